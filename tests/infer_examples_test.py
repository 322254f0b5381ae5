"""Which task a run is over: a file, a local task or a name; its shards."""

import gzip
import importlib.util
import json
import types

import pytest

import tokenizer_bpe_test
from specdec_jax.infer import examples
from specdec_jax.measure import timed_runs
from specdec_jax.measure.prompts import read_prompts
from specdec_jax.text import local_tasks
from specdec_jax.text.lines import read_lines
from specdec_jax.text.local_tasks import LocalTask
from specdec_jax.text.tokenizer_bpe import BpeTokenizer


def write(folder, name, text):
  path = folder / name
  data = text.encode()
  path.write_bytes(gzip.compress(data) if name.endswith('.gz') else data)
  return str(path)


def load(path, tokenizer, lengths=None, **options):
  task = examples.find(path, 'test', tokenizer)
  found, broken_off = examples.load(task, 'test', lengths, tokenizer, **options)
  assert broken_off is None
  return found


@pytest.mark.parametrize(
  'name, task',
  [
    ('tatoeba.test.tsv.gz', 'tatoeba.test'),
    ('own.jsonl', 'own'),
    ('lines.txt', 'lines'),
    ('lines', 'lines'),
    ('lines.de', 'lines.de'),
  ],
)
def test_files_are_local_tasks(tmp_path, tokenizer, name, task):
  text = 'a\tb\n'
  if 'jsonl' in name:
    text = '{"inputs": "a", "targets": ["b", "c"]}\n'
  path = write(tmp_path, name, text)
  found = examples.find(path, 'test', tokenizer)
  assert examples.name_of(found) == task
  ((one,), _) = examples.load(found, 'test', None, tokenizer)
  if 'lines' in name:
    assert one['inputs_pretokenized'] == 'a\tb'
    assert examples.reference(one) is None
  else:
    assert one['inputs'].tolist() == [*tokenizer.encode('a'), 1]
    assert one['targets'].tolist() == [*tokenizer.encode('b'), 1]
    expected = ['b', 'c'] if 'jsonl' in name else 'b'
    assert examples.reference(one) == expected
  assert set(examples.texts(one)) == {
    'inputs_pretokenized',
    'targets_pretokenized',
  }


def test_lengths_cut_before_the_end(tmp_path, tokenizer):
  path = write(tmp_path, 'a.tsv', 'the red dog runs here\tthe old house\n')
  (one,) = load(path, tokenizer, {'inputs': 3, 'targets': 2})
  assert one['inputs'].tolist() == [*tokenizer.encode('the red dog')[:2], 1]
  assert len(one['targets']) == 2


def test_shards_part_the_examples(tmp_path, tokenizer):
  path = write(tmp_path, 'a.txt', ''.join(f'{i}\n' for i in range(7)))
  shards = [
    [
      one['inputs_pretokenized']
      for one in load(path, tokenizer, shard_id=i, num_shards=3)
    ]
    for i in range(3)
  ]
  assert shards == [['0', '3', '6'], ['1', '4'], ['2', '5']]


def test_what_is_no_task(tmp_path, tokenizer):
  for name in (str(tmp_path / 'none'), 'none.tsv', 'none.jsonl.gz'):
    with pytest.raises(ValueError, match='no file of examples .*none'):
      examples.find(name, 'test', tokenizer)
  assert examples.find('wmt_ende', 'test', tokenizer) == 'wmt_ende'
  with pytest.raises(ValueError, match='task'):
    load('wmt_ende', tokenizer)
  path = write(tmp_path, 'a.tsv', 'a\tb\nc\td\te\n')
  right, broken = load(path, tokenizer)
  assert examples.BROKEN not in right
  assert 'line 2 has 3 columns' in broken[examples.BROKEN]
  path = write(tmp_path, 'b.tsv', 'a\tb\tc\nc\td\te\n')
  with pytest.raises(ValueError, match='line 1 has 3 columns'):
    load(path, tokenizer)


def test_a_local_task_of_another_vocabulary(tmp_path, tokenizer):
  path = write(tmp_path, 'a.tsv', 'a\tb\n')
  own = LocalTask('own', {'test': path}, tokenizer.path)
  assert examples.find(own, 'test', tokenizer) == own
  other = type('Other', (), {'fingerprint': 'x', 'path': 'other.model'})()
  with pytest.raises(ValueError, match="the models have 'other.model'"):
    examples.find(own, 'test', other)


@pytest.mark.skipif(
  importlib.util.find_spec('tokenizers') is None,
  reason="needs tokenizers: pip install 'specdec_jax[bpe]'",
)
def test_files_for_the_vocabulary_of_gpt2(tmp_path, tokenizer):
  path = write(tmp_path, 'a.tsv', 'a red dog\tthe dogs\n')
  one, two = map(BpeTokenizer, tokenizer_bpe_test.train(tmp_path))
  for models in (one, two):
    (found,) = load(path, models)
    assert found['inputs'].tolist() == [*one.encode('a red dog'), one.eos_id]
    assert found['targets'].tolist() == [*one.encode('the dogs'), one.eos_id]
  # The same ids, in files of the other kind.
  own = LocalTask('own', {'test': path}, one.path)
  assert examples.find(own, 'test', two) == own
  with pytest.raises(ValueError, match='fingerprints differ'):
    examples.find(own, 'test', tokenizer)
  ends = BpeTokenizer(one.path, eos_token='a')
  with pytest.raises(ValueError, match='ends a text with id 0, .* models with'):
    examples.find(path, 'test', ends)


# Of the first two examples one source has two references.
PAIRS = [('the red dog', 'a cat'), ('the red dog', 'a dog'), ('a house', '')]


@pytest.mark.parametrize('name', ['a.tsv', 'a.jsonl.gz', 'a.txt'])
def test_every_command_reads_a_file_alike(tmp_path, tokenizer, name):
  """Lines and tasks that are decoded, prompts, data sets that are measured."""
  objects = [json.dumps({'inputs': a, 'targets': b}) for a, b in PAIRS]
  columns = ['\t'.join(pair) for pair in PAIRS]
  lines = objects if 'jsonl' in name else columns
  path = write(tmp_path, name, '\n'.join(lines))
  want = columns if 'txt' in name else [source for source, _ in PAIRS]
  assert [line.text for line in read_lines(path)] == want
  found = load(path, tokenizer)
  assert [one['inputs_pretokenized'] for one in found] == want
  once = list(dict.fromkeys(want))
  assert read_prompts(path, len) == once
  engine = types.SimpleNamespace(input_ids=tokenizer.encode, max_input_len=99)
  measured = timed_runs.read_examples(path, engine, 9, (1.0,), 0)
  assert set(measured) == set(once)
  # What a report says of it, whichever command it is of.
  sentence = local_tasks.reading(path)
  assert (sentence is None) == ('txt' in name)
  assert examples.find(path, 'test', tokenizer).reading('test') == sentence
