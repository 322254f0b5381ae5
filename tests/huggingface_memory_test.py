"""Host memory while a Hugging Face folder is loaded, and where arrays go."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from huggingface_test import V10, V11, assert_equal_trees, make_params
from specdec_jax.checkpoints import (
  disk_arrays,
  huggingface,
  huggingface_arrays,
)
from specdec_jax.checkpoints import huggingface_names as names
from specdec_jax.models.t5 import T5, T5Config

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('safetensors') is None,
  reason="needs safetensors: pip install 'specdec_jax[huggingface]'",
)
linux = pytest.mark.skipif(
  not pathlib.Path('/proc/self/status').exists(),
  reason='the peak of memory is read from /proc',
)
TESTS = pathlib.Path(__file__).resolve().parent
# What is allowed beside the arrays themselves: the 1 GiB would hide
# the whole of these files.
SLACK = 128 << 20


def write(folder, **sizes):
  """A folder of constant arrays; returns bytes of all and of the largest."""
  config = T5Config(num_heads=8, head_dim=64, **sizes)
  params = jax.tree.map(
    lambda leaf: np.full(leaf.shape, 0.5, np.float32), names.shapes(T5(config))
  )
  huggingface.save_huggingface(folder, config, params)
  sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
  return sum(sizes), max(sizes)


def measure(folder, how, dtype):
  done = subprocess.run(
    [sys.executable, TESTS / 'huggingface_memory.py', folder, how, dtype],
    env={'PYTHONPATH': str(TESTS.parent), 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


@pytest.fixture(scope='module')
def three_hundred(tmp_path_factory):
  folder = tmp_path_factory.mktemp('300 MB')
  total, largest = write(
    folder,
    vocab_size=30000,
    emb_dim=512,
    num_encoder_layers=9,
    num_decoder_layers=7,
    mlp_dim=1024,
  )
  assert total > 300e6 and 4 * largest < total
  return folder, total, largest


@linux
@pytest.mark.parametrize(
  ('how', 'dtype'),
  [
    ('device', 'float16'),
    ('host', 'float32'),
  ],
)
@pytest.mark.slow
def test_peak_of_host_memory(three_hundred, how, dtype):
  folder, total, largest = three_hundred
  seen = measure(folder, how, dtype)
  assert seen['loaded'] == total * np.dtype(dtype).itemsize // 4
  assert seen['extra'] < 2 * largest + SLACK, seen


@linux
@pytest.mark.slow
def test_the_measurement_sees_a_file_that_is_held(three_hundred):
  folder, total, largest = three_hundred
  seen = measure(folder, 'at_once', 'float32')
  assert seen['extra'] > total > 2 * largest + SLACK / 2, seen
  assert seen['extra'] > 2 * largest + SLACK, seen


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
  ('how', 'dtype'),
  [('host', 'float32'), ('device', 'float32'), ('device', 'float16')],
)
def test_peak_with_two_huge_arrays(tmp_path, how, dtype):
  """2 GB, nearly all of it in the embedding and the output layer."""
  total, largest = write(
    tmp_path,
    vocab_size=250112,
    emb_dim=1024,
    num_encoder_layers=1,
    num_decoder_layers=1,
    mlp_dim=1024,
  )
  assert total > 2e9 and 2 * largest > 0.9 * total
  seen = measure(tmp_path, how, dtype)
  assert seen['extra'] < 2 * largest + SLACK, seen


@pytest.fixture(params=['1.1', '1.0'])
def saved(request, tmp_path):
  config = {'1.1': V11, '1.0': V10}[request.param]
  params = make_params(config)
  huggingface.save_huggingface(tmp_path, config, params)
  return config, params


def test_pieces_give_the_same_arrays(saved, tmp_path, monkeypatch):
  config, params = saved
  read = []
  piece = huggingface_arrays.Stored.read
  monkeypatch.setattr(disk_arrays, 'PIECE_BYTES', 300)
  monkeypatch.setattr(
    huggingface_arrays.Stored,
    'read',
    lambda self, index: read.append(self.name) or piece(self, index),
  )
  _, loaded = huggingface.load_huggingface(tmp_path)
  assert_equal_trees(loaded, params)
  # 28 rows of 80 bytes, 3 at a time.
  wi = 'wi' if config.logits_via_embedding else 'wi_0'
  assert read.count(f'encoder.block.0.layer.1.DenseReluDense.{wi}.weight') == 10


def test_arrays_go_to_a_device(saved, tmp_path):
  _, params = saved
  device = jax.devices()[-1]
  _, loaded = huggingface.load_huggingface(tmp_path, np.float32, device)
  for leaf in jax.tree.leaves(loaded):
    assert isinstance(leaf, jax.Array) and leaf.devices() == {device}
  assert_equal_trees(jax.device_get(loaded), params)


def test_a_function_of_the_name_decides(saved, tmp_path):
  config, params = saved
  mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ('data', 'model'))
  split = NamedSharding(mesh, PartitionSpec(None, 'model'))
  seen = []

  def sharding(name):
    seen.append(name)
    if name.endswith('kernel'):
      return split
    return jax.devices()[0] if name.endswith('scale') else None

  _, loaded = huggingface.load_huggingface(tmp_path, sharding=sharding)
  assert sorted(seen) == sorted(names.table(config))
  assert loaded['encoder']['layers_0']['mlp']['wo']['kernel'].sharding == split
  assert isinstance(loaded['token_embedder']['embedding'], np.ndarray)
  assert isinstance(loaded['decoder']['decoder_norm']['scale'], jax.Array)
  assert_equal_trees(jax.device_get(loaded), params)


def test_what_is_no_sharding(saved, tmp_path):
  with pytest.raises(ValueError, match=r"sharding of \S+ is 'cpu'; expected"):
    huggingface.load_huggingface(tmp_path, sharding='cpu')
  with pytest.raises(ValueError, match=r'sharding of decoder\S+ is 3'):
    huggingface.load_huggingface(
      tmp_path, sharding=lambda name: 3 if name.startswith('decoder') else None
    )


SHARDED = """
import sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from specdec_jax.checkpoints import huggingface, huggingface_arrays
folder = sys.argv[1]
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ('data', 'model'))
def sharding(name):
  if not name.endswith('kernel'):
    return NamedSharding(mesh, P())
  return NamedSharding(mesh, P(None, 'model'))
_, host = huggingface.load_huggingface(folder)
pieces = []
piece = huggingface_arrays.Stored.read
def counted(self, index):
  pieces.append((self.name, index))
  return piece(self, index)
huggingface_arrays.Stored.read = counted
_, placed = huggingface.load_huggingface(folder, np.float16, sharding)
# Those two are compared first, to see whether they are tied.
pieces = [p for p in pieces if p[0] not in ('lm_head.weight', 'shared.weight')]
assert len(pieces) == len(set(map(str, pieces))) > 30, 'a replica was reread'
kernel = placed['decoder']['logits_dense']['kernel']
assert {s.data.shape for s in kernel.addressable_shards} == {(20, 30)}
assert len(kernel.addressable_shards) == 4
jax.tree.map(
  lambda a, b: np.testing.assert_array_equal(a, b.astype(np.float16)),
  jax.device_get(placed), host,
)
try:
  three = Mesh(np.array(jax.devices()[:3]), ('x',))
  huggingface.load_huggingface(
    folder, sharding=NamedSharding(three, P('x')))
except ValueError as error:
  print(error)
"""


def test_four_devices_each_read_their_part(tmp_path):
  config = T5Config(60, 20, 3, 1, 1, 4, 28)
  huggingface.save_huggingface(tmp_path, config, make_params(config))
  done = subprocess.run(
    [sys.executable, '-c', SHARDED, tmp_path],
    env={
      'PYTHONPATH': str(TESTS.parent),
      'JAX_PLATFORMS': 'cpu',
      'XLA_FLAGS': '--xla_force_host_platform_device_count=4',
    },
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert 'cannot be laid out by NamedSharding' in done.stdout
  assert '[20' in done.stdout
