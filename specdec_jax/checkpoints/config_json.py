"""Reads config.json of Hugging Face folders by the data of its family.

A `Family` maps fields of config.json to fields of our configuration, and lists
the fields that may have only one value. All unknown fields are refused.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import flax.traverse_util

from specdec_jax import files
from specdec_jax.checkpoints import families, generation
from specdec_jax.checkpoints.families import Described, Family
from specdec_jax.checkpoints.generation import FILE, SETTINGS
from specdec_jax.checks.fields import (
  check_choice,
  check_number,
  check_type,
  unexpected,
)
from specdec_jax.models.bart import BartConfig, M2M100Config
from specdec_jax.models.causal_lm import CausalLMConfig
from specdec_jax.models.families import Config
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.layers import MOST_LAYERS
from specdec_jax.models.rope import Rope
from specdec_jax.models.t5 import T5Config
from specdec_jax.models.t5gemma import T5GemmaConfig

CONFIG = 'config.json'
# Fingerprints that a checkpoint may hold -> their fields in config.json.
ABOUT = {'target': 'specdec_made_for', 'made_of': 'specdec_made_of'}
# The field of a decoder without an encoder that has the width of the encoder
# whose output it reads.
ENCODER_DIM = 'specdec_encoder_dim'

_WORDS = families.WORDS['config']
_NO_MATTER = re.compile('|'.join(_WORDS['no_matter']))
_AROUND_TEXT = {*_WORDS['around_text']}
_KINDS: Mapping[str, Any] = _WORDS['layers']
# Fields that follow from others if config.json leaves them out.
_DERIVED = {
  'head_dim': lambda values: (
    values['hidden_size'] // values['num_attention_heads']
  ),
  'n_inner': lambda values: 4 * values['n_embd'],
  'num_decoder_layers': lambda values: values['num_layers'],
  'num_key_value_heads': lambda values: values['num_attention_heads'],
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
    return False  # mT5 has T5 1.1's output layer
  untied = described.get('tie_word_embeddings') is False
  # transformers 5 writes this field, and `tie_word_embeddings: true`, always.
  return bool(described.get('scale_decoder_outputs', not untied))


def _fields_of(
  family: Family, described: Described, where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Fills in config.json's defaults; also returns its sizes by our names."""
  read = {*family.fields.values(), *family.defaults, *family.read}
  check_fields(described, read, where, family.fixed, family.same)
  values = _given(described)
  defaults = {
    name: value
    for name, value in family.defaults.items()
    if name not in described or name not in _WORDS['off_by_null']
  }
  values = defaults | values
  for name, derive in _DERIVED.items():
    if name in read and name not in values:
      with contextlib.suppress(KeyError, TypeError, ZeroDivisionError):
        values[name] = derive(values)
  for name in family.fields.values():
    _check_size(values.get(name), name, where)
  return values, {ours: values[name] for ours, name in family.fields.items()}


def _check_size(value: Any, name: str, where: str) -> None:
  least = 0 if name in _WORDS['may_be_zero'] else 1
  check_number(f'{where}: {name}', value, least)


def check_fields(
  described: Described,
  read: Collection[str],
  where: str,
  fixed: Described | None = None,
  same: Mapping[str, str] | None = None,
) -> None:
  """Checks that nothing in config.json changes the mathematics unnoticed.

  Fields that are null, and those that change nothing in any family, pass.

  Args:
    described: config.json, or a part of it.
    read: fields that the caller reads.
    where: the path, for messages.
    fixed: fields -> the only value that the network supports.
    same: fields -> fields that they must be equal to.

  Raises:
    ValueError: a field is unknown, or has an unsupported value.
  """
  for name in ('tie_word_embeddings', 'scale_decoder_outputs'):
    check_type(f'{where}: {name}', described.get(name), bool | None)
  others = {name: described.get(other) for name, other in (same or {}).items()}
  expected = {**_WORDS['fixed'], **(fixed or {}), **others}
  for name, value in described.items():
    if value is None or name in read:
      continue
    if name in expected:
      if value != expected[name]:
        only = f'{expected[name]}, as the network here has it'
        raise unexpected(f'{where}: {name}', only, value)
    elif name not in SETTINGS and not _NO_MATTER.fullmatch(name):
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


def _head_dim(family: Family, sizes: Described, where: str) -> int:
  width, heads = sizes['emb_dim'], sizes['num_heads']
  if width % heads:
    theirs = family.fields
    multiple = f'a multiple of {theirs["num_heads"]} = {heads}'
    raise unexpected(f'{where}: {theirs["emb_dim"]}', multiple, width)
  return width // heads


# T5, T5 1.1, Flan-T5, ByT5, CodeT5, UL2 and MADLAD-400 ('t5'), mT5, UMT5.


def _t5(family: Family, described: Described, where: str, tied: bool):
  values, sizes = _fields_of(family, described, where)
  width = values.get(ENCODER_DIM, sizes['emb_dim'])
  if width != sizes['emb_dim']:
    sizes['encoder_dim'] = width
  word = values['feed_forward_proj']
  check_choice(f'{where}: feed_forward_proj', word, _WORDS['feed_forward'])
  first, *gate = _WORDS['feed_forward'][word]
  # In transformers these two fields override feed_forward_proj.
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
    ValueError: transformers has none with its activations, or its fields.
  """
  if isinstance(config, BartConfig):
    return _describe_bart(config)
  forms = _WORDS['feed_forward']
  words = {tuple(value): word for word, value in forms.items()}
  if config.mlp_activations not in words:
    expected = f'one of {[*words]}, which transformers has'
    raise unexpected('mlp_activations', expected, config.mlp_activations)
  name = 'UMT5' if config.bias_per_layer else 'T5'
  family = families.FAMILIES[name.lower()]
  encoded_dim = config.shape.encoded_dim
  return {
    'architectures': [f'{name}ForConditionalGeneration'],
    'model_type': name.lower(),
    'is_encoder_decoder': True,
    **{theirs: getattr(config, ours) for ours, theirs in family.fields.items()},
    'feed_forward_proj': words[config.mlp_activations],
    'dropout_rate': config.dropout_rate,
    # Only this decides whether transformers scales the logits of a T5.
    'tie_word_embeddings': config.logits_via_embedding,
    **family.fixed,
    **({} if config.num_encoder_layers else {ENCODER_DIM: encoded_dim}),
  }


# GPT-2.


def _gpt2(family: Family, described: Described, where: str, tied: bool):
  values, sizes = _fields_of(family, described, where)
  return GPTConfig(
    **sizes,
    head_dim=_head_dim(family, sizes, where),
    mlp_activations=(_activation(values, 'activation_function', where),),
    logits_via_embedding=tied,
    dropout_rate=values.get('resid_pdrop', 0.0),
  )


# BART, mBART, Pegasus, Marian, M2M-100 and NLLB-200.


def has_own_tables(family: Family, described: Described) -> bool:
  """Whether encoder and decoder have embeddings of their own."""
  shares = described.get('share_encoder_decoder_embeddings', True)
  return family.make == 'bart' and not (shares and is_tied(family, described))


def _bart(family: Family, described: Described, where: str, tied: bool):
  values, sizes = _fields_of(family, described, where)
  ids = {'pad_id': 'pad_token_id', 'start_id': 'decoder_start_token_id'}
  if has_own_tables(family, described):
    sizes['encoder_vocab_size'] = sizes['vocab_size']
    if not values.get('share_encoder_decoder_embeddings', True):
      name = 'decoder_vocab_size'
      sizes['vocab_size'] = values.get(name, sizes['vocab_size'])
      _check_size(sizes['vocab_size'], name, where)
  kind = M2M100Config if 'from_padding' in family.settings else BartConfig
  return kind(
    **sizes | family.settings,
    **{ours: _single(values[n]) for ours, n in ids.items() if n in values},
    head_dim=_head_dim(family, sizes, where),
    mlp_activations=(_activation(values, 'activation_function', where),),
    scale_embeddings=values['scale_embedding'],
    logits_via_embedding=tied,
    dropout_rate=values.get('dropout', 0.0),
  )


def _describe_bart(config: BartConfig) -> dict[str, Any]:
  kinds = {
    name: family
    for name, family in families.FAMILIES.items()
    if family.make == 'bart'
    and all(getattr(config, k) == v for k, v in family.settings.items())
  }
  words = {ours: word for word, ours in _WORDS['activations'].items()}
  if not kinds or config.mlp_activations[0] not in words:
    raise unexpected('config', 'a network that transformers has', config)
  # The first with the most settings: Pegasus has those of Marian, and more.
  kind = max(kinds, key=lambda name: len(kinds[name].settings))
  fields, same = kinds[kind].fields, kinds[kind].same
  described = {theirs: getattr(config, ours) for ours, theirs in fields.items()}
  described |= {
    'model_type': kind,
    'is_encoder_decoder': True,
    'activation_function': words[config.mlp_activations[0]],
    'dropout': config.dropout_rate,
    'scale_embedding': config.scale_embeddings,
    'tie_word_embeddings': config.logits_via_embedding,
  }
  if config.encoder_vocab_size and kind == 'marian':
    described['share_encoder_decoder_embeddings'] = False
    described['decoder_vocab_size'] = config.vocab_size
    described['vocab_size'] = config.encoder_vocab_size
  return described | {name: described[other] for name, other in same.items()}


# Llama, Qwen and Gemma.


def _causal(
  family: Family, described: Described, where: str, tied: bool
) -> CausalLMConfig:
  values, sizes = _fields_of(family, described, where)
  kinds = _layer_kinds(values, where)
  rope, local = (_rope(values, word, where) for word in _KINDS)
  has_local = 'local' in kinds
  window = values.get('sliding_window')
  if 'use_sliding_window' in values and not values['use_sliding_window']:
    window = None  # the configuration then refuses layers of the kind 'local'
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


def _with_images(family: Family, described: Described, where: str, tied: bool):
  """Returns the text model's configuration if the model also reads images."""
  check_fields(described, _AROUND_TEXT, where)
  return _causal(family, _object(described, 'text_config', where), where, tied)


def _layer_kinds(values: Described, where: str) -> tuple[Any, ...]:
  """Returns the shortest sequence of kinds that all layers repeat."""
  # A larger number of layers is refused later.
  count = min(values['num_hidden_layers'], MOST_LAYERS)
  for name in ('sliding_window_pattern', 'max_window_layers'):
    if name in values:
      _check_size(values[name], name, where)
  types = values.get('layer_types')
  if types is None:
    types = [_layer_type(values, i) for i in range(count)]
  if not isinstance(types, list) or len(types) != count:
    raise unexpected(f'{where}: layer_types', f'a list of {count} names', types)
  for word in types:
    check_choice(f'{where}: layer_types', word, _KINDS)
  kinds = tuple(_KINDS[word] for word in types)
  sizes = (
    size
    for size in range(1, count + 1)
    if all(kinds[i] == kinds[i % size] for i in range(count))
  )
  return kinds[: next(sizes)]


def _layer_type(values: Described, layer: int) -> str:
  """Returns a layer's type in configurations without `layer_types`."""
  if 'sliding_window_pattern' in values:
    slides = (layer + 1) % values['sliding_window_pattern'] != 0
  else:
    first = values.get('max_window_layers', layer + 1)
    slides = bool(values.get('use_sliding_window')) and layer >= first
  return 'sliding_attention' if slides else 'full_attention'


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
    theta = values['rope_local_base_freq']  # local layers have no scaling
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


# T5Gemma 1 and 2: config.json describes each stack like a Gemma's.


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
  config = T5GemmaConfig(
    _causal(stack, encoder, f'{where}: encoder', tied),
    _causal(stack, decoder, f'{where}: decoder', tied),
    merged_attention=merged,
    start_id=_t5gemma_ids(described)['decoder_start_token_id'],
    image_end_id=image_end,
  )
  width = decoder.get('cross_attention_hidden_size')
  if width not in (None, config.encoder.emb_dim):
    name = f'{where}: decoder.cross_attention_hidden_size'
    raise unexpected(name, f"the encoder's {config.encoder.emb_dim}", width)
  return config


def _t5gemma_ids(described: Described) -> dict[str, Any]:
  """Returns special ids; by default the decoder starts with `bos_token_id`."""
  ids = {'bos_token_id': 2, 'eos_token_id': 1, 'pad_token_id': 0}
  decoder = described.get('decoder')
  for part in (decoder if isinstance(decoder, Mapping) else {}, described):
    ids |= {name: part[name] for name in ids if part.get(name) is not None}
  start = _single(described.get('decoder_start_token_id'))
  start = ids['bos_token_id'] if start is None else start
  return ids | {'decoder_start_token_id': start}


_MAKERS = {
  't5': _t5,
  'gpt2': _gpt2,
  'bart': _bart,
  'causal': _causal,
  'with_images': _with_images,
  't5gemma': _t5gemma,
}


def read_config(
  described: Described, where: str, tied: bool | None = None
) -> Config:
  """Returns the configuration that a config.json describes.

  Args:
    described: config.json.
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


# Facts about texts: special ids, and settings of transformers' `generate`.


class SpecialIds(NamedTuple):
  """Ids with a special meaning.

  Attributes:
    decoder_start: the id that a decoder with an encoder reads first; 0 in a
      T5, as always in T5X.
    eos: ids that end an output; T5 has 1, MADLAD-400 has 2. A decoder-only
      model may have none.
    pad: the id that transformers pads rows with. Here and in T5X T5s are padded
      with 0: padding is masked, so logits do not depend on it. If 0 is the
      unknown piece (MADLAD-400), the encoder ignores that piece too.
  """

  decoder_start: int
  eos: tuple[int, ...]
  pad: int


T5_IDS = SpecialIds(decoder_start=0, eos=(1,), pad=0)


def describe_ids(ids: SpecialIds) -> dict[str, Any]:
  """Returns config.json's entries for special ids."""
  return {
    'decoder_start_token_id': ids.decoder_start,
    'eos_token_id': ids.eos[0] if len(ids.eos) == 1 else list(ids.eos),
    'pad_token_id': ids.pad,
  }


class FolderFacts(NamedTuple):
  """The facts in config.json and generation_config.json of a folder.

  Attributes:
    described: config.json.
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
    described: its config.json.
    config: the result of `read_config`.

  Raises:
    ValueError: a file is broken, an id is not a whole number, or the decoder
      starts with another id than all models of its family.
  """
  # As in transformers, a folder may lack generation_config.json: config.json
  # then has its settings.
  path, settings = folder / CONFIG, described
  if os.path.lexists(folder / FILE):
    path = folder / FILE
    settings = files.read_json(path)
  ids = _special_ids(
    _given(described) | _given(settings), os.fspath(folder), config
  )
  if isinstance(config, T5GemmaConfig | BartConfig):
    config = dataclasses.replace(config, start_id=ids.decoder_start)
  rules, unfollowed = generation.read_settings(settings, os.fspath(path))
  return FolderFacts(described, config, ids, rules, unfollowed)


def _special_ids(values: Described, where: str, config: Config) -> SpecialIds:
  has_encoder = config.shape.decoder.cross != 'none'
  ids: dict[str, Any] = {'pad_token_id': T5_IDS.pad}
  ids['eos_token_id'] = [*T5_IDS.eos] if has_encoder else []
  ids |= values
  if isinstance(config, T5GemmaConfig):
    ids |= _t5gemma_ids(values)
  elif isinstance(config, BartConfig):
    ids = {'decoder_start_token_id': config.start_id} | ids
  pad, ends = ids['pad_token_id'], ids['eos_token_id']
  # As in transformers, a decoder without a start token starts with padding.
  start = _single(ids.get('decoder_start_token_id', pad))
  ends = tuple(ends) if isinstance(ends, list) else (ends,)
  check_type(f'{where}: pad_token_id', pad, int)
  check_type(f'{where}: eos_token_id', ends, tuple[int, ...])
  if not has_encoder:
    # transformers writes GPT-2's end id, 50256, whatever the vocabulary is.
    ends = tuple(token for token in ends if token < config.vocab_size)
    return SpecialIds(T5_IDS.decoder_start, ends, pad)
  check_type(f'{where}: decoder_start_token_id', start, int)
  is_t5 = isinstance(config, T5Config)
  if is_t5 and start != config.shape.start_id:
    only = f'{config.shape.start_id}, as in every model of this family'
    raise unexpected(f'{where}: decoder_start_token_id', only, start)
  return SpecialIds(start, ends, pad)


def _given(described: Described) -> dict[str, Any]:
  """Returns the fields that are not null."""
  return {name: v for name, v in described.items() if v is not None}


def _single(value: Any) -> Any:
  """Returns the item of a list of one, and any other value as it is."""
  return value[0] if isinstance(value, list) and len(value) == 1 else value


# These functions compare a folder's configuration with the expected one.


def check_config(actual: Config, expected: Any, source: str) -> None:
  """Compares a checkpoint's configuration with the expected one.

  `dropout_rate` and `dtype` are not compared: they are not part of a
  checkpoint.

  Raises:
    ValueError: they differ; the message has both values of each field that
      differs, such as 'encoder.num_layers'.
  """
  have, want = (
    flax.traverse_util.flatten_dict(dataclasses.asdict(config), sep='.')
    for config in (actual, expected)
  )
  problems = [
    f'{name}: expected {want.get(name)!r}, got {have.get(name)!r}'
    for name in have | want
    if have.get(name) != want.get(name)
    and not name.endswith(('dropout_rate', 'dtype'))
  ]
  if problems:
    raise ValueError(
      f'{source} is not a checkpoint of this model configuration:'
      f' {"; ".join(problems)}. Take the configuration of its size, or another'
      ' checkpoint.'
    )
