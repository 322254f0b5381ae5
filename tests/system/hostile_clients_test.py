"""Some clients do what is worst for a server; another one notices nothing."""

import concurrent.futures
import json
import pathlib
import statistics
import threading
import time

import pytest

httpx = pytest.importorskip('httpx', reason='needs the package httpx')
from served import Served  # noqa: E402

COMPLETIONS, CLASSIFY = '/v1/completions', '/v1/classify'
ORDINARY = {'prompt': 'Where is the station?', 'temperature': 0}
ASKED = {'prompt': 'Good morning!', 'temperature': 0, 'max_tokens': 12}
SCHEMA = {'type': 'object', 'properties': {'a': {'type': 'integer'}}}
FIRST_USES = (  # six kinds of rules, and a beam search
  {'no_repeat_ngram_size': 3},
  {'logit_bias': {'7': -100}},
  {'bad_words': ['Bahnhof', 'Morgen']},
  {'structured_outputs': {'choice': ['ja', 'nein']}},
  {'repetition_penalty': 1.3, 'presence_penalty': 1},
  {'min_p': 0.2, 'temperature': 1, 'frequency_penalty': 1},
  {'use_beam_search': True, 'n': 2, 'bad_words': ['a']},
)
FLAGS = (
  '--port 0 --beams 2 --max-seconds 600 --rows 2 --max-input-length 16'.split()
)
MANY = [f'w{i}' for i in range(50_000)]
HOSTILE = (  # path, body, and the status of its answer
  (COMPLETIONS, {'no_repeat_ngram_size': 3}, 200),
  (COMPLETIONS, {'no_repeat_ngram_size': 10**9}, 200),
  (COMPLETIONS, {'no_repeat_ngram_size': 10**18}, 400),
  (COMPLETIONS, {'logit_bias': {'7': -100}}, 200),
  (COMPLETIONS, {'bad_words': ['Bahnhof', 'Morgen']}, 200),
  (COMPLETIONS, {'bad_words': MANY}, 400),
  (COMPLETIONS, {'structured_outputs': {'json': SCHEMA}}, 200),
  (COMPLETIONS, {'structured_outputs': {'choice': ['ja', 'nein']}}, 200),
  (COMPLETIONS, {'min_p': 0.2, 'temperature': 1}, 200),
  (COMPLETIONS, {'repetition_penalty': 1.3}, 200),
  (COMPLETIONS, {'presence_penalty': 1, 'frequency_penalty': 1}, 200),
  (COMPLETIONS, {'use_beam_search': True, 'n': 2, 'min_p': 0}, 200),
  (COMPLETIONS, {'use_beam_search': True, 'n': 2, 'bad_words': ['a']}, 200),
  (COMPLETIONS, {'allowed_token_ids': [*range(5000)], 'n': 4}, 200),
  (COMPLETIONS, {'prompt': 'x ' * 300_000}, 400),
  (COMPLETIONS, {'logprobs': 5}, 200),
  (COMPLETIONS, {'seed': 10**400}, 400),
  (CLASSIFY, {'input': 'a', 'labels': MANY}, 400),
  (CLASSIFY, {'input': ['a'] * 4, 'labels': MANY[:20]}, 200),
  (COMPLETIONS, 'prompt=a', 415),
)


class Memory(threading.Thread):
  """The resident bytes of a process, until the end of a block."""

  def __init__(self, process):
    super().__init__()
    path = pathlib.Path(f'/proc/{process}/status')
    self._file = path if path.exists() else pytest.skip('needs /proc')
    self._over, self.all = threading.Event(), [self.now]

  @property
  def now(self):
    text = self._file.read_text()
    return int(text.partition('VmRSS:')[2].split()[0]) << 10

  def run(self):
    while not self._over.wait(0.05):
      self.all.append(self.now)

  def __enter__(self):
    self.start()
    return self

  def __exit__(self, *_):
    self._over.set()
    self.join()


def ask(http, path, body):
  """Seconds and status of an answer."""
  begin = time.perf_counter()
  headers = {'content-type': 'application/json'}
  if isinstance(body, str):
    headers = {'content-type': 'application/x-www-form-urlencoded'}
  else:
    body = json.dumps(body)
  answer = http.post(path, content=body, headers=headers, timeout=600)
  return time.perf_counter() - begin, answer.status_code


def ordinary(http, count):
  """Seconds of so many requests, one after the other; none fails."""
  found = [ask(http, COMPLETIONS, ORDINARY) for _ in range(count)]
  assert {status for _, status in found} == {200}
  return [seconds for seconds, _ in found]


def slowest_of_200(seconds):
  """The usual slowest of so many requests: one in 200 takes longer."""
  return sorted(seconds)[-1 - (len(seconds) - 1) // 200]


def compiled(served):
  """What the server has said of each lane that it compiled."""
  lines = [line for line in served.lines if '"compiled a lane"' in line]
  return [*map(json.loads, lines)]


@pytest.fixture
def server(tmp_path, monkeypatch):
  """A server that has compiled, an ordinary client, and threads of others."""
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(tmp_path))
  with (
    Served(*FLAGS) as served,
    httpx.Client(base_url=served.url) as http,
    concurrent.futures.ThreadPoolExecutor(len(FIRST_USES)) as pool,
  ):
    served.until(lambda: served.said('compiled'))
    ordinary(http, 20)
    yield served, http, pool
    assert served.end() == 0


@pytest.mark.slow
def test_an_ordinary_client_beside_hostile_ones(server):
  """In turn it is alone and beside one; it never waits for a compilation.

  A server that compiles in the thread that decodes lets one request wait for as
  long as each compilation takes.
  """
  served, http, pool = server
  memory = Memory(served.process.pid)
  alone, beside = [], []
  with memory:
    for path, body, want in HOSTILE:
      alone += ordinary(http, 200 // len(HOSTILE))
      asked = ASKED | body if path == COMPLETIONS and want != 415 else body
      running = pool.submit(ask, httpx, served.url + path, asked)
      found = ordinary(http, 1)
      while not running.done():
        found += ordinary(http, 1)
      seconds, status = running.result()
      print(f'{seconds:.2f} s, {max(found):.3f} others, {str(body)[:60]}')
      assert status == want, body
      beside += found
    beside += ordinary(http, max(1, 200 - len(beside)))
    served.until(lambda: served.lines and '"left": 1}' in served.lines[-1])
  begin, end, most = memory.all[0], memory.now, max(memory.all)
  for name, found in (('alone', alone), ('beside', beside)):
    middle = statistics.median(found)
    print(f'{name}: {len(found)}, median {middle:.3f}, {max(found):.3f} most')
  print(f'memory: {begin:.4g} at first, {most:.4g} at most, {end:.4g}')
  slowest = slowest_of_200(beside)
  print(f'slowest of 200: {slowest / max(alone):.2f} times as slow')
  seconds = [lane['seconds'] for lane in compiled(served)]
  assert len(seconds) >= 9
  assert statistics.median(beside) <= 3 * statistics.median(alone)
  assert slowest <= 3 * max(alone), (slowest, seconds)
  assert slowest <= min(seconds) / 4  # nobody waits for a compilation
  assert end <= 1.4 * begin and most <= begin + (1 << 30)


@pytest.mark.slow
def test_an_ordinary_client_beside_new_kinds_at_once(server):
  """Seven clients use a new kind each; then the same kinds, compiled."""
  served, http, pool = server

  def beside(goes_on=lambda: False):
    """Seconds of ordinary requests while each of the others asks."""

    def use(body):
      body, path = ASKED | body, served.url + COMPLETIONS
      status = {ask(httpx, path, body)[1]}
      while goes_on():
        status.add(ask(httpx, path, body)[1])
      return status

    running = [pool.submit(use, body) for body in FIRST_USES]
    found = ordinary(http, 1)
    while not all(one.done() for one in running):
      found += ordinary(http, 1)
    assert set().union(*(one.result() for one in running)) == {200}
    return found

  def compiles():
    """Whether a lane was compiled in the last two seconds."""
    if http.get('/health').json()['compiling']:
      return True
    return time.time() < compiled(served)[-1]['time'] + 2

  alone, new = ordinary(http, 200), beside()
  served.until(lambda: len(compiled(served)) >= len(FIRST_USES))
  # Idle lanes are forgotten: all are kept busy until all are compiled.
  beside(compiles)
  count, used = len(compiled(served)), []
  while len(used) < 200:
    used += beside()
  assert len(compiled(served)) == count
  for name, found in (('alone', alone), ('new', new), ('compiled', used)):
    numbers = statistics.median(found), max(found), slowest_of_200(found)
    print(f'{name}: {len(found)}, median, slowest, slowest of 200:', *numbers)
  assert slowest_of_200(new) <= 2 * slowest_of_200(used)
