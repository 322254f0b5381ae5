"""Acceptance rates of a pair: Corollary 3.6, and as real runs show them."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import rich.console
import rich.table

from specdec_jax import files
from specdec_jax.bench import alpha
from specdec_jax.bench.report import with_progress
from specdec_jax.bench.settings import check_all_at_least, check_at_least
from specdec_jax.completion import CompletionStats
from specdec_jax.engine import Engine
from specdec_jax.environment import describe
from specdec_jax.measure.prompts import read_prompts
from specdec_jax.probs import SamplingConfig
from specdec_jax.speculative import check_lenience


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
    temperatures: rows of the table, for each lenience.
    leniences: in (0, 1]; 1 is the lossless Algorithm 1, less is Table 5.
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
  leniences: Sequence[float] = (1.0,)
  batch_size: int = 16
  seed: int = 0
  output_file: str | None = None

  def __post_init__(self):
    check_at_least(self, num_tokens=1, batch_size=1)
    check_all_at_least(self, temperatures=0)
    for lenience in self.leniences:
      check_lenience(lenience)


def _batches(
  texts: Sequence[str],
  sampling: SamplingConfig,
  batch_size: int,
  seed: int,
  lenience: float,
) -> Iterator[tuple[Sequence[str], dict[str, Any]]]:
  """Yields texts, and what the engine is asked of them.

  Above temperature 0 they begin anew for ever, as other examples.
  """
  number = 0
  while True:
    for start in range(0, len(texts), batch_size):
      part = texts[start : start + batch_size]
      ids = range(number, number + len(part))
      yield (
        part,
        {
          'sampling': sampling,
          'seed': seed,
          'example_ids': ids,
          'lenience': lenience,
        },
      )
      number += len(part)
    if sampling.greedy:
      return


def overlap_rate(
  engine: Engine,
  texts: Sequence[str],
  sampling: SamplingConfig,
  num_tokens: int,
  batch_size: int,
  seed: int,
  advance: Callable[[int], None] = lambda count: None,
  lenience: float = 1.0,
) -> alpha.Rate:
  """Corollary 3.6 on tokens that the target generates from `texts`.

  Args:
    engine: with a drafter.
    texts: at least one, as `read_prompts` gives them.
    sampling: of both models.
    num_tokens: after which no batch is begun.
    batch_size: texts decoded together.
    seed: of the samples.
    advance: called with the tokens of each batch, for a progress bar.
    lenience: l of Appendix A.5; the tokens are the target's own all the same.

  Raises:
    ValueError: as `Engine.request` and `bench.alpha.of_outputs`.
  """
  requests = (
    engine.request(part, gamma=1, **options)
    for part, options in _batches(texts, sampling, batch_size, seed, lenience)
  )
  return alpha.of_outputs(
    engine.target, engine.drafter, engine.params, requests, num_tokens, advance
  )


def observed_rate(
  engine: Engine,
  texts: Sequence[str],
  sampling: SamplingConfig,
  num_tokens: int,
  batch_size: int,
  seed: int,
  lenience: float = 1.0,
) -> alpha.Rate:
  """Accepted over tested proposals of real runs; arguments as before."""
  done: list[CompletionStats] = []
  for part, options in _batches(texts, sampling, batch_size, seed, lenience):
    done += [one.stats for one in engine.generate(part, **options)]
    if sum(stats.num_tokens for stats in done) >= num_tokens:
      break
  return alpha.ratio(
    [stats.num_accepted for stats in done], [stats.num_tested for stats in done]
  )


def measure_alpha(
  config: MeasureAlphaConfig, console: rich.console.Console | None = None
) -> dict[str, Any]:
  """Measures both rates at every temperature; prints rows as in Table 3.

  Returns:
    The record: rows of target, draft, temperature, lenience, alpha and its
    standard error, observed and its standard error, gamma of the observed runs,
    tokens and outputs behind alpha.

  Raises:
    ValueError: no prompt can be decoded, or the models are broken.
  """
  console = console or rich.console.Console()
  engine = config.engine()
  texts = read_prompts(
    config.input_file, engine.tokenizer, engine.max_input_len
  )
  rows = with_progress(
    console,
    'Tokens',
    len(config.temperatures) * len(config.leniences) * config.num_tokens,
    lambda advance: [
      _row(config, engine, texts, temperature, lenience, advance)
      for temperature in config.temperatures
      for lenience in config.leniences
    ],
  )
  record = {'kind': 'alpha', 'rows': rows, 'machine': describe()}
  console.print(table(rows))
  if config.output_file:
    files.write_json(config.output_file, record)
  return record


def _row(
  config: MeasureAlphaConfig,
  engine: Engine,
  texts: Sequence[str],
  temperature: float,
  lenience: float,
  advance: Callable[[int], None],
) -> dict[str, Any]:
  """Both rates at one temperature and lenience."""
  sampling = SamplingConfig(temperature=temperature)
  common = (config.num_tokens, config.batch_size, config.seed)
  rate = overlap_rate(engine, texts, sampling, *common, advance, lenience)
  seen = observed_rate(engine, texts, sampling, *common, lenience)
  return {
    'target': config.target,
    'draft': config.draft,
    'temperature': temperature,
    'lenience': lenience,
    'lossless': lenience == 1,
    'alpha': rate.alpha,
    'standard_error': rate.standard_error,
    'observed': seen.alpha,
    'observed_standard_error': seen.standard_error,
    'gamma': engine.gamma,
    'num_tokens': rate.num_tokens,
    'num_outputs': rate.num_outputs,
  }


def table(rows: Sequence[dict[str, Any]]) -> rich.table.Table:
  """Rows as in the paper's Table 3, with the errors it does not print."""
  made = rich.table.Table(title='Acceptance rates (Corollary 3.6)')
  for name in ('target', 'draft'):
    made.add_column(name)
  for name in ('T', 'lenience', 'alpha', 'observed', 'tokens'):
    made.add_column(name, justify='right')
  for row in rows:
    made.add_row(
      row['target'],
      row['draft'],
      f'{row["temperature"]:g}',
      f'{row["lenience"]:g}{"" if row["lossless"] else ", lossy"}',
      f'{row["alpha"]:.3f} ± {row["standard_error"]:.3f}',
      f'{row["observed"]:.3f} ± {row["observed_standard_error"]:.3f}',
      str(row['num_tokens']),
    )
  return made
