"""What a server is told: its address, sizes and limits."""

import dataclasses
import ipaddress
import socket
import urllib.parse
from typing import Annotated, Any

from specdec_jax.checks.fields import Bound, Checked
from specdec_jax.types import Above0, Positive

_LAST_SECONDS = 5.0  # in which the ends of what was cut off are sent


@dataclasses.dataclass(frozen=True)
class ServeSettings(Checked):
  """How requests are taken and decoded.

  Attributes:
    host: the address to listen at; this machine alone unless told otherwise.
    port: its port; 0 is any that is free.
    allowed_hosts: names by which clients call the server, beside addresses,
      localhost and `host`. A request with another Host header is refused: a
      site could let its own name lead here. Without any, all names are
      allowed, unless the server listens to this machine alone.
    model_name: what requests call the model; None is the target's name.
    rows: outputs that are decoded together.
    speculative: whether the drafter helps; None is yes if there is one.
    beams: widths of the beam searches that are served, as programs for them are
      compiled before. One runs at a time, beside the rows.
    max_waiting: outputs that may wait; more are answered by 429.
    max_outputs: outputs that a request may ask for: prompts times n.
    max_connections: connections at a time. One more closes the one that has
      waited longest for its client; if none does, it is answered by 503.
    max_seconds: after so many a request ends with an error, wherever it is.
    max_header: bytes of a request's line and header fields.
    header_seconds: after so many they must have come.
    max_body: bytes of a request's body.
    body_seconds: after so many it must have come.
    idle_seconds: after so many a connection is closed if no other request
      comes, or if its client does not read an answer. Clients' pools close
      theirs after 5 to 60 seconds; were the server first, a request that is
      just sent would be lost.
    drain_seconds: when it is told to stop, a server decodes what it has taken
      for so many; what is left ends with an error.
    api_key_file: a file with a key a line; one must come with each request.
      Without a file they are those of the environment's SPECDEC_API_KEYS, with
      commas between them; without any, no key is asked for.

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
    """Whether a request with this Host header, perhaps '', is answered.

    An address or localhost always is: no other site can have it as its name.
    """
    if not host or not (self.is_local or self.allowed_hosts):
      return True
    name = _name_of(host)
    names = map(_name_of, ('localhost', self.host, *self.allowed_hosts))
    return bool(name) and (_address(name) is not None or name in names)

  @property
  def end_seconds(self) -> float:
    """Seconds that a server takes at most to end once it is told to."""
    return self.drain_seconds + _LAST_SECONDS

  @property
  def sizes(self) -> tuple[int, ...]:
    """Rows of the pools: 1, 4, 16, ... and `rows`.

    A pool has as many rows as it needs: a single client must not wait for the
    computation of rows without a text.
    """
    sizes, size = [self.rows], 1
    while size < self.rows:
      sizes.append(size)
      size *= 4
    return tuple(sorted(sizes))


def _name_of(host: str) -> str:
  """The name or address in a Host header, without its port."""
  try:
    return urllib.parse.urlsplit(f'//{host}').hostname or ''
  except ValueError:  # '[' alone
    return ''


def _address(name: str) -> Any:
  """The IP address that a text is; None if it is none."""
  try:
    return ipaddress.ip_address(name)
  except ValueError:
    return None


def listening_socket(settings: ServeSettings) -> socket.socket:
  """A socket that listens at the server's address.

  Raises:
    OSError: the port is taken.
  """
  family = socket.AF_INET6 if ':' in settings.host else socket.AF_INET
  address = settings.host, settings.port
  listening = socket.create_server(address, family=family)
  # Connections inherit it. asyncio sets it for sockets of its own only, and
  # without it the second part of an answer waits for the client's ACK: 40 ms.
  listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  return listening
