"""OpenAI's answers, made of the outputs of a request as they come."""

import asyncio
import dataclasses
import functools
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from specdec_jax.checks.fields import unexpected
from specdec_jax.engine import completion, scoring, trace
from specdec_jax.engine.completion import Completion, Piece, Text
from specdec_jax.engine.long_texts import LongTexts
from specdec_jax.engine.request import Row, Update
from specdec_jax.serving import protocol
from specdec_jax.serving.metrics import Metrics
from specdec_jax.serving.protocol import ApiError, CompletionRequest
from specdec_jax.serving.worker import Worker
from specdec_jax.text.tokenizer import Vocabulary

_LEAST = -9999.0  # OpenAI's logarithm of no probability
_FINISH = {'stop_string': 'stop', 'empty': 'stop'}
# `Update.error` -> arguments of the error of an output that has no end.
_ENDS = {
  'deadline': ('The time of the request is over.', None, 504),
  'stopped': ('The server is stopping. Try again later.', None, 503),
  'failed': ('The server has failed; see its log.', None, 500),
  'failed alone': (
    'Requests of this kind fail; the log of the server says why.',
    None,
    500,
  ),
}
# The log-probability of a token, None of the first one of a prompt, and ids and
# log-probabilities of the likeliest tokens at its place, the likeliest first.
_LogProbs = tuple[float | None, Sequence[tuple[int, float]]]


class Answer:
  """The outputs of one request as they come, and the answer made of them.

  Attributes:
    request: what was asked for.
    rows: the rows that are to be decoded.
    num_prompt_tokens: tokens of all prompts.
  """

  def __init__(
    self,
    request: CompletionRequest,
    worker: Worker,
    metrics: Metrics,
    model: str,
    loop: asyncio.AbstractEventLoop,
  ):
    """
    Raises:
      ApiError: the engine cannot decode it.
    """
    self.request, self._worker, self._metrics = request, worker, metrics
    self._engine = worker.engine
    self._begin, self._heard = time.perf_counter(), 0.0
    self._queue: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
    self.num_prompt_tokens = sum(map(len, request.prompt_ids))
    name = 'chat.completion' if request.is_chat else 'text_completion'
    if request.is_chat and request.stream:
      name += '.chunk'
    self._common = {
      'id': f'{"chat" * request.is_chat}cmpl-{secrets.token_hex(12)}',
      'object': name,
      'created': int(time.time()),
      'model': model,
    }
    self._num_choices = len(request.prompts) * request.n
    self._done: dict[int, Completion] = {}
    self._tokens: dict[int, list[int]] = {}  # of outputs that have begun
    tell = functools.partial(_tell, loop, self._queue)
    self._long: LongTexts | None = None
    with protocol.naming_the_field(constraint=request.constraint[0]):
      self.rows: list[Row] = [
        worker.row(
          text,
          functools.partial(tell, index),
          request.stream,
          not request.speculative,
          request.return_rounds,
          **options,
        )
        for index, (text, options) in enumerate(self._texts())
      ]
    if self._long is not None:
      searches = request.use_beam_search
      self._num_choices = len(self.rows) * (request.n if searches else 1)
    if not request.max_tokens:  # only the prompt is wanted
      for index in range(len(self.rows)):
        tell(index, Update(completion=Completion('', [], [], 'length')))
      self.rows = []

  def _texts(self) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields the text and the options of each row.

    Raises:
      ValueError: a prompt has too many sentences.
    """
    request = self.request
    rows = request.of_each()
    if not request.split:
      for prompt, options in rows:
        yield request.prompts[prompt], options
      return
    options = rows[0][1] | {'example_ids': None, 'num_samples': request.n}
    long = self._long = LongTexts(
      self._engine.codec,
      self._engine.config.max_input_len,
      request.prompts,
      self._engine.options(**options),
    )
    most = self._worker.settings.max_waiting
    if len(long.parts) > most:
      expected = f'at most {most} sentences (max_waiting)'
      raise unexpected('prompt', expected, len(long.parts))
    for part, own in zip(long.parts, long.example_ids, strict=True):
      yield (
        part,
        {'options': dataclasses.replace(long.options, example_ids=[own])},
      )

  async def _next(self) -> tuple[int, Update]:
    """The next update.

    Raises:
      ApiError: an output ends without a text.
    """
    index, update = await self._queue.get()
    if update.error is not None:
      raise ApiError(*_ENDS[update.error])
    done = dict(enumerate(update.beams[::-1], index * self.request.n))
    if update.completion is not None:
      done = {index: update.completion}
    for output in done.values():
      if output.finish_reason == 'error':
        raise ApiError(str(output.error), status=500)
      self._metrics.ended(output)
    self._done |= done
    return index, update

  @property
  def _is_over(self) -> bool:
    return len(self._done) == self._num_choices

  async def whole(self) -> dict[str, Any]:
    """The answer when all outputs are there.

    Raises:
      ApiError: one of them ends without a text.
    """
    while not self._is_over:
      await self._next()
    if self._long is not None:
      parts = [done for _, done in sorted(self._done.items())]
      self._done = dict(enumerate(self._long.joined(parts)))
    self._metrics.whole.observe(time.perf_counter() - self._begin)
    choices = [
      await self._choice(index, done.text, done)
      for index, done in sorted(self._done.items())
    ]
    return self._common | {'choices': choices} | self._counts()

  async def stream(self) -> AsyncIterator[bytes]:
    """The answer as events, as outputs come."""
    usage = self.request.include_usage
    common = self._common | ({'usage': None} if usage else {})
    try:
      while not self._is_over:
        index, update = await self._next()
        self._time(len(update.tokens))
        if not (update.text or update.tokens or update.is_last):
          continue
        before = self._tokens.get(index, [])
        choice = await self._choice(index, update.text, update.completion)
        if update.round is not None:
          (spelled,) = trace.spell(
            [update.round], self._engine.tokenizer, before, update.is_last
          )
          choice['round'] = spelled.parts
        self._tokens[index] = [*before, *update.tokens]
        last = self._is_over and not usage
        more: dict[str, Any] = self._speculation() if last else {}
        yield _event(common | {'choices': [choice]} | more)
      if usage:
        yield _event(common | {'choices': []} | self._counts())
      self._metrics.whole.observe(time.perf_counter() - self._begin)
    except ApiError as error:
      yield _event(error.body)
    yield b'data: [DONE]\n\n'

  def _time(self, num_tokens: int) -> None:
    """Observes when tokens of a stream came."""
    now = time.perf_counter()
    if num_tokens and self._heard:
      self._metrics.between.observe((now - self._heard) / num_tokens)
    elif num_tokens:
      self._metrics.first.observe(now - self._begin)
    self._heard = now if num_tokens else self._heard

  async def _choice(
    self, index: int, text: str, done: Completion | None
  ) -> dict[str, Any]:
    """One choice, or a piece of it, whose tokens come with the last piece."""
    request, prompt = self.request, index // self.request.n
    is_first = index not in self._tokens
    choice: dict[str, Any] = {'index': index, 'text': text}
    choice |= {'logprobs': None, 'finish_reason': None}
    if done is not None:
      reason = done.finish_reason
      choice['finish_reason'] = _FINISH.get(reason, reason)
      choice['logprobs'] = await self._log_probs(index, done)
      if request.return_token_ids:
        choice['token_ids'] = done.tokens
        choice['prompt_token_ids'] = request.prompt_ids[prompt]
      if request.split:
        choice |= {'sentences': done.num_sentences, 'cut': done.num_cut}
    if request.echo and is_first:
      choice['text'] = self._prompt_text(prompt) + text
    if request.is_chat:
      role = {'role': 'assistant'} if is_first else {}
      message = {**role, 'content': choice.pop('text')}
      choice['delta' if request.stream else 'message'] = message
    return choice

  # Log-probabilities.

  async def _log_probs(
    self, index: int, done: Completion
  ) -> dict[str, Any] | None:
    """OpenAI's `logprobs` of an output."""
    request, tokenizer = self.request, self._engine.tokenizer
    if request.num_top is None:
      return None
    values: list[_LogProbs] = [
      (value, [(token, value)])
      for token, value in zip(done.tokens, done.log_probs, strict=False)
    ]
    if request.is_scored:
      values = await self._scored(index, done.tokens)
    entries, shift = [], 0
    if request.echo:
      prompt = index // request.n
      _, shown = self._echoed(prompt)
      pieces = Text(tokenizer).pieces_of(shown)
      entries = _entries(tokenizer, shown, pieces, values)
      values = values[len(shown) :]
      shift = len(self._prompt_text(prompt))
    pieces = completion.pieces_of(done, tokenizer)
    entries += _entries(tokenizer, done.tokens, pieces, values, shift)
    if not entries:
      return None
    form = _of_a_chat if request.is_chat else _of_completions
    return form(entries, request.num_top)

  async def _scored(self, index: int, tokens: Sequence[int]) -> list[_LogProbs]:
    """The target's log-probabilities, from the prompt on if it is echoed.

    Raises:
      ApiError: others are scored for too long.
    """
    request, engine = self.request, self._engine
    prompt = index // request.n
    read, targets, hidden = [*request.prompt_ids[prompt]], [*tokens], 0
    if request.echo:
      before, shown = self._echoed(prompt)
      every = [*before, *shown, *tokens]
      read, targets, hidden = every[:1], every[1:], len(before)
    if not read:
      return []
    languages = engine.codec.languages(target_lang=request.target_lang)
    place = prompt if request.use_beam_search else index
    given = len(targets) - len(tokens)
    ruled = [
      one._replace(before=given)
      for row in self.rows[place : place + 1]
      for one in row.request.ruled()[:1]
    ]
    run = functools.partial(
      scoring.score,
      engine.target,
      engine.params.target,
      [read],
      [targets],
      languages.before_output(()),
      num_top=request.num_top or 0,
      ruled=ruled,
    )
    try:
      async with asyncio.timeout(self._worker.settings.max_seconds):
        async with self._worker.scoring:
          (score,) = await asyncio.to_thread(run)
    except TimeoutError:
      raise ApiError(*_ENDS['deadline']) from None
    first: list[_LogProbs] = [(None, ())] if request.echo else []
    tops = score.top or [()] * len(targets)
    return [*first, *zip(score.log_probs, tops, strict=True)][hidden:]

  def _echoed(self, prompt: int) -> tuple[list[int], list[int]]:
    """Ids of a prompt that the client does not see, and those that it does."""
    text = self.request.prompts[prompt]
    ids = self.request.prompt_ids[prompt]
    bos = (
      [] if self._engine.codec.bos_id is None else [self._engine.codec.bos_id]
    )
    if isinstance(text, str):
      return bos, ids[len(bos) :]
    return ([] if list(text[:1]) == bos else bos), list(text)

  def _prompt_text(self, prompt: int) -> str:
    """The text of a prompt; that of its tokens, if they are shown as well."""
    text = self.request.prompts[prompt]
    if isinstance(text, str) and self.request.num_top is None:
      return text
    return completion.decode(self._engine.tokenizer, self._echoed(prompt)[1])

  # Counts.

  def _speculation(self) -> dict[str, Any]:
    """What speculation did for the request, in the words of vLLM."""
    counts = completion.total(done.stats for done in self._done.values())
    most = len(counts.histogram) - 1
    if self.request.use_beam_search or most < 1:
      return {}
    steps, accepted = counts.num_target_calls, counts.num_accepted
    rested = counts.fallback_rounds
    metrics = {
      'mean_acceptance_length': 1 + accepted / steps if steps else 1.0,
      'acceptance_rate': counts.acceptance_rate,
      'acceptance_histogram': list(counts.histogram),
      'num_spec_steps': steps,
      'num_accepted_draft_tokens': accepted,
      'num_draft_tokens': counts.num_drafted,
      'num_tested': counts.num_tested,
      'num_passed': counts.num_passed,
      'num_spec_tokens': most,
      **({'fallback_rounds': rested} if rested else {}),
    }
    return {'metrics': {'speculative_decoding': metrics}}

  def _counts(self) -> dict[str, Any]:
    inputs = self.num_prompt_tokens
    outputs = sum(len(done.tokens) for done in self._done.values())
    usage = {'prompt_tokens': inputs, 'completion_tokens': outputs}
    usage['total_tokens'] = inputs + outputs
    return {'usage': usage} | self._speculation()


def _tell(loop: Any, queue: Any, index: int, update: Update) -> None:
  """Called by the scheduler's thread.

  It does not know the answer, which has the rows that call it: a request that
  is over is freed at once, and not when Python looks for cycles.
  """
  loop.call_soon_threadsafe(queue.put_nowait, (index, update))


def _event(body: Any) -> bytes:
  return f'data: {json.dumps(body)}\n\n'.encode()


def _entry(piece: Piece, log_prob: float | None) -> dict[str, Any]:
  """A token as OpenAI's chats have it; JSON has no infinite numbers."""
  if log_prob is not None and not math.isfinite(log_prob):
    log_prob = None
  return {'token': piece.name, 'logprob': log_prob, 'bytes': piece.bytes}


def _entries(
  tokenizer: Vocabulary,
  ids: Sequence[int],
  pieces: Sequence[Piece],
  values: Sequence[_LogProbs],
  shift: int = 0,
) -> list[dict[str, Any]]:
  """The tokens of a text that begins `shift` characters into the answer.

  Each has where it begins, and the likeliest ones at its place.
  """
  entries, before = [], Text(tokenizer)
  for token, piece, (log_prob, top) in zip(ids, pieces, values, strict=False):
    likeliest = [
      _entry(piece if other == token else before.adds(other), value)
      for other, value in top
    ]
    offset = shift + piece.end - len(piece.text)
    more = {'top_logprobs': likeliest, 'offset': offset}
    entries.append(_entry(piece, log_prob) | more)
    before.extend([token])
  return entries


def _of_completions(
  entries: Sequence[dict[str, Any]], number: int
) -> dict[str, Any]:
  """OpenAI's `logprobs` of completions: the token itself is among the top."""
  top = [
    # Of tokens with one name the likeliest counts.
    {one['token']: one['logprob'] for one in (entry, *likeliest[::-1])}
    if likeliest
    else None
    for entry in entries
    for likeliest in [entry['top_logprobs']]
  ]
  return {
    'tokens': [entry['token'] for entry in entries],
    'token_logprobs': [entry['logprob'] for entry in entries],
    'top_logprobs': top if number else None,
    'text_offset': [entry['offset'] for entry in entries],
  }


def _of_a_chat(
  entries: Sequence[dict[str, Any]], number: int
) -> dict[str, Any]:
  """OpenAI's `logprobs` of chats, whose clients expect a number."""
  for entry in entries:
    entry['top_logprobs'] = entry['top_logprobs'][:number]
    del entry['offset']
    for one in (entry, *entry['top_logprobs']):
      if one['logprob'] is None:
        one['logprob'] = _LEAST
  return {'content': list(entries), 'refusal': None}
