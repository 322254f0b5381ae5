"""Parity with transformers' T5 in float32, through folders written by both."""

import dataclasses
import functools
import json
import operator

import jax
import pytest

import huggingface_parity as parity
from huggingface_test import make_params
from specdec_jax.checkpoints import huggingface
from specdec_jax.models.t5 import T5Config

pytestmark = parity.MARKS

# emb, heads, head_dim, mlp, layers of encoder and decoder; H * D is not M.
V11 = T5Config(
  vocab_size=97,
  emb_dim=20,
  num_heads=3,
  head_dim=4,
  mlp_dim=28,
  num_encoder_layers=2,
  num_decoder_layers=3,
)
CONFIGS = {
  '1.0 tied': dataclasses.replace(
    V11,
    num_heads=7,
    num_encoder_layers=1,
    num_decoder_layers=2,
    mlp_activations=('relu',),
    logits_via_embedding=True,
  ),
  '1.1 gated': V11,
  '1.1 one head': dataclasses.replace(V11, num_heads=1, head_dim=6),
  'mT5 vocabulary': dataclasses.replace(
    V11, vocab_size=250112, emb_dim=12, num_heads=6, num_encoder_layers=3
  ),
  'UL2': dataclasses.replace(
    V11,
    emb_dim=16,
    num_heads=16,
    head_dim=5,
    mlp_activations=('silu', 'linear'),
  ),
  'MADLAD-400': dataclasses.replace(
    V11, vocab_size=512, emb_dim=16, num_heads=8, head_dim=8, mlp_dim=64
  ),
}
# What transformers calls the activations here.
WORDS = {
  ('relu',): 'relu',
  ('gelu', 'linear'): 'gated-gelu',
  ('silu', 'linear'): 'gated-silu',
}


def their_model(name):
  """A randomly initialised model of transformers; its norms are no ones."""
  import torch
  import transformers

  config = CONFIGS[name]
  tied = config.logits_via_embedding
  kind = 'MT5' if name.startswith('mT5') else 'T5'
  described = getattr(transformers, f'{kind}Config')(
    vocab_size=config.vocab_size,
    d_model=config.emb_dim,
    d_kv=config.head_dim,
    d_ff=config.mlp_dim,
    num_heads=config.num_heads,
    num_layers=config.num_encoder_layers,
    num_decoder_layers=config.num_decoder_layers,
    feed_forward_proj=WORDS[config.mlp_activations],
    tie_word_embeddings=tied,
    decoder_start_token_id=0,
  )
  torch.manual_seed(0)
  model = getattr(transformers, f'{kind}ForConditionalGeneration')(described)
  if not tied:
    # Version 5 ties every new T5; published ones of 1.1 are not tied.
    shape = config.vocab_size, config.emb_dim
    model.lm_head.weight = torch.nn.Parameter(torch.randn(shape))
  with torch.no_grad():
    for parameter in model.parameters():
      parameter += 0.1 * torch.randn(parameter.shape)
    if tied:
      # Or each token's own embedding would choose it again and again.
      model.shared.weight *= 0.1
  return model


def slow(*names):
  return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize(
  'name',
  [
    '1.0 tied',
    '1.1 gated',
    'mT5 vocabulary',
    *slow('1.1 one head', 'UL2', 'MADLAD-400'),
  ],
)
def test_what_transformers_saves_is_read(name, tmp_path):
  model = their_model(name)
  model.save_pretrained(tmp_path)
  described = json.loads((tmp_path / 'config.json').read_text())
  assert described['model_type'] == ('mt5' if name.startswith('mT5') else 't5')
  config, params = huggingface.load_huggingface(tmp_path)
  assert config == dataclasses.replace(CONFIGS[name], dropout_rate=0.1)
  parity.check_rows(parity.compare(model, CONFIGS[name], params))


@pytest.mark.parametrize('name', ['1.0 tied', '1.1 gated', *slow('UL2')])
def test_transformers_reads_what_is_saved(name, tmp_path):
  import transformers

  config = CONFIGS[name]
  params = make_params(config)
  huggingface.save_huggingface(tmp_path, config, params, max_shard_bytes=10_000)
  assert len(list(tmp_path.glob('model-*.safetensors'))) > 2
  loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)
  rows = parity.compare(loaded, config, params)
  assert len({tuple(row) for row in rows}) > 1
  assert loaded.generation_config.decoder_start_token_id == 0


@pytest.fixture(scope='module')
def loaded(tmp_path_factory):
  """A model of transformers, and what is read from its folder."""
  folder = tmp_path_factory.mktemp('1.1')
  model = their_model('1.1 gated').eval()
  model.save_pretrained(folder)
  _, params = huggingface.load_huggingface(folder)
  return model, CONFIGS['1.1 gated'], params


@pytest.mark.parametrize(
  'name',
  [
    'token_embedder',
    'encoder/relpos_bias',
    'encoder/layers_1/attention/value',
    'decoder/layers_0/encoder_decoder_attention/key',
    'decoder/layers_1/pre_mlp_layer_norm',
    'decoder/layers_2/mlp/wi_1',
    'decoder/logits_dense',
  ],
)
def test_the_first_module_that_differs_is_named(name, loaded):
  """The negative control: one array of ours is changed a little."""
  model, config, params = loaded
  params = jax.tree.map(lambda leaf: leaf, params)  # new dicts
  *parents, last = name.split('/')
  module = functools.reduce(operator.getitem, parents, params)
  module[last] = {kind: 1.05 * leaf for kind, leaf in module[last].items()}
  with pytest.raises(AssertionError, match=rf'Logits .* that of {name} \('):
    parity.compare(model, config, params)


def test_every_module_is_compared(loaded):
  model, config, params = loaded
  batch = parity.make_batch(config.vocab_size)
  _, called = parity.their_outputs(model, batch)
  pairs = parity.module_pairs(config)
  # Each array has a module, and each layer is one; both stacks embed.
  assert len(pairs) == len(jax.tree.leaves(params)) + 2 + 3
  said = parity.first_difference(config, params, batch, called)
  assert said == f'All {len(pairs) + 1} outputs are equal; not compared: [].'
