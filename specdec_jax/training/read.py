"""The data of a training run: files of text or ids, or a task."""

import os

from specdec_jax.files import shipped
from specdec_jax.text import tasks
from specdec_jax.text.local_tasks import (
  FEATURES,
  LocalTask,
  check_feature_lengths,
)
from specdec_jax.text.tokenizer import Tokenizer, train_tokenizer
from specdec_jax.text.vocabulary import open_vocabulary
from specdec_jax.training.config import TrainRun
from specdec_jax.training.pairs import (
  TokenPairs,
  read_lines,
  read_tsv,
  tokenise,
  tokenise_lines,
)


def tokenizer_of(run: TrainRun) -> Tokenizer | None:
  """The vocabulary of a run; trains it if it does not exist yet.

  Raises:
    ValueError: it does not exist, and there is no text to train it on.
  """
  if run.vocab_path is None:
    return None
  if os.path.exists(shipped.find(run.vocab_path)):
    return open_vocabulary(run.vocab_path)
  if run.train_file is None or run.train_file.endswith('.npz'):
    raise ValueError(
      f'There is no vocabulary at {run.vocab_path!r}, and none can be trained:'
      ' training it needs a train_file of text.'
    )
  os.makedirs(os.path.dirname(run.vocab_path) or '.', exist_ok=True)
  if run.network.has_encoder:
    pairs = read_tsv(run.train_file)
    sentences = [side for pair in pairs for side in pair]
  else:
    sentences = read_lines(run.train_file)
  return train_tokenizer(sentences, run.vocab_path, run.network.vocab_size)


def pairs_of(
  run: TrainRun, tokenizer: Tokenizer | None
) -> tuple[TokenPairs, TokenPairs | None]:
  """Training and held-out pairs.

  Raises:
    ValueError: data cannot be read, or has ids outside the model's vocabulary.
  """
  if run.task is not None:
    found = _task_pairs(run, run.task)
  else:
    paths = (run.train_file, run.eval_file)
    found = [_read(run, path, tokenizer) for path in paths if path is not None]
  for pairs in found:
    _check_ids(pairs, run.network.vocab_size)
  return found[0], found[1] if len(found) > 1 else None


def _task_pairs(run: TrainRun, task: str | LocalTask) -> list[TokenPairs]:
  """Training and, if the task has them, held-out pairs."""
  lengths = run.task_feature_lengths or {}
  name = task.name if isinstance(task, LocalTask) else task
  check_feature_lengths(lengths, FEATURES, name)
  found = []
  for split in tasks.splits(task):
    sides = [
      [
        ids[: lengths[feature] - 1] if feature in lengths else ids
        for ids in rows
      ]
      for feature, rows in zip(
        FEATURES, tasks.token_lists(task, split), strict=True
      )
    ]
    found.append(TokenPairs.from_lists(*sides))
  return found


def _read(run: TrainRun, path: str, tokenizer: Tokenizer | None) -> TokenPairs:
  if path.endswith('.npz') or tokenizer is None:
    return TokenPairs.load(path)
  if not run.network.has_encoder:
    return tokenise_lines(read_lines(path), tokenizer)
  return tokenise(read_tsv(path), tokenizer)


def _check_ids(pairs: TokenPairs, vocab_size: int) -> None:
  for side in (pairs.inputs, pairs.targets):
    if len(side) and not 0 <= side.min() <= side.max() < vocab_size:
      raise ValueError(
        f'The data has token ids from {side.min()} to {side.max()}; the model'
        f' has a vocabulary of {vocab_size}. Do they belong together?'
      )
