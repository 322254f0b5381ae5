"""A server by uvicorn, with limits on connections.

uvicorn limits how long a connection is idle between two requests. `Connection`
limits the header of a request, how long a client may leave its answer unread,
and how many connections are open.
"""

import asyncio
import dataclasses
import functools
import gc
import json
import math
import socket
from collections.abc import Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from specdec_jax.serving.app import Application
from specdec_jax.serving.protocol import ApiError
from specdec_jax.serving.settings import ServeSettings, listening_socket, say
from specdec_jax.serving.worker import Worker

_OTHER_FILES = 64  # open files that are no connections
_MOST_PIPELINED = 64  # requests that a client may send before it has an answer
_PROBE_SECONDS = 1.0
# Clients ignore both of these: an interim answer, and a comment in a stream.
_INTERIM, _COMMENT = b'HTTP/1.1 100 Continue\r\n\r\n', b'3\r\n:\n\n\r\n'
_TOO_LATE = 408, 'Request Timeout'
_TOO_LARGE = 431, 'Request Header Fields Too Large'
_Timer = asyncio.TimerHandle | None


class Server(uvicorn.Server):
  """A server that decodes with one worker.

  Setting the inherited `should_exit` stops the server, as a signal does.

  Attributes:
    application: answers the requests.
    port: the port at which the server listens.
  """

  def __init__(self, worker: Worker, name: str, keys: Sequence[str] = ()):
    """Opens the port; the arguments are those of `Application`.

    Raises:
      OSError: the port is taken.
    """
    self.application = Application(worker, name, keys)
    self._worker, self._settings = worker, worker.settings
    number = _connections(self._settings.max_connections)
    settings = dataclasses.replace(self._settings, max_connections=number)
    self._socket = listening_socket(settings)
    self.port: int = self._socket.getsockname()[1]
    options: dict[str, Any] = {  # uvicorn accepts more types than its hints say
      'http': functools.partial(Connection, settings, {}),
      'timeout_keep_alive': settings.idle_seconds,
      'timeout_graceful_shutdown': math.ceil(settings.end_seconds),
    }
    options |= {'lifespan': 'off', 'log_config': None, 'ws': 'none'}
    options |= {'access_log': False, 'server_header': False}
    super().__init__(uvicorn.Config(self.application, **options))

  async def serve(self, sockets: list[socket.socket] | None = None) -> None:
    """Serves until a signal, or until `should_exit` is set.

    Raises:
      RuntimeError: the scheduler failed.
    """
    url = f'http://{self._settings.host}:{self.port}'
    say('listening', url=url, model=self.application.name)
    self._worker.start()
    watch = asyncio.create_task(self._watch())
    try:
      await super().serve([self._socket])
    finally:
      watch.cancel()
      await asyncio.to_thread(self.application.close)
      say('stopped')
    self.application.check()

  async def _watch(self) -> None:
    """Stops the server if the scheduler fails."""
    is_frozen = False
    while self._worker.failure is None:
      if self._worker.is_compiled and not is_frozen:
        is_frozen = True
        # Half a million objects stay from here on. Unless they are frozen, the
        # garbage collector goes through them repeatedly while requests wait.
        gc.collect()
        gc.freeze()
      await asyncio.sleep(0.1)
    self.should_exit = True

  async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
    """Finishes the requests that were taken, within a limit."""
    self._worker.refuse('The server is stopping. Try again later.')
    say('stopping', rows=self._worker.num_rows)
    loop = asyncio.get_running_loop()
    loop.call_later(self._settings.drain_seconds, self._worker.stop)
    await super().shutdown(sockets)


def _connections(wanted: int) -> int:
  """Returns how many connections there may be, `wanted` at most.

  Each connection is an open file of the process. The process's limit on open
  files is raised if that is possible.
  """
  try:
    import resource
  except ImportError:  # not a Unix
    return wanted
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  number = wanted + _OTHER_FILES
  files = max(soft, number if hard < 0 else min(number, hard))
  resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
  return min(wanted, max(1, files - _OTHER_FILES))


class Connection(HttpToolsProtocol):
  """One connection of a server.

  A connection is waiting while its client has to act: to send a request or the
  rest of one, or to read an answer. asyncio calls the public methods down to
  `resume_writing`, uvicorn the later ones.
  """

  def __init__(
    self, settings: ServeSettings, waiting: dict[Any, None], **options: Any
  ):
    """Makes a connection without a transport.

    Args:
      settings: the limits.
      waiting: all connections that wait for their clients, the one that has
        waited longest first; the connections of a server share it.
      **options: the arguments of uvicorn's class.
    """
    super().__init__(**options)
    self._settings, self._all_waiting = settings, waiting
    self._num_unparsed = 0  # bytes since a header, or a part of a body, ended
    # These timers close the connection: the first if no header comes in time,
    # the second if the client does not read.
    self._header_timer: _Timer = None
    self._write_timer: _Timer = None

  def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
    """Closes the connection that has waited longest, if there are too many."""
    super().connection_made(transport)
    self._await_header()
    longest = next(iter(self._all_waiting), None)
    if longest and len(self.connections) > self._settings.max_connections:
      del self._all_waiting[longest]
      self.connections.discard(longest)
      longest.transport.abort()
    self._note()

  def connection_lost(self, exc: Exception | None) -> None:
    """Forgets the connection and its timers."""
    super().connection_lost(exc)
    self._header_timer = _cancelled(self._header_timer)
    self._write_timer = _cancelled(self._write_timer)
    self._all_waiting.pop(self, None)

  def data_received(self, data: bytes) -> None:
    """Parses data; limits the bytes and the time of a header."""
    self._num_unparsed += len(data)
    super().data_received(data)
    if self._num_unparsed > self._settings.max_header:
      self._refuse(*_TOO_LARGE)
    elif self._is_idle and self._header_timer is None:
      self._await_header()
    self._note()

  def eof_received(self) -> bool:  # type: ignore[override]
    """Returns whether the connection stays open, as for a pending answer.

    The client may have closed only its sending half.
    """
    if self._is_idle or self.cycle.more_body:
      return False
    self.cycle.keep_alive = False
    self.loop.call_later(_PROBE_SECONDS, self._probe)
    return True

  def pause_writing(self) -> None:
    """Begins to wait for a client that does not read."""
    super().pause_writing()
    seconds = self._settings.idle_seconds
    self._write_timer = self.loop.call_later(seconds, self.transport.abort)
    self._note()

  def resume_writing(self) -> None:
    """Stops waiting, since the client reads again."""
    super().resume_writing()
    self._write_timer = _cancelled(self._write_timer)
    self._note()

  def on_headers_complete(self) -> None:
    """Begins to answer, unless the header is too large."""
    self._header_timer = _cancelled(self._header_timer)
    self._num_unparsed = 0
    sizes = (len(name) + len(value) + 4 for name, value in self.headers)
    if len(self.url) + sum(sizes) > self._settings.max_header:
      self._refuse(*_TOO_LARGE)
    if self.transport.is_closing() or len(self.pipeline) >= _MOST_PIPELINED:
      # The parser answers with the error.
      raise ValueError('a large header, or too many requests')
    # Connections that do not wait for their client, this one included.
    busy = 1 + len(self.connections) - len(self._all_waiting)
    is_over = busy > self._settings.max_connections
    self.limit_concurrency = 1 if is_over else None  # 1: uvicorn sends 503
    super().on_headers_complete()
    if _is_old(self.cycle):
      send = functools.partial(_send_without_chunks, self.cycle)
      self.cycle.send = send  # type: ignore[method-assign]

  def on_body(self, body: bytes) -> None:
    """Passes on a part of a body, and restarts the count of unparsed bytes."""
    self._num_unparsed = 0
    super().on_body(body)

  def send_400_response(self, msg: str) -> None:
    """Answers a request that the parser refused, unless an error was sent."""
    if not self.transport.is_closing():
      super().send_400_response(msg)

  def on_response_complete(self) -> None:
    """Waits for the next request."""
    super().on_response_complete()
    self._note()

  @property
  def _is_idle(self) -> bool:
    return self.cycle is None or self.cycle.response_complete

  def _note(self) -> None:
    if self._is_idle or self.cycle.more_body or self.flow.write_paused:
      self._all_waiting.setdefault(self)
    else:
      self._all_waiting.pop(self, None)

  def _await_header(self) -> None:
    seconds = self._settings.header_seconds
    self._header_timer = self.loop.call_later(seconds, self._end)

  def _end(self) -> None:
    """Closes the connection, since no header came in time."""
    self._header_timer = None
    if self._num_unparsed:
      self._refuse(*_TOO_LATE)
    else:
      self.transport.close()

  def _refuse(self, status: int, reason: str) -> None:
    """Answers an unfinished header with an error; closes the connection."""
    if self.transport.is_closing():
      return
    body = json.dumps(ApiError(f'{reason}.').body).encode()
    head = (
      f'HTTP/1.1 {status} {reason}\r\nconnection: close\r\n'
      f'content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n'
    )
    self.transport.write(head.encode() + body)
    self.transport.close()

  def _probe(self) -> None:
    """Writes bytes that clients ignore, to find out if this client has left."""
    if self._is_idle or self.transport.is_closing():
      return
    if not self.pipeline:  # else an answer to another request is under way
      if self.cycle.chunked_encoding:
        self.transport.write(_COMMENT)
      elif not self.cycle.response_started and not _is_old(self.cycle):
        self.transport.write(_INTERIM)
    self.loop.call_later(_PROBE_SECONDS, self._probe)


def _cancelled(timer: _Timer) -> _Timer:
  if timer is not None:
    timer.cancel()
  return None


def _is_old(cycle: Any) -> bool:
  return bool(cycle.scope['http_version'] == '1.0')


async def _send_without_chunks(cycle: Any, message: Any) -> None:
  """Sends a message as uvicorn does, but without chunks, which HTTP/1.0 lacks.

  An answer without a length ends when the connection is closed.
  """
  if message['type'] == 'http.response.start':
    if not any(name == b'content-length' for name, _ in message['headers']):
      cycle.chunked_encoding = False
  elif cycle.chunked_encoding is False and not cycle.expected_content_length:
    cycle.expected_content_length = len(message.get('body', b''))
  await type(cycle).send(cycle, message)
