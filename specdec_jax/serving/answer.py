"""OpenAI's completions: the outputs of a request, and what is given of them."""

import asyncio
import functools
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from specdec_jax.engine import scoring, trace
from specdec_jax.engine.completion import (
  Completion,
  Piece,
  Text,
  decode,
  pieces_of,
  total,
)
from specdec_jax.engine.scheduler import Update
from specdec_jax.serving.metrics import Metrics, Stopwatch
from specdec_jax.serving.protocol import ApiError, CompletionRequest
from specdec_jax.serving.worker import ServedRow, Worker
from specdec_jax.text.tokenizer import Tokenizer

_LEAST = -9999.0  # OpenAI's logarithm of no probability
_FINISH = {'stop_string': 'stop', 'empty': 'stop'}
# Of rows that end without an output: status, type and what to do.
_ENDS = {
  'deadline': (504, 'timeout_error', 'The time of the request is over.'),
  'stopped': (503, 'server_error', 'The server is stopping. Try again later.'),
  'failed': (500, 'server_error', 'The server has failed; see its log.'),
  'search failed': (
    500,
    'server_error',
    'The beam search failed; see its log.',
  ),
}


def _ended(why: str) -> ApiError:
  """The error of an output that ended without a text."""
  status, kind, message = _ENDS[why]
  return ApiError(message, status=status, kind=kind)


class _Token(NamedTuple):
  """A token as it is sent: what it adds, and its log-probabilities.

  Attributes:
    piece: what it adds to the text.
    offset: where it begins in the text of the answer.
    log_prob: None of the first token of a prompt.
    top: the likeliest tokens at its place, the likeliest first.
  """

  piece: Piece
  offset: int
  log_prob: float | None
  top: Sequence[tuple[Piece, float]]


class _Output:
  """One output, as far as it has come and was sent."""

  def __init__(self, tokenizer: Tokenizer, has_tokens: bool):
    """
    Args:
      tokenizer: the vocabulary.
      has_tokens: whether tokens are sent beside the text.
    """
    self._tokenizer, self._has_tokens = tokenizer, has_tokens
    self.before = Text(tokenizer)  # of the tokens that were sent
    self.tokens: list[int] = []
    self.log_probs: list[float] = []
    self.pieces: list[Piece] = []  # of tokens whose text is settled
    self.num_characters = self.num_tokens = 0  # that were sent
    self.has_begun = False
    self._text = Text(tokenizer, with_pieces=True)

  def hear(self, text: str, update: Update) -> range:
    """Takes an update and its text to send; returns which tokens are sent.

    A token is sent with the last of its text, which nothing may change or cut.
    """
    self.num_characters += len(text)
    first, done = self.num_tokens, update.completion
    if done:  # some that came may be behind a stop string
      self.tokens, self.log_probs = [], []
    self.tokens = [*self.tokens, *(done or update).tokens]
    self.log_probs = [*self.log_probs, *(done or update).log_probs]
    if not self._has_tokens:
      return range(0)
    if done is None:
      self._text.extend(update.tokens)
      self.pieces = self._text.pieces
    else:
      self.pieces = pieces_of(done, self._tokenizer)
    while self.num_tokens < len(self.pieces):
      if self.pieces[self.num_tokens].end > self.num_characters:
        break
      self.num_tokens += 1
    return range(first, self.num_tokens)


class Answer:
  """The outputs of one request as they come, and the answer made of them."""

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
    self.request, self._metrics = request, metrics
    self._loop, self._engine = loop, worker.engine
    self._watch = Stopwatch(metrics)
    self._queue: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
    self.num_prompt_tokens = sum(map(len, request.prompt_ids))
    self._common = {
      'id': f'{"chat" * request.chat}cmpl-{secrets.token_hex(12)}',
      'object': _object_of(request),
      'created': int(time.time()),
      'model': model,
    }
    self._ends: dict[int, Any] = {}  # updates with a completion
    self._num_choices = len(request.prompts) * request.n
    has_tokens = request.return_token_ids or request.log_probs is not None
    self._outputs = [
      _Output(self._engine.tokenizer, has_tokens)
      for _ in range(self._num_choices)
    ]
    self._worker = worker
    self.rows: list[ServedRow] = []
    if not request.options['max_length']:  # only the prompt is wanted
      for index in range(self._num_choices):
        nothing = Completion('', [], [], 'length')
        self._tell(index, Update(completion=nothing))
      return
    try:
      self.rows = [
        worker.row(
          request.prompts[prompt],
          functools.partial(self._tell, index),
          request.stream,
          request.plain,
          request.return_rounds,
          **options,
        )
        for index, (prompt, options) in enumerate(request.of_each())
      ]
    except ValueError as error:
      raise ApiError(str(error)) from error

  def _tell(self, index: int, update: Update) -> None:
    """Called by the scheduler's thread."""
    self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, update))

  async def _next(self) -> tuple[int, Update]:
    """The next update.

    Raises:
      ApiError: an output ends without a text.
    """
    index, update = await self._queue.get()
    if update.error is not None:
      raise _ended(update.error)
    ends = {index: update}
    if update.beams:
      first = index * self.request.n
      beams = enumerate(update.beams, first)
      ends = {place: Update(completion=one) for place, one in beams}
    for place, end in ends.items():
      if end.completion is not None:
        if end.completion.finish_reason == 'error':
          message = str(end.completion.error)
          raise ApiError(message, status=500, kind='server_error')
        self._ends[place] = end
        self._metrics.ended(end)
    return index, update

  @property
  def _is_over(self) -> bool:
    return len(self._ends) == self._num_choices

  async def whole(self) -> dict[str, Any]:
    """The answer when all outputs are there.

    Raises:
      ApiError: one of them ends without a text.
    """
    while not self._is_over:
      await self._next()
    self._watch.ended()
    choices = []
    for index in range(self._num_choices):
      end = self._ends[index]
      choice = await self._choice(index, end.completion.text, end)
      choice['finish_reason'] = _finish_reason(end.completion)
      choices.append(choice)
    return self._common | {'choices': choices} | self._counts()

  async def stream(self) -> AsyncIterator[bytes]:
    """The answer as events, as outputs come."""
    common = self._common
    if self.request.include_usage:
      common = common | {'usage': None}
    try:
      while not self._is_over:
        index, update = await self._next()
        self._watch.heard(update)
        if not (update.text or update.tokens or update.is_last):
          continue
        come = self._outputs[index].tokens
        choice = await self._choice(index, update.text, update)
        if update.round is not None:
          (one,) = trace.spell(
            [update.round], self._engine.tokenizer, come, update.is_last
          )
          choice['round'] = one.parts
        more: dict[str, Any] = {}
        if update.completion is not None:
          choice['finish_reason'] = _finish_reason(update.completion)
          if self._is_over and not self.request.include_usage:
            more = self._metrics_of_request()
        yield _event(common | {'choices': [choice]} | more)
      if self.request.include_usage:
        yield _event(common | {'choices': []} | self._counts())
      self._watch.ended()
    except ApiError as error:
      yield _event(error.body)
    yield b'data: [DONE]\n\n'

  async def _choice(
    self, index: int, text: str, update: Update
  ) -> dict[str, Any]:
    """One choice, or a piece of it: a text and the tokens that belong to it."""
    request, output = self.request, self._outputs[index]
    prompt = index // request.n
    is_first, output.has_begun = not output.has_begun, True
    places = output.hear(text, update)
    if request.echo and is_first:
      text = self._prompt_text(prompt) + text
    choice: dict[str, Any] = {
      'index': index,
      'text': text,
      'logprobs': None,
      'finish_reason': None,
    }
    if request.return_token_ids:
      choice['token_ids'] = [output.tokens[i] for i in places]
      if is_first:
        choice['prompt_token_ids'] = request.prompt_ids[prompt]
    if request.log_probs is not None and (
      update.is_last or not request.is_scored
    ):
      if request.is_scored:  # all of them, once
        places = range(places.stop)
      tokens = await self._tokens(index, places)
      if tokens:
        form = _of_a_chat if request.chat else _of_completions
        choice['logprobs'] = form(tokens, request.log_probs)
    if request.chat:
      role = {'role': 'assistant'} if is_first else {}
      message = {**role, 'content': choice.pop('text')}
      choice['delta' if request.stream else 'message'] = message
    return choice

  def _echoed(self, prompt: int) -> tuple[list[int], list[int]]:
    """Ids of a prompt that the client does not see, and those that it does."""
    given = self.request.prompts[prompt]
    ids = list(self.request.prompt_ids[prompt])
    bos = [] if self._engine.bos_id is None else [self._engine.bos_id]
    if isinstance(given, str):
      return bos, ids[len(bos) :]
    return ([] if list(given[:1]) == bos else bos), list(given)

  def _prompt_text(self, prompt: int) -> str:
    """The text of a prompt; that of its tokens, if they are shown as well."""
    given = self.request.prompts[prompt]
    if isinstance(given, str) and self.request.log_probs is None:
      return given
    return decode(self._engine.tokenizer, self._echoed(prompt)[1])

  async def _tokens(self, index: int, places: range) -> list[_Token]:
    """Tokens of an output, and those of the prompt before it if it is shown."""
    request, output = self.request, self._outputs[index]
    new = slice(places.start, places.stop)
    ids, pieces = output.tokens[new], output.pieces[new]
    if not request.is_scored:
      values = zip(ids, output.log_probs[new], strict=False)
      chosen = [(value, [(token, value)]) for token, value in values]
      return _named(output.before, ids, pieces, chosen, 0)
    made: list[_Token] = []
    shift = 0
    pairs = await self._scored(index, ids)
    if request.echo:
      prompt = index // request.n
      echoed = self._echoed(prompt)[1]
      before = Text(self._engine.tokenizer)
      made += _named(before, echoed, before.pieces_of(echoed), pairs, 0)
      pairs, shift = pairs[len(echoed) :], len(self._prompt_text(prompt))
    return made + _named(output.before, ids, pieces, pairs, shift)

  async def _scored(
    self, index: int, tokens: Sequence[int]
  ) -> list[tuple[float | None, Any]]:
    """Log-probabilities and likeliest tokens, from the prompt on if echoed.

    Raises:
      ApiError: others are scored for too long.
    """
    request, engine = self.request, self._engine
    prompt = index // request.n
    read, targets, skipped = [*request.prompt_ids[prompt]], [*tokens], 0
    if request.echo:
      hidden, shown = self._echoed(prompt)
      every = [*hidden, *shown, *tokens]
      read, targets, skipped = every[:1], every[1:], len(hidden)
    if not read:
      return []
    language = request.options.get('target_lang')
    run = functools.partial(
      scoring.score,
      engine.target,
      engine.params.target,
      [read],
      [targets],
      engine.languages(target_lang=language).before_output(()),
      num_top=request.log_probs or 0,
    )
    try:
      async with asyncio.timeout(self._worker.settings.max_seconds):
        async with self._worker.scoring:
          (score,) = await asyncio.to_thread(run)
    except TimeoutError:
      raise _ended('deadline') from None
    first = [(None, ())] if request.echo else []
    tops = score.top or [()] * len(targets)
    return [*first, *zip(score.log_probs, tops, strict=True)][skipped:]

  def _metrics_of_request(self) -> dict[str, Any]:
    every = [end.completion for end in self._ends.values()]
    speculates = any(len(one.stats.histogram) > 1 for one in every)
    if self.request.searches or not speculates:
      return {}
    drafted = sum(end.num_drafted for end in self._ends.values())
    return {'metrics': speculative_metrics(every, drafted)}

  def _counts(self) -> dict[str, Any]:
    inputs = self.num_prompt_tokens
    outputs = sum(len(end.completion.tokens) for end in self._ends.values())
    usage = {
      'prompt_tokens': inputs,
      'completion_tokens': outputs,
      'total_tokens': inputs + outputs,
    }
    return {'usage': usage} | self._metrics_of_request()


def _object_of(request: CompletionRequest) -> str:
  """OpenAI's word for an answer."""
  if not request.chat:
    return 'text_completion'
  return 'chat.completion.chunk' if request.stream else 'chat.completion'


def _event(body: Any) -> bytes:
  return f'data: {json.dumps(body)}\n\n'.encode()


def _finish_reason(completion: Completion) -> str:
  """OpenAI's word for why an output ended."""
  return _FINISH.get(completion.finish_reason, completion.finish_reason)


def _named(
  before: Text,
  ids: Sequence[int],
  pieces: Sequence[Piece],
  pairs: Sequence[tuple[float | None, Sequence[tuple[int, float]]]],
  shift: int,
) -> list[_Token]:
  """Tokens that follow `before`, which is longer by them then."""
  made = []
  for token, piece, (log_prob, top) in zip(ids, pieces, pairs, strict=False):
    likeliest = [
      (piece if other == token else before.adds(other), x) for other, x in top
    ]
    offset = shift + piece.end - len(piece.text)
    made.append(_Token(piece, offset, log_prob, likeliest))
    before.extend([token])
  return made


def _of_completions(tokens: Sequence[_Token], number: int) -> dict[str, Any]:
  """OpenAI's `logprobs` of completions: the token itself is among the top."""
  values = [_finite(token.log_prob) for token in tokens]
  names = [token.piece.name for token in tokens]
  top: Any = None
  if number:
    top = [
      # Of tokens with one name the likeliest counts.
      {token.piece.name: token.log_prob}
      | {piece.name: _finite(x) for piece, x in token.top[::-1]}
      if token.top
      else None
      for token in tokens
    ]
  return {
    'tokens': names,
    'token_logprobs': values,
    'top_logprobs': top,
    'text_offset': [token.offset for token in tokens],
  }


def _of_a_chat(tokens: Sequence[_Token], number: int) -> dict[str, Any]:
  """OpenAI's `logprobs` of chats."""

  def one(piece: Piece, value: float | None, **more: Any) -> dict[str, Any]:
    value = _finite(value)  # clients expect a number
    number = _LEAST if value is None else value
    return {'token': piece.name, 'logprob': number, 'bytes': piece.bytes} | more

  content = [
    one(x.piece, x.log_prob, top_logprobs=[one(*y) for y in x.top[:number]])
    for x in tokens
  ]
  return {'content': content, 'refusal': None}


def _finite(value: float | None) -> float | None:
  """A number that JSON has."""
  return value if value is not None and math.isfinite(value) else None


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
