"""The log of a server: JSON objects on stderr, one per line."""

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

LOG = logging.getLogger('specdec_jax.serving')


def say(event: str, **fields: Any) -> None:
  """Logs an event and its fields."""
  LOG.info(event, extra={'fields': fields})


class _Lines(logging.Formatter):
  """Formats each record as a JSON object on one line."""

  def format(self, record: logging.LogRecord) -> str:
    """Returns the line of a record."""
    line = {
      'time': round(record.created, 3),
      'level': record.levelname,
      'event': record.getMessage().rstrip(),
      **vars(record).get('fields', {}),
    }
    if record.exc_info:
      line['error'] = self.formatException(record.exc_info)
    return json.dumps(line)


@contextlib.contextmanager
def logging_to_stderr() -> Iterator[None]:
  """Sends the log to stderr."""
  handler = logging.StreamHandler(sys.stderr)
  handler.setFormatter(_Lines())
  names = LOG.name, 'uvicorn.error', 'py.warnings'
  loggers = [logging.getLogger(name) for name in names]
  for logger in loggers:
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
  loggers[1].setLevel(logging.WARNING)  # `say` logs the rest
  logging.captureWarnings(True)
  try:
    yield
  finally:
    logging.captureWarnings(False)
    for logger in loggers:
      logger.removeHandler(handler)
      logger.propagate = True
