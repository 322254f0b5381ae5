"""Checkpoints in a bucket, through TensorStore's own driver for it."""

import contextlib
import http.server
import json
import pathlib
import re
import threading
import urllib.parse
from collections.abc import Iterator

import numpy as np
import pytest

from repository import T5X_FIXTURES, needs_fixtures
from specdec_jax import checkpoints
from specdec_jax.files import locations
from specdec_jax.text.tasks import LocalTask
from specdec_jax.text.tokenizer import Tokenizer
from toy_families import assert_same

_RANGE = re.compile(r'bytes=(\d+)-(\d*)')


class Bucket(http.server.ThreadingHTTPServer):
  """A folder served as a bucket of Google Cloud Storage, on this machine.

  It answers what TensorStore's own driver asks of the JSON API: lists, and
  reads of ranges. https://cloud.google.com/storage/docs/json_api/v1/objects

  Attributes:
    folder: its contents.
    failures: codes that are answered first, the last one first.
    asked: paths of all requests.
    answering: while it is not set, requests wait.
  """

  daemon_threads = True

  def __init__(self, folder: pathlib.Path, failures: list[int]):
    super().__init__(('127.0.0.1', 0), _Handler)
    self.folder, self.failures, self.asked = folder, failures, list[str]()
    self.answering = threading.Event()
    self.answering.set()


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = 'HTTP/1.1'
  server: Bucket

  def do_GET(self):
    server, folder = self.server, self.server.folder
    server.asked.append(self.path)
    server.answering.wait()
    if server.failures:
      return self._answer(server.failures.pop(), b'{}')
    url, prefix = urllib.parse.urlsplit(self.path), '/storage/v1/b/models/o'
    query = dict(urllib.parse.parse_qsl(url.query))
    if url.path == prefix:
      found = [path for path in folder.rglob('*') if path.is_file()]
      names = sorted(path.relative_to(folder).as_posix() for path in found)
      first, end = query.get('startOffset', ''), query.get('endOffset', '~')
      page = {'items': [{'name': n} for n in names if first <= n < end]}
      return self._answer(200, json.dumps(page).encode())
    path = folder / urllib.parse.unquote(url.path[len(prefix) + 1 :])
    if query.get('alt') != 'media' or not path.is_file():
      return self._answer(404, b'Not Found')
    data = path.read_bytes()
    if not (asked := _RANGE.fullmatch(self.headers.get('Range', ''))):
      return self._answer(200, data)
    start, stop = int(asked[1]), min(int(asked[2] or 1 << 40) + 1, len(data))
    if start >= len(data):
      return self._answer(416, b'')
    place = f'bytes {start}-{stop - 1}/{len(data)}'
    self._answer(206, data[start:stop], **{'Content-Range': place})

  def _answer(self, status, data, **headers):
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name, value)
    self.send_header('x-goog-generation', '1')
    self.send_header('Content-Length', str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def log_message(self, *args):
    del args  # nothing to stderr


@contextlib.contextmanager
def serve(
  folder: pathlib.Path, monkeypatch, failures: list[int] | None = None
) -> Iterator[Bucket]:
  """`gs://models/...` is what lies in `folder`, for TensorStore.

  Args:
    folder: of the bucket.
    monkeypatch: pytest's.
    failures: HTTP codes that are answered first, the last one first.
  """
  server = Bucket(folder, failures or [])
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  point_at(f'http://127.0.0.1:{server.server_port}', monkeypatch)
  try:
    yield server
  finally:
    server.shutdown()
    server.server_close()
    thread.join()


def point_at(address: str, monkeypatch) -> None:
  """TensorStore asks there, and looks for nobody's credentials."""
  monkeypatch.setenv('TENSORSTORE_GCS_HTTP_URL', address)
  monkeypatch.setenv('GOOGLE_AUTH_TOKEN_FOR_TESTING', 'anybody')


PARAMS = {'a': {'kernel': np.arange(15.0).reshape(5, 3)}, 'scale': np.ones(4)}


@needs_fixtures
@pytest.mark.parametrize('kind', ['tensorstore', 'orbax'])
@pytest.mark.slow
def test_what_t5x_wrote(monkeypatch, kind):
  path = T5X_FIXTURES / kind / 'checkpoint_0'
  with serve(T5X_FIXTURES, monkeypatch) as server:
    found = checkpoints.load(f'gs://models/{kind}/checkpoint_0')
  assert_same(found, checkpoints.load(path))
  # The optimiser's state stays there.
  read = [line for line in server.asked if 'alt=media' in line]
  assert read and not any('param_states' in line for line in read)


def test_own_formats(tmp_path, monkeypatch):
  checkpoints.save_orbax(tmp_path / 'deep' / 'orbax', PARAMS)
  checkpoints.save_t5x(tmp_path / 'model.msgpack', PARAMS, step=0)
  with serve(tmp_path, monkeypatch):
    for name in ('deep/orbax', 'deep/orbax/', 'model.msgpack'):
      assert_same(checkpoints.load(f'gs://models/{name}'), PARAMS)
    with pytest.raises(ValueError, match=r'No checkpoint .*gs://models/none'):
      checkpoints.load('gs://models/none')


def test_a_bucket_that_is_busy_at_first(tmp_path, monkeypatch):
  checkpoints.save_t5x(tmp_path / 'model.msgpack', PARAMS, step=0)
  with serve(tmp_path, monkeypatch, [503]) as server:
    assert_same(checkpoints.load('gs://models/model.msgpack'), PARAMS)
    assert not server.failures


def test_a_bucket_that_is_not_for_us(monkeypatch, tmp_path):
  with serve(tmp_path, monkeypatch, [403] * 3):
    with pytest.raises(ValueError, match=r'(?s)DENIED.*gcloud auth .*or copy'):
      checkpoints.load('gs://models/model.msgpack')


def test_no_network(monkeypatch):
  """An error, and soon: TensorStore itself would try for minutes."""
  monkeypatch.setitem(locations._FIRST, 'initial_delay', '10ms')
  monkeypatch.setitem(locations._FIRST, 'max_delay', '10ms')
  point_at('http://127.0.0.1:9', monkeypatch)  # nobody listens
  path = 'gs://models/t5_small/checkpoint_1000000'
  words = 'cannot be read: .*3 retry attempts failed.*Check the address'
  with pytest.raises(ValueError, match=f"(?s)'{path}' {words}"):
    checkpoints.load(path)
  with pytest.raises(ValueError, match='vocab.*3 retry attempts failed'):
    Tokenizer('gs://models/vocab.model')


def test_a_bucket_that_never_answers(monkeypatch, tmp_path):
  monkeypatch.setattr(locations, 'FIRST_SECONDS', 0.2)
  with serve(tmp_path, monkeypatch) as server:
    server.answering.clear()
    with pytest.raises(ValueError, match='no answer came. Check the address'):
      checkpoints.load('gs://models/model.msgpack')
    server.answering.set()


def test_a_vocabulary(folder, tokenizer, monkeypatch):
  with serve(folder, monkeypatch):
    address = 'gs://models/vocab.model'
    assert Tokenizer(address).fingerprint == tokenizer.fingerprint
    lines = folder / 'lines.txt'
    lines.write_text('the old house\n')
    task = LocalTask('lines', {'test': lines}, address)
    (example,) = task.examples('test')
    assert example['inputs'].tolist()[:-1] == tokenizer.encode('the old house')
    with pytest.raises(ValueError, match='gs://models/no.model'):
      Tokenizer('gs://models/no.model')
