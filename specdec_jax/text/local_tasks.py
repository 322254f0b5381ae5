"""Files of examples: lines of text, TSV or JSONL; tasks over them.

Examples are as those of the same task in seqio: `inputs_pretokenized` and
`targets_pretokenized` are the texts, prefix included; `inputs` and `targets`
are their ids, cut so that the end-of-sequence id still fits into the length.
"""

import dataclasses
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from specdec_jax import files
from specdec_jax.checks.fields import (
  check_choice,
  check_number,
  check_types,
  nearest,
  unexpected,
)
from specdec_jax.files import TextLine, shipped
from specdec_jax.text import metrics
from specdec_jax.text.tokenizer import Tokenizer

FEATURES = ('inputs', 'targets')
KINDS = ('txt', 'tsv', 'jsonl')
TRAIN_SPLIT, EVAL_SPLIT = 'train', 'validation'
BROKEN = '<broken>'  # key of an example: why its line is broken
# Keys that this module sets; a line's fields with these names are left out.
_OWN = frozenset((*FEATURES, 'references', BROKEN))
_MOST_SAID = 1000  # most characters of the reason why a line is broken
_MOST_NAMES = 100  # most field names that are searched for the nearest one


class Task:
  """What tasks of files and of seqio have in common.

  Attributes:
    name: name of the task; its output files are named after it.
    splits: names of its splits.
  """

  name: str
  splits: Collection[str]

  def check_split(self, split: str) -> None:
    """Raises ValueError if there is no such split."""
    if split not in self.splits:
      near = nearest(split, self.splits)
      raise ValueError(f'The task {self.name!r} has no split {split!r}.{near}')

  def training_splits(self) -> list[str]:
    """The training split and, if there is one, the held-out split.

    Raises:
      ValueError: there is no training split.
    """
    self.check_split(TRAIN_SPLIT)
    return [x for x in (TRAIN_SPLIT, EVAL_SPLIT) if x in self.splits]


@dataclasses.dataclass(frozen=True)
class LocalTask(Task):
  """A task whose examples are the lines of files.

  Attributes:
    files: split -> UTF-8 file, plain or `.gz`.
    vocab_path: the vocabulary of both sides: a sentencepiece model, also
      `gs://bucket/file`, or a folder with GPT-2's vocabulary; see
      `tokenizer.Tokenizer`.
    kind: what a line is: 'txt' an input; 'tsv' source<TAB>target, or a source
      alone; 'jsonl' an object. None is the ending of the file's name.
    prefix: put before each input, such as 'summarize: '.
    inputs_field: the field of a JSONL object with its input.
    targets_field: the field of a JSONL object with its target: a text, or a
      list of texts that are all correct, of which the first is the target. None
      if there are no targets. The object's other texts and numbers are kept as
      they are, except fields named 'inputs', 'targets' or 'references'.
    metrics: names of `metrics.METRICS`.
    distinct: whether lines with the same input are one example, whose
      references are the targets of all.

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
    check_types(self)
    object.__setattr__(self, 'metrics', tuple(self.metrics))
    paths = [shipped.find(path) for path in self.files.values()]
    missing = [path for path in paths if not os.path.isfile(path)]
    vocabulary = shipped.find(self.vocab_path)
    if '://' not in vocabulary and not os.path.exists(vocabulary):
      missing.append(vocabulary)
    if missing:
      raise ValueError(f'Task {self.name!r}: there is no file {missing[0]!r}.')
    for path in paths:
      name = f'LocalTask.kind of {path!r}, by default the ending'
      check_choice(name, self._kind(path), KINDS)
    for metric in self.metrics:
      check_choice('LocalTask.metrics', metric, metrics.METRICS)

  @property
  def splits(self) -> Collection[str]:
    """The keys of `files`."""
    return self.files

  def _kind(self, path: str | os.PathLike[str]) -> str:
    return self.kind or ending_of(path)

  def reading(self, split: str) -> str | None:
    """How the file of a split is read, see `reading`."""
    path = os.fspath(self.files[split])
    return reading(path, self._kind(path), self.inputs_field)

  def texts(
    self, split: str, keep_broken: bool = False
  ) -> Iterator[dict[str, Any]]:
    """The examples of a split before they are tokenised.

    Args:
      split: a key of `files`.
      keep_broken: whether a line with a wrong format gives an example whose
        `BROKEN` says why, and whose 'inputs' is the line; otherwise it raises.

    Returns:
      Dicts with 'inputs' (prefix included), 'targets' ('' if there is none),
      'references' (a list of texts) if the target is a list, and the other
      fields of a JSONL object.

    Raises:
      ValueError: there is no such split; a file cannot be read; a line has a
        wrong format (the message has its number).
      files.BrokenOff: after the examples so far, the rest of the file cannot be
        read.
    """
    self.check_split(split)
    path = os.fspath(self.files[split])
    fields = (self.inputs_field, self.targets_field)

    def generate():
      for example in read(path, self._kind(path), *fields):
        if BROKEN not in example:
          example['inputs'] = self.prefix + example['inputs']
        elif not keep_broken:
          raise ValueError(example[BROKEN])
        yield example

    return _distinct(generate()) if self.distinct else generate()

  def examples(
    self,
    split: str,
    task_feature_lengths: Mapping[str, int] | None = None,
    keep_broken: bool = False,
    tokenizer: Tokenizer | None = None,
  ) -> Iterator[dict[str, Any]]:
    """The examples of a split, in their order, once.

    Args:
      split: such as 'test'.
      task_feature_lengths: feature -> most ids, the end-of-sequence id
        included; longer examples are cut. None, and features that are not
        named, cut nothing.
      keep_broken: as for `texts`.
      tokenizer: None is the task's own.

    Returns:
      Dicts with 'inputs' and 'targets', int32[n], with an end-of-sequence id (a
      target without text is int32[0]: there is nothing to compare a prediction
      with); their texts 'inputs_pretokenized' and 'targets_pretokenized'; and
      the task's other features that are text, numbers, or lists of text.

    Raises:
      ValueError: as for `texts`, or there is no such feature.
    """
    lengths = task_feature_lengths or {}
    check_feature_lengths(lengths, FEATURES, self.name)
    vocabulary = tokenizer or Tokenizer(self.vocab_path)
    # Called here, so that errors show now, not at the first example.
    texts = self.texts(split, keep_broken)

    def generate():
      for example in texts:
        text = {feature: example.pop(feature) for feature in FEATURES}
        for feature in FEATURES:
          example[f'{feature}_pretokenized'] = text[feature]
          ids: list[int] = []
          read = feature == 'inputs' or text[feature]
          if read and BROKEN not in example:
            ids = vocabulary.whole(text[feature], lengths.get(feature))
          example[feature] = np.asarray(ids, np.int32)
        yield example

    return generate()

  def eos_ids(self) -> dict[str, int]:
    """Feature -> the id of its end of sequence."""
    return dict.fromkeys(FEATURES, Tokenizer(self.vocab_path).eos_id)


def _distinct(examples: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
  """Yields an example for each input; its references are those of all lines."""
  merged: dict[str, dict[str, Any]] = {}
  broken_off = None
  try:
    for example in examples:
      texts = example.get('references') or [example['targets']]
      first = merged.setdefault(example['inputs'], example)
      known = first.setdefault('references', [])
      known += [text for text in texts if text and text not in known]
  except files.BrokenOff as error:
    broken_off = error
  yield from merged.values()
  if broken_off is not None:
    raise broken_off


def ending_of(path: str | os.PathLike[str]) -> str:
  """The ending of a file's name, without `.gz`."""
  ending = os.path.splitext(os.fspath(path).removesuffix('.gz'))[1]
  return ending.removeprefix('.')


def kind_of(path: str | os.PathLike[str]) -> str:
  """What a line of a file is, by the file's ending: one of `KINDS`."""
  ending = ending_of(path)
  return ending if ending in KINDS else 'txt'


def reading(
  path: str, kind: str | None = None, inputs_field: str = 'inputs'
) -> str | None:
  """A sentence on how a file is read, None for lines of text.

  Args:
    path: the file.
    kind: one of `KINDS`; None is that of its ending.
    inputs_field: as of `LocalTask`.
  """
  kind = kind or kind_of(path)
  how = {
    'tsv': 'inputs<TAB>targets on each line',
    'jsonl': f'a JSON object on each line, with the field {inputs_field!r}',
  }
  return f'{path} was read as {how[kind]}.' if kind in how else None


def read(
  path: str,
  kind: str | None = None,
  inputs_field: str = 'inputs',
  targets_field: str | None = 'targets',
) -> Iterator[dict[str, Any]]:
  """Yields the example of each line of a file; see `LocalTask.texts`.

  A line with invalid UTF-8, too many bytes or another format than its file has
  gives an example whose `BROKEN` says why, and whose 'inputs' is the line.
  Empty lines are examples too.

  Args:
    path: a file, plain or `.gz`, or a named pipe; '-' is stdin.
    kind: one of `KINDS`; None is that of its ending.
    inputs_field: as of `LocalTask`.
    targets_field: as of `LocalTask`.

  Raises:
    ValueError: as for `files.lines`.
  """
  kind = kind or kind_of(path)
  for number, line in enumerate(files.lines(path), 1):
    place = f'{path!r} line {number}'
    try:
      yield _example(line, kind, place, inputs_field, targets_field)
    except ValueError as error:
      # The message quotes parts of the line, such as names of fields.
      why = files.writable(str(error)[:_MOST_SAID])
      yield {'inputs': line.text, 'targets': '', BROKEN: why}


def _example(
  line: TextLine,
  kind: str,
  place: str,
  inputs_field: str,
  targets_field: str | None,
) -> dict[str, Any]:
  if line.error is not None:
    raise ValueError(f'{place}: {line.error}.')
  if kind == 'jsonl':
    used = {'inputs': inputs_field, 'targets': targets_field}
    return _of_object(json_object(line.text, place), place, used)
  columns = line.text.split('\t') if kind == 'tsv' else [line.text]
  if len(columns) > 2:
    raise unexpected(place, 'source<TAB>target', f'{len(columns)} columns')
  return dict(zip(FEATURES, [*columns, ''], strict=False))


def _of_object(
  fields: dict[str, Any], place: str, used: Mapping[str, str | None]
) -> dict[str, Any]:
  texts: dict[str, Any] = {'targets': ''}
  for feature, field in used.items():
    if field is None:
      continue
    if field not in fields:
      names = list(fields)[:_MOST_NAMES]
      raise ValueError(
        f'{place} has no field {field!r}.{nearest(field, names)}'
        f' LocalTask.{feature}_field names another field.'
      )
    text = fields[field]
    if feature == 'targets' and isinstance(text, list) and text:
      texts['references'] = text
      text = text[0]
    parts = texts.get('references', [text])
    if not all(isinstance(part, str) for part in parts):
      raise unexpected(f'{place}: field {field!r}', 'text', text)
    if any(part != files.writable(part) for part in parts):
      where = f'{place}: field {field!r}'
      raise unexpected(where, 'characters', 'a lone surrogate (\\ud800)')
    texts[feature] = text
  others = {
    key: value
    for key, value in fields.items()
    if key not in {*used.values(), *_OWN}
    and isinstance(value, str | int | float)
  }
  return others | texts


def check_feature_lengths(
  lengths: Mapping[str, int], features: Iterable[str], task: str
) -> None:
  """Raises ValueError for a feature that a task lacks, or for a bad length."""
  features = list(features)
  for feature, length in lengths.items():
    check_choice(f'TASK_FEATURE_LENGTHS of task {task!r}', feature, features)
    check_number(f'TASK_FEATURE_LENGTHS[{feature!r}]', length, 1)


def json_object(line: str, place: str) -> dict[str, Any]:
  """The JSON object of a line.

  Raises:
    ValueError: the line is not a JSON object; the message names the place.
  """
  try:
    value = json.loads(line)
  except RecursionError as error:
    raise ValueError(f'{place}: its JSON is nested too deep.') from error
  except ValueError as error:
    raise ValueError(f'{place} is not JSON: {error}.') from error
  if not isinstance(value, dict):
    raise unexpected(place, 'a JSON object', value)
  return value


def read_inputs(path: str) -> list[str]:
  """The inputs of `read`; every line must be usable.

  A source with several references is there several times in its file, and once
  among these texts. Targets are not looked at.

  Raises:
    ValueError: as for `files.lines`; or a line cannot be used, with its number.
  """
  texts = []
  for example in read(path, targets_field=None):
    if BROKEN in example:
      raise ValueError(example[BROKEN])
    texts.append(example['inputs'])
  return texts if kind_of(path) == 'txt' else list(dict.fromkeys(texts))
