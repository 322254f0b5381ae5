"""The server, as its clients meet it: the openai package over real HTTP.

What clients do to it, too, and what others notice of that: nothing. The slow
tests are of the demo pair, by `specdec serve`.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import importlib.util
import itertools
import json
import re
import socket
import threading
import time

import httpx
import numpy as np
import openai
import pytest

import clients
from benchmarks import serve as load
from clients import LIMITS, NAME, PATH, asking, create, serving, texts_of
from compilations import nothing_compiles
from repository import ROOT
from served import Served
from small_vocabulary import joined
from specdec_jax.serving import ServeSettings, protocol
from specdec_jax.serving.run import api_keys
from specdec_jax.serving.server import Connection, Server
from specdec_jax.serving.worker import Worker
from toy_workers import TEXTS, wait_until


def test_answers_are_those_of_the_engine(client, engine):
  prompts = TEXTS[:3]
  want = engine.generate(prompts, max_length=16)
  have = create(client, prompts, temperature=0)
  assert texts_of(have) == [one.text for one in want]
  assert [one.index for one in have.choices] == [0, 1, 2]
  assert have.usage.completion_tokens == sum(len(one.tokens) for one in want)
  read = map(engine.codec.input_ids, prompts)
  assert have.usage.prompt_tokens == sum(map(len, read))
  options = {'temperature': 1.1, 'seed': 7, 'top_p': 0.9, 'top_k': 20}
  want = engine.generate(TEXTS[:2], num_samples=2, max_length=12, **options)
  have = create(client, TEXTS[:2], n=2, max_tokens=12, **options)
  assert texts_of(have) == [one.text for one in want]
  # Samples are drafted for by the engine's gamma, whoever shares the slots.
  counts = have.metrics['speculative_decoding']
  stats = [one.stats for one in want]
  assert counts['num_spec_steps'] == sum(x.num_target_calls for x in stats)
  drafted = sum(x.num_drafted for x in stats)
  assert counts['num_draft_tokens'] == drafted
  assert counts['num_accepted_draft_tokens'] < drafted
  # Without a seed each answer has another.
  assert len({create(client, TEXTS[0]).choices[0].text for _ in range(4)}) > 1


def test_streams_are_whole_and_never_taken_back(client, url):
  options = {'temperature': 1.3, 'seed': 3, 'max_tokens': 24, 'n': 2}
  options |= {'ignore_eos': True}
  whole = create(client, TEXTS[0], **options)
  options |= {'stream_options': {'include_usage': True}}
  *parts, last = create(client, TEXTS[0], stream=True, **options)
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


LABELS = ['red', 'the dog', 'a']
OBJECT = {'type': 'object'}
SCHEMA = {'type': 'object', 'properties': {'a': {'type': 'integer'}}}
PENALTY = {'min_p': 0.2, 'presence_penalty': 1.0}


def formatted(**form):
  return {'response_format': form}


RULES = (
  ({'structured_outputs': {'choice': LABELS}}, {'choices': LABELS}),
  (PENALTY, PENALTY),
  ({'structured_outputs': {'json': SCHEMA}}, {'json_schema': SCHEMA}),
  ({'structured_outputs': {'regex': 'a', 'choice': None}}, {'regex': 'a'}),
  ({'structured_outputs': {'json_object': True}}, {'json_schema': OBJECT}),
  ({'guided_choice': LABELS, 'guided_json': None}, {'choices': LABELS}),
  ({'guided_regex': 'a'}, {'regex': 'a'}),
  ({'guided_json': SCHEMA}, {'json_schema': SCHEMA}),
  (formatted(type='json_object', schema=SCHEMA), {'json_schema': SCHEMA}),
  (formatted(type='text'), {}),
  (formatted(type='json_object'), {'json_schema': OBJECT}),
  (formatted(type='json_schema', json_schema={'schema': {}}),
   {'json_schema': {}}),
  ({'logit_bias': {'7': -100}}, {'logit_bias': {7: -100}}),
  ({'bad_words': ['a'], 'top_k': 3}, {'bad_words': ['a']}),
)  # fmt: skip


def test_rules_are_those_of_the_engine(client, engine, url):
  """Of streams and samples, too, beside rows that have none."""
  fields, options = RULES[0]
  shared = {'temperature': 0.7, 'seed': 2}
  asked = shared | fields | {'max_tokens': 16, 'n': 2}
  with concurrent.futures.ThreadPoolExecutor() as pool:
    plain = pool.submit(create, client, TEXTS[1], temperature=0)
    parts = [*create(client, TEXTS[0], stream=True, **asked)]
    have = create(client, TEXTS[0], **asked)
  options = shared | options | {'num_samples': 2, 'max_length': 16}
  want = engine.generate(TEXTS[:1], **options)
  assert texts_of(have) == [one.text for one in want], fields
  found = {0: '', 1: ''}
  for choice in (part.choices[0] for part in parts if part.choices):
    found[choice.index] += choice.text
  assert [*found.values()] == texts_of(have)
  same = engine.generate(TEXTS[1:2], max_length=16)[0].text
  assert texts_of(plain.result()) == [same]
  body = {'input': TEXTS[:2], 'labels': LABELS}
  found = httpx.post(f'{url}/v1/classify', json=body, timeout=60).json()['data']
  rows = engine.classify(TEXTS[:2], LABELS)
  np.testing.assert_allclose([one['probs'] for one in found], rows, rtol=1e-5)
  assert found[0]['label'] == LABELS[rows[0].argmax()]
  wrong = httpx.post(f'{url}/v1/classify', json=body | {'labels': ['a', 'a']})
  assert wrong.status_code == 400 and 'labels' in wrong.text


def test_the_words_of_rules():
  nothing = protocol.CompletionRequest(seed=1).options()
  for fields, options in RULES:
    shared = nothing | {x: fields[x] for x in ('top_k',) if x in fields}
    have = protocol.CompletionRequest(seed=1, **fields).options()
    assert have == shared | options


def test_rounds_of_a_stream(client, engine, mixed):
  """They are those of the engine's trace, and what was kept is the text."""
  options = {'temperature': 1.0, 'seed': 3}
  asked = options | {'max_tokens': 20, 'return_rounds': True}
  sent = create(client, mixed, stream=True, **asked)
  pieces = [piece.choices[0] for piece in sent]
  want = engine.trace(mixed, max_length=20, **options).rounds
  kinds = [[kind for kind, _ in piece.round] for piece in pieces]
  assert kinds == [[kind for kind, _ in one.parts] for one in want]
  assert {'accepted', 'rejected', 'target'} <= {k for one in kinds for k in one}
  parts = [part for piece in pieces for part in piece.round]
  kept = [text for kind, text in parts if kind in ('accepted', 'target')]
  text = ''.join(piece.text for piece in pieces)
  assert ''.join(kept).removesuffix('</s>') == text


def test_a_greedy_row_alone_may_be_plain(client, engine, mixed, scheduler):
  wait_until(lambda: not scheduler.num_rows)
  want = engine.generate([mixed], max_length=20)[0].text
  asked = {'temperature': 0, 'max_tokens': 20}
  with nothing_compiles():
    fast = create(client, mixed, **asked)
    slow = create(client, mixed, speculative=False, **asked)
  assert texts_of(fast) == texts_of(slow) == [want]
  both = [x.metrics['speculative_decoding'] for x in (fast, slow)]
  calls, tokens = (counts['num_spec_steps'] for counts in both)
  assert calls < tokens == slow.usage.completion_tokens


@pytest.mark.parametrize(
  ('number', 'options'),
  [
    (1, {'temperature': 0}),
    (3, {'temperature': 1.2, 'seed': 5}),
    (0, {'temperature': 0, 'stop': ['e', '\n'], 'min_tokens': 3}),
    (2, {'n': 2}),
  ],
)
def test_tokens_joined_are_the_text(client, engine, number, options):
  """Whole and streamed, with the likeliest at each place as the engine's."""
  asked = options | {'max_tokens': 9}
  beams = {'num_beams': 2} if 'n' in options else {}
  scored = {'top_log_probs': number, **beams}
  done = engine.generate([TEXTS[0]], **asked, **scored)[::-1]
  asked |= {'return_token_ids': True, 'logprobs': number}
  asked |= {'use_beam_search': bool(beams)}
  have = create(client, TEXTS[0], **asked).choices
  if not beams:
    chunks = create(client, TEXTS[0], stream=True, **asked)
    parts = [chunk.choices[0] for chunk in chunks]
    parts[-1].text = ''.join(part.text for part in parts)
    have.append(parts[-1])  # the last one has the tokens of all
    done = [*done, *done]
  for choice, want in zip(have, done, strict=True):
    assert choice.text == want.text and choice.token_ids == want.tokens
    assert choice.finish_reason == want.finish_reason.partition('_')[0]
    assert choice.prompt_token_ids == engine.codec.input_ids(TEXTS[0])
    probs = choice.logprobs
    if not want.tokens:
      assert probs is None
      continue
    assert joined(probs.tokens) == want.text
    assert probs.text_offset == sorted(probs.text_offset)
    assert probs.token_logprobs == pytest.approx(want.log_probs, abs=1e-4)
    if not number:
      assert probs.top_logprobs is None
      continue
    # Tokens of one name, such as those without a text, are one.
    tops = probs.top_logprobs
    assert all(map(dict.__contains__, tops, probs.tokens))
    best = [pairs[0][1] for pairs in want.top_log_probs]
    have = [max(top.values()) for top in tops]
    assert have == pytest.approx(best, abs=1e-4)


def test_tokens_that_rules_forbid_are_not_likely(client):
  """A number of JSON is finite: a client would get null."""
  asked = {'logprobs': 5, 'temperature': 0, 'guided_choice': LABELS}
  probs = create(client, TEXTS[0], **asked).choices[0].logprobs
  assert all(None not in top.values() for top in probs.top_logprobs)


def test_a_search_keeps_nobody_waiting(client, engine, scheduler, monkeypatch):
  """One that fails ends alone, and a long one only has its turns."""
  asked = {'n': 2, 'max_tokens': 9, 'use_beam_search': True}
  with nothing_compiles():
    want = texts_of(create(client, TEXTS[0], **asked))
  name, over = 'decode_in_pieces', threading.Event()
  real = engine.programs.decode_in_pieces

  def slow(*args):
    while not over.is_set():
      yield None
    yield from real(*args)

  def fail(*args):
    raise RuntimeError('no memory')

  monkeypatch.setattr(engine.programs, name, fail)
  with pytest.raises(openai.InternalServerError, match='kind'):
    create(client, TEXTS[0], **asked)
  monkeypatch.setattr(engine.programs, name, slow)
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    long = pool.submit(create, client, TEXTS[0], **asked)
    wait_until(lambda: scheduler.scheduler.num_running)
    assert create(client, TEXTS[1]).choices and not long.done()
    over.set()
    assert texts_of(long.result()) == want


def test_models_health_and_metrics(client, url):
  assert [one.id for one in client.models.list()] == [NAME]
  assert client.models.retrieve(NAME) == client.models.list().data[0]
  for other in ('gpt-5', f'{NAME}/b'):
    with pytest.raises(openai.NotFoundError) as caught:
      client.models.retrieve(other)
    assert caught.value.body['code'] == 'model_not_found'
    assert caught.value.body['param'] == 'model'
  page = httpx.get(f'{url}/')  # it may load nothing but itself
  assert page.headers['content-type'].startswith('text/html')
  assert "default-src 'none'" in page.headers['content-security-policy']
  assert not re.search(r'(src|href)="(?!data:)', page.text)
  health = httpx.get(f'{url}/health')
  assert health.status_code == 200
  is_well = dict.fromkeys(('live', 'ready', 'compiled'), True)
  assert health.json() == is_well | {'compiling': []}
  before = counters(url)
  with nothing_compiles():
    create(client, TEXTS[0], temperature=0)
    list(create(client, TEXTS[:2], stream=True, n=2, logprobs=0))
  after = counters(url)
  more = after - before
  assert more['specdec:compilations_total'] == 0
  assert more['specdec:requests_total{status="200"}'] == 3
  assert more['specdec:spec_decode_num_drafts_total'] > 0
  accepted = sum(more[name] for name in more if '_per_pos_total{' in name)
  assert accepted == more['specdec:spec_decode_num_accepted_tokens_total']
  assert after['specdec:num_requests_running'] == 0
  assert after['specdec:num_requests_waiting'] == 0
  # The dashboard asks for nothing that is not there.
  board = (ROOT / 'docs/grafana.json').read_text('utf-8')
  asked = set(re.findall(r'specdec:\w+', board))
  known = {name.partition('{')[0] for name in after}
  assert len(asked) > 10 and asked <= known
  assert more['specdec:inter_token_latency_seconds_count'] > 1


def counters(url):
  """Name of a metric -> its value, 0 if there is none."""
  text = httpx.get(f'{url}/metrics').text
  lines = (one for one in text.splitlines() if not one.startswith('#'))
  pairs = map(str.split, lines)
  return collections.Counter({name: float(value) for name, value in pairs})


def answered(url, status):
  """How many requests were answered by this status."""
  return counters(url)[f'specdec:requests_total{{status="{status}"}}']


BEAMS = {'use_beam_search': True, 'n': 2}
USAGE = {'include_usage': True}
LONG_REGEX = '(((a{1,99}){1,99}){1,99}){9}'
BAD = (  # each body begins with the field that is named
  *({'model': 'gpt-5'}, {'temprature': 0}, {'allowed_token_ids': []}),
  *({'logit_bias': {'5': 101}}, {'logit_bias': {'x': 1}}),
  *({'repetition_penalty': 0}, {'speculative': False}, {'n': 9}),
  *(formatted(type='grammar'), formatted(type='text', schema={})),
  formatted(type='json_object', json_schema={'schema': {}}),
  formatted(type='json_schema', json_schema={'schema': None}),
  *(formatted(type='json_schema', json_schema='schema'), formatted(schema={})),
  formatted(type='json_object', schema={'$ref': '#'}),
  *(
    {'structured_outputs': form}
    for form in (
      *({'json_object': 'x'}, {'choice': []}, {'grammar': 'a'}),
      *({'regex': LONG_REGEX}, {'choice': ['a'], 'regex': 'a'}),
    )
  ),
  {'structured_outputs': {'regex': 'a'}, 'guided_regex': 'a'},
  *({'guided_regex': '(?=a)'}, {'guided_json': {'type': 'nothing'}}),
  {'guided_choice': ['a'], 'bad_words': ['a']},
  {'ignore_eos': True, 'guided_regex': 'a'},
  {'use_beam_search': True, 'n': 3},
  *({'temperature': 1, **BEAMS}, {'stream': True, **BEAMS}),
  *({'prompt': 'Q' * 99}, {'prompt': ['a'] * 3, 'n': 3}, {'prompt': []}),
  *({'prompt': [3, 999]}, {'best_of': 3}, {'echo': True}, {'max_tokens': 25}),
  *({'min_tokens': 17}, {'temperature': -1}, {'top_p': 0}, {'top_k': 1.5}),
  *({'stop': ['']}, {'logprobs': 21}, {'seed': 'x'}, {'return_rounds': True}),
  {'stream_options': USAGE},
  {'stream_options': {'obfuscate': True}, 'stream': True},
)


@pytest.mark.parametrize('body', BAD)
def test_bad_input(client, body):
  """The error names the field, also in its message, and shows what came."""
  param, *_ = body
  asked = {'prompt': TEXTS[0], 'model': NAME} | body
  with pytest.raises(openai.APIStatusError) as caught:
    client.post('/completions', body=asked, cast_to=object)
  error = caught.value
  assert error.status_code == (404 if param == 'model' else 400)
  assert error.body['type'] == 'invalid_request_error'
  assert error.body['param'] == param
  assert param in error.body['message'] or param == 'prompt'


def test_neutral_values_pass(client):
  asked = {'prompt': TEXTS[0], 'seed': 3, 'max_tokens': 2}
  plain, neutral, null = (
    client.post('/completions', body=body, cast_to=object)
    for body in (asked, asked | clients.NEUTRAL, clients.NULL | asked)
  )
  assert neutral['choices'] == null['choices'] == plain['choices']
  default = create(client, TEXTS[1], ignore_eos=True)
  assert default.usage.completion_tokens == 16
  empty = create(client, '')
  assert empty.choices[0].text == '' and empty.usage.completion_tokens == 0
  assert empty.choices[0].finish_reason == 'stop'


def test_a_prompt_is_split(client, engine):
  pytest.importorskip('sentencex', reason='needs the extra [split]')
  prompts = ['a b! A c.\n\n d e.', '', 'a b.']
  options = {'split': 'sentences', 'temperature': 1.1, 'seed': 7}
  options['split_prefix'] = 'd '
  want = engine.generate(prompts, num_samples=2, **options)
  have = create(client, prompts, n=2, **options)
  assert texts_of(have) == [one.text for one in want]
  assert [x.sentences for x in have.choices] == [3, 3, 0, 0, 1, 1]
  best = engine.generate(prompts[:1], split='sentences', num_beams=2, n=2)
  search = {'use_beam_search': True, 'n': 2, 'temperature': 0}
  have = create(client, prompts[0], split='sentences', **search)
  assert texts_of(have) == [one.text for one in best[::-1]]
  for param, more in {
    'prompt': {'prompt': 'the cat! ' * 9},  # more sentences than may wait
    'stream': {'stream': True},
    'logprobs': {'logprobs': 1},
    'split': {'split': 'words'},
    'split_lang': {'split': None, 'split_lang': 'de'},
  }.items():
    with pytest.raises(openai.BadRequestError) as caught:
      create(client, **{'prompt': 'a.', 'split': 'sentences'} | more)
    assert caught.value.body['param'] == param


def test_a_text_is_tokenised_once(client, engine, monkeypatch):
  """However many outputs are made of it, and if these are scored."""
  kind, texts = type(engine.tokenizer), []
  real = kind.encode
  monkeypatch.setattr(
    kind, 'encode', lambda self, text: texts.append(text) or real(self, text)
  )
  create(client, TEXTS[:2], n=4, max_tokens=2, logprobs=2)
  assert [text for text in texts if text in TEXTS] == TEXTS[:2]
  if importlib.util.find_spec('sentencex'):
    texts.clear()
    split = {'split': 'sentences', 'max_tokens': 2}
    create(client, 'a b! A c.', **split)
    of_one = texts[:]
    texts.clear()
    create(client, 'a b! A c.', n=4, **split)
    assert texts == of_one


def test_what_is_no_request(client, url):
  messages = [{'role': 'user', 'content': 'Hello'}]
  with pytest.raises(openai.BadRequestError, match='no chat template'):
    client.chat.completions.create(model=NAME, messages=messages)
  nothing = httpx.get(f'{url}/nothing')
  assert nothing.status_code == 404 and nothing.json()['error']['message']
  wrong = httpx.get(f'{url}{PATH}')
  assert wrong.status_code == 405 and 'GET' in wrong.text


def test_deadlines(client, scheduler, held, monkeypatch):
  short = dataclasses.replace(LIMITS, max_seconds=0.05)
  monkeypatch.setattr(scheduler, 'settings', short)
  with pytest.raises(openai.InternalServerError, match='time of the') as caught:
    create(client, TEXTS[0])
  assert caught.value.status_code == 504
  with pytest.raises(openai.APIError, match='time of the'):
    list(create(client, TEXTS[0], stream=True))


def test_keys_and_request_ids(scheduler, server, tmp_path, monkeypatch):
  file = tmp_path / 'keys'
  file.write_text('one\n\ntwo\n')
  assert api_keys(str(file)) == ['one', 'two']
  monkeypatch.setenv('SPECDEC_API_KEYS', 'three, four,')
  assert api_keys(None) == ['three', 'four']
  monkeypatch.setenv('SPECDEC_API_KEYS', ' , ')
  file.write_text('\n')
  for path in (None, str(file), str(tmp_path / 'none')):
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


# What browsers send to other sites without asking these first, whatever a page
# of theirs does: these methods with these types of bodies. A blob of
# `sendBeacon` has its own type, or one of these. By OPTIONS they ask before
# they send JSON.
SIMPLE = [
  (method, kind)
  for method in ('GET', 'HEAD', 'POST', 'OPTIONS')
  for kind in (
    *(None, '', 'text/plain', 'text/plain;charset=UTF-8', 'TEXT/PLAIN'),
    *('application/x-www-form-urlencoded', 'multipart/form-data; boundary=x'),
    *('text/plain; a=application/json', 'application/jsonp'),
    ',application/json',
  )
]
ACTING = (PATH, '/v1/chat/completions', '/v1/classify')
HEARD = json.dumps({'prompt': TEXTS[0], 'input': 'a', 'labels': ['a', 'b']})


@pytest.mark.parametrize(('method', 'kind'), SIMPLE)
def test_simple_requests_do_nothing(scheduler, url, monkeypatch, method, kind):
  monkeypatch.setattr(scheduler, 'take', lambda rows: pytest.fail('taken'))
  monkeypatch.setattr(scheduler.engine, 'classify', scheduler.take)
  headers = {} if kind is None else {'content-type': kind}
  if method == 'OPTIONS':
    headers |= {'access-control-request-method': 'POST'}
    headers |= {'access-control-request-headers': 'content-type'}
    headers['origin'] = 'http://evil.example'
  body = HEARD
  if kind == 'multipart/form-data; boundary=x':
    body = f'--x\r\ncontent-disposition: form-data\r\n\r\n{HEARD}\r\n--x--'
  for path in ACTING:
    sent = {'content': body.encode(), 'headers': headers}
    answer = httpx.request(method, f'{url}{path}', **sent)
    known = {415, 400} if 'chat' in path else {415}  # it has no template
    assert answer.status_code in (known if method == 'POST' else {405})
    assert not any('access-control' in name for name in answer.headers)


PROXY = {'sec-fetch-site': 'same-origin', 'origin': 'https://a.proxy'}
OURS = (  # curl, OpenAI's client, the server's page
  *({}, {'sec-fetch-site': 'none'}, {'origin': 'http://localhost'}, PROXY),
  *({'origin': 'http://LOCALHOST'}, {'sec-fetch-site': 'same-origin'}),
  {'content-type': 'Application/JSON ; charset=utf-8'},
)
ORIGINS = 'localhost:3', 'localhost.evil.example'
THEIRS = (
  *({'origin': f'http://{x}'} for x in ORIGINS),
  *({'origin': x} for x in ('null', '', 'file://')),
  {'sec-fetch-site': 'cross-site'},
  {'sec-fetch-site': 'same-site', 'origin': 'http://localhost:3'},
  {'sec-fetch-site': 'cross-site', 'origin': 'http://localhost'},
)


@pytest.mark.parametrize('headers', OURS + THEIRS)
def test_pages_of_other_sites_do_nothing(scheduler, server, headers):
  with asking(scheduler) as ask:
    body = {'prompt': TEXTS[0], 'max_tokens': 2}
    answer = ask(PATH, body, headers)
    assert answer.status_code == (200 if headers in OURS else 403)
    assert ask('/health', None, headers).status_code == 200


# -> whether a server is called so: alone, for all, for all by name
HERE = '', 'localhost:80', 'LOCALHOST', '127.0.0.1:8000', '[::1]:8000'
ELSEWHERE = (
  *('evil.example', 'localhost.evil.example', '127.0.0.1.evil.example:8000'),
  *('evil.example:127.0.0.1', 'chat.example.evil.example', '['),
)
HOSTS = {
  **dict.fromkeys((*HERE, '192.168.0.9:8000'), (True, True, True)),
  **dict.fromkeys(('chat.example:443', 'Chat.Example'), (False, True, True)),
  **dict.fromkeys(ELSEWHERE, (False, True, False)),
}


def test_names_that_lead_here_are_not_enough(scheduler, monkeypatch):
  for host, expected in HOSTS.items():
    for here in ('127.0.0.1', 'localhost', '::1', '127.0.0.2'):
      assert ServeSettings(host=here).answers_to(host) == expected[0], host
    for_all = {'host': '0.0.0.0'}
    assert ServeSettings(**for_all).answers_to(host) == expected[1]
    named = ServeSettings(**for_all, allowed_hosts=('chat.Example:80',))
    assert named.answers_to(host) == expected[2]
  with asking(scheduler) as ask:
    for path in ('/', '/metrics', '/v1/models', '/health', PATH):
      body = {'prompt': 'a'} if path == PATH else None
      answer = ask(path, body, {'host': 'evil.example'})
      assert answer.status_code == 403 and 'allowed-hosts' in answer.text


def refuses(port):
  """Whether nothing listens there any more."""
  with socket.socket() as one:
    return one.connect_ex(('127.0.0.1', port)) != 0


@contextlib.contextmanager
def stopping(engine, drain_seconds):
  """A server of one row that a test stops, its address and its scheduler."""
  limits = {'rows': 1, 'beams': (), 'drain_seconds': drain_seconds}
  scheduler = Worker(engine, dataclasses.replace(LIMITS, **limits))
  with serving(Server(scheduler, NAME)) as made:
    yield made, f'http://127.0.0.1:{made.port}', scheduler


def test_a_stop_finishes_what_was_taken(engine, monkeypatch):
  body = {'prompt': TEXTS[0], 'n': 3, 'max_tokens': 24}
  # Programs that are kept compile at once: it is to be seen before.
  may_compile, compile_all = threading.Event(), Worker._compile
  monkeypatch.setattr(
    Worker, '_compile', lambda made: may_compile.wait(60) and compile_all(made)
  )
  with (
    stopping(engine, drain_seconds=60.0) as (made, address, scheduler),
    concurrent.futures.ThreadPoolExecutor(2) as pool,
  ):
    early = httpx.post(f'{address}{PATH}', json={'prompt': 'a'})
    assert early.status_code == 503 and 'not ready' in early.text
    ready = httpx.get(f'{address}/health/ready')
    assert ready.status_code == 503 and ready.json()['live']
    may_compile.set()
    wait_until(lambda: scheduler.takes_rows)
    post = functools.partial(httpx.post, f'{address}{PATH}', timeout=300)
    bodies = body, body | {'stream': True}
    asked = [pool.submit(post, json=body) for body in bodies]
    wait_until(lambda: scheduler.num_rows == 6 or all(x.done() for x in asked))
    made.should_exit = True
    whole, streamed = (one.result() for one in asked)
    # uvicorn sees the stop at its next look, a tenth of a second later at most.
    wait_until(lambda: refuses(made.port))
  for answer in (whole, streamed):
    assert answer.status_code == 200 and 'error' not in answer.text
  assert streamed.text.endswith('data: [DONE]\n\n')


def test_a_stop_ends_what_takes_too_long(engine, monkeypatch):
  with stopping(engine, drain_seconds=0.2) as (made, address, scheduler):
    wait_until(lambda: scheduler.takes_rows)
    wait = functools.partial(time.sleep, 0.001)
    monkeypatch.setattr(scheduler.ordinary, '_fill', wait)
    body = {'prompt': TEXTS[0], 'stream': True}
    url = f'{address}{PATH}'
    with httpx.stream('POST', url, json=body, timeout=300) as answer:
      made.should_exit = True
      text = answer.read().decode()
  assert 'is stopping' in text and text.endswith('data: [DONE]\n\n')


# What clients do to a server.


@contextlib.contextmanager
def others(address, want):
  """Inside, another asks for texts; what it hears must be right.

  Args:
    address: of the server.
    want: text -> its output.
  """
  over, asked = threading.Event(), []

  def bodies():
    for text in itertools.cycle(want):
      asked.append(text)
      yield load.body(text)
      if over.wait(0.01):
        return

  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    running = pool.submit(load.closed, address, bodies(), 1)
    try:
      yield
    finally:
      over.set()
    replies, _ = running.result()
  check(asked, replies, want)
  assert not all(map(is_busy, replies))


def check(texts, replies, want):
  """Each answer is right, unless the queue was full."""
  for text, reply in zip(texts, replies, strict=True):
    assert is_busy(reply) or reply.error is None, reply.error
    assert is_busy(reply) or reply.text == want[text]


def is_busy(reply):
  return reply.error is not None and reply.error.startswith('429')


# Clients that leave.


def test_clients_that_leave(url, scheduler, want):
  def leave(text):
    """Leaves in the middle of a stream."""
    body = load.body(text, True, max_tokens=24)
    body |= {'temperature': 1.0, 'ignore_eos': True}
    with httpx.stream('POST', f'{url}{PATH}', json=body) as answer:
      if answer.status_code == 200:  # else the queue was full
        next(answer.iter_raw())

  before = answered(url, 499), answered(url, 500)
  with others(url, want), concurrent.futures.ThreadPoolExecutor(4) as pool:
    list(pool.map(leave, itertools.islice(itertools.cycle(TEXTS), 30)))
  wait_until(lambda: not scheduler.num_rows)
  assert not scheduler._taken
  after = answered(url, 499), answered(url, 500)
  # Some had the whole answer on its way before they left.
  assert after[0] - before[0] > 10 and after[1] == before[1]
  with connected(url, UNFINISHED):
    pass
  wait_until(lambda: answered(url, 499) > after[0])


JSON = {'content-type': 'application/json'}
FIELDS = 'Host: localhost\r\nContent-Type: application/json\r\n'
BEGIN = f'POST {PATH} HTTP/1.1\r\n{FIELDS}'.encode()
UNFINISHED = BEGIN + b'Content-Length: 99\r\n\r\n{"prompt": '


# Bodies that are wrong.

ODD = (None, True, -1, 10**30, float('nan'), '\ud800', [[1], 'a'], {'a': [1]})
BROKEN = (
  *(b'', b'{"prompt": "a', b'\xff{}', b'null', b'[1e9]', b'{"prompt": [[]]}'),
  b'{"prompt": ' + b'[' * 200_000 + b']' * 200_000 + b'}',
)


def test_malformed_bodies(url, scheduler, want):
  """Some of them are of 10 MB, and two clients are slow."""
  large = b'{"prompt": "' + b'x' * (10 << 20) + b'"}'
  names = [name for name, *_ in BAD if name != 'repetition_penalty']  # compiles
  bodies = [{'prompt': TEXTS[0], x: value} for x in names for value in ODD]
  odd = [json.dumps(body).encode() for body in bodies]
  with (
    others(url, want),
    nothing_compiles(),
    connected(url, UNFINISHED, count=2) as slow,
    httpx.Client(timeout=300) as http,
  ):
    for _ in range(2):
      # It may be refused before all of it is sent.
      with contextlib.suppress(httpx.WriteError, httpx.ReadError):
        answer = http.post(f'{url}{PATH}', content=large, headers=JSON)
        assert answer.status_code == 413
    for data in (*BROKEN, *odd):
      answer = http.post(f'{url}{PATH}', content=data, headers=JSON)
      # Some say nothing wrong after all; the queue may be full of others.
      known = (400,) if data in BROKEN else (200, 400, 404, 429)
      assert answer.status_code in known, (data[:300], answer.text)
      assert answer.status_code == 200 or answer.json()['error']['message']
    for one in slow:
      assert one.recv(1 << 16).startswith(b'HTTP/1.1 408')
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


def test_a_header_is_bounded(url, want):
  """One field or many, at once or in parts; behind a body too."""
  begin = b'GET /health HTTP/1.1\r\nHost: localhost\r\n'
  chunked = b'POST /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n'
  fields = b'a: b\r\n' * 7000
  with others(url, want):
    for data in (begin + b'A: ', begin + fields + b'\r\n', chunked + b'A: '):
      with connected(url, data) as (one,):
        with contextlib.suppress(ConnectionError):
          for _ in range(0 if data.endswith(b'\n') else 2000):
            one.sendall(b'x' * (1 << 16))
        code = everything(one)[9:12]  # the reset may come before the answer
        assert code in (b'', b'405' if data.startswith(b'POST') else b'431')
  with connected(url, begin + b'A: ' + b'x' * 20_000 + b'\r\n\r\n') as (one,):
    assert one.recv(1 << 16).startswith(b'HTTP/1.1 200')


def limit(monkeypatch, **limits):
  """New connections have these limits."""
  made = Connection.__init__

  def limited(self, settings, *args, **options):
    made(self, dataclasses.replace(settings, **limits), *args, **options)

  monkeypatch.setattr(Connection, '__init__', limited)


def test_connections_that_do_nothing(url, want, monkeypatch):
  """However many there are, others are answered meanwhile."""
  limit(monkeypatch, max_connections=100)
  kinds = (b'', BEGIN, UNFINISHED)
  with contextlib.ExitStack() as stack:
    made = [stack.enter_context(connected(url, data))[0] for data in 50 * kinds]
    (text, *_) = want
    answer = httpx.post(f'{url}{PATH}', json=load.body(text))
    assert answer.json()['choices'][0]['text'] == want[text]
    for one, data in zip(made[-3:], kinds, strict=True):
      one.settimeout(10)
      answer = everything(one)
      assert answer.startswith(b'HTTP/1.1 408') if data else not answer
      assert not data or b'connection: close' in answer


def test_a_client_that_does_not_read(url, want, monkeypatch):
  """It is closed, and costs no more than its buffers."""
  limit(monkeypatch, idle_seconds=2.0)
  page = b'GET / HTTP/1.1\r\nHost: localhost\r\n\r\n'
  with connected(url) as (one,):
    with others(url, want), contextlib.suppress(ConnectionError):
      begin = time.monotonic()
      while time.monotonic() < begin + 20:
        one.sendall(page * 2)
        time.sleep(0.01)
      pytest.fail('it was not closed')
    assert time.monotonic() > begin + 2


@pytest.mark.parametrize('version', ['1.1', '1.0'])
def test_a_client_that_ended_its_half(url, want, version):
  """It gets its answer; HTTP/1.0, as of some proxies, gets no chunks."""
  (text, *_) = want
  for stream in (False, True):
    head = f'POST {PATH} HTTP/{version}\r\n{FIELDS}Content-Length: '
    data = json.dumps(load.body(text, stream))
    asked = f'{head}{len(data)}\r\n\r\n{data}'
    with connected(url, asked.encode()) as (one,):
      one.shutdown(socket.SHUT_WR)
      head, _, body = everything(one).partition(b'\r\n\r\n')
    assert b'200 OK' in head and (b'text/event-stream' in head) == stream
    chunked = stream and version == '1.1'
    assert (b'chunked' in head) == chunked
    end = b'[DONE]\n\n' + b'\r\n0\r\n\r\n' * chunked
    assert body.endswith(end if stream else b'}')


# More than it can do.


def test_overload(url, scheduler, want, held):
  """Of five times what may wait, a fifth is taken, and then answered."""
  most = scheduler.settings.max_waiting
  texts = [*itertools.islice(itertools.cycle(want), 5 * most)]
  bodies, refused = [*map(load.body, texts)], 5 * most - most
  before = answered(url, 429)
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    running = pool.submit(load.arriving, url, bodies, 1000.0)
    wait_until(lambda: answered(url, 429) == before + refused)
    assert scheduler.scheduler.num_waiting == most
    answer = httpx.post(f'{url}{PATH}', json=load.body(texts[0]))
    assert answer.status_code == 429
    assert int(answer.headers['retry-after']) >= 1
    with others(url, want):
      held()
      replies, _ = running.result()
  assert sum(map(is_busy, replies)) == refused
  check(texts, replies, want)
  wait_until(lambda: not scheduler.num_rows)


# The shipped pair, as users serve it.


def test_a_request_that_is_over_is_freed_at_once(url, scheduler):
  """Python need not look for cycles, which it may do thousands later."""
  bodies = [load.body(TEXTS[i % 3], i % 2 > 0) for i in range(60)]
  gc.collect()
  gc.disable()
  try:
    replies, _ = load.closed(url, bodies, 8)
    wait_until(lambda: not scheduler.num_rows)
    # Objects; a request in a cycle has 40 others.
    assert gc.collect() < 10 * len(bodies)
  finally:
    gc.enable()
  assert not any(reply.error for reply in replies)


@pytest.mark.slow
def test_ten_thousand_requests(monkeypatch):
  """All are answered, and as when they came alone; memory does not grow.

  A server that keeps 4 kB of objects of each of them would be found: it is,
  when clients make this one keep as much.
  """
  # Else glibc, with time, keeps the caches of rows in the heap, whose size then
  # goes up and down by 30 to 70 MB with where they happen to be in it.
  monkeypatch.setenv('MALLOC_MMAP_THRESHOLD_', f'{1 << 17}')
  lines = (ROOT / 'demo/input.txt').read_text('utf-8').splitlines()
  texts = [line for line in lines if line.strip()]
  flags = '--port', '0', '--rows', '16', '--body-seconds', '600'
  with Served(*flags) as served, contextlib.ExitStack() as stack:
    served.until(lambda: served.said('compiled'))
    replies, _ = load.closed(served.url, [*map(load.body, texts)], 1)
    outputs = {t: one.text for t, one in zip(texts, replies, strict=True)}
    pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1))

    def memory(count):
      """The most resident bytes while this many requests are answered.

      At any one moment there may be 60 MB less, of caches that were freed with
      the last rows and that the system has back, or has not.
      """
      some = [texts[i % len(texts)] for i in range(count)]
      bodies = [load.body(t, i % 2 > 0) for i, t in enumerate(some)]
      running, found = pool.submit(load.closed, served.url, bodies, 64), []
      while not running.done():
        found.append(counters(served.url)['process_resident_memory_bytes'])
        time.sleep(0.5)
      replies, _ = running.result()
      assert not any(map(is_busy, replies))
      check(some, replies, outputs)
      return max(found)

    first = max(memory(1000), memory(1000))
    memory(9000)
    last = memory(1000)
    print(f'{first:.5g}, then {last:.5g}')
    assert last <= 1.02 * first, (first, last)
    names = 'num_requests_running', 'num_requests_waiting', 'compilations_total'
    found = counters(served.url)
    assert not any(found[f'specdec:{name}'] for name in names)
    head = BEGIN + 4000 * b'ab:cd\r\n'  # 160 bytes each, as two in a tuple
    with connected(served.url, head + b'Content-Length: 1\r\n\r\n', 64):
      more = memory(500)
      print(f'{more:.5g}')
      assert more > 1.02 * first, (first, last, more)
    assert served.end() == 0
