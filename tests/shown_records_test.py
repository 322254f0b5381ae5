"""Shipped records are shown as they are: by a command, without measuring."""

import json

import pytest
import rich.console

from specdec_jax.cli import gin_flags
from specdec_jax.measure import alpha, canvas, throughput_picture
from specdec_jax.paper import reproduce, table2_suite
from specdec_jax.paper import reproduce as run

RESULTS = gin_flags.ROOT / 'benchmarks' / 'results'
# Run file, folder of its report, folder of its records.
SHIPPED = [
  (
    'table2_cpu --gin.SUITE=%DEMO --gin.REPEATS=15',
    'table2_demo',
    'table2_demo/records',
  ),
  ('table2_cpu', 'table2_base', 'table2_base/records'),
  ('table3_stand_in', 'table3', 'table3'),
  ('table5_stand_in', 'table5', 'table5'),
]


def load(monkeypatch, name, output_dir, *flags):
  monkeypatch.chdir(gin_flags.ROOT)
  name, *macros = name.split()
  given = [f'--gin_file=gin/runs/{name}.gin', f'--gin.OUTPUT_DIR={output_dir}']
  gin_flags.load(gin_flags.parse_flags([*given, *macros, *flags]))


@pytest.mark.parametrize(('name', 'report', 'records'), SHIPPED)
def test_what_is_shipped_can_be_shown(
  name, report, records, monkeypatch, tmp_path
):
  """Nothing is measured, no model or data is read; the report is ours."""
  pytest.importorskip('matplotlib', reason='needs the extra [plots]')

  def measures(*_):
    raise AssertionError('measured')

  monkeypatch.setattr(table2_suite, 'run', measures)
  monkeypatch.setattr(run, 'measure_alpha', measures)
  flags = ('--gin.MEASURE=False', f'--gin.RECORDS_DIR={RESULTS / records}')
  load(monkeypatch, name, tmp_path, *flags)
  config = gin_flags.build(reproduce.ReproduceConfig)
  reproduce.reproduce(config, rich.console.Console(quiet=True))
  for path in sorted(tmp_path.glob('*.json')):
    assert path.read_text() == (RESULTS / report / path.name).read_text()
  ours = (RESULTS / report / 'report.md').read_text()
  assert (tmp_path / 'report.md').read_text() == ours
  assert ours.count('not measured') <= 1


@pytest.mark.parametrize('name', ['table1', 'table2', 'table3', 'table5'])
def test_every_table_takes_the_same_macros(name, monkeypatch, tmp_path):
  flags = ('--gin.MEASURE=False', f'--gin.RECORDS_DIR={tmp_path / "x"}')
  load(monkeypatch, name, tmp_path, *flags)
  config = gin_flags.build(reproduce.ReproduceConfig)
  assert not config.measure and config.records_dir == str(tmp_path / 'x')


def test_figures_of_one_generation_keep_no_record():
  with pytest.raises(ValueError, match='expected True, got False'):
    reproduce.ReproduceConfig(
      ['figure1'], 'x', engine=lambda: None, text='a', measure=False
    )


def test_measurements_keep_records_of_their_own(tmp_path):
  def make():
    return alpha.MeasureAlphaConfig({'x': lambda: None}, 'x')

  config = reproduce.ReproduceConfig(
    ['table3'], str(tmp_path), alphas=[make, make]
  )
  with pytest.raises(ValueError, match='different names'):
    reproduce.reproduce(config, rich.console.Console(quiet=True))


def test_the_accelerator_suite_writes_where_its_table_looks(
  monkeypatch, tmp_path
):
  load(monkeypatch, 'accelerator', tmp_path)
  written = gin_flags.build(table2_suite.SuiteConfig).output_dir
  load(monkeypatch, 'table2', tmp_path)
  read = gin_flags.build(reproduce.ReproduceConfig).suite.output_dir
  assert written == read == str(tmp_path / 'records')


def test_the_throughput_picture_says_why_it_jumps(monkeypatch):
  pytest.importorskip('matplotlib', reason='needs the extra [plots]')
  matplotlib = canvas.load_matplotlib()
  figures = []

  def keep(path, draw, size=None):
    figures.append(matplotlib.figure.Figure())
    draw(figures[-1])

  monkeypatch.setattr(throughput_picture, 'save', keep)
  record = json.loads((RESULTS / 'throughput_demo.json').read_text())
  throughput_picture.plot_throughput('x.png', record)
  plain = [row for row in record['sweep'] if row['mode'] != 'gamma by rows']
  throughput_picture.plot_throughput('x.png', record | {'sweep': plain})
  noted, without = ([t.get_text() for t in f.axes[0].texts] for f in figures)
  assert without == []
  assert '64 rows' in noted[0] and 'smaller pools' in noted[0]
