"""A run over a task or a file of examples, as T5X users know it."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import rich.console

from specdec_jax.checks import memory
from specdec_jax.engine.engine import Engine
from specdec_jax.infer import (
  batches,
  calibrated,
  examples,
  failures,
  processes,
  report,
  results,
  resume,
  shares,
  task_summary,
)
from specdec_jax.infer.settings import (
  PREDICT,
  SCORE,
  WAYS,
  TaskConfig,
  by_rows,
)
from specdec_jax.measure import progress
from specdec_jax.measure.table import say

# Fields that decide no result, or by what they make: see `_identity`.
_NOT_DECIDING = (
  'engine',
  'tokenizer',
  'draft',
  'output_dir',
  'overwrite',
  'metrics',
  'calibration',
)
_ITEM_BYTES = 256  # of a sample at least, until it is written
_KEY_BITS = 32  # of the number that an example's random numbers derive from


def decode_one(
  config: TaskConfig,
  beside: Mapping[str, Callable[[], str]] | None = None,
  console: rich.console.Console | None = None,
) -> dict[str, Any]:
  """Decodes or scores one task and writes the results; goes on where it was.

  The results are `<task>-<mode>.jsonl-SSSSS-of-NNNNN` in `config.output_dir`,
  and under the same name with an ending more: `.summary.json`, `.config.json`
  (what decided them), those of `beside`, and the marker `.COMPLETED`, which
  comes last.

  Args:
    config: the run.
    beside: more files for the output folder: name -> function of its text,
      called when the engine exists.
    console: where the report goes; stdout by default.

  Returns:
    The summary: `report.summarise`'s, of kind 'task', with 'metrics'
    (and as 'unmeasured' why the usual one is not among them, or None).

  Raises:
    ValueError: a bad task, file, shard or output folder, or models that do not
      fit, before anything is compiled. When all is written: a file that broke
      off (see `files.BrokenOff`), also if the run is started again; or a metric
      of the task's own that failed. As AllFailedError: of no example anything
      came; it is left without a marker.
    OSError: results could not be written; what is done is kept.
  """
  console = console or rich.console.Console()
  source = examples.find(
    config.mixture_or_task_name, config.split, config.tokenizer
  )
  config = dataclasses.replace(config, mixture_or_task_name=source)
  folder = resume.Folder(config.output_dir, results_name(config))
  who = processes.current()
  own = folder if who.index == 0 else shares.folder_of(folder, who)
  if who.index:
    console.quiet = True  # the first process speaks for all
  # Finished results that are kept are looked at again once it is known whether
  # they are of this very configuration.
  with own.claimed(overwrite=True):
    gone = None
    if folder.finished and not config.overwrite:
      gone = folder.missing()
    # All have looked before the first process changes anything.
    shares.meet(f'{folder.name} seen', who)
    if who.index == 0 and config.overwrite:
      folder.reopen()
    shares.meet(folder.name, who)
    return _decode(config, folder, gone, beside or {}, console, who)


def _decode(
  config: TaskConfig,
  folder: resume.Folder,
  gone: Sequence[str] | None,
  beside: Mapping[str, Callable[[], str]],
  console: rich.console.Console,
  who: processes.Processes,
) -> dict[str, Any]:
  """`decode_one` of a task that was found, in a folder of its own.

  `gone` is None, or which results are of those that the folder finished.
  """
  found, broken_off = _examples(config)
  functions, unmeasured = task_summary.measures(config, found)
  measured = calibrated.load(config)
  with progress.status(console, 'Loading models'):
    engine = _engine(config, found)
  gammas = None
  if _speculates(config):
    gammas = calibrated.choose_gammas(measured, config, engine, console)
    if not calibrated.pays(gammas):
      config = dataclasses.replace(config, decoding=report.PLAIN)
  ways = _ways(config, engine, gammas)
  decides = _identity(config, engine, found, gammas)
  if gone is not None:
    folder.check_finished(decides)
    if not gone:
      summary = _kept(folder, console, who)
      results.check_whole(broken_off, config.output_dir)
      return summary
    if who.index == 0:
      folder.make_again(decides)
    shares.meet(f'{folder.name} again', who)

  def run(items, folder, done):
    rows = config.batch_size * config.num_decodes
    period = config.checkpoint_period
    return batches.run_all(
      items, ways, rows, period, folder=folder, done=done, console=console
    )

  items = _items(config, found)
  begin = functools.partial(
    resume.Folder.begin, config=decides, overwrite=config.overwrite
  )
  if engine.across_hosts and not who.alone:
    modes = shares.in_lockstep(folder, begin, items, run, who)
  else:
    every = config.num_decodes
    modes = shares.each_its_own(folder, begin, items, every, run, who)
  if modes is None:
    results.check_whole(broken_off, config.output_dir)
    return {'kind': 'share', 'process': [who.index, who.count]}
  scored, metric_failed = task_summary.measured(functions, found, modes, config)
  records = results.task_records(found, modes, config)
  summary = report.summarise(
    modes,
    config.sampling.greedy,
    {
      **task_summary.context(config, engine, records, scored, gammas),
      'input_broken_off': broken_off,
      'unmeasured': unmeasured or metric_failed,
    },
  )
  failed = failures.first_error(modes)
  contents = _contents(folder, records, summary, beside)
  folder.leave(contents) if failed else folder.finish(contents)
  report.print_results(console, summary, config.output_dir)
  if unmeasured:
    say(console, unmeasured)
  if failed:
    params, count = engine.params, len(records)
    raise failures.explained(failed, count, params, config.output_dir)
  results.check_whole(broken_off, config.output_dir)
  if metric_failed is not None:
    where = f'The results are in {config.output_dir!r}.'
    raise ValueError(f'{metric_failed}. {where}')
  return summary


def _kept(
  folder: resume.Folder,
  console: rich.console.Console,
  who: processes.Processes,
) -> dict[str, Any]:
  """The summary of finished results."""
  if who.index == 0:
    folder.clean()
  console.print(
    f'{folder.name} is finished; it is kept. Set overwrite to True to make it'
    ' anew.'
  )
  return folder.read_json(f'{folder.name}.summary.json')


def _contents(
  folder: resume.Folder,
  records: Sequence[Mapping[str, Any]],
  summary: Mapping[str, Any],
  beside: Mapping[str, Callable[[], str]],
) -> dict[str, str]:
  named = {'summary.json': results.indented(summary)}
  named |= {name: text() for name, text in beside.items()}
  return {folder.name: results.json_lines(records)} | {
    f'{folder.name}.{name}': text for name, text in named.items()
  }


def results_name(config: TaskConfig) -> str:
  """The file of results, named as T5X names it; its task was found."""
  shard = f'{config.shard_id:05}-of-{config.num_shards:05}'
  return f'{_name(config)}-{config.mode}.jsonl-{shard}'


def _name(config: TaskConfig) -> str:
  return examples.name_of(config.mixture_or_task_name)


def example_id(index: int, sample: int) -> int:
  """What the random numbers of one sample of one example derive from.

  The bits of `sample` are counted from above, those of `index` from below: all
  pairs that fit differ, and the first sample is the same however many there
  are.

  Raises:
    ValueError: the two do not fit into 32 bits.
  """
  if index.bit_length() + sample.bit_length() > _KEY_BITS:
    raise ValueError(
      f'Sample {sample} of example {index}: the two numbers have more than'
      f' {_KEY_BITS} bits. Ask for fewer samples (num_decodes) or give other'
      ' samples another seed.'
    )
  return index | int(f'{sample:0{_KEY_BITS}b}'[::-1], 2)


def _examples(config: TaskConfig) -> tuple[list[examples.Example], str | None]:
  """`examples.load`, where what lacks a feature that is needed is broken."""
  found, broken_off = examples.load(
    config.mixture_or_task_name,
    config.split,
    config.task_feature_lengths,
    config.tokenizer,
    config.shard_id,
    config.num_shards,
  )
  needed = [examples.INPUTS]
  if config.mode == SCORE or config.prompt_from_targets:
    needed.append(examples.TARGETS)
  if config.prompt_feature is not None:
    needed.append(config.prompt_feature)
  checked = []
  for number, example in enumerate(found):
    for feature in needed:
      ids = example.get(feature, '')
      lacks = config.mode == SCORE and feature == examples.TARGETS
      broken = not _is_ids(ids) or (lacks and not len(ids))
      if broken and examples.BROKEN not in example:
        error = (
          f'{_name(config)!r}: example {config.index(number)} has no tokens'
          f' {feature!r}, which this run needs; it has {sorted(example)}.'
        )
        example = {**example, examples.BROKEN: error}
    checked.append(example)
  examples.check_some(checked)
  return checked, broken_off


def _is_ids(value: Any) -> bool:
  array = np.asarray(value)
  return array.ndim == 1 and (
    not array.size or np.issubdtype(array.dtype, np.integer)
  )


def _ids(example: examples.Example, feature: str) -> list[int]:
  return [int(token) for token in example.get(feature, ())]


def _engine(config: TaskConfig, found: Sequence[examples.Example]) -> Engine:
  """Makes the engine for the task's lengths and checks it against the task."""
  lengths = config.task_feature_lengths
  if lengths is None:
    lengths = {
      feature: max((len(one.get(feature, ())) for one in found), default=2)
      for feature in (examples.INPUTS, examples.TARGETS)
    }
    if found and not lengths[examples.TARGETS] and config.mode != SCORE:
      raise ValueError(
        f'{_name(config)!r} has no targets, so nothing says how'
        ' long an output may be: set task_feature_lengths (gin:'
        " TASK_FEATURE_LENGTHS = {'inputs': 512, 'targets': 128})."
      )
  options: dict[str, Any] = {
    'max_input_len': max(2, lengths[examples.INPUTS]),
    'max_decode_len': max(1, lengths[examples.TARGETS]),
  }
  if config.draft is not None and _speculates(config):
    options['draft'] = config.draft()
  engine = config.engine(**options)
  if engine.tokenizer.fingerprint != config.tokenizer.fingerprint:
    raise ValueError(
      f"The run's tokenizer {config.tokenizer.path!r} is not the engine's,"
      f' {engine.tokenizer.path!r} (their fingerprints do).'
    )
  size = engine.target.vocab_size
  for number, example in enumerate(found):
    for feature in (examples.INPUTS, examples.TARGETS):
      highest = max(_ids(example, feature), default=0)
      if highest >= size:
        raise ValueError(
          f'{_name(config)!r}: {feature!r} of example'
          f' {config.index(number)} holds the id {highest}, the target has'
          f' {size}: the task was made for another vocabulary.'
        )
  return engine


def _speculates(config: TaskConfig) -> bool:
  return config.mode != SCORE and report.SPECULATIVE in WAYS[config.decoding]


def _ways(
  config: TaskConfig, engine: Engine, gammas: Mapping[int, int] | None
) -> dict[str, batches.Way]:
  if config.mode == SCORE:
    return {report.SCORING: batches.Scoring(engine)}
  if _speculates(config):
    _ = engine.drafter  # raises, saying so, if there is none
  return calibrated.decodings(
    WAYS[config.decoding], config, engine, gammas, config.mode != PREDICT
  )


def _items(
  config: TaskConfig, found: Sequence[examples.Example]
) -> list[batches.Item]:
  items: list[batches.Item] = []
  if found:  # the largest number first: there may be very many
    example_id(config.index(len(found) - 1), config.num_decodes - 1)
  memory.check_room(
    f'{len(found)} examples with {config.num_decodes} samples each',
    len(found) * config.num_decodes * _ITEM_BYTES,
    memory.host_bytes(),
    'Ask for fewer samples (num_decodes), or decode shard by shard'
    ' (num_shards).',
  )
  for number, example in enumerate(found):
    if examples.BROKEN in example:
      continue
    prompt = None
    if config.prompt_from_targets:
      prompt = _ids(example, examples.TARGETS)
    elif config.prompt_feature is not None:
      prompt = _ids(example, config.prompt_feature)
    if prompt is not None:
      # An output that began with its end would be over.
      if prompt[-1:] == [config.tokenizer.eos_id]:
        del prompt[-1]
      prompt = prompt[: config.prompt_from_targets or None]
    items += [
      batches.Item(
        number=number * config.num_decodes + sample,
        source=_ids(example, examples.INPUTS),
        example_id=example_id(config.index(number), sample),
        prompt=prompt,
        target=_ids(example, examples.TARGETS),
      )
      for sample in range(config.num_decodes)
    ]
  return items


def _identity(
  config: TaskConfig,
  engine: Engine,
  found: Sequence[examples.Example],
  gammas: Mapping[int, int] | None,
) -> dict[str, Any]:
  """Everything that decides the results, as JSON has it."""
  digest = hashlib.sha256()
  for example in found:
    for feature, value in sorted(example.items()):
      shown = value.tolist() if isinstance(value, np.ndarray) else value
      digest.update(repr((feature, shown)).encode())
  kept = {
    field.name: getattr(config, field.name)
    for field in dataclasses.fields(config)
    if field.name not in _NOT_DECIDING
  }
  kept['mixture_or_task_name'] = _name(config)
  kept['sampling'] = dataclasses.asdict(config.sampling)
  if kept['task_feature_lengths'] is not None:
    kept['task_feature_lengths'] = dict(kept['task_feature_lengths'])
  return {
    **kept,
    **batches.engine_identity(engine),
    'gammas': by_rows(gammas),
    'examples': len(found),
    'examples_sha256': digest.hexdigest(),
  }
