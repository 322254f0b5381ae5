"""The shape of the library: layers, what importing it pulls in, docstrings."""

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIBRARY = ROOT / 'specdec_jax'

# From the bottom up; a module imports from its own layer and from those below.
# A new module of the library needs a place here.
LAYERS = (
  (
    'types',
    'files',
    'field_types',
    'memory',
    'nearest',
    'same_run',
    'paper',
    'table',
    'checks',
  ),
  # mathematics: jax and types only
  ('probs', 'speculative', 'analysis', 'speculate'),
  # placement and models
  ('partitioning', 'models'),
  ('drafters',),
  ('decoding',),
  # the outside world
  (
    'tokenizer',
    'tokenizer_bpe',
    'checkpoints',
    'metrics',
    'local_tasks',
    't5_tasks',
    'seqio_tasks',
    'tasks',
  ),
  # use
  (
    'compilation_cache',
    'environment',
    'record',
    'processes',
    'calibration',
    'completion',
    'scoring',
    'simulate',
    'engine',
    'pair',
    'job',
    'schedule',
    'slot_pass',
    'continuous',
    'training',
    'bench',
    'testing',
    'exact',
  ),
  ('infer',),
  ('measure',),
  ('reproduce',),
  ('interactive',),
)
LAYER = {name: depth for depth, names in enumerate(LAYERS) for name in names}
# Heavy or optional; only seqio_tasks.py and its users may need them.
TASKS_ONLY = {'seqio', 'tensorflow', 'tensorflow_text', 'tensorflow_datasets'}

FILES = sorted(LIBRARY.rglob('*.py'))


def module_name(path: pathlib.Path) -> str:
  parts = path.relative_to(ROOT).with_suffix('').parts
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


MODULES = {module_name(path): path for path in FILES}


def imports(path: pathlib.Path) -> set[str]:
  """Returns the full names that `path` imports, wherever in it."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text('utf-8'))):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: relative import'
      for alias in node.names:
        name = f'{node.module}.{alias.name}'
        found.add(name if name in MODULES else str(node.module))
  return found


def layer_name(module: str) -> str:
  return module.split('.')[1]


def internal(module: str) -> set[str]:
  return {
    name
    for name in imports(MODULES[module])
    if name.split('.')[0] == 'specdec_jax' and name != 'specdec_jax'
  }


def wrong_imports(edges: dict[str, set[str]]) -> list[str]:
  """Returns each import that goes up, as text."""
  return [
    f'{module} imports {name}'
    for module, names in edges.items()
    for name in sorted(names)
    if LAYER[layer_name(name)] > LAYER[layer_name(module)]
  ]


EDGES = {name: internal(name) for name in MODULES if name != 'specdec_jax'}


def test_every_module_has_a_layer():
  assert len(MODULES) > 5
  missing = {layer_name(name) for name in EDGES} - set(LAYER)
  assert not missing, f'give {missing} a place in LAYERS'


def test_layers_import_downwards():
  assert not wrong_imports(EDGES)
  # The check itself sees an import that goes up.
  assert wrong_imports({'specdec_jax.probs': {'specdec_jax.models.t5'}})


def test_no_import_cycles():
  graphlib.TopologicalSorter(EDGES).prepare()


@pytest.mark.parametrize('path', FILES, ids=module_name)
def test_module(path):
  """A docstring; no gin; TensorFlow and seqio in seqio_tasks.py alone."""
  tree = ast.parse(path.read_text('utf-8'))
  docstring = ast.get_docstring(tree)
  assert docstring and docstring.strip(), 'no module docstring'
  roots = {name.split('.')[0] for name in imports(path)}
  assert 'gin' not in roots
  if path.name != 'seqio_tasks.py':
    assert not roots & TASKS_ONLY


def test_every_folder_is_a_package():
  folders = {path.parent for path in FILES}
  assert not [f for f in folders if not (f / '__init__.py').exists()]


def test_import_needs_no_tensorflow():
  """Nothing on the decode path imports what only tasks need, or gin."""
  decode_path = [
    name for name in MODULES if layer_name_or_root(name) != 'tasks'
  ]
  code = f"""
import importlib, sys
class Refuse:
  def find_spec(self, name, path=None, target=None):
    if name.split('.')[0] in {TASKS_ONLY | {'gin'}!r}:
      raise ImportError(name + ' must not be imported here')
sys.meta_path.insert(0, Refuse())
for name in {decode_path!r}:
  importlib.import_module(name)
"""
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr


def layer_name_or_root(module: str) -> str:
  return module.split('.')[1] if '.' in module else module
