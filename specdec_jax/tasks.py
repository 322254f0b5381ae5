"""Tasks: named sources of examples, from seqio or from local files.

T5's translation, its summarisation and lm1b are known by the names that T5's
own code gives them, and read what TensorFlow Datasets (TFDS) has prepared. A
module that registers seqio tasks of the same name goes before them.

seqio brings TensorFlow, so it is imported when a function here is called, and
nowhere else in the library. Local tasks (`local_tasks.py`) need neither.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax import metrics as metrics_lib
from specdec_jax import t5_tasks
from specdec_jax.local_tasks import LocalTask, check_feature_lengths, nearest

EVAL_SPLIT = 'validation'
TRAIN_SPLIT = 'train'

_local: dict[str, LocalTask] = {}


def register(task: LocalTask) -> None:
  """Makes a local task known by its name.

  Raises:
    ValueError: another local task or one of T5's has that name.
  """
  if task.name in t5_tasks.TASKS or _local.get(task.name, task) != task:
    raise ValueError(f'There already is another task {task.name!r}.')
  _local[task.name] = task


def examples(
  name: str | LocalTask,
  split: str,
  task_feature_lengths: Mapping[str, int] | None = None,
  vocab_path: str | os.PathLike[str] | None = None,
) -> Iterator[dict[str, Any]]:
  """The examples of a task or mixture, in its order, once.

  Args:
    name: of a seqio task or mixture, of a task of T5 or of a local one; or a
      local task itself. A mixture's examples are those of its tasks in turn.
    split: such as 'test'.
    task_feature_lengths: feature -> ids at most, with the end-of-sequence id;
      longer ones are cut. None, and features that are not named, cut nothing.
    vocab_path: sentencepiece model, for the tasks of T5 alone: the others say
      theirs. None is T5's own, which is read over the network.

  Returns:
    Dicts with 'inputs' and 'targets', int32[n] that end as the task lets them
    end (a target without text is int32[0]; then there is nothing to compare a
    prediction with); their texts 'inputs_pretokenized' and
    'targets_pretokenized'; and the task's other features that are text,
    numbers, or lists of text.

  Raises:
    ValueError: there is no such task (with the nearest names), split or
      feature; seqio is needed and not installed; TFDS has not prepared the data
      (with the command that does).
  """
  lengths = dict(task_feature_lengths or {})
  local = _find_local(name)
  if local is not None:
    return local.examples(split, lengths)
  found = _subtasks(_find(str(name), vocab_path))
  for task in found:
    check_feature_lengths(lengths, task.output_features, task.name)
    _check_prepared(task.source)
    _check_split(task, split)
    _check_vocabularies(task)

  def generate():
    for task in found:
      dataset = task.get_dataset(lengths or None, split, shuffle=False)
      features = task.output_features
      ends = {key: features[key].vocabulary.eos_id for key in features}
      for example in dataset.as_numpy_iterator():
        yield _plain(example, ends)

  return generate()


def metrics(name: str | LocalTask) -> list[metrics_lib.Metric]:
  """What a task measures its predictions by.

  Args:
    name: as of `examples`, but no mixture of several tasks.

  Returns:
    Functions of the targets' and the predictions' texts that give dicts; they
    run a seqio task's postprocessor first, without an example.

  Raises:
    ValueError: there is no such task, or seqio is needed and not installed.
  """
  local = _find_local(name)
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


def register_tsv(
  name: str,
  files: Mapping[str, str | os.PathLike[str]],
  vocab_path: str | os.PathLike[str],
) -> None:
  """Registers a seqio task over source<TAB>target lines.

  Args:
    name: of the task.
    files: split -> UTF-8 file, such as {'train': 'pairs.tsv'}.
    vocab_path: sentencepiece model of both sides.

  Raises:
    ValueError: seqio is not installed, a file is missing, or the name is
      taken.
  """
  seqio, _ = _import_seqio()
  seqio.TaskRegistry.add_provider(
    name, to_seqio(LocalTask(name, files, vocab_path, kind='tsv'))
  )


def to_seqio(task: LocalTask) -> Any:
  """The seqio task with the examples of a local one, for mixtures of tasks.

  Fields of JSONL objects beyond the two sides do not go along.

  Raises:
    ValueError: seqio is not installed.
  """
  seqio, tf = _import_seqio()
  signature = dict.fromkeys(('inputs', 'targets'), tf.TensorSpec((), tf.string))

  def read(split, shuffle_files, seed=None):
    del shuffle_files, seed  # seqio shuffles examples itself

    def generate():
      for example in task.texts(split):
        yield {feature: example[feature] for feature in signature}

    return tf.data.Dataset.from_generator(generate, output_signature=signature)

  source = seqio.FunctionDataSource(read, splits=tuple(task.files))
  vocabulary = seqio.SentencePieceVocabulary(os.fspath(task.vocab_path))
  return _seqio_task(task.name, source, [], vocabulary, task.metrics)


def splits(name: str) -> list[str]:
  """The task's training split and, if it has one, its held-out split.

  Raises:
    ValueError: seqio is not installed, or there is no such task or split.
  """
  task = _task(name)
  if TRAIN_SPLIT not in task.splits:
    raise ValueError(
      f'The seqio task {name!r} has no split {TRAIN_SPLIT!r}; it has'
      f' {sorted(task.splits)}.'
    )
  return [s for s in (TRAIN_SPLIT, EVAL_SPLIT) if s in task.splits]


def token_lists(name: str, split: str) -> tuple[list[Any], list[Any]]:
  """Source and target ids of a split, in the task's order.

  Args:
    name: a registered task with the features 'inputs' and 'targets'.
    split: such as 'train'.

  Returns:
    Two lists of int32[n], without the end-of-sequence id.

  Raises:
    ValueError: seqio is not installed, or the task is not of this kind.
  """
  task = _task(name)
  features = task.output_features
  missing = {'inputs', 'targets'} - set(features)
  if missing:
    raise ValueError(
      f'The seqio task {name!r} lacks the features {sorted(missing)}; it has'
      f' {sorted(features)}.'
    )
  ends = {key: features[key].vocabulary.eos_id for key in features}
  # Lengths are the caller's business: nothing is cut here.
  dataset = task.get_dataset(None, split, shuffle=False)
  found: dict[str, list[Any]] = {'inputs': [], 'targets': []}
  for example in dataset.as_numpy_iterator():
    for key, rows in found.items():
      ids = example[key]
      if len(ids) and ids[-1] == ends[key]:
        ids = ids[:-1]
      rows.append(ids)
  return found['inputs'], found['targets']


def _task(name: str) -> Any:
  found = _subtasks(_find(name, None))
  if len(found) > 1:
    raise ValueError(
      f'{name!r} is a mixture; training reads one task. Its tasks are'
      f' {", ".join(task.name for task in found)}.'
    )
  _check_prepared(found[0].source)
  return found[0]


def _find_local(name: str | LocalTask) -> LocalTask | None:
  return name if isinstance(name, LocalTask) else _local.get(name)


def _find(name: str, vocab_path: str | os.PathLike[str] | None) -> Any:
  """The seqio task or mixture of that name, one of T5's included."""
  try:
    seqio, _ = _import_seqio()
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
    return _t5_task(name, vocab_path)
  known = {
    *_local,
    *t5_tasks.TASKS,
    *seqio.TaskRegistry.names(),
    *seqio.MixtureRegistry.names(),
  }
  raise ValueError(
    f'There is no task {name!r}.{nearest(name, known)} A task of your own must'
    ' be registered by a module that is imported first.'
  )


def _is_registered(name: str) -> bool:
  if 'seqio' not in sys.modules:
    return False  # then nobody can have registered anything
  seqio, _ = _import_seqio()
  return name in {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}


def _subtasks(task_or_mixture: Any) -> list[Any]:
  seqio, _ = _import_seqio()
  return list(seqio.get_subtasks(task_or_mixture))


def _t5_task(name: str, vocab_path: str | os.PathLike[str] | None) -> Any:
  """The task as T5's own code has it."""
  seqio, tf = _import_seqio()
  described = t5_tasks.TASKS[name]
  path = os.fspath(vocab_path or t5_tasks.VOCAB)

  def two_sides(dataset):
    def sides(example):
      inputs = ''
      if described.inputs is not None:
        inputs = tf.strings.join([described.prefix, example[described.inputs]])
      return {'inputs': inputs, 'targets': example[described.targets]}

    return dataset.map(sides, num_parallel_calls=tf.data.AUTOTUNE)

  # seqio would begin to download what is not there.
  source = seqio.TfdsDataSource(described.tfds, read_only=True)
  vocabulary = seqio.SentencePieceVocabulary(path, extra_ids=t5_tasks.EXTRA_IDS)
  return _seqio_task(name, source, [two_sides], vocabulary, described.metrics)


def _seqio_task(
  name: str,
  source: Any,
  preprocessors: Sequence[Callable[..., Any]],
  vocabulary: Any,
  metric_names: Sequence[str],
) -> Any:
  seqio, _ = _import_seqio()
  return seqio.Task(
    name,
    source=source,
    preprocessors=[
      *preprocessors,
      seqio.preprocessors.tokenize,
      seqio.preprocessors.append_eos_after_trim,
    ],
    output_features={
      feature: seqio.Feature(vocabulary, add_eos=True)
      for feature in ('inputs', 'targets')
    },
    metric_fns=[metrics_lib.METRICS[metric] for metric in metric_names],
  )


def _check_prepared(source: Any) -> None:
  """Raises ValueError where seqio would begin to download for hours."""
  seqio, _ = _import_seqio()
  if not isinstance(source, seqio.TfdsDataSource):
    return
  loader = source.tfds_dataset
  if loader.name is None:
    return  # it joins several datasets; TFDS itself says what is missing
  folder = f', data_dir={loader.data_dir!r}' if loader.data_dir else ''
  command = (
    'python -c "import tensorflow_datasets as tfds;'
    f" tfds.builder('{loader.name}'{folder}).download_and_prepare()\""
  )
  try:
    problem = f'are not in {loader.builder.data_path}'
    if loader.builder.is_prepared():
      return
  except (AssertionError, ValueError) as error:
    problem = f'cannot be loaded ({error})'
  raise ValueError(
    f"TensorFlow Datasets' {loader.name} {problem}. Get them by: {command}."
    ' Data that lie elsewhere are found by the environment variable'
    ' TFDS_DATA_DIR.'
  )


def _check_split(task: Any, split: str) -> None:
  # What follows in brackets, as in 'test[:1%]', is for TFDS to read.
  if split.split('[')[0] not in task.splits:
    raise ValueError(
      f'The task {task.name!r} has no split'
      f' {split!r}.{nearest(split, task.splits)}'
    )


def _check_vocabularies(task: Any) -> None:
  _, tf = _import_seqio()
  for feature in task.output_features.values():
    path = getattr(feature.vocabulary, 'sentencepiece_model_file', None)
    try:
      found = path is None or tf.io.gfile.exists(path)
    except tf.errors.OpError:
      found = False
    if not found:
      raise ValueError(
        f'The vocabulary {path!r} of the task {task.name!r} could not be read;'
        ' give the path of a copy (VOCAB_PATH).'
      )


def _plain(example: dict[str, Any], ends: Mapping[str, int]) -> dict[str, Any]:
  """An example of seqio as ids, text, numbers and lists of text."""
  found: dict[str, Any] = {'targets': np.zeros(0, np.int32)}
  for key, value in example.items():
    if isinstance(value, bytes):
      found[key] = _text(value)
    elif key in ends:
      if value.ndim == 1 and np.issubdtype(value.dtype, np.integer):
        found[key] = value.astype(np.int32)
    elif isinstance(value, np.number):
      found[key] = value.item()
    elif np.ndim(value) == 1 and value.dtype.hasobject:
      found[key] = [_text(part) for part in value]
  if found['targets'].tolist() == [ends.get('targets')]:
    found['targets'] = np.zeros(0, np.int32)
  return found


def _text(value: bytes) -> str:
  return value.decode('utf-8', 'replace')


def _import_seqio() -> tuple[Any, Any]:
  try:
    import seqio
    import tensorflow
  except ImportError as error:
    raise ValueError(
      'seqio tasks need seqio and TensorFlow, which are not installed:'
      " pip install -e '.[tasks]'. Without them, train on a file of"
      ' source<TAB>target lines or on .npz token arrays.'
    ) from error
  return seqio, tensorflow
