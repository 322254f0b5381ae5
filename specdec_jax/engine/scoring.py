"""Scoring: the log-probability that a model gives to known outputs.

The model reads the outputs instead of choosing them (teacher forcing), through
the same `prefill` and `extend` as the decoding loops, so that a score is the
log-probability that decoding reports for the same tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax import partitioning, probs
from specdec_jax.checks.fields import unexpected
from specdec_jax.engine.padding import next_power_of_two, padded, padded_rows
from specdec_jax.models.base import LanguageModel, Params, pad_id, start_id

# For each token of an output: the likeliest ids and their log-probabilities.
Top = Sequence[Sequence[tuple[int, float]]]
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
    top: for each token the likeliest tokens at its place and their
      log-probabilities, the likeliest first; () if not asked for.
  """

  log_probs: tuple[float, ...]
  top: Top = ()

  @property
  def total(self) -> float:
    """Log-probability of the whole output given its input, in nats."""
    return float(sum(self.log_probs))


def score(
  network: LanguageModel,
  params: Params,
  inputs: Sequence[Sequence[int]],
  targets: Sequence[Sequence[int]],
  prompt: Sequence[int] = (),
  *,
  num_top: int = 0,
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
    prompt: with an encoder, ids that every output begins with and that are not
      scored, such as the token of a language.
    num_top: how many of the likeliest tokens at each place are wanted.

  Returns:
    A `Score` for each example. Logits that are not a distribution give NaN.

  Raises:
    ValueError: the numbers of inputs and outputs differ, an id is outside the
      vocabulary, or a decoder-only model's input is empty.
  """
  _check(network, inputs, targets)
  if not inputs:
    return []
  if not num_top:
    found = _of_each(_log_prob, (network,), (params,), inputs, targets, prompt)
    return [Score(tuple(row.tolist())) for row in found]
  # Not a program for each number.
  number = min(next_power_of_two(num_top), network.vocab_size)
  measure = _with_top(number)
  found = _of_each(measure, (network,), (params,), inputs, targets, prompt)
  return [
    Score(tuple(row['log_probs'].tolist()), _top(row, num_top)) for row in found
  ]


def _top(row: Mapping[str, np.ndarray], number: int) -> Top:
  pairs = zip(row['ids'].tolist(), row['top'].tolist(), strict=True)
  return [list(zip(ids, values, strict=True))[:number] for ids, values in pairs]


def compare(
  networks: tuple[LanguageModel, LanguageModel],
  params: tuple[Params, Params],
  inputs: Sequence[Sequence[int]],
  targets: Sequence[Sequence[int]],
  prompt: Sequence[int] = (),
) -> list[dict[str, np.ndarray]]:
  """Two networks that read the same outputs, as in `score`.

  Args:
    networks: of the same ids, such as one network with rounded parameters and
      without.
    params: the parameters of each.
    inputs: as for `score`.
    targets: likewise.
    prompt: likewise.

  Returns:
    For each example arrays of one number a token: 'log_probs' of the first
    network and 'other_log_probs'; and over the vocabulary the mean squares of
    the first one's 'logits' and of the 'errors' of the other's, where the mean
    of the logits of a position is taken off.

  Raises:
    ValueError: as for `score`.
  """
  for network in networks:
    _check(network, inputs, targets)
  if not inputs:
    return []
  return _of_each(_difference, networks, params, inputs, targets, prompt)


def _of_each(measure, networks, params, inputs, targets, prompt) -> list[Any]:
  """What `_measured` gives for the tokens of each target."""
  network = networks[0]
  begins, rows = _rows(network, inputs, targets, prompt)
  encoded = inputs if network.has_encoder else [[]] * len(inputs)
  padded_inputs = _padded(encoded, pad=pad_id(network))
  found = _measured(measure, networks, params, padded_inputs, _padded(rows, 1))
  found = jax.tree.map(partitioning.on_host, found)

  def of_target(row, begin, ids):
    return jax.tree.map(lambda x: x[row, begin : begin + len(ids)], found)

  return [
    of_target(*each)
    for each in zip(range(len(targets)), begins, targets, strict=True)
  ]


def shapes(
  network: LanguageModel,
  inputs: Sequence[Sequence[int]],
  targets: Sequence[Sequence[int]],
  prompt: Sequence[int] = (),
) -> tuple[int, ...]:
  """The sizes that decide which program `score` runs for these examples."""
  _, rows = _rows(network, inputs, targets, prompt)
  encoded = inputs if network.has_encoder else [[]]
  return padded_rows(len(inputs)), _width(encoded), _width(rows, 1)


def _rows(
  network: LanguageModel,
  inputs: Sequence[Sequence[int]],
  targets: Sequence[Sequence[int]],
  prompt: Sequence[int] = (),
) -> tuple[list[int], list[list[int]]]:
  """The decoder's ids, read and then produced, and where producing begins.

  The decoder of an encoder-decoder begins with its start token and the prompt,
  a decoder-only model with the input. The logits after the last of these tokens
  are those of the first output token.
  """
  begin = [start_id(network), *prompt]
  firsts = [begin if network.has_encoder else [*ids] for ids in inputs]
  return (
    [len(first) - 1 for first in firsts],
    [[*first, *ids] for first, ids in zip(firsts, targets, strict=True)],
  )


def _log_prob(logits: Sequence[jax.Array], following: jax.Array) -> jax.Array:
  """Log-probability of each id that followed, of one network's logits."""
  (own,) = logits
  log_probs = probs.log_prob_of(own, following)
  return jnp.where(probs.valid_logits(own), log_probs, jnp.nan)


@functools.cache
def _with_top(number: int) -> Callable[..., dict[str, jax.Array]]:
  """Measures `_log_prob`, and the log-probabilities of the likeliest ids."""

  def measure(logits: Sequence[jax.Array], following: jax.Array):
    _, ids = lax.top_k(logits[0], number)
    each = jax.vmap(functools.partial(_log_prob, logits), -1, -1)(ids)
    own = _log_prob(logits, following)
    return {'log_probs': own, 'ids': ids, 'top': each}

  return measure


def _difference(
  logits: Sequence[jax.Array], following: jax.Array
) -> dict[str, jax.Array]:
  """What `compare` returns, of each position."""
  # A constant added to all logits of a position changes no probability.
  first, second = (x - jnp.mean(x, -1, keepdims=True) for x in logits)
  found = {
    'logits': jnp.mean(jnp.square(first), -1),
    'errors': jnp.mean(jnp.square(first - second), -1),
  }
  names = 'log_probs', 'other_log_probs'
  scores = [_log_prob([one], following) for one in logits]
  return found | dict(zip(names, scores, strict=True))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _measured(
  measure: Callable[[Sequence[jax.Array], jax.Array], Any],
  networks: Sequence[LanguageModel],
  params: Sequence[Params],
  inputs: jax.Array,
  rows: jax.Array,
) -> Any:
  """What `measure` makes of the logits that predict each id of rows.

  The rows are int32[B, S + 1]; the first id of each is not predicted. Results
  are of [B, S, ...]. S is a power of two, `_SMALLEST` at least: a whole number
  of blocks.
  """
  batch, width = rows.shape[0], rows.shape[1] - 1
  block = min(width, _BLOCK)

  def read(caches, pair):
    each = [
      network.extend(own, cache, pair[0])
      for network, own, cache in zip(networks, params, caches, strict=True)
    ]
    features, caches = zip(*each, strict=True)
    logits = [
      network.head(own, feature)
      for network, own, feature in zip(networks, params, features, strict=True)
    ]
    return caches, measure(logits, pair[1])

  def in_blocks(tokens):
    return jnp.moveaxis(tokens.reshape(batch, width // block, block), 1, 0)

  slots = -(-width // _BLOCK) * _BLOCK
  caches = tuple(
    network.prefill(own, inputs, slots)
    for network, own in zip(networks, params, strict=True)
  )
  pairs = in_blocks(rows[:, :-1]), in_blocks(rows[:, 1:])
  _, found = lax.scan(read, caches, pairs)
  return jax.tree.map(
    lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, width, *x.shape[3:]), found
  )


def _padded(rows: Sequence[Sequence[int]], begin: int = 0, pad: int = 0) -> Any:
  """Rows of ids as int32[B, begin + S]."""
  width = begin + _width(rows, begin)
  return padded(rows, padded_rows(len(rows)), width, pad)[0]


def _width(rows: Sequence[Sequence[int]], begin: int = 0) -> int:
  return max(_SMALLEST, next_power_of_two(max(map(len, rows)) - begin))


def _check(
  network: LanguageModel,
  inputs: Sequence[Sequence[int]],
  targets: Sequence[Sequence[int]],
) -> None:
  if len(inputs) != len(targets):
    raise unexpected('targets', f'{len(inputs)}, as inputs', len(targets))
  size = network.vocab_size
  for name, rows in (('inputs', inputs), ('targets', targets)):
    for index, ids in enumerate(rows):
      wrong = [token for token in ids if not 0 <= token < size]
      if wrong:
        expected = f'ids of the vocabulary of {size}'
        raise unexpected(f'{name}[{index}]', expected, wrong[0])
      if name == 'inputs' and not network.has_encoder and not len(ids):
        expected = 'a token that a model without an encoder begins with'
        raise unexpected(f'inputs[{index}]', expected, ids)
