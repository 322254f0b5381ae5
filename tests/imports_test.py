"""The shape of the library: rooms, what importing it pulls in, docstrings.

And that of its tests: they lie as the library does, and share only toys.
"""

import ast
import graphlib
import pathlib

import pytest

from toy_processes import output_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIBRARY = ROOT / 'specdec_jax'

# From the bottom up: a module imports from its own room and from those below.
# A new room of the library needs a place here. `paper.printed` is data, and
# lies below what compares itself with it; `models.backend` knows only devices.
ROOMS = """
types tree_shape checks files paper.printed models.backend
probs verify verify_tree analysis
rules
request
models
partitioning
checkpoints
drafters
decoding
text
report
engine
measure
training
infer
paper
notebook
t5x_plugin
serving
cli __main__
""".strip().splitlines()
DEPTH = {name: i for i, names in enumerate(ROOMS) for name in names.split()}
# Heavy or optional; only text/tasks.py and its users may need them.
TASKS_ONLY = {'seqio', 'tensorflow', 'tensorflow_text', 'tensorflow_datasets'}

FILES = sorted(LIBRARY.rglob('*.py'))


def module_name(path: pathlib.Path) -> str:
  name = '.'.join(path.relative_to(ROOT).with_suffix('').parts)
  return name.removesuffix('.__init__')


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


def room(module: str) -> str:
  """Of a module's full name; a module may have a place of its own."""
  name = module.removeprefix('specdec_jax.')
  return name if name in DEPTH else name.split('.')[0]


def wrong_imports(edges: dict[str, set[str]]) -> list[tuple[str, str]]:
  """Returns each import that goes up: the module, and what it imports."""
  pairs = [(module, name) for module in edges for name in edges[module]]
  return [pair for pair in pairs if DEPTH[room(pair[1])] > DEPTH[room(pair[0])]]


EDGES = {
  name: {i for i in imports(path) if i.startswith('specdec_jax.')}
  for name, path in MODULES.items()
  if name != 'specdec_jax'
}


def test_every_module_has_a_room():
  """Loose are the mathematics, the public API, and rooms of one module."""
  missing = {room(name) for name in EDGES} - set(DEPTH)
  assert len(MODULES) > 5 and not missing, f'give {missing} a place in ROOMS'
  loose = (
    'types request probs verify analysis tree_shape verify_tree partitioning'
  )
  loose = {*loose.split(), '__init__', '__main__'}
  assert loose == {path.stem for path in LIBRARY.glob('*.py')}
  assert all((path.parent / '__init__.py').exists() for path in FILES)


def test_rooms_import_downwards_and_in_no_circle():
  graphlib.TopologicalSorter(EDGES).prepare()
  assert not wrong_imports(EDGES)
  # The check itself sees an import that goes up.
  assert wrong_imports({'specdec_jax.probs': {'specdec_jax.models.t5'}})


@pytest.mark.parametrize('path', FILES, ids=module_name)
def test_module(path):
  """A docstring; gin in cli/ alone, TensorFlow and seqio in text/tasks.py."""
  tree = ast.parse(path.read_text('utf-8'))
  assert (ast.get_docstring(tree) or '').strip(), 'no module docstring'
  roots = {name.split('.')[0] for name in imports(path)}
  assert 'gin' not in roots or path.parent.name == 'cli'
  assert not roots & TASKS_ONLY or path.name == 'tasks.py'


TESTS = ROOT / 'tests'
SUITES = sorted(TESTS.rglob('*_test.py'))


def imported_suites(path: pathlib.Path) -> set[str]:
  """Returns the test modules that a file of the tests imports."""
  last = {name.rsplit('.')[-1] for name in imports(path)}
  return last & {suite.stem for suite in SUITES}


def test_suites_share_only_toys(tmp_path):
  """Suites share helpers through tests/toys alone."""
  for path in TESTS.rglob('*.py'):
    assert not imported_suites(path), path
  # The check itself sees an import of a test module.
  (tmp_path / 'wrong.py').write_text('from verify_test import ROWS')
  assert imported_suites(tmp_path / 'wrong.py') == {'verify_test'}


def test_suites_lie_as_the_library_does():
  """Each is in the folder of a room, but for those of the whole system."""
  rooms = {path.parent.relative_to(LIBRARY).name for path in FILES}
  folders = {path.parent.relative_to(TESTS).name for path in SUITES}
  assert folders - rooms == {'parity', 'system'}


def test_import_needs_no_tensorflow():
  """Importing any module needs nothing that only tasks need, nor torch."""
  names = [name for name in MODULES if room(name) != 'cli']
  code = f"""
import importlib, sys
class Refuse:
  def find_spec(self, name, path=None, target=None):
    if name.split('.')[0] in {TASKS_ONLY | {'gin', 'torch'}!r}:
      raise ImportError(name + ' must not be imported here')
sys.meta_path.insert(0, Refuse())
import specdec_jax
from specdec_jax.cli import main
assert main.main(['--help']) == 0
slow = {{'jax', 'numpy', 'rich', 'gin', 'flax'}} & {{*sys.modules}}
assert not slow, 'a command must answer --help at once'
public = [name for name in dir(specdec_jax) if name[0] != '_']
assert public == specdec_jax.__all__, 'of the module itself nothing is shown'
import specdec_jax.text.tokenizer
assert 'jax' not in sys.modules, 'text needs no JAX'
import specdec_jax.infer
assert 'optax' not in sys.modules, 'to decode nothing that trains is needed'
for name in {names!r}:
  importlib.import_module(name)
"""
  output_of(code)
