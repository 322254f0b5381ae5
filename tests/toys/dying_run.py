"""A run of five lines, whose process may be killed at the fourth."""

import os
import signal

from toy_runs import ReversingEngine, run

LINES = [f'w{i} x y' for i in range(5)]


DATA = '\n'.join(LINES).encode()


def start(tmp_path, engine=None, **options):
  """Decodes `DATA`, two lines a batch; the records, and what was decoded."""
  engine = engine or ReversingEngine()
  _, records, _ = run(tmp_path, DATA, engine, batch_size=2, **options)
  # Every program's first call is made twice, and so is the padding.
  texts = {(call[0], text) for call in engine.calls for text in call[1]}
  return records, texts


class Dies(ReversingEngine):
  def generate(self, texts, *terms):
    if LINES[3] in texts:
      os.kill(os.getpid(), signal.SIGKILL)
    return super().generate(texts, *terms)
