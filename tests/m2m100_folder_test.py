"""Folders of NLLB-200: what is read, what is refused, and the command."""

import dataclasses
import functools
import importlib.util
import io
import json

import flax.traverse_util
import jax
import numpy as np
import pytest
import rich.console

import specdec_jax
import tokenizer_m2m_test
from languages_test import LANGUAGES, PAIR, vocabulary, write_vocabulary
from m2m100_test import SMALL, make
from specdec_jax import infer
from specdec_jax.checkpoints import m2m100_names
from specdec_jax.cli import main
from specdec_jax.engine.engine import Engine
from specdec_jax.models.model import Model
from specdec_jax.text.local_tasks import LocalTask
from specdec_jax.text.tokenizer_m2m import M2MTokenizer

__all__ = ['vocabulary']  # a fixture
pytestmark = pytest.mark.skipif(
  any(
    importlib.util.find_spec(name) is None
    for name in ('safetensors', 'tokenizers')
  ),
  reason="needs safetensors and tokenizers: pip install 'specdec_jax[hub,bpe]'",
)


def save(folder, model, config):
  """A folder as transformers writes it, with the vocabulary beside it."""
  import safetensors.numpy

  table = m2m100_names.table(config)
  flat = flax.traverse_util.flatten_dict(model.params, sep='/')
  arrays = {}
  for name, row in table.items():
    array = np.asarray(flat[name]) / np.float32(row.scale)
    arrays[row.name] = np.ascontiguousarray(
      array.T if row.transposed else array
    )
  safetensors.numpy.save_file(arrays, folder / 'model.safetensors')
  fields = m2m100_names.FIELDS.items()
  described = {theirs: getattr(config, ours) for ours, theirs in fields}
  described |= {
    'model_type': 'm2m_100',
    'decoder_attention_heads': config.num_heads,
    'decoder_ffn_dim': config.mlp_dim,
    'decoder_start_token_id': 2,
    'eos_token_id': 2,
    'pad_token_id': 1,
    'max_length': 200,
    'scale_embedding': True,
  }
  (folder / 'config.json').write_text(json.dumps(described))
  return described


@pytest.fixture(scope='module')
def saved(folder, vocabulary):
  place = folder / 'saved'
  # Heads times their size is the width, as in all folders.
  size = vocabulary.vocab_size + 2
  config = dataclasses.replace(SMALL, vocab_size=size, head_dim=8)
  model = Model(*make(config, seed=4))
  write_vocabulary(place)
  return place, model, save(place, model, config)


def test_a_folder_with_m2m100s_own_vocabulary(tmp_path):
  """Without tokenizer.json; it has eight ids more than tokens."""
  own = M2MTokenizer(tokenizer_m2m_test.write(tmp_path / 'm2m'))
  size = own.vocab_size + 8
  config = dataclasses.replace(SMALL, vocab_size=size, head_dim=8)
  model = Model(*make(config, seed=4))
  save(tmp_path / 'm2m', model, config)
  found = specdec_jax.load(tmp_path / 'm2m')
  assert found.tokenizer.fingerprint == own.fingerprint
  limits = dict(max_input_len=32, max_decode_len=16)
  engine = Engine(found, found, gamma=2, **limits)
  english, german = (own.languages[name] for name in ('en', 'de'))
  ids = own.encode('the red dog')
  assert engine.input_ids('the red dog', 'en') == [english, *ids, 2]
  (have,) = engine.generate(['the red dog'], source_lang='en', target_lang='de')
  (want,) = engine.generate(
    [[english, *ids, 2]], prompts=[[german]], speculative=False
  )
  assert have.tokens == want.tokens and have.tokens


def test_a_folder_is_read(saved):
  place, want, _ = saved
  model = specdec_jax.load(place)
  assert model.network == want.network
  assert model.stop_ids == (2,) and model.bos_id is None
  assert list(model.tokenizer.languages) == list(LANGUAGES)
  for have, one in zip(
    jax.tree.leaves(model.params), jax.tree.leaves(want.params), strict=True
  ):
    np.testing.assert_allclose(have, one, rtol=1e-6)


def test_the_command(saved, tmp_path, capsys):
  place, _, _ = saved
  file = tmp_path / 'texts.txt'
  file.write_text('the red dog\na cat\n')
  flags = ['decode', '--target', str(place), '--draft', str(place)]
  flags += ['--max-length', '8', '--max-input-length', '64', str(file)]
  languages = ['--source_lang', 'eng_Latn', '--target-lang', 'deu_Latn']
  main.main([*flags, *languages])
  lines = capsys.readouterr().out.splitlines()
  engine = Engine(specdec_jax.load(place), max_input_len=64, max_decode_len=8)
  texts = ['the red dog', 'a cat']
  want = [one.text for one in engine.generate(texts, **PAIR)]
  assert lines == want and any(want)
  assert main.main(flags)
  assert 'source_lang is missing' in capsys.readouterr().err
  assert main.main([*flags, '--source-lang', 'eng_Latin'])
  assert 'Nearest known: eng_Latn' in capsys.readouterr().err


@pytest.mark.parametrize(
  ('change', 'said'),
  [
    ({'normalize_before': False}, 'normalize_before = False'),
    ({'decoder_ffn_dim': 7}, 'decoder_ffn_dim is 7; the network here has 40'),
    ({'decoder_start_token_id': 2.5}, 'M2M100Config.start_id'),
    ({'activation_function': 'gelu'}, 'activation_function'),
    ({'tie_word_embeddings': False}, 'tie_word_embeddings is False'),
    ({'encoder_attention_heads': 5, 'decoder_attention_heads': 5}, 'multiple'),
    ({'d_model': None}, 'd_model'),
    ({'forced_bos_token_id': 5}, 'forced_bos_token_id = 5'),
  ],
  ids=str,
)
def test_configurations_that_are_refused(change, said, saved, tmp_path):
  place, _, described = saved
  for file in place.iterdir():
    (tmp_path / file.name).write_bytes(file.read_bytes())
  (tmp_path / 'config.json').write_text(json.dumps(described | change))
  with pytest.raises(ValueError, match=said):
    specdec_jax.load(tmp_path)


@pytest.mark.parametrize('mode', ['predict', 'score'])
def test_a_task_has_its_languages(mode, saved, tmp_path):
  place, _, _ = saved
  texts, targets = ['the red dog', 'a cat'], ['the old dog', 'the cat']
  file = tmp_path / 'pairs.tsv'
  rows = zip(texts, targets, strict=True)
  file.write_text(''.join('\t'.join(row) + '\n' for row in rows))
  model = specdec_jax.load(place)
  infer.decode_task(
    infer.TaskConfig(
      functools.partial(Engine, model),
      model.tokenizer,
      LocalTask('pairs', {'test': str(file)}, place, **PAIR),
      str(tmp_path / 'out'),
      mode=mode,
      decoding='plain',
      metrics=(),
    ),
    console=rich.console.Console(file=io.StringIO()),
  )
  path = tmp_path / 'out' / f'pairs-{mode}.jsonl-00000-of-00001'
  found = [json.loads(line) for line in path.read_text().splitlines()]
  engine = Engine(model, **PAIR)
  if mode == 'score':
    want = [one.total for one in engine.score(texts, targets)]
    np.testing.assert_allclose([one['score'] for one in found], want, rtol=1e-4)
    return
  longest = max(len(engine.tokenizer.encode(one)) for one in targets) + 1
  want = [one.text for one in engine.generate(texts, max_length=longest)]
  assert [one['prediction'] for one in found] == want and any(want)
