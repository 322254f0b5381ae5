"""Reports and Figures 2 to 5: nothing left out, force named, same bytes."""

import csv
import dataclasses
import functools
import io
import json
import sys

import numpy as np
import pytest
import rich.console

from small_vocabulary import network
from specdec_jax import analysis
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.measure import canvas
from specdec_jax.measure.benchmark import BenchmarkConfig
from specdec_jax.paper import plots, report, timeline
from specdec_jax.paper import reproduce as run
from specdec_jax.paper.plots import Point
from specdec_jax.paper.report import Comparison, Row

FORCED = 'forced alpha=0.75, random weights'
REASON = 'no accelerator was at hand | at all'
PNG = b'\x89PNG\r\n\x1a\n'
RATES = np.linspace(0, 1, 191)
TIMES = timeline.CallTimes(3.0, 1.0, 0.5, {1: 4.0, 4: 5.0, 8: 6.0})
RUNS = (
  timeline.Run(7, [8, 1, 3]),
  timeline.Run(3, [4, 4, 4]),
  timeline.Run(0, [1] * 12),
)


def make_table(**options) -> Comparison:
  rows = [
    Row(
      {'task': 'ende', 'gamma': 7},
      paper=3.4,
      predicted=3.2,
      measured=3.123456,
      spread=(3.0, 3.5),
      forced_acceptance=0.75,
      details={'c': 0.02},
    ),
    Row(
      {'task': 'cnndm', 'gamma': 5},
      paper=2.0,
      predicted=2.5,
      measured=2.0,
      details={'c': 0.04},
      notes='<real>',
    ),
    Row(
      {'task': 'lm1b', 'gamma': 3},
      paper=1.7,
      not_measured=REASON,
      details={'c': None},
    ),
  ]
  return Comparison('t', 'Table 2', 'times faster', rows, **options)


def test_markdown_says_what_was_forced_and_what_was_not_measured():
  compared = make_table(caption='As printed.')
  title, about, body, missing, ratio, csv_file = compared.markdown().split(
    '\n\n'
  )
  assert title == f'## Table 2 ({FORCED}: 1 of 3)'
  assert about == 'times faster; 2 of 3 rows measured. As printed.'
  header, rule, forced, real = body.splitlines()
  width = header.count('|')
  assert rule.count('|') == forced.count('|') == width
  assert forced == (
    '| ende | 7 | 3.40 | 3.20 | 3.12 [3.00, 3.50] (forced) | 0.98 | 0.02 |'
    f' {FORCED} |'
  )
  assert '| 2.00 | 0.80 | 0.04 | &lt;real> |' in real
  assert '(forced)' not in real and 'forced alpha' not in real
  assert missing == f'1 row not measured; they are in t.csv: {REASON}.'
  assert ratio.endswith('2 rows: median 0.89, from 0.80 to 0.98.')
  assert csv_file == 'Unrounded: [t.csv](t.csv)\n'


def test_csv_keeps_all_rows_and_digits():
  text = make_table().unrounded().csv()
  rows = list(csv.DictReader(io.StringIO(text)))
  assert [row['measured'] for row in rows] == ['3.123456', '2.0', '']
  assert [row['forced_acceptance'] for row in rows] == ['0.75', '', '']
  assert FORCED in rows[0]['notes'] and rows[2]['not_measured'] == REASON
  assert rows[0]['measured_high'] == '3.5' and rows[2]['c'] == ''


def printed(compared: Comparison) -> str:
  stream = io.StringIO()
  rich.console.Console(file=stream, width=250).print(compared.table())
  return stream.getvalue()


def test_rows_that_were_not_measured_are_one_line():
  """On a console: the reason once, and no row of blanks."""
  one = make_table()
  many = [
    dataclasses.replace(one.rows[2], keys={'task': f'x{i}', 'gamma': 1})
    for i in range(32)
  ]
  text = printed(dataclasses.replace(one, rows=[*one.rows[:2], *many]))
  assert f'Table 2 ({FORCED}: 1 of 34)' in text
  assert text.count('not measured') == 1
  assert f'32 rows not measured; they are in t.csv: {REASON}.' in text


def test_where_nothing_was_measured_all_rows_are_there():
  """The paper's and the predicted values are all that there is to see."""
  rows = [
    Row({'gamma': i}, paper=2.0, predicted=1.5, not_measured=REASON)
    for i in range(12)
  ]
  text = printed(Comparison('t', 'T', 'ms', rows))
  assert text.count('2.00') == text.count('1.50') == 12
  assert text.count('not measured') == 1
  assert f'12 rows not measured: {REASON}.' in text
  assert ' measured ' not in text.splitlines()[2], 'an empty column'


@pytest.mark.parametrize(
  'options, message',
  [
    (dict(), 'needs either a measured value or the reason'),
    (dict(measured=1.0, not_measured='x'), 'needs either a measured value'),
    (dict(measured=1.0, spread=(1.1, 2.0)), 'spread must enclose'),
    (dict(measured=1.0, forced_acceptance=1.5), r'in \[0, 1\], got 1.5'),
    (dict(not_measured='x', forced_acceptance=0.5), 'but no measured value'),
  ],
)
def test_a_row_must_be_whole(options, message):
  with pytest.raises(ValueError, match=message):
    Row({'a': 1}, **options)


def test_a_table_must_be_regular():
  rows = [Row({'a': 1}, measured=1.0), Row({'b': 1}, measured=1.0)]
  with pytest.raises(ValueError, match='must have the same keys'):
    Comparison('t', 'T', 'ms', rows)
  with pytest.raises(ValueError, match='has no rows'):
    Comparison('t', 'T', 'ms', [])


def test_titles_of_forced_values():
  assert report.titled('T', [None, None]) == 'T'
  assert report.titled('T', [0.75]) == f'T ({FORCED})'
  both = report.titled('T', [0.5, 0.75])
  assert both == 'T (forced alpha=0.5 to 0.75, random weights)'


def test_write(tmp_path):
  folder = tmp_path / 'new' / 'folder'
  written = report.write(
    folder,
    [make_table()],
    title='A report',
    machine={'device': 'a | b'},
    figures={'figure2.png': 'Figure 2', 'trace.html': 'Figure 1'},
  )
  names = ['t.csv', 't.json', 'report.md']
  assert [path.name for path in written] == names
  assert sorted(path.name for path in folder.iterdir()) == sorted(names)
  shown = json.loads((folder / 't.json').read_text('utf-8'))
  assert shown['kind'] == 'table' and shown['title'] == make_table().full_title
  assert len(shown['rows']) == 2 and REASON in shown['notes'][0]
  assert {len(row) for row in shown['rows']} == {len(shown['columns'])}
  text = (folder / 'report.md').read_text('utf-8')
  assert make_table().markdown() in text
  assert '![Figure 2](figure2.png)' in text
  assert '\n[Figure 1](trace.html)' in text
  assert '| device | a \\| b |' in text
  with pytest.raises(ValueError, match='must have different names'):
    report.write(folder, [make_table()] * 2, title='x', machine={})


def test_curves_are_the_closed_forms():
  for curve in plots.gamma_curves(analysis.expected_tokens):
    gamma, rates = int(curve.parameter), curve.rates[:-1]
    direct = (1 - rates ** (gamma + 1)) / (1 - rates)
    np.testing.assert_allclose(curve.values[:-1], direct, rtol=1e-4)
    assert curve.values[-1] == gamma + 1
  for speed in plots.gamma_curves(analysis.walltime_factor, 0.1):
    tokens = np.asarray(analysis.expected_tokens(speed.rates, speed.parameter))
    expected = tokens / (1 + 0.1 * speed.parameter)
    np.testing.assert_allclose(speed.values, expected, rtol=1e-5)


def test_optimal_gamma_is_the_best_and_below_the_limit():
  for curve in plots.optimal_gamma_curves():
    assert curve.values.max() < plots.MAX_GAMMA
    for rate, best in list(zip(curve.rates, curve.values, strict=True))[::30]:
      speeds = [
        sum(rate**i for i in range(gamma + 1)) / (1 + gamma * curve.parameter)
        for gamma in range(plots.MAX_GAMMA + 1)
      ]
      assert speeds[best] == pytest.approx(max(speeds), rel=1e-5)


@pytest.fixture
def matplotlib():
  reason = "matplotlib, the extra '[plots]', is not installed"
  pytest.importorskip('matplotlib', reason=reason)
  return canvas.load_matplotlib()


POINT = Point(0.75, 3.0, 'demo', 7, forced_acceptance=0.75)
DRAW = {
  'figure2': functools.partial(plots.plot_expected_tokens, points=[POINT]),
  'figure3': functools.partial(plots.plot_optimal_gamma, points=[POINT]),
  'figure4': functools.partial(
    plots.plot_tradeoff, speed_points=[POINT], operations_points=[POINT]
  ),
  'figure5': functools.partial(
    timeline.plot_timeline,
    runs=[timeline.Run(7, [8, 1], forced_acceptance=0.75)],
    times=TIMES,
  ),
  'comparison': functools.partial(plots.plot_comparison, table=make_table()),
}


def drawn(matplotlib, monkeypatch, draw):
  """The figure that `draw` would have saved."""
  figures = []

  def keep(path, draw, size=None):
    figures.append(matplotlib.figure.Figure())
    draw(figures[-1])

  monkeypatch.setattr(canvas, 'save', keep)
  monkeypatch.setattr(plots, 'save', keep)
  draw('unused.png')
  return figures[0]


@pytest.mark.parametrize('name', DRAW)
def test_png_is_the_same_whatever_the_user_set(matplotlib, tmp_path, name):
  first, second = tmp_path / 'first.png', tmp_path / 'second.png'
  DRAW[name](first)
  with matplotlib.rc_context({'lines.linewidth': 9.0, 'font.size': 30.0}):
    DRAW[name](second)
    assert matplotlib.rcParams['font.size'] == 30.0
  data = first.read_bytes()
  assert data.startswith(PNG) and len(data) > 5000
  assert data == second.read_bytes()


@pytest.mark.parametrize('name', DRAW)
def test_titles_say_what_was_forced(matplotlib, monkeypatch, name):
  figure = drawn(matplotlib, monkeypatch, DRAW[name])
  for axes in figure.axes:
    assert FORCED in axes.get_title()
    assert axes.get_xlabel()
  if name.startswith('figure') and name != 'figure5':
    plain = drawn(matplotlib, monkeypatch, DRAW[name].func)
    assert 'forced' not in plain.axes[0].get_title()


def test_figure_2_draws_its_curves_and_points(matplotlib, monkeypatch):
  figure = drawn(matplotlib, monkeypatch, DRAW['figure2'])
  *lines, point = figure.axes[0].lines
  curves = plots.gamma_curves(analysis.expected_tokens)
  for line, curve in zip(lines, curves, strict=True):
    np.testing.assert_array_equal(line.get_xdata(), curve.rates)
    np.testing.assert_array_equal(line.get_ydata(), curve.values)
  assert [list(x) for x in point.get_data()] == [[0.75], [3.0]]
  assert point.get_markerfacecolor() == 'white', 'forced points are hollow'
  assert len({(x.get_color(), x.get_linestyle()) for x in lines}) == len(lines)


def test_comparison_draws_every_row(matplotlib, monkeypatch):
  axes = drawn(matplotlib, monkeypatch, DRAW['comparison']).axes[0]
  names = [label.get_text() for label in axes.get_yticklabels()]
  assert names == [row.name for row in make_table().rows]
  assert [text.get_text() for text in axes.texts] == ['not measured']
  labels = axes.get_legend_handles_labels()[1]
  assert set(labels) == {'paper', 'predicted', 'measured', 'measured, forced'}


def test_comparison_has_a_line_where_nothing_is_won(matplotlib, monkeypatch):
  draw = functools.partial(plots.plot_comparison, table=make_table(even=1.0))
  axes = drawn(matplotlib, monkeypatch, draw).axes[0]
  (line,) = (x for x in axes.lines if x.get_label() == 'no gain')
  assert set(line.get_xdata()) == {1.0}
  (plain,) = drawn(matplotlib, monkeypatch, DRAW['comparison']).axes
  assert 'no gain' not in plain.get_legend_handles_labels()[1]


def test_labels_of_figure_4_do_not_overlap(matplotlib, monkeypatch):
  """Of twelve points that lie close; each says its own c."""
  points = [
    Point(0.6 + i / 100, 1.0 + i / 50, f'gamma 7, c = 0.{i:02}', 7, 0.6)
    for i in range(12)
  ]
  draw = functools.partial(plots.plot_tradeoff, speed_points=points)
  figure = drawn(matplotlib, monkeypatch, draw)
  axes = figure.axes[0]
  assert 'each with its own c' in axes.get_title()
  figure.set_size_inches(10, 4.2)
  figure.draw_without_rendering()
  boxes = [matplotlib.text.Text.get_window_extent(text) for text in axes.texts]
  assert len(boxes) == 12
  for i, one in enumerate(boxes):
    assert not any(one.overlaps(other) for other in boxes[i + 1 :])


def test_without_matplotlib_nothing_is_measured(monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  config = run.ReproduceConfig(['figure2'], str(tmp_path / 'out'))
  with pytest.raises(ValueError, match='Plots need matplotlib'):
    run.reproduce(config)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('make', [lambda path: None, lambda path: path.mkdir()])
def test_a_folder_without_records(tmp_path, make):
  make(folder := tmp_path / 'records')
  config = run.ReproduceConfig(
    ('table3',), str(tmp_path / 'out'), str(folder), measure=False
  )
  with pytest.raises(ValueError, match='RECORDS_DIR.*/records'):
    run.reproduce(config)
  assert not (tmp_path / 'out').exists()


def test_figure_5_needs_one_setting_and_a_drafter():
  def config(**options):
    costs = BenchmarkConfig(network(1), **options)
    return run.ReproduceConfig(
      ['figure5'], 'x', engine=lambda: None, costs=costs, text='a'
    )

  with pytest.raises(ValueError, match='of one setting.*got 2 settings'):
    config(draft=network(1), batches=(1, 2))
  with pytest.raises(ValueError, match='got 1 settings, draft = None, drafter'):
    config()
  assert config(drafter=prompt_lookup()).costs.drafter.name


def test_without_matplotlib(monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  with pytest.raises(ValueError, match=r"pip install 'specdec_jax\[plots\]'"):
    plots.plot_expected_tokens(tmp_path / 'figure.png')
  assert not list(tmp_path.iterdir())


def test_blocks_follow_each_other():
  row = timeline.blocks(RUNS[1], TIMES)
  kinds = [block.kind for block in row]
  a_round = [timeline.DRAFT] * 3 + [timeline.TARGET]
  start = [timeline.TARGET_ENCODER, timeline.DRAFT_ENCODER]
  assert kinds == start + a_round * 3
  for one, following in zip(row, row[1:], strict=False):
    assert one.begin_ms + one.width_ms == pytest.approx(following.begin_ms)
  assert row[-1].begin_ms + row[-1].width_ms == 3 + 1 + 3 * (3 * 0.5 + 5)
  assert sum(block.num_tokens for block in row) == RUNS[1].num_tokens == 12
  plain = timeline.blocks(RUNS[2], TIMES)
  assert plain[-1].begin_ms + plain[-1].width_ms == 3 + 12 * 4
  assert timeline.DRAFT_ENCODER not in [block.kind for block in plain]


def test_timeline_draws_every_call(matplotlib, monkeypatch):
  draw = functools.partial(timeline.plot_timeline, runs=RUNS, times=TIMES)
  axes = drawn(matplotlib, monkeypatch, draw).axes[0]
  rows = [timeline.blocks(run, TIMES) for run in RUNS]
  calls = sum(len(bars.get_paths()) for bars in axes.collections)
  assert calls == sum(map(len, rows))
  texts = [text.get_text() for text in axes.texts]
  assert '12 tokens\n51 ms' in texts and '12 tokens\n23.5 ms' in texts


def test_timeline_names_what_is_wrong():
  with pytest.raises(ValueError, match='over 6 tokens; there are .*1, 4, 8'):
    timeline.blocks(timeline.Run(5, [1]), TIMES)
  with pytest.raises(ValueError, match='yields 1 to 4 tokens, got 5'):
    timeline.Run(3, [5])
  with pytest.raises(ValueError, match='at least one round'):
    timeline.Run(3, [])
  with pytest.raises(ValueError, match='gamma must be at least 0'):
    timeline.Run(-1, [1])
  with pytest.raises(ValueError, match=r'target_ms\[1\] must be above 0'):
    timeline.CallTimes(1.0, 1.0, 1.0, {1: 0.0})
  with pytest.raises(ValueError, match='draft_ms must be .* got nan'):
    timeline.CallTimes(1.0, 1.0, float('nan'), {1: 1.0})
  with pytest.raises(ValueError, match='at least one run'):
    timeline.plot_timeline('unused.png', [], TIMES)
