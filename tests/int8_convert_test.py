"""Checkpoints whose kernels are of eight bits on disk, and what they are of."""

import dataclasses

import jax
import numpy as np
import pytest

from small_vocabulary import network, weights
from specdec_jax import checkpoints
from specdec_jax.checkpoints import convert, huggingface
from specdec_jax.checkpoints.fingerprint import fingerprint
from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.drafters.uniform import uniform
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.loading import load
from specdec_jax.models import integers
from specdec_jax.models.model import Model
from specdec_jax.models.t5 import T5

NET = network(2)


def make_params(seed=0):
  return jax.tree.map(np.array, weights(NET, seed))


def written(folder, params, kind='orbax', dtype='int8', output='orbax'):
  """Paths of the floats, and of what is converted from them."""
  source = folder / f'floats-{kind}'
  if kind == 'orbax':
    checkpoints.save_orbax(source, params)
  else:
    checkpoints.save_t5x(source, params, step=0)
  made = folder / f'made-{kind}'
  settings = convert.ConvertConfig(str(source), str(made), output, dtype=dtype)
  assert 'arrays' in convert.convert(settings)
  return source, made


@pytest.mark.parametrize('output', ['orbax', 't5x'])
@pytest.mark.parametrize('kind', ['orbax', 't5x'])
def test_as_rounded_while_loading(tmp_path, kind, output, monkeypatch):
  source, made = written(tmp_path, make_params(), kind, output=output)
  want = checkpoints.load(source, NET, dtype='int8')

  def fails(*_):
    raise AssertionError('a kernel was rounded')

  monkeypatch.setattr(integers, 'quantise', fails)
  for options in ({}, {'dtype': 'int8'}):
    found = checkpoints.load(made, NET, **options)
    assert jax.tree.structure(found) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, found, want)
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(found)}
    assert kinds == {'int8', 'float32'}
  device = jax.devices()[0]
  placed = checkpoints.load(made, NET, sharding=device)
  assert {d for x in jax.tree.leaves(placed) for d in x.devices()} == {device}
  jax.tree.map(np.testing.assert_array_equal, placed, want)
  # Control: the rounding would have been noticed.
  with pytest.raises(AssertionError, match='was rounded'):
    checkpoints.load(source, NET, dtype='int8')


def test_an_engine_of_it(tmp_path, tokenizer):
  source, made = written(tmp_path, make_params())
  limits = dict(tokenizer=tokenizer, max_input_len=16, max_decode_len=8)
  mine, rounded = (
    Engine(load(path, NET, dtype=dtype), **limits)
    for path, dtype in ((made, None), (source, 'int8'))
  )
  assert mine.fingerprints == rounded.fingerprints
  same = [
    [one.tokens for one in engine.generate(['a red dog', 'cat cat'])]
    for engine in (mine, rounded)
  ]
  assert same[0] == same[1]
  assert load(made, NET).dtype == 'int8'
  assert load(source, NET).dtype is None


@pytest.mark.parametrize('output', ['orbax', 't5x'])
def test_as_floats(tmp_path, output, tokenizer):
  """What integers times factors are, wherever the arrays go."""
  params = make_params()
  _, made = written(tmp_path, params, output=output)
  want = integers.in_floats(integers.rounded(params))
  found = checkpoints.load(made, NET, dtype='float32')
  jax.tree.map(np.testing.assert_array_equal, found, want)
  device = jax.devices()[0]
  placed = checkpoints.load(made, NET, dtype='bfloat16', sharding=device)
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(x, y.astype(x.dtype)),
    placed,
    want,
  )
  # Control: these are not the floats of before.
  kernel = found['decoder']['layers_0']['mlp']['wo']['kernel']
  assert (kernel != params['decoder']['layers_0']['mlp']['wo']['kernel']).any()
  # A drafter for the floats of before is also for these.
  for wanted in (params, want):
    drafter = uniform(NET.vocab_size)._replace(made_for=(fingerprint(wanted),))
    Engine(load(made, NET, dtype='float32'), drafter, tokenizer=tokenizer)


def test_floats_of_eight_bits_as_other_formats(tmp_path):
  _, made = written(tmp_path, make_params(), output='t5x')
  want = checkpoints.load(made, NET, dtype='float32')
  originals = fingerprint(make_params())
  source = str(made)
  for kind in (*convert.FORMATS, 'orbax'):  # each is made of the one before
    output = f'{source}-{kind}'
    convert.convert(convert.ConvertConfig(source, output, kind, NET, 'float32'))
    found = checkpoints.load(output, NET)
    jax.tree.map(np.testing.assert_array_equal, found, want)
    # A drafter for the floats before eight bits is for these in any file.
    assert load(output, NET).made_of() == (fingerprint(want), originals)
    source = output


def test_floats_that_were_trained_further_are_made_of_nothing_else(tmp_path):
  """transformers keeps all entries of config.json when it saves a model."""
  _, made = written(tmp_path, make_params())
  folder = str(tmp_path / 'floats')
  convert.convert(
    convert.ConvertConfig(str(made), folder, 'safetensors', NET, 'float32')
  )
  about, trained = open_checkpoint(folder, NET).about, make_params(1)
  huggingface.save_huggingface(folder, NET.config, trained, about=about)
  assert load(folder, NET).made_of() == (fingerprint(trained),)


def test_what_is_no_kernel_keeps_its_dtype(tmp_path):
  params = jax.tree.map(lambda leaf: leaf.astype('bfloat16'), make_params())
  _, made = written(tmp_path, params, 't5x', output='t5x')
  found = checkpoints.load(made, NET)
  assert found['token_embedder']['embedding'].dtype == 'bfloat16'
  kernel = found['decoder']['logits_dense']
  assert (kernel['kernel'].dtype, kernel['kernel_scale'].dtype) == (
    'int8',
    'float32',
  )


def test_four_bits_of_eight(tmp_path):
  _, made = written(tmp_path, make_params())
  floats = checkpoints.load(made, NET, dtype='float32')
  found = checkpoints.load(made, NET, dtype='int4')
  want = integers.rounded(floats, 'int4')
  jax.tree.map(np.testing.assert_array_equal, found, want)


def test_eight_bits_are_not_converted_to_eight_bits(tmp_path):
  _, made = written(tmp_path, make_params())
  for dtype in (None, 'int8'):
    with pytest.raises(ValueError, match='already; give the dtype of floats'):
      convert.convert(
        convert.ConvertConfig(str(made), str(tmp_path / 'again'), dtype=dtype)
      )


def change(tree, path, make):
  *rest, last = path.split('/')
  for name in rest:
    tree = tree[name]
  if (value := make(tree[last])) is None:
    del tree[last]
  else:
    tree[last] = value


KERNEL = 'decoder/layers_0/mlp/wo/kernel'


@pytest.mark.parametrize(
  ('path', 'make', 'words'),
  [
    (f'{KERNEL}_scale', lambda x: x * np.nan, 'wo/kernel_scale has factors'),
    (f'{KERNEL}_scale', lambda x: x * 0, 'not finite or not above 0'),
    (f'{KERNEL}_scale', lambda x: None, 'wo/kernel_scale .* found none'),
    (f'{KERNEL}_scale', lambda x: x[1:], 'wo/kernel_scale .* beside it'),
    (f'{KERNEL}_scale', lambda x: x.astype(np.int8), 'wo/kernel_scale is int8'),
    (KERNEL, lambda x: x[1:], 'wo/kernel is .*, expected'),
    (KERNEL, lambda x: x.astype(np.int16), 'wo/kernel is int16'),
    (KERNEL, lambda x: x.astype(np.float32), 'unknown: .*wo/kernel_scale'),
    (
      'token_embedder/embedding',
      lambda x: x.astype(np.int8),
      'embedding is int8, expected floating',
    ),
  ],
)
def test_broken_ones(tmp_path, path, make, words):
  params = integers.rounded(make_params())
  change(params, path, make)
  checkpoints.save_orbax(tmp_path / 'broken', params)
  with pytest.raises(ValueError, match=words):
    checkpoints.load(tmp_path / 'broken', NET)


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_floats_that_are_not_finite(tmp_path, bad, tokenizer):
  params = make_params()
  params['decoder']['layers_0']['mlp']['wo']['kernel'][1, 2] = bad
  with pytest.raises(ValueError, match='wo/kernel .*not finite.* output 2 '):
    written(tmp_path, params)
  assert not (tmp_path / 'made-orbax').exists()
  for target in (
    load(tmp_path / 'floats-orbax', NET, dtype='int8'),
    Model(NET, params, dtype='int8'),
  ):
    with pytest.raises(ValueError, match='mlp/wo/kernel.* output 2 '):
      Engine(target, tokenizer=tokenizer)


# --- What it was made of ------------------------------------------------------


def test_fingerprint_of_what_is_on_disk(tmp_path):
  params = make_params()
  source, made = written(tmp_path, params)
  assert load(source, NET).made_of() == (fingerprint(params),)
  assert load(made, NET).made_of() == (fingerprint(params),)
  _, narrow = written(tmp_path / 'narrow', params, dtype='bfloat16')
  assert load(narrow, NET).made_of() == (fingerprint(params),)


def test_a_drafter_made_for_its_target(tmp_path, tokenizer):
  """Before or after rounding it is the same target, and no other is."""
  params = make_params()
  source, made = written(tmp_path, params)
  rounded = integers.rounded(params)
  kinds = {
    'converted': load(made, NET),
    'while loading': load(source, NET, dtype='int8'),
    'in memory': Model(NET, params, dtype='int8'),
  }

  def made_for(wanted):
    size = NET.vocab_size
    return uniform(size)._replace(name='mine', made_for=(wanted,))

  for name, target in kinds.items():
    for wanted in (params, rounded, integers.in_floats(rounded)):
      engine = Engine(
        target, made_for(fingerprint(wanted)), tokenizer=tokenizer
      )
      assert engine.fingerprints['target'] == fingerprint(rounded), name
    other = made_for(fingerprint(make_params(1)))
    with pytest.raises(ValueError, match="'mine' was made for the target with"):
      Engine(target, other, tokenizer=tokenizer)
  unknown = Model(NET, rounded, dtype='int8')
  with pytest.raises(ValueError, match='was made of is not known'):
    Engine(unknown, made_for(fingerprint(params)), tokenizer=tokenizer)
  # Nobody asks what an unknown one was made of.
  Engine(unknown, uniform(NET.vocab_size), tokenizer=tokenizer)


@pytest.mark.parametrize('dtype', [None, 'int8'])
@pytest.mark.parametrize('known', [True, False])
def test_a_converted_drafter_remembers_its_target(tmp_path, dtype, known):
  """One that reads its target's encoder: Orbax's folder says for which."""
  alone = T5(
    dataclasses.replace(NET.config, num_encoder_layers=0, num_decoder_layers=1)
  )
  wanted = fingerprint(make_params()) if known else ''
  about = {'target': wanted} if known else None
  draft = weights(alone, 3)
  checkpoints.save_t5x(tmp_path / 'floats', draft, 0, about=about)
  for source, output, kind, as_dtype in (
    ('floats', 'folder', 'orbax', dtype),
    ('floats', 'floats2', 'orbax', None),
    ('floats2', 'file', 't5x', None),
  ):
    paths = str(tmp_path / source), str(tmp_path / output)
    convert.convert(convert.ConvertConfig(*paths, kind, dtype=as_dtype))
    found = load(tmp_path / output, alone)
    assert found.made_for == wanted, output
    assert found.made_of()[-1] == fingerprint(draft), output
