"""The suite of Table 2 and the report that is made of its records."""

import dataclasses
import json

import pytest
import rich.console

from small_vocabulary import network
from specdec_jax.checks.memory import DoesNotFitError
from specdec_jax.measure import benchmark
from specdec_jax.paper import printed, reproduce, table2_suite, tables
from specdec_jax.partitioning import Placement

# At this rate the loop's counts are known exactly.
ROW = printed.Table2Row('ende', 't5_small', 0, 2, 1.0, 3.4)


def make(output_dir, **options):
  fields = {'input_len': 8, 'decode_len': 32, 'repeats': 2, 'calls_a_run': 2}
  return table2_suite.SuiteConfig(
    'tiny',
    network(1),
    {'t5_small': network(1)},
    str(output_dir),
    **fields | options,
  )


@pytest.fixture(scope='module')
def measured(tmp_path_factory):
  """One row of Table 2, measured."""
  folder = tmp_path_factory.mktemp('suite')
  said = []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(printed, 'TABLE2', (ROW,))
    table2_suite.run(make(folder), said.append)
    again = []
    records = table2_suite.run(make(folder), again.append)
  return folder, records, said, again


def test_a_row_is_measured_once(measured):
  folder, records, said, again = measured
  assert len(said) == 1 and 'acceptance forced to 1.0' in said[0]
  assert again == []  # a suite that goes on does not measure it again
  record = records['ende-t5_small-T0']
  assert record == json.loads((folder / 'ende-t5_small-T0.json').read_text())
  assert record['forced_acceptance'] == 1.0
  assert record['weights'] == 'random'
  (row,) = record['settings'][0]['gammas']
  assert row['gamma'] == 2 and row['t5x_style_speed_up'] > 0
  # Ten rounds of 3 tokens; one proposal fits before the last of all.
  assert row['histogram'] == [0, 1, 10] and row['acceptance_rate'] == 1.0


def test_a_record_of_other_settings_is_refused(measured, monkeypatch, tmp_path):
  folder, records, _, _ = measured
  monkeypatch.setattr(printed, 'TABLE2', (ROW,))
  assert table2_suite.read(make(folder)) == records  # the control
  for options, message in (
    ({'decode_len': 48}, 'decode_len was 32, is 48'),
    ({'input_len': 16}, 'input_len was 8, is 16'),
    ({'repeats': 3}, 'repeats was 2, is 3'),
    ({'target': network(2)}, 'target was'),
    ({'placement': Placement(dtype='bfloat16')}, 'placement was'),
  ):
    other = dataclasses.replace(make(folder), **options)
    with pytest.raises(ValueError, match=message):
      table2_suite.run(other)
    with pytest.raises(ValueError, match=message):
      # Nor is it shown where nothing is to be measured.
      reproduce.reproduce(
        reproduce.ReproduceConfig(
          ('table4',), str(tmp_path), suite=other, measure=False
        ),
        rich.console.Console(quiet=True),
      )
  monkeypatch.setattr(printed, 'TABLE2', (ROW._replace(gamma=3),))
  with pytest.raises(ValueError, match='gamma was 2, is 3'):
    table2_suite.read(make(folder))


def test_table_2_shows_all_rows(measured):
  _, records, _, _ = measured
  shown = tables.table2(records, (ROW, *printed.TABLE2[1:]), 'no GPU at hand')
  assert len(shown.rows) == 12
  first, *others = shown.rows
  row = records['ende-t5_small-T0']['settings'][0]['gammas'][0]
  assert first.measured == row['speed_up']
  assert first.predicted == row['expected_speed_up']
  assert first.forced_acceptance == 1.0
  assert 'forced' in shown.full_title
  for other in others:
    assert other.measured is None
    assert other.not_measured == 'no GPU at hand'
    assert other.predicted > 1.0


def test_a_pair_that_does_not_fit_is_said_row_by_row(tmp_path, monkeypatch):
  monkeypatch.setattr(benchmark, 'device_bytes', lambda: 10_000)
  with pytest.raises(DoesNotFitError):
    table2_suite.run(make(tmp_path / 'records'))
  console = rich.console.Console(record=True, width=200)
  config = reproduce.ReproduceConfig(
    ('table4',), str(tmp_path), suite=make(None)
  )
  reproduce.reproduce(config, console)
  report = (tmp_path / 'report.md').read_text()
  # The small drafter's rows, all of them for one reason.
  assert report.count('This run needs') == 1
  assert '4 rows not measured: This run needs' in report
  assert '3.2' in report  # the paper's EXP of the first row


def test_closed_forms_need_nothing_measured(tmp_path):
  config = reproduce.ReproduceConfig(('table1', 'table5'), str(tmp_path))
  written = reproduce.reproduce(config, rich.console.Console(quiet=True))
  assert written[-1] == tmp_path / 'report.md'
  report = written[-1].read_text()
  assert 'a closed form' in report and 'checkpoints were not given' in report


def test_table_3_lists_the_papers_rows_and_ours():
  row = {
    'target': 'mine',
    'draft': 'small',
    'temperature': 1.0,
    'lenience': 1.0,
    'alpha': 0.7,
    'standard_error': 0.01,
    'observed': 0.69,
    'num_tokens': 5000,
  }
  lossy = row | {'lenience': 0.1, 'alpha': 0.9}
  shown = tables.table3([{'rows': [row, lossy]}])
  assert len(shown.rows) == len(printed.TABLE3) + 1
  assert shown.rows[0].measured == 0.7 and shown.rows[0].paper is None
  assert all(r.not_measured for r in shown.rows[1:])
  shown = tables.table5([{'rows': [row, lossy]}])
  assert len(shown.rows) == len(printed.TABLE5) + 2
  assert [r.measured for r in shown.rows[:2]] == [0.7, 0.9]
  assert 'lossy' in shown.caption


def test_table_3_has_the_papers_value_beside_what_stands_in():
  """Named for what it is; the paper's other rows are still there."""
  row = {
    'target': 'a small target',
    'draft': 'two-grams',
    'temperature': 1.0,
    'lenience': 1.0,
    'alpha': 0.3,
    'standard_error': 0.01,
    'proposes': 0.9,
    'observed': 0.29,
    'tokens_per_call': 1.2,
    'num_tokens': 5000,
    'paper': ['t5_xxl_ende', 'bigram'],
  }
  silent = row | {'draft': 'silent', 'alpha': None, 'standard_error': None}
  silent |= {'observed': None, 'proposes': 0.0, 'paper': None}
  shown = tables.table3([{'rows': [row, silent]}])
  assert len(shown.rows) == len(printed.TABLE3) - 1 + 2
  first, second = shown.rows[:2]
  assert (first.keys['target'], first.keys['draft'], first.paper) == (
    'a small target',
    'two-grams',
    0.19,
  )
  assert first.details['stands in for'] == 't5_xxl_ende, bigram'
  assert (first.details['proposes'], first.details['tokens per call']) == (
    0.9,
    1.2,
  )
  assert second.measured is None and 'proposed nothing' in second.not_measured
  others = [tuple(r.keys.values()) for r in shown.rows[2:]]
  assert ('t5_xxl_ende', 'bigram', 0) in others
  assert ('t5_xxl_ende', 'bigram', 1) not in others
  # Without a lossless rate there is nothing to be lenient about.
  assert len(tables.table5([{'rows': [silent]}]).rows) == len(printed.TABLE5)
  # Table 5 likewise.
  lossy = [row | {'lenience': 0.1}]
  first, *others = tables.table5([{'rows': lossy}]).rows
  assert first.paper == 0.32 and len(others) == len(printed.TABLE5) - 1


@pytest.mark.parametrize(
  ('options', 'words'),
  [
    ({'items': ('table9',)}, "got 'table9'"),
    ({'items': ('table2',)}, 'table2 needs ReproduceConfig.suite'),
    ({'items': ('figure1',)}, 'figure1 needs ReproduceConfig.engine'),
  ],
)
def test_a_missing_part_is_named(options, words):
  with pytest.raises(ValueError, match=words):
    reproduce.ReproduceConfig(output_dir='x', **options)


def test_an_unknown_drafter_is_named():
  with pytest.raises(ValueError, match='t5_tiny'):
    table2_suite.SuiteConfig('x', network(1), {'t5_tiny': network(1)})
