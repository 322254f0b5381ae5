"""Parity with transformers in float32, through folders written by both."""

import json

import numpy as np
import pytest

import folders
import parity
from specdec_jax import partitioning
from specdec_jax.checkpoints import huggingface
from specdec_jax.models.families import network_of
from toy_families import make

pytestmark = parity.MARKS


def add(folder, name, array):
  """Rewrites model.safetensors with one more array."""
  from safetensors import numpy as safetensors_numpy

  arrays = safetensors_numpy.load_file(folder / huggingface.WEIGHTS)
  described = json.loads((folder / 'config.json').read_text())
  folders.write_arrays(folder, arrays | {name: array}, described)


# One of each family is quick.
SLOW = {
  *('UL2', 'M2M-100, not scaled', 'Llama 3.2', 'Qwen 2.5, windows'),
  *('T5Gemma, untied', 'T5Gemma 2, an even window', 'BART, untied', 'mBART'),
  *('PLBART', 'Pegasus, untied', 'Marian', 'Marian, untied'),
}
NAMES = [
  pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW))
  for name in parity.MODELS
]
# They say few tokens over and over.
REPEATS = {'M2M-100, not scaled', 'Marian', 'Marian, own vocabularies'}


@pytest.mark.parametrize('name', NAMES)
def test_what_transformers_saves_is_read(name):
  model, config, params = parity.loaded(name)
  placed = partitioning.place(params)
  parity.check_logits(model, config, placed)
  network = network_of(config)
  rows = parity.rows_of(network)
  theirs = parity.their_greedy(model, rows, network)
  assert parity.greedy(network, placed, rows) == theirs
  assert parity.greedy(network, placed, rows[2:3]) == theirs[2:3]
  if name not in REPEATS:
    parity.check_rows(theirs)


# An array of each kind: the negative control, in which one of ours is changed.
CHANGED = {
  'T5 1.1': [
    'encoder/relpos_bias/rel_embedding',
    'decoder/layers_0/encoder_decoder_attention/key/kernel',
    'decoder/layers_2/mlp/wi_1/kernel',
  ],
  'GPT-2': [
    'decoder/layers_1/self_attention/query/bias',
    'decoder/decoder_norm/scale',
  ],
  'NLLB': ['decoder/layers_1/encoder_decoder_attention/query/bias'],
  'Gemma 3': ['decoder/layers_0/self_attention/key_norm/scale'],
  'T5Gemma 2': ['encoder/encoder_norm/scale', 'image_end_embedding'],
}


@pytest.mark.parametrize('name', CHANGED)
def test_an_array_that_differs_is_seen(name):
  for array in CHANGED[name]:
    model, config, params = parity.loaded(name)
    *path, last = array.split('/')
    module = params
    for part in path:
      module = module[part]
    noise = np.random.default_rng(0).standard_normal(module[last].shape)
    module[last] = (module[last] * (1 + 0.2 * noise)).astype(np.float32)
    most = 97 if array == 'image_end_embedding' else 90
    with pytest.raises(AssertionError, match='Logits differ'):
      parity.check_logits(model, config, params, most=most)


def test_padding_that_is_read_is_seen():
  """The negative control: what 0 for padding would give."""
  with pytest.raises(AssertionError, match='Logits differ'):
    parity.check_logits(*parity.loaded('NLLB'), pad_id=0)


@pytest.mark.parametrize('name', ['T5 1.0', 'T5 1.1', 'UMT5'])
def test_transformers_reads_what_is_saved(name, tmp_path):
  model, config, _ = parity.loaded(name)
  params = make(config)[1]
  huggingface.save_huggingface(tmp_path, config, params)
  loaded = type(model).from_pretrained(tmp_path)
  parity.check_logits(loaded.eval(), config, params)
  assert loaded.generation_config.decoder_start_token_id == 0


# What config.json is made to say, and whether a head of its own is put there.
DESCRIBED = {
  'tied': ('T5 1.0', {'tie_word_embeddings': True}, True),
  'not tied': ('T5 1.0', {'tie_word_embeddings': False}, True),
  'mT5 never scales': ('mT5', {'scale_decoder_outputs': True}, False),
  'dense_act_fn': ('T5 1.0', {'dense_act_fn': 'silu'}, False),
  'gated': (
    'T5 1.1',
    {'dense_act_fn': 'relu', 'feed_forward_proj': 'relu', 'is_gated_act': True},
    False,
  ),
}


@pytest.mark.parametrize('case', DESCRIBED)
def test_what_a_t5s_fields_decide(case, tmp_path):
  name, fields, has_head = DESCRIBED[case]
  model = parity.folder_of(name)[0]
  model.save_pretrained(tmp_path)
  described = json.loads((tmp_path / 'config.json').read_text()) | fields
  if 'tie_word_embeddings' in fields:
    described.pop('scale_decoder_outputs', None)
  described = {name: v for name, v in described.items() if v is not None}
  (tmp_path / 'config.json').write_text(json.dumps(described))
  if has_head:
    rng = np.random.default_rng(0)
    head = rng.standard_normal(model.shared.weight.shape).astype(np.float32)
    add(tmp_path, 'lm_head.weight', head)
  config, params = folders.read(tmp_path)
  assert config.logits_via_embedding == (case == 'dense_act_fn')
  loaded = type(model).from_pretrained(tmp_path).eval()
  parity.check_logits(loaded, config, params)


@pytest.mark.parametrize('name', ['Llama 3.2', 'Gemma 2', 'T5Gemma'])
def test_a_head_of_its_own_beside_a_tied_config(name, tmp_path):
  """transformers 5 does not tie what differs."""
  model = parity.folder_of(name)[0]
  model.save_pretrained(tmp_path)
  head = 'lm_head.out_proj' if name == 'T5Gemma' else 'lm_head'
  shape = model.get_submodule(head).weight.shape
  own = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
  own /= 5  # a softcap of large logits loses digits
  add(tmp_path, f'{head}.weight', own)
  model = type(model).from_pretrained(tmp_path, attn_implementation='eager')
  config, params = folders.read(tmp_path)
  parity.check_logits(model.eval(), config, params)


def test_the_text_model_of_a_folder_with_images(tmp_path):
  import torch
  import transformers

  text = parity.folder_of('Gemma 3')[0].config.to_dict()
  described = transformers.Gemma3Config(
    text_config=text | {'vocab_size': 97},
    vision_config=parity.IMAGES,
    mm_tokens_per_image=4,
    image_token_index=96,
    boi_token_index=94,
    eoi_token_index=95,
  )
  torch.manual_seed(0)
  model = transformers.Gemma3ForConditionalGeneration._from_config(
    described, attn_implementation='eager'
  )
  model.eval().save_pretrained(tmp_path)
  config, params = folders.read(tmp_path)
  assert config.window == 9 and config.num_layers == 5
  parity.check_logits(model, config, params)
