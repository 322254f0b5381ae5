"""Placement: names, layouts, dtypes, and what is split over which devices."""

import collections
import functools

import flax.traverse_util
import jax
import numpy as np
import pytest

from small_vocabulary import network
from specdec_jax import partitioning
from specdec_jax.models import backend, cpu_layout
from specdec_jax.partitioning import Placement, axes_of_parameter, place
from toy_families import ALL, make


def test_auto_follows_the_device(monkeypatch):
  """A CPU's layout of floats is measured; others, and a mesh, have T5X's."""
  monkeypatch.setenv(cpu_layout.VARIABLE, 'blocks')
  for kind, layout in ('cpu', 'blocks'), ('gpu', 'in_out'), ('tpu', 'in_out'):
    with backend.compiled_for(kind):
      assert Placement().layout == layout
      of_integers = 'out_in' if kind == 'cpu' else layout
      assert Placement('int8').layout == of_integers
      assert Placement(model=2).layout == 'in_out'
      assert Placement(kernel_layout='out_in', model=2).layout == 'out_in'
  assert Placement('bfloat16').layout == 'in_out'


@pytest.mark.parametrize('layout', cpu_layout.LAYOUTS)
def test_arrays_are_given_up_one_by_one(layout):
  """Or a model would be in memory twice while it is laid out."""
  params = {'decoder': {'self_attention': _kernels('query key value out')}}
  attention = params['decoder']['self_attention']
  placement = Placement(kernel_layout=layout)
  placed = place(params, placement)
  assert len(attention) == 4
  again = place(params, placement, empties=True)
  jax.tree.map(np.testing.assert_array_equal, placed, again)
  assert not attention and not params


def _kernels(names):
  return {
    name: {'kernel': np.full((2, 64), i, np.float32)}
    for i, name in enumerate(names.split())
  }


LAYER = {
  'self_attention': _kernels('query key value out'),
  'encoder_decoder_attention': _kernels('query key value out'),
  'mlp': _kernels('wi_0 wi_1 wo'),
}


def test_a_decoders_kernels_are_cut_into_blocks():
  """Not an encoder's, nor what makes keys and values of its output."""
  wide = np.random.default_rng(0).normal(size=(3, 192)).astype(np.float32)
  others = {
    'logits_dense': {'kernel': wide},
    'narrow': {'kernel': np.zeros((3, 96), np.float32)},
  }
  params = {'encoder': LAYER, 'decoder': LAYER | others}
  placed = place(params, Placement(kernel_layout='blocks'))
  flat = flax.traverse_util.flatten_dict(placed, sep='/')
  cut = {name for name in flat if name.endswith('/kernel_blocks')}
  assert cut == {
    f'decoder/{name}/kernel_blocks'
    for name in """
      self_attention/qkv self_attention/out mlp/wi_joined mlp/wo logits_dense
      encoder_decoder_attention/query encoder_decoder_attention/out
    """.split()
  }
  blocks = flat['decoder/logits_dense/kernel_blocks']
  assert blocks.shape == (3, 3, 64)
  np.testing.assert_array_equal(np.concatenate(blocks, axis=1), wide)


@pytest.mark.parametrize('layout', ['in_out', 'out_in'])
def test_projections_of_one_input_are_joined(layout):
  placed = place({'decoder': LAYER}, Placement(kernel_layout=layout))
  decoder = placed['decoder']
  assert set(decoder['self_attention']) == {'qkv', 'out'}
  assert set(decoder['mlp']) == {'wi_joined', 'wo'}
  # Its queries come from the decoder, its keys from the encoder.
  names = set(decoder['encoder_decoder_attention'])
  assert names == {'query', 'key', 'value', 'out'}
  (kernel,) = decoder['self_attention']['qkv'].values()
  kernel = kernel.T if layout == 'out_in' else kernel
  np.testing.assert_array_equal(kernel, [np.repeat([0, 1, 2], 64)] * 2)


@pytest.mark.parametrize('name', ALL)
@pytest.mark.parametrize('layout', ['in_out', 'out_in'])
def test_every_parameter_has_its_axes(name, layout):
  """Each axis is as long as the sizes that its name stands for."""
  config = ALL[name]
  placement = Placement(kernel_layout=layout)
  layout_of = functools.partial(place, placement=placement)
  placed = jax.eval_shape(layout_of, make(config)[1])
  shape = config.shape
  sizes = collections.defaultdict(set)
  tables = filter(None, (shape.tokens, shape.encoder_tokens))
  sizes['vocab'] = {tokens.vocab_size for tokens in tables}
  sizes['relpos_buckets'], sizes[None] = {32}, {1}
  sizes['abspos_buckets'] = {shape.tokens.num_positions}
  for stack in filter(None, (shape.encoder, shape.decoder)):
    heads = {stack.num_heads, kept := stack.num_kv_heads or stack.num_heads}
    sizes['embed'] |= {stack.emb_dim}
    joined = len(stack.mlp_activations) * stack.mlp_dim
    sizes['mlp'] |= {stack.mlp_dim, joined}
    sizes['heads'] |= heads
    sizes['kv'] |= {stack.head_dim}
    heads |= {stack.num_heads + 2 * kept}
    sizes['joined_kv'] |= {count * stack.head_dim for count in heads}
  for path, leaf in flax.traverse_util.flatten_dict(placed, sep='/').items():
    axes = axes_of_parameter(path)
    for axis, size in zip(axes, leaf.shape, strict=True):
      assert size in sizes[axis], path


def test_a_parameter_without_axes():
  with pytest.raises(ValueError, match='decoder/gate/kernel'):
    axes_of_parameter('decoder/gate/kernel')


def test_one_device_has_no_mesh():
  assert Placement().partition() is None
  model = network(1)
  assert partitioning.follow(model, None) is model
  # What is left is one device.
  mesh = Placement(model=0).partition(jax.devices()[:1]).mesh
  assert dict(mesh.shape) == {'data': 1, 'model': 1}
