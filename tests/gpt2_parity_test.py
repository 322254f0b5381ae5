"""Parity with transformers' GPT-2 in float32, through folders it writes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import huggingface_parity as parity
from specdec_jax import partitioning
from specdec_jax.checkpoints import huggingface
from specdec_jax.engine.padding import padded
from specdec_jax.models.gpt import GPT, GPTConfig

pytestmark = parity.MARKS

LENGTHS = (7, 1, 30, 3)  # of the prompts

# 1/sqrt(D) is not a power of 2, and neither is sqrt(M).
SMALL = GPTConfig(
  vocab_size=97,
  emb_dim=24,
  num_heads=3,
  num_layers=3,
  head_dim=8,
  mlp_dim=96,
  num_positions=64,
)
CONFIGS = {
  'GPT-2': SMALL,
  'one head, narrow mlp': dataclasses.replace(
    SMALL, num_heads=1, head_dim=24, mlp_dim=20, num_layers=1
  ),
  'untied relu': dataclasses.replace(
    SMALL, logits_via_embedding=False, mlp_activations=('relu',)
  ),
}
WORDS = {'gelu': 'gelu_new', 'relu': 'relu'}


def their_model(config):
  """A randomly initialised model of transformers; nothing in it is 0 or 1."""
  import torch
  import transformers

  described = transformers.GPT2Config(
    vocab_size=config.vocab_size,
    n_positions=config.num_positions,
    n_embd=config.emb_dim,
    n_layer=config.num_layers,
    n_head=config.num_heads,
    n_inner=None if config.mlp_dim == 96 else config.mlp_dim,
    activation_function=WORDS[config.mlp_activations[0]],
    tie_word_embeddings=config.logits_via_embedding,
    bos_token_id=0,
    eos_token_id=1,
  )
  torch.manual_seed(0)
  model = transformers.GPT2LMHeadModel(described)
  with torch.no_grad():
    for parameter in model.parameters():
      parameter += 0.2 * torch.randn(parameter.shape)
  return model.eval()


def prompts(vocab_size):
  rng = np.random.default_rng(1)
  return [rng.integers(2, vocab_size, length) for length in LENGTHS]


def their_greedy(model, prompt):
  import torch

  tokens = torch.tensor(prompt[None]).long()
  generated = model.generate(
    input_ids=tokens,
    attention_mask=torch.ones_like(tokens),
    do_sample=False,
    max_new_tokens=parity.BUDGET,
    pad_token_id=0,
  )
  return generated[0, len(prompt) :].tolist()


def our_greedy(network, params, rows):
  """Tokens of the plain loop over a ragged batch, a list a row."""
  prompt, length = padded(rows, len(rows), max(map(len, rows)))
  nothing = np.zeros((len(rows), 1), np.int32)
  return parity.greedy(
    network, params, nothing, prompt=prompt, prompt_length=length
  )


def compare(model, config, params):
  """Logits to 1e-4 of the largest, and greedy tokens equal.

  Returns:
    The tokens of each row.

  Raises:
    AssertionError: something differs.
  """
  import torch

  network = GPT(config)
  rows = prompts(config.vocab_size)
  read = np.random.default_rng(2).integers(0, config.vocab_size, (3, 64))
  with torch.no_grad():
    want = model(input_ids=torch.tensor(read)).logits.numpy()
  placed = partitioning.place(params)
  have = jax.jit(network.logits)(placed, None, jnp.asarray(read, jnp.int32))
  difference = parity.difference(np.asarray(have), want)
  assert difference < parity.TOLERANCE, f'Logits differ by {difference:.2g}.'
  ours = our_greedy(network, placed, rows)
  theirs = [their_greedy(model, row) for row in rows]
  assert ours == theirs
  return ours


@pytest.mark.parametrize('name', CONFIGS)
def test_what_transformers_saves_is_read(name, tmp_path):
  model = their_model(CONFIGS[name])
  model.save_pretrained(tmp_path)
  config, params = huggingface.load_huggingface(tmp_path)
  assert dataclasses.replace(config, dropout_rate=0.0) == CONFIGS[name]
  parity.check_rows(compare(model, config, params))


@pytest.mark.parametrize(
  'name',
  [
    'decoder/layers_1/self_attention/query/bias',
    'decoder/layers_0/self_attention/value/kernel',
    'decoder/layers_2/pre_mlp_layer_norm/bias',
    'decoder/decoder_norm/scale',
    'decoder/position_embedder/embedding',
  ],
)
def test_an_array_that_differs_is_seen(name, tmp_path):
  """The negative control: one array of ours is changed a little."""
  model = their_model(SMALL)
  model.save_pretrained(tmp_path)
  config, params = huggingface.load_huggingface(tmp_path)
  *path, last = name.split('/')
  module = params
  for part in path:
    module = module[part]
  noise = np.random.default_rng(0).standard_normal(module[last].shape)
  module[last] = (module[last] * (1 + 0.01 * noise)).astype(np.float32)
  with pytest.raises(AssertionError, match='Logits differ'):
    compare(model, config, params)
