"""Writes tables and figures of the paper beside what is measured here.

  python scripts/reproduce.py --gin_file=gin/runs/table2.gin \\
    --gin.OUTPUT_DIR=outputs/table2

Flags are those of T5X, see scripts/gin_cli.py; macros of the run are listed in
the header of its gin file.
"""

import sys

import gin_cli
from specdec_jax.paper import reproduce


def main() -> None:
  """Runs what the gin files describe; the tables go to stdout."""
  for path in reproduce.reproduce(gin_cli.build(reproduce.ReproduceConfig)):
    print(path)


if __name__ == '__main__':
  sys.exit(gin_cli.main(main))
