"""JAX's persistent compilation cache, on by default in the user's folder."""

import contextlib
import functools
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import compilation_cache as jax_cache
from jax.experimental.compilation_cache import compilation_cache

from specdec_jax.checks import memory
from specdec_jax.files.locations import user_cache

# A function whose shapes clients choose keeps at most so many programs.
_MOST_PROGRAMS = 32


def enable(folder: str | os.PathLike[str] | None = None) -> pathlib.Path | None:
  """Turns the cache on, unless the user has already chosen one for JAX.

  An entry that is damaged, as by a kill while it was written, is removed when
  it is read, and written anew; JAX warns of it. By itself JAX would keep it,
  and compile its program at each start.

  Args:
    folder: where compiled programs are kept; None is a folder in
      the user's cache folder.

  Returns:
    The folder in use; None if it cannot be made, which costs only time.
  """
  _remove_damaged()
  chosen = jax.config.values.get('jax_compilation_cache_dir')
  if chosen and folder is None:
    return pathlib.Path(chosen)
  path = user_cache() / 'xla' if folder is None else pathlib.Path(folder)
  if chosen == str(path):
    return path
  try:
    path.mkdir(parents=True, exist_ok=True)
  except OSError:
    return None
  jax.config.update('jax_compilation_cache_dir', str(path))
  # JAX looks only once, at the first compilation, whether there is a cache.
  compilation_cache.reset_cache()
  return path


@contextlib.contextmanager
def few_programs(jitted: Any) -> Iterator[None]:
  """Bounds the programs that JAX keeps of a jitted function called inside.

  Clients choose the function's shapes, and may send any number of them.
  """
  if jitted._cache_size() >= _MOST_PROGRAMS:
    jitted.clear_cache()
  before = jitted._cache_size()
  yield
  if jitted._cache_size() > before:
    memory.give_back()


@functools.cache
def _remove_damaged() -> None:
  """Makes JAX remove an entry that it cannot read; once in a process."""
  module: Any = jax_cache
  # The function is private to JAX. Without it damaged entries stay in the
  # cache, which only costs time.
  if (read := getattr(module, 'get_executable_and_time', None)) is None:
    return

  @functools.wraps(read)
  def read_or_remove(key: str, *args: Any, **named: Any) -> Any:
    try:
      return read(key, *args, **named)
    except Exception as error:
      folder = jax.config.values.get('jax_compilation_cache_dir')
      with contextlib.suppress(OSError):
        pathlib.Path(folder, f'{key}-cache').unlink()
      raise RuntimeError(f'{error}; it is compiled anew') from error

  module.get_executable_and_time = read_or_remove
