"""What all suites share: how programs are compiled, folders, a tokenizer."""

import gc
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest

_TESTS = pathlib.Path(__file__).parent
# Toy models run for milliseconds and compile for seconds.
_QUICK_FLAGS = (
  '--xla_backend_optimization_level=0',
  '--xla_llvm_disable_expensive_passes=true',
  '--xla_cpu_use_fusion_emitters=false',  # JAX 0.10: half the time
  '--xla_cpu_parallel_codegen_split_count=1',
)


def _known_flags(cache):
  """Returns the quick flags that the installed XLA knows.

  XLA ends a process that is given another flag; its message names them all.
  The answer is kept in pytest's cache, if there is one.
  """
  asked = [importlib.metadata.version('jaxlib'), *_QUICK_FLAGS]
  for_whom, known = (cache and cache.get('xla_flags', None)) or (None, None)
  if for_whom == asked:
    return known
  command = [sys.executable, '-c', 'import jax; jax.devices()']
  asks = {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ' '.join(_QUICK_FLAGS)}
  process = subprocess.run(
    command, env=os.environ | asks, stderr=subprocess.PIPE, text=True
  )
  known = [flag for flag in _QUICK_FLAGS if flag not in process.stderr]
  if cache:
    cache.set('xla_flags', [asked, known])
  return known


def pytest_configure(config):
  """Settings of JAX, before it looks at them; subprocesses inherit them.

  The quick run compiles without optimisation. `-m slow`, and `-m ""` for all
  tests, compile what users run.
  """
  is_worker = hasattr(config, 'workerinput')  # xdist's
  cache = getattr(config, 'cache', None)  # none with -p no:cacheprovider
  given = os.environ.get('XLA_FLAGS', '')  # the last of a kind counts
  # Workers, and runs that a test starts, inherit them.
  if config.option.markexpr == 'not slow' and _QUICK_FLAGS[1] not in given:
    os.environ['XLA_FLAGS'] = ' '.join((*_known_flags(cache), given))
  # Processes that tests start, and kill, have a folder of this run's.
  folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
  config.add_cleanup(folder.cleanup)
  os.environ['JAX_COMPILATION_CACHE_DIR'] = folder.name
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.1'
  # Nothing is measured, and tests find the parameters that T5X has.
  os.environ['SPECDEC_KERNEL_LAYOUT'] = 'in_out'
  if cache:
    programs = cache.mkdir('xla')
    entries = [] if is_worker else list(programs.iterdir())
    if sum(entry.stat().st_size for entry in entries) > _MAX_BYTES:
      for entry in entries:
        entry.unlink()
    if is_worker or not getattr(config.option, 'numprocesses', None):
      _keep_programs(programs)


_MAX_BYTES = 1 << 29  # of some runs of a code that changes


def _keep_programs(folder):
  """Programs that an earlier run, or another worker, has compiled are read.

  `pytest --cache-clear` removes them. JAX by itself writes an entry in place:
  another process might read the half of it.
  """
  import jax
  from jax._src import lru_cache

  def put(cache, key, value):
    entry = pathlib.Path(cache.path, f'{key}-cache')
    part = entry.with_name(f'{key}.{os.getpid()}')
    part.write_bytes(value)
    part.replace(entry)

  lru_cache.LRUCache.put = put
  jax.config.update('jax_compilation_cache_dir', str(folder))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)


# Group of slow tests -> how its files' paths begin; the rest are `system`.
_GROUPS = {
  'laws': (
    *('decoding/', 'drafters/', 'engine/drafters', 'engine/families'),
    *('engine/scheduler', 'rules/options', 'rules/tokens', 'system/demo'),
  ),
  'parity': ('parity/', 't5x_plugin/', 'checkpoints/t5x'),
  'documents': ('system/documents', 'system/notebook'),
}


def pytest_collection_modifyitems(items):
  """Puts each slow test into a group: `-m "slow and laws"` runs one of them."""
  for item in items:
    if item.get_closest_marker('slow'):
      path = item.path.relative_to(_TESTS).as_posix()
      groups = [g for g, begin in _GROUPS.items() if path.startswith(begin)]
      item.add_marker((*groups, 'system')[0])


def pytest_collection_finish():
  """Garbage is collected less often: traces make many objects, few cycles.

  What was imported stays, so the collector need not go through it.
  """
  gc.collect()
  gc.freeze()
  gc.set_threshold(50_000)


@pytest.fixture(scope='module', autouse=True)
def _few_programs():
  """Drops compiled programs after a module, once there are many."""
  yield
  _drop_programs(15_000)


@pytest.fixture(autouse=True)
def _not_too_many_programs(request):
  """Drops them after a slow test too: some compile hundreds."""
  yield
  if request.node.get_closest_marker('slow'):
    _drop_programs(30_000)


def _drop_programs(most):
  """Drops compiled programs if they have more memory mappings than `most`.

  A program takes some 15 memory mappings. Linux gives a process 65,530, and
  XLA ends in a segmentation fault where there are no more.
  """
  mappings = pathlib.Path('/proc/self/maps')
  if mappings.exists() and mappings.read_text().count('\n') > most:
    import jax

    jax.clear_caches()
    gc.collect()


@pytest.fixture
def strict():
  """No rank and no dtype is promoted silently."""
  import jax  # comes after its settings

  with jax.numpy_rank_promotion('raise'), jax.numpy_dtype_promotion('strict'):
    yield


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A folder of the module's own."""
  return tmp_path_factory.mktemp('module')


@pytest.fixture(scope='session')
def _tokenizer(tmp_path_factory):
  import small_vocabulary  # JAX comes after its settings

  return small_vocabulary.train(tmp_path_factory.mktemp('vocabulary'))


@pytest.fixture(scope='module')
def tokenizer(folder, _tokenizer):
  """A small one that all modules share; a copy of its file is in `folder`."""
  shutil.copy(_tokenizer.path, folder / 'vocab.model')
  return _tokenizer
