"""Acceptance rates of a pair: by Corollary 3.6, and in real runs.

The target decodes; at each step the drafter proposes one token for the same
place, and the overlap of both distributions, sum of min, is the probability
that it would have been accepted (beta). No proposal is ever used, so that all
drafters are measured over exactly the same prefixes. The mean is alpha. A
drafter may have nothing to propose, as `prompt_lookup` without a match. Such
places do not count in acceptance rates; how many there are is a separate rate.
"""

import dataclasses
import functools
import os
from collections.abc import (
  Callable,
  Hashable,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
from flax import struct
from jax import lax

from specdec_jax import analysis, probs
from specdec_jax.checks.fields import (
  check_all_at_least,
  check_at_least,
  check_choice,
  check_types,
  unexpected,
)
from specdec_jax.decoding import speculative
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import DecodeState, Request
from specdec_jax.drafters.base import Drafter, check_chain
from specdec_jax.engine.completion import CompletionStats, total
from specdec_jax.engine.engine import Engine
from specdec_jax.measure.progress import bar
from specdec_jax.measure.prompts import SPLIT, read_prompts
from specdec_jax.measure.record import Record, earlier
from specdec_jax.measure.table import Cell, Column, Table, started
from specdec_jax.models.base import LanguageModel
from specdec_jax.paper import printed
from specdec_jax.probs import SamplingConfig
from specdec_jax.text.local_tasks import LocalTask
from specdec_jax.types import Draft, FinishReason, Verdict
from specdec_jax.verify import check_lenience, near_argmax

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
  """What was measured at each token of an output that had a proposal.

  Attributes:
    betas: float[N], acceptance probabilities.
    confidences: float[N], how sure the drafter was.
    text: identifies the text that it is of.
    num_tokens: tokens of the whole output, also those without a proposal.
  """

  betas: np.ndarray
  confidences: np.ndarray
  text: Hashable
  num_tokens: int = 0


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


@struct.dataclass
class Overlap:
  """A plain decode, and beta of its drafter at each token.

  Attributes:
    state: the state of the decode.
    betas: float32[B, L], acceptance probability at each produced token;
      meaningless past a row's end and where nothing was proposed.
    proposed: bool[B, L], whether there was a proposal.
    confidences: float32[B, L], the drafter's top probability at temperature 1,
      see `drafters.length`; 0 for a drafter that does not adapt.
  """

  state: DecodeState
  betas: jax.Array
  proposed: jax.Array
  confidences: jax.Array


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
  zeros = jnp.zeros(shape)
  first = Overlap(state, zeros, jnp.zeros(shape, bool), zeros)

  def body(carry):
    return _step(target, drafter, params, request, carry)

  return lax.while_loop(lambda carry: jnp.any(carry.state.running), body, first)


def _step(target, drafter, params, request, carry: Overlap) -> Overlap:
  state = carry.state
  keys = decode_state.round_keys(request, state)
  context = speculative.context_of(
    request,
    state.tokens,
    state.visible_length,
    keys,
    features=state.features,
    target=target,
    target_params=params.target,
  )
  before = state.drafter_state
  draft, drafter_state = drafter.propose(params.draft, before, context)
  cache = target.rewind(state.target_cache, state.visible_length - 1)
  features, cache = target.extend(
    params.target, cache, state.last_token[:, None]
  )
  logits = target.head(params.target, features)
  adjusted = decode_state.forbid_early_stops(logits, request, state)
  target_probs = probs.standardise_batch(adjusted, request.sampling)[:, 0]
  beta = _beta(request, draft, adjusted, target_probs)

  tokens = jax.vmap(probs.sample)(
    target_probs, jax.vmap(probs.resample_key)(keys)
  )
  # One round per token, so the round's number is the token's place, whatever
  # the prompt is. A finished row writes past its end, or past the array.
  place = jnp.arange(beta.shape[0]), state.stats.num_rounds
  confidences = carry.confidences
  if drafter.adapts:
    sure = _confidence(drafter, params, before, context)
    confidences = confidences.at[place].set(sure, mode='drop')
  zeros = jnp.zeros_like(tokens)
  nothing = Draft(jnp.zeros((len(tokens), 0), jnp.int32), None, zeros)
  after = decode_state.append(
    request, state, nothing, Verdict(zeros, tokens), logits
  )
  after = after.replace(
    target_cache=cache,
    drafter_state=drafter.commit(drafter_state, after.visible_length),
    features=speculative.features_at(drafter, features, zeros),
  )
  return Overlap(
    after,
    carry.betas.at[place].set(beta, mode='drop'),
    carry.proposed.at[place].set(draft.length > 0, mode='drop'),
    confidences,
  )


def _confidence(drafter, params, drafter_state, context):
  """How sure the drafter is of its first proposal, whatever the sampling."""
  batch = context.length.shape[0]
  plainly = SamplingConfig(1.0).params(batch)
  context = context.replace(sampling=plainly, greedy=False)
  draft, _ = drafter.propose(params.draft, drafter_state, context)
  return jnp.max(draft.probs[:, 0], axis=-1)


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


def _outputs(
  target, drafter, params, requests, num_tokens, advance
) -> Iterator[Output]:
  """Decodes until there are enough tokens; arguments as of `of_outputs`."""
  program: Any = jax.jit(functools.partial(decode, target, drafter))
  count = 0
  for request in requests:
    overlap = jax.device_get(program(params, request))
    lengths = overlap.state.stats.num_rounds
    texts = _texts(request)
    for row in np.flatnonzero(lengths):
      end = lengths[row]
      proposed = overlap.proposed[row, :end]
      betas = overlap.betas[row, :end][proposed]
      invalid = overlap.state.finish_reason[row] == FinishReason.INVALID
      if invalid or not np.all(np.isfinite(betas)):
        raise ValueError(_NOT_FINITE)
      sure = overlap.confidences[row, :end][proposed]
      yield Output(betas, sure, texts[row], int(end))
    count += int(lengths.sum())
    advance(int(lengths.sum()))
    if count >= num_tokens:
      return


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
  check_chain(drafter, 'The acceptance rate alpha')
  outputs = [*_outputs(target, drafter, params, requests, num_tokens, advance)]
  texts = [one.text for one in outputs]
  hits = [float(one.betas.sum()) for one in outputs]
  proposals = [len(one.betas) for one in outputs]
  tokens = [one.num_tokens for one in outputs]
  return Rates(
    proposes=ratio(proposals, tokens, texts),
    overall=ratio(hits, tokens, texts),
    alpha=ratio(hits, proposals, texts) if any(proposals) else None,
    outputs=outputs if drafter.adapts else (),
    spread=_spread(outputs),
  )


def _spread(outputs: Sequence[Output]) -> float:
  """Standard deviation between texts, without what chance adds to each."""
  by_text: dict[Hashable, list[np.ndarray]] = {}
  for output in outputs:
    by_text.setdefault(output.text, []).append(output.betas)
  several = [np.concatenate(betas, dtype=float) for betas in by_text.values()]
  several = [betas for betas in several if len(betas) > 1]
  if len(several) < 2:
    return 0.0
  count = np.array([len(betas) for betas in several])
  rates = np.array([betas.mean() for betas in several])
  mean = rates @ count / count.sum()
  seen = np.sum(count * (rates - mean) ** 2) / count.sum()
  seen *= len(count) / (len(count) - 1)
  # Of each text's mean, from how its own tokens vary; weighted likewise.
  within = sum(betas.var(ddof=1) for betas in several) / count.sum()
  return float(np.sqrt(max(0.0, seen - within)))


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


def batches(
  engine: Engine,
  texts: Sequence[str],
  sampling: SamplingConfig,
  batch_size: int,
  seed: int,
  **options: Any,
) -> Iterator[tuple[Sequence[str], dict[str, Any]]]:
  """Yields batches of texts, and the engine's options for them.

  Above temperature 0 the texts are repeated forever, each time with other
  example ids.

  Args:
    engine: an engine with a drafter.
    texts: at least one text, as `read_prompts` returns them.
    sampling: sampling of both models.
    batch_size: texts decoded together.
    seed: seed of the samples.
    **options: further options of `Engine.generate`.
  """
  options |= {**dataclasses.asdict(sampling), 'seed': seed}
  number = 0
  while True:
    for start in range(0, len(texts), batch_size):
      part = texts[start : start + batch_size]
      ids = range(number, number + len(part))
      yield part, options | {'example_ids': ids}
      number += len(part)
    if sampling.greedy:
      return


def rates_of(
  engine: Engine,
  work: Iterable[tuple[Sequence[str], dict[str, Any]]],
  num_tokens: int,
  advance: Callable[[int], None],
) -> Rates:
  """Corollary 3.6 on the target's own tokens; see `of_outputs`.

  Args:
    engine: the engine of `work`.
    work: what `batches` returns.
    num_tokens: once there are so many tokens, no further batch is begun.
    advance: called with the number of tokens of each batch.
  """
  requests = (
    engine.request(part, gamma=1, **options) for part, options in work
  )
  return of_outputs(
    engine.target,
    engine.drafter,
    engine.params,
    requests,
    num_tokens,
    advance,
  )


@dataclasses.dataclass(frozen=True)
class MeasureAlphaConfig:
  """A measurement of acceptance rates of one target with some drafters.

  Attributes:
    engines: name of a drafter, for the table -> function that makes the
      target's engine with it; called when it is measured.
    input_file: UTF-8 text, one prompt per line; or a task over local files,
      whose split 'test' is taken. If there are too few prompts for
      `num_tokens`, a temperature above 0 goes through them again, each time
      with other random numbers; greedy outputs would only repeat.
    target: name of the target, for the table.
    name: name of the record, to tell it from others in the same folder.
    truncate: whether a text longer than the engine's `max_input_len` is cut;
      otherwise it is left out. With a short `max_input_len`, a decoder-only
      target continues the beginnings of texts.
    num_tokens: how many of the target's own tokens to measure.
    temperatures: rows of the table, for each lenience.
    leniences: in (0, 1]; 1 is the lossless Algorithm 1, less is Table 5.
    batch_size: prompts decoded together.
    seed: seed of the samples.
    gamma: proposals per round in the real runs.
    output_file: JSON; None writes nothing.
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

  engines: Mapping[str, Callable[[], Engine]]
  input_file: str | LocalTask
  target: str = 'target'
  name: str = 'alpha'
  truncate: bool = False
  num_tokens: int = 10_000
  temperatures: Sequence[float] = (0.0, 1.0)
  leniences: Sequence[float] = (1.0,)
  batch_size: int = 16
  seed: int = 0
  gamma: int = 4
  output_file: str | None = None
  reuse: bool = False
  paper_target: str | None = None
  paper_drafts: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    check_types(self)
    check_at_least(self, num_tokens=1, batch_size=1, gamma=1)
    check_all_at_least(self, temperatures=0)
    for lenience in self.leniences:
      check_lenience(lenience)
    if not self.engines:
      raise unexpected('engines', 'one or more', self.engines)
    pairs = {(row.target, row.draft) for row in printed.TABLE3}
    for name, draft in self.paper_drafts.items():
      check_choice('paper_drafts', name, self.engines)
      known = [of for target, of in pairs if target == self.paper_target]
      check_choice(f'paper_drafts[{name!r}]', draft, known)

  @property
  def settings(self) -> dict[str, Any]:
    """The settings of a record as JSON, except the models."""
    source = self.input_file
    return {
      'target': self.target,
      'drafts': list(self.engines),
      'input_file': os.fspath(
        source if isinstance(source, str) else source.files[SPLIT]
      ),
      'truncate': self.truncate,
      'num_tokens': self.num_tokens,
      'temperatures': list(self.temperatures),
      'leniences': list(self.leniences),
      'batch_size': self.batch_size,
      'seed': self.seed,
      'gamma': self.gamma,
    }


def measure_alpha(
  config: MeasureAlphaConfig, console: rich.console.Console | None = None
) -> Record:
  """Measures both rates at every temperature; prints rows as in Table 3.

  Returns:
    The record. Each of its rows has target, draft, temperature and lenience;
    alpha by Corollary 3.6 and its standard error, None if nothing was proposed;
    proposes, the share of tokens that had a proposal; the numbers of tokens and
    outputs measured; observed (accepted / tested proposals in real runs with
    gamma) and its standard error; tokens_per_call, tokens per call of the
    target in these runs; paper, target and draft of the paper's row, or None.

  Raises:
    ValueError: no prompt can be decoded, the models are broken, or a record to
      be shown has other settings.
  """
  console = started(config, console)
  record = _earlier(config) if config.reuse else None
  is_new = record is None
  if record is None:
    settings = len(config.temperatures) * len(config.leniences)
    steps = len(config.engines) * settings * config.num_tokens
    with bar(console, 'Tokens', steps) as advance:
      rows = [
        row for name in config.engines for row in _rows(config, name, advance)
      ]
    record = Record('alpha', {'settings': config.settings, 'rows': rows})
  try:
    if is_new and config.output_file:
      record.save(config.output_file)
  finally:
    console.print(table(record))
  return record


def _earlier(config: MeasureAlphaConfig) -> Record | None:
  """The record of `output_file`; None if there is no such file."""
  if config.output_file is None:
    return None

  def settings(record: Record) -> dict[str, Any]:
    # Older records have their gamma only in their rows.
    return {'gamma': record['rows'][0].get('gamma'), **record['settings']}

  return earlier(
    config.output_file,
    'alpha',
    config.settings,
    settings,
    'Remove it, or name another output_file.',
  )


def _rows(
  config: MeasureAlphaConfig, name: str, advance: Callable[[int], None]
) -> list[dict[str, Any]]:
  """All rows of one drafter."""
  engine = config.engines[name]()
  engine.gamma = config.gamma
  limit = None if config.truncate else engine.max_input_len
  texts = read_prompts(config.input_file, engine.num_input_tokens, limit)
  draft = config.paper_drafts.get(name)
  return [
    {
      'target': config.target,
      'draft': name,
      'fingerprints': dict(engine.fingerprints),
      **_row(config, engine, texts, temperature, lenience, advance),
      'paper': None if draft is None else [config.paper_target, draft],
    }
    for temperature in config.temperatures
    for lenience in config.leniences
  ]


def _row(
  config: MeasureAlphaConfig,
  engine: Engine,
  texts: Sequence[str],
  temperature: float,
  lenience: float,
  advance: Callable[[int], None],
) -> dict[str, Any]:
  """Both rates at one temperature and lenience."""
  work = functools.partial(
    batches,
    engine,
    texts,
    SamplingConfig(temperature=temperature),
    config.batch_size,
    config.seed,
    lenience=lenience,
    on_too_long='truncate' if config.truncate else 'error',
  )
  rates = rates_of(engine, work(), config.num_tokens, advance)
  done: list[CompletionStats] = []
  for part, options in work():  # by Algorithm 1, token by token
    options |= {'batch_size': len(part), 'verification': decode_state.TOKEN}
    done += [one.stats for one in engine.generate(part, **options)]
    if total(done).num_tokens >= config.num_tokens:
      break
  observed = None
  if any(stats.num_tested for stats in done):
    observed = ratio(
      [stats.passed for stats in done],
      [stats.num_tested for stats in done],
      [texts[number % len(texts)] for number in range(len(done))],
    )
  return {
    'temperature': temperature,
    'lenience': lenience,
    'lossless': lenience == 1,
    'alpha': rates.alpha and rates.alpha.mean,
    'standard_error': rates.alpha and rates.alpha.standard_error,
    'proposes': rates.proposes.mean,
    'num_tokens': rates.proposes.num_tokens,
    'num_outputs': rates.proposes.num_outputs,
    'observed': observed and observed.mean,
    'observed_standard_error': observed and observed.standard_error,
    'gamma': config.gamma,
    'tokens_per_call': total(done).tokens_per_call,
  }


def table(record: Mapping[str, Any]) -> Table:
  """Rows as in the paper's Table 3, with errors, which the paper lacks.

  Args:
    record: record of `measure_alpha`; older records lack some values.
  """
  rows = record['rows']
  lossy = any(row.get('lenience', 1) != 1 for row in rows)
  silent = any(row.get('proposes', 1) != 1 for row in rows)
  columns: list[tuple[Column | str, Callable[[Mapping[str, Any]], Cell]]] = [
    ('target', lambda row: row['target']),
    ('draft', lambda row: row['draft']),
    (Column('T', 'g'), lambda row: row['temperature']),
    (
      Column('lenience (below 1: lossy)', 'g'),
      lambda row: row['lenience'] if lossy else None,
    ),
    ('alpha', lambda row: with_error(row['alpha'], row['standard_error'])),
    # Left out if all drafters always propose.
    (
      Column('proposes', '.3f'),
      lambda row: row['proposes'] if silent else None,
    ),
    (
      'observed',
      lambda row: with_error(row['observed'], row['observed_standard_error']),
    ),
    (
      Column('tokens per call', '.2f'),
      lambda row: row.get('tokens_per_call'),
    ),
    (Column('tokens', ','), lambda row: row['num_tokens']),
  ]
  cells = [[value(row) for _, value in columns] for row in rows]
  notes = []
  if silent:
    notes = [
      'alpha and observed: of proposals; proposes: tokens with a proposal, of'
      ' all.'
    ]
  return Table(
    'Acceptance rates (Corollary 3.6)', [c for c, _ in columns], cells, notes
  ).said()


def with_error(mean: float | None, error: float | None) -> str | None:
  """A rate and its error as text; None if there is no rate."""
  if mean is None:
    return None
  # A single text gives no error.
  return f'{mean:.3f}' + ('' if error is None else f' ± {error:.3f}')
