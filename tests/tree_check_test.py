"""A call over a tree beside one over a chain, compiled for a GPU."""

import json

import pytest
import rich.console

from compiled_pair import TARGET
from gpu_check_test import needs_cuda
from specdec_jax import tree_shape
from specdec_jax.measure.compiled import tree_check

TREE = tree_shape.TreeShape((-1, -1, 0, 0, 1))
CHAIN = tree_shape.TreeShape((-1, 0))


def settings(**options):
  return tree_check.TreeCheckConfig(
    **{'target': TARGET, 'shapes': (TREE, CHAIN), 'input_len': 32} | options
  )


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    ({'device': 'tpu_v4'}, "'tpu_v4' is no GPU"),
    ({'kernels': 'interpreted'}, "expected one of .*'off'"),
    ({'input_len': 0}, 'input_len'),
    ({'wait_us': -1.0}, 'wait_us'),
  ],
)
def test_what_is_refused(change, words):
  with pytest.raises(ValueError, match=words):
    settings(**change)


@needs_cuda
def test_a_tree_beside_a_chain(tmp_path):
  path = tmp_path / 'record.json'
  console = rich.console.Console(record=True, width=200)
  found = tree_check.check(settings(output_file=str(path)), console)
  assert json.loads(path.read_text())['calls'] == json.loads(
    json.dumps(found['calls'])
  )
  tree, chain = found['calls']
  # Of a tree that is a chain both are the same; a branching one has a mask, and
  # moves what is kept.
  assert chain['tree'] == chain['chain']
  assert tree['tree']['kernels'] >= tree['chain']['kernels']  # or is fused
  assert tree['tree']['read_bytes'] > tree['chain']['read_bytes']
  assert tree['tree']['ms'] < 2 * tree['chain']['ms']
  assert 'tree / chain' in console.export_text()
