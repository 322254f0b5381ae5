"""Languages of texts and outputs, through the engine."""

import dataclasses

import jax
import numpy as np
import pytest

import small_vocabulary
import specdec_jax as sd
import toy_models
from folders import LANGUAGES, write_nllb
from specdec_jax import training
from specdec_jax.engine.padding import padded
from specdec_jax.training.data import PackedBatches, PackingConfig
from toy_families import NLLB as SMALL
from toy_families import logits_of, make

PAIR = dict(source_lang='eng_Latn', target_lang='deu_Latn')
# Texts and ids of several lengths, ids with and without their end.
TEXTS = ['the red dog runs', [60, 0, 61], 'a cat', [62, 60, 2]]
LENGTH = 16


@pytest.fixture(scope='module')
def vocabulary(folder):
  return sd.Tokenizer(write_nllb(folder / 'nllb'))


@pytest.fixture(scope='module')
def models(vocabulary):
  """A target and a drafter that often agree, but not always."""
  size = vocabulary.vocab_size + 2  # as NLLB has two ids more
  config = dataclasses.replace(SMALL, vocab_size=size)
  network, target = make(config)
  _, other = make(config, seed=1)
  draft = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, target, other)
  ends = dict(stop_ids=(2,), tokenizer=vocabulary)
  return sd.Model(network, target, **ends), sd.Model(network, draft, **ends)


@pytest.fixture(scope='module')
def engine(models):
  return sd.Engine(*models, gamma=3, max_input_len=64, max_decode_len=LENGTH)


@pytest.fixture(scope='module')
def chains(vocabulary):
  """An engine whose programs are compiled in no time."""
  limits = {'max_input_len': 16, 'max_decode_len': 8}
  return toy_models.chain_engine(vocabulary, **limits)


def test_the_vocabulary_knows_its_languages(vocabulary, tmp_path):
  assert list(vocabulary.languages) == list(LANGUAGES)
  ids = vocabulary.languages.values()
  assert all(vocabulary.decode([one, 2]) == '' for one in ids)
  assert vocabulary.bos_id is None and vocabulary.eos_id == 2
  text = 'eng_Latn </s> the'
  assert vocabulary.encode(text)[0] == vocabulary.languages['eng_Latn']
  plain = sd.Tokenizer(vocabulary.path, split_special_tokens=True)
  assert not {*plain.encode(text)} & {*ids, 2}
  other = write_nllb(tmp_path / 'm2m', ('__de__', '__en__'))
  assert list(sd.Tokenizer(other).languages) == ['de', 'en']


def test_texts_and_outputs_begin_with_their_language(engine, vocabulary):
  known, input_ids = vocabulary.languages, engine.codec.input_ids
  eng, deu = known['eng_Latn'], known['deu_Latn']
  ids, said = vocabulary.encode('the dog'), 'deu_Latn the dog'
  # Ids that begin with a language say it themselves; words of a text do not,
  # as in transformers.
  for text in ('the dog', [eng, *ids, 2]):
    assert input_ids(text, 'eng_Latn') == [eng, *ids, 2]
  assert input_ids([eng, *ids, 2]) == [eng, *ids, 2]
  assert input_ids(said, 'eng_Latn')[:2] == [eng, deu]
  assert engine.request([said], **PAIR).inputs[0, :2].tolist() == [eng, deu]
  assert input_ids(said)[0] == deu  # no other language is known
  for options, source, prompt in (
    (PAIR, eng, [2, deu]),
    (PAIR | {'prompts': [[5, 6]]}, eng, [2, deu, 5, 6]),
    ({'src_lang': 'deu_Latn', 'prompts': [[eng]]}, deu, [2, eng]),
  ):
    request = engine.request(['the dog'], **options)
    assert request.inputs[0, : len(ids) + 3].tolist() == [source, *ids, 2, 1]
    assert request.prompt[0, : request.prompt_length[0]].tolist() == prompt


def forced(engine, model, text, output):
  """The argmax after each token of an output, by teacher-forced logits."""
  first = [2, engine.tokenizer.languages['deu_Latn']]
  inputs, _ = padded([engine.codec.input_ids(text, 'eng_Latn')], 1, 16, 1)
  read, _ = padded([[*first, *output]], 1, 32, 5)
  logits = logits_of(model.network, model.params, inputs, read)[0]
  return np.asarray(logits).argmax(-1)[1 : 1 + len(output)].tolist()


@pytest.mark.slow
def test_greedy_is_speculative_is_teacher_forced(engine, models):
  have = engine.generate(TEXTS, **PAIR)
  want = engine.generate(TEXTS, speculative=False, **PAIR)
  assert [one.tokens for one in have] == [one.tokens for one in want]
  accepted = sum(one.stats.num_accepted for one in have)
  assert 0 < accepted < sum(one.stats.num_tested for one in have)
  for text, one in zip(TEXTS, have, strict=True):
    assert one.tokens == forced(engine, models[0], text, one.tokens)
  other = engine.generate(TEXTS, source_lang='eng_Latn', target_lang='zho_Hans')
  assert [one.tokens for one in other] != [one.tokens for one in have]


def test_scores_are_those_of_decoding(chains):
  done = chains.generate(TEXTS, **PAIR)
  outputs = [one.tokens for one in done]
  scores = chains.score(TEXTS, outputs, **PAIR)
  for one, score in zip(done, scores, strict=True):
    np.testing.assert_allclose(score.log_probs, one.log_probs, atol=1e-4)
  others = chains.score(TEXTS, outputs, **PAIR | {'target_lang': 'zho_Hans'})
  assert others[0].log_probs != scores[0].log_probs


def test_an_engine_may_have_languages_of_its_own(engine, models):
  other = sd.Engine(models[0], max_input_len=64, max_decode_len=LENGTH, **PAIR)
  request, same = other.request(['a cat']), engine.request(['a cat'], **PAIR)
  np.testing.assert_array_equal(request.inputs, same.inputs)
  np.testing.assert_array_equal(request.prompt, same.prompt)
  assert other.num_input_tokens('') == 0


def test_languages_that_are_none(engine, models, tokenizer):
  for asked, said in (
    ({'source_lang': 'eng_Latn'}, "target_lang: expected .*'deu_Latn'"),
    ({'target_lang': 'eng_Latn'}, 'source_lang: expected the'),
    (PAIR | {'target_lang': 'deu_latn'}, 'Nearest known: deu_Latn'),
    (PAIR | {'source_lang': ['eng_Latn']}, 'source_lang: expected text'),
  ):
    with pytest.raises(ValueError, match=said):
      engine.generate(['the dog'], **asked)
  network = small_vocabulary.network(1)
  model = sd.Model(network, small_vocabulary.weights(network, 0), tokenizer)
  with pytest.raises(ValueError, match='source_lang: .*no tokens'):
    sd.Engine(model, source_lang='eng_Latn')
  # A drafter with other padding.
  target, draft = models
  config = dataclasses.replace(draft.network.config, pad_id=0)
  with pytest.raises(ValueError, match='draft: expected padding with id 1'):
    sd.Engine(target, sd.Model(sd.M2M100(config), draft.params))


def test_requests_name_their_languages(chains):
  import clients

  want = chains.generate(TEXTS[:1], **PAIR)[0].tokens
  body = {'prompt': TEXTS[0], 'temperature': 0, 'return_token_ids': True}
  with clients.asking_of(chains) as ask:
    answer = ask('/v1/completions', body | PAIR).json()
    assert answer['choices'][0]['token_ids'] == want
    answer = ask('/v1/completions', body | {'target_lang': 'deu_Latn'})
  assert answer.status_code == 400
  assert answer.json()['error']['param'] == 'source_lang'


def test_training_pads_with_the_networks_own_id(tmp_path):
  """Id 0 is a token there: inputs that are padded with it would be others."""
  pairs, pad_id = [([5, 6, 7], [8]), ([5], [8, 9])], SMALL.pad_id
  packing = PackingConfig(weights=(1.0,), buckets=(8,), eos_id=2)
  [batch] = PackedBatches(pairs, packing, pad_id=pad_id).epoch()
  rows = batch.inputs.reshape(-1, 8).tolist()
  assert [5, 6, 7, 2] + [pad_id] * 4 in rows and [5, 2] + [pad_id] * 6 in rows
  inputs = dict(train_file='demo/input.txt', vocab_path='demo/vocab.model')
  run = training.TrainRun(make(SMALL)[0], str(tmp_path), **inputs)
  assert run.network.pad_id == pad_id
