"""LoRA adapters that are merged when a model is loaded."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import folders
import specdec_jax
from small_vocabulary import network as t5_of
from specdec_jax.checkpoints import families
from toy_families import SUPPORT

RANK, ALPHA = 3, 7
MERGED = {
  name
  for row in SUPPORT.values()
  for name in row['model_type']
  if 'lora' in row['features']
}


def write(folder, family, arrays):
  folders.write_arrays(folder, arrays, folders.FOLDERS[family][0])


def modules_of(family):
  """Modules that an adapter is for, as PEFT calls them: some of each kind."""
  described, config = folders.FOLDERS[family]
  rows = families.table(families.FAMILIES[described['model_type']], config)
  kernels = [
    row.name.removesuffix('.weight')
    for name, row in rows.items()
    if name.endswith('/kernel') and 'logits' not in name
  ]
  prefix = folders.PREFIXES.get(family, '')
  return [prefix + name for name in dict.fromkeys(kernels)][::2]


def adapter_of(family, base):
  """Module -> A [r, in] and B [out, r]."""
  rng = np.random.default_rng(1)
  found = {}
  for module in modules_of(family):
    out, into = base[f'{module}.weight'].shape[:: -1 if family == 'gpt2' else 1]
    halves = rng.standard_normal((RANK, into)), rng.standard_normal((out, RANK))
    found[module] = tuple(half.astype(np.float32) for half in halves)
  return found


SAID = {
  'peft_type': 'LORA',
  'r': RANK,
  'lora_alpha': ALPHA,
  'bias': 'none',
  'fan_in_fan_out': False,
  'init_lora_weights': True,
  'modules_to_save': None,
  'target_modules': ['q'],
  'use_dora': False,
  'some_new_field': [],  # asks for nothing
}


def write_adapter(folder, adapter, said=SAID, **more):
  from safetensors.numpy import save_file

  folder.mkdir(exist_ok=True)
  arrays = dict(more)
  for module, (down, up) in adapter.items():
    arrays[f'base_model.model.{module}.lora_A.weight'] = down
    arrays[f'base_model.model.{module}.lora_B.weight'] = up
  save_file(arrays, folder / 'adapter_model.safetensors')
  (folder / 'adapter_config.json').write_text(json.dumps(said))
  return folder


def merged(family, base, adapter, scale):
  """The arrays of a file after merging, in float64."""
  found = dict(base)
  for module, (down, up) in adapter.items():
    name = f'{module}.weight'
    change = scale * np.einsum('or,ri->oi', up, down, dtype=float)
    kernel = base[name] + (change.T if family == 'gpt2' else change)
    found[name] = kernel.astype(base[name].dtype)
  return found


def loaded(folder, adapter=None):
  return specdec_jax.load(folder, adapter=adapter).params


def check_same(have, want, rtol):
  def compare(leaf, other):
    assert leaf.dtype == other.dtype
    leaf, other = (np.asarray(x, np.float32) for x in (leaf, other))
    np.testing.assert_allclose(leaf, other, rtol=rtol, atol=rtol)

  jax.tree.map(compare, have, want)


@pytest.mark.parametrize(
  ('family', 'dtype', 'said', 'divided'),
  [
    ('t5', np.float32, {}, RANK),
    (
      't5',
      np.float32,
      {'use_rslora': True, 'rank_pattern': {'wo': RANK}},
      RANK**0.5,
    ),
    ('llama', jnp.bfloat16, {}, RANK),
    *((name, np.float32, {}, RANK) for name in sorted(MERGED - {'t5'})),
  ],
)
@pytest.mark.filterwarnings('ignore:.*arrays are for images')
def test_an_adapter_is_merged(family, dtype, said, divided, tmp_path):
  base = folders.arrays_of(family, dtype=dtype)
  write(tmp_path / 'base', family, base)
  adapter = adapter_of(family, base)
  place = write_adapter(tmp_path / 'adapter', adapter, SAID | said)
  want = merged(family, base, adapter, ALPHA / divided)
  write(tmp_path / 'merged', family, want)
  have = loaded(tmp_path / 'base', place)
  rtol = 1e-5 if dtype == np.float32 else 2**-7
  check_same(have, loaded(tmp_path / 'merged'), rtol)
  # Negative control: it is not what it was.
  with pytest.raises(AssertionError):
    check_same(have, loaded(tmp_path / 'base'), rtol)


QUERY = 'encoder.block.0.layer.0.SelfAttention.q'


def _other(module=QUERY, down=20, up=12, rank=RANK, value=1.0):
  return {module: (np.full((rank, down), value), np.ones((up, rank)))}


@pytest.mark.parametrize(
  ('said', 'adapter', 'words'),
  [
    ({'peft_type': 'IA3'}, {}, 'peft_type'),
    ({'bias': 'all'}, {}, 'bias'),
    ({'init_lora_weights': 'pissa'}, {}, 'init_lora_weights'),
    ({'alpha_pattern': {'q': 3}}, {}, 'alpha_pattern'),
    ({'r': 0}, {}, 'r: .* 0'),
    ({'r': RANK + 1}, _other(), r'A \[4, .*\[3, 20\]'),
    # The end of the name alone would be right.
    ({}, _other(f'vision.{QUERY}'), 'vision'),
    ({}, _other(down=17), r'kernel \[12, 20\], got \[\[3, 17\], \[12, 3\]\]'),
    ({}, _other(rank=0), r'kernel \[12, 20\], got \[\[0, 20\], \[12, 0\]\]'),
    ({}, _other(value=np.nan), 'SelfAttention.q.* not finite'),
    ({}, {}, 'nothing'),
    ({}, {'base_model.model.q.lora_magnitude_vector': np.zeros(4)}, 'q.lora_m'),
    ({}, {'base_model.model.q.lora_A.weight': np.ones((3, 4))}, 'q: .*lora_A'),
  ],
  ids=str,
)
def test_adapters_that_are_refused(said, adapter, words, tmp_path):
  write(tmp_path / 'base', 't5', folders.arrays_of('t5'))
  arrays = {n: a for n, a in adapter.items() if n.startswith('base_model')}
  adapter = {n: a for n, a in adapter.items() if n not in arrays}
  place = write_adapter(tmp_path / 'adapter', adapter, SAID | said, **arrays)
  with pytest.raises(ValueError, match=words):
    loaded(tmp_path / 'base', place)


def test_what_is_no_adapter_or_no_folder(tmp_path):
  write(tmp_path / 'base', 't5', folders.arrays_of('t5'))
  with pytest.raises(ValueError, match=f'adapter {tmp_path}'):
    specdec_jax.load(tmp_path / 'base', adapter=tmp_path)
  demo = 'demo/target.msgpack'
  with pytest.raises(ValueError, match=demo):
    specdec_jax.load(demo, network=t5_of(1), adapter=tmp_path)
