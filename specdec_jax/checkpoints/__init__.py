"""Parameters on disk, in the formats that T5X users have."""

from specdec_jax.checkpoints.disk_arrays import fingerprint
from specdec_jax.checkpoints.load import check_network, load
from specdec_jax.checkpoints.orbax import save_orbax
from specdec_jax.checkpoints.t5x import check_params, save_t5x

__all__ = [
  'check_network',
  'check_params',
  'fingerprint',
  'load',
  'save_orbax',
  'save_t5x',
]
