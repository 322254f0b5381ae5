"""Makes OpenAI's answers from the outputs of a request while they grow."""

import asyncio
import dataclasses
import functools
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from specdec_jax.checks.fields import unexpected
from specdec_jax.engine import completion, trace
from specdec_jax.engine.completion import Completion
from specdec_jax.engine.long_texts import LongTexts
from specdec_jax.engine.options import Options
from specdec_jax.engine.request import Row, Update
from specdec_jax.engine.scoring import Ruled
from specdec_jax.serving import protocol
from specdec_jax.serving.log_probs import Shown
from specdec_jax.serving.metrics import Metrics
from specdec_jax.serving.protocol import (
  ApiError,
  CompletionRequest,
  Prompt,
)
from specdec_jax.serving.turns import Turns
from specdec_jax.serving.worker import Worker

_FINISH = {'stop_string': 'stop', 'empty': 'stop'}
_Updates = asyncio.Queue[tuple[int, Update]]


@dataclasses.dataclass(frozen=True)
class Service:
  """The objects that all requests of a server share.

  Attributes:
    worker: decodes.
    turns: runs scores and classifications of the target, beside the decoding.
    metrics: the counters.
    model: the name by which requests call the model.
  """

  worker: Worker
  turns: Turns
  metrics: Metrics
  model: str


class Answer:
  """Collects the outputs of one request, and makes the answer from them.

  Attributes:
    request: the request.
    rows: the rows that are to be decoded.
    num_prompt_tokens: tokens of all prompts.
  """

  def __init__(
    self,
    request: CompletionRequest,
    service: Service,
    loop: asyncio.AbstractEventLoop,
  ):
    """Makes the rows.

    Args:
      request: the request.
      service: what decodes and counts.
      loop: the event loop in which the answer is awaited.

    Raises:
      ApiError: the engine cannot decode it.
    """
    worker = service.worker
    self.request, self._service, self._engine = request, service, worker.engine
    self._begin, self._heard = time.perf_counter(), 0.0
    self._queue: _Updates = asyncio.Queue()
    self._shown = Shown(request, worker.engine, service.turns)
    self.num_prompt_tokens = sum(map(len, request.prompt_ids))
    name = 'chat.completion' if request.is_chat else 'text_completion'
    if request.is_chat and request.stream:
      name += '.chunk'
    self._common = {
      'id': f'{"chat" * request.is_chat}cmpl-{secrets.token_hex(12)}',
      'object': name,
      'created': int(time.time()),
      'model': service.model,
    }
    self._done: dict[int, Completion] = {}
    self._tokens: dict[int, list[int]] = {}  # told so far
    tell = functools.partial(_tell, loop, self._queue)
    self._long: LongTexts | None = None
    with protocol.naming_the_field(constraint=request.constraint[0]):
      inputs, options = self._inputs()
      self.rows: list[Row] = worker.rows(
        inputs,
        tell,
        request.stream,
        not request.speculative,
        request.return_rounds,
        options=options,
      )
    # A beam search gives all outputs of its row.
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
    self._long, limit = long, self._service.worker.settings.max_waiting
    if len(long.parts) > limit:
      expected = f'at most {limit} sentences (max_waiting)'
      raise unexpected('prompt', expected, len(long.parts))
    inputs = {  # samples have the same sentences
      part: protocol.encoded(engine, part, request.source_lang)[1]
      for part in {*long.parts}
    }
    return [inputs[part] for part in long.parts], long.options

  async def _next(self) -> tuple[int, Update]:
    """Returns the next update, and the index of its row.

    Raises:
      ApiError: an output ends with an error.
    """
    index, update = await self._queue.get()
    if update.error is not None:
      raise protocol.without_end(update.error)
    outputs = update.outputs[::-1]  # of beams the best one first
    for place, output in enumerate(outputs, index * len(outputs)):
      if output.finish_reason == 'error':
        raise ApiError(str(output.error), status=500)
      self._service.metrics.ended(output)
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
    self._service.metrics.end_to_end.observe(time.perf_counter() - self._begin)
    choices = [
      await self._choice(index, done.text, done)
      for index, done in sorted(self._done.items())
    ]
    return self._common | {'choices': choices} | self._usage() | self._counts()

  async def stream(self) -> AsyncIterator[bytes]:
    """Yields the answer as server-sent events while the outputs grow."""
    usage = self.request.include_usage
    common = self._common | ({'usage': None} if usage else {})
    try:
      while not self._is_over:
        index, update = await self._next()
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
      self._service.metrics.end_to_end.observe(
        time.perf_counter() - self._begin
      )
    except ApiError as error:
      yield _event(error.body)
    yield b'data: [DONE]\n\n'

  def _time(self, num_tokens: int) -> None:
    """Records how long a stream's client waited for tokens."""
    now, metrics = time.perf_counter(), self._service.metrics
    if num_tokens and self._heard:
      metrics.between_tokens.observe((now - self._heard) / num_tokens)
    elif num_tokens:
      metrics.first_token.observe(now - self._begin)
    self._heard = now if num_tokens else self._heard

  async def _choice(
    self, index: int, text: str, done: Completion | None
  ) -> dict[str, Any]:
    """Returns a choice, or a piece of it; the last piece has the tokens."""
    request, prompt = self.request, index // self.request.n
    is_first = index not in self._tokens
    choice: dict[str, Any] = {'index': index, 'text': text}
    choice |= {'logprobs': None, 'finish_reason': None}
    if done is not None:
      reason = done.finish_reason
      choice['finish_reason'] = _FINISH.get(reason, reason)
      choice['logprobs'] = await self._shown.log_probs(
        prompt, done, self._ruled(index)
      )
      if request.return_token_ids:
        choice['token_ids'] = done.tokens
        choice['prompt_token_ids'] = request.prompt_ids[prompt]
      if request.split:
        choice |= {'sentences': done.num_sentences, 'cut': done.num_cut}
    if request.echo and is_first:
      choice['text'] = self._shown.prompt_text(prompt) + text
    if request.is_chat:
      role = {'role': 'assistant'} if is_first else {}
      message = {**role, 'content': choice.pop('text')}
      choice['delta' if request.stream else 'message'] = message
    return choice

  def _ruled(self, index: int) -> Sequence[Ruled]:
    """Returns the rules by which an output is scored; () if it is not."""
    if not (self.request.is_scored and self.rows):
      return ()
    return [self.rows[index // self._per_row].ruled]

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


def _tell(
  loop: asyncio.AbstractEventLoop, queue: _Updates, index: int, update: Update
) -> None:
  """Queues an update; the thread that decodes calls it.

  It has no reference to the answer, whose rows refer to it: a cycle would keep
  a finished request until Python's garbage collector runs.
  """
  loop.call_soon_threadsafe(queue.put_nowait, (index, update))


def _event(body: Any) -> bytes:
  return f'data: {json.dumps(body)}\n\n'.encode()
