"""Tables, figures, the suite of Table 2: force named, nothing left out."""

import dataclasses
import itertools
import sys

import jax
import numpy as np
import pytest
import rich.console

from small_vocabulary import network
from specdec_jax import analysis
from specdec_jax.checks.memory import DoesNotFitError
from specdec_jax.cli import gin_flags
from specdec_jax.engine.engine import Engine
from specdec_jax.measure import acceptance, calls
from specdec_jax.measure import table as measured_tables
from specdec_jax.measure.calls import BenchmarkConfig
from specdec_jax.models.model import Model
from specdec_jax.paper import plots, printed, reproduce, tables
from specdec_jax.paper.reproduce import ReproduceConfig
from specdec_jax.partitioning import Placement

FORCED = 'forced alpha=0.75, random weights'
RESULTS = gin_flags.ROOT / 'benchmarks' / 'results'


def quiet():
  return rich.console.Console(quiet=True)


# --- Tables and reports --------------------------------------------------


def test_titles_name_what_was_forced():
  assert tables.titled('T', [None, None]) == 'T'
  assert tables.titled('T', [0.75]) == f'T ({FORCED})'
  assert tables.titled('T', [None, 0.75]) == f'T ({FORCED}: 1 of 2)'
  both = tables.titled('T', [0.5, 0.75])
  assert both == 'T (forced alpha=0.5 to 0.75, random weights)'


def rate(**changes):
  """A row of a record of acceptance rates."""
  return {
    'target': 'a small target',
    'draft': 'two-grams',
    'temperature': 1.0,
    'lenience': 1.0,
    'alpha': 0.3,
    'standard_error': 0.01,
    'num_tokens': 5000,
    'paper': ['t5_xxl_ende', 'bigram'],
  } | changes


def test_tables_3_and_5_list_ours_and_the_papers_other_rows():
  """A row that stands in for one of the paper has its value beside it."""
  silent = rate(draft='silent', alpha=None, paper=None)
  shown = tables.table3([{'rows': [rate(), silent, rate(lenience=0.1)]}])
  assert len(shown.rows) == len(printed.TABLE3) - 1 + 2
  first, second, *others = shown.rows
  assert (first.keys['draft'], first.paper, first.measured) == (
    *('two-grams', 0.19),
    0.3,
  )
  assert first.details['stands in for'] == 't5_xxl_ende, bigram'
  assert second.measured is None and 'nothing' in second.not_measured
  others = [tuple(row.keys.values()) for row in others]
  assert ('t5_xxl_ende', 'bigram', 0) in others
  assert ('t5_xxl_ende', 'bigram', 1) not in others
  # Without a lossless rate there is nothing to be lenient about.
  assert len(tables.table5([{'rows': [silent]}]).rows) == len(printed.TABLE5)
  shown = tables.table5([{'rows': [rate(lenience=0.1)]}])
  assert shown.rows[0].paper == 0.32
  assert len(shown.rows) == len(printed.TABLE5) and 'lossy' in shown.caption


# --- Figures -------------------------------------------------------------


def test_curves_are_the_closed_forms():
  for curve in plots.gamma_curves(analysis.walltime_factor, 0.1):
    gamma, rates = int(curve.parameter), curve.rates[:-1]
    direct = (1 - rates ** (gamma + 1)) / (1 - rates) / (1 + 0.1 * gamma)
    np.testing.assert_allclose(curve.values[:-1], direct, rtol=1e-4)
  for curve in plots.optimal_gamma_curves():
    assert 1 < curve.values.max() < plots.MAX_GAMMA


TIMES = plots.CallTimes(3.0, 1.0, 0.5, {1: 4.0, 4: 5.0, 8: 6.0})
RUNS = (
  plots.Run(7, [8, 1, 3]),
  plots.Run(3, [4, 4, 4]),
  plots.Run(0, [1] * 12),
)
POINTS = [plots.Point(0.75, 3.0, 7, 0.1, forced_acceptance=0.75)]
DRAW = {
  'figure2': plots.plot_figure2,
  'figure3': plots.plot_figure3,
  'figure4': lambda path: plots.plot_figure4(path, POINTS),
  'figure5': lambda path: plots.plot_figure5(path, RUNS, TIMES),
}


@pytest.fixture
def drawn(monkeypatch):
  """Draws a figure of `DRAW` into a PNG; returns matplotlib's object."""
  reason = "matplotlib, the extra '[plots]', is not installed"
  pytest.importorskip('matplotlib', reason=reason)
  figures = []

  def save(path, draw, **size):
    def keep(figure):
      draw(figure)
      figures.append(figure)

    measured_tables.save_plot(path, keep, **size)

  monkeypatch.setattr(plots, 'save_plot', save)

  def draw(name, path):
    DRAW[name](path)
    return figures[-1]

  return draw


@pytest.mark.parametrize('name', DRAW)
def test_every_figure_is_a_picture(drawn, tmp_path, name):
  drawn(name, tmp_path / 'x.png')
  data = (tmp_path / 'x.png').read_bytes()
  assert data.startswith(b'\x89PNG\r\n\x1a\n') and len(data) > 5000


def test_figure_4_is_the_same_whatever_the_user_set(drawn, tmp_path):
  import matplotlib

  left, right = drawn('figure4', tmp_path / 'a.png').axes
  with matplotlib.rc_context({'lines.linewidth': 9.0, 'font.size': 30.0}):
    drawn('figure4', tmp_path / 'b.png')
    assert matplotlib.rcParams['font.size'] == 30.0
  first, second = (tmp_path / f'{name}.png' for name in 'ab')
  assert first.read_bytes() == second.read_bytes()
  # The point is marked as one of forced acceptance.
  assert FORCED in left.get_title() and 'forced' not in right.get_title()
  point = left.lines[-1]
  assert (point.get_xdata(), point.get_ydata()) == ([0.75], [3.0])
  assert point.get_markerfacecolor() == 'white'


def test_figure_5_draws_every_call_after_the_one_before(drawn, tmp_path):
  row = plots.calls(RUNS[1], TIMES)
  a_round = [plots.DRAFT] * 3 + [plots.TARGET]
  encoders = [plots.TARGET_ENCODER, plots.DRAFT_ENCODER]
  assert [call.kind for call in row] == encoders + a_round * 3
  assert all(a.end_ms == b.begin_ms for a, b in itertools.pairwise(row))
  assert row[-1].end_ms == 3 + 1 + 3 * (3 * 0.5 + 5)
  plain = plots.calls(RUNS[2], TIMES)
  assert plain[-1].end_ms == 3 + 12 * 4 and len(plain) == 13
  axes = drawn('figure5', tmp_path / 'x.png').axes[0]
  bars = sum(len(bars.get_paths()) for bars in axes.collections)
  assert bars == sum(len(plots.calls(run, TIMES)) for run in RUNS)
  texts = [text.get_text() for text in axes.texts]
  assert '12 tokens\n51 ms' in texts and '12 tokens\n23.5 ms' in texts


# --- Runs ----------------------------------------------------------------


def test_closed_forms_need_nothing_measured(tmp_path):
  config = ReproduceConfig(('table1', 'table5'), str(tmp_path))
  written = reproduce.reproduce(config, quiet())
  assert written[-1] == tmp_path / 'report.md'
  report = written[-1].read_text()
  assert 'a closed form' in report and 'checkpoints were not given' in report


@pytest.mark.parametrize(
  ('options', 'words'),
  [
    ({'items': ('table9',)}, 'items.*table9'),
    ({'items': ('table2',)}, 'suite.*table2'),
    ({'items': ('figure1',)}, 'engine.*figure1'),
    ({'items': ('figure1',), 'engine': lambda: None}, 'text.*figure1'),
    (
      dict(items=['figure1'], engine=lambda: None, text='a', measure=False),
      'measure',
    ),
  ],
)
def test_bad_settings(options, words):
  with pytest.raises(ValueError, match=words):
    ReproduceConfig(output_dir='x', **options)
  with pytest.raises(ValueError, match='drafts.*t5_tiny'):
    reproduce.SuiteConfig('x', network(1), {'t5_tiny': network(1)})


def test_without_matplotlib_nothing_is_measured(monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  config = ReproduceConfig(['figure2'], str(tmp_path / 'out'))
  with pytest.raises(ValueError, match='matplotlib.*plots'):
    reproduce.reproduce(config, quiet())
  assert not list(tmp_path.iterdir())


def test_records_are_there_and_have_different_names(tmp_path):
  config = ReproduceConfig(
    ('table3',), str(tmp_path / 'out'), str(tmp_path / 'records'), False
  )
  with pytest.raises(ValueError, match='--records-dir.*records'):
    reproduce.reproduce(config, quiet())
  assert not (tmp_path / 'out').exists()

  def make():
    return acceptance.MeasureAlphaConfig({'x': lambda: None}, 'x')

  config = ReproduceConfig(['table3'], str(tmp_path), alphas=[make, make])
  with pytest.raises(ValueError, match='alphas.*different names'):
    reproduce.reproduce(config, quiet())


def load(monkeypatch, name, output_dir, *flags):
  monkeypatch.chdir(gin_flags.ROOT)
  name, *macros = name.split()
  given = [f'--gin_file=gin/runs/{name}.gin', f'--output-dir={output_dir}']
  gin_flags.load(gin_flags.parse_flags([*given, *macros, *flags]))
  return gin_flags.build(ReproduceConfig)


# Run file, folder of its report, folder of its records.
SHIPPED = [
  (
    'table2_cpu --gin.SUITE=%DEMO --gin.SuiteConfig.repeats=15',
    'table2_demo',
    'table2_demo/records',
  ),
  ('table2_cpu', 'table2_base', 'table2_base/records'),
  ('table3_stand_in', 'table3', 'table3'),
  ('table3_stand_in --items=table5', 'table5', 'table5'),
]


@pytest.mark.parametrize(('name', 'report', 'records'), SHIPPED)
def test_shipped_records_are_shown_as_they_are(
  name, report, records, monkeypatch, tmp_path
):
  """Nothing is measured, no model or data is read; the report is ours."""
  pytest.importorskip('matplotlib', reason='needs the extra [plots]')

  def measures(*_):
    raise AssertionError('measured')

  monkeypatch.setattr(reproduce, 'run_suite', measures)
  monkeypatch.setattr(reproduce, 'measure_alpha', measures)
  flags = ('--no-measure', f'--records-dir={RESULTS / records}')
  config = load(monkeypatch, name, tmp_path, *flags)
  reproduce.reproduce(config, quiet())
  for path in [*tmp_path.glob('*.json'), *tmp_path.glob('*.csv')]:
    assert path.read_text() == (RESULTS / report / path.name).read_text()
  ours = (RESULTS / report / 'report.md').read_text()
  assert (tmp_path / 'report.md').read_text() == ours
  assert ours.count('not measured') <= 1
  # Each value of Tables 2 and 4 and each title says that it was forced.
  forced = 4 if report.startswith('table2') else 0
  assert ours.count(' (forced) |') == 2 * forced
  assert ours.count(' (forced alpha=0.53 to 0.75, random') == forced // 2


# --- The suite of Table 2 --------------------------------------------------

# At this rate the loop's counts are known exactly.
ROW = printed.Table2Row('ende', 't5_small', 0, 2, 1.0, 3.4)
SUITE = reproduce.SuiteConfig(
  'tiny',
  network(1),
  {'t5_small': network(1)},
  input_len=8,
  decode_len=32,
  repeats=2,
  calls_a_run=2,
)


@pytest.fixture(scope='module')
def measured(tmp_path_factory):
  """One row of Table 2, measured; what two runs said, and its record."""
  folder = str(tmp_path_factory.mktemp('suite'))
  consoles = [rich.console.Console(record=True, width=150) for _ in range(2)]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(printed, 'TABLE2', (ROW,))
    for console in consoles:
      reproduce.run_suite(SUITE, folder, console)
    records = reproduce.read_suite(SUITE, folder)
  return folder, records, *(console.export_text() for console in consoles)


def test_a_row_is_measured_once(measured):
  _, records, said, again = measured
  assert said.count('acceptance forced to 1.0') == 1
  assert again == ''  # a suite that goes on does not measure it again
  record = records['ende-t5_small-T0']
  assert record['settings']['forced_acceptance'] == 1.0
  row = tables.only(record)
  assert row['gamma'] == 2
  # Ten rounds of 3 tokens; one proposal fits before the last of all.
  assert row['histogram'] == [0, 1, 10] and row['acceptance_rate'] == 1.0


def test_one_generation_is_shown(measured, tokenizer, tmp_path, monkeypatch):
  """Figures 1 and 5 of one engine, with the costs that a row has measured."""
  pytest.importorskip('matplotlib', reason='needs the extra [plots]')
  _, records, _, _ = measured
  monkeypatch.setattr(
    reproduce, 'benchmark', lambda *_: records['ende-t5_small-T0']
  )
  model = Model(network(1), network(1).init(jax.random.key(0)))
  options = dict(gamma=2, max_input_len=32, max_decode_len=8)
  config = ReproduceConfig(
    ('figure1', 'figure5'),
    str(tmp_path),
    engine=lambda: Engine(model, model, tokenizer=tokenizer, **options),
    costs=BenchmarkConfig(network(1), network(1)),
    text='<b>the dog',
  )
  *figures, report = reproduce.reproduce(config, quiet())
  assert [path.name for path in figures] == ['figure1.html', 'figure5.png']
  assert '&lt;b&gt;the dog' in figures[0].read_text('utf-8')
  text = report.read_text('utf-8')
  assert '\n[Figure 1: one generation, as a page](figure1.html)' in text
  assert '![Figure 5: calls over time](figure5.png)' in text


def test_a_record_of_other_settings_is_refused(measured, monkeypatch):
  folder, records, _, _ = measured
  monkeypatch.setattr(printed, 'TABLE2', (ROW,))
  assert reproduce.read_suite(SUITE, folder) == records  # the control
  for options, message in (
    ({'decode_len': 48}, 'decode_len was 32, is 48'),
    ({'input_len': 16}, 'input_len was 8, is 16'),
    ({'repeats': 3}, 'repeats was 2, is 3'),
    ({'target': network(2)}, 'target was'),
    ({'placement': Placement(dtype='bfloat16')}, 'placement was'),
  ):
    other = dataclasses.replace(SUITE, **options)
    with pytest.raises(ValueError, match=message):
      reproduce.read_suite(other, folder)
  monkeypatch.setattr(printed, 'TABLE2', (ROW._replace(gamma=3),))
  with pytest.raises(ValueError, match=r'gammas was \[2\], is \[3\]'):
    reproduce.read_suite(SUITE, folder)


def test_table_2_shows_all_rows(measured):
  _, records, _, _ = measured
  rows = (ROW, *printed.TABLE2[1:])
  shown = tables.table2(records, rows, 'no GPU at hand')
  first, *others = shown.rows
  row = tables.only(records['ende-t5_small-T0'])
  assert first.measured == row['speed_up']
  assert first.predicted == row['expected_speed_up']
  assert 'forced' in shown.full_title and len(others) == 11
  for other in others:
    assert other.measured is None and other.predicted > 1.0
    assert other.not_measured == 'no GPU at hand'


def test_a_pair_that_does_not_fit_is_said_once(tmp_path, monkeypatch):
  monkeypatch.setattr(calls, 'device_bytes', lambda: 10_000)
  with pytest.raises(DoesNotFitError):
    reproduce.run_suite(SUITE, str(tmp_path / 'records'), quiet())
  config = ReproduceConfig(('table4',), str(tmp_path), suite=SUITE)
  reproduce.reproduce(config, quiet())
  report = (tmp_path / 'report.md').read_text()
  # The small drafter's rows, all of them for one reason.
  assert report.count('memory are needed') == 1
  assert '4 rows not measured: 1 rows of 64 slots' in report
  assert '3.2' in report  # the paper's EXP of the first row
