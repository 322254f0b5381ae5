"""Each gin path of version 0.1 loads, and means what it meant."""

import dataclasses
import functools
import hashlib
import inspect
import json
import pathlib

import gin
import pytest

from specdec_jax.cli import gin_flags, gin_old_macros, gin_old_paths
from specdec_jax.partitioning import Placement

# path -> what its files made of it: of each macro a digest of its value, and
# of each run that they describe one of all its values. Made of the files of
# 0.1; names of classes and functions are not in it, so that they may change.
MADE = pathlib.Path(__file__).with_suffix('.json')
# The demo pair is another one now; with these sizes it is that of 0.1.
DEMO_OF_0_1 = (
  '--gin.demo_target/t5.T5Config.emb_dim=128',
  '--gin.demo_target/t5.T5Config.head_dim=32',
  '--gin.demo_target/t5.T5Config.mlp_dim=384',
  '--gin.demo_target/t5.T5Config.num_encoder_layers=3',
  '--gin.demo_target/t5.T5Config.num_decoder_layers=18',
  '--gin.demo_draft/t5.T5Config.emb_dim=128',
  '--gin.demo_draft/t5.T5Config.head_dim=32',
  '--gin.demo_draft/t5.T5Config.mlp_dim=384',
  '--gin.demo_draft/t5.T5Config.encoder_dim=0',
  '--gin.demo_draft/t5.T5Config.num_encoder_layers=3',
)
# Arguments that have another name since 0.1.
RENAMED = {'drafter': 'draft'}


def _resolved(value, scopes=()):
  """`value` with its macros and references replaced by what they stand for."""
  if isinstance(value, gin.config.ConfigurableReference):
    scope, selector = value.config_key
    if selector == 'gin.macro':
      found = gin.config._CONFIG.get((scope, selector), {})
      return _resolved(found.get('value', f'%{scope}'), (scope,))
    inside = value.scopes or scopes
    return [
      'call' if value.evaluate else 'function',
      _arguments(value.configurable.wrapped, selector, tuple(inside)),
    ]
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    given = {
      field.name: getattr(value, field.name)
      for field in dataclasses.fields(value)
    }
    return ['call', _without_defaults(type(value), given, ())]
  if isinstance(value, dict):
    return {str(k): _resolved(v, scopes) for k, v in value.items()}
  if isinstance(value, list | tuple):
    name = type(value).__name__
    return [name, *(_resolved(one, scopes) for one in value)]
  return repr(value)


def _arguments(function, selector, scopes):
  """What gin binds of `function` inside `scopes`; inner ones go first."""
  bound = {}
  for depth in range(len(scopes) + 1):
    key = ('/'.join(scopes[:depth]), selector)
    bound |= gin.config._CONFIG.get(key, {})
  return _without_defaults(function, bound, scopes)


def _without_defaults(function, given, scopes):
  known = inspect.signature(function).parameters
  found = {name: _resolved(value, scopes) for name, value in given.items()}
  if function is Placement and found.get('dtype') == repr('float32'):
    del found['dtype']  # the default of 0.1, which is now the model's dtype
  return {
    RENAMED.get(name, name): value
    for name, value in sorted(found.items())
    if value != _resolved(known[name].default)
  }


def _digest(value):
  text = json.dumps(value, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:8]


def made_of(path, was):
  """Loads a gin file by the scripts' way; returns digests of what it says.

  Args:
    path: of the file.
    was: what was made of it. Macros that it required are given, by the names
      that they had.
  """
  flags = [f'--gin_file={path}']
  if path.startswith('gin/partitioning/'):
    flags.insert(0, '--gin_file=gin/runs/demo.gin')
  if path == 'gin/models/demo_pair.gin':
    flags.append('--gin.GAMMA=4')
  demo = [name for name in ('DEMO_TARGET', 'DEMO_DRAFT') if name in was]
  flags += [
    flag for flag in DEMO_OF_0_1 if any(n.lower() in flag for n in demo)
  ]
  for name in was:
    if was[name] == _digest(_resolved(f'given-{name}')):
      flags.append(f'--gin.{name}=given-{name}')
  gin_flags.load(gin_flags.parse_flags(flags))
  config = gin.config._CONFIG
  for bound in config.values():
    # Its kernels have eight bits on disk now, and it says that it reads floats.
    if bound.get('path') == 'demo/target.msgpack':
      bound.pop('dtype', None)
  try:
    used = {
      ref.config_key[1] for ref in gin.config.iterate_references(config)
    } | {'gin.macro', 'gin.constant'}
    return {
      scope: _digest(_resolved(values['value'], (scope,)))
      for (scope, selector), values in sorted(config.items())
      if selector == 'gin.macro'
    } | {
      '': sorted(
        _digest(_arguments(configurable(selector), selector, ()))
        for scope, selector in config
        if not scope and selector not in used
      )
    }
  finally:
    gin.clear_config()


def configurable(selector):
  return gin.config._REGISTRY[selector].wrapped


OLD = json.loads(MADE.read_text())


def test_all_old_paths_are_here():
  """99 of them; each is a file still, or has a new path."""
  assert len(OLD) == 99
  stayed = {path for path in OLD if (gin_flags.ROOT / path).is_file()}
  assert set(gin_old_paths.PATHS) == set(OLD) - stayed
  for moved in gin_old_paths.PATHS.values():
    assert (gin_flags.ROOT / moved.path).is_file()


@pytest.mark.parametrize('path', OLD)
def test_an_old_path_means_what_it_meant(path, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  was = OLD[path]
  found = made_of(path, was)
  new = gin_old_macros.NAMES  # of a macro that has another name now
  found = {name: found.get(name, found.get(new.get(name))) for name in was}
  assert found == was


def test_the_check_sees_another_value(tmp_path, monkeypatch):
  """The negative control of the above: one number more or less."""
  monkeypatch.chdir(tmp_path)
  path = 'gin/runs/ende_xxl_base_t1.gin'
  was = OLD[path]
  for name, value in (('GAMMA', 4), ('DRAFT', '%T5_1_1_LARGE')):
    text = f"include '{path}'\n{name} = {value}\n"
    (tmp_path / 'mine.gin').write_text(text)
    found = made_of('mine.gin', was)
    changed = {key for key in was if found.get(key) != was[key]}
    assert changed == {name, ''}


def load(*flags):
  gin_flags.load(gin_flags.parse_flags(flags))
  return gin.query_parameter('DRAFT/gin.macro.value')


def test_old_paths_say_the_new_one_once(tmp_path, monkeypatch, capfd):
  monkeypatch.chdir(tmp_path)
  anew = functools.cache(gin_old_paths.serve.__wrapped__)
  monkeypatch.setattr(gin_old_paths, 'serve', anew)
  monkeypatch.setattr(gin.config, '_FILE_READERS', gin.config._FILE_READERS[:1])
  (tmp_path / 'mine.gin').write_text(
    "include 'gin/runs/ende_xxl_base_t1.gin'\nVOCAB_PATH = 'a'\n"
  )
  for _ in range(2):
    draft = load('--gin_file=mine.gin', '--gin.INFER_OUTPUT_DIR=out')
    assert draft.config_key[0] == 'T5_1_1_BASE'
    absolute = gin_flags.ROOT / 'gin/models/demo_pair.gin'
    gin_flags.load(
      gin_flags.parse_flags([f'--gin_file={absolute}', '--gin.GAMMA=1'])
    )
  assert capfd.readouterr().err.splitlines() == [
    'gin/runs/ende_xxl_base_t1.gin is now gin/runs/ende_xxl.gin with'
    ' --gin.DRAFT=%T5_1_1_BASE --gin.DRAFT_CHECKPOINT_PATH='
    "'gs://t5-data/pretrained_models/t5x/t5_1_1_base/checkpoint_1000000'"
    ' --gin.GAMMA=5 --gin.TEMPERATURE=1.0',
    'gin/models/demo_pair.gin is now gin/models/demo/pair.gin',
  ]
  gin.clear_config()


def test_a_file_of_ones_own_goes_before_an_old_path(tmp_path, monkeypatch):
  """In the working folder or a search path, as of all gin files."""
  monkeypatch.chdir(tmp_path)
  # gin keeps those of the loads before.
  monkeypatch.setattr(gin.config, '_LOCATION_PREFIXES', [''])
  path = tmp_path / 'one' / 'gin' / 'models' / 't5_small.gin'
  path.parent.mkdir(parents=True)
  path.write_text("DRAFT = 'mine'\n")
  flags = ['--gin_file=gin/models/t5_small.gin', '--gin_search_paths=one']
  assert load(*flags) == 'mine'
  monkeypatch.chdir(tmp_path / 'one')
  assert load(flags[0]) == 'mine'
  gin.clear_config()
