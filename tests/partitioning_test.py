"""Placement: names, layouts, dtypes, and what is split over which devices."""

import dataclasses

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from causal_lm_test import GEMMA3, QWEN2
from gpt_test import GPT2, T5X
from m2m100_test import SMALL as NLLB
from small_vocabulary import network
from specdec_jax import partitioning
from specdec_jax.cli import gin_flags
from specdec_jax.models import backend, cpu_layout
from specdec_jax.models.causal_lm import CausalLM
from specdec_jax.models.gpt import GPT
from specdec_jax.models.m2m100 import M2M100
from specdec_jax.models.t5 import T5
from specdec_jax.models.t5gemma import T5Gemma
from specdec_jax.partitioning import LogicalAxes, Placement, place
from specdec_jax.partitioning.axes import axes_of_parameter
from t5gemma_test import TWO

PARAMS = {
  'dense': {'kernel': np.arange(6.0, dtype=np.float32).reshape(2, 3)},
  'norm': {'scale': np.ones((3,), np.float32)},
  'token_embedder': {'embedding': np.ones((4, 2), np.float32)},
}


def test_out_in_transposes_kernels_only():
  placed = place(PARAMS, Placement(kernel_layout='out_in'))
  kernel = placed['dense'].pop('kernel_out_in')
  np.testing.assert_array_equal(kernel, PARAMS['dense']['kernel'].T)
  assert placed['dense'] == {}
  assert placed['token_embedder']['embedding'].shape == (4, 2)


def test_in_out_is_t5xs():
  placed = place(PARAMS, Placement(kernel_layout='in_out'))
  assert jax.tree.map(np.shape, placed) == jax.tree.map(np.shape, PARAMS)


def test_auto_follows_the_device(monkeypatch):
  """A CPU's layout is measured, a GPU's known; a mesh has T5X's."""
  monkeypatch.setenv(cpu_layout.VARIABLE, 'blocks')
  for kind, layout in ('cpu', 'blocks'), ('gpu', 'out_in'), ('tpu', 'in_out'):
    with backend.compiled_for(kind):
      assert Placement().layout == layout
      assert Placement('int8').layout == layout
      assert Placement(model=2).layout == 'in_out'
      assert Placement(kernel_layout='out_in', model=2).layout == 'out_in'
  assert Placement('bfloat16').layout == 'in_out'


def test_a_decoders_kernels_are_cut_into_blocks():
  """Not an encoder's, nor what makes keys and values of its output."""
  rng = np.random.default_rng(0)
  kernels = {
    name: {'kernel': rng.normal(size=(3, 64)).astype(np.float32)}
    for name in ('query', 'key', 'value', 'out')
  }
  wide = {'kernel': rng.normal(size=(3, 192)).astype(np.float32)}
  params = {
    'encoder': {'self_attention': kernels},
    'decoder': {
      'self_attention': kernels,
      'encoder_decoder_attention': kernels,
      'logits_dense': wide,
      'narrow': {'kernel': np.zeros((3, 96), np.float32)},
    },
  }
  placed = place(params, Placement(kernel_layout='blocks'))
  flat = flax.traverse_util.flatten_dict(placed, sep='/')
  cut = {name for name in flat if name.endswith('/kernel_blocks')}
  assert cut == {
    'decoder/self_attention/qkv/kernel_blocks',
    'decoder/self_attention/out/kernel_blocks',
    'decoder/encoder_decoder_attention/query/kernel_blocks',
    'decoder/encoder_decoder_attention/out/kernel_blocks',
    'decoder/logits_dense/kernel_blocks',
  }
  blocks = flat['decoder/logits_dense/kernel_blocks']
  assert blocks.shape == (3, 3, 64)
  np.testing.assert_array_equal(np.concatenate(blocks, axis=1), wide['kernel'])
  jax.tree.map(
    np.testing.assert_array_equal,
    place(placed, Placement(kernel_layout='blocks')),
    placed,
  )


def test_a_mesh_has_no_blocks():
  with pytest.raises(ValueError, match="'blocks' is for one device.*model=2"):
    Placement(kernel_layout='blocks', model=2)


PROJECTIONS = {
  'decoder': {
    'self_attention': {
      name: {'kernel': np.full((2, 3), i, np.float32)}
      for i, name in enumerate(('query', 'key', 'value', 'out'))
    },
    'encoder_decoder_attention': {
      name: {'kernel': np.full((2, 3), i, np.float32)}
      for i, name in enumerate(('query', 'key', 'value', 'out'))
    },
    'mlp': {
      name: {'kernel': np.full((2, 3), i, np.float32)}
      for i, name in enumerate(('wi_0', 'wi_1', 'wo'))
    },
  }
}


@pytest.mark.parametrize('layout', ['in_out', 'out_in'])
def test_projections_of_one_input_are_joined(layout):
  decoder = place(PROJECTIONS, Placement(kernel_layout=layout))['decoder']
  assert set(decoder['self_attention']) == {'qkv', 'out'}
  assert set(decoder['mlp']) == {'wi_joined', 'wo'}
  # Its queries come from the decoder, its keys from the encoder.
  assert set(decoder['encoder_decoder_attention']) == {
    'query',
    'key',
    'value',
    'out',
  }
  (kernel,) = decoder['self_attention']['qkv'].values()
  if layout == 'out_in':
    kernel = kernel.T
  np.testing.assert_array_equal(kernel, [[0, 0, 0, 1, 1, 1, 2, 2, 2]] * 2)


def test_joining_can_be_turned_off():
  placement = Placement(kernel_layout='in_out', join_projections=False)
  placed = place(PROJECTIONS, placement)
  assert jax.tree.structure(placed) == jax.tree.structure(PROJECTIONS)


def test_placing_twice_changes_only_the_dtype():
  once = place(PARAMS | PROJECTIONS, Placement(kernel_layout='out_in'))
  again = place(once, Placement('bfloat16', kernel_layout='out_in'))
  assert jax.tree.structure(again) == jax.tree.structure(once)
  assert {leaf.dtype for leaf in jax.tree.leaves(again)} == {
    jnp.dtype('bfloat16')
  }


def test_unknown_layout():
  with pytest.raises(ValueError, match="'in_out', 'out_in' or 'blocks'"):
    Placement(kernel_layout='columns')


@pytest.mark.parametrize('dtype', ['int2', 'float16', 'flaot32', '', 4])
def test_dtypes_that_parameters_cannot_have(dtype):
  with pytest.raises(ValueError, match='Placement.dtype'):
    Placement(dtype)


T5_1_1 = network(1).config
NETWORKS = {
  'T5 1.1': T5(T5_1_1),
  'T5 1.0': T5(
    dataclasses.replace(
      T5_1_1, mlp_activations=('relu',), logits_via_embedding=True
    )
  ),
  'a bias a layer': T5(dataclasses.replace(T5_1_1, bias_per_layer=True)),
  'GPT-2': GPT(GPT2),
  'T5X decoder': GPT(T5X),
  'Qwen 2': CausalLM(QWEN2),
  'Gemma 3': CausalLM(GEMMA3),
  'M2M-100': M2M100(NLLB),
  'T5Gemma 2': T5Gemma(TWO),
}


@pytest.mark.parametrize('layout', ['in_out', 'out_in'])
@pytest.mark.parametrize('name', NETWORKS)
def test_every_parameter_has_its_axes(name, layout):
  model = NETWORKS[name]
  config = getattr(model.config, 'decoder', model.config)  # both are alike
  sizes = {
    'embed': config.emb_dim,
    'mlp': config.mlp_dim,
    'vocab': config.vocab_size,
    'heads': config.num_heads,
    'joined_kv': config.num_heads * config.head_dim,
    'kv': config.head_dim,
    'relpos_buckets': 32,
    'abspos_buckets': getattr(config, 'num_positions', None),
  }
  for join in (False, True):
    placement = Placement(kernel_layout=layout, join_projections=join)

    def init(placement=placement):
      return place(model.init(jax.random.key(0)), placement)

    flat = flax.traverse_util.flatten_dict(jax.eval_shape(init), sep='/')
    joined = 0
    for path, leaf in flat.items():
      heads = getattr(config, 'num_kv_heads', config.num_heads)
      kept = {'joined_kv': heads * config.head_dim}
      own = sizes | kept if '/key/' in path or '/value/' in path else sizes
      expected = tuple(own[axis] for axis in axes_of_parameter(path))
      if 'qkv' in path or 'wi_joined' in path:
        joined += 1
        most = 3 * np.prod(expected)
        assert np.prod(expected) < leaf.size <= most, path
      else:
        assert leaf.shape == expected, path
    assert bool(joined) == join


def test_an_unknown_parameter_is_named():
  with pytest.raises(ValueError, match="the parameter 'decoder/gate/kernel'"):
    axes_of_parameter('decoder/gate/kernel')


@pytest.mark.parametrize(
  'axes, message',
  [
    ({'embed': 'model'}, "vocab and embed are both split over 'model'"),
    ({'kv': 'model'}, "heads and kv are both split over 'model', and keys has"),
    ({'length': 'data'}, "batch and length are both split over 'data'"),
    ({'mlp': 'modell'}, 'LogicalAxes.mlp .* Nearest known: model'),
    (
      {'heads': None},
      "heads and joined_kv are the same dimension.* None and 'mod",
    ),
    ({'layers': 'data'}, "layers is 'data', but no array has that axis"),
  ],
)
def test_axes_that_cannot_be(axes, message):
  with pytest.raises(ValueError, match=message):
    LogicalAxes(**axes)


def test_one_device_has_no_mesh():
  assert Placement().partition() is None
  assert partitioning.share_devices(Placement(), None)[1:] == (None, None)
  model = network(1)
  assert partitioning.follow(model, None) is model


def test_a_drafter_is_whole_on_each_device():
  draft = Placement('bfloat16', data=2, model=4).replicated()
  assert (draft.dtype, draft.data, draft.model) == ('bfloat16', 2, 4)
  split = [getattr(draft.axes, f.name) for f in dataclasses.fields(draft.axes)]
  assert set(split) == {'data', None} and draft.axes.batch == 'data'
  assert draft.joins('mlp') and draft.joins('joined_kv')
  assert not Placement(model=0).joins('joined_kv')


def test_meshes_that_cannot_be():
  device = jax.devices()[:1]
  with pytest.raises(ValueError, match='mesh of 2 devices, .* the 1 devices'):
    Placement(model=2).partition(device)
  with pytest.raises(ValueError, match='mesh of 6 devices, .* the 1 devices'):
    Placement(data=2, model=3).partition(device)
  with pytest.raises(ValueError, match='one of them may be 0.* got 0 and 0'):
    Placement(data=0, model=0)
  with pytest.raises(ValueError, match='got 1 and -1'):
    Placement(model=-1)
  # What is left is one device.
  mesh = Placement(model=0).partition(device).mesh
  assert dict(mesh.shape) == {'data': 1, 'model': 1}


PRESETS = {
  'one_device': (1, 1),
  'tensor_parallel': (1, 0),
  'data_parallel': (0, 1),
  'both': (0, 2),
}


@pytest.mark.parametrize('run', ['demo', 'ende_11b_small'])
@pytest.mark.parametrize('preset', PRESETS)
def test_presets_behind_a_run_file(preset, run):
  flags = [f'--gin_file=gin/runs/{run}.gin']
  flags += ['--gin_file=gin/partitioning.gin']
  data, model = PRESETS[preset]
  flags += [f'--gin.DATA_DEVICES={data}', f'--gin.MODEL_DEVICES={model}']
  if run != 'demo':
    flags += ['--gin.VOCAB_PATH=a.model', '--gin.INFER_OUTPUT_DIR=out']
  gin_flags.load(gin_flags.parse_flags(flags))
  placement = gin_flags.build(partitioning.Placement)
  assert (placement.data, placement.model) == PRESETS[preset]
  assert placement.param_dtype == ('float32' if run == 'demo' else 'bfloat16')
