"""Checkpoints in a bucket, through TensorStore's own driver for it."""

import numpy as np
import pytest

import fake_bucket
from specdec_jax import checkpoints
from specdec_jax.files import locations
from specdec_jax.text.tasks import LocalTask
from specdec_jax.text.tokenizer import Tokenizer
from t5x_test import FIXTURES, needs_fixtures
from toy_families import assert_same

PARAMS = {'a': {'kernel': np.arange(15.0).reshape(5, 3)}, 'scale': np.ones(4)}


@needs_fixtures
@pytest.mark.parametrize(
  'kind', ['tensorstore', pytest.param('orbax', marks=pytest.mark.slow)]
)
def test_what_t5x_wrote(monkeypatch, kind):
  path = FIXTURES / kind / 'checkpoint_0'
  with fake_bucket.serve(FIXTURES, monkeypatch) as server:
    found = checkpoints.load(f'gs://models/{kind}/checkpoint_0')
  assert_same(found, checkpoints.load(path))
  # The optimiser's state stays there.
  read = [line for line in server.asked if 'alt=media' in line]
  assert read and not any('param_states' in line for line in read)


def test_own_formats(tmp_path, monkeypatch):
  checkpoints.save_orbax(tmp_path / 'deep' / 'orbax', PARAMS)
  checkpoints.save_t5x(tmp_path / 'model.msgpack', PARAMS, step=0)
  with fake_bucket.serve(tmp_path, monkeypatch):
    for name in ('deep/orbax', 'deep/orbax/', 'model.msgpack'):
      assert_same(checkpoints.load(f'gs://models/{name}'), PARAMS)
    with pytest.raises(ValueError, match=r'No checkpoint .*gs://models/none'):
      checkpoints.load('gs://models/none')


def test_a_bucket_that_is_busy_at_first(tmp_path, monkeypatch):
  checkpoints.save_t5x(tmp_path / 'model.msgpack', PARAMS, step=0)
  with fake_bucket.serve(tmp_path, monkeypatch, [503]) as server:
    assert_same(checkpoints.load('gs://models/model.msgpack'), PARAMS)
    assert not server.failures


def test_a_bucket_that_is_not_for_us(monkeypatch, tmp_path):
  with fake_bucket.serve(tmp_path, monkeypatch, [403] * 3):
    with pytest.raises(ValueError, match=r'(?s)DENIED.*gcloud auth .*or copy'):
      checkpoints.load('gs://models/model.msgpack')


def test_no_network(monkeypatch):
  """An error, and soon: TensorStore itself would try for minutes."""
  monkeypatch.setitem(locations._FIRST, 'initial_delay', '10ms')
  monkeypatch.setitem(locations._FIRST, 'max_delay', '10ms')
  fake_bucket.point_at('http://127.0.0.1:9', monkeypatch)  # nobody listens
  with pytest.raises(ValueError) as caught:
    checkpoints.load('gs://models/t5_small/checkpoint_1000000')
  for words in (
    "'gs://models/t5_small/checkpoint_1000000' cannot be read: ",
    '3 retry attempts failed',
    'Check the address, the network',
  ):
    assert words in str(caught.value)
  with pytest.raises(ValueError, match='vocab.*3 retry attempts failed'):
    Tokenizer('gs://models/vocab.model')


def test_a_bucket_that_never_answers(monkeypatch, tmp_path):
  monkeypatch.setattr(locations, 'FIRST_SECONDS', 0.2)
  with fake_bucket.serve(tmp_path, monkeypatch) as server:
    server.answering.clear()
    with pytest.raises(ValueError, match='no answer came. Check the address'):
      checkpoints.load('gs://models/model.msgpack')
    server.answering.set()


def test_a_vocabulary(folder, tokenizer, monkeypatch):
  with fake_bucket.serve(folder, monkeypatch):
    address = 'gs://models/vocab.model'
    assert Tokenizer(address).fingerprint == tokenizer.fingerprint
    lines = folder / 'lines.txt'
    lines.write_text('the old house\n')
    task = LocalTask('lines', {'test': lines}, address)
    (example,) = task.examples('test')
    assert example['inputs'].tolist()[:-1] == tokenizer.encode('the old house')
    with pytest.raises(ValueError, match='gs://models/no.model'):
      Tokenizer('gs://models/no.model')
