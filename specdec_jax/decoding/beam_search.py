"""Beam search, plain and speculative (Appendix A.4), in one `while_loop`.

All beams of a row share its one cache, which grows by K slots a level and is
never reordered: each beam knows the slots of its ancestors. The encoder is read
once per row, and the weights once per call for all beams.

In a speculative round the drafter runs a beam search of U >= K beams from the
target's live beams, `gamma` levels deep. The target reads its live beams and
all nodes of the drafter's tree in one call. Then its own search is replayed,
level by level, on its own scores: a level holds if every live beam is a node of
the tree, because only then are all its continuations known. The search is the
plain one whatever the drafter proposes; a round without proposals is the plain
search itself.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from specdec_jax import probs
from specdec_jax.decoding import beams
from specdec_jax.decoding.beams import Hypotheses, Limits
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import Request
from specdec_jax.models.base import LanguageModel, read_prompt
from specdec_jax.models.tree import Tree
from specdec_jax.types import DecodeStats, FinishReason, Generation


@struct.dataclass
class Level:
  """K nodes at one place of a row's sequences, in K neighbouring slots.

  Attributes:
    tokens: int32[B, K].
    visible: bool[B, K, T], the slots of each node's ancestors and its own.
  """

  tokens: jax.Array
  visible: jax.Array


@struct.dataclass
class Known:
  """What the target has said of live beams that it has read already.

  A level that does not hold mostly misses one beam. The others were nodes of
  the tree, so the next draft need not guess what follows them.

  Attributes:
    beams: bool[B, K], which live beams these are.
    values: float32[B, K, C], log-probabilities of their `candidates`.
    ids: int32[B, K, C].
  """

  beams: jax.Array
  values: jax.Array
  ids: jax.Array


@struct.dataclass
class BeamState:
  """The loop's carry; donated, so that it is updated in place.

  Attributes:
    live: the live beams; their last tokens have not been read yet.
    finished: the finished beams.
    ancestors: bool[B, K, T], the slots of all tokens of each live beam but its
      last.
    used: int32[B], slots in use; the last tokens of the live beams come next.
    places: int32[B, T], each slot's place in its sequence.
    previous: the level before that of the live beams. The drafter has not read
      it if all its proposals were accepted, and reads it again otherwise.
    known: what the drafter is told of the live beams.
    finish_reason: int32[B], a `FinishReason`.
    target_cache: the target's cache.
    draft_cache: the drafter's; None in the plain search.
    stats: counts, of levels where those of `DecodeState` are of tokens.
  """

  live: Hypotheses
  finished: Hypotheses
  ancestors: jax.Array
  used: jax.Array
  places: jax.Array
  previous: Level
  known: Known
  finish_reason: jax.Array
  target_cache: Any
  draft_cache: Any
  stats: DecodeStats

  @property
  def running(self) -> jax.Array:
    """bool[B], the rows whose search is not over."""
    return self.finish_reason == FinishReason.RUNNING


@struct.dataclass
class DraftTree:
  """The drafter's proposals: `gamma` levels of U nodes.

  Attributes:
    tokens: int32[B, G, U].
    parents: int32[B, G, U], the number of each node's parent in the level
      before; in the first level, of the live beam that it continues.
    visible: bool[B, G, U, T].
  """

  tokens: jax.Array
  parents: jax.Array
  visible: jax.Array


def start(
  target: LanguageModel,
  drafter: LanguageModel | None,
  params: PairParams,
  request: Request,
) -> BeamState:
  """Both models read the inputs; returns the state before the first round."""
  settings = _settings(request)
  width, slots = settings.width, request.cache_slots
  batch = request.inputs.shape[0]
  inputs, prompt = request.inputs, request.prompt
  first = jnp.zeros((batch,), jnp.int32) + request.first_length
  # K slots that nobody sees stand for the level before the first one.
  used = first - 1 + width
  slot = jnp.arange(slots)
  behind = slot < (first - 1)[:, None]
  tokens = jnp.zeros((batch, request.prompt_width + request.slots), jnp.int32)
  if prompt is not None:
    tokens = tokens.at[:, : request.prompt_width].set(prompt)
  live = beams.start(tokens, first, width)
  zeros = jnp.zeros((batch,), jnp.int32)

  def read(model, model_params):
    return read_prompt(
      model, model_params, inputs, slots, prompt, request.longest
    )

  return BeamState(
    live=live,
    finished=beams.none_finished(live),
    ancestors=jnp.repeat(behind[:, None], width, axis=1),
    used=used,
    places=_places(request, slot),
    previous=Level(
      tokens=jnp.zeros((batch, width), jnp.int32),
      # Each its own slot: a softmax over nothing is not a number.
      visible=slot == (used[:, None] - width + jnp.arange(width))[..., None],
    ),
    known=Known(
      beams=jnp.zeros((batch, width), bool),
      values=jnp.zeros((batch, width, settings.num_candidates), jnp.float32),
      ids=jnp.zeros((batch, width, settings.num_candidates), jnp.int32),
    ),
    finish_reason=jnp.where(
      request.max_length > 0, FinishReason.RUNNING, FinishReason.LENGTH
    ).astype(jnp.int32),
    target_cache=read(target, params.target),
    draft_cache=None if drafter is None else read(drafter, params.draft),
    stats=DecodeStats(
      num_rounds=zeros,
      num_tested=zeros,
      num_accepted=zeros,
      histogram=jnp.zeros((batch, request.gamma + 1), jnp.int32),
    ),
  )


def step(
  target: LanguageModel,
  drafter: LanguageModel | None,
  params: PairParams,
  request: Request,
  state: BeamState,
) -> BeamState:
  """One round: 1 to gamma + 1 levels in every row whose search is not over."""
  settings = _settings(request)
  # Rows that are over work on their first slots, which nobody reads.
  used = jnp.where(state.running, state.used, settings.width)
  roots = _roots(request, state, used)

  # The drafter's beam search from the live beams, gamma levels deep.
  level, places = _levels(request, state, used)
  state, draft = _propose(drafter, params, request, state, roots, used, places)

  # The target reads the live beams and the whole tree in one call.
  cache = target.rewind(state.target_cache, used)
  fed, visible = _nodes(roots, draft)
  tree = Tree(state.live.length[:, :1] - 1 + level, places, visible)
  logits, cache = target.extend(params.target, cache, fed, tree)
  values, ids = _candidates(request, state, logits, level)

  # Its own search on its own scores, as far as its live beams are nodes.
  valid = probs.valid_logits(logits)
  state, chosen, num_held = _replay(
    request, state, draft, used, values, ids, valid
  )

  # Both keep the nodes that were live beams.
  kept = used + settings.width * (1 + num_held)
  first = used + settings.width

  def keep(model, cache):
    if chosen.shape[1]:
      cache = model.keep(cache, first, used[:, None] + chosen)
    return model.rewind(cache, kept)

  draft_cache = state.draft_cache
  if drafter is not None and request.gamma:
    draft_cache = keep(drafter, draft_cache)
  return state.replace(
    target_cache=keep(target, cache),
    draft_cache=draft_cache,
    used=jnp.where(state.running, kept, state.used),
  )


def generation(request: Request, state: BeamState) -> Generation:
  """The K beams of each row, one after another, the best one last.

  Returns:
    A `Generation` of B K rows with `scores`. The counts of a search are those
    of its best beam, the others have none. Where a row has fewer than K
    finished beams, the first ones are empty and their score is `ABSENT`; where
    it has none, they are its live beams, and the scores have no length penalty.
  """
  found = beams.result(state.live, state.finished)
  batch, width, _ = found.tokens.shape
  first = request.first_length
  if not isinstance(first, int):
    first = first[:, None]
  length = jnp.where(found.exists, found.length - first, 0)
  begin = jnp.broadcast_to(jnp.asarray(first), (batch, width))
  index = begin[..., None] + jnp.arange(request.slots)

  def behind_prompt(values):
    taken = jnp.take_along_axis(values, index, axis=2, mode='clip')
    live = jnp.arange(request.slots) < length[..., None]
    return jnp.where(live, taken, 0).reshape(batch * width, request.slots)

  last = jnp.take_along_axis(
    found.tokens, jnp.maximum(found.length - 1, 0)[..., None], axis=2
  )[..., 0]
  stopped = jnp.any(last[..., None] == request.stop_ids, axis=-1)
  stopped &= length > 0
  reason = jnp.where(stopped, FinishReason.STOP, FinishReason.LENGTH)
  invalid = state.finish_reason == FinishReason.INVALID
  reason = jnp.where(invalid[:, None], FinishReason.INVALID, reason)

  def of_best(count):
    shape = batch, width, *count.shape[1:]
    spread = jnp.zeros(shape, count.dtype).at[:, -1].set(count)
    return spread.reshape(batch * width, *count.shape[1:])

  log_probs = behind_prompt(found.log_probs)
  return Generation(
    tokens=behind_prompt(found.tokens),
    length=length.reshape(-1),
    log_probs=log_probs if request.with_log_probs else log_probs[:, :0],
    finish_reason=reason.reshape(-1).astype(jnp.int32),
    stats=jax.tree.map(of_best, state.stats),
    scores=found.score.reshape(-1),
  )


def _settings(request: Request) -> beams.BeamSettings:
  if request.beams is None:
    raise ValueError('A beam search needs a Request with `beams`.')
  return request.beams


def _limits(request: Request) -> Limits:
  return Limits(
    stop_ids=request.stop_ids,
    first_length=jnp.zeros_like(request.max_length) + request.first_length,
    max_length=request.max_length,
  )


def _places(request: Request, slot: jax.Array) -> jax.Array:
  """int32[B, T]: the prompt but its last token, then K slots a level."""
  width = _settings(request).width
  first = jnp.zeros_like(request.max_length) + request.first_length
  base = (first - 1)[:, None]
  # The first K slots behind the prompt are nobody's.
  level = (slot - base) // width - 1
  return jnp.where(slot < base, slot, base + level).astype(jnp.int32)


def _roots(request: Request, state: BeamState, used: jax.Array) -> Level:
  """The live beams' last tokens, as nodes in the next K slots."""
  width = _settings(request).width
  index = state.live.length[..., None] - 1
  tokens = jnp.take_along_axis(state.live.tokens, index, axis=2)[..., 0]
  return Level(tokens, _with_own(state.ancestors, used, width))


def _with_own(ancestors: jax.Array, begin: jax.Array, count: int) -> jax.Array:
  """Adds to bool[B, N, T] each node's own slot, begin int32[B] and on."""
  own = begin[:, None] + jnp.arange(count)
  return ancestors | (jnp.arange(ancestors.shape[-1]) == own[..., None])


def _gather(values: jax.Array, index: jax.Array) -> jax.Array:
  """values[b, index[b, n]], for [B, K, ...] and int32[B, N]."""
  place = index.reshape(*index.shape, *(1,) * (values.ndim - 2))
  return jnp.take_along_axis(values, place, axis=1)


def _propose(
  drafter, params, request: Request, state, roots: Level, used, places
):
  """The drafter's search, and the state with the cache that it read into."""
  settings = _settings(request)
  width, draft_width = settings.width, settings.draft_width
  batch, _, slots = roots.visible.shape
  if drafter is None or not request.gamma:
    shape = batch, 0, draft_width
    empty = jnp.zeros(shape, jnp.int32)
    return state, DraftTree(empty, empty, jnp.zeros((*shape, slots), bool))
  place = state.live.length[:, :1] - 1  # of the roots

  def read(cache, tokens, positions, visible):
    tree = Tree(positions, places, visible)
    return drafter.extend(params.draft, cache, tokens, tree)

  def guess(logits):
    # A beam that ends is no live beam.
    every = jnp.ones(logits.shape[:2], bool)
    count = min(draft_width, logits.shape[-1])
    return beams.candidates(logits, count, every, request.stop_ids)

  # The level before the roots too: nothing is owed then, see `small_model`.
  cache = drafter.rewind(state.draft_cache, used - width)
  positions = jnp.concatenate([jnp.maximum(place - 1, 0), place], axis=1)
  logits, cache = read(
    cache,
    jnp.concatenate([state.previous.tokens, roots.tokens], axis=1),
    jnp.repeat(positions, width, axis=1),
    jnp.concatenate([state.previous.visible, roots.visible], axis=1),
  )
  limits = _limits(request)
  beaten = beams.is_beaten(settings, limits, state.live, state.finished)
  score = jnp.where(beaten, beams.ABSENT, state.live.score)
  guessed = guess(logits[:, width:])
  values, ids = _told(state.known, guessed, request.stop_ids)
  score, parents, tokens = beams.widen(score, values, ids, draft_width)
  visible = _gather(roots.visible, parents)

  def one_level(carry, depth):
    cache, score, tokens, ancestors = carry
    begin = used + width + depth * draft_width
    visible = _with_own(ancestors, begin, draft_width)
    positions = jnp.broadcast_to(place + 1 + depth, tokens.shape)
    logits, cache = read(cache, tokens, positions, visible)
    values, ids = guess(logits)
    score, parents, more = beams.widen(score, values, ids, draft_width)
    carry = cache, score, more, _gather(visible, parents)
    return carry, (tokens, visible, parents)

  carry = cache, score, tokens, visible
  carry, levels = lax.scan(one_level, carry, jnp.arange(request.gamma - 1))
  cache, _, last, ancestors = carry
  begin = used + width + (request.gamma - 1) * draft_width
  visible = _with_own(ancestors, begin, draft_width)

  def stacked(before, one):
    return jnp.concatenate([before.swapaxes(0, 1), one[:, None]], axis=1)

  more_tokens, more_visible, more_parents = levels
  draft = DraftTree(
    tokens=stacked(more_tokens, last),
    parents=jnp.concatenate(
      [parents[:, None], more_parents.swapaxes(0, 1)], axis=1
    ),
    visible=stacked(more_visible, visible),
  )
  return state.replace(draft_cache=cache), draft


def _told(known: Known, guessed, stop_ids: jax.Array):
  """`candidates` of the live beams: the target's where it has said them."""
  ends = jnp.any(known.ids[..., None] == stop_ids, axis=-1)
  said = jnp.where(ends, -jnp.inf, known.values), known.ids
  count = max(guessed[0].shape[-1], said[0].shape[-1])

  def padded(array, value):
    missing = count - array.shape[-1]
    return jnp.pad(array, ((0, 0), (0, 0), (0, missing)), constant_values=value)

  def chosen(one, other, padding):
    here = known.beams[..., None]
    return jnp.where(here, padded(one, padding), padded(other, padding))

  values = chosen(said[0], guessed[0], -jnp.inf)
  return values, chosen(said[1], guessed[1], 0)


def _levels(request: Request, state: BeamState, used: jax.Array):
  """Where the nodes of this round lie.

  Returns:
    int32[N], the level of each node of the target's call, 0 the live beams; and
    int32[B, T], each slot's place in its sequence during the round.
  """
  settings = _settings(request)
  deeper = jnp.repeat(1 + jnp.arange(request.gamma), settings.draft_width)
  level = jnp.concatenate([jnp.zeros((settings.width,), jnp.int32), deeper])
  number = jnp.arange(state.places.shape[1]) - used[:, None]
  is_node = (number >= 0) & (number < level.size)
  place = (
    state.live.length[:, :1] - 1 + level[jnp.clip(number, 0, level.size - 1)]
  )
  return level, jnp.where(is_node, place, state.places)


def _nodes(roots: Level, draft: DraftTree):
  """Tokens, int32[B, N], and what they see, bool[B, N, T]; the roots first."""
  batch, _, slots = roots.visible.shape
  tokens = draft.tokens.reshape(batch, -1)
  visible = draft.visible.reshape(batch, -1, slots)
  return (
    jnp.concatenate([roots.tokens, tokens], axis=1),
    jnp.concatenate([roots.visible, visible], axis=1),
  )


def _candidates(request: Request, state, logits: jax.Array, level: jax.Array):
  """`beams.candidates` of every node of the call."""
  count = _settings(request).num_candidates
  produced = (
    state.live.length[:, :1] - jnp.asarray(request.first_length)[..., None]
  )
  early = produced + level < request.min_length[:, None]
  return beams.candidates(logits, count, early, request.stop_ids)


def _replay(
  request: Request, state, draft: DraftTree, used, values, ids, valid
):
  """The target's own search over the nodes that it has read.

  Args:
    request: the limits.
    state: the state before.
    draft: the nodes, G levels of U.
    used: int32[B], the slot of the first live beam's node.
    values: float32[B, N, C], `candidates` of all nodes, the live beams first.
    ids: int32[B, N, C].
    valid: bool[B, N], whether a node's logits give probabilities.

  Returns:
    The state after it; int32[B, G K], the numbers of the nodes that were live
    beams in each level; int32[B], how many levels held.
  """
  settings, limits = _settings(request), _limits(request)
  width, draft_width = settings.width, settings.draft_width
  batch = used.shape[0]
  gamma = request.gamma
  # The last level has no children: no level after it can hold.
  none = jnp.full((batch, 1, draft_width), -1, jnp.int32)
  children = tuple(
    jnp.concatenate([nodes, none], axis=1).swapaxes(0, 1)
    for nodes in (draft.tokens, draft.parents)
  )

  def one_level(carry, inputs):
    state, going_on, place = carry
    depth, child_tokens, child_parents = inputs
    # The number of each live beam's node among all nodes of the call.
    begin = jnp.where(depth == 0, 0, width + (depth - 1) * draft_width)
    node = begin + place
    live, finished, parents = beams.advance(
      settings,
      limits,
      state.live,
      state.finished,
      _gather(values, node),
      _gather(ids, node),
    )
    is_valid = jnp.all(_gather(valid, node) | ~state.live.exists, axis=1)
    over = beams.is_over(settings, limits, live, finished)
    reason = jnp.where(over, FinishReason.STOP, state.finish_reason)
    reason = jnp.where(is_valid, reason, FinishReason.INVALID)
    # Behind the call the nodes that are kept lie level by level.
    first = used + depth * width
    visible = _with_own(state.ancestors, first, width)
    index = state.live.length[..., None] - 1
    tokens = jnp.take_along_axis(state.live.tokens, index, axis=2)[..., 0]
    after = state.replace(
      live=live,
      finished=finished,
      ancestors=_gather(visible, parents),
      previous=Level(tokens, visible),
      finish_reason=reason.astype(jnp.int32),
    )

    # Which nodes the next live beams are, if each that matters is one.
    last = jnp.take_along_axis(live.tokens, live.length[..., None] - 1, axis=2)
    same = child_tokens[:, None, :] == last
    same &= child_parents[:, None, :] == _gather(place, parents)[..., None]
    found = jnp.any(same, axis=2)
    beaten = beams.is_beaten(settings, limits, live, finished)
    held = going_on & jnp.all(found | beaten, axis=1) & after.running
    # What would follow a beam that is no node is not known: it is dropped.
    dropped = held[:, None] & ~found
    score = jnp.where(dropped, beams.ABSENT, live.score)
    exists = live.exists & ~dropped
    after = after.replace(live=live.replace(score=score, exists=exists))
    next_place = jnp.argmax(same, axis=2).astype(jnp.int32)
    next_node = width + depth * draft_width + next_place
    known = Known(found, _gather(values, next_node), _gather(ids, next_node))
    after = after.replace(known=known)
    state = _where(going_on, after, state)
    return (state, held, next_place), (held, node)

  place = jnp.broadcast_to(jnp.arange(width), (batch, width))
  inputs = jnp.arange(gamma + 1), *children
  (after, _, _), (held, nodes) = lax.scan(
    one_level, (_search_of(state), state.running, place), inputs
  )
  num_held = jnp.sum(held, axis=0, dtype=jnp.int32)
  # How far proposals counted: those behind the end of a search do not.
  ended = ~after.running & state.running
  tested = jnp.minimum(num_held + 1, jnp.where(ended, num_held, gamma))
  running = state.running.astype(jnp.int32)
  stats = state.stats
  rounds = jax.nn.one_hot(num_held, gamma + 1, dtype=jnp.int32)
  stats = stats.replace(
    num_rounds=stats.num_rounds + running,
    num_tested=stats.num_tested + tested * running,
    num_accepted=stats.num_accepted + num_held * running,
    histogram=stats.histogram + rounds * running[:, None],
  )
  state = after.replace(
    target_cache=state.target_cache,
    draft_cache=state.draft_cache,
    places=state.places,
    stats=stats,
  )
  return state, nodes[1:].swapaxes(0, 1).reshape(batch, gamma * width), num_held


def _search_of(state: BeamState) -> BeamState:
  """The part of a state that a level changes."""
  return state.replace(
    target_cache=None, draft_cache=None, places=None, stats=None
  )


def _where(condition: jax.Array, one: Any, other: Any) -> Any:
  """Rows bool[B] of one tree, the others of the other."""

  def choose(left, right):
    shape = condition.shape + (1,) * (left.ndim - 1)
    return jnp.where(condition.reshape(shape), left, right)

  return jax.tree.map(choose, one, other)
