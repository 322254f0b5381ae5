"""Decoding over 8 simulated devices is decoding on one."""

import pathlib

import pytest

from toy_processes import output_of

CASES = pathlib.Path(__file__).with_name('sharded_cases.py')
# Unoptimised programs exchange the same arrays, and compile in half the time.
RUN = """
import os, sys
for name in [name for name in os.environ if name.startswith('PYTEST_')]:
  del os.environ[name]  # of this run, such as its worker's name
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] += ' --xla_backend_optimization_level=0'
import pytest
sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *sys.argv[1:]]))
"""


def run_cases(*options):
  """In a process of its own: the number of devices is fixed at the start."""
  assert ' passed' in output_of(RUN, *options, CASES, devices=8)


def test_quick_cases():
  run_cases()


@pytest.mark.slow
def test_slow_cases():
  run_cases('-m', 'slow')
