"""Imports optional packages where they are used."""

import importlib
from typing import Any


def package(what: str, module: str, extra: str, otherwise: str = '') -> Any:
  """Imports a module of a package that comes with an extra of this library.

  Args:
    what: what needs the package, as the beginning of a sentence.
    module: such as 'rouge_score.rouge_scorer'.
    extra: name of the extra.
    otherwise: a sentence that says how to do without the package.

  Raises:
    ValueError: the package is not installed; the message says how to install
      it.
  """
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ValueError(
      f'{what} needs the package {module.split(".")[0]}, which is not'
      f" installed: pip install 'specdec_jax[{extra}]'. {otherwise}".rstrip()
    ) from error
