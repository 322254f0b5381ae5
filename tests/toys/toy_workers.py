"""Workers of the server, and what their rows are told."""

import contextlib
import threading
import time

from small_vocabulary import make_texts
from specdec_jax.serving.settings import ServeSettings
from specdec_jax.serving.worker import Worker

TEXTS = [text for text in make_texts(24) if len(text) < 60]
POOLS = {'rows': 2}  # the server's suite has them too
_SECONDS = 600.0  # in which programs are compiled on a busy machine


@contextlib.contextmanager
def started(engine, measured=None, whole=True, **settings):
  """A worker that has compiled all programs, or enough of them to begin."""
  limits = {'max_seconds': _SECONDS} | settings
  made = Worker(engine, ServeSettings(**limits), measured)
  made.start()
  wait_until(
    lambda: made.failure or (made.is_compiled or not whole) and made.takes_rows
  )
  assert made.failure is None, made.failure
  try:
    yield made
  finally:
    made.stop()
    made.join()


class Heard:
  """What one row was told."""

  def __init__(self, scheduler, text, streams=False, **options):
    self.news, self._end = [], threading.Event()
    (self.row,) = scheduler.rows([text], self._tell, **options)
    self.row.streams = streams

  def _tell(self, _, news):
    self.news.append(news)
    if news.is_last:
      self._end.set()

  @property
  def last(self):
    assert self._end.wait(_SECONDS)
    return self.news[-1]


def wait_until(condition):
  end = time.monotonic() + _SECONDS
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.005)
