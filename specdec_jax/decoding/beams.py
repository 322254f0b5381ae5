"""One level of beam search: pure functions of scores, as T5X computes them.

T5X has K live beams, sorted from the worst to the best, and the K best finished
beams. It takes the 2 K best continuations of the live beams: those that end
compete with the finished beams by their scores, and the K best of the others
are the next live beams. `transformers` differs in four points, see
`BeamScoring`.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from specdec_jax import probs
from specdec_jax.decoding.state import first_states
from specdec_jax.request import BeamScoring, Request
from specdec_jax.rules.tokens import Prefix

Tree = TypeVar('Tree')

# T5X's "minus infinity": the log-probability of a beam that does not exist.
ABSENT = -1.0e7


@struct.dataclass
class Hypotheses:
  """K sequences a row, sorted from the worst to the best.

  Attributes:
    tokens: int32[B, K, W], the prompt with its start token, then the output.
    log_probs: float32[B, K, W], the target's log-probability of each token.
    length: int32[B, K], number of tokens, the prompt counted.
    score: float32[B, K], the log-probability of all tokens after the prompt; of
      finished beams, with the length penalty.
    exists: bool[B, K], whether there is such a sequence.
    automaton: int32[B, K], the state of the row's constraint after each
      sequence; None if no row has a constraint.
  """

  tokens: jax.Array
  log_probs: jax.Array
  length: jax.Array
  score: jax.Array
  exists: jax.Array
  automaton: jax.Array | None = None

  @property
  def prefix(self) -> Prefix:
    """The sequences as token rules read them."""
    return Prefix(self.tokens, self.length, self.automaton)

  @property
  def last_token(self) -> jax.Array:
    """int32[B, K], each sequence's last token; any id for an empty one."""
    index = jnp.maximum(self.length - 1, 0)[..., None]
    return jnp.take_along_axis(self.tokens, index, axis=2)[..., 0]


def start(request: Request, tokens: jax.Array) -> Hypotheses:
  """Returns K live beams, of which only one exists: the prompt, int32[B, W]."""
  width, batch = request.search.width, tokens.shape[0]
  length, states = request.prompt_length, first_states(request)
  repeated = jnp.repeat(tokens[:, None], width, axis=1)
  first = jnp.full((width,), ABSENT, jnp.float32).at[-1].set(0.0)
  return Hypotheses(
    tokens=repeated,
    log_probs=jnp.zeros(repeated.shape, jnp.float32),
    length=jnp.broadcast_to(length[:, None], (batch, width)),
    score=jnp.broadcast_to(first, (batch, width)),
    exists=jnp.broadcast_to(first == 0, (batch, width)),
    automaton=None
    if states is None
    else jnp.repeat(states[:, None], width, axis=1),
  )


def candidates(
  request: Request,
  logits: jax.Array,
  count: int,
  forbidden: jax.Array,
  prefix: Prefix | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Finds the likeliest tokens after each of N nodes.

  Token rules adjust the log-probabilities, which then need not sum to 1, as in
  transformers.

  Args:
    request: has the stop ids and token rules.
    logits: float32[B, N, V], the logits after each node.
    count: C, the number of tokens to find.
    forbidden: bool[B, N], the nodes after which no beam may end. The other
      tokens keep their probabilities, as in transformers.
    prefix: the sequences up to each node, [B, N]; None without rules.

  Returns:
    Log-probabilities float32[B, N, C] and tokens int32[B, N, C], from the
    likeliest on; and bool[B, N], whether the logits give probabilities, see
    `probs.valid_logits`.
  """
  stop_ids = request.stop_ids
  if request.ruling is not None and prefix is not None:
    adjusted = request.ruling.adjust(prefix, jax.nn.log_softmax(logits))
    adjusted = jnp.maximum(adjusted, ABSENT)
    values, ids, _ = probs.top_tokens(adjusted, count, stop_ids, forbidden)
    return values, ids, probs.valid_logits(logits)
  values, ids, maximum = probs.top_tokens(logits, count, stop_ids, forbidden)
  # The total is NaN if a logit is NaN or +inf, or if all are -inf.
  total = jnp.sum(jnp.exp(logits - maximum[..., None]), axis=-1)
  valid = jnp.isfinite(total) & (maximum > jnp.finfo(jnp.float32).min)
  return values - (jnp.log(total) + maximum)[..., None], ids, valid


def widen(
  score: jax.Array, values: jax.Array, ids: jax.Array, width: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Finds the best continuations of some beams.

  Args:
    score: float32[B, K], log-probabilities of the beams.
    values: float32[B, K, C], log-probabilities of each beam's `candidates`.
    ids: int32[B, K, C], the tokens of these.
    width: number of continuations.

  Returns:
    The log-probabilities of the continuations, float32[B, width], from the best
    on; the indices of the beams that they continue, int32[B, width]; and their
    last tokens, int32[B, width].
  """
  batch, _, count = values.shape
  flat = (score[..., None] + values).reshape(batch, -1)
  best, index = lax.top_k(flat, width)
  tokens = jnp.take_along_axis(ids.reshape(batch, -1), index, axis=1)
  return best, index // count, tokens


def advance(
  request: Request,
  live: Hypotheses,
  finished: Hypotheses,
  values: jax.Array,
  ids: jax.Array,
) -> tuple[Hypotheses, Hypotheses, jax.Array]:
  """Searches one level: every live beam of a row becomes one token longer.

  Args:
    request: has width, scoring, stop ids and limits.
    live: the live beams; those of one row are equally long.
    finished: the finished beams.
    values: float32[B, K, C], log-probabilities of each beam's `candidates`.
    ids: int32[B, K, C], the tokens of these.

  Returns:
    The live and the finished beams after the level, and the index of the beam
    that each new live beam continues, int32[B, K].
  """
  width = request.search.width
  total, parents, tokens = widen(
    live.score, values, ids, request.search.num_candidates
  )
  of_token = total - gather(live.score, parents)
  longer = gather(live, parents)
  place = jnp.arange(longer.tokens.shape[-1]) == longer.length[..., None]
  ends = probs.is_one_of(tokens, request.stop_ids)
  finishes = ends
  if request.search.scoring is BeamScoring.TRANSFORMERS:
    produced = live.length[:, :1] - request.prompt_length[:, None]
    ends = ends | (produced + 1 >= request.max_length[:, None])
    finishes = ends & (jnp.arange(request.search.num_candidates) < width)
  longer = longer.replace(
    tokens=jnp.where(place, tokens[..., None], longer.tokens),
    log_probs=jnp.where(place, of_token[..., None], longer.log_probs),
    length=longer.length + 1,
    automaton=request.ruling
    and request.ruling.next_state(longer.automaton, tokens),
    score=total + ends * ABSENT,
    exists=total > ABSENT / 2,
  )
  _, chosen = lax.top_k(longer.score, width)
  chosen = jnp.flip(chosen, axis=1)
  next_live = gather(longer, chosen)

  score = total / _penalty(request, longer.length)
  ended = longer.replace(
    score=score + ~finishes * ABSENT, exists=finishes & longer.exists
  )
  both = jax.tree.map(
    lambda *parts: jnp.concatenate(parts, axis=1), finished, ended
  )
  # With a penalty below 0, a score may be less than `ABSENT`.
  _, best = lax.top_k(jnp.where(both.exists, both.score, -jnp.inf), width)
  finished = gather(both, jnp.flip(best, axis=1))
  return next_live, finished, gather(parents, chosen)


def is_beaten(
  request: Request, live: Hypotheses, finished: Hypotheses
) -> jax.Array:
  """Returns bool[B, K], the live beams that no longer matter.

  Each of the K finished beams scores more than any continuation of such a beam,
  and of any beam that ranks below it. So the search finds the same finished
  beams with or without it.
  """
  length = (request.prompt_length + request.max_length)[:, None]
  if request.search.scoring is BeamScoring.T5X:
    length = length + 1  # T5X counts one more token than a beam can have
  else:
    # With a penalty below 0 a beam scores best at its present length.
    length = jnp.where(request.search.penalty < 0, live.length, length)
  worst = jnp.min(finished.score, axis=1, keepdims=True)
  beaten = worst > live.score / _penalty(request, length)
  return beaten & jnp.all(finished.exists, axis=1, keepdims=True)


def is_over(
  request: Request, live: Hypotheses, finished: Hypotheses
) -> jax.Array:
  """Returns bool[B], the rows whose finished beams cannot change any more."""
  at_end = live.length[:, 0] - request.prompt_length >= request.max_length
  if request.search.scoring is BeamScoring.T5X:
    return at_end | is_beaten(request, live, finished)[:, -1]
  settings, length = request.search, live.length
  all_ended = jnp.all(finished.exists, axis=1)
  if settings.early_stopping is True:
    return at_end | all_ended
  if settings.early_stopping == 'never':
    longest = (request.prompt_length + request.max_length)[:, None]
    length = jnp.where(settings.penalty > 0, longest, length)
  best = live.score[:, -1] / _penalty(request, length)[:, -1]
  return at_end | (all_ended & (jnp.min(finished.score, axis=1) >= best))


def where(condition: jax.Array, left: Tree, right: Tree) -> Tree:
  """Takes the rows of `left` where bool[B] is True, else of `right`."""

  def choose(left, right):
    shape = condition.shape + (1,) * (left.ndim - 1)
    return jnp.where(condition.reshape(shape), left, right)

  return jax.tree.map(choose, left, right)


def _penalty(request: Request, length: jax.Array) -> jax.Array:
  """Returns the divisor of a log-probability, float32[B, ...].

  Args:
    request: has scoring, exponent, and the lengths of the prompts.
    length: int32[B, ...], tokens of the beams, start token and prompt counted.
  """
  if request.search.scoring is BeamScoring.T5X:
    base = (5.0 + (length - 1)) / 6.0
  else:
    produced = length - request.prompt_length[:, None]
    base = (produced + request.search.num_forced).astype(jnp.float32)
  return jnp.power(base, request.search.penalty)


def gather(values: Tree, index: jax.Array) -> Tree:
  """Takes values[b, index[b, n]] from arrays [B, K, ...]; index is [B, N]."""

  def take(leaf):
    place = index.reshape(*index.shape, *(1,) * (leaf.ndim - 2))
    return jnp.take_along_axis(leaf, place, axis=1)

  return jax.tree.map(take, values)
