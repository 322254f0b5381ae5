"""The paper's tables and figures beside what is predicted and measured.

`ReproduceConfig` and `reproduce` are scripts/reproduce.py.
"""

from specdec_jax.reproduce.run import ReproduceConfig, reproduce

__all__ = ['ReproduceConfig', 'reproduce']
