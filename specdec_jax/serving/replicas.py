"""Several servers of one pair behind one address, kept by Ray Serve.

Each replica is the application of `specdec serve` with its worker, in another
process, on any machine of a Ray cluster. Ray has the address, gives each
request to a replica, keeps their number, and replaces one that has failed.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from specdec_jax.checks.fields import Checked, package, unexpected
from specdec_jax.serving.log import logging_to_stderr, say
from specdec_jax.serving.settings import ServeSettings, listening_socket
from specdec_jax.serving.worker import Worker
from specdec_jax.types import Amount, Count

NAME = 'specdec'  # Ray shows the application and its deployment by this name
_HEALTH_SECONDS = 2.0  # between two checks of a replica
_LOOK_SECONDS = 0.1
_CONNECT_SECONDS = 5.0  # in which a cluster must answer
_LAST_SECONDS = 5.0  # after which Ray has seen that a replica has ended


class ReplicasError(OSError):
  """Ray did not start, or did not start the replicas."""


@dataclasses.dataclass(frozen=True)
class ReplicaSettings(Checked):
  """The number of replicas, and the resources that Ray reserves for each.

  Attributes:
    number: how many replicas there are; 0: one server without Ray.
    cpus: cores of each, which may be a fraction.
    gpus: GPUs of each. JAX sees no others.
    resources: other resources of each, by Ray's names, such as {'TPU': 4}.

  Raises:
    ValueError: a value is outside its range.
  """

  number: Count = 0
  cpus: Amount = 1.0
  gpus: Amount = 0.0
  resources: Mapping[str, float] = dataclasses.field(default_factory=dict)


def run(
  make: Callable[[], tuple[Worker, str]],
  settings: ServeSettings,
  replicas: ReplicaSettings,
  keys: Sequence[str],
) -> None:
  """Serves by replicas until SIGTERM or SIGINT.

  They run in an existing Ray cluster (`RAY_ADDRESS`, or one that was started on
  this machine). Without one, Ray starts a cluster of this machine alone, which
  ends with this process, and listens to this machine alone if the server does.

  Args:
    make: makes a worker and the model's name in the process of a replica; Ray
      must be able to send it there.
    settings: the settings of the server.
    replicas: the number and the resources of the replicas.
    keys: each request needs one of them.

  Raises:
    ValueError: Ray Serve is not installed, or the port is 0.
    OSError: the port is taken on this machine.
    ReplicasError: Ray or a replica did not start, or there is no cluster at
      `RAY_ADDRESS`.
  """
  ray = package('A server with replicas', 'ray', 'ray')
  ray_serve = package('A server with replicas', 'ray.serve', 'ray')
  begin = time.perf_counter()
  if not settings.port:
    raise unexpected('port', 'one that each machine has', settings.port)
  check_cluster()
  # Ray would report a port that is taken only in the log of another process.
  listening_socket(settings).close()
  address = {'host': settings.host, 'port': settings.port}
  url = f'http://{settings.host}:{settings.port}'
  try:
    with contextlib.ExitStack() as ends:
      # This process loads neither JAX nor models.
      is_alone = _connect(ray, settings)
      ends.callback(say, 'stopped')
      ends.callback(ray.shutdown)
      ends.enter_context(_until_a_signal())
      ray_serve.start(http_options=address)
      say('listening', url=url, replicas=replicas.number)
      deployment = _deployment(
        ray_serve, make, settings, replicas, keys, is_alone
      )
      ends.callback(_end, ray_serve, settings)
      ray_serve.run(deployment.bind(), name=NAME, route_prefix='/')
      say('ready', url=url, seconds=round(time.perf_counter() - begin, 3))
      threading.Event().wait()
  except (ray.exceptions.RayError, RuntimeError, ConnectionError) as error:
    line, *_ = str(error).strip().splitlines() or [type(error).__name__]
    raise ReplicasError(f'Ray did not start the replicas: {line}') from error


def check_cluster() -> None:
  """Raises ReplicasError if no cluster listens at `RAY_ADDRESS`.

  Ray itself would try to connect for minutes.
  """
  address = os.environ.get('RAY_ADDRESS', '')
  host, _, port = address.rpartition('://')[2].rpartition(':')
  if not (host and port.isdigit()):  # '', or a word that Ray knows
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
    # With these Ray's address is 127.0.0.1, as it is on other systems than
    # Linux. Otherwise its ports are open to all networks, with any address.
    os.environ['RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER'] = '0'
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
  ray.init(address='local', include_dashboard=False, configure_logging=False)
  return settings.is_local


def _listen_to_this_machine() -> None:
  """Binds the port by which replicas may call each other to this machine."""
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
  ray_serve: Any,
  make: Callable[[], tuple[Worker, str]],
  settings: ServeSettings,
  replicas: ReplicaSettings,
  keys: Sequence[str],
  is_alone: bool,
) -> Any:
  """Makes the deployment that Ray sends to the machines and keeps running."""
  applications: list[Any] = []  # one in the process of a replica

  class Replica:
    """One server: its worker, and the application that Ray calls."""

    def __init__(self):
      """Returns when everything is compiled; then Ray sends requests."""
      self._ends = contextlib.ExitStack()
      self._ends.enter_context(logging_to_stderr())
      if is_alone:
        _listen_to_this_machine()
      from specdec_jax.serving.app import Application  # needs the extra

      self._worker, name = make()
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
      """Ends the requests that are left when the time to finish is over.

      Ray does not tell a replica to end while it has requests.
      """
      while _is_kept(ray_serve):
        time.sleep(_HEALTH_SECONDS / 2)
      self._worker.refuse('The server is stopping. Try again later.')
      time.sleep(settings.drain_seconds)
      self._worker.stop()

    def __del__(self):
      """Ends the server; Ray calls it after the last request."""
      self._ends.close()

  return ray_serve.deployment(
    ray_serve.ingress(lambda: applications[0])(Replica),
    name=NAME,
    num_replicas=replicas.number,
    # The worker itself refuses requests when its queue is full.
    max_ongoing_requests=settings.max_connections,
    graceful_shutdown_wait_loop_s=_LOOK_SECONDS,
    graceful_shutdown_timeout_s=settings.end_seconds,
    health_check_period_s=_HEALTH_SECONDS,
    ray_actor_options={
      'num_cpus': replicas.cpus,
      'num_gpus': replicas.gpus,
      'resources': dict(replicas.resources),
    },
  )


@contextlib.contextmanager
def _until_a_signal() -> Iterator[None]:
  """Ends the block at the first SIGTERM or SIGINT, and ignores the others."""
  kinds = (signal.SIGTERM, signal.SIGINT)

  def end(*_: Any) -> None:
    for kind in kinds:
      signal.signal(kind, signal.SIG_IGN)
    say('stopping')
    raise KeyboardInterrupt

  before = [signal.signal(kind, end) for kind in kinds]
  try:
    with contextlib.suppress(KeyboardInterrupt):
      yield
  finally:
    for kind, handler in zip(kinds, before, strict=True):
      signal.signal(kind, handler)
