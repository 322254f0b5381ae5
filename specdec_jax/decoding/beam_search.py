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

import functools
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
from specdec_jax.tree_shape import Tree
from specdec_jax.types import DecodeStats, FinishReason, Generation, Verdict


@struct.dataclass
class Level:
  """N nodes at one place of a row's sequences, in N neighbouring slots.

  Attributes:
    tokens: int32[B, N].
    visible: bool[B, N, T], the slots of each node's ancestors and its own.
    parents: int32[B, N], of a proposed level: the number of each node's parent
      in the level before; in the first one, of the live beam it continues.
    prefix: what rules see of each node, its token included; None without rules.
  """

  tokens: jax.Array
  visible: jax.Array
  parents: Any = None
  prefix: Any = None


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
    known_values: float32[B, K, C], log-probabilities of the `candidates` of
      live beams that the target has read already; -inf of the others. A level
      that does not hold mostly misses one beam. The others were nodes of the
      tree, so the next draft need not guess what follows them.
    known_ids: int32[B, K, C], these candidates.
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
  candidates = batch, width, settings.num_candidates
  inputs, prompt = request.inputs, request.prompt
  first = request.prompt_length
  # K slots that nobody sees stand for the level before the first one.
  used = first - 1 + width
  slot = jnp.arange(slots)
  behind = slot < (first - 1)[:, None]
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
    finished=beams.none_finished(live),
    ancestors=jnp.repeat(behind[:, None], width, axis=1),
    previous=Level(
      tokens=jnp.zeros((batch, width), jnp.int32),
      # Each its own slot: a softmax over nothing is not a number.
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
  """One round: 1 to gamma + 1 levels in every row whose search is not over."""
  search, width = state.search, request.search.width
  # Rows that are over work on their first slots, which nobody reads.
  used = jnp.where(state.running, state.used, width)
  # The live beams' last tokens are nodes in the next K slots.
  visible = _with_own(search.ancestors, used, width)
  prefix = search.live.prefix if request.ruling else None
  roots = Level(search.live.last_token, visible, prefix=prefix)

  # The drafter's beam search from the live beams, gamma levels deep.
  level, places = _levels(request, search, used)
  draft_cache: Any = state.draft_cache
  draft: list[Level] = []
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
  candidates = beams.candidates(
    logits, count, forbidden, request.stop_ids, _rules(request, prefix)
  )

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
  """The K beams of each row, one after another, the best one last.

  Returns:
    A `Generation` of B K rows with `scores`. The counts of a search are those
    of its best beam, the others have none. Where a row has fewer than K
    finished beams, the first ones are empty and their score is `ABSENT`; where
    it has none, they are its live beams, and the scores have no length penalty.
  """
  live, finished = state.search.live, state.search.finished
  has_finished = jnp.any(finished.exists, axis=1)
  found = beams.where(has_finished, finished, live)
  batch, width, _ = found.tokens.shape
  first = request.prompt_length[:, None]
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
  if request.token_rules is not None:
    has_none = ~jnp.any(found.exists, axis=1, keepdims=True)
    reason = jnp.where(has_none, FinishReason.RULES, reason)

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


def _with_own(ancestors: jax.Array, begin: jax.Array, count: int) -> jax.Array:
  """Adds to bool[B, N, T] each node's own slot, begin int32[B] and on."""
  own = begin[:, None] + jnp.arange(count)
  return ancestors | (jnp.arange(ancestors.shape[-1]) == own[..., None])


def _propose(
  drafter: LanguageModel,
  params: Any,
  request: Request,
  state: BeamState,
  roots: Level,
  used: jax.Array,
  places: jax.Array,
) -> tuple[Any, list[Level]]:
  """The cache that the drafter's search read into, and its proposals."""
  search, settings = state.search, request.search
  width, draft_width = settings.width, settings.draft_width
  place = search.live.length[:, :1] - 1  # of the roots

  def guess(cache, score, tokens, positions, visible, prefix, told=None):
    """The best continuations of the last beams that are read.

    Those that are told take the place of what is guessed.
    """
    tree = Tree(jnp.broadcast_to(positions, tokens.shape), places, visible)
    features, cache = drafter.extend(params, cache, tokens, tree)
    logits = drafter.head(params, features[:, -score.shape[1] :])
    # A beam that ends is no live beam.
    every = jnp.ones(score.shape, bool)
    count = min(draft_width, logits.shape[-1])
    values, ids, _ = beams.candidates(
      logits, count, every, request.stop_ids, _rules(request, prefix)
    )
    if told is not None:
      values = jnp.where(told[0][..., :1] > -jnp.inf, -jnp.inf, values)
      ends = is_stop(request, told[1])
      values = jnp.append(values, jnp.where(ends, -jnp.inf, told[0]), axis=2)
      ids = jnp.append(ids, told[1], axis=2)
    return cache, *beams.widen(score, values, ids, draft_width)

  # The level before the roots too, which it may not have read, see `Search`.
  cache = drafter.rewind(state.draft_cache, used - width)
  tokens, visible, _ = _joined([search.previous, roots.replace(prefix=None)])
  positions = jnp.repeat(place, 2 * width, axis=1)
  positions = jnp.maximum(positions - (np.arange(2 * width) < width), 0)
  beaten = beams.is_beaten(request, search.live, search.finished)
  score = jnp.where(beaten, beams.ABSENT, search.live.score)
  told = search.known_values, search.known_ids
  fed: tuple[Any, ...] = tokens, positions, visible, roots.prefix, told
  above, prefix, levels = roots.visible, roots.prefix, []
  # Unrolled: a loop would carry the cache, and copy it in and out.
  for depth in range(request.gamma):
    cache, score, parents, tokens = guess(cache, score, *fed)
    begin = used + width + depth * draft_width
    above = _with_own(beams.gather(above, parents), begin, draft_width)
    if request.ruling is not None:
      prefix = request.ruling.longer(beams.gather(prefix, parents), tokens)
    levels.append(Level(tokens, above, parents, prefix))
    fed = tokens, place + 1 + depth, above, prefix
  return cache, levels


def _levels(request: Request, search: Search, used: jax.Array):
  """Where the nodes of this round lie.

  Returns:
    int32[N], the level of each node of the target's call, 0 the live beams; and
    int32[B, T], each slot's place in its sequence during the round.
  """
  settings, gamma = request.search, request.gamma
  widths = [settings.width, *[settings.draft_width] * gamma]
  level = np.repeat(np.arange(gamma + 1), widths)
  slot = jnp.arange(search.ancestors.shape[2])
  base = (request.prompt_length - 1)[:, None]
  # The prompt but its last token, K slots that are nobody's, K slots a level.
  behind = base + (slot - base) // settings.width - 1
  number = slot - used[:, None]
  node = jnp.asarray(level)[jnp.clip(number, 0, level.size - 1)]
  places = jnp.where(
    (number >= 0) & (number < level.size),
    search.live.length[:, :1] - 1 + node,
    jnp.where(slot < base, slot, behind),
  )
  return level, places.astype(jnp.int32)


def _joined(levels: list[Level]) -> tuple[jax.Array, jax.Array, Any]:
  """Tokens, int32[B, N], what they see, bool[B, N, T], and their prefixes."""
  parts = [(level.tokens, level.visible, level.prefix) for level in levels]
  return jax.tree.map(lambda *each: jnp.concatenate(each, axis=1), *parts)


def _rules(request: Request, prefix: Any):
  """What adjusts the log-probabilities behind N nodes; None without rules."""
  ruling = request.ruling
  return ruling and functools.partial(ruling.adjust, prefix)


def _replay(
  request: Request,
  search: Search,
  draft: list[Level],
  used: jax.Array,
  candidates: tuple[jax.Array, ...],
) -> tuple[Search, jax.Array, jax.Array]:
  """The target's own search over the nodes that it has read.

  Args:
    request: the limits.
    search: the search before.
    draft: the proposed nodes.
    used: int32[B], the slot of the first live beam's node.
    candidates: `beams.candidates` of all N nodes, the live beams first.

  Returns:
    The search after it; int32[B, G K], the numbers of the nodes that were live
    beams in each level; int32[B], how many levels held.
  """
  width, batch = request.search.width, used.shape[0]
  going_on, num_held = search.running, jnp.zeros((batch,), jnp.int32)
  place = jnp.broadcast_to(jnp.arange(width), (batch, width))
  of_live = tuple(part[:, :width] for part in candidates)
  chosen, begin = [jnp.zeros((batch, 0), jnp.int32)], width
  for depth, level in enumerate(draft):
    before = search
    # Behind the call the nodes that are kept lie level by level.
    first = used + depth * width
    after, parents = _next_level(request, before, of_live, first)
    # Which nodes the next live beams are, if each that matters is one.
    live = after.live
    same = level.tokens[:, None] == live.last_token[..., None]
    parent = beams.gather(place, parents)
    same &= level.parents[:, None] == parent[..., None]
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
  # No level after the last one can hold.
  last = used + len(draft) * width
  after, _ = _next_level(request, search, of_live, last)
  search = beams.where(going_on, after, search)
  return search, jnp.concatenate(chosen, axis=1), num_held


def _next_level(request: Request, search: Search, of_live, first: jax.Array):
  """One level of the target's own search, of which the next one knows nothing.

  Args:
    request: width, scoring, and where beams end.
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
    known_values=jnp.full_like(values, -jnp.inf),
    known_ids=ids,
    finish_reason=reason.astype(jnp.int32),
  )
  return after, parents
