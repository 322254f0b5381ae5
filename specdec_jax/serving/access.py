"""Decides whether a request may use a server: by its host, key and site."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from specdec_jax.serving.protocol import ApiError
from specdec_jax.serving.settings import ServeSettings


class Access:
  """Decides whether a request is answered at all."""

  def __init__(self, settings: ServeSettings, keys: Sequence[str]):
    """Takes the settings and the keys; without keys, no request needs one."""
    self._settings = settings
    self._keys = [_digest(key.encode()) for key in keys]

  def refusal(self, path: str, headers: Mapping[str, str]) -> ApiError | None:
    """Returns the error of a request for a path; None if it may pass."""
    if not self._settings.answers_to(headers.get('host', '')):
      return ApiError(
        'The Host header does not name this server. Start it with'
        ' --allowed-hosts and the names that clients call it by.',
        status=403,
      )
    if path.startswith('/v1/') and not self._has_key(headers):
      return ApiError(
        'Expected a key of this server, as "Authorization: Bearer KEY".',
        status=401,
        code='invalid_api_key',
      )
    return None

  def _has_key(self, headers: Mapping[str, str]) -> bool:
    """Returns whether a request has a key; it takes as long if it has none."""
    scheme, _, key = headers.get('authorization', '').partition(' ')
    sent = _digest(key.encode('latin-1') if scheme.lower() == 'bearer' else b'')
    same = [hmac.compare_digest(sent, key) for key in self._keys]
    return any(same) or not same


def check_acting(headers: Mapping[str, str]) -> None:
  """Refuses a request that the page of another site sends.

  Browsers send bodies of a few types to other sites without asking these first,
  but not JSON.

  Raises:
    ApiError: a page of another site sends it, or no header says that it is
      JSON.
  """
  if _is_of_another_site(headers):
    message = "A page of another site may not use this server's models."
    raise ApiError(message, status=403)
  kind, *_ = headers.get('content-type', '').split(';')
  if kind.strip().lower() != 'application/json':
    message = (
      'Expected a body with the header "content-type: application/json".'
    )
    raise ApiError(message, status=415)


def _is_of_another_site(headers: Mapping[str, str]) -> bool:
  """Returns whether a browser sends a request for a page of another site.

  A proxy may change the Host header, so the browser's own Sec-Fetch-Site is
  read first.
  """
  site, origin = headers.get('sec-fetch-site'), headers.get('origin')
  if site is not None:
    return site not in ('same-origin', 'none')
  if origin is None:
    return False
  _, _, host = origin.partition('://')
  return host.lower() != headers.get('host', '').lower()


def _digest(key: bytes) -> bytes:
  return hashlib.sha256(key).digest()
