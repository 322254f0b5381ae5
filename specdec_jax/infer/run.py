"""The run over lines: in, both ways of decoding batch by batch, results out."""

import collections
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console

from specdec_jax import files
from specdec_jax.engine.engine import Engine
from specdec_jax.infer import (
  batches,
  calibrated,
  failures,
  processes,
  report,
  results,
  resume,
)
from specdec_jax.infer.settings import WAYS, DecodeConfig, by_rows, settings_of
from specdec_jax.measure import progress
from specdec_jax.text.lines import Line, check_some, count_tokens, read_lines


def decode(
  config: DecodeConfig,
  beside: Mapping[str, Callable[[], str]] | None = None,
  console: rich.console.Console | None = None,
) -> dict[str, Any]:
  """Decodes a file of lines, writes the results and prints a report.

  A run that was killed goes on where it was; see `resume`.

  Args:
    config: the run.
    beside: more files for the output folder: name -> function of its text,
      called when the engine exists (a configuration that was in force).
    console: where the report goes; stdout by default. Progress is shown only
      on a terminal.

  Returns:
    The summary, see `report.summarise`.

  Raises:
    ValueError: a bad input file or output folder, or no line that is right,
      before the engine is made; or, after everything was written and printed,
      greedy outputs that differ, where `config.require_agreement` is set, or an
      input that broke off (see `files.BrokenOff`). As AllFailedError: no line
      could be decoded; what came is left without a marker.
    OSError: the results could not be written, such as on a full disk.
  """
  if not processes.current().alone:
    raise ValueError(
      'Several processes decode a task or a file of examples together: give'
      ' gin/runs/infer.gin. A run over lines is one process.'
    )
  console = console or rich.console.Console()
  if config.output_dir is None:
    return _decode(config, None, beside or {}, console)
  folder = resume.Folder(config.output_dir, results.PREDICTIONS)
  with folder.claimed(config.overwrite):
    return _decode(config, folder, beside or {}, console)


def _decode(
  config: DecodeConfig,
  folder: resume.Folder | None,
  beside: Mapping[str, Callable[[], str]],
  console: rich.console.Console,
) -> dict[str, Any]:
  """`decode` to a folder of its own."""
  lines, broken_off = files.until_broken(read_lines(config.input_file))
  check_some(config.input_file, lines)
  measured = calibrated.load(config)
  with progress.status(console, 'Loading models'):
    engine = config.engine()
  gammas = calibrated.choose_gammas(measured, config, engine, console)
  if not calibrated.pays(gammas):
    config = dataclasses.replace(config, mode=report.PLAIN)
  limit = engine.max_input_len
  most = limit if config.on_too_long == 'error' else None
  lines = count_tokens(lines, engine.num_input_tokens, most)
  decides = _identity(config, engine, lines, gammas)
  done: resume.Chunks = {}
  if folder is not None:
    if folder.finished and not config.overwrite:
      folder.make_again(decides)
    done = folder.begin(decides, config.overwrite)
  modes = batches.run_all(
    _items(lines),
    calibrated.decodings(WAYS[config.mode], config, engine, gammas),
    config.batch_size,
    config.checkpoint_period,
    folder=folder,
    done=done,
    console=console,
  )
  failed = failures.first_error(modes, [x.error for x in lines if x.error])
  records = results.make_records(lines, modes, limit)
  summary = report.summarise(
    modes,
    config.sampling.greedy,
    {
      **_context(config, engine, records, gammas),
      'input_broken_off': broken_off,
    },
  )
  if folder is not None:
    extra = {name: text() for name, text in beside.items()}
    contents = results.contents(records, summary, extra)
    folder.leave(contents) if failed else folder.finish(contents)
  report.print_examples(
    console, [line.text for line in lines], modes, config.num_shown
  )
  report.print_results(console, summary, config.output_dir)
  if failed:
    params, count = engine.params, len(records)
    raise failures.explained(failed, count, params, config.output_dir)
  results.check_whole(broken_off, config.output_dir)
  differing = summary.get('agreement', {}).get('disagreements')
  if config.require_agreement and differing and config.lenience == 1:
    raise ValueError(
      f'{len(differing)} greedy outputs differ between plain and speculative'
      f' decoding, first at line {differing[0]["line"]}'
    )
  return summary


def _context(
  config: DecodeConfig,
  engine: Engine,
  records: Sequence[Mapping[str, Any]],
  gammas: Mapping[int, int] | None,
) -> dict[str, Any]:
  """What belongs to the summary of a run besides its measurements."""
  reasons = [record['finish_reason'] for record in records]
  return {
    'input_file': config.input_file,
    'lines': len(records),
    'finish_reasons': dict(sorted(collections.Counter(reasons).items())),
    'errors': [record['error'] for record in records if record['error']],
    **settings_of(config, engine, gammas),
  }


def _items(lines: Sequence[Line]) -> list[batches.Item]:
  """All lines that have something to read and no error."""
  return [
    batches.Item(index, line.text, example_id=index)
    for index, line in enumerate(lines)
    if line.num_tokens and not line.error
  ]


def _identity(
  config: DecodeConfig,
  engine: Engine,
  lines: Sequence[Line],
  gammas: Mapping[int, int] | None,
) -> dict[str, Any]:
  """Everything that decides the results, as JSON has it."""
  texts = repr([(line.text, line.error) for line in lines])
  return {
    'lines': len(lines),
    'lines_sha256': hashlib.sha256(texts.encode()).hexdigest(),
    'mode': config.mode,
    'batch_size': config.batch_size,
    'batching': config.batching,
    'sampling': dataclasses.asdict(config.sampling),
    'lenience': config.lenience,
    'seed': config.seed,
    'on_too_long': config.on_too_long,
    'checkpoint_period': config.checkpoint_period,
    'gammas': by_rows(gammas),
    **batches.engine_identity(engine),
  }
