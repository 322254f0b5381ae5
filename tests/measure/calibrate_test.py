"""Calibration and acceptance rates of a small random pair, end to end."""

import dataclasses
import functools
import json
import math
import re
import types
from unittest.mock import Mock

import numpy as np
import pytest
import rich.console

import toy_calibration
import toy_models
from small_vocabulary import network
from specdec_jax import analysis, infer
from specdec_jax.cli import gin_flags
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.engine import calibration
from specdec_jax.engine.calibration import CalibrationError
from specdec_jax.engine.engine import Engine
from specdec_jax.files import host_cache
from specdec_jax.measure import acceptance, calibrate, calls, compare
from specdec_jax.models.model import Model
from specdec_jax.paper.reproduce import ReproduceConfig
from specdec_jax.text.tasks import LocalTask
from specdec_jax.training import ngram

LINES = ['the red dog runs', '', 'a cat sleeps', 'the old house sings here']


def test_what_cannot_be_written_is_refused_first(tmp_path):
  """Before anything else of the configuration is looked at."""
  (tmp_path / 'file').write_text('')
  programs = acceptance.measure_alpha, calibrate.calibrate, ngram.fit_ngram
  programs = *programs, calls.benchmark, compare.compare
  cases = [(program, 'output_file') for program in programs]
  for measure, field in (*cases, (compare.compare, 'plot_file')):
    paths = dict.fromkeys(('input_file', 'output_file', 'plot_file'))
    config = types.SimpleNamespace(**paths | {field: str(tmp_path / 'file/x')})
    with pytest.raises(ValueError, match='file.* cannot be written'):
      measure(config)


SMALL = {'engines': {'x': Engine}, 'paper_target': 't5_xxl_ende'}
ALPHAS_OF = acceptance.MeasureAlphaConfig
ALPHA = functools.partial(ALPHAS_OF, input_file='x', **SMALL)
CALLS = functools.partial(calls.BenchmarkConfig, network(1), network(1))
COMPARE = functools.partial(compare.CompareConfig, Engine, 'lines')
PAPER = functools.partial(ReproduceConfig, output_dir='x')
SHOWN = {'engine': lambda: None, 'text': 'a'}


@pytest.mark.parametrize(
  'config, options, words',
  [
    (ALPHA, {'num_tokens': 0}, 'num_tokens.*0'),
    (ALPHA, {'temperatures': (-1.0,)}, 'temperatures'),
    (ALPHA, {'engines': {}}, 'engines.*{}'),
    (ALPHA, {'paper_drafts': {'x': 't5_smal'}}, 'paper_drafts.*t5_smal'),
    (ALPHA, {'paper_drafts': {'y': 't5_small'}}, "paper_drafts.*'y'"),
    (CALLS, {'gammas': (4, 0)}, 'gammas.*4, 0.'),
    (CALLS, {'repeats': 1}, 'repeats.*1'),
    (CALLS, {'forced_acceptance': 1.5}, 'forced_acceptance.*1.5'),
    (CALLS, {'call_sizes': (2, 4)}, 'call_sizes.*2, 4'),
    (COMPARE, {'methods': []}, 'methods: '),
    (COMPARE, {'methods': [compare.Method('plain')]}, 'methods: '),
    (COMPARE, {'methods': [compare.Method('a')] * 2}, 'methods: '),
    (PAPER, {'items': ('table9',)}, 'items.*table9'),
    (PAPER, {'items': ('table2',)}, 'suite.*table2'),
    (PAPER, {'items': (), 'drafts': {'t5_tiny': network(1)}}, 'drafts.*t5_tin'),
    (PAPER, SHOWN | {'items': ['figure5']}, 'costs.*figure5'),
    (PAPER, SHOWN | {'items': ['figure1'], 'measure': False}, 'measure'),
  ],
)
def test_settings_are_checked_first(config, options, words):
  with pytest.raises(ValueError, match=words):
    config(**options)


@pytest.fixture(scope='module')
def engine(tokenizer):
  """One for all tests, so that its programs are compiled once."""
  limits = {'max_input_len': 16, 'max_decode_len': 8}
  return toy_models.chain_engine(tokenizer, **limits)


@pytest.fixture(scope='module')
def prompts(folder):
  path = folder / 'prompts.txt'
  path.write_text('\n'.join(LINES) + '\n')
  return str(path)


def quiet():
  return rich.console.Console(record=True, width=140)


def test_a_calibration_holds_what_it_was_made_of(
  engine, prompts, folder, monkeypatch
):
  for module in (calls, calibration):  # the calls of a toy take microseconds
    monkeypatch.setattr(module, 'contradiction', lambda _: '')
  console = quiet()
  sizes = {'num_tokens': 20, 'max_gamma': 1, 'repeats': 2, 'calls_a_run': 1}
  path = str(folder / 'calibration.json')
  sizes |= {'input_len': 8, 'decode_len': 32, 'output_file': path}
  config = calibrate.CalibrateConfig(lambda: engine, prompts, **sizes)
  with pytest.raises(CalibrationError, match='time is over'):
    calibrate.calibrate(config, console, until=0.0)
  with pytest.raises(CalibrationError, match='give more minutes'):
    calibrate.calibrate(dataclasses.replace(config, minutes=1e-9), console)
  calibrate.calibrate(config, console)
  found = calibration.load(path)
  (one,), (costs,) = found.choices, found.record['costs']
  assert one.rows == costs['batch'] == 1
  assert len(one.factors) == len(one.call_cost) == 2 and one.factors[0] == 1.0
  # Where a gamma was chosen, a run of it counts too.
  run = found.record.get('run', {'speed_up': 1.0, 'predicted': 1.0})
  worth = min(run['speed_up'], run['predicted'])
  assert one.expected_speed_up == max(1.0, worth)
  assert (one.gamma > 0) == (worth > 1)
  assert found.record['acceptance_rate']['num_tokens'] >= 20
  # The verdict comes before the table.
  assert 'speculation' in console.export_text().partition('What gamma')[0]


def test_decode_takes_gammas_from_a_calibration(engine, prompts, tmp_path):
  """Other gammas are other settings, which a run that goes on refuses."""
  path = str(tmp_path / 'calibration.json')

  def run(*gammas, rows):
    choices = [*map(toy_calibration.choice, (1, 3), gammas)]
    of = {'fingerprints': engine.fingerprints, 'choices': choices}
    toy_calibration.make(**of).save(path)
    options = {'batching': 'continuous' if rows > 1 else 'fixed'}
    options |= {'mode': 'speculative', 'batch_size': rows, 'calibration': path}
    output_dir = str(tmp_path / str(rows))
    config = infer.DecodeConfig(lambda: engine, prompts, output_dir, **options)
    return infer.decode(config, console=quiet())

  summary = run(2, 0, rows=3)
  assert summary['gammas'] == {'1': 2, '3': 0} and 'speculative' in summary
  with pytest.raises(ValueError, match='gammas'):
    run(1, 0, rows=3)
  alone = run(0, 2, rows=1)
  assert alone['gammas'] == {'1': 0} and 'plain' in alone


# The gamma that pays on a host, from a pair's known acceptance.

COSTS = {'encoder': 2.0, 'draft_encoder': 0.1, 'round_7': 2.7, 'call_1': 1.0}
CHEAP = COSTS | {'call_2': 1.0, 'call_5': 1.2, 'call_8': 2.0, 'round_1': 1.1}
ALPHAS = {0.0: 0.8, 1.0: 0.01}  # by temperature
DEAR = COSTS | {'call_2': 2.0, 'call_5': 5.0, 'call_8': 8.0}
DEAR |= {'round_7': 9.0, 'round_1': 3.0}


def rounds_of(alpha):
  """A rate, and the rounds of 16 tokens that are accepted independently."""
  rounds = [analysis.expected_rounds([alpha] * 16, x) / 16 for x in range(9)]
  return {'alpha': alpha, 'rounds': rounds}


def test_costs_and_acceptance_decide(engine, tmp_path, monkeypatch):
  with monkeypatch.context() as patched:
    patched.setattr(calls, 'contradiction', lambda _: '')
    assert set(calibrate.host_times(engine, 1, 0.0)) == set(CHEAP)
    patched.setattr(calls, 'contradiction', lambda _: 'a call took less')
    with pytest.raises(CalibrationError, match='a call took less'):
      calibrate.host_times(engine, 1, 0.0)
  monkeypatch.setattr(host_cache, 'user_cache', lambda: tmp_path / 'cache')
  path, runs, console = tmp_path / 'acceptance.json', [], quiet()

  def chosen(costs, rows=1, temperature=0.0, when='unknown', **changes):
    """By a record of acceptance with changed rows."""
    row = {'num_tokens': 1600, 'num_outputs': 100, 'rounds_errors': [0.01] * 9}
    row |= {'fingerprints': dict(engine.fingerprints), 'lenience': 1.0}
    rates = [{'temperature': t, **rounds_of(a)} for t, a in ALPHAS.items()]
    known = [row | rate | changes for rate in rates]
    path.write_text(json.dumps({'kind': 'alpha', 'rows': known}))
    times = Mock(side_effect=lambda *_: runs.append(1) or costs)
    monkeypatch.setattr(calibrate, 'host_times', times)
    settings = engine, str(path), rows, temperature, console, when
    return calibrate.for_host(*settings)

  assert chosen(CHEAP, when='never') is None and not runs
  measured = chosen(CHEAP)
  choice = measured.at(1)
  assert 3 <= choice.gamma <= 5 and 1.5 < choice.expected_speed_up < 2.5
  low, high = choice.interval
  assert low < choice.expected_speed_up < high
  assert '1.20' in calibrate.host_verdict(measured)
  # What an earlier start measured counts.
  for when in ('unknown', 'never'):
    assert chosen(DEAR, when=when).at(1) == choice and len(runs) == 1
  # Other rows are another measurement, and here nothing pays.
  assert chosen(DEAR, rows=2).at(2).gamma == 0
  # Nor with proposals that are hardly accepted.
  assert chosen(CHEAP, temperature=1.0).at(1).gamma == 0 and len(runs) == 3
  # A layout of kernels is another measurement.
  for layout in ('in_out', 'out_in', 'out_in'):
    monkeypatch.setattr(engine, 'kernel_layout', layout)
    chosen(CHEAP)
  assert len(runs) == 4
  # The acceptance of another pair, or of lossy outputs, says nothing.
  assert chosen(CHEAP, fingerprints={'target': 'another'}) is None
  assert chosen(CHEAP, lenience=0.5) is None
  # What was kept and cannot be is measured again.
  for kept in (tmp_path / 'cache').glob('calls-*'):
    content = json.loads(kept.read_text())
    content['value'] |= {'call_8': 0.1}
    kept.write_text(json.dumps(content))
  monkeypatch.setattr(engine, 'kernel_layout', 'in_out')
  with pytest.warns(UserWarning, match='a call over 8 .* measured again'):
    assert chosen(CHEAP).at(1).gamma == choice.gamma and len(runs) == 5
  # Times that contradict themselves are said, and not kept.
  before = sorted((tmp_path / 'cache').iterdir())
  wrong = CalibrationError('a call took less')
  monkeypatch.setattr(calibrate, 'host_times', Mock(side_effect=wrong))
  found = calibrate.for_host(engine, str(path), 3, 0.0, console)
  assert found is None and 'a call took less' in console.export_text()
  assert sorted((tmp_path / 'cache').iterdir()) == before


def test_a_gamma_is_worth_no_more_than_in_a_run(monkeypatch):
  times = {name: {'median': ms} for name, ms in CHEAP.items()}
  costs = [{'batch': 1, 'times_ms': times}]
  rate = {'standard_error': 0.02, 'proposes': 1.0, **rounds_of(0.8)}
  rate |= {'num_tokens': 1600, 'num_outputs': 100, 'rounds_errors': [0.01] * 9}
  pair = types.SimpleNamespace(fingerprints={}, num_input_tokens=len)
  made = calibrate._conclude(pair, 0.0, rate, costs)
  texts = [f'text {number}' for number in range(40)]
  predicted = made.at(1).expected_speed_up
  for run, start_ms, gamma, words in (
    (predicted, 3.0, made.at(1).gamma, 'pays here'),
    (0.9 * predicted, 3.0, made.at(1).gamma, 'pays here'),
    # It is not worth more than predicted.
    (3.0, 3.0, made.at(1).gamma, 'busy'),
    (0.43, 3.0, 0, 'does not pay.* 0.43 times.* busy'),
    # Disturbed until the first token.
    (0.9 * predicted, 20.0, made.at(1).gamma, 'pays here'),
  ):

    def decoded(methods, part, *_, run=run, start_ms=start_ms, **__):
      tokens, all_ms = np.full(len(part), 3 * 16), (start_ms, 18.0, 18.0 / run)
      rounds = [np.full((3, len(part)), ms) for ms in all_ms]
      made = [types.SimpleNamespace(ms=ms, tokens=tokens) for ms in rounds]
      return dict(zip(methods, made, strict=True))

    monkeypatch.setattr(calibrate.calls, 'decode_in_turn', decoded)
    checked = calibrate._with_run(made, pair, texts, math.inf)
    choice = checked.at(1)
    assert choice.gamma == gamma and choice.factors == made.at(1).factors
    assert choice.expected_speed_up <= max(1.0, min(run, 1.01 * predicted))
    low, high = choice.interval
    assert low <= choice.expected_speed_up <= high
    assert re.search(words, calibrate.report(checked)[0])


def test_what_is_shipped_is_of_the_shipped_pair():
  gin_flags.load(['--gin_file=gin/runs/demo.gin'])
  config = gin_flags.build(infer.DecodeConfig)
  rows = json.loads((gin_flags.ROOT / config.acceptance).read_text())['rows']
  made = config.engine()
  assert made.config.gamma is None
  assert all(row['fingerprints'] == made.fingerprints for row in rows)


# Acceptance rates.


def test_alpha_of_a_drafter_that_seldom_proposes(engine, folder, tokenizer):
  """Over a task of a file; shown again by `reuse`."""
  path = folder / 'pairs.test.tsv'
  path.write_text('the red dog\tx\nthe red dog\ty\na cat sleeps here\tx\n')

  def copying():
    target = Model(engine.target, engine.params.target, tokenizer)
    limits = {'max_input_len': 4, 'max_decode_len': 16}  # cuts both texts
    return Engine(target, prompt_lookup(), **limits)

  task = LocalTask('pairs', {'test': str(path)}, tokenizer.path)
  paper = {'paper_target': 't5_xxl_ende', 'paper_drafts': {'copy': 'bigram'}}
  options = {'truncate': True, 'num_tokens': 200, 'temperatures': (1.0,)}
  options |= {'reuse': True, 'output_file': str(folder / 'drafters.json')}
  config = ALPHAS_OF({'copy': copying}, task, **options, **paper)
  (row,) = acceptance.measure_alpha(config, quiet())['rows']
  assert 0 < row['proposes'] < 1
  assert 0 < row['alpha'] < 1
  assert row['paper'] == ['t5_xxl_ende', 'bigram']
  # Each of the two texts once a pass.
  assert row['num_outputs'] * 16 >= 200 and row['num_outputs'] % 2 == 0

  engines = {'copy': lambda: pytest.fail('measured again')}
  again = dataclasses.replace(config, engines=engines)
  assert acceptance.measure_alpha(again, quiet())['rows'] == [row]
  other = dataclasses.replace(again, num_tokens=300)
  with pytest.raises(ValueError, match='num_tokens was 200, is 300'):
    acceptance.measure_alpha(other, quiet())


def test_of_one_text_there_is_no_calibration(engine, tmp_path):
  path = tmp_path / 'one.txt'
  path.write_text('the red dog\n' * 3)
  config = calibrate.CalibrateConfig(lambda: engine, str(path))
  with pytest.raises(ValueError, match='input_file: expected two texts'):
    calibrate.calibrate(config, quiet())
