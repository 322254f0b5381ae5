r"""Compiles Table 2 for one TPU v4 chip, without a TPU, and counts its bytes.

  python scripts/tpu_check.py --gin_file=gin/runs/tpu_check.gin \
    --gin.OUTPUT_DIR=outputs/tpu_v4

Flags are those of T5X, see scripts/gin_cli.py; macros of the run are listed in
the header of its gin file.
"""

import sys

import jax

import gin_cli
from specdec_jax import paper
from specdec_jax.bench import tpu_check


def main() -> None:
  """Checks every row; results.json and report.md go to the output folder."""
  # With libtpu installed JAX would look for a TPU here, and wait for it.
  jax.config.update('jax_platforms', 'cpu')
  tpu_check.check(gin_cli.build(tpu_check.TpuCheckConfig), paper.TABLE2)


if __name__ == '__main__':
  sys.exit(gin_cli.main(main))
