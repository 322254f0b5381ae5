"""Tasks by name: local ones, seqio's, T5's over TFDS; and what is refused."""

import importlib.util
import sys

import pytest

import task_files
from specdec_jax.text import metrics, t5_tasks, tasks
from specdec_jax.text.local_tasks import LocalTask
from specdec_jax.text.tokenizer import EOS_ID
from task_files import DATA, PAIRS, T5_VOCAB, same, with_end

HAS_SEQIO = importlib.util.find_spec('seqio') is not None
needs_seqio = pytest.mark.skipif(
  not HAS_SEQIO, reason='needs seqio, the extra [tasks]'
)
needs_data = pytest.mark.skipif(
  not T5_VOCAB.is_file(), reason=f'needs {DATA} with the vocabulary of T5'
)
# TensorFlow and its companions warn about Python's own deprecations.
quiet = pytest.mark.filterwarnings('ignore')


@pytest.fixture(autouse=True)
def no_registered_tasks(monkeypatch):
  monkeypatch.setattr(tasks, '_local', {})


@pytest.fixture
def pairs(tokenizer, folder):
  return task_files.pairs_task(folder, tokenizer)


def test_a_registered_task_goes_by_its_name(pairs):
  tasks.register(pairs)
  tasks.register(pairs)  # the same again is no conflict
  by_name = list(tasks.examples('pairs', 'test'))
  assert len(by_name) == len(PAIRS)
  assert all(map(same, by_name, tasks.examples(pairs, 'test')))
  other = LocalTask('pairs', pairs.files, pairs.vocab_path)
  with pytest.raises(ValueError, match="already is another task 'pairs'"):
    tasks.register(other)
  t5_name = LocalTask('lm1b_v110', pairs.files, pairs.vocab_path)
  with pytest.raises(ValueError, match="already is another task 'lm1b_v110'"):
    tasks.register(t5_name)


def test_without_seqio_the_error_says_what_to_do(monkeypatch, pairs):
  def refuse(name):
    raise ImportError(name)

  monkeypatch.setattr(importlib, 'import_module', refuse)
  tasks.register(pairs)
  for call in (
    lambda: tasks.splits('any'),
    lambda: tasks.token_lists('any', 'train'),
    lambda: tasks.metrics('any'),
    lambda: tasks.examples('wmt_t2t_ende_v003', 'test'),
  ):
    with pytest.raises(ValueError, match=r'installed: .*specdec_jax\[tasks\]'):
      call()
  for name, near in (('pair', 'pairs'), ('lm1b_v11', 'lm1b_v110')):
    with pytest.raises(ValueError, match=f"'{name}' is known.* {near}"):
      tasks.examples(name, 'test')
  monkeypatch.delitem(sys.modules, 'seqio', raising=False)
  assert tasks.metrics('wmt_t2t_ende_v003') == [metrics.t5_bleu]
  assert len(list(tasks.examples('pairs', 'test'))) == len(PAIRS)


@quiet
@needs_seqio
def test_a_task_gives_the_ids_of_its_file(tokenizer, tmp_path):
  pairs = tmp_path / 'pairs.tsv'
  pairs.write_text(''.join(f'{s}\t{t}\n' for s, t in PAIRS), 'utf-8')
  import seqio

  task = LocalTask('specdec_test', {'train': pairs}, tokenizer.path)
  seqio.TaskRegistry.add_provider(task.name, task_files.to_seqio(task))
  assert tasks.splits('specdec_test') == ['train']
  sources, targets = tasks.token_lists('specdec_test', 'train')
  encode = tokenizer.encode
  assert [x.tolist() for x in sources] == [encode(s) for s, _ in PAIRS]
  assert [x.tolist() for x in targets] == [encode(t) for _, t in PAIRS]
  with pytest.raises(
    ValueError, match="'specdec_tset'. Nearest known: specdec_test"
  ):
    tasks.splits('specdec_tset')


@quiet
@needs_seqio
@needs_data
@pytest.mark.parametrize('lengths', [None, {'inputs': 32, 'targets': 5}])
def test_seqio_gives_the_examples_of_a_local_task(lengths, monkeypatch):
  """The reader here and seqio's own, on the bundled data."""
  import seqio

  task = LocalTask(
    'specdec_scitldr',
    {'test': DATA / 'summ' / 'acl_title.test.jsonl.gz'},
    T5_VOCAB,
    prefix='summarize: ',
    inputs_field='source',
    targets_field='target',
    metrics=('rouge',),
  )
  monkeypatch.setattr(seqio.TaskRegistry, '_REGISTRY', {})
  seqio.TaskRegistry.add_provider(task.name, task_files.to_seqio(task))
  there = list(tasks.examples(task.name, 'test', lengths))
  here = list(tasks.examples(task, 'test', lengths))
  assert len(there) == len(here) > 100
  for first, second in zip(there, here, strict=True):
    assert same(first, {key: second[key] for key in first})
  assert {'inputs_pretokenized', 'targets_pretokenized'} < there[0].keys()
  measure = tasks.metrics(task.name)[0]
  if importlib.util.find_spec('rouge_score') is not None:
    assert measure(['a b'], ['a b'])['rouge1'] == pytest.approx(100)


@pytest.fixture
def prepared(tmp_path):
  """Writes a small TFDS data set, with the features of the real one."""
  import tensorflow_datasets as tfds

  def write(name, examples):
    builder = tfds.builder(name, data_dir=tmp_path)
    (tmp_path / builder.data_path).mkdir(parents=True)
    writer = tfds.core.SequentialWriter(builder.info, 100)
    writer.initialize_splits(['test'])
    writer.add_examples({'test': examples})
    writer.close_all()

  return write


@quiet
@needs_seqio
@pytest.mark.parametrize(
  'name, example, inputs, targets',
  [
    (
      'wmt_t2t_ende_v003',
      {'en': 'a red house', 'de': 'ein rotes Haus'},
      'translate English to German: a red house',
      'ein rotes Haus',
    ),
    (
      'cnn_dailymail_v002',
      {
        'article': 'the cat sings',
        'highlights': 'cat .\nsings .',
        'publisher': 'cnn',
        'id': '1',
      },
      'summarize: the cat sings',
      'cat .\nsings .',
    ),
    ('lm1b_v110', {'text': 'the dog runs'}, '', 'the dog runs'),
  ],
)
def test_tasks_of_t5_over_prepared_data(
  name, example, inputs, targets, prepared, tokenizer, tmp_path, monkeypatch
):
  import seqio

  monkeypatch.setattr(seqio.utils.LazyTfdsLoader, '_MEMOIZED_BUILDERS', {})
  seqio.set_tfds_data_dir_override(str(tmp_path))
  try:
    with pytest.raises(
      ValueError, match=f'are not in {tmp_path}/.*Get them by'
    ) as caught:
      tasks.examples(name, 'test', vocab_path=tokenizer.path)
    dataset = t5_tasks.TASKS[name].tfds
    command = f"tfds.builder('{dataset}', data_dir='{tmp_path}').download_and_"
    assert command in str(caught.value)
    seqio.utils.LazyTfdsLoader._MEMOIZED_BUILDERS.clear()  # noqa: SLF001
    prepared(dataset, [example] * 3)
    with pytest.raises(
      ValueError, match="no split 'tset'. Nearest known: test"
    ):
      tasks.examples(name, 'tset', vocab_path=tokenizer.path)
    with pytest.raises(ValueError, match="vocabulary 'nowhere.model'"):
      tasks.examples(name, 'test', vocab_path='nowhere.model')
    found = list(
      tasks.examples(name, 'test', {'targets': 4}, vocab_path=tokenizer.path)
    )
    by_slice = tasks.examples(name, 'test[:2]', vocab_path=tokenizer.path)
    assert (len(found), len(list(by_slice))) == (3, 2)
  finally:
    seqio.set_tfds_data_dir_override('')
  assert found[0]['inputs_pretokenized'] == inputs
  assert found[0]['targets_pretokenized'] == targets
  assert found[0]['inputs'].tolist() == with_end(tokenizer, inputs)
  cut = [*tokenizer.encode(targets)[:3], EOS_ID]
  assert found[0]['targets'].tolist() == cut
  names = t5_tasks.TASKS[name].metrics
  assert tasks.metrics(name) == [metrics.METRICS[metric] for metric in names]


@quiet
@needs_seqio
def test_a_mixture_gives_its_tasks_in_turn(pairs, monkeypatch):
  import seqio

  monkeypatch.setattr(seqio.TaskRegistry, '_REGISTRY', {})
  monkeypatch.setattr(seqio.MixtureRegistry, '_REGISTRY', {})
  for name in ('specdec_one', 'specdec_two'):
    task = LocalTask(
      name, pairs.files, pairs.vocab_path, prefix=name, metrics=('bleu',)
    )
    seqio.TaskRegistry.add_provider(name, task_files.to_seqio(task))
  seqio.MixtureRegistry.add(
    'specdec_both', [('specdec_one', 1), ('specdec_two', 1)]
  )
  found = list(tasks.examples('specdec_both', 'test'))
  assert [e['inputs_pretokenized'] for e in found] == [
    name + source
    for name in ('specdec_one', 'specdec_two')
    for source, _ in PAIRS
  ]
  assert tasks.tasks_of('specdec_both') == ['specdec_one', 'specdec_two']
  for name in ('specdec_one', 'wmt_t2t_ende_v003', 'file.tsv', pairs):
    assert tasks.tasks_of(name) == [name]
  with pytest.raises(ValueError, match='mixture.* specdec_one, specdec_two'):
    tasks.metrics('specdec_both')
  with pytest.raises(ValueError, match='mixture; training reads one task'):
    tasks.splits('specdec_both')


@quiet
@needs_seqio
def test_a_seqio_task_keeps_texts_numbers_and_its_postprocessor(pairs):
  import seqio

  def extra(dataset):
    return dataset.map(
      lambda example: (
        example
        | {'answers': ['Häuser', 'b'], 'year': 7, 'rate': 0.5, 'grid': [[1, 2]]}
      )
    )

  def share(targets, predictions):
    return {'share': sum(map(str.__eq__, targets, predictions)) / len(targets)}

  inner = task_files.to_seqio(pairs)
  seqio.TaskRegistry.add(
    'specdec_labels',
    source=inner.source,
    preprocessors=[extra, *inner.preprocessors],
    output_features=inner.output_features,
    metric_fns=[share],
    postprocess_fn=lambda text, **_: text.strip().lower(),
  )
  try:
    found = next(tasks.examples('specdec_labels', 'test'))
    measure = tasks.metrics('specdec_labels')[0]
  finally:
    seqio.TaskRegistry.remove('specdec_labels')
  assert found['answers'] == ['Häuser', 'b']
  assert (found['year'], found['rate']) == (7, 0.5)
  assert 'grid' not in found
  assert measure(['Yes', 'no'], [' yes', 'yes']) == {'share': 0.5}


@quiet
@needs_seqio
def test_an_unknown_task_names_the_nearest(pairs):
  tasks.register(pairs)
  for name, near in (
    ('wmt_t2t_ende_v03', 'wmt_t2t_ende_v003'),
    ('cnn_dailymail', 'cnn_dailymail_v002'),
    ('pars', 'pairs'),
  ):
    with pytest.raises(
      ValueError, match=f'no task {name!r}. Nearest known: {near}'
    ):
      tasks.examples(name, 'test')
