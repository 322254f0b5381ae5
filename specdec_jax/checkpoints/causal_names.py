"""Hugging Face's names for the arrays of Llama, Qwen and Gemma.

`MODULES` and `LAYER_MODULES` are all differences between the names here and
those of transformers' `...ForCausalLM`. Kernels are [out, in] there.
"""

import re
from collections.abc import Mapping
from typing import Any

import flax.traverse_util

from specdec_jax.checkpoints import causal_config
from specdec_jax.checkpoints import huggingface_arrays as arrays
from specdec_jax.checkpoints.causal_config import is_tied
from specdec_jax.checkpoints.huggingface_names import HEAD_MODULE, Row, shapes
from specdec_jax.models.causal_lm import CausalLM, CausalLMConfig

_EMBEDDING = 'embed_tokens.weight'
# What stands before all names; files with a vision tower have others.
_PREFIX = re.compile(r'(model\.|language_model\.)*')
_UNUSED = re.compile(r'.*rotary_emb\.inv_freq')  # in older files
_OF_IMAGES = re.compile(r'(vision_tower|multi_modal_projector)\..*')

FIELDS = causal_config.FIELDS
# Module here: transformers' module.
MODULES = {
  'decoder/token_embedder': 'embed_tokens',
  'decoder/decoder_norm': 'norm',
  HEAD_MODULE: 'lm_head',
}
# The same inside decoder/layers_<i> and layers.<i>.
LAYER_MODULES = {
  'pre_self_attention_layer_norm': 'input_layernorm',
  'self_attention/query': 'self_attn.q_proj',
  'self_attention/key': 'self_attn.k_proj',
  'self_attention/value': 'self_attn.v_proj',
  'self_attention/out': 'self_attn.o_proj',
  'self_attention/query_norm': 'self_attn.q_norm',
  'self_attention/key_norm': 'self_attn.k_norm',
  'mlp/wi_0': 'mlp.gate_proj',
  'mlp/wi_1': 'mlp.up_proj',
  'mlp/wo': 'mlp.down_proj',
}
# Norms before each block alone, or behind each block as well.
_PRE_NORMS = {'pre_mlp_layer_norm': 'post_attention_layernorm'}
_POST_NORMS = {
  'post_self_attention_layer_norm': 'post_attention_layernorm',
  'pre_mlp_layer_norm': 'pre_feedforward_layernorm',
  'post_mlp_layer_norm': 'post_feedforward_layernorm',
}


def table(config: CausalLMConfig) -> dict[str, Row]:
  """Returns where each array of a model of `config` is; keys are our names."""
  modules = LAYER_MODULES | (_POST_NORMS if config.post_norms else _PRE_NORMS)
  rows = {}
  flat = flax.traverse_util.flatten_dict(shapes(CausalLM(config)), sep='/')
  for name, leaf in flat.items():
    module, kind = name.rsplit('/', 1)
    if found := re.fullmatch(r'decoder/layers_(\d+)/(.+)', module):
      theirs = f'layers.{found[1]}.{modules[found[2]]}'
    else:
      theirs = MODULES[module]
    word = 'bias' if kind == 'bias' else 'weight'
    rows[name] = Row(f'{theirs}.{word}', leaf.shape, kind == 'kernel')
  return rows


def tidy(
  stored: Mapping[str, arrays.Stored], described: Mapping[str, Any], source: str
) -> dict[str, arrays.Stored]:
  """The arrays of the text model, by their names without the prefix.

  Warns if there are arrays for images, which are left out.

  Raises:
    ValueError: an array is there twice, or an output layer of its own where
      config.json says that it is the embedding.
  """
  found: dict[str, arrays.Stored] = {}
  skipped = 0
  for name, array in stored.items():
    short = _PREFIX.sub('', name, count=1)
    if _OF_IMAGES.fullmatch(short):
      skipped += 1
      continue
    if _UNUSED.fullmatch(short):
      continue
    if short in found:
      raise ValueError(
        f'{source!r} has {short} twice: as {found[short].name} and {name}.'
      )
    found[short] = array
  arrays.warn_of_images(source, skipped)
  if is_tied(described):
    head = found.pop(arrays.HEAD, None)
    if head is not None and not (
      _EMBEDDING in found and arrays.same(head, found[_EMBEDDING])
    ):
      raise ValueError(
        f'{source!r} has an output layer, {head.name}, which is not the'
        ' embedding, but tie_word_embeddings is true in config.json (or left'
        ' out, which means true for this model). Correct one of the two.'
      )
  return found
