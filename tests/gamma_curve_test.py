"""The curve of the speed-up over gamma, and the picture of a trace."""

import io

import matplotlib.image
import pytest
import rich.console

import small_vocabulary
from specdec_jax.engine.trace import Round
from specdec_jax.measure import calibration, gamma_curve
from specdec_jax.measure.calibration import (
  Calibration,
  CalibrationError,
  Choice,
)
from specdec_jax.paper.trace_picture import plot_trace


def quiet():
  return rich.console.Console(file=io.StringIO(), width=100)


@pytest.fixture(scope='module')
def engine(tokenizer):
  return small_vocabulary.engine_with_itself(tokenizer)


def save_calibration(path, fingerprints):
  one = Choice(
    1,
    1,
    1.5,
    (1.4, 1.6),
    (1.0, 1.5, 1.25),
    cost_ratio=0.1,
    call_cost=(1.0, 1.1, 1.2),
  )
  record = {
    'acceptance_rate': {'alpha': 0.8},
    'costs': [{'times_ms': {'call_1': {'median': 1.0}}}],
  }
  device = gamma_curve.Record('', {}).machine['device']
  Calibration(fingerprints, device, 0.0, [one], record).save(str(path))
  assert calibration.load(str(path)).at(1).factors == one.factors


def test_measured_beside_predicted(engine, tmp_path):
  (tmp_path / 'lines.txt').write_text('the red dog\na cat sleeps\nx\n')
  save_calibration(tmp_path / 'calibration.json', engine.fingerprints)
  plot = tmp_path / 'curve.png'
  config = gamma_curve.GammaCurveConfig(
    lambda: engine,
    str(tmp_path / 'lines.txt'),
    str(tmp_path / 'calibration.json'),
    gammas=(1, 3),
    num_lines=2,
    repeats=2,
    output_file=str(tmp_path / 'curve.json'),
    plot_file=str(plot),
  )
  record = gamma_curve.gamma_curve(config, quiet())
  assert [one['gamma'] for one in record['points']] == [1, 3]
  known, unknown = (one['predicted'] for one in record['points'])
  # An output's start, in either way, leaves less than a token's factor.
  assert 1 < known < 1.8 / 1.2 and unknown is None
  for one in record['points']:
    assert 0 < one['least'] <= one['speed_up'] <= one['most']
    found = engine.generate(['the red dog', 'a cat sleeps'], gamma=one['gamma'])
    tokens, calls = (
      sum(getattr(each.stats, name) for each in found)
      for name in ('num_tokens', 'num_target_calls')
    )
    assert one['tokens_per_call'] == tokens / calls
  assert '2 lines of' in record['title']
  assert matplotlib.image.imread(plot).shape[1] > 600
  # The same record gives the same picture.
  before = plot.read_bytes()
  gamma_curve.plot_gamma_curve(plot, record)
  assert plot.read_bytes() == before

  save_calibration(tmp_path / 'calibration.json', {'target': 'another'})
  with pytest.raises(CalibrationError, match='made for something else'):
    gamma_curve.gamma_curve(config, quiet())


def test_a_trace_in_colour(tmp_path):
  """What is struck or underlined changes the picture, not only the colour."""
  path = tmp_path / 'trace.png'
  shown = [
    Round([' Das', ' $x$'], 1, ' \x1b[31m'),
    Round([' .', '</s>'], 2, None),
  ]
  plot_trace(path, shown, 'The old house')
  one = matplotlib.image.imread(path)
  plot_trace(
    path, [Round([' Das', ' $x$'], 2, ' \x1b[31m'), shown[1]], 'The old house'
  )
  other = matplotlib.image.imread(path)
  grey, grey_other = one[..., :3].mean(-1), other[..., :3].mean(-1)
  assert one.shape == other.shape and abs(grey - grey_other).max() > 0.3
