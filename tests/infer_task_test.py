"""A run over a task or a mixture: T5X's fields, samples, prompts, errors."""

import dataclasses
import gzip
import json
import sys

import pytest
import rich.console

import small_vocabulary
from infer_test import ReversingEngine, decoded, records_of
from specdec_jax import infer
from specdec_jax.engine import scoring
from specdec_jax.engine.completion import Completion
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.loading import load
from specdec_jax.infer import data
from specdec_jax.models.model import Model
from specdec_jax.text import metrics, tasks
from specdec_jax.text.tasks import LocalTask, read_prompts
from specdec_jax.text.tokenizer import Tokenizer

LINES = [
  ('the red dog runs', 'a cat sleeps'),
  ('a cat', 'the dog runs here'),
  ('the old house sings here', 'the house'),
  ('blue tree', 'a red tree'),
  ('dog', 'cat'),
]
LENGTHS = {'inputs': 16, 'targets': 10}


class Making:
  """Makes one engine, and says with what it was asked to."""

  def __init__(self, tokenizer):
    network = small_vocabulary.network(1)
    self.models = [
      Model(network, small_vocabulary.weights(network, seed)) for seed in (0, 1)
    ]
    self.asked: list[dict] = []
    limits = {'max_input_len': 16, 'max_decode_len': 10}
    self.engine = Engine(*self.models, tokenizer=tokenizer, gamma=2, **limits)

  def __call__(self, **options):
    self.asked.append(options)
    return self.engine


@pytest.fixture(scope='module')
def make(tokenizer):
  return Making(tokenizer)


@pytest.fixture
def source(tmp_path):
  path = tmp_path / 'pairs.tsv'
  path.write_text(''.join(f'{a}\t{b}\n' for a, b in LINES))
  return str(path)


@pytest.fixture
def run(make, source, tokenizer, tmp_path):
  """Runs a task; see `decoded`."""

  def run(engine=make, name=source, out='out', **options):
    few = {'task_feature_lengths': LENGTHS, 'batch_size': 2}
    options = {'decoding': 'plain'} | few | options
    options |= {'mixture_or_task_name': name, 'tokenizer': tokenizer}
    return decoded(tmp_path / out, engine, **options)

  return run


def test_predictions_as_t5x_writes_them(run, make, tmp_path):
  _, records, _ = run()
  name = 'pairs-predict.jsonl-00000-of-00001'
  endings = 'COMPLETED summary.json operative_config.gin'.split()
  names = {path.name for path in (tmp_path / 'out').iterdir()}
  assert names == {name, *(f'{name}.{ending}' for ending in endings)}
  assert make.asked[-1] == {'max_input_len': 16, 'max_decode_len': 10}
  assert [record['inputs'] for record in records] == [
    {'inputs_pretokenized': a, 'targets_pretokenized': b} for a, b in LINES
  ]
  assert set(records[0]) == {'inputs', 'prediction', 'prediction_tokens'}
  alone = in_pairs(make.engine)
  for record, one in zip(records, alone, strict=True):
    assert record['prediction'] == one.text
    assert record['prediction_tokens'] == one.tokens


def in_pairs(engine, prompts=None):
  """Completions of LINES, by programs that the runs have compiled."""
  found = []
  for at in range(0, len(LINES), 2):
    options = {} if prompts is None else {'prompts': prompts[at : at + 2]}
    texts = [a for a, _ in LINES[at : at + 2]]
    found += engine.generate(
      texts, speculative=False, log_probs=False, **options
    )
  return found


def test_scores_of_targets(run, make, tokenizer, tmp_path):
  options = dict(mode='score', drafter=never, decoding='both')
  summary, records, _ = run(include_all_inputs=True, **options)
  pairs = [
    [[*tokenizer.encode(text), 1] for text in texts]
    for texts in zip(*LINES, strict=True)
  ]
  engine = make.engine
  expected = scoring.score(engine.target, engine.params.target, *pairs)
  have = [record['score'] for record in records]
  assert have == pytest.approx([one.total for one in expected], abs=1e-4)
  assert records[0]['inputs']['targets'] == pairs[1][0]
  assert set(records[0]) == {'inputs', 'score'}
  assert summary['mean_score'] == pytest.approx(sum(have) / 5)
  path = write(tmp_path, 'some.tsv', 'the dog\tthe cat\na tree\na dog\tx')
  _, records, _ = run(name=path, **options)
  assert [one['score'] is None for one in records] == [False, True, False]
  assert "has no tokens 'targets'" in records[1]['error']


def sampled(**options):
  return {'mode': 'predict_with_aux', 'options': infer.Options(1.0, **options)}


def test_samples_belong_to_the_example(run):
  _, both, _ = run(**sampled(num_samples=2))
  assert all(len(record['prediction']) == 2 for record in both)
  assert all(len(record['aux']['scores']) == 2 for record in both)
  assert any(len(set(record['prediction'])) > 1 for record in both)
  # The first sample does not depend on how many there are, on neighbours or on
  # the shard.
  _, one, _ = run(out='one', **sampled())
  assert [r['prediction'][0] for r in both] == [r['prediction'] for r in one]
  for shard in (0, 1):
    _, part, _ = run(shard_id=shard, num_shards=2, **sampled())
    assert part == one[shard::2]
  with pytest.raises(ValueError, match='options.seed was 0, is 1'):
    run(out='one', **sampled(seed=1))
  assert run(out='one', overwrite=True, **sampled(seed=1))[1] != one


def test_prompt_with_targets(run, make, tokenizer):
  _, records, _ = run(prompt_feature='targets')
  prompts = [tokenizer.encode(b) for _, b in LINES]
  alone = in_pairs(make.engine, prompts)
  have = [record['prediction_tokens'] for record in records]
  assert have == [one.tokens for one in alone]
  assert have != [r['prediction_tokens'] for r in run(out='none')[1]]


def never(**options):
  raise AssertionError('the engine was made before the run was checked')


def test_errors_before_the_engine_is_made(run, tmp_path):
  (tmp_path / 'lines.txt').write_text('a\nb\n')
  lines = str(tmp_path / 'lines.txt')
  for options, message in (
    (dict(name=str(tmp_path / 'none.tsv')), 'task: expected a file'),
    (
      dict(name=lines, mode='score'),
      r"no tokens 'targets'.* those of \['inputs'\].*TAB",
    ),
    (dict(prompt_feature='prompt'), "example 0 has no tokens 'prompt'"),
    (dict(prompt_feature='targets_pretokenized'), 'has no tokens'),
    (dict(metrics=('blue',)), "metrics is 'blue'.*Nearest known: bleu"),
    (dict(name=lines, task_feature_lengths=None), 'has no targets'),
  ):
    with pytest.raises(ValueError, match=message):
      run(never, **options)


def test_a_drafter_is_loaded_where_it_is_needed(run):
  run(decoding='plain', drafter=never)
  with pytest.raises(AssertionError, match='was made'):
    run(decoding='speculative', drafter=never, out='other')
  with pytest.raises(ValueError, match='--draft, in gin DRAFT_CHECKPOINT_PATH'):
    load(None)


def write(folder, name, text):
  path = folder / name
  data = text.encode()
  path.write_bytes(gzip.compress(data) if name.endswith('.gz') else data)
  return str(path)


def config_of(path, tokenizer, **options):
  config = infer.DecodeConfig(
    never, mixture_or_task_name=path, tokenizer=tokenizer, **options
  )
  (found,) = tasks.find(path, tokenizer)
  return dataclasses.replace(config, mixture_or_task_name=found)


@pytest.mark.parametrize('name', ['test.x.tsv.gz', 'own.jsonl', 'lines.de'])
def test_files_are_tasks(tmp_path, tokenizer, name):
  """Lines, tasks and measurements read a file alike."""
  lines = ['a\tb', 'a\tc', 'd\t']
  if 'jsonl' in name:
    lines = [json.dumps(dict(inputs='a', targets=['b', 'c'])) for _ in range(2)]
    lines.append('{"inputs": "d", "targets": ""}')
  path = write(tmp_path, name, '\n'.join(lines))
  config = config_of(path, tokenizer)
  assert config.task_name in ('test.x', 'own', 'lines.de')
  examples = data.read(config).examples
  want = lines if 'lines' in name else ['a', 'a', 'd']
  assert [one['inputs'] for one in tasks.read(path)] == want
  have = [one.features['inputs_pretokenized'] for one in examples]
  assert have == want
  assert read_prompts(path, len) == list(dict.fromkeys(want))
  reading = data.read(config).reading
  assert reading == tasks.reading(path)
  assert (reading is None) == ('lines' in name)
  if 'lines' in name:
    assert examples[0].reference is None
    return
  assert examples[0].source == [*tokenizer.encode('a'), 1]
  assert examples[0].target == [*tokenizer.encode('b'), 1]
  assert examples[0].reference == (['b', 'c'] if 'jsonl' in name else 'b')


def test_tasks_that_are_refused(tmp_path, tokenizer):
  path = write(tmp_path, 'a.tsv', 'a\tb\n')
  one, two = map(Tokenizer, small_vocabulary.byte_level(tmp_path))
  # The vocabulary of GPT-2, as files of either kind.
  own = LocalTask('own', {'test': path}, one.path)
  assert tasks.find(own, two) == [own]
  for task, vocabulary, message in (
    (str(tmp_path / 'none'), tokenizer, 'task: expected a file .*none'),
    ('none.jsonl.gz', tokenizer, 'task: expected a file .*none'),
    (str(tmp_path), tokenizer, 'is a folder'),
    ('wmt_ende', tokenizer, 'task'),
    (own, tokenizer, 'fingerprint of'),
    (path, Tokenizer(one.path, eos_token='a'), 'eos_id of'),
  ):
    with pytest.raises(ValueError, match=message):
      tasks.find(task, vocabulary)


def test_each_task_of_a_mixture_has_its_files(
  run, make, tokenizer, tmp_path, monkeypatch
):
  names = []
  for name, lines in (('one', LINES[:2]), ('two', LINES[2:])):
    text = ''.join(f'{a}\t{b}\n' for a, b in lines)
    names.append(write(tmp_path, f'{name}.tsv', text))
  alone = [run(name=name, out='alone')[1] for name in names]
  asked, drafters = len(make.asked), []
  sources = [local for name in names for local in tasks.find(name, tokenizer)]
  monkeypatch.setattr(tasks, 'find', lambda *_: sources)

  def decode(out, lengths):
    config = infer.DecodeConfig(
      make,
      mixture_or_task_name='both',
      tokenizer=tokenizer,
      output_dir=str(tmp_path / out),
      drafter=lambda: drafters.append(1) or make.models[1],
      decoding='speculative',
      task_feature_lengths=lengths,
      batch_size=2,
    )
    return infer.decode(config, console=rich.console.Console(quiet=True))

  summary = decode('together', LENGTHS)
  assert len(make.asked) == asked + 1 and drafters == [1]  # loaded once
  assert (summary['kind'], summary['mixture']) == ('mixture', 'both')
  assert [one['task'] for one in summary['tasks'].values()] == ['one', 'two']
  for name, records in zip(('one', 'two'), alone, strict=True):
    file = tmp_path / 'together' / f'{name}-predict.jsonl-00000-of-00001'
    assert records_of(file) == records
    assert file.with_name(f'{file.name}.COMPLETED').exists()
  # Where the longest example decides, each task may need its own engine.
  decode('longest', None)
  lengths = [one['max_input_len'] for one in make.asked[asked + 1 :]]
  assert len(set(lengths)) == len(lengths) == 2


class Knowing(ReversingEngine):
  """Answers with the target of the file below."""

  def complete(self, *_):
    return Completion('the cat sat on the mat', [3], [-0.5], 'stop')


@pytest.fixture
def knows(run, tokenizer, tmp_path):
  """Summary and records of a file whose second example has no target."""
  text = 'a\tthe cat sat on the mat\nb\nc\tthe cat sat on the mat\n'
  path = write(tmp_path, 'knows.tsv', text)
  engine = Knowing(tokenizer=tokenizer)
  return lambda **options: run(
    lambda **_: engine, path, overwrite=True, **options
  )


def test_metrics_are_of_the_examples_with_a_target(knows, monkeypatch):
  pytest.importorskip('sacrebleu', reason='it is in the extra [metrics]')
  summary, *_ = knows()
  (scores,) = summary['metrics'].values()
  assert scores['bleu'] == pytest.approx(100) and summary['unmeasured'] is None
  assert knows(metrics=())[0]['metrics'] == {'plain': {}}
  monkeypatch.setitem(sys.modules, 'sacrebleu.metrics', None)
  assert 'sacrebleu, which is not installed' in knows()[0]['unmeasured']
  with pytest.raises(ValueError, match='sacrebleu, which is not installed'):
    knows(metrics=('bleu',))


@pytest.mark.parametrize('value', [ZeroDivisionError('no'), {'x': {1j}}])
def test_a_metric_that_fails_loses_no_result(
  knows, tmp_path, value, monkeypatch
):
  """Nor does a number that JSON does not have."""

  def own(targets, predictions):
    if len(targets) > 1 and isinstance(value, Exception):
      raise value
    return value

  monkeypatch.setitem(metrics.METRICS, 'own', own)
  if isinstance(value, dict):
    assert knows(metrics=('own',))[0]['metrics'] == {'plain': value}
  else:
    with pytest.raises(ValueError, match='metric of the task failed'):
      knows(metrics=('own',))
  assert list((tmp_path / 'out').glob('*.COMPLETED'))
  (kept,) = (tmp_path / 'out').glob('*.jsonl-*-of-00001')
  assert len(kept.read_text().splitlines()) == 3


def test_distinct_inputs_have_all_their_references(run, make, tmp_path):
  pytest.importorskip('sacrebleu', reason='it is in the extra [metrics]')
  lines = ['the dog\ta cat', 'a tree\tthe tree', 'the dog\tthe old cat sleeps']
  path = write(tmp_path, 'several.tsv', '\n'.join([*lines, lines[0]]))
  options = dict(metrics=('bleu', 'first_bleu'), include_all_inputs=True)
  summary, records, _ = run(name=path, distinct=True, **options)
  assert [r['inputs']['references'] for r in records] == [
    ['a cat', 'the old cat sleeps'],
    ['the tree'],
  ]
  scores = summary['metrics']['plain']
  assert 'nrefs:var' in scores['bleu_signature']
  assert 'nrefs:1' in scores['first_bleu_signature']
  assert len(run(name=path, out='each', **options)[1]) == 4
