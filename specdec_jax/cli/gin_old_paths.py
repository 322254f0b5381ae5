"""The gin paths of version 0.1, which still work.

A file that was moved or merged has its old path here, beside its new one and
the macros that it has to be given to mean what the old one meant. `--gin_file`
and `include` take either; of an old one a line on stderr says the new one.
"""

import dataclasses
import functools
import io
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import TextIO

import gin


@dataclasses.dataclass(frozen=True)
class Moved:
  """Where a file has gone.

  Attributes:
    path: the new one, from the repository's folder.
    macros: name -> gin text, what the old file gave and the new one does not.
  """

  path: str
  macros: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def text(self) -> str:
    """The old file, in gin's language."""
    lines = [f"include '{self.path}'"]
    lines += [f'{name} = {value}' for name, value in self.macros.items()]
    return '\n'.join(lines) + '\n'

  def __str__(self) -> str:
    flags = [
      f'--gin.{name}={value}'
      for name, value in self.macros.items()
      if value != _REQUIRED
    ]
    return ' '.join([self.path, 'with' if flags else '', *flags]).rstrip()


_REQUIRED = '%gin.REQUIRED'
_PUBLIC = 'gs://t5-data/pretrained_models/t5x'
_SIZES = {
  't5': ('small', 'base', 'large', '3b', '11b'),
  't5_1_1': ('small', 'base', 'large', 'xl', 'xxl', '7m', '21m'),
  'mt5': ('small', 'base', 'large', 'xl', 'xxl'),
  'ul2': ('20b',),
  'madlad400': ('3b', '10b'),
  'gpt2': ('124m', '1558m'),
  'gpt': ('600k', '6m', '10m', '97m'),
  'lamda': ('100m', '2b', '8b', '137b'),
  'demo': ('target', 'draft', 'pair'),
}


def _models() -> dict[str, Moved]:
  """Sizes have a folder a family; those of one shape have one file."""
  moved = {
    f'gin/models/{family}_{size}.gin': Moved(f'gin/models/{family}/{size}.gin')
    for family, sizes in _SIZES.items()
    for size in sizes
  }
  for family in ('t5_1_1_lm100k', 'flan_t5'):
    for size in ('small', 'base', 'large', 'xl', 'xxl'):
      path = f'gin/models/t5_1_1/{size}.gin'
      moved[f'gin/models/{family}_{size}.gin'] = Moved(path)
  return moved


def _rows_of_table2() -> dict[str, Moved]:
  """A run a task; the drafter, temperature and gamma are macros."""
  gammas = {
    ('ende', 'small'): (7, 7),
    ('ende', 'base'): (7, 5),
    ('ende', 'large'): (7, 3),
    ('cnndm', 'small'): (5, 5),
    ('cnndm', 'base'): (5, 3),
    ('cnndm', 'large'): (3, 3),
  }
  moved = {}
  for (task, size), pair in gammas.items():
    for temperature, gamma in enumerate(pair):
      checkpoint = f'{_PUBLIC}/t5_1_1_{size}/checkpoint_1000000'
      ending = '_t1' if temperature else ''
      moved[f'gin/runs/{task}_xxl_{size}{ending}.gin'] = Moved(
        f'gin/runs/{task}_xxl.gin',
        {
          'DRAFT': f'%T5_1_1_{size.upper()}',
          'DRAFT_CHECKPOINT_PATH': repr(checkpoint),
          'GAMMA': str(gamma),
          'TEMPERATURE': f'{temperature}.0',
        },
      )
  return moved


def _over_devices(data: int, model: int) -> Moved:
  macros = {'DATA_DEVICES': str(data), 'MODEL_DEVICES': str(model)}
  return Moved('gin/partitioning.gin', macros)


def _with_drafter(name: str, **macros: str) -> Moved:
  return Moved('gin/runs/demo_drafters.gin', {'DRAFTER': f'%{name}'} | macros)


_AT_T5_SIZE = {
  'TOKENS_PER_BATCH': '16384',
  'TOKENS_PER_PART': '0',
  'LEARNING_RATE': '2e-3',
}
# Old path -> new one.
PATHS = {
  **_models(),
  'gin/models/table2_suite.gin': Moved(
    'gin/runs/accelerator.gin', {'OUTPUT_DIR': 'None'}
  ),
  'gin/partitioning/one_device.gin': _over_devices(1, 1),
  'gin/partitioning/tensor_parallel.gin': _over_devices(1, 0),
  'gin/partitioning/data_parallel.gin': _over_devices(0, 1),
  'gin/partitioning/both.gin': _over_devices(0, 4),
  **_rows_of_table2(),
  'gin/runs/decode_task.gin': Moved('gin/runs/infer.gin'),
  'gin/runs/evaluate_demo.gin': Moved('gin/runs/eval.gin'),
  'gin/runs/demo_copy.gin': _with_drafter('COPY', MIN_MATCH='1'),
  'gin/runs/demo_ngram.gin': _with_drafter('NGRAM', NGRAM_FILE=_REQUIRED),
  'gin/runs/demo_cascade.gin': _with_drafter('CASCADE', NGRAM_FILE=_REQUIRED),
  'gin/runs/demo_first_of.gin': _with_drafter('FALLBACK'),
  'gin/runs/table2_base.gin': Moved('gin/runs/table2_cpu.gin'),
  'gin/runs/table2_demo.gin': Moved(
    'gin/runs/table2_cpu.gin', {'SUITE': '%DEMO', 'REPEATS': '15'}
  ),
  'gin/runs/train_demo_target.gin': Moved('gin/runs/train.gin'),
  'gin/runs/train_ende.gin': Moved(
    'gin/runs/train.gin', {'MODEL': '%T5_1_1_BASE'} | _AT_T5_SIZE
  ),
  'gin/runs/train_summ.gin': Moved('gin/runs/finetune.gin'),
  'gin/runs/distill_demo_draft.gin': Moved('gin/runs/distill.gin'),
  'gin/runs/distill_ende.gin': Moved(
    'gin/runs/distill.gin',
    {
      'TARGET': '%T5_1_1_BASE',
      'DRAFT': '%T5_1_1_SMALL',
      'SLICE_TARGET': 'False',
    }
    | _AT_T5_SIZE,
  ),
}


@functools.cache
def serve(root: pathlib.Path) -> None:
  """Lets gin read the old paths, from now on.

  Args:
    root: the folder that holds gin/.
  """

  @functools.cache
  def tell(path: str) -> None:
    print(f'{path} is now {PATHS[path]}', file=sys.stderr)

  def read(path: str) -> TextIO:
    old = find(path, root)
    assert old is not None  # gin asks `is_old` first.
    tell(old)
    return io.StringIO(PATHS[old].text())

  def is_old(path: str) -> bool:
    return find(path, root) is not None

  # Readers are asked in turn: a file that exists goes first.
  gin.config.register_file_reader(read, is_old)


def find(path: str | os.PathLike[str], root: pathlib.Path) -> str | None:
  """Returns the old path that `path` leads to, or None.

  Args:
    path: from the working folder, or absolute.
    root: the folder that holds gin/.
  """
  whole = pathlib.Path(path).resolve()
  if not whole.is_relative_to(root):
    return None
  old = whole.relative_to(root).as_posix()
  return old if old in PATHS else None
