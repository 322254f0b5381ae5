"""Runs over lines, over a task, or over each task of a mixture.

A source (`line_source`, `task_source`) reads the examples and makes their
records. Everything else is the same for both: models, calibration, resuming a
killed run, decoding, and the files at the end.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console

from specdec_jax.engine.engine import Engine
from specdec_jax.infer import (
  acceptance_picture,
  batches,
  calibrated,
  examples,
  failures,
  processes,
  report,
  results,
  resume,
  shares,
)
from specdec_jax.infer.line_source import Lines
from specdec_jax.infer.settings import DecodeConfig, TaskConfig, settings_of
from specdec_jax.infer.task_source import Task, results_name
from specdec_jax.measure import calibration, progress
from specdec_jax.measure.canvas import check_outputs
from specdec_jax.text import tasks

Beside = Mapping[str, Callable[[], str]]


def decode(
  config: DecodeConfig,
  beside: Beside | None = None,
  console: rich.console.Console | None = None,
) -> dict[str, Any]:
  """Decodes a file of lines, writes the results and prints a report.

  A run that was killed is resumed, and a finished one is kept; see `resume`.

  Args:
    config: the run.
    beside: more files for the output folder: name -> function of its text,
      called when the engine exists (a configuration that was in force).
    console: where the report goes; by default stdout, or stderr where
      `config.stdout` is 'outputs'. Progress is shown only on a terminal.

  Returns:
    The summary, see `report.summarise`.

  Raises:
    ValueError: before the engine is made: the input file or the output folder
      is bad, or no line is text. After everything was written and printed, also
      if the run is started again: greedy outputs differ although
      `config.require_agreement` is set, or the input broke off (see
      `files.BrokenOff`). If no line could be decoded, it is an AllFailedError;
      the records are written without the marker.
    OSError: the results could not be written, for example on a full disk.
  """
  who = processes.current()
  if not who.alone:
    raise ValueError(
      'Several processes decode a task or a file of examples together: give'
      ' gin/runs/infer.gin. A run over lines is one process.'
    )
  console = console or _console(config)
  if config.output_dir is None:
    return _run(Lines(config), None, None, beside or {}, console, who)
  folder = resume.Folder(config.output_dir, results.PREDICTIONS)
  with folder.claimed(overwrite=True):  # `_run` keeps what is finished
    gone = None if config.overwrite else folder.missing()
    return _run(Lines(config), folder, gone, beside or {}, console, who)


def decode_task(
  config: TaskConfig,
  beside: Beside | None = None,
  console: rich.console.Console | None = None,
) -> dict[str, Any]:
  """Decodes or scores a task, or the tasks of a mixture one after another.

  The results of each task are `<task>-<mode>.jsonl-SSSSS-of-NNNNN` in
  `config.output_dir`. Further files have that name with another ending:
  `.summary.json`, `.config.json` (everything that decided the results), the
  files of `beside`, and the marker `.COMPLETED`, which is written last. A run
  that was killed is resumed. The models are loaded once, unless
  `config.task_feature_lengths` is None and the longest examples of a mixture's
  tasks differ.

  Args:
    config: the run.
    beside: as for `decode`; written for each task.
    console: as for `decode`.

  Returns:
    The summary from `report.summarise`, of kind 'task', with 'metrics' (and
    'unmeasured': why the usual metric is missing, or None). For a mixture, a
    dict of kind 'mixture', whose 'tasks' has each task's summary by its name.

  Raises:
    ValueError: before anything is compiled: a bad task, file, shard or output
      folder, or models that do not fit. After everything was written: the file
      broke off (see `files.BrokenOff`), also if the run is started again; or
      one of the task's own metrics failed. If no example could be decoded, it
      is an AllFailedError; the records are written without the marker.
    OSError: results could not be written; finished work is kept.
  """
  console = console or _console(config)
  names = tasks.tasks_of(config.mixture_or_task_name)
  if len(names) == 1:
    return _one_task(config, beside or {}, console)
  shared = dataclasses.replace(
    config,
    engine=_Kept(config.engine),
    drafter=config.drafter and functools.cache(config.drafter),
  )
  summaries = {}
  for name in names:
    console.print(f'Task {name}', markup=False, highlight=False)
    one = dataclasses.replace(shared, mixture_or_task_name=name)
    summaries[str(name)] = _one_task(one, beside or {}, console)
  return {
    'kind': 'mixture',
    'mixture': str(config.mixture_or_task_name),
    'tasks': summaries,
  }


def _console(config: DecodeConfig | TaskConfig) -> rich.console.Console:
  return rich.console.Console(stderr=config.prints_outputs)


class _Kept:
  """Keeps an engine; makes another one only if other lengths are needed."""

  def __init__(self, make: Callable[..., Engine]):
    self._make = make
    self._lengths: tuple[int, int] | None = None
    self._engine: Engine | None = None

  def __call__(self, **options) -> Engine:
    lengths = options['max_input_len'], options['max_decode_len']
    if self._engine is None or self._lengths != lengths:
      self._engine = None  # frees its memory before the next one takes memory
      self._engine, self._lengths = self._make(**options), lengths
    return self._engine


def _one_task(
  config: TaskConfig, beside: Beside, console: rich.console.Console
) -> dict[str, Any]:
  found = examples.find(
    config.mixture_or_task_name, config.split, config.tokenizer
  )
  config = dataclasses.replace(config, mixture_or_task_name=found)
  who = processes.current()
  if config.output_dir is None:
    if not who.alone:
      raise ValueError(
        'Several processes of one run need a folder for the results: give'
        ' output_dir (gin: OUTPUT_DIR).'
      )
    return _run(Task(config), None, None, beside, console, who)
  folder = resume.Folder(config.output_dir, results_name(config))
  own = folder
  if who.index:
    own = folder.share(who.index, who.count)
    console.quiet = True  # only the first process prints
  # Finished results are kept here; `_run` checks later whether they have this
  # configuration.
  with own.claimed(overwrite=True):
    gone = None if config.overwrite else folder.missing()
    # All processes look before the first one changes anything.
    shares.meet(f'{folder.name} seen', who)
    if who.index == 0 and config.overwrite:
      folder.reopen()
    shares.meet(folder.name, who)
    return _run(Task(config), folder, gone, beside, console, who)


def _run(
  source: Lines | Task,
  folder: resume.Folder | None,
  gone: Sequence[str] | None,
  beside: Beside,
  console: rich.console.Console,
  who: processes.Processes,
) -> dict[str, Any]:
  """Decodes the examples of a source, in a folder that is claimed.

  Args:
    source: the examples; its `config` is the run.
    folder: folder of the results; None writes none.
    gone: files that are missing from finished results that are to be kept; None
      if there are no such results.
    beside: as for `decode`.
    console: as for `decode`.
    who: which of the run's processes this is.
  """
  check_outputs(source.config)
  measured = None
  if source.config.calibration is not None:  # before any model is loaded
    measured = calibration.load(source.config.calibration)
    source.config = calibrated.with_draft_beams(measured, source.config)
  with progress.status(console, 'Loading models'):
    engine = source.engine()
  items = source.items()
  # No more rows than there are examples: more would be padding.
  num_examples = max(1, len(items) // source.config.num_outputs)
  fewer = min(source.config.batch_size, num_examples)
  source.config = dataclasses.replace(source.config, batch_size=fewer)
  gammas = None
  if report.SPECULATIVE in source.config.ways:
    _ = engine.drafter  # raises if there is no drafter
    if engine.fallback and source.config.beams.searches:
      raise ValueError(
        'A drafter rests (--fallback; gin: DRAFTER_RESTS) between drafts of one'
        ' output, not in a beam search: leave one of both out.'
      )
    if measured is None:
      measured = calibrated.of_this_host(source.config, engine, console)
    gammas = calibrated.choose_gammas(measured, source.config, engine, console)
    if not calibrated.pays(gammas):
      source.config = source.config.plainly()
  config = source.config
  decides = source.identity(engine, gammas)
  if folder is not None and gone is not None:
    folder.check_finished(decides)
    if not gone:
      summary = _kept(source, folder, console, who)
      if config.prints_outputs and who.index == 0:
        found = folder.read_json_lines(folder.name)
        results.print_outputs(found, config.rows // config.batch_size)
      _check_end(source, summary)
      return summary
    if who.index == 0:
      folder.make_again(gone)
    shares.meet(f'{folder.name} again', who)
  ways = calibrated.ways(config, engine, gammas, measured)
  modes = _decoded(source, engine, items, ways, decides, folder, console, who)
  if modes is None:
    results.check_whole(source.broken_off, config.output_dir)
    return {'kind': 'share', 'process': [who.index, who.count]}
  records = source.records(modes)
  summary = report.summarise(
    modes,
    config.sampling.greedy,
    {
      **source.context(records, modes),
      **settings_of(config, engine, gammas),
      'dtypes': {name: one.dtype for name, one in engine.models.items()},
      'input_broken_off': source.broken_off,
    },
  )
  came = [one.error for m in modes.values() for one in m.completions.values()]
  failed = failures.all_failed(
    [*came, *source.broken], len(records), engine.params, config.output_dir
  )
  if folder is not None:
    contents = results.contents(
      records, summary, beside, folder.name, source.prefix
    )
    folder.leave(contents) if failed else folder.finish(contents)
  if config.prints_outputs:
    results.print_outputs(records, config.rows // config.batch_size)
  else:
    source.show(console, modes)
  report.print_results(
    console, summary, config.output_dir, config.prints_outputs
  )
  if failed:
    raise failed
  # Last: a picture that fails costs no output.
  plot_file = getattr(config, 'plot_file', None)
  if plot_file is not None and report.SPECULATIVE in modes:
    own = modes[report.SPECULATIVE]
    acceptance_picture.plot(plot_file, own, engine.usual)
  _check_end(source, summary)
  return summary


def _check_end(source: Lines | Task, summary: Mapping[str, Any]) -> None:
  """Raises ValueError, after all is written, for a run that fails then."""
  results.check_whole(source.broken_off, source.config.output_dir)
  if complaint := source.complaint(summary):
    raise ValueError(complaint)


def _decoded(
  source: Lines | Task,
  engine: Engine,
  items: Sequence[batches.Item],
  ways: Mapping[str, batches.Way],
  decides: Mapping[str, Any],
  folder: resume.Folder | None,
  console: rich.console.Console,
  who: processes.Processes,
) -> shares.Modes | None:
  """All results of each way; None if another process writes them."""
  config = source.config
  run = functools.partial(
    batches.run_all,
    ways=ways,
    rows=config.rows,
    period=config.checkpoint_period,
    console=console,
  )
  begin = functools.partial(
    resume.Folder.begin, config=decides, overwrite=config.overwrite
  )
  if folder is None:
    return run(items, None, {})
  if who.alone:
    return run(items, folder, begin(folder))
  if engine.across_hosts:
    return shares.in_lockstep(folder, begin, items, run, who)
  every = config.rows // config.batch_size
  return shares.each_its_own(folder, begin, items, every, run, who)


def _kept(
  source: Lines | Task,
  folder: resume.Folder,
  console: rich.console.Console,
  who: processes.Processes,
) -> dict[str, Any]:
  """The summary of finished results."""
  if who.index == 0:
    folder.clean()
  console.print(
    f'{folder.name} is finished; it is kept. Overwrite it (--overwrite, in gin'
    ' OVERWRITE = True) to make it again.'
  )
  return folder.read_json(source.prefix + results.SUMMARY)
