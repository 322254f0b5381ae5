"""`specdec distil`: from a T5 and texts to a calibrated drafter."""

import dataclasses
import shutil

import gin
import jax
import numpy as np
import pytest

import calibration_test
import small_vocabulary
from specdec_jax.checkpoints import huggingface
from specdec_jax.checkpoints.disk_arrays import fingerprint
from specdec_jax.cli import main
from specdec_jax.engine import calibration
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.loading import load
from specdec_jax.models.model import Model
from specdec_jax.models.other_ids import Shortlisted
from specdec_jax.models.t5 import T5
from specdec_jax.training import DistilConfig, distil, own_drafter
from specdec_jax.training.outputs import read_outputs

pytest.importorskip('safetensors')
TEXTS = small_vocabulary.sentences()[:40]
QUICK = {'max_input_length': 32, 'max_length': 14, 'steps': 3}
QUICK |= {'max_gamma': 1, 'num_tokens': 20, 'repeats': 2}


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
    shown = capsys.readouterr()
    gin.clear_config()
    return status, shown.out, shown.err

  return run


def check_drafter(target, tmp_path, err):
  """What is in its folder, for this target and of these texts."""
  assert 'agreement' in err  # of the held-out texts
  mine = load('mine')
  assert mine.network.reads_encoder
  assert isinstance(mine.network, Shortlisted)
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


def test_from_texts_to_a_drafter(run, target, tmp_path, monkeypatch):
  """All but the calibration, of which `measure_test` has a quick one."""
  made = calibration_test.make()
  monkeypatch.setattr(own_drafter, '_calibrate', lambda *_: made)
  status, out, err = run()
  assert status == 0, err
  assert 'specdec decode --target' in out
  check_drafter(target, tmp_path, err)
  check_again(run, tmp_path, '')


@pytest.mark.slow
def test_from_texts_to_a_calibrated_pair(run, target, tmp_path):
  status, out, err = run()
  assert status == 0, err
  assert 'speculation' in out and 'specdec decode --target' in out
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
    ('--num-layers=3', 'num_layers: expected at most 2'),
    (f'--output-dir={target}', 'output_dir'),
    (f'--output-dir={target}/texts.txt', 'output_dir'),
  ):
    status, _, err = run(flag)
    assert status == 2 and words in err
    assert not (tmp_path / 'mine').exists()


def test_targets_that_have_no_such_drafter(target, tmp_path):
  network = load(target).network
  alone = dataclasses.replace(network.config, num_encoder_layers=0)
  for model, words in (
    (Model(T5(alone), {}, name='x'), 'T5 with an encoder'),
    (Model(network, {}), 'loaded from a checkpoint'),
    (Model(network, {}, name='x'), 'vocabulary'),
  ):
    texts = f'{target}/texts.txt'
    with pytest.raises(ValueError, match=words):
      distil(DistilConfig(model, texts, str(tmp_path / 'new')))
