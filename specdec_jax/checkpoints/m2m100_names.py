"""Hugging Face's names for M2M-100 and NLLB-200: arrays and config.json.

`MODULES` and `LAYER_MODULES` are all differences between the names here and
those of transformers' `M2M100ForConditionalGeneration`. Kernels are [out, in]
there. A field of config.json that is neither read here nor known not to matter
is refused.
"""

import re
from collections.abc import Mapping
from typing import Any

import flax.traverse_util

from specdec_jax.checkpoints import huggingface_arrays as arrays
from specdec_jax.checkpoints.huggingface_names import (
  Row,
  check_fixed,
  check_known,
  read_sizes,
  shapes,
)
from specdec_jax.checks.names import check_choice
from specdec_jax.models.m2m100 import M2M100, M2M100Config

MODEL_TYPE = 'm2m_100'  # NLLB-200's too; nllb-moe is another
_EMBEDDING = 'model.shared.weight'
# Other names of the embedding, and positions, which older files hold.
_ALIASES = (
  'model.encoder.embed_tokens.weight',
  'model.decoder.embed_tokens.weight',
  arrays.HEAD,
)
_POSITIONS = re.compile(r'model\.(en|de)coder\.embed_positions\.weights?')

# Module here: transformers' module.
MODULES = {
  'token_embedder': 'model.shared',
  'encoder/encoder_norm': 'model.encoder.layer_norm',
  'decoder/decoder_norm': 'model.decoder.layer_norm',
}


def _attention(ours: str, theirs: str) -> dict[str, str]:
  words = {'query': 'q', 'key': 'k', 'value': 'v', 'out': 'out'}
  return {
    f'{ours}/{part}': f'{theirs}.{word}_proj' for part, word in words.items()
  }


_MLP = {
  'pre_mlp_layer_norm': 'final_layer_norm',
  'mlp/wi': 'fc1',
  'mlp/wo': 'fc2',
}
# The same inside <stack>/layers_<i> and model.<stack>.layers.<i>.
LAYER_MODULES = {
  'encoder': {
    'pre_attention_layer_norm': 'self_attn_layer_norm',
    **_attention('attention', 'self_attn'),
    **_MLP,
  },
  'decoder': {
    'pre_self_attention_layer_norm': 'self_attn_layer_norm',
    **_attention('self_attention', 'self_attn'),
    'pre_cross_attention_layer_norm': 'encoder_attn_layer_norm',
    **_attention('encoder_decoder_attention', 'encoder_attn'),
    **_MLP,
  },
}

# M2M100Config's field: config.json's.
FIELDS = {
  'vocab_size': 'vocab_size',
  'emb_dim': 'd_model',
  'num_heads': 'encoder_attention_heads',
  'num_encoder_layers': 'encoder_layers',
  'num_decoder_layers': 'decoder_layers',
  'mlp_dim': 'encoder_ffn_dim',
}
_SAME = {
  'decoder_attention_heads': 'encoder_attention_heads',
  'decoder_ffn_dim': 'encoder_ffn_dim',
}
_IDS = {'pad_id': 'pad_token_id', 'start_id': 'decoder_start_token_id'}
_READ = {
  *FIELDS.values(),
  *_SAME,
  *_IDS.values(),
  'activation_function',
  'scale_embedding',
  'tie_word_embeddings',
}
# Fields that do not change what a model says: names, training, how transformers
# computes, ids that are read elsewhere, and positions, which have no end.
_NO_MATTER = {
  'activation_dropout',
  'architectures',
  'attention_dropout',
  'bos_token_id',
  'decoder_layerdrop',
  'dropout',
  'dtype',
  'early_stopping',  # of beam searches
  'encoder_layerdrop',
  'eos_token_id',
  'gradient_checkpointing',
  'hidden_size',  # d_model's other name
  'init_std',
  'is_encoder_decoder',
  'max_length',
  'max_position_embeddings',
  'model_type',
  'num_beams',
  'num_hidden_layers',
  'tokenizer_class',
  'torch_dtype',
  'transformers_version',
  'use_cache',
  '_name_or_path',
  '_attn_implementation_autoset',
}
_ACTIVATIONS = {'relu': 'relu', 'gelu_new': 'gelu', 'silu': 'silu'}


def table(config: M2M100Config) -> dict[str, Row]:
  """Returns where each array of a model of `config` is; keys are our names."""
  rows = {}
  flat = flax.traverse_util.flatten_dict(shapes(M2M100(config)), sep='/')
  for name, leaf in flat.items():
    module, kind = name.rsplit('/', 1)
    if found := re.fullmatch(r'(\w+)/layers_(\d+)/(.+)', module):
      stack, number, inner = found.groups()
      theirs = f'model.{stack}.layers.{number}.{LAYER_MODULES[stack][inner]}'
    else:
      theirs = MODULES[module]
    # Theirs divides queries by sqrt(D); here that is part of the projection.
    scale = config.head_dim**-0.5 if module.endswith('/query') else 1.0
    word = 'bias' if kind == 'bias' else 'weight'
    rows[name] = Row(
      f'{theirs}.{word}', leaf.shape, kind == 'kernel', scale=scale
    )
  return rows


def tidy(
  stored: Mapping[str, arrays.Stored], described: Mapping[str, Any], source: str
) -> dict[str, arrays.Stored]:
  """The arrays that are read, each under one name.

  Raises:
    ValueError: there are two embeddings, and they differ.
  """
  found = {
    name: array
    for name, array in stored.items()
    if not _POSITIONS.fullmatch(name)
  }
  for alias in _ALIASES:
    array = found.pop(alias, None)
    if array is None:
      continue
    if not arrays.same(array, found.setdefault(_EMBEDDING, array)):
      raise ValueError(
        f'{source!r}: {alias} and {_EMBEDDING} differ; the network here has one'
        ' embedding for both stacks and the output layer.'
      )
  return found


def read_config(described: Mapping[str, Any], where: str) -> M2M100Config:
  """Returns the shape that config.json describes; see `huggingface`."""
  check_known(described, _READ | _NO_MATTER, where)
  sizes = read_sizes(described, FIELDS, where)
  check_fixed(
    described,
    {theirs: described[other] for theirs, other in _SAME.items()}
    | {'tie_word_embeddings': True},
    where,
  )
  word = described.get('activation_function', 'relu')
  check_choice(f'{where}: activation_function', word, _ACTIVATIONS)
  width, heads = sizes['emb_dim'], sizes['num_heads']
  if width % heads:
    raise ValueError(
      f'{where}: d_model is {width}, expected a multiple of'
      f' encoder_attention_heads = {heads}.'
    )
  ids = {
    ours: described[theirs]
    for ours, theirs in _IDS.items()
    if described.get(theirs) is not None
  }
  return M2M100Config(
    **sizes,
    **ids,
    head_dim=width // heads,
    mlp_activations=(_ACTIVATIONS[word],),
    scale_embeddings=described.get('scale_embedding', True),
  )
