"""Packages that not everybody needs, imported where they are used."""

import importlib
from typing import Any


def package(what: str, module: str, extra: str, otherwise: str = '') -> Any:
  """Imports a module of a package that an extra brings.

  Args:
    what: needs it, the beginning of a sentence.
    module: such as 'rouge_score.rouge_scorer'.
    extra: of this library.
    otherwise: a sentence on how to do without.

  Raises:
    ValueError: it is not installed; says how to.
  """
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ValueError(
      f'{what} needs the package {module.split(".")[0]}, which is not'
      f" installed: pip install 'specdec_jax[{extra}]'. {otherwise}".rstrip()
    ) from error
