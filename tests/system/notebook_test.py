"""The notebook: its cells run, and its engine shows itself."""

import ast
import dataclasses
import html
import io
import json
import re

import jax
import pytest
import rich.console

import small_vocabulary
import toy_models
from repository import ROOT
from specdec_jax import load, notebook
from specdec_jax.models.model import Model
from toy_processes import output_of

NOTEBOOK = ROOT / 'notebooks' / 'speculative_decoding.ipynb'

# Runs cells as a kernel does: one namespace, and the value of an expression is
# shown, here as both kinds that a notebook may choose.
RUNNER = """
import ast, json, sys

def show(value):
  if value is not None:
    print('HTML', len(value._repr_html_()))
    import rich
    rich.print(value)

sys.displayhook = show
namespace = {'__name__': '__main__'}
for cell in json.loads(sys.argv[1]):
  statements = ast.Interactive(ast.parse(cell).body)
  exec(compile(statements, '<cell>', 'single'), namespace)
"""


@pytest.fixture(scope='module')
def cells() -> list[str]:
  """Sources of the code cells, stored as if they had never run."""
  document = json.loads(NOTEBOOK.read_text('utf-8'))
  assert (document['nbformat'], document['nbformat_minor']) == (4, 5)
  assert not any(cell.get('outputs') for cell in document['cells'])
  return [
    ''.join(cell['source'])
    for cell in document['cells']
    if cell['cell_type'] == 'code'
  ]


def test_cells_have_no_lines_of_ipython(cells):
  assert len(cells) > 5
  for source in cells:
    ast.parse(source)


def test_the_pair_of_its_cell_is_shipped(cells):
  (cell,) = [source for source in cells if 'PAIRS = {' in source]
  names = {}
  exec(cell, names)
  pair = names['PAIRS']['demo']
  assert load(pair['target']).network.has_encoder
  load(pair['draft'])  # or an error


@pytest.mark.slow  # cells are parsed above; what they call has tests of its own
def test_it_runs_with_the_demo_pair(cells):
  text = output_of(RUNNER, json.dumps(cells), cwd=NOTEBOOK.parent)
  assert 'equal outputs: 3 of 3' in text
  (rate,) = re.findall(r'acceptance rate: ([\d.]+)', text)
  assert 0 < float(rate) < 1 and 'speed-up: ' in text
  assert 'calls of the target' in text and '{+' in text
  assert len(re.findall(r'HTML \d{3,}', text)) == 2
  # The stream, as it came, is the text of the same input above.
  (streamed,) = re.findall(r'^(.*\|)$', text, re.MULTILINE)
  assert f'  {streamed.replace("|", "")}\n' in text


def printed(shown) -> str:
  console = rich.console.Console(file=io.StringIO(), width=100)
  console.print(shown)
  return console.file.getvalue()


def test_it_shows_what_is_loaded_and_the_last_trace(tokenizer):
  network = toy_models.noisy_chain(small_vocabulary.VOCAB_SIZE)
  names = 'my_target', 'my_draft'
  pair = (Model(network, network.params, name=name) for name in names)
  limits = {'max_input_len': 32, 'max_decode_len': 12}
  model = notebook.Interactive(*pair, tokenizer=tokenizer, gamma=3, **limits)
  count = sum(leaf.size for leaf in jax.tree.leaves(network.params))
  for text in (printed(model), model._repr_html_()):
    assert f'my_target: MarkovModel, {count:,} of float32' in text
    assert 'my_draft' in text and '12 tokens' in text
    assert 'iframe' not in text
  trace = model.trace('<b>the & tree')
  assert model.last_trace is trace
  lenient = dataclasses.replace(trace, lenience=0.5)
  assert 'lossy (lenience 0.5)' in repr(lenient)
  assert 'lossy' not in repr(trace)
  assert printed(model).endswith(printed(trace))
  shown = model._repr_html_()
  (page,) = re.findall(r'<iframe sandbox [^>]*srcdoc="([^"]*)"', shown)
  assert html.unescape(page) == trace.page()
  assert '<b>' not in shown and '<b>' not in trace.page()
