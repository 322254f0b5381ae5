"""Measures what a draft costs, for every drafter beside one target.

  python scripts/drafter_costs.py --gin_file=gin/runs/drafter_costs.gin

Flags are those of T5X, see scripts/gin_cli.py; macros of the run are listed in
the header of its gin file.
"""

import sys

import gin_cli
from specdec_jax.measure import drafter_costs


def main() -> None:
  """Runs what the gin files describe; the table goes to stdout."""
  drafter_costs.drafter_costs(gin_cli.build(drafter_costs.DrafterCostsConfig))


if __name__ == '__main__':
  sys.exit(gin_cli.main(main))
