"""Examples of a run over a task: of a registered task, or of a file.

An example is a dict from `tasks.examples`: ids of 'inputs' and 'targets', their
texts as 'inputs_pretokenized' and 'targets_pretokenized', and any other
features. A file needs no TensorFlow.
"""

import itertools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax import files
from specdec_jax.files import shipped
from specdec_jax.text import local_tasks, tasks
from specdec_jax.text.local_tasks import BROKEN, LocalTask
from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.text.vocabulary import open_vocabulary

INPUTS, TARGETS = 'inputs', 'targets'
_PRETOKENIZED = '_pretokenized'
_REFERENCES = 'references'

Example = Mapping[str, Any]


def find(task: str | LocalTask, split: str, tokenizer: Tokenizer):
  """Makes a local task for the path of a file; returns other tasks as they are.

  Args:
    task: the name of a task, a local task, or the path of a file: `.tsv`
      (inputs<TAB>targets), `.jsonl` ('inputs' and 'targets'), otherwise one
      input per line; each of them also as `.gz`.
    split: the split that a file is used as.
    tokenizer: the models' tokenizer, for a file.

  Raises:
    ValueError: it looks like a path, but there is no such file; or a local task
      has another vocabulary than the models.
  """
  if isinstance(task, LocalTask):
    return _checked(task, tokenizer)
  task = shipped.find(task)
  ending = pathlib.Path(task.removesuffix('.gz')).suffix.removeprefix('.')
  if not os.path.isfile(task):
    if os.sep in task or ending in local_tasks.KINDS:
      if os.path.exists(task):
        raise ValueError(
          f'{task!r} is a folder, a pipe or a device. Examples are read from a'
          ' file, because a resumed run reads them again.'
        )
      raise ValueError(
        f'There is no file of examples {task!r}. Expected the path of one'
        f' (.tsv, .jsonl, or a line for each example), relative to'
        f' {os.getcwd()}, or the name of a task.'
      )
    return task
  name = pathlib.Path(task).name.removesuffix('.gz')
  found = LocalTask(
    name=pathlib.Path(name).stem if ending in local_tasks.KINDS else name,
    files={split: task},
    vocab_path=tokenizer.path,
    kind=local_tasks.kind_of(task),
  )
  return _checked(found, tokenizer)


def _checked(task: LocalTask, tokenizer: Tokenizer) -> LocalTask:
  """The task; raises ValueError if it would give ids of another vocabulary."""
  other = open_vocabulary(task.vocab_path)
  if other.fingerprint != tokenizer.fingerprint:
    raise ValueError(
      f'The task {task.name!r} has the vocabulary'
      f' {os.fspath(task.vocab_path)!r}, the models have {tokenizer.path!r}'
      ' (their fingerprints differ).'
    )
  if other.eos_id != tokenizer.eos_id:
    raise ValueError(
      f'The task {task.name!r} ends a text with id {other.eos_id}, as'
      f' open_vocabulary({os.fspath(task.vocab_path)!r}) does; the models'
      f' with {tokenizer.eos_id}.'
    )
  return task


def name_of(task: str | LocalTask) -> str:
  """The name that results are named after."""
  name = task.name if isinstance(task, LocalTask) else task
  return name.replace(os.sep, '_')


def load(
  task: str | LocalTask,
  split: str,
  lengths: Mapping[str, int] | None,
  tokenizer: Tokenizer,
  shard_id: int = 0,
  num_shards: int = 1,
) -> tuple[list[Example], str | None]:
  """Reads the examples of one shard, in the order of the task.

  Args:
    task: as `find` returns it.
    split: split of the task.
    lengths: feature -> the most tokens, its end included; None cuts nothing.
    tokenizer: the models' tokenizer, for T5's own tasks.
    shard_id: the shard has the examples with index % `num_shards` == shard_id.
    num_shards: how many shards there are.

  Returns:
    The examples, in which a broken one has a `BROKEN`; and why the file could
    not be read to its end (then the examples are those before that place), or
    None if it could.

  Raises:
    ValueError: there is no such task, split or data, or all of the shard's
      examples are broken.
  """
  every = tasks.examples(task, split, lengths, tokenizer.path, True)
  shard = itertools.islice(every, shard_id, None, num_shards)
  found: list[Example]
  found, broken_off = files.until_broken(shard)
  check_some(found)
  return found, broken_off


def check_some(found: Sequence[Example]) -> None:
  """Raises ValueError if all examples are broken: the task is wrong."""
  if found and all(BROKEN in example for example in found):
    raise ValueError(found[0][BROKEN])


def texts(example: Example) -> dict[str, Any]:
  """The features of an example that are texts before tokenisation."""
  return {k: v for k, v in example.items() if k.endswith(_PRETOKENIZED)}


def reference(example: Example) -> Any:
  """The correct text, or a list of several; None if there is none."""
  found = example.get(_REFERENCES)
  return found or example.get(TARGETS + _PRETOKENIZED) or None
