"""Fits an n-gram drafter to text, or to a target's own outputs."""

import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Annotated

import jax
import rich.console

from specdec_jax.checks.fields import Bound, check_types, is_a, unexpected
from specdec_jax.drafters.ngram_table import NGramTable, fit
from specdec_jax.files import writable
from specdec_jax.report import record
from specdec_jax.report.table import Table
from specdec_jax.text.tasks import field_of, kind_of, read, records
from specdec_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class FitNgramConfig:
  """The settings of fitting an n-gram table to files.

  The ending of a file's name tells its format (with or without `.gz`). A
  `.jsonl` file has a JSON record per line, such as predictions.jsonl of
  `specdec decode` or the -predict.jsonl-00000-of-00001 of a task. A `.tsv` file
  has source<TAB>target lines, of which the targets are used. Any other file is
  text with one output per line.

  Attributes:
    tokenizer: the target's tokenizer.
    train_files: files to fit the table to.
    output_file: path of the table, a `.npz` file.
    order: length of the n-grams; 1 is a unigram, 2 a bigram.
    field: field of a record that holds its output, as text or as ids.
    start_id: id that the target's decoder begins with, 0 in the T5 family; None
      if it begins with the text itself.
    max_continuations: the most next tokens that are stored per context.
    min_count: contexts that occur less often are left out.

  Raises:
    ValueError: no file is given, or start_id is outside the vocabulary.
  """

  tokenizer: Tokenizer
  train_files: Annotated[Sequence[str], Bound(1)]
  output_file: Annotated[str, Bound(1)]
  order: int = 2
  field: str = 'prediction_tokens'
  start_id: int | None = 0
  max_continuations: int = 32
  min_count: int = 1

  def __post_init__(self):
    check_types(self)
    size, first = self.tokenizer.vocab_size, self.start_id
    if first is not None and not 0 <= first < size:
      raise unexpected('start_id', f'None or an id below {size}', first)


def fit_ngram(
  config: FitNgramConfig, console: rich.console.Console | None = None
) -> NGramTable:
  """Fits a table, writes it, and prints its sizes.

  Raises:
    ValueError: a number is too small or the output cannot be written (before a
      file is read); a file is missing or broken, an id is outside the
      vocabulary, or the corpus is too small for the order.
  """
  console = record.begin(console, config.output_file)
  first = [] if config.start_id is None else [config.start_id]
  paths, tokenizer = config.train_files, config.tokenizer
  ids = (outputs(path, tokenizer, config.field) for path in paths)
  table = fit(
    ([*first, *row] for row in itertools.chain.from_iterable(ids)),
    config.order,
    tokenizer.vocab_size,
    max_continuations=config.max_continuations,
    min_count=config.min_count,
    fingerprint=tokenizer.fingerprint,
  )
  table.save(config.output_file)
  rows = [
    [f'contexts of {length} tokens', f'{number:,}']
    for length, number in enumerate(table.num_contexts)
  ]
  rows.append(['continuations', f'{len(table.ids):,}'])
  size = sum(array.nbytes for array in jax.tree.leaves(table))
  rows.append(['MiB on the device', f'{size / 2**20:.2f}'])
  console.print(Table(os.fspath(config.output_file), ['what', ''], rows))
  return table


def outputs(path: str, tokenizer: Tokenizer, field: str) -> Iterator[list[int]]:
  """Yields the ids of each output of a file.

  An end-of-sequence id is appended to text. Ids are used unchanged, because an
  output that was cut short has no end-of-sequence id.

  Args:
    path: the file, in one of the formats that `FitNgramConfig` describes.
    tokenizer: encodes outputs that are text.
    field: field of JSON records that holds the output.

  Raises:
    ValueError: the file cannot be read, or a record lacks the field.
  """
  kind = kind_of(path)
  side = 'targets' if kind == 'tsv' else 'inputs'
  values = (example[side] for example in read(path, kind, keep_broken=False))
  if kind == 'jsonl':
    values = (field_of(x, field, at, 'Set field.') for at, x in records(path))
  for number, value in enumerate(values, 1):
    several = is_a(value, list) and not is_a(value, list[int])
    for output in value if several else [value]:
      if isinstance(output, str) and output == writable(output):
        output = tokenizer.encode(output)
        output += [tokenizer.eos_id] * bool(output)
      if not is_a(output, list[int]):
        place = f'{path!r} line {number}: {field!r}'
        raise unexpected(place, 'text or ids', value)
      if output:
        yield output
