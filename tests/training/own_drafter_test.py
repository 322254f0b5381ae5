"""`specdec distil`: from a T5 and texts to a calibrated drafter."""

import dataclasses
import math
import re
import shlex
import shutil
import types
from unittest import mock

import gin
import jax
import numpy as np
import optax
import pytest
import rich.console

import small_vocabulary
import toy_calibration
from folders import write_nllb
from specdec_jax.checkpoints import huggingface, t5x
from specdec_jax.checkpoints.config_json import SpecialIds
from specdec_jax.checkpoints.disk_arrays import fingerprint
from specdec_jax.cli import main
from specdec_jax.engine import calibration
from specdec_jax.engine.calibration import CalibrationError
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.loading import load
from specdec_jax.measure import calls
from specdec_jax.models.families import network_of
from specdec_jax.models.model import Model
from specdec_jax.models.other_ids import Shortlisted
from specdec_jax.models.t5 import T5
from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.training import DistilConfig, distil, own_drafter, trainer
from specdec_jax.training.outputs import read_outputs
from toy_families import NLLB

TEXTS = small_vocabulary.sentences()[:40]
QUICK = {'max_input_length': 32, 'max_decode_len': 14, 'steps': 3}
QUICK |= {'max_gamma': 1, 'num_tokens': 20, 'repeats': 2}
GIN = """from __gin__ import dynamic_registration
from specdec_jax.models import t5
SMALL = @t5.T5()
t5.T5.config = @t5.T5Config()"""


@pytest.fixture(scope='module')
def target(folder, tokenizer):
  """A T5 whose outputs end after some tokens, in a folder; texts beside it."""
  network = small_vocabulary.network(2)
  params = network.init(jax.random.key(0))
  kernel = 6.0 * params['decoder']['logits_dense']['kernel']
  params['decoder']['logits_dense']['kernel'] = kernel.at[:, 1].mul(4.0)
  huggingface.save_huggingface(folder / 'target', network.config, params)
  shutil.copy(tokenizer.path, folder / 'target' / 'spiece.model')
  (folder / 'target' / 'texts.txt').write_text('\n'.join(TEXTS) + '\n')
  # The same as T5X has it, which does not say its sizes.
  t5x.save_t5x(folder / 'target.msgpack', params, 0)
  sizes = dataclasses.asdict(network.config)
  fields = [f't5.T5Config.{name} = {x!r}' for name, x in sizes.items()]
  (folder / 'sizes.gin').write_text('\n'.join([*GIN.split('\n'), *fields]))
  return str(folder / 'target')


@pytest.fixture
def run(capsys, target, tmp_path, monkeypatch):
  """Status, stdout and stderr of `specdec distil` with flags, in `tmp_path`."""
  monkeypatch.chdir(tmp_path)

  def run(*argv, **changes):
    flags = [f'--{name}={value}' for name, value in (QUICK | changes).items()]
    given = ['--target', target, '--texts', f'{target}/texts.txt']
    given += ['--output-dir', 'mine']
    status = main.main(['distil', *given, *flags, *argv])
    gin.clear_config()
    return status, *capsys.readouterr()

  return run


def check_drafter(target, tmp_path, err):
  """What is in its folder, for this target and of these texts."""
  assert 'agreement' in err  # of the held-out texts
  mine = load('mine')
  assert mine.network.reads_encoder and isinstance(mine.network, Shortlisted)
  assert mine.made_for == fingerprint(load(target).params)
  held_out = (tmp_path / 'mine/held_out.txt').read_text().splitlines()
  assert 2 <= len(held_out) < len(set(TEXTS)) and set(held_out) < set(TEXTS)
  place = np.asarray(mine.params['place'])
  outputs = read_outputs('mine/training/outputs/train.jsonl')
  listed = set(np.flatnonzero(place < mine.network.num_ids))
  assert listed == {1}.union(*(ids for _, ids in outputs))
  return mine


def check_again(run, tmp_path, said):
  """Nothing is trained or measured twice."""
  before = (tmp_path / 'mine/model.safetensors').read_bytes()
  status, out, err = run()
  assert status == 0, err
  assert said in out and 'resumed at step 3' in err
  assert (tmp_path / 'mine/model.safetensors').read_bytes() == before
  # With other settings it is another run.
  status, _, err = run(num_layers=2)
  assert status == 2 and 'other settings' in err


def check_command(capsys, out, held_out):
  """The last line is a command that decodes the texts that were held out."""
  name, *argv = shlex.split(out.splitlines()[-1])
  assert name == 'specdec' and main.main(argv) == 0
  gin.clear_config()
  shown = capsys.readouterr().out.splitlines()
  assert len(shown) == len(held_out.read_text().splitlines())
  return argv


@pytest.fixture
def refused(monkeypatch):
  """No calibration, and an optimiser that compiles quickly."""
  refused = mock.Mock(side_effect=CalibrationError('a call took less'))
  monkeypatch.setattr(own_drafter.calibrate, 'calibrate', refused)
  monkeypatch.setattr(own_drafter.calibrate, 'time_calls', lambda *_: [])
  monkeypatch.setattr(trainer, 'make_optimizer', optax.sgd)
  return refused


def test_from_texts_to_a_drafter(run, capsys, target, tmp_path, refused):
  """All but the calibration, which `measure/calibrate_test` has quickly.

  What has learned nothing is no drafter: this is said, and the same command
  goes on.
  """
  flags = [f'--gin_file={target}/../sizes.gin', '--gin.TARGET=%SMALL']
  flags += ['--gin_file=gin/runs/own_drafter.gin', f'--target={target}.msgpack']
  flags.append(f'--vocab={target}/spiece.model')
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(own_drafter.calibrate, 'time_calls', refused)
    patched.setattr(own_drafter._Measured, 'closing_s', lambda _: math.inf)
    status, _, err = run(*flags)
    assert status == 2 and 'minutes: expected more than 90' in err
    assert not (tmp_path / 'mine/model.safetensors').exists()
  status, out, err = run(*flags)
  assert status == 0, err
  assert 'No calibration: a call took less' in out
  assert 'parameters after 3 steps' in err
  check_drafter(target, tmp_path, err)
  argv = check_command(capsys, out, tmp_path / 'mine/held_out.txt')
  assert '--calibration' not in argv
  refused.side_effect, refused.return_value = None, toy_calibration.make()
  with mock.patch.object(own_drafter, '_num_steps', return_value=2):
    _, out, _ = run()  # ended by time
  assert 'learned in 2 steps only' in out
  check_again(run, tmp_path, '--calibration mine/calibration.json')


def test_there_is_one_budget_of_time(target, tmp_path, monkeypatch):
  """What is left to learn in, by what the calls took; then what is measured."""
  clock = types.SimpleNamespace(now=0.0)
  clock.monotonic = lambda: clock.now
  monkeypatch.setattr(own_drafter, 'time', clock)
  monkeypatch.setattr(own_drafter, '_shortlist', lambda _: None)
  monkeypatch.setattr(own_drafter._Measured, '_engine', lambda *_: None)
  network = load(target).network
  config = DistilConfig(load(target), 'texts', str(tmp_path), minutes=3)
  end = 60 * config.minutes - own_drafter._STARTED_S

  def left(at, seconds, wrong=''):
    """Seconds to keep; what is said if the training takes the others."""
    clock.now = at
    console = rich.console.Console(record=True, width=200)
    made = own_drafter._Measured(config, 8, end, console)

    def time_calls(*_):
      clock.now += seconds
      if wrong:
        raise CalibrationError(wrong)
      return [1]

    monkeypatch.setattr(own_drafter.calibrate, 'time_calls', time_calls)
    monkeypatch.setattr(own_drafter.calibrate, 'calibrate', lambda *_: made)
    made.time_calls(network, {})
    closing = made.closing_s()
    clock.now = end - closing
    return closing, made.calibrated() is made, console.export_text()

  assert left(60, 20) == (32, True, '')
  # Behind the training they are timed again; not where there is no time.
  assert left(60, 20, 'wrong') == (56, True, '')
  for at, seconds, wrong, words in (
    (60, 60, 'It is wrong.', 'It is wrong'),
    (60, 90, '', 'time is over'),
    (130, 0, '', 'time is over'),
  ):
    closing, measures, text = left(at, seconds, wrong)
    assert closing == 8 and not measures and words in text
  with pytest.raises(ValueError, match='minutes: expected more than 3'):
    left(100, 70)


@pytest.mark.slow
def test_from_texts_to_a_pair(run, capsys, target, tmp_path, monkeypatch):
  # The calls of a toy take microseconds.
  for module in (calls, calibration):
    monkeypatch.setattr(module, 'contradiction', lambda _: '')
  status, out, err = run()
  assert status == 0 and 'speculation' in out, err
  argv = check_command(capsys, out, tmp_path / 'mine/held_out.txt')
  assert '--calibration' in argv
  mine = check_drafter(target, tmp_path, err)
  # The pair decodes as the target does, and the calibration is this pair's.
  engine = Engine(load(target), mine, max_input_len=32, max_decode_len=14)
  made = calibration.load('mine/calibration.json')
  assert made.fingerprints == engine.fingerprints
  have = engine.generate(TEXTS[:5])
  want = engine.generate(TEXTS[:5], speculative=False)
  assert [c.tokens for c in have] == [c.tokens for c in want]
  check_again(run, tmp_path, 'of this pair already')


def test_bad_input_is_seen_first(run, target, tmp_path):
  (tmp_path / 'few.txt').write_text('a dog\n' * 20)
  for flag, words in (
    ('--texts=few.txt', 'few.txt'),
    ('--max-input-length=2', 'no line that can be decoded'),
    ('--num-layers=3', '--num-layers: expected at most 2'),
    ('--minutes=0.1', 'minutes: expected 0 .*, or 2 minutes or more'),
    ('--minutes=1e9', 'minutes: expected .* from 0 to 10080'),
    ('--max-gamma=1000000', '--max-gamma: expected .* from 1 to 64'),
    (f'--output-dir={target}', 'output_dir'),
    (f'--output-dir={target}/texts.txt', 'output_dir'),
  ):
    status, _, err = run(flag)
    assert status == 2 and re.search(words, err)
    assert not (tmp_path / 'mine').exists()


def test_targets_that_have_no_such_drafter(target, tmp_path):
  network = load(target).network
  alone = dataclasses.replace(network.config, num_encoder_layers=0)
  for model, words in (
    (Model(T5(alone), {}, name='x'), 'T5, BART, .* with an encoder'),
    (Model(network, {}), 'in a checkpoint'),
    (Model(network, {}, name='x'), 'vocabulary'),
  ):
    texts = f'{target}/texts.txt'
    with pytest.raises(ValueError, match=words):
      distil(DistilConfig(model, texts, str(tmp_path / 'new')))


@pytest.mark.usefixtures('refused')
def test_a_target_with_languages(run, capsys, tmp_path):
  """Its texts and outputs begin with them, in training as in the command."""
  folder = write_nllb(tmp_path / 'nllb')
  size = Tokenizer(folder).vocab_size
  config = dataclasses.replace(NLLB, vocab_size=size, head_dim=8)
  params = small_vocabulary.weights(network_of(config), 0)
  # Its outputs end after some tokens.
  params['token_embedder']['embedding'][2] *= 5.0
  ids = SpecialIds(2, (2,), 1)
  huggingface.save_huggingface(folder, config, params, ids=ids)
  (folder / 'texts.txt').write_text('\n'.join(TEXTS) + '\n')
  flags = [f'--target={folder}', f'--texts={folder}/texts.txt']
  flags.append('--source-lang=eng_Latn')
  status, _, err = run(*flags)
  assert status == 2 and 'target_lang' in err
  assert not (tmp_path / 'mine').exists()
  status, out, err = run(*flags, '--target-lang=deu_Latn')
  assert status == 0, err
  known = load(str(folder)).tokenizer.languages
  for source, output in read_outputs('mine/training/outputs/train.jsonl'):
    assert source[0] == known['eng_Latn'] and output[0] == known['deu_Latn']
  argv = check_command(capsys, out, tmp_path / 'mine/held_out.txt')
  assert argv[argv.index('--target-lang') + 1] == 'deu_Latn'
