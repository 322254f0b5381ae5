"""Runs a server: uvicorn around the application, its log, its end."""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import importlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specdec_jax import files
from specdec_jax.checks.fields import check_types
from specdec_jax.checks.packages import package
from specdec_jax.drafters.base import Drafter
from specdec_jax.engine.engine import Engine
from specdec_jax.measure import calibration
from specdec_jax.measure.calibration import Calibration
from specdec_jax.models.model import Model
from specdec_jax.serving import drafting, replicas
from specdec_jax.serving.app import Application
from specdec_jax.serving.log import logging_to_stderr, say
from specdec_jax.serving.replicas import ReplicaSettings
from specdec_jax.serving.scheduler import Scheduler
from specdec_jax.serving.settings import ServeSettings, listening_socket

_KEYS = 'SPECDEC_API_KEYS'
_OTHER_FILES = 64  # that a server has open beside its connections
_MOST_KEYS = 1 << 20  # bytes of a file of keys


@dataclasses.dataclass(frozen=True)
class ServeConfig:
  """What `specdec serve` is configured by.

  Attributes:
    engine: makes the engine, of a drafter if it is given one.
    settings: of the server.
    drafter: makes the drafter; None where the engine has its own.
    draft_path: of the drafter's checkpoint; None is no drafter.
    calibration: a file of `specdec calibrate`, which says how long drafts of
      greedy outputs are and which outputs are too short for any, see
      `drafting`; None is the engine's gamma.
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

  def __post_init__(self):
    check_types(self)

  def load(self) -> Engine:
    """Makes the engine."""
    options = {}
    if self.drafter is not None and self.draft_path is not None:
      options['drafter'] = self.drafter()
    return self.engine(**options)


def serve(
  config: ServeConfig, remake: Callable[[], ServeConfig] | None = None
) -> None:
  """Serves until SIGTERM or SIGINT.

  It listens at once, is ready when the programs for one row are compiled, and
  compiles the rest behind. A signal makes it refuse what is new and finish what
  it has taken, see `drain_seconds`.

  Args:
    config: what is served, and how.
    remake: makes `config` in another process, where there are replicas; it is
      sent there.

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
  with logging_to_stderr(), _signals():
    if config.replicas.number:
      made = functools.partial(_remade, remake or (lambda: config))
      replicas.run(made, settings, config.replicas, keys)
    else:
      server = Server(*scheduler_of(config), keys)
      asyncio.run(server.run())


def scheduler_of(config: ServeConfig) -> tuple[Scheduler, str]:
  """Loads the models; returns a scheduler of them, and the model's name.

  Raises:
    ValueError: as `Engine`, `drafting.calibrate` and `Scheduler`.
  """
  measured = _calibration_of(config)
  engine = config.load()
  name = config.settings.model_name or engine.models['target'].name or 'target'
  if measured is not None:
    drafting.calibrate(engine, config.settings, measured)
  scheduler = Scheduler(engine, config.settings, measured)
  say('loaded', model=name, **scheduler.drafting.said)
  return scheduler, name


def _calibration_of(config: ServeConfig) -> Calibration | None:
  return calibration.load(config.calibration) if config.calibration else None


def _remade(remake: Callable[[], ServeConfig]) -> tuple[Scheduler, str]:
  return scheduler_of(remake())


def api_keys(path: str | None) -> list[str]:
  """The keys of a file or, without one, of the environment; [] is none.

  Raises:
    ValueError: there is no such file, or no key in it; or the environment's
      text is not empty and holds no key.
  """
  if path is None:
    given = os.environ.get(_KEYS, '')
    keys = [key.strip() for key in given.split(',') if key.strip()]
    if given and not keys:  # somebody thinks that the server is locked
      raise ValueError(f'Expected keys in {_KEYS}, found none; unset it.')
    return keys
  try:
    lines = files.read_small(path, _MOST_KEYS).decode().splitlines()
  except (OSError, ValueError) as error:
    raise ValueError(f'No keys could be read from {path!r}: {error}') from error
  keys = [line.strip() for line in lines if line.strip()]
  if not keys:
    raise ValueError(f'Expected a key on each line of {path!r}, found none.')
  return keys


class Server:
  """A scheduler behind HTTP.

  Attributes:
    application: what answers.
    port: at which it listens.
  """

  def __init__(self, scheduler: Scheduler, name: str, keys: Sequence[str] = ()):
    """
    Raises:
      ValueError: packages of the extra [serve] are not installed.
      OSError: the port is taken.
    """
    self.application = Application(scheduler, name, keys)
    self._scheduler, self._settings = scheduler, scheduler.settings
    uvicorn = package('A server', 'uvicorn', 'serve')
    package('A server', 'httptools', 'serve')
    from specdec_jax.serving.connections import Connection  # needs uvicorn

    most = _connections(self._settings.max_connections)
    settings = dataclasses.replace(self._settings, max_connections=most)
    self._socket = listening_socket(settings)
    self.port: int = self._socket.getsockname()[1]
    self._uvicorn = uvicorn.Server(
      uvicorn.Config(
        self.application.asgi,
        lifespan='off',
        log_config=None,
        access_log=False,
        server_header=False,
        http=functools.partial(Connection, settings, {}),
        ws='none',
        timeout_keep_alive=settings.idle_seconds,
        timeout_graceful_shutdown=math.ceil(settings.end_seconds),
      )
    )
    self._shutdown = self._uvicorn.shutdown
    self._uvicorn.shutdown = self._drain

  async def run(self) -> None:
    """Serves until a signal, or `stop`.

    Raises:
      RuntimeError: the scheduler failed.
    """
    self._scheduler.start()
    watch = asyncio.create_task(self._watch())
    try:
      await self._uvicorn.serve([self._socket])
    finally:
      watch.cancel()
      self._scheduler.stop()
      await asyncio.to_thread(self._scheduler.join)
      self.application.metrics.close()
      say('stopped')
    if self._scheduler.failure is not None:
      raise RuntimeError(f'The scheduler failed: {self._scheduler.failure}')

  def stop(self) -> None:
    """Ends it as a signal does; any thread may call it."""
    self._uvicorn.should_exit = True

  async def _watch(self) -> None:
    """Says when it is ready, and has all programs; ends it if it fails."""
    begin = time.perf_counter()
    url = f'http://{self._settings.host}:{self.port}'
    say('listening', url=url, model=self.application.name)
    is_ready = is_compiled = False
    while self._scheduler.failure is None:
      seconds = round(time.perf_counter() - begin, 3)
      if not is_ready and self._scheduler.takes_rows:
        is_ready = True
        say('ready', url=url, seconds=seconds)
      if not is_compiled and self._scheduler.is_compiled:
        is_compiled = True
        # What is there by now stays: half a million objects, which would be
        # gone through again and again while requests wait.
        gc.collect()
        gc.freeze()
        say('compiled', url=url, seconds=seconds)
      await asyncio.sleep(0.1)
    self.stop()

  async def _drain(self, sockets: Any = None) -> None:
    """Finishes what was taken, within a limit."""
    self._scheduler.refuse('The server is stopping. Try again later.')
    say('stopping', rows=self._scheduler.num_rows)
    loop = asyncio.get_running_loop()
    loop.call_later(self._settings.drain_seconds, self._scheduler.stop)
    await self._shutdown(sockets)


def _connections(most: int) -> int:
  """How many connections there may be: each is an open file of the process."""
  try:
    resource: Any = importlib.import_module('resource')
  except ImportError:  # not on each system
    return most
  files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = 2 * most + _OTHER_FILES  # see `Connection.connection_made`
  if files < wanted:
    files = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
  if files < wanted:
    most = max(1, (files - _OTHER_FILES) // 2)
    say('few files', open_files=files, max_connections=most)
  return most


@contextlib.contextmanager
def _signals() -> Iterator[None]:
  """Inside, uvicorn is the only one that hears of SIGTERM.

  Commands end at once at SIGTERM, by a thread that is woken by this number; a
  server has something to finish.
  """
  before = signal.set_wakeup_fd(-1)
  try:
    yield
  finally:
    signal.set_wakeup_fd(before)
