"""`specdec convert`: from every kind to every kind, to eight bits and back."""

import dataclasses
import os
import typing

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

import folders
from small_vocabulary import network, weights
from specdec_jax import checkpoints
from specdec_jax.checkpoints import config_json, convert, huggingface
from specdec_jax.checkpoints.disk_arrays import fingerprint
from specdec_jax.cli import main
from specdec_jax.drafters.uniform import uniform
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.loading import load
from specdec_jax.models import integers, t5
from specdec_jax.models.model import Model
from toy_families import TINY, assert_same, make

SILU = dataclasses.replace(TINY, mlp_activations=('silu', 'linear'))
NET = network(2)
all_targets = pytest.mark.parametrize('target', typing.get_args(convert.Format))


def save(path, kind, config, params=None):
  """Writes parameters, by default those of `make`."""
  params = make(config)[1] if params is None else params
  if kind == 'safetensors':
    huggingface.save_huggingface(path, config, params)
  elif kind == 'orbax':
    checkpoints.save_orbax(path, params)
  else:
    checkpoints.save_t5x(path, params, step=0)
  return path


def converted(source, output, *options, **more):
  """Converts; returns the checkpoint that was written."""
  settings = convert.ConvertConfig(str(source), str(output), *options, **more)
  # As T5X looks for one: checkpoint_N in a MODEL_DIR, the file in it.
  path = output / 'checkpoint_0' if settings.format == 't5x' else output
  assert f'{path}: ' in convert.convert(settings)
  assert settings.format != 't5x' or (path / 'checkpoint').is_file()
  return path


@pytest.mark.parametrize('source', typing.get_args(convert.Format))
@all_targets
def test_every_kind_to_every_kind(tmp_path, source, target):
  """Activations come from the network, or from config.json; ids go along."""
  network, params = make(SILU)
  place = save(tmp_path / 'in', source, SILU)
  ids = config_json.SpecialIds(decoder_start=0, eos=(2, 5), pad=1)
  if source == 'safetensors':
    huggingface.save_huggingface(place, SILU, params, ids=ids)
  model = None if source == 'safetensors' else network
  out = converted(place, tmp_path / 'new' / 'out', target, model)
  assert os.listdir(tmp_path / 'new') == ['out']
  assert_same(checkpoints.load(out, network), params)
  if target == 'safetensors':
    assert folders.read(out)[0] == SILU
    assert source != target or folders.special_ids(out) == ids
    # All may be read by whoever may read one of them.
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1


@all_targets
def test_a_failed_write_leaves_no_output(tmp_path, monkeypatch, target):
  place = save(tmp_path / 'in', 't5x', TINY)
  out = tmp_path / 'new' / 'out'

  def disk_full(*args, **kwargs):
    raise OSError(28, 'No space left on device')

  failing = 'specdec_jax.files.os.fsync'
  if target == 'orbax':
    failing = 'orbax.checkpoint.StandardCheckpointHandler.save'
  monkeypatch.setattr(failing, disk_full)
  with pytest.raises(OSError, match='No space left'):
    converted(place, out, target)
  assert not out.exists()
  for left in out.parent.iterdir():
    with pytest.raises(ValueError):
      checkpoints.load(left)
  monkeypatch.undo()
  assert_same(checkpoints.load(converted(place, out, target)), make(TINY)[1])


def test_the_command(tmp_path, capsys):
  network, params = make(TINY)
  save(tmp_path / 'in', 't5x', TINY)
  given = ['convert', '--target', f'{tmp_path}/in', '--format', 'safetensors']
  assert not main.main([*given, '--output-dir', f'{tmp_path}/out'])
  sizes = 'parameters of T5Config(vocab_size=24, emb_dim=8'
  assert sizes in capsys.readouterr().out
  assert_same(checkpoints.load(tmp_path / 'out', network), params)
  assert main.main([*given, '--output-dir', f'{tmp_path}/in'])
  assert 'output ' in capsys.readouterr().err  # nothing is overwritten


# Kernels of eight bits, and what they are made of.


def draw(seed=0):
  return jax.tree.map(np.array, weights(NET, seed))


def written(folder, params, output='orbax', dtype='int8'):
  """Paths of the floats, and of what is converted from them."""
  source = save(folder / 'floats', 'orbax', NET.config, params)
  made = converted(source, folder / 'made', output, dtype=dtype)
  return source, made


@pytest.mark.parametrize('output', ['orbax', 't5x'])
def test_as_rounded_while_loading(tmp_path, output, monkeypatch):
  source, made = written(tmp_path, draw(), output)
  want = checkpoints.load(source, NET, dtype='int8')
  floats = integers.in_floats(integers.rounded(draw()))
  assert_same(checkpoints.load(made, NET, dtype='float32'), floats)
  four = integers.rounded(floats, 'int4')
  assert_same(checkpoints.load(made, NET, dtype='int4'), four)

  def fails(*_):
    raise AssertionError('a kernel was rounded')

  monkeypatch.setattr(integers, 'quantise', fails)
  device = jax.devices()[0]
  for options in ({}, {'dtype': 'int8'}, {'sharding': device}):
    found = checkpoints.load(made, NET, **options)
    assert_same(found, want)
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(found)}
    assert kinds == {'int8', 'float32'}
  assert {d for x in jax.tree.leaves(found) for d in x.devices()} == {device}
  # Control: the rounding would have been noticed.
  with pytest.raises(AssertionError, match='was rounded'):
    checkpoints.load(source, NET, dtype='int8')


def test_engines_of_eight_bits(tmp_path, tokenizer):
  """Before or after rounding it is the same target, and no other is."""
  params = draw()
  source, made = written(tmp_path, params)
  rounded = integers.rounded(params)
  targets = [load(made, NET), load(source, NET, dtype='int8')]
  targets.append(Model(NET, params, dtype='int8'))
  limits = dict(tokenizer=tokenizer, max_input_len=16, max_decode_len=8)
  texts = ['a red dog', 'cat cat']

  def made_for(wanted):
    return uniform(NET.vocab_size)._replace(name='mine', made_for=(wanted,))

  outputs = []
  for target in targets:
    for wanted in (params, integers.in_floats(rounded)):
      engine = Engine(target, made_for(fingerprint(wanted)), **limits)
      assert engine.fingerprints['target'] == fingerprint(rounded)
    done = engine.generate(texts, speculative=False)
    outputs.append([completion.tokens for completion in done])
    other = made_for(fingerprint(draw(1)))
    with pytest.raises(ValueError, match="target: .* 'mine' was made for"):
      Engine(target, other, tokenizer=tokenizer)
  assert outputs[0] == outputs[1] == outputs[2]
  unknown = Model(NET, rounded, dtype='int8')
  with pytest.raises(ValueError, match='target: .*checkpoint of floats'):
    Engine(unknown, made_for(fingerprint(params)), tokenizer=tokenizer)


def test_floats_of_eight_bits_as_other_formats(tmp_path):
  _, made = written(tmp_path, draw(), 't5x')
  want = checkpoints.load(made, NET, dtype='float32')
  source = made
  for number, kind in enumerate(typing.get_args(convert.Format)):
    # Each is made of the one before.
    source = converted(source, tmp_path / f'{number}', kind, NET, 'float32')
    assert_same(checkpoints.load(source, NET), want)
    # A drafter for the floats before eight bits is for these in any file.
    made_of = fingerprint(want), fingerprint(draw())
    assert load(source, NET).made_of() == made_of


def test_what_is_no_kernel_keeps_its_dtype(tmp_path):
  params = jax.tree.map(lambda leaf: leaf.astype('bfloat16'), draw())
  _, made = written(tmp_path, params, 't5x')
  loaded = checkpoints.load(made, NET)
  assert loaded['token_embedder']['embedding'].dtype == 'bfloat16'
  with pytest.raises(ValueError, match='dtype .*eight bits'):
    converted(made, tmp_path / 'again')  # there is nothing to convert


KERNEL = 'decoder/layers_0/mlp/wo/kernel'


@pytest.mark.parametrize(
  ('path', 'change', 'words'),
  [
    (f'{KERNEL}_scale', lambda x: x * np.nan, 'wo/kernel_scale: .*nan'),
    (f'{KERNEL}_scale', lambda x: None, 'wo/kernel_scale: .* got None'),
    (f'{KERNEL}_scale', lambda x: x[1:], 'wo/kernel_scale: .* beside'),
    (KERNEL, lambda x: x.astype(np.int16), 'wo/kernel: .*int16'),
    (KERNEL, lambda x: x.astype(np.float32), 'unknown: .*wo/kernel_scale'),
  ],
)
def test_broken_ones(tmp_path, path, change, words):
  flat = flatten_dict(integers.rounded(draw()), sep='/')
  flat[path] = change(flat[path])
  kept = {name: array for name, array in flat.items() if array is not None}
  params = unflatten_dict(kept, sep='/')
  checkpoints.save_t5x(tmp_path / 'broken', params, step=0)
  with pytest.raises(ValueError, match=words):
    checkpoints.load(tmp_path / 'broken', NET)


@pytest.mark.parametrize('dtype', [None, 'int8'])
def test_a_converted_drafter_remembers_its_target(tmp_path, dtype):
  """One that reads its target's encoder: Orbax's folder says for which."""
  layers = dict(num_encoder_layers=0, num_decoder_layers=1)
  alone = t5.T5(dataclasses.replace(NET.config, **layers))
  draft, wanted = weights(alone, 3), fingerprint(draw())
  source = tmp_path / 'floats'
  checkpoints.save_t5x(source, draft, 0, about={'target': wanted})
  floats = 'float32' if dtype else None
  cases = ('folder', 'orbax', dtype), ('file', 't5x', floats)
  for output, kind, as_dtype in cases:
    source = converted(source, tmp_path / output, kind, dtype=as_dtype)
    found = load(source, alone)
    assert found.made_for == wanted, output
    assert found.made_of()[-1] == fingerprint(draft), output
