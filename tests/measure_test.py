"""Calibration and acceptance rates of a small random pair, end to end."""

import dataclasses
import functools
import types

import jax
import pytest
import rich.console

from small_vocabulary import network
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
from specdec_jax.text.local_tasks import LocalTask
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
  """Of two models of one size, so that less is to be compiled."""
  init = network(1).init

  # One object, so that its programs are traced and compiled once.
  @functools.cache
  def make(seed=0):
    return Engine(
      Model(network(1), init(jax.random.key(seed))),
      Model(network(1), init(jax.random.key(seed + 1))),
      tokenizer=tokenizer,
      gamma=2,
      max_input_len=24,
      max_decode_len=16,
    )

  return make


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
    max_gamma=2,
    batches=(3, 1),
    repeats=2,
    calls_a_run=2,
    num_beams=2,
    output_file=str(folder / 'calibration.json'),
  )
  with pytest.MonkeyPatch.context() as patch:
    # One beam search is enough to be compiled.
    patch.setattr(calibrate, '_LEVELS', (1,))
    patch.setattr(calibrate, '_DRAFT_FACTORS', (1,))
    calibrate.calibrate(config, console)
  return config, console.export_text()


def test_a_calibration_holds_what_it_was_made_of(calibrated):
  config, text = calibrated
  found = calibration.load(config.output_file)
  assert [one.rows for one in found.choices] == [1, 3]
  for one, costs in zip(found.choices, found.record['costs'], strict=True):
    assert len(one.factors) == 3 and one.factors[0] == 1.0
    assert one.gamma == one.factors.index(max(one.factors))
    assert one.expected_speed_up == max(one.factors)
    assert len(one.call_cost) == 3
    assert costs['batch'] == one.rows
  assert found.record['acceptance_rate']['num_tokens'] >= 20
  for one, name in zip(found.choices, ('1 row:', '3 rows:'), strict=True):
    said = 'pays here: gamma = ' if one.gamma else 'does not pay'
    if one.gamma and one.interval[0] < 1:
      said = 'may pay here: gamma = '
    # The verdict comes before all tables.
    assert f'{name} speculation {said}' in text.partition('Chosen here')[0]
  assert found.beams_of(2).speed_up >= 1.0
  assert '2 beams: speculation ' in text


def test_beams_that_cannot_be_are_refused_before_the_costs(
  make_engine, prompts, monkeypatch
):
  monkeypatch.setattr(calibrate, '_costs', lambda *_: pytest.fail('costs'))
  config = calibrate.CalibrateConfig(make_engine, prompts, num_beams=999)
  with pytest.raises(ValueError, match='num_beams'):
    calibrate.calibrate(config, quiet())


def decode(config, make_engine, prompts, **options):
  console = quiet()
  summary = infer.decode(
    infer.DecodeConfig(make_engine, prompts, calibration=config, **options),
    console=console,
  )
  return summary, console.export_text()


@pytest.fixture
def with_gammas(calibrated, tmp_path):
  """The calibration's file, had it chosen other gammas for 1 row and 3."""
  measured = calibration.load(calibrated[0].output_file)

  def changed(*gammas):
    choices = [
      dataclasses.replace(one, gamma=gamma)
      for one, gamma in zip(measured.choices, gammas, strict=True)
    ]
    path = str(tmp_path / 'changed.json')
    dataclasses.replace(measured, choices=choices).save(path)
    return path

  return changed


def test_decode_takes_gamma_from_it(
  with_gammas, make_engine, prompts, tmp_path
):
  path = with_gammas(1, 2)
  alone = {'decoding': 'speculative'}
  summary, text = decode(path, make_engine, prompts, **alone)
  assert summary['gamma'] == 1 and summary['gammas'] == {'1': 1}
  assert 'for 1 row: gamma = 1' in text
  summary, text = decode(path, make_engine, prompts, batch_size=2, **alone)
  assert summary['gamma'] == 2 and summary['gammas'] == {'2': 2}
  four = tmp_path / 'four.txt'
  four.write_text('\n'.join(LINES * 2))
  summary, text = decode(path, make_engine, str(four), batch_size=4, **alone)
  assert 'for up to 3 rows at once' in text


@pytest.mark.parametrize('gammas, plain', [((2, 0), False), ((0, 0), True)])
def test_a_task_takes_gammas_from_it(
  with_gammas, make_engine, tokenizer, prompts, tmp_path, gammas, plain
):
  config = infer.DecodeConfig(
    lambda **_: make_engine(),
    tokenizer=tokenizer,
    mixture_or_task_name=prompts,
    output_dir=str(tmp_path / 'out'),
    decoding='speculative',
    task_feature_lengths={'inputs': 24, 'targets': 16},
    batch_size=3,
    batching='continuous',
    calibration=with_gammas(*gammas),
  )
  summary = infer.decode(config, console=quiet())
  assert summary['gammas'] == {'1': gammas[0], '3': gammas[1]}
  assert ('plain' in summary, 'speculative' in summary) == (plain, not plain)
  # Its path decides nothing, what it says does.
  with_gammas(1, 0)
  with pytest.raises(ValueError, match='gammas'):
    infer.decode(config, console=quiet())


def test_decode_refuses_another_models_calibration(
  calibrated, make_engine, prompts
):
  with pytest.raises(calibration.CalibrationError, match='draft was '):
    decode(calibrated[0].output_file, lambda: make_engine(seed=5), prompts)


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
