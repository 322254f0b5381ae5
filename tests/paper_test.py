"""The paper's numbers: the tables as data, and the closed forms against them.

Where a test says that a formula fits, it also says that a wrong one does not.
"""

import csv
import pathlib

import numpy as np
import pytest

from specdec_jax import analysis
from specdec_jax.paper import printed as paper

TABLES = pathlib.Path(__file__).resolve().parents[2] / 'shared/paper/tables'

# Where a column is not called as its field is.
FIELDS = {
  'alpha': 'acceptance_rate',
  'c': 'cost_ratio',
  'speed_factor': 'walltime_factor',
  'empirical': 'speedup',
}
FILES = {
  'table1_ops_speed.csv': paper.TABLE1,
  'table2_walltime.csv': paper.TABLE2,
  'table3_alpha.csv': paper.TABLE3,
  'table4_expected_vs_empirical.csv': paper.TABLE2,
  'table5_lenience.csv': paper.TABLE5,
}


@pytest.mark.skipif(
  not TABLES.exists(), reason="needs the paper's tables in ../shared/paper"
)
@pytest.mark.parametrize('name', FILES)
def test_rows_are_those_of_the_file(name):
  with (TABLES / name).open(encoding='utf-8', newline='') as file:
    rows = list(csv.reader(file))
  table = FILES[name]
  fields = [FIELDS.get(column, column) for column in rows[0]]
  # Table 2's columns are a part of Table 4's.
  assert fields == list(table[0]._fields) or name == 'table2_walltime.csv'
  for row, cells in zip(table, rows[1:], strict=True):
    for field, cell in zip(fields, cells, strict=True):
      # As numbers where the row has numbers: 0.80 is 0.8.
      value = getattr(row, field)
      assert value == (cell if isinstance(value, str) else float(cell))


def test_tables_that_repeat_numbers_agree():
  rates = {row[:3]: row.acceptance_rate for row in paper.TABLE3}
  assert len(rates) == len(paper.TABLE3)
  for row in paper.TABLE2:
    key = (f't5_xxl_{row.task}', row.draft, row.temperature)
    assert rates[key] == row.acceptance_rate
  for row in paper.TABLE5:
    if row.lenience == 1:
      assert rates['t5_xxl_ende', row.draft, 1] == row.acceptance_rate


# --- The closed forms of `analysis` give these numbers ----------------------


def columns(table):
  """Each field of a table of the paper as one array."""
  return map(np.array, zip(*table, strict=True))


def rounds_to(values, printed, decimals):
  """Which of the values are printed so, with float32's rounding allowed."""
  return np.abs(values - printed) <= 0.5 * 10.0**-decimals + 1e-6


def test_table1_to_its_two_decimals():
  rate, gamma, operations, speed = columns(paper.TABLE1)
  for factor, printed in (
    (analysis.walltime_factor, speed),
    (analysis.operations_factor, operations),
  ):
    assert rounds_to(factor(rate, gamma, 0.0), printed, 2).all()
    # A step of gamma tokens, or one that counts the drafter, fits nowhere.
    for wrong in factor(rate, gamma - 1, 0.0), factor(rate, gamma, 0.02):
      assert not rounds_to(wrong, printed, 2).any()


def within_rounding(factor):
  """Rows of Table 4 whose EXP some alpha and c, rounded as printed, give."""
  *_, gamma, rate, cost, expected, _ = columns(paper.TABLE2)
  # Factors grow with alpha and shrink with c: the corners are the extremes.
  low = factor(rate - 0.005, gamma, cost + 0.005)
  high = factor(rate + 0.005, gamma, cost - 0.005)
  return (low <= expected + 0.05) & (high >= expected - 0.05)


def test_table4_expected_is_within_rounding():
  assert within_rounding(analysis.walltime_factor).all()

  def no_last_token(rate, gamma, cost):
    return analysis.walltime_factor(rate, gamma - 1, cost)

  # Two digits of alpha and c leave room, but not for this.
  assert (~within_rounding(no_last_token)).sum() >= 3


def test_factors_printed_in_the_text():
  """Section 4.2, bigrams; A.5, lenience at temperature 0."""
  for rate, gamma, cost, printed, decimals in (
    (0.20, 3, 0, 1.25, 2),
    (0.75, 8, 0.015, 3.3, 1),
    (0.80, 8, 0.015, 3.9, 1),
    (0.87, 8, 0.015, 4.9, 1),
  ):
    factor = analysis.walltime_factor(rate, gamma, cost)
    assert rounds_to(factor, printed, decimals)


def test_oracle_gains_up_to_60_percent():
  """Section 3.5: "up to ~60%" over a fixed gamma for typical alpha and c."""
  rate = np.linspace(0.5, 0.95, 46, dtype=np.float32)
  cost = np.array([0.01, 0.02, 0.05, 0.1], np.float32)[:, None]
  gamma = analysis.optimal_gamma(rate, cost, 200)
  best = analysis.walltime_factor(rate, gamma, cost)
  gain = analysis.oracle_factor(rate, cost) / best
  assert 1.5 < gain.max() < 1.65
  # An oracle whose drafts cost nothing is far beyond.
  assert (1 / (1 - rate) / best).max() > 2
