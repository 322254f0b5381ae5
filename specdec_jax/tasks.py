"""seqio tasks as a source of token pairs, and a task over a file of pairs.

seqio brings TensorFlow, so it is imported when a function here is called, and
nowhere else in the library.
"""

import os
from collections.abc import Mapping
from typing import Any

EVAL_SPLIT = 'validation'
TRAIN_SPLIT = 'train'


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
  seqio, tf = _import_seqio()
  for path in (*files.values(), vocab_path):
    if not os.path.isfile(path):
      raise ValueError(f'Task {name!r}: there is no file {os.fspath(path)!r}.')

  def two_columns(dataset):
    def split(line):
      columns = tf.strings.split(line, '\t')
      return {'inputs': columns[0], 'targets': columns[1]}

    return dataset.map(split, num_parallel_calls=tf.data.AUTOTUNE)

  vocabulary = seqio.SentencePieceVocabulary(os.fspath(vocab_path))
  seqio.TaskRegistry.add(
    name,
    source=seqio.TextLineDataSource(
      {split: os.fspath(path) for split, path in files.items()}
    ),
    preprocessors=[two_columns, seqio.preprocessors.tokenize],
    output_features={
      feature: seqio.Feature(vocabulary, add_eos=False)
      for feature in ('inputs', 'targets')
    },
  )


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
  seqio, _ = _import_seqio()
  if name not in seqio.TaskRegistry.names():
    known = ', '.join(sorted(seqio.TaskRegistry.names())) or 'none'
    raise ValueError(
      f'There is no seqio task {name!r}; registered are: {known}. Import the'
      ' module that registers it (TASK_MODULE).'
    )
  return seqio.TaskRegistry.get(name)


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
