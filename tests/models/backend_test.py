"""What is traced for a GPU or TPU computes what is traced for a CPU.

It runs on the CPU here: the programs differ, not what they mean.
"""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import small_vocabulary
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
from specdec_jax.models import backend, cpu_layout, kv_cache, products, t5
from specdec_jax.probs import SamplingConfig
from toy_families import T5_1_1
from toy_requests import quick_jit, request_of

TARGET = t5.T5(T5_1_1)
PARAMS = small_vocabulary.weights(TARGET, 0)
INPUTS = (5, 7, 11, 3, 0)
GREEDY = SamplingConfig(0.0)


@pytest.mark.parametrize(
  ('rows', 'result', 'copied'),
  [(1, None, 1 << 20), (3, 'float32', 0), (33, None, 0)],
)
def test_a_product_with_blocks_is_the_same(rows, result, copied, monkeypatch):
  monkeypatch.setattr(products, '_MOST_COPIED', copied)
  rng = np.random.default_rng(0)

  def numbers(*shape):
    return jnp.asarray(rng.normal(size=shape), 'float32')

  kernel, x = numbers(48, 3 * cpu_layout.BLOCK), numbers(2, rows, 48)
  cut = cpu_layout.in_blocks(kernel)
  want = products.dense_in_out(kernel, x, result)
  made = jax.jit(lambda cut, x: products.dense_blocks(cut, x, result))
  have = made(cut, x)
  is_loop = 'while' in made.lower(cut, x).as_text()
  assert is_loop == (2 * rows > products.MOST_COPIED_ROWS and not copied)
  assert have.dtype == want.dtype
  np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)
  # Control: where an output lies matters.
  turned = products.dense_blocks(cut[::-1], x, result)
  assert np.abs(turned - want).max() > 1


@pytest.mark.parametrize('kind', ['gpu', 'tpu', 'cpu'])
def test_a_greedy_round_has_conditionals_on_a_cpu_alone(kind):
  """Of 150 slots a CPU has two buckets; and what is traced is traced anew."""
  request = request_of(1, 3, GREEDY, 140, inputs=INPUTS, seed=1)
  loop = Loop(TARGET, small_model(TARGET))
  params = PairParams(PARAMS, PARAMS)
  with backend.compiled_for(kind):
    text = jax.jit(loop.decode).lower(params, request).as_text()
  assert ('stablehlo.case' in text) == (kind == 'cpu')


@pytest.mark.parametrize('batch', [1, 3, 40])
def test_caches_are_written_the_same(batch):
  """Each row at its own place, 40 of them in a loop over some at once."""
  heads, slots, size, new = 2, 9, 4, 3
  rng = np.random.default_rng(0)

  def numbers(*shape):
    return jnp.asarray(rng.normal(size=shape).astype(np.float32))

  start = jnp.asarray(rng.integers(0, slots - new + 1, batch), jnp.int32)
  args = numbers(batch, heads, size, slots), numbers(batch, new, heads, size)

  def program(split):
    with backend.split(split):
      return jax.jit(kv_cache.write).lower(*args, start).as_text()

  want, mapped = quick_jit(kv_cache.write)(*args, start), program(split=True)
  with backend.compiled_for('tpu'):
    have = quick_jit(kv_cache.write)(*args, start)
    # It is another program, unless rows and heads may be on several devices.
    assert mapped == program(split=True) != program(split=False)
  np.testing.assert_array_equal(have, want)


def copied_in_loops(target, split):
  """How often a loop copies a layer's keys or values in a round."""
  request = request_of(1, 0, GREEDY, 100, inputs=INPUTS, seed=0)
  assert request.cache_slots <= 128, 'more slots are read by a conditional'
  params = PairParams(PARAMS, None)
  with backend.split(split):
    lowered = jax.jit(Loop(target).decode).lower(params, request)
  slots = rf'\d+,{target.config.num_heads},\d+,{request.cache_slots}'
  loops, _, entry = lowered.compile().as_text().partition('\nENTRY')
  assert f',{request.cache_slots}]' in entry
  return len(re.findall(rf'\[{slots}\]\S* copy\(', loops))


def test_a_token_copies_no_cache_on_a_cpu():
  assert not copied_in_loops(TARGET, split=False)
  # Written outside of a branch they are, several times.
  assert copied_in_loops(TARGET, split=True)


# jax-ml/jax issue 39103; 1,065,369,600 on JAX 0.10.2.
_SUMS = """
import jax, jax.numpy as jnp
rows = jnp.zeros((32_769, 3)).at[:, 0].set(jnp.arange(32_769.0))
sums = jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2)))(rows)
print(int(sums[-1]))
"""


def test_this_jax_multiplies_rightly():
  """Compiled as for users: the quick tests have another XLA_FLAGS."""
  env = os.environ | {'XLA_FLAGS': '', 'JAX_PLATFORMS': 'cpu'}
  command = [sys.executable, '-c', _SUMS]
  assert int(subprocess.check_output(command, env=env)) == 32_768**2
