"""Ways to speculate beside each other: tokens a call, time, speed-up.

A way is a drafter with options: a fixed gamma or an adaptive one, drafts judged
by token or as a whole, a chain or a tree, heads, a drafter on the target's
encoder. Each text is decoded plainly and then by every way, so that whatever
slows the machine for a while slows all of them.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import rich.console

from specdec_jax.checks.arguments import check_all_at_least, check_at_least
from specdec_jax.checks.fields import check_types
from specdec_jax.engine.completion import CompletionStats, total
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.options import ADAPTIVE
from specdec_jax.measure import calibration
from specdec_jax.measure.canvas import PALETTE, save, whiskers
from specdec_jax.measure.progress import bar
from specdec_jax.measure.prompts import read_prompts
from specdec_jax.measure.record import Record
from specdec_jax.measure.table import Column, Table, between, show, started
from specdec_jax.types import LengthRule

KIND = 'methods'  # of a record
ALL = 'all'  # of several inputs
_PLAIN = 'plain'
_DRAWS = 2000  # of texts, for the interval of the speed-up
_INTERVAL = (2.5, 97.5)  # percent


@dataclasses.dataclass(frozen=True)
class Method:
  """One way to speculate.

  Attributes:
    name: what tables call it.
    engine: makes the engine, with its drafter; all methods have one target.
    options: of `Engine.generate`, such as gamma and verification.
  """

  name: str
  engine: Callable[[], Engine]
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    check_types(self)


@dataclasses.dataclass(frozen=True)
class MethodsConfig:
  """A comparison of ways to speculate.

  Attributes:
    methods: the ways; the plain loop is always beside them.
    input_file: the texts, one a line; they are decoded one at a time. Of
      several files, each with as many lines as the shortest, there are rows for
      each and for all of them together: a mixed input.
    temperatures: 0 is greedy.
    num_lines: how many lines of each file are decoded; None is all of them.
    repeats: timed repetitions; above temperature 0 each draws other samples.
    calibrations: files of `specdec calibrate`, one a temperature: what a gamma
      that is 'adaptive' follows. Without one it follows the plain rule.
    output_file: path of the record, JSON; None writes none.
    plot_file: path of the picture, PNG; None draws none.
    name: of the pair, for the title.

  Raises:
    ValueError: a number is too small, or two methods have one name.
  """

  methods: Sequence[Method]
  input_file: str | Sequence[str]
  temperatures: Sequence[float] = (0.0, 1.0)
  num_lines: int | None = None
  repeats: int = 3
  calibrations: Sequence[str] = ()
  output_file: str | None = None
  plot_file: str | None = None
  name: str = 'methods'

  def __post_init__(self):
    check_types(self)
    check_at_least(self, repeats=1)
    check_all_at_least(self, temperatures=0)
    if self.num_lines is not None:
      check_at_least(self, num_lines=2)
    names = [_PLAIN, *(method.name for method in self.methods)]
    if len(names) < 2 or len(set(names)) < len(names):
      raise ValueError(
        'MethodsConfig.methods: expected one or more with names of their own,'
        f' none of them {_PLAIN!r}; got {names[1:]}.'
      )


@dataclasses.dataclass
class _Timed:
  """What one way took: of each text its seconds and its counts, summed."""

  seconds: np.ndarray
  stats: list[CompletionStats]

  @classmethod
  def none(cls, texts: int) -> '_Timed':
    return cls(np.zeros(texts), [CompletionStats()] * texts)

  def add(self, text: int, seconds: float, stats: CompletionStats) -> None:
    self.seconds[text] += seconds
    self.stats[text] = total([self.stats[text], stats])

  def of(self, texts: np.ndarray) -> '_Timed':
    """That of some texts."""
    return _Timed(self.seconds[texts], [self.stats[i] for i in texts])

  @property
  def tokens(self) -> np.ndarray:
    return np.array([one.num_tokens for one in self.stats])

  @property
  def calls(self) -> np.ndarray:
    return np.array([one.num_target_calls for one in self.stats])


def compare_methods(
  config: MethodsConfig, console: rich.console.Console | None = None
) -> Record:
  """Times every way; prints a table, writes the record and the picture.

  Returns:
    The record: its table as `Table.to_json` has it, the name of the pair, and
    `rows_measured`: of each input, method and temperature its tokens a call, ms
    a token and speed-up, with 95 % intervals over texts.

  Raises:
    ValueError: the texts cannot be decoded, an engine cannot be made, a
      calibration is of another pair or machine, or a greedy output differs from
      the plain one.
  """
  console = started(config, console)
  calibrated = [calibration.load(path) for path in config.calibrations]
  # Engines that are equal are made once.
  makers = dict.fromkeys(method.engine for method in config.methods)
  made = {make: make() for make in makers}
  first = made[config.methods[0].engine]
  texts, parts = _texts(config, first)
  for one in calibrated:
    one.check(first.fingerprints)
  rules = {one.temperature: one.rule(1) for one in calibrated}
  rows = []
  steps = len(config.temperatures) * (config.repeats + 1) * len(texts)
  with bar(console, 'Compiling', steps) as advance:
    for temperature in config.temperatures:
      rule = rules.get(temperature, ADAPTIVE)
      timed = _measure(config, made, texts, temperature, rule, advance)
      plain = timed.pop(_PLAIN)
      for part, chosen in parts.items():
        rows += [
          _row(name, temperature, one.of(chosen), plain.of(chosen))
          | {'input': part}
          for name, one in timed.items()
        ]
  record = _record(config, rows, len(texts))
  show(console, record, config.output_file)
  if config.plot_file:
    plot_methods(config.plot_file, record)
  return record


def _texts(
  config: MethodsConfig, engine: Engine
) -> tuple[list[str], dict[str, np.ndarray]]:
  """The texts, and the numbers of those of each input."""
  paths = config.input_file
  if isinstance(paths, str):
    paths = [paths]
  read = [
    read_prompts(path, engine.num_input_tokens, engine.max_input_len)
    for path in paths
  ]
  lines = min(len(one) for one in read)
  read = [one[:lines][: config.num_lines] for one in read]
  size = len(read[0])
  texts = [text for one in read for text in one]
  everything = {ALL: np.arange(len(texts))}
  if len(paths) == 1:
    return texts, everything
  return texts, everything | {
    path: np.arange(i * size, (i + 1) * size) for i, path in enumerate(paths)
  }


def _measure(
  config: MethodsConfig,
  made: Mapping[Any, Engine],
  texts: Sequence[str],
  temperature: float,
  rule: LengthRule | str,
  advance: Any,
) -> dict[str, _Timed]:
  """All ways at one temperature, text by text; `rule` is of adaptive ones."""
  first = made[config.methods[0].engine]
  ways: dict[str, tuple[Engine, dict[str, Any]]] = {
    _PLAIN: (first, {'speculative': False})
  }
  for method in config.methods:
    options = dict(method.options)
    if options.get('gamma') == ADAPTIVE:
      options['gamma'] = rule
    ways[method.name] = made[method.engine], options
  names, rng = list(ways), np.random.default_rng(0)
  timed = {name: _Timed.none(len(texts)) for name in names}
  for repeat in range(config.repeats + 1):
    for number, text in enumerate(texts):
      outputs = {}
      # Who comes before leaves other things in the processor's caches.
      for name in rng.permutation(names).tolist():
        engine, options = ways[name]
        begin = time.perf_counter()
        (done,) = engine.generate(
          [text],
          temperature=temperature,
          seed=repeat,
          example_ids=[number],
          log_probs=False,
          **options,
        )
        seconds = time.perf_counter() - begin
        outputs[name] = done.tokens
        if repeat:  # the first one compiled
          timed[name].add(number, seconds, done.stats)
      if temperature == 0:
        _check_equal(outputs, text)
      advance()
    advance.say('Measuring')
  return timed


def _check_equal(outputs: Mapping[str, Sequence[int]], text: str) -> None:
  """Raises ValueError if a way decodes greedily otherwise than plainly."""
  for name, tokens in outputs.items():
    if tokens != outputs[_PLAIN]:
      raise ValueError(
        f'{name!r} gives another greedy output than the plain loop for'
        f' {text!r}: {tokens} instead of {outputs[_PLAIN]}. A near tie of two'
        ' logits can do so; anything else is a defect.'
      )


def _row(
  name: str, temperature: float, one: _Timed, plain: _Timed
) -> dict[str, Any]:
  """The numbers of one way, with intervals over texts."""
  rng = np.random.default_rng(0)
  drawn = rng.integers(len(one.seconds), size=(_DRAWS, len(one.seconds)))

  def interval(ratio: Callable[[Any], np.ndarray]) -> list[float]:
    return [float(x) for x in np.percentile(ratio(drawn), _INTERVAL)]

  def per_call(chosen):
    return one.tokens[chosen].sum(-1) / one.calls[chosen].sum(-1)

  def per_token(timed, chosen):
    return timed.seconds[chosen].sum(-1) / timed.tokens[chosen].sum(-1)

  def speed_up(chosen):
    return per_token(plain, chosen) / per_token(one, chosen)

  every = slice(None)
  stats = total(one.stats)
  return {
    'method': name,
    'temperature': temperature,
    'tokens_per_call': float(per_call(every)),
    'tokens_per_call_interval': interval(per_call),
    'acceptance_rate': stats.acceptance_rate,
    'ms_per_token': 1e3 * float(per_token(one, every)),
    'speed_up': float(speed_up(every)),
    'speed_up_interval': interval(speed_up),
    'tokens': stats.num_tokens,
  }


def _record(
  config: MethodsConfig, rows: Sequence[Mapping[str, Any]], lines: int
) -> Record:
  several = len({row['input'] for row in rows}) > 1
  columns = (
    Column('T', 'g'),
    *(('input',) if several else ()),
    'method',
    Column('tokens per call', '.2f'),
    '95 %',
    Column('ms per token', '.2f'),
    Column('speed-up', '.2f'),
    '95 % ',
  )
  cells = [
    [
      row['temperature'],
      *((row['input'],) if several else ()),
      row['method'],
      row['tokens_per_call'],
      between(*row['tokens_per_call_interval']),
      row['ms_per_token'],
      row['speed_up'],
      between(*row['speed_up_interval']),
    ]
    for row in rows
  ]
  title = (
    f'{config.name}: {lines} lines of {_named(config.input_file)}, one at a'
    f' time, {config.repeats} repetitions; intervals over texts'
  )
  table = Table(title, columns, cells).to_json()
  content = {'pair': config.name, 'rows_measured': list(rows)}
  return Record(KIND, table | content)


def _named(paths: str | Sequence[str]) -> str:
  return paths if isinstance(paths, str) else ' and '.join(paths)


def plot_methods(
  path: str | os.PathLike[str], record: Mapping[str, Any]
) -> None:
  """Draws the speed-up of each way, a colour for each temperature.

  Args:
    path: path of the PNG; replaced whole or not at all.
    record: what `compare_methods` returned.

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
    middle = height * (len(temperatures) - 1) / 2
    axes.set_yticks([i + middle for i in range(len(names))], names)
    axes.invert_yaxis()
    axes.axvline(1, color='#888888', linewidth=1)
    axes.set_xlabel('speed-up over plain decoding, 95 % interval over texts')
    axes.legend(loc='upper left', bbox_to_anchor=(1, 1))  # covers no bar
    axes.set_title(record['machine']['device'])

  save(path, draw, (7.2, 1.6 + 0.5 * len(names)))
