"""For which kind of device a program is traced: what only a CPU needs.

On a CPU a product of one row is slow, slots should be the vector lanes, and
work that a conditional avoids is time saved. On a GPU or TPU each of these
tricks is a kernel more, and a conditional waits for the host.
"""

import contextlib

import jax

_described = jax.make_user_context('')  # JAX traces anew where it differs


def kind() -> str:
  """What the program that is being traced will run on: 'cpu', 'gpu', 'tpu'."""
  return _described.value or jax.default_backend()


def on_cpu() -> bool:
  """Whether that is a CPU."""
  return kind() == 'cpu'


def on_gpu() -> bool:
  """Whether that is a GPU, where each kernel has a price."""
  return kind() == 'gpu'


def compiled_for(described: str) -> contextlib.AbstractContextManager[object]:
  """Traces for a device that is not there.

  Args:
    described: as `jax.default_backend` would name it, such as 'gpu'.
  """
  return _described(described)
