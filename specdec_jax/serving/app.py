"""The HTTP application: OpenAI's completions, health and metrics.

starlette routes the requests. The application refuses a request with a wrong
Host header or key, or from a page of another site. It also adds request ids,
the log and the counters.
"""

import asyncio
import hashlib
import hmac
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
from starlette.responses import HTMLResponse as Html
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from specdec_jax.engine.request import Row
from specdec_jax.serving.answer import Answer, Turns
from specdec_jax.serving.metrics import Metrics
from specdec_jax.serving.protocol import ApiError, Parser
from specdec_jax.serving.settings import LOG, say
from specdec_jax.serving.worker import Worker

# Another thread parses bodies of more than `_LARGE` bytes, chats (a template
# may be slow), and bodies with one of `_CONSTRAINTS` (the automaton of
# permitted outputs is slow to make).
_LARGE = 1 << 14
_CONSTRAINTS = b'structured_outputs', b'response_format', b'guided_', b'\\u'
_PAGE = pathlib.Path(__file__).with_name('page.html')
_ITSELF_ALONE = {  # what the page may load and call
  'content-security-policy': "default-src 'none'; style-src 'unsafe-inline';"
  " script-src 'unsafe-inline'; connect-src 'self'; img-src data:;"
  " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}
LEFT = 499  # status of a client that left before it had the whole answer
_REQUEST_ID = re.compile(r'[\w.:-]{1,64}', re.ASCII)
# Status of an error -> header fields of its answer.
_HEADERS = {
  408: {'connection': 'close'},  # the rest of the late body is not read
  429: {'retry-after': '1'},
  503: {'retry-after': '5'},
}


class Application:
  """An ASGI application that answers requests with one worker.

  Attributes:
    metrics: the server's counters.
    name: the name by which requests call the model.
  """

  def __init__(self, worker: Worker, name: str, keys: Sequence[str] = ()):
    """Makes the routes.

    Args:
      worker: decodes the requests.
      name: the name by which requests call the model.
      keys: API keys, of which each request needs one; empty: none is needed.
    """
    engine, settings = worker.engine, worker.settings
    self._worker, self._settings, self.name = worker, settings, name
    self._keys = [_digest(key.encode()) for key in keys]
    self.metrics, self._parser = Metrics(worker), Parser(engine, settings, name)
    self._turns = Turns(engine, settings.max_seconds)
    card = {
      'id': name,
      'object': 'model',
      'created': int(time.time()),
      'owned_by': 'specdec_jax',
      'speculates': worker.speculates,
      'max_input_len': engine.config.max_input_len,
      'max_decode_len': engine.config.max_decode_len,
    }
    page = Html(_PAGE.read_text('utf-8'), headers=_ITSELF_ALONE)
    cards = JSONResponse({'object': 'list', 'data': [card]})

    async def named(request: Request) -> Response:
      self._parser.check_model(request.path_params['name'])
      return JSONResponse(card)

    errors = (ApiError, HTTPException, ClientDisconnect, Exception)
    self._routes = Starlette(
      routes=[
        Route('/', page, methods=['GET']),
        Route('/v1/completions', self._decoded, methods=['POST']),
        Route('/v1/chat/completions', self._decoded, methods=['POST']),
        Route('/v1/classify', self._classified, methods=['POST']),
        Route('/v1/models', cards, methods=['GET']),
        Route('/v1/models/{name:path}', named),
        *(Route(f'/health{x}', self._health) for x in ('', '/live', '/ready')),
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
    """Answers, counts and logs a request; cancels its unfinished rows."""
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
      refusal = self._refusal(scope['path'], headers)
      answer = _response(refusal) if refusal else self._routes
      await answer(scope, receive, send_noted)
    except Exception:
      # The client has got an error, unless it had left.
      LOG.exception('request %s failed', request_id)
      status, is_whole = 500, True
    finally:
      status = status if is_whole else LEFT
      self._worker.cancel(rows)
      self.metrics.requests.labels(status=str(status)).inc()
      seconds = round(time.perf_counter() - begin, 6)
      line = {'method': scope['method'], 'path': scope['path'][:200]}
      answered = {'outputs': len(rows), 'seconds': seconds}
      say('request', id=request_id, **line, status=status, **answered)

  def _refusal(self, path: str, headers: Headers) -> ApiError | None:
    """Returns the error for a wrong Host header or key; None if both pass."""
    if not self._settings.answers_to(headers.get('host', '')):
      message = 'The Host header does not name this server. Start it with'
      message += ' --allowed-hosts and the names that clients call it by.'
      return ApiError(message, status=403)
    scheme, _, key = headers.get('authorization', '').partition(' ')
    sent = _digest(key.encode('latin-1') if scheme.lower() == 'bearer' else b'')
    # The comparison takes the same time for right, wrong and missing keys.
    same = [hmac.compare_digest(sent, key) for key in self._keys]
    if path.startswith('/v1/') and same and not any(same):
      message = 'Expected a key of this server, as "Authorization: Bearer KEY".'
      return ApiError(message, status=401, code='invalid_api_key')
    return None

  async def _health(self, request: Request) -> Response:
    worker = self._worker
    body = {
      'live': worker.failure is None,
      'ready': worker.takes_rows,
      'compiled': worker.is_compiled,
      'compiling': worker.compiling,
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
      return Answer(
        body, self._worker, self._turns, self.metrics, self.name, loop
      )

    is_slow = len(data) > _LARGE or is_chat
    is_slow |= any(word in data for word in _CONSTRAINTS)
    answer = await asyncio.to_thread(read) if is_slow else read()
    # When the request ends, for any reason, these rows are cancelled.
    request.state.rows.extend(answer.rows)
    self._worker.take(answer.rows)
    self.metrics.taken(answer.num_prompt_tokens)
    if answer.request.stream:
      headers = {'cache-control': 'no-cache', 'x-accel-buffering': 'no'}
      kind = 'text/event-stream'
      return StreamingResponse(answer.stream(), 200, headers, kind)
    return await _unless_left(request, answer.whole())

  async def _classified(self, request: Request) -> Response:
    """Answers a request for the likeliest label of each text."""
    data = await self._body(request)
    texts, labels = self._parser.labels(data)

    async def classified() -> dict[str, Any]:
      rows = await self._turns.classify(texts, labels)
      choices = []
      for index, row in enumerate(rows):
        choice = {'index': index, 'label': labels[row.argmax()]}
        choice |= {'probs': row.tolist(), 'num_classes': len(labels)}
        choices.append(choice)
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
            message = f'The body has more than {limit} bytes. Send less.'
            raise ApiError(message, status=413)
    except TimeoutError:
      message = f'The body did not come within {seconds:g} seconds.'
      raise ApiError(message, status=408) from None
    return bytes(data)


def check_acting(headers: Headers) -> None:
  """Refuses a request that the page of another site sends.

  A browser sends bodies of a few types to another site without first asking
  that site for permission. JSON is none of these types.

  Raises:
    ApiError: a page of another site sends the request, or its header does not
      say that the body is JSON.
  """
  site, origin = headers.get('sec-fetch-site'), headers.get('origin')
  is_of_another = False  # programs that are no browsers send neither header
  if site is not None:  # comes first, since a proxy may change the Host header
    is_of_another = site not in ('same-origin', 'none')
  elif origin is not None:
    _, _, host = origin.partition('://')
    is_of_another = host.lower() != headers.get('host', '').lower()
  if is_of_another:
    message = "A page of another site may not use this server's models."
    raise ApiError(message, status=403)
  kind, *_ = headers.get('content-type', '').split(';')
  if kind.strip().lower() != 'application/json':
    message = 'Expected the header "content-type: application/json".'
    raise ApiError(message, status=415)


def _digest(key: bytes) -> bytes:
  return hashlib.sha256(key).digest()


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

  async def client_left() -> None:
    while (await request.receive())['type'] != 'http.disconnect':
      pass  # other messages are parts of the body, which was read before

  whole = asyncio.ensure_future(answer)
  left = asyncio.ensure_future(client_left())
  try:
    await asyncio.wait({whole, left}, return_when='FIRST_COMPLETED')
    if whole.done():
      return JSONResponse(whole.result())
    return Response(status_code=LEFT)
  finally:
    whole.cancel()
    left.cancel()
