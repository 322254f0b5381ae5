"""From a hub that this machine serves to outputs, by huggingface_hub itself."""

import contextlib
import http.server
import json
import pathlib
import shutil
import threading

import jax
import pytest

import small_vocabulary
from specdec_jax import notebook
from specdec_jax.checkpoints import huggingface

pytest.importorskip('safetensors', reason='needs the extra [huggingface]')
hub = pytest.importorskip('huggingface_hub', reason='needs the extra [hub]')
from huggingface_hub import constants  # noqa: E402

MODEL = 'someone/tiny-t5'
COMMIT = '0123456789' * 4
pytestmark = [
  pytest.mark.filterwarnings('ignore'),  # those of the hub's package
]


class Handler(http.server.BaseHTTPRequestHandler):
  """Answers what `snapshot_download` asks of the hub."""

  protocol_version = 'HTTP/1.1'

  def do_GET(self):
    folder: pathlib.Path = self.server.folder
    paths = sorted(folder.iterdir())
    if self.path.split('/revision/')[0] == f'/api/models/{MODEL}':
      self.server.revisions.append(self.path.rsplit('/', 1)[1])
      names = [{'rfilename': path.name} for path in paths]
      self._answer({'id': MODEL, 'sha': COMMIT, 'siblings': names})
    elif self.path.startswith(f'/api/models/{MODEL}/tree/{COMMIT}'):
      self._answer(
        [
          {
            'type': 'file',
            'path': path.name,
            'size': path.stat().st_size,
            'oid': path.name,
          }
          for path in paths
        ]
      )
    elif self.path.startswith(f'/{MODEL}/resolve/{COMMIT}/'):
      name = self.path.rsplit('/', 1)[1]
      if self.command == 'GET':
        self.server.fetched.append(name)
      self._answer((folder / name).read_bytes(), name)
    else:
      self.send_response(404)
      self.send_header('X-Error-Code', 'RepoNotFound')
      self.send_header('Content-Length', '0')
      self.end_headers()

  do_HEAD = do_GET

  def _answer(self, data, etag='-'):
    if not isinstance(data, bytes):
      data = json.dumps(data).encode()
    self.send_response(200)
    self.send_header('Content-Length', str(len(data)))
    self.send_header('ETag', f'"{etag}"')
    self.send_header('X-Repo-Commit', COMMIT)
    self.end_headers()
    if self.command == 'GET':
      self.wfile.write(data)

  def log_message(self, *args):
    del args


@contextlib.contextmanager
def served(folder, monkeypatch, cache):
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  server.folder, server.fetched, server.revisions = folder, [], []
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(cache))
  point_at(f'http://127.0.0.1:{server.server_port}', monkeypatch)
  try:
    yield server
  finally:
    server.shutdown()
    server.server_close()
    thread.join()


def point_at(address, monkeypatch):
  monkeypatch.setattr(constants, 'ENDPOINT', address)
  template = address + '/{repo_id}/resolve/{revision}/{filename}'
  monkeypatch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE', template)


@pytest.fixture
def model(tmp_path, tokenizer):
  """A folder as it lies on the hub, with another framework's weights."""
  folder = tmp_path / 'model'
  network = small_vocabulary.network(1)
  params = network.init(jax.random.key(0))
  huggingface.save_huggingface(folder, network.config, params)
  shutil.copy(tokenizer.path, folder / 'spiece.model')
  (folder / 'pytorch_model.bin').write_bytes(b'large')
  return folder


def test_a_model_of_the_hub(model, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  lengths = {'max_input_len': 16, 'max_decode_len': 8}
  with served(model, monkeypatch, tmp_path / 'cache') as server:
    there = notebook.load(MODEL, **lengths)
    assert {'config.json', 'model.safetensors', 'spiece.model'} <= set(
      server.fetched
    )
    assert 'pytorch_model.bin' not in server.fetched
    notebook.load(f'{MODEL}@refs/pr/1', **lengths)
    assert server.revisions == ['main', 'refs%2Fpr%2F1']
    with pytest.raises(ValueError, match='RepositoryNotFound'):
      notebook.load('someone/other', **lengths)
  here = notebook.load(model, **lengths)
  # The same weights and vocabulary as in the folder.
  assert there.fingerprints == here.fingerprints
  assert there.tokenizer.fingerprint == here.tokenizer.fingerprint
  # What was fetched is found again without the hub; what was not is not.
  point_at('http://127.0.0.1:9', monkeypatch)
  again = notebook.load(MODEL, **lengths)
  assert again.fingerprints == here.fingerprints
  with pytest.raises(ValueError, match="'someone/other' could not be fetched"):
    notebook.load('someone/other', **lengths)
