"""Decodes lines of text, plainly and speculatively, and compares the two.

  python scripts/decode.py --gin_file=gin/runs/demo.gin

Flags are those of T5X, see scripts/gin_cli.py; macros of the run, such as
--gin.INPUT_FILE=FILE (`-` is stdin) and --gin.INFER_OUTPUT_DIR=FOLDER, are
listed in the header of its gin file.
"""

import sys

import gin_cli
from specdec_jax import infer


def main() -> None:
  """Runs what the gin files describe; the report goes to stdout."""
  infer.decode(
    gin_cli.build(infer.DecodeConfig),
    beside={'operative_config.gin': gin_cli.operative_config},
  )


if __name__ == '__main__':
  sys.exit(gin_cli.main(main))
