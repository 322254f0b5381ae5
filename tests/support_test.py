"""The table of docs/models.md says what the tests run, and all of it."""

import pytest

import beam_parity_test
import families_engine_test
import lora_test
import model_conformance_test
import parity
import rules_parity_test
from specdec_jax.checkpoints.families import FAMILIES
from toy_families import ALL, SUPPORT


def cases(test):
  """The first values of a test's parameters."""
  (mark,) = (m for m in test.pytestmark if m.name == 'parametrize')
  values = (getattr(case, 'values', case) for case in mark.args[1])
  return {case if isinstance(case, str) else case[0] for case in values}


# A feature -> the tests that run it.
RUN = {
  'greedy': [families_engine_test.test_greedy_is_speculative_is_teacher_forced],
  'samples': [families_engine_test.test_rows_that_come_and_go],
  'beams': [families_engine_test.test_beams],
  'trees': [families_engine_test.test_trees],
  'int8': [model_conformance_test.test_kernels_of_eight_bits],
  'server': [families_engine_test.test_rows_that_come_and_go],
  'lora': [lora_test.test_an_adapter_is_merged],
}
COMPARED = {
  'beams': beam_parity_test.test_beams_are_those_of_transformers,
  'rules': rules_parity_test.test_outputs_are_those_of_transformers,
}


@pytest.mark.parametrize('feature', RUN)
def test_a_cell_is_yes_where_a_test_runs_it(feature):
  key = 'model_type' if feature == 'lora' else 'network'
  said = set()
  for row in SUPPORT.values():
    if feature in row['features']:
      said |= {row[key]} if key == 'network' else {*row[key]}
  for test in RUN[feature]:
    assert said <= cases(test), test


def test_all_families_are_in_it():
  types = [name for row in SUPPORT.values() for name in row['model_type']]
  assert {*types} == {*FAMILIES}
  assert {row['network'] for row in SUPPORT.values()} == {*ALL} - {'untied'}
  for row in SUPPORT.values():
    assert {*row['features']} <= {*RUN}
    pair = row['pair']
    assert len(pair) == len({*pair}) == 2 * bool(row['model_type'])


def test_what_is_compared_with_transformers():
  names = [x for row in SUPPORT.values() for x in row['transformers']]
  assert sorted(names) == sorted(parity.MODELS)
  for row in SUPPORT.values():
    models = row['transformers']
    types = {x.replace('_', '').removesuffix('text') for x in row['model_type']}
    assert {parity.MODELS[x]['family'].lower() for x in models} <= types
    for kind, test in COMPARED.items():
      both = cases(test) & {*models}
      assert (kind in row['compared']) == bool(both), (row, kind)
