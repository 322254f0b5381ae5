"""Measures what speculation is worth for a pair on this machine.

  python scripts/calibrate.py --gin_file=gin/runs/calibrate_demo.gin \\
    --gin.OUTPUT_FILE=calibration.json

scripts/decode.py takes the file by --gin.CALIBRATION=calibration.json. Flags
are those of T5X, see scripts/gin_cli.py; macros of the run are listed in the
header of its gin file.
"""

import sys

import gin_cli
from specdec_jax.measure import calibrate


def main() -> None:
  """Runs what the gin files describe; the tables go to stdout."""
  calibrate.calibrate(gin_cli.build(calibrate.CalibrateConfig))


if __name__ == '__main__':
  sys.exit(gin_cli.main(main))
