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

from specdec_jax import probs
from specdec_jax.decoding import beams
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.beams import Hypotheses
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import Request, is_stop
from specdec_jax.models.base import (
  LanguageModel,
  read_prompt,
  reads_encoder,
  start_id,
)
from specdec_jax.tree_shape import Tree
from specdec_jax.types import DecodeStats, FinishReason, Generation, Verdict


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
class Search:
  """What a level changes.

  Attributes:
    live: the live beams; their last tokens have not been read yet.
    finished: the finished beams.
    ancestors: bool[B, K, T], the slots of all tokens of each live beam but its
      last.
    previous: the level before that of the live beams. The drafter has not read
      it if all its proposals were accepted, and reads it again otherwise.
    known: what the drafter is told of the live beams.
    finish_reason: int32[B], a `FinishReason`.
  """

  live: Hypotheses
  finished: Hypotheses
  ancestors: jax.Array
  previous: Level
  known: Known
  finish_reason: jax.Array

  @property
  def running(self) -> jax.Array:
    """bool[B], the rows whose search is not over."""
    return self.finish_reason == FinishReason.RUNNING


@struct.dataclass
class BeamState:
  """The loop's carry; donated, so that it is updated in place.

  Attributes:
    search: the beams.
    used: int32[B], slots in use; the last tokens of the live beams come next.
    target_cache: the target's cache.
    draft_cache: the drafter's; None in the plain search.
    stats: counts, of levels where those of `DecodeState` are of tokens.
  """

  search: Search
  used: jax.Array
  target_cache: Any
  draft_cache: Any
  stats: DecodeStats

  @property
  def running(self) -> jax.Array:
    """bool[B], the rows whose search is not over."""
    return self.search.running

  @property
  def finish_reason(self) -> jax.Array:
    """int32[B], a `FinishReason`."""
    return self.search.finish_reason


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
  settings = request.search
  width, slots = settings.width, request.cache_slots
  batch = request.inputs.shape[0]
  inputs, prompt = request.inputs, request.prompt
  first = request.first_length
  # K slots that nobody sees stand for the level before the first one.
  used = first - 1 + width
  slot = jnp.arange(slots)
  behind = slot < (first - 1)[:, None]
  tokens = decode_state.first_tokens(
    request, start_id(target), request.prompt_width + request.slots
  )
  live = beams.start(tokens, first, width)

  encoded = None
  if drafter is not None and reads_encoder(drafter):
    encoded = target.encode(params.target, inputs)

  def read(model, model_params):
    longest = request.longest
    return read_prompt(
      model, model_params, inputs, slots, prompt, longest, encoded
    )

  search = Search(
    live=live,
    finished=beams.none_finished(live),
    ancestors=jnp.repeat(behind[:, None], width, axis=1),
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
  )
  return BeamState(
    search=search,
    used=used,
    target_cache=read(target, params.target),
    draft_cache=None if drafter is None else read(drafter, params.draft),
    stats=DecodeStats.none(batch, request.gamma),
  )


def step(
  target: LanguageModel,
  drafter: LanguageModel | None,
  params: PairParams,
  request: Request,
  state: BeamState,
) -> BeamState:
  """One round: 1 to gamma + 1 levels in every row whose search is not over."""
  search, width = state.search, request.search.width
  # Rows that are over work on their first slots, which nobody reads.
  used = jnp.where(state.running, state.used, width)
  # The live beams' last tokens are nodes in the next K slots.
  visible = _with_own(search.ancestors, used, width)
  roots = Level(search.live.last_token, visible)

  # The drafter's beam search from the live beams, gamma levels deep.
  level, places = _levels(request, search, used)
  draft_cache, draft = _propose(
    drafter, params, request, state, roots, used, places
  )

  # The target reads the live beams and the whole tree in one call.
  cache = target.rewind(state.target_cache, used)
  fed, visible = _nodes(roots, draft)
  tree = Tree(search.live.length[:, :1] - 1 + level, places, visible)
  features, cache = target.extend(params.target, cache, fed, tree)
  logits = target.head(params.target, features)
  candidates = _candidates(request, search, logits, level)

  # Its own search on its own scores, as far as its live beams are nodes.
  search, chosen, num_held = _replay(request, search, draft, used, candidates)
  # Proposals behind the end of a search do not count.
  ended = ~search.running & state.running
  length = jnp.where(ended, num_held, request.gamma)
  verdict = Verdict(num_held, next_token=num_held)

  # Both keep the nodes that were live beams.
  num_kept = used + width * (1 + num_held)
  first = used + width

  def keep(model, cache):
    if chosen.shape[1]:
      cache = model.keep(cache, first, used[:, None] + chosen)
    return model.rewind(cache, num_kept)

  if drafter is not None and request.gamma:
    draft_cache = keep(drafter, draft_cache)
  return BeamState(
    search=search,
    used=jnp.where(state.running, num_kept, state.used),
    target_cache=keep(target, cache),
    draft_cache=draft_cache,
    stats=state.stats.after_round(state.running, length, verdict),
  )


def generation(request: Request, state: BeamState) -> Generation:
  """The K beams of each row, one after another, the best one last.

  Returns:
    A `Generation` of B K rows with `scores`. The counts of a search are those
    of its best beam, the others have none. Where a row has fewer than K
    finished beams, the first ones are empty and their score is `ABSENT`; where
    it has none, they are its live beams, and the scores have no length penalty.
  """
  found = beams.result(state.search.live, state.search.finished)
  batch, width, _ = found.tokens.shape
  first = request.first_length[:, None]
  length = jnp.where(found.exists, found.length - first, 0)
  index = first[..., None] + jnp.arange(request.slots)
  index = jnp.broadcast_to(index, (batch, width, request.slots))

  def behind_prompt(values):
    taken = jnp.take_along_axis(values, index, axis=2, mode='clip')
    live = jnp.arange(request.slots) < length[..., None]
    return jnp.where(live, taken, 0).reshape(batch * width, request.slots)

  stopped = is_stop(request, found.last_token) & (length > 0)
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


def _places(request: Request, slot: jax.Array) -> jax.Array:
  """int32[B, T]: the prompt but its last token, then K slots a level."""
  width = request.search.width
  base = (request.first_length - 1)[:, None]
  # The first K slots behind the prompt are nobody's.
  level = (slot - base) // width - 1
  return jnp.where(slot < base, slot, base + level).astype(jnp.int32)


def _with_own(ancestors: jax.Array, begin: jax.Array, count: int) -> jax.Array:
  """Adds to bool[B, N, T] each node's own slot, begin int32[B] and on."""
  own = begin[:, None] + jnp.arange(count)
  return ancestors | (jnp.arange(ancestors.shape[-1]) == own[..., None])


def _propose(
  drafter, params, request: Request, state, roots: Level, used, places
):
  """The cache that the drafter's search read into, and its proposals."""
  search, settings = state.search, request.search
  width, draft_width = settings.width, settings.draft_width
  batch, _, slots = roots.visible.shape
  if drafter is None or not request.gamma:
    shape = batch, 0, draft_width
    empty = jnp.zeros(shape, jnp.int32)
    draft = DraftTree(empty, empty, jnp.zeros((*shape, slots), bool))
    return state.draft_cache, draft
  place = search.live.length[:, :1] - 1  # of the roots

  def read(cache, tokens, positions, visible):
    tree = Tree(positions, places, visible)
    features, cache = drafter.extend(params.draft, cache, tokens, tree)
    return drafter.head(params.draft, features), cache

  def guess(logits):
    # A beam that ends is no live beam.
    every = jnp.ones(logits.shape[:2], bool)
    count = min(draft_width, logits.shape[-1])
    return beams.candidates(logits, count, every, request.stop_ids)[:2]

  # The level before the roots too: nothing is owed then, see `small_model`.
  cache = drafter.rewind(state.draft_cache, used - width)
  positions = jnp.concatenate([jnp.maximum(place - 1, 0), place], axis=1)
  logits, cache = read(
    cache,
    jnp.concatenate([search.previous.tokens, roots.tokens], axis=1),
    jnp.repeat(positions, width, axis=1),
    jnp.concatenate([search.previous.visible, roots.visible], axis=1),
  )
  beaten = beams.is_beaten(request, search.live, search.finished)
  score = jnp.where(beaten, beams.ABSENT, search.live.score)
  guessed = guess(logits[:, width:])
  values, ids = _told(search.known, guessed, request.stop_ids)
  score, parents, tokens = beams.widen(score, values, ids, draft_width)
  visible = roots.visible
  levels = []
  # Unrolled: a loop would carry the cache, and copy it in and out.
  for depth in range(request.gamma):
    begin = used + width + depth * draft_width
    visible = _with_own(beams.gather(visible, parents), begin, draft_width)
    levels.append((tokens, parents, visible))
    if depth + 1 < request.gamma:
      positions = jnp.broadcast_to(place + 1 + depth, tokens.shape)
      logits, cache = read(cache, tokens, positions, visible)
      values, ids = guess(logits)
      score, parents, tokens = beams.widen(score, values, ids, draft_width)
  draft = DraftTree(
    *(jnp.stack(part, axis=1) for part in zip(*levels, strict=True))
  )
  return cache, draft


def _told(known: Known, guessed, stop_ids: jax.Array):
  """`candidates` of the live beams: the target's where it has said them."""
  ends = probs.is_one_of(known.ids, stop_ids)
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


def _levels(request: Request, search: Search, used: jax.Array):
  """Where the nodes of this round lie.

  Returns:
    int32[N], the level of each node of the target's call, 0 the live beams; and
    int32[B, T], each slot's place in its sequence during the round.
  """
  settings = request.search
  slot = jnp.arange(search.ancestors.shape[2])
  deeper = jnp.repeat(1 + jnp.arange(request.gamma), settings.draft_width)
  level = jnp.concatenate([jnp.zeros((settings.width,), jnp.int32), deeper])
  number = slot - used[:, None]
  is_node = (number >= 0) & (number < level.size)
  place = (
    search.live.length[:, :1] - 1 + level[jnp.clip(number, 0, level.size - 1)]
  )
  return level, jnp.where(is_node, place, _places(request, slot))


def _nodes(roots: Level, draft: DraftTree):
  """Tokens, int32[B, N], and what they see, bool[B, N, T]; the roots first."""
  batch, _, slots = roots.visible.shape
  tokens = draft.tokens.reshape(batch, -1)
  visible = draft.visible.reshape(batch, -1, slots)
  return (
    jnp.concatenate([roots.tokens, tokens], axis=1),
    jnp.concatenate([roots.visible, visible], axis=1),
  )


def _candidates(request: Request, search, logits: jax.Array, level: jax.Array):
  """`beams.candidates` of every node of the call."""
  count = request.search.num_candidates
  produced = search.live.length[:, :1] - request.first_length[:, None]
  early = produced + level < request.min_length[:, None]
  return beams.candidates(logits, count, early, request.stop_ids)


def _replay(request: Request, search: Search, draft: DraftTree, used, found):
  """The target's own search over the nodes that it has read.

  Args:
    request: the limits.
    search: the search before.
    draft: the nodes, G levels of U.
    used: int32[B], the slot of the first live beam's node.
    found: `candidates` of all N nodes, the live beams first.

  Returns:
    The search after it; int32[B, G K], the numbers of the nodes that were live
    beams in each level; int32[B], how many levels held.
  """
  settings = request.search
  width, draft_width = settings.width, settings.draft_width
  batch, gamma = used.shape[0], request.gamma
  after, going_on = search, search.running
  place = jnp.broadcast_to(jnp.arange(width), (batch, width))
  of_live = tuple(part[:, :width] for part in found)
  nodes, held_levels = [], []
  for depth in range(gamma + 1):
    # Behind the call the nodes that are kept lie level by level.
    before, first = after, used + depth * width
    after, parents = _next_level(request, before, of_live, first)
    if depth == gamma:  # it has no children: no level after it can hold
      after = beams.where(going_on, after, before)
      break

    # Which nodes the next live beams are, if each that matters is one.
    live = after.live
    same = draft.tokens[:, depth, None] == live.last_token[..., None]
    parent = beams.gather(place, parents)
    same &= draft.parents[:, depth, None] == parent[..., None]
    is_node = jnp.any(same, axis=2)
    beaten = beams.is_beaten(request, live, after.finished)
    held = going_on & jnp.all(is_node | beaten, axis=1) & after.running
    # What would follow a beam that is no node is not known: it is dropped.
    dropped = held[:, None] & ~is_node
    live = live.replace(
      score=jnp.where(dropped, beams.ABSENT, live.score),
      exists=live.exists & ~dropped,
    )
    place = jnp.argmax(same, axis=2).astype(jnp.int32)
    begin = width + depth * draft_width
    of_live = tuple(
      beams.gather(part[:, begin : begin + draft_width], place)
      for part in found
    )
    after = after.replace(live=live, known=Known(is_node, *of_live[:2]))
    after = beams.where(going_on, after, before)
    nodes.append(begin + place)
    held_levels.append(held)
    going_on = held

  num_held = sum(held_levels, jnp.zeros((batch,), jnp.int32))
  chosen = jnp.concatenate(nodes or [jnp.zeros((batch, 0), jnp.int32)], axis=1)
  return after, chosen, num_held


def _next_level(request: Request, search: Search, of_live, first: jax.Array):
  """One level of the target's own search, of which the next one knows nothing.

  Args:
    request: width, rule, and where beams end.
    search: the search before.
    of_live: `candidates` of the live beams, with what says whether these are
      probabilities.
    first: int32[B], the slot of the first live beam's last token.

  Returns:
    The search after it, and the beams that the live ones continue, int32[B, K].
  """
  values, ids, valid = of_live
  live, finished, parents = beams.advance(
    request, search.live, search.finished, values, ids
  )
  is_valid = jnp.all(valid | ~search.live.exists, axis=1)
  over = beams.is_over(request, live, finished)
  reason = jnp.where(over, FinishReason.STOP, search.finish_reason)
  reason = jnp.where(is_valid, reason, FinishReason.INVALID)
  visible = _with_own(search.ancestors, first, request.search.width)
  after = Search(
    live=live,
    finished=finished,
    ancestors=beams.gather(visible, parents),
    previous=Level(search.live.last_token, visible),
    known=search.known.replace(beams=jnp.zeros_like(search.known.beams)),
    finish_reason=reason.astype(jnp.int32),
  )
  return after, parents
