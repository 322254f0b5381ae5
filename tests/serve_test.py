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

import small_vocabulary
from continuous_test import nothing_compiles
from engine_text_test import engine_of, joined
from scheduler_test import TEXTS, engine, model, started, wait_until
from specdec_jax.engine.engine import Engine
from specdec_jax.serving import ServeSettings, protocol
from specdec_jax.serving.app import Application
from specdec_jax.serving.run import api_keys
from specdec_jax.serving.server import Server
from specdec_jax.serving.worker import Worker
from specdec_jax.text.tokenizer import Tokenizer

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
  return Worker(engine, LIMITS)


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
  counts = have.metrics['speculative_decoding']
  stats = [one.stats for one in want]
  assert counts['num_spec_steps'] == sum(x.num_target_calls for x in stats)
  accepted = sum(x.num_accepted for x in stats)
  assert counts['num_accepted_draft_tokens'] == accepted
  assert counts['num_draft_tokens'] == 3 * counts['num_spec_steps']
  options = {'temperature': 1.1, 'seed': 7, 'top_p': 0.9}
  want = engine.generate(
    TEXTS[:2], num_samples=2, top_k=20, max_length=12, **options
  )
  have = create(client, TEXTS[:2], n=2, max_tokens=12, top_k=20, **options)
  assert texts_of(have) == [one.text for one in want]
  # Without a seed each answer has another.
  assert len({create(client, TEXTS[0]).choices[0].text for _ in range(4)}) > 1


def test_streams_are_whole_and_never_taken_back(client, url):
  options = {'temperature': 1.3, 'seed': 3, 'max_tokens': 24, 'n': 2}
  options |= {'ignore_eos': True}
  whole = create(client, TEXTS[0], **options)
  usage = {'include_usage': True}
  *parts, last = create(
    client, TEXTS[0], stream=True, stream_options=usage, **options
  )
  assert last.choices == [] and last.usage == whole.usage
  assert last.metrics == whole.metrics
  assert all(one.usage is None for one in parts)
  found, ends = {0: '', 1: ''}, []
  for part in parts:
    (choice,) = part.choices
    # An ill byte between two words stays one; the end of a round may not.
    assert choice.finish_reason or not choice.text.endswith('\ufffd')
    found[choice.index] += choice.text
    ends += [choice.index] * (choice.finish_reason is not None)
  assert list(found.values()) == texts_of(whole)
  assert sorted(ends) == [0, 1]
  assert len(parts) > 4, 'it came all at once'
  assert len({one.id for one in parts}) == 1
  # Without usage the last chunk has what speculation did.
  *_, last = create(client, TEXTS[0], stream=True, temperature=0)
  assert last.choices[0].finish_reason and last.metrics
  body = {'prompt': TEXTS[0], 'stream': True, 'temperature': 0}
  with httpx.stream('POST', f'{url}/v1/completions', json=body) as answer:
    assert answer.headers['content-type'].startswith('text/event-stream')
    text = answer.read().decode()
  assert text.endswith('\n\ndata: [DONE]\n\n')
  assert {one['object'] for one in events_of(text)} == {'text_completion'}


@pytest.fixture(scope='module')
def easy(engine):
  """A text of whose greedy output the toy drafter guesses something."""
  found = engine.generate(TEXTS, max_length=20)
  accepted = [one.stats.num_accepted for one in found]
  assert max(accepted) > 0
  return TEXTS[accepted.index(max(accepted))]


@pytest.fixture(scope='module')
def mixed(engine):
  """A text of which some proposals are accepted, and some are not."""
  found = [
    one.stats.num_tested > one.stats.num_accepted > 0
    for one in engine.generate(TEXTS, max_length=20)
  ]
  return TEXTS[found.index(True)]


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_rounds_of_a_stream(client, engine, mixed, temperature):
  """They are those of the engine's trace, and what was kept is the text."""
  options = {'temperature': temperature, 'seed': 3}
  pieces = [
    piece.choices[0]
    for piece in create(
      client,
      mixed,
      max_tokens=20,
      stream=True,
      return_rounds=True,
      **options,
    )
  ]
  have = [[tuple(part) for part in piece.round] for piece in pieces]
  found = engine.trace(mixed, max_length=20, **options).rounds
  want = [one.parts for one in found]
  kinds = [[kind for kind, _ in one] for one in have]
  assert kinds == [[kind for kind, _ in one] for one in want]
  assert {'accepted', 'rejected', 'target'} <= {k for one in kinds for k in one}
  text = ''.join(piece.text for piece in pieces)
  for rounds in (have, want):
    # A stream does not know yet what a last byte becomes, the whole text does.
    parts = [part for one in rounds for part in one]
    kept = [text for kind, text in parts if kind in ('accepted', 'target')]
    assert ''.join(kept).removesuffix('</s>') == text


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


@pytest.mark.parametrize(
  'options',
  [
    {'temperature': 0, 'logprobs': 1},
    {'temperature': 1.2, 'seed': 5, 'logprobs': 3},
    {'temperature': 0, 'logprobs': 0, 'stop': ['e', '\n'], 'min_tokens': 3},
    {'n': 2, 'use_beam_search': True, 'logprobs': 2},
  ],
)
def test_tokens_joined_are_the_text(client, engine, options):
  """Whole and streamed, with the likeliest at each place as the engine's."""
  searches = 'use_beam_search' in options
  options |= {'return_token_ids': True}
  have = create(client, TEXTS[0], max_tokens=9, **options)
  asked = {'max_length': 9, 'top_log_probs': options['logprobs']}
  if searches:
    asked |= {'num_beams': 2, 'num_samples': 2}
  else:
    asked |= {name: options.get(name, 0) for name in ('temperature', 'seed')}
    asked |= {'stop_strings': options.get('stop', [])}
    asked |= {'min_length': options.get('min_tokens', 0)}
  done = engine.generate([TEXTS[0]], **asked)[::-1]
  for choice, want in zip(have.choices, done, strict=True):
    found = choice.logprobs
    assert choice.text == want.text and choice.token_ids == want.tokens
    if not want.tokens:
      assert found is None
      continue
    assert choice.prompt_token_ids == engine.input_ids(TEXTS[0])
    assert joined(found.tokens) == want.text
    assert found.text_offset == sorted(found.text_offset)
    assert found.token_logprobs == pytest.approx(want.log_probs, abs=1e-4)
    if options['logprobs']:
      for name, own, top, pairs in zip(
        found.tokens,
        found.token_logprobs,
        found.top_logprobs,
        want.top_log_probs,
        strict=True,
      ):
        values = [value for _, value in pairs]
        # Tokens of one name, such as those without a text, are one.
        for value in top.values():
          near = [pytest.approx(x, abs=1e-4) for x in [own, *values]]
          assert value in near
        assert max(top.values()) == pytest.approx(values[0], abs=1e-4)
        assert name in top
    else:
      assert found.top_logprobs is None
  if searches:
    return
  chunks = create(client, TEXTS[0], max_tokens=9, stream=True, **options)
  parts = [chunk.choices[0] for chunk in chunks]
  assert ''.join(part.text for part in parts) == have.choices[0].text
  assert sum((part.token_ids for part in parts), []) == done[0].tokens
  given = [part for part in parts if part.logprobs]
  whole = have.choices[0].logprobs
  for name in ('tokens', 'text_offset'):
    assert sum((getattr(p.logprobs, name) for p in given), []) == getattr(
      whole, name
    )


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


def test_models_health_and_metrics(client, url):
  assert [one.id for one in client.models.list()] == [NAME]
  assert client.models.retrieve(NAME) == client.models.list().data[0]
  for other in ('gpt-5', f'{NAME}/b'):
    with pytest.raises(openai.NotFoundError) as caught:
      client.models.retrieve(other)
    assert caught.value.body['code'] == 'model_not_found'
    assert caught.value.body['param'] == 'model'
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
USAGE = {'include_usage': True}
BAD = (  # the field that is named, and the body
  ('model', {'model': 'gpt-5'}),
  ('temprature', {'temprature': 0}),
  ('gin_file', {'gin_file': '/etc/passwd'}),
  ('logit_bias', {'logit_bias': {'5': 1}}),
  ('tools', {'tools': [{}]}),
  ('response_format', {'response_format': {'type': 'json_object'}}),
  ('safety_identifier', {'safety_identifier': 5}),
  ('use_beam_search', {'use_beam_search': True, 'n': 3}),
  ('temperature', BEAMS | {'temperature': 1}),
  ('stream', BEAMS | {'stream': True}),
  ('speculative', BEAMS | {'speculative': False}),
  ('speculative', {'speculative': False}),
  ('prompt', {'prompt': 'Q' * 99}),
  ('prompt', {'prompt': ['a'] * 3, 'n': 3}),
  ('prompt', {'prompt': []}),
  ('prompt', {'prompt': None}),
  ('prompt', {'prompt': [3, 999]}),
  ('prompt', {'prompt': [[3], [-1]]}),
  ('prompt', {'prompt': ['a', [3]]}),
  ('prompt', {'prompt': [True]}),
  ('n', {'n': 9}),
  ('best_of', {'best_of': 3}),
  ('echo', {'echo': True}),
  ('max_tokens', {'max_tokens': 25}),
  ('max_tokens', {'max_tokens': 0}),
  ('min_tokens', {'min_tokens': 17}),
  ('temperature', {'temperature': -1}),
  ('top_p', {'top_p': 0}),
  ('top_k', {'top_k': 1.5}),
  ('stop', {'stop': ['']}),
  ('logprobs', {'logprobs': 21}),
  ('seed', {'seed': 'x'}),
  ('return_rounds', {'return_rounds': True}),
  ('stream_options', {'stream_options': USAGE}),
  ('stream_options', {'stream': True, 'stream_options': {'obfuscate': True}}),
)


@pytest.mark.parametrize(('param', 'body'), BAD)
def test_bad_input(client, param, body):
  """The error names the field, and shows what came."""
  asked = {'prompt': TEXTS[0], 'model': NAME} | body
  with pytest.raises(openai.APIStatusError) as caught:
    client.post('/completions', body=asked, cast_to=object)
  error = caught.value
  assert error.status_code == (404 if param == 'model' else 400)
  assert error.body['type'] == 'invalid_request_error'
  assert error.body['param'] == param
  value = body[param]
  if (
    param != 'temprature'
    and isinstance(value, int | float | str)
    and len(str(value)) < 9
  ):
    assert json.dumps(value).strip('"') in error.body['message']


# What clients send that asks for nothing: OpenAI's fields and vLLM's.
NEUTRAL = {name: values[-1] for name, values in protocol._NEUTRAL.items()} | {
  'best_of': 1,
  'max_tokens': 2.0,
  'presence_penalty': 0.0,
  'prompt_cache_key': 'mine',
  'stop': [],
  'stream_options': {'include_usage': None},
  'top_k': -1,
  'use_beam_search': False,
}
NULL = dict.fromkeys(
  'audio echo guided_json logprobs metadata n prediction reasoning_effort seed'
  ' store stream stream_options temperature tools web_search_options'.split()
)


def test_neutral_values_pass(client):
  plain, neutral, null = (
    client.post(
      '/completions',
      body={'prompt': TEXTS[0], 'seed': 3, 'max_tokens': 2} | more,
      cast_to=object,
    )
    for more in ({}, NEUTRAL, NULL | {'seed': 3})
  )
  assert neutral['choices'] == null['choices'] == plain['choices']
  options = {'include_usage': None, 'include_obfuscation': False}
  sent = create(client, TEXTS[0], stream=True, stream_options=options)
  assert all(piece.usage is None for piece in sent)
  empty = create(client, '')
  assert empty.choices[0].text == '' and empty.usage.completion_tokens == 0
  assert empty.choices[0].finish_reason == 'stop'


def test_chat_needs_a_template(client):
  with pytest.raises(openai.BadRequestError, match='no chat template'):
    client.chat.completions.create(
      model=NAME, messages=[{'role': 'user', 'content': 'Hello'}]
    )


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


def test_deadlines(client, scheduler, held, monkeypatch):
  short = dataclasses.replace(LIMITS, max_seconds=0.05)
  monkeypatch.setattr(scheduler, 'settings', short)
  with pytest.raises(openai.InternalServerError, match='time of the') as caught:
    create(client, TEXTS[0])
  assert caught.value.status_code == 504
  with pytest.raises(openai.APIError, match='time of the'):
    list(create(client, TEXTS[0], stream=True))


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
  scheduler = Worker(engine, limits)
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
  scheduler = Worker(engine, limits)
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
  """`asking` of a scheduler of its own, of which a part is compiled."""
  scheduler = started(engine, whole=False, rows=1)
  with asking(scheduler) as ask:
    yield ask
  scheduler.stop()
  scheduler.join()


def test_streams_of_a_vocabulary_with_byte_fallback(folder):
  """Its texts may get shorter: what was sent is never sent again."""
  tokenizers = pytest.importorskip('tokenizers')
  path = folder / 'bytes.json'
  small_vocabulary.byte_fallback(path, tokenizers.decoders.Strip(' ', 1, 0))
  engine = engine_of(Tokenizer(path, '</s>'))
  with asking_of(engine) as ask:
    for seed in range(4):
      body = {'prompt': 'a', 'n': 4, 'seed': seed, 'max_tokens': 8 + 4 * seed}
      body |= {'logprobs': 0, 'return_token_ids': True}
      body |= {'stop': ['a', '\n', ' ']} if seed % 2 else {}
      whole = ask('/v1/completions', body).json()['choices']
      sent = ask('/v1/completions', body | {'stream': True}).text
      parts = [one['choices'][0] for one in events_of(sent)]
      for want in whole:
        mine = [one for one in parts if one['index'] == want['index']]
        assert ''.join(one['text'] for one in mine) == want['text']
        ids = [token for one in mine for token in one['token_ids']]
        assert ids == want['token_ids']
        names = [
          x
          for one in mine
          if one['logprobs']
          for x in one['logprobs']['tokens']
        ]
        assert names == want['logprobs']['tokens']
        assert joined(names) == want['text']


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


def score_by_echo(ask, engine, prompt):
  """As EleutherAI's lm-evaluation-harness scores a text."""
  ids = prompt if isinstance(prompt, list) else engine.tokenizer.encode(prompt)
  begins = ids[:1] == [engine.bos_id] or engine.bos_id is None
  for most, stream in ((0, False), (1, False), (3, True)):
    asked = {'prompt': prompt, 'temperature': 0, 'max_tokens': most}
    asked |= {'logprobs': 1, 'echo': True, 'stream': stream}
    answer = ask('/v1/completions', asked)
    answers = [answer.json()] if not stream else events_of(answer.text)
    choices = [one['choices'][0] for one in answers if one['choices']]
    parts = [one['logprobs'] for one in choices if one['logprobs']]
    tokens, values, tops, offsets = (
      [x for part in parts for x in part[name]]
      for name in ('tokens', 'token_logprobs', 'top_logprobs', 'text_offset')
    )
    text = ''.join(one['text'] for one in choices)
    assert joined(tokens) == text and offsets == sorted(offsets)
    if not ids:
      continue
    assert len(ids) <= len(tokens) <= len(ids) + most
    assert text.startswith(engine.tokenizer.decode(ids))
    # The first token has a number if one that is not shown comes before it.
    assert (values[0] is None) == begins
    (score,) = engine.score([ids[:1]], [ids[1:]])
    if not begins:
      (score,) = engine.score([[]], [ids])
    want = score.log_probs[-len(ids) + 1 :]
    assert values[1 : len(ids)] == pytest.approx(want, abs=1e-4)
    for value, top in zip(values[1:], tops[1:], strict=True):
      assert value in top.values() and value <= max(top.values())


def events_of(text):
  return [
    json.loads(line.removeprefix('data: '))
    for line in text.splitlines()
    if line.startswith('data: {')
  ]
