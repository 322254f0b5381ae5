"""Tables, figures, the suite of Table 2: force named, nothing left out."""

import dataclasses
import itertools
import sys

import pytest
import rich.console

import toy_models
from small_vocabulary import network
from specdec_jax import files
from specdec_jax.checks import memory
from specdec_jax.cli import gin_flags
from specdec_jax.measure import acceptance, record
from specdec_jax.measure import table as measured_tables
from specdec_jax.measure.calls import BenchmarkConfig
from specdec_jax.paper import plots, printed, reproduce
from specdec_jax.paper.reproduce import ReproduceConfig
from specdec_jax.partitioning import Placement

FORCED = 'forced alpha=0.75, random weights'
RESULTS = gin_flags.ROOT / 'benchmarks' / 'results'


def quiet():
  return rich.console.Console(quiet=True)


# --- Figures -------------------------------------------------------------


TIMES = {'encoder': 3.0, 'draft_encoder': 1.0, 'plain_loop': 4.0}
TIMES |= {'call_1': 4.0, 'call_4': 5.0, 'call_8': 6.0}
OF_GAMMA = {'gamma': 3, 'cost_ratio': 0.125, 'acceptance_rate': 0.75}
OF_GAMMA |= {'speed_up': 3.0, 'expected_speed_up': 2.5}
COSTS = {
  'times_ms': {name: {'median': ms} for name, ms in TIMES.items()},
  'call_cost': {'1': 1.0, '4': 1.25, '8': 1.5},
  'gammas': [OF_GAMMA],
}
RUNS = {7: [8, 1, 3], 3: [4, 4, 4], 0: [1] * 12}


def test_figures_are_the_same_whatever_the_user_set(monkeypatch, tmp_path):
  matplotlib = pytest.importorskip('matplotlib', reason='needs [plots]')
  figures = []

  def save(path, draw, **size):
    measured_tables.save_plot(
      path, lambda figure: figures.append(figure) or draw(figure)
    )

  monkeypatch.setattr(plots, 'save_plot', save)
  forced = COSTS | {'settings': {'forced_acceptance': 0.75}}
  first, second = tmp_path / 'a.png', tmp_path / 'b.png'
  for draw in (
    plots.plot_figure2,
    plots.plot_figure3,
    lambda path: plots.plot_figure4(path, [forced]),
    lambda path: plots.plot_figure5(path, RUNS, COSTS),
  ):
    draw(first)
    with matplotlib.rc_context({'lines.linewidth': 9.0, 'font.size': 30.0}):
      draw(second)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(b'\x89PNG\r\n\x1a\n')
  # Figure 4's point is marked as one of forced acceptance.
  left, right = figures[4].axes
  assert FORCED in left.get_title() and 'forced' not in right.get_title()
  point = left.lines[-1]
  assert (point.get_xdata(), point.get_ydata()) == ([0.75], [3.0])
  assert point.get_markerfacecolor() == 'white'
  # Figure 5 has a bar for each call.
  (axes,) = figures[6].axes
  bars = sum(len(bars.get_paths()) for bars in axes.collections)
  assert bars == sum(len(plots.calls(*run, COSTS)) for run in RUNS.items())
  texts = [text.get_text() for text in axes.texts]
  assert '12 tokens\n51 ms' in texts and '12 tokens\n23.5 ms' in texts


def test_a_call_begins_where_the_one_before_ends():
  row = plots.calls(3, RUNS[3], COSTS)
  a_round = [plots.DRAFT] * 3 + [plots.TARGET]
  encoders = [plots.TARGET_ENCODER, plots.DRAFT_ENCODER]
  assert [call.kind for call in row] == encoders + a_round * 3
  assert all(a.end_ms == b.begin_ms for a, b in itertools.pairwise(row))
  assert row[-1].end_ms == 3 + 1 + 3 * (3 * 0.5 + 5)


# --- Runs ----------------------------------------------------------------


def test_closed_forms_need_nothing_measured(tmp_path):
  config = ReproduceConfig(('table1', 'table5'), str(tmp_path))
  written = reproduce.reproduce(config, quiet())
  assert written[-1] == tmp_path / 'report.md'
  report = written[-1].read_text()
  assert 'a closed form' in report and 'checkpoints were not given' in report


def test_bad_settings():
  figure = {'items': ['figure5'], 'engine': lambda: None, 'text': 'a'}
  for options, words in (
    ({'items': ('table9',)}, 'items.*table9'),
    ({'items': ('table2',)}, 'suite.*table2'),
    ({'items': (), 'drafts': {'t5_tiny': network(1)}}, 'drafts.*t5_tiny'),
    ({'items': ('figure1',), 'engine': lambda: None}, 'text.*figure1'),
    (figure | {'items': ['figure1'], 'measure': False}, 'measure'),
  ):
    with pytest.raises(ValueError, match=words):
      ReproduceConfig(output_dir='x', **options)


def test_what_is_missing_is_said_before_anything_is_made(monkeypatch, tmp_path):
  def make():
    return acceptance.MeasureAlphaConfig({'x': lambda: None}, 'x')

  out, records = str(tmp_path / 'out'), str(tmp_path / 'records')
  for config, words in (
    (ReproduceConfig(['figure2'], out), 'matplotlib.*plots'),
    (
      ReproduceConfig(['table3'], out, records, measure=False),
      '--records-dir.*records',
    ),
    (ReproduceConfig(['table3'], out, alphas=[make] * 2), 'different names'),
  ):
    with monkeypatch.context() as patch:
      patch.setitem(sys.modules, 'matplotlib', None)
      with pytest.raises(ValueError, match=words):
        reproduce.reproduce(config, quiet())
  assert not list(tmp_path.glob('out/*'))


DEMO = [
  *('table2_cpu', '--gin.TARGET=%DEMO_TARGET', '--gin.DRAFT=%DEMO_DRAFT'),
  *('--repeats=15', "--name=the demo pair's sizes, float32, random weights"),
]
# Flags, folder of the report, folder of its records.
SHIPPED = [
  (DEMO, 'table2_demo', 'table2_demo/records'),
  (['table2_cpu'], 'table2_base', 'table2_base/records'),
  (['table3_stand_in'], 'table3', 'table3'),
  (['table3_stand_in', '--items=table5'], 'table5', 'table5'),
]


@pytest.mark.parametrize(('flags', 'report', 'records'), SHIPPED)
def test_shipped_records_are_shown_as_they_are(
  flags, report, records, monkeypatch, tmp_path
):
  """Nothing is measured, no model or data is read; the report is ours."""
  pytest.importorskip('matplotlib', reason='needs the extra [plots]')

  def measures(*_):
    raise AssertionError('measured')

  monkeypatch.setattr(reproduce, 'benchmark', measures)
  monkeypatch.setattr(reproduce, 'measure_alpha', measures)
  monkeypatch.chdir(gin_flags.ROOT)
  name, *flags = flags
  flags += [f'--output-dir={tmp_path}', f'--records-dir={RESULTS / records}']
  gin_flags.load([f'--gin_file=gin/runs/{name}.gin', '--no-measure', *flags])
  reproduce.reproduce(gin_flags.build(ReproduceConfig), quiet())
  ours = (RESULTS / report / 'report.md').read_text()
  assert (tmp_path / 'report.md').read_text() == ours
  assert ours.count('not measured') <= 2
  # The titles of Tables 2 and 4 say that all was forced.
  titles = 2 if report.startswith('table2') else 0
  assert ours.count(' (forced alpha=0.53 to 0.75, random') == titles


# --- The suite of Table 2 --------------------------------------------------

ROW = printed.Table2Row('ende', 't5_small', 0, 3, 0.75, 0.02, 2.6, 3.4)
SUITE = BenchmarkConfig(network(1), network(1), name='tiny', decode_len=32)


def suite(folder, **changes):
  return ReproduceConfig(
    ('table2', 'table4', 'figure4'),
    str(folder),
    records_dir=str(folder / 'records'),
    suite=dataclasses.replace(SUITE, **changes),
    drafts={'t5_small': network(1)},
  )


def test_a_row_is_measured_once(tmp_path, monkeypatch):
  pytest.importorskip('matplotlib', reason='needs the extra [plots]')
  measured = []

  def benchmark(config, console):
    assert config.target.params is not None  # drawn once for all rows
    measured.append(config.forced_acceptance)
    made = record.new('benchmark', COSTS | {'settings': config.settings})
    files.write_json(config.output_file, made)
    return made

  monkeypatch.setattr(reproduce, 'benchmark', benchmark)
  monkeypatch.setattr(printed, 'TABLE2', (ROW,))
  *_, report = reproduce.reproduce(suite(tmp_path), quiet())
  assert measured == [0.75] and f'({FORCED})' in report.read_text()
  # A suite that goes on does not measure it again.
  found = reproduce.suite_records(suite(tmp_path), quiet())
  assert list(found) == ['ende-t5_small-T0'] and len(measured) == 1
  for options, message in (
    ({'decode_len': 48}, 'decode_len was 32, is 48'),
    ({'target': network(2)}, 'target was'),
    ({'placement': Placement(dtype='bfloat16')}, 'placement was'),
    ({}, r'gammas was \[3\], is \[2\]'),
  ):
    if not options:
      monkeypatch.setattr(printed, 'TABLE2', (ROW._replace(gamma=2),))
    with pytest.raises(ValueError, match=message):
      reproduce.suite_records(suite(tmp_path, **options), quiet())


def test_one_generation_is_shown(tokenizer, tmp_path, monkeypatch):
  """Figures 1 and 5 of one engine, with the costs of its pair."""
  pytest.importorskip('matplotlib', reason='needs the extra [plots]')
  monkeypatch.setattr(reproduce, 'benchmark', lambda *_: COSTS)
  limits = {'max_input_len': 16, 'max_decode_len': 8}
  engine = toy_models.chain_engine(tokenizer, **limits)
  shown = {'engine': lambda: engine, 'costs': SUITE, 'text': '<b>the dog'}
  config = ReproduceConfig(['figure1', 'figure5'], str(tmp_path), **shown)
  *figures, report = reproduce.reproduce(config, quiet())
  assert [path.name for path in figures] == ['figure1.html', 'figure5.png']
  assert '&lt;b&gt;the dog' in figures[0].read_text('utf-8')
  text = report.read_text('utf-8')
  assert '\n[Figure 1: one generation, as a page](figure1.html)' in text
  assert '![Figure 5: calls over time](figure5.png)' in text


def test_a_pair_that_does_not_fit_is_said_once(tmp_path, monkeypatch):
  monkeypatch.setattr(memory, 'device_bytes', lambda: 10_000)
  config = dataclasses.replace(suite(tmp_path), items=('table4',))
  reproduce.reproduce(config, quiet())
  report = (tmp_path / 'report.md').read_text()
  # The small drafter's rows, all of them for one reason.
  assert report.count('memory are needed') == 1
  assert '4 of 4 rows not measured: 1 rows of 64 slots' in report
  assert '3.2' in report  # the paper's EXP of the first row
