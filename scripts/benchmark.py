"""Measures calls and loops of a pair of models on this machine.

  python scripts/benchmark.py --gin_file=gin/runs/benchmark_base.gin

Flags are those of T5X, see scripts/gin_cli.py; macros of the run are listed in
the header of its gin file.
"""

import sys

import gin_cli
from specdec_jax.measure import benchmark, report


def main() -> None:
  """Runs what the gin files describe; the table goes to stdout."""
  report.show(gin_cli.build(benchmark.BenchmarkConfig))


if __name__ == '__main__':
  sys.exit(gin_cli.main(main))
