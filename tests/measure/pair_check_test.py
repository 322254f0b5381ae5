"""Compiling for a GPU or TPU that is not there, and what is told of a pair."""

import dataclasses
import importlib.util
import json

import jax
import pytest
import rich.console
from jax._src import config

from small_vocabulary import network
from specdec_jax.cli import gin_flags
from specdec_jax.measure import memory, pair_check
from specdec_jax.models import t5
from specdec_jax.paper import printed
from specdec_jax.partitioning import Placement

# Vocabulary, width, heads, layers, size of a head, of an MLP.
CONFIG = t5.T5Config(512, 256, 2, 1, 2, 64, 512, dtype='bfloat16')
TARGET = t5.T5(CONFIG)
DRAFT = t5.T5(dataclasses.replace(CONFIG, num_decoder_layers=1))
ROW = printed.Table2Row('ende', 't5_small', 0, 3, 0.75, 0.02, 2.6, 3.4)
CPU_PAIR = {'target': network(1), 'drafts': {'t5_small': network(1)}}
COMPILERS = {'h200': 'jax_cuda12_plugin', 'tpu_v4': 'libtpu'}
EXTRAS = {'h200': 'cuda', 'tpu_v4': 'tpu'}


def settings(**options):
  lengths = {'input_lens': {'ende': 32}, 'decode_lens': {'ende': 40}}
  pair = {'target': TARGET, 'drafts': {'t5_small': DRAFT}, 'device': 'tpu_v4'}
  return pair_check.PairCheckConfig(**lengths | pair | options)


def check(of):
  console = rich.console.Console(record=True, width=160)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(printed, 'TABLE2', (ROW,))
    record = pair_check.check(of, console)
  return record, console.export_text()


@pytest.mark.parametrize('device', COMPILERS)
@pytest.mark.filterwarnings('ignore')  # the compilers' own
def test_a_small_pair_compiles(device):
  if importlib.util.find_spec(COMPILERS[device]) is None:
    pytest.skip(f"pip install 'specdec_jax[{EXTRAS[device]}]'")
  # A program for a device that is not there cannot be kept in a cache.
  with config.persistent_cache_min_compile_time_secs(1e9):
    record, _ = check(settings(device=device))
  (row,) = record['rows']
  assert row['fits']
  placement = Placement('bfloat16')
  shapes = [memory.param_shapes(model, placement) for model in (TARGET, DRAFT)]
  held = memory.tree_bytes(shapes)
  assert held < row['peak_bytes'] < 2 * held  # both models are held


def test_what_is_told_of_a_pair(tmp_path, monkeypatch):
  """The host's own device as the chip; all else is as with libtpu."""
  described = jax.devices('cpu')[0], {'compiled_for': 'cpu', 'jax': '1.0'}
  monkeypatch.setattr(pair_check, 'describe', lambda name: described)
  path = tmp_path / 'out/record.json'
  record, shown = check(settings(**CPU_PAIR, output_file=str(path)))
  assert json.loads(path.read_text()) == record
  (row,) = record['rows']
  assert row['fits'] and 'yes' in shown and '3.4' in shown
  assert row['target_call_ms'] == row['target_call_bytes'] / 1.2e9
  assert row['cost_ratio'] == 1  # both models are alike
  expected = sum(0.75**i for i in range(4)) / 4
  assert row['walltime_factor'] == pytest.approx(expected)
  assert 'compiled for and not run' in pair_check.conditions(record)

  small = dataclasses.replace(pair_check.DEVICES['tpu_v4'], usable_bytes=1000)
  monkeypatch.setitem(pair_check.DEVICES, 'tpu_v4', small)
  record, shown = check(settings(**CPU_PAIR))
  assert not record['rows'][0]['fits'] and 'NO' in shown


def test_errors_name_the_field_and_the_value():
  for options, words in (
    ({'device': 'h100'}, 'device.*h100'),
    ({'batch': 0}, 'batch: .* from 1 to .*, got 0'),
    ({'input_lens': {'ende': 0}}, "input_lens: .*'ende': 0"),
    ({'drafts': {}}, 'drafts.*t5_small'),
    ({'decode_lens': {}}, 'decode_lens.*ende'),
  ):
    with pytest.raises(ValueError, match=words):
      check(settings(**options))


def test_a_missing_compiler_is_named(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  for device, extra in EXTRAS.items():
    with pytest.raises(ValueError, match=rf"install 'specdec_jax\[{extra}\]'"):
      check(settings(device=device))


def test_the_run_file_has_every_pair_of_table_2():
  for name in pair_check.DEVICES:
    flags = ['--gin_file=gin/runs/compile_check.gin', f'--device={name}']
    gin_flags.load(flags)
    made = gin_flags.build(pair_check.PairCheckConfig)
    assert made.device == name
    assert {row.draft for row in printed.TABLE2} == set(made.drafts)
    for lengths in (made.input_lens, made.decode_lens):
      assert {row.task for row in printed.TABLE2} == set(lengths)
