"""The paper's tables and figures beside what is predicted and measured.

`ReproduceConfig` and `reproduce` are scripts/reproduce.py, `plot_throughput`
draws what scripts/throughput.py measures.
"""

from specdec_jax.reproduce.run import ReproduceConfig, reproduce
from specdec_jax.reproduce.throughput import plot_throughput

__all__ = ['ReproduceConfig', 'plot_throughput', 'reproduce']
