"""A drafter without an encoder, which reads its target's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
import toy_models
import toy_requests
from small_vocabulary import network, train, weights
from specdec_jax import training
from specdec_jax.checkpoints import convert, huggingface, t5x
from specdec_jax.checkpoints.fingerprint import fingerprint
from specdec_jax.decoding import pool as decode_pool
from specdec_jax.decoding import speculative
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import example_keys, new_request
from specdec_jax.drafters.small_model import small_model
from specdec_jax.drafters.uniform import uniform
from specdec_jax.models import sizes
from specdec_jax.models.gpt import GPT, GPTConfig
from specdec_jax.models.model import Model
from specdec_jax.models.t5 import T5
from specdec_jax.probs import SamplingConfig
from specdec_jax.training import data, distill
from specdec_jax.training.pairs import TokenPairs
from specdec_jax.training.slicing import sliced

TARGET = network(num_decoder_layers=2)
ALONE = T5(
  dataclasses.replace(TARGET.config, num_encoder_layers=0, num_decoder_layers=1)
)
TEXTS = [
  'the red house sleeps',
  'a dog',
  'blue tree sings here there a cat runs',
  'old',
  'there the cat',
]


@functools.cache
def target_params(seed=1):
  return weights(TARGET, seed)


def draft_params(kept='spaced'):
  return sliced(target_params(), TARGET.config, ALONE.config, kept)


def new_pair():
  return PairParams(target_params(), draft_params())


def first_layer():
  """The target's embedding, first decoder layer and output layer."""
  params = target_params()
  decoder = {k: v for k, v in params['decoder'].items() if k != 'layers_1'}
  return {'token_embedder': params['token_embedder'], 'decoder': decoder}


def request_of(gamma=3, rows=3, slots=12, **changes):
  rng = np.random.default_rng(0)
  inputs = rng.integers(3, 200, (rows, 7)).astype(np.int32)
  inputs[1, 4:] = 0
  return new_request(
    inputs,
    example_keys(0, np.arange(rows, dtype=np.uint32)),
    SamplingConfig(0.0),
    slots=slots,
    gamma=gamma,
    stop_ids=[1],
    **changes,
  )


@pytest.fixture(scope='module')
def vocabulary(tmp_path_factory):
  return train(tmp_path_factory.mktemp('vocabulary'))


@pytest.fixture(scope='module')
def engine(vocabulary):
  return engine_of(vocabulary, draft=Model(ALONE, draft_params()))


def engine_of(vocabulary, draft, target=None):
  return specdec_jax.Engine(
    target or Model(TARGET, target_params()),
    draft,
    tokenizer=vocabulary,
    gamma=3,
    max_input_len=24,
    max_decode_len=20,
    batch_size=4,
  )


# --- The network --------------------------------------------------------------


def test_names_shapes_and_number_of_parameters():
  params = ALONE.init(jax.random.key(0))
  assert set(params) == {'token_embedder', 'decoder'}
  leaves = jax.tree.leaves(params)
  assert sizes.num_params(ALONE.config) == sum(leaf.size for leaf in leaves)
  narrow = dataclasses.replace(ALONE.config, emb_dim=8, encoder_dim=16)
  params = T5(narrow).init(jax.random.key(0))
  attention = params['decoder']['layers_0']['encoder_decoder_attention']
  assert attention['key']['kernel'].shape == (16, 16)
  leaves = jax.tree.leaves(params)
  assert sizes.num_params(narrow) == sum(leaf.size for leaf in leaves)


def test_the_same_encoder_output_gives_the_same_bits():
  """Both caches hold the same keys and values of the inputs."""
  request = request_of()
  params = PairParams(target_params(), first_layer())
  start = jax.jit(
    lambda params: speculative.start(
      TARGET, small_model(ALONE), params, request
    )
  )
  state = start(params)
  for name in ('cross_keys', 'cross_values'):
    np.testing.assert_array_equal(
      getattr(state.target_cache, name)[0],
      getattr(state.drafter_state, name)[0],
    )
  np.testing.assert_array_equal(
    state.target_cache.cross_bias, state.drafter_state.cross_bias
  )
  # Not by chance: another input has others.
  keys = state.drafter_state.cross_keys[0]
  assert not np.array_equal(keys[0], keys[2])


def products(start, params) -> int:
  return jax.jit(start).lower(params).as_text().count('stablehlo.dot_general')


def test_the_encoder_runs_once():
  """A drafter adds two products a layer; one with an encoder adds that too."""
  request = request_of()

  def of(draft):
    drafter = small_model(draft)
    params = PairParams(target_params(), weights(draft, 2))
    return products(
      lambda params: speculative.start(TARGET, drafter, params, request),
      params,
    )

  plain = products(
    lambda params: Loop(TARGET).start(params, request.replace(gamma=0)),
    PairParams(target_params(), None),
  )
  encoder = products(
    lambda params: TARGET.encode(params, request.inputs), target_params()
  )
  assert encoder > 0
  assert of(ALONE) == plain + 2
  assert of(network(num_decoder_layers=1)) == plain + encoder + 2


def test_needs_what_an_encoder_says():
  tokens = jnp.ones((1, 3), jnp.int32)
  params = draft_params()
  with pytest.raises(ValueError, match='has no encoder.*can only draft'):
    ALONE.prefill(params, tokens, 8)
  with pytest.raises(ValueError, match='has no encoder'):
    ALONE.encode(params, tokens)
  with pytest.raises(ValueError, match='width 16, got one of width 12'):
    ALONE.logits(params, tokens, tokens, encoded=jnp.ones((1, 3, 12)))
  with pytest.raises(ValueError, match='Leave it out'):
    dataclasses.replace(TARGET.config, encoder_dim=8)


# --- Its slice ----------------------------------------------------------------


@pytest.mark.parametrize('kept', ['spaced', 'first', 'last'])
def test_a_slice_reads_the_targets_encoder_as_the_target_does(kept):
  """All layers are exact; one is a target of that layer alone."""
  inputs = jnp.array([[5, 9, 33, 1, 0]])
  tokens = jnp.array([[0, 7, 8]])
  encoded = TARGET.encode(target_params(), inputs)
  whole = dataclasses.replace(TARGET.config, num_encoder_layers=0)
  params = sliced(target_params(), TARGET.config, whole, kept)
  np.testing.assert_allclose(
    T5(whole).logits(params, inputs, tokens, encoded=encoded),
    TARGET.logits(target_params(), inputs, tokens),
    atol=1e-4,
  )
  # The decoder of one layer, and its own way of being cut.
  layer = 'layers_1' if kept == 'last' else 'layers_0'
  decoder = dict(target_params()['decoder'])
  chosen = decoder.pop(layer)
  decoder.pop('layers_0', None), decoder.pop('layers_1', None)
  by_hand = first_layer() | {'decoder': decoder | {'layers_0': chosen}}
  np.testing.assert_allclose(
    ALONE.logits(draft_params(kept), inputs, tokens, encoded=encoded),
    ALONE.logits(by_hand, inputs, tokens, encoded=encoded),
    atol=1e-4,
  )


def test_a_narrow_slice_reads_the_whole_encoder():
  narrow = dataclasses.replace(ALONE.config, emb_dim=8, encoder_dim=16)
  have = sliced(target_params(), TARGET.config, narrow)
  want = jax.eval_shape(T5(narrow).init, jax.random.key(0))
  assert jax.tree.map(jnp.shape, have) == jax.tree.map(jnp.shape, want)
  with pytest.raises(ValueError, match='emb_dim; got 8, the target has 16'):
    wrong = dataclasses.replace(narrow, encoder_dim=0)
    sliced(target_params(), TARGET.config, wrong)
  with pytest.raises(ValueError, match='slice_layers'):
    sliced(target_params(), TARGET.config, ALONE.config, 'middle')


# --- In the loops -------------------------------------------------------------


def test_greedy_equality_in_a_ragged_batch_and_a_pool(engine):
  plain = engine.generate(TEXTS[:4], speculative=False)
  have = engine.generate(TEXTS[:4])
  assert [c.tokens for c in have] == [c.tokens for c in plain]
  assert sum(c.stats.num_tested for c in have) > 0
  # More texts than rows: each finished one makes room.
  pooled = engine.generate(TEXTS, batch_size=2)
  want = engine.generate(TEXTS, speculative=False, batch_size=2)
  assert [c.tokens for c in pooled] == [c.tokens for c in want]


@pytest.mark.slow
def test_beams_are_the_plain_ones(engine):
  options = {'num_beams': 2, 'num_samples': 2}
  have = engine.generate(TEXTS[:2], speculative=True, **options)
  want = engine.generate(TEXTS[:2], speculative=False, **options)
  assert [c.tokens for c in have] == [c.tokens for c in want]
  assert sum(c.stats.num_tested for c in have) > 0


def test_rows_of_the_plain_loop_get_the_drafter():
  """In the middle of their outputs; what they become is the same."""
  pair = new_pair()
  loop = Loop(TARGET, small_model(ALONE))
  request = request_of(gamma=0, slots=18)
  plain = Loop(TARGET)
  want = jax.jit(plain.decode)(pair._replace(draft=None), request)

  @jax.jit
  def switched(pair, request):
    alone = pair._replace(draft=None)
    pool = decode_pool.read(plain, alone, request)
    state = plain.run(alone, pool.request, pool.state, 3)
    pool = pool.replace(state=state)
    pool = decode_pool.with_drafter(loop, pair, pool, 2)
    view = decode_pool.run(loop, pair, pool, 40, 40, 2)[1]
    return view.generation

  have = switched(pair, request)
  np.testing.assert_array_equal(have.tokens[:, :18], want.tokens[:, :18])
  assert have.stats.num_tested.sum() > 0


@pytest.mark.slow
def test_what_the_encoder_says_reaches_the_draft():
  """The target's own chain is never rejected, unless it is deaf."""
  target = toy_models.random_markov(5, 5, order=2, scale=1.2, input_scale=1.0)
  table = np.asarray(target.params['table'])
  inputs = (2, 3, 4, 2, 0)
  sampling = SamplingConfig(1.0)
  request = toy_requests.request_of(
    6_000, 3, sampling, 3, inputs=inputs, seed=1
  )
  law = target.law(3, sampling, inputs=inputs)

  def decode(draft, more=0):
    """The share of the proposals that is kept, and the p-value of the law."""

    def judge(request, draft, logits, keys):
      verdict = speculative.judge(request, draft, logits, keys)
      kept = jnp.minimum(verdict.num_accepted + more, draft.length)
      return verdict.replace(num_accepted=kept)

    loop = Loop(target, small_model(draft), judge)
    pair = PairParams(target.params, draft.params)
    found = jax.device_get(toy_requests.quick_jit(loop.decode)(pair, request))
    stats = found.stats
    counts = toy_models.count_ngrams(found.tokens, 5)
    return (
      stats.num_accepted.sum() / stats.num_tested.sum(),
      toy_models.chi_squared_p_value(counts, law),
    )

  hears = toy_models.MarkovOnEncoder(table)
  deaf = toy_models.MarkovModel(table)
  kept, p_value = decode(hears)
  assert kept == 1 and p_value > 1e-3
  kept, p_value = decode(deaf)
  assert kept < 0.9 and p_value > 1e-3
  other = toy_models.random_markov(6, 5, order=2, scale=0.8).params['table']
  other = toy_models.MarkovOnEncoder(np.asarray(other))
  kept, p_value = decode(other)
  assert kept < 0.9 and p_value > 1e-3
  # The control keeps what should be rejected.
  assert decode(other, more=1)[1] < 1e-3


# --- Another target is refused, before anything compiles ----------------------


def test_another_target_is_refused(vocabulary):
  made = Model(
    ALONE,
    draft_params(),
    name='mine',
    made_for=fingerprint(target_params()),
  )
  engine_of(vocabulary, made)
  other = Model(TARGET, target_params(2), name='other')
  with pytest.raises(
    ValueError, match='made for the target with.*other.*distil'
  ):
    engine_of(vocabulary, made, other)


def test_a_target_of_another_width_is_refused(vocabulary):
  wide = T5(dataclasses.replace(TARGET.config, emb_dim=24))
  target = Model(wide, weights(wide, 0))
  with pytest.raises(ValueError, match='width 16, the target has.*width 24'):
    engine_of(vocabulary, Model(ALONE, draft_params()), target)


def test_a_target_without_an_encoder_is_refused(vocabulary):
  gpt = GPT(
    GPTConfig(
      vocab_size=288,
      emb_dim=16,
      num_heads=2,
      num_layers=1,
      head_dim=8,
      mlp_dim=16,
    )
  )
  draft = Model(ALONE, draft_params())
  other = Model(gpt, weights(gpt, 0))
  with pytest.raises(ValueError, match="reads its target's, but GPT has none"):
    engine_of(vocabulary, draft, other)
  own = uniform(288)._replace(reads_encoder=True)  # of somebody's own
  with pytest.raises(ValueError, match="reads its target's, but GPT has none"):
    engine_of(vocabulary, own, other)
  with pytest.raises(ValueError, match='can draft for that model'):
    engine_of(vocabulary, None, draft)


def test_both_formats_remember_the_target(tmp_path):
  made_for = fingerprint(target_params())
  params = draft_params()
  huggingface.save_huggingface(
    tmp_path / 'folder', ALONE.config, params, about={'target': made_for}
  )
  t5x.save_t5x(tmp_path / 'file', params, 3, about={'target': made_for})
  for model in (
    specdec_jax.load(tmp_path / 'folder'),
    specdec_jax.load(tmp_path / 'file', ALONE),
  ):
    assert model.made_for == made_for
    assert model.network == ALONE
    jax.tree.map(np.testing.assert_array_equal, model.params, params)
  # A conversion keeps it, both ways.
  for source, output, kind in (
    ('file', 'folder2', 'safetensors'),
    ('folder', 'file2', 't5x'),
  ):
    paths = str(tmp_path / source), str(tmp_path / output)
    convert.convert(convert.ConvertConfig(*paths, kind))
  again = specdec_jax.load(tmp_path / 'folder2')
  assert again.made_for == made_for and again.network == ALONE
  assert specdec_jax.load(tmp_path / 'file2', ALONE).made_for == made_for
  t5x.save_t5x(tmp_path / 'unknown', params, 3)
  assert specdec_jax.load(tmp_path / 'unknown', ALONE).made_for == ''


# --- Distilled ----------------------------------------------------------------


def test_distillation_reads_the_frozen_targets_encoder():
  """All of the target's decoder on its encoder is the target."""
  whole = dataclasses.replace(TARGET.config, num_encoder_layers=0)
  params = sliced(target_params(), TARGET.config, whole)
  rng = np.random.default_rng(0)
  batch = data.Batch(*rng.integers(3, 200, (2, 4, 6)).astype(np.int32))

  def means(target):
    objective = distill.Distillation(T5(whole), TARGET, target)
    found = jax.jit(lambda p: objective.evaluate(p, batch))(params)
    return {name: found[name] / found['tokens'] for name in found}

  same, other = means(target_params()), means(target_params(2))
  assert same['alpha'] > 0.9999 and same['agreement'] == 1
  assert other['alpha'] < 0.9


def test_runs_that_cannot_be(tmp_path):
  file = tmp_path / 'pairs.npz'
  TokenPairs.from_lists([[3, 4]] * 4, [[5]] * 4).save(file)

  def run(**changes):
    return training.TrainRun(ALONE, str(tmp_path), str(file), **changes)

  with pytest.raises(ValueError, match='has none. Expected learning=FromTar'):
    run()
  with pytest.raises(ValueError, match='one of width 16; the target.*has 24'):
    wide = T5(dataclasses.replace(TARGET.config, emb_dim=24))
    run(learning=training.FromTarget(wide, 'x'))
  with pytest.raises(ValueError, match='bleu_examples.*expected 0'):
    learning = training.FromTarget(TARGET, 'x')
    run(learning=learning, bleu_examples=2, vocab_path='x')
