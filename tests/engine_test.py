"""The engine on small random T5s, and on chains whose output is known.

Laws and edges of the loops are tested in decoding_test and the conformance
suite; here it is text in, text out, options, errors and compilation.
"""

import itertools
import types

import jax
import jax.monitoring
import numpy as np
import pytest

from specdec_jax import compilation_cache
from specdec_jax import tokenizer as tokenizer_lib
from specdec_jax.completion import Text
from specdec_jax.engine import Engine, Model
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.probs import SamplingConfig
from specdec_jax.testing import MarkovModel

WORDS = 'the a red blue old house tree dog cat runs sleeps sings here there'
VOCAB_SIZE = 320  # 256 bytes, 3 special pieces, and some of the text
MAX_INPUT, MAX_OUTPUT = 24, 16
TEXTS = ['the red dog runs', '', 'a cat', 'the old house sings here there']
POISON = 'Q'  # its embedding is NaN in the poisoned engine
SAMPLED = SamplingConfig(temperature=1.0)
SCRIPT = 'the dog <end> grün 5€ 😀 a cat'


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('engine')


@pytest.fixture(scope='module', autouse=True)
def no_shared_cache(folder):
  """These tests compile for themselves and leave JAX as it was."""
  before = jax.config.values['jax_compilation_cache_dir']
  jax.config.update('jax_compilation_cache_dir', str(folder / 'xla'))
  yield
  jax.config.update('jax_compilation_cache_dir', before)


@pytest.fixture(scope='module')
def tokenizer(folder):
  words = WORDS.split()
  sentences = [
    ' '.join(words[(i * k) % len(words)] for k in range(1, 6))
    for i in range(300)
  ]
  return tokenizer_lib.train_tokenizer(
    sentences, folder / 'vocab.model', VOCAB_SIZE
  )


def make_t5(seed: int, layers: int, vocab_size: int = VOCAB_SIZE) -> Model:
  """Random weights whose greedy output depends on the input."""
  network = T5(
    T5Config(
      vocab_size=vocab_size,
      emb_dim=16,
      num_heads=2,
      head_dim=8,
      num_encoder_layers=1,
      num_decoder_layers=layers,
      mlp_dim=32,
    )
  )
  return Model(network, network.init(jax.random.key(seed)))


@pytest.fixture(scope='module')
def engine(tokenizer):
  return Engine(
    make_t5(0, 2),
    make_t5(1, 1),
    tokenizer=tokenizer,
    gamma=3,
    max_input_len=MAX_INPUT,
    max_decode_len=MAX_OUTPUT,
  )


def chain(tokens) -> MarkovModel:
  """A model that says `tokens` (all different), then the last one again."""
  table = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
  for before, after in itertools.pairwise([0, *tokens, tokens[-1]]):
    table[before, after] = 30.0
  return MarkovModel(table)


def make_scripted(tokenizer, script=SCRIPT, drafted=None, **options) -> Engine:
  """An engine that says `script`; its drafter says `drafted`, or the same."""
  ids = [i for char in script for i in piece_ids(tokenizer, char)]
  ids = list(dict.fromkeys([*ids]))  # a chain of order 1 says nothing twice
  target = chain([*ids, tokenizer.eos_id])
  draft = chain([*(ids if drafted is None else drafted), tokenizer.eos_id])
  models = [Model(model, model.params) for model in (target, draft)]
  options = dict(gamma=3, max_input_len=16, max_decode_len=40) | options
  return Engine(*models, tokenizer=tokenizer, **options)


def piece_ids(tokenizer, char: str) -> list[int]:
  return tokenizer.encode(char)[1:] or tokenizer.encode(char)


@pytest.fixture(scope='module')
def scripted(tokenizer):
  return make_scripted(tokenizer)


def tokens_of(completions):
  return [completion.tokens for completion in completions]


def test_greedy_speculative_equals_plain_in_order(engine):
  have = engine.generate(TEXTS)
  want = engine.generate(TEXTS, speculative=False)
  assert tokens_of(have) == tokens_of(want)
  assert [c.text for c in have] == [c.text for c in want]
  reasons = [completion.finish_reason for completion in have]
  assert [reason == 'empty' for reason in reasons] == [
    False,
    True,
    False,
    False,
  ]
  assert have[1].text == '' and have[1].tokens == []
  alone = [engine.generate([text])[0].tokens for text in TEXTS if text]
  assert tokens_of(have[:1] + have[2:]) == alone
  assert len(set(map(tuple, alone))) > 1, 'the inputs should matter'
  for one, other in zip(have, want, strict=True):
    np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
    assert len(one.log_probs) == len(one.tokens) == one.stats.num_tokens
  assert want[0].stats.num_target_calls == len(want[0].tokens)
  assert have[0].stats.num_tested >= have[0].stats.num_accepted
  assert engine.generate([]) == [] and engine.generate(['']) == [have[1]]


def test_too_long(engine):
  long = 'the dog ' * 40
  with pytest.raises(ValueError, match='Text 1 has .* max_input_len = 24'):
    engine.generate(['a', long])
  with pytest.raises(ValueError, match="'error', 'truncate' or 'report'"):
    engine.generate(['a'], on_too_long='cut')
  ok, bad = engine.generate(['a', long], on_too_long='report')
  assert ok.error is None and ok.tokens
  assert bad.finish_reason == 'error' and 'max_input_len' in bad.error
  cut = engine.generate(['a', long], on_too_long='truncate')[1]
  assert cut.tokens and cut.error is None


@pytest.mark.parametrize('speculative', [False, True])
def test_stop_ids(engine, speculative):
  options = dict(speculative=speculative, stop_ids=[])
  whole = engine.generate(TEXTS, **options)[0].tokens
  assert len(whole) == MAX_OUTPUT
  later = next(t for t in whole[2:] if t != whole[0])
  options['stop_ids'] = [VOCAB_SIZE - 1, later, tokenizer_lib.EOS_ID]
  stopped = engine.generate(TEXTS, **options)[0]
  assert stopped.tokens == whole[: whole.index(later) + 1]
  assert stopped.finish_reason == 'stop'
  # The text does not hold what stopped it, though it is no end of sequence.
  assert stopped.text == engine.tokenizer.decode(stopped.tokens[:-1])
  options['min_length'] = whole.index(later) + 2
  longer = engine.generate(TEXTS, **options)[0]
  assert later not in longer.tokens[: options['min_length']]
  assert len(longer.tokens) > options['min_length']


@pytest.mark.parametrize('speculative', [False, True])
def test_max_length(engine, speculative):
  options = dict(speculative=speculative, stop_ids=[])
  whole = engine.generate(TEXTS, **options)[0].tokens
  for limit in (1, 2, 5, MAX_OUTPUT):
    done = engine.generate(TEXTS, max_length=limit, **options)[0]
    assert done.tokens == whole[:limit] and done.finish_reason == 'length'


def test_a_sample_depends_on_its_id_alone(engine):
  options = dict(sampling=SAMPLED, seed=5, stop_ids=[])
  ids = [70, 1, 12, 3]
  together = engine.generate(TEXTS, example_ids=ids, **options)
  turned = engine.generate(TEXTS[::-1], example_ids=ids[::-1], **options)
  assert tokens_of(together) == tokens_of(turned)[::-1]
  alone = engine.generate([TEXTS[2]], example_ids=[12], **options)
  assert alone[0].tokens == together[2].tokens
  other = engine.generate([TEXTS[2]], example_ids=[13], **options)
  assert other[0].tokens != alone[0].tokens
  again = engine.generate(
    [TEXTS[2]], example_ids=[12], sampling=SAMPLED, seed=6
  )
  assert again[0].tokens != alone[0].tokens
  plain = [
    engine.generate(
      [TEXTS[2]],
      example_ids=[12],
      speculative=False,
      **options | {'seed': seed},
    )[0].tokens
    for seed in (5, 5, 6)
  ]
  assert plain[0] == plain[1] != plain[2]


def test_a_temperature_for_each_text(engine):
  mixed = SamplingConfig(temperature=[0.0, 1.0, 1.0, 0.0])
  greedy = engine.generate(TEXTS)
  have = engine.generate(TEXTS, sampling=mixed, seed=1)
  assert have[0].tokens == greedy[0].tokens
  assert have[3].tokens == greedy[3].tokens
  assert have[2].tokens != greedy[2].tokens
  with pytest.raises(ValueError, match='2 values for 4 examples'):
    engine.generate(TEXTS, sampling=SamplingConfig(temperature=[0.0, 1.0]))


def test_scripted_text(scripted):
  for speculative in (False, True):
    done = scripted.generate(['a'], speculative=speculative)[0]
    assert done.finish_reason == 'stop'
    assert 'grün' in done.text.replace(' ', '') or 'ü' in done.text
    assert '€' in done.text and '😀' in done.text
  assert done.stats.acceptance_rate == 1.0


@pytest.mark.parametrize('speculative', [False, True])
def test_stream_gives_whole_characters(tokenizer, scripted, speculative):
  want = scripted.generate(['a'], speculative=speculative)[0].text
  pieces = list(scripted.stream('a', speculative=speculative))
  assert ''.join(pieces) == want and len(pieces) > 3
  assert not any('\ufffd' in piece for piece in pieces)
  # An output may end inside a character: only its last piece shows that.
  for limit in range(1, 12):
    options = dict(speculative=speculative, max_length=limit)
    want = scripted.generate(['a'], **options)[0].text
    pieces = list(scripted.stream('a', **options))
    assert ''.join(pieces) == want
    assert not any('\ufffd' in piece for piece in pieces[:-1])
  assert list(scripted.stream('')) == []


@pytest.mark.parametrize('speculative', [False, True])
@pytest.mark.parametrize(
  'stops', [('€',), ('😀', 'ü'), ('zzz',), ('{last}zzz', '{mid}'), ('{two}',)]
)
def test_stop_strings(scripted, stops, speculative):
  whole = scripted.generate(['a'], speculative=speculative)[0]
  text = whole.text
  parts = {'last': text[-1], 'mid': text[4:6], 'two': text[3:9]}
  stops = [stop.format(**parts) for stop in stops]
  options = dict(speculative=speculative, stop_strings=stops)
  done = scripted.generate(['a'], **options)[0]
  pieces = list(scripted.stream('a', **options))
  assert ''.join(pieces) == done.text
  found = [text.find(stop) for stop in stops if stop in text]
  if not found:
    assert done == whole
    return
  assert done.finish_reason == 'stop_string'
  assert done.text == text[: min(found)]
  # Its tokens are the fewest that show the stop string.
  assert done.tokens == whole.tokens[: len(done.tokens)]
  shown = [scripted.tokenizer.decode(done.tokens[:n]) for n in (-1, None)]
  assert [any(stop in s for stop in stops) for s in shown] == [False, True]
  assert len(done.log_probs) == len(done.tokens)


def test_the_stop_string_complete_first_counts(tokenizer):
  """However many tokens come at once, and though another began earlier."""
  ids = tokenizer.encode('the dog sings')
  text = tokenizer.decode(ids)
  stops = [text[2:], text[6]]
  for length in range(1, len(ids) + 1):
    output = Text(tokenizer, ids[:length], stops)
    if output.has_stop_string:
      assert output.final == text[: text.index(text[6])]
    assert text[: text.index(text[6])].startswith(output.stable)


def test_stable_text_never_changes(tokenizer):
  """Any tokens at all, bytes that are no character among them."""
  rng = np.random.default_rng(0)
  for _ in range(100):
    ids = rng.integers(0, VOCAB_SIZE, 12)
    ids[rng.integers(0, 6) :][:4] = tokenizer.encode('😀')[-4:]
    whole = Text(tokenizer, ids, ()).final
    seen = [Text(tokenizer, ids[:n], ()).stable for n in range(len(ids) + 1)]
    assert all(whole.startswith(part) for part in seen), (ids, whole, seen)
    assert seen == sorted(seen, key=len)


@pytest.fixture
def compilations():
  """Counts what XLA compiles while the test runs."""
  seen = types.SimpleNamespace(count=0)

  def listen(event, duration, **_):
    del duration
    seen.count += event == '/jax/core/compile/backend_compile_duration'

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield seen
  jax.monitoring.unregister_event_duration_listener(listen)


def test_other_values_do_not_recompile(engine, compilations):
  def decode(texts, seed, **sampling):
    config = SamplingConfig(**sampling)
    for speculative in (True, False):
      options = dict(sampling=config, seed=seed, speculative=speculative)
      engine.generate(texts, **options)

  jax.jit(lambda x: x * 3.14159)(1.0)
  assert compilations.count > 0, 'the counter should count'
  decode(TEXTS, 0, temperature=0.9)
  programs, before = engine.num_programs, compilations.count
  decode(TEXTS[::-1], 1, temperature=0.5, top_k=7, top_p=0.8)
  decode(['here', 'a dog', 'the the', 'x'], 2, temperature=[0, 1, 2, 0.1])
  decode(['a', 'b', 'c'], 3, temperature=1.0, top_p=0.3)
  assert engine.num_programs == programs
  assert compilations.count == before


def test_warmup(tokenizer, compilations):
  engine = make_scripted(tokenizer, 'a dog', max_decode_len=9)
  assert engine.num_programs == 0
  assert engine.warmup(['a', 'b']) > 0
  assert engine.num_programs == 2
  assert engine.warmup(['the', 'dog']) == 0.0
  assert engine.warmup(['']) == 0.0
  assert engine.warmup(['the', 'dog'], speculative=False) > 0
  want = engine.generate(['the', 'dog'])
  before = compilations.count
  assert engine.generate(['the', 'dog']) == want
  assert compilations.count == before and engine.num_programs == 4


def test_nan_is_an_error_of_its_row_alone(engine, tokenizer):
  models = [make_t5(0, 2), make_t5(1, 1)]
  table = np.array(models[0].params['token_embedder']['embedding'])
  poison = tokenizer.encode(POISON)[-1]
  table[poison] = np.nan
  models[0].params['token_embedder'] = {'embedding': table}
  poisoned = Engine(
    *models,
    tokenizer=tokenizer,
    gamma=3,
    max_input_len=MAX_INPUT,
    max_decode_len=MAX_OUTPUT,
  )
  texts = [TEXTS[0], f'a {POISON}', TEXTS[2]]
  for speculative in (True, False):
    want = engine.generate(texts, speculative=speculative)
    have = poisoned.generate(texts, speculative=speculative)
    assert have[1].finish_reason == 'error'
    assert 'NaN' in have[1].error and 'token 1' in have[1].error
    assert all(poison not in want[i].tokens for i in (0, 2))
    assert [have[i].tokens for i in (0, 2)] == [want[i].tokens for i in (0, 2)]
    assert [have[i].error for i in (0, 2)] == [None, None]
  with pytest.raises(ValueError, match='NaN'):
    list(poisoned.stream(texts[1], speculative=False))


def test_bad_pairs(tokenizer, folder):
  target, other = make_t5(0, 1), make_t5(0, 1, VOCAB_SIZE + 8)
  with pytest.raises(ValueError, match=r"draft's vocabulary is 328 .* 320"):
    Engine(target, other, tokenizer=tokenizer)
  small = make_t5(0, 1, VOCAB_SIZE - 8)
  with pytest.raises(ValueError, match='target has a vocabulary of 312'):
    Engine(small, tokenizer=tokenizer)
  foreign = tokenizer_lib.train_tokenizer(
    [WORDS, WORDS[::-1]], folder / 'foreign.model', 300
  )
  draft = Model(target.network, target.params, foreign)
  with pytest.raises(ValueError, match="draft's tokenizer .*foreign.model"):
    Engine(target, draft, tokenizer=tokenizer)
  with pytest.raises(ValueError, match='gamma must be at least 0, got -1'):
    Engine(target, target, tokenizer=tokenizer, gamma=-1)
  with pytest.raises(ValueError, match='max_decode_len must be at least 1'):
    Engine(target, tokenizer=tokenizer, max_decode_len=0)
  plain = Engine(target, tokenizer=tokenizer)
  with pytest.raises(ValueError, match='needs a drafter'):
    plain.generate(['a'])
  assert plain.num_programs == 0


@pytest.mark.parametrize(
  'options, message',
  [
    (dict(stop_strings='end'), 'stop_strings must be a sequence'),
    (dict(stop_strings=['']), 'stop_strings must be a sequence'),
    (dict(stop_ids=[VOCAB_SIZE]), 'stop_ids holds 320'),
    (dict(min_length=-1), 'min_length must be at least 0'),
    (dict(max_length=0), 'max_length must be at least 1'),
    (dict(max_length=99), 'max_length = 99 is more than'),
    (dict(example_ids=[1]), '1 entries for 4 texts'),
    (dict(example_ids=[0, 1, 2, -1]), r'example_ids must lie in \[0, 2'),
  ],
)
def test_bad_options_come_before_compilation(engine, options, message):
  before = engine.num_programs
  with pytest.raises(ValueError, match=message):
    engine.generate(TEXTS, **options)
  assert engine.num_programs == before


def test_bad_sampling_and_texts(engine):
  for values in (dict(temperature=-0.1), dict(top_p=0.0), dict(top_p=1.5)):
    name = next(iter(values))
    with pytest.raises(ValueError, match=name):
      SamplingConfig(**values)
  with pytest.raises(ValueError, match='sequence of strings, got one string'):
    engine.generate('the dog')


def test_compilation_cache_folder(monkeypatch, tmp_path):
  before = jax.config.values['jax_compilation_cache_dir']
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  default = tmp_path / 'specdec_jax' / 'xla'
  try:
    jax.config.update('jax_compilation_cache_dir', None)
    assert compilation_cache.default_folder() == default
    assert compilation_cache.enable() == default and default.is_dir()
    assert jax.config.values['jax_compilation_cache_dir'] == str(default)
    # One that the user chose for JAX stays, unless asked for another.
    jax.config.update('jax_compilation_cache_dir', str(tmp_path / 'own'))
    assert compilation_cache.enable() == tmp_path / 'own'
    assert compilation_cache.enable(tmp_path / 'given') == tmp_path / 'given'
    (tmp_path / 'file').write_text('')
    assert compilation_cache.enable(tmp_path / 'file' / 'no') is None
  finally:
    jax.config.update('jax_compilation_cache_dir', before)
