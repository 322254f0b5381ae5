"""What a Hugging Face folder asks of transformers' `generate`.

The defaults of this library hold at every door, whatever a folder asks for:
outputs are greedy and end at the engine's length. What a folder asks for beside
that is said once, when an engine is made of its model, with the options that do
the same here.
"""

from collections.abc import Mapping
from typing import Any

from specdec_jax.checks.fields import shortened

FILE = 'generation_config.json'
# Settings of `generate` that change outputs, by the value that asks for
# nothing. Others change how it computes or what it returns, and special ids are
# read elsewhere.
_NEUTRAL: tuple[tuple[Any, str], ...] = (
  (False, 'do_sample early_stopping token_healing'),
  (0, 'min_length min_new_tokens no_repeat_ngram_size'),
  (0, 'encoder_no_repeat_ngram_size diversity_penalty'),
  (0, 'epsilon_cutoff eta_cutoff min_p'),
  (1, 'num_beam_groups num_beams num_return_sequences'),
  (1, 'encoder_repetition_penalty guidance_scale length_penalty'),
  (1, 'repetition_penalty temperature top_h top_p typical_p'),
  (50, 'top_k'),
  (None, 'max_length max_new_tokens max_time penalty_alpha stop_strings'),
  (None, 'forced_bos_token_id forced_eos_token_id force_words_ids'),
  (None, 'bad_words_ids begin_suppress_tokens suppress_tokens sequence_bias'),
  (None, 'constraints dola_layers exponential_decay_length_penalty'),
  (None, 'watermarking_config'),
)
SETTINGS = {name: none for none, names in _NEUTRAL for name in names.split()}
# Settings that change nothing unless outputs are sampled, or searched for.
_OF_SAMPLES = (
  'epsilon_cutoff eta_cutoff min_p temperature top_h top_k top_p typical_p'
).split()
_OF_BEAMS = (
  'diversity_penalty early_stopping length_penalty num_beam_groups'
).split()
# Settings -> the options of `Engine.generate` that do the same.
OPTIONS = {
  'do_sample': 'temperature',
  'length_penalty': 'length_penalty',
  'max_length': 'max_length',
  'max_new_tokens': 'max_length',
  'min_length': 'min_length',
  'min_new_tokens': 'min_length',
  'num_beams': 'num_beams',
  'num_return_sequences': 'num_samples',
  'stop_strings': 'stop_strings',
  'temperature': 'temperature',
  'top_k': 'top_k',
  'top_p': 'top_p',
}


def unfollowed(described: Mapping[str, Any], where: str) -> str:
  """A sentence on what a folder asks for and does not get; '' for nothing.

  Args:
    described: generation_config.json; config.json where there is none.
    where: the path of that file, for messages.
  """
  values = {
    name: value
    for name, value in described.items()
    if name in SETTINGS and value is not None
  }
  samples = values.get('do_sample', False)
  searches = values.get('num_beams', 1) != 1
  settings = {
    name: shortened(value)
    for name, value in values.items()
    if value not in (SETTINGS[name], [])
    and (samples or name not in _OF_SAMPLES)
    and (searches or name not in _OF_BEAMS)
  }
  if not settings:
    return ''
  listed = ', '.join(f'{name}={value}' for name, value in settings.items())
  options = {OPTIONS[name] for name in settings if name in OPTIONS}
  others = [name for name in settings if name not in OPTIONS]
  text = f'{where} asks for {listed}: not followed.'
  if options:
    text += f' Options that do so: {", ".join(sorted(options))}.'
  return text + (f' No option does: {", ".join(others)}.' if others else '')
