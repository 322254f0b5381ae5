"""Clients of a server: what they send, when, and what each saw of its answer.

`closed` is a number of clients that wait for their answers; `arriving` is
clients that come at random times, whatever became of those before them. What
is measured is what vLLM's, AIPerf's and guidellm's tools measure: the time to
the first token, between tokens, and to the end.

These tools do not fit here: `vllm bench serve` comes with all of vLLM, AIPerf
and guidellm with torch or some forty packages, and processes of their own that
take the server's cores; locust's clients do not come at random times, and it
does not look into streams. aiohttp, with which vLLM's is written, needs a tenth
of the time that httpx needs for a request.
"""

import asyncio
import dataclasses
import functools
import json
import time
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.checks.packages import package

_PATH = '/v1/completions'
_DATA = b'data: {'


@dataclasses.dataclass(frozen=True)
class Reply:
  """What a client saw of one request.

  Attributes:
    seconds: from when it was to be sent to the end of its answer.
    text: of the output.
    num_tokens: of the output.
    first: seconds until the first piece of a stream; None if it was none.
    error: what went wrong; None if nothing did.
  """

  seconds: float
  text: str = ''
  num_tokens: int = 0
  first: float | None = None
  error: str | None = None

  @property
  def between(self) -> float | None:
    """Mean seconds between tokens, after the first one: vLLM's TPOT."""
    if self.first is None or self.num_tokens < 2:
      return None
    return (self.seconds - self.first) / (self.num_tokens - 1)


@dataclasses.dataclass(frozen=True)
class Run:
  """What all clients of a run saw.

  Attributes:
    replies: in the order of the requests.
    seconds: from the first request to the last answer.
    cpu_seconds: that this process computed.
  """

  replies: Sequence[Reply]
  seconds: float
  cpu_seconds: float

  @property
  def errors(self) -> list[str]:
    """What went wrong."""
    return [one.error for one in self.replies if one.error is not None]

  @property
  def num_tokens(self) -> int:
    """Of all outputs."""
    return sum(one.num_tokens for one in self.replies)


def body(text: Any, stream: bool = False, **options: Any) -> dict[str, Any]:
  """A greedy request, which a stream ends with the number of its tokens."""
  usage = {'stream_options': {'include_usage': True}} if stream else {}
  asked = {'prompt': text, 'temperature': 0, 'stream': stream}
  return asked | usage | options


def session() -> Any:
  """A session of aiohttp with any number of connections.

  Raises:
    ValueError: aiohttp is not installed.
  """
  aiohttp = _aiohttp()
  return aiohttp.ClientSession(
    connector=aiohttp.TCPConnector(limit=0),
    timeout=aiohttp.ClientTimeout(total=600),
    read_bufsize=1 << 20,
  )


async def ask(
  client: Any, url: str, asked: Mapping[str, Any], begin: float | None = None
) -> Reply:
  """Sends one request, and reads its answer.

  Args:
    client: from `session`.
    url: of the server.
    asked: the request, see `body`.
    begin: `time.perf_counter()` at which it was to be sent; None is now.
  """
  aiohttp = _aiohttp()
  begin = time.perf_counter() if begin is None else begin
  first, text = None, ''
  usage: dict[str, int] = {}

  def wrong(what: str) -> Reply:
    return Reply(time.perf_counter() - begin, text, 0, first, what[:200])

  try:
    async with client.post(url + _PATH, json=asked) as answer:
      if answer.status != 200:
        return wrong(f'{answer.status}: {await answer.text()}')
      if asked.get('stream'):
        async for line in answer.content:
          if not line.startswith(_DATA):
            continue
          first = first or time.perf_counter() - begin
          piece = json.loads(line[len(_DATA) - 1 :])
          if 'error' in piece:
            return wrong(str(piece['error']))
          text += ''.join(one['text'] for one in piece['choices'])
          usage = piece.get('usage') or usage
      else:
        whole = await answer.json()
        text, usage = whole['choices'][0]['text'], whole['usage']
  except (OSError, ValueError, aiohttp.ClientError) as error:
    return wrong(repr(error))
  if not usage:
    return wrong('the stream broke off')
  seconds = time.perf_counter() - begin
  return Reply(seconds, text, usage['completion_tokens'], first)


def closed(
  url: str, requests: Sequence[Mapping[str, Any]], clients: int
) -> Run:
  """Sends requests by clients that each wait for their answer."""

  async def send() -> list[Reply]:
    async with session() as client:
      return await _in_turn(
        functools.partial(ask, client, url), requests, clients
      )

  return _run(send)


def arriving(
  url: str, requests: Sequence[Mapping[str, Any]], rate: float, seed: int
) -> Run:
  """Sends requests at the times of a Poisson process.

  Args:
    url: of the server.
    requests: one after the other.
    rate: requests a second, in the mean.
    seed: of the times.
  """
  gaps = np.random.default_rng(seed).exponential(1 / rate, len(requests))

  async def send() -> list[Reply]:
    async with session() as client:
      begin = time.perf_counter()

      async def one(at: float, asked: Mapping[str, Any]) -> Reply:
        await asyncio.sleep(begin + at - time.perf_counter())
        return await ask(client, url, asked, begin + at)

      due = zip(np.cumsum(gaps).tolist(), requests, strict=True)
      return await asyncio.gather(*(one(*each) for each in due))

  return _run(send)


def by_openai(
  url: str, requests: Sequence[Mapping[str, Any]], clients: int
) -> Run:
  """`closed`, with the package `openai` as the clients.

  Raises:
    ValueError: it is not installed.
  """
  openai = package('A client of OpenAI', 'openai', 'load')

  async def send() -> list[Reply]:
    async with openai.AsyncOpenAI(
      base_url=f'{url}/v1', api_key='none', max_retries=0, timeout=600
    ) as client:

      async def one(asked: Mapping[str, Any]) -> Reply:
        begin = time.perf_counter()
        try:
          found = await client.completions.create(**asked)
        except openai.OpenAIError as error:
          return Reply(time.perf_counter() - begin, error=repr(error)[:200])
        seconds, usage = time.perf_counter() - begin, found.usage
        return Reply(seconds, found.choices[0].text, usage.completion_tokens)

      name = (await client.models.list()).data[0].id
      named = [{'model': name, **asked} for asked in requests]
      return await _in_turn(one, named, clients)

  return _run(send)


def counters(url: str) -> dict[str, float]:
  """What /metrics of a server says: name of each sample without labels."""
  parser = package('Metrics', 'prometheus_client.parser', 'serve')
  with urllib.request.urlopen(f'{url}/metrics') as answer:
    text = answer.read().decode()
  return {
    sample.name: sample.value
    for family in parser.text_string_to_metric_families(text)
    for sample in family.samples
    if not sample.labels
  }


async def _in_turn(
  send: Callable[[Mapping[str, Any]], Awaitable[Reply]],
  requests: Sequence[Mapping[str, Any]],
  clients: int,
) -> list[Reply]:
  """Sends requests, `clients` of which are under way at a time."""
  left = enumerate(requests)
  found: dict[int, Reply] = {}

  async def one() -> None:
    for index, asked in left:
      found[index] = await send(asked)

  await asyncio.gather(*(one() for _ in range(clients)))
  return [found[index] for index in sorted(found)]


def _aiohttp() -> Any:
  return package('A load on a server', 'aiohttp', 'load')


def _run(send: Callable[[], Any]) -> Run:
  begin, before = time.perf_counter(), time.process_time()
  replies = asyncio.run(send())
  seconds = time.perf_counter() - begin
  return Run(replies, seconds, time.process_time() - before)
