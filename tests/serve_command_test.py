"""`specdec serve`: its flags, what it needs, and how it ends."""

import pathlib
import sys
import types

import gin
import pytest

from specdec_jax import serving
from specdec_jax.cli import commands, gin_flags

ROOT = pathlib.Path(__file__).resolve().parent.parent
SERVE = commands.COMMANDS['serve']


def macros(*flags):
  """The macros of the command with these flags."""
  parsed = gin_flags.parse_flags(flags, SERVE)
  gin_flags.load(parsed)
  names = ('CHECKPOINT_PATH', 'DRAFT_CHECKPOINT_PATH', 'VOCAB_PATH', 'TARGET',
           'DRAFT', 'MODEL_NAME')  # fmt: skip
  try:
    return {
      name: gin.query_parameter(f'{name}/gin.macro.value') for name in names
    }
  finally:
    gin.clear_config()


def test_without_arguments_it_is_the_demo_pair():
  found = macros()
  assert found['CHECKPOINT_PATH'] == 'demo/target.msgpack'
  assert found['DRAFT_CHECKPOINT_PATH'] == 'demo/draft.msgpack'
  assert found['MODEL_NAME'] == 'specdec-demo'


def test_a_target_brings_nothing_of_the_demo():
  found = macros('--target', 'mine')
  assert found.pop('CHECKPOINT_PATH') == 'mine'
  assert set(found.values()) == {None}
  found = macros('--target', 'mine', '--draft', 'small', '--model-name', 'x')
  assert found['DRAFT_CHECKPOINT_PATH'] == 'small'
  assert found['MODEL_NAME'] == 'x' and found['DRAFT'] is None


def test_flags_of_drafts_and_of_replicas():
  flags = ('--gamma', 'adaptive', '--fallback', '--calibration', 'here.json')
  gin_flags.load(gin_flags.parse_flags((*flags, '--replicas', '3'), SERVE))
  try:
    config = gin_flags.build(serving.ServeConfig)
    assert gin.query_parameter('specdec_jax.engine.Engine.gamma') == 'adaptive'
    assert gin.query_parameter('specdec_jax.engine.Engine.fallback') is True
  finally:
    gin.clear_config()
  assert config.calibration == 'here.json' and config.replicas.number == 3


def test_a_calibration_is_read_before_a_model(tmp_path):
  pytest.importorskip('uvicorn', reason='needs the extra [serve]')
  path = tmp_path / 'calibration.json'
  path.write_text('{}')

  def load(**_):
    pytest.fail('a model was loaded')

  config = serving.ServeConfig(load, calibration=str(path))
  with pytest.raises(ValueError, match='is not a calibration'):
    serving.serve(config)


@pytest.mark.parametrize('name', ['uvicorn', 'prometheus_client'])
def test_it_says_which_extra_is_missing(name, monkeypatch):
  """Before a model is loaded."""

  def load(**_):
    pytest.fail('a model was loaded')

  for known in ('uvicorn', 'starlette', 'prometheus_client'):
    found = None if known == name else types.ModuleType(known)
    monkeypatch.setitem(sys.modules, known, found)
  with pytest.raises(ValueError, match=rf'{name}.*specdec_jax\[serve\]'):
    serving.serve(serving.ServeConfig(load))
