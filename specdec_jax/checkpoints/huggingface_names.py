"""Hugging Face's names for T5 models: arrays and config.json.

`MODULES` and `LAYER_MODULES` are all differences between T5X's names and those
of transformers' `T5ForConditionalGeneration`. Every parameter is called
`weight` there; kernels are [out, in] and the relative bias [buckets, H].
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.traverse_util

from specdec_jax.checks.names import check_choice
from specdec_jax.models.base import param_shapes
from specdec_jax.models.families import Network
from specdec_jax.models.t5 import T5, T5Config

HEAD_MODULE = 'decoder/logits_dense'
# T5X's module: transformers' module.
MODULES = {
  'token_embedder': 'shared',
  HEAD_MODULE: 'lm_head',
  'encoder/encoder_norm': 'encoder.final_layer_norm',
  'decoder/decoder_norm': 'decoder.final_layer_norm',
  # Both have one table per stack; transformers keeps it in the first layer.
  'encoder/relpos_bias': (
    'encoder.block.0.layer.0.SelfAttention.relative_attention_bias'
  ),
  'decoder/relpos_bias': (
    'decoder.block.0.layer.0.SelfAttention.relative_attention_bias'
  ),
}
# The same inside encoder/layers_<i> and encoder.block.<i>, and in the decoder.
LAYER_MODULES = {
  'encoder': {
    'pre_attention_layer_norm': 'layer.0.layer_norm',
    'attention/query': 'layer.0.SelfAttention.q',
    'attention/key': 'layer.0.SelfAttention.k',
    'attention/value': 'layer.0.SelfAttention.v',
    'attention/out': 'layer.0.SelfAttention.o',
    'pre_mlp_layer_norm': 'layer.1.layer_norm',
    'mlp/wi': 'layer.1.DenseReluDense.wi',
    'mlp/wi_0': 'layer.1.DenseReluDense.wi_0',
    'mlp/wi_1': 'layer.1.DenseReluDense.wi_1',
    'mlp/wo': 'layer.1.DenseReluDense.wo',
  },
  'decoder': {
    'pre_self_attention_layer_norm': 'layer.0.layer_norm',
    'self_attention/query': 'layer.0.SelfAttention.q',
    'self_attention/key': 'layer.0.SelfAttention.k',
    'self_attention/value': 'layer.0.SelfAttention.v',
    'self_attention/out': 'layer.0.SelfAttention.o',
    'pre_cross_attention_layer_norm': 'layer.1.layer_norm',
    'encoder_decoder_attention/query': 'layer.1.EncDecAttention.q',
    'encoder_decoder_attention/key': 'layer.1.EncDecAttention.k',
    'encoder_decoder_attention/value': 'layer.1.EncDecAttention.v',
    'encoder_decoder_attention/out': 'layer.1.EncDecAttention.o',
    'pre_mlp_layer_norm': 'layer.2.layer_norm',
    'mlp/wi': 'layer.2.DenseReluDense.wi',
    'mlp/wi_0': 'layer.2.DenseReluDense.wi_0',
    'mlp/wi_1': 'layer.2.DenseReluDense.wi_1',
    'mlp/wo': 'layer.2.DenseReluDense.wo',
  },
}
_TRANSPOSED = ('kernel', 'rel_embedding')

# T5Config's field: config.json's.
FIELDS = {
  'vocab_size': 'vocab_size',
  'emb_dim': 'd_model',
  'num_heads': 'num_heads',
  'num_encoder_layers': 'num_layers',
  'num_decoder_layers': 'num_decoder_layers',
  'head_dim': 'd_kv',
  'mlp_dim': 'd_ff',
}
# What the other formats' files say beside their arrays: our entries for it.
ABOUT = {
  'target': 'specdec_made_for',
  'made_of': 'specdec_made_of',
  'fingerprint': 'specdec_fingerprint',
}
# Entries of ours, of a decoder that reads its target's encoder.
_ENCODER_DIM = 'specdec_encoder_dim'
_READS_ENCODER = (ABOUT['target'], _ENCODER_DIM)
# config.json's feed_forward_proj: T5Config.mlp_activations. transformers'
# plain `gelu` differs from T5X's, but its `gated-gelu` does not.
_FEED_FORWARD = {
  'relu': ('relu',),
  'silu': ('silu',),
  'gelu_new': ('gelu',),
  'gated-relu': ('relu', 'linear'),
  'gated-silu': ('silu', 'linear'),
  'gated-gelu': ('gelu', 'linear'),
}
# config.json's model_type; T5 1.1, Flan-T5, ByT5, UL2 and MADLAD-400 are 't5'.
MODEL_TYPES = ('t5', 'mt5')
# Values that the network here has built in; config.json may leave them out.
_FIXED = {
  'layer_norm_epsilon': 1e-6,
  'relative_attention_num_buckets': 32,
  'relative_attention_max_distance': 128,
}


class Row(NamedTuple):
  """Where an array of T5X is in a file of transformers.

  Attributes:
    name: transformers' name.
    shape: T5X's shape.
    transposed: whether the array in the file is the transpose of T5X's.
    third: which third of the file's last axis T5X's array is; None is all of
      it.
    scale: the file's values are multiplied by this.
  """

  name: str
  shape: tuple[int, ...]
  transposed: bool
  third: int | None = None
  scale: float = 1.0

  @property
  def stored_shape(self) -> tuple[int, ...]:
    """The shape of the whole array in the file."""
    shape = self.shape[::-1] if self.transposed else self.shape
    return shape if self.third is None else (*shape[:-1], 3 * shape[-1])


@functools.cache
def shapes(network: Network) -> Any:
  """Returns the parameters' tree of shapes."""
  return param_shapes(network)


def table(config: T5Config, head_scaled: bool = False) -> dict[str, Row]:
  """T5X's name of each array of a model -> where it is.

  Args:
    config: configuration of the model.
    head_scaled: whether transformers divides the input of a separate output
      layer by sqrt(M); T5X does not, so the factor becomes part of the kernel.
  """
  rows = {}
  flat = flax.traverse_util.flatten_dict(shapes(T5(config)), sep='/')
  for name, leaf in flat.items():
    module, kind = name.rsplit('/', 1)
    if found := re.fullmatch(r'(\w+)/layers_(\d+)/(.+)', module):
      stack, number, inner = found.groups()
      theirs = f'{stack}.block.{number}.{LAYER_MODULES[stack][inner]}'
    else:
      theirs = MODULES[module]
    transposed = kind in _TRANSPOSED
    scaled = head_scaled and module == HEAD_MODULE
    scale = config.emb_dim**-0.5 if scaled else 1.0
    rows[name] = Row(f'{theirs}.weight', leaf.shape, transposed, scale=scale)
  return rows


def describe(config: T5Config) -> dict[str, Any]:
  """Returns config.json of a model, except for ids and dtype.

  Raises:
    ValueError: transformers has no T5 with its activations or relative biases.
  """
  words = {value: key for key, value in _FEED_FORWARD.items()}
  if config.mlp_activations not in words:
    raise ValueError(
      'transformers has no T5 whose mlp_activations are'
      f' {config.mlp_activations}; expected one of {sorted(words)}.'
    )
  if config.bias_per_layer:
    raise ValueError(
      "transformers' T5 has one relative bias per stack; a model with"
      ' bias_per_layer cannot be written for it. Choose another format.'
    )
  return {
    'architectures': ['T5ForConditionalGeneration'],
    'model_type': 't5',
    'is_encoder_decoder': True,
    **{theirs: getattr(config, ours) for ours, theirs in FIELDS.items()},
    'feed_forward_proj': words[config.mlp_activations],
    'dropout_rate': config.dropout_rate,
    # Only this decides whether transformers scales the logits of a T5.
    'tie_word_embeddings': config.logits_via_embedding,
    **_FIXED,
    **({} if config.num_encoder_layers else {_ENCODER_DIM: config.encoded_dim}),
  }


def read_config(
  described: Mapping[str, Any], logits_via_embedding: bool, where: str
) -> T5Config:
  """Returns the shape that config.json describes; see `huggingface`."""
  if described.get('num_decoder_layers') is None:
    layers = described.get('num_layers')  # as many as the encoder has
    described = {**described, 'num_decoder_layers': layers}
  alone = any(name in described for name in _READS_ENCODER)
  sizes = read_sizes(
    described, FIELDS, where, ('num_encoder_layers',) if alone else ()
  )
  width = described.get(_ENCODER_DIM, sizes['emb_dim'])
  if width != sizes['emb_dim']:
    sizes['encoder_dim'] = width
  check_fixed(described, _FIXED, where)
  word = described.get('feed_forward_proj')
  if word is None:
    # transformers' defaults.
    word = 'relu' if described['model_type'] == 't5' else 'gated-gelu'
  check_choice(f'{where}: feed_forward_proj', word, _FEED_FORWARD)
  return T5Config(
    **sizes,
    mlp_activations=_FEED_FORWARD[word],
    dropout_rate=described.get('dropout_rate', 0.0),
    logits_via_embedding=logits_via_embedding,
  )


def read_sizes(
  described: Mapping[str, Any],
  fields: Mapping[str, str],
  where: str,
  may_be_zero: Sequence[str] = (),
) -> dict[str, Any]:
  """The sizes for a configuration, from config.json; errors name its fields."""
  sizes = {ours: described.get(theirs) for ours, theirs in fields.items()}
  for ours, value in sizes.items():
    least = 0 if ours in may_be_zero else 1
    if type(value) is not int or value < least:
      raise ValueError(
        f'{where}: {fields[ours]} is {value!r}, expected a whole number of at'
        f' least {least}.'
      )
  return sizes


def check_fixed(
  described: Mapping[str, Any], fixed: Mapping[str, Any], where: str
) -> None:
  """Raises ValueError if a model differs from what the network has built in."""
  for name, value in fixed.items():
    if described.get(name, value) != value:
      raise ValueError(
        f'{where}: {name} is {described[name]!r}; the network here has {value}.'
      )


def check_known(
  described: Mapping[str, Any], known: set[str], where: str
) -> None:
  """Raises ValueError for a field that is not known, unless it is null."""
  unknown = [
    f'{name} = {value!r}'
    for name, value in described.items()
    if name not in known and value is not None
  ]
  if unknown:
    raise ValueError(
      f'{where}: {", ".join(unknown)}: the network here does not know this'
      ' field, which may change what the model says. If it does not, remove it'
      ' from config.json.'
    )


class SpecialIds(NamedTuple):
  """Ids with a special meaning.

  Attributes:
    decoder_start: the id that the decoder reads first; 0 of a T5, as always in
      T5X.
    eos: ids that end an output; T5 has 1, MADLAD-400 has 2.
    pad: the id that transformers pads rows with. T5s are padded with 0 here, as
      in T5X: padding is masked, so that logits do not depend on it. If 0 is the
      unknown piece (MADLAD-400), encoders here and in T5X ignore that piece
      too.
  """

  decoder_start: int
  eos: tuple[int, ...]
  pad: int


T5_IDS = SpecialIds(decoder_start=0, eos=(1,), pad=0)


def describe_ids(ids: SpecialIds) -> dict[str, Any]:
  """Returns config.json's entries for special ids; see `read_ids`."""
  return {
    'decoder_start_token_id': ids.decoder_start,
    'eos_token_id': ids.eos[0] if len(ids.eos) == 1 else list(ids.eos),
    'pad_token_id': ids.pad,
  }


def read_ids(
  described: Mapping[str, Any], where: str, start_id: int | None = 0
) -> SpecialIds:
  """Returns the special ids that config.json names; T5's if it names none.

  Args:
    described: config.json, updated by generation_config.json.
    where: their folder, for messages.
    start_id: the id that the decoder must start with; None is any.

  Raises:
    ValueError: an id is not a whole number, or the decoder starts with another
      id.
  """

  def given(name: str, default: Any) -> Any:
    value = described.get(name)
    return default if value is None else value

  pad = given('pad_token_id', T5_IDS.pad)
  start = given('decoder_start_token_id', pad)  # as transformers does
  eos = given('eos_token_id', list(T5_IDS.eos))
  ends = tuple(eos) if isinstance(eos, list) else (eos,)
  for name, value in (
    ('pad_token_id', pad),
    ('decoder_start_token_id', start),
    *(('eos_token_id', end) for end in ends),
  ):
    if type(value) is not int:
      raise ValueError(
        f'{where}: {name} is {value!r}, expected a whole number.'
      )
  if start_id is not None and start != start_id:
    raise ValueError(
      f'{where}: decoder_start_token_id is {start}; the decoder here starts'
      f' with {start_id}, as in every model of this family.'
    )
  return SpecialIds(start, ends, pad)


# Fields that a checkpoint does not decide: how to train it, how to compute.
_NOT_COMPARED = ('dropout_rate', 'dtype')


def check_config(
  found: Any, expected: Any, source: str, fields: Mapping[str, str] = FIELDS
) -> None:
  """Compares a checkpoint's configuration with the expected one.

  `dropout_rate` and `dtype` are not compared: they are not part of a
  checkpoint.

  Args:
    found: the checkpoint's configuration.
    expected: the expected configuration.
    source: where the checkpoint is, for the message.
    fields: our names of fields -> config.json's.

  Raises:
    ValueError: they differ; the message has each field that differs, with both
      values and config.json's name of the field.
  """
  problems = []
  for path, have, want in _differences(found, expected):
    name = path.rpartition('.')[2]
    theirs = fields.get(name, name)
    known_as = f' ({theirs})' if theirs != name else ''
    problems.append(f'{path}{known_as} is {have!r}, expected {want!r}')
  if problems:
    raise ValueError(
      f'{source} is not a checkpoint of this model configuration:'
      f' {"; ".join(problems)}. Take the configuration of its size, or another'
      ' checkpoint.'
    )


def _differences(
  found: Any, expected: Any, prefix: str = ''
) -> Iterator[tuple[str, Any, Any]]:
  """Field, both values; of a stack within a model 'encoder.num_layers'."""
  for field in dataclasses.fields(found):
    have, want = getattr(found, field.name), getattr(expected, field.name)
    if field.name in _NOT_COMPARED or have == want:
      continue
    if hasattr(have, 'num_layers'):
      yield from _differences(have, want, f'{prefix}{field.name}.')
    else:
      yield f'{prefix}{field.name}', have, want
