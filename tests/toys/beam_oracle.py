"""Beam search as one reads it: lists, one row, no shapes; for tests.

Written from what T5X and transformers document, to compare the loop with.
"""

from collections.abc import Callable, Sequence

import numpy as np

from specdec_jax.request import BeamScoring

# A prefix, the start token and the prompt first -> log-probabilities, [V].
NextLogProbs = Callable[[tuple[int, ...]], np.ndarray]


def beam_search(
  next_log_probs: NextLogProbs,
  prompt: Sequence[int],
  *,
  width: int,
  penalty: float,
  stop_ids: Sequence[int],
  max_length: int,
  min_length: int = 0,
  scoring: BeamScoring = BeamScoring.T5X,
) -> tuple[list[tuple[float, tuple[int, ...]]], int]:
  """The best beams, and how many levels the search went.

  Args:
    next_log_probs: the model.
    prompt: tokens, the start token first.
    width: K.
    penalty: the exponent.
    stop_ids: ids that end a beam.
    max_length: tokens behind the prompt.
    min_length: tokens before a beam may end.
    scoring: whose search.

  Returns:
    At most K (score, tokens behind the prompt), from the worst to the best,
    and the number of levels.
  """
  first = len(prompt)
  is_t5x = scoring is BeamScoring.T5X

  def divisor(produced: int) -> float:
    # T5X counts the prompt, not the start token.
    base = (5 + first - 1 + produced) / 6 if is_t5x else produced
    return base**penalty

  live = [(0.0, ())]
  finished: list[tuple[float, tuple[int, ...]]] = []
  levels = 0
  while levels < max_length:
    found = []
    for score, tokens in live:
      log_probs = next_log_probs((*prompt, *tokens))
      for token, log_prob in enumerate(log_probs):
        if token in stop_ids and levels < min_length:
          continue
        found.append((score + float(log_prob), (*tokens, token)))
    found.sort(key=lambda one: -one[0])
    found = found[: width * max(2, 1 + len(stop_ids))]
    levels += 1
    live = []
    for rank, (score, tokens) in enumerate(found):
      ends = tokens[-1] in stop_ids
      if not is_t5x:
        ends = ends or levels == max_length
      if not ends:
        live.append((score, tokens))
      elif is_t5x or rank < width:
        finished.append((score / divisor(levels), tokens))
    live = live[:width]
    finished.sort(key=lambda one: -one[0])
    finished = finished[:width]
    if len(finished) == width and live:
      worst, best = finished[-1][0], live[0][0]
      # T5X: as long as it could become, and one more.
      if is_t5x and worst > best / divisor(max_length + 1):
        break
      if not is_t5x and worst >= best / divisor(levels):
        break
  return (finished or live)[::-1], levels
