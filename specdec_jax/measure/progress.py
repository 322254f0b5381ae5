"""Progress bars on a terminal; elsewhere a line on stderr now and then."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

import rich.console
import rich.progress

EVERY_S = 20.0  # between two lines


def status(
  console: rich.console.Console, message: str
) -> contextlib.AbstractContextManager[object]:
  """Shows what is going on while a block runs."""
  if console.is_terminal:
    return console.status(message)
  return _lines(lambda: message)


@contextlib.contextmanager
def _lines(describe: Callable[[], str]) -> Iterator[None]:
  """Says what is going on each `EVERY_S`, while the block runs.

  In a thread, because one step may be a compilation of minutes.
  """
  begin = time.monotonic()
  ended = threading.Event()

  def say() -> None:
    while not ended.wait(EVERY_S):
      elapsed = time.monotonic() - begin
      print(f'{describe()}, {elapsed:.0f} s', file=sys.stderr, flush=True)

  thread = threading.Thread(target=say, daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()


@contextlib.contextmanager
def bar(
  console: rich.console.Console, label: str, total: int
) -> Iterator[Callable[..., None]]:
  """A bar of `total` steps, shown while the block runs.

  Yields a function that moves it by a number of steps, one by default.
  """
  progress = rich.progress.Progress(
    rich.progress.SpinnerColumn(),  # it moves while the first step compiles
    *rich.progress.Progress.get_default_columns(),
    rich.progress.TimeElapsedColumn(),
    console=console,
    transient=True,
    disable=not console.is_terminal,
  )
  task = progress.add_task(label, total=total)

  def advance(count: int = 1) -> None:
    progress.advance(task, count)

  def describe() -> str:
    return f'{label}: {progress.tasks[0].completed:g} of {total}'

  shown = progress if console.is_terminal else _lines(describe)
  with shown:
    yield advance
