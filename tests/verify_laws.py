"""The exact distribution of one speculative step, by enumeration.

For vocabularies of a few tokens. The laws are measured on the shipped functions
of `speculative` and `probs`, by finding the very values of their uniform random
numbers at which they change their mind; nothing here knows Algorithm 1. For
larger spaces see `testing.assert_chi_squared`.
"""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from specdec_jax import probs, verify
from specdec_jax.types import Draft
from toy_models import NextProbs, joint_law

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
  # Passed on, so that a test which replaces one of them is not served the
  # compiled code of the other.
  assert lenience == 1 or not as_block
  accepted, next_laws = _step_pieces(
    drafts,
    rows,
    jnp.float32(lenience),
    as_block=as_block,
    count_accepted=(
      verify.count_accepted_block if as_block else verify.count_accepted
    ),
    next_token_weights=verify.next_token_weights,
  )
  accepted = np.asarray(accepted, np.float64) / UNIFORM_GRID
  next_laws = np.asarray(next_laws, np.float64)
  ends_at = _last_holds(accepted) if as_block else _first_fails(accepted)

  @functools.cache
  def rest_law(prefix):
    rest = gamma + 1 - len(prefix)
    return joint_law(lambda later: target(prefix + later), rest, vocab_size)

  law = np.zeros((vocab_size,) * (gamma + 1))
  for row, proposed in enumerate(proposals):
    for kept in range(gamma + 1):
      for token in range(vocab_size):
        prefix = proposed[:kept] + (token,)
        stops = mass[row] * ends_at[row, kept] * next_laws[row, kept, token]
        law[prefix] += stops * rest_law(prefix) if stops else 0.0
  mean = float(mass @ ends_at @ np.arange(gamma + 1))
  return law, mean


def _first_fails(accepted: np.ndarray) -> np.ndarray:
  """Probability of each n, where it is what comes before the first failure."""
  reached = np.cumprod(accepted, axis=1)
  start, end = np.ones((len(accepted), 1)), np.zeros((len(accepted), 1))
  return np.hstack([start, reached]) - np.hstack([reached, end])


def _last_holds(holds: np.ndarray) -> np.ndarray:
  """Probability of each n, where it is the last test that holds."""
  none_after = np.cumprod(1 - holds[:, ::-1], axis=1)[:, ::-1]
  end = np.ones((len(holds), 1))
  return np.hstack([none_after, end]) * np.hstack([end, holds])


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


@functools.partial(
  jax.jit, static_argnames=('as_block', 'count_accepted', 'next_token_weights')
)
def _step_pieces(
  drafts,
  target_probs,
  lenience,
  *,
  as_block,
  count_accepted,
  next_token_weights,
):
  """int32[N, G] grid counts of acceptance; float32[N, G + 1, V] next laws.

  Of a draft judged as a whole, test i alone decides whether n is i + 1 or 0.
  """
  gamma = drafts.tokens.shape[1]
  # Whatever other token can be accepted is; of a block, what can fail fails.
  others = jnp.float32(1 - 1 / UNIFORM_GRID if as_block else 0)

  def one_draft(draft, rows):
    shares = verify.kept_shares(draft, rows) if as_block else None

    def through(position):
      def accepts(uniform):
        uniforms = jnp.full(gamma, others).at[position].set(uniform)
        if as_block:
          return count_accepted(draft, rows, shares, uniforms) > position
        return count_accepted(draft, rows, lenience * uniforms) > position

      return grid_count(accepts)

    def next_law(num_accepted):
      more = (shares[num_accepted],) if as_block else ()
      return sampler_law(next_token_weights(draft, rows, num_accepted, *more))

    next_laws = jax.vmap(next_law)(jnp.arange(gamma + 1))
    if gamma == 0:
      return jnp.zeros(0, jnp.int32), next_laws
    return jax.vmap(through)(jnp.arange(gamma)), next_laws

  return jax.vmap(one_draft)(drafts, target_probs)


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
