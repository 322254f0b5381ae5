"""A run over a task or a mixture: T5X's fields, samples, prompts, errors."""

import functools
import json
import sys
from unittest import mock

import pytest

import small_vocabulary
import toy_models
from specdec_jax import infer
from specdec_jax.engine import scoring
from specdec_jax.engine.completion import Completion
from specdec_jax.infer import data
from specdec_jax.text import metrics, tasks
from specdec_jax.text.tokenizer import Tokenizer
from toy_runs import ReversingEngine, decoded, records_of, write

LINES = [
  ('the red dog runs', 'a cat sleeps'),
  ('a cat', 'the dog runs here'),
  ('the old house sings here', 'the house'),
  ('blue tree', 'a red tree'),
  ('dog', 'cat'),
]
LENGTHS = {'inputs': 16, 'targets': 10}


@pytest.fixture(scope='module')
def make(tokenizer):
  """Makes one engine, whatever it is asked for."""
  limits = {'max_input_len': 16, 'max_decode_len': 10}
  engine = toy_models.chain_engine(tokenizer, gamma=2, **limits)
  draft = toy_models.chain_model(tokenizer.vocab_size, noise=1)
  return mock.Mock(return_value=engine, draft=draft)


def write_pairs(path, pairs=LINES):
  return write(path, ''.join(f'{a}\t{b}\n' for a, b in pairs).encode())


@pytest.fixture
def source(tmp_path):
  return write_pairs(tmp_path / 'pairs.tsv')


@pytest.fixture
def run(make, source, tokenizer, tmp_path):
  """Runs a task; see `decoded`."""

  def run(engine=make, name=source, out='out', **options):
    few = {'task_feature_lengths': LENGTHS, 'batch_size': 2}
    options = {'mode': 'plain'} | few | options
    options |= {'mixture_or_task_name': name, 'tokenizer': tokenizer}
    return decoded(tmp_path / out, engine, **options)

  return run


def test_predictions_as_t5x_writes_them(run, make, tmp_path):
  _, records, _ = run()
  name = 'pairs-predict.jsonl-00000-of-00001'
  endings = 'COMPLETED summary.json operative_config.gin'.split()
  names = {path.name for path in (tmp_path / 'out').iterdir()}
  assert names == {name, *(f'{name}.{ending}' for ending in endings)}
  assert make.call_args.kwargs == {'max_input_len': 16, 'max_decode_len': 10}
  assert [record['inputs'] for record in records] == [
    {'inputs_pretokenized': a, 'targets_pretokenized': b} for a, b in LINES
  ]
  assert set(records[0]) == {'inputs', 'prediction', 'prediction_tokens'}
  have = [(x['prediction'], x['prediction_tokens']) for x in records]
  assert have == [(x.text, x.tokens) for x in alone(make())]


def alone(engine, **options):
  """Completions of LINES, by programs that the runs have compiled."""
  texts = [text for text, _ in LINES]
  options |= {'speculative': False, 'log_probs': False, 'batch_size': 2}
  return engine.generate(texts, **options)


def test_scores_of_targets(run, make, tokenizer):
  options = dict(task_mode='score', drafter=never, mode='both')
  summary, records, _ = run(include_all_inputs=True, **options)
  pairs = [
    [[*tokenizer.encode(text), 1] for text in texts]
    for texts in zip(*LINES, strict=True)
  ]
  engine = make()
  expected = scoring.score(engine.target, engine.params.target, *pairs)
  have = [record['score'] for record in records]
  assert have == pytest.approx([one.total for one in expected], abs=1e-4)
  assert records[0]['inputs']['targets'] == pairs[1][0]
  assert set(records[0]) == {'inputs', 'score'}
  assert summary['mean_score'] == pytest.approx(sum(have) / 5)


def sampled(**options):
  options = infer.Options(1.0, **options)
  return {'task_mode': 'predict_with_aux', 'options': options}


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
  # Where nothing is speculative no drafter is loaded.
  _, records, _ = run(prompt_feature='targets', drafter=never)
  prompts = [tokenizer.encode(b) for _, b in LINES]
  want = alone(make(), prompts=prompts)
  have = [record['prediction_tokens'] for record in records]
  assert have == [one.tokens for one in want]
  assert have != [r['prediction_tokens'] for r in run(out='none')[1]]


def never(**options):
  raise AssertionError('the engine was made before the run was checked')


def test_errors_before_the_engine_is_made(run, tmp_path):
  lines = write(tmp_path / 'lines.txt', b'a\nb\n')
  for options, message in (
    (dict(name=lines, task_mode='score'), "no tokens 'targets'"),
    (dict(prompt_feature='prompt'), "example 0 has no tokens 'prompt'"),
    (dict(prompt_feature='targets_pretokenized'), 'has no tokens'),
    (dict(metrics=('blue',)), "metrics: .*'blue'. Nearest known: bleu"),
    (dict(name=lines, task_feature_lengths=None), 'has no targets'),
  ):
    with pytest.raises(ValueError, match=message):
      run(never, **options)


@pytest.mark.parametrize(
  ('name', 'reference'),
  [('test.x.tsv.gz', 'b'), ('own.jsonl', ['b', 'c']), ('lines.de', None)],
)
def test_files_are_tasks(tmp_path, tokenizer, name, reference):
  """Lines, tasks and measurements read a file alike."""
  lines = ['a\tb', 'a\tc', 'd\t']
  if 'jsonl' in name:
    lines = [json.dumps(dict(inputs='a', targets=['b', 'c']))] * 2
    lines.append('{"inputs": "d", "targets": ""}')
  path = write(tmp_path / name, '\n'.join(lines).encode())
  (task,) = tasks.find(path, tokenizer)
  options = dict(mixture_or_task_name=task, tokenizer=tokenizer)
  config = infer.DecodeConfig(never, **options)
  assert config.task_name in ('test.x', 'own', 'lines.de')
  want = ['a', 'a', 'd'] if reference else lines
  assert [one['inputs'] for one in tasks.read(path)] == want
  assert tasks.read_prompts(path, len) == list(dict.fromkeys(want))
  found = data.read(config)
  have = [one.features['inputs_pretokenized'] for one in found.examples]
  assert have == want and found.examples[0].reference == reference
  assert (found.reading is None) == (reference is None)


def test_tasks_that_are_refused(tmp_path, tokenizer):
  path = write(tmp_path / 'a.tsv', b'a\tb\n')
  one, two = map(Tokenizer, small_vocabulary.byte_level(tmp_path))
  # The vocabulary of GPT-2, as files of either kind.
  own = tasks.LocalTask('own', {'test': path}, one.path)
  assert tasks.find(own, two) == [own]
  for task, vocabulary, message in (
    ('none.jsonl.gz', tokenizer, 'task: expected a file .*none'),
    (str(tmp_path), tokenizer, 'is a folder'),
    ('wmt_ende', tokenizer, 'task'),
    (own, tokenizer, 'fingerprint of'),
    (path, Tokenizer(one.path, eos_token='a'), 'eos_id of'),
  ):
    with pytest.raises(ValueError, match=message):
      tasks.find(task, vocabulary)


def test_each_task_has_its_files(run, make, tokenizer, tmp_path, monkeypatch):
  pairs = {'one.tsv': LINES[:2], 'two.tsv': LINES[2:]}
  names = [write_pairs(tmp_path / name, of) for name, of in pairs.items()]
  apart = [run(name=name, out='apart')[1] for name in names]
  asked, drafters = make.call_count, []
  sources = [local for name in names for local in tasks.find(name, tokenizer)]
  monkeypatch.setattr(tasks, 'find', lambda *_: sources)

  draft = {'drafter': lambda: drafters.append(1) or make.draft}
  draft |= {'name': 'both', 'mode': 'speculative'}
  summary, *_ = run(out='together', **draft)
  assert make.call_count == asked + 1 and drafters == [1]  # loaded once
  assert [one['task'] for one in summary['tasks'].values()] == ['one', 'two']
  for name, records in zip(('one', 'two'), apart, strict=True):
    file = tmp_path / 'together' / f'{name}-predict.jsonl-00000-of-00001'
    assert records_of(file) == records
    assert file.with_name(f'{file.name}.COMPLETED').exists()
  # Where the longest example decides, each task may need its own engine.
  run(out='longest', task_feature_lengths=None, **draft)
  lengths = [x.kwargs['max_input_len'] for x in make.mock_calls[asked + 1 :]]
  assert len(set(lengths)) == len(lengths) == 2


class Knowing(ReversingEngine):
  """Answers with the target of the file below."""

  def complete(self, *_):
    return Completion('the cat sat on the mat', [3], [-0.5], 'stop')


@pytest.fixture
def knows(run, tokenizer, tmp_path):
  """Summary and records of a file whose second example has no target."""
  text = b'a\tthe cat sat on the mat\nb\nc\tthe cat sat on the mat\n'
  path = write(tmp_path / 'knows.tsv', text)
  engine = Knowing(tokenizer=tokenizer)
  return functools.partial(run, lambda **_: engine, path, overwrite=True)


def test_metrics_are_of_the_examples_with_a_target(knows, monkeypatch):
  summary, *_ = knows()
  assert summary['metrics']['plain']['bleu'] == pytest.approx(100)
  assert knows(metrics=())[0]['metrics'] == {'plain': {}}
  monkeypatch.setitem(sys.modules, 'sacrebleu.metrics', None)
  assert 'sacrebleu' in knows()[0]['unmeasured']
  with pytest.raises(ValueError, match='sacrebleu'):
    knows(metrics=('bleu',))


def test_a_metric_that_fails_loses_no_result(knows, tmp_path, monkeypatch):
  """Nor does a number that JSON does not have."""
  monkeypatch.setitem(metrics.METRICS, 'odd', lambda *_: {'x': {1j}})
  assert knows(metrics=('odd',))[0]['metrics'] == {'plain': {'x': {1j}}}
  # At the start it is tried with one text, of which it gives a number.
  monkeypatch.setitem(metrics.METRICS, 'own', lambda x, _: 1 / (len(x) < 2))
  with pytest.raises(ValueError, match='metric of the task failed'):
    knows(metrics=('own',))
  assert list((tmp_path / 'out').glob('*.COMPLETED'))
  (kept,) = (tmp_path / 'out').glob('*.jsonl-*-of-00001')
  assert len(kept.read_text().splitlines()) == 3


def test_distinct_inputs_have_all_their_references(run, make, tmp_path):
  lines = ['the dog\ta cat', 'a tree\tthe tree', 'the dog\tthe old cat sleeps']
  text = '\n'.join([*lines, lines[0]])
  path = write(tmp_path / 'several.tsv', text.encode())
  options = dict(metrics=('bleu', 'first_bleu'), include_all_inputs=True)
  summary, records, _ = run(name=path, distinct=True, **options)
  references = [record['inputs']['references'] for record in records]
  assert references == [['a cat', 'the old cat sleeps'], ['the tree']]
  scores = summary['metrics']['plain']
  assert 'nrefs:var' in scores['bleu_signature']
  assert 'nrefs:1' in scores['first_bleu_signature']
  assert len(run(name=path, out='each', **options)[1]) == 4
