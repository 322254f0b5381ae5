"""Measuring walltime: single calls, whole loops, and what predicts what.

`BenchmarkConfig` describes a run, `benchmark` does it, `report.show` does it
before a person's eyes.
"""

from specdec_jax.bench.run import BenchmarkConfig, benchmark

__all__ = ['BenchmarkConfig', 'benchmark']
