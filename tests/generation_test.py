"""What a folder asks of `generate`, and what an engine says of it."""

import dataclasses
import json

import pytest

import small_vocabulary
import specdec_jax
from load_pair_test import save_folder
from specdec_jax.checkpoints import generation
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.request import Options
from specdec_jax.models.model import Model

# A folder's settings: the options that do the same, and what none does.
SETTINGS = [
  # Nothing is sampled or searched for, and these decide nothing.
  ({'num_beams': 1, 'do_sample': False, 'temperature': 0.6}, '', ''),
  (
    {'do_sample': True, 'temperature': 0.6, 'repetition_penalty': 1.1},
    'temperature',
    'repetition_penalty',
  ),
  (
    {'num_beams': 4, 'max_length': 143, 'early_stopping': True},
    'max_length, num_beams',
    'early_stopping',
  ),
  ({'max_new_tokens': 9, 'min_length': 5}, 'max_length, min_length', ''),
  ({'bad_words_ids': [[3, 4]]}, '', 'bad_words_ids'),
  ({'forced_eos_token_id': [1]}, '', 'forced_eos_token_id'),
]


@pytest.mark.parametrize(('settings', 'options', 'others'), SETTINGS)
def test_what_a_folder_asks_of_generate(settings, options, others):
  text = generation.unfollowed(settings, 'x.json')
  assert bool(text) == bool(options or others)
  assert f'do so: {options}.' in text or not options
  assert f'does: {others}.' in text or not others
  for name, value in settings.items():
    assert f'{name}={value}' in text or not text


def test_options_are_those_of_an_engine():
  names = {field.name for field in dataclasses.fields(Options)}
  assert names >= {*generation.OPTIONS.values()}
  assert generation.OPTIONS.keys() <= generation.SETTINGS.keys()


def test_an_engine_says_what_is_not_followed(tmp_path, tokenizer):
  """Of its target alone; config.json counts where there is no other file."""
  network = small_vocabulary.network(1)
  save_folder(tmp_path, network, 0)
  (tmp_path / 'generation_config.json').unlink()
  file = tmp_path / 'config.json'
  settings = {'num_beams': 4, 'no_repeat_ngram_size': 3}
  file.write_text(json.dumps(json.loads(file.read_text()) | settings))
  model = specdec_jax.load(tmp_path, tokenizer=tokenizer)
  other = Model(network, small_vocabulary.weights(network, 0), tokenizer)
  limits = dict(max_input_len=8, max_decode_len=4)
  words = r'config.json.* num_beams=4, .*No option does: no_repeat_ngram_size'
  with pytest.warns(UserWarning, match=words) as told:
    Engine(model, other, **limits)
  assert len(told) == 1
  Engine(other, model, **limits)
