"""Measures data-set decoding: full slots against fixed batches; batch sizes.

  python scripts/throughput.py --gin_file=gin/runs/throughput_demo.gin \\
    --gin.OUTPUT_FILE=throughput.json --gin.PLOT_FILE=throughput.png

Flags are those of T5X, see scripts/gin_cli.py; macros of the run are listed in
the header of its gin file.
"""

import sys

import gin_cli
from specdec_jax.measure import throughput, throughput_picture


def main() -> None:
  """Runs what the gin files describe; the tables go to stdout."""
  config = gin_cli.build(throughput.ThroughputConfig)
  record = throughput.measure_throughput(config)
  if config.plot_file:
    throughput_picture.plot_throughput(config.plot_file, record)


if __name__ == '__main__':
  sys.exit(gin_cli.main(main))
