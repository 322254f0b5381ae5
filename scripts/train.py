"""Trains a model, or distils a drafter from a target.

  python scripts/train.py --gin_file=gin/runs/train.gin \
    --gin.MODEL_DIR=FOLDER --gin.TRAIN_FILE=FILE --gin.VOCAB_PATH=FILE

Flags are those of T5X, see scripts/gin_cli.py; the macros of a run are listed
in the header of its gin file. The same command goes on where a killed run was.
"""

import sys

import gin_cli
from specdec_jax import training


def main() -> None:
  """Runs what the gin files describe; progress goes to stderr."""
  training.train(
    gin_cli.build(training.TrainRun),
    beside={'operative_config.gin': gin_cli.operative_config},
  )


if __name__ == '__main__':
  sys.exit(gin_cli.main(main))
