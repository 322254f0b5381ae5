"""The server, as its clients meet it: the openai package over real HTTP."""

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import re
import socket
import threading
import time

import pytest

from continuous_test import nothing_compiles
from gpt_engine_test import FAMILIES, make_engine
from scheduler_test import STOPS, TEXTS, engine, model, started, wait_until
from specdec_jax.engine.engine import Engine
from specdec_jax.serving import ServeSettings
from specdec_jax.serving.app import Application
from specdec_jax.serving.run import Server, api_keys
from specdec_jax.serving.scheduler import Scheduler

_WHY = 'needs the extra [serve] and the package openai'
openai = pytest.importorskip('openai', reason=_WHY)
httpx = pytest.importorskip('httpx', reason=_WHY)
for needed in ('uvicorn', 'starlette', 'prometheus_client'):
  pytest.importorskip(needed, reason=_WHY)

__all__ = ['engine']  # a fixture
NAME = 'toy'
ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMITS = ServeSettings(
  port=0,
  beams=(2,),
  rows=4,
  max_waiting=8,
  max_outputs=8,
  body_seconds=2.0,
  max_seconds=600.0,
)


@contextlib.contextmanager
def serving(made):
  """Runs a server in a thread, until the end of the block."""
  failed = []

  def run():
    try:
      asyncio.run(made.run())
    except BaseException as error:
      failed.append(error)
      raise

  thread = threading.Thread(target=run)
  thread.start()
  try:
    yield made
  finally:
    made.stop()
    thread.join(600)
    assert not thread.is_alive() and not failed


@pytest.fixture(scope='module')
def scheduler(engine):
  return Scheduler(engine, LIMITS)


@pytest.fixture(scope='module')
def server(scheduler):
  with serving(Server(scheduler, NAME)) as made:
    wait_until(lambda: scheduler.is_compiled)
    yield made


@pytest.fixture(scope='module')
def url(server):
  return f'http://127.0.0.1:{server.port}'


@pytest.fixture(scope='module')
def client(url):
  with openai.OpenAI(
    base_url=f'{url}/v1', api_key='none', max_retries=0, timeout=300
  ) as made:
    yield made


@pytest.fixture
def held(scheduler, monkeypatch):
  """No row gets a slot until this is called."""
  monkeypatch.setattr(scheduler, '_fill', lambda: time.sleep(0.001))
  yield monkeypatch.undo
  monkeypatch.undo()
  wait_until(lambda: not scheduler.num_rows)


def create(client, prompt, **options):
  """A completion; what is not OpenAI's goes into the body as it is."""
  own = (
    'use_beam_search',
    'top_k',
    'min_tokens',
    'ignore_eos',
    'return_token_ids',
    'return_rounds',
    'speculative',
    'pace',
  )
  body = {name: options.pop(name) for name in own if name in options}
  return client.completions.create(
    model=NAME, prompt=prompt, extra_body=body, **options
  )


def texts_of(answer):
  return [choice.text for choice in answer.choices]


def test_answers_are_those_of_the_engine(client, engine):
  prompts = TEXTS[:3]
  want = engine.generate(prompts, max_length=16)
  have = create(client, prompts, temperature=0)
  assert texts_of(have) == [one.text for one in want]
  assert [one.index for one in have.choices] == [0, 1, 2]
  assert have.usage.completion_tokens == sum(len(one.tokens) for one in want)
  assert have.usage.prompt_tokens == sum(
    len(engine.input_ids(t)) for t in prompts
  )
  assert {one.finish_reason for one in have.choices} <= {'stop', 'length'}
  ids = [engine.tokenizer.encode(text) for text in prompts]
  assert texts_of(create(client, ids, temperature=0)) == texts_of(have)
  one = create(client, ids[0], temperature=0)
  assert texts_of(one) == texts_of(have)[:1]


def test_samples_are_those_of_the_engine(client, engine):
  options = {'temperature': 1.1, 'seed': 7, 'top_p': 0.9}
  want = engine.generate(
    TEXTS[:2], num_samples=2, top_k=20, max_length=12, **options
  )
  have = create(client, TEXTS[:2], n=2, max_tokens=12, top_k=20, **options)
  assert texts_of(have) == [one.text for one in want]
  # Without a seed each answer has another.
  assert len({create(client, TEXTS[0]).choices[0].text for _ in range(4)}) > 1


def test_streams_are_whole_and_never_taken_back(client, engine):
  options = {'temperature': 1.3, 'seed': 3, 'max_tokens': 24, 'n': 2}
  whole = create(client, TEXTS[0], ignore_eos=True, **options)
  for pace in ('rounds', 'even'):
    chunks = list(
      create(
        client,
        TEXTS[0],
        stream=True,
        ignore_eos=True,
        pace=pace,
        stream_options={'include_usage': True},
        **options,
      )
    )
    *parts, last = chunks
    assert last.choices == [] and last.usage == whole.usage
    assert last.metrics == whole.metrics
    assert all(one.usage is None for one in parts)
    found = {0: '', 1: ''}
    ends = []
    for part in parts:
      (choice,) = part.choices
      # An ill byte between two words stays one; the end of a round may not.
      cut = pace == 'rounds' and not choice.finish_reason
      assert not (cut and choice.text.endswith('\ufffd'))
      found[choice.index] += choice.text
      ends += [choice.index] * (choice.finish_reason is not None)
    assert list(found.values()) == texts_of(whole)
    assert sorted(ends) == [0, 1]
    assert len(parts) > 4, 'it came all at once'
    assert len({one.id for one in chunks}) == 1
  # Without usage the last chunk has what speculation did.
  *_, last = create(client, TEXTS[0], stream=True, temperature=0)
  assert last.choices[0].finish_reason and last.metrics


@pytest.fixture(scope='module')
def easy(engine):
  """A text of whose greedy output the toy drafter guesses something."""
  found = engine.generate(TEXTS, max_length=20)
  accepted = [one.stats.num_accepted for one in found]
  assert max(accepted) > 0
  return TEXTS[accepted.index(max(accepted))]


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_rounds_of_a_stream(client, engine, easy, temperature):
  """They are those of the engine's trace, and what was kept is the text."""
  options = {'temperature': temperature, 'seed': 3}
  pieces = [
    piece.choices[0]
    for piece in create(
      client,
      easy,
      max_tokens=20,
      stream=True,
      return_rounds=True,
      **options,
    )
  ]
  have = [[tuple(part) for part in piece.round] for piece in pieces]
  found = engine.trace(easy, max_length=20, **options).rounds
  assert have == [one.parts for one in found]
  kinds = {kind for one in have for kind, _ in one}
  assert {'accepted', 'rejected', 'target'} <= kinds
  kept = [t for one in have for k, t in one if k in ('accepted', 'target')]
  text = ''.join(piece.text for piece in pieces)
  # What ends inside a character is no text yet.
  spelled = ''.join(kept).removesuffix('</s>')
  assert spelled == text.rstrip('\ufffd')


def test_a_greedy_row_alone_may_be_plain(client, engine, easy, scheduler):
  wait_until(lambda: not scheduler.num_rows)
  want = engine.generate([easy], max_length=20)[0].text
  calls = {}
  with nothing_compiles():
    for speculative in (True, False):
      answer = create(
        client,
        easy,
        temperature=0,
        max_tokens=20,
        speculative=speculative,
      )
      assert answer.choices[0].text == want
      counts = answer.metrics['speculative_decoding']
      calls[speculative] = counts['num_spec_steps']
      tokens = answer.usage.completion_tokens
  assert calls[True] < calls[False] == tokens


def test_the_page(url):
  """One file, which may load nothing but itself."""
  answer = httpx.get(f'{url}/')
  assert answer.status_code == 200
  assert answer.headers['content-type'].startswith('text/html')
  policy = answer.headers['content-security-policy']
  assert "default-src 'none'" in policy and "connect-src 'self'" in policy
  assert not re.search(r'(src|href)="(?!data:)', answer.text)


def test_the_protocol_of_a_stream(url):
  body = {'prompt': TEXTS[0], 'stream': True, 'temperature': 0}
  with httpx.stream('POST', f'{url}/v1/completions', json=body) as answer:
    assert answer.headers['content-type'].startswith('text/event-stream')
    text = answer.read().decode()
  events = text.split('\n\n')
  assert events[-1] == '' and events[-2] == 'data: [DONE]'
  for event in events[:-2]:
    assert json.loads(event.removeprefix('data: '))['object'] == (
      'text_completion'
    )


def test_stop_strings_and_lengths(client, engine):
  options = {'temperature': 0.8, 'seed': 1}
  plain = create(client, TEXTS[1], max_tokens=24, **options).choices[0].text
  stop = plain[len(plain) // 2 :][:2]
  for stream in (False, True):
    have = create(
      client,
      TEXTS[1],
      stop=[stop, 'never there'],
      max_tokens=24,
      stream=stream,
      **options,
    )
    answers = have if stream else [have]
    choices = [choice for one in answers for choice in one.choices]
    assert ''.join(one.text for one in choices) == plain[: plain.find(stop)]
    assert choices[-1].finish_reason == 'stop'
  short = create(client, TEXTS[1], max_tokens=3, ignore_eos=True)
  assert short.choices[0].finish_reason == 'length'
  assert short.usage.completion_tokens == 3
  default = create(client, TEXTS[1], ignore_eos=True)
  assert default.usage.completion_tokens == 16


def test_log_probs_and_ids(client, engine):
  options = {'temperature': 0, 'max_tokens': 6}
  (want,) = engine.generate([TEXTS[0]], max_length=6)
  have = create(client, TEXTS[0], logprobs=1, return_token_ids=True, **options)
  (choice,) = have.choices
  assert choice.token_ids == want.tokens
  assert choice.prompt_token_ids == engine.input_ids(TEXTS[0])
  found = choice.logprobs
  assert found.token_logprobs == pytest.approx(want.log_probs, abs=1e-4)
  assert ''.join(found.tokens) == choice.text
  assert [list(one) for one in found.top_logprobs] == [
    [token] for token in found.tokens
  ]
  streamed = [
    chunk.choices[0]
    for chunk in create(
      client,
      TEXTS[0],
      logprobs=1,
      return_token_ids=True,
      stream=True,
      **options,
    )
  ]
  assert sum((c.token_ids for c in streamed), []) == want.tokens
  parts = [c.logprobs for c in streamed if c.logprobs]
  assert sum((p.tokens for p in parts), []) == found.tokens
  assert sum((p.text_offset for p in parts), []) == found.text_offset


def test_beams_are_those_of_the_engine(client, engine, server):
  prompts = TEXTS[:2]
  want = engine.generate(prompts, num_beams=2, num_samples=2, max_length=9)
  with nothing_compiles():
    have = create(client, prompts, n=2, max_tokens=9, use_beam_search=True)
    # Others go on.
    assert create(client, TEXTS[2]).choices
  texts = [one.text for one in want]
  assert texts_of(have) == [texts[i] for i in (1, 0, 3, 2)]  # the best first
  empty = create(client, '', n=2, use_beam_search=True)
  assert texts_of(empty) == ['', '']


def test_a_search_keeps_nobody_waiting(client, engine, scheduler, monkeypatch):
  """One that fails ends alone, and a long one only has its turns."""
  asked = {'n': 2, 'max_tokens': 9, 'use_beam_search': True}
  want = texts_of(create(client, TEXTS[0], **asked))
  real, over = engine.search, threading.Event()

  def slow(*args):
    advance = real(*args)
    return lambda rounds: advance(rounds) if over.is_set() else None

  def fail(*args):
    raise RuntimeError('no memory')

  monkeypatch.setattr(engine, 'search', lambda *_: fail)
  with pytest.raises(openai.InternalServerError, match='search'):
    create(client, TEXTS[0], **asked)
  monkeypatch.setattr(engine, 'search', slow)
  answers = []
  thread = threading.Thread(
    target=lambda: answers.append(create(client, TEXTS[0], **asked))
  )
  thread.start()
  wait_until(lambda: scheduler.num_waiting)
  assert create(client, TEXTS[1]).choices and not answers
  over.set()
  thread.join()
  assert texts_of(answers[0]) == want


def test_what_speculation_did(client, engine):
  (want,) = engine.generate([TEXTS[2]], max_length=24, stop_ids=STOPS[:0])
  have = create(
    client, TEXTS[2], temperature=0, max_tokens=24, ignore_eos=True
  ).metrics['speculative_decoding']
  stats = want.stats
  assert have == {
    'mean_acceptance_length': pytest.approx(
      1 + stats.num_accepted / stats.num_target_calls
    ),
    'acceptance_rate': stats.acceptance_rate,
    'acceptance_histogram': list(stats.histogram),
    'num_spec_steps': stats.num_target_calls,
    'num_accepted_draft_tokens': stats.num_accepted,
    'num_draft_tokens': 3 * stats.num_target_calls,
    'num_tested': stats.num_tested,
    'num_passed': stats.passed,
    'num_spec_tokens': 3,
  }


def test_models_health_and_metrics(client, url):
  assert [one.id for one in client.models.list()] == [NAME]
  health = httpx.get(f'{url}/health')
  assert health.status_code == 200
  assert health.json() == {'live': True, 'ready': True, 'compiled': True}
  assert httpx.get(f'{url}/health/live').status_code == 200
  before = counters(url)
  with nothing_compiles():
    create(client, TEXTS[0], temperature=0)
    list(create(client, TEXTS[:2], stream=True, n=2, logprobs=0))
  after = counters(url)
  more = {name: after[name] - before.get(name, 0) for name in after}
  assert more['specdec:compilations_total'] == 0
  assert more['specdec:requests_total{status="200"}'] == 3
  assert more['specdec:spec_decode_num_drafts_total'] > 0
  accepted = sum(
    value for name, value in more.items() if '_per_pos_total{' in name
  )
  assert accepted == more['specdec:spec_decode_num_accepted_tokens_total']
  assert after['specdec:num_requests_running'] == 0
  assert after['specdec:num_requests_waiting'] == 0
  for name in ('e2e_request_latency', 'time_to_first_token'):
    assert more[f'specdec:{name}_seconds_count'] >= 1
  # The dashboard asks for nothing that is not there.
  board = (ROOT / 'docs/grafana.json').read_text('utf-8')
  asked = set(re.findall(r'specdec:\w+', board))
  known = {name.partition('{')[0] for name in after}
  assert len(asked) > 10 and asked <= known
  assert more['specdec:inter_token_latency_seconds_count'] > 1


def test_an_answer_does_not_wait_for_an_ack(url):
  """Its second part would come 40 ms after the first, on an old connection."""
  took = []
  with httpx.Client() as http:
    for _ in range(40):
      begin = time.perf_counter()
      http.get(f'{url}/v1/models')
      took.append(time.perf_counter() - begin)
  assert min(took[20:]) < 0.03


def counters(url):
  text = httpx.get(f'{url}/metrics').text
  lines = (one for one in text.splitlines() if not one.startswith('#'))
  return {name: float(value) for name, value in map(str.split, lines)}


BEAMS = {'use_beam_search': True, 'n': 2}
BAD = {
  'a model': ({'model': 'gpt-5'}, 404, 'model', "only 'toy'"),
  'a field': ({'temprature': 0}, 400, 'temprature', 'temperature'),
  'unsupported': (
    {'logit_bias': {'5': 1}},
    400,
    'logit_bias',
    'an object of 1 is not',
  ),
  'beams': ({'use_beam_search': True, 'n': 3}, 400, 'use_beam_search', '.2.'),
  'warm beams': (BEAMS | {'temperature': 1}, 400, 'temperature', '0 in a beam'),
  'streamed beams': (BEAMS | {'stream': True}, 400, 'stream', 'in a beam'),
  "beams' candidates": (
    BEAMS | {'temperature': 0, 'logprobs': 1},
    400,
    'logprobs',
    '0 or nothing where .*1 is for temperature 0',
  ),
  'too long': ({'prompt': 'Q' * 99}, 400, 'prompt', '101 tokens.*40 at most'),
  'n': ({'n': 9}, 400, 'n', 'from 1 to 8; got 9'),
  'best of': ({'best_of': 3}, 400, 'best_of', 'n = 1.*got 3'),
  'many': ({'prompt': ['a'] * 3, 'n': 3}, 400, 'prompt', r'8.*3 \* 3'),
  'nothing': ({'prompt': []}, 400, 'prompt', 'got a list of 0'),
  'no prompt': ({'prompt': None}, 400, 'prompt', 'got null'),
  'ids': ({'prompt': [3, 999]}, 400, 'prompt', '999.*from 0 to 287'),
  'ids below': ({'prompt': [[3], [-1]]}, 400, 'prompt', 'prompt 1 holds -1'),
  'mixed': ({'prompt': ['a', [3]]}, 400, 'prompt', 'expected a text'),
  'bools': ({'prompt': [True]}, 400, 'prompt', 'expected a text'),
  'echo': ({'echo': True}, 400, 'echo', 'has an encoder'),
  'tokens': ({'max_tokens': 25}, 400, 'max_tokens', 'from 1 to 24; got 25'),
  'min': ({'min_tokens': 17}, 400, 'min_tokens', 'from 0 to 16'),
  'heat': ({'temperature': -1}, 400, 'temperature', 'from 0 to 100'),
  'top_p': ({'top_p': 0}, 400, 'top_p', 'above 0'),
  'top_k': ({'top_k': 1.5}, 400, 'top_k', 'whole number'),
  'stop': ({'stop': ['']}, 400, 'stop', '1 to 256'),
  'candidates': (
    {'logprobs': 5},
    400,
    'logprobs',
    '0 or nothing where .*1 is for temperature 0',
  ),
  'options': ({'stream_options': {}}, 400, 'stream_options', 'unless stream'),
  'pace': ({'pace': 'slow'}, 400, 'pace', 'even'),
  'seed': ({'seed': 'x'}, 400, 'seed', 'got "x"'),
  'rounds': ({'return_rounds': True}, 400, 'return_rounds', 'unless stream'),
  'plain': ({'speculative': False}, 400, 'speculative', 'on the traffic'),
  'plain beams': (BEAMS | {'speculative': False}, 400, 'speculative', 'beam'),
  'file': ({'gin_file': '/etc/passwd'}, 400, 'gin_file', 'no field'),
}


@pytest.mark.parametrize('name', BAD)
def test_bad_input(client, name):
  """It says what was expected and what came, and names the field."""
  body, status, param, words = BAD[name]
  asked = {'prompt': TEXTS[0], 'model': NAME} | body
  with pytest.raises(openai.APIStatusError) as caught:
    client.post('/completions', body=asked, cast_to=object)
  error = caught.value
  assert error.status_code == status
  assert error.body['type'] == 'invalid_request_error'
  assert error.body['param'] == param
  assert re.search(words, error.body['message']), error.body['message']


def test_neutral_values_pass(client):
  neutral = {
    'best_of': 1,
    'suffix': None,
    'presence_penalty': 0,
    'user': 'me',
    'logit_bias': {},
    'use_beam_search': False,
    'top_k': -1,
    'max_tokens': 2.0,
  }
  answer = client.post(
    '/completions', body={'prompt': TEXTS[0]} | neutral, cast_to=object
  )
  assert answer['usage']['completion_tokens'] <= 2
  empty = create(client, '')
  assert empty.choices[0].text == '' and empty.usage.completion_tokens == 0
  assert empty.choices[0].finish_reason == 'stop'


def test_chat_needs_a_template(client):
  with pytest.raises(openai.BadRequestError, match='no chat template'):
    client.chat.completions.create(
      model=NAME, messages=[{'role': 'user', 'content': 'Hello'}]
    )


def test_clients_that_leave_free_their_slots(url, scheduler, client, engine):
  body = {
    'prompt': TEXTS[0],
    'stream': True,
    'max_tokens': 24,
    'n': 4,
    'ignore_eos': True,
    'seed': 1,
  }
  for _ in range(5):
    with httpx.stream('POST', f'{url}/v1/completions', json=body) as answer:
      next(answer.iter_raw())
    # Others get what they would get anyway.
    want = engine.generate([TEXTS[4]], max_length=16)[0].text
    assert create(client, TEXTS[4], temperature=0).choices[0].text == want
  wait_until(lambda: not scheduler.num_rows)


def test_a_client_that_leaves_the_queue(url, scheduler, held):
  """Also one that does not stream."""
  data = json.dumps({'prompt': TEXTS[0], 'n': 3}).encode()
  with sent(url, data):
    wait_until(lambda: scheduler.num_waiting == 3)
  wait_until(lambda: scheduler.num_waiting == 0)


@contextlib.contextmanager
def sent(url, data, length=None):
  """A connection with a request that has been sent."""
  port = int(url.rpartition(':')[2])
  with socket.create_connection(('127.0.0.1', port)) as connection:
    head = (
      'POST /v1/completions HTTP/1.1\r\nHost: x\r\n'
      f'Content-Length: {length or len(data)}\r\n\r\n'
    )
    connection.sendall(head.encode() + data)
    yield connection


def test_overload_is_refused_and_passes(url, client, scheduler, held):
  with sent(url, json.dumps({'prompt': TEXTS[0], 'n': 8}).encode()) as first:
    wait_until(lambda: scheduler.num_waiting == 8)
    with pytest.raises(openai.RateLimitError) as caught:
      create(client, TEXTS[1])
    assert int(caught.value.response.headers['retry-after']) >= 1
    assert caught.value.body['code'] == 'queue_full'
    held()
    assert first.recv(1 << 16).startswith(b'HTTP/1.1 200')
  assert create(client, TEXTS[1]).choices


def test_deadlines(client, scheduler, held, monkeypatch):
  short = dataclasses.replace(LIMITS, max_seconds=0.05)
  monkeypatch.setattr(scheduler, 'settings', short)
  with pytest.raises(openai.InternalServerError, match='time of the') as caught:
    create(client, TEXTS[0])
  assert caught.value.status_code == 504
  with pytest.raises(openai.APIError, match='time of the'):
    list(create(client, TEXTS[0], stream=True))


def test_bodies_that_are_large_or_slow(url):
  large = b'{"prompt": "' + b'x' * (10 << 20) + b'"}'
  with contextlib.suppress(httpx.WriteError):
    answer = httpx.post(f'{url}/v1/completions', content=large)
    assert answer.status_code == 413 and 'bytes' in answer.text
  with sent(url, b'{"prompt": ', length=100) as slow:
    answer = b''
    while b'within 2' not in answer:  # head and body may come apart
      part = slow.recv(1 << 16)
      assert part, answer
      answer += part
  assert answer.startswith(b'HTTP/1.1 408')
  assert httpx.get(f'{url}/health').status_code == 200


def test_many_clients_at_once(client, engine, scheduler):
  """Retried where the queue is full, each hears the answer to its own text."""
  want = [one.text for one in engine.generate(TEXTS, max_length=16)]
  patient = client.with_options(max_retries=50)
  found = {}

  def ask(index):
    answer = create(patient, TEXTS[index], temperature=0)
    found[index] = answer.choices[0].text

  threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(TEXTS))]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert [found[i] for i in range(len(TEXTS))] == want


@contextlib.contextmanager
def asking(scheduler, keys=()):
  """Gives `ask(path, body, headers)` of an application without a server."""
  application = Application(scheduler, NAME, keys)

  async def answer(path, body, headers):
    transport = httpx.ASGITransport(application.asgi)
    async with httpx.AsyncClient(transport=transport) as http:
      url = f'http://x{path}'
      if body is None:
        return await http.get(url, headers=headers)
      return await http.post(url, json=body, headers=headers)

  yield lambda path, body=None, headers=None: asyncio.run(
    answer(path, body, headers)
  )
  application.metrics.close()


def test_keys_and_request_ids(scheduler, server, tmp_path, monkeypatch):
  file = tmp_path / 'keys'
  file.write_text('one\n\ntwo\n')
  assert api_keys(str(file)) == ['one', 'two']
  monkeypatch.setenv('SPECDEC_API_KEYS', 'three, four,')
  assert api_keys(None) == ['three', 'four']
  monkeypatch.setenv('SPECDEC_API_KEYS', ' , ')
  with pytest.raises(ValueError, match='SPECDEC_API_KEYS'):
    api_keys(None)
  file.write_text('\n')
  for path in (str(file), str(tmp_path / 'none')):
    with pytest.raises(ValueError, match='keys?'):
      api_keys(path)
  known = {'authorization': 'bearer two'}
  with asking(scheduler, ['one', 'two']) as ask:
    for wrong in (None, 'Bearer onetwo', 'Basic two', 'two', 'Bearer '):
      wrong = wrong and {'authorization': wrong}
      answer = ask('/v1/models', None, wrong)
      assert answer.status_code == 401
      assert answer.json()['error']['code'] == 'invalid_api_key'
    mine = ask('/v1/models', None, known | {'x-request-id': 'mine-1'})
    assert mine.status_code == 200
    assert mine.headers['x-request-id'] == 'mine-1'
    other = ask('/v1/models', None, known | {'x-request-id': 'a b'})
    assert re.fullmatch(r'[0-9a-f]{16}', other.headers['x-request-id'])
    assert ask('/health').status_code == 200
    nothing = ask('/nothing')
    assert nothing.status_code == 404 and nothing.json()['error']['message']
    wrong = ask('/v1/completions', None, known)
    assert wrong.status_code == 405 and 'GET' in wrong.text


def refuses(port):
  """Whether nothing listens there any more."""
  try:
    httpx.get(f'http://127.0.0.1:{port}/health')
  except httpx.TransportError as error:
    return isinstance(error, httpx.ConnectError)
  return False


def test_a_stop_finishes_what_was_taken(engine):
  """And what does not fit into its time ends with an error."""
  limits = dataclasses.replace(LIMITS, rows=1, beams=(), drain_seconds=60.0)
  scheduler = Scheduler(engine, limits)
  made = Server(scheduler, NAME)
  answers = []

  def ask(stream):
    body = {'prompt': TEXTS[0], 'n': 3, 'max_tokens': 24, 'stream': stream}
    url = f'http://127.0.0.1:{made.port}/v1/completions'
    answers.append(httpx.post(url, json=body, timeout=300))

  threads = [threading.Thread(target=ask, args=(x,)) for x in (False, True)]
  with serving(made):
    early = httpx.post(
      f'http://127.0.0.1:{made.port}/v1/completions', json={'prompt': 'a'}
    )
    assert early.status_code == 503 and 'not ready' in early.text
    ready = httpx.get(f'http://127.0.0.1:{made.port}/health/ready')
    assert ready.status_code == 503 and ready.json()['live']
    wait_until(lambda: scheduler.takes_rows)
    for thread in threads:
      thread.start()
    wait_until(lambda: scheduler.num_rows == 6 or len(answers) == 2)
    made.stop()
    for thread in threads:
      thread.join()
    # uvicorn sees the stop at its next look, a tenth of a second later at most.
    wait_until(lambda: refuses(made.port))
  assert [one.status_code for one in answers] == [200, 200]
  assert all('error' not in one.text for one in answers)
  assert any(one.text.endswith('data: [DONE]\n\n') for one in answers)


def test_a_stop_ends_what_takes_too_long(engine, monkeypatch):
  limits = dataclasses.replace(LIMITS, rows=1, beams=(), drain_seconds=0.2)
  scheduler = Scheduler(engine, limits)
  made = Server(scheduler, NAME)
  with serving(made):
    wait_until(lambda: scheduler.takes_rows)
    monkeypatch.setattr(scheduler, '_fill', lambda: time.sleep(0.001))
    url = f'http://127.0.0.1:{made.port}/v1/completions'
    body = {'prompt': TEXTS[0], 'stream': True}
    with httpx.stream('POST', url, json=body, timeout=300) as answer:
      made.stop()
      text = answer.read().decode()
  assert 'is stopping' in text and text.endswith('data: [DONE]\n\n')


@contextlib.contextmanager
def asking_of(engine):
  """`asking` of a scheduler of its own."""
  scheduler = started(engine, rows=1)
  with asking(scheduler) as ask:
    yield ask
  scheduler.stop()
  scheduler.join()


def test_plain_where_there_is_no_drafter(tokenizer):
  alone = Engine(
    model(0), tokenizer=tokenizer, max_input_len=32, max_decode_len=8
  )
  want = alone.generate(TEXTS[:1], max_length=8)[0].text
  body = {'prompt': TEXTS[0], 'temperature': 0, 'max_tokens': 8}
  with asking_of(alone) as ask:
    answer = ask('/v1/completions', body).json()
  assert answer['choices'][0]['text'] == want
  assert 'metrics' not in answer


@pytest.mark.slow
@pytest.mark.parametrize('family', ['GPT-2', 'T5X'])
def test_decoder_only(family, tokenizer):
  """The output goes on from the prompt, which `echo` puts before it."""
  engine = make_engine(FAMILIES[family], tokenizer)
  texts = ['the red dog runs', '', 'a cat']
  options = {'temperature': 1.0, 'seed': 4}
  want = engine.generate(texts, max_length=8, **options)
  with asking_of(engine) as ask:
    body = {'prompt': texts, 'max_tokens': 8} | options
    with nothing_compiles():
      plain = ask('/v1/completions', body).json()
      echoed = ask('/v1/completions', body | {'echo': True}).json()
    assert [c['text'] for c in plain['choices']] == [one.text for one in want]
    assert [c['text'] for c in echoed['choices']] == [
      text + one.text for text, one in zip(texts, want, strict=True)
    ]
    wrong = ask('/v1/completions', body | {'echo': True, 'logprobs': 0})
    assert wrong.json()['error']['param'] == 'echo'
