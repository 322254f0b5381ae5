"""Gin files of T5Gemma 1 and 2: their shapes and parameters."""

import dataclasses

import gin
import jax
import pytest

from specdec_jax import infer
from specdec_jax.cli import gin_flags
from specdec_jax.models import sizes
from specdec_jax.models.base import param_shapes
from specdec_jax.models.t5gemma import T5Gemma

# Parameters, as transformers 5.23 counts them: its own network with the values
# of each model's config.json, made without memory (torch.device('meta')). Of
# T5Gemma 2 what reads images is not counted.
SIZES = {
  't5gemma_s_s': 312517632,
  't5gemma_b_b': 591490560,
  't5gemma_l_l': 1241761792,
  't5gemma_ml_ml': 2200345344,
  't5gemma_xl_xl': 3766980608,
  't5gemma_2b_2b': 5596853760,
  't5gemma_9b_2b': 12292375296,
  't5gemma_9b_9b': 20333401088,
  't5gemma_2_270m_270m': 368424832,
  't5gemma_2_1b_1b': 1697783168,
  't5gemma_2_4b_4b': 7089112576,
}


def path_of(name):
  folder = 't5gemma_2' if name.startswith('t5gemma_2_') else 't5gemma'
  return f'gin/models/{folder}/{name.removeprefix(f"{folder}_")}.gin'


@dataclasses.dataclass(frozen=True)
class Networks:
  """What a test's gin file fills in: all sizes, included together."""

  found: dict


@pytest.fixture(scope='module')
def networks(folder):
  lines = ['from __gin__ import dynamic_registration']
  lines += ['import t5gemma_sizes_test']
  lines += [f"include '{path_of(name)}'" for name in SIZES]
  found = ', '.join(f"'{name}': %{name.upper()}" for name in SIZES)
  lines.append(f't5gemma_sizes_test.Networks.found = {{{found}}}')
  path = folder / 't5gemma.gin'
  path.write_text('\n'.join(lines))
  gin_flags.load(gin_flags.parse_flags([f'--gin_file={path}']))
  yield gin_flags.build(Networks).found
  gin.clear_config()


def with_layers(config, count):
  stacks = {
    name: dataclasses.replace(getattr(config, name), num_layers=count)
    for name in ('encoder', 'decoder')
  }
  return dataclasses.replace(config, **stacks)


def count(config):
  return sum(leaf.size for leaf in jax.tree.leaves(shapes(config)))


def shapes(config):
  return param_shapes(T5Gemma(config))


@pytest.mark.parametrize('name', SIZES)
def test_parameters(name, networks):
  config = networks[name].config
  assert sizes.num_params(config) == SIZES[name]
  for layers in (1, 2):
    small = with_layers(config, layers)
    assert sizes.num_params(small) == count(small)


@pytest.mark.slow
@pytest.mark.parametrize('name', SIZES)
def test_whole_networks_and_a_call_of_them(name, networks):
  """Their parameters, caches and a call, as shapes alone."""
  network = networks[name]
  config = network.config
  assert count(config) == SIZES[name]
  inputs = jax.ShapeDtypeStruct((2, 32), 'int32')
  fed = jax.ShapeDtypeStruct((2, 5), 'int32')

  def call(params, inputs, fed):
    return network.extend(params, network.prefill(params, inputs, 128), fed)

  logits, cache = jax.eval_shape(call, shapes(config), inputs, fed)
  assert logits.shape == (2, 5, config.vocab_size)
  stack = config.decoder
  for arrays, slots in ((cache.keys, 128), (cache.cross_values, 32)):
    kept = (2, stack.num_kv_heads, stack.head_dim, slots)
    assert {leaf.shape for leaf in arrays} == {kept}
    assert len(arrays) == stack.num_layers


def test_kinds_of_layers(networks):
  one, two = (
    networks[name].config.decoder
    for name in ('t5gemma_9b_9b', 't5gemma_2_4b_4b')
  )
  assert [one.kinds[i] for i in one.kind_of][:3] == ['local', 'global', 'local']
  kinds = [two.kinds[i] for i in two.kind_of]
  assert kinds.count('global') == 5 and kinds[5] == 'global'
  assert networks['t5gemma_9b_2b'].config.encoded_dim == one.emb_dim


@pytest.mark.parametrize(
  ('run', 'target', 'draft', 'ids'),
  [
    (
      't5gemma',
      '9b_9b',
      's_s',
      ('google/t5gemma-9b-9b-prefixlm-it', 'google/t5gemma-s-s-prefixlm-it'),
    ),
    (
      't5gemma_2',
      '4b_4b',
      '270m_270m',
      ('google/t5gemma-2-4b-4b', 'google/t5gemma-2-270m-270m'),
    ),
  ],
)
def test_runs(run, target, draft, ids, networks):
  flags = [f'--gin_file=gin/runs/{run}.gin', '--gin.INPUT_FILE=x.txt']
  gin.clear_config()
  gin_flags.load(gin_flags.parse_flags(flags))
  config = gin_flags.build(infer.DecodeConfig)
  assert config.mode == 'both' and config.chat == (run == 't5gemma')
  sides = ('target/engine.load', target), ('draft/infer.load_drafter', draft)
  for (scope, size), path in zip(sides, ids, strict=True):
    found = gin.get_bindings(scope)
    assert found['network'] == networks[f'{run}_{size}']
    assert (found['path'], found['dtype']) == (path, 'bfloat16')
