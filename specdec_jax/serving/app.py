"""The HTTP application: OpenAI's completions, health and metrics.

Around starlette's routes are request ids, keys, the log and the counters.
"""

import asyncio
import hashlib
import hmac
import pathlib
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
  HTMLResponse,
  JSONResponse,
  Response,
  StreamingResponse,
)
from starlette.routing import Route

from specdec_jax.engine.engine import Engine
from specdec_jax.serving import protocol
from specdec_jax.serving.answer import Answer
from specdec_jax.serving.log import LOG, say
from specdec_jax.serving.metrics import Metrics
from specdec_jax.serving.protocol import ApiError
from specdec_jax.serving.settings import ServeSettings
from specdec_jax.serving.worker import Worker
from specdec_jax.text.chat import ChatTemplate, template_of

# Bytes of a body that another thread reads, as it does a chat, whose template
# may take its time.
_LARGE = 1 << 14
_PAGE = pathlib.Path(__file__).with_name('page.html')
_OWN_ALONE = (  # what the page may load and call: itself
  "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
  " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
  " frame-ancestors 'none'"
)

LEFT = 499  # of a client that left before it had the whole answer
_REQUEST_ID = re.compile(r'[\w.:-]{1,64}', re.ASCII)
_NO_KEY = ApiError(
  'Expected a key of this server, as "Authorization: Bearer KEY".',
  status=401,
  code='invalid_api_key',
)
_WRONG_HOST = ApiError(
  'The Host header does not name this server. Start it with --allowed-hosts and'
  ' the names that clients call it by.',
  status=403,
)
_OTHER_SITE = ApiError(
  "A page of another site may not use this server's models.", status=403
)
_NO_JSON = ApiError(
  'Expected a body with the header "content-type: application/json".',
  status=415,
)
# Status of an error -> header fields of its answer.
_HEADERS = {
  408: {'connection': 'close'},  # the rest of a body that is late
  429: {'retry-after': '1'},
  503: {'retry-after': '5'},
}


class Application:
  """Answers requests by one worker; it is called as ASGI has it.

  Attributes:
    metrics: what it counts.
    name: what requests call the model.
  """

  def __init__(self, worker: Worker, name: str, keys: Sequence[str] = ()):
    """
    Args:
      worker: decodes.
      name: what requests call the model.
      keys: of which each request needs one; none are needed if there are none.
    """
    self._worker, self.name = worker, name
    self._engine: Engine = worker.engine
    self._settings: ServeSettings = worker.settings
    self._keys = [_digest(key.encode()) for key in keys]
    self.metrics = Metrics(worker)
    self._card = {
      'id': name,
      'object': 'model',
      'created': int(time.time()),
      'owned_by': 'specdec_jax',
      'max_input_len': self._engine.config.max_input_len,
      'max_decode_len': self._engine.config.max_decode_len,
      'speculates': worker.speculates,
    }
    self._template, self._no_chat = _template_of(self._engine, name)
    errors = (ApiError, HTTPException, ClientDisconnect, Exception)
    handlers: Any = dict.fromkeys(errors, self._error)
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
      exception_handlers=handlers,
    )

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    """Answers one request; counts and logs it, and ends what it leaves."""
    if scope['type'] != 'http':
      return
    begin = time.perf_counter()
    headers = dict(scope['headers'])
    request_id = headers.get(b'x-request-id', b'').decode('latin-1')
    if not _REQUEST_ID.fullmatch(request_id):
      request_id = secrets.token_hex(8)
    rows: list[Any] = []
    scope['state'] = {'rows': rows}
    status, is_whole = LEFT, False

    async def send_noted(message: Any) -> None:
      nonlocal status, is_whole
      if message['type'] == 'http.response.start':
        status = message['status']
        more = (b'x-request-id', request_id.encode())
        message = message | {'headers': [*message['headers'], more]}
      else:
        is_whole = not message.get('more_body', False)
      await send(message)

    try:
      answer: Any = self._routes
      host = headers.get(b'host', b'').decode('latin-1')
      if not self._settings.answers_to(host):
        answer = JSONResponse(_WRONG_HOST.body, _WRONG_HOST.status)
      elif not self._is_open(scope['path'], headers.get(b'authorization', b'')):
        answer = JSONResponse(_NO_KEY.body, _NO_KEY.status)
      await answer(scope, receive, send_noted)
    except Exception:
      # The application has answered as well as it can.
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

  def _is_open(self, path: str, authorization: bytes) -> bool:
    """Whether a request may pass; all keys are compared, in constant time."""
    if not self._keys or not path.startswith('/v1/'):
      return True
    scheme, _, key = authorization.partition(b' ')
    sent = _digest(key if scheme.lower() == b'bearer' else b'')
    return any([hmac.compare_digest(sent, key) for key in self._keys])

  # Errors.

  async def _error(self, request: Request, error: Any) -> Response:
    if isinstance(error, ClientDisconnect):
      return Response(status_code=LEFT)
    if isinstance(error, HTTPException):
      message = f'{request.method} {request.url.path[:200]}: {error.detail}.'
      error = ApiError(message, status=error.status_code)
    elif not isinstance(error, ApiError):
      message = 'The server could not answer; its log says why.'
      error = ApiError(message, status=500)
    return JSONResponse(error.body, error.status, _HEADERS.get(error.status))

  # What is not decoded.

  async def _page(self, request: Request) -> Response:
    headers = {'content-security-policy': _OWN_ALONE}
    return HTMLResponse(_PAGE.read_text('utf-8'), 200, headers)

  async def _models(self, request: Request) -> Response:
    return JSONResponse({'object': 'list', 'data': [self._card]})

  async def _model(self, request: Request) -> Response:
    protocol.check_model(request.path_params['name'], self.name)
    return JSONResponse(self._card)

  async def _health(self, request: Request) -> Response:
    body = {
      'live': self._worker.failure is None,
      'ready': self._worker.takes_rows,
      'compiled': self._worker.is_compiled,
      'compiling': self._worker.compiling,
    }
    asked_for = 'live' if request.url.path.endswith('/live') else 'ready'
    return JSONResponse(body, 200 if body[asked_for] else 503)

  async def _metrics(self, request: Request) -> Response:
    kind = 'text/plain; version=0.0.4; charset=utf-8'
    return Response(self.metrics.text(), media_type=kind)

  # Completions.

  async def _decoded(self, request: Request) -> Response:
    template = None
    if request.url.path.endswith('/chat/completions'):
      template = self._template
      if template is None:
        raise ApiError(self._no_chat)
    data = await self._body(request)
    loop = asyncio.get_running_loop()

    def read() -> Answer:
      limits = self._settings
      asked = protocol.parse(data, self._engine, limits, self.name, template)
      return Answer(asked, self._worker, self.metrics, self.name, loop)

    is_long = len(data) > _LARGE or template is not None
    # What may say what an output is, whose automaton takes time to make.
    words = b'structured_outputs', b'response_format', b'guided_', b'\\u'
    is_long |= any(word in data for word in words)
    answer = await asyncio.to_thread(read) if is_long else read()
    # Whatever happens, they end with the request.
    request.state.rows.extend(answer.rows)
    self._worker.take(answer.rows)
    self.metrics.taken(answer.num_prompt_tokens)
    if answer.request.stream:
      return StreamingResponse(
        answer.stream(),
        media_type='text/event-stream',
        headers={'cache-control': 'no-cache', 'x-accel-buffering': 'no'},
      )
    whole = asyncio.ensure_future(answer.whole())
    left = asyncio.ensure_future(_left(request))
    try:
      await asyncio.wait({whole, left}, return_when='FIRST_COMPLETED')
      if whole.done():
        return JSONResponse(whole.result())
      return Response(status_code=LEFT)  # nobody reads it
    finally:
      whole.cancel()
      left.cancel()

  async def _classified(self, request: Request) -> Response:
    data = await self._body(request)
    texts, labels = protocol.parse_labels(data, self.name, self._settings)
    async with self._worker.scoring:
      with protocol.naming_the_field('input'):
        rows = await asyncio.to_thread(self._engine.classify, texts, labels)
    found = [
      {
        'index': index,
        'label': labels[row.argmax()],
        'probs': row.tolist(),
        'num_classes': len(labels),
      }
      for index, row in enumerate(rows)
    ]
    return JSONResponse({'object': 'list', 'model': self.name, 'data': found})

  async def _body(self, request: Request) -> bytes:
    """The body of a request that is to do something.

    Browsers send bodies of a few types to other sites without asking these
    first, but not JSON.

    Raises:
      ApiError: a page of another site sends it, it is not said to be JSON, it
        is too large or comes too late.
    """
    if _is_of_another_site(request.headers):
      raise _OTHER_SITE
    kind, *_ = request.headers.get('content-type', '').split(';')
    if kind.strip().lower() != 'application/json':
      raise _NO_JSON
    most, seconds = self._settings.max_body, self._settings.body_seconds
    data = bytearray()
    try:
      async with asyncio.timeout(seconds):
        async for part in request.stream():
          data += part
          if len(data) > most:
            raise ApiError(
              f'The body has more than {most} bytes. Send less at once.',
              status=413,
            )
    except TimeoutError:
      raise ApiError(
        f'The body did not come within {seconds:g} seconds.', status=408
      ) from None
    return bytes(data)


def _template_of(engine: Engine, name: str) -> tuple[ChatTemplate | None, str]:
  """The chat template, and what a chat is told if there is none."""
  try:
    template = template_of(engine.tokenizer)
  except ValueError as error:  # completions need none
    return None, f'{name!r} cannot answer a chat: {error}'
  return template, (
    f'{name!r} has no chat template, so it cannot answer a chat. Send the text'
    ' itself to /v1/completions.'
  )


def _is_of_another_site(headers: Mapping[str, str]) -> bool:
  """Whether a browser sends a request for a page that is not the server's.

  A proxy may change the Host header, so the browser's own word comes first.
  """
  site, origin = headers.get('sec-fetch-site'), headers.get('origin')
  if site is not None:
    return site not in ('same-origin', 'none')
  if origin is None:
    return False
  _, _, host = origin.partition('://')
  return host.lower() != headers.get('host', '').lower()


async def _left(request: Request) -> None:
  """Returns when the client has left; its body has been read."""
  while (await request.receive())['type'] != 'http.disconnect':
    pass


def _digest(key: bytes) -> bytes:
  return hashlib.sha256(key).digest()
