"""A batch of texts on its way through an engine: ids, request, results."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.checks.fields import is_a, shortened
from specdec_jax.decoding import tree_round
from specdec_jax.decoding.beams import BeamSettings
from specdec_jax.decoding.fallback import Fallback
from specdec_jax.decoding.state import (
  BLOCK,
  TOKEN,
  Request,
  example_keys,
  new_request,
)
from specdec_jax.engine.completion import (
  Completion,
  Text,
  cut_at_stop_string,
  from_generation,
  passed_over,
)
from specdec_jax.engine.languages import languages_of
from specdec_jax.engine.monitor import Usual
from specdec_jax.engine.options import Options
from specdec_jax.engine.padding import (
  SMALLEST_INPUT,
  SMALLEST_PROMPT,
  next_power_of_two,
  padded,
  padded_rows,
  rounded_up,
)
from specdec_jax.models.base import PAD_ID, START_ID
from specdec_jax.probs import SamplingConfig
from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.tree_shape import TreeShape
from specdec_jax.types import FinishReason, Generation, LengthRule

STOP_STRING_ROUNDS = 4  # rounds after which the host looks for a stop string


class Limits(NamedTuple):
  """What is the same for all texts of an engine.

  Attributes:
    max_input_len: tokens that an input may have, its end included.
    max_decode_len: tokens that an output may have, its end included.
    vocab_size: ids of the network; ids past the tokenizer's have no text.
    has_encoder: if False, the decoder begins with the text itself.
    bos_id: the id put in front of each text that is read; None is none.
    batch_multiple: the number of rows is rounded up to a multiple of this.
    usual: the acceptance of a calibration's texts; None is unknown.
    tree: the tree that the drafter proposes; None is a chain.
    start_id: with an encoder, what its decoder begins with.
    pad_id: with an encoder, what its inputs are padded with.
    ends_inputs: with an encoder, whether texts end with the end of sequence.
  """

  max_input_len: int
  max_decode_len: int
  vocab_size: int
  has_encoder: bool = True
  bos_id: int | None = None
  batch_multiple: int = 1
  usual: Usual | None = None
  tree: TreeShape | None = None
  start_id: int = START_ID
  pad_id: int = PAD_ID
  ends_inputs: bool = True

  def around(self, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids before and after a text as the target reads it.

    An encoder's text ends with the end of sequence, if it does in its family. A
    decoder's does not: the decoder continues the text.
    """
    ends = self.has_encoder and self.ends_inputs
    return (
      [] if self.bos_id is None else [self.bos_id],
      [tokenizer.eos_id] if ends else [],
    )

  def bare(self, tokenizer: Tokenizer, text: str | Sequence[int]) -> list[int]:
    """The ids of a text; of given ids those between `bos_id` and an end."""
    ids = encoded(tokenizer, text)
    if isinstance(text, str):
      return ids
    if ids[-1:] == [tokenizer.eos_id]:
      del ids[-1]
    if self.bos_id is not None and ids[:1] == [self.bos_id]:
      del ids[0]
    return ids


class Ends(NamedTuple):
  """Where drafts end before gamma, and drafters rest; see `Request`."""

  rule: LengthRule | None = None
  fallback: Fallback | None = None


class RowsSoFar(NamedTuple):
  """What the host sees of a `DecodeState` between two runs of rounds.

  Attributes:
    tokens: int32[B, T + 1].
    length: int32[B].
    finish_reason: int32[B].
  """

  tokens: np.ndarray
  length: np.ndarray
  finish_reason: np.ndarray


class TextBatch:
  """One batch of texts on its way through the engine.

  Attributes:
    options: what the caller asked for.
    rows: indices of the texts that are decoded.
    request: what the loops are asked: one row for each of these texts, and
      padding rows. There is no such attribute if no text is decoded.
    passed_over: index -> completion of each text that is not decoded at all.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    limits: Limits,
    texts: Sequence[str | Sequence[int]],
    options: Options,
    gamma: int,
    ends: Ends | None = None,
  ):
    check_texts(texts)
    self.options = options
    self._tokenizer = tokenizer
    self._limits = limits
    self._num_texts = len(texts)
    self._languages = languages_of(
      tokenizer, limits.has_encoder, options.source_lang, options.target_lang
    )
    self.passed_over: dict[int, Completion] = {}
    inputs = [self._encode(i, text) for i, text in enumerate(texts)]
    self.rows = [i for i, ids in enumerate(inputs) if ids]
    if self.rows:
      self._encoded = [inputs[i] for i in self.rows]
      self._gamma, self._ends = gamma, ends or Ends()
      self.request = self.request_in(self.num_rows)

  @property
  def num_rows(self) -> int:
    """The least number of rows of the request."""
    return rounded_up(padded_rows(len(self.rows)), self.batch_multiple)

  def _encode(self, index: int, text: str | Sequence[int]) -> list[int]:
    """Ids as the model reads them; empty if the text is not to be decoded."""
    tokenizer, limits = self._tokenizer, self._limits
    limit = limits.max_input_len
    try:
      ids = limits.bare(tokenizer, text)
      self._check_ids(f'Text {index}', ids)
    except ValueError as error:
      if self.options.on_too_long != 'report':
        raise
      self.passed_over[index] = passed_over('error', str(error))
      return []
    first, last = limits.around(tokenizer)
    if not ids and not first:
      self.passed_over[index] = passed_over('empty')
      return []
    first = [*first, *self._languages.before_text(ids)]
    room = limit - len(first) - len(last)
    if len(ids) > room and self.options.on_too_long != 'truncate':
      message = (
        f'Text {index} has {len(ids) + limit - room} tokens (its'
        f' {"end" if last else "start"} included), more than'
        f' max_input_len = {limit}. Shorten it, raise max_input_len, or set'
        " on_too_long='truncate'."
      )
      if self.options.on_too_long == 'error':
        raise ValueError(message)
      self.passed_over[index] = passed_over('error', message)
      return []
    return [*first, *ids[:room], *last]

  def _check_ids(self, what: str, ids: Sequence[int]) -> None:
    """Raises ValueError for an id that is outside the vocabulary."""
    size = self._limits.vocab_size
    for token in ids:
      if not 0 <= token < size:
        raise ValueError(
          f'{what} holds {shortened(token)}, which is outside the vocabulary of'
          f' {size}.'
        )

  def _prompts(self, encoded) -> list[list[int]] | None:
    """Ids that each decoder row begins with; None is only the start token."""
    prompts = self.options.prompts
    if not self._limits.has_encoder:
      if prompts is not None:
        raise ValueError(
          'This model has no encoder: its texts are its prompts. Put the words'
          ' that the output is to begin with at the end of the text.'
        )
      return encoded
    languages = self._languages
    if prompts is None:
      if not languages.known:
        return None
      prompts = [()] * self._num_texts
    if len(prompts) != self._num_texts:
      raise ValueError(
        f'prompts has {len(prompts)} entries for {self._num_texts} texts.'
      )
    found = [[int(token) for token in prompts[i]] for i in self.rows]
    for i, ids in zip(self.rows, found, strict=True):
      self._check_ids(f'Prompt {i}', ids)
    first = self._limits.start_id
    return [[first, *languages.before_output(ids), *ids] for ids in found]

  def request_in(self, batch: int) -> Request:
    """The request with `batch` rows: `num_rows` or more, the rest padding."""
    limits, options = self._limits, self.options
    encoded, gamma = self._encoded, self._gamma
    # NumPy arrays: the call of a program moves them to the device together.
    prompt: Any = None
    prompt_length: Any = None
    prompts = self._prompts(encoded)
    if prompts is not None:
      # One more than a power of two: the last token is read by the first round.
      longest = max(map(len, prompts)) - 1
      # A language alone is all that most prompts of translations are.
      smallest = 1 if self._languages.known else SMALLEST_PROMPT
      width = max(smallest, next_power_of_two(longest))
      if not limits.has_encoder:  # prompts are texts, which have this limit
        width = min(width, limits.max_input_len - 1)
      prompt, prompt_length = padded(prompts, batch, 1 + width)
    inputs: Any = np.zeros((batch, 1), np.int32)
    if limits.has_encoder:
      width = max(SMALLEST_INPUT, next_power_of_two(max(map(len, encoded))))
      width = min(width, limits.max_input_len)
      inputs, _ = padded(encoded, batch, width, limits.pad_id)
    max_length = limits.max_decode_len
    if options.max_length is not None:
      if options.max_length > max_length:
        raise ValueError(
          f'max_length = {shortened(options.max_length)} is more than the'
          f" engine's max_decode_len = {max_length}."
        )
      max_length = options.max_length
    if options.min_length > max_length:
      raise ValueError(
        f'min_length = {shortened(options.min_length)} is more than max_length'
        f' = {max_length}, the most tokens of an output.'
      )
    lenience: Any = None  # its program differs from that of all numbers
    if gamma and options.lenience != 1:
      lenience = np.asarray(options.lenience, np.float32)
    budgets = np.zeros((batch,), np.int32)
    budgets[: len(encoded)] = max_length
    request = new_request(
      inputs,
      self._keys(batch),
      self._sampling(batch),
      slots=limits.max_decode_len,
      gamma=gamma,
      stop_ids=self._stop_ids(),
      min_length=options.min_length,
      max_length=budgets,
      # From all texts, including those that are not decoded.
      greedy=options.sampling.greedy,
      with_log_probs=options.log_probs,
      prompt=prompt,
      prompt_length=prompt_length,
      lenience=lenience,
      verification=self._verification,
      beams=self._beams(gamma),
      **self._ends._asdict(),
      tree=limits.tree if gamma else None,
      pad_id=limits.pad_id,
    )
    if request.tree is not None:
      tree_round.check(request, request.tree.cut(gamma))
    return request

  @property
  def _verification(self) -> str:
    # Greedy programs have no such choice: they stay the same ones.
    options = self.options
    as_blocks = options.judges_blocks and not options.sampling.greedy
    if self._limits.tree is not None and options.verification is None:
      return TOKEN  # blocks are chains
    return BLOCK if as_blocks else TOKEN

  def _beams(self, gamma: int) -> BeamSettings | None:
    settings = self.options.beam_settings(len(self._stop_ids()))
    if settings is None:
      return None
    if settings.num_candidates > self._limits.vocab_size:
      raise ValueError(
        f'num_beams = {settings.width}: a step looks at'
        f' {settings.num_candidates} tokens, the vocabulary has'
        f' {self._limits.vocab_size}. Take fewer beams.'
      )
    if settings.draft_width > self._limits.vocab_size:
      raise ValueError(
        f'draft_beams = {settings.draft_width}: the drafter looks at as many'
        f' tokens at a step, the vocabulary has {self._limits.vocab_size}. Take'
        ' fewer; twice num_beams is usual.'
      )
    # One program for all plain searches.
    return settings if gamma else settings.replace(draft_width=settings.width)

  def _keys(self, batch: int) -> jax.Array:
    ids = self.options.example_ids
    if ids is None:
      ids = range(self._num_texts)
    if len(ids) != self._num_texts:
      raise ValueError(
        f'example_ids has {len(ids)} entries for {self._num_texts} texts.'
      )
    if any(not 0 <= number < 1 << 32 for number in ids):
      raise ValueError(
        f'example_ids must lie in [0, 2**32), got {list(ids)!r}.'
      )
    chosen = np.zeros((batch,), np.uint32)
    chosen[: len(self.rows)] = [ids[i] for i in self.rows]
    return example_keys(self.options.seed, chosen)

  def _sampling(self, batch: int) -> SamplingConfig:
    sampling = self.options.sampling
    if isinstance(sampling.temperature, tuple):
      if len(sampling.temperature) != self._num_texts:
        sampling.params(self._num_texts)  # raises, naming both numbers
      rows = [sampling.temperature[i] for i in self.rows]
      rows += [0.0] * (batch - len(rows))
      sampling = dataclasses.replace(sampling, temperature=rows)
    return sampling

  def _stop_ids(self) -> list[int]:
    ids = self.options.stop_ids
    if ids is None:
      ids = [self._tokenizer.eos_id]
    self._check_ids('stop_ids', ids)
    return [int(token) for token in ids]

  def produced(self, row: int, seen: RowsSoFar) -> np.ndarray:
    """The tokens that a row has produced."""
    first: Any = self.request.prompt_length
    begin = 1 if first is None else first[row]
    return seen.tokens[row, begin : seen.length[row]]

  def with_stop_strings(
    self, reasons: np.ndarray, produced: Mapping[int, np.ndarray]
  ) -> np.ndarray:
    """Finish reasons, int32[B], after looking for stop strings.

    Args:
      reasons: int32[B], before.
      produced: row -> its tokens so far, for the rows that have a text.
    """
    reasons = np.array(reasons)
    for row, tokens in produced.items():
      if reasons[row] == FinishReason.RUNNING:
        text = Text(self._tokenizer, tokens, self.options.stop_strings)
        if text.has_stop_string:
          reasons[row] = FinishReason.STOP_STRING
    return reasons

  def parts(self, most: int) -> list['TextBatch']:
    """Batches of at most `most` of the texts each; none if none is decoded."""
    if 0 < len(self.rows) <= most:
      return [self]
    found = []
    for at in range(0, len(self.rows), most):
      part = copy.copy(self)
      part.rows = self.rows[at : at + most]
      part._encoded = self._encoded[at : at + most]
      part.request = part.request_in(part.num_rows)
      found.append(part)
    return found

  def completions(self, *parts: 'tuple[TextBatch, Generation]'):
    """Results in the order of the texts: `num_samples` of each beam search.

    Args:
      *parts: the decoded `parts`, and what came of each, on the host; none if
        no text was decoded.

    Returns:
      A list of `Completion`s.
    """
    searches = self.options.num_beams is not None
    number = self.options.num_samples if searches else 1
    found = {i: [one] * number for i, one in self.passed_over.items()}
    for part, generation in parts:
      for row, index in enumerate(part.rows):
        if searches:
          found[index] = part._beams_of(generation, row)
        else:
          found[index] = [part.completion(generation, row)]
    return [one for i in range(self._num_texts) for one in found[i]]

  def _beams_of(self, generation: Generation, row: int) -> list[Completion]:
    """The best `num_samples` beams of a row, the best one last."""
    width = self.options.num_beams or 1
    number = self.options.num_samples
    last = (row + 1) * width
    rows = range(last - number, last)
    return [from_generation(generation, i, self._tokenizer) for i in rows]

  def completion(self, generation: Generation, row: int) -> Completion:
    """The completion of one row of a `Generation` on the host."""
    one = from_generation(generation, row, self._tokenizer)
    if self.request.lenience is not None:
      one = dataclasses.replace(one, lossless=False)
    if self._limits.usual is not None and self._gamma:
      one = self._limits.usual.judged(one)
    return cut_at_stop_string(one, self._tokenizer, self.options.stop_strings)

  @property
  def batch_multiple(self) -> int:
    """`Limits.batch_multiple` of the engine."""
    return self._limits.batch_multiple


def encoded(tokenizer: Tokenizer, text: str | Sequence[int]) -> list[int]:
  """The ids of a text, or those that were given in its place.

  Raises:
    ValueError: it is neither, or a text with half a character.
  """
  check_texts([text])
  if not isinstance(text, str):
    return [int(token) for token in text]
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise ValueError(
      f'{shortened(text)} has half a character at place {error.start}, a lone'
      ' surrogate, which is no text. Read it as UTF-8, or take it out.'
    ) from error
  return tokenizer.encode(text)


def check_texts(texts: Any, name: str = 'texts') -> None:
  """Raises ValueError unless it is a sequence of strings or lists of ids."""
  expected = f'{name} must be a sequence of strings or of lists of ids'
  if isinstance(texts, str):
    raise ValueError(
      f'{name} must be a sequence of strings, got one string:'
      f' {shortened(texts)}.'
    )
  if not is_a(texts, Sequence):
    raise ValueError(f'{expected}, got {type(texts).__name__}.')
  for index, text in enumerate(texts):
    if not isinstance(text, str) and not is_a(text, Sequence[int]):
      raise ValueError(
        f'{expected}; {name[:-1]} {index} is {shortened(text)}. One text of ids'
        ' is a list such as [5, 6, 7], several are [[5, 6, 7]].'
      )
