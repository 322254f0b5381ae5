"""Beam search: T5X's own results, an oracle in plain Python, and controls."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beam_oracle
import specdec_jax
from repository import T5X_FIXTURES
from specdec_jax import partitioning
from specdec_jax.decoding import beams
from specdec_jax.decoding.beams import ABSENT
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.probs import SamplingConfig
from specdec_jax.request import BeamScoring, example_keys, new_request
from specdec_jax.types import FinishReason
from toy_beams import near, program, settings_of
from toy_models import random_markov


def search(target, drafter, params, inputs, settings, gamma, **options):
  """A `Generation` of arrays [B, K, ...], whose counts are [B, ...]."""
  shape = len(inputs), settings.width
  keys = example_keys(0, np.arange(len(inputs), dtype=np.uint32))
  options |= {'gamma': gamma, 'beams': settings}
  request = new_request(inputs, keys, SamplingConfig(0.0), **options)
  run = program(target, drafter if gamma else None)
  done = jax.device_get(run(params, request))
  done = jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), done)
  assert not any(x[:, :-1].any() for x in jax.tree.leaves(done.stats))
  stats = jax.tree.map(lambda count: count[:, -1], done.stats)
  np.testing.assert_array_equal(stats.histogram.sum(axis=1), stats.num_rounds)
  np.testing.assert_array_equal(
    stats.histogram @ np.arange(gamma + 1), stats.num_accepted
  )
  assert np.all(stats.num_accepted <= stats.num_tested)
  assert np.all(stats.num_tested <= gamma * stats.num_rounds)
  return done.replace(stats=stats)


def levels_of(found):
  """Levels that each row's search went."""
  return found.stats.num_accepted + found.stats.num_rounds


def check_same(have, want, rows=slice(None)):
  """The same beams, their scores, their tokens' and their ends."""
  for name in ('tokens', 'length', 'finish_reason', 'scores', 'log_probs'):
    both = getattr(have, name)[rows], getattr(want, name)[rows]
    is_exact = both[0].dtype == np.int32
    np.testing.assert_allclose(*both, atol=0 if is_exact else 1e-4)
  np.testing.assert_array_equal(levels_of(have)[rows], levels_of(want)[rows])


# --- What T5X gave ------------------------------------------------------------


@pytest.fixture(scope='module')
def t5x():
  """T5X's network and results, its parameters and a drafter's near them."""
  if not T5X_FIXTURES.exists():
    pytest.skip(f'{T5X_FIXTURES}, results of T5X, is not there')
  sizes = dict(vocab_size=128, emb_dim=32, num_heads=2, head_dim=16, mlp_dim=64)
  layers = dict(num_encoder_layers=2, num_decoder_layers=2)
  network = T5(T5Config(**sizes, **layers))
  model = specdec_jax.load(T5X_FIXTURES / 'tensorstore/checkpoint_0', network)
  params = jax.device_get(model.params)
  params = PairParams(*map(partitioning.place, (params, near(params, 0.03))))
  return network, dict(np.load(T5X_FIXTURES / 'beam_1_1.npz')), params


@pytest.mark.parametrize(('width', 'gamma'), [(4, 0), (2, 2)])
def test_beams_are_those_of_t5x(t5x, width, gamma):
  network, results, params = t5x
  names = [name for name in results if f'_beams{width}_' in name]
  names = [name for name in names if not name.endswith('_scores')]
  assert len(names) == 10
  run = program(network, network if gamma else None)
  before, more = run._cache_size(), 0
  produced = np.sum(results['prompt'][:, 1:] > 0, axis=1, dtype=np.int32)
  for name in names:
    kind, eos, _, penalty = name.split('_')
    want, scores = results[name], results[f'{name}_scores']
    # Without a prompt there is the start token: both are one program.
    by_prompt = produced * (kind == 'prompted')
    settings = settings_of(width, width, penalty.removeprefix('alpha'))
    inputs = results['encoder_input_tokens']
    options = dict(
      slots=want.shape[-1],
      stop_ids=[int(eos.removeprefix('eos'))],
      max_length=want.shape[-1] - by_prompt,
      prompt=results['prompt'][:, : 1 + produced.max()],
      prompt_length=1 + by_prompt,
    )
    found = search(network, network, params, inputs, settings, gamma, **options)
    # There a prompt is part of the result.
    shifted = np.zeros_like(want)
    for row, first in enumerate(by_prompt):
      shifted[row, :, : want.shape[2] - first] = want[row, :, first:]
    np.testing.assert_array_equal(found.tokens, shifted, err_msg=name)
    np.testing.assert_allclose(found.scores, scores, atol=1e-4, err_msg=name)
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
PROMPT = np.zeros((7, 3), np.int32)
PROMPT[:, 1:] = [[0, 0], [3, 5], [4, 0], [0, 0], [2, 7], [6, 6], [8, 0]]
PROMPT_LENGTH = np.array([1, 3, 2, 1, 3, 3, 2], np.int32)
MAX_LENGTH = np.array([12, 5, 0, 12, 1, 9, 12], np.int32)
MIN_LENGTH = np.array([0, 0, 0, 7, 0, 2, 0], np.int32)


class Search(NamedTuple):
  """A search that is compiled once."""

  width: int
  gamma: int
  draft_width: int
  stop_ids: tuple[int, ...] = (1,)
  scoring: BeamScoring = BeamScoring.T5X


# Stop ids may be other ones, as long as they are as many.
SEARCHES = [Search(3, 0, 3), Search(3, 2, 3), Search(2, 3, 4, (1, 4))]
SEARCHES += [
  Search(3, gamma, width, (5,), BeamScoring.TRANSFORMERS)
  for gamma, width in ((0, 3), (2, 5))
]
PENALTIES = {
  BeamScoring.T5X: (0.0, 0.6, 1.0),
  BeamScoring.TRANSFORMERS: (0.0, 1.0, 2.0, -1.5),
}


def toy_search(one, penalty=0.6, drafts=None, params=None, **changes):
  ends = dict(scoring=one.scoring, num_ends=len(one.stop_ids))
  settings = settings_of(one.width, one.draft_width, penalty, **ends)
  options = dict(
    slots=SLOTS,
    stop_ids=one.stop_ids,
    max_length=MAX_LENGTH,
    min_length=MIN_LENGTH,
    prompt=PROMPT,
    prompt_length=PROMPT_LENGTH,
    forbids_stops=True,
  )
  drafts = near(TARGET.params, 0.2) if drafts is None else drafts
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
      scoring=one.scoring,
    )
    want = [(ABSENT, ())] * (one.width - len(want)) + want
    np.testing.assert_allclose(
      found.scores[row], [score for score, _ in want], atol=1e-4
    )
    assert levels_of(found)[row] == levels
    for i, (score, beam) in enumerate(want):
      assert beam == (*found.tokens[row, i, : found.length[row, i]].tolist(),)
      stops = bool(beam) and beam[-1] in stop_ids
      reason = FinishReason.STOP if stops else FinishReason.LENGTH
      assert score == ABSENT or found.finish_reason[row, i] == reason
      ended += stops
  return ended


@pytest.mark.parametrize('one', SEARCHES, ids=str)
def test_beams_are_those_of_the_oracle(one):
  """Ragged rows: prompts, limits, least lengths, a row that fills up."""
  ended = 0
  for penalty in PENALTIES[one.scoring]:
    for stop_ids in (one.stop_ids, tuple(2 + i for i in one.stop_ids)):
      found = toy_search(one._replace(stop_ids=stop_ids), penalty)
      ended += check_oracle(one, found, penalty, stop_ids)
  assert ended > len(INPUTS)


SPECULATIVE = SEARCHES[1]


def test_any_drafter_gives_the_same_beams():
  """The target itself, one near it, one with random numbers, or with none."""
  one = SPECULATIVE
  nothing = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), OTHER.params)
  with_itself = toy_search(one, drafts=TARGET.params)
  check_same(toy_search(one, drafts=nothing), with_itself)
  # Each call but the last gains gamma + 1 levels, if it drafts as wide.
  stats, levels = with_itself.stats, levels_of(with_itself)
  np.testing.assert_array_equal(stats.num_rounds, -(-levels // (one.gamma + 1)))
  np.testing.assert_array_equal(stats.num_tested, stats.num_accepted)
  found = with_itself, toy_search(one), toy_search(one, drafts=OTHER.params)
  for another in found[1:]:
    check_same(another, with_itself)
  calls = [each.stats.num_rounds.sum() for each in found]
  assert calls[0] < calls[1] < calls[2]


def test_a_row_whose_logits_are_no_numbers_says_so():
  """Its neighbours are as they were."""
  one, table = SPECULATIVE, dict(TARGET.params)
  table['offset'] = table['offset'].at[5].set(jnp.nan)  # row 1 reads a 5
  found, before = toy_search(one, params=table), toy_search(one)
  assert np.all(found.finish_reason[1] == FinishReason.INVALID)
  assert levels_of(found)[1] == 1
  others = np.arange(len(INPUTS)) != 1
  check_same(found, before, others)
  assert not np.any(found.finish_reason[others] == FinishReason.INVALID)


def test_control_a_level_that_lacks_a_beam_is_not_the_search(monkeypatch):
  """A rule that never waits for the worst live beam gives other beams."""
  strict = beams.is_beaten

  def loose(*args):
    # Whether a search is over depends on the best live beam, the last one.
    return strict(*args).at[:, 0].set(True)

  want = toy_search(SPECULATIVE)
  check_same(toy_search(SPECULATIVE), want)
  monkeypatch.setattr(beams, 'is_beaten', loose)
  program.cache_clear()
  have = toy_search(SPECULATIVE)
  program.cache_clear()
  differs = np.any(have.tokens != want.tokens, axis=(1, 2))
  assert 0 < differs.sum() < len(INPUTS)
  with pytest.raises(AssertionError):
    check_same(have, want)
