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
import pathlib
import random
import socket
import threading
import time

import pytest

from continuous_test import nothing_compiles
from scheduler_test import TEXTS, engine, wait_until
from specdec_jax.serving import ServeSettings

_WHY = 'needs the extra [serve], aiohttp and httpx'
httpx = pytest.importorskip('httpx', reason=_WHY)
for needed in ('aiohttp', 'openai', 'uvicorn', 'starlette'):
  pytest.importorskip(needed, reason=_WHY)
from benchmarks import serve as load  # noqa: E402
from serve_test import BAD, counters, held, sent, server, url  # noqa: E402
from served import Served  # noqa: E402
from specdec_jax.serving.server import Connection  # noqa: E402
from specdec_jax.serving.worker import Worker  # noqa: E402

__all__ = ['engine', 'held', 'server', 'url']  # fixtures
ROOT = pathlib.Path(__file__).resolve().parent.parent
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
  return Worker(engine, settings)


@pytest.fixture(scope='module')
def want(engine):
  """Text -> what the engine says."""
  found = engine.generate(TEXTS, max_length=16)
  return {t: one.text for t, one in zip(TEXTS, found, strict=True)}


def errors(replies):
  return [one.error for one in replies if one.error is not None]


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
  found = counters(address).items()
  return {n[-5:-2]: x for n, x in found if 'requests_total{' in n}


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


# Bodies that are wrong.


def malformed(rng):
  """A body that is wrong in one of many ways; bytes."""
  names = [
    *dict(BAD),
    *('prompt', 'n', 'max_tokens', 'stop', 'stream', 'seed', 'top_p'),
    *('temperature', 'stream_options', 'logprobs', 'echo', 'model'),
  ]
  values = [
    None, True, -1, 0, 10**30, 1e308, -0.0, 2.5, '', '\ud800', 'x' * 5000, [],
    [[]], [[1], 'a'], [None], {}, {'a': [1]}, [1e9], ['a', 1], [10**20],
    float('nan'), float('inf'),
  ]  # fmt: skip
  body = {'prompt': rng.choice([TEXTS[0], [5, 6], ['a', 'b']])}
  for _ in range(rng.randint(1, 3)):
    body[rng.choice(names)] = rng.choice(values)
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
  before = counters(url)[memory]
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
  assert counters(url)[memory] - before < 50 << 20
  with connected(url, begin + b'A: ' + b'x' * 20_000 + b'\r\n\r\n') as (one,):
    assert one.recv(1 << 16).startswith(b'HTTP/1.1 200')


def test_connections_that_do_nothing(url, want, monkeypatch):
  """However many there are, others are answered meanwhile."""
  made = Connection.__init__

  def of_few(self, settings, *args, **options):
    few = dataclasses.replace(settings, max_connections=100)
    made(self, few, *args, **options)

  monkeypatch.setattr(Connection, '__init__', of_few)
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


@pytest.mark.parametrize('version', ['1.1', '1.0'])
def test_a_client_that_ended_its_half(url, want, version):
  """It gets its answer; one of HTTP/1.0 gets no chunks."""
  (text, *_) = want
  for stream in (False, True):
    asked = http_request(load.body(text, stream), version)
    with connected(url, asked) as (one,):
      one.shutdown(socket.SHUT_WR)
      head, _, body = everything(one).partition(b'\r\n\r\n')
    assert b'200 OK' in head
    chunked = stream and version == '1.1'
    assert (b'chunked' in head) == chunked
    end = b'[DONE]\n\n' + b'\r\n0\r\n\r\n' * chunked
    assert body.endswith(end if stream else b'}')


# More than it can do.


def is_busy(reply):
  return reply.error is not None and reply.error.startswith('429')


def test_overload(url, scheduler, want, held):
  """Of five times what may wait, a fifth is taken, and then answered."""
  most = scheduler.settings.max_waiting
  bodies = [load.body(text) for text in want]
  asked = [bodies[i % len(bodies)] for i in range(5 * most)]
  before = statuses(url).get('429', 0)
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    running = pool.submit(load.arriving, url, asked, 1000.0)
    refused = 5 * most - most
    wait_until(lambda: statuses(url).get('429', 0) == before + refused)
    assert scheduler.num_waiting == most
    with others(url, want, threads=1):
      held()
    replies, _ = running.result()
  assert sum(map(is_busy, replies)) == refused
  for body, reply in zip(asked, replies, strict=True):
    assert is_busy(reply) or reply.error is None, reply.error
    assert is_busy(reply) or reply.text == want[body['prompt']]
  wait_until(lambda: not scheduler.num_rows)


# The shipped pair, as users serve it.


def is_idle(served):
  """Whether nothing is left in a server."""
  found = counters(served.url)
  names = ('num_requests_running', 'num_requests_waiting')
  return not any(found[f'specdec:{name}'] for name in names)


def demo_texts():
  lines = (ROOT / 'demo/input.txt').read_text('utf-8').splitlines()
  return [line for line in lines if line.strip()]


@pytest.mark.slow
def test_ten_thousand_requests():
  """All are answered, and as when they came alone; memory does not grow."""
  texts = demo_texts()
  with Served('--port', '0', '--rows', '16') as served:
    served.until(lambda: served.said('compiled'))
    replies, _ = load.closed(served.url, [load.body(text) for text in texts], 1)
    assert not errors(replies)
    outputs = {t: one.text for t, one in zip(texts, replies, strict=True)}

    def ask(count):
      asked = [texts[i % len(texts)] for i in range(count)]
      bodies = [load.body(t, i % 2 > 0) for i, t in enumerate(asked)]
      replies, _ = load.closed(served.url, bodies, 64)
      assert not errors(replies)
      assert [one.text for one in replies] == [outputs[text] for text in asked]
      return counters(served.url)['process_resident_memory_bytes']

    before = ask(1000)
    after = ask(10_000)
    assert after <= 1.02 * before, (before, after)
    served.until(lambda: is_idle(served))
    assert counters(served.url)['specdec:compilations_total'] == 0


@pytest.mark.slow
def test_sigterm_under_load():
  """Who was taken is answered or, at the limit, told that it ends."""
  texts = demo_texts()
  with Served('--port', '0', '--rows', '4', '--drain-seconds=0.5') as made:
    made.until(lambda: made.said('compiled'))
    bodies = [
      load.body(texts[i % len(texts)], i % 2 > 0, max_tokens=100)
      for i in range(4000)
    ]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      running = pool.submit(load.closed, made.url, bodies, 64)
      wait_until(lambda: len(made.log) > 100)
      assert made.end() == 0
      replies, _ = running.result()
  rows = made.said('stopping')['rows']
  assert rows > 32
  cut = 0
  for reply in replies:
    # Who was taken hears why it ends; who came too late was not let in.
    was_taken = reply.first is not None
    if reply.error is not None and was_taken:
      assert 'is stopping' in reply.error, reply
      cut += 1
  assert cut > 0
  logged = [one['status'] for one in made.log if one.get('path') == PATH]
  assert set(logged) <= {200, 503}
  # Each answer that the server began has reached its client.
  begun = [reply.first is not None or reply.error is None for reply in replies]
  assert logged.count(200) == sum(begun) > 64
