"""The pair check of version 0.1, for a TPU v4: its run files name it."""

import dataclasses

from specdec_jax.measure.compiled.pair_check import PairCheckConfig


@dataclasses.dataclass(frozen=True)
class TpuCheckConfig(PairCheckConfig):
  """`PairCheckConfig` with a TPU v4 as its device.

  Attributes:
    usable_gib: memory of a chip that programs may use.
    gb_per_s: bandwidth of its memory, 1e9 bytes per second.
    name: name of the report.
    device: name of the device in `devices.KNOWN`.
  """

  usable_gib: float | None = 30.75
  gb_per_s: float | None = 1200.0
  name: str = 'TPU v4 check'
  device: str = 'tpu_v4'
