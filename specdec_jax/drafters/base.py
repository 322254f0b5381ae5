"""The `Drafter` contract: three pure functions and a state pytree.

The speculative loop uses nothing else of a drafter. The output is lossless if
the drafter keeps the conditions of `Draft`: it returns the distributions that
it really drew from, and never drops a token because of its value. Apart from
that, a drafter only needs to be fast and often right.
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
from specdec_jax.types import Array, Draft

DrafterState = Any  # a pytree that only its drafter understands


@struct.dataclass
class Context:
  """The input of `Drafter.propose`: a request, and the state of its round.

  Attributes:
    request: the batch, with its sampling, stop ids, limits and token rules. A
      drafter may sample differently as long as it returns the probabilities
      that it really drew from. `request.prompt` may be cut to the start token;
      `tokens` holds all of it.
    tokens: int32[B, T + 1], the decoder's committed tokens: the start token,
      the rest of the prompt, the output so far. Past `length` they mean
      nothing.
    length: int32[B], committed tokens of a row, the start token counted, so
      at least 1. A finished row has 1 here.
    keys: PRNG keys [B] of each row in this round; `probs.draft_key` derives the
      key of each proposal.
    running: bool[B], the rows that are not finished.
    budget: int32[B], the most proposals that each row can use; None unless
      drafts adapt (`Drafting.adapts`).
    prefix: the committed tokens as token rules read them; None without rules. A
      drafter may follow the rules, see `ruled`.
    features: [B, M], the target's last hidden state from which each row's last
      committed token was predicted. The target has not read that token itself
      yet, so the feature does not depend on it. Zeros if there is no such
      state: before the first token after a start token, and in a row that was
      decoded plainly so far. None if the drafter does not read features.
    target: static, the target's network, given with `features`.
    target_params: the target's parameters, given with `features`.

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
    """Returns the context with some fields of its request replaced."""
    return dataclasses.replace(self, request=self.request.replace(**changes))

  def after(self, token: jax.Array) -> Prefix | None:
    """Returns the prefix followed by one more proposal, int32[B]."""
    ruling = self.request.ruling
    if ruling is None or self.prefix is None:
      return None
    return ruling.longer(self.prefix, token)

  @property
  def num_slots(self) -> int:
    """T, the number of slots of a drafter's cache."""
    return self.tokens.shape[1] - 1


# The functions of a drafter, see `Drafter`.
InitFn = Callable[
  [Any, jax.Array, int, jax.Array, jax.Array | None], DrafterState
]
ProposeFn = Callable[[Any, DrafterState, Context], tuple[Draft, DrafterState]]
CommitFn = Callable[[DrafterState, jax.Array], DrafterState]


def no_proposals(*_: Any) -> tuple[Draft, DrafterState]:
  """A `ProposeFn` for requests with a gamma of 0, which never call it."""
  raise NotImplementedError('Drafter: give `propose`, a function.')


class Drafter(NamedTuple):
  """A source of proposals: three functions and their parameters.

  Attributes:
    init: starts a batch and reads its inputs, as `init(params, inputs,
      max_length, prompt, encoded) -> state`. `params` are those below, as
      arrays on the device; `inputs` are int32[B, E], `pad_id` past each row's
      end; `max_length` is T, the decoder slots that the run may use; `prompt`
      is int32[B, P], the tokens that the decoder begins with, see `Request`;
      `encoded` is float[B, E, M], the output of the target's encoder, and None
      unless `reads_encoder`. The first context holds the prompt too, so that
      only a drafter with a cache needs to read it here. By default there is no
      state.
    propose: proposes up to gamma >= 1 tokens per row, once per round, as
      `propose(params, state, context) -> (draft, state)`. The draft must keep
      the conditions that `Draft` states; the state may have read it.
    commit: forgets everything past the committed tokens, once per round, as
      `commit(state, length) -> state`. `state` is the one that `propose`
      returned; `length` is int32[B], the number of committed tokens, the start
      token counted. Inside another drafter (see `Request.catches_up`) `length`
      may be smaller than before, and the round may have had no `propose`. By
      default the state stays as it is.
    name: the kind of the drafter and its settings. It tells apart drafters with
      the same parameters: a run with a drafter of another name is not resumed,
      and a calibration of another name is not used.
    params: the parameters that `init` and `propose` take, such as a table, or a
      tuple of the parameters of several parts; () if there are none. A `Model`
      stands for its parameters, which an engine reads and places.
    network: the network whose likeliest tokens are proposed; None if there is
      no such network, so that no beam search can use the drafter.
    tree: the tree that is proposed; each draft is its first `Context.gamma`
      levels (`TreeShape.cut`). None proposes chains. The caches have room for
      its nodes. After a round `Context.tokens` shows the path that was kept.
    reads_encoder: whether `init` needs `encoded`. The target's encoder then
      runs once for both.
    adapts: whether the drafter follows `Drafting.draft_rule`.
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
    >>> drafter = sd.Drafter(propose=propose, name='repeats')
    >>> sd.Engine(target, drafter)
    Engine(target=..., draft='repeats', gamma=4, ...)
  """

  init: InitFn = lambda *_: ()
  propose: ProposeFn = no_proposals
  commit: CommitFn = lambda state, _: state
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
    """The models among `params`; [] after an engine has placed them."""
    leaves = jax.tree.leaves(self.params)
    return [leaf for leaf in leaves if isinstance(leaf, Model)]


NO_DRAFTER = Drafter()  # the plain loop has this drafter, with a gamma of 0


def ask_unless(
  skipped: jax.Array,
  ask: Callable[[DrafterState], tuple[Draft, DrafterState]],
  state: DrafterState,
) -> tuple[Draft, DrafterState]:
  """Returns `ask(state)`; if `skipped`, an empty draft and the same state.

  The call is in a loop of at most one turn, which updates the cache in place,
  where a conditional would copy it. On a GPU the loop waits for the host once a
  round, which takes less time than gamma unused calls.

  Args:
    skipped: bool[], whether to return the empty draft.
    ask: proposes a draft.
    state: the drafter's state.
  """
  shapes, _ = jax.eval_shape(ask, state)
  empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

  def once(carry):
    return True, *ask(carry[2])

  _, draft, state = lax.while_loop(
    lambda carry: ~carry[0], once, (skipped, empty, state)
  )
  return draft, state


def forbid_early_stops(
  logits: jax.Array,
  context: Context,
  index: jax.Array | int = 0,
  ids: jax.Array | None = None,
  places: Array | None = None,
) -> jax.Array:
  """Masks stop ids as the target does, in the logits of S proposals.

  Args:
    logits: float[B, S, V].
    context: tells whether stop ids are forbidden, and for how many tokens.
    index: number of the first of the S proposals.
    ids: int32[B, S, V], the token that each logit belongs to; None is 0..V-1.
    places: int[S], how many proposals, or levels of a tree, each of the S comes
      after number `index`; None stands for 0, 1, ...

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
  """Applies the request's token rules to the logits of one proposal.

  Args:
    logits: float[B, V].
    context: holds the rules; its `prefix` must end before the proposal.
    index: number of the proposal.
  """
  logits, ruling = logits[:, None], context.request.ruling
  if ruling is not None and context.prefix is not None:
    here = jax.tree.map(lambda leaf: leaf[:, None], context.prefix)
    logits = ruling.adjust(here, logits)
  return forbid_early_stops(logits, context, index)[:, 0]


def check_chain(drafter: Drafter, where: str) -> None:
  """Raises ValueError if a drafter proposes a tree, which `where` refuses."""
  if drafter.tree is not None:
    advice = 'Give a drafter with a tree to an Engine directly.'
    raise unexpected(where, 'drafters without a tree', drafter.name, advice)


def draft_uniforms(context: Context) -> jax.Array | None:
  """Draws the random numbers of all proposals of a round, for `draw`.

  It consumes the key of each proposal (`probs.draft_key`).

  Returns:
    float32[G, B, 2]; None when greedy.
  """
  if context.request.greedy:
    return None
  over_rows = jax.vmap(probs.draft_uniforms, in_axes=(0, None), out_axes=1)
  return over_rows(context.keys, context.gamma)


def draw(logits: jax.Array, context: Context, uniforms: jax.Array | None):
  """Draws one proposal per row, with the target's sampling settings.

  Args:
    logits: float[B, V], logits of any V tokens.
    context: holds the sampling settings.
    uniforms: float32[B, 2], the proposal's part of `draft_uniforms`; None when
      greedy.

  Returns:
    int32[B], indices into the V logits, and the distributions float32[B, V]
    that they were drawn from, None when greedy.
  """
  if uniforms is None:
    return probs.greedy_token(logits), None
  sampling = context.request.sampling
  rows = probs.standardise_batch(logits[:, None], sampling)[:, 0]
  return jax.vmap(probs.inverse_cdf)(rows, uniforms), rows


def draw_next(
  logits: jax.Array,
  context: Context,
  index: jax.Array | int,
  uniforms: jax.Array | None,
):
  """Applies the token rules to logits, then draws a proposal from them.

  Args:
    logits: float[B, V].
    context: has rules and sampling; its `prefix` must end before the proposal.
    index: number of the proposal.
    uniforms: `draft_uniforms` of all proposals.

  Returns:
    The tokens and their distributions, as `draw` does.
  """
  logits = ruled(logits, context, index)
  return draw(logits, context, None if uniforms is None else uniforms[index])
