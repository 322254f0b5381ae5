"""Acceptance rates of a pair: by Corollary 3.6, and in real runs."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console

from specdec_jax.checks.arguments import check_all_at_least, check_at_least
from specdec_jax.checks.fields import check_types
from specdec_jax.checks.names import nearest
from specdec_jax.engine.completion import total
from specdec_jax.engine.engine import Engine
from specdec_jax.measure import acceptance
from specdec_jax.measure.acceptance import Workload
from specdec_jax.measure.progress import bar
from specdec_jax.measure.prompts import SPLIT, read_prompts
from specdec_jax.measure.record import Record, earlier
from specdec_jax.measure.table import Cell, Column, Table, started
from specdec_jax.paper import printed
from specdec_jax.probs import SamplingConfig
from specdec_jax.text.local_tasks import LocalTask
from specdec_jax.verify import check_lenience


@dataclasses.dataclass(frozen=True)
class MeasureAlphaConfig:
  """A measurement of acceptance rates of one target with some drafters.

  Attributes:
    engines: name of a drafter, for the table -> function that makes the
      target's engine with it; called when it is measured.
    input_file: UTF-8 text, one prompt per line; or a task over local files,
      whose split 'test' is taken. If there are too few prompts for
      `num_tokens`, a temperature above 0 goes through them again, each time
      with other random numbers; greedy outputs would only repeat.
    target: name of the target, for the table.
    name: name of the record, to tell it from others in the same folder.
    truncate: whether a text longer than the engine's `max_input_len` is cut;
      otherwise it is left out. With a short `max_input_len`, a decoder-only
      target continues the beginnings of texts.
    num_tokens: how many of the target's own tokens to measure.
    temperatures: rows of the table, for each lenience.
    leniences: in (0, 1]; 1 is the lossless Algorithm 1, less is Table 5.
    batch_size: prompts decoded together.
    seed: seed of the samples.
    gamma: proposals per round in the real runs.
    output_file: JSON; None writes nothing.
    reuse: whether an existing `output_file` is shown instead of measuring. Its
      settings must be the same; that the models are the same is not checked.
    paper_target: the target of the paper's Table 3 that this target stands in
      for.
    paper_drafts: name of a drafter -> the paper's drafter that it stands in
      for; drafters that are not named have no value of the paper.

  Raises:
    ValueError: a number is too small, there is no engine, or a name is not in
      the paper's table.
  """

  engines: Mapping[str, Callable[[], Engine]]
  input_file: str | LocalTask
  target: str = 'target'
  name: str = 'alpha'
  truncate: bool = False
  num_tokens: int = 10_000
  temperatures: Sequence[float] = (0.0, 1.0)
  leniences: Sequence[float] = (1.0,)
  batch_size: int = 16
  seed: int = 0
  gamma: int = 4
  output_file: str | None = None
  reuse: bool = False
  paper_target: str | None = None
  paper_drafts: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    check_types(self)
    check_at_least(self, num_tokens=1, batch_size=1, gamma=1)
    check_all_at_least(self, temperatures=0)
    for lenience in self.leniences:
      check_lenience(lenience)
    if not isinstance(self.engines, Mapping) or not self.engines:
      raise ValueError(
        'MeasureAlphaConfig.engines must map names of drafters to functions'
        f' that make an engine with them, got {self.engines!r}.'
      )
    pairs = {f'{row.target} {row.draft}' for row in printed.TABLE3}
    for name, draft in self.paper_drafts.items():
      pair = f'{self.paper_target} {draft}'
      if name not in self.engines or pair not in pairs:
        known = self.engines if name not in self.engines else pairs
        missing = name if name not in self.engines else pair
        raise ValueError(
          f'MeasureAlphaConfig.paper_drafts: {missing!r} is not'
          f' known.{nearest(missing, known)}'
        )

  @property
  def settings(self) -> dict[str, Any]:
    """The settings of a record as JSON, except the models."""
    source = self.input_file
    return {
      'target': self.target,
      'drafts': list(self.engines),
      'input_file': os.fspath(
        source if isinstance(source, str) else source.files[SPLIT]
      ),
      'truncate': self.truncate,
      'num_tokens': self.num_tokens,
      'temperatures': list(self.temperatures),
      'leniences': list(self.leniences),
      'batch_size': self.batch_size,
      'seed': self.seed,
      'gamma': self.gamma,
    }


def measure_alpha(
  config: MeasureAlphaConfig, console: rich.console.Console | None = None
) -> Record:
  """Measures both rates at every temperature; prints rows as in Table 3.

  Returns:
    The record. Each of its rows has target, draft, temperature and lenience;
    alpha by Corollary 3.6 and its standard error, None if nothing was proposed;
    proposes, the share of tokens that had a proposal; the numbers of tokens and
    outputs measured; observed (accepted / tested proposals in real runs with
    gamma) and its standard error; tokens_per_call, tokens per call of the
    target in these runs; paper, target and draft of the paper's row, or None.

  Raises:
    ValueError: no prompt can be decoded, the models are broken, or a record to
      be shown has other settings.
  """
  console = started(config, console)
  record = _earlier(config) if config.reuse else None
  is_new = record is None
  if record is None:
    settings = len(config.temperatures) * len(config.leniences)
    steps = len(config.engines) * settings * config.num_tokens
    with bar(console, 'Tokens', steps) as advance:
      rows = [
        row for name in config.engines for row in _rows(config, name, advance)
      ]
    record = Record('alpha', {'settings': config.settings, 'rows': rows})
  try:
    if is_new and config.output_file:
      record.save(config.output_file)
  finally:
    console.print(table(record))
  return record


def _earlier(config: MeasureAlphaConfig) -> Record | None:
  """The record of `output_file`; None if there is no such file."""
  if config.output_file is None:
    return None

  def settings(record: Record) -> dict[str, Any]:
    # Older records have their gamma only in their rows.
    return {'gamma': record['rows'][0].get('gamma'), **record['settings']}

  return earlier(
    config.output_file,
    'alpha',
    config.settings,
    settings,
    'Remove it, or name another output_file.',
  )


def _rows(
  config: MeasureAlphaConfig, name: str, advance: Callable[[int], None]
) -> list[dict[str, Any]]:
  """All rows of one drafter."""
  engine = config.engines[name]()
  engine.gamma = config.gamma
  limit = None if config.truncate else engine.max_input_len
  texts = read_prompts(config.input_file, engine.num_input_tokens, limit)
  draft = config.paper_drafts.get(name)
  return [
    {
      'target': config.target,
      'draft': name,
      'fingerprints': dict(engine.fingerprints),
      **_row(config, engine, texts, temperature, lenience, advance),
      'paper': None if draft is None else [config.paper_target, draft],
    }
    for temperature in config.temperatures
    for lenience in config.leniences
  ]


def _row(
  config: MeasureAlphaConfig,
  engine: Engine,
  texts: Sequence[str],
  temperature: float,
  lenience: float,
  advance: Callable[[int], None],
) -> dict[str, Any]:
  """Both rates at one temperature and lenience."""
  work = Workload(
    engine,
    texts,
    SamplingConfig(temperature=temperature),
    config.num_tokens,
    config.batch_size,
    config.seed,
    lenience,
    config.truncate,
  )
  rates = work.rates(advance)
  done = work.real_runs()
  observed = None
  if any(stats.num_tested for stats in done):
    observed = acceptance.ratio(
      [stats.passed for stats in done],
      [stats.num_tested for stats in done],
      [texts[number % len(texts)] for number in range(len(done))],
    )
  return {
    'temperature': temperature,
    'lenience': lenience,
    'lossless': lenience == 1,
    'alpha': rates.alpha and rates.alpha.mean,
    'standard_error': rates.alpha and rates.alpha.standard_error,
    'proposes': rates.proposes.mean,
    'num_tokens': rates.proposes.num_tokens,
    'num_outputs': rates.proposes.num_outputs,
    'observed': observed and observed.mean,
    'observed_standard_error': observed and observed.standard_error,
    'gamma': config.gamma,
    'tokens_per_call': total(done).tokens_per_call,
  }


def table(record: Mapping[str, Any]) -> Table:
  """Rows as in the paper's Table 3, with errors, which the paper lacks.

  Args:
    record: record of `measure_alpha`; older records lack some values.
  """
  rows = record['rows']
  lossy = any(row.get('lenience', 1) != 1 for row in rows)
  silent = any(row.get('proposes', 1) != 1 for row in rows)
  columns: list[tuple[Column | str, Callable[[Mapping[str, Any]], Cell]]] = [
    ('target', lambda row: row['target']),
    ('draft', lambda row: row['draft']),
    (Column('T', 'g'), lambda row: row['temperature']),
    (
      Column('lenience (below 1: lossy)', 'g'),
      lambda row: row['lenience'] if lossy else None,
    ),
    ('alpha', lambda row: with_error(row['alpha'], row['standard_error'])),
    # Left out if all drafters always propose.
    (
      Column('proposes', '.3f'),
      lambda row: row['proposes'] if silent else None,
    ),
    (
      'observed',
      lambda row: with_error(row['observed'], row['observed_standard_error']),
    ),
    (
      Column('tokens per call', '.2f'),
      lambda row: row.get('tokens_per_call'),
    ),
    (Column('tokens', ','), lambda row: row['num_tokens']),
  ]
  cells = [[value(row) for _, value in columns] for row in rows]
  notes = []
  if silent:
    notes = [
      'alpha and observed: of proposals; proposes: tokens with a proposal, of'
      ' all.'
    ]
  return Table(
    'Acceptance rates (Corollary 3.6)', [c for c, _ in columns], cells, notes
  ).said()


def with_error(mean: float | None, error: float | None) -> str | None:
  """A rate and its error as text; None if there is no rate."""
  if mean is None:
    return None
  # A single text gives no error.
  return f'{mean:.3f}' + ('' if error is None else f' ± {error:.3f}')
