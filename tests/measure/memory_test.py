"""Bytes counted from shapes are those of real arrays."""

import dataclasses
import types

import jax
import pytest

import small_vocabulary
from specdec_jax import Engine, Model, load, partitioning
from specdec_jax.checkpoints import save_t5x
from specdec_jax.checks import memory as checks_memory
from specdec_jax.checks.memory import GIB, DoesNotFitError
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.small_model import small_model
from specdec_jax.engine.pair import MemoryCheck
from specdec_jax.measure import memory
from specdec_jax.measure.calls import make_request
from specdec_jax.models import sizes, t5
from specdec_jax.models.families import network_of
from specdec_jax.partitioning import Placement
from toy_families import GPT2, T5_1_1, make

# Sizes of T5 1.1 XXL and small.
XXL = 32128, 4096, 64, 24, 24, 64, 10240
SMALL = 32128, 512, 6, 8, 8, 64, 1024


def request_shapes(network, batch, input_len, slots, gamma=0):
  args = network, batch, input_len, slots, 0.0, 0, gamma
  return jax.eval_shape(lambda: make_request(*args))


def test_decoder_of_xxl_is_11_1_gb_and_its_float32_fits_no_chip(monkeypatch):
  """Counted on a machine that could not hold it: nothing is made."""
  configs = (t5.T5Config(*of, dtype='bfloat16') for of in (XXL, SMALL))
  xxl, small = map(t5.T5, configs)
  params = memory.param_shapes(xxl, Placement('bfloat16', 'in_out'))
  assert memory.tree_bytes(params) == 2 * 11_135_332_352  # as published
  request = request_shapes(xxl, 1, 128, 128, 7)
  caches = 24 * 2 * 4096 * 2 * (128 + 256)  # layers, k and v, H * D, bfloat16
  counted = memory.call_bytes(xxl, params, request)
  assert counted == pytest.approx(11.1e9 + caches, rel=0.005)
  drafter = small_model(Model(small))
  monkeypatch.setattr(checks_memory, 'device_bytes', lambda: 32 * GIB)
  room = MemoryCheck(Model(xxl), drafter, Placement())
  # And not much more than the parameters of both.
  with pytest.raises(DoesNotFitError, match=r'41\.\d\d GiB of memory are need'):
    room.check(1, 128, 192, 8)


# Parameters by hand. Of the T5 self-attention, cross-attention's queries and
# output, a gated block and three norms; its output layer and the last norm; a
# relative bias of 3 heads and 32 buckets. Of GPT-2 two LayerNorms, four
# projections of 24 to 24 and two of 24 to 40, all with biases; its embedding is
# the output layer.
T5_LAYER = 4 * 32 * 36 + 2 * 32 * 36 + 3 * 32 * 48 + 3 * 32
GPT2_LAYER = 2 * 2 * 24 + 4 * (24 * 24 + 24) + (24 * 40 + 40) + (40 * 24 + 24)
LONG_GPT2 = dataclasses.replace(GPT2, num_positions=256)
BY_HAND = {
  # weights, H * D, position of the first call
  'T5': (T5_1_1, 2 * T5_LAYER + 32 * 60 + 32 + 3 * 32, 36, 0),
  'GPT-2': (LONG_GPT2, 2 * GPT2_LAYER + 2 * 24 + 60 * 24, 24, 7),
}


@pytest.mark.parametrize('family', BY_HAND)
def test_bytes_of_calls_by_hand(family):
  config, weights, width, first = BY_HAND[family]
  model = network_of(config)
  request = request_shapes(model, 3, 7, 200, 4)
  assert request.cache_slots == 256
  slot = 3 * 2 * 2 * width * 4  # rows, layers, k and v, H * D, float32
  short = 128 - first  # calls whose position is in the first bucket
  attended = (short * 128 + (200 - short) * 256) * slot // 200
  inputs = 7 * slot if model.has_encoder else 0
  params = memory.param_shapes(model, Placement('float32', 'out_in'))
  counted = memory.call_bytes(model, params, request)
  assert counted == 4 * weights + attended + inputs


def test_bytes_of_an_array_and_of_a_device():
  sizes_of = {'float32': 60, 'bfloat16': 30, 'int8': 15, 'int4': 8}
  for dtype, size in sizes_of.items():
    assert checks_memory.array_bytes((3, 5), dtype) == size
  assert checks_memory.device_bytes() > 1 << 28
  device = types.SimpleNamespace(
    platform='gpu', memory_stats=lambda: {'bytes_limit': 7, 'bytes_in_use': 2}
  )
  assert checks_memory.device_bytes(device) == 5
  device.memory_stats = lambda: None
  assert checks_memory.device_bytes(device) is None


def test_free_bytes_are_what_nobody_uses(tmp_path, monkeypatch):
  """Of the machine, or of the tightest control group above this process."""
  limit, used = 'memory.max', 'memory.current'
  root = tmp_path / 'groups'
  step = root / 'job' / 'step'
  step.mkdir(parents=True)
  monkeypatch.setattr(checks_memory, '_MACHINE', tmp_path / 'meminfo')
  monkeypatch.setattr(checks_memory, '_OWN_GROUPS', tmp_path / 'cgroup')
  monkeypatch.setattr(checks_memory, '_GROUPS', root)
  total = checks_memory.host_bytes()
  assert checks_memory.free_bytes() == total  # nothing says how much is free
  (tmp_path / 'meminfo').write_text('MemTotal:   9 kB\nMemAvailable:   2 kB\n')
  assert checks_memory.free_bytes() == 2048
  (tmp_path / 'cgroup').write_text('0::/job/step\n')
  (step / limit).write_text('max\n')
  assert checks_memory.free_bytes() == 2048
  (root / 'job' / limit).write_text('1500\n')
  (root / 'job' / used).write_text('900\n')
  assert checks_memory.free_bytes() == 600
  assert checks_memory.host_bytes() == 1500
  pages = 'active_file 1\ninactive_file 2\nanon 30\n'
  (root / 'job' / 'memory.stat').write_text(pages)
  assert checks_memory.free_bytes() == 600 + 3
  (root / limit).write_text('700\n')  # in a container its own is the root
  (root / used).write_text('650\n')
  assert checks_memory.free_bytes() == 50


def test_a_cpu_holds_bfloat16_and_float32_of_it():
  """As the compiler does, before a loop; an int4 kernel is held as float32."""
  model = t5.T5(dataclasses.replace(T5_1_1, dtype='bfloat16'))
  placement = Placement('bfloat16', 'in_out')
  params = PairParams(partitioning.place(make(T5_1_1)[1], placement), None)
  request = request_shapes(model, 1, 8, 8)
  compiled = jax.jit(Loop(model).decode).lower(params, request).compile()
  temporary = compiled.memory_analysis().temp_size_in_bytes
  widened = sizes.widened_bytes(model, 'bfloat16')
  assert 0 < widened < temporary
  # Though the encoder is left out.
  assert widened > memory.tree_bytes(params.target)
  assert sizes.widened_bytes(model, 'float32') == 0
  assert sizes.held_bytes(3, 'int4') == sizes.held_bytes(3, 'float32') == 12
  assert sizes.held_bytes(3, 'int8') == 3


def test_an_engine_counts_what_is_to_come(monkeypatch, tokenizer, tmp_path):
  """Parameters that are still to be read; behind that only what a run takes."""
  wide = small_vocabulary.network(1)
  wide = t5.T5(dataclasses.replace(wide.config, mlp_dim=2**15))
  params = jax.device_put(small_vocabulary.weights(wide, 0))
  save_t5x(tmp_path / 'wide.msgpack', params, step=1)
  limit = memory.tree_bytes(params) // 2
  monkeypatch.setattr(checks_memory, 'device_bytes', lambda: limit)
  limits = dict(tokenizer=tokenizer, max_input_len=8, max_decode_len=8)
  with pytest.raises(DoesNotFitError, match='beside .* of parameters'):
    Engine(load(tmp_path / 'wide.msgpack', wide), **limits)
  engine = Engine(Model(wide, params), **limits)  # it has been read
  with pytest.raises(DoesNotFitError, match='^4096 rows'):
    engine.generate(['a'] * 4096, speculative=False, batch_size=4096)
  limit = 2**40
  assert engine.generate(['a'], speculative=False)
