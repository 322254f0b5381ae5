"""Turns produced tokens into text: completions, stop strings, streamed text."""

import copy
import dataclasses
import itertools
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from specdec_jax.engine.padding import Ids
from specdec_jax.engine.scoring import Top
from specdec_jax.text.sentences import Sentences
from specdec_jax.text.tokenizer import Vocabulary
from specdec_jax.types import FinishReason, Generation

_INCOMPLETE = '\ufffd'  # tokenizers write this for incomplete characters

_REASONS = {reason: reason.name.lower() for reason in FinishReason}
_REASONS[FinishReason.INVALID] = 'error'
# If a sentence of a text ended for one of these reasons, the whole text has the
# first such reason in this order.
_FIRST_REASONS = 'error', 'rules', 'length'


@dataclasses.dataclass(frozen=True)
class CompletionStats:
  """The counts of the calls and proposals that one output took.

  Attributes:
    num_tokens: tokens produced, a stop id included. For a beam search, the
      number of its levels; its best beam has all counts, other beams have 0.
    num_target_calls: calls of the target.
    num_tested: proposals that Algorithm 1 judges.
    num_accepted: proposals accepted.
    histogram: how many rounds accepted 0, 1, 2, ... proposals.
    num_passed: of the tested proposals, those that pass Algorithm 1's test;
      more than `num_accepted` only where drafts are judged as a whole.
    fallback_rounds: rounds in which the drafter rested, because its proposals
      were not worth their time.
    num_drafted: proposals of all drafts, without those beyond the output's
      length limit.

  Examples:
    >>> stats = sd.CompletionStats(
    ...   num_tokens=5, num_target_calls=2, num_tested=4, num_passed=3
    ... )
    >>> stats.acceptance_rate, stats.tokens_per_call
    (0.75, 2.5)
  """

  num_tokens: int = 0
  num_target_calls: int = 0
  num_tested: int = 0
  num_accepted: int = 0
  histogram: tuple[int, ...] = ()
  num_passed: int = 0
  fallback_rounds: int = 0
  num_drafted: int = 0

  @property
  def acceptance_rate(self) -> float | None:
    """Alpha, passed / tested proposals; None if none was tested."""
    return self.num_passed / self.num_tested if self.num_tested else None

  @property
  def tokens_per_call(self) -> float | None:
    """Tokens per call of the target; None if there was no call."""
    calls = self.num_target_calls
    return self.num_tokens / calls if calls else None


def total(stats: Iterable[CompletionStats]) -> CompletionStats:
  """Returns the sum of the counts of several outputs."""
  parts = [dict(vars(part)) for part in stats]
  # Histograms of different gammas have different widths.
  histograms = [part.pop('histogram') for part in parts]
  columns = itertools.zip_longest(*histograms, fillvalue=0)
  names = parts[0] if parts else ()
  sums = {name: sum(part[name] for part in parts) for name in names}
  return CompletionStats(histogram=tuple(map(sum, columns)), **sums)


@dataclasses.dataclass(frozen=True)
class Completion:
  """One decoded text.

  Attributes:
    text: the text, without stop ids and stop strings.
    tokens: the produced ids, a stop id included.
    log_probs: the target's log-probability of each token, natural logarithm,
      temperature 1, nothing filtered; empty if not asked for.
    finish_reason: 'stop' (a stop id), 'length', 'stop_string', 'empty' (there
      was no input), 'rules' (the rules on tokens allowed no further token), or
      'error'.
    stats: the counts of calls and proposals.
    error: what went wrong, if finish_reason is 'error'.
    lossless: whether the output has the target's own distribution; False if
      speculative decoding was lenient.
    score: for a beam, its log-probability with the length penalty; None for
      other outputs. If a search finishes fewer beams than were asked for, the
      missing outputs are empty and have the score -1e7.
    top_log_probs: for each token the ids of the likeliest tokens at its
      position and their log-probabilities, the likeliest first; empty if not
      asked for.
    num_sentences: number of sentences of a split text, which are decoded
      separately; None if the text was not split.
    num_cut: number of sentences of a split text that were cut, because they
      were longer than the model can read.
    parts: the output texts of the sentences of a split text.

  Examples:
    >>> [done] = engine.generate(['Good morning!'])
    >>> done.text, done.finish_reason, done.lossless
    ('Guten Morgen!', 'stop', True)
    >>> sum(done.log_probs) < 0
    True
  """

  text: str
  tokens: list[int]
  log_probs: list[float]
  finish_reason: str
  stats: CompletionStats = CompletionStats()
  error: str | None = None
  lossless: bool = True
  score: float | None = None
  top_log_probs: Top = ()
  num_sentences: int | None = None
  num_cut: int = 0
  parts: Sequence[str] = ()


def passed_over(reason: str, error: str | None = None) -> Completion:
  """Returns the completion of a text that was not decoded."""
  return Completion('', [], [], reason, error=error)


def joined(sentences: Sentences, outputs: Sequence[Completion]) -> Completion:
  """Concatenates the completions of a text's sentences into one completion.

  The counts are sums over the sentences. The finish reason is 'error',
  'rules' or 'length' if that of any sentence is; otherwise it is that of the
  last sentence that is not empty.
  """
  reasons = [output.finish_reason for output in outputs]
  last = next((x for x in reversed(reasons) if x != 'empty'), 'empty')
  scores = [output.score for output in outputs if output.score is not None]
  parts = [output.text for output in outputs]
  return Completion(
    text=sentences.joined(parts),
    tokens=[token for output in outputs for token in output.tokens],
    log_probs=[value for output in outputs for value in output.log_probs],
    finish_reason=next((x for x in _FIRST_REASONS if x in reasons), last),
    stats=total(output.stats for output in outputs),
    error=next((x.error for x in outputs if x.error), None),
    lossless=all(output.lossless for output in outputs),
    score=sum(scores) if scores else None,
    top_log_probs=[top for output in outputs for top in output.top_log_probs],
    num_sentences=len(outputs),
    num_cut=sentences.num_cut,
    parts=parts,
  )


def no_distribution(place: str = '') -> str:
  """Returns the error message for logits that give no probabilities."""
  reason = f'not a distribution (NaN, infinite or all masked){place}'
  return f"The target's logits were {reason}; check its parameters and dtype."


def from_generation(
  generation: Generation, row: int, tokenizer: Vocabulary, lossless: bool
) -> Completion:
  """Converts one row of a `Generation` in host memory to a `Completion`."""
  length = int(generation.length[row])
  tokens = [int(token) for token in generation.tokens[row, :length]]
  reason = FinishReason(int(generation.finish_reason[row]))
  scores = generation.scores
  score = None if scores is None else float(scores[row])
  error = None
  if reason == FinishReason.INVALID:
    error = no_distribution(f' at token {length}')
  # The tokenizer does not hide every stop id: a caller may choose an ordinary
  # word.
  shown = tokens[:-1] if reason == FinishReason.STOP else tokens
  counts = vars(generation.stats).items()
  stats = {name: np.asarray(of[row]).tolist() for name, of in counts}
  stats['num_target_calls'] = calls = stats.pop('num_rounds')
  stats['histogram'] = tuple(stats['histogram'])
  # A beam search has a level for each call, and one for each accepted level.
  levels = calls + stats['num_accepted']
  return Completion(
    text=decode(tokenizer, shown),
    tokens=tokens,
    log_probs=[float(x) for x in generation.log_probs[row, :length]],
    finish_reason=_REASONS[reason],
    stats=CompletionStats(length if score is None else levels, **stats),
    error=error,
    lossless=lossless,
    score=score,
  )


def decode(tokenizer: Vocabulary, tokens: Ids) -> str:
  """Returns the text of tokens; ids outside the vocabulary are ignored."""
  known = [token for token in tokens if token < tokenizer.vocab_size]
  return tokenizer.decode(known)


class Piece(NamedTuple):
  """The text that one token adds to an output.

  Attributes:
    text: the added text. If tokens share a character, the last one adds it.
    end: the position in the whole text at which the token ends.
    part: the bytes of a token that is only a part of a character; else empty.
  """

  text: str
  end: int
  part: bytes = b''

  @property
  def name(self) -> str:
    """The text; for a part of a character 'bytes:' and its bytes in hex."""
    if not self.part:
      return self.text
    return 'bytes:' + ''.join(f'\\x{byte:02x}' for byte in self.part)

  @property
  def bytes(self) -> list[int]:
    """The bytes of the token, in UTF-8."""
    return list(self.part or self.text.encode())


class Text:
  """The text of an output while its tokens arrive.

  Further tokens may change the text of the last tokens: bytes become a
  character, or a run of bytes becomes several U+FFFD while its last character
  is incomplete. Text is stable if one more byte would not change it. Only
  tokens after the last point at which the whole text was stable are decoded,
  so the work is linear in the number of tokens.

  Attributes:
    whole: the text of the tokens so far.
    stop_end: where the first stop string ends in `whole`; None if it has none.
      Only stable text is searched, so it does not matter how many tokens arrive
      together.
  """

  def __init__(
    self, tokenizer: Vocabulary, stops: Sequence[str] = (), min_length: int = 0
  ):
    """Starts with no tokens and an empty text.

    Args:
      tokenizer: the vocabulary that decodes the tokens.
      stops: strings that end the output.
      min_length: a stop string counts only if it ends after so many tokens.
    """
    self._tokenizer = tokenizer
    self._stop_strings, self._min_length = stops, min_length
    # The token of a character's last byte. No vocabulary has a token for the
    # whole character.
    self._byte = tokenizer.encode('\U0010ffff')[-1:]
    # The tokens before `_open`. Both are decoded together, so that the text of
    # `_open` keeps its first blank.
    self._context: list[int] = []
    self._open: list[int] = []  # the tokens whose text may still change
    self._settled = self._stable = self.whole = ''
    self._num_tokens = self._searched = self._stop_begin = 0
    self.stop_end: int | None = None

  def extend(self, tokens: Ids | np.ndarray) -> None:
    """Appends further tokens."""
    ids = [int(token) for token in tokens]
    first = max(self._min_length - self._num_tokens, 0)
    for part in filter(None, (ids[:first], ids[first:])):
      self._read(part)
      self._num_tokens += len(part)
      self._search(self._stable)
      self._searched = len(self._stable)

  def _read(self, ids: list[int]) -> None:
    """Appends tokens; if all text is stable then, it is not decoded again."""
    begin = len(decode(self._tokenizer, self._context))
    self._open = self._open + ids
    window = self._context + self._open
    text = decode(self._tokenizer, window)
    longer = decode(self._tokenizer, window + self._byte)
    stable = os.path.commonprefix([text, longer]).rstrip(_INCOMPLETE)
    self.whole = self._settled + text[begin:]
    self._stable = self._settled + stable[begin:]
    if stable == text:
      # A tokenizer strips blanks at the beginning of a text. So some text must
      # come before the tokens that are decoded next.
      alone = decode(self._tokenizer, self._open).strip()
      self._context = self._open if alone else window
      self._open, self._settled = [], self.whole

  def _search(self, text: str) -> None:
    """Searches new text for a stop string, unless one was found before."""
    if self._num_tokens <= self._min_length or self.stop_end is not None:
      return
    ends = []
    for string in self._stop_strings:
      at = text.find(string, max(self._searched + 1 - len(string), 0))
      if at >= 0:
        ends.append((at + len(string), at))
    self.stop_end, self._stop_begin = min(ends, default=(None, 0))

  def pieces_of(self, tokens: Ids, is_end: bool = True) -> list[Piece]:
    """Returns the pieces that further tokens would add, without adding them.

    The first piece also has the text of earlier tokens that was not stable.

    Args:
      tokens: the further tokens.
      is_end: whether no tokens follow. Otherwise the last tokens have no piece
        while their text may still change.
    """
    longer, pieces = copy.copy(self), list[Piece]()
    unspelled: list[tuple[int, str]] = []  # (token, whole text up to its end)
    begin = len(self._settled)  # the text of the next piece begins here
    for count, token in enumerate(tokens, 1):
      longer.extend([token])
      unspelled.append((token, longer.whole))
      if longer._open and not (is_end and count == len(tokens)):
        continue
      shared: list[int] = []
      for each, text in unspelled:
        shared.append(each)
        if len(text) >= begin and longer.whole.startswith(text):
          pieces += self._pieces(shared, text, begin)
          begin, shared = len(text), []
      unspelled = []
    return pieces

  def _pieces(self, tokens: list[int], text: str, begin: int) -> list[Piece]:
    """Returns the pieces of tokens that share the text from `begin` on."""
    added, parts = text[begin:], [b''] * len(tokens)
    if len(tokens) > 1:
      read = [_bytes_of(self._tokenizer, token) for token in tokens]
      if b''.join(read) == added.encode():  # all bytes belong to characters
        parts = read
    *first, last = parts
    pieces = [Piece('', begin, part) for part in first]
    return [*pieces, Piece(added, len(text), last)]

  def adds(self, token: int) -> Piece:
    """Returns the piece that one more token would add to `whole`."""
    longer = copy.copy(self)
    longer.extend([token])
    whole = longer.whole
    # The token may also complete an earlier character.
    is_part = whole.endswith(_INCOMPLETE) or not whole.startswith(self.whole)
    part = _bytes_of(self._tokenizer, token) if is_part else b''
    return Piece(whole[len(self.whole) :], len(whole), part)

  @property
  def ready(self) -> str:
    """The part of the text that later tokens can neither change nor cut."""
    if self.stop_end is not None:
      return self.whole[: self._stop_begin]
    held = 0
    for string in self._stop_strings:
      for size in range(held + 1, len(string)):
        if self._stable.endswith(string[:size]):
          held = size
    return self._stable[: len(self._stable) - held]

  def end(self) -> str:
    """Returns the final text, cut before the first stop string."""
    self._search(self.whole)
    return self.whole if self.stop_end is None else self.ready

  def cut(self, completion: Completion) -> Completion:
    """Cuts a completion at its first stop string, if it has one.

    The completion's tokens must be those that `extend` got. A round may produce
    tokens after the stop string; the completion keeps only the first tokens
    whose text contains the whole stop string. Its counts do not change, because
    they say what was computed.
    """
    text = self.end()
    if self.stop_end is None:
      return completion
    shown, length = Text(self._tokenizer), 0
    while not shown.whole.startswith(self.whole[: self.stop_end]):
      shown.extend(completion.tokens[length : length + 1])
      length += 1
    return dataclasses.replace(
      completion,
      text=text,
      tokens=completion.tokens[:length],
      log_probs=completion.log_probs[:length],
      finish_reason=_REASONS[FinishReason.STOP_STRING],
    )


def pieces_of(completion: Completion, tokenizer: Vocabulary) -> list[Piece]:
  """Returns the piece of each token; together they are the completion's text.

  A stop id adds no text, and neither do tokens after a stop string.
  """
  size, tokens = len(completion.text), completion.tokens
  has_stop_id = completion.finish_reason == _REASONS[FinishReason.STOP]
  pieces = Text(tokenizer).pieces_of(tokens[: len(tokens) - has_stop_id])
  for number, (text, end, _) in enumerate(pieces):
    if end + (not text) > size:
      left = max(size - end + len(text), 0)
      pieces[number] = Piece(text[:left], min(end, size))
  return pieces + [Piece('', size)] * has_stop_id


def _bytes_of(tokenizer: Vocabulary, token: int) -> bytes:
  """Returns the bytes of a token that is a part of a character."""
  # A special token adds no bytes.
  return tokenizer.bytes_of(token) if decode(tokenizer, [token]) else b''
