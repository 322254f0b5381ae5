"""Runs and rows that several processes share."""

import json
import signal
import socket
import time

import pytest

from specdec_jax.cli import gin_flags
from specdec_jax.infer import processes
from specdec_jax.infer.processes import Meeting
from toy_processes import started

# By its own message, or aborted by JAX.
ENDED = (processes.PEER_ENDED, -signal.SIGABRT)

# How each script below begins; argv: folder, address, count, index, and more.
BEGIN = """
import os, signal, sys
import jax
import small_vocabulary
from toy_pools import Pooled
from specdec_jax import infer
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.scheduler import PoolSettings, Scheduler
from specdec_jax.infer import processes
from specdec_jax.models.model import Model
from specdec_jax.partitioning import Placement
from specdec_jax.text.tokenizer import Tokenizer

folder, address, count, index, *more = sys.argv[1:]
count, index = int(count), int(index)

tokenizer = Tokenizer(folder + '/vocab.model')

def small(**options):
  network = small_vocabulary.network(1)
  weights = [small_vocabulary.weights(network, i) for i in range(2)]
  return Engine(
    *(Model(network, one) for one in weights), gamma=2,
    tokenizer=tokenizer, cache_folder=folder + '/xla', **options)

def run(function):
  def joined():
    if count > 1:
      processes.join(processes.Meeting(address, count, index))
    function()
    return 0
  sys.exit(processes.run(joined) if count > 1 else joined())
"""

# Decodes a file, sampled; more: out, the batch that it dies at or 0, placement.
SCRIPT = """
out, fatal, placed = more
jax.config.update('jax_num_cpu_devices', 2)
jax.config.update('jax_compilation_cache_dir', folder + '/xla')
batches, run_batch = 0, Scheduler.run

def counted(scheduler, request):
  global batches
  batches += 1
  if batches == int(fatal):
    os.kill(os.getpid(), signal.SIGKILL)
  return run_batch(scheduler, request)

Scheduler.run = counted

def decode():
  assert len(jax.local_devices()) == 2 and len(jax.devices()) == 2 * count
  options = {'max_input_len': 24, 'max_decode_len': 12}
  if placed == 'split':
    options['placement'] = Placement(data=2, model=2, across_hosts=True)
  source = 'input_file' if 'lines' in placed else 'mixture_or_task_name'
  file = 'other.txt' if index and placed == 'other lines' else 'texts.txt'
  infer.decode(infer.DecodeConfig(
    lambda **lengths: small(**(options | lengths)),
    tokenizer=tokenizer, **{source: folder + '/' + file},
    output_dir=out, mode='speculative', batch_size=2,
    task_feature_lengths={'inputs': 24, 'targets': 12},
    task_mode='predict_with_aux',
    options=infer.Options(temperature=1.0, num_samples=2)))
  print('batches', batches)

run(decode)
"""


def ends_of(code, folder, *each):
  """Status, stdout and stderr of processes, from what each has as `more`."""
  argv = BEGIN + code, folder, free_address(), len(each)
  processes = [started(*argv, index, *more) for index, more in enumerate(each)]
  # The last one first, since it may die.
  ends = [process.communicate() for process in processes[::-1]][::-1]
  return [(x.returncode, *y) for x, y in zip(processes, ends, strict=True)]


def free_address():
  with socket.socket() as probe:
    probe.bind(('localhost', 0))
    return f'localhost:{probe.getsockname()[1]}'


@pytest.fixture(scope='module')
def run(folder, tokenizer):
  """Starts the script above, once for each process."""
  words = 'the red blue old house tree dog cat runs sleeps'.split()
  lines = [' '.join(words[i % 7 : i % 7 + i % 4 + 1]) for i in range(11)]
  (folder / 'texts.txt').write_text('\n'.join(lines) + '\n')
  (folder / 'other.txt').write_text('\n'.join(lines[:-1]) + '\n')

  def run(out, count, fatal=0, placed='apart'):
    """Status, stdout and stderr of all; the last one dies at a batch."""
    fatal = [0] * (count - 1) + [fatal]
    return ends_of(SCRIPT, folder, *((out, one, placed) for one in fatal))

  return run


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


@pytest.fixture(scope='module')
def whole(run, tmp_path_factory):
  """Returns what one process writes for a task, and for a file of lines."""
  outs = {x: tmp_path_factory.mktemp(x) for x in ('apart', 'lines')}
  for placed, out in outs.items():
    ((status, _, said),) = run(out, 1, placed=placed)
    assert status == 0, said
  return {placed: results(out) for placed, out in outs.items()}


@pytest.mark.slow  # one process that is killed goes on in resume_test
@pytest.mark.parametrize('placed', ['apart', 'split'])
def test_a_killed_process_ends_the_others(run, whole, tmp_path, placed):
  """In a minute; what was finished is not decoded again.

  What two processes make, sampled, twice an example, is byte for byte what one
  makes. A model that is split over both decodes in lockstep, and its sums over
  shards round otherwise, so its scores are not the same bytes.
  """
  begin = time.monotonic()
  ends = run(tmp_path, 2, 3, placed)  # the second one in its second batch
  assert ends[1][0] == -signal.SIGKILL and ends[0][0] in ENDED, ends
  assert time.monotonic() - begin < 60
  assert not list(tmp_path.glob('*.COMPLETED'))
  kept = [path.read_text().count('\n') for path in tmp_path.glob('*.partial*')]
  kept = sum(kept) - len(kept)
  ends = run(tmp_path, 2, placed=placed)
  assert [status for status, *_ in ends] == [0, 0], ends
  again = [int(said.split()[-1]) for _, said, _ in ends]
  if placed == 'split':
    # Six batches, of which the one before the kill was kept.
    assert again == [5 + 1, 5 + 1]
    assert predictions(results(tmp_path)) == predictions(whole['apart'])
    return
  # Of three batches each the victim's first was kept, and what the other
  # process had time for; a program's first run is twice.
  assert again[1] == 2 + 1 and kept >= 1
  assert again[0] == (4 - kept + 1 if kept < 4 else 0)
  assert results(tmp_path) == whole['apart']


@pytest.mark.slow
def test_lines_of_two_processes(run, whole, tmp_path):
  """They are those of one; a process that reads another file is refused."""
  ends = run(tmp_path / 'lines', 2, placed='lines')
  assert [status for status, *_ in ends] == [0, 0], ends
  assert results(tmp_path / 'lines') == whole['lines']
  ends = run(tmp_path / 'other', 2, placed='other lines')
  assert [bool(status) for status, *_ in ends] == [True, True], ends
  assert 'Process 1 and another one of this run have' in ends[1][2]
  assert not list((tmp_path / 'other').glob('*.COMPLETED'))


# What the host reads between rounds, and scores, of rows of two processes.
ROWS = """
from specdec_jax.engine import scoring

def decode():
  placement = Placement(data=2, across_hosts=True) if count > 1 else None
  engine = small(max_input_len=32, max_decode_len=8, placement=placement)
  texts = ['the red dog runs', 'a cat']
  said = engine.generate(texts, stop_ids=[])[0].text
  letters = [one for one in said[1:] if one.isascii() and one.isprintable()]
  options = {'stop_ids': [], 'stop_strings': letters[:1]}
  for decoder in (engine, Pooled(engine, PoolSettings(rows=2))):
    for done in decoder.generate(texts, **options):
      print('found', done.tokens, done.finish_reason)
  print('found', list(engine.stream(texts[1], **options)))
  ids = [engine.codec.input_ids(text) for text in texts]
  for one in scoring.score(engine.target, engine.params.target, ids, ids):
    print('found', round(one.total, 2))

run(decode)
"""


@pytest.mark.slow
def test_rows_of_two_processes(tokenizer, folder):
  def run(count):
    ends = ends_of(ROWS, folder, *[()] * count)
    assert [status for status, *_ in ends] == [0] * count, ends
    # Gloo speaks as well.
    return [
      [line for line in out.splitlines() if line.startswith('found')]
      for _, out, _ in ends
    ]

  (alone,) = run(1)
  assert len(alone) == 2 + 2 + 1 + 2 and 'stop_string' in ''.join(alone)
  assert run(2) == [alone, alone]


# It waits for two seconds, then in C code that looks for no signal, as a
# compiled program does; argv: address, count.
WAITS = """
import hashlib, sys
from specdec_jax.infer import processes

def waits():
  processes._JOIN_S = 2
  processes.join(processes.Meeting(sys.argv[1], int(sys.argv[2]), 0))
  print('waiting', flush=True)
  hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)

sys.exit(processes.run(waits))
"""


@pytest.mark.slow
def test_processes_that_do_not_come():
  with started(WAITS, free_address(), 2) as process:
    text = process.communicate()[1]
  assert process.returncode in ENDED
  assert text.startswith('Waiting for the other processes, 2 s at most.')


def test_sigterm_ends_a_process_at_once():
  with started(WAITS, free_address(), 1) as process:
    try:
      assert process.stdout.readline() == 'waiting\n'
      process.terminate()
      assert process.wait(20) == -signal.SIGTERM
    finally:
      process.kill()


def test_flags():
  assert gin_flags.meeting_of(['--gin_file=a.gin']) is None
  assert gin_flags.meeting_of(['--multiprocess']) == Meeting()
  flags = '--coordinator_address=a.b:1234 --process_count=4 --process_index=3'
  assert gin_flags.meeting_of(flags.split()) == Meeting('a.b:1234', 4, 3)
  for values, message in (
    ((None, 2, None), '--coordinator_address, --process_index: expected'),
    (('a:1', 0, 0), '--process_count: .* from 1, got 0'),
    (('a:65536', 1, 0), "coordinator_address: .*HOST:PORT.* got 'a:65536'"),
    (('a', 2, 1), "coordinator_address: .*HOST:PORT.* got 'a'"),
    (('a:1', 2, 2), '--process_index: .*, got 2'),
  ):
    with pytest.raises(ValueError, match=message):
      Meeting(*values)
