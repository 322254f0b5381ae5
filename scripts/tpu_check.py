r"""Compiles for TPU v4 without a TPU, and counts memory, bytes and exchanges.

Table 2 on one chip:

  python scripts/tpu_check.py --gin_file=gin/runs/tpu_check.gin \
    --gin.OUTPUT_DIR=outputs/tpu_v4

Models that are split over slices of 4 and 16 chips:

  python scripts/tpu_check.py --gin_file=gin/runs/tpu_slices.gin \
    --gin.OUTPUT_DIR=outputs/tpu_v4_slices

Flags are those of T5X, see scripts/gin_cli.py; macros of a run are listed in
the header of its gin file.
"""

import sys

import jax

import gin_checks
import gin_cli
from specdec_jax.measure.compiled import tpu_check, tpu_slices
from specdec_jax.paper import printed


def main() -> None:
  """Checks every row; results.json and report.md go to the output folder."""
  # With libtpu installed JAX would look for a TPU here, and wait for it.
  jax.config.update('jax_platforms', 'cpu')
  slices = f'{tpu_slices.__name__}.{tpu_slices.SlicesConfig.__name__}'
  if slices in gin_checks.configured():
    tpu_slices.check(gin_cli.build(tpu_slices.SlicesConfig))
  else:
    tpu_check.check(gin_cli.build(tpu_check.TpuCheckConfig), printed.TABLE2)


if __name__ == '__main__':
  sys.exit(gin_cli.main(main))
