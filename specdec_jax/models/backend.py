"""What is done only for one kind of device, decided here for all others.

On a CPU a product of one row is slow, slots should be the vector lanes, and
work that a conditional avoids is time saved. On a GPU or TPU each such trick
costs a kernel, and a conditional waits for the host. On a GPU each kernel has a
price, whatever its size: the fewer, the better.
"""

import contextlib
from typing import NamedTuple

import jax

_described = jax.make_user_context('')  # where it differs, JAX traces again


class Ways(NamedTuple):
  """How networks compute, and tokens are sampled, on a kind of device.

  Attributes:
    doubles_query: attention of one query computes two of it.
    has_buckets: attention reads a prefix of the cache, chosen by a conditional.
    turns_operands: products with [out, in] kernels have the kernel on the left,
      and a number of rows that is a power of two.
    sums_row: a product of one row with such a kernel is a sum over the kernel.
    joins_cache: a layer's keys and values are one array, slots before numbers.
    orders_layers: barriers keep XLA from joining work of several layers.
    prefers_out_in: on one device kernels are always [out, in].
    samples_by_need: sampling does as little work as it can: conditionals leave
      out what is off, and searches halve. Otherwise what is off is no part of
      the program, and sampling takes as few operations as it can.
  """

  doubles_query: bool = False
  has_buckets: bool = False
  turns_operands: bool = False
  sums_row: bool = False
  joins_cache: bool = False
  orders_layers: bool = False
  prefers_out_in: bool = False
  samples_by_need: bool = False


_WAYS = {
  'cpu': Ways(
    doubles_query=True,
    has_buckets=True,
    turns_operands=True,
    samples_by_need=True,
  ),
  'gpu': Ways(
    sums_row=True, joins_cache=True, orders_layers=True, prefers_out_in=True
  ),
}


def kind() -> str:
  """The device of the program that is traced: 'cpu', 'gpu' or 'tpu'."""
  return _described.value or jax.default_backend()


def ways() -> Ways:
  """How things are done on that device."""
  return _WAYS.get(kind(), Ways())


def compiled_for(described: str) -> contextlib.AbstractContextManager[object]:
  """Traces for a device that is not there.

  Args:
    described: its kind, as `jax.default_backend` would name it.
  """
  return _described(described)
