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
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.t5x_plugin import decode_fns, drafter

LENGTH, EOS = 12, 1


@dataclasses.dataclass
class Config:
  """T5X's `network.T5Config`, with the attributes that it has."""

  vocab_size: int = 40
  dtype: Any = jnp.float32
  emb_dim: int = 16
  num_heads: int = 2
  num_encoder_layers: int = 1
  num_decoder_layers: int = 2
  head_dim: int = 8
  mlp_dim: int = 32
  mlp_activations: Any = ('gelu', 'linear')
  dropout_rate: float = 0.1
  logits_via_embedding: bool = False
  float32_attention_logits: bool = False


def ours(config: Config) -> T5:
  """The network that a module of this configuration should become."""
  return T5(
    T5Config(
      vocab_size=config.vocab_size,
      emb_dim=config.emb_dim,
      num_heads=config.num_heads,
      num_encoder_layers=config.num_encoder_layers,
      num_decoder_layers=config.num_decoder_layers,
      head_dim=config.head_dim,
      mlp_dim=config.mlp_dim,
    )
  )


class Transformer:
  """A module of T5X: a config, and variables with T5X's names."""

  def __init__(self, config: Any, renamed: bool = False):
    self.config = config
    self.renamed = renamed

  def init(self, key, encoder, decoder, targets, enable_dropout=True):
    del encoder, decoder, targets, enable_dropout
    params = ours(self.config).init(key)
    if self.renamed:
      params['decoder']['decoder'] = params['decoder'].pop('layers_0')
    axes = jax.tree.map(lambda leaf: f'axes of {leaf.shape}', params)
    return {'params': params, 'params_axes': axes}


class EncoderDecoderModel:
  """T5X's model, as far as the plug-in needs it."""

  def __init__(self, module, decode_fn, num_decodes=1):
    self.module = module
    self._decode_fn = decode_fn
    self.output_vocabulary = types.SimpleNamespace(eos_id=EOS)
    self._default_decoder_params = types.SimpleNamespace(
      return_all_decodes=False, num_decodes=num_decodes
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
  package = types.ModuleType('t5x')
  for name, made in (
    ('models', EncoderDecoderModel),
    ('interactive_model', InteractiveModel),
  ):
    module = types.ModuleType(f't5x.{name}')
    setattr(module, made.__name__, made)
    monkeypatch.setitem(sys.modules, f't5x.{name}', module)
  monkeypatch.setitem(sys.modules, 't5x', package)
  t5x_plugin._class_of.cache_clear()
  yield
  t5x_plugin._class_of.cache_clear()


TARGET, DRAFT = Config(), Config(num_decoder_layers=1)


@functools.cache
def weights(which: str):
  """Of the target, and of a drafter that often agrees with it."""
  params = small_vocabulary.weights(ours(TARGET), seed=3)
  if which == 'draft':
    params['decoder'].pop('layers_1')
  return params


def greedy(**values):
  settings = {'temperature': 0.0, 'topk': 0} | values
  return functools.partial(t5x_plugin.temperature_sample, **settings)


def plugged(decode_fn=None, draft: Any = DRAFT, **settings):
  theirs = EncoderDecoderModel(Transformer(TARGET), decode_fn or greedy())
  return t5x_plugin.EncoderDecoderModel(theirs, Transformer(draft), **settings)


def batch(rows=3):
  rng = np.random.default_rng(0)
  inputs = rng.integers(2, 40, (rows, 7), np.int32)
  inputs[0, 4:] = 0
  prompt = np.zeros((rows, LENGTH), np.int32)
  prompt[0, 1:4] = 5, 9, EOS
  prompt[1, 1:] = rng.integers(2, 40, LENGTH - 1)
  return {'encoder_input_tokens': inputs, 'decoder_input_tokens': prompt}


@functools.partial(jax.jit, static_argnums=(0, 3))
def _predict(model, rng, variables, settings):
  return model.predict_batch_with_aux(
    variables[0],
    variables[2],
    rng,
    flax_mutables=variables[1],
    **dict(settings),
  )


def predict(model, seed=0, rows=3, **settings):
  mutables = flax.core.freeze({'drafter': weights('draft')})
  variables = flax.core.freeze(weights('target')), mutables, batch(rows)
  key = jax.random.PRNGKey(seed)
  tokens, aux = _predict(model, key, variables, tuple(settings.items()))
  return np.asarray(tokens), np.asarray(aux['scores'])


def forced(tokens, rows=3):
  """The target's logits of each token, all read at once."""
  shifted = np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
  inputs = np.repeat(
    batch(rows)['encoder_input_tokens'], len(tokens) // rows, axis=0
  )
  return _logits(ours(TARGET), weights('target'), inputs, shifted)


_logits = jax.jit(
  lambda network, *args: network.logits(*args), static_argnums=0
)


def ends(tokens):
  """Index behind each row's end of sequence, or L."""
  at = tokens == EOS
  return np.where(at.any(1), at.argmax(1) + 1, tokens.shape[1])


def check_greedy(tokens, first=(0, 0, 0), last=LENGTH):
  """Each token is the target's argmax, from `first` up to the end."""
  best = np.asarray(jnp.argmax(forced(tokens), -1))
  for row, start, end in zip(range(3), first, ends(tokens), strict=True):
    stop = min(end, start + last)
    np.testing.assert_array_equal(
      tokens[row, start:stop], best[row, start:stop]
    )
    assert not tokens[row, stop:].any()


def test_greedy_tokens_are_the_targets():
  tokens, scores = predict(plugged())
  assert tokens.shape == (3, LENGTH) and scores.shape == (3,)
  check_greedy(tokens)
  assert not scores.any()  # T5X's scores of a greedy output, rescaled
  _, raw = predict(plugged(greedy(rescale_log_probs=False)))
  every = probs.log_prob_of(forced(tokens), jnp.asarray(tokens))
  live = np.arange(LENGTH) < ends(tokens)[:, None]
  np.testing.assert_allclose(raw, np.sum(every * live, 1), rtol=1e-4)
  assert (raw < -0.1).all()


def test_an_output_ends_with_the_end_of_the_vocabulary():
  whole, _ = predict(plugged())
  model = plugged()
  end = int(whole[0, 5])
  model.output_vocabulary = types.SimpleNamespace(eos_id=end)
  tokens, _ = predict(model)
  behind = np.cumsum(whole == end, axis=1) - (whole == end) > 0
  np.testing.assert_array_equal(tokens, np.where(behind, 0, whole))
  assert behind[0, -1]


def test_it_is_speculation():
  """Fewer rounds than tokens, and the drafter's own parameters decide."""

  def rounds(draft):
    pair = decode_fns.Pair(
      Counting(ours(TARGET), small_model(ours(TARGET))),
      PairParams(weights('target'), draft),
      batch()['encoder_input_tokens'],
      gamma=3,
      has_prompt=False,
    )
    greedy()(jnp.zeros((3, LENGTH), jnp.int32), {}, pair, eos_id=-1)
    return Counting.stats[-1].num_rounds.tolist()

  other = small_vocabulary.weights(ours(TARGET), seed=4)
  assert rounds(weights('target')) == [3, 3, 3]
  assert min(rounds(other)) > 3


class Counting(Loop):
  stats: list = []

  def decode(self, params, request):
    done = super().decode(params, request)
    self.stats.append(done.stats)
    return done


def test_an_output_begins_with_its_prompt():
  """As T5X returns it, and without the prompt's end of sequence."""
  tokens, _ = predict(plugged(), prompt_with_targets=True)
  assert tokens[0, :2].tolist() == [5, 9]
  prompt = batch()['decoder_input_tokens']
  np.testing.assert_array_equal(tokens[1, :-1], prompt[1, 1:])
  check_greedy(tokens, first=(2, LENGTH - 1, 0))


@pytest.mark.parametrize(
  'hard_limit, steps', [(None, 4), pytest.param(3, 3, marks=pytest.mark.slow)]
)
def test_steps_are_counted_after_the_prompt(hard_limit, steps):
  model = plugged(
    greedy(max_decode_steps=4, max_decode_steps_hard_limit=hard_limit)
  )
  tokens, _ = predict(model, prompt_with_targets=True)
  check_greedy(tokens, first=(2, LENGTH - 1, 0), last=steps)


SAMPLES = {'num_decodes': 4, 'return_all_decodes': True}


def test_samples_have_keys_and_an_order():
  model = plugged(greedy(temperature=1.0))
  tokens, scores = predict(model, seed=1, **SAMPLES)
  assert tokens.shape == (3, 4, LENGTH) and scores.shape == (3, 4)
  again, _ = predict(model, seed=1, **SAMPLES)
  np.testing.assert_array_equal(tokens, again)
  assert (tokens != predict(model, seed=2, **SAMPLES)[0]).any()
  assert len({tuple(row) for row in tokens.reshape(12, -1).tolist()}) > 6
  assert (np.diff(scores, axis=1) >= 0).all()  # the best one last
  best, best_score = predict(model, seed=1, num_decodes=4)
  np.testing.assert_array_equal(best, tokens[:, -1])
  np.testing.assert_array_equal(best_score, scores[:, -1])


@pytest.mark.parametrize(
  'sampling, values, rescale',
  [
    (probs.SamplingConfig(0.7, top_k=5), {'topk': 5}, False),
    *(
      pytest.param(*other, True, marks=pytest.mark.slow)
      for other in (
        (probs.SamplingConfig(0.7, top_k=5), {'topk': 5}),
        (probs.SamplingConfig(1.3, top_p=0.8), {'topp': 0.8}),
      )
    ),
  ],
)
def test_scores_are_of_what_was_drawn_from(sampling, values, rescale):
  values = {'temperature': sampling.temperature} | values
  model = plugged(greedy(**values, rescale_log_probs=rescale))
  tokens, scores = predict(model, seed=1, **SAMPLES)
  flat = tokens.reshape(12, LENGTH)
  logits = forced(flat)
  if rescale:
    logits = jnp.log(probs.standardise_batch(logits, sampling.params(12)))
  each = np.asarray(probs.log_prob_of(logits, jnp.asarray(flat)))
  live = np.arange(LENGTH) < ends(flat)[:, None]
  expected = np.where(live, each, 0.0).sum(1).reshape(3, 4)
  np.testing.assert_allclose(scores, expected, rtol=1e-3)


@pytest.mark.slow
def test_decoder_params_reach_the_decode_function():
  """They may be traced, as T5X's callers may do; one temperature a row.

  Up to 1e-4 it is the argmax, as for T5X.
  """

  @jax.jit
  def run(temperature, topk):
    return plugged().predict_batch_with_aux(
      weights('target'),
      batch(),
      decoder_params={'temperature': temperature, 'topk': topk},
      num_decodes=2,
      return_all_decodes=True,
      flax_mutables={'drafter': weights('draft')},
    )[0]

  sure, _ = predict(plugged())
  warm = np.array([1e-4, 2.0, 0.0], np.float32)
  tokens = np.asarray(run(warm, 0))
  for row in (0, 2):
    np.testing.assert_array_equal(tokens[row], [sure[row]] * 2)
  assert (tokens[1, 0] != tokens[1, 1]).any()
  tokens = np.asarray(run(warm, 1))
  np.testing.assert_array_equal(tokens[:, 0], sure)


def test_one_key_only():
  decoder_params = {'decode_rng': jax.random.PRNGKey(0)}
  with pytest.raises(ValueError, match='one PRNG key'):
    plugged().predict_batch_with_aux(
      {}, batch(), jax.random.PRNGKey(1), decoder_params=decoder_params
    )


@pytest.mark.slow
def test_predict_batch_gives_the_tokens():
  model = plugged()
  tokens = model.predict_batch(
    weights('target'), batch(), None, {'drafter': weights('draft')}
  )
  np.testing.assert_array_equal(tokens, predict(model)[0])


@pytest.mark.parametrize(
  'values, message',
  [
    ({'temperature': 1.0, 'topk': 3, 'topp': 0.5}, 'not by both'),
    ({'max_decode_steps': LENGTH + 1}, 'max_decode_steps is 13'),
  ],
)
def test_arguments_that_t5x_refuses(values, message):
  with pytest.raises(ValueError, match=message):
    predict(plugged(greedy(**values)))


def beam_search(inputs):
  del inputs


@pytest.mark.parametrize(
  'decode_fn', [beam_search, functools.partial(beam_search, alpha=0.6)]
)
def test_a_decode_function_that_does_not_speculate(decode_fn):
  with pytest.raises(
    ValueError,
    match='beam_search .* = @t5x_plugin.temp.* or @t5x_plugin.beam_search',
  ):
    plugged(decode_fn)


def test_decode_functions_are_known_however_they_are_wrapped():
  @functools.wraps(t5x_plugin.temperature_sample)
  def as_gin_does(*args, **kwargs):
    return t5x_plugin.temperature_sample(*args, **kwargs)

  plugged(functools.partial(as_gin_does, temperature=0.0))


def test_what_is_no_pair():
  with pytest.raises(ValueError, match='must be a t5x.models.Enc.*Transformer'):
    t5x_plugin.EncoderDecoderModel(Transformer(TARGET), Transformer(DRAFT))
  with pytest.raises(ValueError, match="vocab_size 41, the target's module 40"):
    plugged(draft=dataclasses.replace(DRAFT, vocab_size=41))
  with pytest.raises(ValueError, match='gamma must be at least 1'):
    plugged(gamma=0)
  other = types.SimpleNamespace(hidden=3)
  with pytest.raises(ValueError, match='draft_module .* whose config says'):
    plugged(draft=other)


def test_a_module_with_other_parameters():
  with pytest.raises(
    ValueError, match='missing.*layers_0.*unknown.*scalable_t5'
  ):
    drafter.network_of(Transformer(TARGET, renamed=True))


def test_a_module_becomes_our_network():
  config = dataclasses.replace(TARGET, dtype=jnp.bfloat16)
  network = drafter.network_of(Transformer(config))
  expected = dataclasses.replace(ours(TARGET).config, dtype='bfloat16')
  assert network.config == expected


def test_variables_are_the_targets_and_a_collection_of_the_drafter():
  shapes = {'encoder_input_tokens': (1, 1)}
  made = plugged().get_initial_variables(jax.random.key(0), shapes)
  assert set(made) == {'params', 'params_axes', 'drafter', 'drafter_axes'}

  def shapes_of(tree):
    return jax.tree.map(jnp.shape, flax.core.unfreeze(tree))

  assert shapes_of(made['params']) == shapes_of(weights('target'))
  assert shapes_of(made['drafter']) == shapes_of(weights('draft'))
  axes = jax.tree.map(lambda shape: f'axes of {shape}', made['drafter'])
  assert jax.tree.structure(axes) == jax.tree.structure(made['drafter_axes'])


def test_restoring_adds_the_drafter(folder):
  checkpoints.save_t5x(folder / 'draft', weights('draft'), 0)
  state = {'target': 'as it is', 'state': {'step': 3}}
  settings = {'checkpoint': folder / 'draft', 'module': Transformer(DRAFT)}
  restored = t5x_plugin.restore_drafter(state, {}, **settings)
  assert {name: restored[name] for name in state} == state
  found = restored['flax_mutables']['drafter']
  jax.tree.map(np.testing.assert_array_equal, found, weights('draft'))
  half = t5x_plugin.restore_drafter(state, {}, dtype='bfloat16', **settings)
  dtypes = jax.tree.map(lambda x: x.dtype, half['flax_mutables']['drafter'])
  assert set(jax.tree.leaves(dtypes)) == {jnp.dtype('bfloat16')}
  settings['module'] = Transformer(TARGET)
  with pytest.raises(ValueError, match='num_decoder_layers'):
    t5x_plugin.restore_drafter(state, {}, **settings)


def test_a_drafter_that_was_not_restored():
  with pytest.raises(ValueError, match=r'\[@t5x_plugin.restore_drafter\]'):
    plugged().predict_batch({}, batch())


def test_the_interactive_model_restores_it_too(folder):
  checkpoints.save_t5x(folder / 'draft2', weights('draft'), 0)
  model = t5x_plugin.InteractiveModel(
    model=plugged(),
    draft_checkpoint=folder / 'draft2',
    dtype='bfloat16',
    checkpoint_path='target',
  )
  assert isinstance(model, InteractiveModel)
  first, second = model.restored
  assert first == 'first'
  found = second({}, {}, is_resuming=True)['flax_mutables']['drafter']
  kernel = found['decoder']['logits_dense']['kernel']
  assert kernel.dtype == jnp.dtype('bfloat16')


def test_it_is_t5xs_model_in_all_else():
  model = plugged()
  assert isinstance(model, EncoderDecoderModel)
  assert model.score_batch('params', 'batch') == ('params', 'batch')
  assert model.module.config is TARGET
  with pytest.raises(AttributeError, match='DecoderOnlyModel'):
    _ = t5x_plugin.DecoderOnlyModel


def test_without_t5x(monkeypatch):
  t5x_plugin._class_of.cache_clear()
  monkeypatch.setitem(sys.modules, 't5x.models', None)
  with pytest.raises(ValueError, match='no registry has'):
    plugged()
