"""Runs that are killed and started again; the folder that makes it possible."""

import errno
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from specdec_jax.infer import locks, resume

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIG = {'seed': 0, 'sampling': {'top_p': 1.0}}


def started(tmp_path, config=CONFIG, overwrite=False):
  folder = resume.Folder(str(tmp_path / 'out'), 'a.jsonl')
  with folder.claimed(overwrite):
    return folder, folder.begin(config, overwrite)


def test_chunks_come_back_until_the_run_is_finished(tmp_path):
  folder, done = started(tmp_path)
  assert done == {}
  folder.keep(0, {'a': 0.1})
  folder.keep(1, {'a': 1e-300})
  assert started(tmp_path)[1] == {0: {'a': 0.1}, 1: {'a': 1e-300}}
  folder.finish({'a.jsonl': 'x\n'})
  names = {path.name for path in folder.path.iterdir()}
  assert names == {'a.jsonl', 'a.jsonl.COMPLETED', 'a.jsonl.config.json'}
  assert json.loads((folder.path / 'a.jsonl.config.json').read_text()) == CONFIG
  with pytest.raises(ValueError, match='already holds finished results'):
    started(tmp_path)
  assert started(tmp_path, overwrite=True)[1] == {}
  # Until the new results are there, the old ones stay.
  assert (folder.path / 'a.jsonl').read_text() == 'x\n' and folder.finished


def test_another_configuration_is_refused_by_its_difference(tmp_path):
  folder, _ = started(tmp_path)
  folder.keep(0, 'kept')
  other = {'seed': 1, 'sampling': {'top_p': 0.9}}
  with pytest.raises(ValueError) as caught:
    started(tmp_path, other)
  assert 'seed was 0, is 1' in str(caught.value)
  assert 'sampling.top_p was 1.0, is 0.9' in str(caught.value)
  assert started(tmp_path)[1] == {0: 'kept'}
  folder, done = started(tmp_path, other, overwrite=True)
  assert done == {}
  folder.finish({'a.jsonl': ''})
  with pytest.raises(ValueError, match='finished results of another'):
    folder.check_finished(CONFIG)
  folder.check_finished(other)


def test_chunks_without_configuration_are_of_no_use(tmp_path):
  """A kill while chunks are being removed leaves such a folder."""
  folder, _ = started(tmp_path)
  folder.keep(0, 'old')
  (folder.path / 'a.jsonl.parts' / 'config.json').unlink()
  assert started(tmp_path)[1] == {}


def test_shards_share_a_folder(tmp_path):
  one, two = (
    resume.Folder(str(tmp_path), f'a.jsonl-0000{i}-of-00002') for i in (0, 1)
  )
  with one.claimed(False), two.claimed(False):
    assert one.begin(CONFIG, False) == two.begin(CONFIG, False) == {}
  one.keep(0, 'one')
  one.finish({one.name: ''})
  assert one.finished and not two.finished
  two.keep(0, 'two')
  assert two.begin(CONFIG, False) == {0: 'two'}


def test_one_process_at_a_time(tmp_path):
  folder, same = (resume.Folder(str(tmp_path), 'a.jsonl') for _ in range(2))
  with folder.claimed(False):
    me = f'process {os.getpid()} on '
    with pytest.raises(ValueError, match=rf'a\.jsonl in .* by {me}.*\. Wait'):
      with same.claimed(True):
        raise AssertionError('both have it')
  with pytest.raises(KeyError), same.claimed(False):
    raise KeyError  # a run that failed lets go as well
  with folder.claimed(False):
    pass
  assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
  def no_locks(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

  monkeypatch.setattr(locks.fcntl, 'flock', no_locks)
  folder = resume.Folder(str(tmp_path), 'a.jsonl')
  (tmp_path / '.a.jsonl.lock').write_text('process 7 on earth')
  with folder.claimed(False):
    said = capsys.readouterr().err
  assert 'a.jsonl' in said and 'process 7 on earth' in said
  assert os.strerror(errno.ENOLCK) in said and said.count('\n') == 1


HOLDER = """
import sys, time
from specdec_jax.infer import resume
with resume.Folder(sys.argv[1], 'a.jsonl').claimed(False):
  print('held', flush=True)
  time.sleep(600)
"""


def test_a_killed_process_lets_go(tmp_path):
  with subprocess.Popen(
    [sys.executable, '-c', HOLDER, str(tmp_path)],
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    stdout=subprocess.PIPE,
    text=True,
  ) as holder:
    try:
      assert holder.stdout.readline() == 'held\n'
      folder = resume.Folder(str(tmp_path), 'a.jsonl')
      with pytest.raises(ValueError, match=f'by process {holder.pid} on'):
        with folder.claimed(False):
          raise AssertionError('both have it')
    finally:
      holder.kill()
  with folder.claimed(False):
    pass
  assert not list(tmp_path.iterdir())


# Decodes a file, batch by batch; argv: folder, out, what with, and then what to
# die of: the number of the batch or of the write, and how far that has got.
SCRIPT = """
import os, random, signal, sys, types
import jax
import numpy as np
import small_vocabulary
from specdec_jax import infer, probs
from specdec_jax.files import writing
from specdec_jax.text import tokenizer as tokenizer_lib
from specdec_jax.engine.completion import Completion
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.engine.engine import Engine
from specdec_jax.models.model import Model

folder, out, kind, fatal, stage = sys.argv[1:]
jax.config.update('jax_compilation_cache_dir', folder + '/xla')
tokenizer = tokenizer_lib.Tokenizer(folder + '/vocab.model')
writes, batches = 0, 0

def dies_at(name, real):
  def call(*args):
    global writes
    if name == 'half':
      writes += 1
      if writes == int(fatal) and stage == 'half':
        # What has been written so far is cut in the middle.
        os.ftruncate(args[0], os.fstat(args[0]).st_size // 2)
    if writes == int(fatal) and stage == name:
      os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)
  return call

# Only what files/writing.py calls: JAX's cache of programs writes, too.
writing.os = types.SimpleNamespace(**vars(os))
writing.os.fsync = dies_at('half', os.fsync)
writing.os.replace = dies_at('before', os.replace)

def count_batch():
  global batches
  batches += 1
  if stage == 'batch' and batches == int(fatal):
    os.kill(os.getpid(), signal.SIGKILL)

class Counted(Engine):
  def generate(self, texts, **options):
    count_batch()
    return super().generate(texts, **options)

class Python:
  # Writes what a seeded generator says; quicker to start than a model.
  target = types.SimpleNamespace(vocab_size=tokenizer.vocab_size)
  drafter, gamma, max_input_len, max_decode_len = None, 2, 24, 12
  params = PairParams({'w': np.zeros(1)}, None)
  fingerprints, models, tokenizer, across_hosts = {}, {}, tokenizer, False
  bos_id = rule = usual = source_lang = target_lang = None
  has_drafter = False
  kernel_layout, chooses_gamma = 'in_out', False
  fallback = False

  def warmup(self, texts, **options):
    return 0.0

  def generate(self, texts, *, seed, example_ids, speculative, **options):
    count_batch()
    return [self._complete(seed, *pair) for pair in zip(texts, example_ids)]

  def _complete(self, *what):
    draw = random.Random(str(what))
    tokens = [draw.randrange(3, 250) for _ in range(5)]
    return Completion(
      tokenizer.decode(tokens), tokens, [-draw.random()] * 5, 'length')

def small(**options):
  def model(layers, seed):
    network = small_vocabulary.network(layers)
    return Model(network, network.init(jax.random.key(seed)))
  target, draft = model(2, 0), model(1, 1)
  options = {'max_input_len': 24, 'max_decode_len': 12} | options
  return Counted(target, draft, tokenizer=tokenizer, gamma=2,
                 cache_folder=folder + '/xla', **options)

sampling = probs.SamplingConfig(temperature=1.0)
if kind == 'lines':
  infer.decode(infer.DecodeConfig(
    small, folder + '/texts.txt', out, mode='both', batch_size=2,
    checkpoint_period=1, sampling=sampling))
else:
  infer.decode_task(infer.TaskConfig(
    small if kind == 'task' else lambda **options: Python(),
    tokenizer, folder + '/texts.txt', out,
    task_feature_lengths={'inputs': 24, 'targets': 12},
    mode='predict_with_aux', decoding='both',
    batch_size=2, num_decodes=2, checkpoint_period=1,
    sampling=sampling, include_all_inputs=True))
print('batches', batches)
"""


class Runner:
  """Starts the script above in a process of its own."""

  def __init__(self, folder):
    self.folder = folder
    (folder / 'run.py').write_text(SCRIPT)
    words = 'the red blue old house tree dog cat runs sleeps'.split()
    lines = [' '.join(words[i % 7 : i % 7 + i % 4 + 1]) for i in range(9)]
    (folder / 'texts.txt').write_text('\n'.join(lines) + '\n')

  def __call__(self, kind, out, fatal=0, stage='never'):
    arguments = [str(out), kind, str(fatal), stage]
    return subprocess.run(
      [sys.executable, 'run.py', str(self.folder), *arguments],
      cwd=self.folder,
      capture_output=True,
      text=True,
      env=os.environ | {'PYTHONPATH': f'{ROOT}{os.pathsep}{ROOT / "tests"}'},
    )


@pytest.fixture(scope='module')
def runner(folder, tokenizer):
  return Runner(folder)


def results(out):
  """Name -> bytes of what must not depend on how often a run was started.

  A summary holds times, and the marker the checksum of it.
  """
  return {
    path.name: b'' if 'COMPLETED' in path.name else path.read_bytes()
    for path in out.iterdir()
    if 'summary' not in path.name
  }


KILLS = [
  (3, 'batch'),  # in the middle of a chunk
  (1, 'half'),  # while the configuration is written
  (3, 'half'),  # while a chunk is
  (3, 'before'),  # a chunk is on the disk under its temporary name
  (7, 'half'),  # while the results are
  (8, 'before'),  # results but no summary
  (10, 'before'),  # everything but the marker
]


@pytest.mark.parametrize(
  'kind', ['python', pytest.param('task', marks=pytest.mark.slow)]
)
def test_killed_run_ends_as_an_uninterrupted_one(
  runner, folder, tmp_path, kind
):
  """Sampled, twice an example, both ways: byte for byte the same."""
  whole, out = tmp_path / 'whole', tmp_path / 'out'
  assert runner(kind, whole).returncode == 0
  for fatal, stage in ((5, 'batch'), (3, 'half')):
    done = runner(kind, out, fatal, stage)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not list(out.glob('*.COMPLETED'))
  done = runner(kind, out)
  assert done.returncode == 0, done.stderr
  assert results(out) == results(whole)
  # Five batches, both ways. What was kept, and no more, is not decoded again;
  # a program's first run is made twice.
  kept, again = (4, 0) if kind == 'python' else (3, 2)
  assert int(done.stdout.split()[-1]) == 2 * (5 - kept) + again
  (path,) = out.glob('*-of-00001')
  records = [json.loads(line) for line in path.read_text().splitlines()]
  texts = (folder / 'texts.txt').read_text().splitlines()
  assert [r['inputs']['inputs_pretokenized'] for r in records] == texts
  assert any(len(set(record['prediction'])) == 2 for record in records)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['python', 'task'])
def test_any_moment(runner, tmp_path, kind):
  assert runner(kind, tmp_path / 'whole').returncode == 0
  for fatal, stage in KILLS:
    out = tmp_path / f'{stage}{fatal}'
    done = runner(kind, out, fatal, stage)
    assert done.returncode == -signal.SIGKILL, (fatal, stage, done.stderr)
    assert not list(out.glob('*.COMPLETED'))
    done = runner(kind, out)
    assert done.returncode == 0, done.stderr
    assert results(out) == results(tmp_path / 'whole'), (fatal, stage)
    assert not list(out.glob('.*.tmp'))


@pytest.mark.slow
def test_lines(runner, tmp_path):
  assert runner('lines', tmp_path / 'whole').returncode == 0
  done = runner('lines', tmp_path / 'out', 6, 'batch')
  assert done.returncode == -signal.SIGKILL
  assert list(tmp_path.glob('out/*.parts/00000.json'))
  assert runner('lines', tmp_path / 'out').returncode == 0
  whole, out = (
    [
      json.loads(line)
      for line in (tmp_path / name / 'predictions.jsonl')
      .read_text()
      .split('\n')
      if line
    ]
    for name in ('whole', 'out')
  )
  for record in itertools.chain(whole, out):
    for stats in record['stats'].values():
      del stats['batch_ms_per_token']
  assert out == whole and len(out) == 9
