r"""Fits an n-gram table: a drafter without a network.

  python scripts/fit_ngram.py --gin_file=gin/runs/fit_ngram.gin \
    --gin.TRAIN_FILES="['text.txt']" --gin.OUTPUT_FILE=bigram.npz

Flags are those of T5X, see scripts/gin_cli.py; macros of the run are listed in
the header of its gin file.
"""

import sys

import gin_cli
from specdec_jax.measure import ngram


def main() -> None:
  """Fits what the gin files describe; what it holds goes to stdout."""
  ngram.fit_ngram(gin_cli.build(ngram.FitNgramConfig))


if __name__ == '__main__':
  sys.exit(gin_cli.main(main))
