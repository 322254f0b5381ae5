"""Compiling for a TPU that is not there, and what is told of the programs."""

import dataclasses
import functools
import importlib.util
import json
import re
import warnings

import jax
import jax.numpy as jnp
import pytest
import rich.console

from compiled_pair import CONFIG, DRAFT, TARGET
from gpt_test import GPT2
from small_vocabulary import network
from specdec_jax.checks.memory import GIB
from specdec_jax.cli import gin_flags
from specdec_jax.measure import memory
from specdec_jax.measure.compiled import (
  collectives,
  compiler,
  pair_check,
  program_text,
  tpu,
  tpu_check,
  tpu_slices,
)
from specdec_jax.models import backend, gpt, t5
from specdec_jax.paper import printed
from specdec_jax.partitioning import Placement

# The same programs, so that tests compile them once.
ROWS = [
  printed.Table2Row('ende', 't5_small', 1, 3, alpha, 3.4)
  for alpha in (0.5, 0.75)
]
# Where only the host compiles: less of it.
CPU_ROWS = [row._replace(temperature=0) for row in ROWS]
CPU_PAIR = {'target': network(1), 'drafts': {'t5_small': network(1)}}
needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None,
  reason="needs libtpu, the extra [tpu]: pip install 'specdec_jax[tpu]'",
)


def settings(tmp_path, **options):
  return tpu_check.TpuCheckConfig(
    **{
      'target': TARGET,
      'drafts': {'t5_small': DRAFT},
      'input_lens': {'ende': 32},
      'decode_lens': {'ende': 40},
      'output_dir': str(tmp_path / 'out'),
      **options,
    }
  )


def check(config, rows):
  console = rich.console.Console(record=True, width=160)
  results = pair_check.check(config, rows, console)
  return results, console.export_text()


@functools.cache
def cpu_compiler():
  return compiler.Compiler(jax.devices('cpu')[0])


@pytest.fixture
def on_cpu(monkeypatch):
  """The host's own device as the chip; all else is as with libtpu."""
  device = jax.devices('cpu')[:1]
  monkeypatch.setattr(tpu, 'describe_slice', lambda topology: device)
  # One for all tests: they compile the same programs.
  shared = cpu_compiler()
  monkeypatch.setattr(pair_check, 'Compiler', lambda *_, **__: shared)
  versions = {'jax': jax.__version__, 'libtpu': 'none'}
  monkeypatch.setattr(tpu, 'versions', lambda: versions)


@needs_libtpu
def test_a_small_pair_compiles_for_a_tpu(tmp_path):
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # libtpu's own
    results, _ = check(settings(tmp_path), ROWS[1:])
  (record,) = results['rows']
  assert results['settings']['compiled_for'].startswith('TPU v4')
  assert record['memory']['fits'] and record['state_keeps_its_shape']
  assert record['num_compiled'] == len(record['programs']) == 7
  run = record['programs']['speculative_run']
  placement = Placement('bfloat16')
  held = memory.tree_bytes(
    [memory.param_shapes(model, placement) for model in (TARGET, DRAFT)]
  )
  # Both models are held, and what the chip pads.
  assert held < run['arguments_bytes'] < record['memory']['peak_bytes']
  assert run['in_place_bytes'] >= record['memory']['target_cache_bytes']
  assert run['host_transfers'] == run['float32_weights']['count'] == 0
  assert run['relaid_weights']['looped_bytes'] == 0
  # A check, not the truth: the compiler counts what is prefetched as well.
  for name, counted in record['bytes_counted'].items():
    assert counted < record['bytes_xla'][name] < 10 * counted


@needs_libtpu
@pytest.mark.parametrize('batch', [1, 4])
def test_a_greedy_round_relays_nothing_and_loops_over_no_rows(tmp_path, batch):
  config = settings(tmp_path, batch=batch)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # libtpu's own
    results, _ = check(config, CPU_ROWS[:1])
  programs = results['rows'][0]['programs']
  for name in ('plain_run', 'speculative_run'):
    assert programs[name]['relaid_weights']['count'] == 0
    assert programs[name]['relaid_caches']['looped_bytes'] == 0
  # Its gathers of biases, and writes of the tokens and of their logarithms;
  # each layer's keys and values were a loop, too.
  loops = programs['speculative_run']['row_loops']
  assert loops <= (3 if batch == 1 else 6)


@needs_libtpu
def test_no_product_of_a_call_is_without_the_matrix_unit():
  """Of one row XLA makes sums; one call of the target has 13 products."""
  chip = tpu.describe_slice('v4:2x2x1')[0]
  placement = Placement('bfloat16')
  with backend.compiled_for('tpu'), warnings.catch_warnings():
    warnings.simplefilter('ignore')  # libtpu's own
    for_tpu = compiler.Compiler(chip)
    params = for_tpu.place(memory.param_shapes(TARGET, placement))
    inputs, token = (
      for_tpu.place(jax.ShapeDtypeStruct((1, n), jnp.int32)) for n in (8, 1)
    )
    cache = for_tpu.place(
      jax.eval_shape(lambda *a: TARGET.prefill(*a, 64), params, inputs)
    )
    lowered = jax.jit(TARGET.extend).lower(params, cache, token)
    text = lowered.compile().as_text()
  assert len(re.findall(r' convolution\(.*dot_general', text)) >= 13


@needs_libtpu
def test_what_no_chip_can_hold_is_refused():
  huge = t5.T5(dataclasses.replace(CONFIG, vocab_size=100_000_000))
  for_tpu = compiler.Compiler(tpu.describe_slice('v4:2x2x1')[0])
  params = for_tpu.place(
    memory.param_shapes(huge, Placement('bfloat16', 'in_out'))
  )
  tokens = for_tpu.place(jax.ShapeDtypeStruct((1, 8), jnp.int32))

  def prefill(params, tokens):
    return huge.prefill(params, tokens, 64)

  record, _ = for_tpu.compile('prefill', prefill, params, tokens)
  assert list(record) == ['refused'] and '30.75G' in record['refused']


def test_results_report_and_restart(tmp_path, on_cpu, monkeypatch):
  config = settings(tmp_path, **CPU_PAIR)
  first, _ = check(config, CPU_ROWS[:1])
  compiled = []
  whole = cpu_compiler().compile

  def compile_and_count(key, *args, **options):
    compiled.append(key)
    return whole(key, *args, **options)

  monkeypatch.setattr(cpu_compiler(), 'compile', compile_and_count)
  both, shown = check(config, CPU_ROWS)
  assert both['rows'][0] == first['rows'][0]
  assert len(compiled) == 7  # only the second row's
  folder = tmp_path / 'out'
  assert json.loads((folder / 'results.json').read_text()) == both
  report = (folder / 'report.md').read_text()
  assert '## Memory of the pair' in report and '| ende | t5_small |' in report
  assert '3.4' in shown and 'yes' in shown
  assert both['missing'] == [] and 'Not compiled yet' not in report
  with pytest.raises(ValueError, match='other settings: gb_per_s was'):
    check(settings(tmp_path, **CPU_PAIR, gb_per_s=900.0), CPU_ROWS)

  record = both['rows'][1]
  calls = record['bytes_counted']
  assert record['call_cost'] == calls['target_call_n'] / calls['target_call_1']
  assert record['target_call_ms'] == calls['target_call_1'] / 1200e6
  expected = sum(0.75**i for i in range(4))
  divisor = record['call_cost'] + 3 * record['cost_ratio']
  assert record['walltime_factor'] == pytest.approx(expected / divisor)
  assert record['memory']['fits']


def test_a_pair_that_does_not_fit_is_said_so(tmp_path, on_cpu):
  config = settings(tmp_path, **CPU_PAIR, usable_gib=1e-6)
  results, told = check(config, CPU_ROWS[:1])
  record = results['rows'][0]['memory']
  assert not record['fits'] and record['peak_bytes'] > record['usable_bytes']
  assert '| NO |' in (tmp_path / 'out/report.md').read_text()
  assert f'does not fit: it needs {record["peak_bytes"]:,} bytes' in told


_PROGRAM = """\
HloModule jit_run, is_scheduled=true

%fused_convert (param_0: bf16[512,256]) -> f32[512,256] {
  %param_0 = bf16[512,256]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %c.0 = f32[512,256]{1,0} convert(%param_0)
}

%body (arg: (s32[], bf16[512,256])) -> (s32[], bf16[512,256]) {
  %arg = (s32[], bf16[512,256]{1,0}) parameter(0)
  %w = bf16[512,256]{1,0:T(8,128)(2,1)} get-tuple-element(%arg), index=1
  %w.t = bf16[512,256]{0,1:T(8,128)(2,1)} copy(%w)
  %w.near = bf16[512,256]{1,0:T(8,128)(2,1)S(3)} copy(%w)
  %two = f32[512,256]{1,0} fusion(%w, %w.t), kind=kLoop, calls=%fused_convert
  %c.n = bf16[1,2,64,32]{3,1,2,0} copy(%c)
  %c.m = bf16[1,2,64,32]{3,2,1,0} copy(%c.n)
  %rows = (s32[]) while(%i), condition=%cond, body=%body, \
metadata={op_name="jit(run)/while/body/vmap()/scatter"}
  %call = s32[] custom-call(%i), custom_call_target="AllocateBuffer"
  ROOT %out = (s32[], bf16[512,256]{1,0}) tuple(%call, %w)
}

%cond (arg.1: (s32[], bf16[512,256])) -> pred[] {
  %arg.1 = (s32[], bf16[512,256]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (p.0: bf16[512,256]) -> f32[512,256] {
  %p.0 = bf16[512,256]{1,0:T(8,128)(2,1)} parameter(0)
  %loop = (s32[], bf16[512,256]{1,0}) while(%t), condition=%cond, body=%body
  %host = token[] send(%p.0, %token), is_host_transfer=true
  ROOT %wide = f32[512,256]{1,0} fusion(%p.0), kind=kLoop, calls=%fused_convert
}
"""


def test_a_program_is_read_for_copies_of_weights():
  found = program_text.inspect(_PROGRAM, [(512, 256)])
  size = 512 * 256
  assert found.float32_weights == program_text.WeightCopies(1, 4 * size, 0)
  assert found.relaid_weights == program_text.WeightCopies(1, 0, 2 * size)
  # The one whose operand is known; caches are not asked for here.
  assert found.row_loops == 1 and found.relaid_caches.count == 0
  caches = program_text.inspect(_PROGRAM, [(512, 256)], [(1, 2, 64, 32)])
  cache = 2 * 2 * 64 * 32
  assert caches.relaid_caches == program_text.WeightCopies(1, 0, cache)
  assert found.custom_calls == {'AllocateBuffer': 1}
  assert found.host_transfers == 1
  none = program_text.inspect(_PROGRAM, [(256, 512)])
  assert (
    none.float32_weights == none.relaid_weights == program_text.WeightCopies()
  )


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


def test_a_callback_waits_for_the_host():
  def function(x):
    jax.debug.callback(lambda value: None, x)
    return x + 1

  text = jax.jit(function).lower(jnp.ones(3)).compile().as_text()
  assert program_text.inspect(text, []).host_transfers == 1


def test_errors_name_what_is_missing(tmp_path, monkeypatch):
  other = ROWS[0]._replace(draft='t5_base')
  with pytest.raises(ValueError, match="no 't5_base', .*; it has t5_small"):
    pair_check.check(settings(tmp_path), [other])
  with pytest.raises(ValueError, match=r"input_lens\['ende'\] must be posit"):
    settings(tmp_path, input_lens={'ende': 0})
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ValueError, match=r"install 'specdec_jax\[tpu\]'"):
    pair_check.check(settings(tmp_path), ROWS)


def test_the_run_file_has_every_pair_of_table_2(tmp_path):
  flags = ['--gin_file=gin/runs/tpu_check.gin', f'--gin.OUTPUT_DIR={tmp_path}']
  gin_flags.load(gin_flags.parse_flags(flags))
  config = gin_flags.build(tpu_check.TpuCheckConfig)
  rows = printed.TABLE2
  assert {row.draft for row in rows} == set(config.drafts)
  for lengths in (config.input_lens, config.decode_lens):
    assert {row.task for row in rows} == set(lengths)
  models = [config.target, *config.drafts.values()]
  assert {model.config.dtype for model in models} == {'bfloat16'}


def slices(tmp_path, **options):
  return tpu_slices.SlicesConfig(
    **{
      'pairs': {'a pair': (TARGET, DRAFT)},
      'slices': {'v4:2x2x1': Placement('bfloat16', 'in_out', model=0)},
      'output_dir': str(tmp_path / 'out'),
      'input_len': 32,
      'decode_len': 40,
      **options,
    }
  )


def check_slices(config):
  console = rich.console.Console(record=True, width=160)
  return tpu_slices.check(config, console), console.export_text()


@needs_libtpu
def test_a_small_pair_compiles_for_a_slice(tmp_path):
  config = dataclasses.replace(CONFIG, num_heads=4)
  pairs = {'a pair': (t5.T5(config), DRAFT)}
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # libtpu's own
    results, _ = check_slices(slices(tmp_path, pairs=pairs))
  (record,) = results['rows']
  assert record['mesh'] == {'data': 1, 'model': 4} and record['fits']
  # Kernels and embeddings are split; norms and biases are not worth a word.
  parts = record['target_bytes'] / record['target_chip_bytes']
  assert 3.9 < parts < 4
  held = record['target_chip_bytes'] + record['draft_chip_bytes']
  assert held < record['program']['arguments_bytes'] < 1.2 * held
  kinds = record['exchanged']['round']
  # Two layers of three blocks, and the embedding; the logits.
  assert kinds['all-reduce']['count'] == 7
  assert kinds['all-gather']['count'] == 1
  assert record['weights_gathered'] == 0


@pytest.fixture
def slice_on_cpu(monkeypatch):
  device = jax.devices('cpu')[:1]
  monkeypatch.setattr(tpu, 'describe_slice', lambda name: device)
  versions = {'jax': jax.__version__, 'libtpu': 'none'}
  monkeypatch.setattr(tpu, 'versions', lambda: versions)


@pytest.mark.slow
def test_slices_report_and_restart(tmp_path, slice_on_cpu, monkeypatch):
  decoder = gpt.GPT(dataclasses.replace(GPT2, num_positions=0, num_layers=1))
  pairs = {'no encoder': (decoder, decoder)}
  config = slices(tmp_path, pairs=pairs)
  results, shown = check_slices(config)
  (record,) = results['rows']
  assert results['missing'] == [] and record['fits']
  # One device exchanges nothing, and has all of the target.
  assert record['exchanged'] == {'once': {}, 'round': {}}
  assert record['target_bytes'] == record['target_chip_bytes']
  assert 0 < record['target_call_bytes'] == record['draft_call_bytes']
  report = (tmp_path / 'out/report.md').read_text()
  assert '| no encoder | v4:2x2x1 | 1 x 1 | yes |' in report
  assert 'no encoder' in shown and 'yes' in shown

  def refuse(*args):
    raise AssertionError('compiled again')

  monkeypatch.setattr(compiler, 'record_of', refuse)
  assert check_slices(config)[0] == results
  with pytest.raises(ValueError, match='other settings: gamma was'):
    check_slices(slices(tmp_path, pairs=pairs, gamma=2))


def test_weights_that_cannot_fit_are_not_compiled(
  tmp_path, slice_on_cpu, monkeypatch
):
  monkeypatch.setattr(compiler, 'record_of', None)
  results, _ = check_slices(slices(tmp_path, usable_gib=1e-6))
  (record,) = results['rows']
  assert not record['fits'] and 'of parameters' in record['program']['refused']
  report = (tmp_path / 'out/report.md').read_text()
  assert '| NO | - |' in report and 'does not fit on v4:2x2x1' in report
  with pytest.raises(
    ValueError, match='SlicesConfig.gamma must be positive: 0'
  ):
    slices(tmp_path, gamma=0)
  with pytest.raises(
    ValueError, match=r"slices\['v4:2x2x1'\] is .* one device"
  ):
    slices(tmp_path, slices={'v4:2x2x1': Placement()})


@pytest.mark.slow
def test_the_slices_are_those_of_v4_and_lamda_is_never_made(tmp_path):
  flags = ['--gin_file=gin/runs/tpu_slices.gin', f'--gin.OUTPUT_DIR={tmp_path}']
  gin_flags.load(gin_flags.parse_flags(flags))
  config = gin_flags.build(tpu_slices.SlicesConfig)
  assert set(config.slices) == {'v4:2x2x1', 'v4:2x2x4'}
  models = [network for pair in config.pairs.values() for network in pair]
  assert {model.config.dtype for model in models} == {'bfloat16'}
  assert {placement.dtype for placement in config.slices.values()} == {
    'bfloat16'
  }
  lamda, _ = config.pairs['LaMDA 137B with 100M']
  # 16 chips hold it where 4 do not.
  shapes = memory.param_shapes(lamda, Placement('bfloat16', 'in_out'))
  held = memory.tree_bytes(shapes)
  assert held / 16 < config.usable_gib * GIB < held / 4
