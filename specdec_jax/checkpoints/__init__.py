"""Parameters on disk, in the formats that T5X users have."""

from specdec_jax.checkpoints.load import load
from specdec_jax.checkpoints.orbax_params import save_orbax
from specdec_jax.checkpoints.t5x import check_params, save_t5x

__all__ = ['check_params', 'load', 'save_orbax', 'save_t5x']
