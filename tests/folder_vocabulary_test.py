"""Hugging Face folders with their vocabularies: how texts begin and end."""

import dataclasses
import importlib.util
import json
import shutil

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
pytestmark = pytest.mark.skipif(
  any(
    importlib.util.find_spec(name) is None
    for name in ('safetensors', 'tokenizers')
  ),
  reason="needs safetensors and tokenizers: pip install 'specdec_jax[hub]'",
)


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


def test_an_added_token_that_the_network_lacks_is_named(tmp_path):
  folder = tmp_path / 'model'
  config = dataclasses.replace(LLAMA, vocab_size=268)
  write_folder(folder, 'llama', config=config, vocab_size=268)
  shutil.copytree(write_vocabulary(tmp_path), folder, dirs_exist_ok=True)
  (folder / 'added_tokens.json').write_text('{"<far>": 268}')
  words = f"'{folder}'.*'<far>': 268"
  with pytest.raises(ValueError, match=words):
    specdec_jax.load(folder)


def test_a_folder_with_its_vocabulary(tmp_path):
  files = write_vocabulary(tmp_path, '<bos>', eos_token='<turn>')
  folder = tmp_path / 'model'
  # One id less: the last special token is no text (Gemma's images).
  for size, ok in ((267, True), (266, False)):
    config = dataclasses.replace(LLAMA, vocab_size=size)
    sizes = dict(vocab_size=size, bos_token_id=7)
    write_folder(folder, 'llama', config=config, **sizes)
    shutil.copytree(files, folder, dirs_exist_ok=True)
    settings = json.dumps({'eos_token': '<|endoftext|>'})
    (folder / 'tokenizer_config.json').write_text(settings)
    if not ok:
      with pytest.raises(ValueError, match='got 266'):
        specdec_jax.load(folder)
      return
    (folder / 'generation_config.json').write_text(
      json.dumps({'eos_token_id': [3, 5]})
    )
    model = specdec_jax.load(folder)
    assert model.bos_id == 266 and model.stop_ids == (3, 5)


@pytest.mark.parametrize('begins', ['<bos>', None])
def test_a_text_begins_as_the_vocabulary_says(begins, tmp_path):
  """Without a config.json, or with one that names another id."""
  files = write_vocabulary(tmp_path, begins)
  config = dataclasses.replace(LLAMA, vocab_size=268)
  path = tmp_path / 'model.msgpack'
  network = CausalLM(config)
  checkpoints.save_t5x(path, small_vocabulary.weights(network, 0), step=1)
  alone = tmp_path / 'alone'
  sizes = dict(vocab_size=268, bos_token_id=7)
  write_folder(alone, 'llama', config=config, **sizes)
  engines = [
    Engine(specdec_jax.load(path, network, tokenizer=files)),
    Engine(specdec_jax.load(alone), tokenizer=files),
  ]
  assert {engine.bos_id for engine in engines} == {begins and 266}
  assert engines[0].num_input_tokens('') == (begins is not None)


def test_texts_of_a_t5gemma(tmp_path):
  """Texts begin as tokenizer.json says, and have no end of sequence."""
  folder = tmp_path / 'model'
  described, stacks = {}, {}
  for name in ('encoder', 'decoder'):
    stack = dataclasses.replace(getattr(T5GEMMA, name), vocab_size=300)
    stacks[name] = stack
    fields = folders.FOLDERS['t5gemma'][0][name]
    described[name] = fields | {'vocab_size': 300}
  config = dataclasses.replace(T5GEMMA, **stacks)
  ids = {'bos_token_id': 266, 'eos_token_id': [267, 3]}
  write_folder(folder, 't5gemma', config=config, **described, **ids)
  files = write_vocabulary(tmp_path, '<bos>', eos_token='<turn>')
  shutil.copytree(files, folder, dirs_exist_ok=True)
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
  place = folder / 'nllb'
  size = vocabulary.vocab_size + 2
  write_nllb(place)
  config = dataclasses.replace(NLLB, vocab_size=size)
  write_folder(place, 'm2m_100', config=config, vocab_size=size)
  return place


def test_a_folder_with_m2m100s_own_vocabulary(tmp_path):
  """Without tokenizer.json; it has eight ids more than tokens."""
  own = Tokenizer(small_vocabulary.m2m(tmp_path / 'm2m'))
  size = own.vocab_size + 8
  config = dataclasses.replace(NLLB, vocab_size=size)
  write_folder(tmp_path / 'm2m', 'm2m_100', config=config, vocab_size=size)
  model = specdec_jax.load(tmp_path / 'm2m')
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
