"""Makes OpenAI's answers from the outputs of a request while they grow.

The scheduler decodes. The target also scores and classifies, on a thread of its
own, where requests take turns.
"""

import asyncio
import concurrent.futures
import functools
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from specdec_jax.checks.fields import unexpected
from specdec_jax.engine import completion, scoring, trace
from specdec_jax.engine.completion import Completion, Piece, Text
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.long_texts import LongTexts
from specdec_jax.engine.options import Options
from specdec_jax.engine.padding import next_power_of_two
from specdec_jax.engine.request import Row, Update
from specdec_jax.serving import protocol
from specdec_jax.serving.metrics import Metrics
from specdec_jax.serving.protocol import ApiError, CompletionRequest, Prompt
from specdec_jax.serving.worker import Worker
from specdec_jax.text.tokenizer import Vocabulary

_FINISH = {'stop_string': 'stop', 'empty': 'stop'}
# `Update.error` -> message and HTTP status of an output that ends early.
_WITHOUT_END = {
  'deadline': ('The time of the request is over.', 504),
  'stopped': ('The server is stopping. Try again later.', 503),
  'failed': ('The server has failed; see its log.', 500),
  'failed alone': ('Requests of this kind fail; the log says why.', 500),
}
_PIECE = 2048  # the most tokens read at once, unless a single text has more
_LEAST = -9999.0  # OpenAI's value for the logarithm of 0
# The log-probability of a token, None for the first token of a prompt; and the
# likeliest ids at the token's position with their log-probabilities, the
# likeliest first.
_LogProb = tuple[float | None, Sequence[tuple[int, float]]]
_Value = TypeVar('_Value')


class Turns:
  """Runs pieces of bounded work one after another, in the order they came in.

  Memory is needed for one piece at a time, and a new request waits for at most
  one piece of each other request.
  """

  def __init__(self, engine: Engine, max_seconds: float):
    """Takes the engine that scores, and the time limit of a request."""
    self._engine, self._max_seconds = engine, max_seconds
    self._thread = concurrent.futures.ThreadPoolExecutor(1, 'turns')

  async def run(self, pieces: Sequence[Callable[[], _Value]]) -> list[_Value]:
    """Runs the pieces of a request, each at its turn; returns their values.

    A piece that has begun runs to its end, and other requests wait for it, even
    if the request of that piece is cancelled.

    Raises:
      ApiError: the time of the request is over.
    """
    loop = asyncio.get_running_loop()
    try:
      async with asyncio.timeout(self._max_seconds):
        return [await loop.run_in_executor(self._thread, x) for x in pieces]
    except TimeoutError:
      raise _without_end('deadline') from None

  async def classify(
    self, texts: Sequence[Prompt], labels: Sequence[Prompt]
  ) -> np.ndarray:
    """Returns the probability of each label for each text.

    The texts are read in pieces, so that other requests get their turns.

    Raises:
      ApiError: the engine refuses the texts or the labels, or the time of the
        request is over.
    """
    with protocol.naming_the_field('input'):
      pieces = await asyncio.to_thread(self._pieces, texts, labels)
      return np.concatenate(await self.run(pieces))

  def _pieces(
    self, texts: Sequence[Prompt], labels: Sequence[Prompt]
  ) -> list[Callable[[], np.ndarray]]:
    """Encodes and checks texts and labels; returns a call for each piece."""
    engine = self._engine
    pairs = [protocol.encoded(engine, x) for x in texts]
    ids, inputs = zip(*pairs, strict=True)
    scoring.check_ids(engine.target, inputs=ids)
    protocol.check_lengths(engine, ids, 'input')
    # `Engine.classify` adds the end of sequence to labels that are ids.
    outputs = [ids[:-1] for ids in engine.label_ids(labels)]
    longest = next_power_of_two(max(map(len, ids)))
    number = max(1, _PIECE // (longest + sum(map(len, outputs))))
    return [
      functools.partial(engine.classify, inputs[at : at + number], outputs)
      for at in range(0, len(inputs), number)
    ]


class Answer:
  """Collects the outputs of one request, and makes the answer from them.

  Attributes:
    request: the parsed body of the HTTP request.
    rows: the rows that are to be decoded.
    num_prompt_tokens: the number of tokens in all prompts.
  """

  def __init__(
    self,
    request: CompletionRequest,
    worker: Worker,
    turns: Turns,
    metrics: Metrics,
    model: str,
    loop: asyncio.AbstractEventLoop,
  ):
    """Makes the rows that are to be decoded.

    Args:
      request: the parsed body of the HTTP request.
      worker: decodes the rows.
      turns: scores outputs with the target while the worker decodes.
      metrics: the server's counters.
      model: the name by which requests call the model.
      loop: the event loop in which the answer is awaited.

    Raises:
      ApiError: the engine cannot decode the request.
    """
    self.request, self._turns, self._metrics = request, turns, metrics
    self._worker, self._engine = worker, worker.engine
    self._begin, self._heard = time.perf_counter(), 0.0
    self._queue = queue = asyncio.Queue[tuple[int, Update]]()
    self.num_prompt_tokens = sum(map(len, request.prompt_ids))
    prefix, name = 'cmpl', 'text_completion'
    if request.is_chat:
      prefix, name = 'chatcmpl', f'chat.completion{".chunk" * request.stream}'
    self._common: dict[str, Any] = {
      'id': f'{prefix}-{secrets.token_hex(12)}',
      'object': name,
      'created': int(time.time()),
      'model': model,
    }
    self._done: dict[int, Completion] = {}
    self._tokens: dict[int, list[int]] = {}  # sent so far, by output
    self._long: LongTexts | None = None

    # The rows refer to `tell`, which does not refer to the answer. A cycle of
    # references would live until Python's garbage collector runs.
    def tell(index: int, update: Update) -> None:
      loop.call_soon_threadsafe(queue.put_nowait, (index, update))

    with protocol.naming_the_field(constraint=request.constraint[0]):
      inputs, options = self._inputs()
      self.rows: list[Row] = worker.rows(inputs, tell, options=options)
    for row in self.rows:
      row.streams, row.shows_rounds = request.stream, request.return_rounds
      row.is_plain |= not request.speculative
    # A beam search finds all outputs of a prompt in one row.
    self._per_row = request.n if request.use_beam_search else 1
    self._num_outputs = len(self.rows) * self._per_row
    if not request.max_length:  # the client wants the prompt alone
      nothing = [Completion('', [], [], 'length')] * self._per_row
      for index in range(len(self.rows)):
        tell(index, Update(outputs=nothing))
      self.rows = []

  def _inputs(self) -> tuple[Sequence[Prompt], Options]:
    """Returns the texts that the engine reads, and its options for them.

    Raises:
      ValueError: the prompts have too many sentences.
    """
    request, engine = self.request, self._engine
    options = engine.options(**request.options())
    if not request.split:
      return request.inputs, options
    long = LongTexts(engine.codec, engine.config, request.prompts, options)
    self._long, limit = long, self._worker.settings.max_waiting
    if len(long.parts) > limit:
      expected = f'at most {limit} sentences (max_waiting)'
      raise unexpected('prompt', expected, len(long.parts))
    encoded = functools.cache(protocol.encoded)  # sentences may repeat
    inputs = [encoded(engine, x, request.source_lang)[1] for x in long.parts]
    return inputs, long.options

  async def _next(self) -> tuple[int, Update]:
    """Returns the next update, and the index of its row.

    Raises:
      ApiError: an output ends with an error.
    """
    index, update = await self._queue.get()
    if update.error is not None:
      raise _without_end(update.error)
    outputs = update.outputs[::-1]  # the best beam first
    for place, output in enumerate(outputs, index * len(outputs)):
      if output.finish_reason == 'error':
        raise ApiError(str(output.error), status=500)
      self._metrics.ended(output)
      self._done[place] = output
    return index, update

  @property
  def _is_over(self) -> bool:
    return len(self._done) == self._num_outputs

  async def whole(self) -> dict[str, Any]:
    """Returns the answer once all outputs have ended.

    Raises:
      ApiError: an output ends with an error.
    """
    while not self._is_over:
      await self._next()
    if self._long is not None:
      parts = [done for _, done in sorted(self._done.items())]
      self._done = dict(enumerate(self._long.joined(parts)))
    self._metrics.end_to_end.observe(time.perf_counter() - self._begin)
    outputs = sorted(self._done.items())
    choices = [await self._choice(i, done.text, done) for i, done in outputs]
    return self._common | {'choices': choices} | self._usage() | self._counts()

  async def stream(self) -> AsyncIterator[bytes]:
    """Yields the answer as server-sent events while the outputs grow."""
    usage = any((self.request.stream_options or {}).values())
    common = self._common | ({'usage': None} if usage else {})
    try:
      while not self._is_over:
        index, update = await self._next()
        if update.tokens:
          self._time(len(update.tokens))
        if not (update.text or update.tokens or update.is_last):
          continue
        before = self._tokens.get(index, [])
        done = update.outputs[0] if update.outputs else None
        choice = await self._choice(index, update.text, done)
        if update.round is not None:
          (spelled,) = trace.spell(
            [update.round], self._engine.tokenizer, before, update.is_last
          )
          choice['round'] = spelled.parts
        self._tokens[index] = [*before, *update.tokens]
        last = self._is_over and not usage
        counts: dict[str, Any] = self._counts() if last else {}
        yield _event(common | {'choices': [choice]} | counts)
      if usage:
        yield _event(common | {'choices': []} | self._usage() | self._counts())
      self._metrics.end_to_end.observe(time.perf_counter() - self._begin)
    except ApiError as error:
      yield _event(error.body)
    yield b'data: [DONE]\n\n'

  def _time(self, num_tokens: int) -> None:
    """Records how long a stream's client waited for tokens."""
    now, metrics = time.perf_counter(), self._metrics
    if self._heard:
      metrics.between_tokens.observe((now - self._heard) / num_tokens)
    else:
      metrics.first_token.observe(now - self._begin)
    self._heard = now

  async def _choice(
    self, index: int, text: str, done: Completion | None
  ) -> dict[str, Any]:
    """Returns a choice of OpenAI's answer or, in a stream, a piece of one.

    Only the last piece has the finish reason, log-probabilities and ids.
    """
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

  def _prompt_text(self, prompt: int) -> str:
    """Returns a prompt as it is echoed: as given, or decoded from its ids."""
    text = self.request.prompts[prompt]
    if isinstance(text, str) and self.request.num_top is None:
      return text
    return completion.decode(self._engine.tokenizer, self._echoed(prompt)[1])

  def _echoed(self, prompt: int) -> tuple[list[int], list[int]]:
    """Returns the ids of a prompt that are not echoed, and those that are."""
    text, bos_id = self.request.prompts[prompt], self._engine.codec.bos_id
    bos = [] if bos_id is None else [bos_id]
    if isinstance(text, str):
      return bos, self.request.prompt_ids[prompt][len(bos) :]
    return ([] if text[:1] == bos else bos), list(text)

  async def _log_probs(
    self, index: int, done: Completion
  ) -> dict[str, Any] | None:
    """Returns the `logprobs` of an output; None if none are wanted.

    Raises:
      ApiError: the output waits too long for its turn to be scored.
    """
    request, tokenizer = self.request, self._engine.tokenizer
    if request.num_top is None:
      return None
    pairs = zip(done.tokens, done.log_probs, strict=False)
    values: list[_LogProb] = [(value, [(x, value)]) for x, value in pairs]
    if request.is_scored:
      values = await self._scored(index, done.tokens)
    entries, shift = list[dict[str, Any]](), 0
    if request.echo:
      _, echo = self._echoed(index // request.n)
      pieces = Text(tokenizer).pieces_of(echo)
      entries = _entries(tokenizer, echo, pieces, values)
      values = values[len(echo) :]
      shift = len(self._prompt_text(index // request.n))
    pieces = completion.pieces_of(done, tokenizer)
    entries += _entries(tokenizer, done.tokens, pieces, values, shift)
    if not entries:
      return None
    form = _of_a_chat if request.is_chat else _of_completions
    return form(entries, request.num_top)

  async def _scored(self, index: int, tokens: Sequence[int]) -> list[_LogProb]:
    """Returns the target's log-probabilities of an output.

    If the prompt is echoed, those of the prompt come first.
    """
    request, engine = self.request, self._engine
    prompt = index // request.n
    read, targets, hidden = [*request.prompt_ids[prompt]], [*tokens], 0
    if request.echo:
      before, echo = self._echoed(prompt)
      every = [*before, *echo, *tokens]
      read, targets, hidden = every[:1], every[1:], len(before)
    if not read:
      return []
    languages = engine.codec.languages(target_lang=request.target_lang)
    rows = self.rows and [self.rows[index // self._per_row]]
    num_before = len(targets) - len(tokens)
    ruled = [row.ruled._replace(before=num_before) for row in rows]
    begin, num_top = engine.codec.begin(languages), request.num_top or 0

    def score() -> Any:
      network, params = engine.target, engine.params.target
      options: dict[str, Any] = {'num_top': num_top, 'ruled': ruled}
      return scoring.score(network, params, [read], [targets], begin, **options)

    [[scored]] = await self._turns.run([score])
    first: list[_LogProb] = [(None, ())] if request.echo else []
    tops = scored.top or [()] * len(targets)
    return [*first, *zip(scored.log_probs, tops, strict=True)][hidden:]

  def _counts(self) -> dict[str, Any]:
    """Returns the counts of speculation, under vLLM's names."""
    counts = completion.total(done.stats for done in self._done.values())
    gamma = len(counts.histogram) - 1
    if self.request.use_beam_search or gamma < 1:
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
      'num_spec_tokens': gamma,
      **({'fallback_rounds': rested} if rested else {}),
    }
    return {'metrics': {'speculative_decoding': metrics}}

  def _usage(self) -> dict[str, Any]:
    inputs = self.num_prompt_tokens
    outputs = sum(len(done.tokens) for done in self._done.values())
    usage = {'prompt_tokens': inputs, 'completion_tokens': outputs}
    return {'usage': usage | {'total_tokens': inputs + outputs}}


def _without_end(reason: str) -> ApiError:
  """Makes an error of `Update.error`, the reason why an output broke off."""
  message, status = _WITHOUT_END[reason]
  return ApiError(message, status=status)


def _event(body: Any) -> bytes:
  return f'data: {json.dumps(body)}\n\n'.encode()


def _entries(
  tokenizer: Vocabulary,
  ids: Sequence[int],
  pieces: Sequence[Piece],
  values: Sequence[_LogProb],
  shift: int = 0,
) -> list[dict[str, Any]]:
  """Returns an entry for each token of a text.

  The text begins `shift` characters into an answer. An entry has the token's
  offset in the answer, and the likeliest tokens at its position, without tokens
  that a rule forbids.
  """
  entries, before = [], Text(tokenizer)
  for token, piece, (log_prob, top) in zip(ids, pieces, values, strict=False):
    likeliest = [
      _entry(piece if other == token else before.adds(other), value)
      for other, value in top
      if value > -math.inf
    ]
    offset = shift + piece.end - len(piece.text)
    more = {'top_logprobs': likeliest, 'offset': offset}
    entries.append(_entry(piece, log_prob) | more)
    before.extend([token])
  return entries


def _entry(piece: Piece, log_prob: float | None) -> dict[str, Any]:
  """Returns the entry of a token, in the form that chats have.

  An infinite log-probability becomes None, since JSON has no infinite numbers.
  """
  if log_prob is not None and not math.isfinite(log_prob):
    log_prob = None
  return {'token': piece.name, 'logprob': log_prob, 'bytes': piece.bytes}


def _of_completions(
  entries: Sequence[dict[str, Any]], number: int
) -> dict[str, Any]:
  """Returns the `logprobs` of completions.

  The likeliest tokens of a position include the token that was chosen.
  """
  top: list[dict[str, Any] | None] = []
  for entry in entries:  # tokens with the same name: the likeliest is shown
    tokens = entry, *entry['top_logprobs'][::-1]
    named = {each['token']: each['logprob'] for each in tokens}
    top.append(named if entry['top_logprobs'] else None)
  return {
    'tokens': [entry['token'] for entry in entries],
    'token_logprobs': [entry['logprob'] for entry in entries],
    'top_logprobs': top if number else None,
    'text_offset': [entry['offset'] for entry in entries],
  }


def _of_a_chat(
  entries: Sequence[dict[str, Any]], number: int
) -> dict[str, Any]:
  """Returns the `logprobs` of a chat.

  A log-probability that is None becomes -9999, since clients expect a number.
  """
  for entry in entries:
    entry['top_logprobs'] = entry['top_logprobs'][:number]
    del entry['offset']
    for each in (entry, *entry['top_logprobs']):
      if each['logprob'] is None:
        each['logprob'] = _LEAST
  return {'content': list(entries), 'refusal': None}
