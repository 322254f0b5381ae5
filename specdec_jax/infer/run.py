"""The run: lines in, both ways of decoding batch by batch, results out."""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console
import rich.progress

from specdec_jax import calibration, environment
from specdec_jax.engine import Engine
from specdec_jax.infer import report, results
from specdec_jax.infer.lines import Line, count_tokens, read_lines
from specdec_jax.probs import SamplingConfig

_MODES = {
  'both': (report.PLAIN, report.SPECULATIVE),
  report.PLAIN: (report.PLAIN,),
  report.SPECULATIVE: (report.SPECULATIVE,),
}


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
  """One run of decoding a file of lines.

  Attributes:
    engine: makes the engine; called after all that is cheap was checked.
    input_file: UTF-8 text, one example a line; '-' reads stdin.
    output_dir: where the results go; None writes nothing.
    overwrite: whether finished results in `output_dir` may be replaced.
    mode: 'both', 'plain' or 'speculative'. 'both' decodes each batch plainly,
      then speculatively, so that a machine that slows down slows both.
    batch_size: lines decoded together.
    sampling: how tokens are drawn, for every line the same.
    seed: with the line number, what all random numbers derive from.
    on_too_long: 'error' makes a line of more than `engine.max_input_len`
      tokens a record with an error; 'truncate' decodes its beginning.
    num_shown: how many results are printed as examples.
    require_agreement: whether differing greedy outputs fail the run; see
      `decode`.
    calibration: a file of scripts/calibrate.py that chooses the engine's gamma;
      None leaves it as it is. Where speculation does not pay, only the plain
      loop runs.

  Raises:
    ValueError: a value is outside its range.
  """

  engine: Callable[[], Engine]
  input_file: str = '-'
  output_dir: str | None = None
  overwrite: bool = False
  mode: str = 'both'
  batch_size: int = 1
  sampling: SamplingConfig = SamplingConfig(temperature=0.0)
  seed: int = 0
  on_too_long: str = 'error'
  num_shown: int = 5
  require_agreement: bool = False
  calibration: str | None = None

  def __post_init__(self):
    _expect(callable(self.engine), 'engine', 'a function', self.engine)
    for name in ('input_file', 'output_dir', 'calibration'):
      value = getattr(self, name)
      optional = value is None and name != 'input_file'
      ok = optional or (isinstance(value, str) and bool(value))
      _expect(ok, name, 'a path, as text', value)
      _expect(optional or '://' not in value, name, 'a local path', value)
    for name in ('overwrite', 'require_agreement'):
      value = getattr(self, name)
      _expect(isinstance(value, bool), name, 'True or False', value)
    _expect(self.mode in _MODES, 'mode', f'one of {list(_MODES)}', self.mode)
    _expect(
      self.on_too_long in ('error', 'truncate'),
      'on_too_long',
      "'error' or 'truncate'",
      self.on_too_long,
    )
    for name, least in (('batch_size', 1), ('num_shown', 0), ('seed', 0)):
      value = getattr(self, name)
      ok = type(value) is int and value >= least
      _expect(ok, name, f'a whole number >= {least}', value)
    _expect(
      isinstance(self.sampling, SamplingConfig)
      and isinstance(self.sampling.temperature, int | float),
      'sampling',
      'a SamplingConfig with one temperature',
      self.sampling,
    )


def _expect(condition: bool, name: str, expected: str, value: Any) -> None:
  if not condition:
    raise ValueError(f'DecodeConfig.{name}: expected {expected}, got {value!r}')


def decode(
  config: DecodeConfig,
  beside: Mapping[str, Callable[[], str]] | None = None,
  console: rich.console.Console | None = None,
) -> dict[str, Any]:
  """Decodes a file of lines, writes the results and prints a report.

  Args:
    config: the run.
    beside: more files for the output folder: name -> function of its text,
      called when the engine exists (a configuration that was in force).
    console: where the report goes; stdout by default. Progress is shown only
      on a terminal.

  Returns:
    The summary, see `report.summarise`.

  Raises:
    ValueError: a bad input file or output folder, before the engine is made;
      or greedy outputs that differ, where `config.require_agreement` is set,
      after everything was written and printed.
    OSError: the results could not be written, such as on a full disk.
  """
  console = console or rich.console.Console()
  if config.output_dir is not None:
    results.claim_output_dir(config.output_dir, config.overwrite)
  lines = read_lines(config.input_file)
  measured = (
    calibration.load(config.calibration) if config.calibration else None
  )
  with _status(console, 'Loading models'):
    engine = config.engine()
  if measured is not None:
    config = _calibrated(config, engine, measured, console)
  limit = engine.max_input_len
  lines = count_tokens(
    lines, engine.tokenizer, limit if config.on_too_long == 'error' else None
  )
  modes = _decode_lines(engine, lines, config, console)
  records = results.make_records(lines, modes, limit)
  summary = report.summarise(
    modes, config.sampling.greedy, _context(config, engine, records)
  )
  if config.output_dir is not None:
    extra = {name: text() for name, text in (beside or {}).items()}
    results.write_results(config.output_dir, records, summary, extra)
  report.print_examples(
    console, [line.text for line in lines], modes, config.num_shown
  )
  report.print_results(console, summary, config.output_dir)
  differing = summary.get('agreement', {}).get('disagreements')
  if config.require_agreement and differing:
    raise ValueError(
      f'{len(differing)} greedy outputs differ between plain and speculative'
      f' decoding, first at line {differing[0]["line"]}'
    )
  return summary


def _calibrated(
  config: DecodeConfig,
  engine: Engine,
  measured: calibration.Calibration,
  console: rich.console.Console,
) -> DecodeConfig:
  """Sets the engine's gamma as it was measured to be best."""
  measured.check(engine.fingerprints)
  if measured.temperature != config.sampling.temperature:
    console.print(
      f'The calibration was made at temperature {measured.temperature:g}, not'
      f' {config.sampling.temperature:g}: its gamma may not be the best here.'
    )
  if measured.gamma == 0:
    console.print(
      'Speculation does not pay here, by the calibration: decoding plainly.'
    )
    return dataclasses.replace(config, mode=report.PLAIN)
  engine.gamma = measured.gamma
  console.print(
    f'gamma = {measured.gamma} by the calibration, expected speed-up'
    f' {measured.expected_speed_up:.2f}'
  )
  return config


def _context(
  config: DecodeConfig, engine: Engine, records: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
  """What belongs to the summary of a run besides its measurements."""
  reasons = [record['finish_reason'] for record in records]
  return {
    'input_file': config.input_file,
    'lines': len(records),
    'finish_reasons': dict(sorted(collections.Counter(reasons).items())),
    'errors': [record['error'] for record in records if record['error']],
    'batch_size': config.batch_size,
    'sampling': dataclasses.asdict(config.sampling),
    'seed': config.seed,
    'gamma': engine.gamma,
    'max_input_len': engine.max_input_len,
    'max_decode_len': engine.max_decode_len,
  }


def _decode_lines(
  engine: Engine,
  lines: Sequence[Line],
  config: DecodeConfig,
  console: rich.console.Console,
) -> dict[str, report.Mode]:
  """Decodes all lines that have text, batch by batch, each way in turn."""
  todo = [
    i for i, line in enumerate(lines) if line.num_tokens and not line.error
  ]
  size = config.batch_size
  batches = [todo[start : start + size] for start in range(0, len(todo), size)]
  modes = {name: report.Mode() for name in _MODES[config.mode]}
  progress = rich.progress.Progress(
    *rich.progress.Progress.get_default_columns(),
    rich.progress.MofNCompleteColumn(),
    console=console,
    transient=True,
    disable=not console.is_terminal,
  )
  with progress:
    task = progress.add_task('Decoding', total=len(todo))
    for batch in batches:
      for name, mode in modes.items():
        _decode_batch(engine, lines, batch, config, name, mode)
      progress.advance(task, len(batch))
  return modes


def _decode_batch(
  engine: Engine,
  lines: Sequence[Line],
  batch: Sequence[int],
  config: DecodeConfig,
  name: str,
  mode: report.Mode,
) -> None:
  """Decodes the lines of `batch` one way and adds what came to `mode`."""
  # A shorter last batch would compile anew; its last line fills it up.
  padded = [*batch, *[batch[-1]] * (config.batch_size - len(batch))]
  texts = [lines[index].text for index in padded]
  options: dict[str, Any] = {
    'speculative': name == report.SPECULATIVE,
    'sampling': config.sampling,
    'seed': config.seed,
    'example_ids': padded,
    'on_too_long': 'truncate',  # where it is an error, no such line is left
  }
  seconds = engine.warmup(texts, **options)
  if seconds > 0:
    mode.compile_seconds += seconds
    # The first run of a program also pays for what is compiled around it.
    engine.generate(texts, **options)
  if mode.first_output_seconds is None:
    mode.first_output_seconds = environment.seconds_since_start()
  start = time.perf_counter()
  completions = engine.generate(texts, **options)
  mode.seconds.append(time.perf_counter() - start)
  mode.batches.append(list(batch))
  mode.completions.update(zip(batch, completions, strict=False))


def _status(
  console: rich.console.Console, message: str
) -> contextlib.AbstractContextManager[object]:
  if console.is_terminal:
    return console.status(message)
  return contextlib.nullcontext()
