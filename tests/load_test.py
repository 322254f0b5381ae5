"""`checkpoints.load`: what it detects, where arrays go, what that takes."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import checkpoints
from specdec_jax.checkpoints import huggingface, huggingface_fetch
from specdec_jax.models import t5

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONFIG = t5.T5Config(
  vocab_size=24,
  emb_dim=8,
  num_heads=2,
  num_encoder_layers=1,
  num_decoder_layers=1,
  head_dim=5,
  mlp_dim=12,
)
NETWORK = t5.T5(CONFIG)


@pytest.fixture(scope='module')
def params():
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: rng.standard_normal(leaf.shape, np.float32),
    jax.eval_shape(NETWORK.init, jax.random.key(0)),
  )


@pytest.fixture(scope='module')
def orbax(tmp_path_factory, params):
  """Not to be changed by a test."""
  path = tmp_path_factory.mktemp('orbax') / 'new' / 'checkpoint_3'
  checkpoints.save_orbax(path, params)
  return path


def assert_equal(loaded, params):
  assert jax.tree.structure(loaded) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_orbax_round_trip(orbax, params):
  for path in (orbax, f'file://{orbax}', f'file://{orbax}/'):
    loaded = checkpoints.load(path, NETWORK)
    assert_equal(loaded, params)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(loaded))
  assert os.listdir(orbax.parent) == ['checkpoint_3']


def test_single_file_at_an_address(tmp_path, params):
  path = tmp_path / 'model.msgpack'
  for size in (1, 100):
    array = {'a': np.arange(size, dtype=np.float32), 'b': params}
    checkpoints.save_t5x(path, array, step=0)
    assert_equal(checkpoints.load(f'file://{path}'), array)


def test_orbax_reads_what_is_saved(orbax, params):
  import orbax.checkpoint as ocp

  with ocp.StandardCheckpointer() as checkpointer:
    restored = checkpointer.restore(orbax, params)
  assert_equal(restored, params)


@pytest.mark.parametrize('root', ['target', 'params', ''])
@pytest.mark.parametrize('item', ['', 'state', 'default'])
def test_trees_of_orbax(tmp_path, root, item):
  """T5X's training state, flax's variables, and parameters alone."""
  import orbax.checkpoint as ocp

  tree = {'a': {'b': np.arange(4.0, dtype=np.float32)}}
  saved = {root: tree, 'state': {'v': np.ones(2)}} if root else tree
  path = tmp_path / 'checkpoint_1' / item
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=bool(root))) as c:
    c.save(path, args=ocp.args.PyTreeSave(saved))
  assert_equal(checkpoints.load(tmp_path / 'checkpoint_1'), tree)


def test_bfloat16_and_dtypes(tmp_path, params):
  narrow = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)
  checkpoints.save_orbax(tmp_path / 'narrow', narrow)
  assert_equal(checkpoints.load(tmp_path / 'narrow', NETWORK), narrow)
  wide = checkpoints.load(tmp_path / 'narrow', dtype=np.float32)
  assert {leaf.dtype.name for leaf in jax.tree.leaves(wide)} == {'float32'}
  assert_equal(wide, jax.tree.map(lambda leaf: leaf.astype('float32'), narrow))


@pytest.mark.parametrize('dtype', ['int16', np.int8, 'flot32', bool])
def test_other_dtypes(orbax, dtype):
  with pytest.raises(ValueError, match='dtype'):
    checkpoints.load(orbax, dtype=dtype)


def test_device_dict_and_rule(orbax, params):
  device = jax.devices()[0]
  on_device = checkpoints.load(orbax, sharding=device)
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(on_device))
  assert_equal(on_device, params)
  tree = jax.tree.map(lambda _: device, params)
  tree['token_embedder']['embedding'] = None
  mixed = checkpoints.load(orbax, sharding=tree)
  assert isinstance(mixed['token_embedder']['embedding'], np.ndarray)
  assert isinstance(mixed['decoder']['decoder_norm']['scale'], jax.Array)
  ruled = checkpoints.load(
    orbax, sharding=lambda name: device if name.endswith('scale') else None
  )
  assert isinstance(ruled['decoder']['decoder_norm']['scale'], jax.Array)
  assert isinstance(ruled['token_embedder']['embedding'], np.ndarray)
  del tree['decoder']['decoder_norm']
  with pytest.raises(ValueError, match='decoder/decoder_norm/scale'):
    checkpoints.load(orbax, sharding=tree)
  with pytest.raises(ValueError, match="'cpu'.* Device"):
    checkpoints.load(orbax, sharding='cpu')


def run(code, *arguments, **environment):
  """The JSON that a fresh process prints."""
  done = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(code), *map(str, arguments)],
    cwd=ROOT,
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


def test_sharded_save_and_restore(tmp_path):
  code = """
    import json, sys
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from specdec_jax import checkpoints
    from specdec_jax.checkpoints import disk_arrays
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ('a', 'b'))
    wide = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)
    rows, both = (NamedSharding(mesh, P(*s)) for s in (('a',), ('a', 'b')))
    saved = {'x': {'w': jax.device_put(wide, both)}, 's': np.ones(3)}
    checkpoints.save_orbax(sys.argv[1], saved)
    checkpoints.save_t5x(sys.argv[1] + '.msgpack', saved, step=0)
    reads = []
    for kind in (disk_arrays.StoredArray, disk_arrays.FileArray):
      def read(self, out, index, original=kind.read_into):
        reads.append((list(self.shape), list(out.shape)))
        return original(self, out, index)
      kind.read_into = read
    found = []
    for path in (sys.argv[1], sys.argv[1] + '.msgpack'):
      for sharding in (rows, both, NamedSharding(mesh, P(None, 'b'))):
        rule = lambda name: sharding if name == 'x/w' else None
        loaded = checkpoints.load(path, sharding=rule, dtype='float32')
        w = loaded['x']['w']
        found.append([
          w.sharding == sharding,
          bool((np.asarray(w) == wide).all()),
          [shape for whole, shape in reads if whole == [8, 12]],
        ])
        reads.clear()
    try:
      checkpoints.load(sys.argv[1], sharding=lambda n: rows)
    except ValueError as error:
      found.append(str(error))
    print(json.dumps(found))
  """
  flags = '--xla_force_host_platform_device_count=4'
  *found, error = run(code, tmp_path / 'x', XLA_FLAGS=flags)
  # Each shard is read once, not the array, and not once a device.
  shards = [2 * [[4, 12]], 4 * [[4, 6]], 2 * [[8, 6]]]
  assert found == [[True, True, shard] for shard in 2 * shards]
  assert 's [3] cannot be laid out by' in error


def test_network_is_checked_before_anything_is_read(tmp_path, orbax):
  copy = tmp_path / 'copy'
  shutil.copytree(orbax, copy)
  other = t5.T5(t5.T5Config(**{**vars(CONFIG), 'emb_dim': 16}))
  for path in copy.rglob('d/*'):
    if path.stat().st_size > 10_000:
      path.write_bytes(b'')
  with pytest.raises(ValueError, match='emb_dim is 8, expected 16'):
    checkpoints.load(orbax, other)


def test_broken_orbax(tmp_path, orbax):
  copy = tmp_path / 'copy'
  shutil.copytree(orbax, copy)
  (copy / '_METADATA').write_text('{"tree_metadata": {"(')
  with pytest.raises(ValueError, match='_METADATA'):
    checkpoints.load(copy)
  shutil.copytree(orbax, tmp_path / 'other')
  gone = [p for p in (tmp_path / 'other').rglob('d/*') if p.is_file()]
  for path in gone:
    path.write_bytes(path.read_bytes()[:100])
  with pytest.raises(ValueError, match=r'array \S+ cannot be read'):
    checkpoints.load(tmp_path / 'other')


def test_orbax_that_was_never_finished(tmp_path, orbax):
  unfinished = tmp_path / 'checkpoint_3.orbax-checkpoint-tmp-17'
  shutil.copytree(orbax, unfinished)
  with pytest.raises(ValueError, match='never finished'):
    checkpoints.load(unfinished)


def test_save_orbax_refuses(tmp_path, orbax, params):
  with pytest.raises(ValueError, match='exists already'):
    checkpoints.save_orbax(orbax, params)
  with pytest.raises(ValueError, match='no parameters to save'):
    checkpoints.save_orbax(tmp_path / 'x', {})
  (tmp_path / 'empty').mkdir()
  checkpoints.save_orbax(tmp_path / 'empty', params)
  assert_equal(checkpoints.load(tmp_path / 'empty'), params)


def need_safetensors():
  reason = 'needs the extra [huggingface]'
  pytest.importorskip('safetensors', reason=reason)


def test_huggingface_folder(tmp_path, params):
  need_safetensors()
  huggingface.save_huggingface(tmp_path / 'hf', CONFIG, params)
  assert_equal(checkpoints.load(tmp_path / 'hf', NETWORK), params)
  loaded = checkpoints.load(tmp_path / 'hf', sharding=jax.devices()[0])
  assert isinstance(loaded['token_embedder']['embedding'], jax.Array)
  other = t5.T5(t5.T5Config(**{**vars(CONFIG), 'mlp_dim': 13}))
  with pytest.raises(ValueError, match='mlp_dim .d_ff. is 12, expected 13'):
    checkpoints.load(tmp_path / 'hf', other)
  with pytest.raises(ValueError, match='file://.*bucket'):
    checkpoints.load(f'file://{tmp_path}/hf')


def test_id_of_the_hub(tmp_path, params, monkeypatch):
  need_safetensors()
  monkeypatch.chdir(tmp_path)
  huggingface.save_huggingface(tmp_path / 'hf', CONFIG, params)
  asked = []

  def fetch(hub_id):
    asked.append(hub_id)
    if hub_id == 'someone/no-such-t5':
      raise ValueError('The hub has no such model.')
    return tmp_path / 'hf'

  monkeypatch.setattr(huggingface_fetch, 'fetch', fetch)
  assert_equal(checkpoints.load('someone/t5', NETWORK), params)
  assert_equal(checkpoints.load('hf', NETWORK), params)
  with pytest.raises(ValueError, match='someone/no-such-t5.* hub'):
    checkpoints.load('someone/no-such-t5')
  assert asked == ['someone/t5', 'someone/no-such-t5']
  # These are mistyped paths.
  for path in ('hf/modle', 'model.msgpack', '/a/b', './x/y', 'a/b/c'):
    with pytest.raises(ValueError, match=f'{path}.*No such file or folder.$'):
      checkpoints.load(path)
  assert len(asked) == 2


def test_folders_that_are_no_checkpoint(tmp_path, orbax):
  with pytest.raises(ValueError, match='found nothing'):
    checkpoints.load(tmp_path)
  for step in (5, 1000, 200):
    (tmp_path / f'checkpoint_{step}').mkdir()
  with pytest.raises(ValueError) as caught:
    checkpoints.load(tmp_path)
  assert (
    'holds checkpoint_5, checkpoint_200, checkpoint_1000; name one of them.'
    f" The newest is '{tmp_path}/checkpoint_1000'." in str(caught.value)
  )
  with pytest.raises(ValueError, match='The newest is .file://.*checkpoint_3'):
    checkpoints.load(f'file://{orbax.parent}')
  with pytest.raises(ValueError, match='foo://x'):
    checkpoints.load('foo://x')
  with pytest.raises(ValueError, match='file:///nowhere/at-all'):
    checkpoints.load('file:///nowhere/at-all')
