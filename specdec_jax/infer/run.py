"""The run itself: lines in, both ways of decoding batch by batch, results out."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import rich.console
import rich.progress

from specdec_jax.infer import report, results
from specdec_jax.infer.lines import Line, Tokenizer, fit_lines, read_lines
from specdec_jax.probs import SamplingConfig

_MODES = {
  'both': (report.PLAIN, report.SPECULATIVE),
  report.PLAIN: (report.PLAIN,),
  report.SPECULATIVE: (report.SPECULATIVE,),
}


class Engine(Protocol):
  """What is needed of `engine.Engine`."""

  tokenizer: Tokenizer
  max_input_len: int

  def warmup(
    self, *, batch_size: int, sampling: SamplingConfig, speculative: bool
  ) -> float: ...

  def generate(
    self,
    texts: Sequence[str],
    *,
    sampling: SamplingConfig,
    speculative: bool,
    seed: int,
    example_ids: Sequence[int],
  ) -> Sequence[report.Completion]: ...


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

  def __post_init__(self):
    _expect(callable(self.engine), 'engine', 'a function', self.engine)
    for name in ('input_file', 'output_dir'):
      value = getattr(self, name)
      optional = value is None and name == 'output_dir'
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
  with _status(console, 'Loading models'):
    engine = config.engine()
  lines = fit_lines(
    lines, engine.tokenizer, engine.max_input_len, config.on_too_long
  )
  modes = _decode_lines(engine, lines, config, console)
  summary = report.summarise(
    modes, config.sampling.greedy, _context(config, lines)
  )
  if config.output_dir is not None:
    extra = {name: text() for name, text in (beside or {}).items()}
    results.write_results(
      config.output_dir, results.make_records(lines, modes), summary, extra
    )
  report.print_examples(
    console, [line.inputs for line in lines], modes, config.num_shown
  )
  report.print_results(console, summary, config.output_dir)
  differing = summary.get('agreement', {}).get('disagreements')
  if config.require_agreement and differing:
    raise ValueError(
      f'{len(differing)} greedy outputs differ between plain and speculative'
      f' decoding, first at line {differing[0]["line"]}'
    )
  return summary


def _context(config: DecodeConfig, lines: Sequence[Line]) -> dict[str, Any]:
  """What belongs to the record of a run besides its measurements."""
  errors = [line.error for line in lines if line.error]
  return {
    'input_file': config.input_file,
    'lines': len(lines),
    'empty_lines': sum(not line.text and not line.error for line in lines),
    'errors': errors,
    'batch_size': config.batch_size,
    'sampling': dataclasses.asdict(config.sampling),
    'seed': config.seed,
  }


def _decode_lines(
  engine: Engine,
  lines: Sequence[Line],
  config: DecodeConfig,
  console: rich.console.Console,
) -> dict[str, report.Mode]:
  """Decodes all lines that have text, batch by batch, each way in turn."""
  todo = [i for i, line in enumerate(lines) if line.text and not line.error]
  size = config.batch_size
  batches = [todo[start : start + size] for start in range(0, len(todo), size)]
  modes = {name: report.Mode() for name in _MODES[config.mode]}
  if not batches:
    return modes
  with _status(console, 'Compiling'):
    for name, mode in modes.items():
      mode.compile_seconds = engine.warmup(
        batch_size=size,
        sampling=config.sampling,
        speculative=name == report.SPECULATIVE,
      )
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
  start = time.perf_counter()
  completions = engine.generate(
    [lines[index].text for index in padded],
    sampling=config.sampling,
    speculative=name == report.SPECULATIVE,
    seed=config.seed,
    example_ids=padded,
  )
  mode.seconds.append(time.perf_counter() - start)
  mode.batches.append(list(batch))
  mode.completions.update(zip(batch, completions, strict=False))


def _status(console: rich.console.Console, message: str):
  return (
    console.status(message)
    if console.is_terminal
    else (contextlib.nullcontext())
  )
