"""The exact distribution of one speculative step, by enumeration.

For vocabularies of a few tokens. The laws are measured on the shipped functions
of `speculative` and `probs`, by finding the very values of their uniform random
numbers at which they change their mind; nothing here knows Algorithm 1. For
larger spaces see `testing.assert_chi_squared`.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from specdec_jax import probs, verify
from specdec_jax.types import Draft
from toy_models import NextProbs, joint_law
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


def constant(row) -> NextProbs:
  """The law that does not look at its prefix."""
  row = np.asarray(row, np.float32)
  return lambda prefix: row


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


def step_law(*args, **options) -> np.ndarray:
  """The law that `step_outcomes` finds; its arguments."""
  return step_outcomes(*args, **options)[0]


def law_error(target: NextProbs, *args, **options) -> float:
  """Largest difference between `step_law` and the target's law."""
  return distance(step_law(target, *args, **options), target)


def distance(law: np.ndarray, target: NextProbs) -> float:
  """Largest difference between a joint law and the target's."""
  assert law.sum() == pytest.approx(1, abs=1e-5)
  return np.abs(law - joint_law(target, law.ndim, len(law))).max()


def step_outcomes(
  target: NextProbs,
  draft: NextProbs,
  gamma: int,
  vocab_size: int,
  *,
  drawn_from: NextProbs | None = None,
  length: int | Callable[[tuple[int, ...]], int] | None = None,
  deterministic: bool = False,
  lenience: float = 1.0,
  as_block: bool = False,
) -> tuple[np.ndarray, float]:
  """Exact joint law of gamma + 1 tokens of which one step made the first.

  All V^gamma drafts are enumerated; for each, the shipped `count_accepted`,
  `next_token_weights` and `inverse_cdf` are measured over their uniforms. What
  one step leaves open, because it emitted fewer than gamma + 1 tokens, the
  target then draws alone. The step is right if and only if the result is
  `joint_law(target, gamma + 1, vocab_size)`.

  Args:
    target: the target's law of the next token.
    draft: the law that the drafter reports as `Draft.probs`.
    gamma: G, the static maximum.
    vocab_size: V; the work grows with V^gamma.
    drawn_from: the law that proposals really come from; `draft` if None.
    length: how many tokens are proposed, gamma if None; the positions behind
      hold every possible value. Or (x_1, ... x_gamma), as a drafter drew them,
      -> how many of these it proposes.
    deterministic: report None as `Draft.probs`; `draft` is then only drawn
      from, and one-hot if the drafter is honest.
    lenience: l of Appendix A.5; below 1 the result is another law.
    as_block: judge drafts as a whole, as `verify_block` does.

  Returns:
    The law float64[V, ..., V], gamma + 1 axes, and the mean number of proposals
    that the step keeps.
  """
  proposals = list(itertools.product(range(vocab_size), repeat=gamma))
  drawn = lengths = [gamma] * len(proposals)
  if callable(length):
    lengths = [length(tokens) for tokens in proposals]
  elif length is not None:
    drawn = lengths = [length] * len(proposals)
  mass = _draft_masses(proposals, drawn_from or draft, drawn, vocab_size)
  drafts = _drafts(proposals, None if deterministic else draft, lengths)
  rows = jnp.asarray(
    [[target(t[:i]) for i in range(gamma + 1)] for t in proposals],
    jnp.float32,
  )
  assert lenience == 1 or not as_block
  count = verify.count_accepted_block if as_block else verify.count_accepted
  decide = Chain(as_block, count, verify.next_token_weights)
  kept = [[tokens[:n] for n in range(gamma + 1)] for tokens in proposals]
  return enumerated(target, decide, drafts, rows, kept, mass, lenience)


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


def enumerated(
  target: NextProbs,
  decide: Callable,
  drafts: Draft,
  rows: jax.Array,
  kept: Sequence[Sequence[tuple[int, ...]]],
  mass: Sequence[float],
  lenience: float = 1.0,
) -> tuple[np.ndarray, float]:
  """The joint law of a step and what the target adds, and the mean it keeps.

  Args:
    target: the target's law of the next token.
    decide: (draft, rows, uniforms, lenience) -> the end that is reached, what
      the next token is drawn from, and which trials held; as `Chain`.
    drafts: N drafts.
    rows: float32[N, R, V], the target's.
    kept: of each draft and each end, the tokens that are kept.
    mass: the probability of each draft.
    lenience: l of Appendix A.5.
  """
  counts, ends, laws = jax.device_get(
    _pieces(drafts, rows, jnp.float32(lenience), decide=decide)
  )
  ways = np.array(_ways(counts.shape[2]), bool)
  held = counts.astype(np.float64) / UNIFORM_GRID
  chances = np.prod(np.where(ways, held, 1 - held), axis=2)
  size, depth = rows.shape[-1], max(map(len, kept[0]))

  @functools.cache
  def rest_law(prefix):
    rest = depth + 1 - len(prefix)
    return joint_law(lambda later: target(prefix + later), rest, size)

  law, mean = np.zeros((size,) * (depth + 1)), 0.0
  for row, way in np.argwhere(chances * np.reshape(mass, (-1, 1))):
    before = kept[row][ends[row, way]]
    chance = mass[row] * chances[row, way]
    mean += chance * len(before)
    for token in np.flatnonzero(laws[row, way]).tolist():
      prefix = (*before, token)
      law[prefix] += (
        chance * np.float64(laws[row, way, token]) * rest_law(prefix)
      )
  return law, mean


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


def _draft_masses(proposals, drawn_from, drawn, vocab_size) -> np.ndarray:
  """Probability of each draft; what lies behind the drawn tokens is uniform."""

  def prob(tokens, position, count):
    if position >= count:
      return 1 / vocab_size
    row = np.asarray(drawn_from(tokens[:position]), np.float64)
    return row[tokens[position]] / row.sum()

  return np.array(
    [
      np.prod([prob(tokens, i, count) for i in range(len(tokens))])
      for tokens, count in zip(proposals, drawn, strict=True)
    ]
  )


def _drafts(proposals, reported: NextProbs | None, lengths) -> Draft:
  """The enumerated drafts as one batch of N."""
  gamma = len(proposals[0])
  rows = None
  if reported is not None and gamma:
    rows = jnp.asarray(
      [[reported(t[:i]) for i in range(gamma)] for t in proposals], jnp.float32
    )
  return Draft(
    tokens=jnp.asarray(proposals, jnp.int32).reshape(len(proposals), gamma),
    probs=rows,
    length=jnp.asarray(lengths, jnp.int32),
  )


def grid_value(index: jax.Array) -> jax.Array:
  return index.astype(jnp.float32) / UNIFORM_GRID


def grid_count(holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
  """How many uniforms of the grid satisfy `holds`, true up to some point."""

  def halve(_, bracket):
    low, high = bracket
    middle = (low + high + 1) // 2
    enough = holds(grid_value(middle - 1))
    return (
      jnp.where(enough, middle, low),
      jnp.where(enough, high, middle - 1),
    )

  bracket = (jnp.int32(0), jnp.int32(UNIFORM_GRID))
  return lax.fori_loop(0, 24, halve, bracket)[0]
