"""Verification of a chain: functions of one sequence, and their vmapped forms.

`verify` is Algorithm 1 of Leviathan et al. 2023; `verify_block` judges a draft
as a whole.

The paper's symbols: p_i is `target_probs[i - 1]`, q_i is `draft.probs[i - 1]`,
x_i is `draft.tokens[i - 1]`, gamma is `draft.length` (at most the static G),
r_i is `uniforms[i - 1]`, n is `num_accepted`, p' is `next_token_weights`.

**Guarantee.** The emitted tokens have exactly the target's distribution
(Appendix A.1) if

- each proposal was drawn from the `draft.probs` that come with it. They may
  come from any model and any temperature;
- whether position i was proposed, i <= `draft.length`, was decided only by
  x_1..x_{i-1} and the distributions up to i, never by x_i itself. A draft may
  end before a draw or after a drawn token. But a token that was drawn and then
  dropped is not rejected here, so that its residual is never drawn from.

**A proposal of draft probability 0** contradicts its own `draft.probs`. It is
handled as if the draft had ended before it: the target draws that token by
itself. So the output still has exactly the target's distribution if the *other*
proposals were drawn from `draft.probs`, and also with a drafter that never
states a positive probability. Rejecting the proposal instead would draw from
the residual, and accepting it would take the drafter's choice unchecked; both
would give a wrong distribution.

**Lenience** l of Appendix A.5 gives the guarantee up for more accepted
proposals: q is multiplied by l before it is compared with p, and only there. A
proposal, still drawn from q, is accepted with probability min(1, p / (l q)), so
each token comes

  accepted with    a = min(q, p / l), in sum beta,
  resampled with   (1 - beta) / d max(0, p - q), where d = sum max(0, p - q).

Where p > q, at most p - q is resampled: d = 1 - beta + sum max(0, a - p), so
the quotient (1 - beta) / d is at most 1. There the sum of both is at most p;
elsewhere it is a alone. So **no token comes more often than p / l**. There is
no such bound from below. At l = 1 the sum is p. And no other residual comes
nearer to p in total variation: no residual can take back what was accepted
beyond p, sum max(0, a - p), and this residual adds nothing beyond p (as
norm(max(0, p - l q)) would).

**Block verification** (Sun et al. 2025, Algorithm 2). Algorithm 1 stops at the
first proposal that fails, whatever follows. `verify_block` judges the tokens of
a draft together: a proposal that fails by itself is kept if a later test holds.
The output has exactly the target's distribution, under the same two conditions
on the draft, and on average at least as many tokens are kept. Let g be the
length of the draft, cut before the first proposal of draft probability 0. Then

  P_0 = 1, P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i))
  Z_i = sum_x max(0, P_i p_{i+1}(x) - q_{i+1}(x))
  h_0 = 1, h_i = Z_i / (Z_i + 1 - P_i) for i < g, h_g = P_g

n is the **last** i with r_i < h_i: a test that fails does not end the search.
The next token comes from p_{g+1} if n = g, else from max(0, P_n p_{n+1} -
q_{n+1}). At temperature 0 both verifications keep the same tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.checks.fields import is_a, unexpected
from specdec_jax.probs import inverse_cdf, verdict_uniforms
from specdec_jax.types import Draft, Verdict


def verify(
  draft: Draft,
  target_probs: jax.Array,
  key: jax.Array,
  lenience: jax.Array | None = None,
) -> Verdict:
  """Decides how much of a draft is kept and draws the token after it.

  Args:
    draft: draft of one sequence: tokens int32[G], probs float32[G, V] or None
      for one-hot, length int32[]. Proposals past `length` are ignored.
    target_probs: float32[G + 1, V]; row i is given the first i proposals.
    key: PRNG key of this row and round; consumed through `verdict_uniforms`.
    lenience: float32[] in (0, 1], l at the top of this file; changing the value
      does not recompile. None is 1, lossless. If the target's rows are one-hot,
      lenience changes nothing; `verify_greedy` has another form of it for them.

  Returns:
    Verdict: num_accepted int32[] <= length, next_token int32[].

  Raises:
    ValueError: the shapes do not fit, at trace time.
  """
  check_shapes(draft, target_probs)
  uniforms, of_next = verdict_uniforms(key, draft.tokens.shape[0])
  if lenience is not None:
    uniforms = lenience * uniforms  # the test r q < p becomes r l q < p
  num_accepted = count_accepted(draft, target_probs, uniforms)
  weights = next_token_weights(draft, target_probs, num_accepted)
  return Verdict(num_accepted, inverse_cdf(weights, of_next))


def count_accepted(
  draft: Draft, target_probs: jax.Array, uniforms: jax.Array
) -> jax.Array:
  """Counts the proposals before the first that fails, n; int32[]."""
  gamma = draft.tokens.shape[0]
  target_prob = value_of(target_probs[:gamma], draft.tokens, 0.0)
  proposed_with = draft_prob(draft)
  # The comparison is strict because `uniforms` are in [0, 1) and can be 0; "<="
  # would then accept a token that the target never emits. Equal probabilities
  # are always accepted, as they must be. Without a division, 0 needs no special
  # case.
  accepted = (proposed_with > 0) & (uniforms * proposed_with < target_prob)
  proposed = jnp.arange(gamma) < draft.length
  return first_false(accepted & proposed)


def next_token_weights(
  draft: Draft,
  target_probs: jax.Array,
  num_accepted: jax.Array,
  share: jax.Array | float = 1.0,
) -> jax.Array:
  """Returns the weights that t of Algorithm 1 is drawn from; float32[V].

  They are p' = max(0, p - q) after a rejection, not normalised. They are the
  target's own row if nothing was rejected: every proposal was accepted, or (see
  the top of this file) the next one has draft probability 0. They are that row
  too if the residual's mass rounds to 0; that needs p = q, where a rejection
  has probability 0 anyway.

  Args:
    draft: draft of one sequence.
    target_probs: float32[G + 1, V]; row i is given the first i proposals.
    num_accepted: int32[], n.
    share: P_n of block verification, where p' is max(0, P_n p - q); else 1.
  """
  gamma = draft.tokens.shape[0]
  if gamma == 0:
    return target_probs[0]
  target_row = target_probs[num_accepted]
  index = jnp.minimum(num_accepted, gamma - 1)
  residual = residual_of(draft, target_row, share, index)
  use_residual = (num_accepted < _end(draft)) & (jnp.sum(residual) > 0)
  return jnp.where(use_residual, residual, target_row)


def verify_block(
  draft: Draft, target_probs: jax.Array, key: jax.Array
) -> Verdict:
  """Judges a draft as a whole, with the random numbers of `verify`.

  Args:
    draft: draft of one sequence, as for `verify`.
    target_probs: float32[G + 1, V]; row i is given the first i proposals.
    key: PRNG key of this row and round; consumed through `verdict_uniforms`.

  Returns:
    Verdict: num_accepted int32[] <= length, next_token int32[], and num_passed
    int32[]: the number that Algorithm 1 accepts with these random numbers.

  Raises:
    ValueError: the shapes do not fit, at trace time.
  """
  check_shapes(draft, target_probs)
  uniforms, of_next = verdict_uniforms(key, draft.tokens.shape[0])
  shares = kept_shares(draft, target_probs)
  num_accepted = count_accepted_block(draft, target_probs, shares, uniforms)
  weights = next_token_weights(
    draft, target_probs, num_accepted, shares[num_accepted]
  )
  return Verdict(
    num_accepted,
    inverse_cdf(weights, of_next),
    num_passed=count_accepted(draft, target_probs, uniforms),
  )


def kept_shares(draft: Draft, target_probs: jax.Array) -> jax.Array:
  """Returns P_0, ..., P_G of block verification, float32[G + 1].

  P_i is the running product of p / q, cut to 1 at each step (see the top of
  this file). Entries past the draft's end have no meaning.
  """
  gamma = draft.tokens.shape[0]
  target_prob = value_of(target_probs[:gamma], draft.tokens, 0.0)
  proposed_with = draft_prob(draft)
  shares = [jnp.float32(1.0)]
  for i in range(gamma):
    # The product comes first, so that 0 stays 0: the quotient of the last two
    # may be infinite.
    share = shares[-1] * target_prob[i] / proposed_with[i]
    shares.append(jnp.minimum(share, 1.0))
  return jnp.stack(shares)


def count_accepted_block(
  draft: Draft, target_probs: jax.Array, shares: jax.Array, uniforms: jax.Array
) -> jax.Array:
  """Counts the proposals that block verification keeps, n; int32[].

  n is the last i with r_i < h_i, see the top of this file.

  Args:
    draft: draft of one sequence.
    target_probs: float32[G + 1, V]; row i is given the first i proposals.
    shares: P_0 ... P_G from `kept_shares`, float32[G + 1].
    uniforms: r_1 ... r_G, float32[G].
  """
  gamma = draft.tokens.shape[0]
  end = _end(draft)
  residual = residual_of(
    draft, target_probs[:gamma], shares[:gamma, None], slice(None)
  )
  left = jnp.sum(residual, axis=-1)
  needed = left + (1 - shares[:gamma])
  bound = jnp.where(needed > 0, left / needed, 1.0)
  index = jnp.arange(1, gamma + 1)
  bound = jnp.where(index == end, shares[1:], jnp.append(bound[1:], 0.0))
  holds = (uniforms < bound) & (index <= end)
  return jnp.max(jnp.where(holds, index, 0), initial=0).astype(jnp.int32)


def verify_greedy(
  draft: Draft, target_tokens: jax.Array, near: jax.Array | None = None
) -> Verdict:
  """Verifies a draft for a target that takes the argmax, without randomness.

  Without `near` this equals `verify` with the one-hot rows of `target_tokens`,
  whatever the drafter's probabilities are.

  Args:
    draft: draft of one sequence: tokens int32[G], length int32[]; probs is
      unused.
    target_tokens: int32[G + 1]; entry i is the target's argmax given the first
      i proposals.
    near: bool[G], proposals that are accepted as if they were the argmax, from
      `near_argmax`; this is lenience at temperature 0. None accepts only the
      argmax.

  Returns:
    Verdict: num_accepted int32[] <= length, next_token int32[].

  Raises:
    ValueError: the shapes do not fit, at trace time.
  """
  gamma = draft.tokens.shape[0]
  if (got := target_tokens.shape) != (gamma + 1,):
    raise unexpected('target_tokens', f'shape {(gamma + 1,)}', got)
  proposed = jnp.arange(gamma) < draft.length
  matches = draft.tokens == target_tokens[:gamma]
  if near is not None:
    matches |= near
  num_accepted = first_false(matches & proposed)
  return Verdict(num_accepted, target_tokens[num_accepted])


def near_argmax(
  tokens: jax.Array, logits: jax.Array, lenience: jax.Array
) -> jax.Array:
  """Returns whether p(x) >= l max(p), which is lenience at temperature 0.

  p is the target's distribution before it is standardised (Appendix A.5). The
  paper prints the inequality the other way round, which would reject the argmax
  itself. A quotient of two probabilities needs no softmax.

  Args:
    tokens: int32[..., G]; an id outside the vocabulary is never near.
    logits: float[..., G, V], the target's logits at the position of each token.
    lenience: float32[] in (0, 1]; at 1 only ties with the argmax are near.

  Returns:
    bool[..., G]; False where the logits are NaN or all masked.
  """
  logits = logits.astype(jnp.float32)
  chosen = value_of(logits, tokens, -jnp.inf)
  return jnp.exp(chosen - jnp.max(logits, axis=-1)) >= lenience


# For B sequences: each argument but the lenience has a leading axis B.
verify_batch = jax.vmap(verify, in_axes=(0, 0, 0, None))
verify_block_batch = jax.vmap(verify_block)
verify_greedy_batch = jax.vmap(verify_greedy)


def check_lenience(lenience: float) -> None:
  """Raises ValueError unless it is a number in (0, 1]."""
  least = float(np.finfo(np.float32).tiny)
  if not is_a(lenience, float) or not least <= lenience <= 1:
    raise unexpected('lenience', 'a number in (0, 1]; 1 is lossless', lenience)


def first_false(flags: jax.Array) -> jax.Array:
  """Returns the index of the first False in bool[G], or G; int32[]."""
  if not flags.size:  # rounds of the plain loop have no proposals
    return jnp.int32(0)
  ends = jnp.append(flags, False)
  return jnp.argmin(ends).astype(jnp.int32)


def value_of(rows: jax.Array, tokens: jax.Array, otherwise: float) -> jax.Array:
  """Returns rows[..., i, tokens[..., i]]; `otherwise` for ids not below V."""
  in_range = (tokens >= 0) & (tokens < rows.shape[-1])
  chosen = jnp.take_along_axis(rows, tokens[..., None], axis=-1, mode='clip')
  return jnp.where(in_range, chosen[..., 0], otherwise)


def draft_rows(
  draft: Draft, index: jax.Array | slice, vocab_size: int
) -> jax.Array:
  """Returns q, a draft's distributions, at `index`; float32[..., V]."""
  if draft.probs is None:
    tokens = draft.tokens[index]
    return jax.nn.one_hot(tokens, vocab_size, dtype=jnp.float32)
  return draft.probs[index]


def draft_prob(draft: Draft) -> jax.Array:
  """Returns q_i(x_i) of every proposal; float32[G]."""
  if draft.probs is None:
    return jnp.ones(draft.tokens.shape, jnp.float32)
  return value_of(draft.probs, draft.tokens, 0.0)


def residual_of(
  draft: Draft,
  target_rows: jax.Array,
  share: jax.Array | float,
  index: jax.Array | slice,
) -> jax.Array:
  """Returns the residual max(0, P p - q) at `index`; float32[..., V].

  Args:
    draft: draft of one sequence, which has q.
    target_rows: p, float32[..., V].
    share: P; 1 without block verification.
    index: the positions of the rows in the draft.
  """
  rows = draft_rows(draft, index, target_rows.shape[-1])
  return jnp.maximum(share * target_rows - rows, 0.0)


def _end(draft: Draft) -> jax.Array:
  """Counts the proposals before the first of draft probability 0; int32[]."""
  proposed = jnp.arange(draft.tokens.shape[0]) < draft.length
  return first_false(proposed & (draft_prob(draft) > 0))


def check_shapes(draft: Draft, target_probs: jax.Array) -> None:
  """Raises ValueError unless a sequence's draft fits the target's rows."""
  gamma, got = draft.tokens.shape[0], target_probs.shape
  if len(got) != 2 or got[0] != gamma + 1:
    raise unexpected('target_probs', f'shape ({gamma + 1}, V)', got)
  expected = (gamma, got[1])
  if draft.probs is not None and draft.probs.shape != expected:
    raise unexpected('draft.probs', f'shape {expected}', draft.probs.shape)
