"""Reads config.json of Hugging Face folders with the data of its family.

A `Family` maps fields of config.json to fields of our configuration, and lists
the fields that may have only one value. An unknown field is an error.

Of a folder's settings for transformers' `generate` only token rules are
followed, unless a call gives others. All else has the defaults of this library:
outputs are greedy and end at the engine's length. When an engine is made of the
model, a warning lists the settings that are not followed, with the options that
do the same here.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import typing
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from flax.traverse_util import flatten_dict

from specdec_jax import files
from specdec_jax.checkpoints import families
from specdec_jax.checkpoints.families import Described, Family
from specdec_jax.checks import fields as checks
from specdec_jax.checks.fields import check_choice, check_type, unexpected
from specdec_jax.models.bart import BartConfig, M2M100Config
from specdec_jax.models.causal_lm import CausalLMConfig
from specdec_jax.models.families import Config
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.layers import MOST_LAYERS
from specdec_jax.models.rope import Rope
from specdec_jax.models.t5 import T5Config
from specdec_jax.models.t5gemma import T5GemmaConfig
from specdec_jax.rules.options import RuleOptions

CONFIG, GENERATION = 'config.json', 'generation_config.json'
# Fingerprints that a checkpoint may hold -> their fields in config.json.
ABOUT = {'target': 'specdec_made_for', 'made_of': 'specdec_made_of'}
# The field for a decoder without an encoder of its own. Its value is the width
# of the encoder output that the decoder reads.
ENCODER_DIM = 'specdec_encoder_dim'

_WORDS, _SETTINGS = families.WORDS['config'], families.WORDS['generation']
# Settings of `generate` that change outputs -> their neutral value.
_UNSET: dict[str, Any] = dict.fromkeys(_SETTINGS['unset'])
_NEUTRAL = _SETTINGS['neutral'] | _UNSET
_NO_MATTER = re.compile('|'.join(_WORDS['no_matter']))
_AROUND_TEXT = {*_WORDS['around_text']}
_KINDS: Mapping[str, Any] = _WORDS['layers']
# Fields that follow from others if config.json leaves them out.
_DERIVED = {
  'head_dim': lambda size: size['hidden_size'] // size['num_attention_heads'],
  'n_inner': lambda size: 4 * size['n_embd'],
  'num_decoder_layers': lambda size: size['num_layers'],
  'num_key_value_heads': lambda size: size['num_attention_heads'],
}


def is_tied(family: Family, described: Described) -> bool:
  """Whether the output layer is the embedding, according to config.json."""
  text = described.get('text_config')
  if not family.ties_by_arrays:
    for part in (described, text if isinstance(text, Mapping) else {}):
      if part.get('tie_word_embeddings') is not None:
        return bool(part['tie_word_embeddings'])
  return family.tied


def scales_output(described: Described) -> bool:
  """Whether transformers divides the input of the output layer by sqrt(M)."""
  if described.get('model_type') not in ('t5', 'umt5'):
    return False  # mT5 has T5 1.1's output layer, without a scale
  untied = described.get('tie_word_embeddings') is False
  # transformers 5 always writes this field, and always writes
  # `tie_word_embeddings: true`.
  return bool(described.get('scale_decoder_outputs', not untied))


def _fields_of(
  family: Family, described: Described, where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns config.json with its defaults, and its sizes by our names."""
  read = {*family.fields.values(), *family.defaults, *family.read}
  same = {name: described.get(other) for name, other in family.same.items()}
  check_fields(described, read, where, family.fixed | same)
  off = described.keys() & {*_WORDS['off_by_null']}
  values = {n: x for n, x in family.defaults.items() if n not in off}
  values |= _given(described)
  for name, derive in _DERIVED.items():
    if name in read and name not in values:
      with contextlib.suppress(KeyError, TypeError, ZeroDivisionError):
        values[name] = derive(values)
  for name in family.fields.values():
    _check_size(values.get(name), name, where)
  return values, {ours: values[name] for ours, name in family.fields.items()}


def _check_size(value: Any, name: str, where: str) -> None:
  least = 0 if name in _WORDS['may_be_zero'] else 1
  checks.check_number(f'{where}: {name}', value, least)


def check_fields(
  described: Described,
  read: Collection[str],
  where: str,
  fixed: Described | None = None,
) -> None:
  """Checks that no field is ignored that could change what a model computes.

  Fields that are null, and those that change nothing in any family, pass.

  Args:
    described: config.json, or a part of it.
    read: fields that the caller reads.
    where: the path, for messages.
    fixed: fields -> the only value that the network supports; None: there are
      no such fields.

  Raises:
    ValueError: a field is unknown, or has an unsupported value.
  """
  for name in ('tie_word_embeddings', 'scale_decoder_outputs'):
    check_type(f'{where}: {name}', described.get(name), bool | None)
  expected = {**_WORDS['fixed'], **(fixed or {})}
  for name, value in described.items():
    if value is None or name in read:
      continue
    if name in expected:
      if value != expected[name]:
        only = f'{expected[name]}, as the network here has it'
        raise unexpected(f'{where}: {name}', only, value)
    elif name not in _NEUTRAL and not _NO_MATTER.fullmatch(name):
      nothing = 'no such field, which may change what the model says'
      advice = 'If it does not, remove it from config.json.'
      raise unexpected(f'{where}: {name}', nothing, value, advice)


def _activation(values: Described, name: str, where: str) -> str:
  activations: Mapping[str, str] = _WORDS['activations']
  check_choice(f'{where}: {name}', values[name], activations)
  return activations[values[name]]


def _object(values: Described, name: str, where: str) -> Described:
  check_type(f'{where}: {name}', values.get(name), Mapping)
  return values[name]


# These functions read and write the configurations of the family 't5' (T5, T5
# 1.1, Flan-T5, ByT5, CodeT5, UL2 and MADLAD-400), of mT5 and of UMT5.


def _t5(family: Family, described: Described, where: str, tied: bool):
  values, sizes = _fields_of(family, described, where)
  width = values.get(ENCODER_DIM, sizes['emb_dim'])
  if width != sizes['emb_dim']:
    sizes['encoder_dim'] = width
  word = values['feed_forward_proj']
  check_choice(f'{where}: feed_forward_proj', word, _WORDS['feed_forward'])
  first, *gate = _WORDS['feed_forward'][word]
  # In transformers `dense_act_fn` and `is_gated_act` override
  # feed_forward_proj.
  if 'dense_act_fn' in values:
    first = _activation(values, 'dense_act_fn', where)
  gated = values.get('is_gated_act')
  check_type(f'{where}: is_gated_act', gated, bool | None)
  if gated is not None:
    gate = ['linear'] * gated
  return T5Config(
    **sizes,
    **family.settings,
    mlp_activations=(first, *gate),
    dropout_rate=values.get('dropout_rate', 0.0),
    logits_via_embedding=tied,
  )


def describe(config: T5Config | BartConfig) -> dict[str, Any]:
  """Returns config.json of a T5 or BART, except for ids and dtype.

  Raises:
    ValueError: transformers has no such model with these activations or fields.
  """
  is_t5 = isinstance(config, T5Config)
  words = {(ours,): word for word, ours in _WORDS['activations'].items()}
  if is_t5:
    forms = _WORDS['feed_forward'].items()
    words = {tuple(value): word for word, value in forms}
  if config.mlp_activations not in words:
    expected = f'one of {[*words]}, which transformers has'
    raise unexpected('mlp_activations', expected, config.mlp_activations)
  kinds = [
    name
    for name, family in families.FAMILIES.items()
    if family.make == ('t5' if is_t5 else 'bart')
    and all(getattr(config, k) == v for k, v in family.settings.items())
  ]
  if not kinds:
    raise unexpected('config', 'a network that transformers has', config)
  # Several families may fit, since Pegasus has the settings of Marian and more:
  # the one with the most settings is right.
  kind = max(kinds, key=lambda name: len(families.FAMILIES[name].settings))
  family, word = families.FAMILIES[kind], words[config.mlp_activations]
  described = {n: getattr(config, ours) for ours, n in family.fields.items()}
  # For a T5 `tie_word_embeddings` alone decides whether logits are scaled.
  described |= {'model_type': kind, 'is_encoder_decoder': True}
  described |= {'tie_word_embeddings': config.logits_via_embedding}
  if isinstance(config, T5Config):
    described |= {'architectures': [f'{kind.upper()}ForConditionalGeneration']}
    described |= {'feed_forward_proj': word, **family.fixed}
    described |= {'dropout_rate': config.dropout_rate}
    if not config.num_encoder_layers:
      described[ENCODER_DIM] = config.shape.encoded_dim
    return described
  described |= {'activation_function': word, 'dropout': config.dropout_rate}
  described |= {'scale_embedding': config.scale_embeddings}
  if config.encoder_vocab_size and kind == 'marian':
    described['share_encoder_decoder_embeddings'] = False
    described['decoder_vocab_size'] = config.vocab_size
    described['vocab_size'] = config.encoder_vocab_size
  return described | {n: described[other] for n, other in family.same.items()}


# These functions read the configurations of GPT-2, BART, mBART, Pegasus,
# Marian, M2M-100 and NLLB-200.


def has_own_tables(family: Family, described: Described) -> bool:
  """Whether encoder and decoder have separate embeddings."""
  shares = described.get('share_encoder_decoder_embeddings', True)
  return family.make == 'bart' and not (shares and is_tied(family, described))


def _gpt2_or_bart(family: Family, described: Described, where: str, tied: bool):
  values, sizes = _fields_of(family, described, where)
  width, heads = sizes['emb_dim'], sizes['num_heads']
  if width % heads:
    multiple = f'a multiple of {family.fields["num_heads"]} = {heads}'
    raise unexpected(f'{where}: {family.fields["emb_dim"]}', multiple, width)
  if has_own_tables(family, described):
    sizes['encoder_vocab_size'] = sizes['vocab_size']
    if not values.get('share_encoder_decoder_embeddings', True):
      name = 'decoder_vocab_size'
      sizes['vocab_size'] = values.get(name, sizes['vocab_size'])
      _check_size(sizes['vocab_size'], name, where)
  sizes |= family.settings
  sizes |= {'head_dim': width // heads, 'logits_via_embedding': tied}
  activation = (_activation(values, 'activation_function', where),)
  if family.make == 'gpt2':
    dropout = values.get('resid_pdrop', 0.0)
    return GPTConfig(**sizes, mlp_activations=activation, dropout_rate=dropout)
  ids = {'pad_id': 'pad_token_id', 'start_id': 'decoder_start_token_id'}
  return (M2M100Config if 'from_padding' in family.settings else BartConfig)(
    **sizes,
    **{ours: _single(values[n]) for ours, n in ids.items() if n in values},
    mlp_activations=activation,
    scale_embeddings=values['scale_embedding'],
    dropout_rate=values.get('dropout', 0.0),
  )


# These functions read the configurations of Llama, Qwen and Gemma.


def _causal(family: Family, described: Described, where: str, tied: bool):
  if family.make == 'with_images':  # only the text model is read
    check_fields(described, _AROUND_TEXT, where)
    described = _object(described, 'text_config', where)
  values, sizes = _fields_of(family, described, where)
  kinds = _layer_kinds(values, where)
  rope, local = (_rope(values, word, where) for word in _KINDS)
  has_local = 'local' in kinds
  window = values.get('sliding_window')
  if 'use_sliding_window' in values and not values['use_sliding_window']:
    window = None  # `CausalLMConfig` then rejects 'local' layers
  is_gemma = 'hidden_activation' in values
  word = 'hidden_activation' if is_gemma else 'hidden_act'
  scalar = values.get('query_pre_attn_scalar', sizes['head_dim'])
  return CausalLMConfig(
    **sizes,
    **family.settings,
    mlp_activations=(_activation(values, word, where), 'linear'),
    rope=rope,
    local_rope=local if has_local and local != rope else None,
    layer_kinds=kinds,
    window=window if has_local else 0,  # type: ignore[arg-type]
    norm_epsilon=values['rms_norm_eps'],
    query_scalar=0.0 if scalar == sizes['head_dim'] else scalar,
    score_softcap=values.get('attn_logit_softcapping', 0.0),
    logit_softcap=values.get('final_logit_softcapping', 0.0),
    logits_via_embedding=tied,
  )


def _layer_kinds(values: Described, where: str) -> tuple[Any, ...]:
  """Returns the shortest sequence of kinds which, repeated, fits all layers."""
  # `CausalLMConfig` later rejects a larger number of layers.
  count = min(values['num_hidden_layers'], MOST_LAYERS)
  for name in ('sliding_window_pattern', 'max_window_layers'):
    if name in values:
      _check_size(values[name], name, where)
  types = values.get('layer_types')
  if types is None:
    # With `sliding_window_pattern`, the last layer of each pattern has full
    # attention, the others have a sliding window. Without it, layers after the
    # first `max_window_layers` have a sliding window, if `use_sliding_window`
    # is set.
    pattern = values.get('sliding_window_pattern')
    slides = values.get('use_sliding_window')
    first = values.get('max_window_layers', count) if slides else count
    layers = range(1, count + 1)
    full = (n % pattern == 0 if pattern else n <= first for n in layers)
    types = ['full_attention' if x else 'sliding_attention' for x in full]
  if not isinstance(types, list) or len(types) != count:
    raise unexpected(f'{where}: layer_types', f'a list of {count} names', types)
  for word in types:
    check_choice(f'{where}: layer_types', word, _KINDS)
  kinds = tuple(_KINDS[word] for word in types)
  sizes = range(1, count + 1)
  return kinds[: next(n for n in sizes if kinds[n:] == kinds[: count - n])]


def _rope(values: Described, layer_type: str, where: str) -> Rope:
  """Returns the RoPE of layers of one type."""
  settings: dict[str, Any] = {}
  if 'rope_parameters' in values:
    settings |= _object(values, 'rope_parameters', where)
  has_local = 'rope_local_base_freq' in values
  if any(word in settings for word in _KINDS):
    check_fields(settings, _KINDS, f'{where}: rope_parameters')
    settings = {**_object(settings, layer_type, where)}
  elif settings and has_local:
    each = f'an entry for each kind of layers, {" and ".join(_KINDS)}'
    raise unexpected(f'{where}: rope_parameters', each, settings)
  theta = values['rope_theta']
  if layer_type == 'sliding_attention' and has_local:
    # `rope_scaling` is for global layers only.
    theta = values['rope_local_base_freq']
  elif 'rope_scaling' in values:
    settings |= _object(values, 'rope_scaling', where)
  word = settings.get('rope_type', settings.get('type', 'default'))
  check_choice(f'{where}: rope_type', word, _WORDS['ropes'])
  fields = _WORDS['ropes'][word]
  settings = {'rope_theta': theta} | _given(settings)
  others = settings.keys() - {'rope_type', 'type', 'rope_theta'}
  if differing := others ^ {*fields.values()}:
    expected = f'only {", ".join(fields.values()) or "its type and base"}'
    name = f'{where}: RoPE of type {word!r}'
    raise unexpected(name, expected, sorted(differing))
  scaling = {ours: settings[theirs] for ours, theirs in fields.items()}
  return Rope(base=settings['rope_theta'], **scaling)


# This function reads the configurations of T5Gemma 1 and 2, in which
# config.json describes each stack like a Gemma.


def _t5gemma(family: Family, described: Described, where: str, tied: bool):
  merged, stack = described['model_type'] == 't5gemma2', family.stack
  assert stack is not None
  check_fields(described, family.read, where)
  encoder = _object(described, 'encoder', where)
  decoder = _object(described, 'decoder', where)
  image_end = 0
  if merged:
    check_fields(encoder, _AROUND_TEXT | {'vocab_size'}, f'{where}: encoder')
    image_end = encoder.get('eoi_token_index') or 256_000
    encoder = _object(encoder, 'text_config', f'{where}: encoder')
  if merged and not tied:
    shared = f'true, without another array {family.head}: one embedding'
    raise unexpected(f'{where}: tie_word_embeddings', shared, tied)
  first = _causal(stack, encoder, f'{where}: encoder', tied)
  second = _causal(stack, decoder, f'{where}: decoder', tied)
  config = T5GemmaConfig(first, second, merged, image_end_id=image_end)
  width = decoder.get('cross_attention_hidden_size')
  if width not in (None, config.encoder.emb_dim):
    name = f'{where}: decoder.cross_attention_hidden_size'
    raise unexpected(name, f"the encoder's {config.encoder.emb_dim}", width)
  return config


_MAKERS = dict(t5=_t5, gpt2=_gpt2_or_bart, bart=_gpt2_or_bart, causal=_causal)
_MAKERS |= {'with_images': _causal, 't5gemma': _t5gemma}


def read_config(
  described: Described, where: str, tied: bool | None = None
) -> Config:
  """Returns the configuration that a config.json describes.

  Args:
    described: the contents of config.json.
    where: its path, for messages.
    tied: whether the output layer is the embedding, according to the weights;
      None: according to config.json.

  Raises:
    ValueError: the architecture is not supported; or a field is missing, has an
      unsupported value, or is unknown and might change the model's outputs.
  """
  family = families.family_of(described, where)
  tied = is_tied(family, described) if tied is None else tied
  return _MAKERS[family.make](family, described, where, tied)


# These classes and functions are for special ids, and for settings of
# transformers' `generate`.


class SpecialIds(NamedTuple):
  """Ids with a special meaning.

  Attributes:
    decoder_start: the id that a decoder with an encoder reads first; 0 in a
      T5, as always in T5X.
    eos: ids that end an output; T5 has 1, MADLAD-400 has 2. A decoder-only
      model may have none.
    pad: the id that transformers pads rows with. This library and T5X pad the
      rows of a T5 with 0 instead; padding is masked, so logits do not depend on
      the id. If 0 is the unknown piece (MADLAD-400), the encoder ignores
      unknown pieces, too.
  """

  decoder_start: int
  eos: tuple[int, ...]
  pad: int


T5_IDS = SpecialIds(decoder_start=0, eos=(1,), pad=0)


class FolderFacts(NamedTuple):
  """The facts in config.json and generation_config.json of a folder.

  Attributes:
    described: the contents of config.json.
    config: the network's configuration.
    ids: the special ids.
    rules: token rules for `generate`, by the names of their options.
    unfollowed: a sentence on the settings for `generate` that are not followed;
      '' if there are none.
  """

  described: Described
  config: Config
  ids: SpecialIds
  rules: Mapping[str, Any]
  unfollowed: str


def read_facts(
  folder: pathlib.Path, described: Described, config: Config
) -> FolderFacts:
  """Reads generation_config.json, and collects the facts of a folder.

  Args:
    folder: where generation_config.json may be.
    described: the contents of the folder's config.json.
    config: the result of `read_config`.

  Raises:
    ValueError: a file is broken, an id is not a whole number, or the decoder
      starts with another id than all models of its family.
  """
  # As in transformers, a folder may lack generation_config.json: config.json
  # then has its settings.
  path, settings = folder / CONFIG, described
  if os.path.lexists(folder / GENERATION):
    path = folder / GENERATION
    settings = files.read_json(path)
  ids = _special_ids(described, settings, os.fspath(folder), config)
  if isinstance(config, T5GemmaConfig | BartConfig):
    config = dataclasses.replace(config, start_id=ids.decoder_start)
  rules, unfollowed = read_settings(settings, os.fspath(path))
  return FolderFacts(described, config, ids, rules, unfollowed)


def _special_ids(
  described: Described, settings: Described, where: str, config: Config
) -> SpecialIds:
  has_encoder = config.shape.decoder.cross != 'none'
  is_t5gemma = isinstance(config, T5GemmaConfig)
  default = [*T5_IDS.eos] if has_encoder else []
  ids: dict[str, Any] = {'pad_token_id': 0, 'eos_token_id': default}
  if is_t5gemma:
    ids = {'bos_token_id': 2, 'eos_token_id': 1, 'pad_token_id': 0}
    decoder = _given(described['decoder'])
    ids |= {name: decoder[name] for name in ids & decoder.keys()}
  elif isinstance(config, BartConfig):
    ids['decoder_start_token_id'] = config.start_id
  ids |= _given(described) | _given(settings)
  # As in transformers, a decoder without a start token starts with padding.
  pad, end = ids['pad_token_id'], ids['eos_token_id']
  start = ids['bos_token_id'] if is_t5gemma else pad
  if 'decoder_start_token_id' in ids:
    start = _single(ids['decoder_start_token_id'])
  ends = tuple(end) if isinstance(end, list) else (end,)
  check_type(f'{where}: pad_token_id', pad, int)
  check_type(f'{where}: eos_token_id', ends, tuple[int, ...])
  if not has_encoder:
    # transformers writes GPT-2's end id, 50256, whatever the vocabulary is, so
    # an id outside the vocabulary is left out.
    ends = tuple(token for token in ends if token < config.vocab_size)
    return SpecialIds(T5_IDS.decoder_start, ends, pad)
  check_type(f'{where}: decoder_start_token_id', start, int)
  if isinstance(config, T5Config) and start != config.shape.start_id:
    only = f'{config.shape.start_id}, as in every model of this family'
    raise unexpected(f'{where}: decoder_start_token_id', only, start)
  return SpecialIds(start, ends, pad)


def read_settings(
  described: Described, path: str
) -> tuple[dict[str, Any], str]:
  """Reads the settings for `generate`.

  Args:
    described: the contents of generation_config.json, or of config.json if the
      former is missing.
    path: the path of that file, for messages.

  Returns:
    Options of `Engine.generate`; and a sentence on the settings that are not
    followed, '' if there are none.
  """
  samples = described.get('do_sample')
  searches = described.get('num_beams') not in (None, 1)
  wanted = {
    name: value
    for name, value in described.items()
    if name in _NEUTRAL
    and value not in (None, _NEUTRAL[name], [])
    and (samples or name not in _SETTINGS['of_samples'])
    and (searches or name not in _SETTINGS['of_beams'])
  }
  hints = typing.get_type_hints(RuleOptions, include_extras=True)
  rules, wrong = {}, ''
  for name in [name for name in _SETTINGS['rules'] if name in wanted]:
    option, value = _SETTINGS['rules'][name], wanted.pop(name)
    try:
      check_type(f'{path}: {name}', value, hints[option])
      rules[option] = value
    except ValueError as error:
      wrong += f' {error} It is not followed.'
  if not wanted:
    return rules, wrong.strip()
  known = _SETTINGS['options']
  listed = [f'{name}={checks.shortened(x)}' for name, x in wanted.items()]
  options = {known[name] for name in wanted if name in known}
  others = [name for name in wanted if name not in known]
  text = f'{path} asks for {", ".join(listed)}: not followed.'
  ours = ', '.join(sorted(options))
  text += f' Options that do so: {ours}.' if options else ''
  text += f' No option does: {", ".join(others)}.' if others else ''
  return rules, text + wrong


def _given(described: Described) -> dict[str, Any]:
  """Returns the fields that are not null."""
  return {name: v for name, v in described.items() if v is not None}


def _single(value: Any) -> Any:
  """Returns the item of a list of one, and any other value as it is."""
  return value[0] if isinstance(value, list) and len(value) == 1 else value


# This function compares a folder's configuration with the expected one.


def check_config(actual: Config, expected: Any, source: str) -> None:
  """Compares a checkpoint's configuration with the expected one.

  `dropout_rate` and `dtype` are not compared: they are not part of a
  checkpoint.

  Raises:
    ValueError: the configurations differ; the message has both values of each
      field that differs, such as 'encoder.num_layers'.
  """
  have = flatten_dict(dataclasses.asdict(actual), sep='.')
  want = flatten_dict(dataclasses.asdict(expected), sep='.')
  problems = [
    f'{name}: expected {want.get(name)!r}, got {have.get(name)!r}'
    for name in have | want
    if have.get(name) != want.get(name)
    and not name.endswith(('dropout_rate', 'dtype'))
  ]
  if problems:
    why = f'not a checkpoint of this model configuration: {"; ".join(problems)}'
    advice = 'Take the configuration of its size, or another checkpoint.'
    raise ValueError(f'{source} is {why}. {advice}')
