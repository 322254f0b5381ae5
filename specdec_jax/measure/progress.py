"""Shows progress bars, and what is going on, on terminals only."""

import contextlib
from collections.abc import Iterator

import rich.console
import rich.progress


def status(
  console: rich.console.Console, message: str
) -> contextlib.AbstractContextManager[object]:
  """Shows what is going on, on a terminal only."""
  if console.is_terminal:
    return console.status(message)
  return contextlib.nullcontext()


class Bar:
  """Moves a progress bar, and says what is going on."""

  def __init__(self, progress: rich.progress.Progress, task):
    self._progress, self._task = progress, task

  def __call__(self, count: int = 1) -> None:
    self._progress.advance(self._task, count)

  def say(self, phase: str) -> None:
    self._progress.update(self._task, description=phase)


@contextlib.contextmanager
def bar(console: rich.console.Console, label: str, total: int) -> Iterator[Bar]:
  """A bar of `total` steps, shown while the block runs."""
  progress = rich.progress.Progress(
    rich.progress.SpinnerColumn(),  # it moves while the first step compiles
    *rich.progress.Progress.get_default_columns(),
    rich.progress.TimeElapsedColumn(),
    console=console,
    transient=True,
    disable=not console.is_terminal,
  )
  with progress:
    yield Bar(progress, progress.add_task(label, total=total))
