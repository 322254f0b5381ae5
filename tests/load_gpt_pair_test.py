"""Decoder-only pairs by `notebook.load`: how their texts begin and end."""

import dataclasses
import importlib.util
import json
import shutil

import jax
import numpy as np
import pytest

import small_vocabulary
import specdec_jax
from folders import write_folder
from specdec_jax import notebook
from specdec_jax.checkpoints import save_t5x
from specdec_jax.models.gpt import GPT
from specdec_jax.text.tokenizer import Tokenizer
from toy_families import GPT2, T5X

LENGTHS = {'max_input_len': 32, 'max_decode_len': 12, 'gamma': 2}
SIZE = 300  # of the vocabulary that `byte_level` trains
END = 299

needs_gpt2 = pytest.mark.skipif(
  any(
    importlib.util.find_spec(name) is None
    for name in ('tokenizers', 'safetensors')
  ),
  reason="needs both: pip install 'specdec_jax[huggingface]'",
)


@pytest.fixture(scope='module')
def trained_here(folder):
  """A checkpoint of T5X's decoder-only network, and the network."""
  size = small_vocabulary.VOCAB_SIZE
  network = GPT(dataclasses.replace(T5X, vocab_size=size))
  path = folder / 'lm.msgpack'
  save_t5x(path, network.init(jax.random.key(0)), step=1)
  return path, network


def test_models_trained_here_begin_with_id_0(trained_here, tokenizer):
  path, network = trained_here
  model = notebook.load(
    path, path, network=network, draft_network=network, tokenizer=tokenizer,
    **LENGTHS,
  )  # fmt: skip
  assert model.bos_id == 0 != tokenizer.eos_id
  # So it is without a notebook, wherever the vocabulary is given.
  loaded = specdec_jax.load(path, network, tokenizer=tokenizer)
  assert specdec_jax.Engine(loaded).bos_id == 0
  loaded = specdec_jax.load(path, network)
  assert specdec_jax.Engine(loaded, tokenizer=tokenizer).bos_id == 0
  assert model.input_ids('a dog') == [0, *tokenizer.encode('a dog')]
  (score,) = model.score([''], [[5, 6]])
  logits_of = jax.jit(network.logits)
  logits = logits_of(model.params.target, None, np.array([[0, 5]]))
  expected = jax.nn.log_softmax(logits[0])[(0, 1), (5, 6)]
  assert score.log_probs == pytest.approx(expected.tolist(), abs=1e-4)
  wrong = logits_of(model.params.target, None, np.array([[1, 5]]))
  wrong = jax.nn.log_softmax(wrong[0])[(0, 1), (5, 6)]
  assert score.log_probs != pytest.approx(wrong.tolist(), abs=1e-2)


@pytest.fixture(scope='module')
def vocabularies(folder):
  """Two folders with one vocabulary, whose files are of other kinds."""
  return small_vocabulary.byte_level(folder)


def gpt2_folder(folder, vocabulary, **described):
  """A folder as transformers writes it, with a vocabulary if there is one."""
  folder.mkdir()
  config = dataclasses.replace(GPT2, vocab_size=SIZE)
  write_folder(folder, 'gpt2', config=config, vocab_size=SIZE, **described)
  if vocabulary is not None:
    shutil.copytree(vocabulary, folder, dirs_exist_ok=True)
  return folder


@needs_gpt2
def test_a_pair_whose_vocabularies_are_other_files(tmp_path, vocabularies):
  one, two = vocabularies
  own = Tokenizer(one)
  ids = {'eos_token_id': own.eos_id, 'bos_token_id': own.eos_id}
  target = gpt2_folder(tmp_path / 'target', one, **ids)
  draft = gpt2_folder(tmp_path / 'draft', two, **ids)
  model = notebook.load(target, draft, **LENGTHS)
  assert model.bos_id == own.eos_id and model.stop_ids == (own.eos_id,)
  assert model.tokenizer.fingerprint == own.fingerprint
  ids = [own.eos_id, *own.encode('the red dog')]
  assert model.input_ids('the red dog') == ids
  texts = ['the red dog', '']
  tokens = [done.tokens for done in model.generate(texts)]
  plain = model.generate(texts, speculative=False)
  assert tokens == [done.tokens for done in plain] and all(tokens)

  # A fine-tune that ends by another id, as either file says.
  stop = tokens[0][1]
  settings = {'eos_token_id': [stop, own.eos_id], 'pad_token_id': END}
  (target / 'generation_config.json').write_text(json.dumps(settings))
  model = notebook.load(target, draft, **LENGTHS)
  assert model.stop_ids == (stop, own.eos_id)
  done = model.generate(texts)[0]
  assert done.tokens == tokens[0][: tokens[0].index(stop) + 1]
  assert done.finish_reason == 'stop'

  # Another vocabulary, as many ids.
  other = tmp_path / 'other'
  other.mkdir()
  words = small_vocabulary.byte_level(other, ('lorem ipsum', 'dolor sit'))[0]
  shutil.rmtree(draft)
  gpt2_folder(draft, words)
  with pytest.raises(ValueError, match="draft's tokenizer: .*draft"):
    notebook.load(target, draft, **LENGTHS)


@needs_gpt2
def test_ids_that_a_folder_names(tmp_path, vocabularies):
  one, _ = vocabularies
  eos = Tokenizer(one).eos_id
  for number, (described, begin, ends) in enumerate(
    (
      ({}, eos, (eos,)),
      ({'eos_token_id': 7}, eos, (7,)),
      ({'eos_token_id': 7, 'bos_token_id': 8, 'pad_token_id': 7}, 8, (7,)),
      # transformers' defaults, whatever the vocabulary.
      ({'eos_token_id': 50256, 'bos_token_id': 50256}, eos, (eos,)),
    )
  ):
    folder = gpt2_folder(tmp_path / str(number), one, **described)
    model = notebook.load(folder, **LENGTHS)
    assert (model.bos_id, model.stop_ids) == (begin, ends)
  folder = gpt2_folder(tmp_path / 'text', one, eos_token_id='x')
  with pytest.raises(ValueError, match="eos_token_id: .* 'x'"):
    notebook.load(folder)
