"""One comparison of what a run finds with what it is."""

import json

import pytest

from specdec_jax.files import same_run


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
