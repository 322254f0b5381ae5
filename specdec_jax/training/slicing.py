"""A smaller T5 cut out of a larger one, for a drafter to begin with.

A drafter with random parameters must learn the task from nothing; a slice of
its target already knows the task, and only learns to manage with less. The
slicing is that of Ashkboos et al. 2024 (SliceGPT): a norm without a mean
commutes with rotations once its scale is folded into the kernels after it, so
the residual stream can be rotated to its leading directions and the other
directions left out. Of the layers, some are kept (`KEPT`).

A drafter without an encoder reads the target's: its cross-attention's keys and
values are then the target's own, and only its own stream is rotated.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.checks.names import check_choice
from specdec_jax.models.base import Params
from specdec_jax.models.t5 import T5Config

Tree = dict[str, Any]
KEPT = ('spaced', 'first', 'last')  # layers of a stack


def sliced(
  target_params: Params,
  target: T5Config,
  draft: T5Config,
  kept: str = 'spaced',
) -> Params:
  """Returns parameters of `draft` that are a slice of the target's.

  Args:
    target_params: parameters of a T5 with `target`'s sizes.
    target: the sizes to cut from.
    draft: the sizes to cut to: a smaller `emb_dim`, fewer layers, or no encoder
      (and the target's `emb_dim` as `encoded_dim`); all other sizes are the
      target's.
    kept: which layers are kept: evenly 'spaced' ones, the 'first' ones or the
      'last' ones.

  Returns:
    float32 parameters with T5X's names.

  Raises:
    ValueError: the sizes do not allow it.
  """
  _check(target, draft, kept)
  params = jax.tree.map(
    lambda leaf: np.asarray(leaf, np.float32), target_params
  )
  has_encoder = draft.num_encoder_layers > 0
  encoder, decoder = _fold_encoder(params), _fold_decoder(params, has_encoder)
  kernels = [
    kernel if name in WRITERS else kernel.T
    for layer in [*(encoder if has_encoder else ()), *decoder]
    for block, kernels in layer.items()
    for name, kernel in kernels.items()
    if has_encoder or (block, name) not in _ENCODED
  ]
  directions = _leading_directions(params, kernels, draft.emb_dim)
  # The norm now sees draft.emb_dim of the target's emb_dim squares.
  scale = np.sqrt(target.emb_dim / draft.emb_dim, dtype=np.float32)
  norm = {'scale': np.full((draft.emb_dim,), scale)}

  def turned(block, name, kernel):
    if name in WRITERS:
      return kernel @ directions
    if not has_encoder and (block, name) in _ENCODED:
      return kernel
    return directions.T @ kernel

  def stack(folded, count, norms):
    layers = {}
    for new, old in enumerate(_chosen(len(folded), count, kept)):
      layer = {
        block: {
          name: {'kernel': turned(block, name, kernel)}
          for name, kernel in kernels.items()
        }
        for block, kernels in folded[old].items()
      }
      layers[f'layers_{new}'] = layer | {name: dict(norm) for name in norms}
    return layers

  result = {
    'token_embedder': {
      'embedding': params['token_embedder']['embedding'] @ directions
    },
    'decoder': {
      'relpos_bias': params['decoder']['relpos_bias'],
      'decoder_norm': dict(norm),
      **stack(decoder, draft.num_decoder_layers, _DECODER_NORMS),
    },
  }
  if has_encoder:
    result['encoder'] = {
      'relpos_bias': params['encoder']['relpos_bias'],
      'encoder_norm': dict(norm),
      **stack(encoder, draft.num_encoder_layers, _ENCODER_NORMS),
    }
  if not draft.logits_via_embedding:
    result['decoder']['logits_dense'] = {
      'kernel': directions.T @ _folded_head(params)
    }
  return jax.tree.map(jnp.asarray, result)


_ENCODER_NORMS = {
  'pre_attention_layer_norm': 'attention',
  'pre_mlp_layer_norm': 'mlp',
}
_DECODER_NORMS = {
  'pre_self_attention_layer_norm': 'self_attention',
  'pre_cross_attention_layer_norm': 'encoder_decoder_attention',
  'pre_mlp_layer_norm': 'mlp',
}
WRITERS = ('out', 'wo')  # write to the residual stream; all others read it
# ... or the encoder's output.
_ENCODED = tuple(
  ('encoder_decoder_attention', name) for name in ('key', 'value')
)


def _chosen(there: int, count: int, kept: str) -> list[int]:
  """The layers that are kept of those that are there."""
  if kept == 'first':
    return list(range(count))
  if kept == 'last':
    return list(range(there - count, there))
  return spaced(there, count)


def spaced(there: int, count: int) -> list[int]:
  """The numbers of `count` evenly spaced layers of those that are there."""
  return [round(x) for x in np.linspace(0, there - 1, count).tolist()]


def _fold(layer: Tree, norms: dict[str, str]) -> Tree:
  """Kernels of one layer with the scale of the norm before them folded in."""
  folded = {}
  for norm, block in norms.items():
    scale = layer[norm]['scale'][:, None]
    folded[block] = {
      name: leaf['kernel'] if name in WRITERS else scale * leaf['kernel']
      for name, leaf in layer[block].items()
    }
  return folded


def _layers(stack: Tree) -> list[Tree]:
  count = sum(name.startswith('layers_') for name in stack)
  return [stack[f'layers_{i}'] for i in range(count)]


def _fold_encoder(params: Params) -> list[Tree]:
  return [_fold(layer, _ENCODER_NORMS) for layer in _layers(params['encoder'])]


def _fold_decoder(params: Params, with_encoder: bool) -> list[Tree]:
  folded = []
  # An encoder that is not cut keeps its last norm.
  norm = params['encoder']['encoder_norm']['scale'][:, None]
  encoded = norm if with_encoder else np.ones_like(norm)
  for layer in _layers(params['decoder']):
    one = _fold(layer, _DECODER_NORMS)
    for block, name in _ENCODED:
      one[block][name] = encoded * layer[block][name]['kernel']
    folded.append(one)
  return folded


def _folded_head(params: Params) -> np.ndarray:
  """The kernel [M, V] that gives logits, with the last scale folded in."""
  decoder = params['decoder']
  if 'logits_dense' in decoder:
    kernel = decoder['logits_dense']['kernel']
  else:
    kernel = params['token_embedder']['embedding'].T
  return decoder['decoder_norm']['scale'][:, None] * kernel


def _leading_directions(
  params: Params, kernels: list[np.ndarray], size: int
) -> np.ndarray:
  """The `size` directions of the stream that are read and written most: [M, m].

  Each matrix that reads or writes the stream has the same weight, whatever its
  norm; the embedding and the output layer together weigh as much as all layers.
  `kernels` are those of the layers, [..., M].
  """
  embedding = params['token_embedder']['embedding']
  head = _folded_head(params)
  total = sum(_gram(kernel) for kernel in kernels)
  count = np.trace(total)
  total = total + count * (_gram(embedding) + _gram(head.T)) / 2
  _, vectors = np.linalg.eigh(total)
  return vectors[:, ::-1][:, :size].astype(np.float32)


def _gram(rows: np.ndarray) -> np.ndarray:
  """The second moment [M, M] of the rows, scaled to trace 1."""
  product = rows.T.astype(np.float64) @ rows
  return product / np.trace(product)


def _check(target: T5Config, draft: T5Config, kept: str) -> None:
  check_choice('kept (FromTarget.slice_layers)', kept, KEPT)
  if not draft.num_encoder_layers and draft.encoded_dim != target.emb_dim:
    raise ValueError(
      'A drafter without an encoder, sliced from its target, reads an encoder'
      f" of the target's emb_dim; got {draft.encoded_dim}, the target has"
      f' {target.emb_dim}. Set encoder_dim to that.'
    )
  for name in (
    'vocab_size',
    'num_heads',
    'head_dim',
    'mlp_dim',
    'mlp_activations',
    'logits_via_embedding',
  ):
    ours, theirs = getattr(draft, name), getattr(target, name)
    if ours != theirs:
      raise ValueError(
        f'A drafter sliced from its target has the same {name}; got {ours}, the'
        f' target has {theirs}. Change it, or begin with random parameters.'
      )
  for name in ('emb_dim', 'num_encoder_layers', 'num_decoder_layers'):
    ours, theirs = getattr(draft, name), getattr(target, name)
    if ours > theirs:
      raise ValueError(
        f'A drafter sliced from its target has at most its {name}; got {ours},'
        f' the target has {theirs}.'
      )
