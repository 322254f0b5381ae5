"""SIGTERM ends a command at once, and it says what is kept."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from specdec_jax.infer import processes

ROOT = pathlib.Path(__file__).resolve().parent.parent

# It waits in C code that looks for no signal, as a compiled program does.
SCRIPT = """
import hashlib, os, sys
from specdec_jax.cli import gin_flags
from specdec_jax.infer import processes

def wait():
  print(os.getpid(), flush=True)
  hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)

if sys.argv[1] == 'watched':
  sys.exit(processes.run(wait))
gin_flags.load = lambda flags: None
sys.exit(gin_flags.main(wait, ['--gin_file=run.gin']))
"""


@pytest.mark.parametrize('kind', ['alone', 'watched'])
def test_one_line_and_status_143(tmp_path, kind):
  script = tmp_path / 'waits.py'
  script.write_text(SCRIPT)
  with subprocess.Popen(
    [sys.executable, str(script), kind],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ | {'PYTHONPATH': f'{ROOT}{os.pathsep}{ROOT / "scripts"}'},
  ) as started:
    try:
      worker = int(started.stdout.readline())
      assert (worker == started.pid) == (kind == 'alone')
      started.terminate()
      _, said = started.communicate(timeout=20)
    finally:
      started.kill()
  assert started.returncode == processes.TERMINATED == 143
  assert said.startswith('error: ended by SIGTERM.') and said.count('\n') == 1
  assert 'kept' in said and 'same command again' in said
  end = time.monotonic() + 20
  while pathlib.Path(f'/proc/{worker}').exists():
    assert time.monotonic() < end, 'the child went on'
    time.sleep(0.05)


def test_everything_is_as_before_behind_it():
  handler, threads = signal.getsignal(signal.SIGTERM), threading.active_count()
  for _ in range(3):
    with processes.ending_on_sigterm():
      assert threading.active_count() == threads + 1
    assert signal.getsignal(signal.SIGTERM) is handler
    assert threading.active_count() == threads
  found = []

  def inside():
    with processes.ending_on_sigterm():
      found.append('went through')

  other = threading.Thread(target=inside)
  other.start()
  other.join()
  assert found  # signals are the main thread's: there it does nothing
