"""Decodes or scores lines, a task, or each task of a mixture.

A run reads the examples, makes the engine, decodes batch after batch in each
mode, and writes the results. A run that was killed continues when it is started
again, and does not repeat finished work, see `resume`.
"""

import codecs
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
from rich.console import Console

from specdec_jax import files
from specdec_jax.checks.fields import check_choice, unexpected
from specdec_jax.decoding import resting
from specdec_jax.engine import calibration, completion, scoring
from specdec_jax.engine.completion import Completion
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.request import TextRequest, widest_of
from specdec_jax.infer import data, report
from specdec_jax.infer.data import SCORING, SPECULATIVE, DecodeConfig, Item
from specdec_jax.infer.report import Batch, Outputs
from specdec_jax.infer.resume import Folder
from specdec_jax.measure import calibrate
from specdec_jax.models import backend
from specdec_jax.report import bar, say
from specdec_jax.report.record import seconds_since_start
from specdec_jax.request import Drafting
from specdec_jax.text import metrics, tasks

Beside = Mapping[str, Callable[[], str]]
SUMMARY = 'summary.json'
# These settings are also entries of the summary itself.
_OF_SETTINGS = ('gamma', 'gammas', 'rule', 'fallback')
# Continuous batching writes finished outputs at this interval; a kill loses
# only what was decoded since then.
_KEEP_SECONDS = 30.0
# Decoding up to `_FEW_ITEMS` items takes less time than compiling ten programs.
# So a run over so few items times no calls and has fixed batches. It pads
# inputs and prompts to common widths of at most `_SHORT`.
_FEW_ITEMS, _SHORT = 256, (64, 65)


def decode(
  config: DecodeConfig,
  beside: Beside | None = None,
  console: Console | None = None,
) -> dict[str, Any]:
  """Decodes or scores lines or a task, writes the results, prints a report.

  The results are in `config.output_dir`. Those of lines are in
  `predictions.jsonl`, or with shards in `predictions.jsonl-SSSSS-of-NNNNN`;
  those of a task, or of each task of a mixture, are in
  `TASK-MODE.jsonl-SSSSS-of-NNNNN`, as in T5X. The other files of a task or a
  shard have that name with a further ending: `.summary.json` (with
  everything that decided the results), the files of `beside`, and the marker
  `.COMPLETED`, which is written last. A run that was killed is continued, and
  finished results are kept. The models are loaded once, unless the lengths of a
  mixture's tasks differ.

  Args:
    config: configuration of the run.
    beside: further files for the output folder, such as gin's operative
      configuration, as name -> function that returns the text. The functions
      are called after decoding.
    console: prints the report; by default on stdout, or on stderr if the
      outputs go to stdout. A progress bar is shown only on a terminal.

  Returns:
    The summary, see `report.summarise`, with 'metrics' for a task (and
    'unmeasured': why the default metric is missing, or None). For a mixture, a
    dict of kind 'mixture', whose 'tasks' has each task's summary by its name.

  Raises:
    ValueError: the input or the output folder is bad (raised before the engine
      is made), or the models do not fit into memory (raised before anything is
      compiled). It is raised after the results were written, and again when
      the run is restarted, because the input broke off, greedy outputs differ
      although `config.require_agreement` is set, or a metric failed. If
      no example could be decoded, the records are written without the marker.
    OSError: results could not be written; finished work is kept.
  """
  prints = config.stdout == 'outputs'
  encoding = getattr(sys.stdout, 'encoding', None) or 'utf-8'
  if prints and codecs.lookup(encoding).name != 'utf-8':
    advice = "Set PYTHONUTF8=1, or sys.stdout.reconfigure(encoding='utf-8')."
    raise unexpected('sys.stdout.encoding', "'utf-8'", encoding, advice)
  console = console or Console(stderr=prints)
  beside = beside or {}
  task, tokenizer = config.mixture_or_task_name, config.tokenizer
  if task is None:
    return _in_folder(config, beside, console)
  if tokenizer is None:
    raise unexpected('tokenizer', 'that of the models, for a task', None)
  sources = tasks.find(
    task, tokenizer, config.task_split, config.prefix, config.distinct
  )
  if len(sources) > 1:
    make_drafter = config.drafter and functools.cache(config.drafter)
    config = dataclasses.replace(config, drafter=make_drafter)
    # If the lengths are given, they are the same for all tasks, so that these
    # share an engine.
    if config.task_feature_lengths is not None:
      make, engines = config.engine, list[Engine]()

      def once(**options: Any) -> Engine:
        if not engines:
          engines.append(make(**options))
        return engines[0]

      config = dataclasses.replace(config, engine=once)
  summaries = {}
  for source in sources:
    if len(sources) > 1:
      say(console, f'Task {source.name}')
    of_task = dataclasses.replace(config, mixture_or_task_name=source)
    summaries[source.name] = _in_folder(of_task, beside, console)
  if len(sources) == 1:
    return summaries.popitem()[1]
  return {'kind': 'mixture', 'mixture': str(task), 'tasks': summaries}


def _in_folder(
  config: DecodeConfig, beside: Beside, console: Console
) -> dict[str, Any]:
  """Locks the output folder, by default a temporary one, and decodes."""
  process = jax.process_index()
  if jax.process_count() > 1 and not config.output_dir:
    raise unexpected('output_dir', 'a folder that all processes see', None)
  console.quiet = console.quiet or process > 0
  with contextlib.ExitStack() as stack:
    path = config.output_dir or stack.enter_context(TemporaryDirectory())
    folder = Folder(path, config.results_name, process)
    stack.enter_context(folder.claimed())
    if is_finished := folder.finished() and not config.overwrite:
      say(
        console,
        f'{folder.name} is finished; it is kept if the models are the same.'
        ' Overwrite it (--overwrite) to make it again.',
      )
    run = _Run(config, folder, console)
    return run.earlier() if is_finished else run.summary(beside)


class _Run:
  """A run whose output folder is locked."""

  def __init__(self, config: DecodeConfig, folder: Folder, console: Console):
    """Reads the examples and loads the models."""
    self.folder, self.console = folder, console
    self.input_state = files.state(config.input_file)
    self.data = data.read(config)
    self.metrics, self.unmeasured = _metrics(config, self.data)
    self.failed_metric: str | None = None
    # A bad calibration fails before any model is loaded.
    path = config.calibration
    measured = None if path is None else calibration.load(path)
    options = self.data.engine_options(config)
    with bar(console, 'Loading models, vocabulary and memory'):
      if config.drafter is not None and SPECULATIVE in config.modes:
        # The drafter is loaded first, because it may be missing.
        options['drafter'] = config.drafter()
      self.engine = config.engine(**options)
    self.items = self.data.prepare(config, self.engine)
    # If there were more rows than examples, the further rows would be padding.
    examples = max(1, len(self.items) // config.options.num_samples)
    rows = min(config.batch_size, examples)
    is_short = len(self.items) <= _FEW_ITEMS
    is_long = 1 < rows < examples and not is_short
    pools = is_long and config.may_pool and backend.kind() == 'cpu'
    batching = config.batching or ('continuous' if pools else 'fixed')
    config = dataclasses.replace(config, batch_size=rows, batching=batching)
    gammas = plan = None
    if SPECULATIVE in config.modes:
      plan = choose_gammas(measured, config, self.engine, console, is_short)
    if plan is not None:
      gammas = {str(size): drafting.gamma for size, drafting in plan.items()}
      if not any(gammas.values()):
        config = dataclasses.replace(config, mode='plain')
    self.config = config
    modes = config.modes
    self.decoders = {x: Decoder(self.engine, x, config, plan) for x in modes}
    settings = config.identity() | self.data.identity()
    settings |= engine_identity(self.engine) | {'gammas': gammas}
    self.settings = json.loads(json.dumps(settings, default=str))

  @property
  def _prints_outputs(self) -> bool:
    return self.config.stdout == 'outputs' and self.folder.process == 0

  def earlier(self) -> dict[str, Any]:
    """Prints the finished results of an earlier run; returns their summary."""
    folder, name = self.folder, self.config.files_prefix + SUMMARY
    summary: dict[str, Any] = folder.read_json(name)
    before = summary.get('settings')
    folder.check_same(before, self.settings, 'finished results')
    if self._prints_outputs:
      report.print_outputs(folder.read_json(folder.name, lines=True))
    if folder.process == 0:
      folder.clean()
    self._check_end(summary)
    return summary

  def summary(self, beside: Beside) -> dict[str, Any]:
    """Decodes, writes and prints the results; returns the summary."""
    config, folder = self.config, self.folder
    if (results := self._results()) is None:
      self._check_end({})
      return {'kind': 'share', 'process': folder.process}
    outputs = report.outputs_of(self.data, results, config.options.num_samples)
    pairs = zip(self.data.examples, outputs, strict=True)
    records = [report.record(*pair, config) for pair in pairs]
    is_greedy = config.options.sampling.greedy
    summary = report.summarise(results, is_greedy, self._context(outputs))
    for differing in summary.get('agreement', {}).get('disagreements', ()):
      number = (differing['line'] - 1) // config.options.num_samples
      differing['line'] = 1 + config.index(self.data.lines[number])
    failed = summary['finish_reasons'].keys() <= {'empty', 'error'}
    failed = failed and bool(summary['errors'])
    contents = {folder.name: ''.join(map(report.json_text, records))}
    name = config.files_prefix + SUMMARY
    contents[name] = report.json_text(summary, indent=2)
    for name, text in beside.items():
      contents[config.files_prefix + name] = text()
    folder.finish(contents, failed)
    if self._prints_outputs:
      report.print_outputs(records)
    elif not config.is_task:
      report.show_examples(self.console, self.data, outputs)
    report.show(self.console, summary, config.output_dir)
    if failed:
      first, place = summary['errors'][0].rstrip('.'), config.output_dir
      where = f' {place!r} has the records, but no marker.' if place else ''
      raise ValueError(
        f'No output could be decoded. The first: {first}.{where}'
      )
    self._check_end(summary)
    return summary

  def _results(self) -> report.Results | None:
    """Returns the batches of each mode; None if another process writes them."""
    folder, config = self.folder, self.config
    results: dict[str, list[Batch]] = {mode: [] for mode in self.decoders}

    def add(works: Sequence[Mapping[str, Any]]) -> None:
      for mode, part in itertools.chain.from_iterable(x.items() for x in works):
        results[mode].append(Batch.from_json(part))

    add(folder.begin(self.settings, config.overwrite))
    process, count = folder.process, jax.process_count()
    apart = count > 1 and not self.engine.across_hosts
    items = self.items
    if apart:
      # Each process has its own models, and decodes one of `count` examples.
      samples = config.options.num_samples
      items = [x for x in items if x.number // samples % count == process]
    pooled = config.slots is not None
    size = config.rows * (config.checkpoint_period if pooled else 1)
    done = {mode: report.completions_of(x) for mode, x in results.items()}
    # In the progress bar, each mode counts as an equal share of an item.
    share = 1 / len(done)
    parts = {x.number: sum(x.number in y for y in done.values()) for x in items}
    before = sum(parts.values()) * share
    with bar(self.console, 'Decoding', len(items), before) as advance:
      if left := [x for x in items if parts[x.number] < len(done)]:
        # On one host, the programs of all modes are compiled in parallel.
        threads = len(self.decoders) if count == 1 else 1
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
          prepare = functools.partial(Decoder.prepare, items=items, left=left)
          list(pool.map(prepare, self.decoders.values()))
      for begin in range(0, len(items), size):
        batch = items[begin : begin + size]
        for mode, decoder in self.decoders.items():
          left = [item for item in batch if item.number not in done[mode]]
          for part in decoder.batches(left, lambda: advance(share)):
            results[mode].append(part)
            if apart or process == 0:
              folder.append({mode: dataclasses.asdict(part)})
    if process:
      folder.wait(folder.finished)
      return None

    def all_came() -> bool:
      add(folder.new_work())
      outputs = map(report.completions_of, results.values())
      return min(map(len, outputs)) == len(self.items)

    if apart:
      folder.wait(all_came)
    return results

  def _context(self, outputs: Sequence[Outputs]) -> dict[str, Any]:
    """Returns the entries of the summary other than times and counts."""
    config, models = self.config, self.engine.models
    last = [x for modes in outputs for x in list(modes.values())[-1]]
    reasons = collections.Counter(output.finish_reason for output in last)
    scores = [float(sum(x.log_probs)) for x in last if not x.error]
    is_scored = config.task_mode == 'score' and scores
    return {
      'input_file': None if config.is_task else config.input_file,
      'task': config.task_name if config.is_task else None,
      'examples': len(self.data.examples),
      'metrics': self._measured(outputs),
      'unmeasured': self.unmeasured or self.failed_metric,
      'mean_score': float(np.mean(scores)) if is_scored else None,
      'finish_reasons': dict(sorted(reasons.items())),
      'errors': report.errors_of(self.data, outputs, config),
      'reading': self.data.reading,
      'batch_size': config.batch_size,
      'sampling': dataclasses.asdict(config.options.sampling),
      'num_beams': config.options.num_beams,
      'lenience': config.options.lenience,
      **{name: self.settings[name] for name in _OF_SETTINGS},
      'kernel_layout': self.engine.kernel_layout,
      'models': {name: model.name for name, model in models.items()},
      'dtypes': {name: model.dtype for name, model in models.items()},
      'input_broken_off': self.data.broken_off,
      'settings': self.settings,
    }

  def _measured(self, outputs: Sequence[Outputs]) -> dict[str, Any]:
    """Computes the metrics of each mode, over the examples with a target.

    Only the first sample of an example counts, or the best beam, which is the
    last. An error in a metric is stored and raised later, because the results
    must be written first.
    """
    if not (references := self.data.references):
      return {}
    counted = -1 if self.config.searches else 0
    measured: dict[str, dict[str, Any]] = {mode: {} for mode in self.decoders}
    for mode, metric in itertools.product(measured, self.metrics):
      texts = [outputs[number][mode][counted].text for number in references]
      try:
        measured[mode] |= metric(list(references.values()), texts)
      except Exception as error:  # a task's own code may raise anything
        self.failed_metric = (
          f'A metric of the task failed: {type(error).__name__}: {error}'
        )
    return measured

  def _check_end(self, summary: Mapping[str, Any]) -> None:
    """Raises ValueError if something went wrong in a run with results.

    The input broke off or was changed, a metric failed, or greedy outputs
    differ although they must agree.
    """
    config = self.config
    where = f'in {config.output_dir!r}' if config.output_dir else 'decoded'
    if broken_off := self.data.broken_off:
      raise ValueError(f'{broken_off} Everything before that is {where}.')
    path = config.input_file
    if not config.is_task and files.state(path) != self.input_state:
      raise ValueError(
        f'{path!r} was changed while it was decoded; all that it was before is'
        f' {where}.'
      )
    if self.failed_metric is not None:
      raise ValueError(f'{self.failed_metric}. Everything is {where}.')
    differing = summary.get('agreement', {}).get('disagreements')
    required = config.require_agreement and config.options.lenience == 1
    if required and differing:
      raise ValueError(
        f'{len(differing)} greedy outputs differ between plain and speculative'
        f' decoding, first at line {differing[0]["line"]}.'
      )


def choose_gammas(
  measured: calibration.Calibration | None,
  config: DecodeConfig,
  engine: Engine,
  console: Console,
  is_short: bool = False,
) -> Mapping[int, Drafting] | None:
  """Sets the engine's gamma to the best one of a calibration, if there is one.

  If the engine's gamma is 'adaptive', it becomes the calibration's rule.

  Args:
    measured: the run's calibration. If it is None and no gamma was given, the
      choice is made by the times of calls on this host, provided that `config`
      has a record of acceptance rates.
    config: configuration of the run.
    engine: the engine; its `gamma` is set if speculation pays.
    console: prints lines about the choice.
    is_short: whether decoding takes less time than timing calls would; then
      only times that an earlier run measured are used.

  Returns:
    Number of rows -> how drafts are made for so many rows. It has the number of
    rows that are decoded together; with continuous batching also smaller
    numbers, because fewer rows are left at the end of a run. None: the engine's
    own settings hold.

  Raises:
    ValueError: there is no drafter, or it rests in a beam search.
    calibration.CalibrationError: the calibration is of other models or of
      another device.
  """
  _ = engine.drafter  # this raises an error if there is no drafter
  temperature: Any = config.options.temperature  # the same for all texts
  rows, is_greedy = config.rows, config.options.sampling.greedy
  if engine.fallback and config.searches:
    expected = 'False in a beam search, where no drafter rests'
    raise unexpected('fallback', expected, engine.fallback)
  opens = engine.config.gamma is None and not config.searches
  if measured is None and opens and config.acceptance is not None:
    with bar(console, 'Timing calls on this host'):
      when: calibrate.When = 'never' if is_short else 'unknown'
      measured = calibrate.for_host(
        engine, config.acceptance, rows, temperature, console, when
      )
    if measured is not None:
      say(console, calibrate.host_verdict(measured))
  if measured is None:
    if not opens or not is_greedy or engine.speculation_pays(rows):
      return None
    say(
      console,
      'By the costs of calls on this processor, speculation does not pay with'
      f' a batch size of {rows}: decoding plainly. `--gamma 4` speculates.',
    )
    return {rows: Drafting()}
  measured.check(engine.fingerprints)
  most_rows = measured.choices[-1].rows
  if measured.temperature != temperature or rows > most_rows:
    say(
      console,
      f'The calibration was made at temperature {measured.temperature:g}, for'
      f' up to {most_rows} rows at once: its gamma may not be the best here.',
    )
  plan = measured.plan(rows, engine.drafting)
  if config.slots is None or not is_greedy:
    plan = {rows: plan[rows]}
  if longest := max(drafting.gamma for drafting in plan.values()):
    if not engine.drafting.adapts:
      engine.gamma = longest
    measured.direct(engine, rows)
  for size in sorted(plan, reverse=True):
    verdict = 'speculation does not pay here, decoding plainly'
    if gamma := plan[size].gamma:
      speed_up = measured.at(size).expected_speed_up
      verdict = f'gamma = {gamma}, expected speed-up {speed_up:.2f}'
    number = '1 row' if size == 1 else f'{size} rows'
    say(console, f'By the calibration, for {number}: {verdict}.')
  return plan


class Decoder:
  """Decodes items plainly or speculatively, or scores them."""

  def __init__(
    self,
    engine: Engine,
    mode: str,
    config: DecodeConfig,
    plan: Mapping[int, Drafting] | None = None,
  ):
    """Stores the arguments; `warmup` compiles the programs.

    Args:
      engine: the engine that decodes or scores.
      mode: 'plain', 'speculative' or 'scoring'.
      config: configuration of the run.
      plan: number of rows -> how drafts are made, from `choose_gammas`.
    """
    self._engine, self._mode, self._config = engine, mode, config
    self._pool = config.slots and dataclasses.replace(config.slots, gammas=plan)
    # The shapes for which scoring has been compiled.
    self._scored: set[tuple[int, ...]] = set()
    self._widths = 1, 1
    self._compile_seconds = 0.0

  def prepare(self, items: Sequence[Item], left: Sequence[Item]) -> None:
    """Compiles the program of the first batch, if batches are fixed.

    If there are few items, short inputs are padded to one width, because
    compiling another program for each width would take longer.

    Args:
      items: all items of the run, so that a continued run has the same width.
      left: the items that are not decoded yet.
    """
    if self._pool or self._mode == SCORING:
      return
    if len(items) <= _FEW_ITEMS:
      inputs, prompts = map(min, widest_of(self._request(items).rows), _SHORT)
      self._widths = inputs, prompts
    self._compile_seconds = self.warmup(self._padded(left))

  def _padded(self, items: Sequence[Item]) -> Sequence[Item]:
    """Returns the first batch; if it is too short, its last item is repeated.

    A shorter batch would need another program.
    """
    rows = self._config.rows
    return [*items[:rows], *[items[-1]] * (rows - len(items))]

  def warmup(self, items: Sequence[Item]) -> float:
    """Compiles what `run` needs; returns the seconds, 0.0 if all exists."""
    if self._mode != SCORING:
      scheduler = self._engine.scheduler(self._pool or len(items))
      return scheduler.warmup(self._request(items))
    pairs = _sources(items), [item.example.target for item in items]
    shape = scoring.shapes(self._engine.target, *pairs)
    if shape in self._scored:
      return 0.0
    self._scored.add(shape)
    begin = time.perf_counter()
    self._engine.score(*pairs)
    return time.perf_counter() - begin

  def run(self, items: Sequence[Item]) -> Iterator[tuple[int, Completion]]:
    """Yields the index and the output of each item as it is finished."""
    if self._mode == SCORING:
      targets = [item.example.target for item in items]
      scores = self._engine.score(_sources(items), targets)
      yield from enumerate(map(_scored, targets, scores))
      return
    request = self._request(items)
    ready = sorted(request.passed_over.items())
    running = self._engine.scheduler(self._pool or len(items)).run(request)
    for number, outputs in itertools.chain(ready, running):
      yield from enumerate(outputs, number * len(outputs))

  def batches(
    self, items: Sequence[Item], advance: Callable[[], None] = lambda: None
  ) -> Iterator[Batch]:
    """Decodes or scores items together; yields their outputs.

    Continuous batching yields the finished outputs every half minute.

    Args:
      items: the items to decode or score.
      advance: called when an item is finished.
    """
    if not items:
      return
    rows = 0 if self._pool else self._config.rows
    padded = self._padded(items) if rows else items
    part = Batch(compile_seconds=self.warmup(padded) + self._compile_seconds)
    self._compile_seconds = 0.0
    if part.compile_seconds > 0 and rows:
      # A run without timing, because it also compiles the code around the
      # program.
      for _ in self.run(padded):
        pass
    part.first_output_seconds = seconds_since_start()
    begin, last = time.perf_counter(), len(padded) - 1
    for count, (index, output) in enumerate(self.run(padded)):
      if index < len(items):
        part.completions[items[index].number] = output
        advance()
      seconds = time.perf_counter() - begin
      is_due = not rows and seconds >= _KEEP_SECONDS
      if part.completions and (count == last or is_due):
        part.seconds = seconds
        yield part
        part, begin = Batch(), begin + seconds

  def _request(self, items: Sequence[Item]) -> TextRequest:
    """Makes a request that decodes the items."""
    options = self._config.options
    # One beam search finds all outputs of a source.
    outputs = options.num_samples if self._config.searches else 1
    items = items[::outputs]
    prompts: list[Any] = [item.example.prompt for item in items]
    reports = options.on_too_long == 'error'
    options = dataclasses.replace(
      options,
      num_samples=outputs,
      split=None,  # each item is a sentence already
      split_lang=None,
      split_prefix='',
      example_ids=[item.example_id for item in items],
      prompts=None if None in prompts else prompts,
      on_too_long='report' if reports else options.on_too_long,
    )
    request = self._engine.text_request(
      _sources(items), self._mode == SPECULATIVE, options=options
    )
    request.widen(self._widths)
    return request


def _sources(items: Sequence[Item]) -> list[Any]:
  return [item.example.source for item in items]


def _scored(target: Sequence[int], score: scoring.Score) -> Completion:
  """Returns a completion that has a target's tokens and their score."""
  if math.isnan(score.total):
    return completion.passed_over('error', completion.no_distribution())
  stats = completion.CompletionStats(len(target), num_target_calls=1)
  return Completion('', [*target], list(score.log_probs), 'scored', stats)


def engine_identity(engine: Engine) -> dict[str, Any]:
  """Returns an engine's properties that decide its outputs, as JSON values."""
  leaves = jax.tree.leaves(engine.params.target)
  vocab, rule = engine.tokenizer, engine.drafting.draft_rule
  return {
    'models': dict(engine.fingerprints),
    'dtype': sorted({str(leaf.dtype) for leaf in leaves}),
    'vocabulary': vocab.fingerprint,
    'special_tokens': [vocab.split_special_tokens, vocab.skip_special_tokens],
    'gamma': engine.gamma,
    'max_input_len': engine.config.max_input_len,
    'max_decode_len': engine.config.max_decode_len,
    'bos_id': engine.codec.bos_id,
    'rule': None if rule is None else rule.to_json(),
    'fallback': resting.to_json(engine.fallback),
    'languages': [engine.codec.source_lang, engine.codec.target_lang],
  }


def _metrics(
  config: DecodeConfig, examples: data.DataSet
) -> tuple[list[metrics.Metric], str | None]:
  """Returns a task's metrics, and why the default one is missing, or None.

  Raises:
    ValueError: a metric in `config` is unknown, or its package is missing.
  """
  names = config.metrics
  if not config.is_task or config.task_mode == 'score' or names is None:
    return [], None
  if names == 'task':
    if isinstance(config.task, tasks.SeqioTask):
      return config.task.metric_functions(), None
    if not (names := config.task.metrics):
      if not examples.references:
        return [], None
      try:
        metrics.bleu(['a'], ['a'])
      except ValueError as error:  # the package of the metric is missing
        return [], str(error)
      names = ('bleu',)
  for name in names:
    check_choice('metrics', name, metrics.METRICS)
    metrics.METRICS[name](['a'], ['a'])
  return [metrics.METRICS[name] for name in names], None
