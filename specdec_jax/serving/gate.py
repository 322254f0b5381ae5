"""What is around the application: request ids, keys, the log, what is left."""

import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any

from specdec_jax.serving.log import LOG
from specdec_jax.serving.metrics import Metrics
from specdec_jax.serving.protocol import error_object
from specdec_jax.serving.scheduler import Scheduler

LEFT = 499  # of a client that left before it had the whole answer
_REQUEST_ID = re.compile(r'[\w.:-]{1,64}', re.ASCII)


class Gate:
  """Around an application: request ids, keys, the log, what is left behind."""

  def __init__(
    self,
    inner: Any,
    scheduler: Scheduler,
    metrics: Metrics,
    keys: Sequence[str],
  ):
    self._inner, self._scheduler, self._metrics = inner, scheduler, metrics
    self._keys = [_digest(key.encode()) for key in keys]

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    """Answers one request."""
    if scope['type'] != 'http':
      return
    begin = time.perf_counter()
    headers = dict(scope['headers'])
    given = headers.get(b'x-request-id', b'').decode('latin-1')
    request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
    scope['state'] = state = dict(scope.get('state') or {})
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
      if self._is_open(scope['path'], headers.get(b'authorization', b'')):
        await self._inner(scope, receive, send_noted)
      else:
        await _refuse(send_noted)
    except Exception:
      # The application has answered as well as it can.
      LOG.exception('request %s failed', request_id)
      status, is_whole = 500, True
    finally:
      status = status if is_whole else LEFT
      self._scheduler.cancel(state.get('rows', ()))
      self._metrics.requests.labels(status=str(status)).inc()
      LOG.info(
        'request',
        extra={
          'said': {
            'id': request_id,
            'method': scope['method'],
            'path': scope['path'][:200],
            'status': status,
            'outputs': state.get('outputs', 0),
            'seconds': round(time.perf_counter() - begin, 6),
          }
        },
      )

  def _is_open(self, path: str, authorization: bytes) -> bool:
    """Whether a request may pass; all keys are compared, in constant time."""
    if not self._keys or not path.startswith('/v1/'):
      return True
    scheme, _, key = authorization.partition(b' ')
    given = _digest(key if scheme.lower() == b'bearer' else b'')
    found = [hmac.compare_digest(given, key) for key in self._keys]
    return any(found)


def _digest(key: bytes) -> bytes:
  return hashlib.sha256(key).digest()


async def _refuse(send: Any) -> None:
  message = 'Expected a key of this server, as "Authorization: Bearer KEY".'
  body = error_object(message, 'authentication_error', None, 'invalid_api_key')
  headers = [(b'content-type', b'application/json')]
  start = {'type': 'http.response.start', 'status': 401, 'headers': headers}
  await send(start)
  await send({'type': 'http.response.body', 'body': json.dumps(body).encode()})
