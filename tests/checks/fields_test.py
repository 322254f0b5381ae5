"""Configurations that nobody should write: one line each, and nothing run."""

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import jax
import numpy as np
import pytest

import small_vocabulary
import toy_families as toys
from specdec_jax import infer
from specdec_jax.checkpoints.convert import ConvertConfig
from specdec_jax.checks import memory
from specdec_jax.checks.fields import Bound, Checked
from specdec_jax.cli import gin_flags
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.scheduler import PoolSettings
from specdec_jax.models.model import Model
from specdec_jax.models.rope import Rope
from specdec_jax.partitioning import LogicalAxes, Placement
from toy_pools import Pooled

NAN = float('nan')


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
  """A working folder."""
  monkeypatch.chdir(tmp_path)
  return tmp_path


# Values of another kind, of whatever is configured.


class Endless(list):
  """A long list whose items nobody should look at."""

  def __len__(self):
    return 10**9

  def __iter__(self):
    raise AssertionError


@dataclasses.dataclass(frozen=True)
class Fields(Checked):
  """One field of each kind that configurations have."""

  whole: int = 1
  number: float = 1.0
  flag: bool = True
  text: str = ''
  either: str | None = None
  word: Literal['a', 'b'] = 'a'
  path: str | os.PathLike[str] = ''
  several: tuple[int, ...] = ()
  pair: tuple[int, float] = (1, 1.0)
  numbers: Sequence[float] = ()
  few: Annotated[Sequence[str | Sequence[int]], Bound(1, 9)] | None = None
  named: Mapping[str, int] | None = None
  function: Callable[[], int] | None = None
  inner: 'Fields | None' = None
  anything: Any = None


@pytest.mark.parametrize(
  ('field', 'right', 'wrong'),
  [
    ('whole', [0, np.int64(2), 10**30], [1.5, 'x', None, True, [1], NAN]),
    ('number', [1, np.float32(2)], ['1', None, True, NAN, math.inf, 10**400]),
    ('flag', [False], [0, 'False', None]),
    ('text', ['x'], [5, None, b'x', ['x']]),
    ('either', ['x', None], [5, False]),
    ('word', ['b'], ['c', 1, None, ['a']]),
    ('path', ['x', pathlib.Path('x')], [5, None]),
    ('several', [(), [3], range(2), np.ones(2, int)], [5, 'ab', {}, None]),
    ('several', [], [(1.5,), ('x',), [None]]),
    ('pair', [(1, 2.5), [1, 2]], [(1,), (1, 2, 3), (1.5, 1), 'ab']),
    ('numbers', [[1, 0.5]], [5, ['x'], [NAN]]),
    ('few', [['a'] * 9, ['a', [1]], [[1]]], [[], [1], ['a', 1], ['a'] * 10]),
    ('few', [], [Endless(), np.array(5)]),
    ('named', [{'a': 1}, None], [5, [1], 'a']),
    ('function', [len, None], [5, 'len']),
    ('inner', [None, Fields()], [5, 'x', {}]),
    ('anything', [None, 5], []),
  ],
)
def test_types_of_fields(field, right, wrong):
  for value in right:
    Fields(**{field: value})
  for value in wrong:
    with pytest.raises(ValueError, match=f'^{field}: expected .*, got '):
      Fields(**{field: value})


BAD_SIZES = ('x', 1.5, NAN, None, True, -1, 10**15)


@pytest.mark.parametrize('config', [toys.T5_1_1, toys.GPT2, toys.LLAMA])
def test_sizes_of_a_network(config):
  sizes = 'vocab_size emb_dim num_heads head_dim mlp_dim num_layers'
  stacks = 'num_encoder_layers num_decoder_layers'
  for field in {*f'{sizes} {stacks}'.split()} & {*vars(config)}:
    for value in BAD_SIZES:
      with pytest.raises(ValueError, match=f'^{field}: expected'):
        replace(config, **{field: value})


CONVERT = ConvertConfig('a', 'b')
# What is configured, the fields that are wrong, and what the message names.
REFUSED = [
  (toys.T5_1_1, {'dtype': 'float16'}, "dtype.*'float16'"),
  (toys.T5_1_1, {'dropout_rate': 'x'}, 'dropout_rate'),
  (toys.T5_1_1, {'mlp_activations': ('swish',)}, 'mlp_activations.*swish'),
  (toys.GPT2, {'norm': 'batch'}, "norm.*'batch'"),
  (toys.GEMMA3, {'num_kv_heads': 4}, r'num_kv_heads.*\(6, 4'),
  (toys.GEMMA3, {'window': 0}, 'window'),
  (toys.GEMMA3, {'layer_kinds': ('far',)}, 'layer_kinds.*far'),
  (toys.GEMMA3, {'norm_epsilon': 0.0}, 'norm_epsilon'),
  (toys.GEMMA3, {'rope': {'base': 1e4}}, 'rope: expected Rope'),
  (toys.NLLB, {'emb_dim': 25}, 'emb_dim.* got 25'),
  (toys.ONE, {'encoder': replace(toys.GEMMA2, vocab_size=61)}, 'size.* .61'),
  (toys.TWO, {'encoder': replace(toys.GEMMA3, emb_dim=20)}, 'emb_dim'),
  (toys.ONE, {'start_id': 60}, 'start_id.* got 60'),
  (Rope(), {'base': 1.0}, 'base'),
  (LogicalAxes(), {'embed': 'model'}, 'token_embedder.*vocab.*embed'),
  (LogicalAxes(), {'mlp': 'modell'}, "mlp: expected .* 'modell'"),
  (Placement(), {'kernel_layout': 'columns'}, "kernel_layout.* 'columns'"),
  (Placement(model=2), {'kernel_layout': 'blocks'}, 'kernel_layout.*=2'),
  (Placement(), {'data': 0, 'model': 0}, r'data and model: .*\[0, 0\]'),
  (CONVERT, {'format': 'safetensor'}, "got 'safetensor'"),
  (CONVERT, {'dtype': 'int8', 'format': 'safetensors'}, "dtype: .* 'int8'"),
  (CONVERT, {'output': 'gs://b/x'}, 'output: .* on this machine'),
]


@pytest.mark.parametrize(('config', 'change', 'words'), REFUSED)
def test_configurations_that_are_refused(config, change, words):
  with pytest.raises(ValueError, match=words):
    replace(config, **change)


DECODE = """
from __gin__ import dynamic_registration
include 'gin/models/demo.gin'
include 'gin/runs/infer.gin'
TARGET = %DEMO_TARGET
DRAFT = %DEMO_DRAFT
CHECKPOINT_PATH = 'demo/target.msgpack'
DRAFT_CHECKPOINT_PATH = 'demo/draft.msgpack'
VOCAB_PATH = 'demo/vocab.model'
MIXTURE_OR_TASK_NAME = 'demo/input.txt'
TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 8}
INFER_OUTPUT_DIR = 'outputs'
"""


@pytest.mark.parametrize(
  ('macro', 'value', 'words'),
  [
    ('EngineConfig.gamma', '100000', 'gamma'),
    ('VOCAB_PATH', '/dev/zero', 'regular file'),
    ('TARGET', '5', 'network'),
    ('NUM_DECODES', '4294967296', 'num_samples'),
    ('DecodeConfig.batch_size', '10000000000', 'batch_size'),
    ('TASK_FEATURE_LENGTHS', "{'inputs': 64, 'targets': 1000000000}", 'GiB'),
    ('demo_target/T5Config.vocab_size', '2000000000', 'GiB'),
    ('Options.temperature', 'nan', 'temperature'),
    ('MIXTURE_OR_TASK_NAME', '5', 'mixture_or_task_name'),
  ],
)
def test_values_of_a_run(place, monkeypatch, macro, value, words):
  """Each is an error before anything is compiled; without it all is well."""
  monkeypatch.setattr(jax.stages.Lowered, 'compile', None)
  (place / 'decode.gin').write_text(DECODE)
  gin_flags.load(['--gin_file=decode.gin'])
  gin_flags.build(infer.DecodeConfig)
  with pytest.raises(ValueError, match=words):
    gin_flags.load(['--gin_file=decode.gin', f'--gin.{macro}={value}'])
    infer.decode(gin_flags.build(infer.DecodeConfig))


def test_a_run_that_no_memory_holds(tokenizer, monkeypatch):
  """Refused by its bytes before it is compiled, whichever way it is decoded."""
  monkeypatch.setattr(memory, 'free_bytes', lambda: 1 << 20)
  monkeypatch.setattr(jax.stages.Lowered, 'compile', None)
  network = small_vocabulary.network(1)
  model = Model(network, small_vocabulary.weights(network, 0), tokenizer)
  engine = Engine(model, model, gamma=4)
  for decode in (
    lambda: engine.generate(['a'] * 128, batch_size=128),
    lambda: engine.warmup(['a'] * 128, batch_size=128, speculative=False),
    lambda: Pooled(engine, PoolSettings(rows=4096)).generate(['a']),
    lambda: Engine(model, max_decode_len=10**9),
  ):
    with pytest.raises(memory.DoesNotFitError, match='of memory are needed'):
      decode()
  # The controls come as far as the compiler: a row, and any if nobody knows.
  with pytest.raises(TypeError, match='not callable'):
    engine.generate(['a'])
  monkeypatch.setattr(memory, 'free_bytes', lambda: None)
  with pytest.raises(TypeError, match='not callable'):
    engine.generate(['a'] * 128, batch_size=128)
