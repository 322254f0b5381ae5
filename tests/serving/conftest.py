"""What the suites of the server share: an engine, and a server of it."""

import functools
import time

import pytest

import toy_models
from specdec_jax.serving.worker import Worker
from toy_workers import TEXTS, wait_until

# The suites of the server share it: what one has compiled is there for all.
_engine = functools.cache(toy_models.chain_engine)


@pytest.fixture(scope='module')
def engine(tokenizer):
  return _engine(tokenizer, max_input_len=32, max_decode_len=24)


@pytest.fixture(scope='module')
def scheduler(engine):
  import clients  # which needs more packages

  return Worker(engine, clients.LIMITS)


@pytest.fixture(scope='module')
def server(scheduler):
  import clients
  from specdec_jax.serving.server import Server

  with clients.serving(Server(scheduler, clients.NAME)) as made:
    wait_until(lambda: scheduler.is_compiled)
    yield made


@pytest.fixture(scope='module')
def url(server):
  return f'http://127.0.0.1:{server.port}'


@pytest.fixture(scope='module')
def client(url):
  import openai

  with openai.OpenAI(
    base_url=f'{url}/v1', api_key='none', max_retries=0, timeout=300
  ) as made:
    yield made


@pytest.fixture
def held(scheduler, monkeypatch):
  """No row gets a slot until this is called."""
  monkeypatch.setattr(scheduler.ordinary, '_fill', lambda: time.sleep(0.001))
  yield monkeypatch.undo
  monkeypatch.undo()
  wait_until(lambda: not scheduler.num_rows)


@pytest.fixture(scope='module')
def mixed(engine):
  """A text of which some proposals are accepted, and some are not."""
  found = [
    one.stats.num_tested > one.stats.num_accepted > 0
    for one in engine.generate(TEXTS, max_length=20)
  ]
  return TEXTS[found.index(True)]


@pytest.fixture(scope='module')
def want(engine):
  """Text -> what the engine says."""
  found = engine.generate(TEXTS, max_length=16)
  return {t: one.text for t, one in zip(TEXTS, found, strict=True)}
