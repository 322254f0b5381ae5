"""Pairs from folders and files: what is loaded, and what is refused."""

import dataclasses
import itertools
import json
import shutil

import jax
import numpy as np
import pytest

import small_vocabulary
import specdec_jax
from folders import write_folder
from specdec_jax import notebook
from specdec_jax.checkpoints import (
  config_json,
  huggingface,
  save_t5x,
)
from specdec_jax.checks import memory
from specdec_jax.checks.memory import DoesNotFitError
from specdec_jax.models.gpt import GPT
from specdec_jax.models.t5 import T5
from specdec_jax.notebook import Interactive
from specdec_jax.partitioning import Placement
from specdec_jax.text.tokenizer import Tokenizer, train_tokenizer
from toy_families import GPT2, T5X

TEXTS = ['the old house sings', 'a red dog', 'the tree']
LENGTHS = {'max_input_len': 32, 'max_decode_len': 12, 'gamma': 3}


def save_folder(folder, network, seed, vocabulary=None, ids=config_json.T5_IDS):
  """A Hugging Face folder, with its vocabulary as its authors leave it."""
  params = small_vocabulary.weights(network, seed)
  huggingface.save_huggingface(folder, network.config, params, ids=ids)
  if vocabulary is not None:
    shutil.copy(vocabulary, folder / 'spiece.model')
  return str(folder)


@pytest.fixture(scope='module')
def networks():
  return small_vocabulary.network(2), small_vocabulary.network(1)


@pytest.fixture(scope='module')
def files(folder, networks):
  """The pair as T5X's files, which do not describe themselves."""
  names = ('target.msgpack', 'draft.msgpack')
  for seed, (network, name) in enumerate(zip(networks, names, strict=True)):
    save_t5x(folder / name, small_vocabulary.weights(network, seed), step=1)
  return [folder / name for name in names]


@pytest.fixture(scope='module')
def model(files, networks, tokenizer) -> Interactive:
  return notebook.load(
    *files,
    network=networks[0],
    draft_network=networks[1],
    tokenizer=tokenizer.path,
    **LENGTHS,
  )


@pytest.mark.parametrize(
  'options',
  [{}, {'dtype': 'bfloat16'}, {'placement': Placement('bfloat16')}],
)
def test_folders_describe_themselves(
  tmp_path, networks, tokenizer, model, options
):
  paths = [
    save_folder(tmp_path / str(seed), network, seed, tokenizer.path)
    for seed, network in enumerate(networks)
  ]
  found = notebook.load(*paths, **options, **LENGTHS)
  want = 'bfloat16' if options else 'float32'
  if 'placement' not in options:
    for side, network in zip(('target', 'draft'), networks, strict=True):
      config = dataclasses.replace(network.config, dtype=want)
      assert found.models[side].network == T5(config)
  leaves = jax.tree.leaves(found.params.target)
  assert {str(leaf.dtype) for leaf in leaves} == {want}
  assert found.models['target'].network.config.dtype == want
  assert found.tokenizer.fingerprint == tokenizer.fingerprint
  if not options:  # the same weights as T5X's files
    outputs = found.generate(TEXTS)
    assert outputs == model.generate(TEXTS)
    assert len(outputs) == len(TEXTS) and all(done.tokens for done in outputs)


def test_a_folder_of_each_kind(tmp_path, networks, tokenizer):
  """What transformers 5 saves has tokenizer.json in spiece.model's place."""
  target = save_folder(tmp_path / 'new', networks[0], 0)
  small_vocabulary.as_tokenizer_json(tokenizer.path, tmp_path / 'new')
  small = save_folder(tmp_path / 'small', networks[1], 1, tokenizer.path)
  old = save_folder(tmp_path / 'old', networks[0], 0, tokenizer.path)
  found, other = (
    notebook.load(path, small, **LENGTHS) for path in (target, old)
  )
  for text in TEXTS:
    ids = other.input_ids(text)
    assert found.input_ids(text) == ids
    assert found.tokenizer.decode(ids) == other.tokenizer.decode(ids) == text
  # A sentinel that the network has no row for is never lost in silence.
  (done,) = found.generate(['the <extra_id_0>'], on_too_long='report')
  assert 'vocabulary of 288, got 387' in done.error


def test_what_a_folder_names_and_lacks(tmp_path, networks, tokenizer):
  folder = save_folder(tmp_path / 'one', networks[0], 0, tokenizer.path)
  added = tmp_path / 'one' / 'added_tokens.json'
  added.write_text(json.dumps({'<hl>': 388}))
  with pytest.raises(ValueError, match="'<hl>': 388.*got 288"):
    specdec_jax.load(folder)
  added.unlink()
  generation = tmp_path / 'one' / 'generation_config.json'
  generation.write_text(json.dumps({'eos_token_id': [1, 5000]}))
  with pytest.raises(ValueError, match='eos_token_id .*has 288, got 5000'):
    specdec_jax.load(folder)


def test_a_drafter_of_another_vocabulary(tmp_path, networks, tokenizer):
  target = save_folder(tmp_path / 'large', networks[0], 0, tokenizer.path)
  size = small_vocabulary.VOCAB_SIZE + 2000
  wider = small_vocabulary.network(1, size)
  small = save_folder(tmp_path / 'small', wider, 1, tokenizer.path)
  with pytest.raises(ValueError, match=f"model's vocabulary: .* got {size}"):
    notebook.load(target, small)

  # As many ids, and other pieces.
  words = itertools.permutations('lorem ipsum dolor sit amet'.split(), 3)
  other = train_tokenizer(map(' '.join, words), tmp_path / 'other.model', 272)
  small = save_folder(tmp_path / 'same', networks[1], 1, other.path)
  with pytest.raises(ValueError, match='tokenizer: .*large.*id 2.*same'):
    notebook.load(target, small)
  # Those of one vocabulary come as far as the weights.
  (tmp_path / 'large' / 'model.safetensors').write_bytes(b'broken')
  shutil.copy(tokenizer.path, tmp_path / 'same' / 'spiece.model')
  with pytest.raises(ValueError, match='model.safetensors'):
    notebook.load(target, small)


def test_special_ids_of_a_folder(tmp_path, networks, tokenizer):
  """As MADLAD-400 has them: 0 is unknown, 1 pads, 2 ends."""
  vocabulary = tmp_path / 'madlad.model'
  small_vocabulary.train_as_madlad(vocabulary)
  ids = config_json.SpecialIds(decoder_start=0, eos=(2,), pad=1)
  paths = [
    save_folder(tmp_path / str(seed), network, seed, vocabulary, ids)
    for seed, network in enumerate(networks)
  ]
  found = notebook.load(*paths, **LENGTHS)
  assert found.input_ids(TEXTS[0])[-1] == 2
  fast = [one.tokens for one in found.generate(TEXTS)]
  (score,) = found.score(TEXTS[:1], ['the tree'])
  ends = [*found.tokenizer.encode('the tree'), 2]
  assert found.score(TEXTS[:1], [ends]) == [score]

  # With T5's vocabulary nothing would ever end.
  with pytest.raises(ValueError, match='end in .* id 2, .* got 1'):
    notebook.load(paths[0], tokenizer=tokenizer)

  # Where several ids end an output, each does.
  tokens = fast[0]
  stop = next(t for t in tokens[1:] if t != tokens[0])
  settings = tmp_path / '0' / huggingface.generation.FILE
  settings.write_text(json.dumps({'eos_token_id': [2, stop]}))
  found = notebook.load(paths[0], **LENGTHS)
  done = found.generate(TEXTS)[0]
  assert done.tokens == tokens[: tokens.index(stop) + 1]
  assert done.finish_reason == 'stop'
  plain = found.generate(TEXTS, stop_ids=[2])
  assert [one.tokens for one in plain] == fast


def test_a_folder_without_its_vocabulary(tmp_path, networks, tokenizer):
  folder = save_folder(tmp_path / 'alone', networks[0], 0)
  with pytest.raises(ValueError, match='tokenizer: .*alone'):
    notebook.load(folder)
  model = notebook.load(folder, tokenizer=tokenizer, **LENGTHS)
  assert model.tokenizer.path == tokenizer.path
  # Without a drafter, decoding is plain unless it is asked for.
  (done,) = model.generate(TEXTS[:1])
  assert done.stats.num_target_calls == done.stats.num_tokens
  with pytest.raises(ValueError, match='needs a drafter'):
    model.trace(TEXTS[0])


def test_bad_input(files, networks, tokenizer, tmp_path, monkeypatch):
  target, draft = networks
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


def test_models_trained_here_begin_with_id_0(folder, tokenizer):
  size = small_vocabulary.VOCAB_SIZE
  network = GPT(dataclasses.replace(T5X, vocab_size=size))
  path = folder / 'lm.msgpack'
  save_t5x(path, small_vocabulary.weights(network, 0), step=1)
  model = notebook.load(path, network=network, tokenizer=tokenizer, **LENGTHS)
  assert model.bos_id == 0 != tokenizer.eos_id
  # So it is without a notebook, wherever the vocabulary is given.
  loaded = specdec_jax.load(path, network)
  assert specdec_jax.Engine(loaded, tokenizer=tokenizer).bos_id == 0
  assert model.input_ids('a dog') == [0, *tokenizer.encode('a dog')]
  (score,) = model.score([''], [[5, 6]])
  for first in (0, 1):  # control: of texts that begin otherwise
    read = np.array([[first, 5]])
    logits = jax.jit(network.logits)(model.params.target, None, read)
    want = jax.nn.log_softmax(logits[0])[(0, 1), (5, 6)]
    near = score.log_probs == pytest.approx(want.tolist(), abs=1e-3)
    assert near == (not first)


@pytest.fixture(scope='module')
def vocabularies(folder):
  """Two folders with one vocabulary of 300 ids, in files of other kinds."""
  return small_vocabulary.byte_level(folder)


def gpt2_folder(folder, vocabulary, **described):
  """A folder as transformers writes it, with a vocabulary."""
  folder.mkdir()
  config = dataclasses.replace(GPT2, vocab_size=300)
  write_folder(folder, 'gpt2', config=config, vocab_size=300, **described)
  shutil.copytree(vocabulary, folder, dirs_exist_ok=True)
  return folder


def test_a_pair_whose_vocabularies_are_other_files(tmp_path, vocabularies):
  own = Tokenizer(vocabularies[0])
  ids = {'eos_token_id': own.eos_id, 'bos_token_id': own.eos_id}
  model = notebook.load(
    *(
      gpt2_folder(tmp_path / str(kind), vocabulary, **ids)
      for kind, vocabulary in enumerate(vocabularies)
    ),
    **LENGTHS,
  )
  assert model.bos_id == own.eos_id and model.stop_ids == (own.eos_id,)
  assert model.tokenizer.fingerprint == own.fingerprint
  ids = [own.eos_id, *own.encode('the red dog')]
  assert model.input_ids('the red dog') == ids
  texts = ['the red dog', '']
  tokens = [done.tokens for done in model.generate(texts)]
  plain = model.generate(texts, speculative=False)
  assert tokens == [done.tokens for done in plain] and all(tokens)


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
  # A fine-tune ends by others, as its generation_config.json says.
  settings = {'eos_token_id': [9, eos], 'pad_token_id': 299}
  (folder / 'generation_config.json').write_text(json.dumps(settings))
  assert notebook.load(folder, **LENGTHS).stop_ids == (9, eos)
  folder = gpt2_folder(tmp_path / 'text', one, eos_token_id='x')
  with pytest.raises(ValueError, match="eos_token_id: .*'x'"):
    notebook.load(folder)
