"""The acceptance rate of a pair: Corollary 3.6 on the target's own tokens.

The mean of the acceptance probabilities that `overlap.decode` finds is alpha. A
drafter may have nothing to propose, as `prompt_lookup` without a match. Such
places do not count in acceptance rates; how many there are is a separate rate.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import Request
from specdec_jax.drafters.base import Drafter, check_chain
from specdec_jax.drafters.small_model_tree import tree_of
from specdec_jax.engine.completion import CompletionStats
from specdec_jax.engine.engine import Engine
from specdec_jax.measure.overlap import decode
from specdec_jax.models.base import LanguageModel
from specdec_jax.probs import SamplingConfig
from specdec_jax.tree_shape import branching
from specdec_jax.types import FinishReason

_NOT_FINITE = (
  'An acceptance probability is not finite: the logits of the target or of the'
  ' drafter are NaN or infinite. Check both checkpoints.'
)


@dataclasses.dataclass(frozen=True)
class Rate:
  """A measured mean over tokens.

  Attributes:
    mean: the mean.
    standard_error: its standard error. The independent units are texts: tokens
      of one output are not independent, nor are samples of one text. None if
      there was only one text.
    num_tokens: how many tokens were measured.
    num_outputs: how many outputs these tokens belong to.
  """

  mean: float
  standard_error: float | None
  num_tokens: int
  num_outputs: int


class Output(NamedTuple):
  """What was measured at each token of an output.

  Attributes:
    betas: float[N], acceptance probabilities.
    confidences: float[N], how sure the drafter was.
    text: identifies the text that it is of.
  """

  betas: np.ndarray
  confidences: np.ndarray
  text: Hashable


class Rates(NamedTuple):
  """Acceptance rates of a drafter, and how often it proposes.

  Attributes:
    alpha: mean beta of the tokens that had a proposal; None if no token had
      one.
    proposes: share of all tokens that had a proposal.
    overall: mean beta of all tokens, 0 where nothing was proposed. The paper's
      closed forms need this rate: they assume a proposal at every place.
    outputs: what was measured at each token; empty for a drafter that does not
      adapt.
    spread: standard deviation of texts' own rates, of infinitely many tokens.
  """

  alpha: Rate | None
  proposes: Rate
  overall: Rate
  outputs: Sequence[Output] = ()
  spread: float = 0.0


def ratio(
  hits: Sequence[float],
  tries: Sequence[float],
  texts: Sequence[Hashable] | None = None,
) -> Rate:
  """Returns sum(hits) / sum(tries), with its standard error.

  The error is that of a ratio of sums over independent texts, from the
  residuals hits - alpha * tries (Cochran, Sampling Techniques, Eq. 6.13).

  Args:
    hits: hits of each output.
    tries: tries of each output.
    texts: identifies the text of each output; None is a different text for
      each.

  Raises:
    ValueError: there is nothing to divide by.
  """
  tops = np.asarray(hits, np.float64)
  bottoms = np.asarray(tries, np.float64)
  total = bottoms.sum()
  if not total > 0:
    raise ValueError(
      'No acceptance rate without tokens: expected at least one output that'
      f' is not empty, got {len(bottoms)} outputs of {total:.0f} tokens.'
    )
  mean = tops.sum() / total
  outputs = int(np.sum(bottoms > 0))
  if texts is not None:
    numbers: dict[Hashable, int] = {}
    text = [numbers.setdefault(one, len(numbers)) for one in texts]
    tops = np.bincount(text, tops).astype(np.float64)
    bottoms = np.bincount(text, bottoms).astype(np.float64)
  count = int(np.sum(bottoms > 0))
  error = None
  if count > 1:
    spread = np.sum((tops - mean * bottoms) ** 2)
    error = float(np.sqrt(spread * count / (count - 1)) / total)
  return Rate(float(mean), error, int(total), outputs)


class RankRates(NamedTuple):
  """Acceptance of each child of a tree's root.

  Attributes:
    ranks: by rank, over all tokens; `best_tree` takes their means.
    places: of each output float[L, C], at each of its tokens; `tokens_per_call`
      of `best_tree` takes them.
  """

  ranks: list[Rate]
  places: list[np.ndarray]


class _Measured(NamedTuple):
  """An output's tokens: a row of an `Overlap` up to its end, and its text."""

  betas: np.ndarray
  proposed: np.ndarray
  confidences: np.ndarray
  text: bytes


def _outputs(
  target, drafter, params, requests, num_tokens, advance
) -> Iterator[_Measured]:
  """Decodes until there are enough tokens; arguments as of `of_outputs`."""
  program: Any = jax.jit(functools.partial(decode, target, drafter))
  count = 0
  for request in requests:
    overlap = jax.device_get(program(params, request))
    lengths = overlap.state.stats.num_rounds
    texts = _texts(request)
    for row in np.flatnonzero(lengths):
      end = lengths[row]
      one = _Measured(
        overlap.betas[row, :end],
        overlap.proposed[row, :end],
        overlap.confidences[row, :end],
        texts[row],
      )
      invalid = overlap.state.finish_reason[row] == FinishReason.INVALID
      if invalid or not np.all(np.isfinite(one.betas[one.proposed])):
        raise ValueError(_NOT_FINITE)
      yield one
    count += int(lengths.sum())
    advance(int(lengths.sum()))
    if count >= num_tokens:
      return


def of_ranks(
  target: LanguageModel,
  drafter: Drafter,
  params: PairParams,
  requests: Iterator[Request],
  num_tokens: int,
  advance: Callable[[int], None] = lambda count: None,
) -> RankRates:
  """Acceptance by rank, for `best_tree`: of each child of a tree's root.

  At every token of the target's own outputs the drafter proposes the first
  level of its tree. Arguments as of `of_outputs`; the drafter proposes a tree.

  Raises:
    ValueError: as for `of_outputs`, or the drafter proposes no tree.
  """
  if drafter.tree is None:
    raise ValueError(
      f'Acceptance by rank is of trees, and {drafter.name!r} proposes a chain:'
      ' expected a drafter such as small_model_tree(model, branching(8)).'
    )
  asked = target, drafter, params, requests, num_tokens, advance
  places, texts = [], []
  for one in _outputs(*asked):
    places.append(np.where(one.proposed[:, None], one.betas, 0.0))
    texts.append(one.text)
  tokens = [len(rows) for rows in places]
  hits = np.transpose([rows.sum(axis=0) for rows in places])
  return RankRates([ratio(rank, tokens, texts) for rank in hits], places)


def of_outputs(
  target: LanguageModel,
  drafter: Drafter,
  params: PairParams,
  requests: Iterator[Request],
  num_tokens: int,
  advance: Callable[[int], None] = lambda count: None,
) -> Rates:
  """Alpha over at least `num_tokens` tokens that the target generates.

  Args:
    target: as for `decode`.
    drafter: as for `decode`.
    params: as for `decode`.
    requests: batches of one shape; they are decoded until there are enough
      tokens. Rows with `max_length` 0 only fill up a batch.
    num_tokens: once there are so many tokens, no further batch is begun.
    advance: called with the number of tokens of each batch, for a progress bar.

  Raises:
    ValueError: nothing was generated, the target's logits were invalid, or the
      drafter proposes a tree.
  """
  check_chain(drafter, 'The acceptance rate alpha (of trees: rates_by_rank)')
  asked = target, drafter, params, requests, num_tokens, advance
  hits, squares, proposals, tokens, texts = [], [], [], [], []
  outputs: list[Output] = []
  for one in _outputs(*asked):
    betas = one.betas[one.proposed]
    hits.append(float(betas.sum()))
    squares.append(float(np.square(betas).sum()))
    proposals.append(len(betas))
    tokens.append(len(one.betas))
    texts.append(one.text)
    if drafter.adapts:
      sure = one.confidences[one.proposed]
      outputs.append(Output(betas, sure, one.text))
  return Rates(
    proposes=ratio(proposals, tokens, texts),
    overall=ratio(hits, tokens, texts),
    alpha=ratio(hits, proposals, texts) if any(proposals) else None,
    outputs=outputs,
    spread=_spread(hits, squares, proposals, texts),
  )


def _spread(
  hits: Sequence[float],
  squares: Sequence[float],
  tries: Sequence[int],
  texts: Sequence[Hashable],
) -> float:
  """Standard deviation between texts, without what chance adds to each.

  Args:
    hits: sum of the betas of each output.
    squares: sum of their squares.
    tries: their number.
    texts: the text of each output.
  """
  sums: dict[Hashable, np.ndarray] = {}
  for text, *own in zip(texts, hits, squares, tries, strict=True):
    sums[text] = sums.get(text, np.zeros(3)) + own
  several = [one for one in sums.values() if one[2] > 1]
  if len(several) < 2:
    return 0.0
  total, square, count = np.array(several).T
  rates = total / count
  mean = total.sum() / count.sum()
  seen = np.sum(count * (rates - mean) ** 2) / count.sum()
  seen *= len(count) / (len(count) - 1)
  # Of each text's mean, from how its own tokens vary; weighted likewise.
  within = np.maximum(square - count * rates**2, 0.0) / (count - 1)
  return float(np.sqrt(max(0.0, seen - within.sum() / count.sum())))


def _texts(request: Request) -> list[bytes]:
  """A key for each text of a batch: the ids that are read, without padding."""
  inputs = np.asarray(request.inputs)
  # Padding, too, may stand inside a text; what follows the text does not count.
  ends = [np.flatnonzero(row != request.pad_id)[-1:] for row in inputs]
  texts = [
    row[: 1 + end.item() if end.size else 0].tobytes()
    for row, end in zip(inputs, ends, strict=True)
  ]
  if request.prompt is None:
    return texts
  lengths = np.asarray(request.prompt_length)
  rows = zip(np.asarray(request.prompt), lengths, strict=True)
  prompts = [row[:length].tobytes() for row, length in rows]
  return [b'|'.join(both) for both in zip(texts, prompts, strict=True)]


@dataclasses.dataclass(frozen=True)
class Workload:
  """An engine, and the texts to measure its acceptance rates with.

  Attributes:
    engine: an engine with a drafter.
    texts: at least one text, as `read_prompts` returns them.
    sampling: sampling of both models.
    num_tokens: once there are so many tokens, no further batch is begun.
    batch_size: texts decoded together.
    seed: seed of the samples.
    lenience: l of Appendix A.5.
    truncate: whether a text too long for the engine is cut; otherwise it is an
      error.
  """

  engine: Engine
  texts: Sequence[str]
  sampling: SamplingConfig
  num_tokens: int
  batch_size: int
  seed: int
  lenience: float = 1.0
  truncate: bool = False

  def _batches(self) -> Iterator[tuple[Sequence[str], dict[str, Any]]]:
    """Yields batches of texts, and the engine's options for them.

    Above temperature 0 the texts are repeated forever, each time with other
    example ids.
    """
    number = 0
    while True:
      for start in range(0, len(self.texts), self.batch_size):
        part = self.texts[start : start + self.batch_size]
        yield (
          part,
          {
            **dataclasses.asdict(self.sampling),
            'seed': self.seed,
            'example_ids': range(number, number + len(part)),
            'lenience': self.lenience,
            'on_too_long': 'truncate' if self.truncate else 'error',
          },
        )
        number += len(part)
      if self.sampling.greedy:
        return

  def requests(self, gamma: int) -> Iterator[Request]:
    """Batches of the texts; above temperature 0 without an end."""
    for part, options in self._batches():
      yield self.engine.request(part, gamma=gamma, **options)

  def rates(self, advance: Callable[[int], None]) -> Rates:
    """Corollary 3.6 on the target's own tokens, whatever the lenience.

    Args:
      advance: called with the number of tokens of each batch.

    Raises:
      ValueError: as for `Engine.request` and `of_outputs`.
    """
    return of_outputs(*self._of_engine(advance))

  def rates_by_rank(
    self, advance: Callable[[int], None], ranks: int | None = None
  ) -> RankRates:
    """`of_ranks` on the target's own tokens.

    Args:
      advance: called with the number of tokens of each batch.
      ranks: so many tokens for each place, where the drafter is a small model;
        None is the first level of the drafter's own tree.

    Raises:
      ValueError: as for `Engine.request` and `of_ranks`.
    """
    target, drafter, params, requests, *rest = self._of_engine(advance)
    if ranks is not None:
      shape = branching(ranks)
      drafter = tree_of(drafter, shape)
      requests = (
        request.replace(tree=shape, verification=decode_state.TOKEN)
        for request in requests
      )
    return of_ranks(target, drafter, params, requests, *rest)

  def _of_engine(self, advance: Callable[[int], None]):
    """What `of_outputs` and `of_ranks` take."""
    engine = self.engine
    return (
      engine.target,
      engine.drafter,
      engine.params,
      self.requests(1),
      self.num_tokens,
      advance,
    )

  def real_runs(self) -> list[CompletionStats]:
    """Counts of each output of the speculative loop, by Algorithm 1."""
    done: list[CompletionStats] = []
    for part, options in self._batches():
      found = self.engine.generate(
        part,
        batch_size=len(part),
        verification=decode_state.TOKEN,
        **options,
      )
      done += [one.stats for one in found]
      if sum(stats.num_tokens for stats in done) >= self.num_tokens:
        break
    return done
