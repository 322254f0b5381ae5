"""Parity with transformers' M2M-100, which is NLLB-200's too."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import huggingface_parity as parity
from small_vocabulary import sentences
from specdec_jax import partitioning
from specdec_jax.checkpoints import huggingface
from specdec_jax.engine.languages import languages_of
from specdec_jax.engine.padding import padded
from specdec_jax.models.m2m100 import M2M100
from specdec_jax.text.tokenizer_bpe import BpeTokenizer

pytestmark = parity.MARKS

TOLERANCE = 1e-4  # of the largest logit
LENGTHS = (7, 1, 30, 3, 12)  # of the inputs, their ends included
LANGUAGE = 90
BUDGET = 64
EOS = 2

# No size is another one, and no factor a power of 2.
SMALL = dict(
  vocab_size=97,
  d_model=24,
  encoder_layers=3,
  decoder_layers=2,
  encoder_attention_heads=4,
  decoder_attention_heads=4,
  encoder_ffn_dim=44,
  decoder_ffn_dim=44,
  max_position_embeddings=512,
)
MODELS = {
  'NLLB': {},
  'not scaled': dict(scale_embedding=False, activation_function='gelu_new'),
  'other padding': dict(pad_token_id=5, decoder_start_token_id=3),
}


def their_model(name):
  """A randomly initialised model of transformers; no array is 0 or 1."""
  import torch
  import transformers

  described = transformers.M2M100Config(**SMALL | MODELS[name])
  torch.manual_seed(0)
  model = transformers.M2M100ForConditionalGeneration._from_config(
    described, attn_implementation='eager'
  )
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      # Else a token is the likeliest to follow itself: the head is tied.
      much = 0.2 if 'norm' in name or 'shared' in name else 0.8
      parameter += much * torch.randn(parameter.shape)
    # Padding is never the likeliest: transformers would mask it as an output.
    model.model.shared.weight[described.pad_token_id] = 0
  return model.eval()


@functools.cache
def folder_of(name):
  """A model and a folder in which it lies."""
  import tempfile

  folder = tempfile.mkdtemp()
  model = their_model(name)
  model.save_pretrained(folder)
  return model, folder


def inputs_of(config):
  """Ragged rows int32[B, E] that end with the end; 0 is a token like others."""
  rng = np.random.default_rng(1)
  ids = np.delete(np.arange(config.vocab_size), config.pad_id)
  rows = [[*rng.choice(ids, length - 1), EOS] for length in LENGTHS]
  rows[2][4] = 0
  return padded(rows, len(rows), max(LENGTHS), config.pad_id)[0]


def their_greedy(model, inputs):
  import torch

  tokens = torch.tensor(inputs).long()
  generated = model.generate(
    input_ids=tokens,
    attention_mask=(tokens != model.config.pad_token_id).long(),
    do_sample=False,
    num_beams=1,
    forced_bos_token_id=LANGUAGE,
    max_new_tokens=BUDGET + 1,
  )
  assert (generated[:, 1] == LANGUAGE).all()
  rows = generated[:, 2:].tolist()
  return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


def our_greedy(network, params, inputs):
  """Tokens of the plain loop over a ragged batch, a list a row."""
  prompt = [[network.start_id, LANGUAGE]] * len(inputs)
  return parity.greedy(
    network,
    params,
    inputs,
    prompt=jnp.asarray(prompt, jnp.int32),
    prompt_length=jnp.full((len(inputs),), 2, jnp.int32),
    stop_ids=jnp.full((4,), EOS, jnp.int32),
    budget=BUDGET,
  )


def check_logits(model, config, params, pad_id=None):
  """Logits to 1e-4 of the largest.

  Args:
    model: transformers'.
    config: ours.
    params: ours.
    pad_id: what inputs of ours are padded with; None is right.

  Raises:
    AssertionError: they differ.
  """
  import torch

  inputs = inputs_of(config)
  ids = np.delete(np.arange(config.vocab_size), config.pad_id)
  read = np.random.default_rng(2).choice(ids, (len(inputs), 80))
  with torch.no_grad():
    want = model(
      input_ids=torch.tensor(inputs).long(),
      attention_mask=torch.tensor(inputs != config.pad_id).long(),
      decoder_input_ids=torch.tensor(read),
    ).logits.numpy()
  if pad_id is not None:
    inputs = np.where(inputs == config.pad_id, pad_id, inputs)
  have = jax.jit(M2M100(config).logits)(
    params, inputs, jnp.asarray(read, jnp.int32)
  )
  difference = parity.difference(np.asarray(have), want)
  assert difference < TOLERANCE, f'Logits differ by {difference:.2g}.'


@pytest.mark.parametrize('name', MODELS)
def test_what_transformers_saves_is_read(name):
  model, folder = folder_of(name)
  config, params = huggingface.load_huggingface(folder)
  placed = partitioning.place(params)
  check_logits(model, config, placed)
  inputs = inputs_of(config)
  theirs = their_greedy(model, inputs)
  network = M2M100(config)
  assert our_greedy(network, placed, inputs) == theirs
  one = inputs[1:2, : LENGTHS[1]]
  assert our_greedy(network, placed, one) == theirs[1:2]
  parity.check_rows(theirs)


def test_padding_that_is_read_is_seen():
  """The negative control: what 0 for padding would give."""
  model, folder = folder_of('NLLB')
  config, params = huggingface.load_huggingface(folder)
  with pytest.raises(AssertionError, match='Logits differ'):
    check_logits(model, config, params, pad_id=0)


@pytest.mark.parametrize(
  'name',
  [
    'encoder/layers_2/attention/key/kernel',
    'decoder/layers_1/encoder_decoder_attention/query/bias',
    'encoder/encoder_norm/bias',
  ],
)
def test_an_array_that_differs_is_seen(name):
  """The negative control: one array of ours is changed a little."""
  model, folder = folder_of('NLLB')
  config, params = huggingface.load_huggingface(folder)
  *path, last = name.split('/')
  module = params
  for part in path:
    module = module[part]
  noise = np.random.default_rng(0).standard_normal(module[last].shape)
  module[last] = module[last] + (0.05 * noise).astype(np.float32)
  with pytest.raises(AssertionError, match='Logits differ'):
    check_logits(model, config, params)


def test_texts_are_marked_as_transformers_marks_them(tmp_path):
  import tokenizers
  import transformers

  made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token='<unk>'))
  made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=80,
    special_tokens=['<s>', '<pad>', '</s>', '<unk>'],
    show_progress=False,
  )
  made.train_from_iterator(sentences(), trainer)
  words = json.loads(made.to_str())['model']
  theirs = transformers.NllbTokenizer(
    words['vocab'], [tuple(pair) for pair in words['merges']]
  )
  theirs.save_pretrained(tmp_path)
  ours = BpeTokenizer(tmp_path)
  assert len(ours.languages) == 202 and ours.bos_id is None
  for language in ('fra_Latn', 'zho_Hans'):
    theirs.src_lang = language
    found = languages_of(ours, True, language, None)
    for text in ('the red dog', ' a  cat'):
      ids = ours.encode(text)
      have = [*found.before_text(ids), *ids, ours.eos_id]
      assert have == theirs(text).input_ids
      assert ours.decode(have) == theirs.decode(have, skip_special_tokens=True)
