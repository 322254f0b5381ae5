"""Gin files of published sizes and of the paper's runs: what they describe."""

import dataclasses
import functools
import itertools
import math
import pathlib
import re

import gin
import jax
import pytest

from specdec_jax import infer
from specdec_jax.cli import gin_flags
from specdec_jax.engine import engine
from specdec_jax.models.model import Model
from specdec_jax.models.t5 import T5
from specdec_jax.paper import printed
from specdec_jax.probs import SamplingConfig
from specdec_jax.text import t5_tasks

ROOT = pathlib.Path(__file__).resolve().parent.parent
# What a CPU trains in place of a published one.
TENTHS = {'t5_1_1_21m': 't5_1_1_base', 't5_1_1_7m': 't5_1_1_small'}
# Size -> its file.
FILES = {
  f'{path.parent.name}_{path.stem}': path
  for path in sorted((ROOT / 'gin' / 'models').glob('*/*.gin'))
}
# Other names for those of the same shape, and so the same file.
ALIASES = {
  name.replace('t5_1_1', family): path
  for name, path in FILES.items()
  for family in ('t5_1_1_lm100k', 'flan_t5')
  if name.startswith('t5_1_1_') and name not in TENTHS
}
FILES |= ALIASES
SIZES = sorted(
  name
  for name in FILES
  if name.startswith(('t5_', 'flan_t5_', 'mt5_', 'madlad400_', 'ul2_'))
  and name not in TENTHS
)

# Parameters in millions, as published: the model cards of T5 1.0 and 1.1 and
# of mT5 (the sizes of their weights), the paper of MADLAD-400 (10B; 3B is its
# model card's), and for UL2 the count that the Open LLM Leaderboard has.
_T5_1_1 = {
  'small': 77.0,
  'base': 247.6,
  'large': 783.2,
  'xl': 2850,
  'xxl': 11135,
}
PUBLISHED = {
  't5_small': 60.5,
  't5_base': 222.9,
  't5_large': 737.7,
  't5_3b': 2852,
  't5_11b': 11307,
  'mt5_small': 300.2,
  'mt5_base': 582.4,
  'mt5_large': 1230,
  'mt5_xl': 3743,
  'mt5_xxl': 12921,
  'madlad400_3b': 2940,
  'madlad400_10b': 10700,
  'ul2_20b': 19460,
} | {
  f'{family}_{size}': count
  for family in ('t5_1_1', 't5_1_1_lm100k', 'flan_t5')
  for size, count in _T5_1_1.items()
}


@dataclasses.dataclass(frozen=True)
class Networks:
  """What a test's gin file fills in."""

  first: object
  second: object = None


def read(folder, first, second=None, files=FILES):
  """The networks of one or two size files that are included together."""
  text = 'from __gin__ import dynamic_registration\n'
  text += 'import gin_models_test\n'
  for field, name in (('first', first), ('second', second)):
    if name is not None:
      text += f"include '{files[name]}'\n"
      text += f'gin_models_test.Networks.{field} = %{name.upper()}\n'
  path = folder / 'networks.gin'
  path.write_text(text)
  gin_flags.load(gin_flags.parse_flags([f'--gin_file={path}']))
  return gin_flags.build(Networks)


@pytest.fixture(scope='module')
def alone(folder):
  return {name: read(folder, name).first for name in SIZES}


def test_every_published_size_is_there(alone):
  assert set(SIZES) == set(PUBLISHED)
  assert all(type(network) is T5 for network in alone.values())


def test_every_pair_can_be_included_together(alone, folder):
  for first, second in itertools.combinations(SIZES, 2):
    both = read(folder, first, second)
    assert both == Networks(alone[first], alone[second]), (first, second)


def test_the_check_of_pairs_sees_a_shared_scope(tmp_path):
  source = FILES['t5_small'].read_text()
  files = {name: tmp_path / f'{name}.gin' for name in ('one', 'two')}
  for name, heads in (('one', 8), ('two', 4)):
    text = source.replace('T5_SMALL', name.upper())
    text = text.replace('num_heads = 8', f'num_heads = {heads}')
    files[name].write_text(text)
  single = read(tmp_path, 'one', files=files)
  both = read(tmp_path, 'one', 'two', files=files)
  assert both.first != single.first


def test_sizes_of_one_shape_are_one_network(alone):
  assert len(ALIASES) == 10
  for name, path in ALIASES.items():
    assert alone[name] == alone[f't5_1_1_{path.stem}'], name
  names = set(PUBLISHED) - set(ALIASES)
  shapes = {alone[name] for name in names}
  assert len(shapes) == len(names), 'two files of one shape'


@functools.cache
def count(config):
  """Parameters that `T5(config).init` would make."""
  shapes = jax.eval_shape(T5(config).init, jax.random.key(0))
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


@functools.cache
def count_by_layers(config):
  """`count` from networks of one and two layers: all layers are alike."""
  assert config.num_encoder_layers == config.num_decoder_layers
  one, two = (
    count(
      dataclasses.replace(
        config, num_encoder_layers=number, num_decoder_layers=number
      )
    )
    for number in (1, 2)
  )
  return one + (config.num_encoder_layers - 1) * (two - one)


@pytest.mark.parametrize('name', SIZES)
def test_parameter_counts_are_the_published_ones(name, alone):
  counted = count_by_layers(alone[name].config)
  assert counted / 1e6 == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize('name', TENTHS)
def test_a_tenth_of_a_published_size(name, folder):
  network = read(folder, name).first
  share = count(network.config) / (PUBLISHED[TENTHS[name]] * 1e6)
  assert 0.08 < share < 0.1
  assert network.vocab_size == 32128


def test_layers_can_be_counted_one_by_one(alone):
  config = alone['t5_small'].config
  assert count(config) == count_by_layers(config)


@pytest.mark.slow
@pytest.mark.parametrize('name', SIZES)
def test_whole_networks_have_the_published_counts(name, alone):
  counted = count(alone[name].config)
  assert counted / 1e6 == pytest.approx(PUBLISHED[name], rel=0.01)
  assert counted == count_by_layers(alone[name].config)


def test_families_share_a_vocabulary_and_others_are_refused(alone, tokenizer):
  """Pairs of one family fit; another vocabulary is an error before all else."""
  sizes = {name: network.vocab_size for name, network in alone.items()}
  of_t5 = {n for n, size in sizes.items() if size == 32128}
  assert of_t5 == {n for n in SIZES if not n.startswith(('mt5', 'madlad'))}
  target = Model(alone['mt5_xl'], {})
  draft = Model(alone['t5_1_1_small'], {})
  with pytest.raises(ValueError, match='32128 .*250112'):
    engine.Engine(target, draft, tokenizer=tokenizer)


def test_the_two_generations_differ_as_published(alone):
  for name, network in alone.items():
    config = network.config
    tied = name in ('t5_small', 't5_base', 't5_large', 't5_3b', 't5_11b')
    assert config.logits_via_embedding == (tied or name == 'ul2_20b')
    gate = 'silu' if name == 'ul2_20b' else 'gelu'
    assert config.mlp_activations == (('relu',) if tied else (gate, 'linear'))
    assert config.dtype == 'float32'


# Task: its seqio name.
TASK_NAMES = {'ende': 'wmt_t2t_ende_v003', 'cnndm': 'cnn_dailymail_v002'}
PATHS = 'gs://t5-data/pretrained_models/t5x'


def row_name(row):
  size = row.draft.removeprefix('t5_')
  return f'{row.task}_xxl_{size}' + ('_t1' if row.temperature else '')


def load_run(name, tokenizer, folder, **macros):
  """A run's configuration, its gamma, and networks and paths of both models."""
  flags = [f'--gin_file=gin/runs/{name}.gin']
  flags += [f'--gin.{macro}={value}' for macro, value in macros.items()]
  flags.append(f'--gin.VOCAB_PATH={tokenizer.path}')
  flags.append(f'--gin.INFER_OUTPUT_DIR={folder}')
  gin_flags.load(gin_flags.parse_flags(flags))
  sides = [
    gin.get_bindings('target/engine.load'),
    gin.get_bindings('draft/infer.load_drafter'),
  ]
  gamma = gin.query_parameter('GAMMA/gin.macro.value')
  return gin_flags.build(infer.TaskConfig), gamma, sides


@pytest.mark.parametrize('row', printed.TABLE2, ids=row_name)
def test_a_run_is_its_row_of_table_2(row, alone, tokenizer, folder):
  """By the macros that the header of its file says."""
  names = ('t5_1_1_xxl', row.draft.replace('t5_', 't5_1_1_'))
  path = ROOT / 'gin' / 'runs' / f'{row.task}_xxl.gin'
  macros = {
    'DRAFT': f'%{names[1].upper()}',
    'DRAFT_CHECKPOINT_PATH': f'{PATHS}/{names[1]}/checkpoint_1000000',
    'TEMPERATURE': float(row.temperature),
    'GAMMA': gamma_in_header(path.read_text(), names[1], row.temperature),
  }
  run = load_run(path.stem, tokenizer, folder, **macros)
  check_row(row, names, run, alone)


def gamma_in_header(text, draft, temperature):
  """Of a line such as `#     %T5_1_1_BASE   7   5`."""
  (line,) = re.findall(rf'# +%{draft.upper()} +(\d+) +(\d+)\n', text)
  return int(line[temperature])


def check_row(row, names, run, alone):
  config, gamma, sides = run
  assert config.mixture_or_task_name == TASK_NAMES[row.task]
  assert config.sampling == SamplingConfig(temperature=row.temperature)
  assert (gamma, config.batch_size) == (row.gamma, 1)
  assert (config.split, config.decoding) == ('test', 'both')
  check_sides(sides, names, names, alone)


@pytest.mark.parametrize('task', sorted(TASK_NAMES))
def test_a_run_of_the_original_t5(task, alone, tokenizer, folder):
  config, gamma, sides = load_run(f'{task}_11b_small', tokenizer, folder)
  assert config.mixture_or_task_name == TASK_NAMES[task]
  assert config.sampling == SamplingConfig(temperature=0.0)
  row = next(
    r for r in printed.TABLE2 if (r.task, r.draft) == (task, 't5_small')
  )
  assert gamma == row.gamma
  check_sides(sides, ('t5_11b', 't5_small'), ('t5_11B', 't5_small'), alone)


def check_sides(sides, sizes, folders, alone):
  """Both models have these sizes and the public checkpoints' paths."""
  for side, size, folder in zip(sides, sizes, folders, strict=True):
    as_published = dataclasses.replace(side['network'].config, dtype='float32')
    assert as_published == alone[size].config
    assert side['network'].config.dtype == 'bfloat16'
    assert side['path'] == f'{PATHS}/{folder}/checkpoint_1000000'


def test_the_tasks_of_the_runs_are_known():
  assert set(TASK_NAMES.values()) <= set(t5_tasks.TASKS)
  found = {p.stem for p in (ROOT / 'gin' / 'runs').glob('*_xxl.gin')}
  assert found == {f'{task}_xxl' for task in TASK_NAMES}
