"""A batch of texts on its way through the engine: options, ids, results."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.completion import (
  Completion,
  Text,
  cut_at_stop_string,
  from_generation,
  passed_over,
)
from specdec_jax.decoding.state import DecodeState, Request
from specdec_jax.probs import SamplingConfig
from specdec_jax.tokenizer import Tokenizer
from specdec_jax.types import FinishReason

_SMALLEST_INPUT = 32


class Limits(NamedTuple):
  """Tokens that an input and an output may have, their ends included."""

  max_input_len: int
  max_decode_len: int


@dataclasses.dataclass(frozen=True)
class Options:
  """What `generate` and `stream` may be asked.

  Attributes:
    sampling: temperature, top-k, top-p. Temperature may be one for each text.
    seed: with the example's id, what all its random numbers derive from.
    example_ids: of the texts, 0, 1, ... by default. A text's sample depends on
      its id, not on its place in a batch or on its neighbours.
    stop_ids: ids that end an output; None is the tokenizer's end of sequence.
    stop_strings: strings that end an output; they are not part of its text.
    min_length: tokens before a stop id is allowed.
    max_length: tokens of an output at most; None is the engine's maximum.
    on_too_long: what a too long input does: 'error' raises, 'truncate' keeps
      its beginning, 'report' gives a completion with an error.
    log_probs: whether log-probabilities are wanted.
  """

  sampling: SamplingConfig = SamplingConfig(temperature=0.0)
  seed: int = 0
  example_ids: Sequence[int] | None = None
  stop_ids: Sequence[int] | None = None
  stop_strings: Sequence[str] = ()
  min_length: int = 0
  max_length: int | None = None
  on_too_long: str = 'error'
  log_probs: bool = True

  def __post_init__(self):
    check_at_least(min_length=(self.min_length, 0))
    if self.on_too_long not in ('error', 'truncate', 'report'):
      raise ValueError(
        "on_too_long must be 'error', 'truncate' or 'report', got"
        f' {self.on_too_long!r}.'
      )
    if isinstance(self.stop_strings, str) or '' in self.stop_strings:
      raise ValueError(
        'stop_strings must be a sequence of strings, none of them empty, got'
        f' {self.stop_strings!r}.'
      )


class Job:
  """One batch of texts on its way through the engine."""

  def __init__(
    self,
    tokenizer: Tokenizer,
    limits: Limits,
    texts: list[str],
    options: Options,
    gamma: int,
  ):
    self.options = options
    self._tokenizer = tokenizer
    self._limits = limits
    self._num_texts = len(texts)
    self._passed_over: dict[int, Completion] = {}
    inputs = [self._encode(i, text) for i, text in enumerate(texts)]
    self.rows = [i for i, ids in enumerate(inputs) if ids]
    if self.rows:
      encoded = [inputs[i] for i in self.rows]
      self.request = self._make_request(encoded, gamma)

  def _encode(self, index: int, text: str) -> list[int]:
    """Ids with the end of sequence; empty where nothing is to be decoded."""
    tokenizer = self._tokenizer
    limit = self._limits.max_input_len
    ids = tokenizer.encode(text)
    if not ids:
      self._passed_over[index] = passed_over('empty')
      return []
    if len(ids) + 1 > limit and self.options.on_too_long != 'truncate':
      message = (
        f'Text {index} has {len(ids) + 1} tokens (its end included), more than'
        f' max_input_len = {limit}. Shorten it, raise max_input_len, or set'
        " on_too_long='truncate'."
      )
      if self.options.on_too_long == 'error':
        raise ValueError(message)
      self._passed_over[index] = passed_over('error', message)
      return []
    return [*ids[: limit - 1], tokenizer.eos_id]

  def _make_request(self, encoded, gamma) -> Request:
    limits, options = self._limits, self.options
    batch = _next_power_of_two(len(encoded))
    longest = max(map(len, encoded))
    width = max(_SMALLEST_INPUT, _next_power_of_two(longest))
    width = min(width, limits.max_input_len)
    # Arrays of the host: a program's call moves them to the device together.
    inputs: Any = np.zeros((batch, width), np.int32)
    for row, ids in enumerate(encoded):
      inputs[row, : len(ids)] = ids
    max_length = limits.max_decode_len
    if options.max_length is not None:
      check_at_least(max_length=(options.max_length, 1))
      if options.max_length > max_length:
        raise ValueError(
          f"max_length = {options.max_length} is more than the engine's"
          f' max_decode_len = {max_length}.'
        )
      max_length = options.max_length
    min_length: Any = np.full((batch,), options.min_length, np.int32)
    budgets: Any = np.zeros((batch,), np.int32)
    budgets[: len(encoded)] = max_length
    return Request(
      inputs=inputs,
      keys=self._keys(batch),
      sampling=self._sampling(batch),
      stop_ids=self._stop_ids(),
      min_length=min_length,
      max_length=budgets,
      slots=limits.max_decode_len,
      gamma=gamma,
      greedy=options.sampling.greedy,
      forbids_stops=options.min_length > 0,
      with_log_probs=options.log_probs,
    )

  def _keys(self, batch: int) -> jax.Array:
    ids = self.options.example_ids
    if ids is None:
      ids = range(self._num_texts)
    if len(ids) != self._num_texts:
      raise ValueError(
        f'example_ids has {len(ids)} entries for {self._num_texts} texts.'
      )
    if any(not 0 <= number < 1 << 32 for number in ids):
      raise ValueError(
        f'example_ids must lie in [0, 2**32), got {list(ids)!r}.'
      )
    chosen = np.zeros((batch,), np.uint32)
    chosen[: len(self.rows)] = [ids[i] for i in self.rows]
    return _example_keys(self.options.seed, chosen)

  def _sampling(self, batch: int):
    sampling = self.options.sampling
    if isinstance(sampling.temperature, tuple):
      if len(sampling.temperature) != self._num_texts:
        sampling.params(self._num_texts)  # raises, naming both numbers
      rows = [sampling.temperature[i] for i in self.rows]
      rows += [0.0] * (batch - len(rows))
      sampling = dataclasses.replace(sampling, temperature=rows)
    return sampling.params(batch)

  def _stop_ids(self) -> Any:
    ids = self.options.stop_ids
    if ids is None:
      ids = [self._tokenizer.eos_id]
    for token in ids:
      if not 0 <= token < self._tokenizer.vocab_size:
        raise ValueError(
          f'stop_ids holds {token}, which is outside the vocabulary of'
          f' {self._tokenizer.vocab_size}.'
        )
    width = max(4, _next_power_of_two(len(ids)))
    return np.asarray([*ids, *[-1] * (width - len(ids))], np.int32)

  def stop_at_strings(self, state: DecodeState) -> DecodeState:
    """Finishes the running rows whose text holds a stop string."""
    tokens, length, reason = jax.device_get(
      (state.tokens, state.length, state.finish_reason)
    )
    reason = reason.copy()
    for row in range(len(self.rows)):
      if reason[row] != FinishReason.RUNNING:
        continue
      output = Text(
        self._tokenizer,
        tokens[row, 1 : length[row]],
        self.options.stop_strings,
      )
      if output.has_stop_string:
        reason[row] = FinishReason.STOP_STRING
    return state.replace(finish_reason=jnp.asarray(reason))

  def completions(self, generation=None) -> list[Completion]:
    """Results in the order of the texts."""
    found = dict(self._passed_over)
    for row, index in enumerate(self.rows):
      one = from_generation(generation, row, self._tokenizer)
      found[index] = cut_at_stop_string(
        one, self._tokenizer, self.options.stop_strings
      )
    return [found[i] for i in range(self._num_texts)]


@jax.jit
def _fold_in_all(seed, ids):
  key = jax.random.key(seed)
  return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, ids)


def _example_keys(seed: int, ids: np.ndarray) -> jax.Array:
  """PRNG keys [B] of (seed, example)."""
  return _fold_in_all(jnp.uint32(seed & 0xFFFFFFFF), ids)


def _next_power_of_two(number: int) -> int:
  return 1 << max(number - 1, 0).bit_length()


def check_at_least(**named: tuple[int, int]) -> None:
  for name, (value, least) in named.items():
    if value < least:
      raise ValueError(f'{name} must be at least {least}, got {value}.')
