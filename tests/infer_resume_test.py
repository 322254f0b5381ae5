"""Runs that are killed and started again; the folder that makes it possible."""

import contextlib
import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from infer_test import PREDICTIONS, ReversingEngine, run
from specdec_jax import files
from specdec_jax.infer import resume
from specdec_jax.infer.processes import Processes

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINES = [f'w{i} x y' for i in range(5)]
DATA = '\n'.join(LINES).encode()
PARTIAL = f'{PREDICTIONS}.partial'


def start(tmp_path, **options):
  """Decodes `DATA`, two lines a batch; records without times, and the calls."""
  engine = ReversingEngine()
  _, records, _ = run(tmp_path, DATA, engine, batch_size=2, **options)
  for record in records:
    for stats in record['stats'].values():
      del stats['batch_ms_per_token']
  # Every program's first call is made twice, and so is the padding.
  texts = {(call[0], text) for call in engine.calls for text in call[1]}
  return records, texts


@pytest.fixture(scope='module')
def partial(tmp_path_factory):
  """The work of a whole run, as it is before the results are written."""
  folder = tmp_path_factory.mktemp('partial')
  with pytest.MonkeyPatch.context() as patch:

    def killed(self, contents, failed):
      raise KeyboardInterrupt

    patch.setattr(resume.Folder, 'finish', killed)
    with pytest.raises(KeyboardInterrupt):
      start(folder)
  return (folder / 'out' / PARTIAL).read_bytes()


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  return start(tmp_path_factory.mktemp('whole'))[0]


def begun(tmp_path, data):
  """An output folder whose run was killed with this work done."""
  shutil.rmtree(tmp_path / 'out', ignore_errors=True)
  (tmp_path / 'out').mkdir()
  (tmp_path / 'out' / PARTIAL).write_bytes(data)


def test_any_prefix_goes_on_to_the_same_records(
  partial, whole, tmp_path, capsys
):
  """Wherever a kill cuts the file; whole lines are not decoded again."""
  ends = [i + 1 for i, byte in enumerate(partial) if byte == 10]
  assert len(ends) == 1 + 2 * 3  # settings, and three batches in two ways
  assert all(len(line) > 20 for line in partial.splitlines())
  cuts = {0, 1, len(partial) - 1, *ends}
  cuts |= {end + shift for end in ends[:-1] for shift in (-1, 1, 30)}
  for cut in sorted(cuts):
    begun(tmp_path, partial[:cut])
    records, calls = start(tmp_path)
    assert records == whole, cut
    done = max(0, sum(end <= cut for end in ends) - 1)
    left = [2, 2, 2, 2, 1, 1][done:]  # lines of each batch in turn
    assert len(calls) == sum(left), cut
    names = {path.name for path in (tmp_path / 'out').iterdir()}
    assert len(names) == 5 and PARTIAL not in names
  # The only cut to warn of is within the settings.
  assert set(capsys.readouterr().err.splitlines()) == {
    f'warning: {tmp_path / "out" / PARTIAL} is no work of a run: it is removed,'
    ' and made again.'
  }


BREAKS = {
  'a digit': lambda line: line.replace(b'-0.5', b'-0.6', 1),
  'short': lambda line: line[: len(line) // 2],
  'deep': lambda line: b'[' * 100_000,
  'not UTF-8': lambda line: b'\xff' * 100,
}


@pytest.mark.parametrize('how', BREAKS)
def test_a_broken_line_is_decoded_again(partial, whole, tmp_path, capsys, how):
  """It alone, with a word; never believed."""
  lines = partial.split(b'\n')
  lines[2] = BREAKS[how](lines[2])
  begun(tmp_path, b'\n'.join(lines))
  records, calls = start(tmp_path)
  assert records == whole
  assert calls == {(True, LINES[0]), (True, LINES[1])}
  assert capsys.readouterr().err.count('is damaged or of another run') == 1


def test_broken_settings_are_made_again_with_their_work(
  partial, whole, tmp_path, capsys
):
  begun(tmp_path, partial.replace(b'batch_size', b'patch_size', 1))
  records, calls = start(tmp_path)
  assert records == whole and len(calls) == 2 * len(LINES)
  assert 'is removed' in capsys.readouterr().err


def test_lines_of_another_run_do_not_count(partial, whole, tmp_path, capsys):
  begun(tmp_path, b'')
  with (
    contextlib.suppress(KeyboardInterrupt),
    pytest.MonkeyPatch.context() as p,
  ):
    p.setattr(
      resume.Folder, 'finish', lambda *_: exec('raise KeyboardInterrupt')
    )
    start(tmp_path, seed=1)
  path = tmp_path / 'out' / PARTIAL
  other = path.read_bytes().split(b'\n')
  with pytest.raises(ValueError, match='seed was 1, is 0'):
    start(tmp_path)
  path.write_bytes(b'\n'.join([partial.split(b'\n')[0], *other[1:]]))
  records, calls = start(tmp_path)
  assert records == whole and len(calls) == 2 * len(LINES)
  assert capsys.readouterr().err.count('of another run') == 6
  # Who overwrites need not remove it.
  begun(tmp_path, b'\n'.join(other))
  assert start(tmp_path, overwrite=True)[0] == whole


@pytest.fixture
def finished(tmp_path):
  start(tmp_path)
  return tmp_path / 'out'


def test_a_result_that_is_gone_is_made_again(tmp_path, whole, finished, capsys):
  (finished / PREDICTIONS).unlink()
  with pytest.raises(ValueError, match='seed was 0, is 1'):
    start(tmp_path, seed=1)
  records, calls = start(tmp_path)
  assert records == whole and len(calls) == 10
  assert 'is missing' in capsys.readouterr().err


@pytest.mark.parametrize('ending', ['', '.config.json', '.COMPLETED'])
def test_a_result_that_was_changed_is_refused(
  tmp_path, whole, finished, ending
):
  path = finished / f'{PREDICTIONS}{ending}'
  data = path.read_bytes()
  middle = len(data) - 12  # of the marker it is a digit of a checksum
  bit = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
  for changed in (bit, data[:-5], b'null'):
    path.write_bytes(changed)
    with pytest.raises(ValueError, match='--overwrite, in gin') as caught:
      start(tmp_path)
    assert path.name in str(caught.value) or 'changed' in str(caught.value)
  assert start(tmp_path, overwrite=True)[0] == whole


def test_leftovers_of_a_kill_are_cleaned(tmp_path, finished):
  names = {path.name for path in finished.iterdir()}
  (finished / PARTIAL).write_text('x')
  (finished / f'{PARTIAL}-00001-of-00002').write_text('x')
  (finished / f'.{PREDICTIONS}-00001-of-00002.lock').write_text('process 1')
  (finished / f'.{PREDICTIONS}.lock').write_text('process 1 on earth')
  (finished / 'other.jsonl.partial').write_text('another run')
  assert not start(tmp_path)[1]
  left = {path.name for path in finished.iterdir()}
  assert left == names | {'other.jsonl.partial'}


def test_a_kill_at_each_write_of_the_results(tmp_path, whole, partial):
  """Ends as an uninterrupted run did, with nothing left over."""
  write, moments = files.write_atomically, []

  def copying(path, data):
    moments.append(tmp_path / f'{len(moments)}' / 'out')
    shutil.copytree(tmp_path / 'out', moments[-1])
    torn = moments[-1] / f'.{pathlib.Path(path).name}.abc.tmp'
    torn.write_bytes(data[::2])
    write(path, data)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(files, 'write_atomically', copying)
    start(tmp_path)
  # Records, operative configuration, summary, settings, and the marker.
  assert len(moments) == 5
  for out in moments:
    assert not (out / f'{PREDICTIONS}.COMPLETED').exists()
    records, calls = start(out.parent)
    assert records == whole and not calls
    assert len(list(out.iterdir())) == 5


def claim(folder):
  with folder.claimed():
    raise AssertionError('both have it')


def test_one_process_at_a_time(tmp_path):
  folder, same = (resume.Folder(str(tmp_path), 'a.jsonl') for _ in range(2))
  other = resume.Folder(str(tmp_path), 'b.jsonl')
  with folder.claimed(), other.claimed():
    with pytest.raises(ValueError, match=f'by process {os.getpid()} on '):
      claim(same)
  with pytest.raises(KeyError), same.claimed():
    raise KeyError  # a run that failed lets go as well
  with folder.claimed():
    pass
  assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
sys.path[:0] = [sys.argv[1]]
import infer_test
from specdec_jax import infer

class Dies(infer_test.ReversingEngine):
  def generate(self, texts, **options):
    if 'w3 x y' in texts:
      os.kill(os.getpid(), signal.SIGKILL)
    return super().generate(texts, **options)

infer.decode(infer.DecodeConfig(
  Dies, sys.argv[2] + '/input.txt', sys.argv[2] + '/out', batch_size=2))
"""


def test_a_killed_process_lets_go_and_keeps_its_work(tmp_path, whole):
  (tmp_path / 'input.txt').write_bytes(DATA)
  done = subprocess.run(
    [sys.executable, '-c', KILLED, str(ROOT / 'tests'), str(tmp_path)],
    env=os.environ | {'PYTHONPATH': str(ROOT)},
  )
  assert done.returncode == -signal.SIGKILL
  names = {path.name for path in (tmp_path / 'out').iterdir()}
  assert names == {f'.{PREDICTIONS}.lock', PARTIAL}
  records, calls = start(tmp_path)
  assert records == whole and len(calls) == 6


def test_several_processes_share_a_folder(tmp_path):
  """Each appends to a file of its own; together they know all of it."""
  first, second = (
    resume.Folder(str(tmp_path), 'a.jsonl', Processes(i, 2)) for i in (0, 1)
  )
  settings = {'seed': 0}
  work = [{'a': 0.1}, {'b': 1e-300}, {'c': float('inf')}]
  with first.claimed(), second.claimed():
    assert first.begin(settings, False) == second.begin(settings, False) == []
    first.append(work[0])
    second.append(work[1])
    assert first.appended() == [work[1]]
    second.append(work[2])
    assert first.appended() == [work[2]] and first.appended() == []
    again = resume.Folder(str(tmp_path), 'a.jsonl')
    assert again.begin(settings, False) == work
    first.finish({'a.jsonl': ''})
  found = json.loads((tmp_path / 'a.jsonl.config.json').read_text())
  assert found == settings
  assert second.finished and len(list(tmp_path.iterdir())) == 3


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
  def no_locks(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

  monkeypatch.setattr(resume.fcntl, 'flock', no_locks)
  folder = resume.Folder(str(tmp_path), 'a.jsonl')
  (tmp_path / '.a.jsonl.lock').write_text('process 7 on earth')
  with folder.claimed():
    warned = capsys.readouterr().err
  assert 'a.jsonl' in warned and 'process 7 on earth' in warned
  assert os.strerror(errno.ENOLCK) in warned and warned.count('\n') == 1


def test_a_process_that_does_nothing_is_not_waited_for(tmp_path, monkeypatch):
  """As one that hangs, or that writes into another folder of this name."""
  monkeypatch.setattr(resume, '_MOST_SILENCE_S', 0.3)
  monkeypatch.setattr(resume, '_LOOK_S', 0.1)
  folder, looks = resume.Folder(str(tmp_path), 'a.jsonl', Processes(0, 2)), []

  def look():
    looks.append(1)
    if len(looks) < 8:  # a third process is alive for more than the bound
      (tmp_path / f'a.jsonl.{len(looks)}').write_text('')
    return False

  with pytest.raises(ValueError, match='process 0 waits for other processes'):
    folder.wait(look)
  assert len(looks) > 9
