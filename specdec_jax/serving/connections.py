"""Bounds on what a connection may hold, and on how long its client may take.

uvicorn bounds how long a connection is idle between two requests. What is here
bounds the header of a request, a client that does not read its answer, and how
many connections may do nothing while others want one.
"""

import functools
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from specdec_jax.serving.protocol import error_object
from specdec_jax.serving.settings import ServeSettings

_MOST_PIPELINED = 64  # requests that a client may send before it has an answer
_PROBE_SECONDS = 1.0
_GRACE_SECONDS = 0.1  # in which there may be twice as many connections
# Clients overlook both: an interim answer, and a comment in a stream.
_INTERIM, _COMMENT = b'HTTP/1.1 100 Continue\r\n\r\n', b'3\r\n:\n\n\r\n'
_TOO_LATE, _TOO_LARGE = (
  (408, 'Request Timeout'),
  (431, 'Request Header Fields Too Large'),
)


class Connection(HttpToolsProtocol):
  """One connection of a server.

  It is `waiting` while its client has to act: to send the rest of a request, or
  to read an answer.
  """

  def __init__(
    self, settings: ServeSettings, waiting: dict[Any, None], **options: Any
  ):
    """
    Args:
      settings: the bounds.
      waiting: the connections that wait for their clients, the longest first.
      **options: uvicorn's.
    """
    super().__init__(**options)
    self._settings, self._all_waiting = settings, waiting
    self._num_unparsed = 0  # bytes since a header, or a part of a body, ended
    self._is_large = False
    # What is done unless a header comes, unless the client reads.
    self._header_timer: Any = None
    self._write_timer: Any = None

  # What asyncio calls.

  def connection_made(self, transport: Any) -> None:
    """Closes others that wait, if there are too many."""
    super().connection_made(transport)
    self._await_header()
    self._note()
    most = self._settings.max_connections
    self._make_room(2 * most)
    if len(self.connections) > most:
      # What others have sent, of as many that came together, is read first.
      self.loop.call_later(_GRACE_SECONDS, self._make_room, most)

  def connection_lost(self, exc: Exception | None) -> None:
    """Forgets it."""
    super().connection_lost(exc)
    self._header_timer = _cancelled(self._header_timer)
    self._write_timer = _cancelled(self._write_timer)
    self._all_waiting.pop(self, None)

  def data_received(self, data: bytes) -> None:
    """Bounds a header that has begun."""
    self._num_unparsed += len(data)
    super().data_received(data)
    if self._num_unparsed > self._settings.max_header:
      self._refuse(*_TOO_LARGE)
    elif self._is_idle and self._header_timer is None:
      self._await_header()
    self._note()

  def eof_received(self) -> bool:  # type: ignore[override]
    """Stays open for an answer: the client may have ended only its half."""
    if self._is_idle or self.cycle.more_body:
      return False
    self.cycle.keep_alive = False
    self.loop.call_later(_PROBE_SECONDS, self._probe)
    return True

  def pause_writing(self) -> None:
    """The client does not read."""
    super().pause_writing()
    self._write_timer = self.loop.call_later(
      self._settings.idle_seconds, self.transport.abort
    )
    self._note()

  def resume_writing(self) -> None:
    """It reads again."""
    super().resume_writing()
    self._write_timer = _cancelled(self._write_timer)
    self._note()

  # What the parser and uvicorn call.

  def on_headers_complete(self) -> None:
    """Begins to answer, unless the header is too large."""
    self._header_timer = _cancelled(self._header_timer)
    self._num_unparsed = 0
    sizes = (len(name) + len(value) + 4 for name, value in self.headers)
    size = len(self.url) + sum(sizes)
    self._is_large = size > self._settings.max_header
    if self._is_large or len(self.pipeline) >= _MOST_PIPELINED:
      raise ValueError('a large header, or too many requests')  # to the parser
    busy = 1 + len(self.connections) - len(self._all_waiting)  # with it
    is_over = busy > self._settings.max_connections
    self.limit_concurrency = 1 if is_over else None  # 1: uvicorn answers by 503
    super().on_headers_complete()
    if self.scope['http_version'] == '1.0':
      self.cycle.send = functools.partial(  # type: ignore[method-assign]
        _send_without_chunks, self.cycle
      )

  def on_body(self, body: bytes) -> None:
    """Keeps a part of a body."""
    self._num_unparsed = 0
    super().on_body(body)

  def send_400_response(self, msg: str) -> None:
    """Refuses what the parser refused."""
    if self._is_large:
      self._refuse(*_TOO_LARGE)
    else:
      super().send_400_response(msg)

  def on_response_complete(self) -> None:
    """Waits for the next request."""
    super().on_response_complete()
    self._note()

  @property
  def _is_idle(self) -> bool:
    return self.cycle is None or self.cycle.response_complete

  def _make_room(self, most: int) -> None:
    """Closes those that have waited longest, until there are `most`."""
    while len(self.connections) > most and self._all_waiting:
      longest = next(iter(self._all_waiting))
      del self._all_waiting[longest]
      self.connections.discard(longest)
      longest.transport.abort()

  def _note(self) -> None:
    waits = self._is_idle or self.cycle.more_body or self.flow.write_paused
    if waits:
      self._all_waiting.setdefault(self)
    else:
      self._all_waiting.pop(self, None)

  def _await_header(self) -> None:
    self._header_timer = self.loop.call_later(
      self._settings.header_seconds, self._end
    )

  def _end(self) -> None:
    """No header came in time."""
    self._header_timer = None
    if self._num_unparsed:
      self._refuse(*_TOO_LATE)
    else:
      self.transport.close()

  def _refuse(self, status: int, reason: str) -> None:
    """Answers what is no request yet, and closes."""
    if self.transport.is_closing():
      return
    error = error_object(f'{reason}.', 'invalid_request_error')
    body = json.dumps(error).encode()
    head = (
      f'HTTP/1.1 {status} {reason}\r\nconnection: close\r\n'
      f'content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n'
    )
    self.transport.write(head.encode() + body)
    self.transport.close()

  def _probe(self) -> None:
    """Writes what means nothing; a client that has left resets it."""
    if self._is_idle or self.transport.is_closing():
      return
    if not self.pipeline:  # else an answer to another request is under way
      if self.cycle.chunked_encoding:
        self.transport.write(_COMMENT)
      elif not self.cycle.response_started and not _is_old(self.cycle):
        self.transport.write(_INTERIM)
    self.loop.call_later(_PROBE_SECONDS, self._probe)


def _cancelled(timer: Any) -> Any:
  if timer is not None:
    timer.cancel()
  return None


def _is_old(cycle: Any) -> bool:
  return bool(cycle.scope['http_version'] == '1.0')


async def _send_without_chunks(cycle: Any, message: Any) -> None:
  """A cycle's `send` for HTTP/1.0, which knows no chunks.

  An answer without a length ends with its connection.
  """
  if message['type'] == 'http.response.start':
    if not any(name == b'content-length' for name, _ in message['headers']):
      cycle.chunked_encoding = False
  elif cycle.chunked_encoding is False and not cycle.expected_content_length:
    cycle.expected_content_length = len(message.get('body', b''))
  await type(cycle).send(cycle, message)
