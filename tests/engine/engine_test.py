"""The engine on small random T5s: what people ask for, errors, compilation.

Laws and edges of the loops are tested in decoding/ and the conformance suite,
text and streams in completion_test.
"""

import importlib.metadata

import jax
import numpy as np
import pytest

import small_vocabulary
import specdec_jax as sd
import toy_models
from compilations import nothing_compiles
from small_vocabulary import VOCAB_SIZE, WORDS
from specdec_jax.decoding.state import PairParams
from specdec_jax.engine import compilation_cache, pair
from specdec_jax.engine.options import Options, example_id, options_of
from specdec_jax.engine.padding import padded_rows
from specdec_jax.text import tokenizer as tokenizer_lib

MAX_OUTPUT = 16
LENGTHS = {'max_input_len': 24, 'max_decode_len': MAX_OUTPUT}
TEXTS = ['the red dog runs', '', 'a cat', 'the old house sings here there']
SAMPLED = dict(temperature=1.0)


def make_t5(seed: int, vocab_size: int = VOCAB_SIZE) -> sd.Model:
  """Random weights whose greedy output depends on the input."""
  network = small_vocabulary.network(1, vocab_size)
  return sd.Model(network, small_vocabulary.weights(network, seed))


@pytest.fixture(scope='module')
def engine(tokenizer):
  return toy_models.chain_engine(tokenizer, **LENGTHS)


@pytest.fixture
def chains(tokenizer):
  """An engine that has compiled nothing."""
  return toy_models.chain_engine(tokenizer, 0, max_decode_len=9, gamma=2)


def tokens_of(completions):
  return [completion.tokens for completion in completions]


def test_greedy_speculative_equals_plain_in_order(tokenizer):
  models = make_t5(0), make_t5(1)
  engine = sd.Engine(*models, tokenizer=tokenizer, gamma=3, **LENGTHS)
  have = engine.generate(TEXTS)
  want = engine.generate(TEXTS, speculative=False)
  assert tokens_of(have) == tokens_of(want)
  assert [c.text for c in have] == [c.text for c in want]
  empty = [completion.finish_reason == 'empty' for completion in have]
  assert empty == [False, True, False, False]
  assert have[1].text == '' and have[1].tokens == []
  other = engine.generate([TEXTS[3], TEXTS[0], 'x'])
  assert tokens_of(other[:2]) == tokens_of([have[3], have[0]])
  assert have[0].tokens != have[3].tokens, 'the inputs should matter'
  for one, other in zip(have, want, strict=True):
    np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
    assert len(one.log_probs) == len(one.tokens) == one.stats.num_tokens
  assert want[0].stats.num_target_calls == len(want[0].tokens)
  assert engine.generate([]) == [] and engine.generate(['']) == [have[1]]


def test_gamma_of_a_request(chains):
  have = chains.generate(TEXTS, gamma=1)
  assert chains.gamma == 2 and len(have[0].stats.histogram) == 2
  assert tokens_of(have) == tokens_of(chains.generate(TEXTS))


def _proposed(done):
  return sum(each.stats.num_tested for each in done) > 0


def test_batches_are_not_slower_by_default(tokenizer, monkeypatch):
  toy_models.dear_batches(monkeypatch)
  engine = toy_models.chain_engine(tokenizer, gamma=None)
  assert engine.speculation_pays(1) and not engine.speculation_pays(32)
  texts = TEXTS * 16
  # A sample does not depend on the machine.
  asked = {'batch_size': 1, 'speculative': True, 'gamma': 2, 'temperature': 1.0}
  for options in ({}, *({name: asked[name]} for name in asked)):
    done = engine.generate(texts, max_length=4, **options)
    assert _proposed(done) == bool(options), options
  assert _proposed(engine.generate(TEXTS[:1], max_length=4))
  for batch_size in (0, -1, '4'):  # refused before any cost is asked for
    for ask in (engine.generate, engine.warmup):
      with pytest.raises(ValueError, match='batch_size'):
        ask(texts, batch_size=batch_size)
  chosen = toy_models.chain_engine(tokenizer, gamma=4)
  assert _proposed(chosen.generate(texts, max_length=4))


def test_the_relative_size_of_a_drafter():
  """The kernels that multiply each token count, and nothing else does."""
  kernel = {'kernel': np.zeros((2, 6))}
  target = {'encoder': kernel, 'decoder': kernel | {'embedding': np.zeros(9)}}
  params = PairParams(target, ({'decoder': {'kernel_blocks': np.zeros(3)}},))
  assert pair.relative_size(params) == 0.25


def test_too_long(engine):
  texts = ['a', 'the dog ' * 40, TEXTS[3], 'y']
  with pytest.raises(ValueError, match='Text 1: .* max_input_len = 24'):
    engine.generate(texts)
  ok, bad, _, _ = engine.generate(texts, on_too_long='report')
  assert ok.error is None and ok.tokens
  assert bad.finish_reason == 'error' and 'max_input_len' in bad.error
  cut = engine.generate(texts, on_too_long='truncate')[1]
  assert cut.tokens and cut.error is None


def test_texts_may_be_ids(engine, tokenizer):
  ids = [tokenizer.encode(text) for text in TEXTS]
  want = engine.generate(TEXTS)
  assert engine.generate(ids) == want
  ended = [np.asarray([*row, tokenizer.eos_id], np.int32) for row in ids]
  ended[1] = ended[1][:0]
  assert engine.generate(ended) == want
  assert repr(engine.trace(ids[2])) == repr(engine.trace('a cat'))


def test_prompts(engine):
  """A greedy output goes on as it would have, whatever begins it."""
  options = dict(stop_ids=[])
  texts = [TEXTS[0], TEXTS[2], TEXTS[3]]
  whole = engine.generate(texts, **options)
  kept = [0, 3, 7]  # ragged, one empty
  prompts = [c.tokens[:n] for c, n in zip(whole, kept, strict=True)]
  have = engine.generate(texts, prompts=prompts, **options)
  for one, other, n in zip(whole, have, kept, strict=True):
    assert len(other.tokens) == MAX_OUTPUT, 'a prompt costs no budget'
    assert other.tokens[: MAX_OUTPUT - n] == one.tokens[n:]
  # Nor is it streamed.
  options |= dict(prompts=prompts[2:])
  assert ''.join(engine.stream(texts[2], **options)) == have[2].text


def test_stop_ids(engine):
  whole = engine.generate(TEXTS, stop_ids=[])[0].tokens
  assert len(whole) == MAX_OUTPUT
  later = next(t for t in whole[2:] if t != whole[0])
  options = {'stop_ids': [VOCAB_SIZE - 1, later, tokenizer_lib.EOS_ID]}
  stopped = engine.generate(TEXTS, **options)[0]
  assert stopped.tokens == whole[: whole.index(later) + 1]
  assert stopped.finish_reason == 'stop'
  # The text does not hold what stopped it, though it is no end of sequence.
  assert stopped.text == engine.tokenizer.decode(stopped.tokens[:-1])
  # A least length holds it back; what a prompt has does not count for it.
  options |= dict(min_length=3, prompts=[whole[: whole.index(later)]] * 4)
  assert later not in engine.generate(TEXTS, **options)[0].tokens[:3]


def test_a_sample_depends_on_its_id_alone(engine):
  options = dict(SAMPLED, seed=5, stop_ids=[])
  ids = [70, 1, 12, 3]
  together = engine.generate(TEXTS, example_ids=ids, **options)
  turned = engine.generate(TEXTS[::-1], example_ids=ids[::-1], **options)
  assert tokens_of(together) == tokens_of(turned)[::-1]
  alone = engine.generate([TEXTS[2]], example_ids=[12], **options)
  assert alone[0].tokens == together[2].tokens
  (streamed,) = engine.generate([TEXTS[2]], **options)
  assert ''.join(engine.stream(TEXTS[2], **options)) == streamed.text
  for other in (dict(example_ids=[13]), dict(example_ids=[12], seed=6)):
    (done,) = engine.generate([TEXTS[2]], **options | other)
    assert done.tokens != alone[0].tokens


def test_samples_of_each_text(engine):
  """Together, or one by one as examples of their own: the same."""
  texts, options = TEXTS[2:], dict(SAMPLED, seed=4, stop_ids=[])
  found = engine.generate(texts, num_samples=2, **options)
  ids = [example_id(*pair) for pair in np.ndindex(2, 2)]
  repeated = [text for text in texts for _ in range(2)]
  alone = engine.generate(repeated, example_ids=ids, **options)
  assert tokens_of(found) == tokens_of(alone)
  assert len(set(map(tuple, tokens_of(found)))) == 4
  # The first sample is what a text has without more.
  assert tokens_of(found[::2]) == tokens_of(engine.generate(texts, **options))
  options['temperature'] = [0.0, 1.0]
  each = engine.generate(texts, num_samples=2, **options)
  assert each[0].tokens == each[1].tokens and each[2].tokens != each[3].tokens


def test_names():
  """Those that others use, and those that are public."""
  named = {'stop': '!', 'num_return_sequences': 2, 'stop_token_ids': [7]}
  named |= {'max_new_tokens': 5, 'beam_size': 3}
  assert options_of(named | {'stop': ()}) == Options(
    num_samples=2, stop_ids=[7], max_length=5, num_beams=3
  )
  assert all(getattr(sd, name) is not None for name in sd.__all__)
  assert sd.__version__ == importlib.metadata.version('specdec_jax')


# What is wrong.

HUGE = 10**400
BEAMS = {'num_beams': 2}
# Options that are wrong by themselves.
WRONG = [
  dict(on_too_long='cut', stop_strings=[''], stop_ids=[VOCAB_SIZE], seed='a'),
  dict(min_length=-1, max_length=0, num_samples=HUGE, prompts=[[3]], gamma='4'),
  dict(max_length=99, log_probs='no', top_log_probs=-1, speculative='no'),
  dict(batch_size=0, temperature=-0.1, top_p=1e300, lenience=HUGE, gamma=257),
  dict(top_p=1e-60, example_ids=[1], num_beams=0, alpha=1.0),  # 0 in float32
  dict(example_ids=[0, 1, 2, -1], num_beams=4000),
]
# Options that are wrong beside those of `BEAMS`.
WITH_BEAMS = [
  dict(temperature=1.0, lenience=0.5, num_samples=3, stop_strings='x'),
  dict(draft_beams=1, alpha=-1.0, length_penalty=float('nan')),
  dict(alpha=1e300, early_stopping=True),
]


@pytest.mark.parametrize(
  ('options', 'field'),
  [
    *(({x: y}, x) for wrong in WRONG for x, y in wrong.items()),
    *((BEAMS | {x: y}, x) for wrong in WITH_BEAMS for x, y in wrong.items()),
    ({'min_lenght': 1}, 'Nearest known: min_length'),
    ({'max_tokens': 5, 'max_length': 6}, 'max_length'),
    ({'do_sample': True}, 'temperature'),
    ({'min_length': 9, 'max_length': 8}, 'min_length'),
    ({'prompts': [[-1]] * 4}, 'Prompt 0'),
    ({'temperature': [0.0, 1.0]}, 'each of 4 texts'),
    ({'verification': 'block', 'lenience': 0.5}, 'verification'),
    (BEAMS | {'alpha': 1.0, 'length_penalty': 1.0}, 'length_penalty'),
    (BEAMS | {'gamma': 'adaptive', 'speculative': True}, 'gamma'),
  ],
)
def test_bad_options_come_before_compilation(engine, options, field):
  before = engine.num_programs
  with pytest.raises(ValueError, match=field):
    engine.generate(TEXTS, **options)
  assert engine.num_programs == before
  if options.keys() == {'gamma'}:
    with pytest.raises(ValueError, match=field):
      engine.gamma = options['gamma']


@pytest.mark.parametrize('text', ['a \ud800 dog', ['text'], [5.5], 5])
def test_neither_text_nor_ids(engine, text):
  """Each way in names what came, and compiles nothing."""
  before = engine.num_programs
  codec = engine.codec
  for decode, *args in (
    *((engine.generate, ['a', text]), (engine.request, [text])),
    *((lambda x: [*engine.stream(x)], text), (engine.trace, text)),
    *((engine.score, [text], ['a']), (engine.score, ['a'], [text])),
    *((codec.input_ids, text), (engine.num_input_tokens, text)),
  ):
    with pytest.raises(ValueError) as error:
      decode(*args)
    assert repr(text) in str(error.value)
  assert engine.num_programs == before
  for ask in (engine.generate, engine.warmup, engine.request):
    with pytest.raises(ValueError, match='text'):
      ask(5)
  if isinstance(text, str):  # of bad data, as an id that is none
    (done,) = engine.generate([text], on_too_long='report')
    assert done.finish_reason == 'error' and repr(text) in done.error


def test_bad_pairs(tokenizer, folder):
  target = make_t5(0)
  foreign = tokenizer_lib.train_tokenizer(
    [WORDS, WORDS[::-1]], folder / 'foreign.model', 280
  )
  of_foreign = sd.Model(target.network, target.params, foreign)
  settings = dict(tokenizer=5, bos_id=5, placement='data', fallback='yes')
  settings |= dict(gamma=-1, max_decode_len=0)
  for models, options, field in (
    ((target, of_foreign), {}, "draft's tokenizer: .*foreign.model"),
    ((make_t5(0, VOCAB_SIZE - 8),), {}, "target's vocabulary: .* got 280"),
    ((target, target.network), {}, 'drafter: expected a Drafter'),
    ((target.network,), {}, 'target'),
    ((target,), {'tokenizer': None}, 'tokenizer: .* beside'),
    *(((target,), {name: value}, name) for name, value in settings.items()),
  ):
    with pytest.raises(ValueError, match=field):
      sd.Engine(*models, **{'tokenizer': tokenizer} | options)
  plain = sd.Engine(target, tokenizer=tokenizer)
  with pytest.raises(ValueError, match='needs a drafter'):
    plain.generate(['a'], speculative=True)
  assert plain.num_programs == 0


# What is compiled.


def test_other_values_do_not_recompile(chains):
  """`warmup` compiles a program of each kind, for all texts and values."""

  def decode(texts, seed, **sampling):
    for speculative in (True, False):
      options = dict(sampling, seed=seed, speculative=speculative)
      chains.generate(texts, **options)

  with pytest.raises(AssertionError), nothing_compiles():  # control
    jax.jit(lambda x: x * 3.14159)(1.0)
  for number, speculative in enumerate((True, False)):
    options = dict(speculative=speculative, temperature=0.9)
    assert chains.num_programs == number
    assert chains.warmup(TEXTS, **options) > 0
    assert chains.warmup(['a', 'b', 'c', 'd'], **options) == 0.0
  with nothing_compiles():
    decode(TEXTS[::-1], 1, temperature=0.5, top_k=7, top_p=0.8)
    decode(['here', 'a dog', 'the the', 'x'], 2, temperature=[0, 1, 2, 0.1])
    decode(['a', 'b', 'c'], 3, temperature=1.0, top_p=0.3)
  assert chains.num_programs == 2


def test_programs_for_other_numbers_of_texts(chains):
  sizes = [padded_rows(number) for number in range(1, 65)]
  assert sorted(set(sizes)) == [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64]
  assert all(size < 1.5 * n for n, size in enumerate(sizes, 1) if size > 2)
  texts, plain = WORDS.split()[:9], SAMPLED | {'speculative': False}
  assert chains.request(texts).inputs.shape[0] == 12
  found = {}
  # Three texts go through the program for eight, one through that for two.
  for number, programs in ((8, 1), (2, 2), (3, 2), (1, 2)):
    found[number] = chains.generate(texts[:number], **plain)
    assert chains.num_programs == programs
    assert tokens_of(found[number]) == tokens_of(found[8][:number])
  # Who measures gets the rows that were asked for.
  assert chains.warmup(texts[:5], **plain) > 0
  assert chains.warmup(texts[:5], **plain) == 0.0


FOLDER = 'jax_compilation_cache_dir'
LEAST_SECONDS = 'jax_persistent_cache_min_compile_time_secs'


@pytest.fixture
def cache_settings():
  """Settings of JAX's cache of programs, which come back."""
  before = {name: jax.config.values[name] for name in (FOLDER, LEAST_SECONDS)}
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.compilation_cache.reset_cache()


def test_a_damaged_compiled_program_is_replaced(tmp_path, cache_settings):
  def compiled():
    jax.clear_caches()
    return jax.jit(lambda x: x @ x)(np.ones((3, 3)))

  compilation_cache.enable(tmp_path)
  jax.config.update(LEAST_SECONDS, 0)
  compiled()
  (entry,) = tmp_path.glob('jit__lambda*-cache')
  entry.write_bytes(entry.read_bytes()[:50])
  with pytest.warns(UserWarning, match='it is compiled anew'):
    compiled()
  assert len(entry.read_bytes()) > 50
  compiled()  # warnings are errors


def test_compilation_cache_folder(monkeypatch, tmp_path, cache_settings):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  default = tmp_path / 'specdec_jax' / 'xla'
  jax.config.update(FOLDER, None)
  assert compilation_cache.enable() == default and default.is_dir()
  assert jax.config.values[FOLDER] == str(default)
  # One that the user chose for JAX stays, unless asked for another.
  jax.config.update(FOLDER, str(tmp_path / 'own'))
  assert compilation_cache.enable() == tmp_path / 'own'
  assert compilation_cache.enable(tmp_path / 'given') == tmp_path / 'given'
  (tmp_path / 'file').write_text('')
  assert compilation_cache.enable(tmp_path / 'file' / 'no') is None


# What is loaded.


def test_a_dtype_is_said_once(tokenizer):
  """By what loads a model, or by its placement; of each drafter's model too."""

  def dtypes(engine):
    """Those of the target, and those of the drafter."""
    kinds = [{str(x.dtype) for x in jax.tree.leaves(y)} for y in engine.params]
    return [kind - {'int32'} for kind in kinds]

  def model(seed, dtype=None):
    made = make_t5(seed)
    return sd.Model(made.network, made.params, tokenizer, name='a', dtype=dtype)

  half = sd.Placement('bfloat16')
  engine = sd.Engine(model(0), model(1, 'float32'), placement=half, **LENGTHS)
  assert dtypes(engine) == [{'bfloat16'}, {'float32'}]
  engine = sd.Engine(model(0, 'bfloat16'), model(1), placement=sd.Placement())
  assert dtypes(engine) == [{'bfloat16'}] * 2
  tree = sd.small_model_tree(model(1, 'bfloat16'), sd.TreeShape((-1, -1)))
  assert dtypes(sd.Engine(model(0), tree, **LENGTHS))[1] == {'bfloat16'}
  message = "Placement.dtype: .*bfloat16.* 'a' .*'float32'"
  with pytest.raises(ValueError, match=message):
    sd.Engine(model(0, 'bfloat16'), placement=sd.Placement('float32'))
