"""Forced acceptance: the walltime that a pair would have at a given alpha.

It is for models whose fine-tuned checkpoints are not available. Models of the
real size, with random weights, do all their work, and then each proposal is
accepted with a given probability, independently, as Section 3.1 of the paper
models it. The output is meaningless; the time is that of a pair with this
acceptance rate.
"""

import jax
import jax.numpy as jnp

from specdec_jax import probs
from specdec_jax.decoding import speculative
from specdec_jax.decoding.speculative import Judge


def judge(acceptance_rate: jax.Array) -> Judge:
  """Returns a judge that does Algorithm 1's work, but accepts at random.

  Args:
    acceptance_rate: float32[], alpha; a traced value does not recompile.
  """

  def by_lot(request, draft, logits, keys):
    # The token depends on the complete real verdict, so that the compiler
    # cannot leave out any part of that work.
    verdict = speculative.judge(request, draft, logits, keys)
    num_accepted = jax.vmap(_draw, in_axes=(0, 0, None, None))(
      keys, draft.length, acceptance_rate, request.gamma
    )
    return verdict.replace(num_accepted=num_accepted)

  return by_lot


def _draw(key, length, acceptance_rate, gamma):
  """Proposals of one row before the first that is rejected, int32[]."""
  # Needs another key, because the real verdict has consumed `accept_key`.
  own = jax.random.fold_in(probs.accept_key(key), 1)
  accepted = jax.random.uniform(own, (gamma,)) < acceptance_rate
  accepted &= jnp.arange(gamma) < length
  return jnp.argmin(jnp.append(accepted, False)).astype(jnp.int32)


def check_rate(acceptance_rate: float | None) -> None:
  """Raises ValueError unless it is None or a probability."""
  if acceptance_rate is not None and not 0.0 <= acceptance_rate <= 1.0:
    raise ValueError(
      'forced_acceptance must lie in [0, 1], or be None to accept by'
      f' Algorithm 1, got {acceptance_rate}.'
    )
