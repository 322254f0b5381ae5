"""Placement: where parameters, caches and requests live, and how."""

from specdec_jax.partitioning.axes import REPLICATED, LogicalAxes
from specdec_jax.partitioning.following import follow
from specdec_jax.partitioning.partition import (
  Partition,
  described,
  on_host,
  shard_bytes,
  shardings,
)
from specdec_jax.partitioning.placement import (
  Placement,
  check_dtypes,
  lay_out,
  place,
  place_parts,
  read_parts,
  share_devices,
)

__all__ = [
  'REPLICATED',
  'LogicalAxes',
  'Partition',
  'Placement',
  'check_dtypes',
  'described',
  'follow',
  'lay_out',
  'on_host',
  'place',
  'place_parts',
  'read_parts',
  'shard_bytes',
  'share_devices',
  'shardings',
]
