"""The exact distribution of one speculative step, by enumeration.

For vocabularies of a few tokens. The laws are measured on the shipped functions
of `verify`, `verify_tree` and `probs`, by finding the very values of their
uniform random numbers at which they change their mind; nothing here knows by
which rule a proposal is accepted. For larger spaces see
`toy_models.chi_squared_p_value`.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from specdec_jax import probs, verify, verify_tree
from specdec_jax.probs import SamplingConfig
from specdec_jax.tree_shape import TreeShape
from specdec_jax.types import Draft
from toy_models import NextProbs, joint_law, random_markov
from toy_requests import quick_jit

# `jax.random.uniform` in float32 returns k / 2^23 for integers k.
UNIFORM_GRID = 2**23

_TINY = 1e-20
# Pairs (target, draft) of laws that do not look at their prefix.
ADVERSARIAL = {
  'draft misses a token of the target': ([0.2, 0.3, 0.5], [0.6, 0.4, 0.0]),
  'target misses a token of the draft': ([0.6, 0.4, 0.0], [0.2, 0.3, 0.5]),
  'equal': ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),
  'equal but for rounding': ([0.2, 0.3, 0.5], [0.2, 0.29999998, 0.50000006]),
  'disjoint': ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]),
  'one-hot target': ([0.0, 1.0, 0.0], [0.2, 0.3, 0.5]),
  'one-hot draft': ([0.2, 0.3, 0.5], [0.0, 1.0, 0.0]),
  'same one-hot': ([0.0, 1.0, 0.0], [0.0, 1.0, 0.0]),
  'different one-hots': ([0.0, 1.0, 0.0], [0.0, 0.0, 1.0]),
  'tiny target': ([_TINY, 1.0, _TINY], [0.5, 0.25, 0.25]),
  'tiny draft': ([0.5, 0.25, 0.25], [_TINY, 1.0, _TINY]),
  'not normalised to the last bit': (
    [0.2000002, 0.3, 0.5],
    [0.6, 0.1, 0.2999998],
  ),
}


def pair(seed, vocab_size, draft_config=None, target_config=None):
  """Target and draft laws of two unrelated order-2 chains."""
  configs = target_config or SamplingConfig(), draft_config or SamplingConfig()
  return [
    random_markov(seed + i, vocab_size, order=2, scale=1.5).next_probs(config)
    for i, config in enumerate(configs)
  ]


def constant(row) -> NextProbs:
  """The law that does not look at its prefix."""
  row = np.asarray(row, np.float32)
  return lambda prefix: row


# What a child of a tree is drawn from: the drafter's law, and the child's elder
# siblings. A chain has none of these.


def independent(law: np.ndarray, elder: tuple[int, ...]) -> np.ndarray:
  """SpecInfer's."""
  del elder
  return law


def without_replacement(law: np.ndarray, elder: tuple[int, ...]) -> np.ndarray:
  """Without the elder siblings; nothing where nothing is left."""
  left = np.array(law, np.float64)
  left[list(elder)] = 0
  return left / left.sum() if left.sum() else left


def likeliest(law: np.ndarray, elder: tuple[int, ...]) -> np.ndarray:
  """One-hot, by rank."""
  order = np.argsort(-np.asarray(law), kind='stable')
  return np.eye(len(law))[order[len(elder)]]


def length_while(rule, see=0):
  """How many of the leading positions a drafter proposes, by its tokens.

  Position i is proposed where `rule` is true of the tokens before it, and with
  `see` = 1 of its own as well.
  """

  def length(tokens):
    flags = [rule(tokens[: i + see]) for i in range(len(tokens))]
    return [*flags, False].index(False)

  return length


def sampler_law(weights: jax.Array) -> jax.Array:
  """The exact law of `probs.inverse_cdf` over the grid of uniforms.

  Found by bisection over the uniforms, for each id of float32[V]; the result,
  float32[V], is exact to about 2^-24 a level. Ids must be monotone by column,
  then by row, in the two uniforms: `inverse_cdf` documents this order.
  """
  size = weights.shape[0]
  columns = probs.num_columns(size)
  rows = -(-size // columns)

  def token(first, second):
    return probs.inverse_cdf(weights, jnp.stack([first, second]))

  def columns_up_to(column):
    return grid_count(lambda u: token(u, jnp.float32(0)) % columns <= column)

  ends = jax.vmap(columns_up_to)(jnp.arange(columns))
  starts = jnp.append(jnp.zeros(1, jnp.int32), ends[:-1])

  def rows_up_to(column, row):
    # Any uniform of the column will do; an empty column has no weight below.
    first = grid_value(jnp.minimum(starts[column], UNIFORM_GRID - 1))
    return grid_count(lambda u: token(first, u) // columns <= row)

  over_columns = jax.vmap(rows_up_to, in_axes=(0, None))
  counts = jax.vmap(over_columns, in_axes=(None, 0))(
    jnp.arange(columns), jnp.arange(rows)
  )
  within = jnp.diff(counts, axis=0, prepend=0) / UNIFORM_GRID
  law = within * ((ends - starts) / UNIFORM_GRID)[None, :]
  return law.reshape(-1)[:size]


def law_error(target: NextProbs, *args, **options) -> float:
  """Largest difference between a step's joint law and the target's."""
  law, _ = step_outcomes(target, *args, **options)
  assert law.sum() == pytest.approx(1, abs=1e-5)
  return np.abs(law - joint_law(target, law.ndim, len(law))).max()


def step_outcomes(
  target: NextProbs,
  draft: NextProbs,
  shape: int | TreeShape,
  vocab_size: int,
  *,
  rows: Callable = independent,
  report: Callable = lambda rows: rows,
  drawn_from: NextProbs | None = None,
  length: int | Callable[[tuple[int, ...]], int] | None = None,
  deterministic: bool = False,
  lenience: float = 1.0,
  as_block: bool = False,
) -> tuple[np.ndarray, float]:
  """Exact joint law of D + 1 tokens of which one step made the first.

  All V^N drafts are enumerated; for each, the shipped functions are measured
  over their uniforms. What one step leaves open, because it emitted fewer than
  D + 1 tokens, the target then draws alone. The step is right if and only if
  the result is `joint_law(target, D + 1, vocab_size)`.

  Args:
    target: the target's law of the next token.
    draft: the law that the drafter reports as `Draft.probs`.
    shape: gamma of a chain, or a tree of N nodes and D levels.
    vocab_size: V; the work grows with V^N.
    rows: what each node is drawn from, as `independent`.
    report: what becomes of the rows of a draft, for controls.
    drawn_from: the law that proposals really come from; `draft` if None.
    length: how many levels are proposed, all if None. Or the tokens of a chain,
      as a drafter drew them, -> how many of these it proposes.
    deterministic: report None as `Draft.probs`; `draft` is then only drawn
      from, and one-hot if the drafter is honest.
    lenience: l of Appendix A.5; below 1 the result is another law.
    as_block: judge drafts as a whole, as `verify_block` does.

  Returns:
    The law float64[V, ..., V], D + 1 axes, and the mean number of proposals
    that the step keeps.
  """
  if isinstance(shape, int):
    depth, parents, tree = shape, range(-1, shape - 1), None
    count = verify.count_accepted_block if as_block else verify.count_accepted
    decide: Callable = Chain(as_block, count, verify.next_token_weights)
  else:
    depth, parents, tree = shape.depth, shape.parents, shape
    decide = Walk(verify_tree.walk)
  assert lenience == 1 or not as_block

  def path_to(node):
    return () if node < 0 else (*path_to(parents[node]), node)

  proposals = list(itertools.product(range(vocab_size), repeat=len(parents)))
  made, masses, kept = [], [], []
  for tokens in proposals:
    mass, reported, paths = 1.0, [], []
    for node, token in enumerate(tokens):
      paths.append(tuple(tokens[i] for i in path_to(node)))
      elder = tuple(
        tokens[i] for i in range(node) if parents[i] == parents[node]
      )
      reported.append(rows(draft(paths[-1][:-1]), elder))
      row = rows((drawn_from or draft)(paths[-1][:-1]), elder)
      row = np.asarray(row, np.float64)
      # Where nothing is left to draw, one token stands for all.
      mass *= row[token] / row.sum() if row.sum() else float(token == 0)
    # Also without a mass: all drafts of a shape are one program.
    masses.append(mass)
    made.append(report(reported))
    kept.append([(), *paths])
  if callable(length):
    lengths = [length(tokens) for tokens in proposals]
  else:
    lengths = [depth if length is None else length] * len(proposals)
  known = len(parents) and not deterministic
  drafts = Draft(
    jnp.asarray(proposals, jnp.int32).reshape(len(proposals), len(parents)),
    jnp.asarray(np.array(made), jnp.float32) if known else None,
    jnp.asarray(lengths, jnp.int32),
    tree,
  )
  target_rows = np.array([[*map(target, paths)] for paths in kept])
  counts, ends, laws = jax.device_get(
    _pieces(
      drafts,
      jnp.asarray(target_rows, jnp.float32),
      jnp.float32(lenience),
      decide=decide,
    )
  )
  ways = np.array(_ways(counts.shape[2]), bool)
  held = counts.astype(np.float64) / UNIFORM_GRID
  chances = np.prod(np.where(ways, held, 1 - held), axis=2)

  @functools.cache
  def rest_law(prefix):
    rest = depth + 1 - len(prefix)
    return joint_law(lambda later: target(prefix + later), rest, vocab_size)

  law, mean = np.zeros((vocab_size,) * (depth + 1)), 0.0
  for row, way in np.argwhere(chances * np.reshape(masses, (-1, 1))):
    before = kept[row][ends[row, way]]
    chance = masses[row] * chances[row, way]
    mean += chance * len(before)
    for token in np.flatnonzero(laws[row, way]).tolist():
      prefix = (*before, token)
      law[prefix] += (
        chance * np.float64(laws[row, way, token]) * rest_law(prefix)
      )
  return law, mean


class Chain(NamedTuple):
  """What `verify` decides by its uniforms.

  The functions are fields, so that a test which replaces one of them is not
  served the compiled code of the other.
  """

  as_block: bool
  count_accepted: Callable
  next_token_weights: Callable

  def num_trials(self, draft: Draft) -> int:
    return draft.tokens.shape[-1]

  def __call__(self, draft: Draft, rows, uniforms, lenience):
    """The end n, what the next token is drawn from, and which trials held."""
    shares = ()
    if self.as_block:
      shares = (verify.kept_shares(draft, rows),)
    count = self.count_accepted(draft, rows, *shares, lenience * uniforms)
    share = (each[count] for each in shares)
    weights = self.next_token_weights(draft, rows, count, *share)
    return count, weights, jnp.arange(len(uniforms)) < count


class Walk(NamedTuple):
  """What `verify_tree` decides by its uniforms; see `Chain`."""

  walk: Callable

  def num_trials(self, draft: Draft) -> int:
    return len(verify_tree.trials(draft.tree))

  def __call__(self, draft: Draft, rows, uniforms, lenience):
    """The node that is reached, from 1; what follows it; the trials held."""
    del lenience
    shape = draft.tree
    last, weights = self.walk(draft, rows, uniforms)
    level, rank = verify_tree.trials(shape).T
    reached = jnp.append(0, shape.levels)[last + 1] >= level
    node = jnp.asarray(shape.paths)[last, level - 1]
    return last + 1, weights, reached & (jnp.asarray(shape.ranks)[node] == rank)


def _ways(num_trials: int) -> list[tuple[bool, ...]]:
  """All that may come of some trials."""
  return list(itertools.product((True, False), repeat=num_trials))


@functools.partial(quick_jit, static_argnames='decide')
def _pieces(drafts, target_probs, lenience, *, decide):
  """Of each draft and each way through its trials: how likely, and its end.

  Returns:
    int32[N, W, K], the uniforms of the grid with which each trial holds, after
    the earlier ones of the way; the ends int32[N, W]; and the laws of the next
    token, float32[N, W, V].
  """
  num_trials = decide.num_trials(drafts)
  trials = jnp.arange(num_trials)
  ways = jnp.asarray(_ways(num_trials), bool)
  largest = grid_value(jnp.float32(UNIFORM_GRID - 1))

  def one(draft, rows):
    def one_way(way):
      uniforms = jnp.where(way, 0.0, largest)

      def count(trial):
        def holds(uniform):
          tried = jnp.where(trials < trial, uniforms, largest)
          tried = jnp.where(trials == trial, uniform, tried)
          return decide(draft, rows, tried, lenience)[2][trial]

        return grid_count(holds)

      end, weights, _ = decide(draft, rows, uniforms, lenience)
      counts = jnp.zeros((0,), jnp.int32)
      if num_trials:
        counts = jax.vmap(count)(trials)
      return counts, end, sampler_law(weights)

    return jax.vmap(one_way)(ways)

  return jax.vmap(one)(drafts, target_probs)


def grid_value(index: jax.Array) -> jax.Array:
  return index.astype(jnp.float32) / UNIFORM_GRID


def grid_count(holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
  """How many uniforms of the grid satisfy `holds`, true up to some point."""

  def halve(_, bracket):
    low, high = bracket
    middle = (low + high + 1) // 2
    enough = holds(grid_value(middle - 1))
    return (jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1))

  bracket = (jnp.int32(0), jnp.int32(UNIFORM_GRID))
  return lax.fori_loop(0, 24, halve, bracket)[0]
