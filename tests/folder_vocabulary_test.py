"""Hugging Face folders with their vocabularies: how texts begin and end."""

import dataclasses
import json

import pytest

import folders
import small_vocabulary
import specdec_jax
from folders import LLAMA, NLLB, T5GEMMA, write_folder, write_vocabulary
from languages_test import vocabulary
from languages_test import write_vocabulary as write_nllb
from specdec_jax import Engine, checkpoints
from specdec_jax.cli import main
from specdec_jax.models.causal_lm import CausalLM
from specdec_jax.text.tokenizer import Tokenizer

__all__ = ['vocabulary']  # a fixture
for name in ('safetensors', 'tokenizers'):
  pytest.importorskip(name, reason='needs the extra [huggingface]')


@pytest.mark.parametrize(
  ('prefix', 'settings', 'begins', 'ends'),
  [
    (None, {}, None, '<|endoftext|>'),
    (None, {'eos_token': {'content': '<turn>'}}, None, '<turn>'),
    # transformers 5 looks at the post-processor alone.
    (None, {'add_bos_token': True, 'bos_token': '<bos>'}, None, None),
    ('<bos>', {'add_bos_token': False, 'bos_token': '<bos>'}, '<bos>', None),
  ],
)
def test_begins_and_ends(prefix, settings, begins, ends, tmp_path):
  tokenizer = Tokenizer(write_vocabulary(tmp_path, prefix, **settings))
  ids = {piece: i for i, piece in tokenizer.pieces.items()}
  assert tokenizer.bos_id == (begins and ids[begins])
  assert tokenizer.eos_id == ids[ends or '<|endoftext|>']
  # What is encoded has neither.
  assert tokenizer.bos_id not in tokenizer.encode('the red')
  assert tokenizer.vocab_size == 268


def sized(folder, name, config, size, **described):
  """A folder of a family whose network has so many ids."""
  config = dataclasses.replace(config, vocab_size=size)
  write_folder(folder, name, config=config, vocab_size=size, **described)
  return config


def test_an_added_token_that_the_network_lacks_is_named(tmp_path):
  folder = write_vocabulary(tmp_path)
  sized(folder, 'llama', LLAMA, 268)
  (folder / 'added_tokens.json').write_text('{"<far>": 268}')
  words = f"'{folder}'.*'<far>': 268"
  with pytest.raises(ValueError, match=words):
    specdec_jax.load(folder)


def test_a_folder_with_its_vocabulary(tmp_path):
  """One id less is enough: the last special token is no text."""
  settings = {'eos_token': '<|endoftext|>'}
  folder = write_vocabulary(tmp_path, '<bos>', **settings)
  ends = json.dumps({'eos_token_id': [3, 5]})
  (folder / 'generation_config.json').write_text(ends)
  sized(folder, 'llama', LLAMA, 267, bos_token_id=7)
  model = specdec_jax.load(folder)
  assert model.bos_id == 266 and model.stop_ids == (3, 5)
  sized(folder, 'llama', LLAMA, 266, bos_token_id=7)
  with pytest.raises(ValueError, match='got 266'):
    specdec_jax.load(folder)


@pytest.mark.parametrize('begins', ['<bos>', None])
def test_a_text_begins_as_the_vocabulary_says(begins, tmp_path):
  """Without a config.json, or with one that names another id."""
  files = write_vocabulary(tmp_path, begins)
  alone, path = tmp_path / 'alone', tmp_path / 'model.msgpack'
  network = CausalLM(sized(alone, 'llama', LLAMA, 268, bos_token_id=7))
  checkpoints.save_t5x(path, small_vocabulary.weights(network, 0), step=1)
  engines = [
    Engine(specdec_jax.load(path, network, tokenizer=files)),
    Engine(specdec_jax.load(alone), tokenizer=files),
  ]
  assert {engine.bos_id for engine in engines} == {begins and 266}
  assert engines[0].num_input_tokens('') == (begins is not None)


def test_texts_of_a_t5gemma(tmp_path):
  """Texts begin as tokenizer.json says, and have no end of sequence."""
  folder = write_vocabulary(tmp_path, '<bos>', eos_token='<turn>')
  described = {'bos_token_id': 266, 'eos_token_id': [267, 3]}
  stacks = {}
  for name in ('encoder', 'decoder'):
    stacks[name] = dataclasses.replace(getattr(T5GEMMA, name), vocab_size=300)
    fields = folders.FOLDERS['t5gemma'][0][name]
    described[name] = fields | {'vocab_size': 300}
  config = dataclasses.replace(T5GEMMA, **stacks)
  write_folder(folder, 't5gemma', config=config, **described)
  model = specdec_jax.load(folder)
  assert model.bos_id == model.network.start_id == 266
  engine = Engine(model, max_input_len=16, max_decode_len=4)
  assert engine.stop_ids == (267, 3)
  pieces = engine.tokenizer.encode('the red')
  request = engine.request(['the red', [5, 6]])
  assert request.inputs[0, : len(pieces) + 2].tolist() == [266, *pieces, 0]
  assert request.inputs[1, :4].tolist() == [266, 5, 6, 0]
  # Nothing at all is a text as well.
  assert all(one.tokens for one in engine.generate(['', 'the red']))


@pytest.fixture(scope='module')
def nllb(folder, vocabulary):
  place = write_nllb(folder / 'nllb')
  sized(place, 'm2m_100', NLLB, vocabulary.vocab_size + 2)
  return place


def test_a_folder_with_m2m100s_own_vocabulary(tmp_path):
  """Without tokenizer.json; it has eight ids more than tokens."""
  own = Tokenizer(small_vocabulary.m2m(tmp_path))
  sized(tmp_path, 'm2m_100', NLLB, own.vocab_size + 8)
  model = specdec_jax.load(tmp_path)
  assert model.tokenizer.fingerprint == own.fingerprint
  engine = Engine(model, max_input_len=32, max_decode_len=16)
  ids = own.encode('the red dog')
  english = own.languages['en']
  assert engine.input_ids('the red dog', 'en') == [english, *ids, 2]


def test_the_command(nllb, tmp_path, capsys):
  file = tmp_path / 'texts.txt'
  file.write_text('the red dog\na cat\n')
  flags = ['decode', '--target', str(nllb), '--mode', 'plain', str(file)]
  flags += ['--max-length', '4', '--max-input-length', '16']
  assert main.main(flags)
  assert 'source_lang: expected the language' in capsys.readouterr().err
  main.main([*flags, '--source_lang', 'eng_Latn', '--target-lang', 'deu_Latn'])
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 2 and any(lines)
