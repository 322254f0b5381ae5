"""The HTTP application: OpenAI's completions, health and metrics.

`Application.asgi` is one of starlette's, with a `Gate` around it.
"""

import asyncio
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from specdec_jax.checks.packages import package
from specdec_jax.engine.engine import Engine
from specdec_jax.serving import protocol
from specdec_jax.serving.answer import Answer, Ended
from specdec_jax.serving.gate import LEFT, Gate
from specdec_jax.serving.metrics import Metrics
from specdec_jax.serving.protocol import (
  BadRequest,
  error_object,
)
from specdec_jax.serving.scheduler import Busy, Scheduler, Stopped
from specdec_jax.serving.settings import ServeSettings
from specdec_jax.text.chat import ChatTemplate, template_of

_LARGE = 1 << 14  # bytes of a body that another thread reads
_PAGE = pathlib.Path(__file__).with_name('page.html')
_OWN_ALONE = (  # what the page may load and call: itself
  "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
  " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
  " frame-ancestors 'none'"
)


class Application:
  """Answers requests by one scheduler.

  Attributes:
    asgi: the application, for uvicorn.
    metrics: what it counts.
    name: what requests call the model.
  """

  def __init__(self, scheduler: Scheduler, name: str, keys: Sequence[str] = ()):
    """
    Args:
      scheduler: decodes.
      name: what requests call the model.
      keys: of which each request needs one; none are needed if there are none.

    Raises:
      ValueError: the packages of the extra [serve] are not installed.
    """
    applications = package('A server', 'starlette.applications', 'serve')
    errors = package('A server', 'starlette.exceptions', 'serve')
    requests = package('A server', 'starlette.requests', 'serve')
    route = package('A server', 'starlette.routing', 'serve').Route
    self._responses = package('A server', 'starlette.responses', 'serve')
    self._scheduler, self.name = scheduler, name
    self._engine: Engine = scheduler.engine
    self._settings: ServeSettings = scheduler.settings
    self.metrics = Metrics(scheduler)
    self._began = int(time.time())
    self._template, self._no_chat = _template_of(self._engine, name)
    inner = applications.Starlette(
      routes=[
        route('/', self._page),
        route('/v1/completions', self._completions, methods=['POST']),
        route('/v1/chat/completions', self._chat, methods=['POST']),
        route('/v1/models', self._models),
        route('/health', self._ready),
        route('/health/live', self._live),
        route('/health/ready', self._ready),
        route('/metrics', self._metrics),
      ],
      exception_handlers={
        BadRequest: self._bad_request,
        Busy: self._busy,
        Stopped: self._stopped,
        Ended: self._ended,
        requests.ClientDisconnect: self._left_early,
        errors.HTTPException: self._no_such_thing,
        Exception: self._failed,
      },
    )
    self.asgi = Gate(inner, scheduler, self.metrics, keys)

  def _json(self, body: Any, status: int = 200, **headers: str) -> Any:
    return self._responses.Response(
      json.dumps(body),
      status,
      {name.replace('_', '-'): value for name, value in headers.items()},
      'application/json',
    )

  # Errors.

  async def _bad_request(self, request: Any, error: BadRequest) -> Any:
    # The rest of a body that is late would only keep the connection.
    close = {'connection': 'close'} if error.status == 408 else {}
    return self._json(error.body, error.status, **close)

  async def _busy(self, request: Any, error: Busy) -> Any:
    body = error_object(str(error), 'rate_limit_error', None, 'queue_full')
    return self._json(body, 429, retry_after=str(error.retry_after))

  async def _stopped(self, request: Any, error: Stopped) -> Any:
    body = error_object(str(error), 'server_error')
    return self._json(body, 503, retry_after='5')

  async def _ended(self, request: Any, error: Ended) -> Any:
    return self._json(error.body, error.status)

  async def _left_early(self, request: Any, error: Exception) -> Any:
    return self._responses.Response(status_code=LEFT)

  async def _no_such_thing(self, request: Any, error: Any) -> Any:
    message = f'{request.method} {request.url.path[:200]}: {error.detail}.'
    body = error_object(message, 'invalid_request_error')
    return self._json(body, error.status_code)

  async def _failed(self, request: Any, error: Exception) -> Any:
    message = 'The server could not answer; its log says why.'
    return self._json(error_object(message, 'server_error'), 500)

  # What is not decoded.

  async def _page(self, request: Any) -> Any:
    headers = {'content-security-policy': _OWN_ALONE}
    return self._responses.HTMLResponse(_PAGE.read_text('utf-8'), 200, headers)

  async def _models(self, request: Any) -> Any:
    one = {
      'id': self.name,
      'object': 'model',
      'created': self._began,
      'owned_by': 'specdec_jax',
      'max_input_len': self._engine.max_input_len,
      'max_decode_len': self._engine.max_decode_len,
      'speculates': self._scheduler.speculates,
    }
    return self._json({'object': 'list', 'data': [one]})

  async def _live(self, request: Any) -> Any:
    live = self._scheduler.failure is None
    return self._json({'live': live}, 200 if live else 503)

  async def _ready(self, request: Any) -> Any:
    live = self._scheduler.failure is None
    ready = self._scheduler.takes_rows
    body = {'live': live, 'ready': ready}
    body['compiled'] = self._scheduler.is_compiled
    return self._json(body, 200 if ready else 503)

  async def _metrics(self, request: Any) -> Any:
    kind = 'text/plain; version=0.0.4; charset=utf-8'
    return self._responses.Response(self.metrics.text(), media_type=kind)

  # Completions.

  async def _chat(self, request: Any) -> Any:
    if self._template is None:
      raise BadRequest(self._no_chat)
    return await self._decoded(request, self._template)

  async def _completions(self, request: Any) -> Any:
    return await self._decoded(request, None)

  async def _decoded(self, request: Any, template: ChatTemplate | None) -> Any:
    data = await self._body(request)
    loop = asyncio.get_running_loop()
    if len(data) > _LARGE:
      answer = await asyncio.to_thread(self._answer, data, loop, template)
    else:
      answer = self._answer(data, loop, template)
    state = request.scope['state']
    state['rows'] = answer.rows  # the gate ends them, whatever happens
    state['outputs'] = len(answer.rows)
    self._scheduler.submit(answer.rows)
    self.metrics.asked(answer.num_prompt_tokens)
    if answer.asked.stream:
      return self._responses.StreamingResponse(
        answer.stream(),
        media_type='text/event-stream',
        headers={'cache-control': 'no-cache', 'x-accel-buffering': 'no'},
      )
    whole = asyncio.ensure_future(answer.whole())
    left = asyncio.ensure_future(_left(request))
    try:
      await asyncio.wait({whole, left}, return_when='FIRST_COMPLETED')
      if whole.done():
        return self._json(whole.result())
      return self._responses.Response(status_code=LEFT)  # nobody reads it
    finally:
      whole.cancel()
      left.cancel()

  def _answer(
    self,
    data: bytes,
    loop: asyncio.AbstractEventLoop,
    template: ChatTemplate | None,
  ) -> 'Answer':
    body = protocol.parse_json(data)
    given = body, self._engine, self._settings, self.name
    if template is None:
      asked = protocol.parse(*given)
    else:
      asked = protocol.parse_chat(*given, template)
    return Answer(asked, self._scheduler, self.metrics, self.name, loop)

  async def _body(self, request: Any) -> bytes:
    most, seconds = self._settings.max_body, self._settings.body_seconds
    data = bytearray()
    try:
      async with asyncio.timeout(seconds):
        async for part in request.stream():
          data += part
          if len(data) > most:
            raise BadRequest(
              f'The body has more than {most} bytes. Send less at once.',
              status=413,
            )
    except TimeoutError:
      raise BadRequest(
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


async def _left(request: Any) -> None:
  """Returns when the client has left; its body has been read."""
  while (await request.receive())['type'] != 'http.disconnect':
    pass
