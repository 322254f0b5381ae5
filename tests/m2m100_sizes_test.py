"""Gin files of M2M-100 and NLLB-200: their shapes and parameters."""

import dataclasses

import gin
import jax
import pytest

from m2m100_test import shapes
from specdec_jax import infer
from specdec_jax.cli import gin_flags
from specdec_jax.models import sizes

# Parameters, as transformers 5.23 counts them: its own network with the values
# of each model's config.json, made without memory (torch.device('meta')).
SIZES = {
  'nllb_600m': 615073792,
  'nllb_1_3b': 1370638336,
  'nllb_3_3b': 3344863232,
  'm2m100_418m': 483905536,
  'm2m100_1_2b': 1239470080,
}


@dataclasses.dataclass(frozen=True)
class Networks:
  """What a test's gin file fills in: all sizes, included together."""

  found: dict


@pytest.fixture(scope='module')
def networks(folder):
  lines = ['from __gin__ import dynamic_registration']
  lines += ['import m2m100_sizes_test']
  for name in SIZES:
    family, size = name.split('_', 1)
    lines += [f"include 'gin/models/{family}/{size}.gin'"]
  found = ', '.join(f"'{name}': %{name.upper()}" for name in SIZES)
  lines += [f'm2m100_sizes_test.Networks.found = {{{found}}}']
  path = folder / 'm2m100.gin'
  path.write_text('\n'.join(lines))
  gin_flags.load(gin_flags.parse_flags([f'--gin_file={path}']))
  yield gin_flags.build(Networks).found
  gin.clear_config()


@pytest.mark.parametrize('name', SIZES)
def test_numbers_of_parameters(name, networks):
  assert sizes.num_params(networks[name].config) == SIZES[name]


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=() if name == 'm2m100_418m' else pytest.mark.slow)
    for name in SIZES
  ],
)
def test_parameters_and_a_call(name, networks):
  """Whole networks, their caches and a call, as shapes alone."""
  network = networks[name]
  config = network.config
  params = shapes(config)
  assert sum(leaf.size for leaf in jax.tree.leaves(params)) == SIZES[name]
  ids = jax.ShapeDtypeStruct((2, 16), 'int32')

  def call(params, ids):
    cache = network.prefill(params, ids, 128)
    return network.extend(params, cache, ids[:, :5])

  logits, cache = jax.eval_shape(call, params, ids)
  assert logits.shape == (2, 5, config.vocab_size)
  kept = (2, config.num_heads, config.head_dim, 128)
  assert {leaf.shape for leaf in cache.keys} == {kept}
  assert len(cache.cross_keys) == config.num_decoder_layers


def test_the_run(networks):
  flags = ['--gin_file=gin/runs/nllb.gin', '--gin.INPUT_FILE=x.txt']
  languages = {'SOURCE_LANG': 'eng_Latn', 'TARGET_LANG': 'deu_Latn'}
  flags += [f'--gin.{name}="{one}"' for name, one in languages.items()]
  gin.clear_config()
  gin_flags.load(gin_flags.parse_flags(flags))
  assert gin_flags.build(infer.DecodeConfig).mode == 'both'
  # Resolved, the engine's target would be loaded.
  found = gin.get_bindings('engine.Engine', resolve_references=False)
  for name, language in languages.items():
    assert repr(found[name.lower()]) == f'%{name}'
    assert gin.query_parameter(f'%{name}') == language
  sides = {
    'target/engine.load': ('nllb_3_3b', 'facebook/nllb-200-3.3B'),
    'draft/infer.load_drafter': (
      'nllb_600m',
      'facebook/nllb-200-distilled-600M',
    ),
  }
  for scope, (size, path) in sides.items():
    found = gin.get_bindings(scope)
    assert found['network'] == networks[size]
    assert (found['path'], found['dtype']) == (path, 'bfloat16')
