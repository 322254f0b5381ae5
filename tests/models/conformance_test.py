"""One suite for the networks of all families: against fixed numbers and self.

`golden_logits.npz` has some logits of each network, made when plain NumPy and
transformers (see the parity tests) gave the same.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_families as toys
from specdec_jax.models import backend, integers, sizes
from specdec_jax.models.base import param_shapes
from specdec_jax.models.families import network_of
from specdec_jax.models.model import Model
from specdec_jax.models.rope import Rope
from specdec_jax.models.t5 import T5Config
from specdec_jax.partitioning import Placement, place
from toy_families import extend, inputs_of, logits_of, make, prefill, tokens

GOLDEN = np.load(pathlib.Path(__file__).parent / 'golden_logits.npz')
_REST = 'T5 1.0', 'untied', 'Llama 3', 'Qwen 3', 'Gemma 2'
NINE = {name: one for name, one in toys.ALL.items() if name not in _REST}
nine = pytest.mark.parametrize('config', NINE.values(), ids=NINE)


def some(*configs):
  ids = [type(config).__name__ for config in configs]
  return pytest.mark.parametrize('config', configs, ids=ids)


def changed(config, stack=None, **fields):
  """The configuration, or one stack of it, with other fields."""
  if stack is None:
    return dataclasses.replace(config, **fields)
  other = dataclasses.replace(getattr(config, stack), **fields)
  return dataclasses.replace(config, **{stack: other})


def at_once(network, params, inputs, fed):
  """Logits of `fed`, behind which there is noise: one program for all."""
  size = fed.shape[1]
  longer = np.pad(fed, ((0, 0), (0, 150 - size)), constant_values=9)
  return np.asarray(logits_of(network, params, inputs, longer))[:, :size]


def teacher_forced(config, fed, **fields):
  """Logits by the parameters of `config`, where some fields differ."""
  network, params = make(config)
  network = network_of(changed(config, **fields))
  return at_once(network, params, inputs_of(config), fed)


def near(logits, want, share=5e-5):
  np.testing.assert_allclose(logits, want, atol=share * np.abs(want).max())


def differs(logits, want):
  return np.abs(logits - want).max() > 1e-3 * np.abs(want).max()


# --- What a family computes ---------------------------------------------------


@pytest.mark.parametrize('name', toys.ALL)
def test_logits_are_those_of_before(name):
  logits = teacher_forced(toys.ALL[name], tokens(1, 3, 40))
  assert logits.std() > 0.1
  near(logits[:, ::7, ::13], GOLDEN[name], 1e-4)


@pytest.mark.parametrize(
  ('config', 'change'),
  [
    (toys.T5_1_1, {'mlp_activations': ('silu', 'linear')}),
    (toys.LLAMA, {'rope': Rope(5e5)}),
    (toys.GEMMA2, {'window': 10}),
    (toys.GEMMA2, {'score_softcap': 0.0}),
    (toys.GEMMA3, {'local_rope': None}),
    (toys.GEMMA3, {'norm_offset': 0.0}),
    (toys.NLLB, {'scale_embeddings': False}),
    (toys.ONE, {'stack': 'encoder', 'window': 10}),
    (toys.ONE, {'stack': 'decoder', 'window': 10}),
    (toys.TWO, {'image_end_id': 8}),
  ],
)
def test_every_field_is_seen(config, change):
  """The negative control of the test above: one field differs."""
  fed = np.array(tokens(1, 3, 40))
  fed[:2, 9] = 7, 8
  assert differs(
    teacher_forced(config, fed, **change), teacher_forced(config, fed)
  )


# --- A cache ------------------------------------------------------------------


def read_all(network, params, inputs, fed, sizes):
  """Logits of `fed`, read in calls of these sizes."""
  cache = prefill(network, params, inputs, fed.shape[1])
  pieces, at = [], 0
  for size in sizes:
    logits, cache = extend(network, params, cache, fed[:, at : at + size])
    pieces.append(logits)
    at += size
  np.testing.assert_array_equal(cache.length, [at] * len(fed))
  return np.concatenate(pieces, axis=1)


LAYOUTS = {'T5X': 'out_in', 'GPT-2': 'out_in', 'NLLB': 'out_in'}
KINDS = {'T5Gemma': 'gpu', 'Gemma 3': 'tpu'}


@pytest.mark.parametrize('name', NINE)
def test_pieces_are_the_whole(name):
  """Attended over 128 slots first, then over all; joined projections."""
  config = NINE[name]
  network, params = make(config)
  fed = np.asarray(tokens(2, 3, 150))
  want = teacher_forced(config, fed)
  placed = place(params, Placement(kernel_layout=LAYOUTS.get(name, 'in_out')))
  attention = placed['decoder']['layers_1']['self_attention']
  assert {'qkv', 'out'} <= set(attention)
  with backend.compiled_for(KINDS.get(name, 'cpu')):
    logits = read_all(network, placed, inputs_of(config), fed, (1, 74, 1, 74))
  near(logits, want)


@nine
def test_rows_at_their_own_places_and_rewound(config):
  """What lay past a rewind leaves no trace, whatever was written there."""
  network, params = make(config)
  fed = np.asarray(tokens(3, 3, 40))
  want = teacher_forced(config, fed)
  used = fresh = prefill(network, params, inputs_of(config), 24)
  for at in range(0, 16, 4):  # four at a time: one program
    _, used = extend(network, params, used, fed[:, at : at + 4])
  starts = np.array([16, 11, 0])
  cache = network.rewind(used, jnp.asarray(starts))
  new = np.stack([fed[row, at : at + 4] for row, at in enumerate(starts)])
  logits, cache = extend(network, params, cache, new)
  np.testing.assert_array_equal(cache.length, starts + 4)
  for row, start in enumerate(starts):
    near(logits[row], want[row, start : start + 4])
  # To the bit: a rewound cache is a fresh one.
  again = network.rewind(used, jnp.zeros_like(used.length))
  np.testing.assert_array_equal(
    extend(network, params, again, new)[0],
    extend(network, params, fresh, new)[0],
  )
  # Negative control: without a rewind the past shows.
  past, _ = extend(network, params, used, new)
  assert differs(past[1], want[1, 11:15])


@some(toys.T5_1_1, toys.NLLB, toys.ONE, toys.TWO)
def test_padding_does_not_show(config):
  network, params = make(config)
  fed, lengths = tokens(4, 3, 12), (9, 3, 14)
  inputs = np.asarray(inputs_of(config, lengths))
  want = at_once(network, params, inputs, fed)
  wide = np.pad(inputs, ((0, 0), (0, 16)), constant_values=network.pad_id)
  near(at_once(network, params, wide, fed), want)
  # Negative control: one more token does.
  wide[1, 3] = 5
  assert differs(at_once(network, params, wide, fed)[1], want[1])


# --- Numbers and training -----------------------------------------------------


@some(toys.T5_1_1, toys.GPT2, toys.TWO)
def test_bfloat16_stays_close(config):
  fed = tokens(2, 3, 40)
  want = teacher_forced(config, fed)
  half = teacher_forced(config, fed, dtype='bfloat16')
  assert half.dtype == np.float32
  assert np.mean(half == half.astype(jnp.bfloat16)) < 0.01  # nor rounded
  error = np.sqrt(np.mean((half - want) ** 2))
  # T5's scores are not scaled: with such parameters a softmax is sharp.
  bound = 0.2 if isinstance(config, T5Config) else 0.05
  assert 0 < error < bound * want.std()


slow = functools.partial(pytest.param, marks=pytest.mark.slow)
EIGHT_BITS = [x if x in ('T5 1.1', 'GPT-2') else slow(x) for x in toys.ALL]


@pytest.mark.parametrize('name', EIGHT_BITS)
def test_kernels_of_eight_bits(name):
  """Logits are those of the rounded numbers as floats; on a CPU near them."""
  config = toys.ALL[name]
  network, params = make(config)
  given = inputs_of(config), tokens(2, 3, 40)

  def logits(params):
    return np.asarray(logits_of(network, params, *given))

  with backend.compiled_for('gpu'):
    want = logits(integers.in_floats(integers.rounded(params)))
    near(logits(place(params, Placement('int8'))), want, 1e-4)
    assert differs(logits(params), want)
  on_cpu = logits(place(params, Placement('int8')))
  assert differs(on_cpu, want)
  assert np.corrcoef(np.ravel(on_cpu), np.ravel(want))[0, 1] > 0.9


def test_a_scale_near_one_is_not_rounded():
  """Gemma's scales are stored as differences from 1, also in bfloat16."""
  network, params = make(toys.GEMMA3)
  tiny = jax.tree_util.tree_map_with_path(
    lambda path, leaf: leaf / 300 if path[-1].key == 'scale' else leaf, params
  )
  halved = place(tiny, Placement('bfloat16'))
  whole = jax.tree.map(lambda leaf: leaf.astype(np.float32), halved)
  fed = tokens(2, 1, 10)
  want = np.asarray(logits_of(network, whole, None, fed))
  near(logits_of(network, halved, None, fed), want, 1e-5)


@some(toys.T5_1_1, toys.T5X)
def test_dropout_only_with_a_key(config):
  # All that drops is in one layer.
  layers = {name: 1 for name in vars(config) if name.endswith('_layers')}
  config = dataclasses.replace(config, **layers)
  _, params = make(config)
  network = network_of(dataclasses.replace(config, dropout_rate=0.3))
  given = params, inputs_of(config), tokens(2, 3, 5)
  plain = logits_of(network, *given)
  np.testing.assert_array_equal(plain, logits_of(network, *given))
  assert not np.allclose(plain, logits_of(network, *given, jax.random.key(0)))


def test_no_more_tokens_than_learned_positions():
  network, params = make(toys.GPT2)
  assert prefill(network, params, tokens(1, 2, 1), 160).num_slots == 160
  with pytest.raises(ValueError, match='160 positions, got 161'):
    network.prefill(params, tokens(1, 2, 1), 161)
  with pytest.raises(ValueError, match='160 positions'):
    network.logits(params, None, tokens(1, 2, 161))
  network, params = make(toys.T5X)
  assert prefill(network, params, tokens(1, 2, 1), 161).num_slots == 161


# --- Names and sizes ----------------------------------------------------------


@pytest.mark.parametrize('name', toys.ALL)
def test_parameters_are_known_before_there_are_any(name):
  """By one layer of each stack."""
  config = toys.ALL[name]
  all_shapes, network = toys.shapes(config), network_of(config)
  want, have = (
    jax.tree.map(lambda leaf: leaf.shape, tree)
    for tree in (all_shapes, param_shapes(network))
  )
  assert have == want
  num_params = sum(leaf.size for leaf in jax.tree.leaves(all_shapes))
  assert Model(network).num_params == num_params
  assert sizes.run_bytes(config, 2, 16, 32, 5) > 0
