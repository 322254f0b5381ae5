"""A T5 decoder's layer in one kernel, for GPUs (Pallas).

Eight kernels of a small drafter's layer take longer to start than to read the
layer's weights. Here they are parts of one, see `kernel_parts`: those of
`attention_kernel` and `product_kernel`, which say what is computed.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.models import attention_kernel, kernel_parts, product_kernel
from specdec_jax.models.kernel_parts import TURNS, Part
from specdec_jax.models.product_kernel import Given
from specdec_jax.models.tree import Tree


class Sizes(NamedTuple):
  """What a layer is, beside its parameters.

  Attributes:
    num_heads: H.
    head_dim: D.
    activations: of the feed-forward block.
    epsilon: of its norms.
    dtype: of the computation.
  """

  num_heads: int
  head_dim: int
  activations: tuple[product_kernel.Activation, ...]
  epsilon: float
  dtype: str


class Seen(NamedTuple):
  """What a layer attends to, as `KVCache` has it.

  Attributes:
    kept: [2, B, H, T, D], keys and values of the tokens before.
    position_bias: float32[H or 1, 2 * T].
    length: int32[B].
    cross: [B, H, D, E] twice, and the bias float32[B, 1, 1, E].
    tree: how the call's tokens hang together; None is one after another.
  """

  kept: jax.Array
  position_bias: jax.Array
  length: jax.Array
  cross: tuple[jax.Array, jax.Array, jax.Array]
  tree: Tree | None = None


def refusal(
  params: Mapping[str, Any], x: jax.Array, seen: Seen, sizes: Sizes
) -> str:
  """Why a layer is not computed here; '' if it can be.

  Args:
    params: of the layer.
    x: [B, S, M].
    seen: what it attends to.
    sizes: what it is.
  """
  rows = x.shape[0] * x.shape[1]
  found = [
    product_kernel.refusal(kernel, rows, parts) if kernel is not None else apart
    for kernel, parts, apart in (
      (_kernel(params, *path), parts, f'{path[-1]} is not [out, in], joined')
      for path, parts in _products(sizes)
    )
  ]
  asked = _queries(x, sizes)
  slots = min(seen.kept.shape[3], seen.cross[0].shape[3])
  found.append(attention_kernel.refusal(asked, sizes.num_heads, slots))
  return next(filter(None, found), '')


def layer(
  params: Mapping[str, Any],
  x: jax.Array,
  seen: Seen,
  sizes: Sizes,
  turns: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """One layer of S tokens.

  All layers in one kernel would take XLA minutes to compile.

  Args:
    params: of the layer; kernels are [out, in], those of queries, keys and
      values are one, and those of a gate.
    x: [B, S, M].
    seen: what it attends to.
    sizes: what it is.
    turns: of the layer before, or `kernel_parts.no_turns()`.

  Returns:
    [B, S, M]; `seen.kept` with S tokens more, in place under jit; and `turns`
    for the next layer.
  """
  dtype = jnp.dtype(sizes.dtype)
  rows = x.reshape(-1, x.shape[-1]).astype(dtype)
  given: dict[str, Any] = {
    'params': params,
    'x': rows,
    'bias': seen.position_bias,
    'length': seen.length,
    'tree': () if seen.tree is None else attention_kernel.of_tree(seen.tree),
    'cross': seen.cross,
  }
  width = sizes.num_heads * sizes.head_dim
  widths = {
    'fresh': 3 * width,
    'mixed': width,
    'after_own': rows.shape[1],
    'queries': width,
    'read': width,
    'after_cross': rows.shape[1],
    'hidden': _kernel(params, 'mlp', 'wo').shape[1],
    'result': rows.shape[1],
  }
  made = {
    name: jax.ShapeDtypeStruct((len(rows), size), dtype)
    for name, size in widths.items()
  }
  parts = _parts(params, x, seen, sizes)
  written = 2 * len(rows) * width * dtype.itemsize
  updated = {'kept': seen.kept, TURNS: turns}
  found = kernel_parts.run('layer', parts, given, updated, made, written)
  return found['result'].reshape(x.shape), found['kept'], found[TURNS]


def _parts(params, x, seen: Seen, sizes: Sizes) -> list[Part]:
  """The layer, in order; names are those of `layer`."""
  own, other = 'self_attention', 'encoder_decoder_attention'
  gate = 'wi' if len(sizes.activations) == 1 else 'wi_joined'
  asked = _queries(x, sizes)

  def product(path, rows, result, norm=None, added=(), activations=()):
    work = product_kernel.shared(
      _kernel(params, *path),
      x.shape[0] * x.shape[1],
      sizes.dtype,
      sizes.epsilon,
      activations,
    )

    def run(piece, refs):
      module = refs['params'][path[0]][path[1]]
      given = Given(
        module['kernel_out_in'],
        refs[rows],
        refs['params'][norm]['scale'] if norm else None,
        module.get('kernel_scale'),
        tuple(refs[name] for name in added),
      )
      product_kernel.product_part(work, piece, given, refs[result])

    return Part(work.count, run)

  def attention(slots, run_part):
    work = attention_kernel.shared(asked, sizes.num_heads, slots, most_parts=1)
    grid = work.grid

    def run(piece, refs):
      place = (
        piece // (grid[1] * grid[2]),
        piece // grid[2] % grid[1],
        piece % grid[2],
      )
      run_part(work, place, refs)

    return Part(math.prod(grid), run)

  def own_part(work, place, refs):
    args = attention_kernel.Own(
      refs['fresh'], refs['kept'], refs['bias'], refs['length'], refs['tree']
    )
    results = refs['mixed'], refs['kept']
    attention_kernel.step_part(work, place, args, results)

  def cross_part(work, place, refs):
    args = refs['queries'], *refs['cross']
    attention_kernel.cross_part(work, place, args, (refs['read'],))

  return [
    product((own, 'qkv'), 'x', 'fresh', 'pre_self_attention_layer_norm'),
    attention([seen.kept.shape[3]], own_part),
    product((own, 'out'), 'mixed', 'after_own', added=('x',)),
    product(
      (other, 'query'), 'after_own', 'queries', 'pre_cross_attention_layer_norm'
    ),
    attention([seen.cross[0].shape[3]], cross_part),
    product((other, 'out'), 'read', 'after_cross', added=('after_own',)),
    product(
      ('mlp', gate),
      'after_cross',
      'hidden',
      'pre_mlp_layer_norm',
      activations=sizes.activations,
    ),
    product(('mlp', 'wo'), 'hidden', 'result', added=('after_cross',)),
  ]


def _products(sizes: Sizes) -> list[tuple[tuple[str, str], int]]:
  """Modules of a layer's products, and the parts of each one's gate."""
  count = len(sizes.activations)
  own, other = 'self_attention', 'encoder_decoder_attention'
  return [
    ((own, 'qkv'), 1),
    ((own, 'out'), 1),
    ((other, 'query'), 1),
    ((other, 'out'), 1),
    (('mlp', 'wi' if count == 1 else 'wi_joined'), count),
    (('mlp', 'wo'), 1),
  ]


def _kernel(params, block: str, name: str) -> Any:
  return params[block].get(name, {}).get('kernel_out_in')


def _queries(x, sizes: Sizes) -> jax.ShapeDtypeStruct:
  shape = (*x.shape[:2], sizes.num_heads, sizes.head_dim)
  return jax.ShapeDtypeStruct(shape, jnp.dtype(sizes.dtype))
