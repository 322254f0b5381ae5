"""Folders of T5Gemma 1 and 2: what is read, what is refused."""

import dataclasses
import importlib.util
import json
import shutil

import jax
import numpy as np
import pytest

import causal_folder_test
import specdec_jax
from specdec_jax import checkpoints
from specdec_jax.checkpoints import huggingface, t5gemma_names
from specdec_jax.checkpoints.convert import ConvertConfig, convert
from specdec_jax.models.base import param_shapes
from specdec_jax.models.t5gemma import T5Gemma
from specdec_jax.text.chat import ChatTemplate
from t5gemma_test import ONE, TWO

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('safetensors') is None,
  reason="needs safetensors: pip install 'specdec_jax[huggingface]'",
)
_DECODER = {
  'attention_bias': False,
  'attn_logit_softcapping': 5.0,
  'cross_attention_hidden_size': 20,
  'dropout_rate': 0.0,
  'eos_token_id': [1, 6],
  'final_logit_softcapping': 3.0,
  'head_dim': 10,
  'hidden_activation': 'gelu_pytorch_tanh',
  'hidden_size': 24,
  'intermediate_size': 40,
  'is_decoder': True,
  'model_type': 't5_gemma_module',
  'num_attention_heads': 6,
  'num_hidden_layers': 3,
  'num_key_value_heads': 2,
  'query_pre_attn_scalar': 7,
  'rms_norm_eps': 1e-5,
  'sliding_window': 9,
  'vocab_size': 60,
}
_ENCODER = _DECODER | {
  'cross_attention_hidden_size': None,
  'final_logit_softcapping': None,
  'hidden_size': 20,
  'is_decoder': False,
  'num_attention_heads': 4,
  'num_hidden_layers': 2,
}
_ROPES = {
  'full_attention': {'factor': 8.0, 'rope_theta': 1e6, 'rope_type': 'linear'},
  'sliding_attention': {'rope_theta': 1e4, 'rope_type': 'default'},
}
_TEXT = _DECODER | {
  '_sliding_window_pattern': 6,
  'attn_logit_softcapping': None,
  'cross_attention_hidden_size': None,
  'final_logit_softcapping': None,
  'layer_types': [*['sliding_attention'] * 2, 'full_attention'],
  'model_type': 't5gemma2_decoder',
  'rope_parameters': _ROPES,
  'use_bidirectional_attention': False,
}
# Name: config.json as the folders of the hub have it, and the configuration.
DESCRIBED = {
  't5gemma': (
    {
      'architectures': ['T5GemmaForConditionalGeneration'],
      'classifier_dropout_rate': 0.0,
      'decoder': _DECODER,
      'dropout_rate': 0.0,
      'encoder': _ENCODER,
      'initializer_range': 0.02,
      'is_encoder_decoder': True,
      'model_type': 't5gemma',
      'torch_dtype': 'float32',
      'vocab_size': 60,
    },
    ONE,
  ),
  't5gemma2': (
    {
      'bos_token_id': 2,
      'decoder': _TEXT,
      'dtype': 'float32',
      'encoder': {
        'boi_token_index': 5,
        'dropout_rate': 0.0,
        'eoi_token_index': 7,
        'image_token_index': 8,
        'mm_tokens_per_image': 256,
        'model_type': 't5gemma2_encoder',
        'text_config': _TEXT
        | {
          'add_cross_attention': False,
          'chunk_size_feed_forward': 0,
          'id2label': {'0': 'LABEL_0'},
          'model_type': 't5gemma2_text',
          'problem_type': None,
        },
        'vision_config': {'model_type': 'siglip_vision_model'},
        'vocab_size': 60,
      },
      'eoi_token_index': 7,
      'eos_token_id': 1,
      'image_token_index': 8,
      'is_encoder_decoder': True,
      'model_type': 't5gemma2',
    },
    TWO,
  ),
}
kinds = pytest.mark.parametrize('kind', DESCRIBED)
says_images = pytest.mark.filterwarnings('ignore:.*arrays are for images')


def no_change(arrays):
  del arrays


def write_folder(folder, kind, change=no_change, config=None, **described):
  """A folder as transformers writes it; returns its arrays."""
  from safetensors import numpy as safetensors_numpy

  said, own = DESCRIBED[kind]
  rng = np.random.default_rng(0)
  arrays = {}
  for row in t5gemma_names.table(config or own).values():
    prefix = '' if row.name.startswith('lm_head') else 'model.'
    values = rng.standard_normal(row.stored_shape).astype(np.float32)
    arrays[prefix + row.name] = values
  if kind == 't5gemma2':
    arrays['model.encoder.vision_tower.post_layernorm.bias'] = np.ones(3)
    name = 'model.encoder.multi_modal_projector.mm_soft_emb_norm.weight'
    arrays[name] = np.ones(3)
  change(arrays)
  folder.mkdir(exist_ok=True)
  safetensors_numpy.save_file(arrays, folder / 'model.safetensors')
  (folder / 'config.json').write_text(json.dumps(said | described))
  return arrays


@kinds
@says_images
def test_folder(kind, tmp_path):
  arrays = write_folder(tmp_path, kind)
  found, params = huggingface.load_huggingface(tmp_path)
  config = DESCRIBED[kind][1]
  assert found == config
  checkpoints.check_params(params, param_shapes(T5Gemma(config)))
  same = np.testing.assert_array_equal
  for stack in ('encoder', 'decoder'):
    layer, theirs = params[stack]['layers_1'], f'model.{stack}.layers.1'
    kernel = arrays[f'{theirs}.self_attn.k_proj.weight']
    same(layer['self_attention']['key']['kernel'], kernel.T)
    gate = arrays[f'{theirs}.mlp.gate_proj.weight']
    same(layer['mlp']['wi_0']['kernel'], gate.T)
    for ours, name in {
      'pre_self_attention': 'pre_self_attn',
      'post_self_attention': 'post_self_attn',
      'pre_mlp': 'pre_feedforward',
      'post_mlp': 'post_feedforward',
    }.items():
      scale = layer[f'{ours}_layer_norm']['scale']
      same(scale, arrays[f'{theirs}.{name}_layernorm.weight'])
  loaded = specdec_jax.load(tmp_path)
  assert loaded.network == T5Gemma(config)
  assert loaded.stop_ids == ((1, 6) if kind == 't5gemma' else (1,))
  assert loaded.bos_id == 2


def test_that_images_are_skipped_is_said(tmp_path):
  write_folder(tmp_path, 't5gemma2')
  with pytest.warns(UserWarning, match='2 arrays are for images .* text alone'):
    huggingface.load_huggingface(tmp_path)


@says_images
def test_names_of_newer_files_and_arrays_that_are_there_twice(tmp_path):
  """transformers 5 says `text_model`, and a file may have both tables."""

  def change(arrays):
    for name in list(arrays):
      if 'encoder.layers' in name or 'encoder.norm' in name:
        new = name.replace('encoder.', 'encoder.text_model.', 1)
        arrays[new] = arrays.pop(name)
    table = arrays.pop('model.encoder.embed_tokens.weight')
    arrays['model.encoder.text_model.embed_tokens.weight'] = table
    arrays['model.decoder.embed_tokens.weight'] = table
    arrays['lm_head.out_proj.weight'] = table

  arrays = write_folder(tmp_path, 't5gemma2', change)
  config, params = huggingface.load_huggingface(tmp_path)
  assert config == TWO
  np.testing.assert_array_equal(
    params['token_embedder']['embedding'], arrays['lm_head.out_proj.weight']
  )


def test_what_the_folder_says_of_ids(tmp_path):
  write_folder(tmp_path, 't5gemma')
  ids = {'eos_token_id': [1, 3], 'bos_token_id': 4}
  (tmp_path / 'generation_config.json').write_text(json.dumps(ids))
  model = specdec_jax.load(tmp_path)
  assert model.network.start_id == 4 and model.stop_ids == (1, 3)
  ids['decoder_start_token_id'] = 5
  (tmp_path / 'generation_config.json').write_text(json.dumps(ids))
  assert specdec_jax.load(tmp_path).network.start_id == 5
  # What a run expects is compared with that.
  with pytest.raises(ValueError, match='start_id is 5, expected 2'):
    checkpoints.load(tmp_path, T5Gemma(ONE))


def test_sizes_that_transformers_leaves_out(tmp_path):
  """2B-2B has its defaults, which some of its versions do not write."""
  del tmp_path
  stack = {'model_type': 't5_gemma_module'}
  found = t5gemma_names.read_config(
    {'model_type': 't5gemma', 'encoder': stack, 'decoder': stack}, 'config.json'
  )
  assert found.encoder == found.decoder
  one = found.decoder
  assert (one.vocab_size, one.emb_dim, one.num_layers) == (256_000, 2304, 26)
  assert (one.num_heads, one.num_kv_heads, one.window) == (8, 4, 4096)
  assert one.layer_kinds == ('local', 'global')


@says_images
def test_another_network_is_refused(tmp_path):
  write_folder(tmp_path, 't5gemma2')
  stack = dataclasses.replace(TWO.decoder, mlp_dim=48)
  other = T5Gemma(dataclasses.replace(TWO, decoder=stack))
  words = r'decoder.mlp_dim \(intermediate_size\) is 40, expected 48'
  with pytest.raises(ValueError, match=words):
    checkpoints.load(tmp_path, other)
  # What it computes in is no part of a folder.
  half = T5Gemma(dataclasses.replace(TWO, dtype='bfloat16'))
  checkpoints.load(tmp_path, half)


@kinds
@says_images
def test_it_is_written_for_t5x_and_not_for_transformers(kind, tmp_path):
  write_folder(tmp_path / 'a', kind)
  written = tmp_path / 'b.msgpack'
  given = {'checkpoint_path': str(tmp_path / 'a')}
  convert(ConvertConfig(**given, output=str(written), format='t5x'))
  want = checkpoints.load(tmp_path / 'a')
  have = checkpoints.load(written, T5Gemma(DESCRIBED[kind][1]))
  jax.tree.map(np.testing.assert_array_equal, have, want)
  # Its texts begin as those of the folder do.
  again = specdec_jax.load(written, T5Gemma(DESCRIBED[kind][1]))
  assert again.bos_id == specdec_jax.load(tmp_path / 'a').bos_id == 2
  with pytest.raises(ValueError, match='is not a T5; only a T5 is written'):
    convert(
      ConvertConfig(**given, output=str(tmp_path / 'c'), format='safetensors')
    )


def drop(name):
  return lambda arrays: arrays.pop(name)


def add(name, *shape):
  return lambda arrays: arrays.update({name: np.ones(shape, np.float32)})


def within(kind, part, **fields):
  """What `described` is with fields of a part changed."""
  said = DESCRIBED[kind][0]
  if part == 'text':
    text = said['encoder']['text_config'] | fields
    return {'encoder': said['encoder'] | {'text_config': text}}
  return {part: said[part] | fields}


ONES, TWOS = DESCRIBED


@says_images
@pytest.mark.parametrize(
  ('kind', 'change', 'described', 'words'),
  [
    (ONES, drop('model.encoder.norm.weight'), {}, 'missing: encoder.norm.we'),
    (
      ONES,
      drop('model.decoder.layers.0.cross_attn.q_proj.weight'),
      {},
      'missing: decoder.layers.0.cross_attn.q_proj.weight',
    ),
    (ONES, add('model.extra', 2), {}, 'unknown: extra'),
    (ONES, add('decoder.norm.weight', 24), {}, 'decoder.norm.weight twice'),
    (
      ONES,
      add('lm_head.out_proj.weight', 60, 24),
      {},
      'lm_head.out_proj.weight, which is not model.decoder.embed_tokens',
    ),
    (
      TWOS,
      add('model.decoder.embed_tokens.weight', 60, 24),
      {},
      'which is not model.encoder.embed_tokens.weight',
    ),
    (TWOS, no_change, {'tie_word_embeddings': False}, 'one table of embedd'),
    (ONES, no_change, {'tie_word_embeddings': False}, 'missing: lm_head.out'),
    (ONES, no_change, {'decoder': None}, 'decoder is None, expected an obj'),
    (ONES, no_change, {'adapter': 1}, 'adapter = 1: the network'),
    (
      ONES,
      no_change,
      within(ONES, 'decoder', quantised=2),
      'json: decoder: quantised = 2',
    ),
    (
      ONES,
      no_change,
      within(ONES, 'encoder', num_hidden_layers=0),
      'json: encoder: num_hidden_layers is 0',
    ),
    (
      ONES,
      no_change,
      within(ONES, 'decoder', cross_attention_hidden_size=24),
      'cross_attention_hidden_size is 24; the encoder is 20 wide',
    ),
    (
      ONES,
      no_change,
      within(ONES, 'encoder', add_cross_attention=True),
      'add_cross_attention is True',
    ),
    (
      ONES,
      no_change,
      within(ONES, 'decoder', vocab_size=61),
      'one vocab_size of both stacks, got 60',
    ),
    (
      TWOS,
      no_change,
      within(TWOS, 'text', attn_logit_softcapping=50.0),
      'attn_logit_softcapping is 50.0; the network here has None',
    ),
    (
      TWOS,
      no_change,
      within(TWOS, 'text', hidden_size=20),
      'one emb_dim of both stacks',
    ),
    (TWOS, no_change, within(TWOS, 'encoder', pool=1), 'encoder: pool = 1'),
    (
      TWOS,
      no_change,
      within(TWOS, 'encoder', text_config=None),
      'text_config is None',
    ),
    (
      TWOS,
      no_change,
      within(TWOS, 'decoder', use_bidirectional_attention=True),
      'use_bidirectional_attention is True',
    ),
  ],
)
def test_folders_that_are_none(kind, change, described, words, tmp_path):
  write_folder(tmp_path, kind, change, **described)
  with pytest.raises(ValueError, match=words):
    huggingface.load_huggingface(tmp_path)


@pytest.mark.skipif(
  importlib.util.find_spec('tokenizers') is None, reason='needs tokenizers'
)
def test_a_folder_with_its_vocabulary(tmp_path):
  """Texts begin as tokenizer.json says, and have no end of sequence."""
  files = causal_folder_test.vocabulary(tmp_path, '<bos>', eos_token='<turn>')
  folder = tmp_path / 'model'
  stacks = {
    name: dataclasses.replace(getattr(ONE, name), vocab_size=300)
    for name in ('encoder', 'decoder')
  }
  config = dataclasses.replace(ONE, **stacks)
  described = {
    name: DESCRIBED['t5gemma'][0][name] | {'vocab_size': 300} for name in stacks
  }
  ids = {'bos_token_id': 266, 'eos_token_id': [267, 3]}
  write_folder(folder, 't5gemma', config=config, **described, **ids)
  shutil.copytree(files, folder, dirs_exist_ok=True)
  model = specdec_jax.load(folder)
  assert model.bos_id == model.network.start_id == 266
  engine = specdec_jax.Engine(model, max_input_len=16, max_decode_len=4)
  assert engine.stop_ids == (267, 3)
  own = engine.tokenizer.encode('the red')
  request = engine.request(['the red', [5, 6]])
  assert request.inputs[0, : len(own) + 2].tolist() == [266, *own, 0]
  assert request.inputs[1, :4].tolist() == [266, 5, 6, 0]
  # A chat's template writes the first id itself.
  pytest.importorskip('jinja2')
  template = ChatTemplate(
    '{{ bos_token }}{{ messages[0].content }}',
    engine.tokenizer,
    {'bos_token': '<bos>'},
  )
  said = [{'role': 'user', 'content': 'the red'}]
  ids = template.ids(said, engine.bos_id)
  assert engine.input_ids(ids) == [266, *own]
  # Nothing at all is a text as well.
  found = engine.generate(['', 'the red'])
  assert all(one.finish_reason in ('length', 'stop') for one in found)
