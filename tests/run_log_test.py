"""A log of a run that may be killed at any byte."""

import pytest

from specdec_jax.files.run_log import RunLog


def test_a_log_goes_on_wherever_a_kill_cut_it(tmp_path):
  path, settings, work = tmp_path / 'log', {'seed': 0}, [[1], {'b': 'ü'}, 'c']
  whole = RunLog(path, settings)
  for value in work:
    whole.append(value)
  data = path.read_bytes()
  assert whole.read_new() == ([], [])  # its own work is not new to it
  for cut in range(len(data)):
    path.write_bytes(data[:cut])
    log = RunLog(path, settings)
    values, damaged = log.read_new()
    assert values == work[: len(values)] and not damaged
    for value in work[len(values) :]:
      log.append(value)
    assert path.read_bytes() == data and log.settings() == settings
  path.write_bytes(data.replace(b'[1]', b'[1'))
  reader = RunLog(path)
  assert reader.read_new() == (work[1:], [b'[1'])
  whole.append(4)
  assert reader.read_new() == ([4], [])
  path.write_bytes(b'{"seed')
  with pytest.raises(ValueError, match='log.*first one with settings'):
    RunLog(path).settings()
