"""The table of docs/models.md says what the tests run, and all of it."""

import pytest

import parity
from repository import ROOT
from specdec_jax.checkpoints.families import FAMILIES
from toy_families import ALL, SUPPORT


@pytest.fixture
def cases(request):
  """Says the first values of a test's parameters; pytest imports its module."""
  return lambda test: cases_of(request.session, test)


def cases_of(session, test):
  path, name = test.split('::')
  module = pytest.Module.from_parent(session, path=ROOT / 'tests' / path)
  marks = getattr(module.obj, name).pytestmark
  (mark,) = (m for m in marks if m.name == 'parametrize')
  values = (getattr(case, 'values', case) for case in mark.args[1])
  return {case if isinstance(case, str) else case[0] for case in values}


FAMILIES_TEST = 'engine/families_test.py'
# A feature -> the test that runs it.
RUN = {
  'greedy': f'{FAMILIES_TEST}::test_greedy_is_speculative_is_teacher_forced',
  'samples': f'{FAMILIES_TEST}::test_rows_that_come_and_go',
  'beams': f'{FAMILIES_TEST}::test_beams',
  'trees': f'{FAMILIES_TEST}::test_trees',
  'int8': 'models/conformance_test.py::test_kernels_of_eight_bits',
  'server': f'{FAMILIES_TEST}::test_rows_that_come_and_go',
  'lora': 'checkpoints/huggingface_test.py::test_an_adapter_is_merged',
}
COMPARED = {
  'beams': (
    'parity/beam_search_test.py::test_beams_are_those_of_transformers',
    'parity/barts_test.py::test_beams_are_those_of_transformers',
  ),
  'rules': ('parity/rules_test.py::test_outputs_are_those_of_transformers',),
}


@pytest.mark.parametrize('feature', RUN)
def test_a_cell_is_yes_where_a_test_runs_it(feature, cases):
  key = 'model_type' if feature == 'lora' else 'network'
  said = set()
  for row in SUPPORT.values():
    if feature in row['features']:
      said |= {row[key]} if key == 'network' else {*row[key]}
  assert said <= cases(RUN[feature])


def test_all_families_are_in_it():
  types = [name for row in SUPPORT.values() for name in row['model_type']]
  assert {*types} == {*FAMILIES}
  assert {row['network'] for row in SUPPORT.values()} == {*ALL} - {'untied'}
  for row in SUPPORT.values():
    assert {*row['features']} <= {*RUN}
    pair = row['pair']
    assert len(pair) == len({*pair}) == 2 * bool(row['model_type'])


def test_what_is_compared_with_transformers(cases):
  names = [x for row in SUPPORT.values() for x in row['transformers']]
  assert sorted(names) == sorted(parity.MODELS)
  for row in SUPPORT.values():
    models = row['transformers']
    types = {x.replace('_', '').removesuffix('text') for x in row['model_type']}
    assert {parity.MODELS[x]['family'].lower() for x in models} <= types
    for kind, tests in COMPARED.items():
      both = set().union(*map(cases, tests)) & {*models}
      assert (kind in row['compared']) == bool(both), (row, kind)
