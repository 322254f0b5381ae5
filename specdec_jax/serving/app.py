"""The HTTP application: OpenAI's completions, health and metrics.

starlette has the routes. The application adds request ids, keys, the log and
the counters.
"""

import asyncio
import pathlib
import re
import secrets
import time
from collections.abc import Awaitable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
  HTMLResponse,
  JSONResponse,
  Response,
  StreamingResponse,
)
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from specdec_jax.engine.request import Row
from specdec_jax.serving.access import Access, check_acting
from specdec_jax.serving.answer import Answer, Service
from specdec_jax.serving.log import LOG, say
from specdec_jax.serving.metrics import Metrics
from specdec_jax.serving.protocol import ApiError, Parser
from specdec_jax.serving.turns import Turns
from specdec_jax.serving.worker import Worker

# Another thread reads bodies of more bytes; chats, whose template may be slow;
# and bodies that may constrain outputs, whose automaton is slow to make.
_LARGE = 1 << 14
_CONSTRAINTS = b'structured_outputs', b'response_format', b'guided_', b'\\u'
_PAGE = pathlib.Path(__file__).with_name('page.html')
_ITSELF_ALONE = (  # what the page may load and call
  "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
  " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
  " frame-ancestors 'none'"
)
LEFT = 499  # status of a client that left before it had the whole answer
_REQUEST_ID = re.compile(r'[\w.:-]{1,64}', re.ASCII)
# Status of an error -> header fields of its answer.
_HEADERS = {
  408: {'connection': 'close'},  # the rest of a body that is late
  429: {'retry-after': '1'},
  503: {'retry-after': '5'},
}


class Application:
  """An ASGI application that answers requests by one worker.

  Attributes:
    metrics: the counters.
    name: the name by which requests call the model.
  """

  def __init__(self, worker: Worker, name: str, keys: Sequence[str] = ()):
    """Makes the routes.

    Args:
      worker: decodes.
      name: the name by which requests call the model.
      keys: each request needs one of them; without any, it needs none.
    """
    engine, settings = worker.engine, worker.settings
    self._worker, self._settings, self.name = worker, settings, name
    self._access, self.metrics = Access(settings, keys), Metrics(worker)
    self._parser = Parser(engine, settings, name)
    self._turns = Turns(engine, settings.max_seconds)
    self._service = Service(worker, self._turns, self.metrics, name)
    self._card = {
      'id': name,
      'object': 'model',
      'created': int(time.time()),
      'owned_by': 'specdec_jax',
      'max_input_len': engine.config.max_input_len,
      'max_decode_len': engine.config.max_decode_len,
      'speculates': worker.speculates,
    }
    errors = (ApiError, HTTPException, ClientDisconnect, Exception)
    self._routes = Starlette(
      routes=[
        Route('/', self._page),
        Route('/v1/completions', self._decoded, methods=['POST']),
        Route('/v1/chat/completions', self._decoded, methods=['POST']),
        Route('/v1/classify', self._classified, methods=['POST']),
        Route('/v1/models', self._models),
        Route('/v1/models/{name:path}', self._model),
        Route('/health', self._health),
        Route('/health/live', self._health),
        Route('/health/ready', self._health),
        Route('/metrics', self._metrics),
      ],
      exception_handlers=dict.fromkeys(errors, _answer_to_error),
    )

  def close(self) -> None:
    """Ends the worker, and the requests that it still has."""
    self._worker.stop()
    self._worker.join()
    self.metrics.close()

  def check(self) -> None:
    """Raises RuntimeError if the worker has failed."""
    if self._worker.failure is not None:
      raise RuntimeError(f'The scheduler failed: {self._worker.failure}')

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request, counts it, logs it, and cancels what is left of it."""
    if scope['type'] != 'http':
      return
    begin, headers = time.perf_counter(), Headers(scope=scope)
    request_id = headers.get('x-request-id', '')
    if not _REQUEST_ID.fullmatch(request_id):
      request_id = secrets.token_hex(8)
    rows: list[Row] = []
    scope['state'] = {'rows': rows}
    status, is_whole = LEFT, False

    async def send_noted(message: Message) -> None:
      nonlocal status, is_whole
      if message['type'] == 'http.response.start':
        status = message['status']
        more = (b'x-request-id', request_id.encode())
        message = {**message, 'headers': [*message['headers'], more]}
      else:
        is_whole = not message.get('more_body', False)
      await send(message)

    try:
      refusal = self._access.refusal(scope['path'], headers)
      answer = _response(refusal) if refusal else self._routes
      await answer(scope, receive, send_noted)
    except Exception:
      # The client has been told, if it still could be.
      LOG.exception('request %s failed', request_id)
      status, is_whole = 500, True
    finally:
      status = status if is_whole else LEFT
      self._worker.cancel(rows)
      self.metrics.requests.labels(status=str(status)).inc()
      say(
        'request',
        id=request_id,
        method=scope['method'],
        path=scope['path'][:200],
        status=status,
        outputs=len(rows),
        seconds=round(time.perf_counter() - begin, 6),
      )

  async def _page(self, request: Request) -> Response:
    headers = {'content-security-policy': _ITSELF_ALONE}
    return HTMLResponse(_PAGE.read_text('utf-8'), 200, headers)

  async def _models(self, request: Request) -> Response:
    return JSONResponse({'object': 'list', 'data': [self._card]})

  async def _model(self, request: Request) -> Response:
    self._parser.check_model(request.path_params['name'])
    return JSONResponse(self._card)

  async def _health(self, request: Request) -> Response:
    body = {
      'live': self._worker.failure is None,
      'ready': self._worker.takes_rows,
      'compiled': self._worker.is_compiled,
      'compiling': self._worker.compiling,
    }
    name = 'live' if request.url.path.endswith('/live') else 'ready'
    return JSONResponse(body, 200 if body[name] else 503)

  async def _metrics(self, request: Request) -> Response:
    kind = 'text/plain; version=0.0.4; charset=utf-8'
    return Response(self.metrics.text(), media_type=kind)

  async def _decoded(self, request: Request) -> Response:
    """Answers a request for completions, or for the next message of a chat."""
    is_chat = request.url.path.endswith('/chat/completions')
    data, loop = await self._body(request), asyncio.get_running_loop()

    def read() -> Answer:
      body = self._parser.completion(data, is_chat)
      return Answer(body, self._service, loop)

    is_slow = len(data) > _LARGE or is_chat
    is_slow |= any(word in data for word in _CONSTRAINTS)
    answer = await asyncio.to_thread(read) if is_slow else read()
    # When the request ends, for any reason, these rows are cancelled.
    request.state.rows.extend(answer.rows)
    self._worker.take(answer.rows)
    self.metrics.taken(answer.num_prompt_tokens)
    if answer.request.stream:
      return StreamingResponse(
        answer.stream(),
        media_type='text/event-stream',
        headers={'cache-control': 'no-cache', 'x-accel-buffering': 'no'},
      )
    return await _unless_left(request, answer.whole())

  async def _classified(self, request: Request) -> Response:
    """Answers a request for the likeliest label of texts."""
    data = await self._body(request)
    texts, labels = self._parser.labels(data)

    async def classified() -> dict[str, Any]:
      rows = await self._turns.classify(texts, labels)
      choices = [
        {
          'index': index,
          'label': labels[row.argmax()],
          'probs': row.tolist(),
          'num_classes': len(labels),
        }
        for index, row in enumerate(rows)
      ]
      return {'object': 'list', 'model': self.name, 'data': choices}

    return await _unless_left(request, classified())

  async def _body(self, request: Request) -> bytes:
    """Returns the body of a POST request.

    Raises:
      ApiError: `check_acting` refuses the request, or the body is too large or
        comes too late.
    """
    check_acting(request.headers)
    limit, seconds = self._settings.max_body, self._settings.body_seconds
    data = bytearray()
    try:
      async with asyncio.timeout(seconds):
        async for part in request.stream():
          data += part
          if len(data) > limit:
            message = (
              f'The body has more than {limit} bytes. Send less at once.'
            )
            raise ApiError(message, status=413)
    except TimeoutError:
      message = f'The body did not come within {seconds:g} seconds.'
      raise ApiError(message, status=408) from None
    return bytes(data)


async def _answer_to_error(request: Request, error: Exception) -> Response:
  if isinstance(error, ClientDisconnect):
    return Response(status_code=LEFT)
  if isinstance(error, HTTPException):
    message = f'{request.method} {request.url.path[:200]}: {error.detail}.'
    error = ApiError(message, status=error.status_code)
  elif not isinstance(error, ApiError):
    message = 'The server could not answer; its log says why.'
    error = ApiError(message, status=500)
  return _response(error)


def _response(error: ApiError) -> Response:
  return JSONResponse(error.body, error.status, _HEADERS.get(error.status))


async def _unless_left(
  request: Request, answer: Awaitable[dict[str, Any]]
) -> Response:
  """Awaits an answer, which is cancelled if its client leaves."""
  whole = asyncio.ensure_future(answer)
  left = asyncio.ensure_future(_left(request))
  try:
    await asyncio.wait({whole, left}, return_when='FIRST_COMPLETED')
    if whole.done():
      return JSONResponse(whole.result())
    return Response(status_code=LEFT)
  finally:
    whole.cancel()
    left.cancel()


async def _left(request: Request) -> None:
  """Waits until the client leaves; its body has been read before."""
  while (await request.receive())['type'] != 'http.disconnect':
    pass
