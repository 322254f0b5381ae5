"""Tasks that need seqio: makes them, and checks that they can be read.

seqio imports TensorFlow, so it is imported only when a function here is called,
and nowhere else in the library.
"""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from specdec_jax.checks.names import nearest
from specdec_jax.checks.packages import package
from specdec_jax.text import metrics as metrics_lib
from specdec_jax.text import t5_tasks


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
  described = t5_tasks.TASKS[name]
  path = os.fspath(vocab_path or t5_tasks.VOCAB)

  def two_sides(dataset):
    def sides(example):
      inputs = ''
      if described.inputs is not None:
        inputs = tf.strings.join([described.prefix, example[described.inputs]])
      return {'inputs': inputs, 'targets': example[described.targets]}

    return dataset.map(sides, num_parallel_calls=tf.data.AUTOTUNE)

  # Otherwise seqio would begin to download data that are missing.
  source = seqio.TfdsDataSource(described.tfds, read_only=True)
  vocabulary = seqio.SentencePieceVocabulary(path, extra_ids=t5_tasks.EXTRA_IDS)
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
    ' If the data are in another folder, name it in the environment variable'
    ' TFDS_DATA_DIR.'
  )


def check_split(task: Any, split: str) -> None:
  """Raises ValueError if a seqio task has no such split."""
  # TFDS reads the part in brackets, as in 'test[:1%]'.
  if split.split('[')[0] not in task.splits:
    raise ValueError(
      f'The task {task.name!r} has no split'
      f' {split!r}.{nearest(split, task.splits)}'
    )


def check_vocabularies(task: Any) -> None:
  """Raises ValueError if a vocabulary of a seqio task cannot be reached."""
  _, tf = import_seqio()
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


def plain(example: dict[str, Any], ends: Mapping[str, int]) -> dict[str, Any]:
  """A seqio example, converted to ids, text, numbers and lists of text."""
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
