"""Hugging Face folders: round trips, broken and unusual folders."""

import dataclasses
import importlib.util
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints import huggingface, huggingface_names
from specdec_jax.models.t5 import T5, T5Config

needs_safetensors = pytest.mark.skipif(
  importlib.util.find_spec('safetensors') is None,
  reason="needs safetensors: pip install 'specdec_jax[huggingface]'",
)
# H * D is not M, and neither H nor the layers of the stacks are equal.
V11 = T5Config(
  vocab_size=61,
  emb_dim=20,
  num_heads=3,
  num_encoder_layers=1,
  num_decoder_layers=2,
  head_dim=4,
  mlp_dim=28,
)
V10 = dataclasses.replace(
  V11, num_heads=7, mlp_activations=('relu',), logits_via_embedding=True
)
CONFIGS = {'1.1': V11, '1.0': V10}


def make_params(config):
  """Random parameters; norms and tables differ, so that none can swap."""
  rng = np.random.default_rng(0)

  def draw(leaf):
    noise = rng.standard_normal(leaf.shape).astype(np.float32)
    return 1 + noise / 10 if len(leaf.shape) == 1 else noise / 4

  return jax.tree.map(draw, huggingface_names.shapes(T5(config)))


@pytest.fixture(scope='module', params=CONFIGS)
def model(request):
  config = CONFIGS[request.param]
  return config, make_params(config)


def edit(folder, change):
  """Rewrites model.safetensors by `change`, which gets name -> array."""
  from safetensors import numpy as safetensors_numpy

  path = folder / huggingface.WEIGHTS
  arrays = safetensors_numpy.load_file(path)
  change(arrays)
  arrays = {name: np.ascontiguousarray(a) for name, a in arrays.items()}
  safetensors_numpy.save_file(arrays, path, metadata={'format': 'pt'})
  return arrays


def edit_config(folder, **values):
  path = folder / huggingface.CONFIG
  described = json.loads(path.read_text()) | values
  path.write_text(json.dumps(described))


def assert_equal_trees(have, want):
  """The same names and values; tree.map raises where names differ."""
  jax.tree.map(np.testing.assert_array_equal, have, want)


@needs_safetensors
def test_round_trip_keeps_every_bit(model, tmp_path):
  config, params = model
  folder = tmp_path / 'new' / 'folder'
  huggingface.save_huggingface(folder, config, params)
  loaded_config, loaded = huggingface.load_huggingface(folder)
  assert loaded_config == config
  assert_equal_trees(loaded, params)
  ids = json.loads((folder / 'generation_config.json').read_text())
  assert ids == {
    'decoder_start_token_id': 0,
    'eos_token_id': 1,
    'pad_token_id': 0,
  }
  assert {path.name for path in folder.iterdir()} == {
    'config.json',
    'generation_config.json',
    'model.safetensors',
  }


@needs_safetensors
def test_bfloat16_on_disk(tmp_path):
  params = make_params(V11)
  narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
  huggingface.save_huggingface(tmp_path, V11, narrow)
  _, on_disk = huggingface.load_huggingface(tmp_path)
  _, loaded = huggingface.load_huggingface(tmp_path, np.float32)

  def check(disk, value, original):
    assert disk.dtype == jnp.bfloat16 and value.dtype == np.float32
    rounded = original.astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(value, rounded)

  jax.tree.map(check, on_disk, loaded, params)
  described = json.loads((tmp_path / 'config.json').read_text())
  assert described['torch_dtype'] == 'bfloat16'


@needs_safetensors
def test_shards_and_other_names_of_the_embedding(tmp_path):
  from safetensors import numpy as safetensors_numpy

  params = make_params(V11)
  huggingface.save_huggingface(tmp_path, V11, params)
  unused = (
    'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'
  )

  def rename(arrays):
    arrays['decoder.embed_tokens.weight'] = arrays.pop('shared.weight')
    arrays['encoder.embed_tokens.weight'] = arrays[
      'decoder.embed_tokens.weight'
    ].copy()
    arrays[unused] = np.zeros((32, 3), np.float32)

  arrays = edit(tmp_path, rename)
  (tmp_path / huggingface.WEIGHTS).unlink()
  weight_map = {}
  for i, name in enumerate(sorted(arrays)):
    weight_map[name] = f'model-{i % 3 + 1:05}-of-00003.safetensors'
  for shard in set(weight_map.values()):
    part = {n: a for n, a in arrays.items() if weight_map[n] == shard}
    safetensors_numpy.save_file(part, tmp_path / shard)
  index = tmp_path / f'{huggingface.WEIGHTS}.index.json'
  index.write_text(json.dumps({'weight_map': weight_map}))
  config, loaded = huggingface.load_huggingface(tmp_path)
  assert config == V11
  assert_equal_trees(loaded, params)
  twice = 'model-00001-of-00003.safetensors', 'model-00002-of-00003.safetensors'
  doubled = sorted(arrays)[0]
  part = {n: a for n, a in arrays.items() if weight_map[n] == twice[1]}
  safetensors_numpy.save_file(
    part | {doubled: arrays[doubled][:1]}, tmp_path / twice[1]
  )
  with pytest.raises(ValueError) as caught:
    huggingface.load_huggingface(tmp_path)
  whole, cut = list(arrays[doubled].shape), [1, *arrays[doubled].shape[1:]]
  assert (
    f'has {doubled} twice: in {twice[0]} {whole} and in {twice[1]} {cut}'
    in str(caught.value)
  )


@needs_safetensors
def test_the_weights_say_what_is_tied(tmp_path):
  """transformers 5 writes tie_word_embeddings=True for every T5."""
  params = make_params(V11)
  huggingface.save_huggingface(tmp_path, V11, params)
  edit_config(tmp_path, tie_word_embeddings=True)
  config, loaded = huggingface.load_huggingface(tmp_path)
  assert config == V11
  assert_equal_trees(loaded, params)
  # A head that rescales what it reads: the factor is in its kernel here.
  edit_config(tmp_path, scale_decoder_outputs=True)
  config, loaded = huggingface.load_huggingface(tmp_path)
  kernel = params['decoder']['logits_dense']['kernel']
  np.testing.assert_allclose(
    loaded['decoder']['logits_dense']['kernel'],
    kernel / np.sqrt(V11.emb_dim),
    rtol=1e-6,
  )
  # The embedding as the head, without T5 1.0's rescaling.
  edit_config(tmp_path, scale_decoder_outputs=False)
  edit(tmp_path, lambda arrays: arrays.pop('lm_head.weight'))
  config, loaded = huggingface.load_huggingface(tmp_path)
  assert config == V11
  np.testing.assert_array_equal(
    loaded['decoder']['logits_dense']['kernel'],
    params['token_embedder']['embedding'].T,
  )


@needs_safetensors
def test_a_tied_head_may_be_there_too(tmp_path):
  params = make_params(V10)
  huggingface.save_huggingface(tmp_path, V10, params)

  def add(arrays):
    arrays['lm_head.weight'] = arrays['shared.weight'].copy()

  edit(tmp_path, add)
  config, loaded = huggingface.load_huggingface(tmp_path)
  assert config == V10
  assert_equal_trees(loaded, params)


@needs_safetensors
def test_every_wrong_array_is_named(tmp_path):
  huggingface.save_huggingface(tmp_path, V11, make_params(V11))

  def spoil(arrays):
    arrays['encoder.block.9.extra.weight'] = np.zeros(3, np.float32)
    del arrays['decoder.final_layer_norm.weight']
    name = 'decoder.block.1.layer.1.EncDecAttention.k.weight'
    arrays[name] = arrays[name].T

  edit(tmp_path, spoil)
  with pytest.raises(ValueError) as caught:
    huggingface.load_huggingface(tmp_path)
  text = str(caught.value)
  assert str(tmp_path) in text
  assert 'missing: decoder.final_layer_norm.weight' in text
  assert 'unknown: encoder.block.9.extra.weight' in text
  assert 'EncDecAttention.k.weight is [20, 12], expected [12, 20]' in text


def other_alias(arrays):
  arrays['encoder.embed_tokens.weight'] = arrays['shared.weight'] + 1


def quantised(arrays):
  arrays['shared.weight'] = arrays['shared.weight'].astype(np.int8)


@needs_safetensors
@pytest.mark.parametrize(
  ('change', 'words'),
  [
    (other_alias, r'embed_tokens.weight \[61, 20\] and shared.weight'),
    (quantised, 'shared.weight is I8'),
  ],
)
def test_an_embedding_that_is_none(tmp_path, change, words):
  huggingface.save_huggingface(tmp_path, V11, make_params(V11))
  edit(tmp_path, change)
  with pytest.raises(ValueError, match=words):
    huggingface.load_huggingface(tmp_path)


@needs_safetensors
@pytest.mark.parametrize(
  ('values', 'words'),
  [
    ({'model_type': 'bart'}, "model_type is 'bart', .*'t5'"),
    ({'d_model': None}, 'd_model is None'),
    ({'layer_norm_epsilon': 1e-5}, 'layer_norm_epsilon is 1e-05.*has 1e-06'),
    ({'feed_forward_proj': 'gelu'}, "feed_forward_proj is 'gelu'"),
    ({'num_heads': 5}, r'SelfAttention.q.weight is \[12, 20\], .*\[20, 20\]'),
  ],
)
def test_config_of_another_model(tmp_path, values, words):
  huggingface.save_huggingface(tmp_path, V11, make_params(V11))
  edit_config(tmp_path, **values)
  with pytest.raises(ValueError, match=words):
    huggingface.load_huggingface(tmp_path)


@needs_safetensors
def test_broken_folders(tmp_path):
  with pytest.raises(ValueError, match='config.json'):
    huggingface.load_huggingface(tmp_path)
  (tmp_path / 'config.json').write_text('{')
  with pytest.raises(ValueError, match='config.json.* JSON'):
    huggingface.load_huggingface(tmp_path)
  huggingface.save_huggingface(tmp_path, V11, make_params(V11))
  path = tmp_path / huggingface.WEIGHTS
  whole = path.read_bytes()
  for size in (0, 5, len(whole) // 2, len(whole) - 1):
    path.write_bytes(whole[:size])
    with pytest.raises(ValueError, match='model.safetensors.* cut short'):
      huggingface.load_huggingface(tmp_path)
  path.rename(tmp_path / 'pytorch_model.bin')
  with pytest.raises(ValueError, match=r'pytorch_model\.bin'):
    huggingface.load_huggingface(tmp_path)


@needs_safetensors
def test_what_cannot_be_saved(tmp_path):
  params = make_params(V11)
  with pytest.raises(ValueError, match='missing: decoder/logits_dense/kernel'):
    missing = {**params, 'decoder': {**params['decoder']}}
    del missing['decoder']['logits_dense']
    huggingface.save_huggingface(tmp_path, V11, missing)
  odd = dataclasses.replace(V11, mlp_activations=('linear', 'gelu'))
  with pytest.raises(ValueError, match=r"\('linear', 'gelu'\)"):
    huggingface.save_huggingface(tmp_path, odd, make_params(odd))
  assert not list(tmp_path.iterdir())


def test_missing_package_is_named_with_its_command(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'safetensors', None)
  (tmp_path / 'config.json').write_text('{}')
  command = r"pip install 'specdec_jax\[huggingface\]'"
  with pytest.raises(ValueError, match=command):
    huggingface.load_huggingface(tmp_path)
  with pytest.raises(ValueError, match=command):
    huggingface.save_huggingface(tmp_path, V11, make_params(V11))
