"""Acceptance rates of a pair: Corollary 3.6, and as real runs show them."""

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import rich.console
import rich.progress
import rich.table

from specdec_jax import files
from specdec_jax.bench import alpha
from specdec_jax.decoding.state import Request
from specdec_jax.engine import Engine
from specdec_jax.environment import describe
from specdec_jax.infer.lines import count_tokens, read_lines
from specdec_jax.probs import SamplingConfig


@dataclasses.dataclass(frozen=True)
class MeasureAlphaConfig:
  """A measurement of acceptance rates.

  Attributes:
    engine: makes the engine, with a drafter; called after all cheap checks.
    input_file: UTF-8 text, one prompt a line. Where they are too few for
      `num_tokens` a temperature above 0 goes through them again, each time
      with other random numbers; greedy outputs would only repeat.
    target: name of the target, for the table.
    draft: name of the drafter.
    num_tokens: of the target's own, to measure over.
    temperatures: one row of the table for each.
    batch_size: prompts decoded together.
    seed: of the samples.
    output_file: JSON; None writes nothing.

  Raises:
    ValueError: a number is too small.
  """

  engine: Callable[[], Engine]
  input_file: str
  target: str = 'target'
  draft: str = 'draft'
  num_tokens: int = 10_000
  temperatures: Sequence[float] = (0.0, 1.0)
  batch_size: int = 16
  seed: int = 0
  output_file: str | None = None

  def __post_init__(self):
    for field in ('num_tokens', 'batch_size'):
      if getattr(self, field) < 1:
        raise ValueError(
          f'MeasureAlphaConfig.{field} must be at least 1, got'
          f' {getattr(self, field)}.'
        )
    if not self.temperatures or min(self.temperatures) < 0:
      raise ValueError(
        'MeasureAlphaConfig.temperatures must be one or more numbers >= 0, got'
        f' {tuple(self.temperatures)}.'
      )


def read_prompts(path: str, engine: Engine) -> list[str]:
  """Returns the lines of a file that the engine can decode.

  Raises:
    ValueError: the file cannot be read, or no line of it can be decoded.
  """
  lines = read_lines(path)
  counted = count_tokens(lines, engine.tokenizer, engine.max_input_len)
  texts = [line.text for line in counted if line.num_tokens and not line.error]
  if not texts:
    raise ValueError(
      f'{path!r} has no line that can be decoded: expected UTF-8 text of at'
      f' most {engine.max_input_len} tokens a line, found {len(lines)} lines'
      ' that are empty, too long or not UTF-8.'
    )
  return texts


def batches(
  texts: Sequence[str], batch_size: int, again: bool
) -> Iterator[tuple[list[str], list[int]]]:
  """Yields texts and their example ids; `again` begins anew for ever."""
  number = 0
  for _ in itertools.count():
    for start in range(0, len(texts), batch_size):
      part = list(texts[start : start + batch_size])
      yield part, list(range(number, number + len(part)))
      number += len(part)
    if not again:
      return


def overlap_rate(
  engine: Engine,
  texts: Sequence[str],
  sampling: SamplingConfig,
  num_tokens: int,
  batch_size: int,
  seed: int,
  advance: Callable[[int], None] = lambda count: None,
) -> alpha.Rate:
  """Corollary 3.6 on tokens that the target generates from `texts`."""

  def requests() -> Iterator[Request]:
    for part, ids in batches(texts, batch_size, again=not sampling.greedy):
      yield engine.request(
        part, gamma=1, sampling=sampling, seed=seed, example_ids=ids
      )

  return alpha.of_outputs(
    engine.target,
    engine.drafter,
    engine.params,
    requests(),
    num_tokens,
    advance,
  )


def observed_rate(
  engine: Engine,
  texts: Sequence[str],
  sampling: SamplingConfig,
  num_tokens: int,
  batch_size: int,
  seed: int,
) -> alpha.Rate:
  """Accepted over tested proposals of real speculative runs."""
  accepted, tested, produced = [], [], 0
  for part, ids in batches(texts, batch_size, again=not sampling.greedy):
    done = engine.generate(part, sampling=sampling, seed=seed, example_ids=ids)
    accepted += [float(one.stats.num_accepted) for one in done]
    tested += [one.stats.num_tested for one in done]
    produced += sum(one.stats.num_tokens for one in done)
    if produced >= num_tokens:
      break
  return alpha.ratio(accepted, tested)


def measure_alpha(
  config: MeasureAlphaConfig, console: rich.console.Console | None = None
) -> dict[str, Any]:
  """Measures both rates at every temperature; prints rows as in Table 3.

  Returns:
    The record: rows of target, draft, temperature, alpha and its standard
    error, observed and its standard error, tokens and outputs behind alpha.

  Raises:
    ValueError: no prompt can be decoded, or the models are broken.
  """
  console = console or rich.console.Console()
  engine = config.engine()
  texts = read_prompts(config.input_file, engine)
  progress = rich.progress.Progress(
    console=console, transient=True, disable=not console.is_terminal
  )
  rows = []
  with progress:
    total = len(config.temperatures) * config.num_tokens
    task = progress.add_task('Tokens', total=total)
    for temperature in config.temperatures:
      sampling = SamplingConfig(temperature=temperature)
      common = (texts, sampling, config.num_tokens, config.batch_size)
      rate = overlap_rate(
        engine, *common, config.seed, lambda n: progress.advance(task, n)
      )
      seen = observed_rate(engine, *common, config.seed)
      rows.append(
        {
          'target': config.target,
          'draft': config.draft,
          'temperature': temperature,
          'alpha': rate.alpha,
          'standard_error': rate.standard_error,
          'observed': seen.alpha,
          'observed_standard_error': seen.standard_error,
          'gamma': engine.gamma,
          'num_tokens': rate.num_tokens,
          'num_outputs': rate.num_outputs,
        }
      )
  record = {'kind': 'alpha', 'rows': rows, 'machine': describe()}
  console.print(table(rows))
  if config.output_file:
    os.makedirs(os.path.dirname(config.output_file) or '.', exist_ok=True)
    text = json.dumps(record, indent=1) + '\n'
    files.write_atomically(config.output_file, text.encode())
  return record


def table(rows: Sequence[dict[str, Any]]) -> rich.table.Table:
  """Rows as in the paper's Table 3, with the errors it does not print."""
  made = rich.table.Table(title='Acceptance rates (Corollary 3.6)')
  for name in ('target', 'draft'):
    made.add_column(name)
  for name in ('T', 'alpha', 'observed', 'tokens'):
    made.add_column(name, justify='right')
  for row in rows:
    made.add_row(
      row['target'],
      row['draft'],
      f'{row["temperature"]:g}',
      f'{row["alpha"]:.3f} ± {row["standard_error"]:.3f}',
      f'{row["observed"]:.3f} ± {row["observed_standard_error"]:.3f}',
      str(row['num_tokens']),
    )
  return made
