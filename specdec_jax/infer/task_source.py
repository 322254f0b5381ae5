"""A task, or a file of examples, as the examples of a run; see `run`."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import rich.console

from specdec_jax.checks import memory
from specdec_jax.decoding.state import BLOCK
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.options import example_id
from specdec_jax.infer import (
  batches,
  examples,
  report,
  results,
  task_summary,
)
from specdec_jax.infer.settings import SCORE, TaskConfig, as_blocks, by_rows
from specdec_jax.measure.table import say
from specdec_jax.text import tasks

# Fields that do not decide results, or only by the objects that they make,
# which `Task.identity` describes.
_NOT_DECIDING = (
  'engine',
  'tokenizer',
  'drafter',
  'output_dir',
  'overwrite',
  'metrics',
  'calibration',
  'checkpoint_period',
  'stdout',
)
_ITEM_BYTES = 256  # the least memory of a sample, until it is written


class Task:
  """The examples of a task that was found, or of a file.

  Attributes:
    config: the run; `run` sets its decoding to plain if drafting does not pay.
    broken_off: why a file could not be read to its end, or None.
    prefix: prefix of the names of all files except the results' file.
  """

  def __init__(self, config: TaskConfig):
    """Reads the examples.

    Raises:
      ValueError: they cannot be read, all of them are broken, or a metric that
        was named is unknown.
    """
    self.config = config
    self.prefix = f'{results_name(config)}.'
    self._found, self.broken_off = _examples(config)
    self._functions, self._unmeasured = task_summary.measures(
      config, self._found
    )
    self._metric_failed: str | None = None

  @property
  def broken(self) -> list[str]:
    """The errors of examples that cannot be decoded."""
    found = [one.get(examples.BROKEN) for one in self._found]
    return [error for error in found if error]

  def engine(self) -> Engine:
    """Makes the engine for the task's lengths and checks it against the task.

    Raises:
      ValueError: it is unknown how long an output may be, or the engine has
        another vocabulary.
    """
    config = self.config
    lengths = config.task_feature_lengths
    if lengths is None:
      lengths = {
        feature: max(
          (len(one.get(feature, ())) for one in self._found), default=2
        )
        for feature in (examples.INPUTS, examples.TARGETS)
      }
      if self._found and not lengths[examples.TARGETS] and config.mode != SCORE:
        raise ValueError(
          f'{_name(config)!r} has no targets, so nothing says how'
          ' long an output may be: set task_feature_lengths (gin:'
          " TASK_FEATURE_LENGTHS = {'inputs': 512, 'targets': 128})."
        )
    # The token of a language stands before what the task says.
    more = 1 if getattr(config.tokenizer, 'languages', {}) else 0
    options: dict[str, Any] = {
      'max_input_len': max(2, lengths[examples.INPUTS] + more),
      'max_decode_len': max(1, lengths[examples.TARGETS]),
    }
    task = tasks.find_local(config.mixture_or_task_name)
    for name in ('source_lang', 'target_lang'):
      if getattr(task, name, None) is not None:
        options[name] = getattr(task, name)
    if config.drafter is not None and report.SPECULATIVE in config.ways:
      options['drafter'] = config.drafter()
    engine = config.engine(**options)
    if engine.tokenizer.fingerprint != config.tokenizer.fingerprint:
      raise ValueError(
        f"The run's tokenizer {config.tokenizer.path!r} is not the engine's,"
        f' {engine.tokenizer.path!r} (their fingerprints do).'
      )
    size = engine.target.vocab_size
    for number, example in enumerate(self._found):
      for feature in (examples.INPUTS, examples.TARGETS):
        highest = max(_ids(example, feature), default=0)
        if highest >= size:
          raise ValueError(
            f'{_name(config)!r}: {feature!r} of example'
            f' {config.index(number)} holds the id {highest}, the target has'
            f' {size}: the task was made for another vocabulary.'
          )
    return engine

  def items(self) -> list[batches.Item]:
    """An item for each sample of each example that is not broken."""
    config, count = self.config, len(self._found)
    items: list[batches.Item] = []
    if count:  # the largest number first: there may be very many
      example_id(config.index(count - 1), config.num_outputs - 1)
    memory.check_room(
      f'{count} examples with {config.num_outputs} outputs each',
      count * config.num_outputs * _ITEM_BYTES,
      memory.free_bytes,
      'Ask for fewer samples (num_decodes), or decode shard by shard'
      ' (num_shards).',
    )
    for number, example in enumerate(self._found):
      if examples.BROKEN in example:
        continue
      prompt = None
      if config.prompt_from_targets:
        prompt = _ids(example, examples.TARGETS)
      elif config.prompt_feature is not None:
        prompt = _ids(example, config.prompt_feature)
      if prompt is not None:
        # Without its end: an output that begins with it would be over.
        if prompt[-1:] == [config.tokenizer.eos_id]:
          del prompt[-1]
        prompt = prompt[: config.prompt_from_targets or None]
      items += [
        batches.Item(
          number=number * config.num_outputs + sample,
          source=_ids(example, examples.INPUTS),
          example_id=example_id(config.index(number), sample),
          prompt=prompt,
          target=_ids(example, examples.TARGETS),
        )
        for sample in range(config.num_outputs)
      ]
    return items

  def identity(
    self, engine: Engine, gammas: Mapping[int, int] | None
  ) -> dict[str, Any]:
    """Everything that decides the results, as JSON values."""
    config = self.config
    digest = hashlib.sha256()
    for example in self._found:
      for feature, value in sorted(example.items()):
        shown = value.tolist() if isinstance(value, np.ndarray) else value
        digest.update(repr((feature, shown)).encode())
    kept = {
      field.name: getattr(config, field.name)
      for field in dataclasses.fields(config)
      if field.name not in _NOT_DECIDING
    }
    kept['beams'] = config.beams.identity
    kept['verification'] = BLOCK if as_blocks(config, engine) else None
    kept['mixture_or_task_name'] = _name(config)
    kept['sampling'] = dataclasses.asdict(config.sampling)
    if kept['task_feature_lengths'] is not None:
      kept['task_feature_lengths'] = dict(kept['task_feature_lengths'])
    return {
      **kept,
      **batches.engine_identity(engine),
      'gammas': by_rows(gammas),
      'examples': len(self._found),
      'examples_sha256': digest.hexdigest(),
    }

  def records(self, modes: Mapping[str, report.Mode]) -> list[dict[str, Any]]:
    """One record per example; see `results`."""
    return results.task_records(self._found, modes, self.config)

  def context(
    self,
    records: Sequence[Mapping[str, Any]],
    modes: Mapping[str, report.Mode],
  ) -> dict[str, Any]:
    """The summary's entries about the examples: metrics, counts, errors."""
    measured, self._metric_failed = task_summary.measured(
      self._functions, self._found, modes, self.config
    )
    return {
      **task_summary.context(self.config, records, measured),
      'unmeasured': self._unmeasured or self._metric_failed,
    }

  def show(
    self, console: rich.console.Console, modes: Mapping[str, report.Mode]
  ) -> None:
    """Says why there is no metric, if one is expected."""
    if self._unmeasured:
      say(console, self._unmeasured)

  def complaint(self, summary: Mapping[str, Any]) -> str | None:
    """Why the run fails after its results are written, or None."""
    if self._metric_failed is None:
      return None
    return (
      f'{self._metric_failed}. The results are in {self.config.output_dir!r}.'
    )


def results_name(config: TaskConfig) -> str:
  """The name of the file of results, as in T5X; `find` has made the task."""
  shard = f'{config.shard_id:05}-of-{config.num_shards:05}'
  return f'{_name(config)}-{config.mode}.jsonl-{shard}'


def _name(config: TaskConfig) -> str:
  return examples.name_of(config.mixture_or_task_name)


def _examples(config: TaskConfig) -> tuple[list[examples.Example], str | None]:
  """`examples.load`; examples that lack a needed feature count as broken."""
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
        those = [k for k, v in sorted(example.items()) if _is_ids(v) and len(v)]
        error = (
          f'{_name(config)!r}: example {config.index(number)} has no tokens'
          f' {feature!r}, which this run needs; it has those of {those}.'
          + ' A line is inputs<TAB>targets (.tsv), or has both (.jsonl).'
          * lacks
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
