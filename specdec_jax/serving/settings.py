"""The settings of a server, its socket, and its log.

The log is written to stderr, one JSON object per line.
"""

import contextlib
import dataclasses
import ipaddress
import json
import logging
import socket
import sys
import time
import urllib.parse
from collections.abc import Iterator
from typing import Annotated, Any

from specdec_jax.checks.fields import Bound, Checked
from specdec_jax.types import Above0, Positive

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_LAST_SECONDS = 5.0  # for sending errors to requests that are cut off
LOG = logging.getLogger('specdec_jax.serving')


@dataclasses.dataclass(frozen=True)
class ServeSettings(Checked):
  """The settings by which requests are taken and decoded.

  Attributes:
    host: the address to listen at; by default, only this machine reaches it.
    port: the port to listen at; 0: any free one.
    allowed_hosts: names by which clients call the server, beside addresses,
      localhost and `host`. A request with another Host header is refused, since
      a site could let its own name resolve to this server. If empty, all names
      are allowed, unless the server listens to this machine alone.
    model_name: the name by which requests call the model; None: the target's.
    rows: outputs that are decoded together.
    speculative: whether the drafter is used; None: where it pays.
    beams: widths of the beam searches that are served; their programs are
      compiled at the start. One search runs at a time, beside the rows.
    max_waiting: outputs that may wait in the queue; more are answered with 429.
    max_outputs: outputs that a request may ask for: prompts times n.
    max_connections: connections that may be open. One more closes the
      connection that has waited longest for its client, or else is answered
      with 503.
    max_seconds: seconds after which a request ends with an error.
    max_header: the most bytes of a request's line and header fields.
    header_seconds: seconds in which a request's header must come.
    max_body: the most bytes of a request's body.
    body_seconds: seconds in which a request's body must come.
    idle_seconds: seconds after which a connection is closed if no other request
      comes, or if its client does not read an answer. Clients' pools close idle
      connections after 5 to 60 seconds. If the server closed one first, a
      request that was just sent would be lost.
    drain_seconds: seconds in which a server that is to stop finishes the
      requests that it has taken; the others end with an error.
    api_key_file: a file with a key per line; each request must have one of
      them. Without a file the keys are those in the environment's
      SPECDEC_API_KEYS, with commas between them. Without keys, requests need
      none.

  Raises:
    ValueError: a value is outside its range.
  """

  host: str = '127.0.0.1'
  port: Annotated[int, Bound(0, 65535)] = 8000
  allowed_hosts: tuple[str, ...] = ()
  model_name: str | None = None
  rows: Positive = 16
  speculative: bool | None = None
  beams: tuple[Positive, ...] = ()
  max_waiting: Positive = 256
  max_outputs: Positive = 64
  max_connections: Positive = 1024
  max_seconds: Above0 = 60.0
  max_header: Positive = 1 << 15
  header_seconds: Above0 = 10.0
  max_body: Positive = 1 << 20
  body_seconds: Above0 = 10.0
  idle_seconds: Above0 = 75.0
  drain_seconds: Above0 = 30.0
  api_key_file: str | None = None

  @property
  def is_local(self) -> bool:
    """Whether the server listens to this machine alone."""
    address = _address(self.host)
    return self.host == 'localhost' or bool(address and address.is_loopback)

  def answers_to(self, host: str) -> bool:
    """Whether a request with the Host header `host` is answered.

    If `host` is empty, there is no such header. Addresses and localhost are
    always answered, since no site can have such a name.
    """
    if not host or not (self.is_local or self.allowed_hosts):
      return True
    name = _name_of(host)
    names = map(_name_of, ('localhost', self.host, *self.allowed_hosts))
    return bool(name) and (_address(name) is not None or name in names)

  @property
  def end_seconds(self) -> float:
    """The most seconds that a server takes to stop."""
    return self.drain_seconds + _LAST_SECONDS

  @property
  def sizes(self) -> tuple[int, ...]:
    """The numbers of rows that a pool may have: 1, 4, 16, ... and `rows`.

    In a small pool a single client does not wait for the computation of
    placeholder rows.
    """
    sizes, size = [self.rows], 1
    while size < self.rows:
      sizes.append(size)
      size *= 4
    return tuple(sorted(sizes))


def _name_of(host: str) -> str:
  """Returns the name or address in a Host header, without its port."""
  try:
    return urllib.parse.urlsplit(f'//{host}').hostname or ''
  except ValueError:  # such as '['
    return ''


def _address(name: str) -> _Address | None:
  """Returns a text as an IP address; None if the text is not one."""
  try:
    return ipaddress.ip_address(name)
  except ValueError:
    return None


def listening_socket(settings: ServeSettings) -> socket.socket:
  """Returns a socket that listens at the server's address.

  Raises:
    OSError: the port is taken.
  """
  family = socket.AF_INET6 if ':' in settings.host else socket.AF_INET
  address = settings.host, settings.port
  listening = socket.create_server(address, family=family)
  # Connections inherit the option, which asyncio sets only for sockets that it
  # makes. Without it the second part of an answer waits 40 ms for an ACK.
  listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  return listening


def say(event: str, **fields: Any) -> None:
  """Logs an event and its fields."""
  LOG.info(event, extra={'fields': fields})


def say_since(event: str, begin: float, **fields: Any) -> None:
  """Logs an event with its seconds since `time.perf_counter` was `begin`."""
  say(event, **fields, seconds=round(time.perf_counter() - begin, 3))


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
  loggers = [*map(logging.getLogger, names)]
  for logger in loggers:
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
  loggers[1].setLevel(logging.WARNING)  # `say` logs its other events
  logging.captureWarnings(True)
  try:
    yield
  finally:
    logging.captureWarnings(False)
    for logger in loggers:
      logger.removeHandler(handler)
      logger.propagate = True
