"""Fits an n-gram drafter to text, or to a target's own outputs."""

import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console

from specdec_jax.checks.arguments import check_at_least
from specdec_jax.checks.fields import check_types
from specdec_jax.checks.names import nearest
from specdec_jax.drafters.ngram import first_guess, longest_known
from specdec_jax.drafters.ngram_fit import fit
from specdec_jax.drafters.ngram_table import NGramTable
from specdec_jax.files import text_lines, writable
from specdec_jax.measure.table import Table, started
from specdec_jax.text.local_tasks import json_object
from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.training.pairs import TokenPairs, read_tsv

_BLOCK = 8192  # tokens that are scored in one call


@dataclasses.dataclass(frozen=True)
class FitNgramConfig:
  """An n-gram table and the files that it is fitted to.

  The ending of a file's name says what it is (with or without `.gz`): `.jsonl`
  has records, such as predictions.jsonl of scripts/decode.py or the
  -predict.jsonl-00000-of-00001 of a task; `.tsv` has source<TAB>target lines,
  and `.npz` arrays of `TokenPairs`, of which the targets are used; any other
  file is text, one output per line.

  Attributes:
    tokenizer: the target's tokenizer.
    train_files: files to fit the table to.
    output_file: the table, `.npz`.
    order: n; 1 is a unigram, 2 a bigram.
    field: field of a record that holds its output: text, or the ids that were
      produced.
    start_id: id that the target's decoder begins with, 0 in the T5 family; None
      is none.
    max_continuations: entries kept per context.
    min_count: contexts seen less often are left out.
    valid_files: held-out outputs to score the table's first guess on; may be
      empty.

  Raises:
    ValueError: a number is too small, or there is no file.
  """

  tokenizer: Tokenizer
  train_files: Sequence[str]
  output_file: str
  order: int = 2
  field: str = 'prediction_tokens'
  start_id: int | None = 0
  max_continuations: int = 32
  min_count: int = 1
  valid_files: Sequence[str] = ()

  def __post_init__(self):
    check_types(self)
    if self.order == 0:
      raise ValueError(
        'order must be at least 1, got 0. Order 1 is a unigram, which ignores'
        ' the tokens before; order 2 is a bigram.'
      )
    check_at_least(self, order=1, max_continuations=1, min_count=1)
    if not self.train_files:
      raise ValueError('train_files names no file to fit to.')
    first = self.start_id
    if first is not None and first < 0:
      raise ValueError(f'start_id must be None or an id, got {first!r}.')
    if not self.output_file or os.path.isdir(self.output_file):
      raise ValueError(
        f'output_file must be the path of a file, got {self.output_file!r}.'
      )


def fit_ngram(
  config: FitNgramConfig, console: rich.console.Console | None = None
) -> NGramTable:
  """Fits a table, writes it, and prints what it holds.

  Raises:
    ValueError: a file is missing or broken, an id is outside the vocabulary,
      or the corpus is too small for the order.
  """
  console = started(config, console)
  read = functools.partial(
    outputs, tokenizer=config.tokenizer, field=config.field
  )
  size = config.tokenizer.vocab_size
  if config.start_id is not None and config.start_id >= size:
    raise ValueError(
      f'start_id is {config.start_id}, outside the vocabulary of {size}.'
    )
  first = [] if config.start_id is None else [config.start_id]
  # Read before the fit, so that a missing file shows immediately.
  held_out = [[*first, *ids] for f in config.valid_files for ids in read(f)]
  table = fit(
    ([*first, *ids] for f in config.train_files for ids in read(f)),
    config.order,
    config.tokenizer.vocab_size,
    max_continuations=config.max_continuations,
    min_count=config.min_count,
    fingerprint=config.tokenizer.fingerprint,
  )
  table.save(config.output_file)
  rate = score(table, held_out) if held_out else None
  console.print(_summary(config, table, rate))
  return table


def outputs(path: str, tokenizer: Tokenizer, field: str) -> Iterator[list[int]]:
  """Yields the ids of each output of a file, its end included.

  Ids that were produced are taken as they are; an output that was cut short has
  no end.

  Args:
    path: see `FitNgramConfig`.
    tokenizer: for text.
    field: field of JSON records that holds the output.

  Raises:
    ValueError: the file cannot be read, or a record lacks the field.
  """
  # The name of a task's results ends with the shard.
  name = re.sub(r'-\d{5}-of-\d{5}$', '', path.removesuffix('.gz'))
  end = [tokenizer.eos_id]
  if name.endswith('.npz'):
    pairs = TokenPairs.load(path)
    for index in range(len(pairs)):
      yield [*map(int, pairs[index][1]), *end]
  elif name.endswith('.jsonl'):
    for number, line in enumerate(text_lines(path), 1):
      for value in _values(f'{path!r} line {number}', line, field):
        yield _ids(f'{path!r} line {number}', value, tokenizer, field)
  else:
    texts: Any = text_lines(path)
    if name.endswith('.tsv'):
      texts = (target for _, target in read_tsv(path))
    for text in texts:
      if ids := tokenizer.encode(text):
        yield [*ids, *end]


def score(table: NGramTable, sequences: Sequence[Sequence[int]]) -> float:
  """The share of tokens that are the table's first guess, found on the device.

  Args:
    table: the table.
    sequences: ids, each beginning with the start token, which is not guessed.

  Raises:
    ValueError: there is no token to guess.
  """
  size = table.order - 1
  contexts, known, wanted = [], [], []
  for ids in sequences:
    for place in range(1, len(ids)):
      near = ids[max(place - size, 0) : place][::-1] if size else []
      contexts.append([*near, *[0] * (size - len(near))])
      known.append(place)
      wanted.append(ids[place])
  if not wanted:
    raise ValueError('valid_files hold no output to score on.')
  guess = jax.jit(_guess)
  hits = 0
  for begin in range(0, len(wanted), _BLOCK):
    part = slice(begin, begin + _BLOCK)
    missing = _BLOCK - len(wanted[part])  # one shape, one program
    recent = np.array(contexts[part], np.int32).reshape(len(known[part]), size)
    found = guess(
      table,
      np.pad(recent, ((0, missing), (0, 0))),
      np.pad(np.array(known[part], np.int32), (0, missing)),
    )
    hits += int(np.sum(np.asarray(found)[: len(wanted[part])] == wanted[part]))
  return hits / len(wanted)


def _guess(table: NGramTable, recent: jax.Array, known: jax.Array):
  table = jax.tree.map(jnp.asarray, table)
  return first_guess(table, longest_known(table, recent, known))


def _values(where: str, line: str, field: str) -> list[Any]:
  """The outputs of one record: one output, or several samples."""
  record = json_object(line, where)
  if field not in record:
    names = nearest(field, record)
    raise ValueError(f'{where} has no field {field!r}.{names} Set field.')
  value = record[field]
  several = isinstance(value, list) and any(
    not isinstance(one, int) for one in value
  )
  return [one for one in (value if several else [value]) if one]


def _ids(where: str, value: Any, tokenizer: Tokenizer, field: str) -> list[int]:
  if isinstance(value, str) and value == writable(value):
    return [*tokenizer.encode(value), tokenizer.eos_id]
  if isinstance(value, list) and all(isinstance(one, int) for one in value):
    return value
  raise ValueError(
    f'{where}: {field!r} holds {str(value)[:40]!r}; expected text or ids.'
  )


def _summary(
  config: FitNgramConfig, table: NGramTable, rate: float | None
) -> Table:
  rows = [
    [f'contexts of {length} tokens', f'{number:,}']
    for length, number in enumerate(table.num_contexts)
  ]
  rows += [
    ['continuations', f'{len(table.ids):,}'],
    ['MiB on the device', f'{table.num_bytes / 2**20:.2f}'],
  ]
  if rate is not None:
    rows.append(['first guess right, held out', f'{rate:.3f}'])
  return Table(os.fspath(config.output_file), ['what', ''], rows)
