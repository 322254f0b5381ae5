"""The notebook: its cells run, its sizes are the published ones."""

import ast
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import gin_models_test
from specdec_jax.checks.memory import GIB
from specdec_jax.measure import memory
from specdec_jax.models import backend

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / 'notebooks' / 'speculative_decoding.ipynb'

# Runs cells as a kernel does: one namespace, and the value of a cell's last
# expression is shown, here as both kinds that a notebook may choose.
RUNNER = """
import ast, json, sys

cells = json.loads(sys.argv[1])
namespace = {'__name__': '__main__'}
for cell in cells:
  tree = ast.parse(cell)
  last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
  exec(compile(tree, '<cell>', 'exec'), namespace)
  if last is not None:
    last = compile(ast.Expression(last.value), '<cell>', 'eval')
    value = eval(last, namespace)
    if value is not None:
      print('HTML', len(value._repr_html_()))
      import rich
      rich.print(value)
"""


@pytest.fixture(scope='module')
def notebook():
  return json.loads(NOTEBOOK.read_text('utf-8'))


@pytest.fixture(scope='module')
def cells(notebook) -> dict[str, str]:
  return {
    cell['id']: ''.join(cell['source'])
    for cell in notebook['cells']
    if cell['cell_type'] == 'code'
  }


def test_it_is_stored_as_if_it_had_never_run(notebook, cells):
  assert (notebook['nbformat'], notebook['nbformat_minor']) == (4, 5)
  ids = [cell['id'] for cell in notebook['cells']]
  assert len(set(ids)) == len(ids) > len(cells) > 5
  for cell in notebook['cells']:
    if cell['cell_type'] == 'code':
      assert cell['outputs'] == [] and cell['execution_count'] is None
  for source in cells.values():
    ast.parse(source)  # no lines of IPython's


@pytest.mark.skipif(
  not (ROOT / 'demo' / 'target.msgpack').exists(),
  reason='demo/target.msgpack, the demo pair, is not there',
)
@pytest.mark.slow  # cells are parsed above; what they call has tests of its own
def test_it_runs_with_the_demo_pair(cells):
  code = json.dumps(list(cells.values()))
  # Of the large ones only memory is computed, here of one layer; the whole ones
  # are in a test below.
  for name, other in (
    ('2048, 32, 24', '2048, 32, 1'),
    ('4096, 64, 24', '4096, 64, 1'),
  ):
    assert code.count(name) == 1
    code = code.replace(name, other)
  done = subprocess.run(
    [sys.executable, '-c', RUNNER, code],
    cwd=NOTEBOOK.parent,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  text = done.stdout

  def number(pattern: str) -> float:
    (found,) = re.findall(pattern, text)
    return float(found)

  assert 'equal outputs: 3 of 3' in text
  assert 0 < number(r'acceptance rate: ([\d.]+)') <= 1
  assert number(r'speed-up: ([\d.]+)') > 0
  (found,) = re.findall(r'speculative: (\d+) tokens, (\d+) target calls', text)
  tokens, calls = map(int, found)
  assert 0 < calls < tokens
  (found,) = re.findall(r'plain: (\d+) tokens, (\d+) target calls', text)
  assert found == (str(tokens), str(tokens))
  own, other = map(float, re.findall(r'score (-[\d.]+): ', text))
  assert own > other  # the target prefers what it said
  assert len(re.findall(r'sample: \w+', text)) == 3
  assert 'calls of the target' in text and '{+' in text
  assert len(re.findall(r'HTML \d{4,}', text)) == 2
  for name in ('demo', 'flan_t5_xl', 'flan_t5_xxl'):
    number(rf'{name}: ([\d.]+) [GM]iB')
  # The stream, as it came, is the text of the same input above.
  (streamed,) = re.findall(r'^(.*\|)$', text, re.MULTILINE)
  assert f'  {streamed.replace("|", "")}\n' in text


@pytest.fixture(scope='module')
def pairs(cells):
  namespace: dict = {}
  exec(cells['pair'], namespace)
  return namespace['PAIRS']


@pytest.mark.parametrize(
  'pair, target, draft, least_gib, chip_gib',
  [
    ('demo', 'demo_target', 'demo_draft', 0, 1),
    pytest.param(
      *('flan_t5_xl', 'flan_t5_xl', 'flan_t5_small', 5, 16),
      marks=pytest.mark.slow,
    ),
    ('flan_t5_xxl', 'flan_t5_xxl', 'flan_t5_small', 16, 32),
  ],
)
def test_pairs_are_those_of_gin_and_fit_the_chip(
  pairs, folder, pair, target, draft, least_gib, chip_gib
):
  chosen = pairs[pair]
  plan = memory.Plan(
    chosen['network'],
    chosen['draft_network'],
    param_dtype=chosen['network'].config.dtype,
  )
  with backend.compiled_for('tpu'):  # a CPU needs float32 beside bfloat16
    needed = sum(memory.plan_bytes(plan).values()) / GIB
  assert least_gib < needed < chip_gib
  for network, name in (
    (chosen['network'], target),
    (chosen['draft_network'], draft),
  ):
    published = gin_models_test.read(folder, name).first
    config = dataclasses.replace(network.config, dtype='float32')
    assert config == published.config


def test_set_up_of_a_fresh_runtime(cells, tmp_path, monkeypatch):
  set_up = cells['setup']
  monkeypatch.setattr(sys, 'path', [*sys.path])
  calls = []

  def run(command, check):
    assert check
    calls.append([str(word) for word in command])
    if command[0] == 'git':
      (command[-1] / 'specdec_jax').mkdir(parents=True)

  monkeypatch.setattr(subprocess, 'run', run)
  with contextlib.chdir(tmp_path):
    with pytest.raises(ValueError, match='Fill in REPOSITORY'):
      exec(set_up, {})
    assert not calls
    named = set_up.replace("REPOSITORY = ''", "REPOSITORY = 'somewhere'")
    assert named != set_up
    exec(named, {})
    checkout = tmp_path / 'checkout'
    assert pathlib.Path.cwd() == checkout
    assert sys.path[0] == str(checkout)
    clone, install = calls
    assert clone == ['git', 'clone', 'somewhere', str(checkout)]
    assert install[:4] == [sys.executable, '-m', 'pip', 'install']
    assert install[-1].startswith(f'{checkout}[hub')
    exec(named, {})  # run again, it is a checkout
    assert len(calls) == 2 and pathlib.Path.cwd() == checkout
    # In a new runtime, or with an archive that was unpacked there.
    os.chdir(tmp_path)
    checkout.rename(tmp_path / 'specdec_jax-1.0')
    exec(set_up, {})
    (again,) = calls[2:]
    assert again[:4] == [sys.executable, '-m', 'pip', 'install']
    assert pathlib.Path.cwd() == tmp_path / 'specdec_jax-1.0'
