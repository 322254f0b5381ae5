"""Tasks: named sources of examples, from seqio or from local files.

A `SeqioTask` has the methods of a `LocalTask`. T5's translation, its
summarisation and lm1b are known by the names that T5's own code gives them, and
read data that TensorFlow Datasets (TFDS) has prepared. If a module registers a
seqio task of the same name, that task is used instead.

seqio brings TensorFlow: it is imported when a function here needs it, and
nowhere else in the library. Names, prefixes and metrics of T5's tasks are those
of T5's own task definitions (Raffel et al. 2020, appendix D).
"""

import dataclasses
import functools
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from specdec_jax import files
from specdec_jax.checks.fields import nearest, package, unexpected
from specdec_jax.files import shipped
from specdec_jax.text import metrics as metrics_lib
from specdec_jax.text.local_tasks import (
  FEATURES,
  KINDS,
  LocalTask,
  Task,
  check_feature_lengths,
  ending_of,
  kind_of,
)
from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.text.vocabulary import SENTENCEPIECE

VOCAB = 'gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model'
EXTRA_IDS = 100  # sentinels that T5's vocabulary has after its pieces


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


@dataclasses.dataclass(frozen=True)
class SeqioTask(Task):
  """A task of seqio, with the methods of a `LocalTask`.

  Attributes:
    task: a `seqio.Task`.
  """

  task: Any

  @property
  def name(self) -> str:
    """The name of the task."""
    return self.task.name

  @property
  def splits(self) -> Collection[str]:
    """The names of its splits; ValueError if TFDS has not prepared them."""
    check_prepared(self.task.source)
    return self.task.splits

  def reading(self, split: str) -> str | None:
    """None: no file is read by its ending."""

  def examples(
    self,
    split: str,
    task_feature_lengths: Mapping[str, int] | None = None,
    keep_broken: bool = False,
    tokenizer: Tokenizer | None = None,
  ) -> Iterator[dict[str, Any]]:
    """The examples of a split, in the task's order; see `LocalTask.examples`.

    Its vocabularies are its own, and no example is broken.

    Raises:
      ValueError: there is no such split or feature, a vocabulary cannot be
        reached, or TFDS has not prepared the data (with the command that does).
    """
    del keep_broken, tokenizer
    task, lengths = self.task, dict(task_feature_lengths or {})
    check_feature_lengths(lengths, task.output_features, self.name)
    # TFDS reads the part in brackets, as in 'test[:1%]'.
    self.check_split(split.split('[')[0])
    check_vocabularies(task)
    dataset = task.get_dataset(lengths or None, split, shuffle=False)
    ends = {
      key: feature.vocabulary.eos_id
      for key, feature in task.output_features.items()
    }
    return (plain(example, ends) for example in dataset.as_numpy_iterator())

  def metric_functions(self) -> list[metrics_lib.Metric]:
    """Functions of the targets' and the predictions' texts that return dicts.

    They first run the task's postprocessor, without an example.
    """
    after = functools.partial(self.task.postprocess_fn, example=None)

    def measure(targets, predictions, metric):
      return metric(
        [after(text, is_target=True) for text in targets],
        [after(text, is_target=False) for text in predictions],
      )

    metrics = self.task.predict_metric_fns
    return [functools.partial(measure, metric=metric) for metric in metrics]

  def eos_ids(self) -> dict[str, int]:
    """Feature -> the id of its end of sequence.

    Raises:
      ValueError: one of 'inputs' and 'targets' is missing.
    """
    features = self.task.output_features
    if not {*FEATURES} <= {*features}:
      where = f'features of the seqio task {self.name!r}'
      raise unexpected(where, f'{FEATURES} among them', sorted(features))
    return {key: features[key].vocabulary.eos_id for key in FEATURES}


def find(
  task: str | LocalTask | SeqioTask,
  tokenizer: Tokenizer | None = None,
  split: str = 'test',
  prefix: str = '',
  distinct: bool = False,
) -> list[Task]:
  """The task that is meant, or the tasks of a mixture.

  Args:
    task: name of a seqio task or mixture, or of a task of T5; a local task; or
      the path of a file: `.tsv` (inputs<TAB>targets), `.jsonl` ('inputs' and
      'targets'), otherwise one input a line; each also as `.gz`.
    tokenizer: the models' tokenizer, that of a file and of T5's tasks too; None
      is that of a local task, and T5's, which is read over the network.
    split: the split that a file is used as.
    prefix: put before each input of a file.
    distinct: as of `LocalTask`, for a file.

  Raises:
    ValueError: there is no such file or task (with the nearest names); seqio is
      needed and not installed; or a local task has another vocabulary than the
      models.
  """
  if isinstance(task, SeqioTask):
    return [task]
  if isinstance(task, str):
    path = shipped.find(task)
    is_path = os.sep in path or ending_of(path) in KINDS
    if tokenizer is None or not (is_path or os.path.isfile(path)):
      return [*map(SeqioTask, _subtasks(task, tokenizer))]
    if not os.path.isfile(path):
      files.check_regular(path)
      kinds = 'a file (.tsv, .jsonl, or lines) or the name of a task'
      raise unexpected('task', kinds, path, f'You are in {os.getcwd()}.')
    name = os.path.basename(path).removesuffix('.gz')
    if ending_of(path) in KINDS:
      name = os.path.splitext(name)[0]
    vocabulary, kind = tokenizer.path, kind_of(path)
    task = LocalTask(
      name, {split: path}, vocabulary, kind, prefix, distinct=distinct
    )
  if tokenizer is not None:
    other = Tokenizer(task.vocab_path)
    for field in ('fingerprint', 'eos_id'):
      theirs, ours = getattr(other, field), getattr(tokenizer, field, None)
      if theirs != ours:
        where = f'{field} of {os.fspath(task.vocab_path)!r}, of {task.name!r}'
        raise unexpected(where, f"{ours!r}, the models'", theirs)
  return [task]


def find_one(task: str | LocalTask) -> Task:
  """`find` for a task by its name, not a mixture of several.

  Raises:
    ValueError: as for `find`, or it is a mixture.
  """
  first, *others = find(task)
  if others:
    names = [part.name for part in (first, *others)]
    expected = f'one task, such as {names[0]}'
    raise unexpected(str(task), expected, f'the tasks {names}')
  return first


def token_lists(task: Task, split: str) -> tuple[list[Any], list[Any]]:
  """Source and target ids of a split, in the task's order.

  Args:
    task: a task with the features 'inputs' and 'targets'.
    split: such as 'train'.

  Returns:
    Two lists of int32[n], without the end-of-sequence id.

  Raises:
    ValueError: the task lacks one of the two features, or as for its examples.
  """
  ends = task.eos_ids()
  sides: dict[str, list[Any]] = {key: [] for key in FEATURES}
  for example in task.examples(split):  # the caller decides about lengths
    for key, rows in sides.items():
      ids = example[key]
      rows.append(ids[:-1] if len(ids) and ids[-1] == ends[key] else ids)
  return sides['inputs'], sides['targets']


def _subtasks(name: str, tokenizer: Tokenizer | None) -> list[Any]:
  """The seqio tasks of that name, of a mixture its own, T5's included."""
  try:
    seqio, _ = import_seqio()
  except ValueError as error:
    if name in TASKS:
      raise
    raise ValueError(
      f'No task {name!r} is known without seqio.{nearest(name, TASKS)} {error}'
    ) from error
  known = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
  if name in known:
    return list(seqio.get_subtasks(seqio.get_mixture_or_task(name)))
  if name in TASKS:
    return [t5_task(name, tokenizer.path if tokenizer else None)]
  raise ValueError(
    f'There is no task {name!r}.{nearest(name, known | TASKS.keys())} Import'
    ' the module that registers a task of your own first (`import my_tasks` in'
    ' a gin file).'
  )


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
