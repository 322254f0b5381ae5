"""Processes of Python that a test starts."""

import os
import subprocess
import sys

from repository import ROOT


def started(code, *argv, devices=1, cwd=None):
  """A process of Python, with so many devices."""
  path = f'{ROOT}{os.pathsep}{ROOT / "tests/toys"}'
  flags = os.environ.get('XLA_FLAGS', '')
  if devices > 1:
    flags += f' --xla_force_host_platform_device_count={devices}'
  return subprocess.Popen(
    [sys.executable, '-c', code, *map(str, argv)],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ | {'PYTHONPATH': path, 'XLA_FLAGS': flags},
    cwd=cwd,
  )


def output_of(code, *argv, **options):
  """Returns the output of a process, which must end without an error."""
  with started(code, *argv, **options) as process:
    out, err = process.communicate()
  assert process.returncode == 0, out + err
  return out
