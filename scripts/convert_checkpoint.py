r"""Writes a checkpoint of any kind anew: for Orbax, Hugging Face or T5X.

  python scripts/convert_checkpoint.py \
    --gin_file=gin/runs/convert_checkpoint.gin \
    --gin.CHECKPOINT_PATH=FOLDER --gin.OUTPUT=FOLDER --gin.FORMAT=safetensors

Flags are those of T5X, see scripts/gin_cli.py; macros of the run are listed in
the header of its gin file.
"""

import sys

import gin_cli
from specdec_jax.checkpoints import convert


def main() -> None:
  """Runs what the gin files describe; a line about it goes to stdout."""
  print(convert.convert(gin_cli.build(convert.ConvertConfig)))


if __name__ == '__main__':
  sys.exit(gin_cli.main(main))
