"""The `Drafter` contract: pure functions plus a state pytree of their own.

The speculative loop knows nothing else of a drafter. The output is lossless if
the drafter keeps the rule of `Draft`: it truthfully returns the distributions
that it drew from, and never drops a token because of what was drawn. Apart from
that, a new drafter only needs to be fast and often right.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from specdec_jax import probs
from specdec_jax.checks.fields import unexpected
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.model import Model
from specdec_jax.request import Request
from specdec_jax.rules.tokens import Prefix
from specdec_jax.tree_shape import TreeShape
from specdec_jax.types import Draft

DrafterState = Any  # a pytree that only its drafter understands


@struct.dataclass
class Context:
  """The input of `Drafter.propose`: a request, and the state of its round.

  Attributes:
    request: the batch, with its sampling, stop ids, limits and rules on tokens.
      A drafter may sample differently as long as it returns the probabilities
      it really drew from. `request.prompt` may be cut to the start token;
      `tokens` has all of it.
    tokens: int32[B, T + 1], the decoder's committed tokens: the start token,
      the rest of the prompt, the output so far. Past `length` they mean
      nothing.
    length: int32[B], committed tokens of a row, the start token counted, so
      at least 1. A finished row has 1 here.
    keys: PRNG keys [B] of each row in this round; `probs.draft_key` derives the
      key of each proposal.
    running: bool[B], the rows that are not finished.
    budget: int32[B], proposals that each row has a use for; None unless drafts
      adapt (`Drafting.adapts`).
    prefix: what rules on tokens see of the committed ones; None without rules.
      A drafter may follow the rules, see `ruled`.
    features: [B, M], for a drafter that reads them: the target's last hidden
      state whose logits gave the last committed token. The target has not read
      that token itself yet: it is the end of `tokens` that the feature does not
      know. Zeros where there is none: before the first token after a start
      token, and in a row that was decoded plainly so far.
    target: static, the target's network, given with `features`.
    target_params: its parameters, given with `features`.

  Examples:
    >>> import jax, jax.numpy as jnp
    >>> request = engine.request(['a text'])
    >>> context = sd.Context(  # of one row that has committed 0, 5 and 6
    ...   request=request,
    ...   tokens=jnp.array([[0, 5, 6, 0]]),
    ...   length=jnp.array([3]),
    ...   keys=jax.random.split(jax.random.key(0), 1),
    ...   running=jnp.array([True]),
    ... )
    >>> proposed, _ = sd.uniform(8).propose((), (), context)
    >>> proposed.tokens.shape
    (1, 4)
  """

  request: Request
  tokens: jax.Array
  length: jax.Array
  keys: jax.Array
  running: jax.Array
  budget: jax.Array | None = None
  prefix: Prefix | None = None
  features: jax.Array | None = None
  target: LanguageModel | None = struct.field(pytree_node=False, default=None)
  target_params: Any = None

  @property
  def gamma(self) -> int:
    """The most tokens to propose; of a tree, the most levels."""
    return self.request.gamma

  def within(self, **changes: Any) -> 'Context':
    """Returns the context of another drafter inside: its request is changed."""
    return dataclasses.replace(self, request=self.request.replace(**changes))

  def after(self, token: jax.Array) -> Prefix | None:
    """The prefix with one proposal more, int32[B]."""
    ruling = self.request.ruling
    if ruling is None or self.prefix is None:
      return None
    return ruling.longer(self.prefix, token)

  @property
  def num_slots(self) -> int:
    """T, `max_length` of `Drafter.init`."""
    return self.tokens.shape[1] - 1


class Drafter(NamedTuple):
  """A source of proposals: three functions and their parameters.

  Attributes:
    init: (params, inputs int32[B, E], max_length, prompt, encoded) -> state.
      Reads the inputs; `max_length` is the number of decoder slots that the run
      may use; `prompt`, int32[B, P], is what the decoder begins with (see
      `Request`). The first context holds the prompt too, so only a drafter with
      a cache needs to read it here. `encoded`, float[B, E, M], is what the
      target's encoder says of the inputs; None unless `reads_encoder`.
    propose: (params, state, context) -> (Draft, state). Called once per round
      with gamma >= 1. The `Draft` must keep the rule that its class states.
    commit: (state, length int32[B]) -> state. Called once per round after
      `propose`, with the verdict: `length` tokens are committed now (the start
      token counted), and whatever was read of a longer draft must be forgotten.
      Inside another drafter (see `Request.catches_up`) `length` may be
      smaller than before, and there may have been no proposal before it.
    name: what the drafter does, and its settings. It tells apart drafters with
      the same parameters: a run is not resumed, and a calibration is not used,
      with a drafter of another name.
    params: the parameters that `init` and `propose` take: a table, a tuple of
      the parameters of its parts, or () if there are none. A `Model` stands for
      its parameters, which an engine reads and places.
    network: the one network whose likeliest tokens are proposed; None if the
      drafter is something else, which no beam search can use.
    tree: the tree that is proposed, of which each draft is the first
      `Context.gamma` levels (`TreeShape.cut`); None is a chain. The caches have
      room for its nodes. After a round its drafter sees in `Context.tokens`
      which path was kept.
    reads_encoder: whether `init` needs `encoded`. The encoder then runs once
      for both.
    adapts: whether it follows `Drafting.draft_rule`.
    reads_features: whether it reads `Context.features`.
    follows_rules: whether its proposals follow `Request.ruling`.
    made_for: fingerprints of the only target that the drafter, or a part of it,
      was made for, see `disk_arrays.fingerprint`.

  Examples:
    >>> import jax.numpy as jnp
    >>> def propose(params, state, context):  # the last token again
    ...   at = context.length[:, None] - 1
    ...   last = jnp.take_along_axis(context.tokens, at, axis=1)
    ...   tokens = jnp.repeat(last, context.gamma, axis=1)
    ...   length = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    ...   return sd.Draft(tokens, None, length), state
    >>> drafter = sd.Drafter(
    ...   lambda *_: (), propose, lambda state, _: state, name='repeats'
    ... )
    >>> sd.Engine(target, drafter)
    Engine(target=..., draft='repeats', gamma=4, ...)
  """

  init: Callable[..., DrafterState]
  propose: Callable[[Any, DrafterState, Context], tuple[Draft, DrafterState]]
  commit: Callable[[DrafterState, jax.Array], DrafterState]
  name: str = ''
  params: Any = ()
  network: LanguageModel | None = None
  tree: TreeShape | None = None
  reads_encoder: bool = False
  adapts: bool = False
  reads_features: bool = False
  follows_rules: bool = False
  made_for: tuple[str, ...] = ()

  @property
  def models(self) -> list[Model]:
    """The models that the drafter asks, to check that they fit a target.

    Once an engine has placed the parameters, there are none among them.
    """
    leaves = jax.tree.leaves(self.params)
    return [leaf for leaf in leaves if isinstance(leaf, Model)]


# Stands in for a drafter in the plain loop, which asks for no proposals.
_never: Any = None
NO_DRAFTER = Drafter(lambda *_: (), _never, lambda state, _: state)


def ask_unless(
  skipped: jax.Array,
  ask: Callable[[DrafterState], tuple[Draft, DrafterState]],
  state: DrafterState,
) -> tuple[Draft, DrafterState]:
  """`ask(state)`, or an empty draft and the state as it is.

  A loop of one turn or none, because it updates the cache in place; a
  conditional would copy it. On a GPU it waits for the host once a round, which
  is less than gamma calls for nothing.

  Args:
    skipped: bool[], whether the drafter is not asked.
    ask: proposes a draft.
    state: the drafter's state.
  """
  shapes, _ = jax.eval_shape(ask, state)
  nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

  def once(carry):
    return True, *ask(carry[2])

  _, draft, state = lax.while_loop(
    lambda carry: ~carry[0], once, (skipped, nothing, state)
  )
  return draft, state


def forbid_early_stops(
  logits: jax.Array,
  context: Context,
  index: jax.Array | int = 0,
  ids: jax.Array | None = None,
  places: Any = None,
) -> jax.Array:
  """Masks stop ids as the target does, in the logits of S proposals.

  Args:
    logits: float[B, S, V].
    context: says whether stop ids are forbidden, and for how long.
    index: number of the first of the S proposals.
    ids: int32[B, S, V], the token that each logit belongs to; None is 0..V-1.
    places: int[S] as in `probs.forbid_early_stops`.

  Returns:
    float[B, S, V].
  """
  request = context.request
  if not request.forbids_stops:
    return logits
  produced = context.length - request.prompt_length + index
  return probs.forbid_early_stops(
    logits, request.stop_ids, produced, request.min_length, ids, places
  )


def ruled(
  logits: jax.Array, context: Context, index: jax.Array | int
) -> jax.Array:
  """The logits float[B, V] of proposal `index`, as the target's rules have it.

  Where there are rules, `Context.prefix` must be that of the proposal.
  """
  logits, ruling = logits[:, None], context.request.ruling
  if ruling is not None and context.prefix is not None:
    here = jax.tree.map(lambda leaf: leaf[:, None], context.prefix)
    logits = ruling.adjust(here, logits)
  return forbid_early_stops(logits, context, index)[:, 0]


def check_chain(drafter: Drafter, where: str) -> None:
  """Raises ValueError if a drafter proposes a tree where that does not fit."""
  if drafter.tree is not None:
    advice = 'One with a tree is given to an Engine by itself.'
    raise unexpected(where, 'drafters without a tree', drafter.name, advice)


def draft_uniforms(context: Context) -> jax.Array | None:
  """The random numbers of all proposals, for `draw`: consumes their keys.

  Returns:
    float32[G, B, 2]; None when greedy.
  """
  if context.request.greedy:
    return None
  over_rows = jax.vmap(probs.draft_uniforms, in_axes=(0, None), out_axes=1)
  return over_rows(context.keys, context.gamma)


def draw(logits: jax.Array, context: Context, uniforms: jax.Array | None):
  """Draws one proposal of each row, sampled as the target is.

  Args:
    logits: float[B, V], logits of any V tokens.
    context: says how to sample.
    uniforms: float32[B, 2], the proposal's part of `draft_uniforms`.

  Returns:
    int32[B], indices into the V logits, and the distributions float32[B, V]
    that they were drawn from, None when greedy.
  """
  if uniforms is None:
    return probs.greedy_token(logits), None
  rows = probs.standardise_batch(logits[:, None], context.request.sampling)[
    :, 0
  ]
  return jax.vmap(probs.inverse_cdf)(rows, uniforms), rows


def draw_next(
  logits: jax.Array,
  context: Context,
  index: jax.Array | int,
  uniforms: jax.Array | None,
):
  """`draw` of the proposal `index`, `ruled`.

  Here `uniforms` are those of all proposals, from `draft_uniforms`.
  """
  logits = ruled(logits, context, index)
  return draw(logits, context, None if uniforms is None else uniforms[index])
