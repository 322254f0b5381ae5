"""Text files that are broken or hostile: one bad line stops no other one.

Each case is a line that is wrong, in a kind of file; an engine of plain Python
decodes what is right.
"""

import gzip
import io
import itertools
import os
import sys
import threading
import zlib
from contextlib import suppress

import numpy as np
import pytest

import toy_runs
from specdec_jax import files, infer
from specdec_jax.drafters import heads, ngram_table
from specdec_jax.engine import calibration
from specdec_jax.report import record
from specdec_jax.serving.run import api_keys
from specdec_jax.text import tasks
from specdec_jax.text.tasks import read_prompts
from specdec_jax.text.tokenizer import Tokenizer
from toy_runs import ReversingEngine, write

LENGTHS = {'inputs': 16, 'targets': 8}
RIGHT = {
  'txt': (b'the red dog', b'a cat'),
  'tsv': (b'the red dog\ta cat', b'a cat\tthe dog'),
  'jsonl': (
    b'{"inputs": "the red dog", "targets": "a cat"}',
    b'{"inputs": "a cat", "targets": "the dog"}',
  ),
}
LONG = 1 << 17  # bytes of a line, in place of `files.MAX_LINE`
# What is wrong with a line: the kinds of file, the line, what its error says.
BYTES = ('txt tsv jsonl', b'ab\xff', 'not valid UTF-8 (byte 0xff at byte 3')
TOO_LONG = ('txt tsv jsonl', b'a ' * LONG, '262,144 bytes; a line has at most')
LINES = [
  BYTES,
  ('txt tsv jsonl', 'ab'.encode('utf-16-le'), 'it holds NUL bytes, as UTF-16'),
  TOO_LONG,
  ('tsv', b'a\tb\tc', '3 columns'),
  ('jsonl', rb'{"inputs": "a \ud800", "targets": ""}', 'surrogate'),
  ('jsonl', rb'{"inputs": "", "targets": ["a", "\udc00"]}', 'surrogate'),
  ('jsonl', rb'{"\ud800": "a"}', "no field 'inputs'"),
  ('jsonl', b'{"inputs": ' + b'[' * 100_000, 'nested too deep'),
  ('jsonl', b'{"inputs": [[]]}', "field 'inputs': expected text"),
  ('jsonl', b'["x"]', 'expected a JSON object'),
  ('jsonl', b'{"inputs": ' + b'1' * 5000 + b'}', 'is not JSON'),
]


@pytest.fixture
def engine(tokenizer):
  return ReversingEngine(tokenizer=tokenizer)


def decoded(engine, path, out, **options):
  """Records and summary of the file: as lines, or as examples of a task."""
  if '.txt' in path and not options:
    truncate = infer.Options(on_too_long='truncate')
    options = {'input_file': path, 'options': truncate}
  else:
    options |= {'mixture_or_task_name': path, 'tokenizer': engine.tokenizer}
    options['task_feature_lengths'] = LENGTHS
  options['mode'] = 'plain'
  summary, records, _ = toy_runs.decoded(out, lambda **_: engine, **options)
  return records, summary


@pytest.mark.parametrize('kind', ['txt', 'tsv.gz', 'jsonl'])
def test_bad_lines_stop_no_other(kind, engine, tmp_path, monkeypatch):
  """Also where one is the last; only bad lines are an error."""
  monkeypatch.setattr(files, 'MAX_LINE', LONG)
  kind_of_lines = kind.removesuffix('.gz')
  right = RIGHT[kind_of_lines]
  bad = [(x, why) for kinds, x, why in LINES if kind_of_lines in kinds]
  lines = [right[0], *(x for x, _ in bad), right[1], bad[0][0]]
  path = write(tmp_path / f'a.{kind}', b'\n'.join(lines) + b'\n')
  options, nothing = {}, None
  if kind != 'txt':  # examples have samples, each of which lacks a text
    options, nothing = {'options': infer.Options(num_samples=2)}, [None] * 2
  records, summary = decoded(engine, path, tmp_path / 'out', **options)
  wrong = ['error' in record for record in records]
  assert wrong == [line not in right for line in lines]
  for number, (_, why) in enumerate(bad, 1):
    error = records[number]['error']
    assert why in error and f'line {number + 1}' in error
    assert records[number]['prediction'] == nothing
  assert records[-2]['prediction'] and summary['input_broken_off'] is None
  assert len(summary['errors']) == len(bad) + 1


STRANGE = (
  rb'"nan": NaN, "inf": -Infinity, "big": 1e999, "id": "x\ud800y",'
  rb' "\udc00": "key", "<broken>": "no", "references": 5, "ok": 0.5'
)


def test_what_goes_along_can_be_written(engine, tmp_path):
  line = rb'{"inputs": "a cat", "targets": "a", ' + STRANGE + b'}'
  path = write(tmp_path / 'a.jsonl', line)
  records, _ = decoded(engine, path, tmp_path, include_all_inputs=True)
  assert records[0]['prediction'] and 'error' not in records[0]
  want = {'nan': None, 'inf': None, 'big': None, 'id': 'x\ufffdy', 'ok': 0.5}
  want |= {'\ufffd': 'key'}
  assert records[0]['inputs'].items() >= want.items()
  assert not {'<broken>', 'references'} & set(records[0]['inputs'])


def damaged(folder, kind):
  """A gzip file with a broken block behind the first 200 of its lines."""
  numbers = np.random.default_rng(0).integers(1e8, size=200)
  form = b'{"inputs": "%d", "targets": "x"}' if kind == 'jsonl' else b'%d'
  content = b''.join(form % number + b'\n' for number in numbers)
  packing = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
  data = packing.compress(content) + packing.flush(zlib.Z_FULL_FLUSH)
  rest = packing.compress(content) + packing.flush()
  path = folder / f'a.{kind}.gz'
  path.write_bytes(data + b'\xff' * 9 + rest)  # no block begins with ones
  return str(path), [b'%d' % number for number in numbers]


@pytest.mark.parametrize('kind', ['txt', 'jsonl'])
def test_what_came_before_a_break_counts(kind, engine, tmp_path):
  path, texts = damaged(tmp_path, kind)
  out, shards = tmp_path / 'out', {'shard_id': 1, 'num_shards': 2}
  for _ in range(2):  # a finished run knows it too
    with pytest.raises(ValueError, match='could not be read on after line'):
      decoded(engine, path, out, **shards)
  (marker,) = out.glob('*.COMPLETED')
  records = toy_runs.records_of(marker.with_suffix(''))
  assert all(record['prediction'] for record in records)
  inputs = [record['inputs']['inputs_pretokenized'] for record in records]
  assert [one.encode() for one in inputs] == texts[1::2]
  (summary,) = out.glob('*summary.json')
  assert 'read on after line' in summary.read_text()


def test_a_cut_gzip_file_loses_only_its_end(tmp_path):
  content = b'line\n' * 1000 + b'half a line'
  whole = gzip.compress(content, mtime=0)
  (tmp_path / 'a.gz').write_bytes(whole[:-9])
  found, why = files.until_broken(files.text_lines(tmp_path / 'a.gz'))
  assert found == ['line'] * 1000 and 'cut short' in why
  # zlib holds back text where a piece is full and the file has no more.
  long = gzip.compress(b'\n' * 300_000, mtime=0)
  for size in range(80, 100):
    (tmp_path / 'a.gz').write_bytes(long[:size])
    found, _ = files.until_broken(files.text_lines(tmp_path / 'a.gz'))
    unpacked = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(long[:size])
    assert len(found) == len(unpacked)
  # Several members, and padding between and behind them, are one text.
  (tmp_path / 'a.gz').write_bytes(whole + b'\0' * 3 + whole + b'\0')
  found, why = files.until_broken(files.text_lines(tmp_path / 'a.gz'))
  assert len(found) == 2001 and found[1000] == 'half a lineline' and not why
  for wrong in (b'no gzip', b'\0' * 100, whole[:12]):
    (tmp_path / 'a.gz').write_bytes(wrong)
    with pytest.raises(ValueError, match="a.gz' could not be read as text"):
      list(files.lines(tmp_path / 'a.gz'))
  (tmp_path / 'a.gz').write_bytes(b'')
  assert list(files.lines(tmp_path / 'a.gz')) == []


def test_readers_name_the_line(tmp_path, monkeypatch):
  """Training and measuring need every line."""
  monkeypatch.setattr(files, 'MAX_LINE', LONG)
  (right, _) = RIGHT['txt']
  for bad, packed in ((BYTES[1], ''), (TOO_LONG[1], '.gz')):
    path = write(tmp_path / f'own.txt{packed}', b'\n'.join([right, bad, right]))
    with pytest.raises(ValueError, match=f"own.txt{packed}' line 2: "):
      read_prompts(path, len)
  path, _ = damaged(tmp_path, 'txt')
  with pytest.raises(ValueError, match='could not be read on after line'):
    read_prompts(path, len)


def test_devices_are_refused(engine, tmp_path):
  path = '/dev/zero'
  with pytest.raises(ValueError, match='is a device'):
    decoded(engine, path, tmp_path / 'out', metrics=())
  of_texts = [lambda path: [*tasks.read(path)], lambda x: read_prompts(x, len)]
  loads = [module.load for module in (calibration, heads, ngram_table, record)]
  for function in (*of_texts, *loads, api_keys, Tokenizer):
    with pytest.raises(ValueError, match='is a device'):
      function(path)


def test_a_bomb_is_not_unpacked(tmp_path, monkeypatch):
  monkeypatch.setattr(files, '_FREE', 0)
  for content in (b'\0', b'\n'):
    path = write(tmp_path / 'bomb.gz', content * (1 << 22))
    count = itertools.count()
    with pytest.raises(ValueError, match='unpacks to more than 200 times'):
      list(zip(files.lines(path), count, strict=False))
    assert next(count) < 1 << 20  # it was noticed on the way
  # Text does not pack like that.
  lines = b'\n'.join(b'line %d of a text' % i for i in range(20_000))
  assert len(list(files.lines(write(tmp_path / 'a.gz', lines)))) == 20_000


def feed(path, content, times=1):
  """Writes to a pipe as long as somebody reads it."""

  def write_all():
    with suppress(BrokenPipeError), open(path, 'wb', buffering=0) as pipe:
      for _ in range(times):
        pipe.write(content)

  writer = threading.Thread(target=write_all, daemon=True)
  writer.start()
  return writer


@pytest.fixture
def pipe(tmp_path):
  os.mkfifo(path := str(tmp_path / 'pipe.txt'))
  return path


def test_stdin(monkeypatch):
  for data, texts in (
    (b'', []),
    (b'\n', ['']),
    (b'a\r\nb\r\n', ['a', 'b']),
    ('a\u2028b\x0bc\x85\n\0'.encode(), ['a\u2028b\x0bc\x85', '\0']),
  ):
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(data)))
    assert [line.text for line in files.lines('-')] == texts
  monkeypatch.setattr(sys, 'stdin', None)
  with pytest.raises(ValueError, match='stdin, which is closed'):
    list(files.lines('-'))


def test_a_pipe_is_read_once_somebody_writes(pipe, engine, tmp_path):
  later = threading.Timer(0.2, feed, (pipe, b'a cat\nthe dog'))
  later.start()
  records, _ = decoded(engine, pipe, tmp_path / 'out')
  assert [record['inputs'] for record in records] == ['a cat', 'the dog']
  # Examples are read again when a run goes on.
  with pytest.raises(ValueError, match='is a pipe'):
    decoded(engine, pipe, tmp_path / 'task', metrics=())


@pytest.mark.parametrize(
  'byte, bound', [(0, 'MAX_PIPE'), (10, 'MAX_PIPE_LINES')]
)
def test_an_endless_pipe_is_bounded(pipe, monkeypatch, byte, bound):
  monkeypatch.setattr(files, bound, 10_000)
  writer = feed(pipe, bytes([byte]) * 1000, 1_000_000)
  with pytest.raises(ValueError, match='More than 10,000 .* in a file'):
    list(files.lines(pipe))
  writer.join(10)
  assert not writer.is_alive()
