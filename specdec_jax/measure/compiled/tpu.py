"""Compiles for a TPU that is not there: libtpu needs only its description."""

import importlib.metadata
import importlib.util
import os
from typing import Any

import jax
from jax.experimental import topologies

# Without these, libtpu asks a cloud machine's metadata server for its machine.
_DESCRIPTION = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_ACCELERATOR_TYPE': 'v4-8',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  # Nothing runs on the chip, so other processes may use libtpu too.
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}
_CHIP = 'megacore'  # both cores of a v4 chip as one device


def describe_slice(topology: str) -> list[Any]:
  """The chips of a TPU slice, to compile for.

  Args:
    topology: such as 'v4:2x2x4'.

  Raises:
    ValueError: libtpu is not installed, or does not know the topology.
  """
  if importlib.util.find_spec('libtpu') is None:
    raise ValueError("libtpu is not installed: pip install 'specdec_jax[tpu]'")
  for name, value in _DESCRIPTION.items():
    os.environ.setdefault(name, value)
  try:
    described = topologies.get_topology_desc(
      topology, platform='tpu', chip_config_name=_CHIP
    )
  except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
    raise ValueError(
      f'libtpu {importlib.metadata.version("libtpu")} does not describe a TPU'
      f' {topology}: {error}'
    ) from error
  return list(described.devices)


def versions() -> dict[str, str]:
  """Versions of the packages that compile."""
  return {name: importlib.metadata.version(name) for name in ('jax', 'libtpu')}
