"""Text files that are broken or hostile: one bad line stops no other one.

Each case is a line that is wrong, in a kind of file; an engine of plain Python
decodes what is right.
"""

import gzip
import io
import json
import os
import pathlib
import threading
import types
import zlib

import numpy as np
import pytest
import rich.console

from specdec_jax import files, infer
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters import heads, ngram_table
from specdec_jax.engine.completion import Completion
from specdec_jax.files import reading
from specdec_jax.infer import results, resume
from specdec_jax.measure import calibration, record
from specdec_jax.measure.prompts import read_prompts
from specdec_jax.serving.run import api_keys
from specdec_jax.text import lines as lines_lib
from specdec_jax.text.local_tasks import LocalTask
from specdec_jax.text.vocabulary import open_vocabulary
from specdec_jax.training import pairs

LENGTHS = {'inputs': 16, 'targets': 8}
RIGHT = {
  'txt': (b'the red dog', b'a cat'),
  'tsv': (b'the red dog\ta cat', b'a cat\tthe dog'),
  'jsonl': (
    b'{"inputs": "the red dog", "targets": "a cat"}',
    b'{"inputs": "a cat", "targets": "the dog"}',
  ),
}
LONG = 1 << 13  # bytes of a line, in place of `files.MAX_LINE`
# What is wrong with a line: the kinds of file, the line, what its error says.
LINES = {
  'bytes': ('txt tsv jsonl', b'ab\xff', 'not valid UTF-8 (byte 0xff at byte 3'),
  'cut': ('txt tsv jsonl', 'ä'.encode()[:1], 'not valid UTF-8'),
  'surrogate': ('txt tsv jsonl', b'a \xed\xa0\x80', 'not valid UTF-8'),
  'long': ('txt tsv jsonl', b'a ' * LONG, '16,384 bytes; a line has at most'),
  'columns': ('tsv', b'a\tb\tc', '3 columns'),
  'escaped': ('jsonl', rb'{"inputs": "a \ud800", "targets": ""}', 'surrogate'),
  'target': ('jsonl', rb'{"inputs": "a", "targets": "\udfff"}', 'surrogate'),
  'one of': ('jsonl', rb'{"inputs": "", "targets": ["a", "\udc00"]}', 'surr'),
  'name': ('jsonl', rb'{"\ud800": "a"}', "no field 'inputs'"),
  'deep': ('jsonl', b'[' * 100_000, 'nested too deep'),
  'deep field': ('jsonl', b'{"inputs": ' + b'[' * 100_000, 'nested too deep'),
  'a list': (
    'jsonl',
    b'{"inputs": ' + b'[' * 500 + b']' * 500 + b'}',
    "text in the field 'inputs'",
  ),
  'digits': ('jsonl', b'{"inputs": ' + b'1' * 5000 + b'}', 'is not JSON'),
  'half': ('jsonl', b'{"inputs": "a', 'is not JSON'),
}
CASES = [
  pytest.param(kind + packed, case, id=f'{case}-{kind}{packed}')
  for case, (kinds, _, _) in LINES.items()
  for kind in kinds.split()
  for packed in ('', '.gz')
]


class Reversing:
  """Reverses ids or texts; may die once so many batches are done."""

  target = types.SimpleNamespace(vocab_size=1000)
  drafter, gamma, max_input_len, max_decode_len = None, 2, 16, 8
  params = PairParams({'w': np.zeros(1)}, None)
  fingerprints, models, across_hosts, bos_id = {}, {}, False, None
  source_lang = target_lang = None
  rule, fallback, usual = None, False, None
  has_drafter = False
  kernel_layout, chooses_gamma = 'in_out', False

  def __init__(self, tokenizer):
    self.tokenizer = tokenizer
    self.batches = 0

  def num_input_tokens(self, line):
    return len(self.tokenizer.encode(line))

  def warmup(self, sources, **options):
    return 0.0

  def generate(self, sources, **options):
    self.batches += 1
    return [
      Completion(str(source)[::-1], [3], [-0.5], 'stop') for source in sources
    ]


@pytest.fixture
def engine(tokenizer):
  return Reversing(tokenizer)


def write(path, content):
  if path.name.endswith('.gz'):
    content = gzip.compress(content, mtime=0)
  path.write_bytes(content)
  return str(path)


def decoded(engine, path, out, **options):
  """Records and summary of the file: as lines, or as examples of a task."""
  console = rich.console.Console(file=io.StringIO(), width=100)
  if '.txt' in path and not options:
    config = infer.DecodeConfig(
      lambda: engine, path, str(out), mode='plain', on_too_long='truncate'
    )
    summary = infer.decode(config, console=console)
    name = results.PREDICTIONS
  else:
    config = infer.TaskConfig(
      lambda **options: engine,
      engine.tokenizer,
      path,
      str(out),
      task_feature_lengths=LENGTHS,
      decoding='plain',
      **options,
    )
    summary = infer.decode_task(config, console=console)
    (marker,) = pathlib.Path(out).glob('*.COMPLETED')
    name = marker.name.removesuffix('.COMPLETED')
  return read(pathlib.Path(out) / name), summary


def refuse(name):
  raise AssertionError(f'{name} is no JSON')


def read(path):
  """The records of a file of strict JSON."""
  return [
    json.loads(line, parse_constant=refuse)
    for line in path.read_bytes().decode('utf-8').split('\n')[:-1]
  ]


@pytest.mark.parametrize('kind, case', CASES)
def test_a_bad_line_stops_no_other(kind, case, engine, tmp_path, monkeypatch):
  """Also where it is the last one; all lines like that are an error."""
  monkeypatch.setattr(reading, 'MAX_LINE', LONG)
  if case.startswith('deep'):
    monkeypatch.setattr(reading, 'MAX_LINE', 1 << 20)
  _, bad, message = LINES[case]
  right = RIGHT[kind.removesuffix('.gz')]
  name = f'a.{kind}'
  lines = [right[0], bad, right[1], bad]
  path = write(tmp_path / name, b'\n'.join(lines) + b'\n')
  records, summary = decoded(engine, path, tmp_path / 'out')
  assert [record.get('error') is None for record in records] == [
    True,
    False,
    True,
    False,
  ]
  assert message in records[1]['error'] and 'line 2' in records[1]['error']
  assert records[1]['prediction'] is None and records[2]['prediction']
  assert len(summary['errors']) == 2 and summary['input_broken_off'] is None
  path = write(tmp_path / f'b.{kind}', bad + b'\n' + bad)
  with pytest.raises(ValueError) as caught:
    decoded(engine, path, tmp_path / 'other')
  assert 'line 1' in str(caught.value) and str(caught.value).count('\n') == 0


STRANGE = (
  rb'"nan": NaN, "inf": -Infinity, "big": 1e999, "id": "x\ud800y",'
  rb' "\udc00": "key", "<broken>": "no", "references": 5, "ok": 0.5'
)


@pytest.mark.parametrize('packed', ['', '.gz'])
def test_what_goes_along_can_be_written(engine, tmp_path, packed):
  line = rb'{"inputs": "a cat", "targets": "a", ' + STRANGE + b'}\n'
  path = write(tmp_path / f'a.jsonl{packed}', line)
  ((record,), _) = decoded(
    engine, path, tmp_path / 'out', include_all_inputs=True
  )
  assert record['prediction'] and 'error' not in record
  inputs = record['inputs']
  assert inputs['nan'] is inputs['inf'] is inputs['big'] is None
  assert inputs['id'] == 'x\ufffdy' and inputs['\ufffd'] == 'key'
  assert inputs['ok'] == 0.5
  assert not {'<broken>', 'references'} & set(inputs)


def test_whatever_a_feature_is():
  strange = {
    'array': np.array([1.0, np.nan]),
    'bytes': [b'a\xff', np.bytes_(b'b')],
    'number': np.float32('inf'),
    'whole': np.int64(3),
    4: (None, True),
    'object': pathlib.PurePosixPath('a'),
  }
  (record,) = (json.loads(line) for line in [results.json_lines([strange])])
  assert record == {
    'array': [1.0, None],
    'bytes': ['a\ufffd', 'b'],
    'number': None,
    'whole': 3,
    '4': [None, True],
    'object': 'a',
  }
  assert json.loads(results.indented(strange)) == record


def damaged(folder, kind):
  """A gzip file with a broken block behind the first 200 of its lines."""
  numbers = np.random.default_rng(0).integers(1e8, size=200)
  form = {
    'txt': b'%d',
    'tsv': b'%d\tx',
    'jsonl': b'{"inputs": "%d", "targets": "x"}',
  }[kind]
  content = b''.join(form % number + b'\n' for number in numbers)
  packing = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
  data = packing.compress(content) + packing.flush(zlib.Z_FULL_FLUSH)
  rest = packing.compress(content) + packing.flush()
  path = folder / f'a.{kind}.gz'
  path.write_bytes(data + b'\xff' * 9 + rest)  # no block begins with ones
  return str(path), [b'%d' % number for number in numbers]


@pytest.mark.parametrize('kind', RIGHT)
def test_what_came_before_a_break_counts(kind, engine, tmp_path):
  path, texts = damaged(tmp_path, kind)
  out = tmp_path / 'out'
  for _ in range(2):  # nor does a finished run forget it
    with pytest.raises(ValueError, match='could not be read on after line'):
      decoded(engine, path, out)
    if kind == 'txt':
      break  # a run over lines refuses to be finished twice
  (marker,) = out.glob('*.COMPLETED')
  records = read(out / marker.name.removesuffix('.COMPLETED'))
  assert all(record['prediction'] for record in records)
  inputs = [record['inputs'] for record in records]
  if kind != 'txt':
    inputs = [one['inputs_pretokenized'] for one in inputs]
  # zlib keeps the byte before the damage to itself: here the last line feed.
  assert [one.encode() for one in inputs] == texts[:-1]
  (summary,) = out.glob('*summary.json')
  assert 'line' in json.loads(summary.read_text())['input_broken_off']


def test_each_shard_says_that_the_file_broke_off(engine, tmp_path):
  path, _ = damaged(tmp_path, 'tsv')
  for shard in range(3):
    with pytest.raises(ValueError, match='could not be read on after line'):
      decoded(engine, path, tmp_path / f'{shard}', shard_id=shard, num_shards=3)
    assert list((tmp_path / f'{shard}').glob('*.COMPLETED'))


def test_a_cut_gzip_file_loses_only_its_end(tmp_path):
  content = b'line\n' * 1000 + b'half a line'
  whole = gzip.compress(content, mtime=0)
  (tmp_path / 'a.gz').write_bytes(whole[:-9])
  found, why = files.until_broken(files.lines(tmp_path / 'a.gz'))
  assert [line.text for line in found] == ['line'] * 1000 and 'cut short' in why
  # Several members, and padding between and behind them, are one text.
  (tmp_path / 'a.gz').write_bytes(whole + b'\0' * 3 + whole + b'\0')
  found, why = files.until_broken(files.lines(tmp_path / 'a.gz'))
  assert len(found) == 2001 and found[1000].text == 'half a lineline'
  assert why is None
  for wrong in (b'no gzip', b'\0' * 100, whole[:12]):
    (tmp_path / 'a.gz').write_bytes(wrong)
    with pytest.raises(ValueError, match="a.gz' could not be read as text"):
      list(files.lines(tmp_path / 'a.gz'))
  (tmp_path / 'a.gz').write_bytes(b'')
  assert list(files.lines(tmp_path / 'a.gz')) == []


def test_a_run_goes_on_after_a_kill_with_strange_fields(
  engine, tmp_path, monkeypatch
):
  """What was decoded is never decoded again only to fail at the end."""
  line = rb'{"inputs": "a cat", "targets": "a", ' + STRANGE + b'}\n'
  path = write(tmp_path / 'a.jsonl', line * 4)
  options = {'batch_size': 1, 'checkpoint_period': 1}
  options['include_all_inputs'] = True

  def full(self, contents):
    raise OSError(28, 'No space left')

  with monkeypatch.context() as patch:
    patch.setattr(resume.Folder, 'finish', full)
    with pytest.raises(OSError):
      decoded(engine, path, tmp_path / 'out', **options)
  batches = engine.batches
  records, _ = decoded(engine, path, tmp_path / 'out', **options)
  assert len(records) == 4 and engine.batches == batches


# Training and measuring need every line: an error names file and line.
READERS = {
  'pairs': ('tsv', pairs.read_tsv),
  'text': ('txt', pairs.read_lines),
  'prompts': ('txt', lambda path: read_prompts(str(path), len)),
}


@pytest.mark.parametrize('packed', ['', '.gz'])
@pytest.mark.parametrize('case', ['bytes', 'surrogate', 'long'])
@pytest.mark.parametrize('reader', READERS)
def test_readers_name_the_line(reader, case, packed, tmp_path, monkeypatch):
  monkeypatch.setattr(reading, 'MAX_LINE', LONG)
  kind, function = READERS[reader]
  right, _ = RIGHT[kind]
  bad = LINES[case][1]
  path = tmp_path / f'own.{kind}{packed}'
  write(path, b'\n'.join([right, bad, right]))
  with pytest.raises(ValueError) as caught:
    function(path)
  assert f"{path.name}' line 2: " in str(caught.value)
  assert LINES[case][2].split(' at')[0] in str(caught.value)


@pytest.mark.parametrize('reader', READERS)
def test_readers_take_no_broken_file(reader, tmp_path):
  kind, function = READERS[reader]
  path, _ = damaged(tmp_path, kind)
  with pytest.raises(ValueError, match='could not be read on after line'):
    function(path)


def test_prompts_of_a_task_name_the_line(tokenizer, tmp_path):
  path = write(tmp_path / 'a.jsonl', RIGHT['jsonl'][0] + b'\n' + b'[' * 10**5)
  task = LocalTask('a', {'test': path}, tokenizer.path)
  with pytest.raises(ValueError, match="a.jsonl' line 2: .* too deep"):
    read_prompts(task, len)


@pytest.mark.parametrize('path', ['/dev/zero', '/dev/urandom'])
def test_devices_are_refused(path, engine, tmp_path):
  if not os.path.exists(path):
    pytest.skip(f'needs {path}')
  with pytest.raises(ValueError, match='is a device, which may have no end'):
    list(lines_lib.read_lines(path))
  with pytest.raises(ValueError, match='a pipe or a device'):
    decoded(engine, path, tmp_path / 'out', metrics=())
  for function in (
    *(function for _, function in READERS.values()),
    api_keys,
    calibration.load,
    heads.load,
    ngram_table.load,
    open_vocabulary,
    pairs.TokenPairs.load,
    record.load,
  ):
    with pytest.raises(ValueError, match='is a device'):
      function(path)


def test_a_pipe_that_is_written_stays_a_pipe(tmp_path):
  os.mkfifo(path := tmp_path / 'pipe')
  reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
  files.write_atomically(path, b'text')
  assert os.read(reader, 9) == b'text' and path.is_fifo()
  os.close(reader)


def test_a_bomb_is_not_unpacked(tmp_path, monkeypatch):
  monkeypatch.setattr(reading, '_FREE', 0)
  for content in (b'\0', b'\n'):
    path = write(tmp_path / 'bomb.gz', content * (1 << 22))
    count = 0
    with pytest.raises(ValueError, match='unpacks to more than 200 times'):
      for _ in files.lines(path):
        count += 1
    assert count < 1 << 20  # it was noticed on the way
  # Text does not pack like that.
  lines = b'\n'.join(b'line %d of a text' % i for i in range(20_000))
  assert len(list(files.lines(write(tmp_path / 'a.gz', lines)))) == 20_000


def test_a_line_is_held_up_to_its_bound(tmp_path, monkeypatch):
  monkeypatch.setattr(reading, 'MAX_LINE', LONG)
  monkeypatch.setattr(reading, '_CHUNK', 1000)
  lines = [b'a' * LONG, b'b' * (LONG + 1), b'', b'c' * 10 * LONG, b'd']
  path = write(tmp_path / 'a.txt', b'\xef\xbb\xbf' + b'\r\n'.join(lines[1:]))
  found = list(files.lines(path))
  assert [line.error is None for line in found] == [False, True, False, True]
  path = write(tmp_path / 'b.txt', b'\n'.join(lines[:2]))
  first, second = files.lines(path)
  assert first == (lines[0].decode(), None) and second.error
  kept = max(len(line) for line, _ in reading._split(iter(lines)))
  assert kept == LONG + 1


def feed(path, content, times=1):
  """Writes to a pipe as long as somebody reads it."""

  def write_all():
    try:
      with open(path, 'wb', buffering=0) as pipe:
        for _ in range(times):
          pipe.write(content)
    except BrokenPipeError:
      pass

  writer = threading.Thread(target=write_all, daemon=True)
  writer.start()
  return writer


@pytest.fixture
def pipe(tmp_path):
  if not hasattr(os, 'mkfifo'):
    pytest.skip('needs named pipes')
  os.mkfifo(tmp_path / 'pipe.txt')
  return str(tmp_path / 'pipe.txt')


def test_a_pipe_is_read_once_somebody_writes(
  pipe, engine, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(reading, '_PATIENCE_MS', 1)
  later = threading.Timer(0.2, feed, (pipe, b'a cat\nthe dog'))
  later.start()
  records, _ = decoded(engine, pipe, tmp_path / 'out')
  assert [record['inputs'] for record in records] == ['a cat', 'the dog']
  # It did not wait without a word.
  assert f'Waiting for text from the pipe {pipe!r}' in capsys.readouterr().err
  # Examples are read again when a run goes on.
  with pytest.raises(ValueError, match='a pipe or a device'):
    decoded(engine, pipe, tmp_path / 'task', metrics=())


@pytest.mark.parametrize(
  'bound, content',
  [('MAX_PIPE', b'\0' * 1000), ('MAX_PIPE_LINES', b'\n' * 1000)],
)
def test_an_endless_pipe_is_bounded(pipe, monkeypatch, bound, content):
  monkeypatch.setattr(reading, bound, 10_000)
  writer = feed(pipe, content, 1_000_000)
  with pytest.raises(ValueError, match='More than 10,000 .* in a file'):
    list(files.lines(pipe))
  writer.join(10)
  assert not writer.is_alive()
