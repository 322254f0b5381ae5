"""The engine on small random T5s: options, errors, compilation.

Laws and edges of the loops are tested in decoding_test and the conformance
suite, text and streams in engine_text_test.
"""

import types

import jax
import jax.monitoring
import numpy as np
import pytest

import small_vocabulary
import toy_models
from small_vocabulary import VOCAB_SIZE, WORDS
from specdec_jax.drafters.uniform import uniform
from specdec_jax.engine import compilation_cache
from specdec_jax.engine.engine import Engine
from specdec_jax.models.model import Model
from specdec_jax.probs import SamplingConfig
from specdec_jax.text import tokenizer as tokenizer_lib

MAX_INPUT, MAX_OUTPUT = 24, 16
TEXTS = ['the red dog runs', '', 'a cat', 'the old house sings here there']
POISON = 'Q'  # its embedding is NaN in the poisoned engine
SAMPLED = dict(temperature=1.0)


def make_t5(seed: int, layers: int, vocab_size: int = VOCAB_SIZE) -> Model:
  """Random weights whose greedy output depends on the input."""
  network = small_vocabulary.network(layers, vocab_size)
  return Model(network, network.init(jax.random.key(seed)))


@pytest.fixture(scope='module')
def engine(tokenizer):
  return Engine(
    make_t5(0, 1),
    make_t5(1, 1),
    tokenizer=tokenizer,
    gamma=3,
    max_input_len=MAX_INPUT,
    max_decode_len=MAX_OUTPUT,
  )


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
  other = engine.generate([TEXTS[3], TEXTS[0], 'x'])
  assert tokens_of(other[:2]) == tokens_of([have[3], have[0]])
  assert have[0].tokens != have[3].tokens, 'the inputs should matter'
  for one, other in zip(have, want, strict=True):
    np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
    assert len(one.log_probs) == len(one.tokens) == one.stats.num_tokens
  assert want[0].stats.num_target_calls == len(want[0].tokens)
  assert have[0].stats.num_tested >= have[0].stats.num_accepted
  assert engine.generate([]) == [] and engine.generate(['']) == [have[1]]


def test_too_long(engine):
  long = 'the dog ' * 40
  with pytest.raises(ValueError, match='Text 1 has .* max_input_len = 24'):
    engine.generate(['a', long, 'x'])
  with pytest.raises(ValueError, match="'error', 'truncate' or 'report'"):
    engine.generate(['a'], on_too_long='cut')
  ok, bad, _, _ = engine.generate(['a', long, 'x', 'y'], on_too_long='report')
  assert ok.error is None and ok.tokens
  assert bad.finish_reason == 'error' and 'max_input_len' in bad.error
  cut = engine.generate(['a', long, 'x'], on_too_long='truncate')[1]
  assert cut.tokens and cut.error is None


def test_texts_may_be_ids(engine, tokenizer):
  ids = [tokenizer.encode(text) for text in TEXTS]
  want = engine.generate(TEXTS)
  assert engine.generate(ids) == want
  ended = [np.asarray([*row, tokenizer.eos_id], np.int32) for row in ids]
  ended[1] = ended[1][:0]
  assert engine.generate(ended) == want
  with pytest.raises(ValueError, match='Text 0 holds 288, which is outside'):
    engine.generate([[VOCAB_SIZE]])


@pytest.mark.parametrize('speculative', [False, True])
def test_prompts(engine, speculative):
  """A greedy output goes on as it would have, whatever begins it."""
  options = dict(speculative=speculative, stop_ids=[])
  texts = [TEXTS[0], TEXTS[2], TEXTS[3]]
  whole = engine.generate(texts, **options)
  kept = [0, 3, 7]  # ragged, one empty
  prompts = [c.tokens[:n] for c, n in zip(whole, kept, strict=True)]
  have = engine.generate(texts, prompts=prompts, **options)
  for one, other, n in zip(whole, have, kept, strict=True):
    assert len(other.tokens) == MAX_OUTPUT, 'a prompt costs no budget'
    shared = MAX_OUTPUT - n
    assert other.tokens[:shared] == one.tokens[n:]
    np.testing.assert_allclose(
      other.log_probs[:shared], one.log_probs[n:], atol=1e-4
    )
  # The prompt matters: another one gives another output.
  other = engine.generate(texts[:1], prompts=[prompts[2]], **options)[0]
  assert other.tokens[:3] != have[0].tokens[:3]


def test_prompts_are_no_part_of_what_is_counted_or_streamed(engine):
  text, options = TEXTS[3], dict(stop_ids=[])
  whole = engine.generate([text], **options)[0].tokens
  prompt = whole[:5]
  early = whole[6]
  stops = dict(stop_ids=[early], min_length=3, prompts=[prompt])
  have, want = (
    engine.generate([text], speculative=way, **stops)[0]
    for way in (True, False)
  )
  assert have.tokens == want.tokens and early not in have.tokens[:3]
  pieces = ''.join(engine.stream(text, prompts=[prompt], **options))
  done = engine.generate([text], prompts=[prompt], **options)[0]
  assert pieces == done.text
  word = done.text.split()[1]
  cut = engine.generate(
    [text], prompts=[prompt], stop_strings=[word], **options
  )[0]
  assert cut.text == done.text[: done.text.index(word)]
  with pytest.raises(ValueError, match='prompts has 1 entries for 2 texts'):
    engine.generate(['a', 'b'], prompts=[[3]])
  with pytest.raises(ValueError, match='Prompt 0 holds -1'):
    engine.generate(['a'], prompts=[[-1]])


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
  options = dict(SAMPLED, seed=5, stop_ids=[])
  ids = [70, 1, 12, 3]
  together = engine.generate(TEXTS, example_ids=ids, **options)
  turned = engine.generate(TEXTS[::-1], example_ids=ids[::-1], **options)
  assert tokens_of(together) == tokens_of(turned)[::-1]
  alone = engine.generate([TEXTS[2]], example_ids=[12], **options)
  assert alone[0].tokens == together[2].tokens
  other = engine.generate([TEXTS[2]], example_ids=[13], **options)
  assert other[0].tokens != alone[0].tokens
  again = engine.generate([TEXTS[2]], example_ids=[12], **SAMPLED, seed=6)
  assert again[0].tokens != alone[0].tokens
  options['speculative'] = False
  plain = []
  for row, seed in ((2, 5), (0, 5), (2, 6)):
    texts, ids = ['x', '', 'the', 'y'], [0, 1, 2, 3]
    texts[row], ids[row] = TEXTS[2], 12
    options['seed'] = seed
    done = engine.generate(texts, example_ids=ids, **options)
    plain.append(done[row].tokens)
  assert plain[0] == plain[1] != plain[2]


def test_unknown_options_are_named(engine):
  with pytest.raises(ValueError, match="no option 'temprature'"):
    engine.generate(TEXTS, temprature=1.0)
  with pytest.raises(ValueError, match="'min_lenght'. Nearest known: min_leng"):
    engine.generate(TEXTS, min_lenght=1)


def test_a_temperature_for_each_text(engine):
  mixed = [0.0, 1.0, 1.0, 0.0]
  greedy = engine.generate(TEXTS)
  have = engine.generate(TEXTS, temperature=mixed, seed=1)
  assert have[0].tokens == greedy[0].tokens
  assert have[3].tokens == greedy[3].tokens
  assert have[2].tokens != greedy[2].tokens
  with pytest.raises(ValueError, match='2 values for 4 examples'):
    engine.generate(TEXTS, temperature=[0.0, 1.0])


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
    for speculative in (True, False):
      options = dict(sampling, seed=seed, speculative=speculative)
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
  chain = toy_models.random_markov(0, VOCAB_SIZE)
  model = Model(chain, chain.params)
  engine = Engine(model, model, tokenizer=tokenizer, max_decode_len=9)
  assert engine.num_programs == 0
  assert engine.warmup(['a', 'b']) > 0
  assert engine.num_programs == 1
  assert engine.warmup(['the', 'dog']) == 0.0
  assert engine.warmup(['']) == 0.0
  assert engine.warmup(['the', 'dog'], speculative=False) > 0
  want = engine.generate(['the', 'dog'])
  before = compilations.count
  assert engine.generate(['the', 'dog']) == want
  assert compilations.count == before and engine.num_programs == 2


def test_nan_is_an_error_of_its_row_alone(engine, tokenizer):
  target, draft = make_t5(0, 1), make_t5(0, 1)
  table = np.array(target.params['token_embedder']['embedding'])
  poison = tokenizer.encode(POISON)[-1]
  table[poison] = np.nan
  target.params['token_embedder'] = {'embedding': table}
  poisoned = Engine(
    target,
    draft,  # the same network unharmed: it never proposes the poison
    tokenizer=tokenizer,
    gamma=3,
    max_input_len=MAX_INPUT,
    max_decode_len=MAX_OUTPUT,
  )
  texts = [TEXTS[0], f'a {POISON}', TEXTS[2]]
  want = engine.generate(texts)
  assert all(poison not in want[i].tokens for i in (0, 2))
  have = poisoned.generate(texts, max_length=8)
  assert have[1].finish_reason == 'error'
  assert 'NaN' in have[1].error and 'token 1' in have[1].error
  for row in (0, 2):
    assert have[row].error is None
    assert have[row].tokens == want[row].tokens[:8]


def test_bad_pairs(tokenizer, folder):
  target, other = make_t5(0, 1), make_t5(0, 1, VOCAB_SIZE + 2000)
  with pytest.raises(ValueError, match=r"draft's vocabulary is 2288 .* 288"):
    Engine(target, other, tokenizer=tokenizer)
  small = make_t5(0, 1, VOCAB_SIZE - 8)
  with pytest.raises(ValueError, match='target has a vocabulary of 280'):
    Engine(small, tokenizer=tokenizer)
  foreign = tokenizer_lib.train_tokenizer(
    [WORDS, WORDS[::-1]], folder / 'foreign.model', 280
  )
  draft = Model(target.network, target.params, foreign)
  with pytest.raises(ValueError, match="draft's tokenizer .*foreign.model"):
    Engine(target, draft, tokenizer=tokenizer)
  with pytest.raises(ValueError, match='begins with id 0 by itself'):
    Engine(target, tokenizer=tokenizer, bos_id=5)
  with pytest.raises(ValueError, match='drafter, such as prompt_lookup'):
    Engine(target, target.network, tokenizer=tokenizer)
  with pytest.raises(ValueError, match='target such as specdec_jax.load'):
    Engine(target.network, tokenizer=tokenizer)
  with pytest.raises(ValueError, match="placement: expected .* got 'data'"):
    Engine(target, tokenizer=tokenizer, placement='data')
  with pytest.raises(ValueError, match='There is no vocabulary'):
    Engine(target)
  with pytest.raises(ValueError, match='gamma must be at least 0, got -1'):
    Engine(target, target, tokenizer=tokenizer, gamma=-1)
  with pytest.raises(ValueError, match='max_decode_len must be at least 1'):
    Engine(target, tokenizer=tokenizer, max_decode_len=0)
  plain = Engine(target, tokenizer=tokenizer)
  with pytest.raises(ValueError, match='needs a drafter'):
    plain.generate(['a'], speculative=True)
  assert plain.num_programs == 0


@pytest.mark.parametrize(
  'options, message',
  [
    (dict(stop_strings=['']), 'stop_strings must be a sequence'),
    (dict(stop_ids=[VOCAB_SIZE]), 'stop_ids holds 288'),
    (dict(min_length=-1), 'min_length must be at least 0'),
    (dict(max_length=0), 'max_length must be at least 1'),
    (dict(max_length=99), 'max_length = 99 is more than'),
    (dict(min_length=9, max_length=8), 'min_length = 9 .* max_length = 8'),
    (dict(min_length=10**400), 'min_length = 1000'),
    (dict(num_samples=10**400), 'num_samples must be at most'),
    (dict(stop_strings=[1]), r'stop_strings: expected .* got \[1\]'),
    (dict(stop_ids=[1.5]), r'stop_ids: expected .* got \[1.5\]'),
    (dict(prompts=['x']), r"prompts: expected .* got \['x'\]"),
    (dict(example_ids=[0, 1, 2, 0.5]), 'example_ids: expected .* 0.5'),
    (dict(seed='a'), "seed: expected a whole number, got 'a'"),
    (dict(log_probs='no'), "log_probs: expected True or False, got 'no'"),
    (dict(speculative='no'), "speculative must be .* got 'no'"),
    (dict(temperature=10**400), 'temperature must be finite'),
    (dict(top_p=10**400), 'top_p must be in'),
    (dict(top_p=1e-60), 'top_p must be in'),  # 0 in float32
    (dict(lenience=10**400), 'lenience must be in'),
    (dict(num_beams=2, alpha=10**400), 'alpha: expected a finite number'),
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


@pytest.mark.parametrize(
  'text', ['a \ud800 dog', ['text'], [5.5], [5.0], [True], [[5]], [5, None], 5]
)
def test_neither_text_nor_ids(engine, text):
  """Each way in names what came, and compiles nothing."""
  before = engine.num_programs
  for decode in (
    lambda: engine.generate(['a', text]),
    lambda: engine.request([text]),
    lambda: list(engine.stream(text)),
    lambda: engine.trace(text),
    lambda: engine.score([text], ['a']),
    lambda: engine.score(['a'], [text]),
    lambda: engine.input_ids(text),
    lambda: engine.num_input_tokens(text),
  ):
    with pytest.raises(ValueError) as error:
      decode()
    assert repr(text) in str(error.value)
  assert engine.num_programs == before
  if isinstance(text, str):  # of bad data, as an id that is none
    (done,) = engine.generate([text], on_too_long='report')
    assert done.finish_reason == 'error' and repr(text) in done.error


def test_a_trace_of_ids_is_that_of_their_text(engine, tokenizer):
  ids = tokenizer.encode('a cat')
  assert repr(engine.trace(ids)) == repr(engine.trace('a cat'))


def test_an_engine_says_what_it_is(engine, tokenizer):
  assert repr(engine) == (
    'Engine(target=Model(T5), draft=Model(T5), gamma=3, devices=1 x cpu)'
  )
  plain = Engine(make_t5(0, 1), uniform(VOCAB_SIZE), tokenizer=tokenizer)
  assert "draft='uniform'" in repr(plain)


def test_a_damaged_compiled_program_is_replaced(tmp_path):
  before = {
    name: jax.config.values[name]
    for name in (
      'jax_compilation_cache_dir',
      'jax_persistent_cache_min_compile_time_secs',
    )
  }

  def compiled():
    jax.clear_caches()
    return jax.jit(lambda x: x @ x)(np.ones((3, 3)))

  try:
    compilation_cache.enable(tmp_path)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
    compiled()
    (entry,) = tmp_path.glob('jit__lambda*-cache')
    whole = entry.read_bytes()
    entry.write_bytes(whole[:50])
    with pytest.warns(UserWarning, match='it is compiled anew'):
      compiled()
    assert len(entry.read_bytes()) > 50
    compiled()  # warnings are errors
  finally:
    for name, value in before.items():
      jax.config.update(name, value)
    compilation_cache.compilation_cache.reset_cache()


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
