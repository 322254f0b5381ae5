"""Reads a Hugging Face folder's settings for transformers' `generate`.

Its token rules are followed, unless a call gives others. For all else the
defaults of this library hold everywhere: outputs are greedy and end at the
engine's length. A warning lists the other settings once, when an engine is made
of the model, with the options that do the same here.
"""

import typing
from collections.abc import Mapping
from typing import Any

from specdec_jax.checkpoints.families import WORDS
from specdec_jax.checks.fields import check_type, shortened
from specdec_jax.rules.options import RuleOptions

FILE = 'generation_config.json'
_WORDS = WORDS['generation']
# Settings that change outputs -> their neutral value.
SETTINGS: dict[str, Any] = _WORDS['neutral'] | dict.fromkeys(_WORDS['unset'])
# Settings -> the options of `Engine.generate` that do the same.
OPTIONS: dict[str, str] = _WORDS['options']
# Token rules -> their options here.
_RULES: dict[str, str] = _WORDS['rules']


def read_settings(
  described: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], str]:
  """Reads the settings for `generate`.

  Args:
    described: generation_config.json, or config.json if it is missing.
    where: the path of that file, for messages.

  Returns:
    Options of `Engine.generate`; and a sentence on the settings that are not
    followed, '' if there are none.
  """
  values = {
    name: value
    for name, value in described.items()
    if name in SETTINGS and value is not None
  }
  samples = values.get('do_sample', False)
  searches = values.get('num_beams', 1) != 1
  wanted = {
    name: value
    for name, value in values.items()
    if value not in (SETTINGS[name], [])
    and (samples or name not in _WORDS['of_samples'])
    and (searches or name not in _WORDS['of_beams'])
  }
  hints = typing.get_type_hints(RuleOptions, include_extras=True)
  rules, wrong = {}, ''
  for name in [name for name in _RULES if name in wanted]:
    option, value = _RULES[name], wanted.pop(name)
    try:
      check_type(f'{where}: {name}', value, hints[option])
      rules[option] = value
    except ValueError as error:
      wrong += f' {error} It is not followed.'
  if not wanted:
    return rules, wrong.strip()
  settings = {name: shortened(value) for name, value in wanted.items()}
  listed = ', '.join(f'{name}={value}' for name, value in settings.items())
  options = {OPTIONS[name] for name in settings if name in OPTIONS}
  others = [name for name in settings if name not in OPTIONS]
  text = f'{where} asks for {listed}: not followed.'
  if options:
    text += f' Options that do so: {", ".join(sorted(options))}.'
  text += f' No option does: {", ".join(others)}.' if others else ''
  return rules, text + wrong
