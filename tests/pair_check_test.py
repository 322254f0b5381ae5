"""Compiling for a GPU or TPU that is not there, and what is told of a pair."""

import importlib.util
import json
import warnings

import jax
import pytest
import rich.console

import collectives
from compiled_pair import DRAFT, TARGET
from small_vocabulary import network
from specdec_jax.cli import gin_flags
from specdec_jax.measure import memory, pair_check
from specdec_jax.paper import printed
from specdec_jax.partitioning import Placement

# The same programs, so that a test compiles them once.
ROWS = [
  printed.Table2Row('ende', 't5_small', 0, 3, alpha, 3.4)
  for alpha in (0.5, 0.75)
]
CPU_PAIR = {'target': network(1), 'drafts': {'t5_small': network(1)}}
COMPILERS = {'h200': 'jax_cuda12_plugin', 'tpu_v4': 'libtpu'}
EXTRAS = {'h200': 'cuda', 'tpu_v4': 'tpu'}


def settings(tmp_path, **options):
  return pair_check.PairCheckConfig(
    **{
      'target': TARGET,
      'drafts': {'t5_small': DRAFT},
      'input_lens': {'ende': 32},
      'decode_lens': {'ende': 40},
      'output_dir': str(tmp_path / 'out'),
      'device': 'tpu_v4',
      **options,
    }
  )


def check(config, rows):
  console = rich.console.Console(record=True, width=160)
  record = pair_check.check(config, rows, console)
  return record, console.export_text()


@pytest.fixture
def on_cpu(monkeypatch):
  """The host's own device as the chip; all else is as with libtpu."""
  versions = {'compiled_for': 'cpu', 'jax': jax.__version__}
  described = jax.devices('cpu')[0], versions
  monkeypatch.setattr(pair_check, 'describe', lambda name: described)


@pytest.fixture
def _nothing_is_kept():
  """A program for a device that is not there cannot be kept in a cache."""
  name = 'jax_persistent_cache_min_compile_time_secs'
  before = getattr(jax.config, name)
  jax.config.update(name, 1e9)
  yield
  jax.config.update(name, before)


@pytest.mark.usefixtures('_nothing_is_kept')
@pytest.mark.parametrize('device', COMPILERS)
def test_a_small_pair_compiles(tmp_path, device):
  if importlib.util.find_spec(COMPILERS[device]) is None:
    pytest.skip(f"pip install 'specdec_jax[{EXTRAS[device]}]'")
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # the compilers' own
    record, _ = check(settings(tmp_path, device=device), ROWS[1:])
  (row,) = record['rows']
  assert row['memory']['fits'] and row['state_keeps_its_shape']
  run = row['programs']['speculative_run']
  placement = Placement('bfloat16')
  held = memory.tree_bytes(
    [memory.param_shapes(model, placement) for model in (TARGET, DRAFT)]
  )
  # Both models are held, and what the device pads.
  assert held < run['arguments_bytes'] < row['memory']['peak_bytes']
  assert run['in_place_bytes'] >= row['memory']['target_cache_bytes']


def test_results_report_and_restart(tmp_path, on_cpu, monkeypatch):
  config = settings(tmp_path, **CPU_PAIR)
  first, _ = check(config, ROWS[:1])
  checked = []
  check_row = pair_check._check_row

  def count(config, row, *args):
    checked.append(row)
    return check_row(config, row, *args)

  monkeypatch.setattr(pair_check, '_check_row', count)
  both, shown = check(config, ROWS)
  assert both['rows'][0] == first['rows'][0]
  assert checked == ROWS[1:]
  folder = tmp_path / 'out'
  assert json.loads((folder / 'results.json').read_text()) == both
  assert '| ende | t5_small |' in (folder / 'report.md').read_text()
  assert '3.4' in shown and 'yes' in shown
  assert both['missing'] == []
  with pytest.raises(ValueError, match='other settings: gb_per_s was'):
    check(settings(tmp_path, **CPU_PAIR, gb_per_s=900.0), ROWS)

  row = both['rows'][1]
  one = row['target_call_bytes']
  assert row['call_cost'] == row['verification_bytes'] / one
  assert row['target_call_ms'] == one / 1200e6
  expected = sum(0.75**i for i in range(4))
  divisor = row['call_cost'] + 3 * row['cost_ratio']
  assert row['walltime_factor'] == pytest.approx(expected / divisor)
  assert row['memory']['fits']

  options = CPU_PAIR | {'usable_gib': 1e-6, 'output_dir': str(tmp_path / 'no')}
  record, told = check(settings(tmp_path, **options), ROWS[:1])
  memory_of = record['rows'][0]['memory']
  assert not memory_of['fits']
  assert memory_of['peak_bytes'] > memory_of['usable_bytes']
  assert '| NO |' in (tmp_path / 'no/report.md').read_text()
  assert f'does not fit: it needs {memory_of["peak_bytes"]:,} bytes' in told


@pytest.mark.parametrize(
  ('options', 'words'),
  [
    ({'device': 'h100'}, "device is 'h100', expected .*'h200', 'tpu_v4'"),
    ({'batch': 0}, 'batch .*0'),
    ({'input_lens': {'ende': 0}}, r"input_lens\['ende'\].*0"),
    ({'drafts': {}}, "drafts is 't5_small'"),
    ({'decode_lens': {}}, "decode_lens is 'ende'"),
  ],
)
def test_errors_name_the_field_and_the_value(tmp_path, options, words):
  with pytest.raises(ValueError, match=words):
    check(settings(tmp_path, **options), ROWS)


@pytest.mark.parametrize('device, extra', EXTRAS.items())
def test_a_missing_compiler_is_named(tmp_path, monkeypatch, device, extra):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ValueError, match=rf"install 'specdec_jax\[{extra}\]'"):
    check(settings(tmp_path, device=device), ROWS)


def test_the_run_file_has_every_pair_of_table_2(tmp_path):
  path = 'gin/runs/compile_check.gin'
  for name, described in pair_check.KNOWN.items():
    flags = [f'--gin_file={path}', f'--output-dir={tmp_path}']
    gin_flags.load([*flags, f'--device={name}'])
    config = gin_flags.build(pair_check.PairCheckConfig)
    assert config.device == name
    assert config.gb_per_s == described.bytes_per_s / 1e9
    assert {row.draft for row in printed.TABLE2} == set(config.drafts)
    for lengths in (config.input_lens, config.decode_lens):
      assert {row.task for row in printed.TABLE2} == set(lengths)
    models = [config.target, *config.drafts.values()]
    assert {model.config.dtype for model in models} == {'bfloat16'}


_EXCHANGES = """\
HloModule jit_run, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%inner (i: (s32[])) -> (s32[]) {
  %ar.1 = (f32[2,8]{1,0}, f32[3]{0}) all-reduce(%a, %b), to_apply=%add
}

%branch (x: f32[]) -> f32[] {
  %ag = (f32[4,64]{1,0}, f32[32,64]{1,0}) all-gather-start(%w), dimensions={0}
  %agd = f32[32,64]{1,0} all-gather-done(%ag)
}

%rounds (s: (s32[])) -> (s32[]) {
  %scan = (s32[]) while(%s), condition=%more, body=%inner, \
backend_config={"known_trip_count":{"n":"3"}}
  %pick = f32[] conditional(%i, %x), branch_computations={%branch, %none}
}

%more (s: (s32[])) -> pred[] {
  ROOT %all = pred[] all-reduce(%running), to_apply=%add
}

ENTRY %main (w: bf16[4,64]) -> f32[2] {
  %cp = (bf16[6]{0}, bf16[6]{0}, u32[], u32[]) collective-permute-start(%w)
  ROOT %loop = (s32[]) while(%t), condition=%more, body=%rounds
}
"""


def test_a_program_is_read_for_exchanges():
  found = collectives.find(_EXCHANGES)
  totals = collectives.totals(found)
  assert totals == {
    'once': {'collective-permute': {'count': 1, 'bytes': 12}},
    'round': {
      # 3 times in the scan, and in both conditions.
      'all-reduce': {'count': 3 + 3 + 1, 'bytes': 3 * (64 + 12) + 4},
      'all-gather': {'count': 1, 'bytes': 4 * 32 * 64},
    },
  }
  (gathered,) = collectives.of_weights(found, [(64, 32)])
  assert gathered.shapes == ((32, 64),)
  assert not collectives.of_weights(found, [(64, 16)])
