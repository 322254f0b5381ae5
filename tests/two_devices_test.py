"""Continuous batching whose rows two devices share."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from specdec_jax.schedule import Queue, Settings

TESTS = pathlib.Path(__file__).parent

# Pools of one row and of three, which two devices do not divide.
_POOLS = """
import pathlib, sys, warnings
import jax, small_vocabulary
from specdec_jax.continuous import Continuous
from specdec_jax.engine import Engine, Model
from specdec_jax.partitioning import Placement
from specdec_jax.schedule import Settings

warnings.simplefilter('error')
folder = pathlib.Path(sys.argv[1])
tokenizer = small_vocabulary.train(folder)
network = small_vocabulary.network(1)
models = [Model(network, network.init(jax.random.key(i))) for i in range(2)]
engine = Engine(
  *models, tokenizer=tokenizer, max_input_len=32, max_decode_len=12,
  placement=Placement(data=2), cache_folder=folder / 'xla')
texts = ['the red dog runs', 'a cat', 'the old house', 'blue tree', 'sleeps']
options = {'stop_ids': list(range(3, 288, 8))}
want = [one.tokens for one in engine.generate(texts, **options)]
settings = eval(sys.argv[2])
decoder = Continuous(engine, settings)
have = [one.tokens for one in decoder.generate(texts, **options)]
assert have == want
gammas = settings.gammas or {3: engine.gamma}
assert set(decoder.load.rounds) == set(gammas.values()), decoder.load
print('the same')
"""


def slow(settings):
  return pytest.param(settings, marks=pytest.mark.slow)


@pytest.mark.parametrize(
  'settings',
  [
    'Settings(gammas={4: 2, 1: 3})',
    slow('Settings(gammas={3: 0, 1: 2})'),
    slow('Settings(rows=3, read_rows=1)'),
  ],
)
def test_pools_that_two_devices_do_not_divide(settings, tmp_path):
  flags = (
    '--xla_force_host_platform_device_count=2'
    ' --xla_backend_optimization_level=0'
  )
  paths = f'{TESTS.parent}{os.pathsep}{TESTS}'
  done = subprocess.run(
    [sys.executable, '-c', _POOLS, str(tmp_path), settings],
    env=os.environ
    | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': paths},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip() == 'the same'


@pytest.mark.parametrize(
  'devices, rows, gammas, become',
  [
    (1, 3, {4: 2, 1: 3}, (3, {4: 2, 1: 3})),
    (2, 3, {4: 2, 1: 3}, (4, {2: 3, 4: 2})),
    # Of pools that become one it is the larger one's gamma.
    (2, 2, {2: 3, 1: 5, 3: 1}, (2, {2: 3, 4: 1})),
    (8, 9, None, (16, None)),
  ],
)
def test_pools_are_multiples_of_the_devices(devices, rows, gammas, become):
  settings = Settings(rows=rows, gammas=gammas).in_multiples_of(devices)
  assert (settings.rows, settings.gammas) == become


def test_what_is_read_together_is_one_too():
  class Rows:
    inputs = np.ones((5, 4), np.int32)
    prompt_width, first_length = 1, 1

  for settings, together in ((Settings(rows=2), 2), (Settings(read_rows=3), 4)):
    assert Queue(Rows(), range(5), settings, 2).read_rows == together
