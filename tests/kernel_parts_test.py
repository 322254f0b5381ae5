"""How programs of a kernel wait for each other: every order of a few."""

import itertools

import jax
import numpy as np
import pytest

from specdec_jax.models import backend, kernel_parts

CORES = 108


def comes_through(orders, programs, waits, at_first, share=kernel_parts.share):
  """Runs programs in some order; says when each passed each wait.

  Args:
    orders: which program goes on, one after another, again and again.
    programs: how many.
    waits: how many.
    at_first: the number by which they wait.
    share: what a program adds.

  Returns:
    Whether no program passed a wait before all had come to it, and all passed
    all; and the number.
  """
  number, came = at_first, np.zeros((programs, waits), bool)
  waiting, at = [None] * programs, [0] * programs
  for program in orders:
    if at[program] == waits:
      continue
    if waiting[program] is None:
      waiting[program] = kernel_parts.until(number, CORES)
      number += share(program, programs, CORES)
      came[program, at[program]] = True
    elif number >= waiting[program]:
      if not came[:, at[program]].all():
        return False, number
      waiting[program] = None
      at[program] += 1
  return at == [waits] * programs, number


def orders(programs, rounds):
  """Each order of the programs, again and again; and some at random."""
  for one in itertools.permutations(range(programs)):
    yield list(one) * rounds
  rng = np.random.default_rng(0)
  for _ in range(50):
    yield list(rng.integers(0, programs, 40 * programs * rounds))


@pytest.mark.parametrize('programs', [1, 2, 4])
def test_nobody_passes_before_all_are_there(programs):
  for order in orders(programs, 12):
    number = 0
    # As many waits of as many programs as the kernels of a draft's step have.
    for waits in (7, 1, 7):
      passed, after = comes_through(order * 2, programs, waits, number)
      assert passed and after == number + waits * CORES
      number = after


def test_kernels_of_several_sizes_wait_one_after_another():
  number = 0
  for programs in (3, CORES, 72, 1, 5):
    order = list(range(programs)) * 8
    passed, number = comes_through(order, programs, 3, number)
    assert passed
  # Control: if each program adds one, a smaller kernel leaves the next astray.
  number = 0
  found = []
  for programs in (3, 5):
    order = list(range(programs)) * 200
    passed, number = comes_through(
      order, programs, 3, number, share=lambda *_: 1
    )
    found.append(passed)
  assert not all(found)


def test_there_are_no_more_programs_than_the_gpu_has_cores(monkeypatch):
  class Gpu:
    core_count = 58

  assert backend.gpu_cores() == 132  # of an H200, which is described
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  monkeypatch.setattr(jax, 'devices', lambda: [Gpu()])
  assert backend.gpu_cores() == 58
  with backend.compiled_for('gpu'):  # for another one than that which is here
    assert backend.gpu_cores() == 132
