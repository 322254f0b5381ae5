"""Runs the command line: `python -m specdec_jax` is the same as `specdec`."""

import sys

from specdec_jax.cli.main import main

if __name__ == '__main__':
  sys.exit(main())
