"""The `Drafter` contract: pure functions plus a state pytree of their own.

The speculative loop knows nothing else of a drafter. What keeps the output
lossless is the rule of `Draft`: a drafter says truthfully what it drew from,
and never drops a token for what the token turned out to be. For the rest a new
one needs only to be fast and often right.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import struct

from specdec_jax import probs
from specdec_jax.models.model import Model
from specdec_jax.probs import SamplingParams
from specdec_jax.types import Draft

DrafterState = Any  # a pytree that only its drafter understands


@struct.dataclass
class Context:
  """What a drafter may look at when it proposes.

  Attributes:
    tokens: int32[B, N], the decoder's committed tokens from the start token
      on, its prompt's first; without meaning behind `length`.
    length: int32[B], committed tokens of a row, the start token counted, so
      at least 1. A finished row shows 1.
    keys: PRNG keys [B] of this row and round; proposals derive theirs by
      `probs.draft_key`.
    sampling: how the target is sampled; a drafter may do otherwise as long as
      it returns the probabilities it really drew from.
    stop_ids: int32[K], ids that end a row; -1 fills up.
    min_length: int32[B], tokens behind the start token, the prompt's
      included, before a stop id is allowed.
    gamma: static, how many tokens to propose at most.
    greedy: static, every row takes the argmax: no probabilities are needed.
    forbids_stops: static, whether `min_length` is in use.
    skips_rounds: static, whether rounds may have passed without asking the
      drafter: `cascade` and `with_fallback` set it for those that they are made
      of. One with a cache then first reads the committed tokens that it lacks.
  """

  tokens: jax.Array
  length: jax.Array
  keys: jax.Array
  sampling: SamplingParams
  stop_ids: jax.Array
  min_length: jax.Array
  gamma: int = struct.field(pytree_node=False)
  greedy: bool = struct.field(pytree_node=False)
  forbids_stops: bool = struct.field(pytree_node=False)
  skips_rounds: bool = struct.field(pytree_node=False, default=False)


class Drafter(NamedTuple):
  """A source of drafts.

  Attributes:
    init: (params, inputs int32[B, E], max_length, prompt) -> state. Reads the
      inputs; `max_length` is the decoder slots that the run may use, `prompt`
      int32[B, P] what the decoder begins with, or None (see `Request`). The
      first context holds the prompt, so only a drafter with a cache reads it.
    propose: (params, state, context) -> (Draft, state). Called once a round
      with gamma >= 1. The `Draft` keeps the rule that its class states.
    commit: (state, length int32[B]) -> state. The verdict: `length` tokens are
      committed now (the start token counted); whatever was read of a longer
      draft must be forgotten. Called once a round after `propose`. Inside of
      another drafter (see `Context.skips_rounds`) it may name fewer tokens than
      before, or follow rounds without a proposal.
    name: tells it from others of the same parameters, by what it does and its
      settings: no run is resumed, and no calibration used, under another name.
    params: what `init` and `propose` take as parameters: a table, a tuple of
      those of its parts, () of one that has none. A `Model` stands for its
      parameters, which an engine reads and places.
    models: the models that it asks, to check that they fit a target.
  """

  init: Callable[[Any, jax.Array, int, jax.Array | None], DrafterState]
  propose: Callable[[Any, DrafterState, Context], tuple[Draft, DrafterState]]
  commit: Callable[[DrafterState, jax.Array], DrafterState]
  name: str = ''
  params: Any = ()
  models: tuple[Model, ...] = ()


def is_finished(length: jax.Array) -> jax.Array:
  """bool[B], of the `length` that a `commit` is told.

  A finished row shows 1. After a round a running one shows 2 at least.
  """
  return length <= 1


def forbid_early_stops(
  logits: jax.Array,
  context: Context,
  index: jax.Array | int = 0,
  ids: jax.Array | None = None,
) -> jax.Array:
  """Masks stop ids as the target does, in logits of proposals `index` on.

  Args:
    logits: float[B, S, V].
    context: says whether and how long they are forbidden.
    index: of the first of the S proposals.
    ids: int32[B, S, V], which token each logit is of; None is 0..V-1.

  Returns:
    float[B, S, V].
  """
  if not context.forbids_stops:
    return logits
  produced = context.length - 1 + index
  return probs.forbid_early_stops(
    logits, context.stop_ids, produced, context.min_length, ids
  )


def draw(logits: jax.Array, context: Context, index: jax.Array | int):
  """Draws proposal `index` of each row as the target is sampled.

  Args:
    logits: float[B, V], of any V tokens.
    context: gives sampling and keys.
    index: of the proposal; its keys are consumed.

  Returns:
    int32[B], places among the V, and the distributions float32[B, V] that they
    come from, None when greedy.
  """
  if context.greedy:
    return probs.greedy_token(logits), None
  rows = probs.standardise_batch(logits[:, None], context.sampling)[:, 0]
  keys = jax.vmap(probs.draft_key, in_axes=(0, None))(context.keys, index)
  return jax.vmap(probs.sample)(rows, keys), rows
