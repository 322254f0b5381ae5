"""Errors for runs in which nothing could be decoded, with the likely reason."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

_NAMED = 5  # most arrays in a message


class AllFailedError(ValueError):
  """No example of a run could be decoded."""


def all_failed(
  errors: Sequence[str | None],
  count: int,
  params: Any,
  output_dir: str | None,
) -> AllFailedError | None:
  """The error to raise after all is written, if nothing could be decoded.

  Args:
    errors: error of each example; None for one that was decoded.
    count: examples of the run.
    params: the engine's parameters, which are searched for the reason. It takes
      one read of all of them, but only in a run that has failed.
    output_dir: folder that the results were written to, or None.

  Returns:
    The error, which quotes the first of `errors`; None if something was
    decoded.
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
      f' The records are in {output_dir!r} for inspection, not marked as'
      ' COMPLETED; another start makes them again.'
    )
  first = str(errors[0]).rstrip('.')
  return AllFailedError(
    f'None of {count} could be decoded. The first: {first}.{why}{left}'
  )


def nonfinite(params: Any) -> list[str]:
  """Names of the arrays that hold NaN or infinite values, with their numbers.

  Of an array that is split over several hosts only this host's part is
  searched.
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
