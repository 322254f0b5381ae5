"""Tasks: named sources of examples, from files or from seqio.

Files of examples are lines of text, TSV or JSONL. Examples are dicts as in
seqio: `inputs_pretokenized` and `targets_pretokenized` are the texts, prefix
included; `inputs` and `targets` are their ids, cut so that the end-of-sequence
id still fits into the length.

T5's tasks of translation and summarisation, and lm1b, have the names that T5's
code gives them. They read data that TensorFlow Datasets (TFDS) has prepared. If
a module registers a seqio task of the same name, that task is used instead.

seqio imports TensorFlow. So seqio is imported only when a function here needs
it, and nowhere else in the library. Names, prefixes and metrics of T5's tasks
are those of T5's own task definitions (Raffel et al. 2020, appendix D).
"""

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from specdec_jax import files
from specdec_jax.checks import fields as checks
from specdec_jax.checks.fields import nearest, package, unexpected
from specdec_jax.files import shipped
from specdec_jax.text import metrics
from specdec_jax.text.tokenizer import Tokenizer, Vocabulary
from specdec_jax.text.vocabulary import SENTENCEPIECE

FEATURES = ('inputs', 'targets')
KINDS = ('txt', 'tsv', 'jsonl')
TRAIN_SPLIT, EVAL_SPLIT, PROMPTS_SPLIT = 'train', 'validation', 'test'
Examples = Iterator[dict[str, Any]]
BROKEN = '<broken>'  # key of the reason why an example's line is broken
# Keys that this module sets; fields of a line with these names are left out.
_RESERVED = frozenset((*FEATURES, 'references', BROKEN))
_MAX_REASON = 1000  # characters of the reason why a line is broken
_MAX_NAMES = 100  # fields among which an error message looks for the nearest
VOCAB = 'gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model'
EXTRA_IDS = 100  # sentinels that T5's vocabulary has after its pieces


class T5Task(NamedTuple):
  """An entry of t5_tasks.toml: a task of T5 over TensorFlow Datasets (TFDS).

  Attributes:
    tfds: TFDS's name of the dataset, with configuration and version.
    targets: the feature of TFDS with the target.
    inputs: the feature of TFDS with the input; None: inputs are empty.
    prefix: text that is put before each input.
    metrics: names of metrics in `metrics.METRICS`.
  """

  tfds: str
  targets: str
  inputs: str | None = None
  prefix: str = ''
  metrics: Collection[str] = ()


_FILE = pathlib.Path(__file__).with_name('t5_tasks.toml')
_TABLES = tomllib.loads(_FILE.read_text('utf-8'))
TASKS = {name: T5Task(**table) for name, table in _TABLES.items()}


@dataclasses.dataclass(frozen=True)
class LocalTask:
  """A task whose examples are the lines of files.

  Attributes:
    name: name of the task, which output files are named after.
    files: split -> UTF-8 file, plain or `.gz`.
    vocab_path: the vocabulary of both sides: a sentencepiece model, also
      `gs://bucket/file`, or a folder with GPT-2's vocabulary; see
      `tokenizer.Tokenizer`.
    kind: the form of a line: 'txt' is an input; 'tsv' is source<TAB>target, or
      a source alone; 'jsonl' is an object. None: the ending of the file's name
      decides.
    prefix: text that is put before each input, such as 'summarize: '.
    inputs_field: the field of a JSONL object with its input.
    targets_field: the field of a JSONL object with its target: a text, or a
      list of correct texts, of which the first is the target. None: there are
      no targets. The object's other texts and numbers stay as they are, except
      fields named 'inputs', 'targets' or 'references'.
    metrics: names of metrics in `metrics.METRICS`.
    distinct: whether lines with the same input are one example, whose
      references are the targets of all these lines.

  Raises:
    ValueError: a file is missing, or a kind of file or a metric is unknown.
  """

  name: str
  files: Mapping[str, str | os.PathLike[str]]
  vocab_path: str | os.PathLike[str]
  kind: str | None = None
  prefix: str = ''
  inputs_field: str = 'inputs'
  targets_field: str | None = 'targets'
  metrics: tuple[str, ...] = ()
  distinct: bool = False

  def __post_init__(self):
    checks.check_types(self)
    paths = [shipped.find(path) for path in self.files.values()]
    missing = [path for path in paths if not os.path.isfile(path)]
    vocabulary = shipped.find(self.vocab_path)
    if '://' not in vocabulary and not os.path.exists(vocabulary):
      missing.append(vocabulary)
    if missing:
      raise ValueError(f'Task {self.name!r}: there is no file {missing[0]!r}.')
    for path in paths:
      name = f'kind of {path!r}, by default the ending'
      checks.check_choice(name, self._kind(path), KINDS)
    for metric in self.metrics:
      checks.check_choice('metrics', metric, metrics.METRICS)

  @property
  def splits(self) -> Collection[str]:
    """The keys of `files`."""
    return self.files

  def _kind(self, path: str | os.PathLike[str]) -> str:
    return self.kind or ending_of(path)

  def reading(self, split: str) -> str | None:
    """Returns a sentence on how a split's file is read; None for plain text."""
    path = os.fspath(self.files[split])
    return reading(path, self._kind(path), self.inputs_field)

  def texts(self, split: str, keep_broken: bool = False) -> Examples:
    """Reads the examples of a split, without tokenising them.

    Args:
      split: a key of `files`.
      keep_broken: whether a broken line becomes an example, see `read`.

    Returns:
      Dicts with 'inputs' (prefix included), 'targets' ('' if there is none),
      'references' (a list of texts) if the target is a list, and the other
      fields of a JSONL object.

    Raises:
      ValueError: there is no such split; a file cannot be read; a line has a
        wrong format (the message has its number).
      files.BrokenOff: the rest of the file cannot be read. It is raised after
        the examples before that.
    """
    check_split(self, split)
    path = os.fspath(self.files[split])
    fields = self.inputs_field, self.targets_field
    lines = read(path, self._kind(path), *fields, keep_broken)

    def generate():
      for example in lines:
        if BROKEN not in example:
          example['inputs'] = self.prefix + example['inputs']
        yield example

    return _distinct(generate()) if self.distinct else generate()

  def examples(
    self,
    split: str,
    task_feature_lengths: Mapping[str, int] | None = None,
    keep_broken: bool = False,
    tokenizer: Vocabulary | None = None,
  ) -> Examples:
    """Reads the examples of a split once, in their order.

    Args:
      split: such as 'test'.
      task_feature_lengths: feature -> the most ids, the end-of-sequence id
        included; longer examples are cut. Other features are not cut.
      keep_broken: whether a broken line becomes an example, see `read`.
      tokenizer: a vocabulary that replaces the task's; None: the task's.

    Returns:
      Dicts with 'inputs' and 'targets', int32[n], which end with the
      end-of-sequence id (an empty target is int32[0], since no prediction can
      be compared with it); their texts 'inputs_pretokenized' and
      'targets_pretokenized'; and the task's other features that are text,
      numbers, or lists of text.

    Raises:
      ValueError: there is no such split or feature, a file cannot be read, or a
        line has a wrong format.
    """
    lengths = task_feature_lengths or {}
    check_feature_lengths(lengths, FEATURES, self.name)
    vocabulary = tokenizer or Tokenizer(self.vocab_path)
    # This call raises errors at once. Within `generate` they would show only
    # when the first example is read.
    texts = self.texts(split, keep_broken)

    def generate():
      for example in texts:
        for feature in FEATURES:
          example[f'{feature}_pretokenized'] = text = example.pop(feature)
          has_ids = BROKEN not in example and (text or feature == 'inputs')
          reader = vocabulary.inputs if feature == 'inputs' else vocabulary
          ids = reader.whole(text, lengths.get(feature)) if has_ids else []
          example[feature] = np.asarray(ids, np.int32)
        yield example

    return generate()

  def eos_ids(self) -> dict[str, int]:
    """Returns feature -> the id of its end of sequence."""
    return dict.fromkeys(FEATURES, Tokenizer(self.vocab_path).eos_id)


@dataclasses.dataclass(frozen=True)
class SeqioTask:
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
    """The names of the task's splits.

    Raises:
      ValueError: TFDS has not prepared the data.
    """
    # Otherwise seqio would begin a download, which may take hours.
    seqio, _ = import_seqio()
    if isinstance(self.task.source, seqio.TfdsDataSource):
      _check_prepared(self.task.source.tfds_dataset)
    return self.task.splits

  def reading(self, split: str) -> str | None:
    """Returns None, because no file is read by its ending."""

  def examples(
    self,
    split: str,
    task_feature_lengths: Mapping[str, int] | None = None,
    keep_broken: bool = False,
    tokenizer: Vocabulary | None = None,
  ) -> Examples:
    """Reads the examples of a split as `LocalTask.examples` does.

    A task of seqio has its own vocabularies and no broken examples.

    Raises:
      ValueError: there is no such split or feature, a vocabulary cannot be
        reached, or TFDS has not prepared the data (the message has the command
        that prepares them).
    """
    del keep_broken, tokenizer
    task, lengths = self.task, dict(task_feature_lengths or {})
    check_feature_lengths(lengths, task.output_features, self.name)
    # The part in brackets is for TFDS, as in 'test[:1%]'.
    check_split(self, split.split('[')[0])
    seqio, tf = import_seqio()
    for feature in task.output_features.values():
      if isinstance(feature.vocabulary, seqio.SentencePieceVocabulary):
        path, exists = feature.vocabulary.sentencepiece_model_file, False
        with contextlib.suppress(tf.errors.OpError):
          exists = tf.io.gfile.exists(path)
        if not exists:
          name = f'vocabulary {path!r} of the task {task.name!r}'
          raise unexpected(name, 'a file (VOCAB_PATH)', 'nothing')
    dataset = task.get_dataset(lengths or None, split, shuffle=False)
    ends = self.eos_ids()
    return (plain(example, ends) for example in dataset.as_numpy_iterator())

  def metric_functions(self) -> list[metrics.Metric]:
    """Returns metrics that first run the task's postprocessor."""
    after = functools.partial(self.task.postprocess_fn, example=None)

    def measure(targets, predictions, metric):
      return metric(
        [after(text, is_target=True) for text in targets],
        [after(text, is_target=False) for text in predictions],
      )

    functions = self.task.predict_metric_fns
    return [functools.partial(measure, metric=metric) for metric in functions]

  def eos_ids(self) -> dict[str, int]:
    """Returns feature -> the id of its end of sequence."""
    features = self.task.output_features.items()
    return {key: feature.vocabulary.eos_id for key, feature in features}


Task = LocalTask | SeqioTask


def check_split(task: Task, split: str) -> None:
  """Raises ValueError if a task lacks a split."""
  if split not in task.splits:
    near = nearest(split, task.splits)
    raise ValueError(f'The task {task.name!r} has no split {split!r}.{near}')


def training_splits(task: Task) -> list[str]:
  """Returns the training split and, if there is one, the held-out split.

  Raises:
    ValueError: there is no training split.
  """
  check_split(task, TRAIN_SPLIT)
  return [x for x in (TRAIN_SPLIT, EVAL_SPLIT) if x in task.splits]


def find(
  task: str | Task,
  tokenizer: Vocabulary | None = None,
  split: str = 'test',
  prefix: str = '',
  distinct: bool = False,
) -> list[Task]:
  """Returns the task that a name or path stands for, or a mixture's tasks.

  Args:
    task: name of a seqio task or mixture, or of a task of T5; a local task; or
      the path of a file: `.tsv` (inputs<TAB>targets), `.jsonl` ('inputs' and
      'targets'), otherwise one input a line; each also as `.gz`.
    tokenizer: the models' vocabulary, which files and T5's tasks use too. None:
      a local task uses its own vocabulary, T5's tasks use T5's, which is read
      over the network; `task` must not be a path.
    split: the name of the split that a file becomes.
    prefix: text that is put before each input of a file.
    distinct: whether lines of a file with the same input are one example.

  Raises:
    ValueError: there is no such file or task (the message has the nearest
      names); seqio is needed and not installed; or a local task has another
      vocabulary than the models.
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
    of_file = {split: path}, tokenizer.path, kind_of(path), prefix
    task = LocalTask(name, *of_file, distinct=distinct)
  if tokenizer is not None:
    other = Tokenizer(task.vocab_path)
    for field in ('fingerprint', 'eos_id'):
      theirs, ours = getattr(other, field), getattr(tokenizer, field)
      if theirs != ours:
        where = f'{field} of {os.fspath(task.vocab_path)!r}, of {task.name!r}'
        raise unexpected(where, f"{ours!r}, the models'", theirs)
  return [task]


def find_one(task: str | LocalTask) -> Task:
  """Returns the one task that a name stands for.

  Raises:
    ValueError: there is no such task, seqio is needed and not installed, or the
      name stands for a mixture of several tasks.
  """
  first, *others = tasks = find(task)
  if others:
    names = f'the tasks {[part.name for part in tasks]}'
    raise unexpected(str(task), f'one task, such as {first.name}', names)
  return first


def token_lists(task: Task, split: str) -> tuple[list[Any], list[Any]]:
  """Returns source and target ids of a split, in the task's order.

  Args:
    task: a task with the features 'inputs' and 'targets'.
    split: such as 'train'.

  Returns:
    Two lists of int32[n], without the end-of-sequence id.

  Raises:
    ValueError: the task lacks one of the two features, or its examples cannot
      be read.
  """
  ends = task.eos_ids()
  if not {*FEATURES} <= ends.keys():
    where = f'features of the task {task.name!r}'
    raise unexpected(where, f'{FEATURES} among them', sorted(ends))
  sides: dict[str, list[Any]] = {key: [] for key in FEATURES}
  # The caller cuts the ids to their lengths.
  for example in task.examples(split):
    for key, rows in sides.items():
      ids = example[key]
      rows.append(ids[:-1] if len(ids) and ids[-1] == ends[key] else ids)
  return sides['inputs'], sides['targets']


def _subtasks(name: str, tokenizer: Vocabulary | None) -> list[Any]:
  """Returns the seqio tasks of a name: one, or those of a mixture.

  Names of `TASKS` are known even if no module has registered them.
  """
  try:
    seqio, _ = import_seqio()
  except ValueError as error:
    if name in TASKS:
      raise
    near = nearest(name, TASKS)
    why = f'No task {name!r} is known without seqio.{near} {error}'
    raise ValueError(why) from error
  names = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
  if name in names:
    return list(seqio.get_subtasks(seqio.get_mixture_or_task(name)))
  if name in TASKS:
    return [t5_task(name, tokenizer.path if tokenizer else None)]
  near = nearest(name, names | TASKS.keys())
  advice = 'Import the module of your own task first (gin: `import my_tasks`).'
  raise ValueError(f'There is no task {name!r}.{near} {advice}')


def import_seqio() -> tuple[Any, Any]:
  """Returns the modules seqio and tensorflow.

  Raises:
    ValueError: they are not installed.
  """
  otherwise = 'Or give a path: a file of source<TAB>target lines needs neither.'
  seqio = package('A seqio task', 'seqio', 'tasks', otherwise)
  return seqio, package('A seqio task', 'tensorflow', 'tasks', otherwise)


def t5_task(name: str, vocab_path: str | os.PathLike[str] | None) -> Any:
  """Returns the seqio task that T5's own code defines under a name."""
  seqio, tf = import_seqio()
  described = TASKS[name]
  path = os.fspath(vocab_path or VOCAB)
  if os.path.isdir(path):
    path = os.path.join(path, SENTENCEPIECE)

  @seqio.map_over_dataset
  def two_sides(example):
    inputs = ''
    if described.inputs is not None:
      inputs = tf.strings.join([described.prefix, example[described.inputs]])
    return {'inputs': inputs, 'targets': example[described.targets]}

  # Otherwise seqio would begin to download data that are missing.
  source = seqio.TfdsDataSource(described.tfds, read_only=True)
  vocabulary = seqio.SentencePieceVocabulary(path, extra_ids=EXTRA_IDS)
  steps = seqio.preprocessors
  feature = seqio.Feature(vocabulary, add_eos=True)
  return seqio.Task(
    name,
    source=source,
    preprocessors=[two_sides, steps.tokenize, steps.append_eos_after_trim],
    output_features=dict.fromkeys(FEATURES, feature),
    metric_fns=[metrics.METRICS[metric] for metric in described.metrics],
  )


def _check_prepared(loader: Any) -> None:
  """Raises ValueError if TFDS has not prepared the data of a loader."""
  if loader.name is None:
    return  # the loader combines data sets, and TFDS raises their errors
  folder = f', data_dir={loader.data_dir!r}' if loader.data_dir else ''
  command = f"tfds.builder('{loader.name}'{folder}).download_and_prepare()"
  command = f'python -c "import tensorflow_datasets as tfds; {command}"'
  try:
    problem = f'are not in {loader.builder.data_path}'
    if loader.builder.is_prepared():
      return
  except (AssertionError, ValueError) as error:
    problem = f'cannot be loaded ({error})'
  advice = f'Get them by: {command}. TFDS_DATA_DIR names another folder.'
  raise ValueError(f"TensorFlow Datasets' {loader.name} {problem}. {advice}")


def plain(example: dict[str, Any], ends: Mapping[str, int]) -> dict[str, Any]:
  """Converts a seqio example to ids, text, numbers and lists of text.

  Args:
    example: feature -> value, as seqio reads it.
    ends: feature that is ids -> the id of its end of sequence.
  """
  fields: dict[str, Any] = {'targets': np.zeros(0, np.int32)}
  for key, value in example.items():
    if isinstance(value, bytes):
      fields[key] = value.decode('utf-8', 'replace')
    elif key in ends:
      if value.ndim == 1 and np.issubdtype(value.dtype, np.integer):
        fields[key] = value.astype(np.int32)
    elif isinstance(value, np.number):
      fields[key] = value.item()
    elif np.ndim(value) == 1 and value.dtype.hasobject:
      fields[key] = [part.decode('utf-8', 'replace') for part in value]
  if fields['targets'].tolist() == [ends.get('targets')]:
    fields['targets'] = np.zeros(0, np.int32)
  return fields


# These functions read files of examples.


def _distinct(examples: Iterable[dict[str, Any]]) -> Examples:
  """Merges examples with the same input into one with all their references."""
  merged: dict[str, dict[str, Any]] = {}
  lines, broken_off = files.until_broken(iter(examples))
  for example in lines:
    texts = example.get('references') or [example['targets']]
    first = merged.setdefault(example['inputs'], example)
    references = first.setdefault('references', [])
    references += [x for x in texts if x and x not in references]
  yield from merged.values()
  if broken_off is not None:
    raise files.BrokenOff(broken_off)


def ending_of(path: str | os.PathLike[str]) -> str:
  """Returns the ending of a file's name, without `.gz` and a shard's number."""
  name = re.sub(r'(-\d{5}-of-\d{5})?(\.gz)?$', '', os.fspath(path))
  return os.path.splitext(name)[1].removeprefix('.')


def kind_of(path: str | os.PathLike[str]) -> str:
  """Returns the form of a file's lines by its ending: one of `KINDS`."""
  ending = ending_of(path)
  return ending if ending in KINDS else 'txt'


def reading(
  path: str, kind: str | None = None, inputs_field: str = 'inputs'
) -> str | None:
  """Returns a sentence on how a file is read; None for lines of text.

  Args:
    path: the file.
    kind: the form of a line, one of `KINDS`; None: by the file's ending.
    inputs_field: the field of a JSONL object with its input.
  """
  kind = kind or kind_of(path)
  forms = {
    'tsv': 'inputs<TAB>targets on each line',
    'jsonl': f'a JSON object on each line, with the field {inputs_field!r}',
  }
  return f'{path} was read as {forms[kind]}.' if kind in forms else None


def read(
  path: str,
  kind: str | None = None,
  inputs_field: str = 'inputs',
  targets_field: str | None = 'targets',
  keep_broken: bool = True,
) -> Examples:
  """Yields an example, a dict with 'inputs' and 'targets', for each line.

  A line is broken if it has invalid UTF-8, NUL bytes, too many bytes or another
  format than its file. Empty lines are examples too.

  Args:
    path: a file, plain or `.gz`, or a named pipe; '-' is stdin.
    kind: the form of a line, one of `KINDS`; None: by the file's ending.
    inputs_field: the field of a JSONL object with its input.
    targets_field: the field of a JSONL object with its target; None: no field.
    keep_broken: whether a broken line becomes an example whose `BROKEN` says
      why, and whose 'inputs' is the line; otherwise ValueError is raised.

  Raises:
    ValueError: the file cannot be read; or a line is broken (the message has
      its number).
  """
  kind = kind or kind_of(path)
  used = {'inputs': inputs_field, 'targets': targets_field}
  for number, line in enumerate(files.lines(path), 1):
    place = f'{path!r} line {number}'
    try:
      if line.error is not None:
        raise ValueError(f'{place}: {line.error}.')
      if kind == 'jsonl':
        example = _of_object(files.json_object(line.text, place), place, used)
      else:
        columns = line.text.split('\t') if kind == 'tsv' else [line.text]
        if len(columns) > 2:
          got = f'{len(columns)} columns'
          raise unexpected(place, 'source<TAB>target', got)
        example = dict(zip(FEATURES, [*columns, ''], strict=False))
    except ValueError as error:
      if not keep_broken:
        raise
      # The message quotes parts of the line, such as names of fields.
      why = files.writable(str(error)[:_MAX_REASON])
      example = {'inputs': line.text, 'targets': '', BROKEN: why}
    yield example


def field_of(fields: Mapping[str, Any], field: str, place: str, to_do: str):
  """Returns a field of a JSON object.

  Raises:
    ValueError: there is no such field. The message begins with `place`, the
      line of the object, and ends with `to_do`, a piece of advice.
  """
  if field not in fields:
    near = nearest(field, list(fields)[:_MAX_NAMES])
    raise ValueError(f'{place} has no field {field!r}.{near} {to_do}')
  return fields[field]


def _of_object(
  fields: dict[str, Any], place: str, used: Mapping[str, str | None]
) -> dict[str, Any]:
  texts: dict[str, Any] = {'targets': ''}
  for feature, field in used.items():
    if field is None:
      continue
    to_do = f'LocalTask.{feature}_field names another field.'
    text = field_of(fields, field, place, to_do)
    if feature == 'targets' and isinstance(text, list) and text:
      texts['references'] = text
      text = text[0]
    parts = texts.get('references', [text])
    where = f'{place}: field {field!r}'
    if not all(isinstance(part, str) for part in parts):
      raise unexpected(where, 'text', text)
    if any(part != files.writable(part) for part in parts):
      raise unexpected(where, 'characters', 'a lone surrogate (\\ud800)')
    texts[feature] = text
  hidden = {*used.values(), *_RESERVED}
  plain = {n: x for n, x in fields.items() if isinstance(x, str | int | float)}
  return {n: x for n, x in plain.items() if n not in hidden} | texts


def check_feature_lengths(
  lengths: Mapping[str, int], features: Collection[str], task: str
) -> None:
  """Raises ValueError for a feature that a task lacks, or for a bad length."""
  for feature, length in lengths.items():
    name = f'TASK_FEATURE_LENGTHS of task {task!r}'
    checks.check_choice(name, feature, features)
    checks.check_number(f'TASK_FEATURE_LENGTHS[{feature!r}]', length, 1)


def records(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields file and number of each line of a JSONL file, and its object.

  Raises:
    ValueError: the file cannot be read, or a line is not a JSON object.
  """
  for number, line in enumerate(files.text_lines(path), 1):
    place = f'{path!r} line {number}'
    yield place, files.json_object(line, place)


def read_pairs(path: str) -> Iterator[tuple[str, str]]:
  """Yields the source and the target of each line that has a target.

  The target of a line of plain text is the line, and its source is ''. In
  predictions.jsonl, which `specdec decode` writes, the targets are predictions:
  the last one if an input has several, or one for each sentence of a text that
  was split.

  Raises:
    ValueError: the file cannot be read; or a line is broken (the message has
      its number).
  """
  kind = kind_of(path)
  if kind == 'jsonl' and 'prediction' in next(records(path), ('', {}))[1]:
    # Records of failed inputs yield no pairs.
    for _, record in records(path):
      whole = record.get('inputs'), record.get('prediction')
      for source, target in record.get('parts', [whole]):
        target = target[-1] if isinstance(target, list) else target
        if isinstance(source, dict):  # the features of a task
          source = source.get('inputs_pretokenized')
        if source and target:
          yield source, target
    return
  for example in read(path, keep_broken=False):
    pair = example['inputs'], example['targets']
    source, target = ('', pair[0]) if kind == 'txt' else pair
    if target:
      yield source, target


def read_prompts(
  source: str | LocalTask, count: Callable[[str], int], limit: int | None = None
) -> list[str]:
  """Returns the texts that can be decoded, in their order.

  A text that occurs several times in a task, a TSV or a JSONL file, such as one
  with several references, is returned once.

  Args:
    source: the path of UTF-8 text, one prompt per line, see `read`; or a task,
      whose split `PROMPTS_SPLIT` has the inputs.
    count: counts the tokens of a text, such as `Engine.num_input_tokens`.
    limit: longer texts are left out; None: no limit.

  Raises:
    ValueError: the file cannot be read, a line of it is broken, or no line can
      be decoded.
  """
  if isinstance(source, str):
    name = source
    examples = read(source, targets_field=None, keep_broken=False)
  else:
    name = str(source.files.get(PROMPTS_SPLIT))
    examples = source.texts(PROMPTS_SPLIT)
  texts = [example['inputs'] for example in examples]
  if not isinstance(source, str) or kind_of(source) != 'txt':
    texts = list(dict.fromkeys(texts))
  # An empty text is left out, since its output tells little about a pair.
  longest = math.inf if limit is None else limit
  usable = [text for text in texts if text and 0 < count(text) <= longest]
  if not usable:
    short = '' if limit is None else f' of at most {limit} tokens per line'
    where = f'{name!r} has no line that can be decoded'
    got = f'{len(texts)} lines that are empty or too long'
    raise ValueError(f'{where}: expected UTF-8 text{short}, got {got}.')
  return usable
