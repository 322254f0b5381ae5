"""Acceptance rates of a pair, by Corollary 3.6.

The target decodes; at each step the drafter proposes a token for the same
position, and the overlap of both distributions, sum of min, is the probability
that the proposal would have been accepted (beta). The mean of beta is alpha. No
proposal is ever used, so that all drafters are measured over exactly the same
prefixes. A drafter may have nothing to propose, as `prompt_lookup` without a
match. Such positions do not count in alpha; the share of positions with a
proposal is reported beside it.
"""

import dataclasses
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console

from specdec_jax import analysis, probs
from specdec_jax.checks.fields import Bound, Checked, check_choice, unexpected
from specdec_jax.decoding import speculative
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import DecodeState
from specdec_jax.drafters.base import Drafter, check_chain
from specdec_jax.engine.engine import Engine
from specdec_jax.measure.calls import Advance, Pair
from specdec_jax.models.base import LanguageModel
from specdec_jax.paper import printed
from specdec_jax.report import Column, Record, Table, bar, record
from specdec_jax.request import Request
from specdec_jax.text.tasks import PROMPTS_SPLIT, LocalTask, read_prompts
from specdec_jax.types import Amount, FinishReason, Positive, Verdict
from specdec_jax.verify import check_lenience, near_argmax

_NO_PROPOSAL = -1.0  # the beta of a position without a proposal
_MOST_GAMMA = 16  # rounds are predicted up to this gamma
Values = Sequence[float]


class Rate(NamedTuple):
  """A measured mean over tokens.

  Attributes:
    mean: the sum over all tokens, divided by their number.
    standard_error: the standard error of the mean. Texts are its independent
      units, because tokens of one output are not independent, nor are samples
      of one text. None if there was only one text.
    num_tokens: number of tokens that the mean is over.
    num_outputs: number of outputs that these tokens belong to.
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
      closed forms need this rate: they assume a proposal at every position.
    rounds: expected rounds per token with gamma 0, 1, ..., see
      `analysis.expected_rounds`.
  """

  alpha: Rate | None
  proposes: Rate
  overall: Rate
  rounds: Sequence[Rate]

  def as_record(self, rate: Rate | None) -> dict[str, Any]:
    """Returns a rate, and numbers to choose gamma by, as JSON values."""
    return {
      'alpha': rate and rate.mean,
      'standard_error': rate and rate.standard_error,
      'proposes': self.proposes.mean,
      'num_tokens': self.proposes.num_tokens,
      'num_outputs': self.proposes.num_outputs,
      'rounds': [rounds.mean for rounds in self.rounds],
      'rounds_errors': [rounds.standard_error for rounds in self.rounds],
    }


def ratio(
  hits: Values, tries: Values, texts: Sequence[Any] | None = None
) -> Rate:
  """Returns sum(hits) / sum(tries), with its standard error.

  The error is that of a ratio of sums over independent texts, from the
  residuals hits - alpha * tries (Cochran, Sampling Techniques, Eq. 6.13).

  Args:
    hits: a number for each output, such as its accepted proposals.
    tries: a number for each output, such as its tested proposals.
    texts: identifies the text of each output; None means that no two outputs
      have the same text.

  Raises:
    ValueError: the sum of `tries` is 0.
  """
  tops = np.asarray(hits, np.float64)
  bottoms = np.asarray(tries, np.float64)
  total = bottoms.sum()
  if not total > 0:
    got = f'{len(bottoms)} outputs of {total:.0f} tokens'
    raise unexpected('alpha', 'an output that is not empty', got)
  mean = tops.sum() / total
  outputs = int(np.sum(bottoms > 0))
  if texts is not None:
    numbers: dict[Any, int] = {}
    text = [numbers.setdefault(name, len(numbers)) for name in texts]
    tops, bottoms = np.bincount(text, tops), np.bincount(text, bottoms)
  count = int(np.sum(bottoms > 0))
  error = None
  if count > 1:
    spread = np.sum((tops - mean * bottoms) ** 2)
    error = float(np.sqrt(spread * count / (count - 1)) / total)
  return Rate(float(mean), error, int(total), outputs)


class Overlap(NamedTuple):
  """A plain decoding, and the beta of a drafter at each of its tokens.

  Attributes:
    state: the last state of the decoding loop.
    betas: float32[B, L], acceptance probability at each produced token, or
      `_NO_PROPOSAL`; meaningless past a row's end.
  """

  state: DecodeState
  betas: jax.Array


def decode(
  target: LanguageModel, drafter: Drafter, params: PairParams, request: Request
) -> Overlap:
  """Decodes plainly and records beta at every token.

  Args:
    target: the model that decodes.
    drafter: any drafter; it proposes one token per step.
    params: the parameters of target and drafter.
    request: a request with gamma 1.
  """
  state = speculative.start(target, drafter, params, request)
  first = Overlap(state, jnp.zeros((len(state.length), request.slots)))
  step = functools.partial(_step, target, drafter, params, request)
  return lax.while_loop(lambda carry: jnp.any(carry.state.running), step, first)


def _step(target, drafter, params, request, carry: Overlap) -> Overlap:
  """Takes a step of the plain loop; a proposal is judged, but not used."""
  state = carry.state
  context = speculative.context_of(target, params, request, state)
  draft, drafter_state = drafter.propose(
    params.draft, state.drafter_state, context
  )
  betas = []

  def judge(plain, nothing, logits, keys):
    target_probs = probs.standardise_batch(logits, plain.sampling)[:, 0]
    betas.append(_beta(request, draft, logits, target_probs))
    resample_keys = jax.vmap(probs.resample_key)(keys)
    tokens = jax.vmap(probs.sample)(target_probs, resample_keys)
    return Verdict(nothing.length, tokens)

  plain = request.with_drafting(gamma=0)
  state = state.replace(drafter_state=drafter_state)
  after, _ = speculative.step(target, drafter, params, plain, state, judge)
  # Each round makes one token, so the number of rounds is the token's position
  # in the output, without the prompt. A finished row writes after its last
  # token, or past the array, which drops the value.
  place = jnp.arange(len(state.length)), state.stats.num_rounds
  beta = jnp.where(draft.length > 0, betas[0], _NO_PROPOSAL)
  return Overlap(after, carry.betas.at[place].set(beta, mode='drop'))


def _beta(request, draft, logits, target_probs):
  """Returns the acceptance probability of each first proposal, float32[B]."""
  proposed = draft.tokens[:, :1]
  lenience = 1.0 if request.lenience is None else request.lenience
  if draft.probs is None:
    beta = jnp.take_along_axis(target_probs, proposed, axis=1)[:, 0]
    beta = jnp.minimum(beta / lenience, 1.0)
  else:
    rows = draft.probs[:, 0]
    beta = analysis.acceptance_prob(target_probs, rows, lenience)
  if request.lenience is None:
    return beta
  near = near_argmax(proposed, logits, request.lenience)[:, 0]
  return jnp.where(request.sampling.temperature == 0, near, beta)


# A batch to decode: its texts, which identify its outputs, and its request.
Batch = tuple[Sequence[Any], Request]


def of_outputs(
  pair: Pair,
  batches: Iterable[Batch],
  num_tokens: int,
  advance: Advance = lambda count: None,
  until: float = math.inf,
  most_gamma: int = _MOST_GAMMA,
) -> Rates:
  """Measures alpha over at least `num_tokens` tokens that the target generates.

  Args:
    pair: target and drafter; the drafter must propose a chain of tokens.
    batches: batches of one shape; they are decoded until there are enough
      tokens.
    num_tokens: once there are so many tokens, no further batch is begun.
    advance: called with the number of tokens of each batch, for a progress bar.
    until: no further batch is begun after this time (`time.monotonic()`).
    most_gamma: the largest gamma for which rounds are predicted.

  Raises:
    ValueError: nothing was generated, the target's logits were invalid, or the
      drafter proposes a tree.
  """
  drafter = pair.drafter
  assert drafter is not None
  check_chain(drafter, 'The acceptance rate alpha')
  program = jax.jit(functools.partial(decode, pair.target, drafter))
  outputs: list[tuple[Any, np.ndarray]] = []
  count = 0
  for texts, request in batches:
    overlap = jax.device_get(program(pair.params, request))
    ends = np.asarray(overlap.state.stats.num_rounds).tolist()
    for row, text in enumerate(texts):
      if not (end := ends[row]):
        continue
      betas = np.asarray(overlap.betas[row, :end], np.float64)
      invalid = overlap.state.finish_reason[row] == FinishReason.INVALID
      if invalid or not np.all(np.isfinite(betas)):
        expected = 'finite logits of target and drafter'
        got = 'NaN or infinite ones'
        raise unexpected('alpha', expected, got, 'Check both checkpoints.')
      outputs.append((text, betas))
    tokens = sum(ends[: len(texts)])
    count += tokens
    advance(tokens)
    if count >= num_tokens or time.monotonic() > until:
      break
  keys = [text for text, _ in outputs]
  lengths = [len(betas) for _, betas in outputs]
  proposals = [int(np.sum(betas != _NO_PROPOSAL)) for _, betas in outputs]
  # A position without a proposal counts as one whose proposal is rejected.
  chances = [np.maximum(betas, 0.0) for _, betas in outputs]
  hits = [float(betas.sum()) for betas in chances]

  def rounds(gamma: int) -> Rate:
    numbers = [analysis.expected_rounds(betas, gamma) for betas in chances]
    return ratio(numbers, lengths, keys)

  proposes, overall = (ratio(x, lengths, keys) for x in (proposals, hits))
  alpha = ratio(hits, proposals, keys) if any(proposals) else None
  return Rates(alpha, proposes, overall, [*map(rounds, range(most_gamma + 1))])


def rates(
  engine: Engine,
  texts: Sequence[str],
  temperature: float,
  num_tokens: int,
  advance: Advance,
  until: float = math.inf,
  *,
  batch_size: int = 8,
  most_gamma: int = _MOST_GAMMA,
  **options: Any,
) -> Rates:
  """Measures the acceptance rates of an engine's pair on texts.

  Args:
    engine: an engine with a drafter.
    texts: at least one text, as `read_prompts` returns them. Above temperature
      0 they are repeated, each time with other random numbers.
    temperature: temperature of both models.
    num_tokens: once there are so many tokens, no further batch is begun.
    advance: called with the number of tokens of each batch, for a progress bar.
    until: no further batch is begun after this time (`time.monotonic()`).
    batch_size: texts decoded together; no rate depends on it.
    most_gamma: the largest gamma for which rounds are predicted.
    **options: further options of `Engine.request`, such as `seed`.
  """
  options |= {'temperature': temperature}

  def batches() -> Iterator[Batch]:
    for first_id in itertools.count(step=len(texts)):
      for first in range(0, len(texts), batch_size):
        part = texts[first : first + batch_size]
        ids = range(first_id + first, first_id + first + len(part))
        yield part, engine.request(part, gamma=1, example_ids=ids, **options)
      if temperature == 0:
        return

  return of_outputs(engine, batches(), num_tokens, advance, until, most_gamma)


@dataclasses.dataclass(frozen=True)
class MeasureAlphaConfig(Checked):
  """A measurement of acceptance rates of one target with some drafters.

  Attributes:
    engines: name of a drafter in the table -> function that makes the engine of
      the target with that drafter; it is called when the drafter is measured.
    input_file: UTF-8 text, one prompt per line; or a task over local files,
      whose split 'test' is taken. If there are too few prompts for
      `num_tokens`, a temperature above 0 goes through them again, each time
      with other random numbers; greedy outputs would only repeat.
    target: name of the target, for the table.
    name: name of the record, to tell it from others in the same folder.
    truncate: whether a text longer than the engine's `max_input_len` is cut;
      otherwise it is left out. With a short `max_input_len`, a decoder-only
      target continues the beginnings of texts.
    num_tokens: number of tokens of the target to measure.
    temperatures: temperatures to measure at, each with every lenience.
    leniences: leniences to measure with, in (0, 1]; 1 is the lossless Algorithm
      1, less is lossy, as in the paper's Table 5.
    batch_size: prompts decoded together.
    seed: seed of the samples.
    output_file: path of the record, JSON; None writes no file.
    reuse: whether an existing `output_file` is shown instead of measuring. Its
      settings must be the same; that the models are the same is not checked.
    paper_target: the target of the paper's Table 3 that this target stands in
      for.
    paper_drafts: name of a drafter -> the paper's drafter that it stands in
      for; drafters that are not named have no value of the paper.

  Raises:
    ValueError: a number is too small, there is no engine, or a name is not in
      the paper's table.
  """

  engines: Annotated[Mapping[str, Callable[[], Engine]], Bound(1)]
  input_file: str | LocalTask
  target: str = 'target'
  name: str = 'alpha'
  truncate: bool = False
  num_tokens: Positive = 10_000
  temperatures: Annotated[Sequence[Amount], Bound(1)] = (0.0, 1.0)
  leniences: Sequence[float] = (1.0,)
  batch_size: Positive = 16
  seed: int = 0
  output_file: str | None = None
  reuse: bool = False
  paper_target: str | None = None
  paper_drafts: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    super().__post_init__()
    for lenience in self.leniences:
      check_lenience(lenience)
    pairs = {row[:2] for row in printed.TABLE3}
    for name, draft in self.paper_drafts.items():
      check_choice('paper_drafts', name, self.engines)
      drafts = [x for target, x in pairs if target == self.paper_target]
      check_choice(f'paper_drafts[{name!r}]', draft, drafts)

  @property
  def settings(self) -> dict[str, Any]:
    """The settings as JSON values, except the models."""
    task = self.input_file
    path = task.files[PROMPTS_SPLIT] if isinstance(task, LocalTask) else task
    names = 'target', 'truncate', 'num_tokens', 'batch_size', 'seed'
    return {name: getattr(self, name) for name in names} | {
      'drafts': list(self.engines),
      'input_file': os.fspath(path),
      'temperatures': list(self.temperatures),
      'leniences': list(self.leniences),
    }


def measure_alpha(
  config: MeasureAlphaConfig, console: Console | None = None
) -> Record:
  """Measures alpha at every temperature; prints rows as in Table 3.

  Returns:
    The record. Each of its rows has 'target', 'draft', 'temperature' and
    'lenience'; 'alpha' by Corollary 3.6 and its 'standard_error', both None if
    nothing was proposed; 'proposes', the share of tokens that had a proposal;
    'num_tokens' and 'num_outputs', which were measured; and 'paper', the target
    and draft of the row of the paper's table, or None.

  Raises:
    ValueError: no prompt can be decoded, the models are broken, or a record to
      be shown has other settings.
  """
  console = record.begin(console, config.output_file, config.input_file)
  if config.reuse:
    done = record.earlier(config.output_file, 'alpha', config.settings)
    if done is not None:
      console.print(table(done))
      return done
  settings = len(config.temperatures) * len(config.leniences)
  steps = len(config.engines) * settings * config.num_tokens
  with bar(console, 'Tokens', steps) as advance:
    rows = [row for x in config.engines for row in _rows(config, x, advance)]
  done = record.new('alpha', {'settings': config.settings, 'rows': rows})
  record.finish(config.output_file, console, done, table(done))
  return done


def _rows(
  config: MeasureAlphaConfig, name: str, advance: Advance
) -> Iterator[Record]:
  """Measures one drafter; yields its rows of the record."""
  engine = config.engines[name]()
  limit = None if config.truncate else engine.config.max_input_len
  texts = read_prompts(config.input_file, engine.num_input_tokens, limit)
  draft = config.paper_drafts.get(name)
  settings = itertools.product(config.temperatures, config.leniences)
  for temperature, lenience in settings:
    measured = rates(
      engine,
      texts,
      temperature,
      config.num_tokens,
      advance,
      lenience=lenience,
      batch_size=config.batch_size,
      seed=config.seed,
      on_too_long='truncate' if config.truncate else 'error',
    )
    yield {
      'target': config.target,
      'draft': name,
      'fingerprints': dict(engine.fingerprints),
      'temperature': temperature,
      'lenience': lenience,
      **measured.as_record(measured.alpha),
      'paper': None if draft is None else [config.paper_target, draft],
    }


def table(measured: Record) -> Table:
  """Returns a table with rows as in the paper's Table 3 and standard errors."""

  def alpha(row: Record) -> str | None:
    if row['alpha'] is None:
      return None
    error = row['standard_error']  # None if there was only one text
    return f'{row["alpha"]:.3f}' + ('' if error is None else f' ± {error:.3f}')

  return Table.from_records(
    'Acceptance rates (Corollary 3.6)',
    {
      'target': 'target',
      'draft': 'draft',
      Column('T', 'g'): 'temperature',
      Column('lenience', 'g'): 'lenience',
      'alpha': alpha,
      Column('proposes', '.3f'): 'proposes',
      Column('tokens', ','): 'num_tokens',
    },
    measured['rows'],
    [
      'alpha: of proposals; proposes: tokens with a proposal, of all. Below'
      ' lenience 1 outputs are lossy.'
    ],
  )
