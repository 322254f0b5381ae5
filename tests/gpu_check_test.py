"""Compiling for a GPU that is not there, and counting what is launched."""

import importlib.util
import json

import jax
import pytest
import rich.console

from compiled_pair import DRAFT, TARGET
from specdec_jax.cli import gin_flags
from specdec_jax.measure.compiled import devices, gpu, kernels, pair_check
from specdec_jax.paper import printed

ROW = printed.Table2Row('ende', 't5_small', 0, 3, 0.75, 3.4)
SAMPLED = ROW._replace(temperature=1)
NO_CUDA = importlib.util.find_spec('jax_cuda12_plugin') is None
needs_cuda = pytest.mark.skipif(
  NO_CUDA, reason="needs CUDA's compiler: pip install 'specdec_jax[cuda]'"
)
compiles_kernels = pytest.mark.skipif(
  NO_CUDA or jax.__version_info__ >= (0, 11),
  reason="needs CUDA's compiler, and JAX 0.10: newer ones want a GPU",
)


def settings(tmp_path, **options):
  return pair_check.PairCheckConfig(
    **{
      'target': TARGET,
      'drafts': {'t5_small': DRAFT},
      'input_lens': {'ende': 32},
      'decode_lens': {'ende': 200},
      'output_dir': str(tmp_path / 'out'),
      **options,
    }
  )


def check(config, row=ROW):
  console = rich.console.Console(record=True, width=200)
  results = pair_check.check(config, [row], console)
  return results, console.export_text()


_PROGRAM = """\
HloModule jit_run, is_scheduled=true

%fused_update (c: bf16[1,2,64,32], k: bf16[1,2,64,1]) -> bf16[1,2,64,32] {
  %c = bf16[1,2,64,32]{3,2,1,0} parameter(0)
  %k = bf16[1,2,64,1]{3,2,1,0} parameter(1)
  %i = s32[] constant(3)
  ROOT %dus = bf16[1,2,64,32]{3,2,1,0} dynamic-update-slice(%c, %k, %i, %i, \
%i, %i)
}

%fused_relay (w: bf16[512,256]) -> bf16[256,512] {
  %w = bf16[512,256]{1,0} parameter(0)
  ROOT %t = bf16[256,512]{1,0} transpose(%w), dimensions={1,0}
}

%fused_product (w.1: bf16[512,256], x: bf16[512,512]) -> bf16[512,256] {
  %w.1 = bf16[512,256]{1,0} parameter(0)
  %x = bf16[512,512]{1,0} parameter(1)
  ROOT %dot = bf16[512,256]{1,0} dot(%x, %w.1), lhs_contracting_dims={1}
}

%fewer (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %copy.1 = f32[8]{0} copy(%p)
}

%more (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  %copy.2 = f32[8]{0} copy(%p.1)
  ROOT %copy.3 = f32[8]{0} copy(%copy.2)
}

%step (s: (s32[], bf16[512,256])) -> (s32[], bf16[512,256]) {
  %s = (s32[], bf16[512,256]{1,0}) parameter(0)
  %sw = bf16[512,256]{1,0} get-tuple-element(%s), index=1
  %relaid = bf16[256,512]{1,0} fusion(%sw), kind=kLoop, calls=%fused_relay, \
metadata={op_name="jit(run)/while/body/while/body/decoder/layers_0/mlp"}
  %next = s32[] add(%a, %b)
  ROOT %st = (s32[], bf16[512,256]{1,0}) tuple(%next, %sw)
}

%going (s.1: (s32[], bf16[512,256])) -> pred[] {
  %s.1 = (s32[], bf16[512,256]{1,0}) parameter(0)
  ROOT %lt = pred[] compare(%s.1, %b), direction=LT
}

%round (r: (bf16[1,2,64,32], bf16[512,256])) -> (bf16[1,2,64,32], f32[8]) {
  %r = (bf16[1,2,64,32]{3,2,1,0}, bf16[512,256]{1,0}) parameter(0)
  %cache = bf16[1,2,64,32]{3,2,1,0} get-tuple-element(%r), index=0
  %rw = bf16[512,256]{1,0} get-tuple-element(%r), index=1
  %written = bf16[1,2,64,32]{3,2,1,0} fusion(%cache, %k.1), kind=kLoop, \
calls=%fused_update
  %whole = bf16[1,2,64,32]{2,3,1,0} copy(%cache)
  %made = bf16[512,256]{1,0} fusion(%rw, %x.1), kind=kCustom, \
calls=%fused_product, metadata={op_name="jit(run)/while/body/layers_1/out"}
  %unnamed = f32[8]{0} copy(%made)
  %inner = (s32[], bf16[512,256]{1,0}) while(%t), condition=%going, \
body=%step, backend_config={"known_trip_count":{"n":"6"}}
  %pick = f32[8]{0} conditional(%index, %a.1, %a.1), \
branch_computations={%fewer, %more}
  ROOT %rt = (bf16[1,2,64,32]{3,2,1,0}, f32[8]{0}) tuple(%written, %pick)
}

%running (r.1: (bf16[1,2,64,32], bf16[512,256])) -> pred[] {
  %r.1 = (bf16[1,2,64,32]{3,2,1,0}, bf16[512,256]{1,0}) parameter(0)
  ROOT %any = pred[] reduce(%r.1, %false), to_apply=%or
}

ENTRY %main (w.0: bf16[512,256]) -> f32[8] {
  %w.0 = bf16[512,256]{1,0} parameter(0)
  %wb = bf16[1,512,256]{2,1,0} bitcast(%w.0)
  %once = bf16[256,512]{1,0} fusion(%wb), kind=kLoop, calls=%fused_relay
  %start = ((bf16[8]{0}), bf16[8]{0}, s32[]) async-start(%z), calls=%fewer
  %done = bf16[8]{0} async-done(%start)
  ROOT %loop = (bf16[1,2,64,32]{3,2,1,0}, f32[8]{0}) while(%t.1), \
condition=%running, body=%round
}
"""
_WEIGHT, _CACHE = 2 * 512 * 256, 2 * 2 * 64 * 32
_SHAPES = [(512, 256)], [(1, 2, 64, 32)]


def test_a_program_is_read_for_kernels():
  parts = kernels.by_loop(kernels.find(_PROGRAM, *_SHAPES))
  assert set(parts) == {'once', 'round', 'step'}
  # The relaid weight and the asynchronous one; the loops are none.
  assert parts['once']['kernels'] == 2
  assert parts['once']['rewritten_bytes'] == _WEIGHT
  # In the loop of six nobody asks for the condition; bitcasts are none.
  assert parts['step']['kernels'] == 2
  assert parts['step']['layer_kernels'] == 2
  assert parts['step']['rewritten_bytes'] == _WEIGHT
  a_round = parts['round']
  # Four, and the rounds' own condition; of a conditional either branch.
  assert a_round['kernels'] == 4 + 1 + 6 * parts['step']['kernels']
  assert (a_round['branch_kernels'], a_round['conditionals']) == (1, 1)
  assert a_round['most_branch_kernels'] == 2
  # What is in no scope belongs to what is before it.
  assert a_round['layer_kernels'] == 2 + 1 + 6 * 2
  # A product may be as large as its weight; a cache that is copied is not
  # updated.
  assert a_round['rewritten_bytes'] == 6 * _WEIGHT
  assert a_round['copied_bytes'] == _CACHE
  assert a_round['updated_bytes'] == 2 * 2 * 64


@pytest.mark.parametrize(
  ('line', 'instead', 'name', 'difference'),
  [
    # One more kernel in each of six steps; a bitcast is none.
    ('add(%a, %b)', 'add(%a, %b)\n  %x = s32[] negate(%a)', 'kernels', 6),
    ('add(%a, %b)', 'add(%a, %b)\n  %x = s32[] bitcast(%a)', 'kernels', 0),
    ('copy(%cache)', 'bitcast(%cache)', 'copied_bytes', -_CACHE),
    ('"n":"6"', '"n":"5"', 'rewritten_bytes', -_WEIGHT),
    # A hand-written kernel says what it changes of an array.
    (
      'add(%a, %b)',
      'add(%a, %b)\n  %y = f32[8]{0} custom-call(%a), backend_config='
      '{m = "{\\22updated_bytes\\22: \\22123\\22}"}',
      'updated_bytes',
      6 * 123,
    ),
    # Without its update the fusion writes a whole cache.
    ('dynamic-update-slice(', 'select(', 'copied_bytes', _CACHE),
  ],
)
def test_another_program_has_other_counts(line, instead, name, difference):
  assert line in _PROGRAM
  before, after = (
    kernels.by_loop(kernels.find(text, *_SHAPES))['round'][name]
    for text in (_PROGRAM, _PROGRAM.replace(line, instead))
  )
  assert after - before == difference


@pytest.fixture
def _nothing_is_kept():
  """A program for a device that is not there cannot be read from a cache."""
  name = 'jax_persistent_cache_min_compile_time_secs'
  before = getattr(jax.config, name)
  jax.config.update(name, 1e9)
  yield
  jax.config.update(name, before)


@needs_cuda
@pytest.mark.usefixtures('_nothing_is_kept')
def test_rows_are_written_by_one_kernel_a_layer_and_no_cache_is_copied(
  tmp_path,
):
  results, _ = check(settings(tmp_path, batch=4))
  (record,) = results['rows']
  costs, programs = record['costs'], record['programs']
  for name, most in BUDGETS_OF_FOUR.items():
    part, count = name.split()
    assert costs[part][count] <= most, name
  for name in ('plain_run', 'speculative_run'):
    assert programs[name]['launched']['once']['copied_bytes'] == 0


@needs_cuda
@pytest.mark.usefixtures('_nothing_is_kept')
def test_a_small_pair_compiles_for_a_gpu(tmp_path):
  results, shown = check(settings(tmp_path))
  (record,) = results['rows']
  assert results['settings']['compiled_for'] == 'NVIDIA H200'
  assert record['memory']['fits'] and record['state_keeps_its_shape']
  costs = record['costs']
  token, step, a_round = (costs[name] for name in ('token', 'step', 'round'))
  _within(BUDGETS, costs)
  # gamma 3: two steps behind the call over two tokens.
  assert a_round['kernels'] > 2 * step['kernels'] + token['kernels'] / 2
  micros = 2.5 * (token['kernels'] + token['branch_kernels'])
  micros += 10 * token['conditionals']
  assert token['ms'] == pytest.approx(micros / 1e3 + token['bytes_ms'])
  factor = record['walltime_factor']['plain']
  expected = sum(0.75**i for i in range(4)) * token['ms'] / a_round['ms']
  assert factor == pytest.approx(expected)
  report = (tmp_path / 'out/report.md').read_text()
  assert '## Kernels' in report and '| ende | t5_small | 0 | 3 |' in report
  assert f'{factor:.2f}' in shown
  assert json.loads((tmp_path / 'out/results.json').read_text()) == results


def _within(budgets, costs):
  for name, most in budgets.items():
    part, count = name.split()
    assert costs[part][count] <= most, name


@needs_cuda
@pytest.mark.usefixtures('_nothing_is_kept')
def test_sampling_does_not_wait_for_the_host(tmp_path):
  results, _ = check(settings(tmp_path), SAMPLED)
  _within(SAMPLED_BUDGETS, results['rows'][0]['costs'])


def test_errors_name_what_is_known_or_missing(tmp_path, monkeypatch):
  with pytest.raises(ValueError, match=r"'h100', expected .*'h200', 'tpu_v4'"):
    settings(tmp_path, device='h100')
  with pytest.raises(ValueError, match='kernel_us must not be negative: -1'):
    settings(tmp_path, kernel_us=-1.0)
  monkeypatch.setattr(jax, '__version_info__', (0, 12))
  with pytest.raises(ValueError, match="kernels must be 'off'.*'forced'"):
    check(settings(tmp_path, kernels='forced'))
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(
    ValueError, match=r"install 'specdec_jax\[cuda\]'"
  ) as told:
    check(settings(tmp_path))
  assert '\n' not in str(told.value)


def test_a_gpu_is_described_by_its_numbers():
  for device in devices.KNOWN.values():
    if isinstance(device, devices.Gpu):
      text = gpu._numbers(device)
      assert f'core_count: {device.cores}' in text
      assert text.count('{') == text.count('}') == 4


def test_the_run_file_has_every_pair_of_table_2(tmp_path):
  path = 'gin/runs/compile_check.gin'
  for name, described in devices.KNOWN.items():
    flags = [f'--gin_file={path}', f'--gin.OUTPUT_DIR={tmp_path}']
    gin_flags.load(gin_flags.parse_flags([*flags, f"--gin.DEVICE='{name}'"]))
    config = gin_flags.build(pair_check.PairCheckConfig)
    assert config.device == name
    assert config.gb_per_s == described.bytes_per_s / 1e9
    assert {row.draft for row in printed.TABLE2} == set(config.drafts)


# Two layers of the target and one of the drafter. Counted: 35, 15 and 119.
BUDGETS = {
  'token kernels': 37,
  'token conditionals': 0,
  'token copied_bytes': 0,
  'step kernels': 16,
  'step conditionals': 0,
  'step copied_bytes': 0,
  'step rewritten_bytes': 0,
  'round kernels': 125,
  'round conditionals': 0,
  'round rewritten_bytes': 0,
}
# The same at temperature 1. Counted: 42, 24 and 162.
SAMPLED_BUDGETS = BUDGETS | {
  'token kernels': 44,
  'step kernels': 26,
  'round kernels': 170,
}

# Of four rows. Counted: 41, 21 and 130.
BUDGETS_OF_FOUR = {
  'token kernels': 45,
  'token conditionals': 0,
  'token copied_bytes': 0,
  'step kernels': 23,
  'step conditionals': 0,
  'step copied_bytes': 0,
  'round kernels': 145,
  'round conditionals': 0,
  'round copied_bytes': 0,
  'round rewritten_bytes': 0,
}
