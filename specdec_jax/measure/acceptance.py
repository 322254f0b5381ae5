"""The acceptance rate of a pair: Corollary 3.6 on the target's own tokens.

The target decodes; at each step the drafter proposes one token for the same
place, and the overlap of both distributions, sum of min, is the probability
that it would have been accepted (beta). The mean of these is alpha. No proposal
is ever used, so that all drafters are measured over exactly the same prefixes.

A drafter may have nothing to propose, as `prompt_lookup` without a match. Such
places do not count in acceptance rates; how many there are is a separate rate.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from specdec_jax import analysis, probs
from specdec_jax.decoding import speculative
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import DecodeState, Request
from specdec_jax.drafters.base import Drafter
from specdec_jax.engine.completion import CompletionStats
from specdec_jax.engine.engine import Engine
from specdec_jax.models.base import LanguageModel
from specdec_jax.probs import SamplingConfig
from specdec_jax.types import FinishReason
from specdec_jax.verify import near_argmax


@struct.dataclass
class Overlap:
  """A plain decode, and beta of its drafter at each token.

  Attributes:
    state: the state of the decode.
    betas: float32[B, L], acceptance probability at each produced token;
      meaningless past a row's end and where nothing was proposed.
    proposed: bool[B, L], whether there was a proposal.
  """

  state: DecodeState
  betas: jax.Array
  proposed: jax.Array


def decode(
  target: LanguageModel, drafter: Drafter, params: PairParams, request: Request
) -> Overlap:
  """Decodes plainly and records beta at every token.

  Args:
    target: the model that decodes.
    drafter: any drafter; it is asked for one token per step.
    params: the parameters of both.
    request: a request with gamma 1.
  """
  state = speculative.start(target, drafter, params, request)
  shape = request.inputs.shape[0], request.slots
  first = Overlap(state, jnp.zeros(shape), jnp.zeros(shape, bool))

  def body(carry):
    return _step(target, drafter, params, request, carry)

  return lax.while_loop(lambda carry: jnp.any(carry.state.running), body, first)


def _step(target, drafter, params, request, carry: Overlap) -> Overlap:
  state = carry.state
  keys = decode_state.round_keys(request, state)
  context = speculative.context_of(
    request, state.tokens, state.visible_length, keys
  )
  draft, drafter_state = drafter.propose(
    params.draft, state.drafter_state, context
  )
  cache = target.rewind(state.target_cache, state.visible_length - 1)
  logits, cache = target.extend(params.target, cache, state.last_token[:, None])
  adjusted = decode_state.forbid_early_stops(logits, request, state)
  target_probs = probs.standardise_batch(adjusted, request.sampling)[:, 0]
  beta = _beta(request, draft, adjusted, target_probs)

  tokens = jax.vmap(probs.sample)(
    target_probs, jax.vmap(probs.resample_key)(keys)
  )
  # One round per token, so the round's number is the token's place, whatever
  # the prompt is. A finished row writes past its end, or past the array.
  place = jnp.arange(beta.shape[0]), state.stats.num_rounds
  one = jnp.ones_like(tokens)
  running = state.running.astype(jnp.int32)
  after = decode_state.append(request, state, tokens[:, None], one, logits)
  stats = state.stats
  after = after.replace(
    target_cache=cache,
    drafter_state=drafter.commit(drafter_state, after.visible_length),
    stats=stats.replace(num_rounds=stats.num_rounds + running),
  )
  return Overlap(
    after,
    carry.betas.at[place].set(beta, mode='drop'),
    carry.proposed.at[place].set(draft.length > 0, mode='drop'),
  )


def _beta(request, draft, logits, target_probs):
  """Acceptance probability of each row's first proposal, float32[B]."""
  proposed = draft.tokens[:, :1]
  lenience = 1.0 if request.lenience is None else request.lenience
  if draft.probs is None:
    beta = jnp.take_along_axis(target_probs, proposed, axis=1)[:, 0]
    beta = jnp.minimum(beta / lenience, 1.0)
  else:
    rows = draft.probs[:, 0]
    beta = analysis.lenient_acceptance_prob(target_probs, rows, lenience)
  if request.lenience is None:
    return beta
  near = near_argmax(proposed, logits, request.lenience)[:, 0]
  return jnp.where(request.sampling.temperature == 0, near, beta)


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


class Rates(NamedTuple):
  """Acceptance rates of a drafter, and how often it proposes.

  Attributes:
    alpha: mean beta of the tokens that had a proposal; None if no token had
      one.
    proposes: share of all tokens that had a proposal.
    overall: mean beta of all tokens, 0 where nothing was proposed. The paper's
      closed forms need this rate: they assume a proposal at every place.
  """

  alpha: Rate | None
  proposes: Rate
  overall: Rate


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
    ValueError: nothing was generated, or the target's logits were invalid.
  """
  program: Any = jax.jit(functools.partial(decode, target, drafter))
  hits: list[float] = []
  proposals: list[int] = []
  tokens: list[int] = []
  texts: list[bytes] = []
  for request in requests:
    overlap = jax.device_get(program(params, request))
    lengths = overlap.state.stats.num_rounds
    read = _texts(request)
    for row in np.flatnonzero(lengths):
      proposed = overlap.proposed[row, : lengths[row]]
      betas = overlap.betas[row, : lengths[row]][proposed]
      invalid = overlap.state.finish_reason[row] == FinishReason.INVALID
      if invalid or not np.all(np.isfinite(betas)):
        raise ValueError(
          'An acceptance probability is not finite: the logits of the target'
          ' or of the drafter are NaN or infinite. Check both checkpoints.'
        )
      hits.append(float(betas.sum()))
      proposals.append(len(betas))
      tokens.append(int(lengths[row]))
      texts.append(read[row])
    advance(int(lengths.sum()))
    if sum(tokens) >= num_tokens:
      break
  return Rates(
    proposes=ratio(proposals, tokens, texts),
    overall=ratio(hits, tokens, texts),
    alpha=ratio(hits, proposals, texts) if any(proposals) else None,
  )


def _texts(request: Request) -> list[bytes]:
  """A key for each text of a batch: the ids that are read, without padding."""
  inputs = np.asarray(request.inputs)
  texts = [np.trim_zeros(row, 'b').tobytes() for row in inputs]
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

  def rates(self, advance: Callable[[int], None]) -> Rates:
    """Corollary 3.6 on the target's own tokens, whatever the lenience.

    Args:
      advance: called with the number of tokens of each batch.

    Raises:
      ValueError: as for `Engine.request` and `of_outputs`.
    """
    engine = self.engine
    requests = (
      engine.request(part, gamma=1, **options)
      for part, options in self._batches()
    )
    return of_outputs(
      engine.target,
      engine.drafter,
      engine.params,
      requests,
      self.num_tokens,
      advance,
    )

  def real_runs(self) -> list[CompletionStats]:
    """Counts of each output of the engine's speculative loop."""
    done: list[CompletionStats] = []
    for part, options in self._batches():
      done += [
        one.stats
        for one in self.engine.generate(part, batch_size=len(part), **options)
      ]
      if sum(stats.num_tokens for stats in done) >= self.num_tokens:
        break
    return done
