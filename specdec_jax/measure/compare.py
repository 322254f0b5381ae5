"""Ways to decode beside each other: methods text by text, batches at a load.

A method is an engine with options: a gamma, an adaptive one, drafts judged by
token or as a block, a tree, heads, beams. Each text is decoded plainly and by
every method, in random order, so that whatever slows the machine for a while
slows all of them.

`measure_throughput` decodes many texts at once: for each number of rows in
fixed batches, sorted by length, and by continuous batching, plainly and
speculatively, in turn. Latency is the time from the start of a run, when all
texts are there, until a text's output is there.
"""

import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import rich.console

from specdec_jax import analysis
from specdec_jax.checks.fields import (
  check_all_at_least,
  check_at_least,
  check_types,
  unexpected,
)
from specdec_jax.engine import calibration
from specdec_jax.engine.calibration import Calibration
from specdec_jax.engine.completion import Completion, CompletionStats, total
from specdec_jax.engine.continuous import Continuous
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.request import ADAPTIVE
from specdec_jax.engine.scheduler import PoolSettings
from specdec_jax.measure import host_gamma
from specdec_jax.measure.canvas import PALETTE, save, whiskers
from specdec_jax.measure.progress import bar, status
from specdec_jax.measure.prompts import read_prompts
from specdec_jax.measure.record import Record
from specdec_jax.measure.table import Column, Table, between, show, started
from specdec_jax.text.local_tasks import read_inputs

KIND = 'methods'  # of a record
ALL = 'all'  # of several inputs
PLAIN = 'plain'
FIXED, SPECULATIVE, BY_LOAD = 'fixed batches', 'speculative', 'gamma by rows'
_MARKERS = ('o', 's', '^', 'v', 'd')
_EXAMPLES_A_ROW = 16  # at least: else most of a run is its end
_FIRST = 'first token'  # the plain loop that ends with the first token
_DRAWS = 2000  # of texts, for the interval of the speed-up
_INTERVAL = (2.5, 97.5)  # percent


@dataclasses.dataclass(frozen=True)
class Method:
  """One way to decode.

  Attributes:
    name: what tables call it.
    options: of `Engine.generate`, such as gamma and verification.
    engine: makes its engine; None takes that of the comparison. All methods
      have one target.
  """

  name: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  engine: Callable[[], Engine] | None = None

  def __post_init__(self):
    check_types(self)


@dataclasses.dataclass(frozen=True)
class CompareConfig:
  """A comparison of methods with the plain loop.

  Attributes:
    engine: makes the engine; called after all cheap checks.
    input_file: the texts, one a line; they are decoded one at a time. Of
      several files, each with as many lines as the shortest, there are rows for
      each and for all of them together: a mixed input.
    methods: what is compared.
    gammas: each adds a method that proposes so many tokens a round, whose
      speed-up is also predicted where a calibration or `acceptance` is given.
    temperatures: 0 is greedy.
    num_lines: how many lines of each file are decoded; None is all of them.
    repeats: timed repetitions; above temperature 0 each draws other samples.
    calibrations: files of `specdec calibrate`, one a temperature, by which a
      gamma that is 'adaptive' ends and speed-ups are predicted; None is left
      out.
    acceptance: without a calibration, a record of the pair's acceptance: calls
      are timed here, see `host_gamma.for_host`. None predicts nothing.
    output_file: path of the record, JSON; None writes none.
    plot_file: path of the picture, PNG; None draws none.
    name: of the pair, for the title.

  Raises:
    ValueError: a number is too small, or two methods have one name.
  """

  engine: Callable[[], Engine]
  input_file: str | Sequence[str]
  methods: Sequence[Method] = ()
  gammas: Sequence[int] = ()
  temperatures: Sequence[float] = (0.0, 1.0)
  num_lines: int | None = None
  repeats: int = 3
  calibrations: Sequence[str | None] = ()
  acceptance: str | None = None
  output_file: str | None = None
  plot_file: str | None = None
  name: str = 'methods'

  def __post_init__(self):
    check_types(self)
    check_at_least(self, repeats=1)
    check_all_at_least(self, temperatures=0)
    if self.gammas:
      check_all_at_least(self, gammas=1)
    if self.num_lines is not None:
      check_at_least(self, num_lines=2)
    names = [PLAIN, _FIRST, *(method.name for method in self.all_methods)]
    if len(names) < 3 or len(set(names)) < len(names):
      expected = f'different names, none of them {PLAIN!r} or {_FIRST!r}'
      raise unexpected('CompareConfig.methods', expected, names[2:])

  @property
  def all_methods(self) -> list[Method]:
    """The methods, and those of `gammas`."""
    fixed = [
      Method(f'gamma {gamma}', {'gamma': gamma})
      for gamma in dict.fromkeys(self.gammas)
    ]
    return [*self.methods, *fixed]


@dataclasses.dataclass
class Timed:
  """What one method took.

  Attributes:
    seconds: float[R, N], of each repetition and text.
    stats: counts of each text, summed over repetitions.
  """

  seconds: np.ndarray
  stats: list[CompletionStats]

  def of(self, texts: np.ndarray) -> 'Timed':
    """What it took for some texts, given by their numbers."""
    return Timed(self.seconds[:, texts], [self.stats[i] for i in texts])

  @property
  def tokens(self) -> np.ndarray:
    """Tokens of each text, summed over repetitions."""
    return np.array([stats.num_tokens for stats in self.stats])


def compare(
  config: CompareConfig, console: rich.console.Console | None = None
) -> Record:
  """Times every method; prints a table, writes the record and the picture.

  Returns:
    The record: its table as `Table.to_json` has it, the name of the pair, the
    layout of its kernels, and `rows_measured`: of each input, method and
    temperature its tokens a call, ms a token and speed-up, both with 95 %
    intervals over texts; the least and the largest speed-up of a repetition;
    and the predicted one, or None.

  Raises:
    ValueError: the texts cannot be decoded, an engine cannot be made, a
      calibration is of another pair or machine, or a greedy output differs from
      the plain one.
  """
  console = started(config, console)
  loaded = [calibration.load(path) for path in config.calibrations if path]
  # Engines that are equal are made once.
  makers = [method.engine for method in config.all_methods]
  made = {m: m() for m in dict.fromkeys([config.engine, *makers]) if m}
  engine = made[config.engine]
  for one in loaded:
    one.check(engine.fingerprints)
  known = {one.temperature: one for one in loaded}
  if config.acceptance and not loaded:
    with status(console, 'Timing calls on this host'):
      for t in config.temperatures:
        host = host_gamma.for_host(engine, config.acceptance, 1, t)
        known |= {} if host is None else {t: host}
  texts, parts = _texts(config, engine)
  rows = []
  steps = len(config.temperatures) * (config.repeats + 1) * len(texts)
  with bar(console, 'Compiling', steps) as advance:
    for temperature in config.temperatures:
      chosen = known.get(temperature)
      methods = _options(config, made, chosen)
      timed = interleaved(methods, texts, temperature, config.repeats, advance)
      for part, numbers in parts.items():
        of_part = {name: one.of(numbers) for name, one in timed.items()}
        rows += _rows(config, of_part, temperature, chosen, part)
  record = _record(config, rows, len(texts), engine, known.get(0.0))
  show(console, record, config.output_file)
  if config.plot_file:
    plot_methods(config.plot_file, record)
  return record


def _texts(
  config: CompareConfig, engine: Engine
) -> tuple[list[str], dict[str, np.ndarray]]:
  """The texts, and the numbers of those of each input."""
  paths = config.input_file
  if isinstance(paths, str):
    paths = [paths]
  read = [
    read_prompts(path, engine.num_input_tokens, engine.max_input_len)
    for path in paths
  ]
  size = min(len(lines) for lines in read)
  read = [lines[:size][: config.num_lines] for lines in read]
  size = len(read[0])
  texts = [text for lines in read for text in lines]
  everything = {ALL: np.arange(len(texts))}
  if len(paths) == 1:
    return texts, everything
  return texts, everything | {
    path: np.arange(i * size, (i + 1) * size) for i, path in enumerate(paths)
  }


def _options(
  config: CompareConfig,
  made: Mapping[Any, Engine],
  chosen: Calibration | None,
) -> dict[str, tuple[Engine, dict[str, Any]]]:
  """Name of each method -> its engine and options; the plain loop is first."""
  plain: dict[str, Any] = {'speculative': False}
  methods = {PLAIN: (made[config.engine], plain)}
  if config.gammas and chosen is not None:
    methods[_FIRST] = made[config.engine], plain | {'max_length': 1}
  for method in config.all_methods:
    options = dict(method.options)
    if options.get('gamma') == ADAPTIVE and chosen is not None:
      options['gamma'] = chosen.rule(1)
    methods[method.name] = made[method.engine or config.engine], options
  return methods


def interleaved(
  methods: Mapping[str, tuple[Engine, Mapping[str, Any]]],
  texts: Sequence[str],
  temperature: float,
  repeats: int,
  advance: Any,
  must_agree: bool = True,
) -> dict[str, Timed]:
  """Decodes each text by each method in turn, `repeats` times, after compiling.

  Args:
    methods: name -> engine and options of its `generate`; PLAIN is one of them.
    texts: decoded one at a time.
    temperature: 0 is greedy.
    repeats: timed repetitions.
    advance: called after each text.
    must_agree: whether a greedy output that differs from PLAIN's is an error;
      beams may have scores that differ by rounding alone.

  Raises:
    ValueError: a greedy output differs from the plain one.
  """
  rng = np.random.default_rng(0)
  shape = repeats, len(texts)
  timed = {
    name: Timed(np.zeros(shape), [CompletionStats()] * len(texts))
    for name in methods
  }
  for repeat in range(repeats + 1):
    for number, text in enumerate(texts):
      outputs = {}
      # What comes before leaves other things in the processor's caches.
      for name in rng.permutation(list(methods)).tolist():
        engine, options = methods[name]
        begin = time.perf_counter()
        done = engine.generate(
          [text],
          temperature=temperature,
          seed=repeat,
          example_ids=[number],
          log_probs=False,
          **options,
        )
        seconds = time.perf_counter() - begin
        outputs[name] = [one.tokens for one in done]
        if repeat:  # the first one compiled
          timed[name].seconds[repeat - 1, number] = seconds
          stats = [timed[name].stats[number], done[-1].stats]
          timed[name].stats[number] = total(stats)
      if must_agree and temperature == 0:
        _check_equal(outputs, text)
      advance()
    advance.say('Measuring')
  return timed


def _check_equal(outputs: Mapping[str, Any], text: str) -> None:
  """Raises ValueError if a method's greedy output is not the plain loop's."""
  for name, tokens in outputs.items():
    if name != _FIRST and tokens != outputs[PLAIN]:
      raise ValueError(
        f'{name!r} gives another greedy output than the plain loop for'
        f' {text!r}: {tokens} instead of {outputs[PLAIN]}. A near tie of two'
        ' logits can do so; anything else is a defect.'
      )


def speed_ups(timed: Timed, plain: Timed) -> np.ndarray:
  """float[R], of each repetition over the plain loop in it."""
  return plain.seconds.sum(1) / timed.seconds.sum(1)


def _rows(
  config: CompareConfig,
  timed: Mapping[str, Timed],
  temperature: float,
  chosen: Calibration | None,
  part: str,
) -> list[dict[str, Any]]:
  """The numbers of every method over one input."""
  plain, rows = timed[PLAIN], []
  for method in config.all_methods:
    gamma: Any = method.options.get('gamma')
    predicted = None
    if gamma in config.gammas and chosen is not None:
      predicted = _predicted(chosen, gamma, plain, timed[_FIRST])
    each = speed_ups(timed[method.name], plain) * (
      timed[method.name].tokens.sum() / plain.tokens.sum()
    )
    rows.append(
      {
        'input': part,
        'method': method.name,
        'temperature': temperature,
        'gamma': gamma if isinstance(gamma, int) else None,
        **_row(timed[method.name], plain),
        'least': float(each.min()),
        'most': float(each.max()),
        'predicted': predicted,
      }
    )
  return rows


def _row(timed: Timed, plain: Timed) -> dict[str, Any]:
  """The numbers of one method, with intervals over texts."""
  count = len(timed.stats)
  drawn = np.random.default_rng(0).integers(count, size=(_DRAWS, count))
  calls = np.array([stats.num_target_calls for stats in timed.stats])

  def interval(ratio: Callable[[Any], np.ndarray]) -> list[float]:
    return np.percentile(ratio(drawn), _INTERVAL).tolist()

  def per_call(texts):
    return timed.tokens[texts].sum(-1) / calls[texts].sum(-1)

  def per_token(one, texts):
    return one.seconds.sum(0)[texts].sum(-1) / one.tokens[texts].sum(-1)

  def speed_up(texts):
    return per_token(plain, texts) / per_token(timed, texts)

  every = slice(None)
  stats = total(timed.stats)
  return {
    'tokens_per_call': float(per_call(every)),
    'tokens_per_call_interval': interval(per_call),
    'acceptance_rate': stats.acceptance_rate,
    'ms_per_token': 1e3 * float(per_token(timed, every)),
    'speed_up': float(speed_up(every)),
    'speed_up_interval': interval(speed_up),
    'plain_ms_per_token': 1e3 * float(per_token(plain, every)),
    'tokens': stats.num_tokens,
  }


def _predicted(
  chosen: Calibration, gamma: int, plain: Timed, first: Timed
) -> float | None:
  """The speed-up that a calibration and the plain runs give; None if unknown.

  The calibration says what calls cost beside each other, and what is accepted;
  the plain runs, whole and of one token, what an output takes besides.
  """
  choice = chosen.at(1)
  if gamma + 1 > len(choice.call_cost):
    return None
  repeats, count = plain.seconds.shape
  lengths = (plain.tokens // repeats).tolist()
  whole, begun = (
    np.median(timed.seconds.sum(1)).item() for timed in (plain, first)
  )
  one = (whole - begun) / max(1, sum(lengths) - count)
  return analysis.speed_up_of_outputs(
    lengths,
    chosen.record['acceptance_rate']['alpha'],
    gamma,
    choice.call_cost[gamma] + gamma * choice.cost_ratio + choice.round_cost,
    start=max(0.0, begun / one / count - 1),
    draft_start=chosen.first_calls(1),
  )


def _record(
  config: CompareConfig,
  rows: Sequence[Mapping[str, Any]],
  lines: int,
  engine: Engine,
  chosen: Calibration | None,
) -> Record:
  several = len({row['input'] for row in rows}) > 1
  columns: list[tuple[Column | str, Callable[[Any], Any]]] = [
    (Column('T', 'g'), lambda row: row['temperature']),
    ('input', lambda row: row['input'] if several else None),
    ('method', lambda row: row['method']),
    (Column('tokens per call', '.2f'), lambda row: row['tokens_per_call']),
    ('95 %', lambda row: between(*row['tokens_per_call_interval'])),
    (Column('ms per token', '.2f'), lambda row: row['ms_per_token']),
    (Column('speed-up', '.2f'), lambda row: row['speed_up']),
    ('95 % ', lambda row: between(*row['speed_up_interval'])),
    (Column('predicted', '.2f'), lambda row: row['predicted']),
  ]
  paths = config.input_file
  named = paths if isinstance(paths, str) else ' and '.join(paths)
  table = Table(
    f'{config.name}: {lines} lines of {named}, one at a time,'
    f' {config.repeats} repetitions; intervals over texts',
    [column for column, _ in columns],
    [[value(row) for _, value in columns] for row in rows],
  )
  content = {
    'pair': config.name,
    'kernel_layout': engine.kernel_layout,
    'chosen': None if chosen is None else chosen.at(1).gamma,
    'rows_measured': list(rows),
  }
  return Record(KIND, table.said().to_json() | content)


def side_by_side(records: Sequence[Record]) -> Table:
  """A row a machine: its best gamma, and the one that was chosen for it."""
  rows = []
  for record in records:
    measured = [row for row in record['rows_measured'] if row['gamma']]
    best = max(measured, key=lambda row: row['speed_up'])
    by_gamma = {row['gamma']: row for row in measured}
    chosen = by_gamma.get(record['chosen'], best)
    rows.append(
      [
        record.where,
        record['kernel_layout'],
        chosen['plain_ms_per_token'],
        chosen['gamma'],
        chosen['speed_up'],
        between(chosen['least'], chosen['most']),
        chosen['predicted'],
        chosen['predicted'] and chosen['predicted'] / chosen['speed_up'],
        f'{best["speed_up"]:.2f} (gamma {best["gamma"]})',
      ]
    )
  columns = (
    'machine',
    'kernels',
    Column('plain, ms/token', '.2f'),
    'gamma chosen',
    Column('speed-up', '.2f'),
    'least to most',
    Column('predicted', '.2f'),
    Column('predicted / measured', '.2f'),
    'best gamma',
  )
  return Table('', columns, rows)


def plot_methods(
  path: str | os.PathLike[str], record: Mapping[str, Any]
) -> None:
  """Draws the speed-up of each method, and crosses where it was predicted.

  Args:
    path: path of the PNG; replaced whole or not at all.
    record: what `compare` returned.

  Raises:
    ValueError: matplotlib is not installed.
    OSError: the file cannot be written.
  """
  rows = [
    row for row in record['rows_measured'] if row.get('input', ALL) == ALL
  ]
  names = list(dict.fromkeys(row['method'] for row in rows))
  temperatures = list(dict.fromkeys(row['temperature'] for row in rows))
  height = 0.8 / len(temperatures)

  def draw(figure):
    axes = figure.subplots()
    for i, temperature in enumerate(temperatures):
      these = [row for row in rows if row['temperature'] == temperature]
      places = [names.index(row['method']) + i * height for row in these]
      values = [row['speed_up'] for row in these]
      spread = [row['speed_up_interval'] for row in these]
      axes.barh(
        places,
        values,
        height * 0.9,
        xerr=whiskers(values, spread),
        color=PALETTE[i % len(PALETTE)],
        label=f'temperature {temperature:g}',
        capsize=2,
      )
    known = [row for row in rows if row.get('predicted')]
    if known:
      axes.plot(
        [row['predicted'] for row in known],
        [
          names.index(row['method'])
          + temperatures.index(row['temperature']) * height
          for row in known
        ],
        'kx',
        label='predicted',
      )
    middle = height * (len(temperatures) - 1) / 2
    axes.set_yticks([i + middle for i in range(len(names))], names)
    axes.invert_yaxis()
    axes.axvline(1, color='#888888', linewidth=1)
    axes.set_xlabel('speed-up over plain decoding, 95 % interval over texts')
    axes.legend(loc='upper left', bbox_to_anchor=(1, 1))  # covers no bar
    axes.set_title(record['machine']['device'])

  save(path, draw, (7.2, 1.6 + 0.5 * len(names)))


@dataclasses.dataclass(frozen=True)
class ThroughputConfig:
  """A measurement of data-set decoding.

  Attributes:
    engine: makes the engine, with a drafter; called after all cheap checks.
    input_file: one text per line, plain or `.gz`; of a line with tabs the first
      column.
    num_examples: texts per run; 16 for each row if that is more.
    join_weights: join_weights[k] is proportional to the number of examples that
      join k + 1 neighbouring lines, as in training, so that lengths differ
      more.
    batches: numbers of rows that are decoded together.
    temperature: temperature of the target.
    calibration: file of `specdec calibrate` for several numbers of rows, for
      continuous batching with gamma by rows; None leaves that out.
    repeats: runs of each mode, in turn.
    seed: seed of order, joining and samples.
    output_file: JSON; None writes nothing.
    plot_file: PNG; None draws nothing.

  Raises:
    ValueError: a number is too small.
  """

  engine: Callable[[], Engine]
  input_file: str
  num_examples: int = 256
  join_weights: Sequence[float] = (1.0,)
  batches: Sequence[int] = (1, 4, 16, 64)
  temperature: float = 0.0
  calibration: str | None = None
  repeats: int = 1
  seed: int = 0
  output_file: str | None = None
  plot_file: str | None = None

  def __post_init__(self):
    check_types(self)
    check_at_least(self, num_examples=1, repeats=1, seed=0, temperature=0.0)
    check_all_at_least(self, join_weights=0, batches=1)


def measure_throughput(
  config: ThroughputConfig, console: rich.console.Console | None = None
) -> Mapping[str, Any]:
  """Measures what `config` asks for, prints it, writes the record.

  Returns:
    The record. Its `sweep` has a row for each number of rows and mode: medians
    over repeats of throughput, latency, occupancy and the host's share.

  Raises:
    ValueError: nothing can be decoded, or the calibration is of other models.
    OSError: the record could not be written.
  """
  console = started(config, console)
  chosen = calibration.load(config.calibration) if config.calibration else None
  engine = config.engine()
  if chosen is not None:
    chosen.check(engine.fingerprints)
  most = max(config.num_examples, _EXAMPLES_A_ROW * max(config.batches))
  texts = read_examples(
    config.input_file, engine, most, config.join_weights, config.seed
  )
  sweep = []
  with bar(console, 'Runs', len(config.batches) * config.repeats) as advance:
    for rows in config.batches:
      some = texts[: max(config.num_examples, _EXAMPLES_A_ROW * rows)]
      modes = _modes(config, engine, chosen, rows)
      runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
      for _ in range(config.repeats):
        for mode, run in modes.items():
          runs[mode].append(run(some))
        advance()
      for mode, found in runs.items():
        sweep.append({'batch_size': rows, 'mode': mode, **_medians(found)})
  values = {
    'examples': config.num_examples,
    'temperature': config.temperature,
    'gamma': engine.gamma,
    'sweep': sweep,
  }
  record = Record('throughput', values)
  console.print(throughput_table(record))
  if config.output_file:
    record.save(config.output_file)
  if config.plot_file:
    plot_throughput(config.plot_file, record)
  return record


def read_examples(
  path: str,
  engine: Engine,
  count: int,
  join_weights: Sequence[float],
  seed: int,
) -> list[str]:
  """Texts of different lengths in random order, none too long for the engine.

  Each text is one line, or several lines joined.

  Args:
    path: one text per line, see `read_lines`. If it has too few lines, they
      are used again in another order.
    engine: the engine that will decode the texts.
    count: how many texts.
    join_weights: join_weights[k] is proportional to the number of texts that
      join k + 1 neighbouring lines.
    seed: seed of order and joining.

  Raises:
    ValueError: the file cannot be read, or nothing in it can be decoded.
  """
  lines = [line for line in read_inputs(path) if line.strip()]
  rng = np.random.default_rng(seed)
  weights = np.asarray(join_weights) / sum(join_weights)
  texts: list[str] = []
  while len(texts) < count:
    rest, before = iter(rng.permutation(len(lines))), len(texts)
    while True:
      size = 1 + rng.choice(len(weights), p=weights)
      part = [lines[index] for index in itertools.islice(rest, size)]
      if not part:
        break
      text = ' '.join(part)
      if len(engine.input_ids(text)) <= engine.max_input_len:
        texts.append(text)
    if len(texts) == before:
      what = f'lines of at most {engine.max_input_len} tokens'
      raise unexpected(path, what, f'{len(lines)} others')
  return texts[:count]


def _modes(
  config: ThroughputConfig,
  engine: Engine,
  chosen: Calibration | None,
  rows: int,
) -> dict[str, Callable[[Sequence[str]], dict[str, Any]]]:
  """Name of a mode -> a run through texts with so many rows."""
  sampling = {'temperature': config.temperature, 'seed': config.seed}

  def continuous(speculative: bool, **settings):
    pool = PoolSettings(rows=rows, **settings)
    decoder, options = Continuous(engine, pool), {'speculative': speculative}
    return lambda texts: run_continuous(decoder, texts, **sampling, **options)

  modes = {
    FIXED: lambda texts: run_fixed(engine, texts, rows, **sampling),
    PLAIN: continuous(False),
    SPECULATIVE: continuous(True),
  }
  if chosen is not None:
    modes[BY_LOAD] = continuous(True, gammas=chosen.plan(rows, engine))
  return modes


def run_fixed(
  engine: Engine, texts: Sequence[str], rows: int, **options
) -> dict[str, Any]:
  """Decodes batches of `rows` texts, the shortest first, after compiling."""
  lengths = [len(engine.input_ids(text)) for text in texts]
  order = sorted(range(len(texts)), key=lambda index: lengths[index])
  batches = []
  for at in range(0, len(order), rows):
    batch = order[at : at + rows]
    # Filled up: a shorter last batch would need another program.
    filled = [*batch, *[batch[-1]] * (rows - len(batch))]
    asked = {'example_ids': filled, 'batch_size': rows, **options}
    batches.append((len(batch), [texts[index] for index in filled], asked))
  for _, given, asked in batches:
    if engine.warmup(given, **asked):
      engine.generate(given, **asked)
  computed = 0

  def decoded() -> Iterator[Completion]:
    nonlocal computed
    for count, given, asked in batches:
      done = engine.generate(given, **asked)[:count]
      computed += rows * max(one.stats.num_target_calls for one in done)
      yield from done

  timed, calls = _seconds(decoded())
  return timed | {'occupancy': calls / computed}


def run_continuous(
  decoder: Continuous, texts: Sequence[str], **options
) -> dict[str, Any]:
  """Decodes all texts by continuous batching, after compiling."""
  decoder.warmup(texts, **options)
  timed, _ = _seconds(done for _, done in decoder.run(texts, **options))
  stats = decoder.stats
  return timed | {
    'occupancy': stats.occupancy,
    'host_fraction': stats.host_fraction,
    'in_slot': stats.in_slot,
  }


def _seconds(completions: Iterable[Completion]) -> tuple[dict[str, Any], int]:
  """Times completions as they come; also returns all calls of the target."""
  latency: list[float] = []
  done: list[CompletionStats] = []
  start = time.perf_counter()
  for completion in completions:
    latency.append(time.perf_counter() - start)
    done.append(completion.stats)
  seconds, stats = time.perf_counter() - start, total(done)
  values = {
    'seconds': seconds,
    'tokens': stats.num_tokens,
    'examples_per_second': len(latency) / seconds,
    'tokens_per_second': stats.num_tokens / seconds,
    'median_latency': statistics.median(latency),
    'latency_90': float(np.percentile(latency, 90)),
    'host_fraction': None,
    'in_slot': None,
    'acceptance_rate': stats.acceptance_rate,
  }
  return values, stats.num_target_calls


def _medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Each number's median; None stays None."""
  return {
    key: None
    if runs[0][key] is None
    else statistics.median(run[key] for run in runs)
    for key in runs[0]
  }


def throughput_table(record: Mapping[str, Any]) -> Table:
  """A row for each number of rows and mode."""
  columns = (
    Column('rows'),
    'decoding',
    Column('tokens/s', '.1f'),
    Column('median latency', '.2f', unit='s'),
    Column('occupancy', '.3f'),
    Column('host', '.1%'),
    Column('accepted', '.3f'),
  )
  names = ['batch_size', 'mode', 'tokens_per_second', 'median_latency']
  names += ['occupancy', 'host_fraction', 'acceptance_rate']
  rows = [[row[name] for name in names] for row in record['sweep']]
  return Table(f'{record["examples"]} texts', columns, rows)


def plot_throughput(
  path: str | os.PathLike[str], record: Mapping[str, Any]
) -> None:
  """Draws throughput and latency over rows, a line for each mode.

  Args:
    path: path of the PNG; replaced whole or not at all.
    record: record of `measure_throughput`.

  Raises:
    ValueError: matplotlib is not installed.
    OSError: the file cannot be written.
  """
  sweep = record['sweep']
  modes = list(dict.fromkeys(row['mode'] for row in sweep))
  panels = {
    'tokens_per_second': 'tokens a second',
    'median_latency': 'median latency, seconds',
  }

  def draw(figure):
    for axes, key in zip(figure.subplots(1, 2), panels, strict=True):
      for index, mode in enumerate(modes):
        rows = [row for row in sweep if row['mode'] == mode]
        axes.plot(
          [row['batch_size'] for row in rows],
          [row[key] for row in rows],
          color=PALETTE[index],
          marker=_MARKERS[index],
          label=mode,
        )
      axes.set_xscale('log', base=2)
      axes.xaxis.set_major_formatter('{x:g}')
      axes.set_xlabel('rows decoded at once')
      axes.set_ylabel(panels[key])
      axes.set_ylim(bottom=0)
    axes.legend()
    figure.suptitle(
      f'{record["examples"]} texts, gamma {record["gamma"]}, temperature'
      f' {record["temperature"]:g}: {record["machine"]["device"]}',
      fontsize='medium',
    )

  save(path, draw, (9.0, 4.0))
