"""Times this project beside transformers and CTranslate2 on the same weights.

  python benchmarks/peers.py --gin_file=gin/runs/peers_demo.gin

Needs the extra: pip install -e '.[peers]'. Flags are those of T5X, see
scripts/gin_cli.py; macros of the run are in the header of its gin file.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Run as a file: Python has found this folder only.
sys.path[:0] = [str(ROOT), str(ROOT / 'scripts')]

import gin_cli  # noqa: E402
from benchmarks import peers_run  # noqa: E402


def main() -> None:
  """Runs what the gin files describe; the table goes to stdout."""
  peers_run.compare(gin_cli.build(peers_run.PeersConfig))


if __name__ == '__main__':
  sys.exit(gin_cli.main(main))
