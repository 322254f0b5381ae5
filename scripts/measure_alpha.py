"""Measures a pair's acceptance rate: Corollary 3.6 on the target's own tokens.

  python scripts/measure_alpha.py --gin_file=gin/runs/alpha_demo.gin

Flags are those of T5X, see scripts/gin_cli.py; macros of the run are listed in
the header of its gin file.
"""

import sys

import gin_cli
from specdec_jax.measure import alpha


def main() -> None:
  """Runs what the gin files describe; the table goes to stdout."""
  alpha.measure_alpha(gin_cli.build(alpha.MeasureAlphaConfig))


if __name__ == '__main__':
  sys.exit(gin_cli.main(main))
