"""Logits are float32 in bfloat16 runs too: not rounded, so without ties."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from small_vocabulary import weights
from specdec_jax import partitioning
from specdec_jax.models import backend, gpt, t5
from toy_families import GPT2, T5_1_0, T5_1_1, UNTIED
from toy_requests import quick_jit

# 2,000 logits near each other: rounded to bfloat16 many of them are equal.
WIDE = {'vocab_size': 2000, 'dtype': 'bfloat16'}
NETWORKS = {
  't5_1_1': t5.T5(dataclasses.replace(T5_1_1, **WIDE)),
  't5_1_0': t5.T5(dataclasses.replace(T5_1_0, **WIDE)),
  'gpt_tied': gpt.GPT(dataclasses.replace(GPT2, **WIDE)),
  'gpt_untied': gpt.GPT(dataclasses.replace(UNTIED, **WIDE)),
}
INPUTS = jnp.asarray(np.array([[5, 7, 11, 3, 0]], np.int32))
TOKENS = jnp.asarray(np.array([[0, 9, 4, 30, 2, 8]], np.int32))
in_all_families = pytest.mark.parametrize('name', NETWORKS)


def num_values(rows):
  """Different values in each row."""
  rows = np.asarray(rows, np.float32).reshape(-1, rows.shape[-1])
  return np.array([np.unique(row).size for row in rows])


def check_unrounded(logits):
  assert logits.dtype == jnp.float32
  assert np.min(num_values(logits)) > 1900  # of 2,000; float32 has ties, too
  # The control: this is what a head that rounds to bfloat16 would give.
  rounded = logits.astype(jnp.bfloat16)
  assert np.max(num_values(rounded)) < 1200
  assert np.mean(rounded.astype(jnp.float32) == logits) < 0.01


@functools.cache
def params_of(name):
  return weights(NETWORKS[name], 0)


def logits_of_calls(kind, name):
  """Logits of a prefill, then of calls over 5 tokens and 1."""
  network = NETWORKS[name]

  def calls(params):
    cache = network.prefill(params, INPUTS, 64)
    first, cache = network.extend(params, cache, TOKENS[:, :5])
    second, _ = network.extend(params, cache, TOKENS[:, 5:])
    return jnp.concatenate([first, second], axis=1)

  with backend.compiled_for(kind):
    return quick_jit(calls)(partitioning.place(params_of(name)))


# Tied and untied heads on either kind of device.
@pytest.mark.parametrize(
  ('kind', 'name'),
  [
    ('cpu', 't5_1_0'),
    ('cpu', 'gpt_untied'),
    ('gpu', 't5_1_1'),
    ('gpu', 'gpt_tied'),
  ],
)
def test_decoding_has_float32_logits(name, kind):
  check_unrounded(logits_of_calls(kind, name))


def test_training_has_float32_logits():
  name = 't5_1_1'
  network = NETWORKS[name]

  def loss(params):
    logits = network.logits(params, INPUTS, TOKENS)
    return jnp.sum(jnp.square(logits)), logits

  gradient, logits = quick_jit(jax.grad(loss, has_aux=True))(params_of(name))
  check_unrounded(logits)
  gradient = jax.tree.leaves(gradient)
  assert all(np.all(np.isfinite(leaf)) for leaf in gradient)
  assert {str(leaf.dtype) for leaf in gradient} == {'float32'}


@in_all_families
def test_the_heads_kernel_is_not_converted(name):
  """The product takes bfloat16 and makes float32; bytes of weights are time."""
  network = NETWORKS[name]
  params = jax.eval_shape(network.init, jax.random.key(0))
  with backend.compiled_for('tpu'):
    params = jax.eval_shape(
      lambda given: partitioning.place(
        given, partitioning.Placement('bfloat16')
      ),
      params,
    )
    text = jax.jit(network.logits).lower(params, INPUTS, TOKENS).as_text()
  heads = [line for line in text.splitlines() if 'x2000xf32>' in line]
  (product,) = [line for line in heads if 'dot_general' in line]
  operands = product.rsplit(':', 1)[1].split('->')[0]
  assert operands.count('bf16>') == 2, product
