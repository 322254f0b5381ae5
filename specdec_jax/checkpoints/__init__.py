"""Parameters on disk, in the formats that T5X users have."""

from specdec_jax.checkpoints.t5x import check_params, load_params, save_t5x

__all__ = ['check_params', 'load_params', 'save_t5x']
