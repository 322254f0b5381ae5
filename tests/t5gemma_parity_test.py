"""Parity with transformers' T5Gemma 1 and 2, through their folders."""

import functools
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import huggingface_parity as parity
from specdec_jax import partitioning
from specdec_jax.checkpoints import huggingface
from specdec_jax.engine.padding import padded
from specdec_jax.models.t5gemma import T5Gemma

pytestmark = parity.MARKS

TOLERANCE = 1e-4  # of the largest logit
LENGTHS = (7, 1, 30, 3, 12)  # of the inputs
BUDGET = 64

# No size is another one, and no factor a power of 2.
SMALL = dict(
  vocab_size=97,
  hidden_size=24,
  intermediate_size=44,
  num_hidden_layers=3,
  num_attention_heads=6,
  num_key_value_heads=2,
  head_dim=10,
  max_position_embeddings=512,
  sliding_window=9,  # shorter than inputs and outputs
  query_pre_attn_scalar=7,
)
WIDER = SMALL | dict(
  hidden_size=30, num_attention_heads=5, intermediate_size=50
)
WIDER |= dict(num_key_value_heads=1, num_hidden_layers=4)
IMAGES = dict(
  model_type='siglip_vision_model',
  hidden_size=16,
  intermediate_size=16,
  num_hidden_layers=1,
  num_attention_heads=2,
  image_size=28,
  patch_size=14,
)
SCALED = {
  'full_attention': {
    'rope_type': 'linear', 'factor': 8.0, 'rope_theta': 1e6
  },
  'sliding_attention': {'rope_type': 'default', 'rope_theta': 1e4},
}  # fmt: skip
PATTERN = [*['sliding_attention'] * 2, 'full_attention']
# Name: shapes of encoder and decoder; what is said besides.
MODELS = {
  'T5Gemma': (SMALL, SMALL, {}),
  'T5Gemma, two widths': (WIDER, SMALL, {}),
  'T5Gemma, untied': (SMALL, WIDER, dict(tie_word_embeddings=False)),
  'T5Gemma, no caps': (
    SMALL | dict(attn_logit_softcapping=None, num_key_value_heads=6),
    SMALL | dict(final_logit_softcapping=None, attn_logit_softcapping=3.0),
    {},
  ),
  'T5Gemma 2': (
    SMALL | dict(layer_types=PATTERN),
    SMALL | dict(layer_types=PATTERN),
    {},
  ),
  'T5Gemma 2, an even window': (
    SMALL | dict(sliding_window=8, rope_parameters=SCALED),
    SMALL
    | dict(final_logit_softcapping=3.0, num_key_value_heads=1)
    | dict(sliding_window=8, layer_types=PATTERN, num_attention_heads=4),
    {},
  ),
}


def their_model(name):
  """A randomly initialised model of transformers; nothing in it is 0 or 1."""
  import torch
  import transformers

  encoder, decoder, others = MODELS[name]
  two = '2' if name.startswith('T5Gemma 2') else ''
  if two:
    images = dict(vision_config=IMAGES, mm_tokens_per_image=4)
    encoder = dict(text_config=encoder, eoi_token_index=95, **images)
    others = others | dict(image_token_index=96)
  else:
    others = others | dict(vocab_size=97)
  described = getattr(transformers, f'T5Gemma{two}Config')(
    encoder=encoder, decoder=decoder, **others
  )
  torch.manual_seed(0)
  network = getattr(transformers, f'T5Gemma{two}ForConditionalGeneration')
  model = network._from_config(described, attn_implementation='eager')
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      # Else the embedding, which is the output layer, would say most.
      size = 0.2 if 'embed' in name or 'norm' in name else 0.5
      parameter += size * torch.randn(parameter.shape)
  return model.eval()


@functools.cache
def folder_of(name):
  """A model and a folder in which it lies, in several files."""
  folder = tempfile.mkdtemp()
  model = their_model(name)
  model.save_pretrained(folder, max_shard_size='20KB')
  return model, folder


def inputs_of(vocab_size):
  rng = np.random.default_rng(1)
  rows = [rng.integers(3, vocab_size, length) for length in LENGTHS]
  return [np.array([2, *row]) for row in rows]


def their_greedy(model, row):
  import torch

  tokens = torch.tensor(row[None]).long()
  generated = model.generate(
    input_ids=tokens,
    attention_mask=torch.ones_like(tokens),
    do_sample=False,
    max_new_tokens=BUDGET,
  )
  assert generated[0, 0] == 2  # what the decoder begins with
  return generated[0, 1:].tolist()


def our_greedy(network, params, rows):
  """Tokens of the plain loop over a ragged batch, a list a row."""
  inputs, _ = padded(rows, len(rows), max(map(len, rows)))
  return parity.greedy(network, params, inputs, budget=BUDGET)


def check_logits(model, config, params, most=97):
  """Logits of a ragged batch to 1e-4 of the largest.

  Args:
    model: transformers'.
    config: ours.
    params: ours.
    most: the ids that are read are below this.

  Raises:
    AssertionError: they differ.
  """
  import torch

  rng = np.random.default_rng(2)
  inputs = rng.integers(3, most, (3, 40))
  inputs[1, 4:] = inputs[2, 33:] = 0
  fed = rng.integers(3, most, (3, 50))
  with torch.no_grad():
    want = model(
      input_ids=torch.tensor(inputs),
      attention_mask=torch.tensor(inputs > 0).long(),
      decoder_input_ids=torch.tensor(fed),
    ).logits.numpy()
  have = jax.jit(T5Gemma(config).logits)(
    params, jnp.asarray(inputs, jnp.int32), jnp.asarray(fed, jnp.int32)
  )
  difference = parity.difference(np.asarray(have), want)
  assert difference < TOLERANCE, f'Logits differ by {difference:.2g}.'


SLOW = {'T5Gemma', 'T5Gemma, no caps', 'T5Gemma, untied'}


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
  assert config.merged_attention == name.startswith('T5Gemma 2')
  placed = partitioning.place(params)
  check_logits(model, config, placed)
  network = T5Gemma(config)
  rows = inputs_of(config.vocab_size)
  theirs = [their_greedy(model, row) for row in rows]
  assert our_greedy(network, placed, rows) == theirs
  assert our_greedy(network, placed, rows[2:3]) == theirs[2:3]
  parity.check_rows(theirs)


@pytest.mark.parametrize(
  ('name', 'array'),
  [
    ('T5Gemma', 'encoder/layers_1/self_attention/key/kernel'),
    ('T5Gemma', 'decoder/layers_2/encoder_decoder_attention/value/kernel'),
    ('T5Gemma', 'decoder/layers_0/post_cross_attention_layer_norm/scale'),
    ('T5Gemma', 'encoder/token_embedder/embedding'),
    ('T5Gemma 2', 'decoder/layers_0/self_attention/key_norm/scale'),
    ('T5Gemma 2', 'encoder/encoder_norm/scale'),
    ('T5Gemma 2', 'image_end_embedding'),
  ],
)
def test_an_array_that_differs_is_seen(name, array):
  """The negative control: one array of ours is changed a little."""
  model, folder = folder_of(name)
  config, params = huggingface.load_huggingface(folder)
  *path, last = array.split('/')
  module = params
  for part in path:
    module = module[part]
  noise = np.random.default_rng(0).standard_normal(module[last].shape)
  module[last] = module[last] + (0.05 * noise).astype(np.float32)
  with pytest.raises(AssertionError, match='Logits differ'):
    check_logits(model, config, params)
