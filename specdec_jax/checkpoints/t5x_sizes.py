"""Infers the sizes of a T5 from the shapes of its arrays."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from specdec_jax.models.t5 import T5Config

Shapes = Mapping[str, tuple[int, ...]]

# A stack that was trained as a scan: one array for all of its layers.
STACKED = re.compile(r'(encoder|decoder)/(?:layers|\1)/(.+)')
_EMBEDDING = 'token_embedder/embedding'
_HEADS = '/relpos_bias/rel_embedding'
_ACTIVATIONS = 'len(mlp_activations)'


def sizes(shapes: Shapes) -> dict[str, Any]:
  """Fields of `T5Config` -> their values, for the fields that shapes decide.

  Args:
    shapes: T5X's name -> shape; stacked layers may be on the first or second
      axis.
  """
  found: dict[str, Any] = {}
  if len(shape := shapes.get(_EMBEDDING, ())) == 2:
    found['vocab_size'], found['emb_dim'] = shape
    head = 'decoder/logits_dense/kernel'
    found['logits_via_embedding'] = head not in shapes
  layers: dict[str, set[int]] = {}
  for stack, number, inner, shape in _in_layers(shapes, found.get('emb_dim')):
    layers.setdefault(stack, set()).add(number)
    if inner.endswith('attention/query/kernel') and len(shape) == 2:
      found['head_dim'] = shape[1]
    if inner == 'encoder_decoder_attention/key/kernel' and len(shape) == 2:
      found['encoder_dim'] = shape[0]
    if re.fullmatch(r'mlp/wi(_0)?/kernel', inner) and len(shape) == 2:
      found['mlp_dim'] = shape[1]
      found[_ACTIVATIONS] = 2 if '_0' in inner else 1
    if f'/{inner}' == _HEADS:
      found['num_heads'] = shape[0]
      found['bias_per_layer'] = True
  for stack, numbers in layers.items():
    found[f'num_{stack}_layers'] = len(numbers)
  if 'decoder' in layers:
    found.setdefault('num_encoder_layers', 0)
  if found.get('num_encoder_layers') or found.get('encoder_dim') == found.get(
    'emb_dim'
  ):
    found.pop('encoder_dim', None)
  for stack in ('decoder', 'encoder'):
    if len(shape := shapes.get(stack + _HEADS, ())) == 2:
      found['num_heads'] = shape[0]
  width = found.pop('head_dim', 0)
  if width and 'num_heads' in found and width % found['num_heads'] == 0:
    found['head_dim'] = width // found['num_heads']
  return found


def differences(found: Shapes, expected: Shapes) -> str:
  """Lists each field in which the two differ, with both values."""
  there, here = sizes(found), sizes(expected)
  return ', '.join(
    f'{field} is {there[field]}, expected {here[field]}'
    for field in here
    if field in there and there[field] != here[field]
  )


def infer_config(shapes: Shapes, source: str) -> T5Config:
  """The configuration of a checkpoint that comes without one.

  What shapes do not decide is taken from the published models: a gated MLP has
  T5 1.1's `gelu`, a plain one T5 1.0's `relu`.

  Raises:
    ValueError: the shapes are not those of a T5.
  """
  found = sizes(shapes)
  activations = {1: ('relu',), 2: ('gelu', 'linear')}
  try:
    gated = activations[found.pop(_ACTIVATIONS)]
    return T5Config(**found, mlp_activations=gated)
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f'The sizes of the T5 in {source!r} cannot be inferred from its arrays'
      f' ({error}); give its network.'
    ) from error


def _in_layers(
  shapes: Shapes, emb_dim: int | None
) -> Iterator[tuple[str, int, str, tuple[int, ...]]]:
  """(stack, layer, name, shape) of each array of a layer."""
  for name, shape in shapes.items():
    if found := re.fullmatch(r'(encoder|decoder)/layers_(\d+)/(.+)', name):
      yield found[1], int(found[2]), found[3], shape
    elif (found := STACKED.fullmatch(name)) and len(shape) > 1:
      norm = shapes.get(
        name.removesuffix(found[2]) + 'pre_mlp_layer_norm/scale'
      )
      # T5X's own scan is over the second axis.
      axis = 0 if norm and emb_dim not in norm[:1] else 1
      one = shape[:axis] + shape[axis + 1 :]
      if len(one) == 3 and not found[2].endswith('out/kernel'):
        one = (one[0], math.prod(one[1:]))
      for number in range(shape[axis]):
        yield found[1], number, found[2], one
