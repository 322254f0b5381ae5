"""Pairs from folders and files: what is loaded, and what is refused."""

import dataclasses
import importlib.util
import itertools
import json
import shutil

import jax
import pytest

import small_vocabulary
import specdec_jax
from specdec_jax import notebook
from specdec_jax.checkpoints import (
  config_json,
  huggingface,
  save_t5x,
)
from specdec_jax.checks import memory
from specdec_jax.checks.memory import DoesNotFitError
from specdec_jax.models.t5 import T5
from specdec_jax.notebook import Interactive
from specdec_jax.partitioning import Placement
from specdec_jax.text.tokenizer import train_tokenizer

TEXTS = ['the old house sings', 'a red dog', 'the tree']
LENGTHS = {'max_input_len': 32, 'max_decode_len': 12}

needs_safetensors = pytest.mark.skipif(
  importlib.util.find_spec('safetensors') is None,
  reason="needs safetensors: pip install 'specdec_jax[huggingface]'",
)


def draw(network: T5, seed: int):
  return network.init(jax.random.key(seed))


def save_folder(folder, network, seed, vocabulary=None, ids=config_json.T5_IDS):
  """A Hugging Face folder, with its vocabulary as its authors leave it."""
  params = draw(network, seed)
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
    save_t5x(folder / name, draw(network, seed), step=1)
  return [folder / name for name in names]


@pytest.fixture(scope='module')
def model(files, networks, tokenizer) -> Interactive:
  return notebook.load(
    *files,
    network=networks[0],
    draft_network=networks[1],
    tokenizer=tokenizer.path,
    gamma=3,
    **LENGTHS,
  )


@needs_safetensors
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
  found = notebook.load(*paths, gamma=3, **options, **LENGTHS)
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


@needs_safetensors
def test_a_folder_of_each_kind(tmp_path, networks, tokenizer):
  """What transformers 5 saves has tokenizer.json in spiece.model's place."""
  target = save_folder(tmp_path / 'new', networks[0], 0)
  small_vocabulary.as_tokenizer_json(tokenizer.path, tmp_path / 'new')
  small = save_folder(tmp_path / 'small', networks[1], 1, tokenizer.path)
  old = save_folder(tmp_path / 'old', networks[0], 0, tokenizer.path)
  found = notebook.load(target, small, gamma=3, **LENGTHS)
  other = notebook.load(old, small, gamma=3, **LENGTHS)
  tokens = [done.tokens for done in other.generate(TEXTS)]
  assert [done.tokens for done in found.generate(TEXTS)] == tokens
  # A sentinel that the network has no row for is never lost in silence.
  (done,) = found.generate(['the <extra_id_0>'], on_too_long='report')
  assert 'vocabulary of 288, got 387' in done.error


@needs_safetensors
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


@needs_safetensors
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


@needs_safetensors
def test_special_ids_of_a_folder(tmp_path, networks, tokenizer):
  """As MADLAD-400 has them: 0 is unknown, 1 pads, 2 ends."""
  vocabulary = tmp_path / 'madlad.model'
  small_vocabulary.train_as_madlad(vocabulary)
  ids = config_json.SpecialIds(decoder_start=0, eos=(2,), pad=1)
  paths = [
    save_folder(tmp_path / name, network, seed, vocabulary, ids)
    for seed, (name, network) in enumerate(
      zip(('large', 'small'), networks, strict=True)
    )
  ]
  found = notebook.load(*paths, gamma=3, **LENGTHS)
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
  settings = tmp_path / 'large' / huggingface.generation.FILE
  settings.write_text(json.dumps({'eos_token_id': [2, stop]}))
  found = notebook.load(paths[0], **LENGTHS)
  done = found.generate(TEXTS)[0]
  assert done.tokens == tokens[: tokens.index(stop) + 1]
  assert done.finish_reason == 'stop'
  plain = found.generate(TEXTS, stop_ids=[2])
  assert [one.tokens for one in plain] == fast


@needs_safetensors
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
    model.generate(TEXTS, speculative=True)
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
