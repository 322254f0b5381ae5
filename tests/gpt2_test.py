"""Hugging Face folders of GPT-2: what is read, broken and unusual ones.

Parity with transformers is in gpt2_parity_test, which needs torch.
"""

import dataclasses
import functools
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt_test import GPT2, UNTIED, shapes
from specdec_jax import checkpoints
from specdec_jax.checkpoints import gpt2_names, huggingface
from specdec_jax.models.gpt import GPT

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('safetensors') is None,
  reason="needs safetensors: pip install 'specdec_jax[huggingface]'",
)
DESCRIBED = {
  'model_type': 'gpt2',
  'vocab_size': 60,
  'n_embd': 24,
  'n_head': 3,
  'n_layer': 2,
  'n_inner': 40,
  'n_positions': 160,
  'resid_pdrop': 0.1,
}


def no_change(arrays):
  del arrays


def write_folder(folder, config=GPT2, change=no_change, **described):
  """A folder as transformers writes it; returns its arrays."""
  from safetensors import numpy as safetensors_numpy

  rng = np.random.default_rng(0)
  arrays = {
    f'transformer.{row.name}': rng.standard_normal(row.stored_shape).astype(
      np.float32
    )
    for row in gpt2_names.table(config).values()
  }
  if not config.logits_via_embedding:
    arrays['lm_head.weight'] = arrays.pop('transformer.lm_head.weight')
  change(arrays)
  safetensors_numpy.save_file(arrays, folder / 'model.safetensors')
  (folder / 'config.json').write_text(json.dumps(DESCRIBED | described))
  return arrays


@pytest.mark.parametrize('prefix', ['transformer.', ''])
@pytest.mark.parametrize('config', [GPT2, UNTIED], ids=['tied', 'untied'])
def test_folder(config, prefix, tmp_path):
  def change(arrays):
    for name in list(arrays):
      arrays[name.replace('transformer.', prefix)] = arrays.pop(name)
    # A mask, as older files have it.
    arrays[f'{prefix}h.1.attn.bias'] = np.ones((1, 1, 160, 160), np.float32)

  arrays = write_folder(tmp_path, config, change)
  found, params = huggingface.load_huggingface(tmp_path)
  assert dataclasses.replace(found, dropout_rate=0.0) == config
  checkpoints.check_params(params, shapes(config))
  layer = params['decoder']['layers_1']
  joined = arrays[f'{prefix}h.1.attn.c_attn.weight']
  bias = arrays[f'{prefix}h.1.attn.c_attn.bias']
  attention = layer['self_attention']
  close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
  close(attention['query']['kernel'], joined[:, :24] / np.sqrt(8))
  close(attention['query']['bias'], bias[:24] / np.sqrt(8))
  close(attention['key']['kernel'], joined[:, 24:48])
  close(attention['value']['bias'], bias[48:])
  close(layer['mlp']['wo']['kernel'], arrays[f'{prefix}h.1.mlp.c_proj.weight'])
  factor = np.sqrt(24) if config.logits_via_embedding else 1.0
  scale = params['decoder']['decoder_norm']['scale']
  close(scale, factor * arrays[f'{prefix}ln_f.weight'])


def test_folder_by_dtype_and_layout(tmp_path):
  write_folder(tmp_path)
  _, params = huggingface.load_huggingface(tmp_path)
  placed = huggingface.load_huggingface(
    tmp_path, jnp.bfloat16, jax.devices()[0]
  )[1]
  for have, want in zip(
    jax.tree.leaves(placed), jax.tree.leaves(params), strict=True
  ):
    assert isinstance(have, jax.Array) and have.dtype == jnp.bfloat16
    np.testing.assert_allclose(have.astype(np.float32), want, rtol=1e-2)


def test_folder_is_a_checkpoint(tmp_path):
  write_folder(tmp_path)
  params = checkpoints.load(tmp_path, GPT(GPT2))
  _, expected = huggingface.load_huggingface(tmp_path)
  jax.tree.map(np.testing.assert_array_equal, params, expected)
  # Another number of heads has the same shapes.
  other = GPT(dataclasses.replace(GPT2, num_heads=4, head_dim=6))
  with pytest.raises(ValueError, match=r'\(n_head\) is 3, expected 4'):
    checkpoints.load(tmp_path, other)


def drop(name):
  return lambda arrays: arrays.pop(name)


@pytest.mark.parametrize(
  ('change', 'described', 'words'),
  [
    (drop('transformer.h.0.ln_1.bias'), {}, 'missing: h.0.ln_1.bias'),
    (drop('transformer.wte.weight'), {}, 'missing: wte.weight'),
    (lambda a: a.update(extra=np.ones(2)), {}, 'unknown: extra'),
    (lambda a: a.update({'wte.weight': np.ones(2)}), {}, 'wte.weight twice'),
    (no_change, {'n_embd': 27}, r'ln_f.bias is \[24\], expected \[27\]'),
    (no_change, {'n_embd': 25}, 'a multiple of n_head = 3'),
    (no_change, {'n_layer': None}, 'n_layer is None'),
    (no_change, {'n_inner': 0}, 'n_inner is 0'),
    (no_change, {'model_type': 'gptj'}, "'gptj', expected .*'gpt2'"),
    (no_change, {'activation_function': 'gelu'}, "'gelu', .*gelu_new"),
    (no_change, {'scale_attn_weights': False}, 'scale_attn_weights is False'),
    (no_change, {'layer_norm_epsilon': 1e-6}, 'layer_norm_epsilon is 1e-06'),
  ],
)
def test_folders_that_are_none(change, described, words, tmp_path):
  write_folder(tmp_path, GPT2, change, **described)
  with pytest.raises(ValueError, match=words):
    huggingface.load_huggingface(tmp_path)
