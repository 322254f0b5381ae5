r"""Decodes text plainly and speculatively: lines, or a task as with T5X.

  python scripts/decode.py --gin_file=gin/runs/demo.gin

  python scripts/decode.py --gin_file=gin/models/demo/pair.gin \
    --gin_file=gin/runs/infer.gin --gin.MIXTURE_OR_TASK_NAME=... ...

A run file that configures `infer.TaskConfig` is over a task or a file of
examples; others are over lines of text (`infer.DecodeConfig`), which both ways
decode, and are compared. A run that was killed goes on when it is started
again.

Flags are those of T5X, see scripts/gin_cli.py; macros of the run, such as
--gin.INPUT_FILE=FILE (`-` is stdin) and --gin.INFER_OUTPUT_DIR=FOLDER, are
listed in the header of its gin file.
"""

import sys

import gin_checks
import gin_cli
from specdec_jax import infer


def main() -> None:
  """Runs what the gin files describe; the report goes to stdout."""
  beside = {'operative_config.gin': gin_cli.operative_config}
  if any(name.endswith('.TaskConfig') for name in gin_checks.configured()):
    infer.decode_task(gin_cli.build(infer.TaskConfig), beside)
  else:
    infer.decode(gin_cli.build(infer.DecodeConfig), beside)


if __name__ == '__main__':
  sys.exit(gin_cli.main(main))
