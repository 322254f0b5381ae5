"""Prints sentences and progress.

On a terminal, progress is a bar. Elsewhere it is a line on stderr every
`EVERY_S` seconds.
"""

import contextlib
import datetime
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import rich.console
import rich.progress

_NO_EDGE = 10_000  # this width, in characters, is wider than any output
# Steps within this time count as simultaneous, and tell nothing about the rate.
_TOGETHER_S = 0.1
EVERY_S = 20.0  # seconds between two lines of progress


def say(console: rich.console.Console, sentence: str) -> None:
  """Prints a sentence as it is, without interpreting it as rich's markup."""
  console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def console() -> rich.console.Console:
  """Returns a console of standard output.

  Its width is that of the terminal, or the environment variable COLUMNS. Lines
  that go to a pipe are not folded, unless COLUMNS is set.
  """
  stdout = rich.console.Console()
  has_width = os.environ.get('COLUMNS', '').isdigit()
  if not (stdout.is_terminal or stdout.is_jupyter or has_width):
    stdout.width = _NO_EDGE
  return stdout


@contextlib.contextmanager
def _lines(describe: Callable[[], str]) -> Iterator[None]:
  """Prints the progress every `EVERY_S` seconds while the `with` block runs.

  A thread prints, because one step may be a compilation that takes minutes.
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
  console: rich.console.Console, label: str, total: int = 0, done: float = 0
) -> Iterator[Callable[..., None]]:
  """Shows a progress bar while the `with` block runs.

  The bar shows the number of steps that are done, the steps per second, and the
  time that is left. Where there is no terminal, lines show the same.

  Args:
    console: shows the bar.
    label: text beside the bar.
    total: number of steps; 0: only the label and the elapsed time are shown.
    done: number of steps that were done before.

  Yields:
    A function that moves the bar by a number of steps, by default 1.
  """
  text, steps, *_ = rich.progress.Progress.get_default_columns()
  counters = [steps, rich.progress.TextColumn('{task.fields[pace]}')]
  progress = rich.progress.Progress(
    # The spinner moves while the first step compiles.
    rich.progress.SpinnerColumn(),
    text,
    *(counters if total else ()),
    rich.progress.TimeElapsedColumn(),
    console=console,
    transient=True,
    disable=not console.is_terminal,
  )
  number = progress.add_task(label, total=total, pace='')
  (task,) = progress.tasks
  progress.update(number, completed=done)
  first_time, first_steps = 0.0, float(total)

  def pace() -> str:
    counted = f'{task.completed:.0f} of {total}'
    if task.completed <= first_steps:
      return counted
    rate = (task.completed - first_steps) / (time.monotonic() - first_time)
    left = datetime.timedelta(seconds=round((total - task.completed) / rate))
    return f'{counted}, {rate:.3g} a second, {left} left'

  def advance(count: float = 1) -> None:
    nonlocal first_time, first_steps
    progress.advance(number, count)
    # The time is counted from the first step on, because programs are compiled
    # before it.
    first_time = first_time or time.monotonic()
    if time.monotonic() - first_time < _TOGETHER_S:
      first_steps = task.completed
    progress.update(number, pace=pace())

  progress.update(number, pace=pace())

  def describe() -> str:
    return f'{label}: {pace()}' if total else label

  with progress if console.is_terminal else _lines(describe):
    yield advance
