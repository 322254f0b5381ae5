"""The layout of kernels that a CPU is quick with: measured, kept, forced."""

import json

import pytest

from specdec_jax.files import host_cache
from specdec_jax.models import cpu_layout

BATCH = {32: 8.0, 160: 40.0}
FEW = {
  'in_out': {1: 2.0, 5: 9.0},
  'blocks': {1: 2.0, 5: 5.0},
  'out_in': {1: 2.0, 2: 3.0, 4: 2.5, 5: 4.0, 8: 3.5, 9: 5.0, 16: 6.0},
}
TIMES = {(x, n): ms for x in FEW for n, ms in (FEW[x] | BATCH).items()}


@pytest.fixture
def measured(monkeypatch, tmp_path):
  """An empty cache folder, and a processor that takes TIMES; how often."""
  monkeypatch.delenv(cpu_layout.VARIABLE)
  monkeypatch.setattr(host_cache, 'user_cache', lambda: tmp_path / 'new')
  runs = []
  monkeypatch.setattr(cpu_layout, '_measured', lambda: runs.append(1) or TIMES)
  cpu_layout._of_this_host.cache_clear()
  yield runs
  cpu_layout._of_this_host.cache_clear()


def test_the_quickest_is_kept(measured, tmp_path):
  layout = cpu_layout.cpu_layout()
  assert layout.kernel_layout == 'out_in'
  assert layout.widths == (4, 8)  # 16 rows take longer than 9
  assert [cpu_layout.width(n) for n in (2, 5, 9)] == [4, 8, 9]
  cpu_layout._of_this_host.cache_clear()  # another process
  assert cpu_layout.cpu_layout() == layout
  assert len(measured) == 1


def _with(**fields):
  return lambda content: content | {'value': content['value'] | fields}


@pytest.mark.parametrize(
  'damage',
  [
    lambda content: '{',
    lambda content: content | {'key': {'processor': 'another'}},
    _with(widths=[3]),
    _with(times_ms=[2, 4, 8]),
    _with(times_ms=[2, 4, 3, 8]),
    _with(times_ms=[2, 4, 8, float('nan')]),
  ],
)
def test_a_broken_file_is_measured_again_and_said_once(
  measured, tmp_path, damage
):
  layout = cpu_layout.cpu_layout()
  (path,) = (tmp_path / 'new').iterdir()
  made = damage(json.loads(path.read_text()))
  path.write_text(made if isinstance(made, str) else json.dumps(made))
  cpu_layout._of_this_host.cache_clear()
  with pytest.warns(UserWarning, match='measured again'):
    assert cpu_layout.cpu_layout() == layout
  cpu_layout._of_this_host.cache_clear()
  assert cpu_layout.cpu_layout() == layout  # it is whole again
  assert len(measured) == 2


@pytest.mark.parametrize(
  'few, batch, wanted',
  [
    (6.4, 20.0, 'in_out'),  # nearly as quick for few rows, quicker for many
    (6.4, 50.0, 'out_in'),
    (7.0, 20.0, 'out_in'),  # too slow for few rows
  ],
)
def test_a_batch_decides_between_equals(few, batch, wanted):
  in_out = {('in_out', 1): 1.0, ('in_out', 5): few - 1, ('in_out', 160): batch}
  assert cpu_layout._chosen(TIMES | in_out).kernel_layout == wanted


def test_the_cost_of_more_tokens(measured):
  assert cpu_layout.cpu_layout().times_ms == (2.0, 4.0, 8.0, 40.0)
  assert cpu_layout.call_cost(1, 5) == pytest.approx(2.0)
  assert cpu_layout.call_cost(32, 5) == pytest.approx(5.0)
  assert cpu_layout.call_cost(320, 5) == pytest.approx(5.0)  # in proportion
  assert cpu_layout.call_cost(5, 1) == 1.0
  assert 1.0 < cpu_layout.call_cost(2, 5) < cpu_layout.call_cost(8, 5) < 5.0


def test_more_rows_never_take_less():
  faster = TIMES | {('out_in', 32): 3.0}
  assert cpu_layout._chosen(faster).times_ms == (2.0, 4.0, 4.0, 40.0)


def test_a_forced_layout_has_no_costs_and_must_exist(monkeypatch):
  assert cpu_layout.call_cost(32, 5) is None
  monkeypatch.setenv(cpu_layout.VARIABLE, 'out-in')
  with pytest.raises(ValueError, match='out-in.*out_in'):
    cpu_layout.cpu_layout()


def test_all_layouts_are_timed(monkeypatch):
  """With sizes that take no time, the real program."""
  monkeypatch.setattr(cpu_layout, '_CHAINS', ((1, 64, 128), (2, 64, 64)))
  times = cpu_layout._measured()
  assert set(times) == set(TIMES) and min(times.values()) > 0
  assert cpu_layout._chosen(times).kernel_layout in cpu_layout.LAYOUTS
