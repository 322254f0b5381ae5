"""T5X's own infer.py and InteractiveModel, which speculate by the plug-in.

T5X is on no registry. Where it can be imported, its outputs without the plug-in
are compared with those with it; see docs/from-t5x.md for how to run this.
"""

import functools
import importlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import small_vocabulary
import t5x_batches
from repository import ROOT, T5X_FIXTURES
from specdec_jax import checkpoints, t5x_plugin
from specdec_jax.models.t5 import T5, T5Config

CHECKPOINT = T5X_FIXTURES / 'tensorstore/checkpoint_0'
LENGTHS = {'inputs': 24, 'targets': 32}
SIZES = dict(vocab_size=128, emb_dim=32, num_heads=2, head_dim=16, mlp_dim=64)
SIZES |= dict(num_encoder_layers=2, num_decoder_layers=2)
SIZES |= dict(mlp_activations=('gelu', 'linear'))

pytest.importorskip('t5x')
pytestmark = [
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

SPECULATIVE = """
include '{root}/gin/t5x/speculative.gin'
{draft_sizes}
DRAFT_CHECKPOINT_PATH = '{folder}/draft'
DRAFT_DTYPE = 'float32'
"""


DRAFT_SIZES = SIZES | {'num_decoder_layers': 1}


def bindings(scope, sizes):
  lines = [f'{scope}network.T5Config.{x} = {y!r}' for x, y in sizes.items()]
  return '\n'.join(lines)


@pytest.fixture(scope='module')
def files(folder):
  """A vocabulary, a task, a drafter, and gin files of both runs."""
  sentences = small_vocabulary.sentences()
  small_vocabulary.sentencepiece_of(
    folder / 'vocab.model',
    vocab_size=60,
    hard_vocab_limit=False,
    **dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1),
  )
  pairs = zip(sentences[:10], sentences[1:11], strict=True)
  lines = ''.join('\t'.join(pair) + '\n' for pair in pairs)
  (folder / 'lines.tsv').write_text(lines)
  (folder / 'little_task.py').write_text(TASK)

  params = checkpoints.load(CHECKPOINT)
  del params['decoder']['layers_1']
  checkpoints.save_t5x(folder / 'draft', params, 0)
  for name, run in (('stock', STOCK), ('speculative', SPECULATIVE)):
    text = (MODEL + run + TASK_OF_RUN).format(
      folder=folder,
      root=ROOT,
      sizes=bindings('', SIZES),
      draft_sizes=bindings('draft/', DRAFT_SIZES),
      lengths=LENGTHS,
      checkpoint=CHECKPOINT.resolve(),
    )
    (folder / f'{name}.gin').write_text(text)
  return folder


def infer(files, name, mode, *bindings, **env):
  """Runs t5x.infer, once; returns the files that it wrote, by name."""
  output = files / '_'.join([name, mode, *env])
  command = [sys.executable, '-m', 't5x.infer', f'--gin_file={name}.gin']
  bindings += f"INFER_OUTPUT_DIR='{output}'", f"infer.mode='{mode}'"
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


def t5x(module):
  return importlib.import_module(f't5x.{module}')


@pytest.fixture(scope='module')
def make(files):
  """(decode_fn, speculates) -> a model of the checkpoint."""
  import seqio

  def module(sizes):
    config = t5x('examples.t5.network').T5Config(**sizes, dtype=jnp.float32)
    return t5x('examples.t5.network').Transformer(config)

  path = str(files / 'vocab.model')
  vocabulary = seqio.SentencePieceVocabulary(path)
  # T5X's notebooks have one, although nothing is trained.
  adafactor = t5x('adafactor')
  rules = adafactor.standard_logical_factor_rules()
  optimizer = adafactor.Adafactor(decay_rate=0.8, logical_factor_rules=rules)

  def made(speculates=True, **values):
    values = {'temperature': 0.0, 'topk': 0} | values
    theirs = t5x('decoding').temperature_sample
    decode_fn = t5x_plugin.temperature_sample if speculates else theirs
    model = t5x('models').EncoderDecoderModel(
      module=module(SIZES),
      input_vocabulary=vocabulary,
      output_vocabulary=vocabulary,
      optimizer_def=optimizer,
      decode_fn=functools.partial(decode_fn, **values),
    )
    if not speculates:
      return model
    return t5x_plugin.EncoderDecoderModel(model, module(DRAFT_SIZES))

  return made


@pytest.fixture(scope='module')
def variables(files):
  draft = checkpoints.load(files / 'draft', T5(T5Config(**DRAFT_SIZES)))
  target = checkpoints.load(CHECKPOINT, T5(T5Config(**SIZES)))
  return target, {'drafter': draft}


batch = functools.partial(t5x_batches.batch, 5, 24, 32, SIZES['vocab_size'])


def predict(model, variables, read=None, **settings):
  params, mutables = variables
  if isinstance(model, t5x_plugin.EncoderDecoderModel):
    settings['flax_mutables'] = mutables
  read = read or batch()
  tokens, aux = model.predict_batch_with_aux(params, read, **settings)
  return np.asarray(tokens), np.asarray(aux['scores'])


@pytest.mark.parametrize('prompted', [False, True])
def test_greedy_outputs_with_prompts_and_ends(make, variables, prompted):
  settings = {'num_decodes': 2, 'return_all_decodes': True}
  settings['prompt_with_targets'] = prompted
  for given, values in (
    ({}, {}),
    ({'eos_id': 100}, {}),
    ({'eos_id': 100}, {'max_decode_steps': 7, 'rescale_log_probs': False}),
  ):
    stock, ours = (
      predict(model, variables, decoder_params=dict(given), **settings)
      for model in (make(speculates=False, **values), make(**values))
    )
    np.testing.assert_array_equal(ours[0], stock[0])
    np.testing.assert_allclose(ours[1], stock[1], rtol=1e-4)
    # With this end id some end early, by themselves.
    assert not given or (ours[0][:, :, -1] == 0).any()


NUM_SAMPLES = 400
PLACES = 3  # tokens of each sample


def sample(model, variables):
  settings = {'num_decodes': NUM_SAMPLES, 'return_all_decodes': True}
  return predict(model, variables, rng=jax.random.PRNGKey(5), **settings)


def difference(first, second):
  """Of two samples' tokens: chi-squared, in deviations from its mean.

  It counts, for each example and place, the tokens that came up 20 times.
  """
  one, other = (
    np.array([[np.bincount(at, minlength=128) for at in row.T] for row in each])
    for each in (first[..., :PLACES], second[..., :PLACES])
  )
  common = one + other >= 20
  square = np.sum(((one - other) ** 2)[common] / (one + other)[common])
  return (square - common.sum()) / np.sqrt(2 * common.sum())


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


def test_the_interactive_model(make, files):
  def interactive(cls, name, model, **settings):
    return cls(
      batch_size=2,
      task_feature_lengths=LENGTHS,
      output_dir=str(files / name),
      partitioner=t5x('partitioning').PjitPartitioner(num_partitions=1),
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

  stock = t5x('interactive_model').InteractiveModel
  theirs = interactive(stock, 'theirs', make(speculates=False))
  draft = {'draft_checkpoint': files / 'draft'}
  ours = interactive(t5x_plugin.InteractiveModel, 'ours', make(), **draft)
  texts = [('the red dog', 'a cat'), ('a tree', 'sleeps here')]
  texts.append(('old', 'house'))
  examples = [{'input': text, 'target': other} for text, other in texts]
  want, have = (
    [
      [text for _, text in model.predict_with_aux(examples)[0]],
      [score for _, score in model.score(examples)],
    ]
    for model in (theirs, ours)
  )
  assert len(want[0]) == 3
  np.testing.assert_equal(have, want)


def test_beams_of_prompts_and_of_other_lengths(make, variables):
  """T5X's own function beside ours, in the same model."""
  read = batch()
  read['decoder_input_tokens'][1, 31] = 0  # see `t5x_plugin.beam_search`
  for options in (
    {'num_decodes': 2, 'decoder_params': {'eos_id': 60}},
    {'num_decodes': 4, 'decoder_params': {'eos_id': 100, 'alpha': 1.0}},
    {'num_decodes': 4, 'prompt_with_targets': True},
    {'num_decodes': 3, 'decoder_params': {'max_decode_len': 9}},
  ):
    theirs = make(speculates=False)
    theirs._decode_fn = t5x('decoding').beam_search
    ours = make(speculates=False)
    ours._decode_fn = t5x_plugin.beam_search
    ours = t5x_plugin.EncoderDecoderModel(ours, make().draft_module, gamma=3)
    options['return_all_decodes'] = True
    want, have = (
      predict(model, variables, read, **options) for model in (theirs, ours)
    )
    np.testing.assert_array_equal(have[0], want[0])
    np.testing.assert_allclose(have[1], want[1], atol=1e-4)
