"""What people guess of the API: names, samples, many texts, paths."""

import importlib.metadata
import importlib.util
import inspect
import pathlib
import shutil

import jax
import pytest

import small_vocabulary
import specdec_jax
from specdec_jax import Engine, Model, Tokenizer, load
from specdec_jax.checkpoints import huggingface, save_t5x
from specdec_jax.drafters.small_model_tree import small_model_tree
from specdec_jax.engine.options import Options, example_id, options_of
from specdec_jax.partitioning import Placement
from specdec_jax.tree_shape import TreeShape

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXTS = ['the red dog runs', 'a cat', 'the old house sings here there']
LENGTHS = {'max_input_len': 24, 'max_decode_len': 12}


def draw(layers, seed):
  network = small_vocabulary.network(layers)
  return network, network.init(jax.random.key(seed))


@pytest.fixture(scope='module')
def engine(tokenizer):
  return Engine(
    Model(*draw(1, 0)),
    Model(*draw(1, 1)),
    tokenizer=tokenizer.path,
    gamma=3,
    **LENGTHS,
  )


def tokens_of(completions):
  return [completion.tokens for completion in completions]


def test_every_public_name_is_where_it_is_said_to_be():
  """For editors by imports, when it runs by places: the same names."""
  source = (ROOT / 'specdec_jax' / '__init__.py').read_text()
  typed = source.partition('if TYPE_CHECKING')[2].partition('\n\n')[0]
  for name in specdec_jax.__all__:
    assert getattr(specdec_jax, name) is not None
    assert f' {name}' in typed, name
  assert set(specdec_jax.__all__) <= set(dir(specdec_jax))
  assert specdec_jax.__version__ == importlib.metadata.version('specdec_jax')
  with pytest.raises(AttributeError, match='no attribute'):
    _ = specdec_jax.generate


def test_the_signature_names_what_people_look_for():
  shown = inspect.signature(Engine.generate).parameters
  for name in (
    'temperature', 'top_k', 'top_p', 'max_length', 'num_samples',
    'stop_strings', 'seed', 'gamma', 'speculative',
  ):  # fmt: skip
    assert name in shown
    if hasattr(Options, name):
      assert shown[name].default == getattr(Options, name), name


def test_names_that_others_use(engine):
  want = engine.generate(TEXTS, max_length=5)
  have = engine.generate(TEXTS, max_new_tokens=5)
  assert tokens_of(have) == tokens_of(want) and len(want[0].tokens) == 5
  named = {'stop': '!', 'num_return_sequences': 2, 'stop_token_ids': [7]}
  assert options_of(named) == Options(
    stop_strings=('!',), num_samples=2, stop_ids=[7]
  )
  with pytest.raises(ValueError, match='max_tokens is called max_length here'):
    engine.generate(TEXTS, max_tokens=5, max_length=6)
  with pytest.raises(ValueError, match='temperature says it'):
    engine.generate(TEXTS, do_sample=True)


def test_samples_of_each_text(engine):
  """Together, or one by one as examples of their own: the same."""
  options = dict(temperature=1.0, seed=4, stop_ids=[])
  found = engine.generate(TEXTS, num_samples=3, **options)
  assert len(found) == 9
  ids = [example_id(index, sample) for index in range(3) for sample in range(3)]
  alone = engine.generate(
    [text for text in TEXTS for _ in range(3)], example_ids=ids, **options
  )
  assert tokens_of(found) == tokens_of(alone)
  assert len(set(map(tuple, tokens_of(found)))) == 9
  # The first sample is what a text has without more.
  assert tokens_of(found[::3]) == tokens_of(engine.generate(TEXTS, **options))
  each = engine.generate(
    TEXTS, num_samples=2, temperature=[0.0, 1.0, 0.0], stop_ids=[]
  )
  assert each[0].tokens == each[1].tokens and each[2].tokens != each[3].tokens
  with pytest.raises(ValueError, match='num_samples must be at least 1'):
    engine.generate(TEXTS, num_samples=0)
  with pytest.raises(ValueError, match='stream gives one output'):
    list(engine.stream(TEXTS[0], num_samples=2))


@pytest.mark.parametrize(
  'speculative', [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_more_texts_than_rows(engine, speculative):
  """Rows come and go, and it changes no token, greedy or sampled."""
  texts = [*TEXTS, '', *TEXTS[::-1], 'x']
  temperature = [0.0, 1.0] * 4
  options = dict(temperature=temperature, seed=3, speculative=speculative)
  want = engine.generate(texts, **options)
  have = engine.generate(texts, batch_size=2, **options)
  assert tokens_of(have) == tokens_of(want)
  assert [one.text for one in have] == [one.text for one in want]
  assert have[3].finish_reason == 'empty'
  with pytest.raises(ValueError, match='Text 8 has .* max_input_len'):
    engine.generate([*texts, 'dog ' * 40], batch_size=2)


def test_gamma_of_one_call(engine):
  want = engine.generate(TEXTS)
  have = engine.generate(TEXTS, gamma=1)
  assert tokens_of(have) == tokens_of(want) and engine.gamma == 3
  assert len(have[0].stats.histogram) == 2
  with pytest.raises(ValueError, match='gamma must be'):
    engine.generate(TEXTS, gamma=-1)


def test_a_trace_is_the_engines(engine):
  found = engine.trace(TEXTS[0], gamma=2)
  kept = sum(len(one.kept) for one in found.rounds)
  assert kept == len(engine.generate(TEXTS[:1])[0].tokens)
  assert max(len(one.proposed) for one in found.rounds) <= 2


@pytest.mark.skipif(
  importlib.util.find_spec('safetensors') is None,
  reason="needs safetensors: pip install 'specdec_jax[huggingface]'",
)
def test_a_folder_tells_everything(tmp_path, tokenizer):
  """Sizes, vocabulary and ends; arrays are read when an engine needs them."""
  paths = []
  for layers, seed, name in ((2, 0, 'large'), (1, 1, 'small')):
    network, params = draw(layers, seed)
    huggingface.save_huggingface(tmp_path / name, network.config, params)
    shutil.copy(tokenizer.path, tmp_path / name / 'spiece.model')
    paths.append(tmp_path / name)
  target, draft = map(load, paths)
  assert target.network == small_vocabulary.network(2)
  assert isinstance(target.tokenizer, Tokenizer) and target.stop_ids == (1,)
  have = Engine(target, draft, **LENGTHS).generate(TEXTS)
  want = Engine(Model(*draw(2, 0)), tokenizer=tokenizer, **LENGTHS)
  assert tokens_of(have) == tokens_of(want.generate(TEXTS))
  # The control: arrays were not read by `load`.
  broken = load(paths[0])
  (paths[0] / 'model.safetensors').unlink()
  with pytest.raises(ValueError, match=r'model\.safetensors'):
    Engine(broken, **LENGTHS)
  small = load(paths[1], dtype='bfloat16')
  made = Engine(small, **LENGTHS)
  leaves = jax.tree.leaves(made.params.target)
  assert {str(leaf.dtype) for leaf in leaves} == {'bfloat16'}
  with pytest.raises(ValueError, match='dtype is .int2., expected'):
    load(paths[1], dtype='int2')


def test_a_dtype_is_said_once(tokenizer):
  """By what loads a model, or by its placement; of each drafter's model too."""

  def dtypes(engine, side='draft'):
    leaves = jax.tree.leaves(getattr(engine.params, side))
    return {str(leaf.dtype) for leaf in leaves} - {'int32'}

  def model(seed, dtype=None):
    return Model(*draw(1, seed), tokenizer, name='mine', dtype=dtype)

  half, full = Placement('bfloat16'), Placement('float32')
  engine = Engine(model(0), model(1, 'float32'), placement=half, **LENGTHS)
  assert dtypes(engine, 'target') == {'bfloat16'}
  assert dtypes(engine) == {'float32'}
  engine = Engine(model(0, 'bfloat16'), model(1), placement=Placement())
  assert dtypes(engine, 'target') == dtypes(engine) == {'bfloat16'}
  tree = small_model_tree(model(1, 'bfloat16'), TreeShape((-1, -1)))
  assert dtypes(Engine(model(0), tree, **LENGTHS)) == {'bfloat16'}
  given = dict(draft_placement=half)
  assert dtypes(Engine(model(0), model(1), **given)) == {'bfloat16'}
  message = "Placement.dtype is 'float32', and 'mine' .*'bfloat16'"
  for target, drafter, given in (
    (model(0, 'bfloat16'), None, dict(placement=full)),
    (model(0), model(1, 'bfloat16'), dict(draft_placement=full)),
    (model(0), tree, dict(draft_placement=full)),
  ):
    with pytest.raises(ValueError, match=message):
      Engine(target, drafter, **given)


def test_a_checkpoint_needs_its_network(tmp_path, tokenizer):
  network, params = draw(1, 0)
  path = tmp_path / 'a.msgpack'
  save_t5x(path, params, step=1)
  model = load(path, network=network, tokenizer=tokenizer.path)
  assert Engine(model, **LENGTHS).generate(['a cat'])[0].tokens
  assert model.params['token_embedder'] is not None
  with pytest.raises(ValueError, match='a.msgpack.* does not say which sizes'):
    load(path)
  with pytest.raises(ValueError, match='num_encoder_layers|num_decoder_layers'):
    load(path, small_vocabulary.network(2))
