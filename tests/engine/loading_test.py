"""Folders, of the hub too, and pairs of them: what is loaded, or refused."""

import dataclasses
import fnmatch
import itertools
import json
import shutil
import sys
import types

import jax
import pytest

import folders
import small_vocabulary
import specdec_jax
from folders import save_folder, write_folder, write_nllb, write_vocabulary
from specdec_jax import Engine, checkpoints, notebook
from specdec_jax.checkpoints import config_json, huggingface
from specdec_jax.checks import memory
from specdec_jax.checks.memory import DoesNotFitError
from specdec_jax.cli import main
from specdec_jax.models.causal_lm import CausalLM
from specdec_jax.models.model import Model
from specdec_jax.models.t5 import T5
from specdec_jax.partitioning import Placement
from specdec_jax.text.tokenizer import Tokenizer, train_tokenizer
from toy_families import GPT2

TEXTS = ['the old house sings', 'a red dog', 'the tree']
LENGTHS = {'max_input_len': 32, 'max_decode_len': 12, 'gamma': 3}
NETWORKS = small_vocabulary.network(2), small_vocabulary.network(1)


@pytest.fixture(scope='module')
def files(folder):
  """The pair as T5X's files, which do not describe themselves."""
  paths = folder / 'target.msgpack', folder / 'draft.msgpack'
  for seed, (network, path) in enumerate(zip(NETWORKS, paths, strict=True)):
    params = small_vocabulary.weights(network, seed)
    checkpoints.save_t5x(path, params, step=1)
  return paths


def save_pair(folder, *options):
  """Saves target and draft, in a folder each."""
  numbered = enumerate(NETWORKS)
  return [save_folder(folder / str(i), x, i, *options) for i, x in numbered]


WAYS = {}, {'dtype': 'bfloat16'}, {'placement': Placement('bfloat16')}


@pytest.mark.parametrize('options', WAYS)
def test_folders_describe_it(tmp_path, tokenizer, files, options):
  paths = save_pair(tmp_path, tokenizer.path)
  found = notebook.load(*paths, **options, **LENGTHS)
  want = 'bfloat16' if options else 'float32'
  for side, network in zip(('target', 'draft'), NETWORKS, strict=True):
    config = dataclasses.replace(network.config, dtype=want)
    assert found.models[side].network == T5(config)
  leaves = jax.tree.leaves(found.params.target)
  assert {str(leaf.dtype) for leaf in leaves} == {want}
  assert found.tokenizer.fingerprint == tokenizer.fingerprint
  if not options:  # the same weights as T5X's files
    sides = dict(zip(('network', 'draft_network'), NETWORKS, strict=True))
    other = notebook.load(*files, **sides, tokenizer=tokenizer, **LENGTHS)
    outputs = found.generate(TEXTS)
    assert outputs == other.generate(TEXTS)
    assert all(done.tokens for done in outputs)


def test_what_a_folder_names_and_lacks(tmp_path, tokenizer):
  folder = save_folder(tmp_path / 'one', NETWORKS[0], 0, tokenizer.path)
  added = tmp_path / 'one' / 'added_tokens.json'
  added.write_text(json.dumps({'<hl>': 388}))
  with pytest.raises(ValueError, match="'<hl>': 388.*got 288"):
    specdec_jax.load(folder)
  added.unlink()
  generation = tmp_path / 'one' / 'generation_config.json'
  generation.write_text(json.dumps({'eos_token_id': [1, 5000]}))
  with pytest.raises(ValueError, match='eos_token_id .*has 288, got 5000'):
    specdec_jax.load(folder)


def test_a_drafter_of_another_vocabulary(tmp_path, tokenizer):
  target = save_folder(tmp_path / 'large', NETWORKS[0], 0, tokenizer.path)
  # As many ids, and other pieces.
  words = itertools.permutations('lorem ipsum dolor sit amet'.split(), 3)
  other = train_tokenizer(map(' '.join, words), tmp_path / 'other.model', 272)
  small = save_folder(tmp_path / 'same', NETWORKS[1], 1, other.path)
  with pytest.raises(ValueError, match='tokenizer: .*large.*id 2.*same'):
    notebook.load(target, small)
  # Those of one vocabulary come as far as the weights.
  (tmp_path / 'large' / 'model.safetensors').write_bytes(b'broken')
  shutil.copy(tokenizer.path, tmp_path / 'same' / 'spiece.model')
  with pytest.raises(ValueError, match='model.safetensors'):
    notebook.load(target, small)


def test_special_ids_of_a_folder(tmp_path, tokenizer):
  """As MADLAD-400 has them: 0 is unknown, 1 pads, 2 ends."""
  vocabulary = tmp_path / 'madlad.model'
  small_vocabulary.train_as_madlad(vocabulary)
  ids = config_json.SpecialIds(decoder_start=0, eos=(2,), pad=1)
  paths = save_pair(tmp_path, vocabulary, ids)
  found = notebook.load(*paths, **LENGTHS)
  assert found.codec.input_ids(TEXTS[0])[-1] == 2
  (score,) = found.score(TEXTS[:1], ['the tree'])
  ends = [*found.tokenizer.encode('the tree'), 2]
  assert found.score(TEXTS[:1], [ends]) == [score]

  # With T5's vocabulary nothing would ever end.
  with pytest.raises(ValueError, match='end in .* id 2, .* got 1'):
    notebook.load(paths[0], tokenizer=tokenizer)


def test_a_folder_without_its_vocabulary(tmp_path, tokenizer):
  folder = save_folder(tmp_path / 'alone', NETWORKS[0], 0)
  with pytest.raises(ValueError, match='tokenizer: .*alone'):
    notebook.load(folder)
  model = notebook.load(folder, tokenizer=tokenizer, **LENGTHS)
  assert model.tokenizer.path == tokenizer.path
  # transformers 5 saves tokenizer.json; a sentinel that the network has no
  # row for is never lost in silence.
  small_vocabulary.as_tokenizer_json(tokenizer.path, tmp_path / 'alone')
  model = notebook.load(folder, **LENGTHS)
  (done,) = model.generate(['the <extra_id_0>'], on_too_long='report')
  assert 'vocabulary of 288, got 387' in done.error


def test_bad_input(files, tokenizer, tmp_path, monkeypatch):
  target, draft = NETWORKS
  given = {'network': target, 'tokenizer': tokenizer}
  missing = tmp_path / 'missing.msgpack'
  side = {'draft_network': draft, **given}
  for paths, options, words in (
    ([missing], given, 'missing.msgpack'),
    ([files[0], missing], side, 'missing.msgpack'),
    (files[:1], {'tokenizer': tokenizer}, 'target.msgpack.* network=T5'),
    (files, given, 'draft.msgpack.* network=T5'),
    (files[:1], side, 'draft_network'),
    (files[1:], given, 'num_decoder_layers is 1, expected 2'),
    (files[:1], {'network': target}, 'tokenizer: '),
  ):
    with pytest.raises(ValueError, match=words):
      notebook.load(*paths, **options)
  monkeypatch.setattr(memory, 'device_bytes', lambda: 1 << 10)
  with pytest.raises(DoesNotFitError):
    notebook.load(files[0], **given)


# Decoder-only models: how their texts begin and end.


@pytest.fixture(scope='module')
def vocabularies(folder):
  """Two folders with one vocabulary of 300 ids, in files of other kinds."""
  return small_vocabulary.byte_level(folder)


def gpt2_folder(folder, vocabulary, **described):
  """A folder as transformers writes it, with a vocabulary."""
  shutil.copytree(vocabulary, folder)
  sized(folder, 'gpt2', GPT2, 300, **described)
  return folder


def test_a_pair_whose_vocabularies_are_other_files(tmp_path, vocabularies):
  numbered = enumerate(vocabularies)
  paths = [gpt2_folder(tmp_path / str(kind), made) for kind, made in numbered]
  model = notebook.load(*paths, **LENGTHS)
  own = Tokenizer(vocabularies[0])
  assert model.tokenizer.fingerprint == own.fingerprint


def test_ids_that_a_folder_names(tmp_path, vocabularies):
  one, _ = vocabularies
  eos = Tokenizer(one).eos_id
  for described, begin, ends in (
    ({}, eos, (eos,)),
    ({'eos_token_id': 7}, eos, (7,)),
    ({'eos_token_id': 7, 'bos_token_id': 8, 'pad_token_id': 7}, 8, (7,)),
    # transformers' defaults, whatever the vocabulary.
    ({'eos_token_id': 50256, 'bos_token_id': 50256}, eos, (eos,)),
  ):
    folder = gpt2_folder(tmp_path / str(described), one, **described)
    model = notebook.load(folder, **LENGTHS)
    assert (model.codec.bos_id, model.codec.stop_ids) == (begin, ends)
  # A fine-tune ends by others, as its generation_config.json says.
  settings = {'eos_token_id': [9, eos], 'pad_token_id': 299}
  (folder / 'generation_config.json').write_text(json.dumps(settings))
  assert notebook.load(folder, **LENGTHS).codec.stop_ids == (9, eos)
  folder = gpt2_folder(tmp_path / 'text', one, eos_token_id='x')
  with pytest.raises(ValueError, match="eos_token_id: .*'x'"):
    notebook.load(folder)


# How the texts of a folder begin and end.


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


def test_a_folder_with_its_vocabulary(tmp_path):
  """One id less is enough: the last special token is no text."""
  settings = {'eos_token': '<|endoftext|>'}
  folder = write_vocabulary(tmp_path, '<bos>', **settings)
  ends = json.dumps({'eos_token_id': [3, 5]})
  (folder / 'generation_config.json').write_text(ends)
  sized(folder, 'llama', folders.LLAMA, 267, bos_token_id=7)
  model = specdec_jax.load(folder)
  assert model.bos_id == 266 and model.stop_ids == (3, 5)


@pytest.mark.parametrize('begins', ['<bos>', None])
def test_a_text_begins_as_the_vocabulary_says(begins, tmp_path):
  """Without a config.json, or with one that names another id."""
  files = write_vocabulary(tmp_path, begins)
  alone, path = tmp_path / 'alone', tmp_path / 'model.msgpack'
  network = CausalLM(sized(alone, 'llama', folders.LLAMA, 268, bos_token_id=7))
  checkpoints.save_t5x(path, small_vocabulary.weights(network, 0), step=1)
  named = specdec_jax.load(path, network, tokenizer=files)
  engines = Engine(named), Engine(specdec_jax.load(alone), tokenizer=files)
  assert {engine.codec.bos_id for engine in engines} == {begins and 266}
  assert engines[0].num_input_tokens('') == (begins is not None)


def test_texts_of_a_t5gemma(tmp_path):
  """Texts begin as tokenizer.json says, and have no end of sequence."""
  folder = write_vocabulary(tmp_path, '<bos>', eos_token='<turn>')
  described = {'bos_token_id': 266, 'eos_token_id': [267, 3]}
  stacks, size = {}, {'vocab_size': 300}
  for name in ('encoder', 'decoder'):
    stacks[name] = dataclasses.replace(getattr(folders.T5GEMMA, name), **size)
    described[name] = folders.FOLDERS['t5gemma'][0][name] | size
  config = dataclasses.replace(folders.T5GEMMA, **stacks)
  write_folder(folder, 't5gemma', config=config, **described)
  model = specdec_jax.load(folder)
  assert model.bos_id == model.network.start_id == 266
  engine = Engine(model, max_input_len=16, max_decode_len=4)
  assert engine.codec.stop_ids == (267, 3)
  pieces = engine.tokenizer.encode('the red')
  request = engine.request(['the red', [5, 6]])
  assert request.inputs[0, : len(pieces) + 2].tolist() == [266, *pieces, 0]
  assert request.inputs[1, :4].tolist() == [266, 5, 6, 0]
  # Nothing at all is a text as well.
  assert all(one.tokens for one in engine.generate(['', 'the red']))


def test_the_command(tmp_path, capsys):
  nllb = write_nllb(tmp_path / 'nllb')
  sized(nllb, 'm2m_100', folders.NLLB, Tokenizer(nllb).vocab_size + 2)
  file = tmp_path / 'texts.txt'
  file.write_text('the red dog\na cat\n')
  flags = ['decode', '--target', str(nllb), '--mode', 'plain', str(file)]
  flags += ['--max-decode-len', '4', '--max-input-len', '16']
  assert main.main(flags)
  assert 'source_lang: expected the language' in capsys.readouterr().err
  main.main([*flags, '--source_lang', 'eng_Latn', '--target-lang', 'deu_Latn'])
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 2 and any(lines)


# What a folder asks of `generate`.

# A folder's settings: the options that do the same, and what none does.
SETTINGS = [
  # Nothing is sampled or searched for, and these decide nothing.
  ({'num_beams': 1, 'do_sample': False, 'temperature': 0.6}, '', ''),
  ({'do_sample': True, 'temperature': 0.6}, 'temperature', ''),
  ({'num_beams': 4, 'num_beam_groups': 2}, 'num_beams', 'num_beam_groups'),
  ({'num_beams': 4, 'early_stopping': True}, 'early_stopping, num_beams', ''),
  ({'max_new_tokens': 9, 'min_length': 5}, 'max_length, min_length', ''),
]


@pytest.mark.parametrize(('settings', 'options', 'others'), SETTINGS)
def test_what_a_folder_asks_of_generate(settings, options, others):
  _, text = config_json.read_settings(settings, 'x.json')
  assert bool(text) == bool(options or others)
  assert f'do so: {options}.' in text or not options
  assert f'does: {others}.' in text or not others


@pytest.mark.parametrize(
  ('name', 'value', 'expected'),
  [
    ('repetition_penalty', 'x', 'a finite number from 0.01 to 100'),
    ('no_repeat_ngram_size', 1.5, 'a whole number from 0 to 2147483647'),
    ('forced_eos_token_id', [1], 'a whole number or None'),
    ('suppress_tokens', 'all', 'a sequence, each a whole number'),
  ],
)
def test_a_rule_of_another_type_is_named(name, value, expected):
  settings = {name: value, 'num_beams': 4}
  rules, text = config_json.read_settings(settings, 'x.json')
  assert not rules and 'x.json asks for num_beams=4' in text
  assert f'x.json: {name}: expected {expected}, got {value!r}' in text


def test_an_engine_says_what_is_not_followed(tmp_path, tokenizer):
  """Of its target alone; config.json counts where there is no other file."""
  network = small_vocabulary.network(1)
  save_folder(tmp_path, network, 0)
  (tmp_path / 'generation_config.json').unlink()
  file = tmp_path / 'config.json'
  settings = {'num_beams': 4, 'no_repeat_ngram_size': 3, 'guidance_scale': 2}
  file.write_text(json.dumps(json.loads(file.read_text()) | settings))
  model = specdec_jax.load(tmp_path, tokenizer=tokenizer)
  other = Model(network, small_vocabulary.weights(network, 0), tokenizer)
  limits = dict(max_input_len=8, max_decode_len=4)
  words = r'config.json.* num_beams=4, .*No option does: guidance_scale'
  with pytest.warns(UserWarning, match=words) as told:
    engine = Engine(model, other, **limits)
  assert len(told) == 1
  assert engine.request(['a']).token_rules.no_repeat_ngram_size[0] == 3
  Engine(other, model, **limits)


# Folders of the hub.


@pytest.fixture
def hub(tmp_path, tokenizer, monkeypatch):
  """Puts a hub with one model in place, which lies there as a folder.

  Returns the folder, and a list of the revisions asked for. It also has another
  framework's weights.
  """
  source, revisions = tmp_path / 'model', []
  save_folder(source, NETWORKS[1], 0, tokenizer.path)
  (source / 'pytorch_model.bin').write_bytes(b'large')

  def snapshot_download(hub_id, revision, allow_patterns):
    if hub_id != 'someone/tiny-t5':
      raise RuntimeError(f'404 \n for {hub_id}')
    revisions.append(revision)
    folder = tmp_path / f'cache{len(revisions)}'
    folder.mkdir()
    for path in source.iterdir():
      if any(fnmatch.fnmatch(path.name, p) for p in allow_patterns):
        shutil.copy(path, folder)
    return str(folder)

  hub = types.SimpleNamespace(snapshot_download=snapshot_download)
  monkeypatch.setitem(sys.modules, 'huggingface_hub', hub)
  monkeypatch.chdir(tmp_path)
  return source, revisions


def test_a_model_of_the_hub(hub):
  on_hub, revisions = hub
  there = notebook.load('someone/tiny-t5', **LENGTHS)
  names = {path.name for path in (on_hub.parent / 'cache1').iterdir()}
  assert {'config.json', 'model.safetensors', 'spiece.model'} <= names
  assert 'pytorch_model.bin' not in names
  here = notebook.load(on_hub, **LENGTHS)
  assert there.fingerprints == here.fingerprints
  assert there.tokenizer.fingerprint == here.tokenizer.fingerprint
  huggingface.fetch('someone/tiny-t5@refs/pr/1')
  assert revisions == [None, 'refs/pr/1']


def test_paths_are_not_asked_of_the_hub(hub, tmp_path):
  """Not those that are mistyped, nor one with a revision."""
  for path in (tmp_path, 'org/model@v2'):
    with pytest.raises(ValueError, match="revision: .*, got 'main'"):
      specdec_jax.load(path, revision='main')
  (tmp_path / 'hf').mkdir()
  for path in ('hf/modle', 'model.msgpack', '/a/b', './x/y', 'a/b/c@v1'):
    with pytest.raises(ValueError, match=f"{path}': No such file or folder."):
      specdec_jax.load(path)
  assert not hub[1]


def test_what_the_hub_does_not_have(hub):
  words = r"'someone/other' could not be fetched .*RuntimeError: 404 for"
  with pytest.raises(ValueError, match=words):
    notebook.load('someone/other', **LENGTHS)
  (hub[0] / 'model.safetensors').unlink()
  with pytest.raises(ValueError, match="tiny-t5' .* no model.*@refs/pr"):
    huggingface.fetch('someone/tiny-t5')
