"""Runs that several processes share: their results, their ends, their flags."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from specdec_jax.cli import gin_flags
from specdec_jax.infer import processes, resume, shares
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
  infer.decode_task(infer.TaskConfig(
    small, tokenizer, folder + '/texts.txt', out,
    task_feature_lengths={'inputs': 24, 'targets': 12},
    mode='predict_with_aux', batch_size=2, num_decodes=2, checkpoint_period=1,
    sampling=probs.SamplingConfig(temperature=1.0)))
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
def test_two_processes_make_one_result(runner, whole, tmp_path):
  """Sampled, twice an example: byte for byte what one process makes."""
  ended = runner(tmp_path, 2)
  assert [status for status, *_ in ended] == [0, 0], ended
  assert results(tmp_path) == whole
  # Six and five examples in batches of two; a program's first run is twice.
  assert [num_batches(said) for _, said, *_ in ended] == [3 + 1, 3 + 1]


@pytest.mark.slow
def test_one_model_over_the_devices_of_two_processes(runner, whole, tmp_path):
  """In lockstep, as one process decodes."""
  ended = runner(tmp_path, 2, placed='split')
  assert [status for status, *_ in ended] == [0, 0], ended
  assert [num_batches(said) for _, said, *_ in ended] == [6 + 1, 6 + 1]
  # Sums over shards round otherwise, so scores are not the same bytes.
  assert predictions(results(tmp_path)) == predictions(whole)


@pytest.mark.slow
def test_one_model_goes_on_after_a_kill(runner, whole, tmp_path):
  """Both processes begin again."""
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
@pytest.mark.parametrize('victim', [0, 1])
def test_a_killed_process_ends_the_others(runner, whole, tmp_path, victim):
  """In 30 s, with a message; what was finished is not decoded again.

  What two processes make, sampled, twice an example, is byte for byte what one
  makes.
  """
  fatal = [0, 0]
  fatal[victim] = 3  # in its second batch
  ended = runner(tmp_path, 2, fatal)
  assert ended[victim][0] == 128 + signal.SIGKILL
  status, _, said, when = ended[1 - victim]
  assert status == processes.PEER_ENDED, said
  assert said.strip().splitlines()[-1].startswith('error: another process of')
  assert when - ended[victim][3] < 30
  assert not list(tmp_path.glob('*.COMPLETED'))
  kept = len(list(tmp_path.glob('*.parts/[0-9]*.json')))
  ended = runner(tmp_path, 2)
  assert [status for status, *_ in ended] == [0, 0], ended
  # Of three batches each the victim's first was kept, and what the other
  # process had time for; a program's first run is twice.
  again = [num_batches(said) for _, said, *_ in ended]
  assert again[victim] == 2 + 1 and kept >= 1
  assert again[1 - victim] == (4 - kept + 1 if kept < 4 else 0)
  assert results(tmp_path) == whole
  assert whole[next(n for n in whole if n.endswith('00001'))].count(b'\n') == 11
  # Started again, whether by as many or by one, it is known to be finished.
  ((status, said, *_),) = runner(tmp_path, 1)
  assert status == 0 and num_batches(said) == 0
  assert 'is finished; it is kept' in said


@pytest.mark.parametrize('index', [0, 1])
def test_a_process_that_does_nothing_is_not_waited_for(
  tmp_path, monkeypatch, index
):
  """As one that hangs, or that writes into another folder of this name."""
  whole = resume.Folder(str(tmp_path), 'a.jsonl')
  monkeypatch.setattr(shares, '_MOST_SILENCE_S', 0.5)
  looks = []

  def sleep(seconds, real=time.sleep):
    if len(looks) < 5:  # a third process is alive for more than the bound
      (tmp_path / f'a.jsonl.of-another-{len(looks)}').write_text('')
      looks.append(time.monotonic())
    real(seconds)

  monkeypatch.setattr(time, 'sleep', sleep)
  with pytest.raises(ValueError, match=f'process {1 - index} there'):
    shares.each_its_own(
      whole,
      lambda folder: folder.begin({}, False),
      [],
      1,
      lambda *_: {},
      processes.Processes(index, 2),
    )
  assert time.monotonic() - looks[-1] >= 0.5 and len(looks) == 5


def test_what_follows_a_missing_chunk_is_not_kept_twice(tmp_path):
  """In lockstep all of it is decoded again, so its old chunks go."""
  whole = resume.Folder(str(tmp_path), 'a.jsonl')
  whole.begin({}, False)
  for number in (0, 2, 3):
    whole.keep(number, number)
  given = []
  shares.in_lockstep(
    whole,
    lambda folder: folder.begin({}, False),
    [],
    lambda items, folder, done: given.append(done),
    processes.Processes(0, 2),
  )
  assert given == [{0: 0}] and whole.begin({}, False) == {0: 0}


def test_a_process_ends_with_the_one_that_watches_it(runner, tmp_path):
  """Killing what was started leaves nothing behind."""
  code = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'
  script = tmp_path / 'waits.py'
  script.write_text(
    'import sys\nfrom specdec_jax.infer import processes\n'
    f'def wait():\n  {code}\n'
    'sys.exit(processes.run(wait))\n'
  )
  with subprocess.Popen(
    [sys.executable, str(script)],
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
  ) as started:
    child = int(started.stdout.readline())
    assert child != started.pid
    started.kill()
  for _ in range(200):
    if not pathlib.Path(f'/proc/{child}').exists():
      break
    time.sleep(0.05)
  else:
    os.kill(child, signal.SIGKILL)
    raise AssertionError('the child went on')


@pytest.fixture
def joining(tmp_path):
  """Starts a process that joins as these flags say, and does nothing else."""
  script = tmp_path / 'joining.py'
  script.write_text(
    'import sys\n'
    'from specdec_jax.infer import processes\n'
    'meeting = processes.Meeting(sys.argv[1], *map(int, sys.argv[2:]))\n'
    'def join():\n'
    '  try:\n'
    '    processes.join(meeting)\n'
    '  except ValueError as error:\n'
    '    print(error, file=sys.stderr)\n'
    '    return 2\n'
    '  return 0\n'
    'raise SystemExit(processes.run(join))\n'
  )

  def start(port, *numbers):
    return subprocess.Popen(
      [sys.executable, str(script), f'localhost:{port}', *map(str, numbers)],
      stderr=subprocess.PIPE,
      text=True,
      env=os.environ | {'PYTHONPATH': str(ROOT)},
    )

  return start


def test_processes_that_do_not_come(joining):
  done = joining(free_port(), 2, 0, 2)
  lines = done.communicate()[1].strip().splitlines()
  assert done.returncode == processes.PEER_ENDED
  assert lines[0] == 'Waiting for the other processes, 2 s at most.'
  assert 'never came' in lines[-1]
  assert 'as many as --process_count says' in lines[-1]


def test_waiting_can_be_interrupted(joining):
  waits = joining(free_port(), 2, 0, 60)
  assert 'Waiting' in waits.stderr.readline()
  time.sleep(0.5)  # until JAX's own code waits
  waits.send_signal(signal.SIGINT)
  waits.communicate(timeout=20)
  assert waits.returncode == 128 + signal.SIGINT


@pytest.mark.slow
def test_process_counts_that_differ(joining):
  port = free_port()
  first, second = joining(port, 2, 0, 60), joining(port, 3, 1, 60)
  said = second.communicate(timeout=60)[1]
  assert second.returncode == 2
  assert '--process_count is 3, but 2 processes have joined' in said
  first.kill()
  first.communicate()


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--process_count=2'], 'Missing: --coordinator_address, --process_index'),
    (
      ['--process_count=0', '--process_index=0', '--coordinator_address=a:1'],
      '--process_count must be at least 1, got 0',
    ),
    (
      [
        '--process_count=1',
        '--process_index=0',
        '--coordinator_address=a:65536',
      ],
      "must be HOST:PORT, .* got 'a:65536'",
    ),
    (
      ['--process_count=2', '--process_index=2', '--coordinator_address=a:1'],
      'from 0 to --process_count - 1; got 2 of 2',
    ),
    (
      ['--process_count=2', '--process_index=1', '--coordinator_address=a'],
      "must be HOST:PORT, .* got 'a'",
    ),
    (['--process_counts=2'], "'--process_counts'.*--process_count"),
  ],
)
def test_bad_flags(flags, message):
  with pytest.raises(ValueError, match=message):
    gin_flags.parse_flags(['--gin_file=gin/runs/infer.gin', *flags])


def test_flags():
  flags = ['--gin_file=gin/runs/infer.gin']
  assert gin_flags.parse_flags(flags).meeting is None
  assert gin_flags.parse_flags([*flags, '--multiprocess']).meeting == Meeting()
  flags += ['--coordinator_address=10.0.0.1:1234']
  flags += ['--process_count=4', '--process_index=3']
  assert gin_flags.parse_flags(flags).meeting == Meeting('10.0.0.1:1234', 4, 3)
  assert processes.current() == processes.Processes(0, 1)
