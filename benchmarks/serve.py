"""Measures a server that runs: clients that wait, and clients that arrive.

  specdec serve &
  python benchmarks/serve.py http://127.0.0.1:8000 demo/input.txt --output FILE

The first rows are of 1, 16 and 64 clients that each wait for their answer. The
last row is of clients that come at random times (a Poisson process), at
`--rate` requests a second. FILE is a record that `scripts/update_readme.py`
shows. Needs the package aiohttp.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import pathlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aiohttp
import numpy as np

PATH = '/v1/completions'
DATA = b'data: {'


@dataclasses.dataclass(frozen=True)
class Reply:
  """What a client saw of one request.

  Attributes:
    seconds: from when it was to be sent to the end of its answer.
    text: the output.
    num_tokens: tokens of the output.
    first: seconds until the first piece of a stream; None without a stream.
    error: what went wrong; None if nothing did.
  """

  seconds: float
  text: str = ''
  num_tokens: int = 0
  first: float | None = None
  error: str | None = None


def body(text: Any, stream: bool = False, **options: Any) -> dict[str, Any]:
  """A greedy request; its stream ends with the number of tokens."""
  usage = {'stream_options': {'include_usage': True}} if stream else {}
  base = {'prompt': text, 'temperature': 0, 'stream': stream}
  return base | usage | options


async def ask(
  client: Any, url: str, request: Mapping[str, Any], begin: float
) -> Reply:
  """Sends a request, which was to be sent at `begin`, and reads its answer."""
  first, text, usage = None, '', dict[str, int]()

  def failed(reason: str) -> Reply:
    return Reply(time.perf_counter() - begin, text, 0, first, reason[:200])

  try:
    async with client.post(url + PATH, json=request) as answer:
      if answer.status != 200:
        return failed(f'{answer.status}: {await answer.text()}')
      if not request.get('stream'):
        whole = await answer.json()
        text, usage = whole['choices'][0]['text'], whole['usage']
      async for line in answer.content:
        if not line.startswith(DATA):
          continue
        first = first or time.perf_counter() - begin
        piece = json.loads(line[len(DATA) - 1 :])
        if 'error' in piece:
          return failed(str(piece['error']))
        text += ''.join(choice['text'] for choice in piece['choices'])
        usage = piece.get('usage') or usage
  except (OSError, ValueError, aiohttp.ClientError) as error:
    return failed(repr(error))
  if not usage:
    return failed('the stream broke off')
  seconds = time.perf_counter() - begin
  return Reply(seconds, text, usage['completion_tokens'], first)


def closed(
  url: str, requests: Sequence[Mapping[str, Any]], clients: int
) -> tuple[list[Reply], float]:
  """Replies to requests of clients that wait, and the seconds of all."""
  left, replies = enumerate(requests), dict[int, Reply]()

  async def send() -> None:
    async with _session() as session:

      async def client() -> None:
        for index, request in left:
          begin = time.perf_counter()
          replies[index] = await ask(session, url, request, begin)

      await asyncio.gather(*(client() for _ in range(clients)))

  begin = time.perf_counter()
  asyncio.run(send())
  seconds = time.perf_counter() - begin
  return [replies[index] for index in sorted(replies)], seconds


def arriving(
  url: str, requests: Sequence[Mapping[str, Any]], rate: float, seed: int = 0
) -> tuple[list[Reply], float]:
  """Replies to requests that come at random, `rate` a second in the mean."""
  gaps = np.random.default_rng(seed).exponential(1 / rate, len(requests))

  async def send() -> list[Reply]:
    async with _session() as session:
      begin = time.perf_counter()

      async def client(at: float, request: Mapping[str, Any]) -> Reply:
        await asyncio.sleep(begin + at - time.perf_counter())
        return await ask(session, url, request, begin + at)

      due = zip(np.cumsum(gaps).tolist(), requests, strict=True)
      return await asyncio.gather(*(client(*each) for each in due))

  begin = time.perf_counter()
  return asyncio.run(send()), time.perf_counter() - begin


def _session() -> Any:
  connector = aiohttp.TCPConnector(limit=0)
  timeout = aiohttp.ClientTimeout(total=600)
  return aiohttp.ClientSession(connector=connector, timeout=timeout)


def _row(name: str, replies: Sequence[Reply], seconds: float) -> list[str]:
  good = [reply for reply in replies if reply.error is None]
  tokens = sum(reply.num_tokens for reply in good)

  def times(values: Sequence[float]) -> str:
    percentiles = np.percentile(1e3 * np.array(values or [0.0]), [50, 95, 99])
    return ' / '.join(f'{value:.0f}' for value in percentiles)

  counts = [f'{len(good) / seconds:.1f}', f'{tokens / seconds:.0f}']
  first = times([reply.first or 0.0 for reply in good])
  whole = times([reply.seconds for reply in good])
  return [name, *counts, first, whole, str(len(replies) - len(good))]


def measured(
  url: str, texts: Sequence[str], clients: Sequence[int], rate: float = 0.0
) -> tuple[list[str], list[list[str]]]:
  """Returns columns, and a row for each number of clients that wait.

  Args:
    url: the address of a server.
    texts: a prompt for each request.
    clients: numbers of clients.
    rate: requests a second of clients that arrive; 0: none do.
  """
  requests = [body(text, True, max_tokens=120) for text in texts]
  closed(url, requests[:32], 16)  # a server's first answers are slower
  rows = []
  for count in clients:
    part = requests[: max(32, len(requests) * min(count, 16) // 16)]
    rows.append(_row(f'{count} clients', *closed(url, part, count)))
  if rate:
    found = arriving(url, requests, rate)
    rows.append(_row(f'{rate:g} a second', *found))
  columns = ['load', 'requests/s', 'tokens/s', 'first token, ms']
  return [*columns, 'end to end, ms', 'errors'], rows


@contextlib.contextmanager
def started(options: Mapping[str, Any], log: pathlib.Path) -> Iterator[str]:
  """Starts a server with flags; yields its address when all is compiled.

  Raises:
    ValueError: the server has ended.
  """
  with socket.create_server(('127.0.0.1', 0)) as free:
    port = free.getsockname()[1]
  url = f'http://127.0.0.1:{port}'
  flags = [
    f'--{key}={value}' for key, value in {**options, 'port': port}.items()
  ]
  command = [sys.executable, '-m', 'specdec_jax', 'serve', *flags]
  with log.open('w') as file, subprocess.Popen(command, stderr=file) as server:
    try:
      while not _is_compiled(url):
        if server.poll() is not None:
          raise ValueError(f'the server has ended: {log}')
        time.sleep(2.0)
      yield url
    finally:
      server.terminate()


def _is_compiled(url: str) -> bool:
  try:
    with urllib.request.urlopen(f'{url}/health') as answer:
      return json.load(answer)['compiled']
  except OSError:
    return False


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('url')
  parser.add_argument('texts', help='a file of texts, one a line')
  parser.add_argument('--requests', type=int, default=256)
  parser.add_argument('--rate', type=float, default=20.0)
  parser.add_argument('--output')
  flags = parser.parse_args()
  lines = pathlib.Path(flags.texts).read_text('utf-8').splitlines()
  texts = [line for line in lines if line.strip()]
  requests = [texts[i % len(texts)] for i in range(flags.requests)]
  columns, rows = measured(flags.url, requests, (1, 16, 64), flags.rate)
  print('\n'.join(' | '.join(row) for row in [columns, *rows]))
  if flags.output:
    from specdec_jax import files
    from specdec_jax.report import record

    content = {'title': '', 'columns': columns, 'rows': rows}
    files.write_json(flags.output, record.new('table', content))


if __name__ == '__main__':
  main()
