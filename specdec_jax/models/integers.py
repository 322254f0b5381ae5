"""Kernels of eight or four bits: integers with one scale for each output.

A kernel [in, out] becomes `kernel`, int8[in, out] or int4[in, out], and
`kernel_scale`, float32[out]: the weights of an output are rounded to multiples
of its scale, which is their largest absolute value divided by 127, or by 7. A
product is computed with the integers in the dtype of the computation, and then
multiplied by the scales. On a CPU activations that meet kernels of eight bits
are rounded to eight bits as well, see `products.dense_int8`. Norms and biases
are not rounded; an embedding has the dtype of the computation.

A target with integer kernels is another model than the original: speculation is
exact for the distribution of the rounded model. A drafter with integer kernels
does not change the distribution of outputs.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.checks.fields import unexpected
from specdec_jax.models import backend

INT8, INT4 = 'int8', 'int4'
KERNEL, SCALE = 'kernel', 'kernel_scale'
MOST_INT8 = 127  # integers are symmetric: -128 is not used
_MOST = {INT8: MOST_INT8, INT4: 7}
INTEGERS = tuple(_MOST)  # dtypes of integer kernels
_ROWS_BYTES = 32 << 20  # bytes of the pieces that are cast to float32


def is_integers(dtype: Any) -> bool:
  """Whether a dtype, or the name of one, is that of integer kernels."""
  return dtype is not None and jnp.dtype(dtype).name in INTEGERS


def computes_in() -> str:
  """Returns the dtype of computations with integer kernels."""
  return 'float32' if backend.kind() == 'cpu' else 'bfloat16'


def is_kernel(name: str) -> bool:
  """Whether a name, such as 'mlp/wo/kernel', is that of a kernel."""
  return name.rpartition('/')[2] == KERNEL


def is_scale(name: str) -> bool:
  """Whether a name, such as 'mlp/wo/kernel_scale', is that of scales."""
  return name.rpartition('/')[2] == SCALE


def quantise(kernel: Any, name: str, dtype: str = INT8) -> tuple[Any, Any]:
  """Rounds a kernel to integers.

  Args:
    kernel: float[in, out], an array of NumPy or JAX.
    name: name of the kernel, for error messages.
    dtype: 'int8' or 'int4'.

  Returns:
    The integers, [in, out], and their scales, float32[out]; the scale of an
    output with only zeros is 1.

  Raises:
    ValueError: a number is not finite; traced arrays are not checked.
  """
  xp = np if isinstance(kernel, np.ndarray) else jnp
  step = max(1, _ROWS_BYTES // (4 * max(1, kernel.shape[1])))
  step = step if xp is np else len(kernel)
  pieces = [kernel[i : i + step] for i in range(0, len(kernel), step)]
  largest = functools.reduce(
    xp.maximum, (xp.abs(piece.astype(xp.float32)).max(0) for piece in pieces)
  )
  if not isinstance(largest, jax.core.Tracer):
    _check_finite(np.asarray(largest), name)
  scale = xp.where(largest > 0, largest / np.float32(_MOST[dtype]), 1.0)
  scale = scale.astype(xp.float32)
  rows = [
    xp.rint(piece.astype(xp.float32) / scale).astype(jnp.dtype(dtype))
    for piece in pieces
  ]
  return xp.concatenate(rows), scale


def rounded(
  params: Mapping[str, Any], dtype: str = INT8, module: str = ''
) -> Mapping[str, Any]:
  """Rounds the kernels of parameters, unless they are integers already.

  Args:
    params: parameters as in a checkpoint.
    dtype: 'int8' or 'int4'; another dtype rounds nothing.
    module: name of the module and a slash, for messages.

  Raises:
    ValueError: as for `quantise`.
  """
  if not is_integers(dtype):
    return params
  result: dict[str, Any] = {
    name: rounded(value, dtype, f'{module}{name}/')
    if isinstance(value, Mapping)
    else value
    for name, value in params.items()
  }
  kernel = result.get(KERNEL)
  # The module's kernel is rounded already, or the module has no kernel.
  if SCALE in result or kernel is None:
    return result
  kernel, scale = quantise(kernel, f'{module}{KERNEL}', dtype)
  return result | {KERNEL: kernel, SCALE: scale}


def in_floats(params: Mapping[str, Any]) -> dict[str, Any]:
  """Multiplies integer kernels [in, out] by their scales.

  Args:
    params: parameters as in a checkpoint; all but integer kernels and their
      scales stay as they are.
  """
  result: dict[str, Any] = {
    name: in_floats(value) if isinstance(value, Mapping) else value
    for name, value in params.items()
  }
  if (scale := result.pop(SCALE, None)) is not None:
    result[KERNEL] = result[KERNEL].astype(jnp.float32) * scale
  return result


def check_scale(scale: np.ndarray, name: str) -> None:
  """Raises ValueError unless scales [out] are finite and positive."""
  if not (np.isfinite(scale) & (scale > 0)).all():
    advice = 'Convert the one of floats again (specdec convert --dtype int8).'
    raise unexpected(name, 'factors that are finite and above 0', scale, advice)


def _check_finite(largest: np.ndarray, name: str) -> None:
  bad = np.flatnonzero(~np.isfinite(largest))
  if bad.size:
    got = (
      f'not finite in output {bad[0]} ({bad.size} of {largest.size} outputs)'
    )
    advice = 'The checkpoint is broken, or training diverged.'
    raise unexpected(name or 'kernel', 'finite numbers', got, advice)
