"""Calibration and acceptance rates of a small random pair, end to end."""

import dataclasses
import types

import pytest
import rich.console

import small_vocabulary
from specdec_jax import infer
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.engine import calibration
from specdec_jax.engine.engine import Engine
from specdec_jax.measure import (
  acceptance,
  calibrate,
  calls,
  compare,
)
from specdec_jax.models.model import Model
from specdec_jax.text.tasks import LocalTask
from specdec_jax.training import ngram

LINES = ['the red dog runs', '', 'a cat sleeps', 'the old house sings here']


@pytest.mark.parametrize(
  'measure',
  [
    acceptance.measure_alpha,
    calls.benchmark,
    calibrate.calibrate,
    compare.compare,
    ngram.fit_ngram,
  ],
)
def test_what_cannot_be_written_is_refused_first(measure, tmp_path):
  """Before anything else of the configuration is looked at."""
  (tmp_path / 'file').write_text('')
  for field in ('output_file', 'plot_file'):
    config = types.SimpleNamespace(**{field: str(tmp_path / 'file' / 'x')})
    with pytest.raises(ValueError, match='file.* cannot be written'):
      measure(config)


@pytest.fixture(scope='module')
def make_engine(tokenizer):
  """Makes one object, so that its programs are traced and compiled once."""
  engine = small_vocabulary.engine_with_itself(tokenizer)
  return lambda **_: engine


@pytest.fixture(scope='module')
def prompts(folder):
  path = folder / 'prompts.txt'
  path.write_text('\n'.join(LINES) + '\n')
  return str(path)


def quiet():
  return rich.console.Console(record=True, width=140)


@pytest.fixture(scope='module')
def calibrated(folder, make_engine, prompts):
  """The file and what was printed of a calibration."""
  console = quiet()
  config = calibrate.CalibrateConfig(
    engine=make_engine,
    input_file=prompts,
    num_tokens=20,
    input_len=8,
    decode_len=32,
    max_gamma=1,
    batches=(3, 1),
    repeats=2,
    calls_a_run=2,
    output_file=str(folder / 'calibration.json'),
  )
  calibrate.calibrate(config, console)
  return config, console.export_text()


def test_a_calibration_holds_what_it_was_made_of(calibrated):
  config, text = calibrated
  found = calibration.load(config.output_file)
  assert [one.rows for one in found.choices] == [1, 3]
  for one, costs in zip(found.choices, found.record['costs'], strict=True):
    assert len(one.factors) == 2 and one.factors[0] == 1.0
    assert one.gamma == one.factors.index(max(one.factors))
    assert one.expected_speed_up == max(one.factors)
    assert len(one.call_cost) == 2
    assert costs['batch'] == one.rows
  assert found.record['acceptance_rate']['num_tokens'] >= 20
  for one, name in zip(found.choices, ('1 row:', '3 rows:'), strict=True):
    said = 'pays here: gamma = ' if one.gamma else 'does not pay'
    if one.gamma and one.interval[0] < 1:
      said = 'may pay here: gamma = '
    # The verdict comes before all tables.
    assert f'{name} speculation {said}' in text.partition('Chosen here')[0]


def test_decode_takes_gammas_from_it(
  calibrated, make_engine, tokenizer, prompts, tmp_path
):
  """Had it chosen other gammas, which are what a run that goes on must have."""
  measured = calibration.load(calibrated[0].output_file)
  path = str(tmp_path / 'changed.json')

  def run(*gammas, name='out', rows=3, maker=make_engine):
    choices = [
      dataclasses.replace(one, gamma=gamma)
      for one, gamma in zip(measured.choices, gammas, strict=True)
    ]
    dataclasses.replace(measured, choices=choices).save(path)
    config = infer.DecodeConfig(
      maker,
      tokenizer=tokenizer,
      mixture_or_task_name=prompts,
      output_dir=str(tmp_path / name),
      decoding='speculative',
      task_feature_lengths={'inputs': 24, 'targets': 16},
      batch_size=rows,
      batching='continuous' if rows > 1 else 'fixed',
      calibration=path,
    )
    return infer.decode(config, console=quiet())

  summary = run(2, 0)
  assert summary['gammas'] == {'1': 2, '3': 0} and 'speculative' in summary
  # Its path decides nothing, what it says does.
  with pytest.raises(ValueError, match='gammas'):
    run(1, 0)
  network = small_vocabulary.network(1)
  target = Model(network, make_engine().params.target)
  drafter = Model(network, small_vocabulary.weights(network, 5))
  other = Engine(target, drafter, tokenizer=tokenizer, max_input_len=24)
  with pytest.raises(calibration.CalibrationError, match='draft was '):
    run(1, 0, name='other', maker=lambda **_: other)
  summary = run(0, 0, name='plain')
  assert summary['gammas'] == {'1': 0, '3': 0} and 'plain' in summary
  alone = run(1, 2, name='alone', rows=1)
  assert alone['gamma'] == 1 and alone['gammas'] == {'1': 1}


def test_alpha_of_a_drafter_that_seldom_proposes(
  make_engine, folder, tokenizer
):
  """Over a task of a file; shown again by `reuse`."""
  path = folder / 'pairs.test.tsv'
  path.write_text('the red dog\tx\nthe red dog\ty\na cat sleeps here\tx\n')

  def copying():
    drafts = make_engine()
    return Engine(
      Model(drafts.target, drafts.params.target),
      prompt_lookup(),
      tokenizer=tokenizer,
      max_input_len=4,  # cuts both texts
      max_decode_len=16,
    )

  config = acceptance.MeasureAlphaConfig(
    {'copy': copying},
    LocalTask('pairs', {'test': str(path)}, tokenizer.path),
    truncate=True,
    num_tokens=200,
    temperatures=(1.0,),
    output_file=str(folder / 'drafters.json'),
    reuse=True,
    paper_target='t5_xxl_ende',
    paper_drafts={'copy': 'bigram'},
  )
  (row,) = acceptance.measure_alpha(config, quiet())['rows']
  assert 0 < row['proposes'] < 1
  assert 0 < row['alpha'] < 1
  assert row['paper'] == ['t5_xxl_ende', 'bigram']
  # Each of the two texts once a pass.
  assert row['num_outputs'] * 16 >= 200 and row['num_outputs'] % 2 == 0

  def measures_again():
    raise AssertionError('measured again')

  again = dataclasses.replace(config, engines={'copy': measures_again})
  assert acceptance.measure_alpha(again, quiet())['rows'] == [row]
  other = dataclasses.replace(again, num_tokens=300)
  with pytest.raises(ValueError, match='num_tokens was 200, is 300'):
    acceptance.measure_alpha(other, quiet())


def test_one_text_has_no_error(make_engine, tmp_path):
  path = tmp_path / 'one.txt'
  path.write_text('the red dog\n' * 3)
  config = acceptance.MeasureAlphaConfig(
    {'x': make_engine}, str(path), num_tokens=40, temperatures=(1.0,)
  )
  console = quiet()
  (row,) = acceptance.measure_alpha(config, console)['rows']
  assert row['standard_error'] is None
  assert row['num_outputs'] > 1 and '±' not in console.export_text()
  with pytest.raises(ValueError, match='input_file: expected two texts'):
    calibrate.calibrate(
      calibrate.CalibrateConfig(
        engine=make_engine,
        input_file=str(path),
      ),
      quiet(),
    )


@pytest.mark.parametrize(
  ('options', 'words'),
  [
    ({'num_tokens': 0}, 'num_tokens.*0'),
    ({'temperatures': (-1.0,)}, 'temperatures'),
    ({'engines': {}}, 'engines.*{}'),
    (
      {'paper_target': 't5_xxl_ende', 'paper_drafts': {'x': 't5_smal'}},
      "'t5_smal', expected .*'t5_small'",
    ),
    (
      {'paper_target': 't5_xxl_ende', 'paper_drafts': {'y': 't5_small'}},
      "'y', expected .*'x'",
    ),
  ],
)
def test_alpha_config_says_what_is_wrong(options, words):
  options = {'engines': {'x': lambda: None}, 'input_file': 'x'} | options
  with pytest.raises(ValueError, match=words):
    acceptance.MeasureAlphaConfig(**options)
