"""Drafters through the engine: greedy outputs, what does not fit, heads.

In small in the conformance suite; here the models are real ones.
"""

import dataclasses
import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax as sd
import toy_models
import toy_requests
from small_vocabulary import VOCAB_SIZE, decoder_only, network, weights
from specdec_jax import checkpoints
from specdec_jax.checkpoints.disk_arrays import fingerprint
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters import heads as heads_module
from specdec_jax.drafters.heads import Heads, heads
from specdec_jax.models.transformer import Network
from specdec_jax.training.own_drafter import decoder_layers
from toy_beams import near

TEXTS = ['the red dog runs', 'a cat sleeps here', 'the old house', 'the the']
# Its head is padded to more ids than the vocabulary has.
TARGET = network(2, VOCAB_SIZE + 8)
TREE = sd.branching(3, (2, 1), 1)  # 9 nodes


def engine_of(tokenizer, target, drafter, **changes):
  options = {'gamma': 3, 'max_input_len': 32, 'max_decode_len': 24}
  return sd.Engine(target, drafter, tokenizer=tokenizer, **(options | changes))


def random_model(net, seed=1, **fields):
  return sd.Model(net, weights(net, seed), **fields)


def random_heads(num_heads, emb_dim, scale=1.0):
  """Heads that change the features, unlike untrained ones."""
  made = Heads(num_heads, emb_dim, 4)
  params = made.init(jax.random.key(3))
  for i, head in enumerate(params.values()):
    shape = head['wo']['kernel'].shape
    head['wo']['kernel'] = scale * jax.random.normal(jax.random.key(i), shape)
    head['wi']['bias'] += 0.1
  return made, params


def without_encoder(target):
  layers = {'num_encoder_layers': 0, 'num_decoder_layers': 1}
  config = dataclasses.replace(target.network.config, **layers)
  made = {'name': 'mine', 'made_for': fingerprint(target.params)}
  return sd.Model(sd.T5(config), decoder_layers(target.params, 1), **made)


@pytest.fixture(scope='module')
def target():
  """It likes an id that only padding has."""
  params = weights(TARGET, 0)
  params['decoder']['logits_dense']['kernel'][:, -1] *= 3
  return sd.Model(TARGET, params)


@pytest.fixture(scope='module')
def plain(target, tokenizer):
  """The target's own outputs."""
  made = engine_of(tokenizer, target, None).generate(TEXTS)
  assert any(VOCAB_SIZE + 7 in one.tokens for one in made)
  return [one.tokens for one in made]


def decoder_alone(_):
  """A drafter without an encoder reads the output, not the input."""
  return random_model(decoder_only())


def tree(target):
  """Often right, and often second or third."""
  model = sd.Model(TARGET, near(target.params, 0.1))
  return sd.small_model_tree(model, TREE)


def few_heads(_):
  return heads(*random_heads(2, TARGET.config.emb_dim, scale=0.1))


SLOW = pytest.mark.slow  # trees and heads are quick in the conformance suite


@pytest.mark.filterwarnings('ignore:The draft is decoder-only')
@pytest.mark.parametrize(
  'made_for',
  [decoder_alone, without_encoder]
  + [pytest.param(made, marks=SLOW) for made in (tree, few_heads)],
)
def test_greedy_outputs_are_the_targets_own(target, plain, tokenizer, made_for):
  found = engine_of(tokenizer, target, made_for(target)).generate(TEXTS)
  assert [one.tokens for one in found] == plain
  assert sum(one.stats.num_tested for one in found) > 0


# --- A translation memory -----------------------------------------------------


def test_what_was_said_before_costs_few_calls(target, plain, tokenizer):
  reads = engine_of(tokenizer, target, None).codec.input_ids
  said = [[*reads(t), *ids] for t, ids in zip(TEXTS, plain, strict=True)]
  drafter = sd.translation_memory(sd.remember(said[:2]), min_match=4)
  found = engine_of(tokenizer, target, drafter).generate(TEXTS)
  assert [one.tokens for one in found] == plain
  calls = [one.stats.num_target_calls for one in found]
  fewest = [-(-len(ids) // 4) for ids in plain]  # gamma is 3
  assert calls[:2] == fewest[:2] and calls[2:] > fewest[2:]


def test_a_memory_is_read_from_what_a_user_has(target, tokenizer, tmp_path):
  pairs = [('a cat', 'the dog'), ('the red house', 'here')]
  features = [({'inputs_pretokenized': one}, two) for one, two in pairs]
  whole = {'inputs': 'all', 'prediction': 'all', 'parts': pairs}
  files = {
    'pairs.tsv': '\n'.join('\t'.join(pair) for pair in [*pairs, ('a', '')]),
    'task.jsonl': _records(pairs, 'targets'),
    'predictions.jsonl': _records(pairs),
    'beams.jsonl': _records((source, ['a', said]) for source, said in pairs),
    'task.jsonl-00000-of-00001': _records(features),
    # A text with an error, and one that was split.
    'split.jsonl': _records([('a', None)]) + json.dumps(whole),
    'outputs.txt': '\n'.join(said for _, said in pairs),
  }
  for name, text in files.items():
    path = tmp_path / name
    path.write_text(text)
    engine = engine_of(tokenizer, target, None, memory=str(path))
    wanted = []
    for source, said in pairs:
      wanted += engine.codec.input_ids(source) if name != 'outputs.txt' else []
      wanted += engine.codec.output_ids(said)
    assert engine.drafter.params.tokens.tolist() == wanted
  wrong = {b'': 'two tokens or more.* 0', b'a\tb\tc\n': 'line 1'}
  wrong |= {b'a\t\xff\n': 'line 1.*UTF-8'}
  for text, message in wrong.items():
    path = tmp_path / 'broken.tsv'
    path.write_bytes(text)
    with pytest.raises(ValueError, match=message):
      engine_of(tokenizer, target, None, memory=str(path))


def _records(pairs, target='prediction'):
  lines = (json.dumps({'inputs': one, target: two}) for one, two in pairs)
  return ''.join(f'{line}\n' for line in lines)


# --- What does not fit --------------------------------------------------------


@pytest.fixture(scope='module')
def parts():
  target = random_model(network(2))
  return {
    'target': target,
    'other': random_model(network(2), seed=2, name='other'),
    'draft': random_model(network(1)),
    'decoder only': random_model(decoder_only()),
    'on encoder': without_encoder(target),
    'heads': heads(*random_heads(2, 16), (fingerprint(target.params),)),
    'tree': sd.small_model_tree(random_model(network(2), seed=3), TREE),
  }


def test_what_does_not_fit(parts, tokenizer):
  """A drafter is checked as what it is made of."""
  copies, draft = sd.prompt_lookup(), parts['draft']
  counts = [[0, 5, 6, 1]], 2, VOCAB_SIZE
  bigram, table = (
    sd.ngram(sd.fit_ngram_table(*counts, fingerprint=vocabulary))
    for vocabulary in ('', 'another')
  )
  sees_outputs = sd.with_fallback(copies, parts['decoder only'])
  with pytest.warns(UserWarning, match='The draft is decoder-only'):
    engine_of(tokenizer, parts['target'], sees_outputs)
  controls = sd.with_fallback(copies, draft), bigram
  for fits in (*controls, parts['on encoder'], parts['heads']):
    engine_of(tokenizer, parts['target'], fits)
  wider = sd.Model(network(1, VOCAB_SIZE + 2000), {})
  beyond = sd.remember([[5, VOCAB_SIZE]])
  # What nothing in the library is: it reads the encoder, and is no model.
  reads = sd.uniform(VOCAB_SIZE)._replace(reads_encoder=True)
  prints = [fingerprint(parts[name].params) for name in ('target', 'other')]
  of_another = f'(?s){prints[0]}.*other.*{prints[1]}'
  for of, drafter, said in (
    ('target', sd.translation_memory(beyond), 'memory: .*below 288, got 288'),
    ('target', wider, "draft's vocabulary .* 288 ids, got 2288"),
    ('target', sd.with_fallback(copies, wider), 'got 2288'),
    ('target', sd.cascade(draft, table), 'vocabulary of table of the draft'),
    ('decoder only', draft, 'draft: expected a decoder-only'),
    ('decoder only', parts['on encoder'], 'target: .*encoder'),
    ('decoder only', reads, 'target: .*encoder'),
    ('on encoder', None, 'target: .*encoder of its own'),
    ('other', parts['on encoder'], 'target: .*was made for.*other.*distil'),
    ('other', parts['heads'], of_another),
    ('other', sd.with_fallback(copies, parts['heads']), of_another),
  ):
    with pytest.raises(ValueError, match=said):
      engine_of(tokenizer, parts[of], drafter)
  with pytest.raises(ValueError, match='cascade: .*without a tree'):
    sd.cascade(draft, parts['tree'])
  for both in ((parts['tree'], draft), (copies, parts['tree'])):
    with pytest.raises(ValueError, match='with_fallback: .*without a tree'):
      sd.with_fallback(*both)


def test_a_small_model_is_itself_however_it_is_given(parts, tokenizer):
  """Its calibrations and runs are one drafter's; another's are not."""
  given = parts['draft'], sd.small_model(parts['draft']), parts['on encoder']
  engines = [engine_of(tokenizer, parts['target'], one) for one in given]
  one, same, other = (engine.fingerprints['draft'] for engine in engines)
  assert one == same != other


def test_what_is_for_chains_is_refused(parts, tokenizer):
  made = engine_of(tokenizer, parts['target'], parts['tree'])
  for options, field in (
    ({'lenience': 0.5}, 'lenience'),
    ({'temperature': 1.0, 'verification': 'block'}, 'verification'),
    ({'gamma': 'adaptive'}, 'gamma'),
    ({'num_beams': 2, 'speculative': True}, 'drafter'),
  ):
    with pytest.raises(ValueError, match=field):
      made.generate(TEXTS, **options)
  with pytest.raises(ValueError, match='trace: .*without a tree'):
    made.trace(TEXTS[0])
  assert made.num_programs == 0
  # Of a tree that its drafter does not announce there are no slots.
  silent = parts['tree']._replace(tree=None)
  with pytest.raises(ValueError, match='9 nodes on 3 levels'):
    engine_of(tokenizer, parts['target'], silent).generate(TEXTS)


# --- On the target's encoder --------------------------------------------------


@pytest.mark.parametrize(('kind', 'times'), [('on encoder', 1), ('draft', 2)])
def test_the_encoder_runs_once(parts, kind, times):
  draft, greedy = parts[kind], sd.SamplingConfig(0.0)
  request = toy_requests.request_of(3, 3, greedy, 12, inputs=(7, 8, 0), seed=0)
  loop = Loop(parts['target'].network, sd.small_model(draft.network))
  pair = PairParams(parts['target'].params, draft.params)
  noted = {'autospec': True, 'side_effect': Network.encode}
  with mock.patch.object(Network, 'encode', **noted) as encode:
    jax.eval_shape(loop.start, pair, request)
  assert encode.call_count == times


def test_needs_what_an_encoder_says(parts):
  alone, params = parts['on encoder'].network, parts['on encoder'].params
  tokens = np.ones((1, 3), np.int32)
  with pytest.raises(ValueError, match='has no encoder.*can only draft'):
    alone.prefill(params, tokens, 8)
  with pytest.raises(ValueError, match='width of 16, got 12'):
    alone.logits(params, tokens, tokens, encoded=np.ones((1, 3, 12)))
  with pytest.raises(ValueError, match='encoder_dim'):
    dataclasses.replace(network(1).config, encoder_dim=8)


# --- Heads --------------------------------------------------------------------

CHAIN = toy_models.random_markov(1, 3, order=2, scale=1.2)


def test_features_gave_the_last_committed_token():
  """After prompts of several lengths, none, and every acceptance.

  A chain's features are its logits, known in closed form.
  """
  made, params = random_heads(2, 3)
  limits = {'prompt_length': np.array([3, 1, 2, 3])}
  limits |= {'max_length': np.array([9, 9, 2, 9])}
  limits |= {'prompt': jnp.array([[0, 2, 1], [0, 0, 0], [0, 1, 0], [0, 2, 2]])}
  law = sd.SamplingConfig(1.0), 9
  request = toy_requests.request_of(
    4, 2, *law, inputs=(1, 2, 0), seed=5, **limits
  )
  loop, pair = Loop(CHAIN, heads(made, ())), PairParams(CHAIN.params, params)
  state = toy_requests.quick_jit(loop.start)(pair, request)
  step = toy_requests.quick_jit(loop.step)
  right, late = [], []
  for _ in range(4):
    seen = jax.device_get(state)
    for row in np.flatnonzero(seen.running):
      tokens = seen.tokens[row, : seen.length[row]].tolist()
      for differences, read in ((right, tokens[:-1]), (late, tokens[:-2])):
        want = CHAIN.logits_after(read, (1, 2)) if read else np.zeros(3)
        differences.append(np.abs(seen.features[row] - want).max())
    state, _ = step(pair, request, state)
  assert len(right) > 8
  # The control: those of the token before are others.
  assert max(right) < 1e-5 and max(late) > 0.1


ABOUT = {'kind': heads_module.KIND, 'target': 'abc'}


def test_a_file_says_its_sizes(tmp_path):
  made, params = random_heads(3, 16)
  path = tmp_path / 'heads.msgpack'
  checkpoints.save_t5x(path, params, 7, about=ABOUT)
  loaded = heads_module.load(path)
  assert loaded.made_for == ('abc',)
  assert loaded.name == heads(made, params).name
  jax.tree.map(np.testing.assert_array_equal, loaded.params, params)


def test_files_of_something_else(tmp_path):
  params = {'other': {'kernel': np.zeros((2, 2))}}
  checkpoints.save_t5x(tmp_path / 'checkpoint', params, 1)
  checkpoints.save_t5x(tmp_path / 'others.msgpack', params, 1, about=ABOUT)
  for name, words in (
    ('checkpoint', 'heads: expected a file'),
    ('others.msgpack', 'heads of .*expected heads_0'),
    ('', 'a folder'),
    ('nothing.msgpack', 'No checkpoint'),
  ):
    with pytest.raises(ValueError, match=words):
      heads_module.load(tmp_path / name)
