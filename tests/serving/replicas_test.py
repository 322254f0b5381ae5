"""Several servers behind one address, by Ray Serve."""

import concurrent.futures
import contextlib
import importlib.util
import os
import pathlib
import pickle
import re
import signal
import socket
import sys
import threading
import time
import types

import gin
import pytest

from served import Served
from specdec_jax import serving
from specdec_jax.cli import commands, gin_flags
from specdec_jax.serving import run

SERVE = commands.COMMANDS['serve']
PROMPTS = ('Good morning!', 'Where is it?', 'Thank you.')


@pytest.fixture(autouse=True)
def gin_as_it_was():
  yield
  gin.clear_config()


def test_what_a_replica_is_made_of_goes_to_another_process():
  flags = ('--replicas', '2', '--rows', '3', '--replica-gpus=1')
  gin_flags.load(flags, SERVE)
  here = gin_flags.build(serving.ServeConfig)
  sent = pickle.dumps(gin_flags.builder(serving.ServeConfig))
  gin.clear_config()
  there = pickle.loads(sent)()
  assert there.settings == here.settings and there.settings.rows == 3
  assert there.replicas == serving.ReplicaSettings(2, gpus=1.0)
  assert there.draft_path == here.draft_path


def no_model(**_):
  pytest.fail('a model was loaded')


@pytest.mark.parametrize(
  ('name', 'extra', 'number'), [('uvicorn', 'serve', 0), ('ray', 'ray', 2)]
)
def test_it_says_which_extra_is_missing(name, extra, number, monkeypatch):
  """Before a model is loaded."""
  for known in ('uvicorn', 'starlette', 'prometheus_client', 'httptools'):
    monkeypatch.setitem(sys.modules, known, types.ModuleType(known))
  monkeypatch.setitem(sys.modules, name, None)
  replicas = serving.ReplicaSettings(number)
  config = serving.ServeConfig(no_model, replicas=replicas)
  with pytest.raises(ValueError, match=rf'{name}.*specdec_jax\[{extra}\]'):
    serving.serve(config)


def test_what_cannot_be_is_said_before_a_model_or_ray(tmp_path, monkeypatch):
  pytest.importorskip('uvicorn', reason='needs the extra [serve]')
  path = tmp_path / 'calibration.json'
  path.write_text('{}')
  with pytest.raises(ValueError, match='is not a calibration'):
    serving.serve(serving.ServeConfig(no_model, calibration=str(path)))
  fake_ray(monkeypatch, lambda **_: pytest.fail('it started'))
  with socket.create_server(('127.0.0.1', 0)) as taken:
    port = taken.getsockname()[1]
    for error, number in ((ValueError, 0), (OSError, port)):
      with pytest.raises(error, match='port.*got 0|in use'):
        start(port=number)


def fake_ray(monkeypatch, init, **more):
  errors = types.SimpleNamespace(RayError=ArithmeticError)
  ray = types.SimpleNamespace(init=init, exceptions=errors, **more)
  monkeypatch.setattr(run, 'package', lambda *_: ray)


def start(**settings):
  settings = serving.ServeSettings(**{'port': free_port()} | settings)
  two = serving.ReplicaSettings(2)
  config = serving.ServeConfig(no_model, settings, replicas=two)
  run.run_replicas(lambda: config, config, [])


@pytest.mark.parametrize('kind', [ArithmeticError, RuntimeError])
def test_what_keeps_ray_from_starting_is_said_in_a_sentence(kind, monkeypatch):
  def init(**_):
    raise kind('The actor died.\nmore')

  fake_ray(monkeypatch, init)
  match = r'did not start the replicas: The actor died\.$'
  with pytest.raises(run.ReplicasError, match=match):
    start()


@pytest.mark.parametrize('scheme', ['', 'ray://'])
def test_a_cluster_that_is_not_there_is_said_at_once(scheme, monkeypatch):
  fake_ray(monkeypatch, lambda **_: pytest.fail('Ray looks for it'))
  address = f'{scheme}127.0.0.1:{free_port()}'
  monkeypatch.setenv('RAY_ADDRESS', address)
  with pytest.raises(run.ReplicasError, match=f'{address}.*refused'):
    start()


@pytest.mark.parametrize('host', ['127.0.0.1', '0.0.0.0'])
@pytest.mark.parametrize('named', [True, False])
def test_ray_listens_where_the_server_does(host, named, monkeypatch):
  """A cluster that is there is taken; one that is not there is not made."""
  started, alone = [], 'RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER'

  def init(address, **how):
    if address == 'auto':
      raise ConnectionError('There is no Ray at 10.0.0.1:6379.\nmore')
    started.append((address, how['include_dashboard'], os.environ.get(alone)))
    raise ArithmeticError('enough')

  constants = types.SimpleNamespace(ENABLE_RAY_CLUSTER=True)
  private = types.SimpleNamespace(ray_constants=constants)
  fake_ray(monkeypatch, init, _private=private)
  monkeypatch.setenv(alone, 'unset')
  monkeypatch.delenv(alone)
  monkeypatch.setenv('RAY_ADDRESS', 'cluster' if named else '')
  match = 'no Ray at' if named else 'enough'
  with pytest.raises(run.ReplicasError, match=match):
    start(host=host)
  is_local = host == '127.0.0.1'
  want = [] if named else [('local', False, '0' if is_local else None)]
  assert started == want
  assert constants.ENABLE_RAY_CLUSTER == (named or not is_local)


def listening(process):
  """Addresses, as Linux writes them, at which a tree of processes listens."""
  parents, proc = {}, pathlib.Path('/proc')
  for stat in proc.glob('[0-9]*/stat'):
    with contextlib.suppress(OSError):
      fields = stat.read_text().rpartition(')')[2].split()
      parents[int(stat.parent.name)] = int(fields[1])
  tree = {process}
  while more := {k for k, v in parents.items() if v in tree} - tree:
    tree |= more
  files = set()
  for number in tree:
    for file in (proc / str(number) / 'fd').glob('*'):
      with contextlib.suppress(OSError):
        files.add(os.readlink(file))
  for name in ('tcp', 'tcp6'):
    for line in (proc / 'net' / name).read_text().splitlines()[1:]:
      fields = line.split()
      if fields[3] == '0A' and f'socket:[{fields[9]}]' in files:
        yield fields[1].partition(':')[0]


def free_port():
  with socket.create_server(('127.0.0.1', 0)) as free:
    return free.getsockname()[1]


class Replicas(Served):
  """`specdec serve --replicas 2`."""

  def __init__(self, *more):
    flags = f'--replicas 2 --port {free_port()} --rows 1 --max-input-length 8'
    super().__init__(*flags.split(), '--replica-cpus=0.5', *more)

  @property
  def replicas(self):
    """The ids of the processes that were ready at some time, by Ray's log."""
    ready = r'ServeReplica.* pid=(\d+)\).*"compiled"'
    return [int(one) for one in re.findall(ready, ''.join(self.lines))]


@pytest.mark.slow
def test_two_replicas_one_of_which_is_killed():
  if importlib.util.find_spec('ray') is None:
    pytest.skip('needs the extra [ray]')
  gin_flags.load([], SERVE)
  config = gin_flags.build(serving.ServeConfig)
  engine = config.engine(drafter=config.drafter())  # that of `specdec serve`
  sampled = {'temperature': 1.0, 'seed': 3}
  want = {one: engine.generate([one], max_length=12)[0].text for one in PROMPTS}
  drawn = engine.generate(PROMPTS[:1], max_length=12, **sampled)[0].text
  stop = threading.Event()
  answers = []

  def keep_asking(prompt):
    while not stop.is_set():
      answers.append((time.monotonic(), served.ask(prompt) == want[prompt]))

  with Replicas('--drain-seconds=3.0') as served:
    assert served.url
    served.until(lambda: len(served.replicas) == 2)
    assert {one: served.ask(one) for one in PROMPTS} == want
    if pathlib.Path('/proc/net/tcp').exists():  # 127.0.0.1, also as of IPv6
      assert {at[-8:] for at in listening(served.process.pid)} == {'0100007F'}
    found = {served.ask(PROMPTS[0], **sampled) for _ in range(6)}
    assert found == {drawn}, 'a sample is the same, whoever draws it'
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
      try:
        clients = [pool.submit(keep_asking, prompt) for prompt in PROMPTS]
        served.until(lambda: len(answers) > 10)
        victim, other = served.replicas
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        # The other one goes on while a third is made.
        served.until(lambda: len(served.replicas) > 2)
        back = time.monotonic()
        served.until(lambda: any(t > back + 2 for t, _ in answers))
        os.kill(other, 0)  # it lives
        assert len(served.replicas) == 3
      finally:
        stop.set()
      for client in clients:
        client.result()
    wrong = [t - killed for t, is_right in answers if not is_right]
    # No more than what it was decoding, and soon after.
    assert len(wrong) <= len(PROMPTS) and all(t < 30 for t in wrong), wrong
    assert sum(killed < t < back for t, is_right in answers if is_right) > 3
    # More than is done in that time, one after the other.
    long = {'n': 64, 'max_tokens': 120, 'ignore_eos': True}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
      last = pool.submit(served.ask, PROMPTS[0], max_tokens=60)
      time.sleep(0.2)
      cut = pool.submit(served.ask, PROMPTS[1], **long)
      time.sleep(0.2)
      served.process.send_signal(signal.SIGTERM)
      assert served.process.wait(120) == 0
      assert isinstance(last.result(), str), 'what was taken was not finished'
      assert cut.result() == 503
