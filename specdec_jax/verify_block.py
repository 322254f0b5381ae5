"""Block verification (Sun et al. 2025, Algorithm 2): a draft judged as a whole.

Algorithm 1 stops at the first proposal that fails, whatever follows. Here the
draft's tokens are judged together: a token that is less likely than it should
be is made up for by the room that the tokens before it left. The output has
exactly the target's distribution, by the same two conditions on the draft (see
`verify`), and never fewer tokens are kept in the mean than by Algorithm 1. At
temperature 0 both keep the same.

With p_i, q_i, x_i, r_i of `verify`, and the draft's own length g:

  P_0 = 1, P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i))
  Z_i = sum_x max(0, P_i p_{i+1}(x) - q_{i+1}(x))
  h_0 = 1, h_i = Z_i / (Z_i + 1 - P_i) for i < g, h_g = P_g

n is the **last** i with r_i < h_i: a test that fails does not end the search.
The next token comes from p_{g+1} if n = g, else from max(0, P_n p_{n+1} -
q_{n+1}): another residual than Algorithm 1's.

A proposal of draft probability 0 ends its draft, as in `verify`.
"""

import jax
import jax.numpy as jnp

from specdec_jax import verify
from specdec_jax.probs import inverse_cdf, verdict_uniforms
from specdec_jax.types import Draft, Verdict


def verify_block(
  draft: Draft, target_probs: jax.Array, key: jax.Array
) -> Verdict:
  """Decides how much of a draft is kept and draws the token after it.

  Args:
    draft: as for `verify.verify`.
    target_probs: float32[G + 1, V], likewise.
    key: likewise; the random numbers are the same.

  Returns:
    Verdict: num_accepted int32[] <= length, next_token int32[], and num_passed
    int32[]: what Algorithm 1 would have kept with the same random numbers.

  Raises:
    ValueError: the shapes do not fit, at trace time.
  """
  verify.check_shapes(draft, target_probs)
  uniforms, own = verdict_uniforms(key, draft.tokens.shape[0])
  kept = kept_shares(draft, target_probs)
  num_accepted = count_accepted(draft, target_probs, kept, uniforms)
  weights = next_token_weights(draft, target_probs, kept, num_accepted)
  return Verdict(
    num_accepted,
    inverse_cdf(weights, own),
    num_passed=verify.count_accepted(draft, target_probs, uniforms),
  )


def kept_shares(draft: Draft, target_probs: jax.Array) -> jax.Array:
  """P_0, ..., P_G; float32[G + 1], meaningless past the draft's end."""
  gamma = draft.tokens.shape[0]
  target_prob = verify.value_of(target_probs[:gamma], draft.tokens, 0.0)
  draft_prob = verify.draft_prob(draft)
  shares = [jnp.float32(1.0)]
  for i in range(gamma):
    # In this order 0 stays 0, where the quotient of the two might be infinite.
    share = shares[-1] * target_prob[i] / draft_prob[i]
    shares.append(jnp.minimum(share, 1.0))
  return jnp.stack(shares)


def count_accepted(
  draft: Draft, target_probs: jax.Array, kept: jax.Array, uniforms: jax.Array
) -> jax.Array:
  """n: the last i with r_i < h_i; int32[].

  Args:
    draft: the draft.
    target_probs: float32[G + 1, V].
    kept: float32[G + 1], of `kept_shares`.
    uniforms: r_1 ... r_G, float32[G].
  """
  gamma = draft.tokens.shape[0]
  end = _end(draft)
  residual = _residual(
    draft, target_probs[:gamma], kept[:gamma, None], slice(None)
  )
  left = jnp.sum(residual, axis=-1)
  needed = left + (1 - kept[:gamma])
  share = jnp.where(needed > 0, left / needed, 1.0)
  index = jnp.arange(1, gamma + 1)
  share = jnp.where(index == end, kept[1:], jnp.append(share[1:], 0.0))
  holds = (uniforms < share) & (index <= end)
  return jnp.max(jnp.where(holds, index, 0), initial=0).astype(jnp.int32)


def next_token_weights(
  draft: Draft,
  target_probs: jax.Array,
  kept: jax.Array,
  num_accepted: jax.Array,
) -> jax.Array:
  """What the next token is drawn from, not normalised; float32[V].

  It is the target's own row behind the whole draft; and where the residual
  rounds to 0, for which the probability to be asked is 0.

  Args:
    draft: the draft.
    target_probs: float32[G + 1, V].
    kept: float32[G + 1], of `kept_shares`.
    num_accepted: int32[], n.
  """
  gamma = draft.tokens.shape[0]
  target_row = target_probs[num_accepted]
  if gamma == 0:
    return target_row
  index = jnp.minimum(num_accepted, gamma - 1)
  residual = _residual(draft, target_row, kept[num_accepted], index)
  use_residual = (num_accepted < _end(draft)) & (jnp.sum(residual) > 0)
  return jnp.where(use_residual, residual, target_row)


def verify_block_batch(
  draft: Draft, target_probs: jax.Array, keys: jax.Array
) -> Verdict:
  """`verify_block` for B sequences: float32[B, G + 1, V], keys [B]."""
  return jax.vmap(verify_block)(draft, target_probs, keys)


def _residual(
  draft: Draft,
  target_rows: jax.Array,
  kept: jax.Array,
  index: jax.Array | slice,
) -> jax.Array:
  """max(0, P p - q) of the positions `index`; float32[..., V]."""
  rows = verify.draft_rows(draft, index, target_rows.shape[-1])
  return jnp.maximum(kept * target_rows - rows, 0.0)


def _end(draft: Draft) -> jax.Array:
  """How many tokens are proposed with a probability above 0; int32[]."""
  gamma = draft.tokens.shape[0]
  proposed = jnp.arange(gamma) < draft.length
  return verify.first_false(proposed & (verify.draft_prob(draft) > 0))
