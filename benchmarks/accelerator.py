"""The accelerator suite: Table 2 in forced-acceptance mode on one device.

  python benchmarks/accelerator.py --gin_file=gin/runs/accelerator.gin \\
    --gin.OUTPUT_DIR=benchmarks/results/accelerator

Leaves a record a row in the records/ of OUTPUT_DIR and goes on where it was
stopped. It needs only jax, flax, numpy, gin-config and absl.
scripts/reproduce.py with gin/runs/table2.gin and the same OUTPUT_DIR makes
tables of them.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Run as a file: Python has found this folder only.
sys.path[:0] = [str(ROOT), str(ROOT / 'scripts')]

import gin_cli  # noqa: E402
from specdec_jax.engine import compilation_cache  # noqa: E402
from specdec_jax.paper import table2_suite  # noqa: E402


def main() -> None:
  """Runs what the gin files describe; a line a row goes to stdout."""
  compilation_cache.enable(None)
  table2_suite.run(gin_cli.build(table2_suite.SuiteConfig))


if __name__ == '__main__':
  sys.exit(gin_cli.main(main))
