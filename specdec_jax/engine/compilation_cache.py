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

# JAX keeps at most so many programs of a function whose shapes clients choose.
_MOST_PROGRAMS = 32


def enable(folder: str | os.PathLike[str] | None = None) -> pathlib.Path | None:
  """Turns the cache on, unless the user has already chosen one for JAX.

  An entry may be damaged, for example if the process was killed while it wrote
  the entry. Such an entry is removed when it is read, and written again, with a
  warning from JAX. JAX by itself would keep it, and compile the program at each
  start.

  Args:
    folder: the folder of compiled programs; None: a folder in the user's cache
      folder.

  Returns:
    The folder of the cache. None if it cannot be made; then nothing is cached.
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
  # JAX checks only once, at the first compilation, whether there is a cache.
  compilation_cache.reset_cache()
  return path


@contextlib.contextmanager
def few_programs(jitted: Any) -> Iterator[None]:
  """Bounds how many programs JAX keeps of a jitted function.

  The function is called inside this context. Clients choose its shapes, and may
  send any number of them.
  """
  if jitted._cache_size() >= _MOST_PROGRAMS:
    jitted.clear_cache()
  before = jitted._cache_size()
  yield
  if jitted._cache_size() > before:
    memory.give_back()


@functools.cache
def _remove_damaged() -> None:
  """Makes JAX remove cache entries that it cannot read; runs once."""
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
