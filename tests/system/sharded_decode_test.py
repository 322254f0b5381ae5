"""Decoding over 8 simulated devices is decoding on one."""

import os
import pathlib
import subprocess
import sys

import pytest

CASES = pathlib.Path(__file__).with_name('sharded_cases.py')


def run_cases(*options):
  """In a process of its own: the number of devices is fixed at the start."""
  # What XLA exchanges is the same, and it compiles in half the time.
  flags = ' '.join(
    (
      os.environ.get('XLA_FLAGS', ''),
      '--xla_force_host_platform_device_count=8',
      '--xla_backend_optimization_level=0',
    )
  )
  environment = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith('PYTEST_')  # of this run, such as its worker's name
  }
  environment |= {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run(
    [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider']
    + [*options, str(CASES)],
    cwd=CASES.parent.parent,
    env=environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert ' passed' in done.stdout


def test_quick_cases():
  run_cases()


@pytest.mark.slow
def test_slow_cases():
  run_cases('-m', 'slow')
