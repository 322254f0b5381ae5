"""Rows that two devices share, of one process or of two."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parent
FLAGS = f'{os.environ.get("XLA_FLAGS", "")} --xla_backend_optimization_level=0'
ENVIRONMENT = os.environ | {
  'XLA_FLAGS': FLAGS,
  'JAX_PLATFORMS': 'cpu',
  'PYTHONPATH': f'{TESTS.parent}{os.pathsep}{TESTS}',
}


# A server whose target is split over both.
_SERVER = """
import pathlib, sys, threading, warnings
import small_vocabulary
from scheduler_test import Heard, started
from continuous_test import nothing_compiles
from specdec_jax.engine.engine import Engine
from specdec_jax.models.model import Model
from specdec_jax.partitioning import Placement

warnings.simplefilter('error')
folder = pathlib.Path(sys.argv[1])
tokenizer = small_vocabulary.train(folder)
network = small_vocabulary.network(1)
weights = [small_vocabulary.weights(network, i) for i in range(2)]
engine = Engine(
  *(Model(network, one) for one in weights), tokenizer=tokenizer, gamma=2,
  max_input_len=8, max_decode_len=12, placement=Placement(data=1, model=2),
  cache_folder=folder / 'xla')
texts = ['red', 'a cat', 'blue']
kinds = {'stop_ids': ()}, {'stop_ids': (), 'temperature': 1.0, 'seed': 2}
want = [engine.generate([text], **kind)[0].tokens
        for kind in kinds for text in texts]
scheduler = started(engine, rows=2)
with nothing_compiles():
  heard = [Heard(scheduler, text, **kind) for kind in kinds for text in texts]
  scheduler.take([one.row for one in heard])
  assert [one.last.completion.tokens for one in heard] == want
scheduler.stop()
scheduler.join()
print('the same')
"""


# What the host reads between rounds, and scores, of rows of two processes.
_PROCESSES = """
import sys
import small_vocabulary
from specdec_jax import partitioning
from specdec_jax.infer import processes
from specdec_jax.engine import scoring
from specdec_jax.text import tokenizer
from specdec_jax.engine.scheduler import Continuous
from specdec_jax.engine.engine import Engine
from specdec_jax.models.model import Model
from specdec_jax.engine.scheduler import PoolSettings

folder, address, count, index = sys.argv[1:]

def decode():
  placement = None
  if int(count) > 1:
    processes.join(processes.Meeting(address, int(count), int(index)))
    placement = partitioning.Placement(data=2, across_hosts=True)
  network = small_vocabulary.network(1)
  weights = [small_vocabulary.weights(network, i) for i in range(2)]
  models = [Model(network, one) for one in weights]
  engine = Engine(
    *models, tokenizer=tokenizer.Tokenizer(folder + '/vocab.model'), gamma=2,
    max_input_len=32, max_decode_len=8, placement=placement,
    cache_folder=folder + '/xla')
  texts = ['the red dog runs', 'a cat']
  said = engine.generate(texts, stop_ids=[])[0].text
  letters = [one for one in said[1:] if one.isascii() and one.isprintable()]
  options = {'stop_ids': [], 'stop_strings': letters[:1]}
  for decoder in (engine, Continuous(engine, PoolSettings(rows=2))):
    for done in decoder.generate(texts, **options):
      print('found', done.tokens, done.finish_reason)
  print('found', list(engine.stream(texts[1], **options)))
  ids = [engine.input_ids(text) for text in texts]
  for one in scoring.score(engine.target, engine.params.target, ids, ids):
    print('found', round(one.total, 2))
  return 0

sys.exit(processes.run(decode) if int(count) > 1 else decode())
"""


@pytest.mark.slow
def test_rows_of_two_processes(tokenizer, folder):
  with socket.socket() as one:
    one.bind(('localhost', 0))
    address = f'localhost:{one.getsockname()[1]}'

  def run(count):
    started = [
      subprocess.Popen(
        [sys.executable, '-c', _PROCESSES, folder, address]
        + [str(count), str(index)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
      )
      for index in range(count)
    ]
    said = [one.communicate() for one in started]
    assert [one.returncode for one in started] == [0] * count, said
    # Gloo speaks as well.
    return [
      [line for line in out.splitlines() if line.startswith('found')]
      for out, _ in said
    ]

  (alone,) = run(1)
  assert len(alone) == 2 + 2 + 1 + 2 and 'stop_string' in ''.join(alone)
  assert run(2) == [alone, alone]


@pytest.mark.slow
def test_a_server_whose_target_two_devices_share(tmp_path):
  says_the_same(_SERVER, str(tmp_path))


def says_the_same(*command):
  """Runs a script on two devices."""
  flags = f'{FLAGS} --xla_force_host_platform_device_count=2'
  done = subprocess.run(
    [sys.executable, '-c', *command],
    env=ENVIRONMENT | {'XLA_FLAGS': flags},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip() == 'the same'
