"""Tables, figures, the suite of Table 2: force named, nothing left out."""

import csv
import dataclasses
import sys

import matplotlib
import pytest
import rich.console

import toy_models
from small_vocabulary import network
from specdec_jax import files
from specdec_jax.checks import memory
from specdec_jax.cli import gin_flags
from specdec_jax.measure import acceptance
from specdec_jax.measure.calls import BenchmarkConfig
from specdec_jax.paper import plots, printed, reproduce
from specdec_jax.paper.reproduce import ReproduceConfig
from specdec_jax.report import plot as pictures
from specdec_jax.report import record

FORCED = 'forced alpha=0.75, random weights'
RESULTS = gin_flags.ROOT / 'benchmarks' / 'results'
QUIET = rich.console.Console(quiet=True)


# --- The paper's tables as data ---------------------------------------------

TABLES = gin_flags.ROOT.parent / 'shared' / 'paper' / 'tables'
# Table 2 is a part of Table 4.
FILES = {
  'table1_ops_speed.csv': printed.TABLE1,
  'table3_alpha.csv': printed.TABLE3,
  'table4_expected_vs_empirical.csv': printed.TABLE2,
  'table5_lenience.csv': printed.TABLE5,
}


@pytest.mark.skipif(not TABLES.exists(), reason=f'needs {TABLES}')
@pytest.mark.parametrize('name', FILES)
def test_rows_are_those_of_the_file(name):
  with (TABLES / name).open(encoding='utf-8', newline='') as file:
    _, *rows = csv.reader(file)
  for row, cells in zip(FILES[name], rows, strict=True):
    # As numbers where the row has numbers: 0.80 is 0.8.
    made = (type(value)(cell) for value, cell in zip(row, cells, strict=True))
    assert tuple(made) == row


def test_tables_that_repeat_numbers_agree():
  assert len({row[:3] for row in printed.TABLE3}) == len(printed.TABLE3)
  for task, draft, temperature, _, rate, *_ in printed.TABLE2:
    assert (f't5_xxl_{task}', draft, temperature, rate) in printed.TABLE3
  for draft, lenience, rate in printed.TABLE5:
    assert lenience < 1 or ('t5_xxl_ende', draft, 1, rate) in printed.TABLE3


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
  figures = []

  def save(path, draw, **size):
    pictures.save_plot(path, lambda axes: figures.append(axes) or draw(axes))

  monkeypatch.setattr(plots, 'save_plot', save)
  monkeypatch.setattr(pictures, '_DPI', 30)
  forced = COSTS | {'settings': {'forced_acceptance': 0.75}}
  nothing_read = {'draft_encoder': {'median': 0.0}}
  without = COSTS | {'times_ms': COSTS['times_ms'] | nothing_read}
  first, second = tmp_path / 'a.png', tmp_path / 'b.png'
  for draw in (
    plots.plot_figure2,
    plots.plot_figure3,
    lambda path: plots.plot_figure4(path, [forced]),
    lambda path: plots.plot_figure5(path, RUNS, COSTS),
    lambda path: plots.plot_figure5(path, RUNS, without),
  ):
    draw(first)
    with matplotlib.rc_context({'lines.linewidth': 9.0, 'font.size': 30.0}):
      draw(second)
    assert first.read_bytes() == second.read_bytes()
  # Figure 4's point is marked as one of forced acceptance.
  left, right = figures[4].axes
  assert FORCED in left.get_title() and 'forced' not in right.get_title()
  assert left.lines[-1].get_markerfacecolor() == 'white'
  texts = {text.get_text() for text in figures[6].axes[0].texts}
  assert {'12 tokens\n51 ms', '12 tokens\n23.5 ms'} <= texts
  # A drafter that reads nothing has no such call, nor a name for it.
  for figure, is_read in (figures[6], True), (figures[8], False):
    legend = [text.get_text() for text in figure.axes[0].get_legend().texts]
    assert (plots.DRAFT_START in legend) == is_read


# --- Runs ----------------------------------------------------------------


def test_closed_forms_need_nothing_measured(tmp_path):
  config = ReproduceConfig(('table1', 'table5'), str(tmp_path))
  written = reproduce.reproduce(config, QUIET)
  assert written[-1] == tmp_path / 'report.md'
  report = written[-1].read_text()
  assert 'a closed form' in report and 'checkpoints were not given' in report


def test_what_is_missing_is_said_before_anything_is_made(monkeypatch, tmp_path):
  def make():
    return acceptance.MeasureAlphaConfig({'x': lambda: None}, 'x')

  out = str(tmp_path / 'out')
  stored = {'records_dir': str(tmp_path / 'records'), 'measure': False}
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  for item, options, words in (
    ('figure2', {}, 'matplotlib.*plots'),
    ('table3', stored, '--records-dir.*records'),
    ('table3', {'alphas': [make] * 2}, 'different names'),
  ):
    with pytest.raises(ValueError, match=words):
      reproduce.reproduce(ReproduceConfig([item], out, **options), QUIET)
  assert not list(tmp_path.glob('out/*'))


# Flags, folder of the report, folder of its records.
SHIPPED = [
  (['table2_cpu'], 'table2_base', 'table2_base/records'),
  (['table3_stand_in'], 'table3', 'table3'),
  (['table3_stand_in', '--items=table5'], 'table5', 'table5'),
]


@pytest.mark.parametrize(('flags', 'report', 'records'), SHIPPED)
def test_shipped_records_are_shown_as_they_are(
  flags, report, records, monkeypatch, tmp_path
):
  """Nothing is measured, no model or data is read; the report is ours."""

  for name in 'benchmark', 'measure_alpha':  # to call them is an error
    monkeypatch.setattr(reproduce, name, None)
  monkeypatch.chdir(gin_flags.ROOT)
  name, *flags = flags
  flags += [f'--output-dir={tmp_path}', f'--records-dir={RESULTS / records}']
  gin_flags.load([f'--gin_file=gin/runs/{name}.gin', '--no-measure', *flags])
  reproduce.reproduce(gin_flags.build(ReproduceConfig), QUIET)
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
  items, records = ('table2', 'table4', 'figure4'), str(folder / 'records')
  pair = {'suite': dataclasses.replace(SUITE, **changes)}
  pair['drafts'] = {'t5_small': network(1)}
  return ReproduceConfig(items, str(folder), records, **pair)


def test_a_row_is_measured_once(tmp_path, monkeypatch):
  measured = []

  def benchmark(config, console):
    assert config.target.params is not None  # drawn once for all rows
    measured.append(config.forced_acceptance)
    made = record.new('benchmark', COSTS | {'settings': config.settings})
    files.write_json(config.output_file, made)
    return made

  monkeypatch.setattr(reproduce, 'benchmark', benchmark)
  monkeypatch.setattr(printed, 'TABLE2', (ROW,))
  *_, report = reproduce.reproduce(suite(tmp_path), QUIET)
  assert measured == [0.75] and f'({FORCED})' in report.read_text()
  # A suite that goes on does not measure it again.
  found = reproduce.suite_records(suite(tmp_path), QUIET)
  assert list(found) == ['ende-t5_small-T0'] and len(measured) == 1
  with pytest.raises(ValueError, match='decode_len was 32, is 48'):
    reproduce.suite_records(suite(tmp_path, decode_len=48), QUIET)
  monkeypatch.setattr(printed, 'TABLE2', (ROW._replace(gamma=2),))
  with pytest.raises(ValueError, match=r'gammas was \[3\], is \[2\]'):
    reproduce.suite_records(suite(tmp_path), QUIET)


def test_one_generation_is_shown(tokenizer, tmp_path, monkeypatch):
  """Figures 1 and 5 of one engine, with the costs of its pair."""
  monkeypatch.setattr(reproduce, 'benchmark', lambda *_: COSTS)
  limits = {'max_input_len': 16, 'max_decode_len': 8}
  engine = toy_models.chain_engine(tokenizer, **limits)
  shown = {'engine': lambda: engine, 'costs': SUITE, 'text': '<b>the dog'}
  config = ReproduceConfig(['figure1', 'figure5'], str(tmp_path), **shown)
  console = rich.console.Console(record=True, width=120)
  *figures, report = reproduce.reproduce(config, console)
  # One speed-up: that of the picture.
  figure5 = reproduce.figure5_table(RUNS, COSTS)
  rows = {row[0]: row[3:] for row in figure5.rows}
  assert rows['plain'] == [12, 12, 51.0, 1.0]
  assert rows[3] == [12, 3, 23.5, 51 / 23.5]
  shown = console.export_text()
  assert 'speed-up' in shown and 'v(m): time of a call' in shown
  names = ['figure1.html', 'figure1.svg', 'figure5.png']
  assert [path.name for path in figures] == names
  assert '&lt;b&gt;the dog' in figures[0].read_text('utf-8')
  text = report.read_text('utf-8')
  assert '\n[Figure 1: one generation, as a page](figure1.html)' in text
  assert '![Figure 5: calls over time](figure5.png)' in text


def test_a_pair_that_does_not_fit_is_said_once(tmp_path, monkeypatch):
  monkeypatch.setattr(memory, 'device_bytes', lambda: 10_000)
  config = dataclasses.replace(suite(tmp_path), items=('table4',))
  reproduce.reproduce(config, QUIET)
  report = (tmp_path / 'report.md').read_text()
  # The small drafter's rows, all of them for one reason.
  assert report.count('memory are needed') == 1
  assert '4 of 4 rows not measured: 1 rows of 64 slots' in report
  assert '3.2' in report  # the paper's EXP of the first row
