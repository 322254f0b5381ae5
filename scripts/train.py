"""Runs `train` of specdec_jax/cli/commands.py, whose docstring is its help."""

import sys

from specdec_jax.cli import main

if __name__ == '__main__':
  sys.exit(main.script('train'))
