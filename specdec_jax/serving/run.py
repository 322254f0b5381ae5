"""Runs one server, or several behind one address, until a signal.

Several servers are replicas, which Ray Serve keeps running. Each is the
application of `specdec serve` with its worker, in a process of its own, on any
machine of a Ray cluster. Ray listens at the address, passes each request to a
replica, and replaces a replica that has failed.
"""

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from specdec_jax import files
from specdec_jax.checks.fields import Checked, package, unexpected
from specdec_jax.drafters.base import Drafter
from specdec_jax.engine import calibration
from specdec_jax.engine.calibration import Calibration
from specdec_jax.engine.engine import Engine
from specdec_jax.models.model import Model
from specdec_jax.serving.settings import (
  ServeSettings,
  listening_socket,
  logging_to_stderr,
  say,
  say_since,
)
from specdec_jax.serving.worker import Worker
from specdec_jax.types import Amount, Count

_KEYS = 'SPECDEC_API_KEYS'
_MOST_KEYS = 1 << 20  # the most bytes of a file of keys
NAME = 'specdec'  # Ray shows the application and its deployment by this name
_HEALTH_SECONDS = 2.0  # between two checks of a replica
_LOOK_SECONDS = 0.1
_SIGNALS = signal.SIGTERM, signal.SIGINT
_CONNECT_SECONDS = 5.0  # within which a cluster must answer
_LAST_SECONDS = 5.0  # within which Ray notices that a replica has ended


class ReplicasError(OSError):
  """Ray did not start, or did not start the replicas."""


@dataclasses.dataclass(frozen=True)
class ReplicaSettings(Checked):
  """The number of replicas, and the resources that Ray reserves for each.

  Attributes:
    number: how many replicas there are; 0: one server without Ray.
    cpus: CPU cores of each replica, also a fraction.
    gpus: GPUs of each replica, the only ones that its JAX sees.
    resources: other resources of each replica, by Ray's names, such as
      {'TPU': 4}.

  Raises:
    ValueError: a value is outside its range.
  """

  number: Count = 0
  cpus: Amount = 1.0
  gpus: Amount = 0.0
  resources: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ServeConfig(Checked):
  """The configuration of `specdec serve`.

  Attributes:
    engine: makes the engine; if `drafter` made a drafter, the call has it as
      the argument `drafter`.
    settings: the address, sizes and limits of the server.
    drafter: makes the drafter; None: `engine` makes one, or there is none.
    draft_path: the path of the drafter's checkpoint; None: no drafter.
    calibration: a file that `specdec calibrate` wrote. It sets gamma for greedy
      outputs, and the length from which on a drafter speeds an output up; None:
      the engine's gamma is used.
    replicas: the number of servers, and the resources of each.

  Raises:
    ValueError: a value has the wrong type.
  """

  engine: Callable[..., Engine]
  settings: ServeSettings = ServeSettings()
  drafter: Callable[[], Drafter | Model] | None = None
  draft_path: str | None = None
  calibration: str | None = None
  replicas: ReplicaSettings = ReplicaSettings()


_Make = Callable[[], ServeConfig]


def serve(config: ServeConfig, remake: _Make | None = None) -> None:
  """Serves until SIGTERM or SIGINT.

  The server listens at once, is ready when the programs for one row are
  compiled, and then compiles the others. After a signal it refuses new requests
  and finishes the earlier ones within `drain_seconds`.

  Args:
    config: the configuration.
    remake: a function that Ray sends to the process of each replica, where it
      makes `config` anew; None: Ray sends `config`.

  Raises:
    ValueError: a value is out of range, packages of the extras [serve] or [ray]
      are not installed, or the keys cannot be read.
    OSError: the port is taken.
    ReplicasError: no replica could be started.
  """
  settings = config.settings
  for name in ('uvicorn', 'starlette', 'prometheus_client', 'httptools'):
    package('A server', name, 'serve')  # raises before models are loaded
  keys = api_keys(settings.api_key_file)
  _calibration_of(config)  # raises before models are loaded
  with logging_to_stderr():
    if config.replicas.number:
      run_replicas(remake or (lambda: config), config, keys)
    else:
      from specdec_jax.serving.server import Server  # needs the extra [serve]

      server = Server(*worker_of(config), keys)
      # uvicorn raises SIGTERM again after it has stopped.
      before = signal.signal(signal.SIGTERM, lambda *_: None)
      try:
        asyncio.run(server.serve())
      finally:
        signal.signal(signal.SIGTERM, before)


def worker_of(config: ServeConfig) -> tuple[Worker, str]:
  """Loads the models; returns a worker that decodes, and the model's name.

  Raises:
    ValueError: a model cannot be loaded, the models do not go together, or the
      settings do not fit them.
  """
  measured = _calibration_of(config)
  options = {}
  if config.drafter is not None and config.draft_path is not None:
    options['drafter'] = config.drafter()
  engine = config.engine(**options)
  name = config.settings.model_name or engine.models['target'].name or 'target'
  worker = Worker(engine, config.settings, measured)
  gammas = worker.ordinary.policy.gammas
  say('loaded', model=name, gammas=gammas, least_length=worker.least_length)
  return worker, name


def _calibration_of(config: ServeConfig) -> Calibration | None:
  return calibration.load(config.calibration) if config.calibration else None


def api_keys(path: str | None) -> list[str]:
  """Returns the keys in a file; without a path those in SPECDEC_API_KEYS.

  Raises:
    ValueError: there is no such file, or no key in it; or SPECDEC_API_KEYS is
      not empty and holds no key.
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
    name, advice = path or _KEYS, 'Give or unset it.'
    raise unexpected(name, 'one key or more', text, advice)
  return keys


def run_replicas(make: _Make, config: ServeConfig, keys: list[str]) -> None:
  """Serves with replicas until SIGTERM or SIGINT.

  The replicas run in an existing Ray cluster (at `RAY_ADDRESS`, or one that was
  started on this machine). Without one, Ray starts a cluster of this machine
  alone, which ends with this process. If only this machine may reach the
  server, only this machine may reach that cluster.

  Args:
    make: makes the configuration in the process of a replica; Ray must be able
      to send it there.
    config: the configuration.
    keys: API keys, of which each request needs one; empty: none is needed.

  Raises:
    ValueError: Ray Serve is not installed, or the port is 0.
    OSError: the port is taken on this machine.
    ReplicasError: Ray or a replica did not start, or there is no cluster at
      `RAY_ADDRESS`.
  """
  ray = package('A server with replicas', 'ray', 'ray')
  ray_serve = package('A server with replicas', 'ray.serve', 'ray')
  begin, settings = time.perf_counter(), config.settings
  if not settings.port:
    raise unexpected('port', 'one that each machine has', settings.port)
  check_cluster()
  # Ray would report a port that is taken only in the log of another process.
  listening_socket(settings).close()
  url = f'http://{settings.host}:{settings.port}'
  try:
    with contextlib.ExitStack() as ends:
      # This process loads neither JAX nor models.
      is_alone = _connect(ray, settings)
      ends.callback(say, 'stopped')
      ends.callback(ray.shutdown)
      ends.enter_context(contextlib.suppress(KeyboardInterrupt))
      # The first signal ends the server; later ones are ignored.
      for kind in _SIGNALS:
        ends.callback(signal.signal, kind, signal.signal(kind, _stop))
      address = {'host': settings.host, 'port': settings.port}
      ray_serve.start(http_options=address)
      say('listening', url=url, replicas=config.replicas.number)
      deployment = _deployment(ray_serve, make, config, keys, is_alone)
      ends.callback(_end, ray_serve, settings)
      ray_serve.run(deployment.bind(), name=NAME, route_prefix='/')
      say_since('ready', begin, url=url)
      threading.Event().wait()
  except (ray.exceptions.RayError, RuntimeError, ConnectionError) as error:
    line, *_ = str(error).strip().splitlines() or [type(error).__name__]
    raise ReplicasError(f'Ray did not start the replicas: {line}') from error


def _stop(*_: Any) -> None:
  for kind in _SIGNALS:
    signal.signal(kind, signal.SIG_IGN)
  say('stopping')
  raise KeyboardInterrupt


def check_cluster() -> None:
  """Raises ReplicasError if no cluster listens at `RAY_ADDRESS`.

  Ray itself would try to connect for minutes.
  """
  address = os.environ.get('RAY_ADDRESS', '')
  host, _, port = address.rpartition('://')[2].rpartition(':')
  if not (host and port.isdigit()):  # empty, or a word such as 'auto'
    return
  try:
    socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
  except OSError as error:
    raise ReplicasError(
      f'No Ray cluster is at RAY_ADDRESS={address!r}: {error}. Start one (`ray'
      ' start --head`), or unset it for one of this machine alone.'
    ) from error


def _connect(ray: Any, settings: ServeSettings) -> bool:
  """Connects to an existing cluster, or starts one.

  Returns:
    Whether the cluster listens to this machine alone.

  Raises:
    ConnectionError: there is no cluster at `RAY_ADDRESS`.
  """
  try:
    ray.init(address='auto', configure_logging=False)
    return False
  except ConnectionError:
    if os.environ.get('RAY_ADDRESS'):
      raise
  if settings.is_local:
    # With these two settings Ray listens at 127.0.0.1, as it does on macOS and
    # Windows. Otherwise its ports are open to all networks.
    os.environ['RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER'] = '0'
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
  ray.init(address='local', include_dashboard=False, configure_logging=False)
  return settings.is_local


def _listen_to_this_machine() -> None:
  """Lets only this machine reach the port that replicas open for calls."""
  from ray.serve._private import replica

  add_port = replica.add_port_to_grpc_server
  replica.add_port_to_grpc_server = lambda server, address: add_port(
    server, address.replace('[::]', '127.0.0.1')
  )


def _end(ray_serve: Any, settings: ServeSettings) -> None:
  """Lets each replica finish its requests, within a limit.

  Other applications of Ray Serve in the cluster go on.
  """
  ray_serve.delete(NAME, _blocking=False)
  until = time.monotonic() + settings.end_seconds + _LAST_SECONDS
  while time.monotonic() < until and NAME in ray_serve.status().applications:
    time.sleep(_LOOK_SECONDS)
  if not set(ray_serve.status().applications) - {NAME}:
    ray_serve.shutdown()


def _is_kept(ray_serve: Any) -> bool:
  """Returns whether Ray Serve keeps the application running."""
  application = ray_serve.status().applications.get(NAME)
  return application is not None and application.status != 'DELETING'


def _deployment(
  ray_serve: Any, make: _Make, config: ServeConfig, keys: list[str], alone: bool
) -> Any:
  """Makes the deployment that Ray sends to the machines and keeps running."""
  settings, replicas = config.settings, config.replicas
  applications: list[Any] = []  # has one entry in the process of a replica

  class Replica:
    """One server: its worker, and the application that Ray calls."""

    def __init__(self):
      """Loads the models; returns when all programs are compiled.

      Ray sends requests only after that.
      """
      self._ends = contextlib.ExitStack()
      self._ends.enter_context(logging_to_stderr())
      if alone:
        _listen_to_this_machine()
      from specdec_jax.serving.app import Application  # needs [serve]

      self._worker, name = worker_of(make())
      self._application = Application(self._worker, name, keys)
      applications.append(self._application)
      self._worker.start()
      self._ends.callback(self._application.close)
      threading.Thread(target=self._watch, daemon=True).start()
      while not self._worker.is_compiled:
        self.check_health()
        time.sleep(_LOOK_SECONDS)

    def check_health(self):
      """Raises if the worker has failed; then Ray replaces the replica."""
      self._application.check()

    def _watch(self):
      """Waits until Ray Serve ends the application, then ends the requests.

      Requests have `drain_seconds` to finish. The method asks Ray, since Ray
      does not tell a replica to end while the replica has requests.
      """
      while _is_kept(ray_serve):
        time.sleep(_HEALTH_SECONDS / 2)
      self._worker.refuse('The server is stopping. Try again later.')
      time.sleep(settings.drain_seconds)
      self._worker.stop()

    def __del__(self):
      """Ends the server; Ray calls it after the last request."""
      self._ends.close()

  reserved = {'num_cpus': replicas.cpus, 'num_gpus': replicas.gpus}
  return ray_serve.deployment(
    ray_serve.ingress(lambda: applications[0])(Replica),
    name=NAME,
    num_replicas=replicas.number,
    # The worker itself refuses requests when its queue is full.
    max_ongoing_requests=settings.max_connections,
    graceful_shutdown_wait_loop_s=_LOOK_SECONDS,
    graceful_shutdown_timeout_s=settings.end_seconds,
    health_check_period_s=_HEALTH_SECONDS,
    ray_actor_options={**reserved, 'resources': dict(replicas.resources)},
  )
