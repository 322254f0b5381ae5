"""The command line: commands, their flags through gin, checks of names."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

# Folders of interrupted runs, which continue when they are started again.
unfinished: list[str] = []


@contextlib.contextmanager
def resumable(folder: str | None) -> Iterator[None]:
  """Lists a folder in `unfinished` during a block.

  If an interrupt ends the block, the folder stays in the list.
  """
  unfinished[:] = [folder] if folder else []
  try:
    yield
  except Exception:
    unfinished.clear()
    raise
  unfinished.clear()


class Command(NamedTuple):
  """A command of `specdec`.

  Attributes:
    function: runs the command, with a configuration of `gin_flags.build`, and
      returns the exit status or None for 0. Its docstring is the --help.
    run_file: the gin file that is loaded without a --gin_file; None: a
      --gin_file is required.
    places: flags that may be given as positional arguments, in this order.
    implied: flag -> macro -> value. If the flag is given, the macro gets the
      value, provided that the run file has the macro; --gin.MACRO overrides it.
  """

  function: Callable[[], int | None]
  run_file: str | None = None
  places: tuple[str, ...] = ()
  implied: Mapping[str, Mapping[str, Any]] = {}
