"""Hugging Face's names for T5Gemma 1 and 2: config.json and arrays.

Each stack is described as a Gemma is, see `causal_config`. `MODULES` and
`LAYER_MODULES` are all differences between the names here and those of
transformers' `T5Gemma...ForConditionalGeneration`. Kernels are [out, in] there.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import flax.traverse_util

from specdec_jax.checkpoints import causal_config
from specdec_jax.checkpoints import huggingface_arrays as arrays
from specdec_jax.checkpoints.causal_config import FAMILIES, Family
from specdec_jax.checkpoints.causal_names import LAYER_MODULES as CAUSAL_MODULES
from specdec_jax.checkpoints.huggingface_names import (
  HEAD_MODULE,
  Row,
  check_known,
  shapes,
)
from specdec_jax.models.t5gemma import T5Gemma, T5GemmaConfig

FIELDS = causal_config.FIELDS
ONE, TWO = MODEL_TYPES = 't5gemma', 't5gemma2'

# Module here: transformers' module.
MODULES = {
  'encoder/token_embedder': 'encoder.embed_tokens',
  'encoder/encoder_norm': 'encoder.norm',
  'decoder/decoder_norm': 'decoder.norm',
  HEAD_MODULE: 'lm_head.out_proj',
}
# The same inside <stack>/layers_<i> and <stack>.layers.<i>.
LAYER_MODULES = CAUSAL_MODULES | {
  'pre_self_attention_layer_norm': 'pre_self_attn_layernorm',
  'post_self_attention_layer_norm': 'post_self_attn_layernorm',
  'encoder_decoder_attention/query': 'cross_attn.q_proj',
  'encoder_decoder_attention/key': 'cross_attn.k_proj',
  'encoder_decoder_attention/value': 'cross_attn.v_proj',
  'encoder_decoder_attention/out': 'cross_attn.o_proj',
  'pre_cross_attention_layer_norm': 'pre_cross_attn_layernorm',
  'post_cross_attention_layer_norm': 'post_cross_attn_layernorm',
  'pre_mlp_layer_norm': 'pre_feedforward_layernorm',
  'post_mlp_layer_norm': 'post_feedforward_layernorm',
}
_IMAGE_END = 'eoi_embedding'
_HEAD = f'{MODULES[HEAD_MODULE]}.weight'
# What only images go through.
_OF_IMAGES = re.compile(r'encoder\.(vision_tower|multi_modal_projector)\..*')

# transformers' defaults for sizes, which folders may leave out.
_SIZES = {
  'hidden_size': 2304,
  'intermediate_size': 9216,
  'num_hidden_layers': 26,
}
# Fields of stacks: dropout, which only training has, and a width that follows.
_OF_STACKS = (
  'classifier_dropout_rate',
  'cross_attention_hidden_size',
  'dropout_rate',
)


def _stack(gemma: Family, vocab_size: int, **fixed: Any) -> Family:
  """The family of a stack that is as a Gemma's."""
  defaults = {**gemma.defaults, **_SIZES, 'vocab_size': vocab_size}
  return gemma._replace(
    defaults=defaults,
    more=(*gemma.more, *_OF_STACKS),
    fixed={**gemma.fixed, 'add_cross_attention': False, **fixed},
  )


# config.json's model_type: the family of its stacks. transformers reads a
# softcap of T5Gemma 2's scores, but does not use it.
_STACKS = {
  ONE: _stack(FAMILIES['gemma2'], 256_000),
  TWO: _stack(FAMILIES['gemma3_text'], 262_208, attn_logit_softcapping=None),
}
_AROUND_STACKS = {
  'classifier_dropout_rate',
  'decoder',
  'decoder_start_token_id',
  'dropout_rate',
  'encoder',
  'tie_word_embeddings',
  'vocab_size',
}
_END_INDEX = 'eoi_token_index'


def read_config(described: Mapping[str, Any], where: str) -> T5GemmaConfig:
  """Returns the shape that config.json describes; see `huggingface`.

  Raises:
    ValueError: a field is missing, has a value that the network here does not
      know, or is itself unknown and might matter; or the stacks do not fit.
  """
  merged = described['model_type'] == TWO
  around = _AROUND_STACKS | causal_config.NO_MATTER
  if merged:
    around |= {_END_INDEX, 'image_token_index'}
  check_known(described, around, where)
  encoder = _part(described, 'encoder', where)
  image_end = 0
  if merged:
    known = causal_config.AROUND_TEXT | causal_config.NO_MATTER
    known = known | {'dropout_rate', 'vocab_size'}
    check_known(encoder, known, f'{where}: encoder')
    image_end = encoder.get(_END_INDEX) or 256_000
    encoder = _part(encoder, 'text_config', f'{where}: encoder')
  decoder = _part(described, 'decoder', where)
  tied = described.get('tie_word_embeddings')
  tied = True if tied is None else bool(tied)
  if merged and not tied:
    raise ValueError(
      f'{where}: tie_word_embeddings is false; the network here has one table'
      ' of embeddings for encoder, decoder and output layer.'
    )
  family = _STACKS[described['model_type']]

  def stack(name, said):
    found = causal_config.read_stack(said, family, f'{where}: {name}')
    return dataclasses.replace(found, logits_via_embedding=tied)

  config = T5GemmaConfig(
    stack('encoder', encoder),
    stack('decoder', decoder),
    merged_attention=merged,
    start_id=with_ids(described)['decoder_start_token_id'],
    image_end_id=image_end,
  )
  width = decoder.get('cross_attention_hidden_size')
  if width not in (None, config.encoded_dim):
    raise ValueError(
      f'{where}: decoder.cross_attention_hidden_size is {width}; the encoder is'
      f' {config.encoded_dim} wide.'
    )
  return config


def with_ids(described: Mapping[str, Any]) -> dict[str, Any]:
  """config.json with the special ids that it leaves out.

  Those of the decoder are the model's, and the decoder begins with the
  beginning of a text unless another id is named.
  """
  decoder = described.get('decoder')
  known = {'bos_token_id': 2, 'eos_token_id': 1, 'pad_token_id': 0}
  for said in (decoder if isinstance(decoder, Mapping) else {}, described):
    known |= {name: said[name] for name in known if said.get(name) is not None}
  start = described.get('decoder_start_token_id')
  start = known['bos_token_id'] if start is None else start
  return {**described, **known, 'decoder_start_token_id': start}


def _part(
  described: Mapping[str, Any], name: str, where: str
) -> Mapping[str, Any]:
  found = described.get(name)
  if not isinstance(found, Mapping):
    raise ValueError(f'{where}: {name} is {found!r}, expected an object.')
  return found


def table(config: T5GemmaConfig) -> dict[str, Row]:
  """Returns where each array of a model of `config` is; keys are our names."""
  shared = 'encoder' if config.merged_attention else 'decoder'
  modules = MODULES | {'token_embedder': f'{shared}.embed_tokens'}
  rows = {}
  flat = flax.traverse_util.flatten_dict(shapes(T5Gemma(config)), sep='/')
  for name, leaf in flat.items():
    module, _, kind = name.rpartition('/')
    if name == 'image_end_embedding':
      theirs = f'{shared}.embed_tokens.{_IMAGE_END}'
    elif found := re.fullmatch(r'(\w+)/layers_(\d+)/(.+)', module):
      inner = LAYER_MODULES[found[3]]
      theirs = f'{found[1]}.layers.{found[2]}.{inner}.weight'
    else:
      theirs = f'{modules[module]}.weight'
    rows[name] = Row(theirs, leaf.shape, kind == 'kernel')
  return rows


def tidy(
  stored: Mapping[str, arrays.Stored], described: Mapping[str, Any], source: str
) -> dict[str, arrays.Stored]:
  """The arrays that a text goes through, by the names of `table`.

  Warns if there are arrays for images, which are left out.

  Raises:
    ValueError: an array is there twice, or one that should be the embedding is
      not.
  """
  found: dict[str, arrays.Stored] = {}
  skipped = 0
  for name, array in stored.items():
    short = name.removeprefix('model.')
    short = short.replace('encoder.text_model.', 'encoder.', 1)
    if _OF_IMAGES.fullmatch(short):
      skipped += 1
      continue
    if short in found:
      raise ValueError(
        f'{source!r} has {short} twice: as {found[short].name} and {name}.'
      )
    found[short] = array
  arrays.warn_of_images(source, skipped)
  own = 'decoder.embed_tokens'
  same_as = {}
  if described['model_type'] == TWO:
    own = 'encoder.embed_tokens'
    for kind in ('weight', _IMAGE_END):
      same_as[f'decoder.embed_tokens.{kind}'] = f'{own}.{kind}'
  if described.get('tie_word_embeddings') is not False:
    same_as[_HEAD] = f'{own}.weight'
  for name, first in same_as.items():
    if name not in found:
      continue
    array = found.pop(name)
    if first not in found:  # a file may name shared arrays by either name
      found[first] = array
    elif not arrays.same(array, found[first]):
      raise ValueError(
        f'{source!r} has {array.name}, which is not {found[first].name}, but'
        ' the two are one array in this model (tie_word_embeddings in'
        ' config.json). Correct one of the two.'
      )
  return found
