"""`simulate` of specdec_jax/cli/simulate.py, which has its --help."""

import sys

from specdec_jax.cli import simulate

if __name__ == '__main__':
  sys.exit(simulate.main(sys.argv[1:]))
