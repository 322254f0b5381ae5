"""The command line: its commands, gin's flags, and checks of their names."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Folders of interrupted runs, which continue when they are started again.
unfinished: list[str] = []


@contextlib.contextmanager
def resumable(folder: str | None) -> Iterator[None]:
  """Keeps a folder in `unfinished` in its block, and after an interrupt."""
  unfinished[:] = [folder] if folder else []
  try:
    yield
  except Exception:
    unfinished.clear()
    raise
  unfinished.clear()


@dataclasses.dataclass(frozen=True)
class Command:
  """A command.

  Attributes:
    function: takes nothing and returns a status, None for 0; it makes its
      configuration by `gin_flags.build`. Its docstring is the --help.
    run_file: its run file without a --gin_file; None requires a --gin_file.
    places: flags that may be given as positional arguments, in this order.
    implied: values of macros that a flag also sets: flag -> macro -> value.
      They hold if the run file has the macro; --gin.MACRO overrides them.
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
