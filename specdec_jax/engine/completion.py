"""From produced tokens to text: `Completion`, stop strings, safe prefixes."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.types import DecodeStats, FinishReason, Generation

_INCOMPLETE = '\ufffd'  # a tokenizer's sign for bytes that form no character

_REASONS = {
  FinishReason.STOP: 'stop',
  FinishReason.LENGTH: 'length',
  FinishReason.STOP_STRING: 'stop_string',
  FinishReason.INVALID: 'error',
}


@dataclasses.dataclass(frozen=True)
class CompletionStats:
  """What producing one output took.

  Attributes:
    num_tokens: tokens produced, a stop id included; of a beam search, its
      levels. The best beam has the counts of the search, the others have none.
    num_target_calls: calls of the target.
    num_tested: proposals that Algorithm 1 judges.
    num_accepted: proposals accepted.
    histogram: how many rounds accepted 0, 1, 2, ... proposals.
    num_passed: where drafts were judged as a whole: of the tested proposals,
      those that pass Algorithm 1's test; None elsewhere: `num_accepted`.
    fallback_rounds: rounds in which the drafter rested, because its proposals
      were not worth their time.
  """

  num_tokens: int = 0
  num_target_calls: int = 0
  num_tested: int = 0
  num_accepted: int = 0
  histogram: tuple[int, ...] = ()
  num_passed: int | None = None
  fallback_rounds: int = 0

  @property
  def passed(self) -> int:
    """Of the tested proposals, those that pass Algorithm 1's test."""
    return self.num_accepted if self.num_passed is None else self.num_passed

  @property
  def acceptance_rate(self) -> float | None:
    """Passed / tested proposals: alpha; None if none was tested."""
    return self.passed / self.num_tested if self.num_tested else None

  @property
  def tokens_per_call(self) -> float | None:
    """Tokens per call of the target; None if there was no call."""
    calls = self.num_target_calls
    return self.num_tokens / calls if calls else None


def total(stats: Iterable[CompletionStats]) -> CompletionStats:
  """The sum of the counts of several outputs."""
  every = list(stats)
  histograms = (one.histogram for one in every)
  as_blocks = any(one.num_passed is not None for one in every)
  return CompletionStats(
    num_tokens=sum(one.num_tokens for one in every),
    num_target_calls=sum(one.num_target_calls for one in every),
    num_tested=sum(one.num_tested for one in every),
    num_accepted=sum(one.num_accepted for one in every),
    # Histograms of different gammas have different widths.
    histogram=tuple(map(sum, itertools.zip_longest(*histograms, fillvalue=0))),
    num_passed=sum(one.passed for one in every) if as_blocks else None,
    fallback_rounds=sum(one.fallback_rounds for one in every),
  )


@dataclasses.dataclass(frozen=True)
class Completion:
  """One decoded text.

  Attributes:
    text: the text, without stop ids and stop strings.
    tokens: the produced ids, a stop id included.
    log_probs: the target's log-probability of each token, natural logarithm,
      temperature 1, nothing filtered; empty if not asked for.
    finish_reason: 'stop' (a stop id), 'length', 'stop_string', 'empty' (there
      was no input), or 'error'.
    stats: the counts.
    error: what went wrong, with finish_reason 'error'.
    lossless: whether the output has the target's own distribution; False if
      speculative decoding was lenient.
    score: of a beam: its log-probability with the length penalty; None of any
      other output. Where a search finished fewer beams than it was asked for,
      an output is empty, with the score -1e7.
    acceptance_z: how many standard deviations the acceptance rate is above
      that of the calibration's texts; None without a calibration.
    out_of_distribution: whether that is more than 3, either way: the text is of
      another kind than those of the calibration.
  """

  text: str
  tokens: list[int]
  log_probs: list[float]
  finish_reason: str
  stats: CompletionStats = CompletionStats()
  error: str | None = None
  lossless: bool = True
  score: float | None = None
  acceptance_z: float | None = None
  out_of_distribution: bool = False


def passed_over(reason: str, error: str | None = None) -> Completion:
  """The completion of a text that was not decoded."""
  return Completion('', [], [], reason, error=error)


def no_distribution(place: str = '') -> str:
  """The error message for logits that give no probabilities."""
  return (
    "The target's logits were not a distribution (NaN, infinite or all"
    f' masked){place}; check its parameters and dtype.'
  )


def from_generation(
  generation: Generation, row: int, tokenizer: Tokenizer
) -> Completion:
  """Returns one row of a `Generation` on the host as a `Completion`."""
  length = int(generation.length[row])
  tokens = [int(token) for token in generation.tokens[row, :length]]
  reason = FinishReason(int(generation.finish_reason[row]))
  stats = generation.stats
  passed = stats.num_passed
  error = score = None
  if generation.scores is not None:
    score = float(generation.scores[row])
  if reason == FinishReason.INVALID:
    error = no_distribution(f' at token {length}')
  return Completion(
    text=decode(tokenizer, without_stop_id(tokens, reason)),
    tokens=tokens,
    log_probs=[float(x) for x in generation.log_probs[row, :length]],
    finish_reason=_REASONS[reason],
    stats=CompletionStats(
      num_tokens=length if score is None else _levels(stats, row),
      num_target_calls=int(stats.num_rounds[row]),
      num_tested=int(stats.num_tested[row]),
      num_accepted=int(stats.num_accepted[row]),
      histogram=tuple(int(count) for count in stats.histogram[row]),
      num_passed=None if passed is None else int(passed[row]),
      fallback_rounds=(
        0 if stats.fallback_rounds is None else int(stats.fallback_rounds[row])
      ),
    ),
    error=error,
    score=score,
  )


def _levels(stats: DecodeStats, row: int) -> int:
  """Levels of a beam search: one a call, and one for each that held."""
  return int(stats.num_rounds[row]) + int(stats.num_accepted[row])


def without_stop_id(tokens, reason: int):
  """The tokens to turn into text, without a final stop id.

  The tokenizer does not always hide it: a stop id that the caller chose may be
  an ordinary word.
  """
  return tokens[:-1] if reason == FinishReason.STOP else tokens


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
  """The text of tokens; ids beyond the tokenizer's vocabulary give no text."""
  return tokenizer.decode(
    [token for token in tokens if token < tokenizer.vocab_size]
  )


class Text:
  """The text of an output that may still grow.

  Attributes:
    final: the text if nothing follows. It ends before the stop string that is
      completed first, so it does not depend on how many tokens arrived
      together.
    has_stop_string: whether the text holds a stop string.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    tokens: Sequence[int] | np.ndarray,
    stop_strings: Sequence[str],
  ):
    self._whole = decode(tokenizer, [int(token) for token in tokens])
    self._stop_strings = stop_strings
    begins = [(self._whole.find(string), string) for string in stop_strings]
    found = [(at + len(string), at) for at, string in begins if at >= 0]
    self.has_stop_string = bool(found)
    self.final = self._whole[: min(found)[1]] if found else self._whole

  @property
  def stable(self) -> str:
    """The part of the text that no further token can change."""
    if self.has_stop_string:
      return self.final
    text = self._whole.rstrip(_INCOMPLETE)
    held = 0
    for string in self._stop_strings:
      for size in range(1, len(string)):
        if text.endswith(string[:size]):
          held = max(held, size)
    return text[: len(text) - held]


def cut_at_stop_string(
  completion: Completion, tokenizer: Tokenizer, stop_strings: Sequence[str]
) -> Completion:
  """Ends a completion at its first stop string.

  A round may produce tokens past it, so the tokens are cut to the fewest whose
  text holds it. The counts stay: they say what was computed.
  """
  if not stop_strings:
    return completion
  tokens = completion.tokens
  if completion.finish_reason == _REASONS[FinishReason.STOP]:
    tokens = without_stop_id(tokens, FinishReason.STOP)
  output = Text(tokenizer, np.asarray(tokens), stop_strings)
  if not output.has_stop_string:
    return completion
  for length in range(1, len(tokens) + 1):
    if Text(tokenizer, tokens[:length], stop_strings).has_stop_string:
      break
  return dataclasses.replace(
    completion,
    text=output.final,
    tokens=tokens[:length],
    log_probs=completion.log_probs[:length],
    finish_reason=_REASONS[FinishReason.STOP_STRING],
  )
