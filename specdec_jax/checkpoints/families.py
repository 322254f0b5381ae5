"""Families of Hugging Face folders, as data: config.json and array names.

A folder's `model_type` names its `Family`: which fields of config.json give
which fields of our configuration, which fields may have one value only, and
how transformers calls our modules. `read_config` reads config.json by it, and
`table` says where each of our arrays is in a file.

Kernels are [out, in] in files, ours are [in, out]; GPT-2's are [in, out] in
both. Some factors of transformers become part of a kernel or a norm here: GPT-2
and M2M-100 divide queries by sqrt(D); a GPT-2's embedding as output layer does
not divide its input by sqrt(M) as ours does; a T5 may divide the input of a
separate output layer by it.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.traverse_util

from specdec_jax.checkpoints import config_json
from specdec_jax.checkpoints.config_json import Described, Family
from specdec_jax.checks.names import check_choice
from specdec_jax.models.base import param_shapes
from specdec_jax.models.families import Config, network_of
from specdec_jax.models.gpt import LAYER_NORM_EPSILON

# Names of modules.


def _stack(ours: str, theirs: str, names: Mapping[str, str]) -> dict[str, str]:
  return {f'{ours}/{a}': f'{theirs}.{b}' for a, b in names.items()}


def _projections(ours: str, theirs: str, words: str) -> dict[str, str]:
  """Query, key, value and out of an attention; {} in `theirs` is the word."""
  parts = zip(('query', 'key', 'value', 'out'), words.split(), strict=True)
  return {f'{ours}/{part}': theirs.format(word) for part, word in parts}


def _t5_mlp(layer: int) -> dict[str, str]:
  names = {
    f'mlp/{name}': f'layer.{layer}.DenseReluDense.{name}'
    for name in ('wi', 'wi_0', 'wi_1', 'wo')
  }
  return names | {'pre_mlp_layer_norm': f'layer.{layer}.layer_norm'}


_T5_NAMES = {
  'token_embedder': 'shared',
  'decoder/logits_dense': 'lm_head',
  'encoder/encoder_norm': 'encoder.final_layer_norm',
  'decoder/decoder_norm': 'decoder.final_layer_norm',
  **_stack(
    'encoder/layers_*',
    'encoder.block.*',
    {
      'pre_attention_layer_norm': 'layer.0.layer_norm',
      **_projections('attention', 'layer.0.SelfAttention.{}', 'q k v o'),
      **_t5_mlp(1),
    },
  ),
  **_stack(
    'decoder/layers_*',
    'decoder.block.*',
    {
      'pre_self_attention_layer_norm': 'layer.0.layer_norm',
      **_projections('self_attention', 'layer.0.SelfAttention.{}', 'q k v o'),
      'pre_cross_attention_layer_norm': 'layer.1.layer_norm',
      **_projections(
        'encoder_decoder_attention', 'layer.1.EncDecAttention.{}', 'q k v o'
      ),
      **_t5_mlp(2),
    },
  ),
}
_BIAS = 'layer.0.SelfAttention.relative_attention_bias'
# One table per stack, which transformers keeps in the first layer; of UMT5 each
# layer has its own.
_SHARED_BIAS = {
  f'{stack}/relpos_bias': f'{stack}.block.0.{_BIAS}'
  for stack in ('encoder', 'decoder')
}
_BIAS_PER_LAYER = {
  f'{stack}/layers_*/relpos_bias': f'{stack}.block.*.{_BIAS}'
  for stack in ('encoder', 'decoder')
}
_GPT2_NAMES = {
  'decoder/token_embedder': 'wte',
  'decoder/position_embedder': 'wpe',
  'decoder/decoder_norm': 'ln_f',
  'decoder/logits_dense': 'lm_head',
  **_stack(
    'decoder/layers_*',
    'h.*',
    {
      'pre_self_attention_layer_norm': 'ln_1',
      **_projections(
        'self_attention', 'attn.{}', 'c_attn c_attn c_attn c_proj'
      ),
      'pre_mlp_layer_norm': 'ln_2',
      'mlp/wi': 'mlp.c_fc',
      'mlp/wo': 'mlp.c_proj',
    },
  ),
}
_M2M100_MLP = {
  'pre_mlp_layer_norm': 'final_layer_norm',
  'mlp/wi': 'fc1',
  'mlp/wo': 'fc2',
}
_M2M100_NAMES = {
  'token_embedder': 'model.shared',
  'encoder/encoder_norm': 'model.encoder.layer_norm',
  'decoder/decoder_norm': 'model.decoder.layer_norm',
  **_stack(
    'encoder/layers_*',
    'model.encoder.layers.*',
    {
      'pre_attention_layer_norm': 'self_attn_layer_norm',
      **_projections('attention', 'self_attn.{}_proj', 'q k v out'),
      **_M2M100_MLP,
    },
  ),
  **_stack(
    'decoder/layers_*',
    'model.decoder.layers.*',
    {
      'pre_self_attention_layer_norm': 'self_attn_layer_norm',
      **_projections('self_attention', 'self_attn.{}_proj', 'q k v out'),
      'pre_cross_attention_layer_norm': 'encoder_attn_layer_norm',
      **_projections(
        'encoder_decoder_attention', 'encoder_attn.{}_proj', 'q k v out'
      ),
      **_M2M100_MLP,
    },
  ),
}
_CAUSAL_LAYER = {
  'pre_self_attention_layer_norm': 'input_layernorm',
  **_projections('self_attention', 'self_attn.{}_proj', 'q k v o'),
  'self_attention/query_norm': 'self_attn.q_norm',
  'self_attention/key_norm': 'self_attn.k_norm',
  'pre_mlp_layer_norm': 'post_attention_layernorm',
  'mlp/wi_0': 'mlp.gate_proj',
  'mlp/wi_1': 'mlp.up_proj',
  'mlp/wo': 'mlp.down_proj',
}
# Gemma's norms stand before and behind each block.
_GEMMA_LAYER = _CAUSAL_LAYER | {
  'post_self_attention_layer_norm': 'post_attention_layernorm',
  'pre_mlp_layer_norm': 'pre_feedforward_layernorm',
  'post_mlp_layer_norm': 'post_feedforward_layernorm',
}
_CAUSAL_OUTSIDE = {
  'decoder/token_embedder': 'embed_tokens',
  'decoder/decoder_norm': 'norm',
  'decoder/logits_dense': 'lm_head',
}
_CAUSAL_NAMES = _CAUSAL_OUTSIDE | _stack(
  'decoder/layers_*', 'layers.*', _CAUSAL_LAYER
)
_GEMMA_NAMES = _CAUSAL_OUTSIDE | _stack(
  'decoder/layers_*', 'layers.*', _GEMMA_LAYER
)
_T5GEMMA_LAYER = _GEMMA_LAYER | {
  'pre_self_attention_layer_norm': 'pre_self_attn_layernorm',
  'post_self_attention_layer_norm': 'post_self_attn_layernorm',
  **_projections('encoder_decoder_attention', 'cross_attn.{}_proj', 'q k v o'),
  'pre_cross_attention_layer_norm': 'pre_cross_attn_layernorm',
  'post_cross_attention_layer_norm': 'post_cross_attn_layernorm',
}
_T5GEMMA_NAMES = {
  'encoder/token_embedder': 'encoder.embed_tokens',
  'encoder/encoder_norm': 'encoder.norm',
  'decoder/decoder_norm': 'decoder.norm',
  'decoder/logits_dense': 'lm_head.out_proj',
  **_stack('encoder/layers_*', 'encoder.layers.*', _T5GEMMA_LAYER),
  **_stack('decoder/layers_*', 'decoder.layers.*', _T5GEMMA_LAYER),
}

# The families.

_T5 = Family(
  config_json.t5,
  _T5_NAMES | _SHARED_BIAS,
  'shared.weight',
  {
    'vocab_size': 'vocab_size',
    'emb_dim': 'd_model',
    'num_heads': 'num_heads',
    'num_encoder_layers': 'num_layers',
    'num_decoder_layers': 'num_decoder_layers',
    'head_dim': 'd_kv',
    'mlp_dim': 'd_ff',
  },
  defaults={'feed_forward_proj': 'relu'},
  derived={'num_decoder_layers': lambda given: given['num_layers']},
  read={
    *config_json.ABOUT.values(),
    config_json.ENCODER_DIM,
    'dense_act_fn',
    'is_gated_act',
    'scale_decoder_outputs',
  },
  fixed={
    'layer_norm_epsilon': 1e-6,
    'relative_attention_num_buckets': 32,
    'relative_attention_max_distance': 128,
  },
  ties_by_arrays=True,
  skipped=re.compile(  # no version of T5 reads it
    r'decoder\.block\.0\.layer\.1\.EncDecAttention'
    r'\.relative_attention_bias\.weight'
  ),
  aliases={
    'encoder.embed_tokens.weight': 'shared.weight',
    'decoder.embed_tokens.weight': 'shared.weight',
  },
)
_MT5 = _T5._replace(defaults={'feed_forward_proj': 'gated-gelu'})
_LLAMA = Family(
  config_json.causal,
  _CAUSAL_NAMES,
  'embed_tokens.weight',
  {
    'vocab_size': 'vocab_size',
    'emb_dim': 'hidden_size',
    'num_heads': 'num_attention_heads',
    'num_kv_heads': 'num_key_value_heads',
    'num_layers': 'num_hidden_layers',
    'head_dim': 'head_dim',
    'mlp_dim': 'intermediate_size',
  },
  defaults={'hidden_act': 'silu', 'rms_norm_eps': 1e-6, 'rope_theta': 1e4},
  derived={
    'num_key_value_heads': lambda given: given['num_attention_heads'],
    'head_dim': lambda given: (
      given['hidden_size'] // given['num_attention_heads']
    ),
  },
  read={'layer_types', 'rope_parameters', 'rope_scaling'},
  fixed={'attention_bias': False, 'mlp_bias': False, 'use_mrope': False},
  same={'sliding_window_size': 'sliding_window'},  # Gemma 2's folders have both
  tied=False,
  prefix=re.compile(r'(model\.|language_model\.)*'),
  skipped=re.compile(r'.*rotary_emb\.inv_freq'),  # in older files
  images=re.compile(r'(vision_tower|multi_modal_projector)\..*'),
)
_QWEN2 = _LLAMA._replace(
  settings={'qkv_bias': True},
  defaults=_LLAMA.defaults | {'sliding_window': 4096, 'max_window_layers': 28},
  read={*_LLAMA.read, 'use_sliding_window'},
)
_QWEN3 = _QWEN2._replace(
  settings={'qk_norm': True}, defaults=_QWEN2.defaults | {'head_dim': 128}
)
# Defaults are those of transformers' configurations.
_GEMMA = _LLAMA._replace(
  names=_GEMMA_NAMES,
  settings={'norm_offset': 1.0, 'post_norms': True, 'scale_embeddings': True},
  defaults=_LLAMA.defaults
  | {
    'hidden_activation': 'gelu_pytorch_tanh',
    'num_attention_heads': 8,
    'num_key_value_heads': 4,
    'head_dim': 256,
    'query_pre_attn_scalar': 256,
    'sliding_window': 4096,
  },
  fixed=_LLAMA.fixed | {'use_bidirectional_attention': False},
  tied=True,
)
_GEMMA2 = _GEMMA._replace(
  defaults=_GEMMA.defaults
  | {
    'sliding_window_pattern': 2,
    'final_logit_softcapping': 30.0,
    'attn_logit_softcapping': 50.0,
  }
)
_GEMMA3 = _GEMMA._replace(
  settings=_GEMMA.settings | {'qk_norm': True},
  defaults=_GEMMA.defaults
  | {
    'vocab_size': 262208,
    'sliding_window_pattern': 6,
    'rope_theta': 1e6,
    'rope_local_base_freq': 1e4,
  },
  read={*_GEMMA.read, 'final_logit_softcapping'},
)
_T5GEMMA_SIZES = {
  'hidden_size': 2304,
  'intermediate_size': 9216,
  'num_hidden_layers': 26,
}
# The families of T5Gemma's stacks. transformers reads a softcap of T5Gemma 2's
# scores, but does not use it.
_STACKS = {
  't5gemma': _GEMMA2._replace(
    defaults=_GEMMA2.defaults | _T5GEMMA_SIZES | {'vocab_size': 256_000},
    read={*_GEMMA2.read, 'cross_attention_hidden_size'},
  ),
  't5gemma2': _GEMMA3._replace(
    defaults=_GEMMA3.defaults | _T5GEMMA_SIZES,
    read={*_GEMMA3.read, 'cross_attention_hidden_size'},
    fixed=_GEMMA3.fixed | {'attn_logit_softcapping': None},
  ),
}
_T5GEMMA = Family(
  config_json.t5gemma,
  _T5GEMMA_NAMES | {'token_embedder': 'decoder.embed_tokens'},
  'decoder.embed_tokens.weight',
  _LLAMA.fields,
  read={'decoder', 'encoder', 'vocab_size'},
  head='lm_head.out_proj.weight',
  stack=_STACKS['t5gemma'],
  # The encoder of texts may be within one of texts and images.
  prefix=re.compile(r'(model\.)?(?P<kept>encoder\.)?(text_model\.)?'),
  images=re.compile(r'encoder\.(vision_tower|multi_modal_projector)\..*'),
)
FAMILIES = {
  't5': _T5,
  'mt5': _MT5,
  'umt5': _MT5._replace(
    names=_T5_NAMES | _BIAS_PER_LAYER, settings={'bias_per_layer': True}
  ),
  'gpt2': Family(
    config_json.gpt2,
    _GPT2_NAMES,
    'wte.weight',
    {
      'vocab_size': 'vocab_size',
      'emb_dim': 'n_embd',
      'num_heads': 'n_head',
      'num_layers': 'n_layer',
      'num_positions': 'n_positions',
      'mlp_dim': 'n_inner',
    },
    defaults={'activation_function': 'gelu_new'},
    derived={'n_inner': lambda given: 4 * given['n_embd']},
    fixed={
      'layer_norm_epsilon': LAYER_NORM_EPSILON,
      'scale_attn_weights': True,
      'scale_attn_by_inverse_layer_idx': False,
    },
    prefix=re.compile(r'transformer\.'),  # where there is an output layer
    skipped=re.compile(r'h\.\d+\.attn\.(masked_)?bias'),  # in older files
    kernels_in_out=True,
    scales_queries=True,
  ),
  'm2m_100': Family(
    config_json.m2m100,
    _M2M100_NAMES,
    'model.shared.weight',
    {
      'vocab_size': 'vocab_size',
      'emb_dim': 'd_model',
      'num_heads': 'encoder_attention_heads',
      'num_encoder_layers': 'encoder_layers',
      'num_decoder_layers': 'decoder_layers',
      'mlp_dim': 'encoder_ffn_dim',
    },
    defaults={'activation_function': 'relu', 'scale_embedding': True},
    fixed={'tie_word_embeddings': True},
    same={
      'decoder_attention_heads': 'encoder_attention_heads',
      'decoder_ffn_dim': 'encoder_ffn_dim',
      'hidden_size': 'd_model',
      'num_attention_heads': 'encoder_attention_heads',
      'num_hidden_layers': 'encoder_layers',
    },
    skipped=re.compile(r'model\.(en|de)coder\.embed_positions\.weights?'),
    aliases={
      'model.encoder.embed_tokens.weight': 'model.shared.weight',
      'model.decoder.embed_tokens.weight': 'model.shared.weight',
      'lm_head.weight': 'model.shared.weight',
    },
    scales_queries=True,
  ),
  'llama': _LLAMA,
  'qwen2': _QWEN2,
  'qwen3': _QWEN3,
  'gemma2': _GEMMA2,
  'gemma3_text': _GEMMA3,
  'gemma3': _GEMMA3._replace(make=config_json.with_images),
  't5gemma': _T5GEMMA,
  't5gemma2': _T5GEMMA._replace(
    names=_T5GEMMA_NAMES
    | {
      'token_embedder': 'encoder.embed_tokens',
      'image_end_embedding': 'encoder.embed_tokens.eoi_embedding',
    },
    embedding='encoder.embed_tokens.weight',
    stack=_STACKS['t5gemma2'],
    read={*_T5GEMMA.read, 'eoi_token_index', 'image_token_index'},
    aliases={
      f'decoder.embed_tokens.{name}': f'encoder.embed_tokens.{name}'
      for name in ('weight', 'eoi_embedding')
    },
  ),
}


def family_of(described: Described, where: str) -> Family:
  """The family of a config.json; ValueError if it is none of `FAMILIES`."""
  word = described.get('model_type')
  check_choice(f'{where}: model_type', word, FAMILIES)
  return FAMILIES[str(word)]


def read_config(
  described: Described, where: str, tied: bool | None = None
) -> Config:
  """Returns the shape that a config.json describes.

  Args:
    described: config.json.
    where: its path, for messages.
    tied: whether the output layer is the embedding, as the weights show; None
      goes by config.json.

  Raises:
    ValueError: the architecture is not supported; or a field is missing, or
      differs from what the network here has, or is not known and might change
      what the model says.
  """
  family = family_of(described, where)
  tied = config_json.is_tied(family, described) if tied is None else tied
  return family.make(family, described, where, tied)


# Where our arrays are in a file.


class Row(NamedTuple):
  """Where one of our arrays is in a file of transformers.

  Attributes:
    name: transformers' name.
    shape: our shape.
    transposed: whether the array in the file is the transpose of ours.
    third: which third of the file's last axis ours is; None: all of it.
    scale: the file's values are multiplied by this.
  """

  name: str
  shape: tuple[int, ...]
  transposed: bool = False
  third: int | None = None
  scale: float = 1.0

  @property
  def stored_shape(self) -> tuple[int, ...]:
    """The shape of the whole array in the file."""
    shape = self.shape[::-1] if self.transposed else self.shape
    return shape if self.third is None else (*shape[:-1], 3 * shape[-1])


def table(
  family: Family, config: Config, scales_head: bool = False
) -> dict[str, Row]:
  """Our name of each array of a model -> where it is in a file.

  Args:
    family: of the file.
    config: configuration of the model.
    scales_head: whether transformers divides the input of a separate output
      layer by sqrt(M), see `scales_output`.
  """
  sizes: Any = config
  thirds = ('query', 'key', 'value') if family.kernels_in_out else ()
  rows = {}
  shapes = param_shapes(network_of(config))
  for name, leaf in flax.traverse_util.flatten_dict(shapes, sep='/').items():
    module, _, kind = re.sub(r'layers_\d+', 'layers_*', name).rpartition('/')
    part = module.rpartition('/')[2]
    stored = family.names[module or name]
    if module:
      stored += '.bias' if kind == 'bias' else '.weight'
    if number := re.search(r'layers_(\d+)', name):
      stored = stored.replace('*', number[1])
    scale = 1.0
    if part == 'query' and family.scales_queries:
      scale = sizes.head_dim**-0.5
    elif part == 'logits_dense' and scales_head:
      scale = sizes.emb_dim**-0.5
    elif part == 'decoder_norm' and family.kernels_in_out:
      scale = sizes.emb_dim**0.5 if sizes.logits_via_embedding else 1.0
    turned = kind in ('kernel', 'rel_embedding')
    turned = turned and (not family.kernels_in_out or part == 'logits_dense')
    third = thirds.index(part) if part in thirds else None
    rows[name] = Row(stored, leaf.shape, turned, third, scale)
  return rows
