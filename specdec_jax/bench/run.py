"""One benchmark: bandwidth, v(m), draft cost, both loops, prediction."""

import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
import rich.table

from specdec_jax import files, partitioning
from specdec_jax.bench import calls, timing
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
from specdec_jax.environment import describe
from specdec_jax.models.t5 import T5
from specdec_jax.probs import SamplingConfig


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
  """What to measure, at random tokens that never stop before their budget.

  Attributes:
    target: the network to time.
    draft: a drafter's network; None times the target alone.
    target_params: its parameters; None draws random ones.
    draft_params: likewise.
    gamma: proposals a round.
    call_sizes: m, tokens a call, for v(m).
    batch: B.
    input_len: E.
    decode_len: tokens of a run.
    calls_a_run: calls in one timed loop.
    repeats: timed rounds, interleaved.
    seed: of parameters and inputs.
    output_file: JSON; None writes nothing.
    name: of the record.

  Raises:
    ValueError: a number is too small.
  """

  target: T5
  draft: T5 | None = None
  target_params: Any = None
  draft_params: Any = None
  gamma: int = 4
  call_sizes: Sequence[int] = (1, 2, 4, 8)
  batch: int = 1
  input_len: int = 32
  decode_len: int = 120
  calls_a_run: int = 20
  repeats: int = 7
  seed: int = 0
  output_file: str | None = None
  name: str = 'benchmark'

  def __post_init__(self):
    least = {'gamma': 1, 'batch': 1, 'input_len': 1, 'decode_len': 32}
    least |= {'calls_a_run': 1, 'repeats': 1}
    for field, minimum in least.items():
      value = getattr(self, field)
      if value < minimum:
        raise ValueError(
          f'BenchmarkConfig.{field} must be at least {minimum}, got {value}.'
        )
    if 1 not in self.call_sizes:
      raise ValueError(
        'BenchmarkConfig.call_sizes must hold 1, what the others are divided'
        f' by, got {tuple(self.call_sizes)}.'
      )


def benchmark(
  config: BenchmarkConfig, console: rich.console.Console | None = None
) -> dict[str, Any]:
  """Runs a benchmark, prints its table, writes its JSON.

  Returns:
    The record: times in ms as median, min and max over interleaved rounds.
  """
  console = console or rich.console.Console()
  functions, facts = _prepare(config)
  progress = rich.progress.Progress(
    console=console, transient=True, disable=not console.is_terminal
  )
  with progress:
    task = progress.add_task('Measuring', total=config.repeats)
    seconds = timing.interleave(
      functions, config.repeats, lambda: progress.advance(task)
    )
  record = _record(config, seconds, facts)
  _print(console, record)
  if config.output_file:
    os.makedirs(os.path.dirname(config.output_file) or '.', exist_ok=True)
    text = json.dumps(record, indent=1) + '\n'
    files.write_atomically(config.output_file, text.encode())
  return record


def _params(network: T5, given: Any, seed: int) -> Any:
  if given is None:
    given = jax.jit(network.init)(jax.random.key(seed))
  return partitioning.place(given)


def _prepare(config: BenchmarkConfig):
  """Compiles everything; returns the functions to time and what is counted."""
  rng = np.random.default_rng(config.seed)
  shape = (config.batch, config.input_len)
  inputs = jnp.asarray(
    rng.integers(3, config.target.vocab_size, shape), jnp.int32
  )
  greedy = SamplingConfig(temperature=0.0)
  request = functools.partial(
    calls.make_request,
    inputs,
    config.decode_len,
    sampling=greedy,
    seed=config.seed,
  )
  target, params = (
    config.target,
    _params(config.target, config.target_params, config.seed),
  )
  plain = request(gamma=0)
  matvec, matvec_bytes = calls.matvec()
  loop, compile_seconds = calls.loop(
    functools.partial(autoregressive.start, target),
    functools.partial(autoregressive.run, target),
    params,
    plain,
  )
  facts: dict[str, Any] = {
    'compile_seconds': {'plain': compile_seconds},
    'matvec_bytes': matvec_bytes,
    'bytes_per_call': calls.decoder_bytes(target, params, plain),
  }
  functions = {'matvec': matvec, 'plain_loop': loop}
  for size in config.call_sizes:
    functions[f'call_{size}'] = calls.target_calls(
      target, params, request(gamma=size), size, config.calls_a_run
    )
  if config.draft is not None:
    _prepare_pair(config, params, request(gamma=config.gamma), functions, facts)
  return functions, facts


def _prepare_pair(config, params, request, functions, facts):
  """Adds the drafter's rounds, the verifying call and the speculative loop."""
  drafter = small_model(config.draft)
  pair = PairParams(
    params, _params(config.draft, config.draft_params, config.seed + 1)
  )
  functions['verify_call'] = calls.target_calls(
    config.target, params, request, config.gamma + 1, config.calls_a_run
  )
  functions['draft_round'] = calls.draft_rounds(
    drafter, pair.draft, request, config.calls_a_run
  )
  target = config.target
  prepare, compile_seconds = calls.loop(
    functools.partial(speculative.start, target, drafter),
    functools.partial(speculative.run, target, drafter),
    pair,
    request,
  )
  functions['speculative_loop'] = prepare
  facts['compile_seconds']['speculative'] = compile_seconds
  stats = jax.device_get(prepare()()).stats
  facts['rounds'] = int(stats.num_rounds.max())
  facts['histogram'] = stats.histogram.sum(axis=0).tolist()
  tested = int(stats.num_tested.sum())
  facts['acceptance_rate'] = int(stats.num_accepted.sum()) / max(tested, 1)


def _record(config, seconds, facts) -> dict[str, Any]:
  """All numbers of a run, from times and counts."""
  each = {'matvec': 1.0, 'plain_loop': 1 / config.decode_len}
  per_call = 1 / config.calls_a_run
  times = {
    name: timing.summarise(values, 1e3 * each.get(name, per_call))
    for name, values in seconds.items()
    if name != 'speculative_loop'
  }
  median = {name: value['median'] for name, value in times.items()}
  bandwidth = facts['matvec_bytes'] / median['matvec'] / 1e6
  reached = facts['bytes_per_call'] / median['plain_loop'] / 1e6
  record = {
    'kind': 'benchmark',
    'name': config.name,
    'batch': config.batch,
    'input_len': config.input_len,
    'decode_len': config.decode_len,
    'repeats': config.repeats,
    'times_ms': times,
    'matvec_gb_per_s': bandwidth,
    'plain_gb_per_s': reached,
    'bandwidth_fraction': reached / bandwidth,
    'call_cost': {
      str(size): median[f'call_{size}'] / median['call_1']
      for size in config.call_sizes
    },
    **{k: v for k, v in facts.items() if k != 'matvec_bytes'},
    'machine': describe(),
  }
  if config.draft is not None:
    measured = timing.summarise(seconds['speculative_loop'], 1e3)
    a_round = median['draft_round'] + median['verify_call']
    predicted = facts['rounds'] * a_round
    record |= {
      'gamma': config.gamma,
      'cost_ratio': median['draft_round'] / config.gamma / median['call_1'],
      'speculative_ms': measured,
      'predicted_ms': predicted,
      'measured_over_predicted': measured['median'] / predicted,
      'speed_up': median['plain_loop'] * config.decode_len / measured['median'],
    }
  return record


def _print(console: rich.console.Console, record: dict[str, Any]) -> None:
  table = rich.table.Table(title=record['name'])
  table.add_column('what')
  for column in ('median ms', 'min', 'max', 'against one token'):
    table.add_column(column, justify='right')
  for name, times in record['times_ms'].items():
    size = name.removeprefix('call_')
    ratio = record['call_cost'].get(size)
    table.add_row(
      name,
      *(f'{times[key]:.3f}' for key in ('median', 'min', 'max')),
      '' if ratio is None else f'{ratio:.2f}',
    )
  console.print(table)
  console.print(
    f'plain loop {record["plain_gb_per_s"]:.1f} GB/s of'
    f' {record["matvec_gb_per_s"]:.1f} GB/s'
    f' ({100 * record["bandwidth_fraction"]:.0f} %)'
  )
  if 'predicted_ms' in record:
    console.print(
      f'speculative: {record["speculative_ms"]["median"]:.1f} ms measured,'
      f' {record["predicted_ms"]:.1f} ms predicted from its'
      f' {record["rounds"]} rounds'
      f' ({100 * (record["measured_over_predicted"] - 1):+.0f} %);'
      f' acceptance {record["acceptance_rate"]:.3f},'
      f' speed-up {record["speed_up"]:.2f}'
    )
