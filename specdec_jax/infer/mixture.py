"""A run over a task, or over each task of a mixture: T5X's files for each."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import rich.console

from specdec_jax.engine.engine import Engine
from specdec_jax.infer.settings import TaskConfig
from specdec_jax.infer.task import decode_one
from specdec_jax.text import tasks


def decode_task(
  config: TaskConfig,
  beside: Mapping[str, Callable[[], str]] | None = None,
  console: rich.console.Console | None = None,
) -> dict[str, Any]:
  """Decodes or scores a task, or the tasks of a mixture one after another.

  Each writes what `task.decode_one` says, and each goes on where it was. The
  models are loaded once, unless `config.task_feature_lengths` is None and the
  tasks' longest examples differ.

  Args:
    config: the run.
    beside: as of `decode_one`, for each task.
    console: as of `decode_one`.

  Returns:
    The summary of the task; of a mixture, of kind 'mixture', 'tasks' with the
    summary of each by its name.

  Raises:
    ValueError: as `decode_one`.
    OSError: as `decode_one`.
  """
  names = tasks.tasks_of(config.mixture_or_task_name)
  if len(names) == 1:
    return decode_one(config, beside, console)
  console = console or rich.console.Console()
  shared = dataclasses.replace(
    config,
    engine=_Kept(config.engine),
    draft=config.draft and functools.cache(config.draft),
  )
  summaries = {}
  for name in names:
    console.print(f'Task {name}', markup=False, highlight=False)
    one = dataclasses.replace(shared, mixture_or_task_name=name)
    summaries[str(name)] = decode_one(one, beside, console)
  return {
    'kind': 'mixture',
    'mixture': str(config.mixture_or_task_name),
    'tasks': summaries,
  }


class _Kept:
  """Makes an engine anew only where other lengths are asked for."""

  def __init__(self, make: Callable[..., Engine]):
    self._make = make
    self._lengths: tuple[int, int] | None = None
    self._engine: Engine | None = None

  def __call__(self, **options) -> Engine:
    lengths = options['max_input_len'], options['max_decode_len']
    if self._engine is None or self._lengths != lengths:
      self._engine = None  # its memory is free before another one's is taken
      self._engine, self._lengths = self._make(**options), lengths
    return self._engine
