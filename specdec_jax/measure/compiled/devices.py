"""Devices that programs are compiled for without being there, by numbers."""

import dataclasses

from specdec_jax.checks.memory import GIB
from specdec_jax.checks.names import check_choice


@dataclasses.dataclass(frozen=True)
class Tpu:
  """A chip of a TPU, by what libtpu calls it.

  Attributes:
    topology: the least slice that has it.
    usable_bytes: memory that programs may use.
    bytes_per_s: bandwidth of it.
  """

  topology: str
  usable_bytes: int
  bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class Gpu:
  """An NVIDIA GPU, by what XLA asks of a driver.

  Attributes:
    name: as the driver says it.
    compute_capability: major and minor.
    cores: streaming multiprocessors.
    fpus_per_core: float32 units of each.
    threads_per_core: at most.
    shared_per_core: bytes of shared memory.
    shared_per_block: of these a block can ask for.
    registers_per_core: of 32 bits.
    l2_bytes: of the second-level cache.
    clock_ghz: its boost clock.
    usable_bytes: memory that programs may use.
    bytes_per_s: bandwidth of it.
  """

  name: str
  compute_capability: tuple[int, int]
  cores: int
  fpus_per_core: int
  threads_per_core: int
  shared_per_core: int
  shared_per_block: int
  registers_per_core: int
  l2_bytes: int
  clock_ghz: float
  usable_bytes: int
  bytes_per_s: float


# The numbers are NVIDIA's and Google's data sheets'. Another device is a line
# here; of a GPU, whatever the CUDA samples' deviceQuery prints of it.
KNOWN: dict[str, Tpu | Gpu] = {
  'tpu_v4': Tpu('v4:2x2x1', int(30.75 * GIB), 1.2e12),
  'h200': Gpu(
    name='NVIDIA H200',
    compute_capability=(9, 0),
    cores=132,
    fpus_per_core=128,
    threads_per_core=2048,
    shared_per_core=233472,
    shared_per_block=232448,
    registers_per_core=65536,
    l2_bytes=60 << 20,
    clock_ghz=1.98,
    usable_bytes=150 * 10**9,
    bytes_per_s=4.8e12,
  ),
}


def find(name: str) -> Tpu | Gpu:
  """The device of that name.

  Raises:
    ValueError: it is not known; says those that are.
  """
  check_choice('The device to compile for', name, KNOWN)
  return KNOWN[name]
