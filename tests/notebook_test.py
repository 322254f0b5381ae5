"""The notebook: its cells run, and its engine shows itself."""

import ast
import dataclasses
import html
import io
import json
import pathlib
import re
import subprocess
import sys

import jax
import pytest
import rich.console

import small_vocabulary
import toy_models
from specdec_jax import notebook
from specdec_jax.models.model import Model

ROOT = pathlib.Path(__file__).resolve().parent.parent
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
def document():
  return json.loads(NOTEBOOK.read_text('utf-8'))


@pytest.fixture(scope='module')
def cells(document) -> dict[str, str]:
  return {
    cell['id']: ''.join(cell['source'])
    for cell in document['cells']
    if cell['cell_type'] == 'code'
  }


def test_it_is_stored_as_if_it_had_never_run(document, cells):
  assert (document['nbformat'], document['nbformat_minor']) == (4, 5)
  ids = [cell['id'] for cell in document['cells']]
  assert len(set(ids)) == len(ids) > len(cells) > 5
  for cell in document['cells']:
    assert cell.get('outputs', []) == []
    assert cell.get('execution_count') is None
  for source in cells.values():
    ast.parse(source)  # no lines of IPython's


@pytest.mark.skipif(
  not (ROOT / 'demo' / 'target.msgpack').exists(),
  reason='demo/target.msgpack, the demo pair, is not there',
)
@pytest.mark.slow  # cells are parsed above; what they call has tests of its own
def test_it_runs_with_the_demo_pair(cells):
  code = json.dumps(list(cells.values()))
  done = subprocess.run(
    [sys.executable, '-c', RUNNER, code],
    cwd=NOTEBOOK.parent,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  text = done.stdout

  assert 'equal outputs: 3 of 3' in text
  for pattern in ('acceptance rate', 'speed-up'):
    (number,) = re.findall(rf'{pattern}: ([\d.]+)', text)
    assert float(number) > 0
  (counts,) = re.findall(r'speculative: (\d+) tokens, (\d+) target calls', text)
  tokens, calls = map(int, counts)
  assert 0 < calls < tokens
  right, wrong = map(float, re.findall(r'score (-[\d.]+): ', text))
  assert right > wrong  # the target prefers what it said
  assert len(re.findall(r'sample: \w+', text)) == 3
  assert 'calls of the target' in text and '{+' in text
  assert len(re.findall(r'HTML \d{3,}', text)) == 2
  # The stream, as it came, is the text of the same input above.
  (streamed,) = re.findall(r'^(.*\|)$', text, re.MULTILINE)
  assert f'  {streamed.replace("|", "")}\n' in text


def printed(shown) -> str:
  stream = io.StringIO()
  rich.console.Console(file=stream, width=100).print(shown)
  return stream.getvalue()


def test_it_shows_what_is_loaded_and_the_last_trace(tokenizer):
  network = toy_models.noisy_chain(small_vocabulary.VOCAB_SIZE)
  model = notebook.Interactive(
    Model(network, network.params, name='my_target'),
    Model(network, network.params, name='my_draft'),
    tokenizer=tokenizer,
    gamma=3,
    max_input_len=32,
    max_decode_len=12,
  )
  count = sum(leaf.size for leaf in jax.tree.leaves(network.params))
  for text in (printed(model), model._repr_html_()):
    for part in (
      f'my_target: MarkovModel, {count:,} of float32',
      'my_draft',
      'gamma',
      str(small_vocabulary.VOCAB_SIZE),
      '12 tokens',
    ):
      assert part in text
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
