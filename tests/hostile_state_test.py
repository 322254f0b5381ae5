"""State on disk that was broken: it is named and made again, never believed.

A stand-in for the engine says what a seeded generator draws, so that a run
takes milliseconds; what is decoded how often is counted.
"""

import functools
import io
import json
import os
import pathlib
import random
import re
import shutil
import types

import numpy as np
import pytest
import rich.console

from specdec_jax import files, infer
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.engine.completion import Completion
from specdec_jax.files import same_run
from specdec_jax.infer import resume
from specdec_jax.probs import SamplingConfig

TEXTS = [f'{word} red dog' for word in 'the a one this my our'.split()]
CHUNKS = 3  # of two batches each, of one example each
NAME = 'texts-predict_with_aux.jsonl-00000-of-00001'
PARTS = f'{NAME}.parts'


class Says:
  """Says what it draws for a text, its example and the seed."""

  target = types.SimpleNamespace(vocab_size=300)
  drafter, gamma, max_input_len, max_decode_len = None, 2, 24, 12
  params = PairParams({'w': np.zeros(1)}, None)
  across_hosts, bos_id = False, None
  source_lang = target_lang = None
  rule, fallback, usual = None, False, None
  has_drafter = False
  kernel_layout, chooses_gamma = 'in_out', False
  fingerprints = types.MappingProxyType({})
  models = types.MappingProxyType({})

  def __init__(self, tokenizer):
    self.tokenizer = tokenizer
    self.decoded = []

  def num_input_tokens(self, text):
    return len(self.tokenizer.encode(text)) + 1

  def warmup(self, texts, **options):
    return 0.0

  def generate(self, texts, *, seed, example_ids, **options):
    self.decoded += example_ids
    pairs = zip(texts, example_ids, strict=True)
    return [self._complete(seed, *pair) for pair in pairs]

  def _complete(self, *what):
    draw = random.Random(str(what))
    tokens = [draw.randrange(3, 250) for _ in range(5)]
    scores = [-draw.random() for _ in tokens]
    return Completion(self.tokenizer.decode(tokens), tokens, scores, 'length')


class Killed(BaseException):
  """Stands for a kill in this process."""


class Runs:
  """Starts a run over `TEXTS` in a folder; `decoded`: by the last start."""

  def __init__(self, tokenizer, folder):
    self.tokenizer, self.source = tokenizer, folder / 'texts.txt'
    self.source.write_text('\n'.join(TEXTS) + '\n')
    self.decoded = []

  def __call__(self, out, **options):
    engine = Says(self.tokenizer)
    self.decoded = engine.decoded
    config = infer.TaskConfig(
      lambda **lengths: engine,
      self.tokenizer,
      str(self.source),
      str(out),
      task_feature_lengths={'inputs': 24, 'targets': 12},
      mode='predict_with_aux',
      decoding='plain',
      sampling=SamplingConfig(temperature=1.0),
      **{'batch_size': 1, 'checkpoint_period': 2} | options,
    )
    return infer.decode_task(config, console=quiet())

  def lines(self, out, **options):
    engine = Says(self.tokenizer)
    self.decoded = engine.decoded
    config = infer.DecodeConfig(
      lambda: engine, str(self.source), str(out), mode='plain', **options
    )
    return infer.decode(config, console=quiet())

  def killed(self, out, writes, **options):
    """A start that dies before its write of this number, from 0."""
    write, done = files.write_atomically, []

    def counting(path, data):
      if len(done) == writes:
        raise Killed
      done.append(path)
      write(path, data)

    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(files, 'write_atomically', counting)
      patch.setattr(files.writing, 'write_atomically', counting)
      with pytest.raises(Killed):
        self(out, **options)


def quiet():
  return rich.console.Console(file=io.StringIO())


@pytest.fixture(scope='module')
def runs(tokenizer, tmp_path_factory):
  return Runs(tokenizer, tmp_path_factory.mktemp('texts'))


@pytest.fixture(scope='module')
def whole(runs, tmp_path_factory):
  """What an uninterrupted run leaves."""
  out = tmp_path_factory.mktemp('whole')
  runs(out)
  return results(out)


def results(out):
  """Name -> bytes; a summary holds times, and the marker its checksum."""
  return {
    path.name: '' if path.suffix == '.COMPLETED' else path.read_bytes()
    for path in out.iterdir()
    if 'summary' not in path.name
  }


def change_a_digit(data):
  """In the middle of the content; in a chunk that is within a prediction."""
  body = data.index(b'\n') if b'\n' in data else 0
  digits = [m.start() for m in re.finditer(rb'\d', data) if m.start() > body]
  at = digits[len(digits) // 2]
  return data[:at] + (b'%d' % ((data[at] - 47) % 10)) + data[at + 1 :]


def as_a_folder(path):
  path.unlink()
  path.mkdir()
  (path / 'inside').write_text('x')


def as_a_pipe(path):
  path.unlink()
  os.mkfifo(path)


HOWS = {
  'a digit': change_a_digit,
  'a bit': lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
  'cut short': lambda data: data[: len(data) // 2],
  'one byte less': lambda data: data[:-1],
  'longer': lambda data: data + b' ',
  'empty': lambda data: b'',
  'null': lambda data: b'null',
  'braces': lambda data: b'{}',
  'a list': lambda data: b'[]',
  'deep': lambda data: b'[' * 100_000,
  'not UTF-8': lambda data: b'\xff' * 100,
  'zeros': lambda data: bytes(len(data)),
  'an earlier version': lambda data: data.partition(b'\n')[2],
  'another checksum': lambda data: b'sha256 ' + b'0' * 64 + data[71:],
}
IN_ITS_PLACE = {'a folder': as_a_folder, 'a pipe': as_a_pipe}


def break_file(path, how):
  if how in IN_ITS_PLACE:
    IN_ITS_PLACE[how](path)
  else:
    before = path.read_bytes()
    path.write_bytes(HOWS[how](before))
    assert path.read_bytes() != before


@pytest.fixture(scope='module')
def half(runs, tmp_path_factory):
  """A run that was killed when two of its three chunks were kept."""
  out = tmp_path_factory.mktemp('half')
  runs.killed(out, 3)
  return out


@pytest.fixture
def out(half, tmp_path):
  shutil.copytree(half, tmp_path / 'out')
  return tmp_path / 'out'


def test_whole_chunks_are_kept(runs, whole, out, capsys):
  """The control of what follows."""
  runs(out)
  assert runs.decoded == [4, 5]
  assert results(out) == whole and not capsys.readouterr().err


@pytest.mark.parametrize('how', [*HOWS, *IN_ITS_PLACE])
@pytest.mark.parametrize('number', [0, 1])
def test_a_broken_chunk_is_decoded_again(runs, whole, out, capsys, number, how):
  """It alone: the other one is kept, also where that comes later."""
  path = out / PARTS / f'0000{number}.json'
  break_file(path, how)
  runs(out)
  said = capsys.readouterr().err
  assert said.count('\n') == 1 and f'{path} ' in said
  assert 'decoded again' in said
  assert runs.decoded == [2 * number, 2 * number + 1, 4, 5]
  assert results(out) == whole


def test_a_chunk_that_is_gone_is_decoded_again(runs, whole, out):
  (out / PARTS / '00000.json').unlink()
  runs(out)
  assert runs.decoded == [0, 1, 4, 5] and results(out) == whole


def test_a_chunk_of_another_place_or_run(runs, whole, out, tmp_path, capsys):
  """Each is whole, but not what stands here."""
  first, second = (out / PARTS / f'0000{i}.json' for i in (0, 1))
  shutil.copy(first, second)
  runs.killed(tmp_path / 'other', 2, seed=1)
  shutil.copy(tmp_path / 'other' / PARTS / first.name, first)
  runs(out)
  said = capsys.readouterr().err.splitlines()
  assert len(said) == 2 and 'of another run' in said[0]
  assert str(first) in said[0] and str(second) in said[1]
  assert len(runs.decoded) == len(TEXTS) and results(out) == whole


@pytest.mark.parametrize('how', [*HOWS, *IN_ITS_PLACE])
def test_a_broken_configuration_is_made_again_with_its_chunks(
  runs, whole, out, capsys, how
):
  path = out / PARTS / 'config.json'
  break_file(path, how)
  runs(out)
  said = capsys.readouterr().err
  assert said.count('\n') == 1 and f'{path} ' in said and 'are removed' in said
  assert len(runs.decoded) == len(TEXTS) and results(out) == whole


def test_a_readable_configuration_of_another_run_is_refused(runs, whole, out):
  with pytest.raises(same_run.OtherRunError, match='seed was 0, is 1') as found:
    runs(out, seed=1)
  assert str(out) in str(found.value)
  runs(out)
  assert runs.decoded == [4, 5] and results(out) == whole


def test_a_chunk_of_the_same_settings_of_other_examples(
  runs, whole, out, tmp_path, capsys
):
  """What decides the result holds the examples, so it counts, too."""
  runs.killed(tmp_path / 'other', 3, num_decodes=2)
  for path in (tmp_path / 'other' / PARTS).glob('0*.json'):
    shutil.copy(path, out / PARTS)
  runs(out)
  assert len(runs.decoded) == len(TEXTS) and results(out) == whole
  assert capsys.readouterr().err.count('of another run') == 2


@pytest.fixture
def moments(runs, tmp_path):
  """A copy of the folder before and after each write of a run."""
  copies, write = [], files.write_atomically
  out = tmp_path / 'out'

  def copy():
    copies.append(tmp_path / f'{len(copies):02}')
    shutil.copytree(out, copies[-1])

  def copying(path, data):
    copy()
    # Half of it, under the name that it has until it is whole.
    torn = copies[-1] / pathlib.Path(path).relative_to(out)
    torn.with_name(f'.{torn.name}.abc.tmp').write_bytes(data[::2])
    write(path, data)
    copy()

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(files, 'write_atomically', copying)
    patch.setattr(files.writing, 'write_atomically', copying)
    runs(out)
  return copies


def test_a_kill_at_each_write(runs, whole, moments):
  """Ends as an uninterrupted run did, with nothing left over."""
  # The configuration, chunks, results, configuration, summary and the marker.
  assert len(moments) == 2 * (1 + CHUNKS + 4)
  for moment, out in enumerate(moments):
    assert (out / f'.{NAME}.lock').exists()  # as a kill leaves it
    runs(out)
    kept = min(max(moment - 1, 0) // 2, CHUNKS)
    last = moment == len(moments) - 1
    assert len(runs.decoded) == (0 if last else 2 * (CHUNKS - kept)), moment
    assert results(out) == whole, moment
    # A summary that belongs to the results, by the marker.
    runs(out)
    assert runs.decoded == []


def test_what_a_kill_after_the_marker_left_is_cleaned(runs, out):
  """Of lines, too, whose finished results are an error."""
  runs.lines(out)
  kept = 'predictions.jsonl'
  names = {path.name for path in out.iterdir() if kept in path.name}
  (out / f'{kept}.parts').mkdir()
  (out / f'{kept}.parts' / '00000.json').write_text('{}')
  for name in (f'.{kept}.lock', f'.{kept}.process-00001-of-00002.lock'):
    (out / name).write_text('process 1 on earth')
  (out / f'{kept}.process-00001-of-00002.parts').mkdir()
  runs.lines(out)
  assert runs.decoded == []
  left = {path.name for path in out.iterdir()}
  assert {name for name in left if kept in name} == names
  assert PARTS in left  # another run's


ENDINGS = ['', '.summary.json', '.config.json']


@pytest.fixture(scope='module')
def finished_once(runs, tmp_path_factory):
  out = tmp_path_factory.mktemp('finished')
  runs(out)
  return out


@pytest.fixture
def finished(finished_once, tmp_path):
  shutil.copytree(finished_once, tmp_path / 'finished')
  return tmp_path / 'finished'


@pytest.mark.parametrize('ending', ENDINGS)
def test_a_result_that_is_gone_is_made_anew(
  runs, whole, finished, capsys, ending
):
  runs(finished)
  assert runs.decoded == [] and not capsys.readouterr().err  # the control
  (finished / f'{NAME}{ending}').unlink()
  runs(finished)
  said = capsys.readouterr().err
  assert f'{NAME}{ending} is missing' in said and said.count('\n') == 1
  assert len(runs.decoded) == len(TEXTS) and results(finished) == whole
  runs(finished)
  assert runs.decoded == []


@pytest.mark.parametrize('how', ['a bit', 'cut short', 'null'])
@pytest.mark.parametrize('ending', [*ENDINGS, '.COMPLETED'])
def test_a_result_that_was_changed_is_refused(
  runs, whole, finished, ending, how
):
  path = finished / f'{NAME}{ending}'
  break_file(path, how)
  changed = path.read_bytes()
  for _ in range(2):
    with pytest.raises(ValueError, match='--overwrite, in gin') as found:
      runs(finished)
    assert str(path) in str(found.value) and runs.decoded == []
    assert path.read_bytes() == changed
  runs(finished, overwrite=True)
  assert len(runs.decoded) == len(TEXTS) and results(finished) == whole


def test_a_result_that_is_a_folder_is_refused(runs, finished):
  as_a_folder(finished / NAME)
  with pytest.raises(ValueError, match='cannot be read'):
    runs(finished)


def test_other_settings_are_refused_though_a_result_is_gone(runs, finished):
  (finished / NAME).unlink()
  with pytest.raises(same_run.OtherRunError, match='seed was 0, is 1'):
    runs(finished, seed=1)
  assert {path.name for path in finished.iterdir()} == {
    f'{NAME}{ending}' for ending in [*ENDINGS[1:], '.COMPLETED']
  }


@pytest.mark.parametrize('how', ['gone', 'changed'])
def test_finished_lines(runs, tmp_path, how, capsys):
  out = tmp_path / 'out'
  runs.lines(out)
  path = out / 'predictions.jsonl'
  before = predictions(path)
  if how == 'changed':
    break_file(path, 'a digit')
    with pytest.raises(ValueError, match='was changed after'):
      runs.lines(out)
    assert runs.decoded == []
    runs.lines(out, overwrite=True)
  else:
    path.unlink()
    with pytest.raises(same_run.OtherRunError, match='seed was 0, is 1'):
      runs.lines(out, seed=1)
    runs.lines(out)
    assert 'predictions.jsonl is missing' in capsys.readouterr().err
  assert len(runs.decoded) == len(TEXTS) and predictions(path) == before
  runs.lines(out)
  assert runs.decoded == [] and predictions(path) == before


def predictions(path):
  return [json.loads(x)['prediction'] for x in path.read_text().splitlines()]


def test_what_another_process_decoded(tmp_path, capsys):
  """It counts once all of it is there, and is this run's."""
  whole = resume.Folder(str(tmp_path), 'a.jsonl')
  config = {'seed': 0}
  own, other = (whole.share(index, 2) for index in (0, 1))
  own.begin(config, False)
  assert other.decoded(own) is None
  other.begin(config, False)
  for number in range(2):
    other.keep(number, f'chunk {number}')
  seen = functools.partial(whole.share(1, 2).decoded, own)
  assert seen() is None
  other.mark_decoded()
  assert seen() == ['chunk 0', 'chunk 1']
  path = tmp_path / f'{other.name}.parts' / '00001.json'
  before = path.read_bytes()
  path.write_bytes(change_a_digit(before))
  assert seen() is None
  path.unlink()
  assert seen() is None
  path.write_bytes(before)
  assert seen() is not None
  # Its process was started again, and has not gone through its chunks.
  path.write_bytes(b'')
  assert whole.share(1, 2).begin(config, False) == {0: 'chunk 0'}
  assert seen() is None and str(path) in capsys.readouterr().err
  other.keep(1, 'chunk 1')
  other.mark_decoded()
  assert seen() == ['chunk 0', 'chunk 1']
  # One of another run.
  apart = resume.Folder(str(tmp_path), 'a.jsonl').share(0, 2)
  apart.begin({'seed': 1}, True)
  assert whole.share(1, 2).decoded(apart) is None
