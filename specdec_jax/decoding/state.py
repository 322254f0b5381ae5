"""The state that a decode carries from round to round; when a row stops."""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from specdec_jax import probs
from specdec_jax.decoding import fallback
from specdec_jax.decoding.fallback import Fallback, Rests
from specdec_jax.probs import SamplingConfig, SamplingParams
from specdec_jax.rules.automata import Automata
from specdec_jax.rules.tokens import Prefix, Rules, Ruling
from specdec_jax.tree_shape import TreeShape
from specdec_jax.types import (
  DecodeStats,
  Draft,
  FinishReason,
  Generation,
  LengthRule,
  Verdict,
)

# How a draft is judged: token by token, or as a whole.
TOKEN, BLOCK = 'token', 'block'
NO_ROUND_LIMIT = jnp.iinfo(jnp.int32).max


class PairParams(NamedTuple):
  """Parameters of both sides; the drafter's may be any pytree."""

  target: Any
  draft: Any


class Rule(enum.Enum):
  """Whose beam search it is.

  With T5X's, a finished beam of n tokens, its prompt and its end counted, has
  the score log_prob / ((5 + n) / 6) ** penalty. Any of the 2 K best
  continuations may end a beam, a beam that is cut off has not finished, and the
  search goes on until no live beam could still beat a finished one, however
  long it became.

  With that of Hugging Face's transformers (`early_stopping=False`), the score
  is log_prob / n ** penalty, n without the prompt. Only the K best
  continuations may end a beam, a beam that is cut off counts as finished, and
  the search goes on until no live beam, as long as it is now, beats a finished
  one.
  """

  T5X = 't5x'
  TRANSFORMERS = 'transformers'


@struct.dataclass
class BeamSettings:
  """What a beam search is asked for, beside its `Request`.

  Attributes:
    penalty: float32[], the exponent of the `Rule`'s length penalty; >= 0 where
      it is T5X's.
    width: static, K, live beams.
    draft_width: static, U, beams of the drafter.
    num_ends: static, how many ids end a beam.
    rule: static, whose beam search it is.
  """

  penalty: jax.Array
  width: int = struct.field(pytree_node=False)
  draft_width: int = struct.field(pytree_node=False)
  num_ends: int = struct.field(pytree_node=False, default=1)
  rule: Rule = struct.field(pytree_node=False, default=Rule.T5X)

  @property
  def num_candidates(self) -> int:
    """C, continuations that are looked at: K of them do not end a beam."""
    return max(2, 1 + self.num_ends) * self.width


@struct.dataclass
class Request:
  """What a decode is asked for. Changing the arrays' values does not recompile.

  Attributes:
    inputs: int32[B, E], `pad_id` past each row's end.
    keys: PRNG keys [B], made from (seed, example); each round's are derived
      from them.
    sampling: temperature, top-k, top-p.
    stop_ids: int32[K], ids that end a row, or int32[B, K]; padded with -1.
    min_length: int32[B], tokens before a stop id is allowed.
    max_length: int32[B], tokens after which a row stops; 0 for a row that
      only fills up the batch. At most `slots`.
    prompt: int32[B, P], the tokens that the decoder begins with, the start
      token first.
    prompt_length: int32[B], 1..P, the start token counted.
    slots: static, the tokens that the state has room for.
    gamma: static, the most proposals per round; of a tree, its levels.
    greedy: static, every temperature is 0: no softmax, no noise.
    forbids_stops: static, whether `min_length` is in use.
    with_log_probs: static, whether log-probabilities are wanted.
    log_probs_as_drawn: static, whether they are those of the distribution that
      tokens are drawn from, after temperature, top-k and top-p (0.0 where it is
      one-hot); otherwise those of the model itself.
    lenience: float32[] in (0, 1], see `verify`; None is 1, lossless.
    verification: static, 'token' (Algorithm 1) or 'block' (`verify_block`, for
      drafts that are sampled and lossless).
    beams: what a beam search is asked for; None is none. Keys and sampling then
      do not matter.
    tree: static, the tree that the drafter proposes (`Drafter.tree`), of which
      a draft is the first `gamma` levels; None is a chain.
    rule: when a draft ends whose length adapts, made for `gamma`; None is after
      gamma tokens.
    fallback: when the drafter rests, made for `gamma`; None is never.
    skips_rounds: static, whether a drafter may have missed rounds for another
      reason than `fallback`: it then reads what it missed.
    pad_id: static, what inputs are padded with: `models.base.pad_id` of the
      target.
    rules: of tokens, of each row; None is none, and no part of the program.
    automata: of the rows' constraints; None without any.
  """

  inputs: jax.Array
  keys: jax.Array
  sampling: SamplingParams
  stop_ids: jax.Array
  min_length: jax.Array
  max_length: jax.Array
  prompt: jax.Array
  prompt_length: jax.Array
  slots: int = struct.field(pytree_node=False)
  gamma: int = struct.field(pytree_node=False)
  greedy: bool = struct.field(pytree_node=False)
  forbids_stops: bool = struct.field(pytree_node=False, default=False)
  with_log_probs: bool = struct.field(pytree_node=False, default=True)
  log_probs_as_drawn: bool = struct.field(pytree_node=False, default=False)
  lenience: jax.Array | None = None
  verification: str = struct.field(pytree_node=False, default=TOKEN)
  beams: BeamSettings | None = None
  rule: LengthRule | None = None
  fallback: Fallback | None = None
  skips_rounds: bool = struct.field(pytree_node=False, default=False)
  tree: TreeShape | None = struct.field(pytree_node=False, default=None)
  pad_id: int = struct.field(pytree_node=False, default=0)
  rules: Rules | None = None
  automata: Automata | None = None

  @property
  def ruling(self) -> Ruling | None:
    """The rules of all rows; None is none."""
    return None if self.rules is None else Ruling(self.rules, self.automata)

  @property
  def rows(self) -> dict[str, Any]:
    """The fields that have an entry for each row; the others belong to all."""
    names = ['inputs', 'keys', 'sampling', 'min_length', 'max_length', 'rules']
    names += ['prompt', 'prompt_length']
    names += ['stop_ids'] * (self.stop_ids.ndim > 1)
    return {name: getattr(self, name) for name in names}

  @property
  def draft_slots(self) -> int:
    """Slots that a whole draft takes."""
    if self.tree is None or not self.gamma:
      return self.gamma
    return self.tree.cut(self.gamma).num_nodes

  @property
  def call_tokens(self) -> int:
    """Tokens of a row that a call of the target reads, with a whole draft."""
    if self.beams is not None:
      return self.beams.width + self.beams.draft_width * self.gamma
    return 1 + self.draft_slots

  @property
  def prompt_width(self) -> int:
    """P, slots of the longest prompt, the start token counted."""
    return self.prompt.shape[1]

  @property
  def search(self) -> BeamSettings:
    """`beams` of a request for a beam search."""
    assert self.beams is not None
    return self.beams

  @property
  def judges_blocks(self) -> bool:
    """Whether drafts are judged as a whole."""
    return self.gamma > 0 and self.verification == BLOCK and not self.greedy

  @property
  def longest(self) -> int:
    """Tokens of the longest sequence: prompt, output and a whole draft."""
    return self.prompt_width + self.slots + self.gamma

  @property
  def cache_slots(self) -> int:
    """T: slots for prompt, output, and a whole draft past the last token.

    In a beam search each position has a slot for every beam, and so has the
    last of the prompt's. Rounded up to a multiple of 64, see `whole_buckets`.
    """
    needed = self.longest - self.gamma + self.draft_slots
    if self.beams is not None:
      levels = self.beams.width * (self.slots + 1)
      needed = self.prompt_width + levels + self.beams.draft_width * self.gamma
    return whole_buckets(needed)


def whole_buckets(tokens: int) -> int:
  """The least multiple of 64 that is not below `tokens`."""
  return tokens + -tokens % 64


def new_request(
  inputs: Any,
  keys: jax.Array,
  sampling: SamplingConfig,
  *,
  slots: int,
  gamma: int,
  stop_ids: Sequence[int] = (),
  min_length: Any = 0,
  max_length: Any = None,
  prompt: Any = None,
  prompt_length: Any = 1,
  **others: Any,
) -> Request:
  """A `Request`, with NumPy arrays; values that all rows share are given once.

  Args:
    inputs: int32[B, E], `pad_id` past each row's end.
    keys: PRNG keys [B], see `example_keys`.
    sampling: sampling of all rows; its temperature may be one for each row.
    slots: the tokens that the state has room for.
    gamma: the most proposals per round; 0 for the plain loop.
    stop_ids: ids that end a row.
    min_length: as in `Request`: one number for all rows, or int[B].
    max_length: as in `Request`: one number for all rows, or int[B]; None is
      `slots`.
    prompt: as in `Request`; None is the start token 0.
    prompt_length: as in `Request`: one number for all rows, or int[B].
    **others: further fields, as they are; also `greedy` and `forbids_stops`,
      which otherwise follow from the arguments above.
  """
  batch = inputs.shape[0]
  # Few widths, so that few programs are compiled.
  width = max(4, 1 << max(len(stop_ids) - 1, 0).bit_length())
  stops: Any = np.full((width,), -1, np.int32)
  stops[: len(stop_ids)] = stop_ids

  def of_rows(value: Any) -> Any:
    return np.broadcast_to(np.asarray(value, np.int32), (batch,))

  follows = {
    'greedy': sampling.greedy,
    'forbids_stops': bool(np.any(np.asarray(min_length) > 0)),
  }
  if prompt is None:
    prompt = np.zeros((batch, 1), np.int32)
  return Request(
    inputs=inputs,
    keys=keys,
    sampling=sampling.params(batch),
    stop_ids=stops,
    min_length=of_rows(min_length),
    max_length=of_rows(slots if max_length is None else max_length),
    prompt=prompt,
    prompt_length=of_rows(prompt_length),
    slots=slots,
    gamma=gamma,
    **(follows | others),
  )


def example_keys(seed: int, ids: Any) -> jax.Array:
  """PRNG keys [B] from the seed and the examples' numbers, uint32[B]."""
  return keys_of_rows(np.full(np.shape(ids), seed & 0xFFFFFFFF, np.uint32), ids)


@jax.jit
def keys_of_rows(seeds: Any, ids: Any) -> jax.Array:
  """`example_keys` of rows with a seed each: both are uint32[B]."""
  return jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(seeds), ids)


@struct.dataclass
class DecodeState:
  """The loop's carry; donated, so that it is updated in place.

  Attributes:
    tokens: int32[B, T + 1], committed tokens: the start token, the rest of the
      prompt, the output so far. Past `length` they mean nothing.
    length: int32[B], committed tokens, the prompt and its start token counted.
    log_probs: float32[B, T + 1], the target's log-probability of each token
      (see `Request.log_probs_as_drawn`); [B, 0] if they are not wanted.
    finish_reason: int32[B], a `FinishReason`.
    target_cache: the target's cache, of all committed tokens but the last.
    drafter_state: the drafter's own state; None in the plain loop.
    stats: the counts so far.
    features: [B, M], the target's features for a drafter that reads them, see
      `Context`; None for all others.
    rests: whose drafter rests; None where none ever does.
    automaton: int32[B], the state of each row's constraint; None without any.
  """

  tokens: jax.Array
  length: jax.Array
  log_probs: jax.Array
  finish_reason: jax.Array
  target_cache: Any
  drafter_state: Any
  stats: DecodeStats
  features: jax.Array | None = None
  rests: Rests | None = None
  automaton: jax.Array | None = None

  @property
  def running(self) -> jax.Array:
    """bool[B], the rows that are not finished."""
    return self.finish_reason == FinishReason.RUNNING

  @property
  def visible_length(self) -> jax.Array:
    """int32[B], `length`, except that it is 1 in a finished row.

    Finished rows go on computing with the batch. With length 1 they work on
    their first slots, overwrite nothing that is in use, and do not lengthen the
    attention of other rows.
    """
    return jnp.where(self.running, self.length, 1)

  @property
  def last_token(self) -> jax.Array:
    """int32[B], the token that the target has not read yet."""
    index = self.visible_length[:, None] - 1
    return jnp.take_along_axis(self.tokens, index, axis=1)[:, 0]

  @property
  def prefix(self) -> Prefix:
    """What rules see before a round."""
    return Prefix(self.tokens, self.visible_length, self.automaton)

  def with_reasons(self, reasons: np.ndarray) -> 'DecodeState':
    """The state with the host's finish reasons, int32[B].

    They are put on the same devices as the old ones; otherwise the next run
    would be compiled again.
    """
    placed = jax.device_put(reasons, self.finish_reason.sharding)
    return self.replace(finish_reason=placed)


def start(
  request: Request, target_cache: Any, drafter_state: Any
) -> DecodeState:
  """The `DecodeState` before the first round: it holds the prompts.

  Args:
    request: what is asked for.
    target_cache: of the target, which has read inputs and prompts.
    drafter_state: of the drafter, likewise; None without one.
  """
  batch = request.inputs.shape[0]
  width = request.cache_slots + 1
  return DecodeState(
    tokens=first_tokens(request, width),
    # A sum: a donated state must not share an array with the request.
    length=jnp.zeros((batch,), jnp.int32) + request.prompt_length,
    log_probs=jnp.zeros((batch, width if request.with_log_probs else 0)),
    finish_reason=jnp.where(
      request.max_length > 0, FinishReason.RUNNING, FinishReason.LENGTH
    ).astype(jnp.int32),
    target_cache=target_cache,
    drafter_state=drafter_state,
    stats=DecodeStats.none(batch, request.gamma),
    rests=None if request.fallback is None else Rests.none(batch),
    automaton=first_states(request),
  )


def first_states(request: Request) -> jax.Array | None:
  """int32[B], the states in which constraints begin; None without any."""
  if request.rules is None or request.rules.automaton is None:
    return None
  # A sum: a donated state must not share an array with the request.
  return jnp.zeros((), jnp.int32) + request.rules.automaton


def first_tokens(request: Request, width: int) -> jax.Array:
  """int32[B, width]: the prompts."""
  tokens = jnp.zeros((request.inputs.shape[0], width), jnp.int32)
  return tokens.at[:, : request.prompt_width].set(request.prompt)


def _after_none(
  request: Request, state: DecodeState, logits: jax.Array
) -> jax.Array:
  """bool[B, S], the places from the first one on that allows no token."""
  if request.forbids_stops:
    produced = _produced(request, state)
    logits = probs.forbid_early_stops(
      logits, request.stop_ids, produced, request.min_length
    )
  allows_none = jnp.max(logits, axis=-1) <= jnp.finfo(jnp.float32).min
  return jnp.cumsum(allows_none, axis=1) > 0


def remaining(request: Request, state: DecodeState) -> jax.Array:
  """int32[B], tokens that a row may still produce."""
  return request.max_length - _produced(request, state)


def _produced(request: Request, state: DecodeState) -> jax.Array:
  return state.length - request.prompt_length


def is_stop(request: Request, tokens: jax.Array) -> jax.Array:
  """bool[...], whether each of the tokens int32[...] is a stop id.

  If the rows have stop ids of their own, the tokens are int32[B, S].
  """
  stop_ids = request.stop_ids
  if stop_ids.ndim > 1:
    stop_ids = stop_ids[:, None]
  return probs.is_one_of(tokens, stop_ids)


def up_to_stop(
  request: Request, tokens: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Ends the first `count` (int32[B]) of tokens int32[B, S] at a stop id.

  Returns:
    int32[B], tokens up to the first stop id, itself counted, or `count`; and
    bool[B], whether there is one.
  """
  stops, behind_all = is_stop(request, tokens), tokens.shape[1] + 1
  until = jnp.argmax(stops, axis=1) + 1
  until = jnp.where(jnp.any(stops, axis=1), until, behind_all)
  return jnp.minimum(until, count), until <= count


def append(
  request: Request,
  state: DecodeState,
  draft: Draft,
  verdict: Verdict,
  logits: jax.Array,
) -> DecodeState:
  """Commits x_1..x_n, t in each running row, counts the round, and stops rows.

  A row ends after its first stop id, at `max_length`, or if the logits that a
  token was chosen from cannot be a distribution.

  Args:
    request: the limits.
    state: the state before.
    draft: the proposals, a chain.
    verdict: n and t.
    logits: float32[B, G + 1, V], the target's own logits of each token.

  Returns:
    The state after it; caches and features are the caller's.
  """
  rests, stats = fallback.after_round(
    request.fallback, state.rests, state.stats, state.running, draft, verdict
  )
  count = verdict.num_accepted + 1
  padded = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
  position = jnp.arange(padded.shape[1])
  at_end = position == verdict.num_accepted[:, None]
  tokens = jnp.where(at_end, verdict.next_token[:, None], padded)
  count, stopped = up_to_stop(request, tokens, count)
  left = remaining(request, state)
  stopped = stopped & (count <= left)
  count = jnp.where(state.running, jnp.minimum(count, left), 0)
  used = position < count[:, None]
  if request.rules is not None:
    used &= ~_after_none(request, state, logits)
    is_cut = jnp.sum(used, axis=1) < count
    count = jnp.sum(used, axis=1)
  invalid = jnp.any(used & ~probs.valid_logits(logits), axis=1)

  reason = state.finish_reason
  reason = jnp.where(count == left, FinishReason.LENGTH, reason)
  reason = jnp.where(stopped, FinishReason.STOP, reason)
  reason = jnp.where(invalid, FinishReason.INVALID, reason)
  if request.rules is not None:
    reason = jnp.where(is_cut, FinishReason.RULES, reason)
  automaton = state.automaton
  if automaton is not None:
    ruling: Any = request.ruling

    def read(place, before):
      after = ruling.next_state(before, tokens[:, place])
      return jnp.where(place < count, after, before)

    automaton = lax.fori_loop(0, tokens.shape[1], read, automaton)
  log_probs = state.log_probs
  if request.with_log_probs:
    new = _log_probs(request, logits, tokens)
    log_probs = _write_rows(log_probs, new, state.length)
  return state.replace(
    # The next round overwrites tokens that are written past `count`.
    tokens=_write_rows(state.tokens, tokens, state.length),
    log_probs=log_probs,
    length=state.length + count,
    finish_reason=jnp.where(state.running, reason, state.finish_reason),
    rests=rests,
    stats=stats,
    automaton=automaton,
  )


def _log_probs(request: Request, logits: jax.Array, tokens: jax.Array):
  """float32[B, S], of tokens [B, S] and their logits [B, S, V]."""
  if not request.log_probs_as_drawn:
    return probs.log_prob_of(logits, tokens)
  drawn_from = probs.standardise_batch(logits, request.sampling)
  index = tokens[..., None]
  return jnp.log(jnp.take_along_axis(drawn_from, index, axis=-1)[..., 0])


def _write_rows(buffer, new, first):
  return jax.vmap(lax.dynamic_update_slice)(buffer, new, (first,))


def generation(request: Request, state: DecodeState) -> Generation:
  """Returns the result: without the prompt, zeros past each end."""
  tokens, log_probs = state.tokens, state.log_probs
  length = _produced(request, state)
  live = jnp.arange(request.slots) < length[:, None]
  tokens = _from(request, tokens)
  if request.with_log_probs:
    log_probs = jnp.where(live, _from(request, log_probs), 0.0)
  return Generation(
    tokens=jnp.where(live, tokens, 0),
    length=length,
    log_probs=log_probs,
    finish_reason=state.finish_reason,
    stats=state.stats,
  )


def _from(request: Request, buffer: jax.Array) -> jax.Array:
  """The part [B, slots] of `buffer` that follows each row's prompt."""
  index = request.prompt_length[:, None] + jnp.arange(request.slots)
  return jnp.take_along_axis(buffer, index, axis=1)
