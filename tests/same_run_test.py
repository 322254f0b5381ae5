"""One comparison of what a run finds with what it is."""

import dataclasses
import json

import pytest

from small_vocabulary import network
from specdec_jax.files import same_run
from specdec_jax.measure import acceptance, record
from specdec_jax.measure.calls import BenchmarkConfig
from specdec_jax.paper import printed, reproduce, tables


def test_each_difference_is_named_with_both_values():
  before = {'seed': 0, 'sampling': {'top_p': 1.0, 'top_k': 0}, 'gone': 1}
  now = {'seed': 1, 'sampling': {'top_p': 0.9, 'top_k': 0}, 'new': [2]}
  assert same_run.differences(before, now) == [
    'gone was 1, is None',
    'new was None, is [2]',
    'sampling.top_p was 1.0, is 0.9',
    'seed was 0, is 1',
  ]
  with pytest.raises(ValueError) as found:
    same_run.check(before, now, 'Here', 'Do that.')
  said = str(found.value)
  assert said.startswith('Here: gone was') and said.endswith('Do that.')


def test_what_a_file_cannot_tell_apart_is_the_same():
  now = {'widths': (1, 2), 'rows': {3: 'a'}, 'dtype': complex, 'new': None}
  before = json.loads(json.dumps(now, default=str))
  del before['new']
  same_run.check(before, now, '', '')
  for before in (None, [], 3, 'text', {}, {'seed': '0'}):  # no description
    assert same_run.differences(before, {'seed': 0})
  many = {str(i): 'x' * 10_000 for i in range(100)}
  with pytest.raises(ValueError, match='and 95 more') as caught:
    same_run.check({}, many, 'Here', '')
  assert len(str(caught.value)) < 2_000


NO_RECORDS = ['', '[]', '{"kind": "alpha", "settings": 1, "rows": 2}']


@pytest.mark.parametrize('text', NO_RECORDS)
def test_a_record_that_is_none_is_named(tmp_path, text):
  """Wherever a measurement goes on with what it finds."""
  path = tmp_path / 'results.json'
  path.write_text(text)
  with pytest.raises(ValueError, match='results.json.*Do that'):
    record.earlier(path, 'alpha', {'a': 1}, lambda r: r['settings'], 'Do that.')
  fields = {field.name: None for field in dataclasses.fields(FakeAlpha)}
  config = FakeAlpha(**fields | {'output_file': str(path)})
  with pytest.raises(ValueError, match='results.json.*another output_file'):
    acceptance._earlier(config)
  row = printed.TABLE2[0]
  config = reproduce.ReproduceConfig(
    (),
    'out',
    records_dir=str(tmp_path),
    suite=BenchmarkConfig(network(1)),
    drafts={row.draft: network(1)},
  )
  name = tables.row_name(row)
  (tmp_path / f'{name}.json').write_text(text)
  with pytest.raises(ValueError, match=f'{name}.*not a record'):
    reproduce.read_suite(config)


@dataclasses.dataclass
class FakeAlpha:
  """The fields of a `MeasureAlphaConfig` that are read."""

  output_file: str
  settings: dict
