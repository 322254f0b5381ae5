"""Stochastic speculative execution of two functions: Section 6 of the paper.

f(x) is a distribution over a finite set, and g continues with a sample of f(x):
y = g(s) with s drawn from f(x). Both functions are slow, and g cannot begin
before f has ended. If there is a cheap f_approx that is close to f, g can begin
with a sample of f_approx(x), the guess, while f runs. The guess is then
verified like a proposal of one token. Either it is kept, and so is the result
of this early call of g; or it is replaced by a new sample, and g is called
again. In both cases the sample has exactly f's distribution (Appendix A.1). The
guess is kept with probability sum min(f, f_approx), `analysis.acceptance_prob`.
Then y takes, after f_approx, as long as the slower one of f and g, not as long
as both together.

In this example, a particle hops along a ring of charges. The energy of a site
is a sum over all charges (f), and approximately a sum over the nearest charges
(f_approx). What follows a hop (g) is here only the new site; it could be a
costly relaxation.

>>> import jax
>>> import jax.numpy as jnp
>>> from specdec_jax.paper.speculative_execution import speculate
>>> ring = jnp.arange(12)
>>> charges = jnp.cos(ring**2)
>>> def hops(site, reach):
...   '''The law of a hop by -1, 0 or 1 at temperature 1; float32[3].'''
...   distance = jnp.abs(site + jnp.arange(-1, 2)[:, None] - ring[None, :])
...   distance = jnp.minimum(distance, 12 - distance)
...   near = jnp.where(distance <= reach, charges[None, :], 0.0)
...   return jax.nn.softmax(-jnp.sum(near / (1 + distance), axis=1))
>>> def step(site, key):
...   return speculate(
...     lambda site: hops(site, reach=6),
...     lambda site: hops(site, reach=1),
...     lambda hop: (site + hop - 1) % 12,
...     site,
...     key,
...   )
>>> site = jnp.int32(0)
>>> for key in jax.random.split(jax.random.key(0), 5):
...   site = jax.jit(step)(site, key).value
>>> bool(0 <= site < 12)
True
"""

import concurrent.futures
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from specdec_jax import analysis, probs
from specdec_jax.checks.fields import unexpected
from specdec_jax.types import Draft
from specdec_jax.verify import verify


@struct.dataclass
class Outcome:
  """The result of a speculative execution.

  Attributes:
    value: the result of g for the sample.
    sample: int32[], the index drawn from f's distribution.
    accepted: bool[], whether the sample is the guess that g began with.
  """

  value: Any
  sample: Any
  accepted: Any


def speculate(
  f: Callable[[Any], jax.Array],
  f_approx: Callable[[Any], jax.Array],
  g: Callable[[jax.Array], Any],
  x: Any,
  key: jax.Array,
) -> Outcome:
  """Computes y = g(sample of f(x)) as a JAX program, which the caller jits.

  f(x) and g of the guess, a sample of f_approx(x), do not depend on each other,
  so XLA may overlap them. g runs a second time only if the guess is rejected;
  under `vmap` g always runs twice, because a mapped condition computes both
  branches.

  Args:
    f: x -> float[V], probabilities; only their shape is checked.
    f_approx: x -> float[V], probabilities; only their shape is checked.
    g: int32[] -> a pytree of arrays.
    x: any pytree.
    key: PRNG key; consumed.

  Returns:
    An `Outcome` of arrays.

  Raises:
    ValueError: f and f_approx differ in their shapes, at trace time.
  """
  draft_probs = f_approx(x)
  guess = _guess(draft_probs, key)
  early = g(guess)
  sample, accepted = settle(guess, f(x), draft_probs, key)
  value = lax.cond(accepted, lambda: early, lambda: g(sample))
  return Outcome(value, sample, accepted)


def speculate_in_threads(
  f: Callable[[Any], Any],
  f_approx: Callable[[Any], Any],
  g: Callable[[int], Any],
  x: Any,
  key: jax.Array,
  executor: concurrent.futures.Executor | None = None,
) -> Outcome:
  """Computes y = g(sample of f(x)) with Python functions that run together.

  f, and g of the guess (a sample of f_approx(x)), run in the executor. f_approx
  runs in the caller's thread, and so does g if it has to run again. If the
  guess is rejected, nobody waits for the first call of g, and its result or
  exception is dropped; so g must not have side effects. Threads help if f and g
  release the interpreter's lock, as array libraries and input and output do.
  For other functions pass a `ProcessPoolExecutor`.

  Args:
    f: x -> V probabilities, anything that NumPy accepts as a vector.
    f_approx: x -> V probabilities, anything that NumPy accepts as a vector.
    g: an int, the index of the sample -> anything.
    x: anything.
    key: PRNG key; consumed. The sample is the one that `speculate` draws.
    executor: executor with at least two workers; None makes one for this call.

  Returns:
    An `Outcome` of a value, an int and a bool.

  Raises:
    ValueError: f and f_approx do not return distributions over the same set.
    Exception: any exception of f, of f_approx, or of g for the final sample.
  """
  if executor is None:
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=2)
    try:
      return speculate_in_threads(f, f_approx, g, x, key, pool)
    finally:
      pool.shutdown(wait=False, cancel_futures=True)
  exact = executor.submit(f, x)
  draft_probs = np.asarray(f_approx(x))
  guess = int(_guess(draft_probs, key))
  early = executor.submit(g, guess)
  try:
    target_probs = np.asarray(exact.result())
    _check_distributions(target_probs, draft_probs)
    sample, accepted = _settle(guess, target_probs, draft_probs, key)
    if accepted:
      return Outcome(early.result(), guess, True)
    return Outcome(g(int(sample)), int(sample), False)
  finally:
    early.cancel()  # a call that has begun goes on


def settle(
  guess: jax.Array,
  target_probs: jax.Array,
  draft_probs: jax.Array,
  key: jax.Array,
  lenience: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Applies Algorithm 1 to one proposal: keeps the guess, or replaces it.

  Args:
    guess: int32[], drawn from `draft_probs`.
    target_probs: float[V], the distribution that the result must have.
    draft_probs: float[V], the distribution of the guess.
    key: PRNG key; consumed, except for `probs.draft_key`.
    lenience: float32[] in (0, 1], as for `verify`; None is lossless.

  Returns:
    The sample of `target_probs`, int32[], and whether it is the guess, bool[].

  Raises:
    ValueError: the probabilities are not two vectors of the same length.
  """
  shapes = jnp.shape(target_probs), jnp.shape(draft_probs)
  if len(shapes[0]) != 1 or shapes[0] != shapes[1]:
    raise unexpected('f and f_approx', 'a vector each, of one length', shapes)
  target_row = jnp.asarray(target_probs, jnp.float32)
  draft_row = jnp.asarray(draft_probs, jnp.float32)
  draft = Draft(jnp.asarray(guess)[None], draft_row[None], jnp.int32(1))
  # `verify` expects a second row, the distribution of the token after an
  # accepted proposal. What it draws from this row is not used.
  verdict = verify(draft, jnp.stack([target_row] * 2), key, lenience)
  accepted = verdict.num_accepted == 1
  return jnp.where(accepted, draft.tokens[0], verdict.next_token), accepted


_settle = jax.jit(settle)


@jax.jit
def _guess(draft_probs: jax.Array, key: jax.Array) -> jax.Array:
  row = jnp.asarray(draft_probs, jnp.float32)
  return probs.sample(row, probs.draft_key(key, 0))


def _check_distributions(target_probs, draft_probs) -> None:
  try:
    analysis.acceptance_prob(target_probs, draft_probs)
  except ValueError as error:
    raise ValueError(
      f'f gives target_probs, f_approx gives draft_probs: {error}'
    ) from error
