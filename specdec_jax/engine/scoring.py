"""Scoring: the log-probability that a model gives to known outputs.

The model reads the outputs instead of choosing them (teacher forcing), through
the same `prefill` and `extend` as the decoding loops, so that a score is the
log-probability that decoding reports for the same tokens.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax import partitioning, probs
from specdec_jax.engine.padding import next_power_of_two, padded, padded_rows
from specdec_jax.models.base import LanguageModel, Params, start_id

_SMALLEST = 16  # tokens of the shortest program
# Positions read in one call. Not all of them together: the logits of a batch of
# long outputs would take gigabytes.
_BLOCK = 64


@dataclasses.dataclass(frozen=True)
class Score:
  """The log-probabilities that a model gives to one output.

  Attributes:
    log_probs: log-probability of each token, natural logarithm, temperature 1,
      nothing filtered.
  """

  log_probs: tuple[float, ...]

  @property
  def total(self) -> float:
    """Log-probability of the whole output given its input, in nats."""
    return float(sum(self.log_probs))


def score(
  network: LanguageModel,
  params: Params,
  inputs: Sequence[Sequence[int]],
  targets: Sequence[Sequence[int]],
) -> list[Score]:
  """Scores each output given its input: log prob(targets | inputs).

  Lengths are rounded up to a power of two, and the number of rows as in an
  engine, so that few programs are compiled.

  Args:
    network: such as `T5(config)`.
    params: its parameters, as a checkpoint has them or placed.
    inputs: ids of each input as the model reads them: for a model with an
      encoder with their end of sequence; for a decoder-only model not empty.
    targets: ids of each output; an end of sequence among them is scored too.

  Returns:
    A `Score` for each example. Logits that are not a distribution give NaN.

  Raises:
    ValueError: the numbers of inputs and outputs differ, an id is outside the
      vocabulary, or a decoder-only model's input is empty.
  """
  _check(network, inputs, targets)
  if not inputs:
    return []
  begins, rows = _rows(network, inputs, targets)
  encoded = inputs if network.has_encoder else [[]] * len(inputs)
  found = _log_probs(network, params, _padded(encoded), _padded(rows, 1))
  found = partitioning.on_host(found)
  return [
    Score(tuple(float(x) for x in row[begin : begin + len(ids)]))
    for row, begin, ids in zip(found, begins, targets, strict=False)
  ]


def shapes(
  network: LanguageModel,
  inputs: Sequence[Sequence[int]],
  targets: Sequence[Sequence[int]],
) -> tuple[int, ...]:
  """The sizes that decide which program `score` runs for these examples."""
  _, rows = _rows(network, inputs, targets)
  encoded = inputs if network.has_encoder else [[]]
  return padded_rows(len(inputs)), _width(encoded), _width(rows, 1)


def _rows(
  network: LanguageModel,
  inputs: Sequence[Sequence[int]],
  targets: Sequence[Sequence[int]],
) -> tuple[list[int], list[list[int]]]:
  """The decoder's ids, read and then produced, and where producing begins.

  The decoder of an encoder-decoder begins with its start token, a decoder-only
  model with the input. The logits after the last of these tokens are those of
  the first output token.
  """
  first = start_id(network)
  firsts = [[first] if network.has_encoder else [*ids] for ids in inputs]
  return (
    [len(first) - 1 for first in firsts],
    [[*first, *ids] for first, ids in zip(firsts, targets, strict=True)],
  )


@functools.partial(jax.jit, static_argnums=0)
def _log_probs(
  network: LanguageModel, params: Params, inputs: jax.Array, rows: jax.Array
) -> jax.Array:
  """Log-probabilities float32[B, S] of all but the first id of each row.

  The rows are int32[B, S + 1].

  S is a power of two of at least `_SMALLEST`: a whole number of blocks.
  """
  batch, width = rows.shape[0], rows.shape[1] - 1
  block = min(width, _BLOCK)

  def read(cache, pair):
    logits, cache = network.extend(params, cache, pair[0])
    log_probs = probs.log_prob_of(logits, pair[1])
    valid = probs.valid_logits(logits)
    return cache, jnp.where(valid, log_probs, jnp.nan)

  def in_blocks(tokens):
    return jnp.moveaxis(tokens.reshape(batch, width // block, block), 1, 0)

  cache = network.prefill(params, inputs, -(-width // _BLOCK) * _BLOCK)
  pairs = in_blocks(rows[:, :-1]), in_blocks(rows[:, 1:])
  _, found = lax.scan(read, cache, pairs)
  return jnp.moveaxis(found, 0, 1).reshape(batch, width)


def _padded(rows: Sequence[Sequence[int]], begin: int = 0) -> Any:
  """Rows of ids as int32[B, begin + S], padded with 0."""
  width = begin + _width(rows, begin)
  return padded(rows, padded_rows(len(rows)), width)[0]


def _width(rows: Sequence[Sequence[int]], begin: int = 0) -> int:
  return max(_SMALLEST, next_power_of_two(max(map(len, rows)) - begin))


def _check(
  network: LanguageModel,
  inputs: Sequence[Sequence[int]],
  targets: Sequence[Sequence[int]],
) -> None:
  if len(inputs) != len(targets):
    raise ValueError(
      f'Scoring needs an output for each input: got {len(inputs)} inputs and'
      f' {len(targets)} targets.'
    )
  size = network.vocab_size
  for name, rows in (('inputs', inputs), ('targets', targets)):
    for index, ids in enumerate(rows):
      wrong = [token for token in ids if not 0 <= token < size]
      if wrong:
        raise ValueError(
          f'{name}[{index}] holds {wrong[0]}, which is outside the vocabulary'
          f' of {size}.'
        )
      if name == 'inputs' and not network.has_encoder and not len(ids):
        raise ValueError(
          f'inputs[{index}] is empty: a model without an encoder needs a token'
          ' to begin with, such as its beginning of sequence.'
        )
