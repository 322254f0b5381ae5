"""What clients do to a server, and what others notice of it: nothing.

The quick forms are of a toy engine in this process; the slow ones of the demo
pair, by `specdec serve`.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import random
import re
import signal
import socket
import string
import subprocess
import sys
import threading
import time

import pytest

from continuous_test import nothing_compiles
from scheduler_test import TEXTS, engine, wait_until
from specdec_jax import files
from specdec_jax.serving import ServeSettings

_WHY = 'needs the extras [serve] and [load], and httpx'
httpx = pytest.importorskip('httpx', reason=_WHY)
for needed in ('aiohttp', 'openai', 'uvicorn', 'starlette'):
  pytest.importorskip(needed, reason=_WHY)
from serve_test import BAD, sent, server, url  # noqa: E402
from specdec_jax.serving import connections, load  # noqa: E402
from specdec_jax.serving.scheduler import Scheduler  # noqa: E402

__all__ = ['engine', 'server', 'url']  # fixtures
ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = ROOT.parent / 'shared/data/ende/tatoeba.test.tsv.gz'
PATH = '/v1/completions'


@contextlib.contextmanager
def others(address, want, threads=2):
  """Inside, others ask for texts; all that they hear must be right.

  Args:
    address: of the server.
    want: text -> its output.
    threads: how many ask.
  """
  over, heard = threading.Event(), []

  def ask(texts):
    with httpx.Client(timeout=300) as http:
      for text in itertools.cycle(texts):
        answer = http.post(f'{address}{PATH}', json=load.body(text))
        if answer.status_code != 429:  # where the queue is full on purpose
          heard.append((text, answer.text))
        else:
          assert int(answer.headers['retry-after']) >= 1
          over.wait(0.05)
        if over.is_set() and heard:
          return

  texts = list(want)
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    asking = [pool.submit(ask, texts[i::threads]) for i in range(threads)]
    try:
      yield
    finally:
      over.set()
    for one in asking:
      one.result()
  for text, answer in heard:
    assert json.loads(answer)['choices'][0]['text'] == want[text], answer


@pytest.fixture(scope='module')
def scheduler(engine):
  """Of few programs and a short queue."""
  settings = ServeSettings(
    port=0,
    rows=2,
    max_waiting=8,
    header_seconds=2.0,
    body_seconds=2.0,
    idle_seconds=2.0,
  )
  return Scheduler(engine, settings)


@pytest.fixture(scope='module')
def want(engine):
  """Text -> what the engine says."""
  found = engine.generate(TEXTS, max_length=16)
  return {t: one.text for t, one in zip(TEXTS, found, strict=True)}


# Clients that leave.


def leave(address, texts, count):
  """Streams whose clients leave in the middle, several at a time."""

  def one(index):
    body = load.body(texts[index % len(texts)], True, max_tokens=24)
    body |= {'temperature': 1.0, 'ignore_eos': True}
    while True:
      with httpx.stream('POST', f'{address}{PATH}', json=body) as answer:
        if answer.status_code == 200:
          next(answer.iter_raw())
          return
      time.sleep(0.05)  # the queue was full

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    list(pool.map(one, range(count)))


def statuses(address):
  """Status of an answer -> how many had it."""
  text = httpx.get(f'{address}/metrics').text
  every = re.findall(r'requests_total{status="(\d+)"} (\S+)', text)
  return {status: float(count) for status, count in every}


def test_clients_that_leave(url, scheduler, want):
  with others(url, want):
    leave(url, TEXTS, 30)
  wait_until(lambda: not scheduler.num_rows)
  assert not scheduler._taken
  # Some had the whole answer on its way before they left.
  assert statuses(url).get('499', 0) > 10
  with sent(url, b'{"prompt": ', length=100):
    pass
  wait_until(lambda: statuses(url).get('499', 0) > 11)
  assert '500' not in statuses(url)


@pytest.mark.slow
def test_a_thousand_clients_that_leave(demo, outputs):
  with others(demo.url, outputs):
    leave(demo.url, list(outputs), 1000)
  assert demo.idle()


# Bodies that are wrong.


def malformed(rng):
  """A body that is wrong in one of many ways; bytes."""
  names = [
    *BAD,
    'prompt',
    'n',
    'max_tokens',
    'stop',
    'stream',
    'seed',
    'top_p',
    'temperature',
    'stream_options',
    'logprobs',
    'echo',
    'model',
  ]
  values = [
    None, True, -1, 0, 10**30, 1e308, -0.0, 2.5, '', '\ud800', 'x' * 5000, [],
    [[]], [[1], 'a'], [None], {}, {'a': [1]}, [1e9], ['a', 1], [10**20],
    float('nan'), float('inf'),
  ]  # fmt: skip
  body = {'prompt': rng.choice([TEXTS[0], [5, 6], ['a', 'b']])}
  for _ in range(rng.randint(1, 3)):
    name = rng.choice(names) or rng.choice(string.ascii_letters)
    body[name] = rng.choice(values)
  data = json.dumps(body).encode()
  way = rng.randrange(6)
  if way == 0:
    data = data[: rng.randrange(len(data))]
  elif way == 1:
    at = rng.randrange(len(data))
    data = data[:at] + bytes(rng.choices(range(256), k=3)) + data[at:]
  elif way == 2:
    depth = rng.choice([10, 10_000, 200_000])
    data = b'{"prompt": ' + b'[' * depth + b']' * depth + b'}'
  elif way == 3:
    data = json.dumps(rng.choice(values)).encode()
  return data


def fuzz(address, count, large_every):
  """Sends malformed bodies, some of them of 10 MB; two clients are slow."""
  rng, statuses = random.Random(0), collections.Counter()
  large = b'{"prompt": "' + b'x' * (10 << 20) + b'"}'
  with contextlib.ExitStack() as stack:
    slow = [
      stack.enter_context(sent(address, b'{"prompt": ', length=100))
      for _ in range(2)
    ]
    http = stack.enter_context(httpx.Client(timeout=300))
    for index in range(count):
      if index % large_every == 0:
        # It may be refused before all of it is sent.
        with contextlib.suppress(httpx.WriteError, httpx.ReadError):
          answer = httpx.post(f'{address}{PATH}', content=large, timeout=300)
          assert answer.status_code == 413
      data = malformed(rng)
      answer = http.post(f'{address}{PATH}', content=data)
      code = answer.status_code
      statuses[code] += 1
      # Some say nothing wrong after all; the queue may be full of others.
      assert code in (200, 400, 404, 429), (data[:300], answer.text)
      if code != 200:
        assert answer.json()['error']['message']
    for one in slow:
      one.settimeout(60)
      assert one.recv(1 << 16).startswith(b'HTTP/1.1 408')
  assert statuses[400] > 0.7 * count


def test_malformed_bodies(url, scheduler, want):
  with others(url, want, threads=1), nothing_compiles():
    fuzz(url, 100, large_every=50)
  wait_until(lambda: not scheduler.num_rows)


@pytest.mark.slow
def test_a_thousand_malformed_bodies(demo, outputs):
  with others(demo.url, outputs):
    fuzz(demo.url, 1000, large_every=50)
  assert demo.idle()


# Connections that do nothing, or too much.


@contextlib.contextmanager
def connected(address, data=b'', count=1):
  """Connections on which this has been sent."""
  port = int(address.rpartition(':')[2])
  with contextlib.ExitStack() as stack:
    made = []
    for _ in range(count):
      one = stack.enter_context(socket.create_connection(('127.0.0.1', port)))
      one.settimeout(60)
      one.sendall(data)
      made.append(one)
    yield made


def everything(connection):
  """What comes until the other side ends."""
  parts = []
  with contextlib.suppress(ConnectionError):
    while part := connection.recv(1 << 16):
      parts.append(part)
  return b''.join(parts)


def http_request(body, version='1.1'):
  head = f'POST {PATH} HTTP/{version}\r\nHost: x\r\nContent-Length: '
  data = json.dumps(body).encode()
  return f'{head}{len(data)}\r\n\r\n'.encode() + data


def test_a_header_is_bounded(url, want):
  """One field or many, at once or in parts; behind a body too."""
  begin = b'GET /health HTTP/1.1\r\nHost: x\r\n'
  chunked = b'POST /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n'
  fields = b'a: b\r\n' * 7000
  memory = 'process_resident_memory_bytes'
  before = load.counters(url)[memory]
  with others(url, want, threads=1):
    for data in (begin + b'A: ', begin + fields + b'\r\n', chunked + b'A: '):
      with connected(url, data) as (one,):
        with contextlib.suppress(ConnectionError):
          for _ in range(0 if data.endswith(b'\n') else 2000):
            one.sendall(b'x' * (1 << 16))
        answer = everything(one)
        assert (
          not answer
          or answer.startswith(b'HTTP/1.1 431')
          or (data.startswith(b'POST') and answer.startswith(b'HTTP/1.1 405'))
        )
  assert load.counters(url)[memory] - before < 50 << 20
  with connected(url, begin + b'A: ' + b'x' * 20_000 + b'\r\n\r\n') as (one,):
    assert one.recv(1 << 16).startswith(b'HTTP/1.1 200')


def test_connections_that_do_nothing(url, want, monkeypatch):
  """However many there are, others are answered meanwhile."""
  made = connections.Connection.__init__

  def of_few(self, settings, *args, **options):
    few = dataclasses.replace(settings, max_connections=100)
    made(self, few, *args, **options)

  monkeypatch.setattr(connections.Connection, '__init__', of_few)
  begin = b'POST /v1/completions HTTP/1.1\r\nHost: x\r\n'
  for data in (b'', begin, begin + b'Content-Length: 9\r\n\r\n{'):
    with connected(url, data, count=150) as first:
      (text, *_) = want
      answer = httpx.post(f'{url}{PATH}', json=load.body(text))
      assert answer.json()['choices'][0]['text'] == want[text]
      first[-1].settimeout(10)
      answer = everything(first[-1])
      assert answer.startswith(b'HTTP/1.1 408') if data else not answer
      assert not data or b'connection: close' in answer


def test_a_client_that_does_not_read(url, want):
  """It is closed, and costs no more than its buffers."""
  page = b'GET / HTTP/1.1\r\nHost: x\r\n\r\n'
  with connected(url) as (one,):
    with others(url, want, threads=1), contextlib.suppress(ConnectionError):
      begin = time.monotonic()
      while time.monotonic() < begin + 20:
        one.sendall(page * 5)
        time.sleep(0.01)
      pytest.fail('it was not closed')
    assert time.monotonic() > begin + 2


def test_a_client_that_ended_its_half(url, want):
  (text, *_) = want
  for stream in (False, True):
    with connected(url, http_request(load.body(text, stream))) as (one,):
      one.shutdown(socket.SHUT_WR)
      answer = everything(one)
    assert answer.startswith(b'HTTP/1.1 200')
    assert answer.endswith(b'[DONE]\n\n\r\n0\r\n\r\n' if stream else b'}')


def test_an_old_client_gets_no_chunks(url, want):
  (text, *_) = want
  for stream in (False, True):
    with connected(url, http_request(load.body(text, stream), '1.0')) as (one,):
      head, _, body = everything(one).partition(b'\r\n\r\n')
    assert b'200 OK' in head and b'chunked' not in head
    if stream:
      assert body.startswith(b'data: {') and body.endswith(b'[DONE]\n\n')
    else:
      assert json.loads(body)['choices'][0]['text'] == want[text]


# More than it can do.


def overload(address, want, seconds, clients):
  """Five times what it can do; it says so, and is well again at once."""
  bodies = [load.body(text) for text in want]
  many = [bodies[i % len(bodies)] for i in range(4 * clients)]
  run = load.closed(address, many, clients)
  assert not run.errors
  rate = 5 * len(many) / run.seconds
  count = round(rate * seconds)
  asked = [bodies[i % len(bodies)] for i in range(count)]
  with others(address, want, threads=1):
    run = load.arriving(address, asked, rate, seed=0)
  ok = 0
  for body, reply in zip(asked, run.replies, strict=True):
    if reply.error is None:
      ok += 1
      assert reply.text == want[body['prompt']]
    else:
      assert reply.error.startswith('429'), reply.error
  assert ok and run.errors, (ok, len(run.errors))
  begin = time.monotonic()
  while httpx.post(f'{address}{PATH}', json=bodies[0]).status_code == 429:
    time.sleep(0.1)
  assert time.monotonic() - begin < 5


def test_overload(url, scheduler, want):
  overload(url, want, 1.0, 4)
  wait_until(lambda: not scheduler.num_rows)


@pytest.mark.slow
def test_a_minute_of_overload(demo, outputs):
  overload(demo.url, outputs, 60.0, 16)
  assert demo.idle()


# The shipped pair, as users serve it.


class Serve:
  """A process of `specdec serve`, when it is ready.

  Attributes:
    url: its address.
    log: what it has said so far, one object a line.
  """

  def __init__(self, *flags):
    flags = ('--port', '0', *flags)
    self.process = subprocess.Popen(
      [sys.executable, '-m', 'specdec_jax', 'serve', *flags],
      cwd=ROOT,
      env=os.environ | {'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path])},
      stderr=subprocess.PIPE,
      text=True,
    )
    self.log = []
    self._reader = threading.Thread(target=self._read)
    self._reader.start()
    ended = self.process.poll
    wait_until(lambda: self.said('compiled') or ended() is not None)
    assert self.said('compiled'), self.log
    self.url = self.said('compiled')['url']

  def _read(self):
    for line in self.process.stderr:
      if line.startswith('{'):
        self.log.append(json.loads(line))

  def said(self, event):
    """What it said of an event; None if it said nothing."""
    found = [one for one in list(self.log) if one['event'] == event]
    return found[0] if found else None

  def idle(self):
    """Whether nothing is left in it, soon."""

    def is_idle():
      found = load.counters(self.url)
      names = ('num_requests_running', 'num_requests_waiting')
      return not any(found[f'specdec:{name}'] for name in names)

    wait_until(is_idle)
    assert load.counters(self.url)['specdec:compilations_total'] == 0
    return self.process.poll() is None

  def end(self):
    """Tells it to end, and waits; its exit status."""
    self.process.send_signal(signal.SIGTERM)
    status = self.process.wait(120)
    self._reader.join()
    return status

  def close(self):
    self.process.kill()
    self.process.wait()
    self._reader.join()
    self.process.stderr.close()


@contextlib.contextmanager
def serve(*flags):
  made = Serve(*flags)
  try:
    yield made
  finally:
    made.close()


def demo_texts():
  lines = (ROOT / 'demo/input.txt').read_text('utf-8').splitlines()
  return [line for line in lines if line.strip()]


@pytest.fixture(scope='module')
def demo():
  """The shipped pair, served."""
  with serve('--rows', '16', '--gin.ServeSettings.body_seconds=2.0') as made:
    yield made


@pytest.fixture(scope='module')
def outputs(demo):
  """Text -> output of the demo's texts, each asked for alone.

  That the server says what `Engine.generate` says is tested elsewhere.
  """
  texts = demo_texts()
  run = load.closed(demo.url, [load.body(text) for text in texts], 1)
  assert not run.errors
  return {t: one.text for t, one in zip(texts, run.replies, strict=True)}


@pytest.mark.slow
def test_ten_thousand_requests(demo, outputs):
  """All are answered, and rightly; memory does not grow."""
  texts = list(outputs)

  def ask(count):
    asked = [texts[i % len(texts)] for i in range(count)]
    bodies = [load.body(t, i % 2 > 0) for i, t in enumerate(asked)]
    run = load.closed(demo.url, bodies, 64)
    assert not run.errors
    assert all(
      one.text == outputs[text]
      for one, text in zip(run.replies, asked, strict=True)
    )
    return load.counters(demo.url)['process_resident_memory_bytes']

  before = ask(1000)
  after = ask(10_000)
  assert after <= 1.02 * before, (before, after)
  assert demo.idle()


@pytest.mark.slow
@pytest.mark.parametrize('seconds', [30.0, 0.5])
def test_sigterm_under_load(seconds):
  """Who was taken is answered or, at the limit, told that it ends."""
  texts = demo_texts()
  with serve('--rows', '4', f'--gin.DRAIN_SECONDS={seconds}') as made:
    bodies = [
      load.body(texts[i % len(texts)], i % 2 > 0, max_tokens=100)
      for i in range(4000)
    ]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      running = pool.submit(load.closed, made.url, bodies, 64)
      wait_until(lambda: len(made.log) > 100)
      assert made.end() == 0
      run = running.result()
  rows = made.said('stopping')['rows']
  assert rows > 32
  replies, cut = run.replies, 0
  for reply in replies:
    # Who was taken hears why it ends; who came too late was not let in.
    was_taken = reply.first is not None
    if reply.error is not None and was_taken:
      assert 'is stopping' in reply.error, reply
      cut += 1
  assert (cut > 0) == (seconds < 1)
  logged = [one['status'] for one in made.log if one.get('path') == PATH]
  assert set(logged) <= {200, 503}
  # Each answer that the server began has reached its client.
  begun = [reply.first is not None or reply.error is None for reply in replies]
  assert logged.count(200) == sum(begun) > 64


@pytest.mark.slow
@pytest.mark.skipif(not SOURCES.exists(), reason='needs ../shared')
def test_speculative_answers_are_the_plain_ones(demo):
  """For all sources of the test set, by 16 clients at a time."""
  lines = files.text_lines(str(SOURCES))
  texts = list(dict.fromkeys(line.split('\t')[0] for line in lines))
  assert len(texts) == 1646
  bodies = [load.body(text, max_tokens=120) for text in texts]
  speculative = load.closed(demo.url, bodies, 16)
  with serve('--rows', '16', '--gin.SPECULATIVE=False') as plain:
    want = load.closed(plain.url, bodies, 16)
  assert not speculative.errors + want.errors
  assert [one.text for one in speculative.replies] == [
    one.text for one in want.replies
  ]
  assert len({one.text for one in want.replies}) > 1500
