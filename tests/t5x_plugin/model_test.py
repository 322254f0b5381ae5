"""The plug-in for T5X, without T5X: what it takes for T5X's is made here.

`t5x_itself_test.py` runs it with T5X, where that can be imported.
"""

import dataclasses
import functools
import sys
import types
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import small_vocabulary
from specdec_jax import checkpoints, probs, t5x_plugin
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
from specdec_jax.models.t5 import T5
from specdec_jax.t5x_plugin.model import Pair
from t5x_batches import EOS, LENGTH, batch


class Transformer:
  """A module of T5X: a config, and variables with T5X's names."""

  def __init__(self, network: T5, **changes):
    self.network = network
    sizes = dataclasses.asdict(network.config) | {'dropout_rate': 0.1}
    del sizes['bias_per_layer'], sizes['encoder_dim']  # T5X has none
    sizes |= {'dtype': jnp.float32, 'float32_attention_logits': False}
    self.config = types.SimpleNamespace(**sizes | changes)

  def init(self, key, encoder, decoder, targets, enable_dropout=True):
    del encoder, decoder, targets, enable_dropout
    params = self.network.init(key)
    axes = jax.tree.map(lambda leaf: f'axes of {leaf.shape}', params)
    return {'params': params, 'params_axes': axes}


class EncoderDecoderModel:
  """T5X's model, as far as the plug-in needs it."""

  def __init__(self, module, decode_fn):
    self.module = module
    self._decode_fn = decode_fn
    self.output_vocabulary = types.SimpleNamespace(eos_id=EOS)
    self._default_decoder_params = types.SimpleNamespace(
      return_all_decodes=False, num_decodes=1
    )

  @property
  def decode_fn(self):
    return self._decode_fn

  def get_initial_variables(self, rng, input_shapes, input_types=None):
    token = jnp.ones(input_shapes['encoder_input_tokens'], jnp.int32)
    return self.module.init(rng, token, token, token)

  def score_batch(self, params, batch):
    return params, batch


class InteractiveModel:
  """T5X's class: it makes its own configuration of the restoring."""

  def __init__(self, model, dtype, checkpoint_path):
    self._restore_checkpoint_cfg = None
    self._restore_checkpoint_cfg = types.SimpleNamespace(
      path=checkpoint_path, dtype=dtype, state_transformation_fns=('first',)
    )
    self.model = model
    self.restored = self._restore_checkpoint_cfg.state_transformation_fns


@pytest.fixture(autouse=True)
def t5x(monkeypatch):
  module = types.ModuleType('t5x')
  module.EncoderDecoderModel = EncoderDecoderModel
  module.InteractiveModel = InteractiveModel
  for name in ('t5x', 't5x.models', 't5x.interactive_model'):
    monkeypatch.setitem(sys.modules, name, module)
  t5x_plugin._class_of.cache_clear()
  yield
  t5x_plugin._class_of.cache_clear()


TARGET, DRAFT = (small_vocabulary.network(n, 40) for n in (2, 1))


@functools.cache
def weights(which: str):
  """Of the target, and of a drafter that often agrees with it."""
  params = small_vocabulary.weights(TARGET, seed=3)
  if which == 'draft':
    params['decoder'].pop('layers_1')
  return params


def greedy(**values):
  settings = {'temperature': 0.0, 'topk': 0} | values
  return functools.partial(t5x_plugin.temperature_sample, **settings)


def plugged(decode_fn=None, draft: Any = None, **settings):
  theirs = EncoderDecoderModel(Transformer(TARGET), decode_fn or greedy())
  draft = draft or Transformer(DRAFT)
  return t5x_plugin.EncoderDecoderModel(theirs, draft, **settings)


@functools.partial(jax.jit, static_argnums=(0, 4))
def _predict(model, variables, rng, decoder_params, settings):
  target, mutables, read = variables
  given = {'decoder_params': decoder_params, 'flax_mutables': mutables}
  return model.predict_batch_with_aux(target, read, rng, **given, **settings)


def predict(model, seed=None, decoder_params=None, **settings):
  mutables = flax.core.freeze({'drafter': weights('draft')})
  variables = flax.core.freeze(weights('target')), mutables, batch()
  rng = None if seed is None else jax.random.PRNGKey(seed)
  settings = flax.core.freeze(settings)
  tokens, scores = _predict(model, variables, rng, decoder_params, settings)
  return np.asarray(tokens), np.asarray(scores['scores'])


def forced(tokens):
  """The target's logits of each token, all read at once."""
  shifted = np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
  inputs = batch()['encoder_input_tokens']
  inputs = np.repeat(inputs, len(tokens) // 3, axis=0)
  return jax.jit(TARGET.logits)(weights('target'), inputs, shifted)


def ends(tokens):
  """Index behind each row's end of sequence, or L."""
  at = tokens == EOS
  return np.where(at.any(1), at.argmax(1) + 1, tokens.shape[1])


def sums(logits, tokens):
  """Of each row's log-probabilities, up to its end."""
  each = np.asarray(probs.log_prob_of(logits, jnp.asarray(tokens)))
  live = np.arange(LENGTH) < ends(tokens)[:, None]
  return np.where(live, each, 0.0).sum(1)


def check_greedy(tokens, first=(0, 0, 0), last=LENGTH, rows=range(3)):
  """Each token is the target's argmax, from `first` up to the end."""
  best = np.asarray(jnp.argmax(forced(tokens), -1))
  for row in rows:
    stop = min(ends(tokens)[row], first[row] + last)
    place = slice(first[row], stop)
    np.testing.assert_array_equal(tokens[row, place], best[row, place])
    assert not tokens[row, stop:].any()


def test_greedy_tokens_are_the_targets():
  """Their scores are the target's own, where T5X does not rescale them."""
  tokens, scores = predict(plugged(greedy(rescale_log_probs=False)))
  assert tokens.shape == (3, LENGTH) and scores.shape == (3,)
  check_greedy(tokens)
  np.testing.assert_allclose(scores, sums(forced(tokens), tokens), rtol=1e-4)
  assert (scores < -0.1).all()


def test_it_is_speculation(monkeypatch):
  """Fewer rounds than tokens, and the drafter's own parameters decide."""
  decode, rounds = Loop.decode, []

  def counted(self, params, request):
    done = decode(self, params, request)
    rounds.append(done.stats.num_rounds)
    return done

  @jax.jit
  def rounds_of(draft):
    params = PairParams(weights('target'), draft)
    inputs = batch()['encoder_input_tokens']
    loop = Loop(TARGET, small_model(TARGET))
    pair = Pair(loop, params, inputs, gamma=3, has_prompt=False)
    greedy()(jnp.zeros((3, LENGTH), jnp.int32), {}, pair, eos_id=-1)
    return rounds.pop()

  monkeypatch.setattr(Loop, 'decode', counted)
  assert rounds_of(weights('target')).tolist() == [3, 3, 3]
  assert min(rounds_of(small_vocabulary.weights(TARGET, 4))) > 3


def test_an_output_begins_with_its_prompt():
  """As T5X returns it, without the prompt's end; steps count behind it."""
  model = plugged(greedy(max_decode_steps=4, max_decode_steps_hard_limit=3))
  tokens, scores = predict(model, prompt_with_targets=True)
  assert tokens[0, :2].tolist() == [17, 30]
  prompt = batch()['decoder_input_tokens']
  np.testing.assert_array_equal(tokens[1, :-1], prompt[1, 1:])
  check_greedy(tokens, first=(2, LENGTH - 1, 4), last=3)
  assert not scores.any()  # T5X's scores of a greedy output, rescaled


@pytest.mark.slow
def test_samples_have_keys_an_order_and_scores():
  sampling = probs.SamplingConfig(0.7, top_k=5)
  model = plugged(greedy(temperature=0.7, topk=5))
  all_of_four = {'num_decodes': 4, 'return_all_decodes': True}
  tokens, scores = predict(model, seed=1, **all_of_four)
  assert tokens.shape == (3, 4, LENGTH) and scores.shape == (3, 4)
  assert (tokens != predict(model, seed=2, **all_of_four)[0]).any()
  assert (np.diff(scores, axis=1) >= 0).all()  # the best one last
  # Scores are of the distribution that was drawn from.
  flat = tokens.reshape(12, LENGTH)
  law = probs.standardise_batch(forced(flat), sampling.params(12))
  want = sums(jnp.log(law), flat).reshape(3, 4)
  np.testing.assert_allclose(scores, want, rtol=1e-3)


@pytest.mark.slow
def test_decoder_params_reach_the_decode_function():
  """Up to 1e-4 a temperature is the argmax, as for T5X; one a row."""
  warm = {'temperature': np.array([1e-4, 2.0, 0.0], np.float32)}
  tokens, _ = predict(plugged(), decoder_params=warm)
  check_greedy(tokens, rows=(0, 2))
  with pytest.raises(AssertionError):
    check_greedy(tokens, rows=(1,))


def test_bad_input(monkeypatch):
  model, key = plugged(), jax.random.PRNGKey(0)
  wide = Transformer(small_vocabulary.network(1, 41))
  deep = Transformer(TARGET, num_decoder_layers=3)

  def predicted(**values):
    return predict(plugged(greedy(**values)))

  for words, function in (
    ('model: .*t5x.models.Enc', lambda: type(model)(deep, deep)),
    ('vocab_size: .*40, got 41', lambda: plugged(draft=wide)),
    ('gamma: .* from 1', lambda: plugged(gamma=0)),
    ('draft_module: ', lambda: plugged(draft=types.SimpleNamespace())),
    ('missing.*layers_2.*scalable_t5', lambda: plugged(draft=deep)),
    ('decode_fn: .* got .print', lambda: plugged(functools.partial(print))),
    ('.@t5x_plugin.restore_drafter', lambda: model.predict_batch({}, batch())),
    ('topk: .* got 3', lambda: predicted(temperature=1.0, topk=3, topp=0.5)),
    ('max_decode_steps: .* got 13', lambda: predicted(max_decode_steps=13)),
    (
      'one PRNG key',
      lambda: model.predict_batch_with_aux({}, batch(), key, {'decode_rng': 1}),
    ),
  ):
    with pytest.raises(ValueError, match=words):
      function()
  t5x_plugin._class_of.cache_clear()
  monkeypatch.setitem(sys.modules, 't5x.models', None)
  with pytest.raises(ValueError, match='no registry has'):
    plugged()


def test_it_is_t5xs_model_and_a_collection_of_the_drafter():
  shapes = {'encoder_input_tokens': (1, 1)}
  model = plugged()
  assert isinstance(model, EncoderDecoderModel)
  assert model.score_batch('params', 'batch') == ('params', 'batch')
  made = model.get_initial_variables(jax.random.key(0), shapes)
  assert set(made) == {'params', 'params_axes', 'drafter', 'drafter_axes'}
  shape_of = jax.tree.map(jnp.shape, flax.core.unfreeze(made['drafter']))
  assert shape_of == jax.tree.map(jnp.shape, weights('draft'))


def test_restoring_adds_the_drafter(folder):
  """Of a T5X state, and by T5X's InteractiveModel."""
  checkpoints.save_t5x(folder / 'draft', weights('draft'), 0)
  state = {'target': 'as it is', 'state': {'step': 3}}
  settings = {'checkpoint': folder / 'draft', 'module': Transformer(DRAFT)}
  restored = t5x_plugin.restore_drafter(state, {}, **settings)
  assert {name: restored[name] for name in state} == state
  drafter_params = restored['flax_mutables']['drafter']
  jax.tree.map(np.testing.assert_array_equal, drafter_params, weights('draft'))
  model = t5x_plugin.InteractiveModel(
    model=plugged(),
    draft_checkpoint=folder / 'draft',
    dtype='bfloat16',
    checkpoint_path='target',
  )
  first, second = model.restored
  assert isinstance(model, InteractiveModel) and first == 'first'
  made = second({}, {}, is_resuming=True)['flax_mutables']['drafter']
  kernel = made['decoder']['logits_dense']['kernel']
  assert kernel.dtype == jnp.dtype('bfloat16')
