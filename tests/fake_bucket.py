"""A folder served as a bucket of Google Cloud Storage, on this machine.

It answers what TensorStore's own driver asks of the JSON API: lists, and reads
of ranges. https://cloud.google.com/storage/docs/json_api/v1/objects
"""

import contextlib
import http.server
import json
import pathlib
import re
import threading
import urllib.parse
from collections.abc import Iterator

BUCKET = 'models'
_RANGE = re.compile(r'bytes=(\d+)-(\d*)')


class _Server(http.server.ThreadingHTTPServer):
  """The bucket.

  Attributes:
    folder: its contents.
    failures: codes that are answered first, the last one first.
    asked: paths of all requests.
    answering: while it is not set, requests wait.
  """

  daemon_threads = True

  def __init__(self, folder: pathlib.Path, failures: list[int]):
    super().__init__(('127.0.0.1', 0), _Handler)
    self.folder = folder
    self.failures = failures
    self.asked: list[str] = []
    self.answering = threading.Event()
    self.answering.set()

  @property
  def address(self) -> str:
    return f'http://127.0.0.1:{self.server_port}'


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = 'HTTP/1.1'
  server: _Server

  def do_GET(self):
    parts = urllib.parse.urlsplit(self.path)
    query = dict(urllib.parse.parse_qsl(parts.query))
    self.server.asked.append(self.path)
    self.server.answering.wait()
    if self.server.failures:
      return self._answer(self.server.failures.pop(), b'{}')
    prefix = f'/storage/v1/b/{BUCKET}/o'
    if parts.path == prefix:
      return self._list(query)
    if parts.path.startswith(f'{prefix}/') and query.get('alt') == 'media':
      return self._read(urllib.parse.unquote(parts.path[len(prefix) + 1 :]))
    self._answer(404, b'{"error": {"code": 404}}')

  def _list(self, query):
    folder = self.server.folder
    names = sorted(
      path.relative_to(folder).as_posix()
      for path in folder.rglob('*')
      if path.is_file()
    )
    first, end = query.get('startOffset', ''), query.get('endOffset', '\uffff')
    page = {'items': [{'name': n} for n in names if first <= n < end]}
    self._answer(200, json.dumps(page).encode())

  def _read(self, name):
    path = self.server.folder / name
    if not path.is_file():
      return self._answer(404, b'Not Found')
    data = path.read_bytes()
    asked = _RANGE.fullmatch(self.headers.get('Range', ''))
    if not asked:
      return self._answer(200, data)
    start = int(asked[1])
    stop = min(int(asked[2]) + 1 if asked[2] else len(data), len(data))
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
) -> Iterator[_Server]:
  """`gs://models/...` is what lies in `folder`, for TensorStore.

  Args:
    folder: of the bucket.
    monkeypatch: pytest's.
    failures: HTTP codes that are answered first, the last one first.
  """
  server = _Server(folder, failures or [])
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  point_at(server.address, monkeypatch)
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
