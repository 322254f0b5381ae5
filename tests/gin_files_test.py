"""Gin files: their headers, published sizes, and the paper's runs."""

import dataclasses
import pathlib
import re

import gin
import jax
import pytest

from specdec_jax import infer
from specdec_jax.cli import gin_flags
from specdec_jax.models import sizes
from specdec_jax.models.base import param_shapes
from specdec_jax.paper import printed

ROOT = pathlib.Path(__file__).resolve().parent.parent
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
_T5_1_1 = {'small': 77, 'base': 247.6, 'large': 783.2, 'xl': 2850, 'xxl': 11135}
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
  'ul2_20b': 19460,
  'gpt_97m': 97,
  'gpt_6m': 6,
  'lamda_137b': 137.4e3,
  'lamda_8b': 8590,
  'lamda_2b': 2100,
  'lamda_100m': 105,
} | {f't5_1_1_{size}': count for size, count in _T5_1_1.items()}
# Other names for those of the same shape.
ALIASES = {f'flan_t5_{size}': f't5_1_1_{size}' for size in _T5_1_1}
ALIASES |= {f't5_1_1_lm100k_{size}': f't5_1_1_{size}' for size in _T5_1_1}


@dataclasses.dataclass(frozen=True)
class Networks:
  """What a test's gin file fills in."""

  named: dict


def read(folder, *names):
  """The networks of these names, all families included together."""
  lines = ['from __gin__ import dynamic_registration', 'import gin_files_test']
  lines += [f"include '{path.relative_to(ROOT)}'" for path in FILES]
  macros = ', '.join(f"'{name}': %{name.upper()}" for name in names)
  lines.append(f'gin_files_test.Networks.named = {{{macros}}}')
  path = folder / 'networks.gin'
  path.write_text('\n'.join(lines))
  gin_flags.load([f'--gin_file={path}'])
  return gin_flags.build(Networks).named


@pytest.fixture(scope='module')
def alone(folder):
  return read(folder, *PUBLISHED, *TENTHS, *ALIASES)


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
  assert sizes.num_params(network.config) == pytest.approx(count, rel=0.1)
  if name.startswith('lamda'):
    count -= network.config.vocab_size * network.config.emb_dim
  return count / 1e6


@pytest.mark.parametrize('name', PUBLISHED)
def test_parameter_counts_are_the_published_ones(name, alone):
  # Of the paper's drafter one digit is known.
  rel = 0.04 if name == 'gpt_6m' else 0.01
  assert counted(name, alone[name]) == pytest.approx(PUBLISHED[name], rel=rel)


def test_a_tenth_of_a_published_size(alone):
  for name, of in TENTHS.items():
    assert 0.07 < counted(name, alone[name]) / PUBLISHED[of] < 0.11
    assert alone[name].vocab_size == alone[of].vocab_size


# Task: its seqio name.
TASK_NAMES = {'ende': 'wmt_t2t_ende_v003', 'cnndm': 'cnn_dailymail_v002'}
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
  assert config.mixture_or_task_name == TASK_NAMES[row.task]
  assert config.options.temperature == row.temperature
  assert (config.split, config.decoding) == ('test', 'both')
  assert config.batch_size == 1
  gamma = gin.query_parameter('specdec_jax.engine.Engine.gamma')
  assert gamma == row.gamma
  for scope, name in zip(('target', 'draft'), names, strict=True):
    side = gin.get_bindings(f'{scope}/engine.load')
    assert side['network'].config == alone[name].config
    assert side['dtype'] == 'bfloat16'
    assert side['path'] == f'{PATHS}/{name}/checkpoint_1000000'


# Headers.

RUNS = sorted((ROOT / 'gin' / 'runs').glob('*.gin'))


@pytest.mark.parametrize('path', RUNS, ids=lambda path: path.stem)
def test_a_header_has_the_command_and_what_is_required(path):
  text = path.read_text('utf-8')
  header, _, command = text.partition('from __gin__')[0].partition('# Command')
  for part in ('# Purpose: ', '# Required:', '# Expected time:'):
    assert part in header
  assert f'--gin_file={path.relative_to(ROOT)}' in command
  for macro in re.findall(r'^(\w+) = %gin\.REQUIRED$', text, re.M):
    assert re.search(rf'\b{macro}\b', header[header.index('# Required:') :])


def test_files_that_are_named_are_there():
  """In gin files, documents and scripts."""
  paths = {*(ROOT / 'gin').glob('**/*.gin'), *(ROOT / 'scripts').glob('*.py')}
  for pattern in ('*.md', 'docs/*.md', '*/README.md'):
    paths |= {*ROOT.glob(pattern)} - {ROOT / 'CHANGELOG.md'}
  named = set()
  for path in paths:
    named |= {*re.findall(r'gin/(?:\w+/)*\w+\.gin', path.read_text('utf-8'))}
  missing = {name for name in named if not (ROOT / name).is_file()}
  assert not missing and len(named) >= 15
