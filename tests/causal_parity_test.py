"""Parity with transformers' Llama, Qwen and Gemma, through their folders."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import huggingface_parity as parity
from specdec_jax import partitioning
from specdec_jax.checkpoints import huggingface
from specdec_jax.engine.padding import padded
from specdec_jax.models.causal_lm import CausalLM

pytestmark = parity.MARKS

TOLERANCE = 1e-4  # of the largest logit
LENGTHS = (7, 1, 30, 3, 12)  # of the prompts
BUDGET = 64

# No size is another one, and no factor a power of 2.
SMALL = dict(
  vocab_size=97,
  hidden_size=24,
  intermediate_size=44,
  num_hidden_layers=5,
  num_attention_heads=6,
  num_key_value_heads=2,
  head_dim=10,
  max_position_embeddings=512,
  bos_token_id=0,
  eos_token_id=1,
  pad_token_id=0,
)
LLAMA_3_1 = dict(
  rope_type='llama3',
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=24,
)
GEMMA_3 = dict(
  sliding_window=9,  # shorter than prompts and outputs
  sliding_window_pattern=3,
  query_pre_attn_scalar=7,
)
# Name: transformers' word for the family, and what is not as in SMALL.
MODELS = {
  'Llama 3': ('Llama', dict(rope_theta=5e5)),
  'Llama 3.1': ('Llama', dict(rope_theta=5e5, rope_scaling=LLAMA_3_1)),
  'Llama 3.2': (
    'Llama',
    dict(rope_scaling=LLAMA_3_1 | {'factor': 32.0}, tie_word_embeddings=True),
  ),
  'Qwen 2.5': ('Qwen2', dict(rope_theta=1e6, head_dim=4)),
  'Qwen 2.5, windows': (
    'Qwen2',
    dict(
      head_dim=4, use_sliding_window=True, sliding_window=9, max_window_layers=2
    ),
  ),
  'Qwen 3': ('Qwen3', dict(rope_theta=1e6, tie_word_embeddings=True)),
  'Qwen 3, untied': ('Qwen3', dict(num_key_value_heads=6, rms_norm_eps=1e-3)),
  'Gemma 2': ('Gemma2', dict(sliding_window=9, query_pre_attn_scalar=7)),
  'Gemma 3': ('Gemma3', GEMMA_3),
  'Gemma 3, scaled': (
    'Gemma3',
    GEMMA_3
    | dict(
      rope_scaling={'rope_type': 'linear', 'factor': 8.0},
      num_key_value_heads=1,
      final_logit_softcapping=3.0,
    ),
  ),
}


def their_model(name):
  """A randomly initialised model of transformers; nothing in it is 0 or 1."""
  import torch
  import transformers

  family, changes = MODELS[name]
  text = 'Text' if family == 'Gemma3' else ''
  described = getattr(transformers, f'{family}{text}Config')(**SMALL | changes)
  torch.manual_seed(0)
  network = getattr(transformers, f'{family}ForCausalLM')
  # Others than the eager one leave out what they do not have.
  model = network._from_config(described, attn_implementation='eager')
  with torch.no_grad():
    for parameter in model.parameters():
      parameter += 0.2 * torch.randn(parameter.shape)
  return model.eval()


@functools.cache
def folder_of(name):
  """A model and a folder in which it lies."""
  import tempfile

  folder = tempfile.mkdtemp()
  model = their_model(name)
  model.save_pretrained(folder)
  return model, folder


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
    max_new_tokens=BUDGET,
    pad_token_id=0,
  )
  return generated[0, len(prompt) :].tolist()


def our_greedy(network, params, rows):
  """Tokens of the plain loop over a ragged batch, a list a row."""
  prompt, length = padded(rows, len(rows), max(map(len, rows)))
  nothing = np.zeros((len(rows), 1), np.int32)
  return parity.greedy(
    network,
    params,
    nothing,
    prompt=prompt,
    prompt_length=length,
    budget=BUDGET,
  )


def check_logits(model, config, params, most=None):
  """Logits to 1e-4 of the largest.

  Args:
    model: transformers'.
    config: ours.
    params: ours.
    most: the largest id that is read; None is all.

  Raises:
    AssertionError: they differ.
  """
  import torch

  ids = most or config.vocab_size
  read = np.random.default_rng(2).integers(0, ids, (3, 80))
  with torch.no_grad():
    want = model(input_ids=torch.tensor(read)).logits.numpy()
  network = CausalLM(config)
  have = jax.jit(network.logits)(params, None, jnp.asarray(read, jnp.int32))
  difference = parity.difference(np.asarray(have), want)
  assert difference < TOLERANCE, f'Logits differ by {difference:.2g}.'


# One of each family is quick.
SLOW = {'Llama 3', 'Llama 3.2', 'Qwen 2.5, windows', 'Qwen 3, untied'}


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW))
    for name in MODELS
  ],
)
def test_what_transformers_saves_is_read(name):
  model, folder = folder_of(name)
  config, params = huggingface.load_huggingface(folder)
  placed = partitioning.place(params)
  check_logits(model, config, placed)
  network = CausalLM(config)
  rows = prompts(config.vocab_size)
  theirs = [their_greedy(model, row) for row in rows]
  assert our_greedy(network, placed, rows) == theirs
  assert our_greedy(network, placed, rows[2:3]) == theirs[2:3]
  parity.check_rows(theirs)


@pytest.mark.parametrize(
  'name',
  [
    'decoder/layers_1/self_attention/query/kernel',
    'decoder/layers_0/self_attention/key_norm/scale',
    'decoder/layers_2/post_mlp_layer_norm/scale',
    'decoder/decoder_norm/scale',
  ],
)
def test_an_array_that_differs_is_seen(name):
  """The negative control: one array of ours is changed a little."""
  model, folder = folder_of('Gemma 3')
  config, params = huggingface.load_huggingface(folder)
  *path, last = name.split('/')
  module = params
  for part in path:
    module = module[part]
  noise = np.random.default_rng(0).standard_normal(module[last].shape)
  module[last] = module[last] + (0.02 * noise).astype(np.float32)
  with pytest.raises(AssertionError, match='Logits differ'):
    check_logits(model, config, params)


def test_the_text_model_of_a_folder_with_images(tmp_path):
  import torch
  import transformers

  text = their_model('Gemma 3').config.to_dict()
  described = transformers.Gemma3Config(
    text_config=text | {'vocab_size': 97},
    vision_config=dict(
      hidden_size=16,
      intermediate_size=16,
      num_hidden_layers=1,
      num_attention_heads=2,
      image_size=28,
      patch_size=14,
    ),
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
  config, params = huggingface.load_huggingface(tmp_path)
  assert config.window == 9 and config.num_layers == 5
  # The last ids stand for images.
  check_logits(model, config, params, most=93)
