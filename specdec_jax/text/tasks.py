"""Tasks: named sources of examples, from seqio or from local files.

T5's translation, its summarisation and lm1b are known by the names that T5's
own code gives them, and read data that TensorFlow Datasets (TFDS) has prepared.
If a module registers a seqio task of the same name, that task is used instead.

Code that needs seqio is in `seqio_tasks.py`. Local tasks (`local_tasks.py`) do
not need it.
"""

import functools
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from specdec_jax.checks.names import nearest
from specdec_jax.text import metrics as metrics_lib
from specdec_jax.text import seqio_tasks, t5_tasks
from specdec_jax.text.local_tasks import (
  FEATURES,
  LocalTask,
  check_feature_lengths,
)
from specdec_jax.text.vocabulary import open_vocabulary

EVAL_SPLIT = 'validation'
TRAIN_SPLIT = 'train'

_local: dict[str, LocalTask] = {}


def register(task: LocalTask) -> None:
  """Makes a local task known by its name.

  Raises:
    ValueError: another local task or a task of T5 has that name.
  """
  if task.name in t5_tasks.TASKS or _local.get(task.name, task) != task:
    raise ValueError(f'There already is another task {task.name!r}.')
  _local[task.name] = task


def examples(
  name: str | LocalTask,
  split: str,
  task_feature_lengths: Mapping[str, int] | None = None,
  vocab_path: str | os.PathLike[str] | None = None,
  keep_broken: bool = False,
) -> Iterator[dict[str, Any]]:
  """The examples of a task or mixture, in its order, once.

  Args:
    name: name of a seqio task or mixture, of a task of T5 or of a local task;
      or a local task itself. A mixture's examples are those of its first task,
      then those of its second, and so on.
    split: such as 'test'.
    task_feature_lengths: feature -> most ids, the end-of-sequence id included;
      longer examples are cut. None, and features that are not named, cut
      nothing.
    vocab_path: sentencepiece model, only for the tasks of T5: other tasks have
      their own. None is T5's vocabulary, which is read over the network.
    keep_broken: as for `LocalTask.texts`; only for local tasks.

  Returns:
    Dicts with 'inputs' and 'targets', int32[n], with an end-of-sequence id if
    the task adds one (a target without text is int32[0]: there is nothing to
    compare a prediction with); their texts 'inputs_pretokenized' and
    'targets_pretokenized'; and the task's other features that are text,
    numbers, or lists of text.

  Raises:
    ValueError: there is no such task (with the nearest names), split or
      feature; seqio is needed and not installed; TFDS has not prepared the data
      (with the command that does).
  """
  lengths = dict(task_feature_lengths or {})
  local = find_local(name)
  if local is not None:
    return local.examples(split, lengths, keep_broken)
  found = _subtasks(_find(str(name), vocab_path))
  for task in found:
    check_feature_lengths(lengths, task.output_features, task.name)
    seqio_tasks.check_prepared(task.source)
    seqio_tasks.check_split(task, split)
    seqio_tasks.check_vocabularies(task)

  def generate():
    for task in found:
      dataset = task.get_dataset(lengths or None, split, shuffle=False)
      features = task.output_features
      ends = {key: features[key].vocabulary.eos_id for key in features}
      for example in dataset.as_numpy_iterator():
        yield seqio_tasks.plain(example, ends)

  return generate()


def tasks_of(name: str | LocalTask) -> list[str | LocalTask]:
  """The names of a seqio mixture's tasks; else the given name or task alone."""
  if find_local(name) is not None or not _is_registered(str(name)):
    return [name]
  seqio, _ = seqio_tasks.import_seqio()
  return [task.name for task in _subtasks(seqio.get_mixture_or_task(name))]


def metrics(name: str | LocalTask) -> list[metrics_lib.Metric]:
  """The metrics of a task.

  Args:
    name: as for `examples`, but not a mixture of several tasks.

  Returns:
    Functions of the targets' and the predictions' texts that return dicts; for
    a seqio task they first run its postprocessor, without an example.

  Raises:
    ValueError: there is no such task, or seqio is needed and not installed.
  """
  local = find_local(name)
  if local is not None:
    return [metrics_lib.METRICS[metric] for metric in local.metrics]
  if str(name) in t5_tasks.TASKS and not _is_registered(str(name)):
    return [metrics_lib.METRICS[m] for m in t5_tasks.TASKS[str(name)].metrics]
  found = _subtasks(_find(str(name), None))
  if len(found) > 1:
    raise ValueError(
      f'{name!r} is a mixture; ask for the metrics of one of its tasks:'
      f' {", ".join(task.name for task in found)}.'
    )
  after = functools.partial(found[0].postprocess_fn, example=None)

  def measure(targets, predictions, metric):
    return metric(
      [after(text, is_target=True) for text in targets],
      [after(text, is_target=False) for text in predictions],
    )

  return [
    functools.partial(measure, metric=metric)
    for metric in found[0].predict_metric_fns
  ]


def splits(name: str | LocalTask) -> list[str]:
  """The task's training split and, if it has one, its held-out split.

  Raises:
    ValueError: seqio is needed and not installed, or there is no such task or
      split.
  """
  local = find_local(name)
  known = local.files if local is not None else _task(_name(name)).splits
  if TRAIN_SPLIT not in known:
    raise ValueError(
      f'The task {_name(name)!r} has no split {TRAIN_SPLIT!r}; it has'
      f' {sorted(known)}.'
    )
  return [s for s in (TRAIN_SPLIT, EVAL_SPLIT) if s in known]


def token_lists(
  name: str | LocalTask, split: str
) -> tuple[list[Any], list[Any]]:
  """Source and target ids of a split, in the task's order.

  Args:
    name: a task with the features 'inputs' and 'targets'.
    split: such as 'train'.

  Returns:
    Two lists of int32[n], without the end-of-sequence id.

  Raises:
    ValueError: seqio is needed and not installed, or the task lacks one of the
      two features.
  """
  local = find_local(name)
  if local is not None:
    ends = dict.fromkeys(FEATURES, open_vocabulary(local.vocab_path).eos_id)
    found = local.examples(split)
  else:
    task = _task(_name(name))
    features = task.output_features
    if missing := set(FEATURES) - set(features):
      raise ValueError(
        f'The seqio task {name!r} lacks the features {sorted(missing)}; it has'
        f' {sorted(features)}.'
      )
    ends = {key: features[key].vocabulary.eos_id for key in FEATURES}
    # Nothing is cut here: the caller decides about lengths.
    found = task.get_dataset(None, split, shuffle=False).as_numpy_iterator()
  sides: dict[str, list[Any]] = {key: [] for key in FEATURES}
  for example in found:
    for key, rows in sides.items():
      ids = example[key]
      rows.append(ids[:-1] if len(ids) and ids[-1] == ends[key] else ids)
  return sides['inputs'], sides['targets']


def _name(name: str | LocalTask) -> str:
  return name.name if isinstance(name, LocalTask) else name


def _task(name: str) -> Any:
  found = _subtasks(_find(name, None))
  if len(found) > 1:
    raise ValueError(
      f'{name!r} is a mixture; training reads one task. Its tasks are'
      f' {", ".join(task.name for task in found)}.'
    )
  seqio_tasks.check_prepared(found[0].source)
  return found[0]


def find_local(name: str | LocalTask) -> LocalTask | None:
  """The local task that is given, or has that name; None if there is none."""
  return name if isinstance(name, LocalTask) else _local.get(name)


def _find(name: str, vocab_path: str | os.PathLike[str] | None) -> Any:
  """The seqio task or mixture of that name, tasks of T5 included."""
  try:
    seqio, _ = seqio_tasks.import_seqio()
  except ValueError as error:
    if name in t5_tasks.TASKS:
      raise
    near = nearest(name, {*_local, *t5_tasks.TASKS})
    raise ValueError(
      f'No task {name!r} is known without seqio.{near} {error}'
    ) from error
  if _is_registered(name):
    return seqio.get_mixture_or_task(name)
  if name in t5_tasks.TASKS:
    return seqio_tasks.t5_task(name, vocab_path)
  known = {
    *_local,
    *t5_tasks.TASKS,
    *seqio.TaskRegistry.names(),
    *seqio.MixtureRegistry.names(),
  }
  raise ValueError(
    f'There is no task {name!r}.{nearest(name, known)} A task of your own must'
    ' be registered by a module that is imported first: `import my_tasks` in a'
    ' gin file, or in Python.'
  )


def _is_registered(name: str) -> bool:
  if 'seqio' not in sys.modules:
    return False  # then nobody can have registered anything
  seqio, _ = seqio_tasks.import_seqio()
  return name in {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}


def _subtasks(task_or_mixture: Any) -> list[Any]:
  seqio, _ = seqio_tasks.import_seqio()
  return list(seqio.get_subtasks(task_or_mixture))
