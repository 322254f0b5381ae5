"""T5 and its cache: parity with itself, edges of the buffer, T5X's names."""

import dataclasses
import pathlib

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import checkpoints, partitioning
from specdec_jax.models import kv_cache, layers, t5

T5_1_1 = t5.T5Config(
  vocab_size=60,
  emb_dim=32,
  num_heads=3,
  num_encoder_layers=2,
  num_decoder_layers=2,
  head_dim=12,  # heads * head_dim is not emb_dim
  mlp_dim=48,
)
T5_1_0 = dataclasses.replace(
  T5_1_1, mlp_activations=('relu',), logits_via_embedding=True
)
OF_BLOCKS = dataclasses.replace(
  T5_1_1, vocab_size=128, emb_dim=64, mlp_dim=64, num_heads=4, head_dim=16
)
OWN_BIAS = dataclasses.replace(T5_1_1, bias_per_layer=True)
FIXTURE = (
  pathlib.Path(__file__).parents[2]
  / 'shared/fixtures/t5x/legacy_msgpack.checkpoint_0'
)


# Compiled once a network and shape, not dispatched operation by operation.
logits_of = jax.jit(t5.T5.logits, static_argnums=0)
extend = jax.jit(t5.T5.extend, static_argnums=0)
prefill = jax.jit(t5.T5.prefill, static_argnums=(0, 3))


def make(config=T5_1_1, seed=0):
  model = t5.T5(config)
  return model, model.init(jax.random.key(seed))


def tokens(seed, *shape):
  rng = np.random.default_rng(seed)  # which compiles nothing for each shape
  return jnp.asarray(rng.integers(2, 60, shape).astype(np.int32))


def ragged_inputs(batch=3, width=11):
  inputs = np.array(tokens(1, batch, width))
  for row in range(batch):
    inputs[row, width - 2 * row :] = 0
  return jnp.asarray(inputs)


@pytest.mark.parametrize(
  ('config', 'layout'),
  [
    pytest.param(T5_1_1, 'in_out', id='1.1-in_out'),
    pytest.param(T5_1_0, 'out_in', id='1.0-out_in'),
    pytest.param(OWN_BIAS, 'in_out', id='own bias-in_out'),
    pytest.param(OF_BLOCKS, 'blocks', id='1.1-blocks'),
    *(
      pytest.param(
        config, layout, id=f'{name}-{layout}', marks=pytest.mark.slow
      )
      for config, layout, name in (
        (T5_1_1, 'out_in', '1.1'),
        (T5_1_0, 'in_out', '1.0'),
        (OWN_BIAS, 'out_in', 'own bias'),
      )
    ),
  ],
)
def test_extend_in_pieces_equals_teacher_forcing(config, layout):
  model, params = make(config)
  inputs, targets = ragged_inputs(), tokens(2, 3, 150)
  expected = logits_of(model, params, inputs, targets)
  placed = partitioning.place(
    params, partitioning.Placement(kernel_layout=layout)
  )
  names = {name[-1] for name in flax.traverse_util.flatten_dict(placed)}
  assert ('kernel_blocks' in names) == (layout == 'blocks')
  cache = prefill(model, placed, inputs, 150)
  assert cache.num_slots == 150  # attended over 128 first, then over all
  pieces, at = [], 0
  for size in (1, 9, 60, 1, 9, 60, 9, 1):
    logits, cache = extend(model, placed, cache, targets[:, at : at + size])
    pieces.append(logits)
    at += size
  assert at == 150
  np.testing.assert_array_equal(cache.length, [150] * 3)
  np.testing.assert_allclose(
    np.concatenate(pieces, axis=1), expected, rtol=2e-5, atol=2e-5
  )


def test_rows_at_their_own_places():
  model, params = make()
  inputs, targets = ragged_inputs(), tokens(3, 3, 12)
  expected = np.asarray(logits_of(model, params, inputs, targets))
  cache = prefill(model, params, inputs, 16)
  _, cache = extend(model, params, cache, targets[:, :8])
  starts = np.array([8, 3, 0])
  cache = model.rewind(cache, jnp.asarray(starts))
  new = np.stack([targets[b, s : s + 4] for b, s in enumerate(starts)])
  logits, cache = extend(model, params, cache, jnp.asarray(new))
  for row, begin in enumerate(starts):
    np.testing.assert_allclose(
      logits[row], expected[row, begin : begin + 4], rtol=2e-5, atol=2e-5
    )
  np.testing.assert_array_equal(cache.length, starts + 4)


@pytest.mark.parametrize(
  'kept', [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 5)), 9]
)
def test_rewound_cache_equals_a_fresh_one(kept):
  """What lay past a rewind leaves no trace, whatever was written there."""
  model, params = make()
  inputs, targets = ragged_inputs(), tokens(4, 3, 12)
  fresh = prefill(model, params, inputs, 12)
  if kept:
    _, fresh = extend(model, params, fresh, targets[:, :kept])
  used = prefill(model, params, inputs, 12)
  if kept:
    _, used = extend(model, params, used, targets[:, :kept])
  _, used = extend(model, params, used, tokens(9, 3, 12 - kept))
  used = model.rewind(used, jnp.full((3,), kept))
  want, _ = extend(model, params, fresh, targets[:, kept:])
  have, _ = extend(model, params, used, targets[:, kept:])
  np.testing.assert_array_equal(have, want)


def test_without_a_rewind_the_past_shows():
  """Negative control of the test above."""
  model, params = make()
  cache = prefill(model, params, ragged_inputs(), 12)
  want, _ = extend(model, params, cache, tokens(4, 3, 2))
  _, cache = extend(model, params, cache, tokens(9, 3, 5))
  have, _ = extend(model, params, cache, tokens(4, 3, 2))
  assert not np.allclose(have, want, atol=1e-3)


def test_layers_with_the_same_bias_are_as_if_they_shared_it():
  """And with another one in a single layer they are not."""
  model, params = make()
  own = t5.T5(OWN_BIAS)
  for stack in ('encoder', 'decoder'):
    table = params[stack].pop('relpos_bias')
    for layer in ('layers_0', 'layers_1'):
      params[stack][layer]['relpos_bias'] = table
  inputs, targets = ragged_inputs(), tokens(2, 3, 40)
  have = logits_of(own, params, inputs, targets)
  shared = make()[1]
  want = logits_of(model, shared, inputs, targets)
  np.testing.assert_allclose(have, want, atol=1e-6)
  for stack in ('encoder', 'decoder'):
    changed = jax.tree.map(lambda leaf: leaf, params)
    table = changed[stack]['layers_1']['relpos_bias']['rel_embedding']
    changed[stack]['layers_1']['relpos_bias'] = {'rel_embedding': 2 * table}
    other = logits_of(own, changed, inputs, targets)
    assert np.max(np.abs(other - want)) > 1e-3


def test_padding_of_inputs_changes_nothing():
  model, params = make()
  inputs, targets = tokens(5, 2, 7), tokens(6, 2, 6)
  padded = jnp.pad(inputs, ((0, 0), (0, 9)))
  np.testing.assert_allclose(
    logits_of(model, params, padded, targets),
    logits_of(model, params, inputs, targets),
    rtol=2e-5,
    atol=2e-5,
  )


def test_write_places_each_row():
  buffer = jnp.zeros((2, 1, 2, 6))
  new = jnp.arange(1, 9, dtype=jnp.float32).reshape(2, 2, 1, 2)
  written = kv_cache.write(buffer, new, jnp.array([4, 0]))
  np.testing.assert_array_equal(
    written[0, 0], [[0] * 4 + [1, 3], [0] * 4 + [2, 4]]
  )
  np.testing.assert_array_equal(
    written[1, 0], [[5, 7] + [0] * 4, [6, 8] + [0] * 4]
  )


@pytest.mark.parametrize('slots', [5, 64, 65, 130, 513])
def test_buckets_cover_the_buffer(slots):
  sizes = kv_cache.buckets(slots)
  assert sizes[-1] == slots
  assert list(sizes) == sorted(set(sizes))


def reference_bucket(distance: int, bidirectional: bool) -> int:
  """T5's rule (Raffel et al. 2020, Section 2.1), one distance at a time."""
  buckets, offset = 32, 0
  if bidirectional:
    buckets = 16
    if distance > 0:
      offset = 16
    distance = abs(distance)
  else:
    distance = max(-distance, 0)
  exact = buckets // 2
  if distance < exact:
    return offset + distance
  steps = np.log(distance / exact) / np.log(128 / exact)
  return offset + min(exact + int(steps * (buckets - exact)), buckets - 1)


@pytest.mark.parametrize('bidirectional', [False, True])
def test_relative_position_buckets(bidirectional):
  distance = np.arange(-300, 301)
  # At exact powers the logarithm's rounding decides; T5X adds an epsilon.
  exact = 8 if bidirectional else 16
  keep = ~np.isin(np.abs(distance), [exact * 2, exact * 4, exact * 8])
  have = layers.relative_position_bucket(distance, bidirectional)
  want = [reference_bucket(int(d), bidirectional) for d in distance]
  np.testing.assert_array_equal(have[keep], np.array(want)[keep])


def test_bfloat16_stays_close():
  model, params = make()
  half = t5.T5(dataclasses.replace(T5_1_1, dtype='bfloat16'))
  inputs, targets = ragged_inputs(), tokens(2, 3, 10)
  want = logits_of(model, params, inputs, targets)
  have = logits_of(half, params, inputs, targets)
  assert have.dtype == jnp.float32
  scale = float(jnp.std(want))
  assert float(jnp.max(jnp.abs(have - want))) < 0.1 * scale


def test_dropout_only_with_a_key():
  model, params = make(dataclasses.replace(T5_1_1, dropout_rate=0.3))
  inputs, targets = ragged_inputs(), tokens(2, 3, 5)
  plain = logits_of(model, params, inputs, targets)
  np.testing.assert_array_equal(
    plain, logits_of(model, params, inputs, targets)
  )
  key = jax.random.key(0)
  assert not np.allclose(plain, logits_of(model, params, inputs, targets, key))


@pytest.mark.parametrize(
  ('field', 'value', 'words'),
  [
    ('num_heads', 0, 'at least 1, got 0'),
    ('dtype', 'float16', "'float16', .*'bfloat16', 'float32'"),
    ('mlp_activations', ('swish',), 'swish'),
  ],
)
def test_config_says_what_is_wrong(field, value, words):
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(T5_1_1, **{field: value})


def test_t5x_checkpoint_needs_no_renaming():
  """T5X's own test checkpoint has exactly the names and shapes of `T5`."""
  if not FIXTURE.exists():
    pytest.skip("needs T5X's test checkpoint in ../shared/fixtures")
  config = t5.T5Config(
    vocab_size=32128,
    emb_dim=8,
    num_heads=4,
    head_dim=3,
    num_encoder_layers=2,
    num_decoder_layers=2,
    mlp_dim=16,
  )
  model = t5.T5(config)
  params = checkpoints.load(FIXTURE)
  expected = jax.eval_shape(model.init, jax.random.key(0))
  checkpoints.check_params(params, expected)
  logits = logits_of(model, params, tokens(1, 1, 5), tokens(2, 1, 4))
  assert bool(jnp.all(jnp.isfinite(logits)))
