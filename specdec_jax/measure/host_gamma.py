"""The gamma that pays on this host, for a pair whose acceptance is known.

What the target accepts does not depend on the processor, so a record of it can
be shipped with the drafter (`acceptance` writes it). What calls cost does: a
few of them are timed here, in a second or two besides their compilation, and
kept. `specdec calibrate` measures both, and more, in minutes.
"""

import concurrent.futures
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from specdec_jax import analysis
from specdec_jax.engine import calibration
from specdec_jax.engine.calibration import Calibration, Choice
from specdec_jax.engine.engine import Engine
from specdec_jax.files import host_cache, shipped
from specdec_jax.measure import calls, record
from specdec_jax.measure.calls import Pair
from specdec_jax.models import backend
from specdec_jax.probs import SamplingConfig

_SIZES = 1, 2, 4, 5, 8  # of calls; those between are interpolated
_ROUND_GAMMA = 4
_CALLS_A_RUN, _REPEATS = 10, 5
_INPUT_LEN = 32
_DECODE_LEN = 112  # with any of _SIZES caches of 128 slots: one prefill


def for_host(
  engine: Engine, acceptance_file: str, rows: int, temperature: float
) -> Calibration | None:
  """Times calls of a pair here, unless that was done before, and chooses gamma.

  Args:
    engine: an engine with a drafter.
    acceptance_file: a record of acceptance, see `acceptance`; its row of
      this pair and the nearest temperature counts.
    rows: that are decoded together.
    temperature: of the run.

  Returns:
    The calibration; None if the record has no row of this pair, whose
    acceptance is then not known.

  Raises:
    ValueError: the file is no such record.
  """
  pair = dict(engine.fingerprints)
  rates = [
    row
    for row in record.load(shipped.find(acceptance_file), 'alpha')['rows']
    if row.get('fingerprints') == pair and row['lossless']
  ]
  if not rates:
    return None
  rate = min(rates, key=lambda row: abs(row['temperature'] - temperature))
  key = {
    **backend.host(),
    'device': calibration.device_name(),
    'layout': engine.kernel_layout,
    'fingerprints': pair,
    'rows': rows,
    'greedy': temperature == 0,
  }
  times = host_cache.kept(
    'calls',
    key,
    lambda: _timed(engine, rows, temperature),
    lambda value: {name: float(value[name]) for name in _NAMES},
  )
  return _calibration(engine, rate, times, rows, temperature)


_NAMES = ('encoder', 'draft_encoder', 'round', *(f'call_{m}' for m in _SIZES))


def _timed(engine: Engine, rows: int, temperature: float) -> dict[str, float]:
  """Milliseconds of each of `_NAMES`: medians of runs in turn."""
  pair = Pair(engine.target, engine.drafter, engine.params)
  request = functools.partial(
    calls.make_request,
    calls.random_inputs(engine.target, rows, _INPUT_LEN, 0),
    _DECODE_LEN,
    sampling=SamplingConfig(temperature=temperature),
    seed=0,
    has_encoder=engine.target.has_encoder,
  )
  repeats = _CALLS_A_RUN
  makers = {
    'round': functools.partial(  # the longest to compile
      calls.pair_rounds, pair, request(gamma=_ROUND_GAMMA), repeats
    )
  }
  makers |= {
    f'call_{size}': functools.partial(
      calls.target_calls, pair, request(gamma=size), size, repeats
    )
    for size in _SIZES
  }
  functions = {
    'encoder': calls.encoder_call(pair, request(gamma=0)),
    'draft_encoder': calls.start_of_drafter(pair, request(gamma=0)),
  }
  # The makers run these two as well, and would each compile them.
  for prepare in functions.values():
    jax.block_until_ready(prepare()())
  # XLA compiles without Python's lock, a program on each core.
  with concurrent.futures.ThreadPoolExecutor(backend.num_cores()) as pool:
    made = pool.map(lambda make: make(), makers.values())
    functions |= zip(makers, made, strict=True)
  seconds = calls.interleave(functions, _REPEATS)
  return {
    name: calls.summarise(
      values, 1e3 if name.endswith('encoder') else 1e3 / repeats
    )['median']
    for name, values in seconds.items()
  }


def _calibration(
  engine: Engine,
  rate: Mapping[str, Any],
  times: Mapping[str, float],
  rows: int,
  temperature: float,
) -> Calibration:
  one = times['call_1']
  sizes = np.arange(1, _SIZES[-1] + 1)
  call_cost = np.interp(sizes, _SIZES, [times[f'call_{m}'] for m in _SIZES])
  call_cost = call_cost / one
  # A drafter whose cost is lost in the target's noise costs nothing.
  drafts = times['round'] - times[f'call_{_ROUND_GAMMA + 1}']
  cost_ratio = max(0.0, drafts / one / _ROUND_GAMMA)
  length = round(rate['num_tokens'] / rate['num_outputs'])

  def factor(gamma: int, alpha: float) -> float:
    return analysis.speed_up_of_outputs(
      [length],
      alpha,
      gamma,
      call_cost[gamma] + gamma * cost_ratio,
      times['encoder'] / one,
      times['draft_encoder'] / one,
    )

  alpha, error = rate['alpha'], 2 * rate['standard_error']
  factors = [1.0] + [factor(gamma, alpha) for gamma in sizes[:-1].tolist()]
  gamma = int(np.argmax(factors))
  interval = (1.0, 1.0)
  if gamma:
    low, high = np.clip([alpha - error, alpha + error], 0.0, 1.0)
    interval = factor(gamma, low), factor(gamma, high)
  choice = Choice(
    rows=rows,
    gamma=gamma,
    expected_speed_up=factors[gamma],
    interval=interval,
    factors=tuple(factors),
    cost_ratio=cost_ratio,
    call_cost=tuple(call_cost.tolist()),
    acceptance=alpha,
  )
  return Calibration(
    fingerprints=engine.fingerprints,
    device=calibration.device_name(),
    temperature=temperature,
    choices=(choice,),
    record={  # as that of `calibrate`
      'acceptance_rate': dict(rate),
      'costs': [
        {'times_ms': {name: {'median': ms} for name, ms in times.items()}}
      ],
    },
  )


def said(measured: Calibration) -> str:
  """A line with the numbers that decided."""
  (choice,) = measured.choices
  times = measured.record['costs'][0]['times_ms']
  costs = ', '.join(f'{choice.call_cost[m - 1]:.2f}' for m in _SIZES[1:])
  sizes = ', '.join(map(str, _SIZES[1:]))
  return (
    f'On this host a call of the target over one token takes'
    f' {times["call_1"]["median"]:.2f} ms, one over {sizes} tokens'
    f' {costs} times that, and a proposal {choice.cost_ratio:.2f};'
    f' {choice.acceptance:.0%} of the proposals are accepted.'
  )
