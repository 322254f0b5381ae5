"""Measurements of beam search: the grid, a level's time, a GPU's kernels."""

import dataclasses
import importlib.util
import io
import json

import jax
import pytest
import rich.console

import small_vocabulary
from compiled_pair import CONFIG, DRAFT, TARGET
from specdec_jax.engine.engine import Engine
from specdec_jax.measure import beam_grid, report
from specdec_jax.measure.beam_grid import Setting
from specdec_jax.measure.benchmark import BenchmarkConfig
from specdec_jax.measure.compiled import beam_check
from specdec_jax.models import t5
from specdec_jax.models.model import Model


def quiet():
  return rich.console.Console(file=io.StringIO(), width=200)


@pytest.fixture(scope='module')
def measured(tokenizer, tmp_path_factory):
  """The record of a small grid, and its path."""
  folder = tmp_path_factory.mktemp('grid')
  (folder / 'lines.txt').write_text('the red dog\na cat sleeps\nx\n')
  network = small_vocabulary.network(1)
  model = Model(network, network.init(jax.random.key(0)))

  def engine():
    return Engine(
      model, model, tokenizer=tokenizer, max_input_len=16, max_decode_len=8
    )

  config = beam_grid.BeamGridConfig(
    engine,
    str(folder / 'lines.txt'),
    widths=(2,),
    gammas=(1, 3),
    draft_factors=(2,),
    num_lines=2,
    repeats=1,
    output_file=str(folder / 'beams.json'),
  )
  return beam_grid.beam_grid(config, quiet()), folder / 'beams.json'


@pytest.mark.slow
def test_a_drafter_that_reads_its_targets_encoder(tokenizer, tmp_path):
  (tmp_path / 'lines.txt').write_text('the red dog\n')
  network = small_vocabulary.network(1)
  alone = t5.T5(dataclasses.replace(network.config, num_encoder_layers=0))
  models = [Model(one, one.init(jax.random.key(0))) for one in (network, alone)]

  def engine():
    return Engine(
      *models, tokenizer=tokenizer, max_input_len=16, max_decode_len=4
    )

  config = beam_grid.BeamGridConfig(
    engine,
    str(tmp_path / 'lines.txt'),
    widths=(2,),
    gammas=(1,),
    draft_factors=(1,),
    repeats=1,
  )
  record = beam_grid.beam_grid(config, quiet())
  assert record['points'][-1]['predicted'] > 0


def test_each_setting_beside_the_plain_search(measured):
  record, path = measured
  greedy, plain, one, three = record['points']
  assert (greedy['width'], plain['gamma'], three['draft_beams']) == (0, 0, 4)
  assert plain['levels'] == 1 and plain['speed_up'] == 1
  # The drafter is the target: its beams hold all levels but the last ones.
  assert 1 < one['levels'] <= 2 and one['levels'] < three['levels'] <= 4
  for point in (one, three):
    assert point['differences'] == 0 and point['predicted'] > 0
    assert point['least'] <= point['speed_up'] <= point['most']
  assert set(record['choices']['2']) == {'measured', 'predicted'}
  assert 'plain search: 0 of 4.' in record['notes'][-1]
  assert beam_grid.levels_a_call(str(path)) == {
    Setting(2, 1, 4): one['levels'],
    Setting(2, 3, 4): three['levels'],
  }


def test_the_prediction_counts_each_call():
  costs = {('target', 4): 2.0, ('target', 20): 3.0}
  costs |= {('draft', 8): 0.5}
  assert beam_grid.predicted_speed_up(Setting(4, 2, 8), 2.0, costs) == 1.0
  costs['draft', 8] = 1.5
  assert beam_grid.predicted_speed_up(Setting(4, 2, 8), 3.0, costs) == 1.0


def test_levels_need_their_own_record(tmp_path):
  path = tmp_path / 'table.json'
  path.write_text(json.dumps({'kind': 'table', 'rows': []}))
  with pytest.raises(ValueError, match=r'expected one that .*beams_demo\.gin'):
    beam_grid.levels_a_call(str(path))


@pytest.mark.slow
def test_a_level_is_timed_beside_a_token():
  small = dataclasses.replace(CONFIG, dtype='float32')
  config = BenchmarkConfig(
    t5.T5(small),
    decode_lens=(32,),
    call_sizes=(1,),
    beam_widths=(2,),
    repeats=1,
  )
  record = report.show(config, quiet())
  (setting,) = record['settings']
  times = {n: one['median'] for n, one in setting['times_ms'].items()}
  # Per level, as the plain loop's is per token.
  assert 0.2 < times['beams_2_loop'] / times['plain_loop'] < 50
  shown = report.summary(record, setting).texts
  assert any('beams 2 loop, a level' in row[0] for row in shown)


def config(measured, tmp_path, settings, **options):
  return beam_check.BeamCheckConfig(
    TARGET,
    DRAFT,
    settings,
    str(measured[1]),
    str(tmp_path / 'out'),
    width=2,
    input_len=32,
    decode_len=40,
    **options,
  )


def test_a_device_without_kernels_is_refused(measured, tmp_path):
  with pytest.raises(ValueError, match=r"'tpu_v4' is no GPU.*Take 'h200'"):
    config(measured, tmp_path, [(1, 4)], device='tpu_v4')


@pytest.mark.skipif(
  importlib.util.find_spec('jax_cuda12_plugin') is None,
  reason="needs CUDA's compiler: pip install 'specdec_jax[cuda]'",
)
def test_searches_compile_for_a_gpu(measured, tmp_path):
  # The levels of the second search are not known.
  asked = config(measured, tmp_path, [(1, 4), (1, 2)])
  results = beam_check.check(asked, quiet())
  _, plain, drafted, _ = results['rows']
  counts = [row['cost']['kernels'] for row in results['rows']]
  assert counts[0] < counts[1] < counts[2] < 3 * counts[1]
  factor = plain['cost']['ms'] / drafted['cost']['ms']
  factor *= measured[0]['points'][2]['levels']
  *_, known, unknown = (tmp_path / 'out/report.md').read_text().splitlines()
  assert known.endswith(f' {factor:.2f} |') and unknown.endswith('| - | - |')
