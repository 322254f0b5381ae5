"""Languages of texts and outputs, through the engine."""

import dataclasses
import importlib.util
import json
import types

import jax
import numpy as np
import pytest

import specdec_jax
from m2m100_test import SMALL, logits_of, make
from small_vocabulary import sentences
from specdec_jax.cli import main
from specdec_jax.drafters.prompt_lookup import ends_of, prompt_lookup
from specdec_jax.engine.continuous import Continuous
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.schedule import PoolSettings
from specdec_jax.models.model import Model
from specdec_jax.text.tokenizer_bpe import BpeTokenizer

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('tokenizers') is None,
  reason="needs tokenizers: pip install 'specdec_jax[bpe]'",
)
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
  return BpeTokenizer(write_vocabulary(folder / 'nllb'))


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
  assert not {*vocabulary.encode('eng_Latn </s> the'), 2} & {*ids} - {2}
  other = write_vocabulary(tmp_path / 'm2m', ('__de__', '__en__'))
  assert list(BpeTokenizer(other).languages) == ['de', 'en']


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
  network, params = engine.models['target'].network, models_params(engine)
  inputs = np.array([engine.input_ids(text, 'eng_Latn')], np.int32)
  first = [2, engine.tokenizer.languages['deu_Latn']]
  read = np.full((1, 32), 5, np.int32)
  read[0, : 2 + len(output)] = [*first, *output]
  logits = logits_of(network, params, inputs, read)[0]
  return np.asarray(logits).argmax(-1)[1 : 1 + len(output)].tolist()


def models_params(engine):
  return models(engine.tokenizer)[0].params


def test_greedy_is_speculative_is_teacher_forced(engine):
  have = engine.generate(TEXTS, **PAIR)
  want = engine.generate(TEXTS, speculative=False, **PAIR)
  assert [one.tokens for one in have] == [one.tokens for one in want]
  accepted = sum(one.stats.num_accepted for one in have)
  assert 0 < accepted < sum(one.stats.num_tested for one in have)
  for text, one in zip(TEXTS, have, strict=True):
    assert one.tokens == forced(engine, text, one.tokens)
    alone = engine.generate([text], **PAIR)[0]
    assert alone.tokens == one.tokens  # whatever stood beside it
  other = engine.generate(TEXTS, source_lang='eng_Latn', target_lang='zho_Hans')
  assert [one.tokens for one in other] != [one.tokens for one in have]


def test_rows_that_come_and_go(engine):
  """Texts of several widths: the pool grows, and its padding stays padding."""
  texts = [*TEXTS, LONG, *TEXTS[::-1]]
  want = [engine.generate([text], **PAIR)[0].tokens for text in texts]
  for order in ('shortest', 'given'):
    pool = Continuous(engine, PoolSettings(rows=2, order=order))
    have = pool.generate(texts, **PAIR)
    assert [one.tokens for one in have] == want


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


@pytest.mark.slow
def test_beams(engine):
  have = engine.generate(TEXTS, num_beams=3, speculative=True, **PAIR)
  want = engine.generate(TEXTS, num_beams=3, speculative=False, **PAIR)
  assert [one.tokens for one in have] == [one.tokens for one in want]


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
    ({}, 'source_lang is missing: .* 3 languages'),
    ({'source_lang': 'eng_Latn'}, "target_lang is missing: .*'deu_Latn'"),
    ({'target_lang': 'eng_Latn'}, 'source_lang is missing'),
    (PAIR | {'target_lang': 'deu_latn'}, 'Nearest known: deu_Latn'),
    (PAIR | {'source_lang': 'x'}, "none of the 3 languages .*'deu_Latn'"),
    (PAIR | {'source_lang': 5}, 'source_lang is 5'),
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
  with pytest.raises(ValueError, match='has no tokens of languages'):
    Engine(model, source_lang='eng_Latn')
  with pytest.raises(ValueError, match='target_lang .* no tokens of languages'):
    Engine(model, max_decode_len=4).generate(['a'], target_lang='deu_Latn')


def server_of(engine):
  """`serve_test.asking_of`, where what it needs is installed."""
  pytest.importorskip('httpx', reason='needs the extra [serve]')
  pytest.importorskip('starlette', reason='needs the extra [serve]')
  pytest.importorskip('openai', reason='needs the package openai')
  import serve_test

  return serve_test.asking_of(engine)


def test_requests_name_their_languages(engine):
  others = PAIR | {'target_lang': 'zho_Hans'}
  want = [engine.generate(TEXTS[:1], **one)[0].tokens for one in (PAIR, others)]
  assert want[0] != want[1]
  body = {'prompt': TEXTS[0], 'temperature': 0, 'max_tokens': LENGTH}
  body['return_token_ids'] = True
  with server_of(engine) as ask:
    have = [
      ask('/v1/completions', body | one).json()['choices'][0]['token_ids']
      for one in (PAIR, others)
    ]
    assert have == want
    for asked, param, said in (
      ({}, 'target_lang', 'target_lang is missing'),
      ({'target_lang': 'deu_Latn'}, 'source_lang', 'source_lang is missing'),
      (PAIR | {'source_lang': 'eng_Lat'}, 'source_lang', 'known: eng_Latn'),
      (PAIR | {'target_lang': ['x']}, 'target_lang', 'expected a text'),
    ):
      answer = ask('/v1/completions', body | asked)
      error = answer.json()['error']
      assert answer.status_code == 400 and error['param'] == param
      assert said in error['message']


def save(folder, model, config):
  """A folder as transformers writes it, with the vocabulary beside it."""
  import flax.traverse_util
  import safetensors.numpy

  from specdec_jax.checkpoints import m2m100_names

  table = m2m100_names.table(config)
  flat = flax.traverse_util.flatten_dict(model.params, sep='/')
  arrays = {}
  for name, row in table.items():
    array = np.asarray(flat[name]) / np.float32(row.scale)
    arrays[row.name] = np.ascontiguousarray(
      array.T if row.transposed else array
    )
  write_vocabulary(folder)
  safetensors.numpy.save_file(arrays, folder / 'model.safetensors')
  fields = m2m100_names.FIELDS.items()
  described = {theirs: getattr(config, ours) for ours, theirs in fields}
  described |= {
    'model_type': 'm2m_100',
    'decoder_attention_heads': config.num_heads,
    'decoder_ffn_dim': config.mlp_dim,
    'decoder_start_token_id': 2,
    'eos_token_id': 2,
    'pad_token_id': 1,
    'max_length': 200,
    'scale_embedding': True,
  }
  (folder / 'config.json').write_text(json.dumps(described))
  return described


@pytest.fixture(scope='module')
def saved(folder, vocabulary):
  pytest.importorskip('safetensors', reason='needs safetensors')
  place = folder / 'saved'
  # Heads times their size is the width, as in all folders.
  size = vocabulary.vocab_size + 2
  config = dataclasses.replace(SMALL, vocab_size=size, head_dim=8)
  model = Model(*make(config, seed=4))
  return place, model, save(place, model, config)


def test_a_folder_is_read(saved):
  place, want, _ = saved
  model = specdec_jax.load(place)
  assert model.network == want.network
  assert model.stop_ids == (2,) and model.bos_id is None
  assert list(model.tokenizer.languages) == list(LANGUAGES)
  for have, one in zip(
    jax.tree.leaves(model.params), jax.tree.leaves(want.params), strict=True
  ):
    np.testing.assert_allclose(have, one, rtol=1e-6)


def test_the_command(saved, tmp_path, capsys):
  place, _, _ = saved
  file = tmp_path / 'texts.txt'
  file.write_text('the red dog\na cat\n')
  flags = ['decode', '--target', str(place), '--draft', str(place)]
  flags += ['--max-length', '8', '--max-input-length', '64', str(file)]
  languages = ['--source_lang', 'eng_Latn', '--target-lang', 'deu_Latn']
  main.main([*flags, *languages])
  lines = capsys.readouterr().out.splitlines()
  engine = Engine(specdec_jax.load(place), max_input_len=64, max_decode_len=8)
  texts = ['the red dog', 'a cat']
  want = [one.text for one in engine.generate(texts, **PAIR)]
  assert lines == want and any(want)
  assert main.main(flags)
  assert 'source_lang is missing' in capsys.readouterr().err
  assert main.main([*flags, '--source-lang', 'eng_Latin'])
  assert 'Nearest known: eng_Latn' in capsys.readouterr().err


@pytest.mark.parametrize(
  ('change', 'said'),
  [
    ({'normalize_before': False}, 'normalize_before = False'),
    ({'decoder_ffn_dim': 7}, 'decoder_ffn_dim is 7; the network here has 40'),
    ({'decoder_start_token_id': 2.5}, 'M2M100Config.start_id'),
    ({'activation_function': 'gelu'}, 'activation_function'),
    ({'tie_word_embeddings': False}, 'tie_word_embeddings is False'),
    ({'encoder_attention_heads': 5, 'decoder_attention_heads': 5}, 'multiple'),
    ({'d_model': None}, 'd_model'),
    ({'forced_bos_token_id': 5}, 'forced_bos_token_id = 5'),
  ],
  ids=str,
)
def test_configurations_that_are_refused(change, said, saved, tmp_path):
  place, _, described = saved
  for file in place.iterdir():
    (tmp_path / file.name).write_bytes(file.read_bytes())
  (tmp_path / 'config.json').write_text(json.dumps(described | change))
  with pytest.raises(ValueError, match=said):
    specdec_jax.load(tmp_path)
