"""Tasks: over local files, seqio's, T5's over TFDS; and what is refused."""

import dataclasses
import gzip
import importlib.util
import json
import os
import sys
import types

import numpy as np
import pytest

from specdec_jax.text import metrics, tasks
from specdec_jax.text.tasks import LocalTask
from specdec_jax.text.tokenizer import EOS_ID

ENDE = 'translate English to German: '
PAIRS = [
  ('the old house', 'das alte Haus'),
  ('a red tree sleeps here', 'ein roter Baum schläft hier'),
  ('a dog', ''),
]
WHY = 'needs seqio, the extra [tasks]'
HAS_SEQIO = importlib.util.find_spec('seqio') is not None
needs_seqio = pytest.mark.skipif(not HAS_SEQIO, reason=WHY)
# TensorFlow and its companions warn about Python's own deprecations.
quiet = pytest.mark.filterwarnings('ignore')


@pytest.fixture
def pairs(folder, tokenizer):
  """A task over a TSV file of `PAIRS`."""
  path = folder / 'pairs.tsv'
  path.write_text(''.join(f'{s}\t{t}\n' for s, t in PAIRS), 'utf-8')
  return LocalTask('pairs', {'test': path}, tokenizer.path, prefix=ENDE)


def to_seqio(task):
  """The seqio task with the examples of a local one."""
  import seqio
  import tensorflow as tf

  def read(split, shuffle_files, seed=None):
    del shuffle_files, seed  # seqio shuffles examples itself
    texts = [*task.texts(split)]
    columns = {name: [text[name] for text in texts] for name in tasks.FEATURES}
    return tf.data.Dataset.from_tensor_slices(columns)

  vocabulary = seqio.SentencePieceVocabulary(os.fspath(task.vocab_path))
  feature, steps = seqio.Feature(vocabulary, add_eos=True), seqio.preprocessors
  return seqio.Task(
    task.name,
    source=seqio.FunctionDataSource(read, splits=tuple(task.files)),
    preprocessors=[steps.tokenize, steps.append_eos_after_trim],
    output_features=dict.fromkeys(tasks.FEATURES, feature),
    metric_fns=[metrics.METRICS[name] for name in task.metrics],
  )


def with_end(tokenizer, text):
  """Ids of a side."""
  return [*tokenizer.encode(text), EOS_ID]


def test_a_tsv_task_has_prefix_text_ids_and_end(pairs, tokenizer):
  made = list(pairs.examples('test'))
  for example, (source, target) in zip(made, PAIRS, strict=True):
    assert example['inputs_pretokenized'] == ENDE + source
    assert example['targets_pretokenized'] == target
    assert example['inputs'].dtype == example['targets'].dtype == np.int32
    assert example['inputs'].tolist() == with_end(tokenizer, ENDE + source)
    # Without a target there is nothing to score: no end-of-sequence id either.
    expected = with_end(tokenizer, target) if target else []
    assert example['targets'].tolist() == expected
  lengths = {'inputs': 6, 'targets': 4}
  cut = pairs.examples('test', lengths)
  for short, whole in zip(cut, made, strict=True):
    assert short['inputs'].tolist() == [*whole['inputs'][:5], EOS_ID]
    assert len(short['targets']) == min(4, len(whole['targets']))
    assert short['inputs_pretokenized'] == whole['inputs_pretokenized']


def test_a_jsonl_task_keeps_its_other_fields(tokenizer, tmp_path):
  path = tmp_path / 'papers.jsonl.gz'
  objects = [
    {'source': 'a house', 'title': 'house', 'year': 2018, 'id': 'x', 'n': [1]},
    {'source': 'a tree', 'title': ['tree', 'a tree'], 'year': 2.5, 'id': 'y'},
  ]
  text = '\n'.join(map(json.dumps, objects))
  path.write_bytes(gzip.compress(text.encode()))
  fields = {'inputs_field': 'source', 'targets_field': 'title'}
  fields |= {'prefix': 'summarize: ', 'metrics': ('rouge', 'bleu')}
  task = LocalTask('papers', {'test': path}, tokenizer.path, **fields)
  first, second = task.examples('test')
  assert first['inputs_pretokenized'] == 'summarize: a house'
  assert first['targets'].tolist() == with_end(tokenizer, 'house')
  assert (first['year'], first['id']) == (2018, 'x')
  assert not {'n', 'source', 'title', 'references'} & set(first)
  assert second['targets_pretokenized'] == 'tree'
  assert second['references'] == ['tree', 'a tree']


def test_bad_settings_are_refused_before_any_example(pairs, tmp_path):
  for arguments, message in (
    (('tset',), "no split 'tset'. Nearest known: test"),
    (('test', {'input': 9}), "expected .*'input'. Nearest known: inputs"),
    (('test', {'inputs': 0}), 'from 1, got 0'),
    (('test', {'inputs': True}), 'inputs.*got True'),
  ):
    with pytest.raises(ValueError, match=message):
      pairs.examples(*arguments)
  other = tmp_path / 'pairs.csv'
  other.write_text('a\tb\n')
  for changes, message in (
    ({'files': {'test': 'nowhere.tsv'}}, "no file 'nowhere.tsv'"),
    ({'files': {'test': tmp_path}}, 'there is no file'),
    ({'files': {'test': other}}, "pairs.csv.*expected .*tsv.*'csv'"),
    ({'vocab_path': 'nowhere.model'}, "no file 'nowhere.model'"),
    ({'metrics': ('blue',)}, "metrics: .*'blue'. Nearest known: bleu"),
  ):
    with pytest.raises(ValueError, match=message):
      dataclasses.replace(pairs, **changes)
  named = dataclasses.replace(pairs, files={'test': other}, kind='tsv')
  assert [e['targets_pretokenized'] for e in named.examples('test')] == ['b']


def test_without_seqio_the_error_says_what_to_do(monkeypatch):
  monkeypatch.setitem(sys.modules, 'seqio', None)
  for name, near in (('any', ''), ('lm1b_v11', 'lm1b_v110')):
    words = rf"'{name}'.*{near}.*specdec_jax\[tasks\]"
    with pytest.raises(ValueError, match=words):
      tasks.find_one(name)


@quiet
@needs_seqio
def test_tasks_and_a_mixture_of_seqio(pairs, tokenizer, monkeypatch):
  """Their ids are those of the file; an unknown name says which is near."""
  import seqio

  for registry in (seqio.TaskRegistry, seqio.MixtureRegistry):
    monkeypatch.setattr(registry, '_REGISTRY', {})
  files = {'train': pairs.files['test']}
  ours = [
    LocalTask(name, files, tokenizer.path, prefix=name, metrics=('bleu',))
    for name in ('specdec_one', 'specdec_two')
  ]
  for task in ours:
    seqio.TaskRegistry.add_provider(task.name, to_seqio(task))
  parts = [(task.name, 1) for task in ours]
  seqio.MixtureRegistry.add('specdec_both', parts)
  for there, task in zip(tasks.find('specdec_both'), ours, strict=True):
    assert there.name == task.name == task.prefix
    splits = [*map(tasks.training_splits, (there, task))]
    assert splits == [['train']] * 2
    sources, targets = tasks.token_lists(there, 'train')
    encode = tokenizer.encode
    assert [x.tolist() for x in sources] == [
      encode(task.name + source) for source, _ in PAIRS
    ]
    assert [x.tolist() for x in targets] == [encode(t) for _, t in PAIRS]
    for lengths in (None, {'inputs': 32, 'targets': 5}):
      both = (one.examples('train', lengths) for one in (there, task))
      for first, second in zip(*both, strict=True):
        np.testing.assert_equal(first, {key: second[key] for key in first})
  for name in ('specdec_one', 'wmt_t2t_ende_v003'):
    assert tasks.find_one(name).name == name
  with pytest.raises(ValueError, match='specdec_both: .* specdec_one'):
    tasks.find_one('specdec_both')
  for name, near in (('specdec_on', 'specdec_one'), ('lm1b_v11', 'lm1b_v110')):
    with pytest.raises(ValueError, match=f'{name}.*Nearest known: {near}'):
      tasks.find(name)


@quiet
@needs_seqio
def test_tasks_of_t5_over_prepared_data(tokenizer, tmp_path, monkeypatch):
  name, example = 'wmt_t2t_ende_v003', {'en': 'a house', 'de': 'ein rotes Haus'}
  inputs, targets = ENDE + example['en'], example['de']
  import seqio
  import tensorflow_datasets as tfds

  def read(vocabulary, *arguments):
    (task,) = tasks.find(name, vocabulary)
    return task.examples(*arguments)

  nowhere = types.SimpleNamespace(path='nowhere.model')
  monkeypatch.setattr(seqio.utils.LazyTfdsLoader, '_MEMOIZED_BUILDERS', {})
  seqio.set_tfds_data_dir_override(str(tmp_path))
  try:
    dataset = tasks.TASKS[name].tfds
    command = rf"tfds.builder\('{dataset}', data_dir='{tmp_path}'\).download_"
    with pytest.raises(ValueError, match=f'are not in {tmp_path}/.*{command}'):
      read(tokenizer, 'test')
    seqio.utils.LazyTfdsLoader._MEMOIZED_BUILDERS.clear()  # noqa: SLF001
    # A small data set, with the features of the real one.
    builder = tfds.builder(dataset, data_dir=tmp_path)
    (tmp_path / builder.data_path).mkdir(parents=True)
    writer = tfds.core.SequentialWriter(builder.info, 100)
    writer.initialize_splits(['test'])
    writer.add_examples({'test': [example] * 3})
    writer.close_all()
    with pytest.raises(ValueError, match="vocabulary 'nowhere.model'"):
      read(nowhere, 'test')
    found = list(read(tokenizer, 'test', {'targets': 4}))
    by_slice = read(tokenizer, 'test[:2]')
    assert (len(found), len(list(by_slice))) == (3, 2)
  finally:
    seqio.set_tfds_data_dir_override('')
  assert found[0]['inputs_pretokenized'] == inputs
  assert found[0]['targets_pretokenized'] == targets
  assert found[0]['inputs'].tolist() == with_end(tokenizer, inputs)
  cut = [*tokenizer.encode(targets)[:3], EOS_ID]
  assert found[0]['targets'].tolist() == cut


@quiet
@needs_seqio
def test_a_seqio_task_keeps_texts_numbers_and_its_postprocessor(pairs):
  import seqio

  @seqio.map_over_dataset
  def extra(example):
    more = {'answers': ['Häuser', 'b'], 'year': 7, 'rate': 0.5}
    return example | more | {'grid': [[1, 2]]}

  def share(targets, predictions):
    return {'share': sum(map(str.__eq__, targets, predictions)) / len(targets)}

  inner = to_seqio(pairs)
  task = tasks.SeqioTask(
    seqio.Task(
      'specdec_labels',
      source=inner.source,
      preprocessors=[extra, *inner.preprocessors],
      output_features=inner.output_features,
      metric_fns=[share],
      postprocess_fn=lambda text, **_: text.strip().lower(),
    )
  )
  found, (measure,) = next(task.examples('test')), task.metric_functions()
  assert found['answers'] == ['Häuser', 'b']
  assert (found['year'], found['rate']) == (7, 0.5)
  assert 'grid' not in found
  assert measure(['Yes', 'no'], [' yes', 'yes']) == {'share': 0.5}
