"""Gin files: their headers, published sizes, and the paper's runs."""

import copy
import re

import gin
import jax
import pytest

from repository import ROOT
from specdec_jax import infer, training
from specdec_jax.cli import gin_flags
from specdec_jax.models.base import param_shapes
from specdec_jax.paper import printed

FILES = sorted((ROOT / 'gin' / 'models').glob('[!d]*.gin'))  # not demo*.gin
# What a CPU trains in place of a published one.
TENTHS = {
  't5_1_1_21m': 't5_1_1_base',
  't5_1_1_7m': 't5_1_1_small',
  'gpt_10m': 'gpt_97m',
  'gpt_600k': 'gpt_6m',
}
# Parameters in millions, as published: the model cards of T5 1.0 and 1.1 and
# of mT5 (the sizes of their weights), for UL2 the count that the Open LLM
# Leaderboard has, of the paper's GPT-like models what their names say, LaMDA's
# without the embedding (Thoppilan et al. 2022).
PUBLISHED_TEXT = """
t5_small 60.5, t5_base 222.9, t5_large 737.7, t5_3b 2852, t5_11b 11307
t5_1_1_small 77, t5_1_1_base 247.6, t5_1_1_large 783.2
t5_1_1_xl 2850, t5_1_1_xxl 11135
mt5_small 300.2, mt5_base 582.4, mt5_large 1230, mt5_xl 3743, mt5_xxl 12921
ul2_20b 19460, gpt_97m 97, gpt_6m 6
lamda_137b 137400, lamda_8b 8590, lamda_2b 2100, lamda_100m 105
"""
PUBLISHED = {
  name: float(count)
  for name, count in re.findall(r'(\w+) ([\d.]+)', PUBLISHED_TEXT)
}
# Other names for those of the same shape.
ALIASES = {
  f'{name}_{size}': f't5_1_1_{size}'
  for name in ('flan_t5', 't5_1_1_lm100k')
  for size in ('small', 'base', 'large', 'xl', 'xxl')
}


@pytest.fixture(scope='module')
def alone():
  """The networks of all names, all families loaded together."""
  gin_flags.load([f'--gin_file={path}' for path in FILES])
  names = [*PUBLISHED, *TENTHS, *ALIASES]
  macros = (f'{name.upper()}/gin.macro.value' for name in names)
  # A copy of what gin refers to is the thing itself.
  made = map(copy.deepcopy, map(gin.query_parameter, macros))
  return dict(zip(names, made, strict=True))


def test_every_size_has_its_published_count(alone):
  macros = {
    name.lower()
    for path in FILES
    for name in re.findall(r'^([A-Z]\w+) = ', path.read_text(), re.M)
  }
  assert macros == {*PUBLISHED, *TENTHS, *ALIASES}
  for name, size in ALIASES.items():
    assert alone[name] == alone[size], name
  assert len({alone[name] for name in PUBLISHED}) == len(PUBLISHED)


def counted(name, network):
  """Parameters in millions; LaMDA's without its embedding."""
  count = sum(leaf.size for leaf in jax.tree.leaves(param_shapes(network)))
  if name.startswith('lamda'):
    count -= network.config.vocab_size * network.config.emb_dim
  return count / 1e6


@pytest.mark.parametrize('name', PUBLISHED)
def test_parameter_counts_are_the_published_ones(name, alone):
  # Of the paper's drafter one digit is known.
  rel = 0.04 if name == 'gpt_6m' else 0.01
  assert counted(name, alone[name]) == pytest.approx(PUBLISHED[name], rel=rel)
  for tenth in [tenth for tenth, of in TENTHS.items() if of == name]:
    assert 0.07 < counted(tenth, alone[tenth]) / PUBLISHED[name] < 0.11
    assert alone[tenth].vocab_size == alone[name].vocab_size


PATHS = 'gs://t5-data/pretrained_models/t5x'


@pytest.mark.parametrize(
  'row', printed.TABLE2, ids=lambda row: f'{row.task}_{row.draft}'
)
def test_a_run_is_its_row_of_table_2(row, alone, tokenizer, folder):
  """By the flags that the header of the file says."""
  names = ('t5_1_1_xxl', row.draft.replace('t5_', 't5_1_1_'))
  text = (ROOT / 'gin' / 'runs' / 'ende_xxl.gin').read_text()
  # A line such as `#     %T5_1_1_BASE   7   5   5   3`.
  (line,) = re.findall(rf'# +%{names[1].upper()} +(\d.*)\n', text)
  gamma = line.split()[2 * (row.task == 'cnndm') + row.temperature]
  flags = [
    '--gin_file=gin/runs/ende_xxl.gin',
    f'--gin.VOCAB_PATH={tokenizer.path}',
    f'--gin.INFER_OUTPUT_DIR={folder}',
    f'--gin.DRAFT=%{names[1].upper()}',
    f'--draft={PATHS}/{names[1]}/checkpoint_1000000',
    f'--temperature={row.temperature}',
    f'--gamma={gamma}',
  ]
  if row.task == 'cnndm':
    flags += re.findall(r'--gin.MIXTURE_OR_TASK_NAME=\w+', text)
    (lengths,) = re.findall(r'LENGTHS="(.*)"', text)
    flags.append(f'--gin.TASK_FEATURE_LENGTHS={lengths}')
  gin_flags.load(flags)
  config = gin_flags.build(infer.DecodeConfig)
  names_of_tasks = {'ende': 'wmt_t2t_ende_v003', 'cnndm': 'cnn_dailymail_v002'}
  assert config.mixture_or_task_name == names_of_tasks[row.task]
  assert config.options.temperature == row.temperature
  settings = config.task_split, config.mode, config.batch_size
  assert settings == ('test', 'both', 1)
  assert gin.query_parameter('engine.EngineConfig.gamma') == row.gamma
  for scope, name in zip(('target', 'draft'), names, strict=True):
    side = gin.get_bindings(f'{scope}/engine.load')
    assert side['network'].config == alone[name].config
    assert side['dtype'] == 'bfloat16'
    assert side['path'] == f'{PATHS}/{name}/checkpoint_1000000'


# Headers.

RUNS = sorted((ROOT / 'gin' / 'runs').glob('*.gin'))
TRAIN = {'train', 'distill', 'train_lm', 'finetune', 'train_heads'}
TRAIN_MACROS = 'MODEL_DIR TRAIN_FILE EVAL_FILE VOCAB_PATH CHECKPOINT_PATH'


@pytest.mark.parametrize('path', RUNS, ids=lambda path: path.stem)
def test_a_run_file(path):
  """Its header has the command, and all that is required."""
  text = path.read_text('utf-8')
  header, _, command = text.partition('from __gin__')[0].partition('# Command')
  for part in ('# Purpose: ', '# Required:', '# Expected time:'):
    assert part in header
  assert f'--gin_file={path.relative_to(ROOT)}' in command
  macros = re.findall(r'^(\w+) = %gin\.REQUIRED$', text, re.M)
  needed = header[header.index('# Required:') :]
  assert all(re.search(rf'\b{macro}\b', needed) for macro in macros)
  if path.stem in TRAIN:
    pairs = str(ROOT / 'demo' / 'sample.tsv')
    given = [f'--gin.{macro}={pairs}' for macro in TRAIN_MACROS.split()]
    gin_flags.load([f'--gin_file={path}', *given])
    run = gin_flags.build(training.TrainRun)
    assert run.model_dir == pairs and run.network.vocab_size == 8000


def test_files_that_are_named_are_there():
  """In gin files, documents and scripts."""
  patterns = 'gin/**/*.gin scripts/*.py [!C]*.md docs/*.md */README.md'
  paths = [path for pattern in patterns.split() for path in ROOT.glob(pattern)]
  text = '\n'.join(path.read_text('utf-8') for path in paths)
  named = {*re.findall(r'gin/(?:\w+/)*\w+\.gin', text)}
  missing = {name for name in named if not (ROOT / name).is_file()}
  assert not missing and len(named) >= 15
