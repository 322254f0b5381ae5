"""Runs over lines, over a task, or over each task of a mixture.

One loop for all: read the examples, make the engine, decode what is not done
yet, batch by batch and with all ways in turn, and write the results. A run that
is killed goes on when it is started again, see `resume`.
"""

import collections
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress

from specdec_jax.checks.fields import check_choice
from specdec_jax.decoding import fallback
from specdec_jax.decoding.state import BLOCK
from specdec_jax.engine import calibration, scoring
from specdec_jax.engine.completion import (
  Completion,
  CompletionStats,
  no_distribution,
  passed_over,
)
from specdec_jax.engine.continuous import Continuous
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.request import Drafting, Options
from specdec_jax.engine.scheduler import PoolSettings
from specdec_jax.infer import calibrated, processes, report
from specdec_jax.infer.data import (
  SCORING,
  SPECULATIVE,
  DataSet,
  DecodeConfig,
  Item,
  read,
)
from specdec_jax.infer.report import Results
from specdec_jax.infer.resume import Folder
from specdec_jax.measure import progress
from specdec_jax.measure.record import Record, seconds_since_start
from specdec_jax.measure.table import check_outputs, say
from specdec_jax.text import metrics, tasks
from specdec_jax.text.local_tasks import find_task

Beside = Mapping[str, Callable[[], str]]
SUMMARY = 'summary.json'
# Continuous batching hands over what is finished after so long, so that a kill
# costs no more than that.
_KEEP_SECONDS = 30.0
_NAMED = 5  # most arrays in a message


class AllFailedError(ValueError):
  """No example of a run could be decoded."""


def decode(
  config: DecodeConfig,
  beside: Beside | None = None,
  console: rich.console.Console | None = None,
) -> dict[str, Any]:
  """Decodes or scores lines or a task, writes the results, prints a report.

  The results of lines are `predictions.jsonl` in `config.output_dir`; those of
  a task, or of each task of a mixture, `<task>-<mode>.jsonl-SSSSS-of-NNNNN`, as
  in T5X, whose other files have that name with another ending: `.summary.json`,
  `.config.json` (everything that decided the results), the files of `beside`,
  and the marker `.COMPLETED`, which is written last. A run that was killed goes
  on, and finished results are kept. The models are loaded once, unless the
  lengths of a mixture's tasks differ.

  Args:
    config: the run.
    beside: more files for the output folder: name -> function of its text,
      called when the engine exists (a configuration that was in force).
    console: where the report goes; by default stdout, or stderr where outputs
      go to stdout. Progress is shown only on a terminal.

  Returns:
    The summary, see `report.summarise`; of a task with 'metrics' (and
    'unmeasured': why the usual metric is missing, or None). For a mixture, a
    dict of kind 'mixture', whose 'tasks' has each task's summary by its name.

  Raises:
    ValueError: before the engine is made: the input or the output folder is
      bad. Before anything is compiled: the models do not fit. After everything
      was written, also if the run is started again: the input broke off,
      greedy outputs differ although `config.require_agreement` is set, or a
      metric failed. If nothing could be decoded, it is an AllFailedError, and
      the records are written without the marker.
    OSError: results could not be written; finished work is kept.
  """
  prints_outputs = config.stdout == 'outputs'
  console = console or rich.console.Console(stderr=prints_outputs)
  task = config.mixture_or_task_name
  if task is None:
    return _in_folder(config, beside or {}, console)
  if config.tokenizer is None:
    raise ValueError('DecodeConfig.tokenizer: a task needs it, got None.')
  tokenizer = config.tokenizer
  names = tasks.tasks_of(task)
  if len(names) > 1:
    make_drafter = config.drafter and functools.cache(config.drafter)
    config = dataclasses.replace(
      config, engine=_KeptEngine(config.engine), drafter=make_drafter
    )
  summaries = {}
  for name in names:
    if len(names) > 1:
      console.print(f'Task {name}', markup=False, highlight=False)
    found = find_task(name, config.split, tokenizer, config.prefix)
    one = dataclasses.replace(config, mixture_or_task_name=found)
    summaries[str(name)] = _in_folder(one, beside or {}, console)
  if len(names) == 1:
    return summaries.popitem()[1]
  return {'kind': 'mixture', 'mixture': str(task), 'tasks': summaries}


class _KeptEngine:
  """Keeps an engine; makes another one only if other options are needed."""

  def __init__(self, make: Callable[..., Engine]):
    self._make = make
    self._options: dict[str, Any] | None = None
    self._engine: Engine | None = None

  def __call__(self, **options) -> Engine:
    if self._engine is None or self._options != options:
      self._engine = None  # frees its memory before the next one takes memory
      self._engine, self._options = self._make(**options), options
    return self._engine


def _in_folder(
  config: DecodeConfig, beside: Beside, console: rich.console.Console
) -> dict[str, Any]:
  """Claims the output folder and runs."""
  process = processes.current()
  if not process.alone and not (config.is_task and config.output_dir):
    raise ValueError(
      'Several processes decode a task or a file of examples together, into a'
      ' folder: give gin/runs/infer.gin and --output-dir.'
    )
  check_outputs(config)
  if config.output_dir is None:
    return _Run(config, None, console, process).summary(beside)
  if process.index:
    console.quiet = True  # only the first process prints
  folder = Folder(config.output_dir, config.results_name, process)
  with folder.claimed():
    return _Run(config, folder, console, process).summary(beside)


class _Run:
  """A run whose output folder, if it has one, is claimed."""

  def __init__(
    self,
    config: DecodeConfig,
    folder: Folder | None,
    console: rich.console.Console,
    process: processes.Processes,
  ):
    """Looks for finished results, reads the examples, and loads the models."""
    # Finished results are kept, or made again if some of their files are gone.
    gone = None
    if folder is not None:
      gone = None if config.overwrite else folder.missing()
      process.meet(f'{folder.name} seen')  # before anything is changed
      if config.overwrite and process.index == 0:
        folder.reopen()
    self.folder, self.console, self.process = folder, console, process
    self.data = read(config)
    self.metrics, self.unmeasured = _metrics(config, self.data)
    self.failed_metric: str | None = None
    measured = None
    if config.calibration is not None:  # before any model is loaded
      measured = calibration.load(config.calibration)
      config = calibrated.with_draft_beams(measured, config)
    options = self.data.engine_options(config)
    with progress.status(console, 'Loading models'):
      if config.drafter is not None and SPECULATIVE in config.ways:
        options['drafter'] = config.drafter()  # first: it may be missing
      self.engine = config.engine(**options)
    self.items = self.data.prepare(config, self.engine)
    self._choose_ways(config, measured)
    self.settings = {
      **self.config.identity(),
      **self.data.identity(),
      **engine_identity(self.engine),
      'gammas': self.gammas,
      'verification': self.verification,
    }
    self.is_finished = False
    if folder is not None and gone is not None:
      folder.check_finished(self.settings)
      self.is_finished = not gone
      if gone and process.index == 0:
        folder.reopen(gone)
      process.meet(f'{folder.name} again')

  def _choose_ways(
    self, config: DecodeConfig, measured: calibration.Calibration | None
  ) -> None:
    """Sets `config`, `ways` and `gammas`, by a calibration if there is one."""
    engine, console = self.engine, self.console
    # No more rows than there are examples: more would be padding.
    examples = max(1, len(self.items) // config.options.num_samples)
    rows = min(config.batch_size, examples)
    config = dataclasses.replace(config, batch_size=rows)
    plan = None
    if SPECULATIVE in config.ways:
      _ = engine.drafter  # raises if there is no drafter
      if engine.fallback and config.searches:
        raise ValueError(
          'A drafter rests (--fallback) between drafts of one output,'
          ' not in a beam search: leave one of both out.'
        )
      if measured is None:
        measured = calibrated.of_this_host(config, engine, console)
      plan = calibrated.choose_gammas(measured, config, engine, console)
      if not calibrated.pays(plan):
        config = dataclasses.replace(config, decoding='plain')
    self.config = config
    self.gammas: dict[str, int] | None = None
    if plan is not None:
      self.gammas = {str(size): one.gamma for size, one in plan.items()}
    self.verification = BLOCK if config.judges_blocks(engine) else None
    self.ways = ways_of(config, engine, plan)

  def summary(self, beside: Beside) -> dict[str, Any]:
    """Decodes, writes and prints; the summary."""
    config, folder, console = self.config, self.folder, self.console
    prints_outputs = config.stdout == 'outputs' and self.process.index == 0
    if folder is not None and self.is_finished:
      console.print(
        f'{folder.name} is finished; it is kept. Overwrite it (--overwrite)'
        ' to make it again.'
      )
      summary = folder.read_json(config.files_prefix + SUMMARY)
      if prints_outputs:
        made = folder.read_json(folder.name, lines=True)
        report.print_outputs(made, config.options.num_samples)
      if self.process.index == 0:
        folder.clean()
      self._check_end(summary)
      return summary
    results = self._results()
    if results is None:
      self._check_end({})
      who = self.process
      return {'kind': 'share', 'process': [who.index, who.count]}
    made = report.records(self.data, results, config)
    summary = report.summarise(
      results, config.options.sampling.greedy, self._context(made, results)
    )
    outputs = [o for way in results.values() for o in way.completions.values()]
    errors = [output.error for output in outputs]
    errors += [one.error for one in self.data.examples if one.error]
    failed = all_failed(
      errors, len(made), self.engine.params, config.output_dir
    )
    if folder is not None:
      texts = {name: text() for name, text in beside.items()}
      texts[SUMMARY] = report.json_text(summary, indent=2)
      contents = {folder.name: ''.join(map(report.json_text, made))}
      contents |= {config.files_prefix + n: text for n, text in texts.items()}
      folder.finish(contents, failed is not None)
    if prints_outputs:
      report.print_outputs(made, config.options.num_samples)
    elif not config.is_task:
      report.show_examples(console, self.data, results, config)
    report.show(console, summary, config)
    if failed:
      raise failed
    if 'agreement' in summary and summary['speed_up']:
      for sentence in report.sentences(self._first_look(summary)):
        say(console, sentence)
    # Last: a record or a picture that fails costs no output.
    if config.output_file is not None:
      self._first_look(summary).save(config.output_file)
      say(console, f'The record is in {config.output_file}.')
    if config.plot_file is not None and SPECULATIVE in results:
      usual = self.engine.usual
      report.plot(config.plot_file, results[SPECULATIVE], usual)
    self._check_end(summary)
    return summary

  def _first_look(self, summary: Mapping[str, Any]) -> Record:
    """A summary of both ways as a record of the pair."""
    engine = self.engine
    draft = engine.models.get('draft')
    network = getattr(draft, 'network', None)
    ids = getattr(network, 'num_ids', getattr(network, 'vocab_size', None))
    names = {
      'target': getattr(engine.models.get('target'), 'name', '') or 'target',
      'draft': getattr(draft or engine.drafter, 'name', '') or 'draft',
      'draft_ids': ids,
    }
    head = ('kind', 'version', 'machine')
    measured = {k: value for k, value in summary.items() if k not in head}
    return Record('try', names | measured)

  def _results(self) -> dict[str, Results] | None:
    """The results of each way; None if another process writes them."""
    folder, process, items = self.folder, self.process, self.items
    results = {name: Results() for name in self.ways}
    if folder is not None:
      for work in folder.begin(self.settings, self.config.overwrite):
        _add(results, work)
    keep: Callable[[Mapping[str, Any]], None] | None = None
    if not process.alone and not self.engine.across_hosts:
      # Each process has its own models, and decodes every n-th example.
      every, count = self.config.options.num_samples, process.count
      items = [x for x in items if x.number // every % count == process.index]
      keep = folder.append if folder else None
    elif process.index == 0:
      keep = folder.append if folder else None
    period = self.config.checkpoint_period
    run_items(
      items, self.ways, self.config.rows, period, self.console, results, keep
    )
    if process.alone or folder is None:
      return results
    if process.index:
      folder.wait(lambda: folder.finished)
      return None

    def all_came() -> bool:
      for work in folder.appended():
        _add(results, work)
      count = len(self.items)
      return all(len(one.completions) == count for one in results.values())

    folder.wait(all_came)
    return results

  def _context(
    self,
    made: Sequence[Mapping[str, Any]],
    results: Mapping[str, Results],
  ) -> dict[str, Any]:
    """The summary's entries besides its measurements."""
    config, engine = self.config, self.engine
    errors = [record.get('error') for record in made]
    if config.is_task:
      scores = [
        record.get('score') for record in made if config.mode == 'score'
      ]
      known = [score for score in scores if score is not None]
      context = {
        'kind': 'task',
        'task': config.task_name,
        'split': config.split,
        'mode': config.mode,
        'examples': len(made),
        'shard': [config.shard_id, config.num_shards],
        'errors': [
          f'example {config.index(number)}: {error}'
          for number, error in enumerate(errors)
          if error
        ],
        'metrics': self._measured(results),
        'mean_score': float(np.mean(known)) if known else None,
        'num_decodes': config.options.num_samples,
      }
      context['unmeasured'] = self.unmeasured or self.failed_metric
    else:
      reasons = collections.Counter(
        reason
        for record in made
        for reason in report.as_list(record['finish_reason'])
      )
      context = {
        'input_file': config.input_file,
        'lines': len(made),
        'finish_reasons': dict(sorted(reasons.items())),
        'errors': [error for error in errors if error],
      }
    return {
      **context,
      'reading': self.data.reading,
      'batch_size': config.batch_size,
      'sampling': dataclasses.asdict(config.options.sampling),
      **({'beams': config.beams} if config.searches else {}),
      'lenience': config.options.lenience,
      **({'verification': BLOCK} if self.verification else {}),
      'seed': config.options.seed,
      **{name: self.settings[name] for name in _OF_ENGINE},
      'kernel_layout': engine.kernel_layout,
      'gammas': self.gammas,
      'dtypes': {name: model.dtype for name, model in engine.models.items()},
      'input_broken_off': self.data.broken_off,
    }

  def _measured(self, results: Mapping[str, Results]) -> dict[str, Any]:
    """Metrics of each way, over the examples with a target.

    Of several samples the first counts, of beams the best one, which is last.
    Nothing is raised here, because the results must be written in any case.
    """
    references = _references(self.data)
    measured: dict[str, dict[str, Any]] = {}
    if not references:
      return measured
    samples = self.config.options.num_samples
    counted = samples - 1 if self.config.searches else 0
    for name, way in results.items():
      outputs = [
        way.completions[number * samples + counted].text
        for number in references
      ]
      measured[name] = {}
      for metric in self.metrics:
        try:
          measured[name] |= metric(list(references.values()), outputs)
        except Exception as error:  # a task's own code may raise anything
          self.failed_metric = (
            f'A metric of the task failed: {type(error).__name__}: {error}'
          )
    return measured

  def _check_end(self, summary: Mapping[str, Any]) -> None:
    """Raises ValueError, after all is written, for a run that fails then."""
    config = self.config
    if self.data.broken_off is not None:
      where = f'in {config.output_dir!r}' if config.output_dir else 'decoded'
      raise ValueError(
        f'{self.data.broken_off} Everything before that is {where}.'
      )
    if self.failed_metric is not None:
      raise ValueError(
        f'{self.failed_metric}. The results are in {config.output_dir!r}.'
      )
    differing = summary.get('agreement', {}).get('disagreements')
    required = config.require_agreement and config.options.lenience == 1
    if required and differing:
      raise ValueError(
        f'{len(differing)} greedy outputs differ between plain and speculative'
        f' decoding, first at line {differing[0]["line"]}.'
      )


def _add(results: Mapping[str, Results], work: Mapping[str, Any]) -> None:
  for name, one in work.items():
    results[name].add(Results.from_json(one))


@dataclasses.dataclass
class Decoding:
  """Plain or speculative decoding by an engine.

  Attributes:
    engine: the engine.
    speculative: whether its drafter helps.
    options: how outputs are decoded.
    slots: settings of continuous batching; None decodes fixed batches.
  """

  engine: Engine
  speculative: bool
  options: Options
  slots: PoolSettings | None = None

  @functools.cached_property
  def _decoder(self) -> Engine | Continuous:
    if self.slots is None:
      return self.engine
    return Continuous(self.engine, self.slots)

  def warmup(self, items: Sequence[Item]) -> float:
    """Compiles what `run` needs; returns seconds, 0.0 if it needs nothing."""
    sources, options = self._asked(items)
    return self._decoder.warmup(sources, **options)

  def run(self, items: Sequence[Item]) -> Iterator[tuple[int, Completion]]:
    """Yields the place and the output of each item as it is finished."""
    sources, options = self._asked(items)
    if isinstance(self._decoder, Continuous):
      return self._decoder.run(sources, **options)
    return enumerate(self._decoder.generate(sources, **options))

  def rounds(self) -> tuple[int, int]:
    """Rounds of running rows and of all rows, of the last `run` in a pool."""
    stats = getattr(self._decoder, 'stats', None)
    return (stats.live_rounds, stats.slot_rounds) if stats else (0, 0)

  def _asked(self, items: Sequence[Item]) -> tuple[list[Any], dict[str, Any]]:
    options = {
      name: getattr(self.options, name)
      for name, default in dataclasses.asdict(Options()).items()
      if name != 'num_samples' and getattr(self.options, name) != default
    }
    if self.options.num_beams is not None:
      # One beam search gives all outputs of a source.
      items = items[:: self.options.num_samples]
      options['num_samples'] = self.options.num_samples
    if self.options.on_too_long == 'error':
      options['on_too_long'] = 'report'
    if self.slots is None:
      options['batch_size'] = max(1, len(items))
    if any(item.prompt is not None for item in items):
      options['prompts'] = [item.prompt or [] for item in items]
    options |= {
      'speculative': self.speculative,
      'seed': self.options.seed,
      'example_ids': [item.example_id for item in items],
    }
    return [item.source for item in items], options


def ways_of(
  config: DecodeConfig,
  engine: Engine,
  plan: Mapping[int, Drafting] | None,
) -> dict[str, 'Decoding | Scoring']:
  """The ways of a run by their names.

  Args:
    config: the run.
    engine: the engine that decodes or scores.
    plan: rows -> how they are drafted for, by a calibration; or None.
  """
  slots = config.slots
  if slots is not None and plan is not None:
    slots = dataclasses.replace(slots, gammas=plan)
  return {
    name: Scoring(engine)
    if name == SCORING
    else Decoding(engine, name == SPECULATIVE, config.options, slots)
    for name in config.ways
  }


class Scoring:
  """Scores each item's target; results have the form of decoded outputs."""

  slots = None

  def __init__(self, engine: Engine):
    """Scores by the engine's target."""
    self._engine = engine
    self._known: set[tuple[int, ...]] = set()

  def warmup(self, items: Sequence[Item]) -> float:
    """Compiles and runs the program for a batch like this."""
    shape = scoring.shapes(self._engine.target, *_sides(items))
    if shape in self._known:
      return 0.0
    self._known.add(shape)
    begin = time.perf_counter()
    self._engine.score(*_sides(items))
    return time.perf_counter() - begin

  def run(self, items: Sequence[Item]) -> Iterator[tuple[int, Completion]]:
    """Yields the place and the scores of each item."""
    scores = self._engine.score(*_sides(items))
    for place, (item, score) in enumerate(zip(items, scores, strict=True)):
      stats = CompletionStats(num_tokens=len(item.target), num_target_calls=1)
      log_probs = list(score.log_probs)
      scored = Completion('', [*item.target], log_probs, 'scored', stats)
      if math.isnan(score.total):
        scored = passed_over('error', no_distribution())
      yield place, scored

  def rounds(self) -> tuple[int, int]:
    """There is no pool."""
    return 0, 0


def _sides(items: Sequence[Item]) -> tuple[list[Any], list[Any]]:
  return [item.source for item in items], [item.target for item in items]


def run_items(
  items: Sequence[Item],
  ways: Mapping[str, Decoding | Scoring],
  rows: int,
  period: int,
  console: rich.console.Console,
  results: Mapping[str, Results],
  keep: Callable[[Mapping[str, Any]], None] | None = None,
) -> None:
  """Runs the items that have no result yet, batch by batch, ways in turn.

  Args:
    items: the items in order, which alone decides the batches.
    ways: name -> way.
    rows: items of a batch; with continuous batching `period` times as many.
    period: see `rows`.
    console: shows progress if it is a terminal.
    results: name -> results so far; new ones are added.
    keep: keeps new results of a way, as JSON values; None keeps none.

  Raises:
    OSError: results could not be kept.
  """
  size = rows * period if any(way.slots for way in ways.values()) else rows
  bar = rich.progress.Progress(
    *rich.progress.Progress.get_default_columns(),
    rich.progress.MofNCompleteColumn(),
    console=console,
    transient=True,
    disable=not console.is_terminal,
  )
  with bar:
    task = bar.add_task('Decoding', total=len(items))
    for begin in range(0, len(items), size):
      for name, way in ways.items():
        known = results[name].completions
        batch = [
          x for x in items[begin : begin + size] if x.number not in known
        ]
        for part in _run_batch(way, batch, rows):
          results[name].add(part)
          if keep is not None:
            keep({name: dataclasses.asdict(part)})
      done = min(begin + size, len(items))
      bar.update(task, completed=done)


def _run_batch(
  way: Decoding | Scoring, batch: Sequence[Item], rows: int
) -> Iterator[Results]:
  """Runs one batch with one way; yields its results.

  With continuous batching they come in parts, one each half minute.
  """
  if not batch:
    return
  padded = list(batch)
  if way.slots is None:
    # Filled up with its last item: a shorter batch would need another program.
    padded += [batch[-1]] * (rows - len(batch))
  part = Results(compile_seconds=way.warmup(padded))
  if part.compile_seconds > 0 and way.slots is None:
    # Not timed: the first run also compiles the code around the program.
    for _ in way.run(padded):
      pass
  part.first_output_seconds = seconds_since_start()
  begin, live, slots = time.perf_counter(), 0, 0
  due = time.monotonic() + _KEEP_SECONDS
  last = len(padded) - 1
  for count, (place, output) in enumerate(way.run(padded)):
    if place < len(batch):
      part.completions[batch[place].number] = output
    is_due = way.slots is not None and time.monotonic() >= due
    if part.completions and (count == last or is_due):
      now, rounds = time.perf_counter(), way.rounds()
      part.batches.append(list(part.completions))
      part.seconds.append(now - begin)
      part.live_rounds, part.slot_rounds = rounds[0] - live, rounds[1] - slots
      yield part
      part = Results()
      begin, (live, slots) = now, rounds
      due = time.monotonic() + _KEEP_SECONDS


# The properties of an engine that decide its outputs and are in a summary.
_OF_ENGINE = ('gamma', 'rule', 'fallback', 'max_input_len', 'max_decode_len')


def engine_identity(engine: Engine) -> dict[str, Any]:
  """The properties of an engine that decide its outputs, as JSON values."""
  leaves = jax.tree.leaves(engine.params.target)
  names = ('split_special_tokens', 'skip_special_tokens')
  return {
    'models': dict(engine.fingerprints),
    'dtype': sorted({str(leaf.dtype) for leaf in leaves}),
    'vocabulary': engine.tokenizer.fingerprint,
    'special_tokens': [getattr(engine.tokenizer, x, None) for x in names],
    'gamma': engine.gamma,
    'max_input_len': engine.max_input_len,
    'max_decode_len': engine.max_decode_len,
    'bos_id': engine.bos_id,
    'rule': None if engine.rule is None else engine.rule.to_json(),
    'fallback': fallback.to_json(engine.fallback),
    'languages': [engine.source_lang, engine.target_lang],
  }


def _references(data: DataSet) -> dict[int, Any]:
  """The number of each example that has a target -> the target."""
  examples = enumerate(data.examples)
  known = {n: one.reference for n, one in examples if not one.error}
  return {n: text for n, text in known.items() if text is not None}


def _metrics(
  config: DecodeConfig, data: DataSet
) -> tuple[list[metrics.Metric], str | None]:
  """The metric functions of a task, and why the usual one is missing, or None.

  Raises:
    ValueError: a metric that was named is unknown, or its package is missing.
  """
  names = config.metrics
  if not config.is_task or config.mode == 'score' or names is None:
    return [], None
  local = tasks.find_local(config.task)
  if names == 'task':
    if local is None:
      return tasks.metrics(config.task), None
    names = local.metrics
    if not names:
      missing = metrics.lack(metrics.bleu)
      if missing or not _references(data):
        return [], missing if _references(data) else None
      return [metrics.bleu], None
  for name in names:
    check_choice('DecodeConfig.metrics', name, metrics.METRICS)
    if missing := metrics.lack(metrics.METRICS[name]):
      raise ValueError(missing)
  return [metrics.METRICS[name] for name in names], None


def all_failed(
  errors: Sequence[str | None],
  count: int,
  params: Any,
  output_dir: str | None,
) -> AllFailedError | None:
  """The error to raise after all is written, if nothing could be decoded.

  Args:
    errors: error of each output; None for one that was decoded.
    count: examples of the run.
    params: the engine's parameters, which are searched for the reason.
    output_dir: folder that the results were written to, or None.
  """
  if not errors or not all(errors):
    return None
  reason = kept = ''
  if names := nonfinite(params):
    more = len(names) - _NAMED
    named = ', '.join(names[:_NAMED]) + (f' and {more} more' * (more > 0))
    reason = (
      f' The parameters hold NaN or infinite values: {named}. Is the checkpoint'
      ' damaged, or too large for its dtype?'
    )
  if output_dir is not None:
    kept = (
      f' The records are in {output_dir!r} for inspection, not marked as'
      ' COMPLETED; another start makes them again.'
    )
  first = str(errors[0]).rstrip('.')
  return AllFailedError(
    f'None of {count} could be decoded. The first: {first}.{reason}{kept}'
  )


def nonfinite(params: Any) -> list[str]:
  """Names of the arrays that hold NaN or infinite values, with their numbers.

  Of an array that is split over several hosts only this host's part is
  searched.
  """
  names = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
      continue
    parts = [leaf]
    if isinstance(leaf, jax.Array):
      parts = [part.data for part in leaf.addressable_shards]
    if bad := sum(int(jnp.sum(~jnp.isfinite(part))) for part in parts):
      name = jax.tree_util.keystr(path, simple=True, separator='/')
      names.append(f'{name} ({bad} of {sum(part.size for part in parts)})')
  return names
