"""Tasks over local files, without seqio; and what is refused."""

import gzip
import importlib.util
import json

import numpy as np
import pytest

import task_files
import tokenizer_bpe_test
from specdec_jax.text import metrics, tasks
from specdec_jax.text.local_tasks import LocalTask
from specdec_jax.text.tokenizer import EOS_ID
from specdec_jax.text.tokenizer_bpe import BpeTokenizer
from task_files import DATA, ENDE, PAIRS, T5_VOCAB, with_end

needs_tokenizers = pytest.mark.skipif(
  importlib.util.find_spec('tokenizers') is None,
  reason="needs tokenizers: pip install 'specdec_jax[bpe]'",
)
needs_data = pytest.mark.skipif(
  not T5_VOCAB.is_file(), reason=f'needs {DATA} with the vocabulary of T5'
)


@pytest.fixture
def pairs(tokenizer, folder):
  return task_files.pairs_task(folder, tokenizer)


def test_a_tsv_task_has_prefix_text_ids_and_end(pairs, tokenizer):
  found = list(tasks.examples(pairs, 'test'))
  assert [e['inputs_pretokenized'] for e in found] == [
    ENDE + source for source, _ in PAIRS
  ]
  assert [e['targets_pretokenized'] for e in found] == [t for _, t in PAIRS]
  for example, (source, target) in zip(found, PAIRS, strict=True):
    assert example['inputs'].dtype == example['targets'].dtype == np.int32
    assert example['inputs'].tolist() == with_end(tokenizer, ENDE + source)
    # Without a target there is nothing to score: no end-of-sequence id either.
    expected = with_end(tokenizer, target) if target else []
    assert example['targets'].tolist() == expected


def test_long_sides_are_cut_and_keep_their_end(pairs, tokenizer):
  lengths = {'inputs': 6, 'targets': 4}
  for short, whole in zip(
    tasks.examples(pairs, 'test', lengths),
    tasks.examples(pairs, 'test'),
    strict=True,
  ):
    assert short['inputs'].tolist() == [*whole['inputs'][:5], EOS_ID]
    assert len(short['targets']) == min(4, len(whole['targets']))
    assert short['inputs_pretokenized'] == whole['inputs_pretokenized']


def test_a_jsonl_task_takes_its_fields_and_keeps_the_others(
  tokenizer, tmp_path
):
  path = tmp_path / 'papers.jsonl.gz'
  objects = [
    {'source': 'a house', 'title': 'house', 'year': 2018, 'id': 'x', 'n': [1]},
    {'source': 'a tree', 'title': ['tree', 'a tree'], 'year': 2.5, 'id': 'y'},
  ]
  text = '\n'.join(json.dumps(one) for one in objects)
  path.write_bytes(gzip.compress(text.encode()))
  task = LocalTask(
    'papers',
    {'test': path},
    tokenizer.path,
    prefix='summarize: ',
    inputs_field='source',
    targets_field='title',
    metrics=('rouge', 'bleu'),
  )
  first, second = tasks.examples(task, 'test')
  assert first['inputs_pretokenized'] == 'summarize: a house'
  assert first['targets'].tolist() == with_end(tokenizer, 'house')
  assert (first['year'], first['id']) == (2018, 'x')
  assert not {'n', 'source', 'title', 'references'} & set(first)
  assert second['targets_pretokenized'] == 'tree'
  assert second['references'] == ['tree', 'a tree']
  assert tasks.metrics(task) == [metrics.rouge, metrics.bleu]


def test_a_text_task_has_inputs_alone(tokenizer, tmp_path):
  path = tmp_path / 'lines.txt'
  # A line separator inside a line ends no line; an empty line is an example.
  text = '\ufeffa dog\tsings\u2028here\n\na cat\n'  # with a byte order mark
  path.write_text(text, 'utf-8')
  task = LocalTask('lines', {'test': path}, tokenizer.path)
  found = list(tasks.examples(task, 'test'))
  assert [e['inputs_pretokenized'] for e in found] == [
    'a dog\tsings\u2028here',
    '',
    'a cat',
  ]
  assert all(e['targets'].shape == (0,) for e in found)
  assert found[1]['inputs'].tolist() == [EOS_ID]


@pytest.mark.parametrize(
  'name, content, message',
  [
    ('a.tsv', b'one\ttwo\tthree\n', r"a.tsv' line 1 has 3 columns"),
    ('a.jsonl', b'{"inputs": "x", "targets": "y"}\n{', r'line 2 is not JSON'),
    ('a.jsonl', b'["x"]', r'line 1: expected a JSON object, got list'),
    ('a.jsonl', b'{"input": "x"}', r"no field 'inputs' for inputs.*: input\."),
    (
      'a.jsonl',
      b'{"inputs": "x", "targets": 3}',
      r"expected text in the field 'targets', got 3",
    ),
    (
      'a.jsonl',
      b'{"inputs": "x", "targets": ["y", 3]}',
      r"expected text in the field 'targets'",
    ),
    ('a.txt', b'\xff\xfe', r"a.txt' line 1: not valid UTF-8"),
    (
      'a.txt.gz',
      gzip.compress(b'text ' * 50, mtime=0)[:-9],
      r'could not be read',
    ),
  ],
)
def test_bad_lines_are_named(name, content, message, tokenizer, tmp_path):
  (tmp_path / name).write_bytes(content)
  task = LocalTask('bad', {'test': tmp_path / name}, tokenizer.path)
  with pytest.raises(ValueError, match=message):
    list(tasks.examples(task, 'test'))


def test_bad_settings_are_refused_before_any_example(pairs, tmp_path):
  for arguments, message in (
    (('tset',), "no split 'tset'. Nearest known: test"),
    (('test', {'input': 9}), "no feature 'input'. Nearest known: inputs"),
    (('test', {'inputs': 0}), 'at least 1, got 0'),
    (('test', {'inputs': True}), 'at least 1, got True'),
  ):
    with pytest.raises(ValueError, match=message):
      tasks.examples(pairs, *arguments)
  vocab = pairs.vocab_path
  with pytest.raises(ValueError, match="no file 'nowhere.tsv'"):
    LocalTask('task', {'test': 'nowhere.tsv'}, vocab)
  with pytest.raises(ValueError, match="no file 'nowhere.model'"):
    LocalTask('task', pairs.files, 'nowhere.model')
  with pytest.raises(ValueError, match="metric 'blue'. Nearest known: bleu"):
    LocalTask('task', pairs.files, vocab, metrics=('blue',))
  other = tmp_path / 'pairs.csv'
  other.write_text('a\tb\n')
  with pytest.raises(ValueError, match="kind 'csv'; expected one of txt, tsv"):
    LocalTask('task', {'test': other}, vocab)
  told = LocalTask('task', {'test': other}, vocab, kind='tsv')
  assert [e['targets_pretokenized'] for e in told.examples('test')] == ['b']


@needs_tokenizers
def test_a_task_has_the_vocabulary_of_gpt2(pairs, tmp_path):
  for folder in tokenizer_bpe_test.train(tmp_path):
    tokenizer = BpeTokenizer(folder)
    task = LocalTask('pairs', pairs.files, folder)
    found = list(task.examples('test', {'inputs': 9}))
    for example, (source, target) in zip(found, PAIRS, strict=True):
      ids = [*tokenizer.encode(source)[:8], tokenizer.eos_id]
      assert example['inputs'].tolist() == ids
      ids = [*tokenizer.encode(target), tokenizer.eos_id] if target else []
      assert example['targets'].tolist() == ids
  with pytest.raises(ValueError, match='No vocabulary could be read'):
    LocalTask('pairs', pairs.files, tmp_path).examples('test')
  # Examples are a file, not a folder.
  with pytest.raises(ValueError, match='there is no file'):
    LocalTask('pairs', {'test': tmp_path}, folder, kind='tsv')


@needs_data
def test_t5_reads_the_bundled_pairs():
  """The ids that T5's own vocabulary gives, known from its publications."""
  task = LocalTask(
    'tatoeba', {'test': DATA / 'ende' / 'tatoeba.test.tsv.gz'}, T5_VOCAB
  )
  task_with_prefix = LocalTask('tatoeba', task.files, T5_VOCAB, prefix=ENDE)
  first = next(tasks.examples(task_with_prefix, 'test'))
  # 'translate English to German:'
  assert first['inputs'][:5].tolist() == [13959, 1566, 12, 2968, 10]
  assert first['inputs'][-1] == first['targets'][-1] == EOS_ID
  plain = next(tasks.examples(task, 'test'))
  assert first['inputs'].tolist() == [
    13959, 1566, 12, 2968, 10, *plain['inputs']
  ]  # fmt: skip
