"""One comparison of what a run finds with what it is."""

import json
import types

import pytest

from specdec_jax.files import same_run
from specdec_jax.measure import record


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


@pytest.mark.parametrize('text', ['', '{"kind": "alpha", "settings": 1}'])
def test_a_record_that_is_none_is_named(tmp_path, text):
  path = tmp_path / 'results.json'
  path.write_text(text)
  config = types.SimpleNamespace(output_file=path, settings={'a': 1})
  with pytest.raises(ValueError, match='results.json.*Remove it'):
    record.earlier(config, 'alpha')
