"""OpenAI's completions: the outputs of a request, and what is said of them."""

import asyncio
import collections
import functools
import json
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from specdec_jax.engine import trace
from specdec_jax.engine.completion import Completion, decode, total
from specdec_jax.engine.engine import Engine
from specdec_jax.serving.metrics import Metrics, Stopwatch
from specdec_jax.serving.protocol import Asked, BadRequest, error_object
from specdec_jax.serving.rows import News, Row
from specdec_jax.serving.scheduler import Scheduler

_WORDS = re.compile(r'\s*\S+|\s+$')
_LONGEST_GAP = 1.0  # seconds over which the words of a round are spread
_NO_NEWS = News()
_FINISH = {'stop_string': 'stop', 'empty': 'stop'}
# Of rows that end without an output: status, type and what to do.
_ENDS = {
  'deadline': (504, 'timeout_error', 'The time of the request is over.'),
  'stopped': (503, 'server_error', 'The server is stopping. Try again later.'),
  'failed': (500, 'server_error', 'The server has failed; see its log.'),
  'search failed': (
    500,
    'server_error',
    "The beam search failed; the server's log says why.",
  ),
}


class Ended(Exception):
  """An output ended without a text."""

  def __init__(self, status: int, kind: str, message: str):
    super().__init__(message)
    self.status = status
    self.body = error_object(message, kind)


class Answer:
  """The outputs of one request as they come, and the answer made of them."""

  def __init__(
    self,
    asked: Asked,
    scheduler: Scheduler,
    metrics: Metrics,
    model: str,
    loop: asyncio.AbstractEventLoop,
  ):
    """
    Raises:
      BadRequest: the engine cannot decode it.
    """
    self.asked, self._metrics = asked, metrics
    self._loop, self._engine = loop, scheduler.engine
    self._watch = Stopwatch(metrics)
    self._queue: asyncio.Queue[tuple[int, News]] = asyncio.Queue()
    self.num_prompt_tokens = sum(map(len, asked.prompt_ids))
    self._common = {
      'id': f'{"chat" * asked.chat}cmpl-{secrets.token_hex(12)}',
      'object': _object_of(asked),
      'created': int(time.time()),
      'model': model,
    }
    self._ends: dict[int, News] = {}
    self._seen: dict[int, list[int]] = {}  # tokens that were sent
    self._begun: set[int] = set()  # outputs that something was sent of
    each = asked.of_each()
    self._num_choices = len(asked.prompts) * asked.n
    try:
      self.rows: list[Row] = [
        scheduler.row(
          asked.prompts[prompt],
          functools.partial(self._tell, index),
          asked.stream,
          asked.plain,
          asked.return_rounds,
          **options,
        )
        for index, (prompt, options) in enumerate(each)
      ]
    except ValueError as error:
      raise BadRequest(str(error)) from error

  def _tell(self, index: int, news: News) -> None:
    """Called by the scheduler's thread."""
    self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, news))

  async def _next(self) -> tuple[int, News]:
    """The next news.

    Raises:
      Ended: an output ends without a text.
    """
    index, news = await self._queue.get()
    if news.error is not None:
      raise Ended(*_ENDS[news.error])
    ends = {index: news}
    if news.beams:
      first = index * self.asked.n
      beams = enumerate(news.beams, first)
      ends = {place: News(completion=one) for place, one in beams}
    for place, end in ends.items():
      if end.completion is not None:
        if end.completion.finish_reason == 'error':
          raise Ended(500, 'server_error', str(end.completion.error))
        self._ends[place] = end
        self._metrics.ended(end)
    return index, news

  @property
  def _is_over(self) -> bool:
    return len(self._ends) == self._num_choices

  async def whole(self) -> dict[str, Any]:
    """The answer when all outputs are there.

    Raises:
      Ended: one of them ends without a text.
    """
    while not self._is_over:
      await self._next()
    self._watch.ended()
    choices = []
    for index in range(self._num_choices):
      one = self._completion(index)
      choice = self._choice(index, one.text, one.tokens, one.log_probs)
      choices.append(choice | {'finish_reason': _finish_reason(one)})
    return self._common | {'choices': choices} | self._counts()

  async def stream(self) -> AsyncIterator[bytes]:
    """The answer as events, as outputs come."""
    common = self._common
    if self.asked.include_usage:
      common = common | {'usage': None}
    try:
      async for index, text, news in self._pieces():
        if not (text or news.tokens or news.is_last):
          continue
        sent = list(self._seen.get(index, ()))
        choice = self._choice(index, text, news.tokens, news.log_probs)
        if news.round is not None:
          (one,) = trace.spell([news.round], self._engine.tokenizer, sent)
          choice['round'] = one.parts
        more = {}
        if news.completion is not None:
          choice['finish_reason'] = _finish_reason(news.completion)
          if self._is_over and not self.asked.include_usage:
            more = self._metrics_of_request()
        yield _event(common | {'choices': [choice]} | more)
      if self.asked.include_usage:
        yield _event(common | {'choices': []} | self._counts())
      self._watch.ended()
    except Ended as ended:
      yield _event(ended.body)
    yield b'data: [DONE]\n\n'

  async def _pieces(self) -> AsyncIterator[tuple[int, str, News]]:
    """What is sent at once: index of the output, text, and the news it is from.

    At an even pace words wait for their turn, but for nothing that follows.
    """
    held: collections.deque[tuple[int, str, News]] = collections.deque()
    delay, last = 0.0, time.perf_counter()
    while not self._is_over:
      try:
        async with asyncio.timeout(delay if held else None):
          index, news = await self._next()
      except TimeoutError:
        yield held.popleft()
        continue
      while held:
        yield held.popleft()
      self._watch.heard(news)
      words = [news.text]
      if self.asked.pace == 'even' and not news.is_last:
        words = _WORDS.findall(news.text) or words
        now = time.perf_counter()
        delay, last = min(now - last, _LONGEST_GAP) / len(words), now
      held.extend((index, word, _NO_NEWS) for word in words[1:])
      yield index, words[0], news

  def _choice(
    self,
    index: int,
    text: str,
    tokens: Sequence[int],
    log_probs: Sequence[float],
  ) -> dict[str, Any]:
    """One choice, or a piece of it; `tokens` follow those before."""
    asked = self.asked
    prompt = index // asked.n
    is_first = index not in self._begun
    before = self._seen.setdefault(index, [])
    choice: dict[str, Any] = {
      'index': index,
      'text': text,
      'logprobs': None,
      'finish_reason': None,
    }
    if asked.log_probs is not None and tokens:
      choice['logprobs'] = _log_probs_object(
        self._engine, tokens, log_probs, before, asked.log_probs
      )
    if asked.return_token_ids:
      choice['token_ids'] = list(tokens)
    if is_first:
      self._begun.add(index)
      if asked.return_token_ids:
        choice['prompt_token_ids'] = asked.prompt_ids[prompt]
      if asked.echo:
        said = asked.prompts[prompt]
        if not isinstance(said, str):
          said = decode(self._engine.tokenizer, said)
        choice['text'] = said + text
    before.extend(tokens)
    if asked.chat:
      role = {'role': 'assistant'} if is_first else {}
      message = {**role, 'content': choice.pop('text')}
      choice['delta' if asked.stream else 'message'] = message
    return choice

  def _completion(self, index: int) -> Completion:
    found: Any = self._ends[index].completion
    return found

  def _metrics_of_request(self) -> dict[str, Any]:
    ends = self._ends.values()
    drafted = sum(one.num_drafted for one in ends)
    every = [self._completion(index) for index in self._ends]
    speculates = any(len(one.stats.histogram) > 1 for one in every)
    if self.asked.searches or not speculates:
      return {}
    return {'metrics': speculative_metrics(every, drafted)}

  def _counts(self) -> dict[str, Any]:
    outputs = sum(len(self._completion(i).tokens) for i in self._ends)
    counts = {'usage': _usage(self.num_prompt_tokens, outputs)}
    return counts | self._metrics_of_request()


def _object_of(asked: Asked) -> str:
  """OpenAI's word for an answer."""
  if not asked.chat:
    return 'text_completion'
  return 'chat.completion.chunk' if asked.stream else 'chat.completion'


def _event(body: Any) -> bytes:
  return f'data: {json.dumps(body)}\n\n'.encode()


def _finish_reason(completion: Completion) -> str:
  """OpenAI's word for why an output ended."""
  return _FINISH.get(completion.finish_reason, completion.finish_reason)


def _log_probs_object(
  engine: Engine,
  tokens: Sequence[int],
  log_probs: Sequence[float],
  before: Sequence[int],
  candidates: int,
) -> dict[str, Any]:
  """OpenAI's `logprobs` of tokens that follow `before`."""
  every = [*before, *tokens]
  ends = [
    len(decode(engine.tokenizer, every[:end]))
    for end in range(len(before), len(every) + 1)
  ]
  text = decode(engine.tokenizer, every)
  spelled = [text[a:b] for a, b in zip(ends, ends[1:], strict=False)]
  values = [x if math.isfinite(x) else None for x in log_probs]
  top = None
  if candidates:  # the chosen one is the likeliest, see `protocol.parse`
    top = [{t: x} for t, x in zip(spelled, values, strict=True)]
  return {
    'tokens': spelled,
    'token_logprobs': values,
    'top_logprobs': top,
    'text_offset': ends[:-1],
  }


def _usage(num_prompt: int, num_output: int) -> dict[str, int]:
  """Counts of tokens."""
  return {
    'prompt_tokens': num_prompt,
    'completion_tokens': num_output,
    'total_tokens': num_prompt + num_output,
  }


def speculative_metrics(
  completions: Sequence[Completion], num_drafted: int
) -> dict[str, Any]:
  """What speculation did for a request, in the words of vLLM."""
  counts = total(one.stats for one in completions)
  steps, accepted = counts.num_target_calls, counts.num_accepted
  rested = counts.fallback_rounds
  return {
    'speculative_decoding': {
      'mean_acceptance_length': 1 + accepted / steps if steps else 1.0,
      'acceptance_rate': counts.acceptance_rate,
      'acceptance_histogram': list(counts.histogram),
      'num_spec_steps': steps,
      'num_accepted_draft_tokens': accepted,
      'num_draft_tokens': num_drafted,
      'num_tested': counts.num_tested,
      'num_passed': counts.passed,
      'num_spec_tokens': len(counts.histogram) - 1,
      **({'fallback_rounds': rested} if rested else {}),
    }
  }
