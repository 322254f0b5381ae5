"""scripts/convert_checkpoint.py: from every kind to every kind."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from specdec_jax import checkpoints
from specdec_jax.checkpoints import convert, huggingface, huggingface_names
from specdec_jax.models import t5

pytest.importorskip('safetensors', reason='needs the extra [huggingface]')

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONFIG = t5.T5Config(
  vocab_size=24,
  emb_dim=8,
  num_heads=2,
  num_encoder_layers=1,
  num_decoder_layers=2,
  head_dim=5,
  mlp_dim=12,
)
SILU = dataclasses.replace(CONFIG, mlp_activations=('silu', 'linear'))
TIED = dataclasses.replace(
  CONFIG, mlp_activations=('relu',), logits_via_embedding=True
)


def make_params(config):
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: rng.standard_normal(leaf.shape, np.float32),
    jax.eval_shape(t5.T5(config).init, jax.random.key(0)),
  )


def save(path, kind, config, params):
  if kind == 'orbax':
    checkpoints.save_orbax(path, params)
  elif kind == 'safetensors':
    huggingface.save_huggingface(path, config, params)
  else:
    checkpoints.save_t5x(path, params, step=0)


def assert_equal(loaded, params):
  assert jax.tree.structure(loaded) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)


@pytest.mark.parametrize('config', [CONFIG, TIED], ids=['1.1', '1.0'])
@pytest.mark.parametrize('source', convert.FORMATS)
@pytest.mark.parametrize('target', convert.FORMATS)
def test_every_kind_to_every_kind(tmp_path, source, target, config):
  params = make_params(config)
  save(tmp_path / 'in', source, config, params)
  out = tmp_path / 'new' / 'out'
  line = convert.convert(
    convert.ConvertConfig(str(tmp_path / 'in'), str(out), target)
  )
  count = len(jax.tree.leaves(params))
  assert f'{out}: {count} arrays' in line
  assert os.listdir(out.parent) == ['out']
  assert_equal(checkpoints.load(out, t5.T5(config)), params)
  if target == 'safetensors':
    found, _ = huggingface.load_huggingface(out)
    assert found == config
    # All may be read by whoever may read one of them.
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1


@pytest.mark.parametrize('source', convert.FORMATS)
def test_what_arrays_do_not_tell(tmp_path, source):
  """Activations come from the network, or from config.json."""
  save(tmp_path / 'in', source, SILU, make_params(SILU))
  network = None if source == 'safetensors' else t5.T5(SILU)
  convert.convert(
    convert.ConvertConfig(
      str(tmp_path / 'in'), str(tmp_path / 'out'), 'safetensors', network
    )
  )
  found, _ = huggingface.load_huggingface(tmp_path / 'out')
  assert found == SILU


def test_special_ids_go_along(tmp_path):
  ids = huggingface_names.SpecialIds(decoder_start=0, eos=(2, 5), pad=1)
  params = make_params(CONFIG)
  huggingface.save_huggingface(tmp_path / 'in', CONFIG, params, ids=ids)
  convert.convert(
    convert.ConvertConfig(
      str(tmp_path / 'in'), str(tmp_path / 'out'), 'safetensors'
    )
  )
  assert huggingface.special_ids(tmp_path / 'out') == ids


def test_dtype(tmp_path):
  params = make_params(CONFIG)
  save(tmp_path / 'in', 't5x', CONFIG, params)
  out = str(tmp_path / 'out')
  convert.convert(
    convert.ConvertConfig(str(tmp_path / 'in'), out, dtype='bfloat16')
  )
  narrow = jax.tree.map(lambda leaf: leaf.astype('bfloat16'), params)
  assert_equal(checkpoints.load(out), narrow)


@pytest.mark.parametrize('target', convert.FORMATS)
def test_nothing_is_overwritten(tmp_path, target):
  save(tmp_path / 'in', 't5x', CONFIG, make_params(CONFIG))
  config = convert.ConvertConfig(
    str(tmp_path / 'in'), str(tmp_path / 'in'), target
  )
  with pytest.raises(ValueError, match='exists already; name another outpu'):
    convert.convert(config)


@pytest.mark.parametrize('target', convert.FORMATS)
def test_a_failed_write_leaves_no_output(tmp_path, monkeypatch, target):
  save(tmp_path / 'in', 't5x', CONFIG, make_params(CONFIG))
  out = tmp_path / 'new' / 'out'

  def disk_full(*args, **kwargs):
    raise OSError(28, 'No space left on device')

  where = {
    'orbax': 'orbax.checkpoint.StandardCheckpointHandler.save',
    'safetensors': 'specdec_jax.files.writing.os.fsync',
    't5x': 'specdec_jax.files.writing.os.fsync',
  }
  monkeypatch.setattr(where[target], disk_full)
  config = convert.ConvertConfig(str(tmp_path / 'in'), str(out), target)
  with pytest.raises(OSError, match='No space left'):
    convert.convert(config)
  assert not out.exists()
  for left in out.parent.iterdir():
    with pytest.raises(ValueError):
      checkpoints.load(left)
  monkeypatch.undo()
  convert.convert(config)
  assert_equal(checkpoints.load(out), make_params(CONFIG))


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    (dict(format='safetensor'), "'safetensor', .* Nearest known: safetensors"),
    (
      dict(dtype='bfloat61'),
      "dtype must be a floating-point type.* 'bfloat61'",
    ),
    (dict(output='gs://b/x'), 'output must be on this machine'),
  ],
)
def test_bad_input(changes, words):
  with pytest.raises(ValueError, match=words):
    convert.ConvertConfig(**{'checkpoint_path': 'a', 'output': 'b', **changes})


def script(*flags):
  return subprocess.run(
    [
      sys.executable,
      'scripts/convert_checkpoint.py',
      '--gin_file=gin/runs/convert_checkpoint.gin',
      *flags,
    ],
    cwd=ROOT,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
  )


def test_script(tmp_path):
  params = make_params(CONFIG)
  save(tmp_path / 'in', 't5x', CONFIG, params)
  flags = [
    f'--gin.CHECKPOINT_PATH={tmp_path}/in',
    f'--gin.OUTPUT_DIR={tmp_path}/out',
    '--gin.FORMAT=safetensors',
  ]
  done = script(*flags)
  assert done.returncode == 0, done.stderr
  assert 'parameters of T5Config(vocab_size=24, emb_dim=8' in done.stdout
  assert_equal(checkpoints.load(tmp_path / 'out', t5.T5(CONFIG)), params)
  network = ['--gin_file=gin/models/t5_1_1/small.gin']
  network += [
    '--gin.TARGET=%T5_1_1_SMALL',
    f'--gin.OUTPUT_DIR={tmp_path}/other',
  ]
  done = script(*flags, *network)
  assert done.returncode != 0
  assert 'vocab_size is 24, expected 32128, emb_dim is 8' in done.stderr
  assert done.stderr.count('\n') == 1  # no trace
  assert not (tmp_path / 'other').exists()
