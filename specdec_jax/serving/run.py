"""Runs a server: loads the models, and serves until a signal."""

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable, Iterator

from specdec_jax import files
from specdec_jax.checks.fields import Checked, package, unexpected
from specdec_jax.drafters.base import Drafter
from specdec_jax.engine import calibration
from specdec_jax.engine.calibration import Calibration
from specdec_jax.engine.engine import Engine
from specdec_jax.models.model import Model
from specdec_jax.serving import replicas
from specdec_jax.serving.log import logging_to_stderr, say
from specdec_jax.serving.replicas import ReplicaSettings
from specdec_jax.serving.settings import ServeSettings
from specdec_jax.serving.worker import Worker

_KEYS = 'SPECDEC_API_KEYS'
_MOST_KEYS = 1 << 20  # bytes of a file of keys


@dataclasses.dataclass(frozen=True)
class ServeConfig(Checked):
  """The configuration of `specdec serve`.

  Attributes:
    engine: makes the engine; with the argument `drafter`, for that drafter.
    settings: the settings of the server.
    drafter: makes the drafter; None: `engine` makes one, or there is none.
    draft_path: the path of the drafter's checkpoint; None: no drafter.
    calibration: a file of `specdec calibrate`, which has the lengths of greedy
      drafts, and the length of outputs from which on a drafter pays; None: the
      engine's gamma holds.
    replicas: how many servers there are, if there are several.

  Raises:
    ValueError: a value has the wrong type.
  """

  engine: Callable[..., Engine]
  settings: ServeSettings = ServeSettings()
  drafter: Callable[[], Drafter | Model] | None = None
  draft_path: str | None = None
  calibration: str | None = None
  replicas: ReplicaSettings = ReplicaSettings()


def serve(
  config: ServeConfig, remake: Callable[[], ServeConfig] | None = None
) -> None:
  """Serves until SIGTERM or SIGINT.

  The server listens at once, is ready when the programs for one row are
  compiled, and then compiles the others. After a signal it refuses new requests
  and finishes those that it has taken, see `drain_seconds`.

  Args:
    config: the configuration.
    remake: makes `config` in the process of a replica, to which it is sent.

  Raises:
    ValueError: a value is out of range, packages of the extras [serve] or [ray]
      are not installed, or the keys cannot be read.
    OSError: the port is taken.
    replicas.ReplicasError: no replica could be started.
  """
  settings = config.settings
  for name in ('uvicorn', 'starlette', 'prometheus_client', 'httptools'):
    package('A server', name, 'serve')  # before models are loaded
  keys = api_keys(settings.api_key_file)
  _calibration_of(config)  # before models are loaded, too
  with logging_to_stderr():
    if config.replicas.number:
      make = remake or (lambda: config)
      replicas.run(lambda: worker_of(make()), settings, config.replicas, keys)
    else:
      from specdec_jax.serving.server import Server  # needs the extra

      server = Server(*worker_of(config), keys)
      with _sigterm_once():
        asyncio.run(server.serve())


def worker_of(config: ServeConfig) -> tuple[Worker, str]:
  """Loads the models; returns a worker that decodes, and the model's name.

  Raises:
    ValueError: as for `Engine` and `Worker`.
  """
  measured = _calibration_of(config)
  options = {}
  if config.drafter is not None and config.draft_path is not None:
    options['drafter'] = config.drafter()
  engine = config.engine(**options)
  name = config.settings.model_name or engine.models['target'].name or 'target'
  worker = Worker(engine, config.settings, measured)
  say(
    'loaded',
    model=name,
    gammas=worker.ordinary.policy.gammas,
    least_length=worker.least_length,
  )
  return worker, name


def _calibration_of(config: ServeConfig) -> Calibration | None:
  return calibration.load(config.calibration) if config.calibration else None


def api_keys(path: str | None) -> list[str]:
  """Returns the keys of a file or, without one, of the environment.

  Raises:
    ValueError: there is no such file, or no key in it; or the environment's
      text is not empty and holds no key.
  """
  text = os.environ.get(_KEYS, '').replace(',', '\n')
  if path is not None:
    try:
      text = files.read_small(path, _MOST_KEYS).decode()
    except (OSError, ValueError) as error:
      message = f'No keys could be read from {path!r}: {error}'
      raise ValueError(message) from error
  keys = [line.strip() for line in text.splitlines() if line.strip()]
  if not keys and (path is not None or text):
    # The user believes that the server needs a key.
    raise unexpected(
      path or _KEYS, 'one key or more', text, 'Give or unset it.'
    )
  return keys


@contextlib.contextmanager
def _sigterm_once() -> Iterator[None]:
  """Ignores SIGTERM, which uvicorn raises again after it has stopped."""
  before = signal.signal(signal.SIGTERM, lambda *_: None)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, before)
