"""Beam search, plain and speculative (Appendix A.4), in one `while_loop`.

All beams of a row share one cache, which grows by K slots a level and is never
reordered: each beam has a mask of its ancestors' slots. The encoder runs once
per row, and a call reads the weights once for all beams.

In a speculative round the drafter runs a beam search of U >= K beams from the
target's live beams, `gamma` levels deep. The target reads its live beams and
all nodes of the drafter's tree in one call. Then the target's search is
replayed level by level on its own scores. A level holds if every live beam is a
node of the tree, because only then have all its continuations been read. So the
result is that of the plain search whatever the drafter proposes; a round
without proposals is the plain search itself.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specdec_jax.decoding import beams
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.beams import Hypotheses
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import is_stop
from specdec_jax.models.base import LanguageModel, read_prompt
from specdec_jax.request import Request
from specdec_jax.rules.tokens import Prefix
from specdec_jax.tree_shape import Tree
from specdec_jax.types import DecodeStats, FinishReason, Generation, Verdict


@struct.dataclass
class Level:
  """N nodes at the same position of a row's sequences, in neighbouring slots.

  Attributes:
    tokens: int32[B, N], the token of each node.
    visible: bool[B, N, T], the slots of each node's ancestors and its own.
    parents: int32[B, N], the index of each node's parent in the level before,
      which for the first proposed level is that of the live beams; None for
      nodes that were not proposed.
    prefix: the sequences up to each node, as token rules read them; None
      without rules.
  """

  tokens: jax.Array
  visible: jax.Array
  parents: jax.Array | None = None
  prefix: Prefix | None = None


@struct.dataclass
class Search:
  """The part of the state that a level changes.

  Attributes:
    live: the live beams; their last tokens have not been read yet.
    finished: the finished beams.
    ancestors: bool[B, K, T], the slots of all tokens of each live beam except
      its last one.
    previous: the level before the live beams. The drafter has not read it if
      all its proposals were accepted, and reads it again otherwise.
    known_values: float32[B, K, C], log-probabilities of the `candidates` of
      live beams that the target has read already; -inf for the other beams.
      Even if a level does not hold, most of its live beams are nodes of the
      tree, so the next draft need not guess their continuations.
    known_ids: int32[B, K, C], the tokens of these candidates.
    finish_reason: int32[B], a `FinishReason`.
  """

  live: Hypotheses
  finished: Hypotheses
  ancestors: jax.Array
  previous: Level
  known_values: jax.Array
  known_ids: jax.Array
  finish_reason: jax.Array

  @property
  def running(self) -> jax.Array:
    """bool[B], the rows whose search is not over."""
    return self.finish_reason == FinishReason.RUNNING


@struct.dataclass
class BeamState:
  """The loop's carry; it is donated, so that it is updated in place.

  Attributes:
    search: the beams of each row, and its finish reason.
    used: int32[B], number of filled slots of the cache; the last tokens of the
      live beams will fill the next ones.
    target_cache: the target's cache.
    draft_cache: the drafter's cache; None in the plain search.
    stats: the counts, which count levels instead of tokens.
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
    """int32[B], the `FinishReason` of each row; RUNNING until it ends."""
    return self.search.finish_reason


def start(
  target: LanguageModel,
  drafter: LanguageModel | None,
  params: PairParams,
  request: Request,
) -> BeamState:
  """Reads the inputs with both models; returns the first state."""
  settings = request.search
  width, slots = settings.width, request.cache_slots
  batch = request.inputs.shape[0]
  candidates = batch, width, settings.num_candidates
  inputs, prompt = request.inputs, request.prompt
  first = request.prompt_length
  # K slots that no beam sees stand for the level before the first one.
  used = first - 1 + width
  slot = jnp.arange(slots)
  is_prompt = slot < (first - 1)[:, None]
  tokens = decode_state.first_tokens(
    request, request.prompt_width + request.slots
  )
  live = beams.start(request, tokens)

  encoded = None
  if drafter is not None and drafter.reads_encoder:
    encoded = target.encode(params.target, inputs)

  def read(model, model_params):
    longest = request.longest
    return read_prompt(
      model, model_params, inputs, slots, prompt, longest, encoded
    )[1]

  search = Search(
    live=live,
    finished=jax.tree.map(jnp.zeros_like, live).replace(
      score=jnp.full_like(live.score, beams.ABSENT)
    ),
    ancestors=jnp.repeat(is_prompt[:, None], width, axis=1),
    previous=Level(
      tokens=jnp.zeros((batch, width), jnp.int32),
      # Each node sees its own slot: a softmax over nothing is not a number.
      visible=slot == (used[:, None] - width + jnp.arange(width))[..., None],
    ),
    known_values=jnp.full(candidates, -jnp.inf),
    known_ids=jnp.zeros(candidates, jnp.int32),
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
  """Runs a round: 1 to gamma + 1 levels in each row that is still searched."""
  search, width = state.search, request.search.width
  # Finished rows compute on their first slots, but their results are not used.
  used = jnp.where(state.running, state.used, width)
  # The live beams' last tokens are nodes in the next K slots.
  visible = _see_self(search.ancestors, used, width)
  prefix = search.live.prefix if request.ruling else None
  roots = Level(search.live.last_token, visible, prefix=prefix)

  # The drafter searches gamma levels of beams from the live beams on.
  level, places = _levels(request, search, used)
  draft: list[Level] = []
  draft_cache = state.draft_cache
  if drafter is not None and request.gamma:
    draft_cache, draft = _propose(
      drafter, params.draft, request, state, roots, used, places
    )

  # The target reads the live beams and the whole tree in one call.
  cache = target.rewind(state.target_cache, used)
  tokens, visible, prefix = _joined([roots, *draft])
  tree = Tree(search.live.length[:, :1] - 1 + level, places, visible)
  features, cache = target.extend(params.target, cache, tokens, tree)
  logits = target.head(params.target, features)
  produced = search.live.length[:, :1] - request.prompt_length[:, None] + level
  forbidden = produced < request.min_length[:, None]
  count = request.search.num_candidates
  candidates = beams.candidates(request, logits, count, forbidden, prefix)

  # The target's own search goes on, by its own scores, while its live beams are
  # nodes of the tree.
  search, chosen, num_held = _replay(request, search, draft, used, candidates)
  # Proposals after the end of a search do not count.
  ended = ~search.running & state.running
  length = jnp.where(ended, num_held, request.gamma)
  verdict = Verdict(num_held, next_token=num_held)

  # Both caches keep the nodes that were live beams.
  num_kept = used + width * (1 + num_held)

  def keep(model, cache):
    if chosen.shape[1]:
      cache = model.keep(cache, used + width, used[:, None] + chosen)
    return model.rewind(cache, num_kept)

  if draft:
    draft_cache = keep(drafter, draft_cache)
  return BeamState(
    search=search,
    used=jnp.where(state.running, num_kept, state.used),
    target_cache=keep(target, cache),
    draft_cache=draft_cache,
    stats=state.stats.after_round(state.running, length, verdict),
  )


def generation(request: Request, state: BeamState) -> Generation:
  """Returns the K beams of each row, one after another, the best one last.

  Returns:
    A `Generation` of B K rows with `scores`. The best beam has the counts of
    the search, the others have zeros. If a row has fewer than K finished beams,
    its first beams are empty and their score is `ABSENT`; if it has none, its
    beams are the live ones, whose scores have no length penalty.
  """
  live, finished = state.search.live, state.search.finished
  has_finished = jnp.any(finished.exists, axis=1)
  best = beams.where(has_finished, finished, live)
  batch, width, _ = best.tokens.shape
  first = request.prompt_length[:, None]
  length = jnp.where(best.exists, best.length - first, 0)
  index = first[..., None] + jnp.arange(request.slots)
  index = jnp.broadcast_to(index, (batch, width, request.slots))

  def without_prompt(values):
    output = jnp.take_along_axis(values, index, axis=2, mode='clip')
    is_output = jnp.arange(request.slots) < length[..., None]
    output = jnp.where(is_output, output, 0)
    return output.reshape(batch * width, request.slots)

  stopped = is_stop(request, best.last_token) & (length > 0)
  reason = jnp.where(stopped, FinishReason.STOP, FinishReason.LENGTH)
  invalid = state.finish_reason == FinishReason.INVALID
  reason = jnp.where(invalid[:, None], FinishReason.INVALID, reason)
  if request.token_rules is not None:
    has_none = ~jnp.any(best.exists, axis=1, keepdims=True)
    reason = jnp.where(has_none, FinishReason.RULES, reason)

  def of_best(count):
    shape = batch, width, *count.shape[1:]
    spread = jnp.zeros(shape, count.dtype).at[:, -1].set(count)
    return spread.reshape(batch * width, *count.shape[1:])

  log_probs = without_prompt(best.log_probs)
  return Generation(
    tokens=without_prompt(best.tokens),
    length=length.reshape(-1),
    log_probs=log_probs if request.with_log_probs else log_probs[:, :0],
    finish_reason=reason.reshape(-1).astype(jnp.int32),
    stats=jax.tree.map(of_best, state.stats),
    scores=best.score.reshape(-1),
  )


def _see_self(ancestors: jax.Array, begin: jax.Array, count: int) -> jax.Array:
  """Returns the masks `ancestors` bool[B, N, T] with each node's slot added.

  The nodes have `count` neighbouring slots from slot `begin`, int32[B], on.
  """
  slots = begin[:, None] + jnp.arange(count)
  return ancestors | (jnp.arange(ancestors.shape[-1]) == slots[..., None])


def _propose(
  drafter: LanguageModel,
  params: Any,
  request: Request,
  state: BeamState,
  roots: Level,
  used: jax.Array,
  places: jax.Array,
) -> tuple[Any, list[Level]]:
  """Runs the drafter's beam search from the live beams on.

  Args:
    drafter: the drafter's network.
    params: its parameters.
    request: has beam settings, gamma and token rules.
    state: the state before the round.
    roots: the live beams' last tokens.
    used: int32[B], the slot of the first root.
    places: int32[B, T], the position of each slot's token in its sequence.

  Returns:
    The drafter's cache, and the proposed nodes, level by level.
  """
  search, settings = state.search, request.search
  width, draft_width = settings.width, settings.draft_width
  # The position of the roots in their sequences.
  place = search.live.length[:, :1] - 1

  # The drafter may lack the level before the roots, see `Search.previous`.
  cache = drafter.rewind(state.draft_cache, used - width)
  tokens, visible, _ = _joined([search.previous, roots.replace(prefix=None)])
  positions = jnp.repeat(place, 2 * width, axis=1)
  positions = jnp.maximum(positions - (np.arange(2 * width) < width), 0)
  beaten = beams.is_beaten(request, search.live, search.finished)
  score = jnp.where(beaten, beams.ABSENT, search.live.score)
  above, prefix, levels = roots.visible, roots.prefix, []
  # The loop is unrolled: one on the device would copy the cache in and out.
  for depth in range(request.gamma):
    # The drafter reads nodes; the last beams get their best continuations.
    tree = Tree(jnp.broadcast_to(positions, tokens.shape), places, visible)
    features, cache = drafter.extend(params, cache, tokens, tree)
    logits = drafter.head(params, features[:, -score.shape[1] :])
    # No beam may end here: a beam that ends is not live.
    every = jnp.ones(score.shape, bool)
    count = min(draft_width, logits.shape[-1])
    values, ids, _ = beams.candidates(request, logits, count, every, prefix)
    if not depth:  # known candidates of the target replace the drafter's
      known = search.known_values
      values = jnp.where(known[..., :1] > -jnp.inf, -jnp.inf, values)
      known = jnp.where(is_stop(request, search.known_ids), -jnp.inf, known)
      values = jnp.append(values, known, axis=2)
      ids = jnp.append(ids, search.known_ids, axis=2)
    score, parents, tokens = beams.widen(score, values, ids, draft_width)
    begin = used + width + depth * draft_width
    above = _see_self(beams.gather(above, parents), begin, draft_width)
    if request.ruling is not None and prefix is not None:
      prefix = request.ruling.longer(beams.gather(prefix, parents), tokens)
    levels.append(Level(tokens, above, parents, prefix))
    positions, visible = place + 1 + depth, above
  return cache, levels


def _levels(request: Request, search: Search, used: jax.Array):
  """Computes the levels and positions of this round's nodes.

  Returns:
    int32[N], the level of each node of the target's call, 0 for live beams; and
    int32[B, T], the position of each slot's token in its sequence.
  """
  settings, gamma = request.search, request.gamma
  widths = [settings.width, *[settings.draft_width] * gamma]
  level = np.repeat(np.arange(gamma + 1), widths)
  slot = jnp.arange(search.ancestors.shape[2])
  base = (request.prompt_length - 1)[:, None]
  # The slots hold the prompt without its last token, K unused ones, and then K
  # for each level.
  earlier = base + (slot - base) // settings.width - 1
  number = slot - used[:, None]
  node = jnp.asarray(level)[jnp.clip(number, 0, level.size - 1)]
  places = jnp.where(
    (number >= 0) & (number < level.size),
    search.live.length[:, :1] - 1 + node,
    jnp.where(slot < base, slot, earlier),
  )
  return level, places.astype(jnp.int32)


def _joined(levels: list[Level]) -> tuple[jax.Array, jax.Array, Any]:
  """Concatenates tokens int32[B, N], masks and prefixes of several levels."""
  parts = [(level.tokens, level.visible, level.prefix) for level in levels]
  return jax.tree.map(lambda *each: jnp.concatenate(each, axis=1), *parts)


def _replay(
  request: Request,
  search: Search,
  draft: list[Level],
  used: jax.Array,
  candidates: tuple[jax.Array, ...],
) -> tuple[Search, jax.Array, jax.Array]:
  """Runs the target's own search over the nodes that it has read.

  Args:
    request: has width, scoring, stop ids and limits.
    search: the search before the round.
    draft: the proposed nodes, level by level.
    used: int32[B], the slot of the first node, that is of the first live beam.
    candidates: `beams.candidates` of all N nodes, the live beams first.

  Returns:
    The search after the round; int32[B, G K], the indices of the nodes that
    were live beams in each level; int32[B], the number of levels whose live
    beams had all been proposed.
  """
  width, batch = request.search.width, used.shape[0]
  going_on, num_held = search.running, jnp.zeros((batch,), jnp.int32)
  place = jnp.broadcast_to(jnp.arange(width), (batch, width))
  of_live = tuple(part[:, :width] for part in candidates)
  chosen, begin = [jnp.zeros((batch, 0), jnp.int32)], width
  for depth, level in enumerate(draft):
    before = search
    # After the round the kept nodes lie level by level.
    first = used + depth * width
    after, parents = _next_level(request, before, of_live, first)
    # Match each live beam with a node: the same token and the same parent.
    live = after.live
    same = level.tokens[:, None] == live.last_token[..., None]
    assert level.parents is not None
    parent = beams.gather(place, parents)
    same &= level.parents[:, None] == parent[..., None]
    is_node = jnp.any(same, axis=2)
    beaten = beams.is_beaten(request, live, after.finished)
    held = going_on & jnp.all(is_node | beaten, axis=1) & after.running
    # The target has not read a live beam that is not a node; it is dropped.
    dropped = held[:, None] & ~is_node
    live = live.replace(
      score=jnp.where(dropped, beams.ABSENT, live.score),
      exists=live.exists & ~dropped,
    )
    place = jnp.argmax(same, axis=2).astype(jnp.int32)
    chosen.append(begin + place)
    of_live = beams.gather(candidates, chosen[-1])
    after = after.replace(
      live=live,
      known_values=jnp.where(is_node[..., None], of_live[0], -jnp.inf),
      known_ids=of_live[1],
    )
    search = beams.where(going_on, after, before)
    going_on, num_held = held, num_held + held
    begin += request.search.draft_width
  # Levels after the last one were not drafted, so none can be accepted.
  last = used + len(draft) * width
  after, _ = _next_level(request, search, of_live, last)
  search = beams.where(going_on, after, search)
  return search, jnp.concatenate(chosen, axis=1), num_held


def _next_level(request: Request, search: Search, of_live, first: jax.Array):
  """Runs one level of the target's own search.

  After it no candidates are known yet (`Search.known_values`).

  Args:
    request: has width, scoring, stop ids and limits.
    search: the search before the level.
    of_live: `beams.candidates` of the live beams.
    first: int32[B], the slot of the first live beam's last token.

  Returns:
    The search after the level, and the index of the beam that each new live
    beam continues, int32[B, K].
  """
  values, ids, valid = of_live
  live, finished, parents = beams.advance(
    request, search.live, search.finished, values, ids
  )
  is_valid = jnp.all(valid | ~search.live.exists, axis=1)
  over = beams.is_over(request, live, finished)
  reason = jnp.where(over, FinishReason.STOP, search.finish_reason)
  reason = jnp.where(is_valid, reason, FinishReason.INVALID)
  visible = _see_self(search.ancestors, first, request.search.width)
  after = Search(
    live=live,
    finished=finished,
    ancestors=beams.gather(visible, parents),
    previous=Level(search.live.last_token, visible),
    known_values=jnp.full_like(values, -jnp.inf),
    known_ids=ids,
    finish_reason=reason.astype(jnp.int32),
  )
  return after, parents
