"""Gin files of Llama, Qwen and Gemma: their shapes and parameters."""

import dataclasses

import gin
import jax
import pytest

from causal_lm_test import shapes
from specdec_jax import infer
from specdec_jax.cli import gin_flags
from specdec_jax.models import sizes

# Parameters, as transformers 5.23 counts them: its own network with the values
# of each model's config.json, made without memory (torch.device('meta')). What
# model cards state is this, rounded; a vision tower is not counted.
SIZES = {
  'llama_3_8b': 8030261248,
  'llama_3_70b': 70553706496,
  'llama_3_1_8b': 8030261248,
  'llama_3_1_70b': 70553706496,
  'llama_3_1_405b': 405853388800,
  'llama_3_2_1b': 1235814400,
  'llama_3_2_3b': 3212749824,
  'qwen_3_0_6b': 596049920,
  'qwen_3_1_7b': 1720574976,
  'qwen_3_4b': 4022468096,
  'qwen_3_8b': 8190735360,
  'qwen_3_14b': 14768307200,
  'qwen_3_32b': 32762123264,
  'gemma_3_270m': 268098176,
  'gemma_3_1b': 999885952,
  'gemma_3_4b': 3880263168,
  'gemma_3_12b': 11766034176,
  'gemma_3_27b': 27009346304,
}
# Longest first: llama_3_1_8b is not llama_3's.
FOLDERS = ('llama_3_1', 'llama_3_2', 'llama_3', 'qwen_3', 'gemma_3')


def path_of(name):
  folder = next(folder for folder in FOLDERS if name.startswith(f'{folder}_'))
  return f'gin/models/{folder}/{name.removeprefix(f"{folder}_")}.gin'


@dataclasses.dataclass(frozen=True)
class Networks:
  """What a test's gin file fills in: all sizes, included together."""

  found: dict


@pytest.fixture(scope='module')
def networks(folder):
  lines = ['from __gin__ import dynamic_registration']
  lines += ['import causal_sizes_test']
  lines += [f"include '{path_of(name)}'" for name in SIZES]
  names = [*SIZES, 'llama_3_3_70b']
  found = ', '.join(f"'{name}': %{name.upper()}" for name in names)
  lines.append(f'causal_sizes_test.Networks.found = {{{found}}}')
  path = folder / 'causal.gin'
  path.write_text('\n'.join(lines))
  gin_flags.load(gin_flags.parse_flags([f'--gin_file={path}']))
  yield gin_flags.build(Networks).found
  gin.clear_config()


def count(config):
  return sum(leaf.size for leaf in jax.tree.leaves(shapes(config)))


@pytest.mark.parametrize('name', SIZES)
def test_parameters(name, networks):
  config = networks[name].config
  assert sizes.num_params(config) == SIZES[name]
  one, two = (
    count(dataclasses.replace(config, num_layers=number)) for number in (1, 2)
  )
  assert one + (config.num_layers - 1) * (two - one) == SIZES[name]


@pytest.mark.slow
@pytest.mark.parametrize('name', SIZES)
def test_whole_networks_and_a_call_of_them(name, networks):
  """Their parameters, caches and a call, as shapes alone."""
  network = networks[name]
  config = network.config
  assert count(config) == SIZES[name]
  inputs = jax.ShapeDtypeStruct((2, 1), 'int32')
  fed = jax.ShapeDtypeStruct((2, 5), 'int32')

  def call(params, inputs, fed):
    return network.extend(params, network.prefill(params, inputs, 128), fed)

  logits, cache = jax.eval_shape(call, shapes(config), inputs, fed)
  assert logits.shape == (2, 5, config.vocab_size)
  kept = (2, config.num_kv_heads, config.head_dim, 128)
  assert {leaf.shape for leaf in cache.keys} == {kept}
  assert len(cache.keys) == config.num_layers


def test_gemma_has_a_global_layer_in_six(networks):
  for name, layers in (('gemma_3_270m', 3), ('gemma_3_27b', 10)):
    config = networks[name].config
    kinds = [config.kinds[number] for number in config.kind_of]
    assert kinds.count('global') == layers
    assert kinds[5::6] == ['global'] * layers


@pytest.mark.parametrize(
  ('run', 'target', 'draft', 'ids'),
  [
    ('qwen_3', '32b', '0_6b', ('Qwen/Qwen3-32B', 'Qwen/Qwen3-0.6B')),
    (
      'gemma_3',
      '27b',
      '270m',
      ('google/gemma-3-27b-it', 'google/gemma-3-270m-it'),
    ),
  ],
)
def test_runs(run, target, draft, ids, networks):
  flags = [f'--gin_file=gin/runs/{run}.gin', '--gin.INPUT_FILE=x.txt']
  gin.clear_config()
  gin_flags.load(gin_flags.parse_flags(flags))
  config = gin_flags.build(infer.DecodeConfig)
  assert config.mode == 'both'
  sides = ('target/engine.load', target), ('draft/infer.load_drafter', draft)
  for (scope, size), path in zip(sides, ids, strict=True):
    found = gin.get_bindings(scope)
    assert found['network'] == networks[f'{run}_{size}']
    assert (found['path'], found['dtype']) == (path, 'bfloat16')


def test_sizes_of_one_shape(networks):
  assert networks['llama_3_3_70b'] == networks['llama_3_1_70b']
  assert len({*networks.values()}) == len(SIZES)
