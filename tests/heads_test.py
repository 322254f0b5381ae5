"""Heads on the target's features: these, files, refusals.

That they are lossless in long runs, in pools and behind other drafters is for
the suites of all drafters (`drafter_conformance_test`, `pool_test`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_models
import toy_requests
from small_vocabulary import network, weights
from specdec_jax import checkpoints
from specdec_jax.checkpoints.disk_arrays import fingerprint
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters import heads as heads_module
from specdec_jax.drafters.heads import Heads, heads
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.drafters.with_fallback import with_fallback
from specdec_jax.engine.engine import Engine
from specdec_jax.models.model import Model
from specdec_jax.probs import SamplingConfig

VOCAB = 3
GAMMA = 2
TARGET = toy_models.random_markov(1, VOCAB, order=2, scale=1.2)
T1 = SamplingConfig(1.0)
HIDDEN = 4

T5_TARGET = network(2)


def random_heads(
  emb_dim: int, num_heads: int = GAMMA, conditioned: bool = True
):
  """Heads that change the features, unlike untrained ones."""
  made = Heads(num_heads, emb_dim, HIDDEN, conditioned)
  params = made.init(jax.random.key(3))
  for i, head in enumerate(params.values()):
    shape = head['wo']['kernel'].shape
    head['wo']['kernel'] = jax.random.normal(jax.random.key(i), shape)
    head['wi']['bias'] += 0.1
  return made, params


class TestFeatures:
  """A `MarkovModel`'s features are its logits, known in closed form."""

  PROMPT = np.array([[0, 2, 1], [0, 0, 0], [0, 1, 0], [0, 2, 2]], np.int32)
  LENGTHS = np.array([3, 1, 2, 3], np.int32)

  def _states(self, target, rounds=4, **changes):
    made, params = random_heads(VOCAB)
    request = toy_requests.request_of(
      4,
      GAMMA,
      T1,
      9,
      inputs=(1, 2, 0),
      seed=5,
      prompt=jnp.asarray(self.PROMPT),
      prompt_length=jnp.asarray(self.LENGTHS),
      max_length=jnp.array([9, 9, 2, 9]),
      **changes,
    )
    loop = Loop(target, heads(made, ()))
    pair = PairParams(TARGET.params, params)
    state = toy_requests.quick_jit(loop.start)(pair, request)
    step = toy_requests.quick_jit(loop.step)
    for _ in range(rounds):
      yield jax.device_get(state)
      state, _ = step(pair, request, state)

  def _differences(self, target, **changes):
    """How far each running row's feature is from what it should be."""
    found = []
    for state in self._states(target, **changes):
      for row in np.flatnonzero(state.running):
        tokens = state.tokens[row, : state.length[row]].tolist()
        want = np.zeros(VOCAB)
        if len(tokens) > 1:
          want = TARGET.logits_after(tokens[:-1], (1, 2))
        found.append(np.abs(state.features[row] - want).max())
    assert len(found) > 8
    return found

  def test_they_gave_the_last_committed_token(self):
    """After prompts of several lengths, none, and every acceptance."""
    assert max(self._differences(TARGET)) < 1e-5

  def test_control_features_of_the_token_before(self):
    class Late(toy_models.MarkovModel):
      def extend(self, *args):
        features, cache = super().extend(*args)
        return jnp.roll(features, 1, axis=1), cache

    late = Late(np.asarray(TARGET.params['table']))
    assert max(self._differences(late)) > 0.1


def engine_of(target, drafter, tokenizer, **changes):
  limits = dict(gamma=3, max_input_len=32, max_decode_len=24)
  return Engine(target, drafter, tokenizer=tokenizer, **(limits | changes))


@pytest.fixture(scope='module')
def target():
  return Model(T5_TARGET, weights(T5_TARGET, 1))


@pytest.fixture(scope='module')
def saved(target, tmp_path_factory):
  """A file of heads for that target."""
  path = tmp_path_factory.mktemp('heads') / 'heads.msgpack'
  _, params = random_heads(16)
  heads_module.save(path, params, fingerprint(target.params))
  return path


class TestRefusals:
  def test_heads_of_another_target(self, target, saved, tokenizer):
    other = weights(target.network, 2)
    other = Model(target.network, other, name='other', bos_id=target.bos_id)
    wanted, came = fingerprint(target.params), fingerprint(other.params)
    message = f'(?s){wanted}.*other.*{came}'
    for drafter in (
      heads_module.load(saved),
      with_fallback(prompt_lookup(), heads_module.load(saved)),
    ):
      with pytest.raises(ValueError, match=message):
        engine_of(other, drafter, tokenizer)

  def test_files_of_something_else(self, tmp_path):
    path = tmp_path / 'model.msgpack'
    checkpoints.save_t5x(path, T5_TARGET.init(jax.random.key(0)), 1)
    with pytest.raises(ValueError, match='heads: expected a file'):
      heads_module.load(path)
    heads_module.save(path, {'other': {'kernel': np.zeros((2, 2))}}, 'abc')
    with pytest.raises(ValueError, match='heads of .*expected heads_0'):
      heads_module.load(path)
    with pytest.raises(ValueError, match='a folder'):
      (tmp_path / 'checkpoint').write_bytes(path.read_bytes())
      heads_module.load(tmp_path)
    with pytest.raises(ValueError, match='No checkpoint'):
      heads_module.load(tmp_path / 'nothing.msgpack')


@pytest.mark.parametrize('conditioned', [True, False])
def test_a_file_says_its_sizes(tmp_path, conditioned):
  made, params = random_heads(16, 3, conditioned)
  path = tmp_path / 'heads.msgpack'
  heads_module.save(path, params, 'abc', step=7)
  loaded = heads_module.load(path)
  assert loaded.made_for == ('abc',)
  assert loaded.name == heads(made, params).name
  jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
