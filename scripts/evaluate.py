r"""Scores a pair on a test set: BLEU, and how often drafts are accepted.

  python scripts/evaluate.py --gin_file=gin/runs/eval.gin \
    --gin.EVAL_FILE=FILE

Flags are those of T5X, see scripts/gin_cli.py; macros of the run are listed in
the header of its gin file.
"""

import sys

import gin_cli
from specdec_jax.infer import quality


def main() -> None:
  """Runs what the gin files describe; the report goes to stdout."""
  quality.evaluate(
    gin_cli.build(quality.EvaluateConfig),
    beside={'operative_config.gin': gin_cli.operative_config},
  )


if __name__ == '__main__':
  sys.exit(gin_cli.main(main))
