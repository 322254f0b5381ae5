"""Servers in this process, and what their clients ask."""

import asyncio
import concurrent.futures
import contextlib
import json

import pytest

from specdec_jax.serving import ServeSettings, protocol
from toy_workers import POOLS, started

_WHY = 'needs the extra [serve], aiohttp, httpx and the package openai'
httpx = pytest.importorskip('httpx', reason=_WHY)
for needed in 'openai aiohttp uvicorn starlette prometheus_client'.split():
  pytest.importorskip(needed, reason=_WHY)
from specdec_jax.serving.app import Application  # noqa: E402

NAME = 'toy'
PATH = '/v1/completions'
LIMITS = ServeSettings(
  **POOLS | {'port': 0, 'beams': (2,), 'max_waiting': 8, 'max_outputs': 8},
  **{'header_seconds': 2.0, 'body_seconds': 2.0, 'max_seconds': 600.0},
)


@contextlib.contextmanager
def serving(made):
  """Runs a server in a thread, until the end of the block."""
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    running = pool.submit(asyncio.run, made.serve())
    try:
      yield made
    finally:
      made.should_exit = True
      running.result()


def create(client, prompt, stream=False, **options):
  """A completion; the options go into the body as they are."""
  return client.completions.create(
    model=NAME, prompt=prompt, stream=stream, extra_body=options
  )


def texts_of(answer):
  return [choice.text for choice in answer.choices]


# What clients send that asks for nothing: OpenAI's fields and vLLM's.
NEUTRAL = {name: values[-1] for name, values in protocol._NEUTRAL.items()}
NEUTRAL |= {
  'best_of': 1,
  'bad_words': [],
  'logit_bias': {},
  'repetition_penalty': 1.0,
  'max_tokens': 2.0,
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


@contextlib.contextmanager
def asking(scheduler, keys=()):
  """Gives `ask(path, body, headers)` of an application without a server."""
  application = Application(scheduler, NAME, keys)

  async def answer(path, body=None, headers=None):
    transport = httpx.ASGITransport(application)
    address = {'transport': transport, 'base_url': 'http://localhost'}
    async with httpx.AsyncClient(**address) as http:
      method = 'GET' if body is None else 'POST'
      return await http.request(method, path, json=body, headers=headers)

  yield lambda *asked: asyncio.run(answer(*asked))
  application.metrics.close()


@contextlib.contextmanager
def asking_of(engine):
  """`asking` of a scheduler of its own, of which a part is compiled."""
  with (
    started(engine, whole=False, rows=1) as scheduler,
    asking(scheduler) as ask,
  ):
    yield ask


def events_of(text):
  return [
    json.loads(line.removeprefix('data: '))
    for line in text.splitlines()
    if line.startswith('data: {')
  ]
