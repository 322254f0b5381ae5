"""The command line: what can be run, gin's flags, and checks of their names."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Folders of runs that go on where they are when they are started again.
unfinished: list[str] = []


@contextlib.contextmanager
def resumable(folder: str | None) -> Iterator[None]:
  """Has a folder in `unfinished` inside, and behind an interrupt too."""
  unfinished[:] = [folder] if folder else []
  try:
    yield
  except Exception:
    unfinished.clear()
    raise
  unfinished.clear()


@dataclasses.dataclass(frozen=True)
class Command:
  """What can be run.

  Attributes:
    function: takes nothing and returns a status, None for 0; it fetches what it
      needs by `build`. Its docstring is the --help.
    run_file: which it takes where no --gin_file is given; None requires one.
    places: flags that may be given as positional arguments, in this order.
    implied: values of macros that a flag brings along: flag -> macro -> value.
      They hold if the run file has the macro; --gin.MACRO goes before them.
  """

  function: Callable[[], int | None]
  run_file: str | None = None
  places: tuple[str, ...] = ()
  implied: Mapping[str, Mapping[str, Any]] = dataclasses.field(
    default_factory=dict
  )

  @property
  def summary(self) -> str:
    """The first line of its help."""
    return str(self.function.__doc__).partition('\n')[0].rstrip('.')
