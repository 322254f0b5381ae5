"""Tasks: named sources of examples, from seqio or from local files.

T5's translation, its summarisation and lm1b are known by the names that T5's
own code gives them, and read data that TensorFlow Datasets (TFDS) has prepared.
If a module registers a seqio task of the same name, that task is used instead.

seqio brings TensorFlow: it is imported when a function here needs it, and
nowhere else in the library. Names, prefixes and metrics of T5's tasks are those
of T5's own task definitions (Raffel et al. 2020, appendix D).
"""

import functools
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.checks.fields import nearest, package, unexpected
from specdec_jax.text import metrics as metrics_lib
from specdec_jax.text.local_tasks import (
  FEATURES,
  LocalTask,
  check_feature_lengths,
)
from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.text.vocabulary import SENTENCEPIECE

VOCAB = 'gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model'
EXTRA_IDS = 100  # sentinels that T5's vocabulary has after its pieces
EVAL_SPLIT = 'validation'
TRAIN_SPLIT = 'train'


class T5Task(NamedTuple):
  """A task of T5 over TensorFlow Datasets (TFDS).

  Attributes:
    tfds: dataset, its configuration and version.
    inputs: TFDS's feature that is the input; None is an empty input.
    targets: TFDS's feature that is the target.
    prefix: put before each input.
    metrics: names of `metrics.METRICS`.
  """

  tfds: str
  inputs: str | None
  targets: str
  prefix: str = ''
  metrics: tuple[str, ...] = ()


TASKS = {
  'wmt_t2t_ende_v003': T5Task(
    'wmt_t2t_translate/de-en:1.0.0',
    'en',
    'de',
    'translate English to German: ',
    ('t5_bleu',),
  ),
  # T5 used 3.1.0, which TFDS no longer makes. 3.4.0 differs: no space before
  # the full stops of the targets (ROUGE ignores it), and two more features.
  'cnn_dailymail_v002': T5Task(
    'cnn_dailymail:3.4.0', 'article', 'highlights', 'summarize: ', ('rouge',)
  ),
  'lm1b_v110': T5Task('lm1b:1.1.0', None, 'text'),
}

_local: dict[str, LocalTask] = {}


def register(task: LocalTask) -> None:
  """Makes a local task known by its name.

  Raises:
    ValueError: another local task or a task of T5 has that name.
  """
  if task.name in TASKS or _local.get(task.name, task) != task:
    raise ValueError(f'There already is another task {task.name!r}.')
  _local[task.name] = task


def examples(
  name: str | LocalTask,
  split: str,
  task_feature_lengths: Mapping[str, int] | None = None,
  tokenizer: Tokenizer | None = None,
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
    tokenizer: for local tasks and those of T5: other tasks have their own.
      None is a local task's own, and T5's, which is read over the network.
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
    return local.examples(split, lengths, keep_broken, tokenizer)
  subtasks = _subtasks(_find(str(name), tokenizer.path if tokenizer else None))
  for task in subtasks:
    check_feature_lengths(lengths, task.output_features, task.name)
    check_prepared(task.source)
    check_split(task, split)
    check_vocabularies(task)

  def generate():
    for task in subtasks:
      dataset = task.get_dataset(lengths or None, split, shuffle=False)
      features = task.output_features
      ends = {key: features[key].vocabulary.eos_id for key in features}
      for example in dataset.as_numpy_iterator():
        yield plain(example, ends)

  return generate()


def tasks_of(name: str | LocalTask) -> list[str | LocalTask]:
  """The names of a seqio mixture's tasks; else the given name or task alone."""
  if find_local(name) is not None or not _is_registered(str(name)):
    return [name]
  seqio, _ = import_seqio()
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
  if str(name) in TASKS and not _is_registered(str(name)):
    return [metrics_lib.METRICS[m] for m in TASKS[str(name)].metrics]
  task = _single(str(name))
  after = functools.partial(task.postprocess_fn, example=None)

  def measure(targets, predictions, metric):
    return metric(
      [after(text, is_target=True) for text in targets],
      [after(text, is_target=False) for text in predictions],
    )

  return [
    functools.partial(measure, metric=metric)
    for metric in task.predict_metric_fns
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
    where = f'splits of the task {_name(name)!r}'
    raise unexpected(where, f'{TRAIN_SPLIT!r} among them', sorted(known))
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
    ends = dict.fromkeys(FEATURES, Tokenizer(local.vocab_path).eos_id)
  else:
    features = _task(_name(name)).output_features
    if not set(FEATURES) <= set(features):
      where = f'features of the seqio task {name!r}'
      raise unexpected(where, f'{FEATURES} among them', sorted(features))
    ends = {key: features[key].vocabulary.eos_id for key in FEATURES}
  sides: dict[str, list[Any]] = {key: [] for key in FEATURES}
  for example in examples(name, split):  # the caller decides about lengths
    for key, rows in sides.items():
      ids = example[key]
      rows.append(ids[:-1] if len(ids) and ids[-1] == ends[key] else ids)
  return sides['inputs'], sides['targets']


def _name(name: str | LocalTask) -> str:
  return name.name if isinstance(name, LocalTask) else name


def _single(name: str) -> Any:
  """The seqio task of that name; ValueError if it is a mixture of several."""
  task, *others = _subtasks(_find(name, None))
  if others:
    names = [one.name for one in (task, *others)]
    raise unexpected(
      name, f'one task, such as {names[0]}', f'the tasks {names}'
    )
  return task


def _task(name: str) -> Any:
  task = _single(name)
  check_prepared(task.source)
  return task


def find_local(name: str | LocalTask) -> LocalTask | None:
  """The local task that is given, or has that name; None if there is none."""
  return name if isinstance(name, LocalTask) else _local.get(name)


def _find(name: str, vocab_path: str | os.PathLike[str] | None) -> Any:
  """The seqio task or mixture of that name, tasks of T5 included."""
  try:
    seqio, _ = import_seqio()
  except ValueError as error:
    if name in TASKS:
      raise
    near = nearest(name, {*_local, *TASKS})
    raise ValueError(
      f'No task {name!r} is known without seqio.{near} {error}'
    ) from error
  if _is_registered(name):
    return seqio.get_mixture_or_task(name)
  if name in TASKS:
    return t5_task(name, vocab_path)
  known = {
    *_local,
    *TASKS,
    *seqio.TaskRegistry.names(),
    *seqio.MixtureRegistry.names(),
  }
  raise ValueError(
    f'There is no task {name!r}.{nearest(name, known)} Import the module that'
    ' registers a task of your own first (`import my_tasks` in a gin file).'
  )


def _is_registered(name: str) -> bool:
  if 'seqio' not in sys.modules:
    return False  # then nobody can have registered anything
  seqio, _ = import_seqio()
  return name in {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}


def _subtasks(task_or_mixture: Any) -> list[Any]:
  seqio, _ = import_seqio()
  return list(seqio.get_subtasks(task_or_mixture))


def import_seqio() -> tuple[Any, Any]:
  """Returns the modules seqio and tensorflow.

  Raises:
    ValueError: they are not installed.
  """
  otherwise = (
    'Local files need no such package: instead of a task give the path of a'
    ' file, such as one of source<TAB>target lines.'
  )
  seqio = package('A seqio task', 'seqio', 'tasks', otherwise)
  return seqio, package('A seqio task', 'tensorflow', 'tasks', otherwise)


def t5_task(name: str, vocab_path: str | os.PathLike[str] | None) -> Any:
  """The seqio task that T5's own code defines under this name."""
  seqio, tf = import_seqio()
  described = TASKS[name]
  path = os.fspath(vocab_path or VOCAB)
  if os.path.isdir(path):
    path = os.path.join(path, SENTENCEPIECE)

  def two_sides(dataset):
    def sides(example):
      inputs = ''
      if described.inputs is not None:
        inputs = tf.strings.join([described.prefix, example[described.inputs]])
      return {'inputs': inputs, 'targets': example[described.targets]}

    return dataset.map(sides, num_parallel_calls=tf.data.AUTOTUNE)

  # Otherwise seqio would begin to download data that are missing.
  source = seqio.TfdsDataSource(described.tfds, read_only=True)
  vocabulary = seqio.SentencePieceVocabulary(path, extra_ids=EXTRA_IDS)
  return seqio.Task(
    name,
    source=source,
    preprocessors=[
      two_sides,
      seqio.preprocessors.tokenize,
      seqio.preprocessors.append_eos_after_trim,
    ],
    output_features={
      feature: seqio.Feature(vocabulary, add_eos=True)
      for feature in ('inputs', 'targets')
    },
    metric_fns=[metrics_lib.METRICS[metric] for metric in described.metrics],
  )


def check_prepared(source: Any) -> None:
  """Raises ValueError if seqio would begin a download of hours."""
  seqio, _ = import_seqio()
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
    ' TFDS_DATA_DIR in the environment names another folder.'
  )


def check_split(task: Any, split: str) -> None:
  """Raises ValueError if a seqio task has no such split."""
  # TFDS reads the part in brackets, as in 'test[:1%]'.
  if split.split('[')[0] not in task.splits:
    near = nearest(split, task.splits)
    raise ValueError(f'The task {task.name!r} has no split {split!r}.{near}')


def check_vocabularies(task: Any) -> None:
  """Raises ValueError if a vocabulary of a seqio task cannot be reached."""
  _, tf = import_seqio()
  for feature in task.output_features.values():
    path = getattr(feature.vocabulary, 'sentencepiece_model_file', None)
    try:
      exists = path is None or tf.io.gfile.exists(path)
    except tf.errors.OpError:
      exists = False
    if not exists:
      what = f'vocabulary {path!r} of the task {task.name!r}'
      raise unexpected(what, 'a file (VOCAB_PATH)', 'nothing')


def plain(example: dict[str, Any], ends: Mapping[str, int]) -> dict[str, Any]:
  """A seqio example, converted to ids, text, numbers and lists of text."""
  fields: dict[str, Any] = {'targets': np.zeros(0, np.int32)}
  for key, value in example.items():
    if isinstance(value, bytes):
      fields[key] = _text(value)
    elif key in ends:
      if value.ndim == 1 and np.issubdtype(value.dtype, np.integer):
        fields[key] = value.astype(np.int32)
    elif isinstance(value, np.number):
      fields[key] = value.item()
    elif np.ndim(value) == 1 and value.dtype.hasobject:
      fields[key] = [_text(part) for part in value]
  if fields['targets'].tolist() == [ends.get('targets')]:
    fields['targets'] = np.zeros(0, np.int32)
  return fields


def _text(value: bytes) -> str:
  return value.decode('utf-8', 'replace')
