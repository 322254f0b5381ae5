"""T5X's own infer.py and InteractiveModel, which speculate by the plug-in.

T5X is on no registry. Where it can be imported, its outputs without the plug-in
are compared with those with it; see docs/from-t5x.md for how to run this.
"""

import functools
import importlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import small_vocabulary
from specdec_jax import checkpoints, t5x_plugin
from specdec_jax.models.t5 import T5, T5Config

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / '../shared/fixtures/t5x/tensorstore/checkpoint_0'
LENGTHS = {'inputs': 24, 'targets': 32}
SIZES = {
  'vocab_size': 128,
  'emb_dim': 32,
  'num_heads': 2,
  'head_dim': 16,
  'num_encoder_layers': 2,
  'num_decoder_layers': 2,
  'mlp_dim': 64,
  'mlp_activations': ('gelu', 'linear'),
}

pytestmark = [
  pytest.mark.skipif(
    not importlib.util.find_spec('t5x'), reason='T5X is not installed'
  ),
  pytest.mark.skipif(not CHECKPOINT.exists(), reason='no T5X checkpoint'),
  # Those of T5X, TensorFlow and seqio are not ours.
  pytest.mark.filterwarnings('ignore'),
]

TASK = """
import pathlib
import seqio
import tensorflow as tf

HERE = pathlib.Path(__file__).parent
VOCABULARY = seqio.SentencePieceVocabulary(str(HERE / 'vocab.model'))

def columns(dataset):
  def two(line):
    return dict(zip(('inputs', 'targets'), tf.unstack(line, 2)))
  return dataset.map(lambda line: two(tf.strings.split(line, chr(9))))

seqio.TaskRegistry.add(
  'little',
  source=seqio.TextLineDataSource({'test': str(HERE / 'lines.tsv')}),
  preprocessors=[
    columns, seqio.preprocessors.tokenize, seqio.preprocessors.append_eos
  ],
  output_features={
    name: seqio.Feature(VOCABULARY) for name in ('inputs', 'targets')
  },
)
"""

# What both runs bind, in T5X's way: a file of a model, with its sizes.
MODEL = """
from __gin__ import dynamic_registration
import seqio
from t5x import utils
from t5x.examples.t5 import network
import little_task

include 't5x/examples/t5/t5_1_1/base.gin'
seqio.SentencePieceVocabulary.sentencepiece_model_file = '{folder}/vocab.model'
DROPOUT_RATE = 0.0
network.T5Config.dtype = 'float32'
{sizes}
"""

TASK_OF_RUN = """
MIXTURE_OR_TASK_NAME = 'little'
TASK_FEATURE_LENGTHS = {lengths}
CHECKPOINT_PATH = '{checkpoint}'
utils.RestoreCheckpointConfig.dtype = 'float32'
utils.DatasetConfig.batch_size = 4
"""

STOCK = """
from t5x import decoding
from t5x import models
include 't5x/configs/runs/infer.gin'
models.EncoderDecoderModel.decode_fn = @decoding.temperature_sample
decoding.temperature_sample.temperature = 0.0
"""

STOCK_BEAMS = """
from t5x import decoding
from t5x import models
include 't5x/configs/runs/infer.gin'
NUM_DECODES = 1
models.EncoderDecoderModel:
  decode_fn = @decoding.beam_search
  default_decoder_params = @models.DecoderParams()
models.DecoderParams:
  num_decodes = %NUM_DECODES
  return_all_decodes = True
"""

SPECULATIVE = """
include '{root}/gin/t5x/speculative.gin'
draft/network.T5Config:
  emb_dim = 32
  num_heads = 2
  head_dim = 16
  num_encoder_layers = 2
  num_decoder_layers = 1
  mlp_dim = 64
DRAFT_CHECKPOINT_PATH = '{folder}/draft'
DRAFT_DTYPE = 'float32'
"""


def network(num_decoder_layers):
  return T5(T5Config(**SIZES | {'num_decoder_layers': num_decoder_layers}))


@pytest.fixture(scope='module')
def files(folder):
  """A vocabulary, a task, a drafter, and gin files of both runs."""
  import sentencepiece

  sentences = small_vocabulary.sentences()
  with open(folder / 'vocab.model', 'wb') as file:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(sentences),
      model_writer=file,
      vocab_size=60,
      hard_vocab_limit=False,
      pad_id=0,
      eos_id=1,
      unk_id=2,
      bos_id=-1,
      minloglevel=2,
    )
  pairs = zip(sentences[:10], sentences[1:11], strict=True)
  lines = ''.join('\t'.join(pair) + '\n' for pair in pairs)
  (folder / 'lines.tsv').write_text(lines)
  (folder / 'little_task.py').write_text(TASK)

  params = checkpoints.load(CHECKPOINT)
  del params['decoder']['layers_1']
  checkpoints.save_t5x(folder / 'draft', params, 0)
  sizes = '\n'.join(
    f'network.T5Config.{name} = {value!r}' for name, value in SIZES.items()
  )
  runs = {
    'stock': STOCK,
    'stock_beams': STOCK_BEAMS,
    'speculative': SPECULATIVE,
  }
  for name, run in runs.items():
    text = (MODEL + run + TASK_OF_RUN).format(
      folder=folder,
      root=ROOT,
      sizes=sizes,
      lengths=LENGTHS,
      checkpoint=CHECKPOINT.resolve(),
    )
    (folder / f'{name}.gin').write_text(text)
  return folder


def infer(files, name, mode, *bindings, **env):
  """Runs t5x.infer, once; returns the files that it wrote, by name."""
  bound = zlib.crc32(' '.join(bindings).encode())
  output = files / f'{name}_{mode}_{bound}'
  command = [sys.executable, '-m', 't5x.infer', f'--gin_file={name}.gin']
  command += [
    f"--gin.INFER_OUTPUT_DIR='{output}'",
    f"--gin.infer.mode='{mode}'",
  ]
  command += [f'--gin.{binding}' for binding in bindings]
  paths = [str(files), *filter(None, sys.path)]
  env = os.environ | {'PYTHONPATH': os.pathsep.join(paths)} | env
  if not output.exists():
    done = subprocess.run(
      command, env=env, cwd=files, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
  return {
    path.name: path.read_text()
    for path in output.iterdir()
    if path.name != 'config.gin'  # it says what was bound
  }


@pytest.mark.parametrize('mode', ['predict', 'predict_with_aux', 'score'])
def test_infer_writes_the_same_files(files, mode):
  """Greedily; also which files there are, and what they say of the model."""
  stock, ours = (infer(files, name, mode) for name in ('stock', 'speculative'))
  assert stock == ours
  name = f'little-{mode}.jsonl-00000-of-00001'
  assert set(ours) == {name, f'{name}.COMPLETED', 'model-info.txt'}
  assert len(ours[name].splitlines()) == 10


def test_infer_splits_both_models(files):
  """Over two devices, from a checkpoint of Orbax; the same outputs."""
  orbax = CHECKPOINT.parent.with_name('orbax') / CHECKPOINT.name
  ours = infer(
    files,
    'speculative',
    'predict',
    'PjitPartitioner.num_partitions=2',
    f"CHECKPOINT_PATH='{orbax.resolve()}'",
    XLA_FLAGS='--xla_force_host_platform_device_count=2',
  )
  name = 'little-predict.jsonl-00000-of-00001'
  assert ours[name] == infer(files, 'stock', 'predict')[name]


@pytest.mark.parametrize('width', [1, 4])
def test_infer_searches_as_t5x_does(files, width):
  """T5X's default: the same beams in the same files, scores to 1e-4."""
  mode, wide = 'predict_with_aux', f'NUM_DECODES={width}'
  theirs = infer(files, 'stock_beams', mode, wide)
  bindings = ('DECODE_FN=@t5x_plugin.beam_search', 'RETURN_ALL_DECODES=True')
  ours = infer(files, 'speculative', mode, wide, *bindings)
  assert theirs.keys() == ours.keys()
  name = 'little-predict_with_aux.jsonl-00000-of-00001'
  for each in zip(*(f[name].splitlines() for f in (theirs, ours)), strict=True):
    want, have = map(json.loads, each)
    scores = [line.pop('aux')['scores'] for line in (want, have)]
    assert want == have
    np.testing.assert_allclose(*scores, atol=1e-4)
    assert np.size(scores[1]) == width


def test_infer_samples(files):
  """Several decodes of each example; T5X's seed makes them again."""
  bindings = (
    'TEMPERATURE=1.0',
    'NUM_DECODES=2',
    'RETURN_ALL_DECODES=True',
  )
  first = infer(files, 'speculative', 'predict_with_aux', *bindings)
  # The default once more, for another folder.
  bindings += ('GAMMA=4',)
  again = infer(files, 'speculative', 'predict_with_aux', *bindings)
  assert first == again
  lines = first['little-predict_with_aux.jsonl-00000-of-00001'].splitlines()
  for line in map(json.loads, lines):
    low, high = line['aux']['scores']
    assert low <= high < 0
    assert len(set(line['prediction'])) == 2


@pytest.fixture(scope='module')
def modules():
  names = (
    'seqio',
    't5x.adafactor',
    't5x.decoding',
    't5x.interactive_model',
    't5x.models',
    't5x.partitioning',
    't5x.utils',
    't5x.examples.t5.network',
  )
  return {name.split('.')[-1]: importlib.import_module(name) for name in names}


@pytest.fixture(scope='module')
def make(files, modules):
  """(decode_fn, speculates) -> a model of the checkpoint."""

  def module(num_decoder_layers):
    sizes = SIZES | {'num_decoder_layers': num_decoder_layers}
    config = modules['network'].T5Config(**sizes, dtype=jnp.float32)
    return modules['network'].Transformer(config)

  vocabulary = modules['seqio'].SentencePieceVocabulary(
    str(files / 'vocab.model')
  )

  # T5X's notebooks have one, although nothing is trained.
  adafactor = modules['adafactor']
  optimizer = adafactor.Adafactor(
    decay_rate=0.8,
    logical_factor_rules=adafactor.standard_logical_factor_rules(),
  )

  def made(speculates=True, **values):
    values = {'temperature': 0.0, 'topk': 0} | values
    theirs = modules['decoding'].temperature_sample
    decode_fn = t5x_plugin.temperature_sample if speculates else theirs
    model = modules['models'].EncoderDecoderModel(
      module=module(2),
      input_vocabulary=vocabulary,
      output_vocabulary=vocabulary,
      optimizer_def=optimizer,
      decode_fn=functools.partial(decode_fn, **values),
    )
    if not speculates:
      return model
    return t5x_plugin.EncoderDecoderModel(model, module(1))

  return made


@pytest.fixture(scope='module')
def variables(files):
  draft = checkpoints.load(files / 'draft', network(1))
  return checkpoints.load(CHECKPOINT, network(2)), {'drafter': draft}


def batch():
  rng = np.random.default_rng(0)
  inputs = rng.integers(2, 128, (5, 24), np.int32)
  inputs[1, 9:] = 0
  prompt = np.zeros((5, 32), np.int32)
  prompt[0, 1:4] = 17, 30, 1
  prompt[1, 1:] = rng.integers(2, 128, 31)
  prompt[2, 1:13] = rng.integers(2, 128, 12)
  return {'encoder_input_tokens': inputs, 'decoder_input_tokens': prompt}


def predict(model, variables, **settings):
  params, mutables = variables
  if isinstance(model, t5x_plugin.EncoderDecoderModel):
    settings['flax_mutables'] = mutables
  tokens, aux = model.predict_batch_with_aux(params, batch(), **settings)
  return np.asarray(tokens), np.asarray(aux['scores'])


@pytest.mark.parametrize(
  'values',
  [
    {},
    {'eos_id': 100},
    {'max_decode_steps': 7, 'eos_id': 100, 'rescale_log_probs': False},
  ],
)
@pytest.mark.parametrize('prompted', [False, True])
def test_greedy_outputs_with_prompts_and_ends(
  make, variables, prompted, values
):
  given = {k: v for k, v in values.items() if k == 'eos_id'}
  values = {k: v for k, v in values.items() if k != 'eos_id'}
  settings = {
    'decoder_params': given,
    'prompt_with_targets': prompted,
    'num_decodes': 2,
    'return_all_decodes': True,
  }
  stock = predict(make(speculates=False, **values), variables, **settings)
  settings['decoder_params'] = dict(given)
  ours = predict(make(**values), variables, **settings)
  np.testing.assert_array_equal(ours[0], stock[0])
  np.testing.assert_allclose(ours[1], stock[1], rtol=1e-4)
  # With this end id some end early, by themselves.
  assert not given or (ours[0][:, :, -1] == 0).any()


NUM_SAMPLES = 400
PLACES = 3  # tokens of each sample


def sample(model, variables):
  return predict(
    model,
    variables,
    num_decodes=NUM_SAMPLES,
    return_all_decodes=True,
    rng=jax.random.PRNGKey(5),
  )


def difference(first, second):
  """Of two samples' tokens: chi-squared, in deviations from its mean.

  It counts, for each example and place, the tokens that came up 20 times.
  """
  square, cells = 0.0, 0
  for place in range(PLACES):
    one, other = (
      np.stack([np.bincount(row, minlength=128) for row in each[..., place]])
      for each in (first, second)
    )
    common = one + other >= 20
    square += np.sum(((one - other) ** 2)[common] / (one + other)[common])
    cells += common.sum()
  return (square - cells) / np.sqrt(2 * cells)


@pytest.mark.parametrize('values', [{'topk': 6}, {'topp': 0.7}, {'topk': 0}])
def test_samples_are_from_t5xs_distribution(make, variables, values):
  """2,000 samples of each; alpha about 1e-6 (5 deviations)."""
  values = {'max_decode_steps': PLACES} | values
  stock = sample(make(False, temperature=0.4, **values), variables)
  ours = sample(make(temperature=0.4, **values), variables)
  assert difference(ours[0], stock[0]) < 5
  spread = np.sqrt((ours[1].var(1) + stock[1].var(1)) / NUM_SAMPLES)
  assert (np.abs(ours[1].mean(1) - stock[1].mean(1)) < 5 * spread).all()
  # Negative control: another temperature is noticed.
  other = sample(make(temperature=0.7, **values), variables)
  assert difference(other[0], stock[0]) > 5


def test_parameters_are_arguments_split_by_t5x(make, modules):
  """Constants in the compiled function are small; both models have axes."""
  partitioner = modules['partitioning'].PjitPartitioner(num_partitions=1)
  model = make()
  shapes = {
    'encoder_input_tokens': (4, 512),
    'decoder_input_tokens': (4, 128),
  }
  initializer = modules['utils'].TrainStateInitializer(
    optimizer_def=None,
    init_fn=model.get_initial_variables,
    input_shapes=shapes,
    input_types=dict.fromkeys(shapes, jnp.int32),
    partitioner=partitioner,
  )
  axes = initializer.train_state_axes

  def axes_of(tree):
    return tree['decoder']['layers_0']['mlp']['wi_0']['kernel']

  split = jax.sharding.PartitionSpec(None, 'model')
  assert axes_of(axes.flax_mutables['drafter']) == split
  assert axes_of(axes.params) == split
  state = initializer.global_train_state_shape
  program = partitioner.partition(
    lambda params, batch, mutables: model.predict_batch_with_aux(
      params, batch, flax_mutables=mutables
    ),
    in_axis_resources=(
      axes.params,
      partitioner.data_partition_spec,
      axes.flax_mutables,
    ),
    out_axis_resources=None,
  )
  tokens = {k: jax.ShapeDtypeStruct(v, jnp.int32) for k, v in shapes.items()}
  compiled = program.lower(state.params, tokens, state.flax_mutables).compile()
  found = re.findall(
    r'= (?:f32|s32|u32|bf16|pred)\[([\d,]*)\]\S* constant\(', compiled.as_text()
  )
  assert found
  sizes = [np.prod([int(n) for n in dims.split(',') if n]) for dims in found]
  assert 4 * sum(sizes) < 2**20
  given = jax.tree.leaves((state.params, state.flax_mutables))
  total = compiled.memory_analysis().argument_size_in_bytes
  assert total >= sum(leaf.size * leaf.dtype.itemsize for leaf in given)


def interactive(model, modules, cls, folder, **settings):
  return cls(
    batch_size=2,
    task_feature_lengths=LENGTHS,
    output_dir=str(folder),
    partitioner=modules['partitioning'].PjitPartitioner(num_partitions=1),
    model=model,
    dtype='float32',
    restore_mode='specific',
    checkpoint_path=str(CHECKPOINT.resolve()),
    input_shapes={
      'encoder_input_tokens': (2, LENGTHS['inputs']),
      'decoder_input_tokens': (2, LENGTHS['targets']),
    },
    **settings,
  )


def test_the_interactive_model(make, modules, files):
  theirs = interactive(
    make(speculates=False),
    modules,
    modules['interactive_model'].InteractiveModel,
    files / 'theirs',
  )
  ours = interactive(
    make(),
    modules,
    t5x_plugin.InteractiveModel,
    files / 'ours',
    draft_checkpoint=files / 'draft',
  )
  examples = [
    {'input': 'the red dog', 'target': 'a cat'},
    {'input': 'a tree', 'target': 'sleeps here'},
    {'input': 'old', 'target': 'house'},
  ]

  def texts(inferences):
    return [prediction for _, prediction in inferences[0]]

  expected = texts(theirs.predict_with_aux(examples))
  assert len(expected) == 3
  assert texts(ours.predict_with_aux(examples)) == expected
  scores = [each.score(examples) for each in (theirs, ours)]
  values = [[score for _, score in each] for each in scores]
  np.testing.assert_array_equal(*values)


def test_beams_of_prompts_and_of_other_lengths(modules, make, variables):
  """T5X's own function beside ours, in the same model."""
  params, mutables = variables
  read = batch()
  read['decoder_input_tokens'][1, 31] = 0  # see `t5x_plugin.beam_search`
  for options in (
    {'num_decodes': 2, 'decoder_params': {'eos_id': 60}},
    {'num_decodes': 4, 'decoder_params': {'eos_id': 100, 'alpha': 1.0}},
    {'num_decodes': 4, 'prompt_with_targets': True},
    {'num_decodes': 3, 'decoder_params': {'max_decode_len': 9}},
  ):
    theirs = make(speculates=False)
    theirs._decode_fn = modules['decoding'].beam_search
    ours = make(speculates=False)
    ours._decode_fn = t5x_plugin.beam_search
    ours = t5x_plugin.EncoderDecoderModel(ours, make().draft_module, gamma=3)
    want, aux = theirs.predict_batch_with_aux(
      params, read, return_all_decodes=True, **options
    )
    have, own = ours.predict_batch_with_aux(
      params,
      read,
      return_all_decodes=True,
      flax_mutables=mutables,
      **options,
    )
    np.testing.assert_array_equal(have, want)
    np.testing.assert_allclose(own['scores'], aux['scores'], atol=1e-4)


def test_stock_decode_functions_are_refused(modules, make):
  search = modules['decoding'].beam_search
  model = make(speculates=False)
  model._decode_fn = search
  with pytest.raises(ValueError, match="decode_fn is T5X's beam_search"):
    t5x_plugin.EncoderDecoderModel(model, model.module)
