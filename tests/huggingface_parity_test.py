"""Parity with transformers' T5 in float32, through folders written by both."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from huggingface_test import CONFIGS, make_params
from specdec_jax.checkpoints import huggingface
from specdec_jax.decoding import autoregressive
from specdec_jax.decoding.state import Request, generation
from specdec_jax.models.t5 import T5
from specdec_jax.probs import SamplingConfig

NEEDED = ('transformers', 'torch', 'safetensors')
pytestmark = [
  pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED),
    reason="needs transformers and torch: pip install -e '.[parity]'",
  ),
  pytest.mark.filterwarnings('ignore'),  # those of torch and transformers
]

INPUTS = [[5, 17, 33, 60, 8, 2, 1], [9, 1], [44, 3, 12, 7, 1], [1]]
BUDGET = 12


def padded(rows):
  width = max(map(len, rows))
  return np.array([[*row, *[0] * (width - len(row))] for row in rows], np.int32)


def greedy(config, params, inputs):
  """Tokens of the plain loop, a list a row."""
  batch = len(inputs)
  request = Request(
    inputs=jnp.asarray(inputs),
    keys=jax.random.split(jax.random.key(0), batch),
    sampling=SamplingConfig(0.0).params(batch),
    stop_ids=jnp.full((4,), 1, jnp.int32),
    min_length=jnp.zeros((batch,), jnp.int32),
    max_length=jnp.full((batch,), BUDGET, jnp.int32),
    slots=BUDGET,
    gamma=0,
    greedy=True,
  )
  network = T5(config)

  @jax.jit
  def decode(params, request):
    state = autoregressive.start(network, params, request)
    state = autoregressive.run(
      network, params, request, state, jnp.int32(BUDGET + 1)
    )
    return generation(request, state)

  done = jax.device_get(decode(params, request))
  rows = zip(done.tokens, done.length, strict=True)
  return [row[:length].tolist() for row, length in rows]


def check_parity(theirs, config, params):
  """Teacher-forced logits to 1e-4 relative, greedy tokens equal."""
  import torch

  inputs = padded(INPUTS)
  mask = torch.tensor(inputs != 0).long()
  rng = np.random.default_rng(1)
  targets = rng.integers(2, config.vocab_size, (len(INPUTS), 9)).astype('int32')
  targets[:, 0] = 0
  ours = jax.jit(T5(config).logits)(params, inputs, targets)
  theirs = theirs.eval()
  # Version 5.23 sizes the decoder's cache by the encoder's layers.
  theirs.config.num_layers = theirs.config.num_decoder_layers
  with torch.no_grad():
    expected = theirs(
      input_ids=torch.tensor(inputs).long(),
      attention_mask=mask,
      decoder_input_ids=torch.tensor(targets).long(),
    ).logits.numpy()
    generated = theirs.generate(
      input_ids=torch.tensor(inputs).long(),
      attention_mask=mask,
      do_sample=False,
      num_beams=1,
      max_new_tokens=BUDGET,
    ).numpy()
  np.testing.assert_allclose(
    ours, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max()
  )
  rows = greedy(config, params, inputs)
  assert len({tuple(row) for row in rows}) > 1
  for row, other in zip(rows, generated[:, 1:].tolist(), strict=True):
    assert row == other[: len(row)] and not any(other[len(row) :])


@pytest.mark.parametrize('version', CONFIGS)
def test_transformers_reads_what_is_saved(version, tmp_path):
  import transformers

  config = CONFIGS[version]
  params = make_params(config)
  huggingface.save_huggingface(tmp_path, config, params)
  loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)
  check_parity(loaded, config, params)
  assert loaded.generation_config.decoder_start_token_id == 0


def their_model(config, tied):
  """A randomly initialised model of transformers; its norms are no ones."""
  import torch
  import transformers

  described = {
    'vocab_size': config.vocab_size,
    'd_model': config.emb_dim,
    'd_kv': config.head_dim,
    'd_ff': config.mlp_dim,
    'num_heads': config.num_heads,
    'num_layers': config.num_encoder_layers,
    'num_decoder_layers': config.num_decoder_layers,
    'feed_forward_proj': 'relu' if tied else 'gated-gelu',
    'tie_word_embeddings': tied,
    'decoder_start_token_id': 0,
  }
  torch.manual_seed(0)
  model = transformers.T5ForConditionalGeneration(
    transformers.T5Config(**described)
  )
  if not tied:
    # Version 5 ties every new T5; published ones of 1.1 are not tied.
    shape = config.vocab_size, config.emb_dim
    model.lm_head.weight = torch.nn.Parameter(torch.randn(shape))
  with torch.no_grad():
    for parameter in model.parameters():
      parameter += 0.1 * torch.randn(parameter.shape)
  return model


@pytest.mark.parametrize('version', CONFIGS)
def test_what_transformers_saves_is_read(version, tmp_path):
  config = CONFIGS[version]
  theirs = their_model(config, tied=config.logits_via_embedding)
  theirs.save_pretrained(tmp_path)
  loaded_config, params = huggingface.load_huggingface(tmp_path)
  assert dataclasses.replace(loaded_config, dropout_rate=0.0) == config
  check_parity(theirs, loaded_config, params)
