"""Measuring walltime: single calls, whole loops, and what predicts what.

`BenchmarkConfig` describes a run, `benchmark` does it.
"""

from specdec_jax.bench.run import BenchmarkConfig, benchmark

__all__ = ['BenchmarkConfig', 'benchmark']
