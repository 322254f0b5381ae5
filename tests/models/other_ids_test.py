"""A drafter's output layer of some ids: nothing else of it changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_requests
from small_vocabulary import VOCAB_SIZE, weights
from specdec_jax import checkpoints
from specdec_jax.drafters import ngram_table
from specdec_jax.engine.loading import load
from specdec_jax.models import layers
from specdec_jax.models.causal_lm import CausalLMConfig
from specdec_jax.models.model import Model
from specdec_jax.models.other_ids import cut, shortlisted
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.models.t5gemma import T5Gemma, T5GemmaConfig

SIZES = dict(vocab_size=VOCAB_SIZE, emb_dim=16, head_dim=8, mlp_dim=24)
STACKS = dict(num_heads=2, num_encoder_layers=1, num_decoder_layers=1)
HEADS = dict(num_heads=2, num_kv_heads=1)
CAUSAL = CausalLMConfig(**SIZES, **HEADS, num_layers=1, logit_softcap=2.0)
NETWORKS = {
  't5': T5(T5Config(**SIZES, **STACKS)),
  't5_tied': T5(T5Config(**SIZES, **STACKS, logits_via_embedding=True)),
  't5gemma': T5Gemma(T5GemmaConfig(CAUSAL, CAUSAL)),
}
IDS = [7, 3, 1, VOCAB_SIZE - 1, 3]
KEPT = [1, 3, 7, VOCAB_SIZE - 1]
INPUTS = jnp.array([[5, 6, 1, 0], [7, 1, 0, 0]])
TOKENS = jnp.array([[0, 5, 9], [0, 8, 3]])
TEXTS = ['one two', 'three', 'four five six', 'two two']


@functools.cache
def reader(network):
  """Logits of three tokens at once, and then of one."""

  def read(params):
    cache = network.prefill(params, INPUTS, 8)
    first, cache = toy_requests.read(network, params, cache, TOKENS)
    second, _ = toy_requests.read(network, params, cache, TOKENS[:, :1])
    return jnp.concatenate([first, second], axis=1)

  return jax.jit(read)


@pytest.mark.parametrize('name', NETWORKS)
def test_ids_that_are_kept_have_the_logits_that_they_had(name):
  network = NETWORKS[name]
  params = weights(network, 0)
  small = shortlisted(network, IDS)
  want = np.asarray(reader(network)(params))
  have = np.asarray(reader(small)(cut(params, IDS, VOCAB_SIZE)))
  np.testing.assert_allclose(have[..., KEPT], want[..., KEPT], atol=1e-5)
  assert (np.delete(have, KEPT, axis=-1) == layers.MASKED).all()
  other = reader(small)(cut(params, [*IDS[:3], 9], VOCAB_SIZE))
  # Control: it reads which they are.
  assert (other[..., -1] == layers.MASKED).all() and (have[..., -1] > -99).all()


DRAFT = Model(NETWORKS['t5'], weights(NETWORKS['t5'], 1))


@pytest.fixture
def path(tmp_path):
  path = tmp_path / 'draft.msgpack'
  checkpoints.save_t5x(path, DRAFT.params, step=0)
  return path


def ids_of(path, **options) -> set[int]:
  """The ids of a drafter as `load` makes it."""
  place = np.asarray(load(path, NETWORKS['t5'], **options).params['place'])
  return {*np.flatnonzero(place < place.max()).tolist()}


def test_ids_and_texts_are_a_shortlist(path, tokenizer, tmp_path):
  texts = tmp_path / 'texts.txt'
  texts.write_text('\n'.join(TEXTS))
  wanted = {token for text in TEXTS for token in tokenizer.encode(text)}
  for shortlist, ids in (([5, 9], {5, 9}), (texts, wanted)):
    found = ids_of(path, tokenizer=tokenizer, shortlist=shortlist)
    assert found == ids | {tokenizer.eos_id}


def test_a_table_beside_the_checkpoint_is_one(path, tmp_path):
  table = ngram_table.fit([[0, 5, 9, 1]], 1, VOCAB_SIZE, max_continuations=3)
  table.save(tmp_path / 'another.shortlist.npz')  # control: of another file
  assert 'place' not in load(path, NETWORKS['t5']).params
  table.save(tmp_path / 'draft.shortlist.npz')
  assert ids_of(path) == {1, 5, 9}
  assert ids_of(path, shortlist=[7]) == {7}


@pytest.mark.parametrize('ids', [[], [-1, 3], [3, VOCAB_SIZE]])
def test_ids_that_are_none(ids):
  with pytest.raises(ValueError, match=f'ids below {VOCAB_SIZE}'):
    DRAFT.with_shortlist(ids)
