"""Runs of which nothing came: they fail, and say why where it can be found."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

_NAMED = 5  # arrays in a message


class AllFailedError(ValueError):
  """Not one example of a run could be decoded."""


def all_failed(
  errors: Sequence[str | None],
  count: int,
  params: Any,
  output_dir: str | None,
) -> AllFailedError | None:
  """What to raise when all is written, of a run of which nothing came.

  Args:
    errors: of all that was tried or could not be, None where it came.
    count: examples of the run.
    params: the engine's parameters, looked through for the reason: one read
      of all of them, paid by a run that has failed.
    output_dir: where the results are left, or None.

  Returns:
    The error, which quotes the first one; None where something came.
  """
  if not errors or not all(errors):
    return None
  found = nonfinite(params)
  why = ''
  if found:
    more = len(found) - _NAMED
    named = ', '.join(found[:_NAMED]) + (f' and {more} more' * (more > 0))
    why = (
      f' The parameters hold NaN or infinite values: {named}. Is the'
      ' checkpoint damaged, or too large for its dtype?'
    )
  left = ''
  if output_dir is not None:
    left = (
      f' What came is in {output_dir!r} to be looked at, not marked as'
      ' COMPLETED; another start makes it anew.'
    )
  first = str(errors[0]).rstrip('.')
  return AllFailedError(
    f'None of {count} could be decoded. The first: {first}.{why}{left}'
  )


def nonfinite(params: Any) -> list[str]:
  """Names of the arrays that hold a NaN or an infinity, with how many.

  Of an array that lies on several hosts this one looks through its own part.
  """
  found = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
      continue
    parts = [leaf]
    if isinstance(leaf, jax.Array):
      parts = [part.data for part in leaf.addressable_shards]
    count = sum(int(_count(part)) for part in parts)
    if count:
      name = jax.tree_util.keystr(path, simple=True, separator='/')
      found.append(f'{name} ({count} of {sum(part.size for part in parts)})')
  return found


@jax.jit
def _count(array):
  return jnp.sum(~jnp.isfinite(array))
