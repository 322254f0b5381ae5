"""Beam search: T5X's own results, an oracle in plain Python, and controls."""

import functools
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beam_oracle
import specdec_jax
from specdec_jax import partitioning
from specdec_jax.decoding import beams
from specdec_jax.decoding.beams import ABSENT
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import (
  BeamSettings,
  Rule,
  example_keys,
  new_request,
)
from specdec_jax.drafters.small_model import small_model
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.probs import SamplingConfig
from specdec_jax.types import FinishReason
from toy_models import random_markov
from toy_requests import quick_jit

FIXTURES = pathlib.Path(__file__).parents[2] / 'shared/fixtures/t5x'


class Found(NamedTuple):
  """What a search gave; [B, K, ...], and of the counts [B, ...]."""

  tokens: np.ndarray
  length: np.ndarray
  scores: np.ndarray
  log_probs: np.ndarray
  reason: np.ndarray
  stats: specdec_jax.types.DecodeStats

  @property
  def levels(self):
    """Levels that each row's search went."""
    return self.stats.num_accepted + self.stats.num_rounds


@functools.cache
def program(target, drafter):
  """One for all values of its arguments."""
  loop = Loop(target, drafter and small_model(drafter))
  return jax.jit(loop.decode)


def search(target, drafter, params, inputs, settings, gamma, **options):
  batch = len(inputs)
  request = new_request(
    inputs,
    example_keys(0, np.arange(batch, dtype=np.uint32)),
    SamplingConfig(0.0),
    gamma=gamma,
    beams=settings,
    **options,
  )
  drafter = drafter if gamma else None
  done = jax.device_get(program(target, drafter)(params, request))
  width = settings.width

  def by_row(values):
    return values.reshape(batch, width, *values.shape[1:])

  stats = jax.tree.map(by_row, done.stats)
  for count in jax.tree.leaves(stats):
    assert not count[:, :-1].any()
  return Found(
    by_row(done.tokens),
    by_row(done.length),
    by_row(done.scores),
    by_row(done.log_probs),
    by_row(done.finish_reason),
    jax.tree.map(lambda count: count[:, -1], stats),
  )


def settings_of(width, draft_width, penalty, **others):
  return BeamSettings(
    penalty=jnp.float32(penalty),
    width=width,
    draft_width=draft_width,
    **others,
  )


def check_same(have, want, tolerance=1e-4):
  """The same beams, their scores, their tokens' and their ends."""
  np.testing.assert_array_equal(have.tokens, want.tokens)
  np.testing.assert_array_equal(have.length, want.length)
  np.testing.assert_array_equal(have.reason, want.reason)
  np.testing.assert_allclose(have.scores, want.scores, atol=tolerance)
  np.testing.assert_allclose(have.log_probs, want.log_probs, atol=tolerance)
  np.testing.assert_array_equal(have.levels, want.levels)


def check_counts(found, gamma):
  stats = found.stats
  np.testing.assert_array_equal(stats.histogram.sum(axis=1), stats.num_rounds)
  np.testing.assert_array_equal(
    stats.histogram @ np.arange(gamma + 1), stats.num_accepted
  )
  assert np.all(stats.num_accepted <= stats.num_tested)
  assert np.all(stats.num_tested <= gamma * stats.num_rounds)


# --- What T5X gave ------------------------------------------------------------


class T5X(NamedTuple):
  """T5X's checkpoint, a drafter with other weights, and T5X's results."""

  network: T5
  params: PairParams
  results: dict[str, np.ndarray]


@pytest.fixture(scope='module')
def t5x():
  if not FIXTURES.exists():
    pytest.skip(f'{FIXTURES}, results of T5X, is not there')
  network = T5(
    T5Config(
      vocab_size=128,
      emb_dim=32,
      num_heads=2,
      head_dim=16,
      num_encoder_layers=2,
      num_decoder_layers=2,
      mlp_dim=64,
    )
  )
  model = specdec_jax.load(FIXTURES / 'tensorstore/checkpoint_0', network)
  rng = np.random.default_rng(1)

  def moved(leaf):
    noise = rng.standard_normal(leaf.shape).astype(np.float32)
    return leaf + 0.03 * noise * np.std(leaf)

  drafts = jax.tree.map(moved, jax.device_get(model.params))
  params = PairParams(*map(partitioning.place, (model.params, drafts)))
  return T5X(network, params, dict(np.load(FIXTURES / 'beam_1_1.npz')))


def t5x_search(t5x, name, gamma, draft_width):
  """The search that T5X's result of this name is of."""
  kind, eos, width, penalty = name.split('_')
  width = int(width.removeprefix('beams'))
  inputs = t5x.results['encoder_input_tokens']
  slots = t5x.results[name].shape[-1]
  # Without a prompt there is the start token: both are one program.
  prompt = t5x.results['prompt']
  length = np.ones((len(inputs),), np.int32)
  if kind == 'prompted':
    length += np.sum(prompt[:, 1:] > 0, axis=1, dtype=np.int32)
  most = 1 + int(np.sum(prompt[:, 1:] > 0, axis=1).max())
  return length, search(
    t5x.network,
    t5x.network,
    t5x.params,
    inputs,
    settings_of(width, draft_width, penalty.removeprefix('alpha')),
    gamma,
    slots=slots,
    stop_ids=[int(eos.removeprefix('eos'))],
    max_length=slots - (length - 1),
    prompt=prompt[:, :most],
    prompt_length=length,
  )


@pytest.mark.parametrize(
  ('width', 'gamma', 'draft_width'),
  [
    (4, 0, 4),
    (2, 2, 2),
  ],
)
def test_beams_are_those_of_t5x(t5x, width, gamma, draft_width):
  names = [
    name
    for name in t5x.results
    if f'_beams{width}_' in name and not name.endswith('_scores')
  ]
  assert len(names) == 10
  run = program(t5x.network, t5x.network if gamma else None)
  before = run._cache_size()
  more = 0
  for name in names:
    begin, found = t5x_search(t5x, name, gamma, draft_width)
    want = t5x.results[name]
    # There a prompt is part of the result.
    shifted = np.zeros_like(want)
    for row, first in enumerate(begin - 1):
      shifted[row, :, : want.shape[2] - first] = want[row, :, first:]
    np.testing.assert_array_equal(found.tokens, shifted, err_msg=name)
    scores = t5x.results[f'{name}_scores']
    np.testing.assert_allclose(found.scores, scores, atol=1e-4, err_msg=name)
    check_counts(found, gamma)
    more += found.stats.num_accepted.sum()
  assert (more > 0) == (gamma > 0)
  # Exponents, ends and limits are arguments of one program, not parts of it.
  assert run._cache_size() == before + 1


# --- What plain Python gives --------------------------------------------------

VOCAB = 9
SLOTS = 12
TARGET = random_markov(1, VOCAB, order=2, scale=1.5, input_scale=0.5)
OTHER = random_markov(2, VOCAB, order=2, scale=1.5)
# Rows differ in everything that may differ.
INPUTS = np.array(
  [[3, 4], [5, 0], [2, 2], [3, 4], [7, 1], [1, 8], [6, 0]], np.int32
)
PROMPT = np.array(
  [
    [0, 0, 0],
    [0, 3, 5],
    [0, 4, 0],
    [0, 0, 0],
    [0, 2, 7],
    [0, 6, 6],
    [0, 8, 0],
  ],
  np.int32,
)
PROMPT_LENGTH = np.array([1, 3, 2, 1, 3, 3, 2], np.int32)
MAX_LENGTH = np.array([12, 5, 0, 12, 1, 9, 12], np.int32)
MIN_LENGTH = np.array([0, 0, 0, 7, 0, 2, 0], np.int32)


class Search(NamedTuple):
  """A search that is compiled once."""

  width: int
  gamma: int
  draft_width: int
  rule: Rule = Rule.T5X
  stop_ids: tuple[int, ...] = (1,)


# Stop ids may be other ones, as long as they are as many.
PLAIN = Search(3, 0, 3)
SEARCHES = [
  PLAIN,
  Search(3, 2, 3),
  Search(2, 3, 4, stop_ids=(1, 4)),
  Search(3, 0, 3, Rule.TRANSFORMERS, (5,)),
  Search(3, 3, 5, Rule.TRANSFORMERS, (5,)),
]
PENALTIES = {
  Rule.T5X: (0.0, 0.6, 1.0),
  Rule.TRANSFORMERS: (0.0, 1.0, 2.0, -1.5),
}


def near(model, noise=0.3):
  """Parameters that are nearly the same."""
  rng = np.random.default_rng(3)
  return {
    name: leaf + noise * rng.standard_normal(leaf.shape).astype(np.float32)
    for name, leaf in model.params.items()
  }


def toy_search(one, penalty=0.6, drafts=None, params=None, **changes):
  settings = settings_of(
    one.width,
    one.draft_width,
    penalty,
    rule=one.rule,
    num_ends=len(one.stop_ids),
  )
  options = dict(
    slots=SLOTS,
    stop_ids=one.stop_ids,
    max_length=MAX_LENGTH,
    min_length=MIN_LENGTH,
    prompt=PROMPT,
    prompt_length=PROMPT_LENGTH,
    forbids_stops=True,
  )
  drafts = near(TARGET) if drafts is None else drafts
  pair = PairParams(params or TARGET.params, drafts if one.gamma else None)
  changes = options | changes
  return search(TARGET, OTHER, pair, INPUTS, settings, one.gamma, **changes)


def log_probs_of(inputs, prefix):
  logits = TARGET.logits_after(prefix, inputs).astype(np.float64)
  return logits - np.log(np.sum(np.exp(logits)))


def check_oracle(one, found, penalty, stop_ids):
  ended = 0
  for row, inputs in enumerate(INPUTS):
    length = PROMPT_LENGTH[row]
    want, levels = beam_oracle.beam_search(
      functools.partial(log_probs_of, inputs),
      PROMPT[row, :length].tolist(),
      width=one.width,
      penalty=penalty,
      stop_ids=stop_ids,
      max_length=MAX_LENGTH[row],
      min_length=MIN_LENGTH[row],
      rule=one.rule,
    )
    tokens = [
      tuple(ids[:count].tolist())
      for ids, count in zip(found.tokens[row], found.length[row], strict=True)
    ]
    absent = one.width - len(want)
    assert tokens == [()] * absent + [beam for _, beam in want]
    np.testing.assert_allclose(
      found.scores[row], [ABSENT] * absent + [s for s, _ in want], atol=1e-4
    )
    assert found.levels[row] == levels
    for (_, beam), reason in zip(want, found.reason[row, absent:], strict=True):
      stops = bool(beam) and beam[-1] in stop_ids
      assert reason == (FinishReason.STOP if stops else FinishReason.LENGTH)
      ended += stops
  return ended


@pytest.mark.parametrize('one', SEARCHES, ids=str)
def test_beams_are_those_of_the_oracle(one):
  """Ragged rows: prompts, limits, least lengths, a row that fills up."""
  ended = 0
  for penalty in PENALTIES[one.rule]:
    for stop_ids in (one.stop_ids, tuple(2 + i for i in one.stop_ids)):
      changed = one._replace(stop_ids=stop_ids)
      found = toy_search(changed, penalty)
      check_counts(found, one.gamma)
      ended += check_oracle(one, found, penalty, stop_ids)
      # A beam's score is made of its tokens' log-probabilities.
      best = found.log_probs[0, -1].sum()
      assert best == pytest.approx(
        found.scores[0, -1]
        * (
          ((5 + found.length[0, -1]) / 6) ** penalty
          if one.rule is Rule.T5X
          else found.length[0, -1] ** penalty
        ),
        abs=1e-4,
      )
  assert ended > len(INPUTS)


SPECULATIVE = [one for one in SEARCHES if one.gamma]


@pytest.mark.parametrize('one', [SPECULATIVE[0]], ids=str)
def test_any_drafter_gives_the_same_beams(one):
  """The target itself, one near it, one with random numbers, or with none."""
  nothing = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), OTHER.params)
  with_itself = toy_search(one, drafts=TARGET.params)
  check_same(toy_search(one, drafts=nothing), with_itself)
  # Each call but the last gains gamma + 1 levels, if it drafts as wide.
  stats, levels = with_itself.stats, with_itself.levels
  np.testing.assert_array_equal(stats.num_rounds, -(-levels // (one.gamma + 1)))
  np.testing.assert_array_equal(stats.num_tested, stats.num_accepted)
  near_it, another = toy_search(one), toy_search(one, drafts=OTHER.params)
  for found in (near_it, another):
    check_same(found, with_itself)
    check_counts(found, one.gamma)
  calls = [
    found.stats.num_rounds.sum() for found in (with_itself, near_it, another)
  ]
  assert calls[0] < calls[1] < calls[2]


@pytest.mark.parametrize('one', [SPECULATIVE[0]], ids=str)
def test_a_row_whose_logits_are_no_numbers_says_so(one):
  """Its neighbours are as they were."""
  table = dict(TARGET.params)
  table['offset'] = table['offset'].at[5].set(jnp.nan)  # row 1 reads a 5
  found, before = toy_search(one, params=table), toy_search(one)
  assert np.all(found.reason[1] == FinishReason.INVALID)
  assert found.levels[1] == 1
  others = np.arange(len(INPUTS)) != 1

  def of_others(x):
    return x[others]

  check_same(
    jax.tree.map(of_others, found), jax.tree.map(of_others, before), 1e-6
  )
  assert not np.any(found.reason[others] == FinishReason.INVALID)


def test_control_a_level_that_lacks_a_beam_is_not_the_search(monkeypatch):
  """A rule that never waits for the worst live beam gives other beams."""
  strict = beams.is_beaten

  def loose(*args):
    # Whether a search is over depends on the best live beam, the last one.
    return strict(*args).at[:, 0].set(True)

  one = SPECULATIVE[0]
  want = toy_search(one)
  check_same(toy_search(one), want)
  monkeypatch.setattr(beams, 'is_beaten', loose)
  monkeypatch.setattr(f'{__name__}.program', functools.cache(_anew))
  have = toy_search(one)
  differs = np.any(have.tokens != want.tokens, axis=(1, 2))
  assert 0 < differs.sum() < len(INPUTS)
  with pytest.raises(AssertionError):
    check_same(have, want)


def _anew(target, drafter):
  """`program`, traced again."""
  loop = Loop(target, small_model(drafter))
  return quick_jit(lambda *args: loop.decode(*args))
