"""Languages of texts and outputs, through the engine."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest

from small_vocabulary import sentences
from specdec_jax import training
from specdec_jax.drafters.prompt_lookup import ends_of, prompt_lookup
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.scheduler import Row, joined
from specdec_jax.measure import acceptance
from specdec_jax.models.m2m100 import M2M100
from specdec_jax.models.model import Model
from specdec_jax.text.tokenizer import Tokenizer
from toy_families import NLLB as SMALL
from toy_families import logits_of, make

LANGUAGES = ('deu_Latn', 'eng_Latn', 'zho_Hans')
PAIR = dict(source_lang='eng_Latn', target_lang='deu_Latn')
# Texts and ids of several lengths, ids with and without their end.
TEXTS = ['the red dog runs', [60, 0, 61], 'a cat', [62, 60, 2]]
LONG = [60, 0, 61, 62] * 10  # of the next width
LENGTH = 16


def write_vocabulary(folder, languages=LANGUAGES):
  """The files of a folder of NLLB-200, of few words: 0 <s>, 1 <pad>, 2 </s>."""
  import tokenizers

  made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token='<unk>'))
  made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
  made.decoder = tokenizers.decoders.Metaspace()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=80,
    special_tokens=['<s>', '<pad>', '</s>', '<unk>'],
    show_progress=False,
  )
  made.train_from_iterator(sentences(), trainer)
  made.add_special_tokens([*languages, '<mask>'])
  ends = [(name, made.token_to_id(name)) for name in (languages[0], '</s>')]
  made.post_processor = tokenizers.processors.TemplateProcessing(
    f'{languages[0]} $A </s>', special_tokens=ends
  )
  folder.mkdir(exist_ok=True)
  made.save(str(folder / 'tokenizer.json'))
  said = {'eos_token': '</s>', 'bos_token': '<s>', 'pad_token': '<pad>'}
  (folder / 'tokenizer_config.json').write_text(json.dumps(said))
  return folder


@pytest.fixture(scope='module')
def vocabulary(folder):
  return Tokenizer(write_vocabulary(folder / 'nllb'))


def models(tokenizer):
  """A target and a drafter that often agree, but not always."""
  size = tokenizer.vocab_size + 2  # as NLLB has two ids more
  config = dataclasses.replace(SMALL, vocab_size=size)
  network, target = make(config)
  _, other = make(config, seed=1)
  draft = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, target, other)
  ends = dict(stop_ids=(2,), tokenizer=tokenizer)
  return Model(network, target, **ends), Model(network, draft, **ends)


@pytest.fixture(scope='module')
def engine(vocabulary):
  target, draft = models(vocabulary)
  return Engine(target, draft, gamma=3, max_input_len=64, max_decode_len=LENGTH)


def test_the_vocabulary_knows_its_languages(vocabulary, tmp_path):
  assert list(vocabulary.languages) == list(LANGUAGES)
  ids = vocabulary.languages.values()
  assert all(vocabulary.decode([one, 2]) == '' for one in ids)
  assert vocabulary.bos_id is None and vocabulary.eos_id == 2
  text = 'eng_Latn </s> the'
  assert vocabulary.encode(text)[0] == vocabulary.languages['eng_Latn']
  plain = Tokenizer(vocabulary.path, split_special_tokens=True)
  assert not {*plain.encode(text)} & {*ids, 2}
  other = write_vocabulary(tmp_path / 'm2m', ('__de__', '__en__'))
  assert list(Tokenizer(other).languages) == ['de', 'en']


def test_texts_and_outputs_begin_with_their_language(engine, vocabulary):
  known = vocabulary.languages
  eng, deu = known['eng_Latn'], known['deu_Latn']
  ids = vocabulary.encode('the dog')
  assert engine.input_ids('the dog', 'eng_Latn') == [eng, *ids, 2]
  # Ids that begin with a language say it themselves.
  assert engine.input_ids([eng, *ids, 2]) == [eng, *ids, 2]
  request = engine.request(['the dog'], **PAIR)
  assert request.inputs[0, : len(ids) + 3].tolist() == [eng, *ids, 2, 1]
  assert request.prompt[0].tolist() == [2, deu]
  request = engine.request(['the dog'], prompts=[[5, 6]], **PAIR)
  assert request.prompt[0, : request.prompt_length[0]].tolist() == [
    2, deu, 5, 6,
  ]  # fmt: skip
  request = engine.request(['the dog'], src_lang='deu_Latn', prompts=[[eng]])
  assert request.prompt[0].tolist() == [2, eng]
  assert request.inputs[0, 0] == deu


def forced(engine, text, output):
  """The argmax after each token of an output, by teacher-forced logits."""
  model = models(engine.tokenizer)[0]
  inputs = np.array([engine.input_ids(text, 'eng_Latn')], np.int32)
  first = [2, engine.tokenizer.languages['deu_Latn']]
  read = np.full((1, 32), 5, np.int32)
  read[0, : 2 + len(output)] = [*first, *output]
  logits = logits_of(model.network, model.params, inputs, read)[0]
  return np.asarray(logits).argmax(-1)[1 : 1 + len(output)].tolist()


def test_greedy_is_speculative_is_teacher_forced(engine):
  have = engine.generate(TEXTS, **PAIR)
  want = engine.generate(TEXTS, speculative=False, **PAIR)
  assert [one.tokens for one in have] == [one.tokens for one in want]
  accepted = sum(one.stats.num_accepted for one in have)
  assert 0 < accepted < sum(one.stats.num_tested for one in have)
  for text, one in zip(TEXTS, have, strict=True):
    assert one.tokens == forced(engine, text, one.tokens)
  other = engine.generate(TEXTS, source_lang='eng_Latn', target_lang='zho_Hans')
  assert [one.tokens for one in other] != [one.tokens for one in have]


def test_rows_of_several_widths_are_read_together(engine):
  rows = [
    Row(engine.text_batch([text], True, **PAIR)) for text in (TEXTS[0], LONG)
  ]
  length = len(engine.input_ids(TEXTS[0], 'eng_Latn'))
  request = joined(rows, rows[0].batch.request)
  assert request.inputs.shape == (2, 64)
  assert (request.inputs[0, length:] == 1).all()


def test_copies_of_the_input_end_where_the_text_does(vocabulary):
  target, _ = models(vocabulary)
  engine = Engine(
    target, prompt_lookup(), gamma=3, max_input_len=64, max_decode_len=LENGTH
  )
  have = engine.generate(TEXTS, **PAIR)
  want = engine.generate(TEXTS, speculative=False, **PAIR)
  assert [one.tokens for one in have] == [one.tokens for one in want]
  inputs = np.array([[60, 0, 2, 1, 1], [60, 61, 62, 61, 2], [1] * 5])
  for pad_id, ends in ((1, [3, 5, 0]), (0, [5, 5, 5])):
    context = types.SimpleNamespace(pad_id=pad_id)
    assert ends_of(inputs, context).tolist() == ends


def test_scores_are_those_of_decoding(engine):
  done = engine.generate(TEXTS, **PAIR)
  outputs = [one.tokens for one in done]
  scores = engine.score(TEXTS, outputs, **PAIR)
  for one, score in zip(done, scores, strict=True):
    np.testing.assert_allclose(score.log_probs, one.log_probs, atol=1e-3)
  others = engine.score(
    TEXTS, outputs, source_lang='eng_Latn', target_lang='zho_Hans'
  )
  assert others[0].log_probs != scores[0].log_probs


def test_an_engine_may_have_languages_of_its_own(vocabulary):
  target, _ = models(vocabulary)
  engine = Engine(target, max_input_len=64, max_decode_len=4, **PAIR)
  want = engine.generate(['the dog'], **PAIR)[0].tokens
  assert engine.generate(['the dog'])[0].tokens == want
  assert engine.num_input_tokens('') == 0
  assert engine.generate([''])[0].finish_reason == 'empty'
  assert engine.score(['the dog'], [want])[0].total < 0


@pytest.mark.parametrize(
  ('asked', 'said'),
  [
    ({}, 'source_lang: expected the'),
    ({'source_lang': 'eng_Latn'}, "target_lang: expected .*'deu_Latn'"),
    ({'target_lang': 'eng_Latn'}, 'source_lang: expected the'),
    (PAIR | {'target_lang': 'deu_latn'}, 'Nearest known: deu_Latn'),
    (PAIR | {'source_lang': 'x'}, "one of the 3 languages .*'deu_Latn'"),
    (PAIR | {'source_lang': ['eng_Latn']}, 'source_lang: expected text'),
  ],
  ids=str,
)
def test_languages_that_are_none(asked, said, engine):
  with pytest.raises(ValueError, match=said):
    engine.generate(['the dog'], **asked)


def test_models_without_languages(vocabulary, tokenizer):
  import small_vocabulary

  network = small_vocabulary.network(1)
  params = network.init(jax.random.key(0))
  model = Model(network, params, tokenizer)
  with pytest.raises(ValueError, match='source_lang: .*no tokens'):
    Engine(model, source_lang='eng_Latn')
  with pytest.raises(ValueError, match='target_lang: .*no tokens'):
    Engine(model, max_decode_len=4).generate(['a'], target_lang='deu_Latn')


def server_of(engine):
  """`serve_test.asking_of`, where what it needs is installed."""
  pytest.importorskip('httpx', reason='needs the extra [serve]')
  pytest.importorskip('starlette', reason='needs the extra [serve]')
  pytest.importorskip('openai', reason='needs the package openai')
  import serve_test

  return serve_test.asking_of(engine)


def test_requests_name_their_languages(vocabulary):
  target, _ = models(vocabulary)
  engine = Engine(target, max_input_len=16, max_decode_len=8)
  others = PAIR | {'target_lang': 'zho_Hans'}
  want = [engine.generate(TEXTS[:1], **one)[0].tokens for one in (PAIR, others)]
  assert want[0] != want[1]
  body = {'prompt': TEXTS[0], 'temperature': 0, 'max_tokens': 8}
  body['return_token_ids'] = True
  with server_of(engine) as ask:
    have = [
      ask('/v1/completions', body | one).json()['choices'][0]['token_ids']
      for one in (PAIR, others)
    ]
    assert have == want
    for asked, param, said in (
      ({}, 'target_lang', 'target_lang: expected the'),
      ({'target_lang': 'deu_Latn'}, 'source_lang', 'source_lang: expected the'),
      (PAIR | {'source_lang': 'eng_Lat'}, 'source_lang', 'known: eng_Latn'),
      (PAIR | {'target_lang': ['x']}, 'target_lang', 'expected a text'),
    ):
      answer = ask('/v1/completions', body | asked)
      error = answer.json()['error']
      assert answer.status_code == 400 and error['param'] == param
      assert said in error['message']


def test_a_drafter_with_other_padding_is_refused(vocabulary):
  target, draft = models(vocabulary)
  config = dataclasses.replace(draft.network.config, pad_id=0)
  other = Model(M2M100(config), draft.params)
  with pytest.raises(ValueError, match='draft: expected padding with id 1'):
    Engine(target, other)


def test_training_pads_otherwise(tmp_path):
  inputs = dict(train_file='demo/input.txt', vocab_path='demo/vocab.model')
  with pytest.raises(ValueError, match='pads with id 0.*pads with 1'):
    training.TrainRun(make(SMALL)[0], str(tmp_path), **inputs)


def test_texts_of_a_report_are_told_apart(engine):
  """Whatever the width that they were padded to."""
  alone = engine.request(TEXTS[:1], **PAIR)
  beside = engine.request([TEXTS[0], LONG], **PAIR)
  assert alone.inputs.shape[1] < beside.inputs.shape[1]
  (first,) = acceptance._texts(alone)
  assert acceptance._texts(beside)[0] == first != acceptance._texts(beside)[1]
