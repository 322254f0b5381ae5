"""config.json of Llama, Qwen and Gemma in Hugging Face folders.

A field that is neither read here nor known not to matter is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specdec_jax.checkpoints.huggingface_names import (
  check_fixed,
  check_known,
  read_sizes,
)
from specdec_jax.checks.names import check_choice
from specdec_jax.models.causal_lm import CausalLMConfig
from specdec_jax.models.layers import MOST_LAYERS
from specdec_jax.models.rope import Rope

# CausalLMConfig's field: config.json's.
FIELDS = {
  'vocab_size': 'vocab_size',
  'emb_dim': 'hidden_size',
  'num_heads': 'num_attention_heads',
  'num_kv_heads': 'num_key_value_heads',
  'num_layers': 'num_hidden_layers',
  'head_dim': 'head_dim',
  'mlp_dim': 'intermediate_size',
}
# Fields that all families have, besides FIELDS.
_COMMON = {
  'hidden_act',
  'layer_types',
  'rms_norm_eps',
  'rope_parameters',
  'rope_scaling',
  'rope_theta',
  'tie_word_embeddings',
}
# Fields that do not change what a model says: names, training, how transformers
# computes, ids (read elsewhere), and the longest text that was trained on.
NO_MATTER = {
  '_sliding_window_pattern',  # stands beside layer_types
  '_attn_implementation_autoset',
  '_name_or_path',
  'architectures',
  'attention_dropout',
  'bos_token_id',
  'cache_implementation',
  'chunk_size_feed_forward',
  'dtype',
  'eos_token_id',
  'id2label',
  'initializer_range',
  'is_decoder',
  'is_encoder_decoder',
  'label2id',
  'max_position_embeddings',
  'model_type',
  'output_attentions',
  'output_hidden_states',
  'pad_token_id',
  'pretraining_tp',
  'problem_type',
  'return_dict',
  'torch_dtype',
  'transformers_version',
  'use_cache',
}
# Fields around `text_config` in folders of models that read images too.
AROUND_TEXT = {
  'boi_token_index',
  'eoi_token_index',
  'image_token_index',
  'mm_tokens_per_image',
  'text_config',
  'tie_word_embeddings',
  'vision_config',
}
# Values that the network here has built in; config.json may leave them out.
_FIXED = {'attention_bias': False, 'mlp_bias': False}
_ACTIVATIONS = {
  'silu': 'silu',
  'swish': 'silu',
  'gelu_pytorch_tanh': 'gelu',
  'gelu_new': 'gelu',
}
_KINDS = {'full_attention': 'global', 'sliding_attention': 'local'}
_LINEAR = {'factor': 'factor'}
# Type of RoPE: config.json's name of each of `Rope`'s fields.
_ROPES: dict[str, dict[str, str]] = {
  'default': {},
  'linear': _LINEAR,
  'llama3': _LINEAR
  | {
    'original_length': 'original_max_position_embeddings',
    'low_freq_factor': 'low_freq_factor',
    'high_freq_factor': 'high_freq_factor',
  },
}


class Family(NamedTuple):
  """What is particular to a `model_type`.

  Attributes:
    settings: fields of `CausalLMConfig` that all of its models have.
    defaults: what fields of config.json are where it leaves them out.
    more: fields of config.json that are read, besides `_COMMON`.
    fixed: fields of config.json, and their only values.
  """

  settings: Mapping[str, Any] = {}
  defaults: Mapping[str, Any] = {}
  more: Sequence[str] = ()
  fixed: Mapping[str, Any] = {}


_WINDOWS = ('max_window_layers', 'sliding_window', 'use_sliding_window')
_QWEN = {'sliding_window': 4096, 'max_window_layers': 28}
_GEMMA = {'norm_offset': 1.0, 'post_norms': True, 'scale_embeddings': True}
_GEMMA_DEFAULTS = {
  'hidden_activation': 'gelu_pytorch_tanh',
  'num_attention_heads': 8,
  'num_key_value_heads': 4,
  'head_dim': 256,
  'query_pre_attn_scalar': 256,
  'sliding_window': 4096,
  'tie_word_embeddings': True,
}
_GEMMA_MORE = (
  'final_logit_softcapping',
  'hidden_activation',
  'query_pre_attn_scalar',
  'sliding_window',
)
_NOT_CAUSAL = {'use_bidirectional_attention': False}
# config.json's model_type: what is particular to it. Defaults are those of
# transformers' configurations.
FAMILIES = {
  'llama': Family(),
  'qwen2': Family({'qkv_bias': True}, _QWEN, _WINDOWS),
  'qwen3': Family({'qk_norm': True}, _QWEN | {'head_dim': 128}, _WINDOWS),
  'gemma2': Family(
    _GEMMA,
    _GEMMA_DEFAULTS
    | {
      'sliding_window_pattern': 2,
      'final_logit_softcapping': 30.0,
      'attn_logit_softcapping': 50.0,
    },
    (*_GEMMA_MORE, 'attn_logit_softcapping'),
    _NOT_CAUSAL,
  ),
  'gemma3_text': Family(
    _GEMMA | {'qk_norm': True},
    _GEMMA_DEFAULTS
    | {
      'vocab_size': 262208,
      'sliding_window_pattern': 6,
      'rope_theta': 1e6,
      'rope_local_base_freq': 1e4,
    },
    (
      *_GEMMA_MORE,
      'rope_local_base_freq',
      'sliding_window_pattern',
    ),
    _NOT_CAUSAL,
  ),
}
_WITH_IMAGES = 'gemma3'  # its text_config is a gemma3_text
MODEL_TYPES = (*FAMILIES, _WITH_IMAGES)


def is_tied(described: Mapping[str, Any]) -> bool:
  """Whether the output layer is the embedding, as config.json says."""
  kind, text = _text_of(described)
  return bool(_with_defaults(FAMILIES[kind], text)['tie_word_embeddings'])


def read_config(described: Mapping[str, Any], where: str) -> CausalLMConfig:
  """Returns the shape that config.json describes; see `huggingface`.

  Raises:
    ValueError: a field is missing, has a value that the network here does not
      know, or is itself unknown and might matter.
  """
  kind, text = _text_of(described, where)
  return read_stack(text, FAMILIES[kind], where)


def read_stack(
  text: Mapping[str, Any], family: Family, where: str
) -> CausalLMConfig:
  """`read_config` of the part that describes one stack."""
  known = {*FIELDS.values(), *_COMMON, *NO_MATTER, *family.more}
  fixed = {**_FIXED, **family.fixed}
  # Gemma 2's folders have this name as well.
  fixed['sliding_window_size'] = text.get('sliding_window')
  check_known(text, known | {*fixed}, where)
  text = _with_defaults(family, text)
  check_fixed(text, fixed, where)
  sizes = read_sizes(text, FIELDS, where)
  kinds = _layer_kinds(text, where)
  ropes = {word: _rope(text, word, where) for word in _KINDS}
  local: Rope | None = ropes['sliding_attention']
  if 'local' not in kinds or local == ropes['full_attention']:
    local = None
  words = [
    text[name] for name in ('hidden_act', 'hidden_activation') if name in text
  ]
  for word in words:
    check_choice(f'{where}: hidden_act', word, _ACTIVATIONS)
  scalar: Any = text.get('query_pre_attn_scalar', sizes['head_dim'])
  return CausalLMConfig(
    **sizes,
    **family.settings,
    mlp_activations=(_ACTIVATIONS[words[-1]], 'linear'),
    rope=ropes['full_attention'],
    local_rope=local,
    layer_kinds=kinds,
    window=_window(text) if 'local' in kinds else 0,
    norm_epsilon=text['rms_norm_eps'],
    query_scalar=0.0 if scalar == sizes['head_dim'] else scalar,
    score_softcap=text.get('attn_logit_softcapping', 0.0),
    logit_softcap=text.get('final_logit_softcapping', 0.0),
    logits_via_embedding=bool(text['tie_word_embeddings']),
  )


def _text_of(
  described: Mapping[str, Any], where: str = 'config.json'
) -> tuple[str, Mapping[str, Any]]:
  """The family of a text model, and the part of config.json about it."""
  if described.get('model_type') != _WITH_IMAGES:
    return described['model_type'], described
  check_known(described, AROUND_TEXT | NO_MATTER, where)
  text = described.get('text_config')
  if not isinstance(text, Mapping):
    raise ValueError(f'{where}: text_config is {text!r}, expected an object.')
  tied = described.get('tie_word_embeddings')
  return 'gemma3_text', text if tied is None else {
    **text,
    'tie_word_embeddings': tied,
  }


def _with_defaults(family: Family, text: Mapping[str, Any]) -> dict[str, Any]:
  """Fields with their values in transformers where they are left out."""
  said = {name: value for name, value in text.items() if value is not None}
  activation = (
    {} if 'hidden_activation' in family.more else {'hidden_act': 'silu'}
  )
  # None is "off" where the field is there, and the default where it is not.
  defaults = {
    name: value
    for name, value in family.defaults.items()
    if name not in text or name in FIELDS.values()
  }
  said = (
    {'tie_word_embeddings': False, 'rms_norm_eps': 1e-6, 'rope_theta': 1e4}
    | activation
    | defaults
    | said
  )
  heads, width = said.get('num_attention_heads'), said.get('hidden_size')
  said.setdefault('num_key_value_heads', heads)
  if isinstance(heads, int) and isinstance(width, int) and heads > 0:
    said.setdefault('head_dim', width // heads)
  return said


def _window(text: Mapping[str, Any]) -> Any:
  """What local layers see; None, which is refused, if that is turned off."""
  off = 'use_sliding_window' in text and not text['use_sliding_window']
  return None if off else text.get('sliding_window')


def _layer_kinds(text: Mapping[str, Any], where: str) -> tuple[Any, ...]:
  """The kinds of the layers, as the shortest row of them that repeats."""
  count = min(text['num_hidden_layers'], MOST_LAYERS)  # more is refused later
  numbers = ('sliding_window_pattern', 'max_window_layers')
  given = {name: name for name in numbers if name in text}
  read_sizes(text, given, where, ('max_window_layers',))
  types = text.get('layer_types')
  if types is None:
    types = [_layer_type(text, i) for i in range(count)]
  if not isinstance(types, list) or len(types) != count:
    raise ValueError(
      f'{where}: layer_types is {types!r}, expected {count} names.'
    )
  for word in types:
    check_choice(f'{where}: layer_types', word, _KINDS)
  found = tuple(_KINDS[word] for word in types)
  sizes = (
    size
    for size in range(1, count + 1)
    if all(found[i] == found[i % size] for i in range(count))
  )
  return found[: next(sizes)]


def _layer_type(text: Mapping[str, Any], layer: int) -> str:
  """A layer's type in configurations without `layer_types`."""
  if 'sliding_window_pattern' in text:
    slides = (layer + 1) % text['sliding_window_pattern'] != 0
  else:
    first = text.get('max_window_layers', layer + 1)
    slides = bool(text.get('use_sliding_window')) and layer >= first
  return 'sliding_attention' if slides else 'full_attention'


def _rope(text: Mapping[str, Any], layer_type: str, where: str) -> Rope:
  """The RoPE of layers of one type."""
  said = _object(text, 'rope_parameters', where)
  theta = text['rope_theta']
  if any(word in said for word in _KINDS):
    check_known(said, set(_KINDS), f'{where}: rope_parameters')
    said = _object(said, layer_type, where)
  elif said and 'rope_local_base_freq' in text:
    raise ValueError(
      f'{where}: rope_parameters is {said!r}; this model has two kinds of'
      f' layers, expected an entry for each of {", ".join(_KINDS)}.'
    )
  if layer_type == 'sliding_attention' and 'rope_local_base_freq' in text:
    theta = text['rope_local_base_freq']  # and it is not scaled
  else:
    said = {**said, **_object(text, 'rope_scaling', where)}
  word = said.get('rope_type', said.get('type', 'default'))
  check_choice(f'{where}: rope_type', word, _ROPES)
  fields = _ROPES[word]
  others = set(said) - {'rope_type', 'type', 'rope_theta', *fields.values()}
  if others := {name for name in others if said[name] is not None}:
    raise ValueError(
      f'{where}: RoPE of type {word!r} has {", ".join(sorted(others))}, which'
      ' the network here does not know.'
    )
  missing = [name for name in fields.values() if said.get(name) is None]
  if missing:
    raise ValueError(
      f'{where}: RoPE of type {word!r} lacks {", ".join(missing)}.'
    )
  scaling = {ours: said[theirs] for ours, theirs in fields.items()}
  return Rope(base=said.get('rope_theta', theta), **scaling)


def _object(
  said: Mapping[str, Any], name: str, where: str
) -> Mapping[str, Any]:
  found = said.get(name)
  if found is None:
    return {}
  if not isinstance(found, Mapping):
    raise ValueError(f'{where}: {name} is {found!r}, expected an object.')
  return found
