"""One drafter of each kind, and of each kind of trouble, for small chains.

A new drafter is a line in `DRAFTERS`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import toy_models
import toy_requests
from specdec_jax.drafters.base import Drafter
from specdec_jax.drafters.cascade import cascade
from specdec_jax.drafters.heads import Heads, heads
from specdec_jax.drafters.ngram import ngram
from specdec_jax.drafters.ngram_table import fit
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.drafters.small_model import small_model
from specdec_jax.drafters.small_model_tree import small_model_tree
from specdec_jax.drafters.translation_memory import remember, translation_memory
from specdec_jax.drafters.uniform import uniform
from specdec_jax.drafters.with_fallback import with_fallback
from specdec_jax.models.gpt import GPT, GPTConfig
from specdec_jax.models.other_ids import Fitted, cut, shortlisted
from specdec_jax.tree_shape import branching
from specdec_jax.types import LengthRule

VOCAB = 5
LENGTH = 4  # tokens whose joint law is tested: several rounds, V^4 cells
SEED = 20
GAMMA = 3
STOP = 1
INPUTS = (4, 2, 3, 4, 2, 4, 0)  # something to copy from, and padding
# Order 2: one stale, skipped or doubled slot changes the distribution.
_chain = functools.partial(
  toy_models.random_markov, order=2, scale=0.8, input_scale=0.3
)
TARGET = _chain(1, VOCAB, scale=1.2)
DRAFT, CHEAPER = _chain(2, VOCAB), _chain(3, VOCAB)


def _changed(drafter, context=None, draft=None) -> Drafter:
  """A drafter with another context, or whose draft is changed."""

  def propose(params, state, given):
    asked = context(given) if context else given
    made, state = drafter.propose(params, state, asked)
    return draft(made, given) if draft else made, state

  return drafter._replace(propose=propose)


def _short_drafts(step=1) -> Drafter:
  """`small_model` that proposes 0, 1, ... gamma tokens, row by row.

  With another `step` only some of these: with 2 none or 2 of 3.
  """

  def shorter(draft, context):
    number = context.length + jnp.arange(len(context.length))
    length = number * step % (context.gamma + 1)
    return draft.replace(length=length.astype(jnp.int32))

  return _changed(small_model(DRAFT), draft=shorter)


def _shortlist(size: int) -> tuple[Drafter, Any]:
  """A small network that never proposes the first ids."""
  network = GPT(
    GPTConfig(VOCAB, 8, 2, 1, head_dim=4, mlp_dim=8, num_positions=64)
  )
  ids = range(VOCAB - size, VOCAB)
  params = cut(network.init(jax.random.key(0)), ids, VOCAB)
  return small_model(shortlisted(network, ids)), params


def _with_rule(context):
  """Drafts end where `adaptive_rule` says."""
  request = context.request
  request = request.with_drafting(draft_rule=adaptive_rule(request.gamma))
  budget = jnp.full_like(context.length, request.gamma)
  return context.replace(request=request, budget=budget)


def adaptive_rule(gamma: int) -> LengthRule:
  """One that ends drafts of `DRAFT` at any place, before and behind a draw."""
  index = jnp.arange(gamma)
  return LengthRule(0.55 - 0.14 * index, 0.51 - 0.08 * index)


# Fitted to noise, with contexts left out and continuations cut off.
_RNG = np.random.default_rng(2)
_CORPUS = [np.append(0, _RNG.integers(0, VOCAB, 9)) for _ in range(12)]
TABLE = fit(_CORPUS, 2, VOCAB, max_continuations=3, min_count=2)
# Without the table, which is given apart: drafters are keys of programs.
_BIGRAM = ngram(TABLE)._replace(params=())


# 8 nodes: the younger child of the root has one child, the elder has two.
TREE = branching(2, (2, 1), 1)


def _heads() -> tuple[Drafter, dict]:
  """Random heads, of which two propose something else than the target."""
  network = Heads(2, VOCAB, 6)
  params = network.init(jax.random.key(7))
  for i, head in enumerate(params.values()):
    shape = head['wo']['kernel'].shape
    head['wo']['kernel'] = jax.random.normal(jax.random.key(i), shape)
  return heads(network, ()), params


# One program for both: their tables are its arguments.
_SMALL = small_model(DRAFT)
# The target emits an id that the one lacks; the other has two of its own.
NARROW, WIDE = _chain(4, VOCAB - 1), _chain(5, VOCAB + 2)
ON_ENCODER = toy_models.MarkovOnEncoder(np.asarray(DRAFT.params['table']))


# Texts of noise, each behind the input of the suite.
_NOISE = np.random.default_rng(20).integers(0, VOCAB, (20, 9))
MEMORY = remember([[*INPUTS[:-1], *row] for row in _NOISE], max_match=4)


# name -> (drafter, its parameters)
DRAFTERS = {
  'small_model': (_SMALL, DRAFT.params),
  'small_model_is_target': (_SMALL, TARGET.params),
  'fewer_ids': (small_model(Fitted(NARROW, VOCAB)), NARROW.params),
  'more_ids': (small_model(Fitted(WIDE, VOCAB)), WIDE.params),
  'shortlist': _shortlist(VOCAB - 2),
  'on_encoder': (small_model(ON_ENCODER), ON_ENCODER.params),
  'adaptive': (_changed(small_model(DRAFT), _with_rule), DRAFT.params),
  'short_drafts': (_short_drafts(), DRAFT.params),
  'bigram': (_BIGRAM, TABLE),
  'prompt_lookup': (prompt_lookup(), ()),
  'translation_memory': (
    translation_memory(MEMORY, 1)._replace(params=()),
    MEMORY,
  ),
  'uniform': (uniform(VOCAB), ()),
  # Two heads for a gamma of three.
  'heads': _heads(),
  'cascade': (cascade(DRAFT, _BIGRAM), (DRAFT.params, TABLE)),
  'cascade_of_models': (
    cascade(DRAFT, small_model(CHEAPER), gamma=3),
    (DRAFT.params, CHEAPER.params),
  ),
  # Of pairs, so that rows change from copying to asking and back.
  'with_fallback': (
    with_fallback(prompt_lookup(min_match=2), small_model(DRAFT)),
    ((), DRAFT.params),
  ),
  # The first has a cache, and often no proposal.
  'with_fallback_of_models': (
    with_fallback(_short_drafts(2), small_model(CHEAPER)),
    (DRAFT.params, CHEAPER.params),
  ),
  'tree': (small_model_tree(DRAFT, TREE), DRAFT.params),
  # As parts of others.
  'with_fallback_on_encoder': (
    with_fallback(prompt_lookup(min_match=2), cascade(ON_ENCODER, _BIGRAM)),
    ((), (ON_ENCODER.params, TABLE)),
  ),
}


def request_of(rows, gamma, sampling, slots=LENGTH, **changes):
  changes = {'stop_ids': (STOP, -1)} | changes
  return toy_requests.request_of(
    rows, gamma, sampling, slots, inputs=INPUTS, seed=SEED, **changes
  )
