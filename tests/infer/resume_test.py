"""Runs that are killed and started again; the folder that makes it possible."""

import errno
import itertools
import os
import pathlib
import shutil
import signal
from unittest import mock

import pytest

from dying_run import LINES, start
from specdec_jax import files
from specdec_jax.infer import resume
from specdec_jax.infer.data import PREDICTIONS
from toy_processes import started
from toy_training import Killed

PARTIAL = f'{PREDICTIONS}.partial'


@pytest.fixture(scope='module')
def partial(tmp_path_factory):
  """The work of a whole run, as it is before the results are written."""
  folder = tmp_path_factory.mktemp('partial')
  killed = mock.patch.object(resume.Folder, 'finish', side_effect=Killed)
  with killed, pytest.raises(Killed):
    start(folder)
  return (folder / 'out' / PARTIAL).read_bytes()


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  return start(tmp_path_factory.mktemp('whole'))[0]


def begin(tmp_path, data):
  """Makes an output folder whose run was killed with this work done."""
  shutil.rmtree(tmp_path / 'out', ignore_errors=True)
  (tmp_path / 'out').mkdir()
  (tmp_path / 'out' / PARTIAL).write_bytes(data)


def test_any_prefix_leads_to_the_same_records(partial, whole, tmp_path, capsys):
  """Wherever a kill cuts the file; whole lines are not decoded again."""
  ends = [i + 1 for i, byte in enumerate(partial) if byte == 10]
  assert len(ends) == 1 + 2 * 3  # settings, and three batches in two ways
  assert all(len(line) > 20 for line in partial.splitlines())
  cuts = {0, 1, len(partial) - 1, *ends}
  cuts |= {end + shift for end in ends[:-1] for shift in (-1, 1, 30)}
  for cut in sorted(cuts):
    begin(tmp_path, partial[:cut])
    records, calls = start(tmp_path)
    assert records == whole, cut
    done = max(0, sum(end <= cut for end in ends) - 1)
    left = [2, 2, 2, 2, 1, 1][done:]  # lines of each batch in turn
    assert len(calls) == sum(left), cut
    names = {path.name for path in (tmp_path / 'out').iterdir()}
    assert len(names) == 4 and PARTIAL not in names
  # The only cut to warn of is within the settings.
  (warned,) = set(capsys.readouterr().err.splitlines())
  assert str(tmp_path / 'out' / PARTIAL) in warned


@pytest.mark.parametrize('broken', [b'{"plain": ', b'[' * 9999, b'\xff' * 9])
def test_a_broken_line_is_made_again(partial, whole, tmp_path, capsys, broken):
  """It alone, with a warning."""
  lines = partial.split(b'\n')
  lines[2] = broken
  begin(tmp_path, b'\n'.join(lines))
  records, calls = start(tmp_path)
  assert records == whole
  assert calls == {(True, LINES[0]), (True, LINES[1])}
  assert capsys.readouterr().err.count('is damaged') == 1


def test_another_run_is_refused_or_replaced(partial, tmp_path):
  begin(tmp_path, partial)
  with pytest.raises(ValueError, match='seed was 0, is 1'):
    start(tmp_path, seed=1)
  assert len(start(tmp_path, seed=1, overwrite=True)[1]) == 2 * len(LINES)


def test_finished_results_that_cannot_be_used(tmp_path, whole):
  start(tmp_path)
  out = tmp_path / 'out'
  for name in (PREDICTIONS, 'summary.json'):
    (out / name).write_text('{')
    with pytest.raises(ValueError, match='--overwrite, in gin'):
      start(tmp_path, stdout='outputs')
    assert start(tmp_path, overwrite=True)[0] == whole
  (out / PREDICTIONS).unlink()
  records, calls = start(tmp_path)
  assert records == whole and len(calls) == 2 * len(LINES)


def test_leftovers_of_a_kill_are_cleaned(tmp_path):
  start(tmp_path)
  finished = tmp_path / 'out'
  (finished / 'other.jsonl.partial').write_text('another run')
  names = {path.name for path in finished.iterdir()}
  for left in (PARTIAL, f'{PARTIAL}-00001', f'.{PREDICTIONS}.lock'):
    (finished / left).write_text('process 1 on earth')
  assert not start(tmp_path)[1]
  assert {path.name for path in finished.iterdir()} == names


def test_a_kill_at_each_write_of_the_results(tmp_path, whole, partial):
  """Ends as an uninterrupted run did, with nothing left over."""
  write, moments = files.write_atomically, []

  def copying(path, data):
    moments.append(tmp_path / f'{len(moments)}' / 'out')
    shutil.copytree(tmp_path / 'out', moments[-1])
    torn = moments[-1] / f'.{pathlib.Path(path).name}.abc.tmp'
    torn.write_bytes(data[::2])
    write(path, data)

  with mock.patch.object(files, 'write_atomically', copying):
    start(tmp_path)
  # Records, operative configuration, summary, and the marker.
  assert len(moments) == 4
  for out in moments:
    assert not (out / f'{PREDICTIONS}.COMPLETED').exists()
    records, calls = start(out.parent)
    assert records == whole and not calls
    assert len(list(out.iterdir())) == 4


def test_one_process_at_a_time(tmp_path):
  folder, same = (resume.Folder(str(tmp_path), 'a.jsonl') for _ in range(2))
  other = resume.Folder(str(tmp_path), 'b.jsonl')
  with folder.claimed(), other.claimed():
    process = f'by process {os.getpid()} on '
    with pytest.raises(ValueError, match=process), same.claimed():
      pass
  with pytest.raises(KeyError), same.claimed():
    raise KeyError  # a run that failed lets go as well
  with folder.claimed():
    pass
  assert not list(tmp_path.iterdir())


def test_a_killed_process_lets_go_and_keeps_its_work(tmp_path, whole):
  code = 'import pathlib; from dying_run import Dies, start;'
  code += f'start(pathlib.Path({str(tmp_path)!r}), Dies())'
  with started(code) as process:
    process.communicate()
  assert process.returncode == -signal.SIGKILL
  names = {path.name for path in (tmp_path / 'out').iterdir()}
  assert names == {f'.{PREDICTIONS}.lock', PARTIAL}
  records, calls = start(tmp_path)
  assert records == whole and len(calls) == 6


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
  no_locks = mock.Mock(side_effect=OSError(errno.ENOLCK, 'No locks'))
  monkeypatch.setattr(resume.fcntl, 'flock', no_locks)
  (tmp_path / '.a.jsonl.lock').write_text('process 7 on earth')
  with resume.Folder(str(tmp_path), 'a.jsonl').claimed():
    warned = capsys.readouterr().err
  assert 'a.jsonl' in warned and 'process 7 on earth' in warned


def test_a_process_that_does_nothing_is_not_waited_for(tmp_path, monkeypatch):
  """As one that hangs, or that writes into another folder of this name."""
  monkeypatch.setattr(resume, '_MOST_SILENCE_S', 0.3)
  monkeypatch.setattr(resume, '_POLL_S', 0.1)
  looks = itertools.count()

  def look():
    if (number := next(looks)) < 8:  # a third process lives beyond the bound
      (tmp_path / f'a.jsonl.{number}').write_text('')

  with pytest.raises(ValueError, match='process 0 waits for others'):
    resume.Folder(str(tmp_path), 'a.jsonl').wait(look)
  assert next(looks) > 9
