"""Makes OpenAI's `logprobs` of an output, and of an echoed prompt."""

import functools
import math
from collections.abc import Sequence
from typing import Any

from specdec_jax.engine import completion, scoring
from specdec_jax.engine.completion import Completion, Piece, Text
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.scoring import Ruled
from specdec_jax.serving.protocol import CompletionRequest
from specdec_jax.serving.turns import Turns
from specdec_jax.text.tokenizer import Vocabulary

_LEAST = -9999.0  # what OpenAI has for the logarithm of 0
# The log-probability of a token, None for the first token of a prompt; and the
# likeliest ids at its place with their log-probabilities, the likeliest first.
_LogProb = tuple[float | None, Sequence[tuple[int, float]]]


class Shown:
  """Makes the parts of an answer that stand beside the text of an output."""

  def __init__(self, request: CompletionRequest, engine: Engine, turns: Turns):
    """Takes a request, its engine, and the turns in which the target scores."""
    self._request, self._engine, self._turns = request, engine, turns
    self._codec = engine.codec

  def prompt_text(self, prompt: int) -> str:
    """Returns a prompt as it is echoed: as given, or decoded from its ids."""
    text = self._request.prompts[prompt]
    if isinstance(text, str) and self._request.num_top is None:
      return text
    return completion.decode(self._engine.tokenizer, self._echoed(prompt)[1])

  def _echoed(self, prompt: int) -> tuple[list[int], list[int]]:
    """Returns the ids of a prompt that are not echoed, and those that are."""
    text = self._request.prompts[prompt]
    bos = [] if self._codec.bos_id is None else [self._codec.bos_id]
    if isinstance(text, str):
      return bos, self._request.prompt_ids[prompt][len(bos) :]
    return ([] if text[:1] == bos else bos), list(text)

  async def log_probs(
    self, prompt: int, done: Completion, ruled: Sequence[Ruled]
  ) -> dict[str, Any] | None:
    """Returns the `logprobs` of an output; None if none are wanted.

    Args:
      prompt: the index of its prompt.
      done: the output.
      ruled: the rules on its tokens; () without an output.

    Raises:
      ApiError: the output waits too long for its turn to be scored.
    """
    request, tokenizer = self._request, self._engine.tokenizer
    if request.num_top is None:
      return None
    values: list[_LogProb] = [
      (value, [(token, value)])
      for token, value in zip(done.tokens, done.log_probs, strict=False)
    ]
    if request.is_scored:
      values = await self._scored(prompt, done.tokens, ruled)
    entries, shift = list[dict[str, Any]](), 0
    if request.echo:
      _, echo = self._echoed(prompt)
      pieces = Text(tokenizer).pieces_of(echo)
      entries = _entries(tokenizer, echo, pieces, values)
      values = values[len(echo) :]
      shift = len(self.prompt_text(prompt))
    pieces = completion.pieces_of(done, tokenizer)
    entries += _entries(tokenizer, done.tokens, pieces, values, shift)
    if not entries:
      return None
    form = _of_a_chat if request.is_chat else _of_completions
    return form(entries, request.num_top)

  async def _scored(
    self, prompt: int, tokens: Sequence[int], ruled: Sequence[Ruled]
  ) -> list[_LogProb]:
    """Returns the scores of an output, after those of an echoed prompt."""
    request, engine = self._request, self._engine
    read, targets, hidden = [*request.prompt_ids[prompt]], [*tokens], 0
    if request.echo:
      before, echo = self._echoed(prompt)
      every = [*before, *echo, *tokens]
      read, targets, hidden = every[:1], every[1:], len(before)
    if not read:
      return []
    languages = self._codec.languages(target_lang=request.target_lang)
    num_before = len(targets) - len(tokens)
    score = functools.partial(
      scoring.score,
      engine.target,
      engine.params.target,
      [read],
      [targets],
      self._codec.begin(languages),
      num_top=request.num_top or 0,
      ruled=[rules._replace(before=num_before) for rules in ruled],
    )
    [[scored]] = await self._turns.run([score])
    first: list[_LogProb] = [(None, ())] if request.echo else []
    tops = scored.top or [()] * len(targets)
    return [*first, *zip(scored.log_probs, tops, strict=True)][hidden:]


def _entries(
  tokenizer: Vocabulary,
  ids: Sequence[int],
  pieces: Sequence[Piece],
  values: Sequence[_LogProb],
  shift: int = 0,
) -> list[dict[str, Any]]:
  """Returns the tokens of a text that begins `shift` characters into an answer.

  Each has its offset in the answer, and the likeliest tokens at its place;
  tokens that a rule forbids are none of these.
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
  """Returns a token in the form of a chat; JSON has no infinite numbers."""
  if log_prob is not None and not math.isfinite(log_prob):
    log_prob = None
  return {'token': piece.name, 'logprob': log_prob, 'bytes': piece.bytes}


def _of_completions(
  entries: Sequence[dict[str, Any]], number: int
) -> dict[str, Any]:
  """Returns the `logprobs` of completions; a top includes the token itself."""
  top = [
    # If tokens have the same name, the likeliest one is shown.
    {each['token']: each['logprob'] for each in (entry, *likeliest[::-1])}
    if (likeliest := entry['top_logprobs'])
    else None
    for entry in entries
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
  """Returns the `logprobs` of chats, whose clients expect a number."""
  for entry in entries:
    entry['top_logprobs'] = entry['top_logprobs'][:number]
    del entry['offset']
    for each in (entry, *entry['top_logprobs']):
      if each['logprob'] is None:
        each['logprob'] = _LEAST
  return {'content': list(entries), 'refusal': None}
