"""Hugging Face's names for GPT-2: arrays and config.json.

`MODULES` and `LAYER_MODULES` are all differences between the names here and
those of transformers' `GPT2LMHeadModel`. Kernels are [in, out] there too
(transformers' Conv1D); query, key and value are one kernel, [M, 3 * M].
"""

import re
from collections.abc import Mapping
from typing import Any

import flax.traverse_util

from specdec_jax.checkpoints import huggingface_arrays as arrays
from specdec_jax.checkpoints.huggingface_names import (
  HEAD_MODULE,
  Row,
  check_fixed,
  read_sizes,
  shapes,
)
from specdec_jax.checks.names import check_choice
from specdec_jax.models.gpt import GPT, LAYER_NORM_EPSILON, GPTConfig

MODEL_TYPE = 'gpt2'
EMBEDDING = 'wte.weight'
# Prefix of all names in files that were saved with an output layer.
_PREFIX = 'transformer.'
# Causal masks, which older files hold.
_MASKS = re.compile(r'h\.\d+\.attn\.(masked_)?bias')

# Module here: transformers' module.
MODULES = {
  'decoder/token_embedder': 'wte',
  'decoder/position_embedder': 'wpe',
  'decoder/decoder_norm': 'ln_f',
  HEAD_MODULE: 'lm_head',
}
# The same inside decoder/layers_<i> and h.<i>.
LAYER_MODULES = {
  'pre_self_attention_layer_norm': 'ln_1',
  'self_attention/query': 'attn.c_attn',
  'self_attention/key': 'attn.c_attn',
  'self_attention/value': 'attn.c_attn',
  'self_attention/out': 'attn.c_proj',
  'pre_mlp_layer_norm': 'ln_2',
  'mlp/wi': 'mlp.c_fc',
  'mlp/wo': 'mlp.c_proj',
}
_KINDS = {
  'embedding': 'weight',
  'kernel': 'weight',
  'scale': 'weight',
  'bias': 'bias',
}
# Which third of the joined kernel and bias a projection is.
_THIRDS = {'query': 0, 'key': 1, 'value': 2}

# GPTConfig's field: config.json's.
FIELDS = {
  'vocab_size': 'vocab_size',
  'emb_dim': 'n_embd',
  'num_heads': 'n_head',
  'num_layers': 'n_layer',
  'num_positions': 'n_positions',
}
# config.json's activation_function: ours. Its plain `gelu` is a different
# function, and so is not supported.
_ACTIVATIONS = {
  'gelu_new': 'gelu',
  'gelu_pytorch_tanh': 'gelu',
  'relu': 'relu',
  'silu': 'silu',
  'swish': 'silu',
}
# Values that the network here has built in; config.json may leave them out.
_FIXED = {
  'layer_norm_epsilon': LAYER_NORM_EPSILON,
  'scale_attn_weights': True,
  'scale_attn_by_inverse_layer_idx': False,
  'add_cross_attention': False,
}


def table(config: GPTConfig) -> dict[str, Row]:
  """Returns where each array of a model of `config` is; keys are our names."""
  rows = {}
  flat = flax.traverse_util.flatten_dict(shapes(GPT(config)), sep='/')
  for name, leaf in flat.items():
    module, kind = name.rsplit('/', 1)
    part = module.rsplit('/', 1)[1]
    if found := re.fullmatch(r'decoder/layers_(\d+)/(.+)', module):
      theirs = f'h.{found[1]}.{LAYER_MODULES[found[2]]}'
    else:
      theirs = MODULES[module]
    scale = 1.0
    if part == 'query':
      # GPT-2 divides scores by sqrt(D); here that is part of the projection.
      scale = config.head_dim**-0.5
    elif part == 'decoder_norm' and config.logits_via_embedding:
      # The output layer here divides its input by sqrt(M); GPT-2's does not.
      scale = config.emb_dim**0.5
    rows[name] = Row(
      f'{theirs}.{_KINDS[kind]}',
      leaf.shape,
      module == HEAD_MODULE,
      _THIRDS.get(part),
      scale,
    )
  return rows


def tidy(
  stored: Mapping[str, arrays.Stored], source: str
) -> tuple[dict[str, arrays.Stored], bool]:
  """A GPT-2's arrays without masks, by their names without the prefix.

  Returns:
    The arrays, and whether the output layer is the embedding.
  """
  found: dict[str, arrays.Stored] = {}
  for name, array in stored.items():
    short = name.removeprefix(_PREFIX)
    if _MASKS.fullmatch(short):
      continue
    if short in found:
      raise ValueError(
        f'{source!r} has {short} twice: with and without {_PREFIX!r} before it.'
      )
    found[short] = array
  if tied := arrays.has_no_head(found, EMBEDDING):
    found.pop(arrays.HEAD, None)
  return found, tied


def read_config(
  described: Mapping[str, Any], logits_via_embedding: bool, where: str
) -> GPTConfig:
  """Returns the shape that config.json describes; see `huggingface`."""
  sizes = read_sizes(described, FIELDS, where)
  inner = described.get('n_inner')
  if inner is not None:
    read_sizes(described, {'mlp_dim': 'n_inner'}, where)
  check_fixed(described, _FIXED, where)
  word = described.get('activation_function', 'gelu_new')
  check_choice(f'{where}: activation_function', word, _ACTIVATIONS)
  width, heads = sizes['emb_dim'], sizes['num_heads']
  if width % heads:
    raise ValueError(
      f'{where}: n_embd is {width}, expected a multiple of n_head = {heads}.'
    )
  return GPTConfig(
    **sizes,
    head_dim=width // heads,
    mlp_dim=4 * width if inner is None else inner,
    mlp_activations=(_ACTIVATIONS[word],),
    logits_via_embedding=logits_via_embedding,
    dropout_rate=described.get('resid_pdrop', 0.0),
  )
