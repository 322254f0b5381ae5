"""A run of which nothing came is no success, whatever it was over."""

import functools
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

import small_vocabulary
from specdec_jax import infer
from specdec_jax.cli import gin_flags
from specdec_jax.engine.engine import Engine
from specdec_jax.infer import failures, quality
from specdec_jax.models.model import Model

TEXTS = ['the red dog', 'a cat', 'the old house']
LENGTHS = {'inputs': 16, 'targets': 6}


@pytest.fixture(scope='module')
def make(tokenizer):
  """An engine whose target has this value in one place of one array."""
  network = small_vocabulary.network(1)

  @functools.cache
  def make(value=None):
    params = network.init(jax.random.key(0))
    if value is not None:
      layer = params['decoder']['layers_0']['mlp']['wo']
      layer['kernel'] = layer['kernel'].at[3, 2].set(value)
    return Engine(
      Model(network, params),
      Model(network, network.init(jax.random.key(1))),
      tokenizer=tokenizer,
      gamma=2,
      max_input_len=LENGTHS['inputs'],
      max_decode_len=LENGTHS['targets'],
    )

  return make


@pytest.fixture
def start(make, tokenizer, tmp_path):
  """Starts a run of a kind with an engine."""
  lines, pairs = tmp_path / 'lines.txt', tmp_path / 'pairs.tsv'
  lines.write_text('\n'.join(TEXTS) + '\n\n')
  pairs.write_text(''.join(f'{text}\tthe cat\n' for text in TEXTS))
  out = str(tmp_path / 'out')

  def start(kind, engine):
    console = rich.console.Console(file=io.StringIO())
    if kind == 'lines':
      config = infer.DecodeConfig(
        lambda: engine, str(lines), out, batch_size=2, mode='plain'
      )
      return infer.decode(config, console=console)
    if kind == 'quality':
      config = quality.EvaluateConfig(
        lambda: engine, str(pairs), out, batch_size=2, temperatures=(0.0,)
      )
      return quality.evaluate(config, console=console)
    config = infer.TaskConfig(
      lambda **lengths: engine,
      tokenizer,
      str(pairs),
      out,
      task_feature_lengths=LENGTHS,
      mode=kind,
      batch_size=2,
      metrics=(),
      decoding='plain',
    )
    return infer.decode_task(config, console=console)

  return start


@pytest.mark.parametrize(
  ('kind', 'value'),
  [
    ('lines', np.nan),
    ('predict', np.inf),
    ('score', np.inf),
    ('quality', np.nan),
  ],
)
def test_weights_that_are_no_numbers(start, make, tmp_path, kind, value):
  if kind == 'quality':
    pytest.importorskip('sacrebleu')
  out = tmp_path / 'out'
  for _ in range(2):  # another start tries again, and says the same
    with pytest.raises(infer.AllFailedError) as found:
      start(kind, make(value))
    said = str(found.value)
    assert 'target/decoder/layers_0/mlp/wo/kernel (1 of 512)' in said
    assert 'not a distribution' in said and str(out) in said
    assert '\n' not in said and 'draft/' not in said
    assert not list(out.glob('*.COMPLETED')) + list(out.glob('*.parts'))
    (records,) = (
      path for path in out.iterdir() if path.suffix.startswith('.jsonl')
    )
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert sum(bool(line.get('error')) for line in lines) == len(TEXTS)
  # Other weights are another run; nothing stands in its way.
  start(kind, make())
  assert len(list(out.glob('*.COMPLETED'))) == 1


def test_lines_that_are_all_too_long(start, make, tmp_path):
  (tmp_path / 'lines.txt').write_bytes(b'dog ' * 100 + b'\n\xff\n' * 2)
  with pytest.raises(infer.AllFailedError, match='line 1: .*tokens') as found:
    start('lines', make())
  assert 'NaN' not in str(found.value)


def test_one_that_came_is_enough():
  def said(*errors):
    return failures.all_failed(errors, 2, {}, None)

  assert 'The first: a.' in str(said('a', 'b'))
  assert said() is said('a', None) is said(None, 'c') is None


def test_arrays_are_named_whatever_their_type():
  bad = jnp.array([1, jnp.nan, -jnp.inf])
  params = {
    'a': {'b': bad, 'c': bad.astype(jnp.bfloat16)},
    'ids': jnp.arange(3),
    'host': np.array([[np.inf]], np.float16),
    'right': jnp.ones(3),
  }
  assert failures.nonfinite(params) == [
    'a/b (2 of 3)',
    'a/c (2 of 3)',
    'host (1 of 1)',
  ]


def test_the_command_ends_with_status_2(monkeypatch, capsys):
  monkeypatch.setattr(gin_flags, 'load', lambda flags: None)

  def fails():
    raise failures.all_failed(['NaN'], 3, {'w': jnp.array(jnp.nan)}, 'out')

  assert gin_flags.main(fails, ['--gin_file=run.gin']) == 2
  said = capsys.readouterr().err
  assert said.startswith('error: None of 3') and said.count('\n') == 1
