"""What GPT-2 is called by Hugging Face: arrays and config.json.

`MODULES` and `LAYER_MODULES` are the whole difference between the names here
and those of transformers' `GPT2LMHeadModel`. Kernels are [in, out] there too
(transformers' Conv1D); query, key and value are one kernel, [M, 3 * M].
"""

import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.traverse_util
import jax

from specdec_jax.checkpoints.huggingface_names import check_word
from specdec_jax.models.gpt import GPT, LAYER_NORM_EPSILON, GPTConfig

MODEL_TYPE = 'gpt2'
EMBEDDING = 'wte.weight'
HEAD = 'lm_head.weight'

# Module here: transformers' module.
MODULES = {
  'decoder/token_embedder': 'wte',
  'decoder/position_embedder': 'wpe',
  'decoder/decoder_norm': 'ln_f',
  'decoder/logits_dense': 'lm_head',
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
# Which third of the joined kernel and bias.
_THIRDS = {'query': 0, 'key': 1, 'value': 2}

# GPTConfig's field: config.json's.
FIELDS = {
  'vocab_size': 'vocab_size',
  'emb_dim': 'n_embd',
  'num_heads': 'n_head',
  'num_layers': 'n_layer',
  'num_positions': 'n_positions',
}
# config.json's activation_function: ours. Its plain `gelu` is another function.
_ACTIVATIONS = {
  'gelu_new': 'gelu',
  'gelu_pytorch_tanh': 'gelu',
  'relu': 'relu',
  'silu': 'silu',
  'swish': 'silu',
}
# What the network here has built in; config.json may leave these out.
_FIXED = {
  'layer_norm_epsilon': LAYER_NORM_EPSILON,
  'scale_attn_weights': True,
  'scale_attn_by_inverse_layer_idx': False,
  'add_cross_attention': False,
}


class Row(NamedTuple):
  """Where an array of ours is in transformers' file.

  Attributes:
    name: transformers', without the prefix 'transformer.' that some have.
    transposed: whether it is the transpose of ours.
    third: which third of its last axis ours is; None is all of it.
    scale: what its values are multiplied by.
    shape: ours.
  """

  name: str
  transposed: bool
  third: int | None
  scale: float
  shape: tuple[int, ...]

  @property
  def stored_shape(self) -> tuple[int, ...]:
    """The shape of the whole array in the file."""
    *rest, last = self.shape[::-1] if self.transposed else self.shape
    return (*rest, last if self.third is None else 3 * last)


@functools.cache
def shapes(config: GPTConfig) -> Any:
  """Returns the parameters' tree of shapes."""
  return jax.eval_shape(GPT(config).init, jax.random.key(0))


def table(config: GPTConfig) -> dict[str, Row]:
  """Returns where each array of a model of `config` is; keys are our names."""
  rows = {}
  flat = flax.traverse_util.flatten_dict(shapes(config), sep='/')
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
      # The output layer here divides what it reads by sqrt(M), GPT-2's not.
      scale = config.emb_dim**0.5
    rows[name] = Row(
      f'{theirs}.{_KINDS[kind]}',
      module == 'decoder/logits_dense',
      _THIRDS.get(part),
      scale,
      leaf.shape,
    )
  return rows


def read_config(
  described: Mapping[str, Any], logits_via_embedding: bool, where: str
) -> GPTConfig:
  """Returns the shape that config.json describes.

  Args:
    described: config.json.
    logits_via_embedding: what the weights say of it.
    where: the file's path, for messages.

  Raises:
    ValueError: it is no GPT-2, or a field is missing or differs from what is
      built in here; names the field, what came and what was expected.
  """
  check_word(where, 'model_type', described.get('model_type'), (MODEL_TYPE,))
  sizes: dict[str, Any] = {
    ours: described.get(theirs) for ours, theirs in FIELDS.items()
  }
  inner = described.get('n_inner')
  for name, value in {
    **sizes,
    'n_inner': 1 if inner is None else inner,
  }.items():
    if type(value) is not int or value < 1:
      raise ValueError(
        f'{where}: {FIELDS.get(name, name)} is {value!r}, expected a whole'
        ' number of at least 1.'
      )
  for name, value in _FIXED.items():
    if described.get(name, value) != value:
      raise ValueError(
        f'{where}: {name} is {described[name]!r}; this GPT-2 has {value}.'
      )
  word = described.get('activation_function', 'gelu_new')
  check_word(where, 'activation_function', word, tuple(_ACTIVATIONS))
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
