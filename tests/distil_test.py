"""`specdec distil`: from a T5 and texts to a calibrated drafter."""

import dataclasses
import importlib.util
import shutil

import gin
import jax
import numpy as np
import pytest

import small_vocabulary
from specdec_jax.checkpoints import huggingface
from specdec_jax.checkpoints.disk_arrays import fingerprint
from specdec_jax.cli import main
from specdec_jax.engine import calibration
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.loading import load
from specdec_jax.models.model import Model
from specdec_jax.models.other_ids import Shortlisted
from specdec_jax.training import DistilConfig, distil, own_drafter
from specdec_jax.training.outputs import read_outputs

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('safetensors') is None,
  reason="needs safetensors: pip install 'specdec_jax[huggingface]'",
)
TEXTS = small_vocabulary.sentences()[:40]
QUICK = {
  'max_input_length': 32,
  'max_length': 14,
  'steps': 3,
  'max_gamma': 1,
  'num_tokens': 20,
  'repeats': 2,
}


def test_decoding_and_learning_leave_time_for_the_rest():
  for minutes in (0, 1, 30, 90):
    decoding, learning = own_drafter._shares(minutes)
    assert decoding + learning <= minutes - min(minutes / 3, 10) + 1e-9
    assert learning >= decoding or not minutes


@pytest.fixture(scope='module')
def target(folder, tokenizer):
  """A T5 whose outputs end after some tokens, in a folder."""
  network = small_vocabulary.network(2)
  params = network.init(jax.random.key(0))
  kernel = 6.0 * params['decoder']['logits_dense']['kernel']
  params['decoder']['logits_dense']['kernel'] = kernel.at[:, 1].mul(4.0)
  huggingface.save_huggingface(folder / 'target', network.config, params)
  shutil.copy(tokenizer.path, folder / 'target' / 'spiece.model')
  return str(folder / 'target')


@pytest.fixture(scope='module')
def texts(folder):
  path = folder / 'texts.txt'
  path.write_text('\n'.join(TEXTS) + '\n')
  return str(path)


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)

  def run(*argv):
    status = main.main(list(argv))
    shown = capsys.readouterr()
    gin.clear_config()
    return status, shown.out, shown.err

  yield run
  gin.clear_config()


def quick(**changes):
  return [f'--{name}={value}' for name, value in (QUICK | changes).items()]


def test_from_texts_to_a_calibrated_pair(run, target, texts, tmp_path):
  flags = ['--target', target, '--texts', texts, '--output-dir', 'mine']
  status, out, err = run('distil', *flags, *quick())
  assert status == 0, err
  assert 'speculation' in out and 'specdec decode --target' in out
  mine = load('mine')
  assert mine.network.reads_encoder
  assert isinstance(mine.network, Shortlisted)
  assert mine.made_for == fingerprint(load(target).params)
  assert 'agreement' in err  # of the held-out texts
  held_out = (tmp_path / 'mine/held_out.txt').read_text().splitlines()
  assert 2 <= len(held_out) < len(set(TEXTS)) and set(held_out) < set(TEXTS)
  place = np.asarray(mine.params['place'])
  outputs = read_outputs('mine/training/outputs/train.jsonl')
  listed = set(np.flatnonzero(place < mine.network.num_ids))
  assert listed == {1}.union(*(ids for _, ids in outputs))

  # The pair decodes as the target does, and the calibration is this pair's.
  engine = Engine(load(target), mine, max_input_len=32, max_decode_len=14)
  made = calibration.load('mine/calibration.json')
  assert made.fingerprints == engine.fingerprints
  have = engine.generate(TEXTS[:5])
  want = engine.generate(TEXTS[:5], speculative=False)
  assert [c.tokens for c in have] == [c.tokens for c in want]

  # Again: nothing is trained or measured twice.
  before = (tmp_path / 'mine/model.safetensors').read_bytes()
  status, out, err = run('distil', *flags, *quick())
  assert status == 0, err
  assert 'of this pair already' in out and 'resumed at step 3' in err
  assert (tmp_path / 'mine/model.safetensors').read_bytes() == before
  # With other settings it is another run.
  status, _, err = run('distil', *flags, *quick(num_layers=2))
  assert status == 2 and 'other settings' in err


def test_bad_input_is_seen_first(run, target, texts, tmp_path):
  def fails(*changes, **settings):
    flags = ['--target', target, '--texts', texts, '--output-dir', 'new']
    status, _, err = run('distil', *flags, *changes, *quick(**settings))
    assert status == 2
    assert not (tmp_path / 'new').exists()
    return err

  (tmp_path / 'few.txt').write_text('a dog\n' * 20)
  assert 'few.txt' in fails('--texts', 'few.txt')
  assert 'no line that can be decoded' in fails(max_input_length=2)
  assert 'num_layers: expected at most 2' in fails('--num-layers', '3')
  assert 'output_dir' in fails('--output-dir', target)
  assert 'output_dir' in fails('--output-dir', texts)


def test_targets_that_have_no_such_drafter(target, texts, tmp_path):
  found = load(target)
  alone = dataclasses.replace(found.network.config, num_encoder_layers=0)
  for model, words in (
    (Model(type(found.network)(alone), {}, name='x'), 'T5 with an encoder'),
    (Model(found.network, {}), 'loaded from a checkpoint'),
    (Model(found.network, {}, name='x'), 'vocabulary'),
  ):
    config = DistilConfig(model, texts, str(tmp_path / 'new'))
    with pytest.raises(ValueError, match=words):
      distil(config)
