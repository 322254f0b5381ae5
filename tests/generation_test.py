"""What a folder asks of `generate`, and what an engine says of it."""

import json

import jax
import pytest

import small_vocabulary
import specdec_jax
from folders import needs_safetensors
from specdec_jax.checkpoints import generation, huggingface
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.request import options_of
from specdec_jax.models.model import Model

# A folder's settings: the options that do the same, and what none does.
SETTINGS = [
  # Nothing is sampled or searched for, and these decide nothing.
  ({'num_beams': 1, 'do_sample': False, 'temperature': 0.6}, None, None),
  (
    {'do_sample': True, 'temperature': 0.6, 'repetition_penalty': 1.1},
    {'temperature': 0.6, 'top_k': 50, 'top_p': 1.0},
    ['repetition_penalty'],
  ),
  (
    {'num_beams': 4, 'max_length': 143, 'early_stopping': True},
    {'num_beams': 4, 'length_penalty': 1.0, 'max_length': 142},
    ['early_stopping'],
  ),
  ({'num_beams': 2, 'do_sample': True}, {}, ['num_beams', 'do_sample']),
  (
    {'max_new_tokens': 9, 'max_length': 200, 'min_length': 5},
    {'max_length': 9, 'min_length': 4},
    [],
  ),
  ({'bad_words_ids': [[3, 4]]}, {}, ['bad_words_ids']),
  ({'forced_eos_token_id': [1]}, {}, ['forced_eos_token_id']),
  ({'suppress_tokens': [2]}, {}, ['suppress_tokens']),
]


@pytest.mark.parametrize(('settings', 'options', 'others'), SETTINGS)
def test_what_a_folder_asks_of_generate(settings, options, others):
  found = generation.read_defaults(settings, 'x.json', True)
  if options is None:
    assert found is None
    return
  assert (found.options, found.others) == (options, others)
  options_of(found.options)
  for name, value in settings.items():
    assert f'{name}={value}' in str(found)
  if 'max_length' in settings and 'max_new_tokens' not in settings:
    # Theirs counts the prompt of a model without an encoder.
    found = generation.read_defaults(settings, 'x.json', False)
    assert 'max_length' in found.others


def test_a_setting_of_a_wrong_type_is_named():
  for name, value in (('num_beams', 'four'), ('bad_words_ids', [3])):
    with pytest.raises(ValueError, match=rf'x\.json: .*\b{name}: expected'):
      generation.read_defaults({name: value}, 'x.json', True)


@needs_safetensors
@pytest.mark.parametrize('file', ['config.json'])
def test_an_engine_says_what_is_not_followed(file, tmp_path, tokenizer):
  """Of its target alone; config.json counts where there is no other file."""
  network = small_vocabulary.network(1)
  params = network.init(jax.random.key(0))
  huggingface.save_huggingface(tmp_path, network.config, params)
  if file == 'config.json':
    (tmp_path / 'generation_config.json').unlink()
  said = json.loads((tmp_path / file).read_text())
  settings = {'num_beams': 4, 'no_repeat_ngram_size': 3}
  (tmp_path / file).write_text(json.dumps(said | settings))
  model = specdec_jax.load(tmp_path, tokenizer=tokenizer)
  assert model.defaults.options == {'num_beams': 4, 'length_penalty': 1.0}
  other = Model(network, params, tokenizer)
  limits = dict(max_input_len=8, max_decode_len=4)
  words = rf'{file}.* num_beams=4, .*No option does: no_repeat_ngram_size'
  with pytest.warns(UserWarning, match=words) as told:
    Engine(model, other, **limits)
  assert len(told) == 1
  Engine(other, model, **limits)
