"""Runs that several processes share, and how a process ends."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from specdec_jax.cli import gin_flags
from specdec_jax.infer import processes
from specdec_jax.infer.processes import Meeting

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Decodes a file with a small pair, sampled, as one of several processes; argv:
# folder, out, address, count, index, the batch that it dies at or 0, placement.
SCRIPT = """
import os, signal, sys
import jax
import small_vocabulary
from specdec_jax import infer, partitioning, probs
from specdec_jax.infer import processes
from specdec_jax.text import tokenizer as tokenizer_lib
from specdec_jax.engine.engine import Engine
from specdec_jax.models.model import Model

folder, out, address, count, index, fatal, placed = sys.argv[1:]
count, index, fatal = int(count), int(index), int(fatal)
jax.config.update('jax_num_cpu_devices', 2)
jax.config.update('jax_compilation_cache_dir', folder + '/xla')
batches = 0

class Counted(Engine):
  def generate(self, texts, **options):
    global batches
    batches += 1
    if batches == fatal:
      os.kill(os.getpid(), signal.SIGKILL)
    return super().generate(texts, **options)

def small(**options):
  def model(layers, seed):
    network = small_vocabulary.network(layers)
    return Model(network, small_vocabulary.weights(network, seed))
  return Counted(model(1, 0), model(1, 1), tokenizer=tokenizer, gamma=2,
                 cache_folder=folder + '/xla', placement=placement, **options)

def decode():
  if count > 1:
    processes.join(processes.Meeting(address, count, index))
    assert len(jax.local_devices()) == 2 and len(jax.devices()) == 2 * count
  global tokenizer, placement
  placement = None
  if placed == 'split':
    placement = partitioning.Placement(data=2, model=2, across_hosts=True)
  tokenizer = tokenizer_lib.Tokenizer(folder + '/vocab.model')
  infer.decode(infer.DecodeConfig(
    small, tokenizer=tokenizer, mixture_or_task_name=folder + '/texts.txt',
    output_dir=out, decoding='speculative',
    task_feature_lengths={'inputs': 24, 'targets': 12},
    mode='predict_with_aux', batch_size=2,
    options=infer.Options(temperature=1.0, num_samples=2)))
  print('batches', batches)
  return 0

sys.exit(processes.run(decode) if count > 1 else decode())
"""


class Runner:
  """Starts the script above, once for each process."""

  def __init__(self, folder):
    self.folder = folder
    (folder / 'shared.py').write_text(SCRIPT)
    words = 'the red blue old house tree dog cat runs sleeps'.split()
    lines = [' '.join(words[i % 7 : i % 7 + i % 4 + 1]) for i in range(11)]
    (folder / 'texts.txt').write_text('\n'.join(lines) + '\n')

  def __call__(self, out, count, fatal=(), placed='apart'):
    """Results of all processes; `fatal`: the batch each one dies at, or 0."""
    address = f'localhost:{free_port()}'
    fatal = fatal or [0] * count
    started = [
      subprocess.Popen(
        [sys.executable, 'shared.py', str(self.folder), str(out), address]
        + [str(count), str(index), str(fatal[index]), placed],
        cwd=self.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {'PYTHONPATH': f'{ROOT}{os.pathsep}{ROOT / "tests"}'},
      )
      for index in range(count)
    ]
    ended = {}
    while len(ended) < count:
      time.sleep(0.05)
      for index, one in enumerate(started):
        if index not in ended and one.poll() is not None:
          ended[index] = time.monotonic()
    texts = [one.communicate() for one in started]
    return [
      (one.returncode, *text, ended[index])
      for index, (one, text) in enumerate(zip(started, texts, strict=True))
    ]


def free_port():
  with socket.socket() as one:
    one.bind(('localhost', 0))
    return one.getsockname()[1]


@pytest.fixture(scope='module')
def runner(folder, tokenizer):
  return Runner(folder)


@pytest.fixture(scope='module')
def whole(runner, tmp_path_factory):
  """What one process alone writes."""
  out = tmp_path_factory.mktemp('whole')
  ((status, _, said, _),) = runner(out, 1)
  assert status == 0, said
  return results(out)


def results(out):
  """Name -> bytes of what must not depend on the number of processes.

  A summary holds times, and the marker the checksum of it.
  """
  return {
    path.name: b'' if 'COMPLETED' in path.name else path.read_bytes()
    for path in out.iterdir()
    if 'summary' not in path.name
  }


def num_batches(said):
  return int(said.split()[-1])


@pytest.mark.slow
def test_one_model_goes_on_after_a_kill(runner, whole, tmp_path):
  """Split over both processes, which decode in lockstep and begin again.

  Sums over shards round otherwise, so scores are not the same bytes.
  """
  ended = runner(tmp_path, 2, [0, 3], placed='split')
  assert ended[1][0] == 128 + signal.SIGKILL
  assert ended[0][0] == processes.PEER_ENDED, ended[0]
  ended = runner(tmp_path, 2, placed='split')
  assert [status for status, *_ in ended] == [0, 0], ended
  # Six batches, of which the one before the kill was kept.
  assert [num_batches(said) for _, said, *_ in ended] == [5 + 1, 5 + 1]
  assert predictions(results(tmp_path)) == predictions(whole)


def predictions(found):
  lines = next(text for name, text in found.items() if name.endswith('00001'))
  return [json.loads(line)['prediction_tokens'] for line in lines.splitlines()]


@pytest.mark.slow  # one process that is killed goes on in infer_resume_test
def test_a_killed_process_ends_the_others(runner, whole, tmp_path):
  """In 30 s, with a message; what was finished is not decoded again.

  What two processes make, sampled, twice an example, is byte for byte what one
  makes.
  """
  ended = runner(tmp_path, 2, [0, 3])  # the second one in its second batch
  assert ended[1][0] == 128 + signal.SIGKILL
  status, _, said, when = ended[0]
  assert status == processes.PEER_ENDED, said
  assert said.strip().splitlines()[-1].startswith('error: another process of')
  assert when - ended[1][3] < 30
  assert not list(tmp_path.glob('*.COMPLETED'))
  kept = sum(
    path.read_bytes().count(b'\n') - 1 for path in tmp_path.glob('*.partial*')
  )
  ended = runner(tmp_path, 2)
  assert [status for status, *_ in ended] == [0, 0], ended
  # Of three batches each the victim's first was kept, and what the other
  # process had time for; a program's first run is twice.
  again = [num_batches(said) for _, said, *_ in ended]
  assert again[1] == 2 + 1 and kept >= 1
  assert again[0] == (4 - kept + 1 if kept < 4 else 0)
  assert results(tmp_path) == whole
  # Started again, whether by as many or by one, it is known to be finished.
  ((status, said, *_),) = runner(tmp_path, 1)
  assert status == 0 and num_batches(said) == 0
  assert 'is finished; it is kept' in said


def test_a_process_ends_with_the_one_that_watches_it(tmp_path):
  """Killing what was started leaves nothing behind."""
  script = tmp_path / 'waits.py'
  script.write_text(WAITS)
  with started(script, 'watched') as process:
    child = int(process.stdout.readline())
    assert child != process.pid
    process.kill()
  assert_ended(child)


def test_processes_that_do_not_come(tmp_path):
  script = tmp_path / 'joining.py'
  script.write_text(
    'import sys\n'
    'from specdec_jax.infer import processes\n'
    'meeting = processes.Meeting(sys.argv[1], 2, 0, 2)\n'
    'sys.exit(processes.run(lambda: processes.join(meeting)))\n'
  )
  with started(script, f'localhost:{free_port()}') as process:
    lines = process.communicate()[1].strip().splitlines()
  assert process.returncode == processes.PEER_ENDED
  assert lines[0] == 'Waiting for the other processes, 2 s at most.'
  assert 'never came' in lines[-1]
  assert 'as many as --process_count says' in lines[-1]


@pytest.mark.parametrize(
  ('count', 'index', 'address', 'message'),
  [
    (2, None, None, 'Missing: --coordinator_address, --process_index'),
    (0, 0, 'a:1', '--process_count: .* from 1, got 0'),
    (1, 0, 'a:65536', "coordinator_address: .*HOST:PORT.* got 'a:65536'"),
    (2, 1, 'a', "coordinator_address: .*HOST:PORT.* got 'a'"),
    (2, 2, 'a:1', '--process_index: .*, got 2'),
  ],
)
def test_bad_flags(count, index, address, message):
  flags = {'process_count': count, 'process_index': index}
  flags['coordinator_address'] = address
  given = [f'--{k}={v}' for k, v in flags.items() if v is not None]
  with pytest.raises(ValueError, match=message):
    gin_flags.meeting_of(given)
  with pytest.raises(ValueError, match="'--process_counts'.*--process_count"):
    gin_flags.parse_flags(
      ['--gin_file=gin/runs/infer.gin', '--process_counts=2']
    )


def test_flags():
  assert gin_flags.meeting_of(['--gin_file=a.gin']) is None
  assert gin_flags.meeting_of(['--multiprocess']) == Meeting()
  flags = ['--coordinator_address=10.0.0.1:1234']
  flags += ['--process_count=4', '--process_index=3']
  assert gin_flags.meeting_of(flags) == Meeting('10.0.0.1:1234', 4, 3)
  assert processes.current() == processes.Processes(0, 1)


# It waits in C code that looks for no signal, as a compiled program does.
WAITS = """
import hashlib, os, sys
from specdec_jax.cli import gin_flags
from specdec_jax.infer import processes

def wait():
  print(os.getpid(), flush=True)
  hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)

if sys.argv[1] == 'watched':
  sys.exit(processes.run(wait))
gin_flags.load = gin_flags.parse_flags = lambda *_: None
sys.exit(gin_flags.main(wait, ['--gin_file=run.gin']))
"""


def started(script, kind):
  return subprocess.Popen(
    [sys.executable, str(script), kind],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ | {'PYTHONPATH': f'{ROOT}{os.pathsep}{ROOT / "scripts"}'},
  )


def assert_ended(process_id):
  end = time.monotonic() + 20
  while pathlib.Path(f'/proc/{process_id}').exists():
    assert time.monotonic() < end, 'the child went on'
    time.sleep(0.05)


@pytest.mark.parametrize('kind', ['alone', 'watched'])
def test_one_line_and_status_143(tmp_path, kind):
  script = tmp_path / 'waits.py'
  script.write_text(WAITS)
  with started(script, kind) as process:
    try:
      worker = int(process.stdout.readline())
      assert (worker == process.pid) == (kind == 'alone')
      process.terminate()
      _, said = process.communicate(timeout=20)
    finally:
      process.kill()
  assert process.returncode == processes.TERMINATED == 143
  assert said.startswith('error: ended by SIGTERM.') and said.count('\n') == 1
  assert 'kept' in said and 'same command again' in said
  assert_ended(worker)


def test_everything_is_as_before_behind_it():
  handler, threads = signal.getsignal(signal.SIGTERM), threading.active_count()
  for _ in range(3):
    with processes.ending_on_sigterm():
      assert threading.active_count() == threads + 1
    assert signal.getsignal(signal.SIGTERM) is handler
    assert threading.active_count() == threads
