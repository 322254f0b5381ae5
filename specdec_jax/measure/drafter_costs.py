"""What drafting costs: every drafter of Section 3.6, with the same target.

The weights of the target and of the small model are random, which does not
change the times. N-gram tables are as large as those of real text.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console

from specdec_jax import partitioning
from specdec_jax.checks.arguments import check_all_at_least, check_at_least
from specdec_jax.checks.fields import check_types
from specdec_jax.decoding.state import Request
from specdec_jax.drafters.base import Drafter
from specdec_jax.drafters.ngram import ngram
from specdec_jax.drafters.ngram_fit import fit
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.drafters.small_model import small_model
from specdec_jax.drafters.uniform import uniform
from specdec_jax.measure import calls, timing
from specdec_jax.measure.measured_pair import Pair, make_pair, random_params
from specdec_jax.measure.ngram import outputs
from specdec_jax.measure.progress import bar
from specdec_jax.measure.record import Record
from specdec_jax.measure.table import Column, Table, show, started
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.model import Model
from specdec_jax.partitioning import Placement
from specdec_jax.probs import SamplingConfig
from specdec_jax.text.vocabulary import open_vocabulary
from specdec_jax.types import Draft

_NOTHING = 'nothing'  # the drafter that all others are compared with
_NOISE = (160_000, 16)  # random sequences and their length, if there is no text


@dataclasses.dataclass(frozen=True)
class DrafterCostsConfig:
  """A measurement of what a draft costs, in calls of the target.

  Attributes:
    target: the target's network.
    small: the small model's network; None leaves it out.
    shortlist: ids that the small model's output layer has in a further row, see
      `models.shortlist`; 0 leaves that row out.
    train_files: files that the n-gram tables are fitted to, see
      `FitNgramConfig`. If one is missing, the tables are fitted to random ids
      drawn by Zipf's law; the record says which was used.
    vocab_path: sentencepiece model of these files.
    field: field of JSON records that holds the output.
    max_continuations: entries kept per context.
    placement: layout and dtype of both models.
    gamma: proposals per round.
    temperatures: 0 is greedy.
    batch: rows decoded together.
    input_len: E, tokens of an input.
    decode_len: tokens per run.
    calls_a_run: calls or rounds in one timed loop.
    repeats: timed rounds, interleaved.
    seed: seed of parameters, inputs and sampling.
    output_file: JSON; None writes nothing.

  Raises:
    ValueError: a number is too small.
  """

  target: LanguageModel
  small: LanguageModel | None = None
  shortlist: int = 0
  train_files: Sequence[str] = ()
  vocab_path: str = ''
  field: str = 'target'
  max_continuations: int = 32
  placement: Placement = Placement()
  gamma: int = 4
  temperatures: Sequence[float] = (0.0, 1.0)
  batch: int = 1
  input_len: int = 64
  decode_len: int = 120
  calls_a_run: int = 20
  repeats: int = 15
  seed: int = 0
  output_file: str | None = None

  def __post_init__(self):
    check_types(self)
    check_at_least(self, max_continuations=1, gamma=1, batch=1, input_len=1)
    check_at_least(self, decode_len=1, calls_a_run=1, repeats=1, shortlist=0)
    if self.shortlist and self.small is None:
      raise ValueError(
        f'DrafterCostsConfig.shortlist is {self.shortlist}, of a small model,'
        ' and there is none: give small, or leave it 0.'
      )
    check_all_at_least(self, temperatures=0)


def drafter_costs(
  config: DrafterCostsConfig, console: rich.console.Console | None = None
) -> Mapping[str, Any]:
  """Times drafts alone and inside rounds; prints and writes a table.

  Returns:
    The record: its table in the form of `Table.to_json`, the corpus of the
    n-grams, and `measured`. That has per drafter and temperature: c (the cost
    of one proposal, in calls of the target over one token) alone, and inside a
    round with its standard error; the cost of a whole draft in such calls; and
    times in ms.
  """
  console = started(config, console)
  pairs, corpus = _pairs(config)
  steps = len(config.temperatures) * config.repeats
  with bar(console, 'Measuring', steps) as advance:
    measured = [
      row
      for temperature in config.temperatures
      for row in _measure(config, pairs, temperature, advance)
    ]
  record = _record(config, measured, corpus)
  show(console, record, config.output_file)
  console.print(f'n-grams of {corpus}')
  return record


def _pairs(config: DrafterCostsConfig) -> tuple[dict[str, Pair], str]:
  """Name -> the target with that drafter; and a text about the n-grams."""
  vocab_size = config.target.vocab_size
  sequences, corpus = _corpus(config)
  drafters = {_NOTHING: _nothing()}
  for order, name in ((1, 'unigram'), (2, 'bigram')):
    table = fit(
      sequences,
      order,
      vocab_size,
      max_continuations=config.max_continuations,
    )
    drafters[name] = ngram(table)
  drafters['prompt_lookup'] = prompt_lookup()
  drafters['uniform'] = uniform(vocab_size)

  own = random_params(config.target, config.seed, config.placement.param_dtype)
  own = partitioning.place(own, config.placement)

  def pair(draft, drafter=None):
    # The target's parameters are placed already, so they are not copied.
    return make_pair(
      config.target, draft, own, None, config.placement, config.seed, drafter
    )

  found = {name: pair(None, drafter) for name, drafter in drafters.items()}
  if config.small is not None:
    found['small_model'] = pair(config.small)
    if config.shortlist:
      params = found['small_model'].params.draft
      ids = range(config.shortlist)  # which ones does not change the times
      short = Model(config.small, params).with_shortlist(ids)
      found[f'of {config.shortlist:,} ids'] = pair(None, small_model(short))
  return found, corpus


def _corpus(config: DrafterCostsConfig) -> tuple[list[list[int]], str]:
  """Sequences of ids as a decoder has them, and a text that describes them."""
  paths = [*config.train_files, config.vocab_path]
  missing = [path for path in paths if not os.path.isfile(path)]
  if config.train_files and not missing:
    tokenizer = open_vocabulary(config.vocab_path)
    found = [
      [0, *ids]
      for path in config.train_files
      for ids in outputs(path, tokenizer, config.field)
    ]
    total = sum(map(len, found))
    return found, f'{total:,} tokens of {", ".join(config.train_files)}'
  ranks = np.arange(1, config.target.vocab_size)
  weights = 1 / ranks
  ids = np.random.default_rng(config.seed).choice(
    ranks, _NOISE, p=weights / weights.sum()
  )
  why = f'no {missing[0]!r}' if missing else 'no files were given'
  return (
    [[0, *row] for row in ids.tolist()],
    f"{ids.size:,} ids drawn by Zipf's law ({why})",
  )


def _nothing() -> Drafter:
  """A drafter that always proposes one token, its parameter, at no cost."""

  def propose(token, state, context):
    shape = context.length.size, context.gamma
    length = jnp.full(shape[:1], context.gamma, jnp.int32)
    return Draft(jnp.full(shape, token), None, length), state

  token = jnp.int32(3)
  return Drafter(
    lambda *_: (), propose, lambda state, _: state, _NOTHING, token
  )


def _measure(
  config: DrafterCostsConfig,
  pairs: Mapping[str, Pair],
  temperature: float,
  advance: Callable[[], None],
) -> list[dict[str, Any]]:
  """Measures everything at one temperature, alternately."""
  request = _request(config, temperature)
  repeats = config.calls_a_run
  functions = {'call': calls.target_calls(pairs[_NOTHING], request, 1, repeats)}
  for name, pair in pairs.items():
    functions |= {
      f'draft {name}': calls.pair_rounds(pair, request, repeats, False),
      f'round {name}': calls.pair_rounds(pair, request, repeats),
    }
  seconds = timing.interleave(functions, config.repeats, advance)
  times = {
    name: timing.summarise(values, 1e3 / repeats)
    for name, values in seconds.items()
  }
  return [
    {'drafter': name, 'temperature': temperature, 'gamma': config.gamma}
    | _row(config, name, seconds, times)
    | {'params_mib': _mib(pairs[name].params.draft)}
    for name in pairs
    if name != _NOTHING
  ]


def _request(config: DrafterCostsConfig, temperature: float) -> Request:
  return calls.make_request(
    calls.random_inputs(
      config.target, config.batch, config.input_len, config.seed
    ),
    config.decode_len,
    config.gamma,
    SamplingConfig(temperature=temperature),
    config.seed,
    config.target.has_encoder,
  )


def _row(
  config: DrafterCostsConfig,
  name: str,
  seconds: Mapping[str, Sequence[float]],
  times: Mapping[str, Any],
) -> dict[str, Any]:
  """One drafter: the cost of its draft alone, and what it adds to a round."""
  call = times['call']['median']
  alone = times[f'draft {name}']['median']
  # Compares rounds that ran one after the other: if something slows the machine
  # for a while, it slows both.
  without = seconds[f'round {_NOTHING}']
  pairs = zip(seconds[f'round {name}'], without, strict=True)
  added = timing.summarise(
    [one - other for one, other in pairs], 1e3 / config.calls_a_run
  )
  return {
    'cost_ratio_alone': alone / config.gamma / call,
    'draft_of_a_call': alone / call,
    'cost_ratio': added['median'] / config.gamma / call,
    'cost_ratio_error': added['error'] / config.gamma / call,
    'times_ms': {
      'call': times['call'],
      'draft': times[f'draft {name}'],
      'round': times[f'round {name}'],
      'round_without_drafting': times[f'round {_NOTHING}'],
    },
  }


def _mib(params: Any) -> float:
  return sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 2**20


def _record(
  config: DrafterCostsConfig, measured: Sequence[dict[str, Any]], corpus: str
) -> Record:
  columns = (
    'drafter',
    Column('T', 'g'),
    Column('MiB', '.1f'),
    Column('c alone', '.4f'),
    'c in a round',
    Column('draft / call', '.1%'),
    Column('draft ms', '.3f'),
    Column('call ms', '.2f'),
  )
  rows = [
    [
      row['drafter'],
      row['temperature'],
      row['params_mib'],
      row['cost_ratio_alone'],
      f'{row["cost_ratio"]:.4f} ± {row["cost_ratio_error"]:.4f}',
      row['draft_of_a_call'],
      row['times_ms']['draft']['median'],
      row['times_ms']['call']['median'],
    ]
    for row in measured
  ]
  title = (
    f'Drafting costs: batch {config.batch}, gamma {config.gamma}, a target of'
    f' {_count(config.target)} parameters'
  )
  names = (
    'max_continuations',
    'input_len',
    'decode_len',
    'calls_a_run',
    'repeats',
    'seed',
  )
  return Table(title, columns, rows).record(
    measured=list(measured),
    ngrams=corpus,
    settings={name: getattr(config, name) for name in names},
  )


def _count(network: LanguageModel) -> str:
  shapes = jax.eval_shape(network.init, jax.random.key(0))
  size = sum(leaf.size for leaf in jax.tree.leaves(shapes))
  return f'{size / 1e6:,.0f}M'
