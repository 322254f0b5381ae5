"""Runs, rows and servers that several processes or devices share."""

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
from specdec_jax.infer import processes
from specdec_jax.infer.processes import Meeting

ROOT = pathlib.Path(__file__).resolve().parent.parent
# By its own message, or aborted by JAX.
ENDED = (processes.PEER_ENDED, -signal.SIGABRT)

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


def started(*argv, folder=None, devices=1):
  """A process of Python, with so many devices."""
  path = f'{ROOT}{os.pathsep}{ROOT / "tests"}'
  flags = os.environ.get('XLA_FLAGS', '')
  if devices > 1:
    flags += f' --xla_force_host_platform_device_count={devices}'
  return subprocess.Popen(
    [sys.executable, *map(str, argv)],
    cwd=folder,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ | {'PYTHONPATH': path, 'XLA_FLAGS': flags},
  )


def ends_of(processes):
  """Status, stdout and stderr of each, when all have ended."""
  # The last one first, since it may die.
  ends = [process.communicate() for process in processes[::-1]][::-1]
  return [
    (process.returncode, *end)
    for process, end in zip(processes, ends, strict=True)
  ]


def free_address():
  with socket.socket() as probe:
    probe.bind(('localhost', 0))
    return f'localhost:{probe.getsockname()[1]}'


@pytest.fixture(scope='module')
def run(folder, tokenizer):
  """Starts the script above, once for each process."""
  (folder / 'shared.py').write_text(SCRIPT)
  words = 'the red blue old house tree dog cat runs sleeps'.split()
  lines = [' '.join(words[i % 7 : i % 7 + i % 4 + 1]) for i in range(11)]
  (folder / 'texts.txt').write_text('\n'.join(lines) + '\n')

  def run(out, count, fatal=0, placed='apart'):
    """Status, stdout and stderr of all; the last one dies at a batch."""
    argv = ['shared.py', folder, out, free_address(), count]
    fatal = [0] * (count - 1) + [fatal]
    return ends_of(
      [
        started(*argv, index, fatal[index], placed, folder=folder)
        for index in range(count)
      ]
    )

  return run


@pytest.fixture(scope='module')
def whole(run, tmp_path_factory):
  """What one process alone writes."""
  out = tmp_path_factory.mktemp('whole')
  ((status, _, said),) = run(out, 1)
  assert status == 0, said
  return results(out)


def results(out):
  """Name -> bytes of what must not depend on the number of processes."""
  return {
    path.name: path.read_bytes()
    for path in out.iterdir()
    if 'summary' not in path.name  # it holds times
  }


def predictions(files):
  lines = next(text for name, text in files.items() if name.endswith('00001'))
  return [json.loads(line)['prediction_tokens'] for line in lines.splitlines()]


def num_batches(said):
  return int(said.split()[-1])


@pytest.mark.slow
def test_one_model_goes_on_after_a_kill(run, whole, tmp_path):
  """Split over both processes, which decode in lockstep and begin again.

  Sums over shards round otherwise, so scores are not the same bytes.
  """
  ends = run(tmp_path, 2, 3, placed='split')
  assert ends[1][0] == -signal.SIGKILL and ends[0][0] in ENDED, ends
  ends = run(tmp_path, 2, placed='split')
  assert [status for status, *_ in ends] == [0, 0], ends
  # Six batches, of which the one before the kill was kept.
  assert [num_batches(said) for _, said, _ in ends] == [5 + 1, 5 + 1]
  assert predictions(results(tmp_path)) == predictions(whole)


@pytest.mark.slow  # one process that is killed goes on in infer_resume_test
def test_a_killed_process_ends_the_others(run, whole, tmp_path):
  """In a minute; what was finished is not decoded again.

  What two processes make, sampled, twice an example, is byte for byte what one
  makes.
  """
  begin = time.monotonic()
  ends = run(tmp_path, 2, 3)  # the second one in its second batch
  assert ends[1][0] == -signal.SIGKILL and ends[0][0] in ENDED, ends
  assert time.monotonic() - begin < 60
  assert not list(tmp_path.glob('*.COMPLETED'))
  kept = sum(
    path.read_bytes().count(b'\n') - 1 for path in tmp_path.glob('*.partial*')
  )
  ends = run(tmp_path, 2)
  assert [status for status, *_ in ends] == [0, 0], ends
  # Of three batches each the victim's first was kept, and what the other
  # process had time for; a program's first run is twice.
  again = [num_batches(said) for _, said, _ in ends]
  assert again[1] == 2 + 1 and kept >= 1
  assert again[0] == (4 - kept + 1 if kept < 4 else 0)
  assert results(tmp_path) == whole
  # Started again, whether by as many or by one, it is known to be finished.
  ((status, said, _),) = run(tmp_path, 1)
  assert status == 0 and num_batches(said) == 0
  assert 'is finished; it is kept' in said


# What the host reads between rounds, and scores, of rows of two processes.
ROWS = """
import sys
import small_vocabulary
from specdec_jax import partitioning
from specdec_jax.infer import processes
from specdec_jax.engine import scoring
from specdec_jax.text import tokenizer
from specdec_jax.engine.scheduler import Continuous
from specdec_jax.engine.engine import Engine
from specdec_jax.models.model import Model
from specdec_jax.engine.scheduler import PoolSettings

folder, address, count, index = sys.argv[1:]

def decode():
  placement = None
  if int(count) > 1:
    processes.join(processes.Meeting(address, int(count), int(index)))
    placement = partitioning.Placement(data=2, across_hosts=True)
  network = small_vocabulary.network(1)
  weights = [small_vocabulary.weights(network, i) for i in range(2)]
  models = [Model(network, one) for one in weights]
  engine = Engine(
    *models, tokenizer=tokenizer.Tokenizer(folder + '/vocab.model'), gamma=2,
    max_input_len=32, max_decode_len=8, placement=placement,
    cache_folder=folder + '/xla')
  texts = ['the red dog runs', 'a cat']
  said = engine.generate(texts, stop_ids=[])[0].text
  letters = [one for one in said[1:] if one.isascii() and one.isprintable()]
  options = {'stop_ids': [], 'stop_strings': letters[:1]}
  for decoder in (engine, Continuous(engine, PoolSettings(rows=2))):
    for done in decoder.generate(texts, **options):
      print('found', done.tokens, done.finish_reason)
  print('found', list(engine.stream(texts[1], **options)))
  ids = [engine.input_ids(text) for text in texts]
  for one in scoring.score(engine.target, engine.params.target, ids, ids):
    print('found', round(one.total, 2))
  return 0

sys.exit(processes.run(decode) if int(count) > 1 else decode())
"""


@pytest.mark.slow
def test_rows_of_two_processes(tokenizer, folder):
  def run(count):
    argv = ['-c', ROWS, folder, free_address(), count]
    ends = ends_of([started(*argv, index) for index in range(count)])
    assert [status for status, *_ in ends] == [0] * count, ends
    # Gloo speaks as well.
    return [
      [line for line in out.splitlines() if line.startswith('found')]
      for _, out, _ in ends
    ]

  (alone,) = run(1)
  assert len(alone) == 2 + 2 + 1 + 2 and 'stop_string' in ''.join(alone)
  assert run(2) == [alone, alone]


# A server whose target is split over both.
SERVER = """
import pathlib, sys, threading, warnings
import small_vocabulary
from scheduler_test import Heard, started
from continuous_test import nothing_compiles
from specdec_jax.engine.engine import Engine
from specdec_jax.models.model import Model
from specdec_jax.partitioning import Placement

warnings.simplefilter('error')
folder = pathlib.Path(sys.argv[1])
tokenizer = small_vocabulary.train(folder)
network = small_vocabulary.network(1)
weights = [small_vocabulary.weights(network, i) for i in range(2)]
engine = Engine(
  *(Model(network, one) for one in weights), tokenizer=tokenizer, gamma=2,
  max_input_len=8, max_decode_len=12, placement=Placement(data=1, model=2),
  cache_folder=folder / 'xla')
texts = ['red', 'a cat', 'blue']
kinds = {'stop_ids': ()}, {'stop_ids': (), 'temperature': 1.0, 'seed': 2}
want = [engine.generate([text], **kind)[0].tokens
        for kind in kinds for text in texts]
scheduler = started(engine, rows=2)
with nothing_compiles():
  heard = [Heard(scheduler, text, **kind) for kind in kinds for text in texts]
  scheduler.take([one.row for one in heard])
  assert [one.last.completion.tokens for one in heard] == want
scheduler.stop()
scheduler.join()
print('the same')
"""


@pytest.mark.slow
def test_a_server_whose_target_two_devices_share(tmp_path):
  ((status, out, err),) = ends_of([started('-c', SERVER, tmp_path, devices=2)])
  assert status == 0, err
  assert out.strip() == 'the same'


def test_processes_that_do_not_come():
  code = (
    'import sys; from specdec_jax.infer import processes;'
    f'meeting = processes.Meeting("{free_address()}", 2, 0, 2);'
    'sys.exit(processes.run(lambda: processes.join(meeting)))'
  )
  with started('-c', code) as process:
    text = process.communicate()[1]
  assert process.returncode in ENDED
  assert text.startswith('Waiting for the other processes, 2 s at most.')


@pytest.mark.parametrize(
  ('count', 'index', 'address', 'message'),
  [
    (2, None, None, '--coordinator_address, --process_index: expected'),
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


def test_flags():
  assert gin_flags.meeting_of(['--gin_file=a.gin']) is None
  assert gin_flags.meeting_of(['--multiprocess']) == Meeting()
  flags = ['--coordinator_address=10.0.0.1:1234']
  flags += ['--process_count=4', '--process_index=3']
  assert gin_flags.meeting_of(flags) == Meeting('10.0.0.1:1234', 4, 3)


# It waits in C code that looks for no signal, as a compiled program does.
WAITS = """
import hashlib, sys
from specdec_jax.infer import processes

if sys.argv[1:]:
  processes.join(processes.Meeting(sys.argv[1], 1, 0))
print('waiting', flush=True)
hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)
"""


@pytest.mark.parametrize('joins', [False, True])
def test_sigterm_ends_a_process_at_once(joins):
  with started('-c', WAITS, *[free_address()] * joins) as process:
    try:
      assert process.stdout.readline() == 'waiting\n'
      process.terminate()
      assert process.wait(20) == -signal.SIGTERM
    finally:
      process.kill()
