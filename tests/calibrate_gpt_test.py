"""Calibration of a decoder-only pair, from prompts to what decode.py takes."""

import dataclasses

import gin
import jax
import numpy as np
import pytest
import rich.console

from gpt_engine_test import FAMILIES, make_engine
from specdec_jax import infer, partitioning
from specdec_jax.checkpoints import t5x
from specdec_jax.cli import gin_flags
from specdec_jax.measure import calibrate, calibration, memory
from specdec_jax.models.gpt import GPT

BOS = 5  # not what fills up
INPUT_LEN, DECODE_LEN, MAX_GAMMA = 8, 32, 2
LINES = ['the red dog runs', '', 'a cat sleeps', 'the old house sings here']


def quiet():
  return rich.console.Console(record=True, width=140)


@pytest.fixture(scope='module')
def prompts(folder):
  path = folder / 'prompts.txt'
  path.write_text('\n'.join(LINES) + '\n')
  return str(path)


@pytest.fixture(
  scope='module',
  params=[
    pytest.param(one, marks=pytest.mark.slow) for one in ('GPT-2', 'T5X')
  ],
)
def calibrated(request, folder, tokenizer, prompts):
  """The configuration, and the requests that the acceptance rate is of."""
  network = GPT(FAMILIES[request.param])
  asked = []

  def engine():
    made = make_engine(network.config, tokenizer, bos_id=BOS, gamma=2)
    ask = made.request

    def watched(*args, **options):
      asked.append(ask(*args, **options))
      return asked[-1]

    made.request = watched
    return made

  config = calibrate.CalibrateConfig(
    engine=engine,
    target=network,
    draft=network,
    input_file=prompts,
    num_tokens=20,
    input_len=INPUT_LEN,
    decode_len=DECODE_LEN,
    max_gamma=MAX_GAMMA,
    repeats=2,
    calls_a_run=2,
    output_file=str(folder / f'{request.param}.json'),
  )
  calibrate.calibrate(config, quiet())
  return config, asked


def test_the_acceptance_rate_is_of_texts_behind_their_start(
  calibrated, tokenizer
):
  config, asked = calibrated
  (request,) = asked
  texts = [line for line in LINES if line]
  assert request.inputs.shape[1] == 1
  for row, text in enumerate(texts):
    length = request.prompt_length[row]
    read = [BOS, *tokenizer.encode(text)]
    assert request.prompt[row, :length].tolist() == read
  rate = calibration.load(config.output_file).record['acceptance_rate']
  assert rate['num_tokens'] >= 20
  assert rate['num_outputs'] == len(texts)
  assert 0 < rate['alpha'] < 1


def test_the_bytes_are_those_of_a_prompt_and_no_encoder(calibrated):
  config, _ = calibrated
  record = calibration.load(config.output_file).record
  sizes = config.target.config
  per_slot = 2 * sizes.num_layers * sizes.num_heads * sizes.head_dim * 4
  slots = 64  # 1 + 8 + 32, with or without a draft of 2
  # Of T5X's every head has a bias of its own, of GPT-2's all have one mask.
  masks = 1 if sizes.num_positions else sizes.num_heads
  cache = slots * per_slot + 4 * masks * 2 * slots + 4
  shapes = memory.param_shapes(config.target, partitioning.Placement())
  parameters = memory.tree_bytes(shapes)
  parts = record['memory_bytes']
  assert parts['target caches'] == parts['draft caches'] == cache
  assert parts['target parameters'] == parts['draft parameters'] == parameters
  (costs,) = record['costs']
  # A row of the embedding is nobody's output layer; rows of positions are not
  # read but for one.
  tables = sizes.num_positions * sizes.emb_dim
  assert sizes.logits_via_embedding
  assert costs['bytes_per_call'] == parameters - 4 * tables + slots * per_slot


@pytest.mark.parametrize('gamma', [0, 2])
def test_decode_takes_gamma_from_it(calibrated, prompts, tmp_path, gamma):
  config, _ = calibrated
  found = calibration.load(config.output_file)
  (choice,) = found.choices
  assert choice.gamma == choice.factors.index(max(choice.factors))
  path = str(tmp_path / 'changed.json')
  chosen = [dataclasses.replace(choice, gamma=gamma)]
  dataclasses.replace(found, choices=chosen).save(path)

  summary = infer.decode(
    infer.DecodeConfig(
      config.engine, prompts, mode='speculative', calibration=path
    ),
    console=quiet(),
  )
  assert summary['gammas'] == {'1': gamma}
  modes = {'plain', 'speculative'} & set(summary)
  assert modes == {'speculative' if gamma else 'plain'}


def test_the_run_file_takes_a_decoder_only_pair(tmp_path, monkeypatch):
  """Macros alone; nothing of the demo pair is left in it."""
  monkeypatch.chdir(gin_flags.ROOT)
  paths = {
    name: tmp_path / f'{name}.msgpack' for name in ('gpt_10m', 'gpt_600k')
  }
  flags = [f'--gin_file=gin/models/gpt/{size}.gin' for size in ('10m', '600k')]
  flags += ['--gin_file=gin/runs/calibrate_demo.gin', '--gin.BOS_ID=0']
  for side, (name, path) in zip(
    ('TARGET', 'DRAFT'), paths.items(), strict=True
  ):
    flags += [f'--gin.{side}=%{name.upper()}', f'--gin.{side}_PATH={path}']
  gin_flags.load(gin_flags.parse_flags(flags))
  for name, path in paths.items():
    macro = gin.query_parameter(f'{name.upper()}/gin.macro.value')
    network = macro.scoped_configurable_fn()
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, 'float32'), shapes)
    t5x.save_t5x(path, params, step=1)
  config = gin_flags.build(calibrate.CalibrateConfig)
  assert not config.target.has_encoder and not config.draft.has_encoder
  engine = config.engine()
  assert engine.target == config.target
  assert engine.bos_id == 0
