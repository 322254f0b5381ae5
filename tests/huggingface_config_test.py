"""What config.json decides: published shapes, special ids, differences."""

import dataclasses
import importlib.util
import json

import jax
import numpy as np
import pytest

from huggingface_test import V11, edit_config, make_params
from specdec_jax.checkpoints import huggingface
from specdec_jax.checkpoints import huggingface_names as names
from specdec_jax.models.t5 import T5Config

needs_safetensors = pytest.mark.skipif(
  importlib.util.find_spec('safetensors') is None,
  reason="needs safetensors: pip install 'specdec_jax[huggingface]'",
)


def described(emb, heads, head_dim, mlp, layers, vocab=32128, **other):
  """config.json as it is published, but for what decides nothing."""
  return {
    'd_ff': mlp,
    'd_kv': head_dim,
    'd_model': emb,
    'decoder_start_token_id': 0,
    'dropout_rate': 0.1,
    'eos_token_id': 1,
    'feed_forward_proj': 'gated-gelu',
    'initializer_factor': 1.0,
    'is_encoder_decoder': True,
    'layer_norm_epsilon': 1e-06,
    'model_type': 't5',
    'num_decoder_layers': layers,
    'num_heads': heads,
    'num_layers': layers,
    'pad_token_id': 0,
    'relative_attention_max_distance': 128,
    'relative_attention_num_buckets': 32,
    'tie_word_embeddings': False,
    'vocab_size': vocab,
    **other,
  }


def t5_small():
  """One of the first: no word on the activation, distances or decoder."""
  config = described(512, 8, 64, 2048, 6)
  for silent in (
    'feed_forward_proj',
    'num_decoder_layers',
    'relative_attention_max_distance',
    'tie_word_embeddings',
  ):
    del config[silent]
  return config | {'output_past': True, 'n_positions': 512}


PUBLISHED = {
  'T5 1.0 small': (
    t5_small(),
    T5Config(
      32128, 512, 8, 6, 6, 64, 2048, ('relu',), 0.1, logits_via_embedding=True
    ),
  ),
  'Flan-T5 XL': (
    described(2048, 32, 64, 5120, 24),
    T5Config(32128, 2048, 32, 24, 24, 64, 5120, dropout_rate=0.1),
  ),
  'mT5 small': (
    described(512, 6, 64, 1024, 8, 250112, model_type='mt5'),
    T5Config(250112, 512, 6, 8, 8, 64, 1024, dropout_rate=0.1),
  ),
  'ByT5 small': (
    described(1472, 6, 64, 3584, 12, 384, num_decoder_layers=4),
    T5Config(384, 1472, 6, 12, 4, 64, 3584, dropout_rate=0.1),
  ),
  'UL2 20B': (
    described(4096, 16, 256, 16384, 32, feed_forward_proj='gated-silu'),
    T5Config(
      32128, 4096, 16, 32, 32, 256, 16384, ('silu', 'linear'), dropout_rate=0.1
    ),
  ),
  'MADLAD-400 3B': (
    described(1024, 16, 128, 8192, 32, 256000, eos_token_id=2, pad_token_id=1),
    T5Config(256000, 1024, 16, 32, 32, 128, 8192, dropout_rate=0.1),
  ),
}


@pytest.mark.parametrize('name', PUBLISHED)
def test_published_shapes(name):
  config, expected = PUBLISHED[name]
  tied = expected.logits_via_embedding
  assert names.read_config(config, tied, 'config.json') == expected
  ids = names.read_ids(config, 'folder')
  madlad = name.startswith('MADLAD')
  assert ids == ((0, (2,), 1) if madlad else (0, (1,), 0))


def test_arrays_of_a_published_shape():
  """Names and shapes as they are in the published files."""
  table = names.table(PUBLISHED['ByT5 small'][1])
  shapes = {row.name: row.stored_shape for row in table.values()}
  # 9 arrays a layer of the encoder, 14 of the decoder; embedding, head, and
  # a norm and a table of positions each.
  assert len(shapes) == 12 * 9 + 4 * 14 + 6
  decoder = 'decoder.block.3.layer'
  assert shapes['encoder.block.11.layer.0.SelfAttention.q.weight'] == (
    384,
    1472,
  )
  assert shapes[f'{decoder}.1.EncDecAttention.o.weight'] == (1472, 384)
  assert shapes[f'{decoder}.2.DenseReluDense.wi_0.weight'] == (3584, 1472)
  assert shapes[f'{decoder}.2.layer_norm.weight'] == (1472,)
  assert shapes['lm_head.weight'] == shapes['shared.weight'] == (384, 1472)
  name = 'decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight'
  assert shapes[name] == (32, 6)


@needs_safetensors
def test_an_mt5_folder_is_read_without_its_word_for_the_activation(tmp_path):
  huggingface.save_huggingface(tmp_path, V11, make_params(V11))
  edit_config(tmp_path, model_type='mt5', feed_forward_proj=None)
  config, _ = huggingface.load_huggingface(tmp_path)
  assert config == V11


@pytest.mark.parametrize(
  ('values', 'words'),
  [
    (
      {'model_type': 'umt5'},
      r"model_type is 'umt5', expected one of \['gemma2', .* known: mt5",
    ),
    ({'model_type': None}, 'model_type is None, expected one of'),
    (
      {'feed_forward_proj': 'gated-gleu'},
      r"is 'gated-gleu', expected one of \['gated-gelu', 'gated-relu',"
      r'.*\]. Nearest known: gated-gelu',
    ),
    (
      {'relative_attention_num_buckets': 64},
      'relative_attention_num_buckets is 64; .* 32',
    ),
    (
      {'relative_attention_max_distance': 256},
      'relative_attention_max_distance is 256; .* 128',
    ),
    ({'num_layers': '6'}, "num_layers is '6', expected a whole number"),
    ({'d_kv': 0}, 'd_kv is 0, expected .* at least 1'),
  ],
)
def test_what_is_not_supported_is_named(values, words):
  config = PUBLISHED['Flan-T5 XL'][0] | values
  with pytest.raises(ValueError, match=words):
    huggingface.read_config(config, 'config.json')


def test_special_ids_are_read_from_both_files(tmp_path):
  write = {'eos_token_id': 1, 'pad_token_id': 0}
  (tmp_path / 'config.json').write_text(json.dumps(write))
  assert huggingface.special_ids(tmp_path) == (0, (1,), 0)
  write = {'eos_token_id': [1, 7], 'pad_token_id': None}
  (tmp_path / 'generation_config.json').write_text(json.dumps(write))
  ids = huggingface.special_ids(tmp_path)
  assert ids == names.SpecialIds(decoder_start=0, eos=(1, 7), pad=0)


@needs_safetensors
def test_special_ids_that_the_decoder_cannot_follow(tmp_path):
  huggingface.save_huggingface(tmp_path, V11, make_params(V11))
  generation = tmp_path / 'generation_config.json'
  generation.write_text('{"decoder_start_token_id": 2}')
  with pytest.raises(ValueError, match='decoder_start_token_id is 2'):
    huggingface.load_huggingface(tmp_path)
  generation.write_text('{"eos_token_id": "</s>"}')
  with pytest.raises(ValueError, match="eos_token_id is '</s>'"):
    huggingface.load_huggingface(tmp_path)
  generation.unlink()
  edit_config(tmp_path, eos_token_id=2, pad_token_id=1)
  assert huggingface.special_ids(tmp_path) == (0, (2,), 1)
  huggingface.load_huggingface(tmp_path)


def test_every_field_that_differs_is_named():
  other = dataclasses.replace(
    V11,
    emb_dim=24,
    num_decoder_layers=5,
    mlp_activations=('relu',),
    dropout_rate=0.5,
    dtype='bfloat16',
  )
  with pytest.raises(ValueError) as caught:
    names.check_config(V11, other, '/some/folder')
  text = str(caught.value)
  assert text.startswith('/some/folder is not a checkpoint of this')
  assert 'emb_dim (d_model) is 20, expected 24;' in text
  assert 'num_decoder_layers is 2, expected 5;' in text
  assert "mlp_activations is ('gelu', 'linear'), expected ('relu',)." in text
  for same in ('vocab_size', 'dropout_rate', 'dtype', 'logits_via_embedding'):
    assert same not in text
  names.check_config(V11, dataclasses.replace(V11, dtype='bfloat16'), 'here')


@needs_safetensors
def test_several_files(tmp_path):
  """Shards of a save, and one save over another."""
  params = make_params(V11)
  total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  folder = tmp_path / 'sharded'
  huggingface.save_huggingface(folder, V11, params, max_shard_bytes=9000)
  shards = sorted(folder.glob('model-*.safetensors'))
  assert len(shards) > 2 and not (folder / 'model.safetensors').exists()
  assert max(shard.stat().st_size for shard in shards) < 9000 + 2000
  index = json.loads((folder / 'model.safetensors.index.json').read_text())
  assert index['metadata']['total_size'] == total
  assert set(index['weight_map']) == {
    row.name for row in names.table(V11).values()
  }
  assert set(index['weight_map'].values()) == {s.name for s in shards}
  assert {s.name for s in shards} == {
    f'model-{i:05}-of-{len(shards):05}.safetensors'
    for i in range(1, len(shards) + 1)
  }
  config, loaded = huggingface.load_huggingface(folder)
  assert config == V11
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  changed = jax.tree.map(lambda leaf: leaf + 1, params)
  huggingface.save_huggingface(folder, V11, changed)
  assert not list(folder.glob('model-*')) and not list(folder.glob('*.index*'))
  _, loaded = huggingface.load_huggingface(folder)
  jax.tree.map(np.testing.assert_array_equal, loaded, changed)
  huggingface.save_huggingface(folder, V11, params, max_shard_bytes=1)
  assert len(list(folder.glob('model-*'))) == len(names.table(V11))
  _, loaded = huggingface.load_huggingface(folder)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  with pytest.raises(ValueError, match='max_shard_bytes must be at least 1'):
    huggingface.save_huggingface(folder, V11, params, max_shard_bytes=0)


@needs_safetensors
def test_the_configuration_is_written_last(tmp_path, monkeypatch):
  written = []

  def recorded(function):
    def record(path, *args, **options):
      assert not (tmp_path / 'config.json').exists()
      written.append(path.name)
      function(path, *args, **options)

    return record

  for owner, name in (
    (huggingface, '_write_weights'),
    (huggingface.files, 'write_json'),
  ):
    monkeypatch.setattr(owner, name, recorded(getattr(owner, name)))
  params = make_params(V11)
  huggingface.save_huggingface(tmp_path, V11, params, max_shard_bytes=9000)
  assert written[0].startswith('model-00001') and len(written) > 4
  assert written[-3:] == [
    'model.safetensors.index.json',
    'generation_config.json',
    'config.json',
  ]


@needs_safetensors
def test_a_save_that_is_cut_short_leaves_no_configuration(
  tmp_path, monkeypatch
):
  params = make_params(V11)
  huggingface.save_huggingface(tmp_path, V11, params)
  write = huggingface._write_weights
  written = []

  def full_disk(path, *rest):
    if written:
      raise OSError(28, 'No space left on device')
    written.append(path)
    write(path, *rest)

  monkeypatch.setattr(huggingface, '_write_weights', full_disk)
  with pytest.raises(OSError, match='No space left'):
    huggingface.save_huggingface(tmp_path, V11, params, max_shard_bytes=9000)
  assert not (tmp_path / 'config.json').exists()
  with pytest.raises(ValueError, match='config.json.* cannot be read'):
    huggingface.load_huggingface(tmp_path)


@needs_safetensors
def test_a_missing_shard_is_named(tmp_path):
  huggingface.save_huggingface(
    tmp_path, V11, make_params(V11), max_shard_bytes=9000
  )
  shard = sorted(tmp_path.glob('model-*.safetensors'))[1]
  shard.unlink()
  with pytest.raises(ValueError, match=f'{shard.name}.* is missing'):
    huggingface.load_huggingface(tmp_path)
