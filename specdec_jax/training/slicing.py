"""A smaller T5 cut out of a larger one, for a drafter to begin with.

A drafter with random parameters must learn the task from nothing; a slice of
its target already knows the task, and only learns to manage with less. The
slicing is that of Ashkboos et al. 2024 (SliceGPT): a norm without a mean
commutes with rotations once its scale is folded into the kernels after it, so
the residual stream can be rotated to its leading directions and the other
directions left out. Of the layers, evenly spaced ones are kept.

A drafter without an encoder reads the target's: its cross-attention's keys and
values are then the target's own, and only its own stream is rotated.
"""

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from specdec_jax.checks.fields import unexpected
from specdec_jax.models.base import Params
from specdec_jax.models.t5 import T5Config

Path = tuple[str, ...]  # the names of a parameter


def sliced(
  target_params: Params,
  target: T5Config,
  draft: T5Config,
) -> Params:
  """Returns parameters of `draft` that are a slice of the target's.

  Args:
    target_params: parameters of a T5 with `target`'s sizes.
    target: the sizes to cut from.
    draft: the sizes to cut to: a smaller `emb_dim`, fewer layers, or no encoder
      (and the target's `emb_dim` as `encoded_dim`); all other sizes are the
      target's.

  Returns:
    float32 parameters with T5X's names.

  Raises:
    ValueError: the sizes do not allow it.
  """
  _check(target, draft)
  has_encoder = draft.num_encoder_layers > 0
  leaves = {
    path: np.asarray(leaf, np.float32)
    for path, leaf in flatten_dict(target_params).items()
    if has_encoder or path[0] != 'encoder'
  }
  for path, leaf in leaves.items():
    norm = _norm_before(path, has_encoder)
    if norm is not None:
      leaves[path] = leaves[norm][:, None] * leaf
  directions = _leading_directions(leaves, has_encoder, draft.emb_dim)
  # The norm now sees draft.emb_dim of the target's emb_dim squares.
  scale = np.sqrt(target.emb_dim / draft.emb_dim, dtype=np.float32)

  def cut(path: Path, leaf: np.ndarray) -> np.ndarray:
    if path[-1] == 'scale':
      return np.full((draft.emb_dim,), scale)
    if path[-1] == 'embedding' or path[-2] in WRITERS:
      return leaf @ directions
    if path[-1] == 'kernel' and (has_encoder or not _reads_encoder(path)):
      return directions.T @ leaf
    return leaf

  new_names = {}
  for stack in ('encoder', 'decoder'):
    name = f'num_{stack}_layers'
    spaced = np.linspace(0, getattr(target, name) - 1, getattr(draft, name))
    for new, old in enumerate(spaced.round().astype(int)):
      new_names[stack, f'layers_{old}'] = f'layers_{new}'
  result = {}
  for path, leaf in leaves.items():
    if path[1].startswith('layers_'):
      if path[:2] not in new_names:
        continue
      path = (path[0], new_names[path[:2]], *path[2:])
    result[path] = jnp.asarray(cut(path, leaf))
  return unflatten_dict(result)


# The norm before each block of a layer.
_NORMS = {
  'attention': 'pre_attention_layer_norm',
  'self_attention': 'pre_self_attention_layer_norm',
  'encoder_decoder_attention': 'pre_cross_attention_layer_norm',
  'mlp': 'pre_mlp_layer_norm',
}
_HEAD = ('decoder', 'logits_dense', 'kernel')
_EMBEDDING = ('token_embedder', 'embedding')
_LAST_NORM = ('decoder', 'decoder_norm', 'scale')
WRITERS = ('out', 'wo')  # write to the residual stream; all others read it


def _reads_encoder(path: Path) -> bool:
  """Whether a kernel reads the encoder's output, not the stream."""
  return 'encoder_decoder_attention' in path and path[-2] in ('key', 'value')


def _norm_before(path: Path, has_encoder: bool) -> Path | None:
  """The scale of the norm before a kernel; None if there is none to fold in."""
  if path == _HEAD:
    return _LAST_NORM
  if path[-1] != 'kernel' or path[-2] in WRITERS:
    return None
  if _reads_encoder(path):
    # An encoder that is not cut keeps its last norm.
    return ('encoder', 'encoder_norm', 'scale') if has_encoder else None
  stack, layer, block, *_ = path
  return stack, layer, _NORMS[block], 'scale'


def _leading_directions(
  leaves: dict[Path, np.ndarray], has_encoder: bool, size: int
) -> np.ndarray:
  """The `size` directions of the stream that are read and written most: [M, m].

  Each matrix that reads or writes the stream has the same weight, whatever its
  norm; the embedding and the output layer together weigh as much as all layers.
  """
  embedding = leaves[_EMBEDDING]
  # A tied output layer is the embedding behind the last norm.
  head = leaves.get(_HEAD, leaves[_LAST_NORM][:, None] * embedding.T)
  layers = [
    _gram(leaf if path[-2] in WRITERS else leaf.T)
    for path, leaf in leaves.items()
    if path[-1] == 'kernel'
    and path != _HEAD
    and (has_encoder or not _reads_encoder(path))
  ]
  ends = _gram(embedding) + _gram(head.T)
  _, vectors = np.linalg.eigh(sum(layers) + len(layers) / 2 * ends)
  return vectors[:, ::-1][:, :size].astype(np.float32)


def _gram(rows: np.ndarray) -> np.ndarray:
  """The second moment [M, M] of the rows, scaled to trace 1."""
  product = rows.T.astype(np.float64) @ rows
  return product / np.trace(product)


def _check(target: T5Config, draft: T5Config) -> None:
  same = ('vocab_size', 'num_heads', 'head_dim', 'mlp_dim', 'mlp_activations')
  at_most = ('emb_dim', 'num_encoder_layers', 'num_decoder_layers')
  wanted = {
    name: getattr(target, name)
    for name in (*same, 'logits_via_embedding', *at_most)
  }
  if not draft.num_encoder_layers:
    wanted['encoded_dim'] = target.emb_dim
  for name, most in wanted.items():
    of = draft.shape if name == 'encoded_dim' else draft
    size = getattr(of, name)
    if size > most if name in at_most else size != most:
      expected = f'at most {most}' if name in at_most else f'{most}'
      subject = f'FromTarget.slice_target: {name} of the slice'
      raise unexpected(subject, f"{expected}, the target's", size)
