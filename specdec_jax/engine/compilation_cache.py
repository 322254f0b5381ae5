"""JAX's persistent compilation cache, on by default in the user's folder."""

import os
import pathlib

import jax
from jax.experimental.compilation_cache import compilation_cache

from specdec_jax.files.locations import user_cache


def default_folder() -> pathlib.Path:
  """The folder of this library in the user's cache folder."""
  return user_cache() / 'xla'


def enable(folder: str | os.PathLike[str] | None = None) -> pathlib.Path | None:
  """Turns the cache on, unless the user has already chosen one for JAX.

  Args:
    folder: where compiled programs are kept; None is `default_folder()`.

  Returns:
    The folder in use; None if it cannot be made, which costs only time.
  """
  chosen = jax.config.values.get('jax_compilation_cache_dir')
  if chosen and folder is None:
    return pathlib.Path(chosen)
  path = pathlib.Path(folder) if folder is not None else default_folder()
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
