"""A run over a task: T5X's fields, samples, prompts, shards, errors."""

import io
import json
import pathlib

import jax
import pytest
import rich.console

import small_vocabulary
from specdec_jax import infer, probs
from specdec_jax.engine import scoring
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.options import example_id
from specdec_jax.infer import resume
from specdec_jax.models.model import Model
from specdec_jax.text import metrics

LINES = [
  ('the red dog runs', 'a cat sleeps'),
  ('a cat', 'the dog runs here'),
  ('the old house sings here', 'the house'),
  ('blue tree', 'a red tree'),
  ('dog', 'cat'),
]
LENGTHS = {'inputs': 16, 'targets': 10}
SAMPLED = probs.SamplingConfig(temperature=1.0)


class Making:
  """Makes one engine, and says with what it was asked to."""

  def __init__(self, tokenizer, vocab_size=small_vocabulary.VOCAB_SIZE):
    models = []
    for seed, layers in ((0, 2), (1, 1)):
      network = small_vocabulary.network(layers, vocab_size)
      models.append(Model(network, network.init(jax.random.key(seed))))
    self._models, self._tokenizer = models, tokenizer
    self.asked: list[dict] = []
    self.engine: Engine | None = None

  def __call__(self, **options):
    self.asked.append(options)
    if self.engine is None:
      self.engine = Engine(
        *self._models,
        tokenizer=self._tokenizer,
        gamma=2,
        max_input_len=LENGTHS['inputs'],
        max_decode_len=LENGTHS['targets'],
      )
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
  """Runs a task; returns (summary, records, text of the file)."""

  def run(engine=make, name=source, out='out', **options):
    options = {
      'task_feature_lengths': LENGTHS,
      'batch_size': 2,
      'decoding': 'plain',
    } | options
    config = infer.TaskConfig(
      engine, tokenizer, name, str(tmp_path / out), **options
    )
    console = rich.console.Console(file=io.StringIO(), width=100)
    beside = {'operative_config.gin': lambda: 'A = 1\n'}
    summary = infer.decode_task(config, beside, console)
    stem = pathlib.Path(name).stem
    shard = f'{config.shard_id:05}-of-{config.num_shards:05}'
    path = tmp_path / out / f'{stem}-{config.mode}.jsonl-{shard}'
    text = path.read_text('utf-8')
    return summary, [json.loads(line) for line in text.splitlines()], text

  return run


def test_predictions_as_t5x_writes_them(run, make, tmp_path):
  _, records, _ = run()
  name = 'pairs-predict.jsonl-00000-of-00001'
  assert {path.name for path in (tmp_path / 'out').iterdir()} == {
    name,
    *(
      f'{name}.{ending}'
      for ending in (
        'COMPLETED',
        'config.json',
        'summary.json',
        'operative_config.gin',
      )
    ),
  }
  assert make.asked[-1] == {'max_input_len': 16, 'max_decode_len': 10}
  assert [record['inputs'] for record in records] == [
    {'inputs_pretokenized': a, 'targets_pretokenized': b} for a, b in LINES
  ]
  assert set(records[0]) == {'inputs', 'prediction', 'prediction_tokens'}
  alone = in_pairs(make.engine)
  assert [r['prediction'] for r in records] == [one.text for one in alone]
  assert [r['prediction_tokens'] for r in records] == [
    one.tokens for one in alone
  ]


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


def test_metrics_of_both_ways_on_all_references(run, tmp_path, monkeypatch):
  def exact(targets, predictions):
    pairs = zip(targets, predictions, strict=True)
    return {'exact': sum(b in a for a, b in pairs) / len(targets)}

  monkeypatch.setitem(metrics.METRICS, 'exact', exact)
  _, records, _ = run()
  rows = [
    json.dumps({'inputs': a, 'targets': ['x', r['prediction']]}) + '\n'
    for (a, _), r in zip(LINES, records, strict=True)
  ]
  (tmp_path / 'own.jsonl').write_text(''.join(rows))
  summary, *_ = run(
    name=str(tmp_path / 'own.jsonl'), metrics=['exact'], decoding='both'
  )
  assert summary['metrics'] == {
    'plain': {'exact': 1},
    'speculative': {'exact': 1},
  }
  assert summary['agreement'] == {'compared': 5, 'disagreements': []}
  summary, *_ = run(metrics=['exact'], out='other')
  assert summary['metrics'] == {'plain': {'exact': 0}}


def test_scores_of_targets(run, make, tokenizer):
  summary, records, _ = run(
    mode='score', include_all_inputs=True, drafter=never, decoding='both'
  )
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


def test_aux_of_a_greedy_prediction_is_its_log_probability(run):
  _, records, _ = run(mode='predict_with_aux', decoding='both')
  for record in records:
    assert record['score'] == record['aux']['scores'] < 0
    counts = record['aux']['speculative']
    assert counts['num_tokens'] == len(record['prediction_tokens'])
    assert counts['num_target_calls'] <= record['aux']['plain']['num_tokens']


def test_samples_belong_to_the_example(run):
  options = dict(sampling=SAMPLED, mode='predict_with_aux')
  _, both, _ = run(num_decodes=2, **options)
  assert all(len(record['prediction']) == 2 for record in both)
  assert all(len(record['aux']['scores']) == 2 for record in both)
  assert any(len(set(record['prediction'])) > 1 for record in both)
  # The first sample does not depend on how many there are, on neighbours or on
  # the shard.
  _, one, _ = run(out='one', **options)
  assert [r['prediction'][0] for r in both] == [r['prediction'] for r in one]
  for shard in (0, 1):
    _, part, _ = run(shard_id=shard, num_shards=2, **options)
    assert [r['inputs'] for r in part] == [r['inputs'] for r in one[shard::2]]
    assert [r['prediction'] for r in part] == [
      r['prediction'] for r in one[shard::2]
    ]
  _, other, _ = run(out='other', seed=1, **options)
  assert [r['prediction'] for r in other] != [r['prediction'] for r in one]


def test_example_ids_differ():
  pairs = [(i, j) for i in range(300) for j in range(20)]
  assert len({example_id(*pair) for pair in pairs}) == len(pairs)
  assert example_id(1 << 31, 0) == 1 << 31
  assert example_id(5, 1) == 5 | 1 << 31
  with pytest.raises(ValueError, match='more than 32 bits'):
    example_id(1 << 31, 1)


@pytest.mark.parametrize(
  'options, count',
  [({'prompt_from_targets': 2}, 2), ({'prompt_feature': 'targets'}, None)],
)
def test_prompt_from_targets(run, make, tokenizer, options, count):
  _, records, _ = run(**options)
  prompts = [tokenizer.encode(b)[:count] for _, b in LINES]
  alone = in_pairs(make.engine, prompts)
  have = [record['prediction_tokens'] for record in records]
  assert have == [one.tokens for one in alone]
  assert have != [r['prediction_tokens'] for r in run(out='none')[1]]


class Killed(BaseException):
  """Stands for a kill in this process."""


def test_run_goes_on_where_it_was(run, make, monkeypatch):
  options = dict(sampling=SAMPLED, checkpoint_period=1)
  *_, whole = run(out='whole', **options)
  keep, batches = resume.Folder.keep, []

  def die(self, number, content):
    keep(self, number, content)
    if number == 1:
      raise Killed

  with monkeypatch.context() as patch:
    patch.setattr(resume.Folder, 'keep', die)
    with pytest.raises(Killed):
      run(**options)
  with pytest.raises(ValueError, match='seed was 0, is 1'):
    run(seed=1, **options)
  generate = make.engine.generate

  def count(texts, **rest):
    batches.append(texts)
    return generate(texts, **rest)

  monkeypatch.setattr(make.engine, 'generate', count)
  summary, _, text = run(**options)
  assert text == whole
  assert len(batches) == 1  # the last of three
  assert summary['plain']['tokens'] > 0 and summary['examples'] == 5
  # Finished: kept, and nothing runs; of another configuration: refused.
  assert run(**options)[0] == summary and len(batches) == 1
  with pytest.raises(ValueError, match='seed was 0, is 1'):
    run(seed=1, **options)
  assert run(seed=1, overwrite=True, **options)[2] != whole


@pytest.mark.parametrize(
  'options',
  [{}, pytest.param({'batching': 'continuous'}, marks=pytest.mark.slow)],
)
def test_a_broken_example_stops_no_other(run, tmp_path, options):
  """It is in its place and says what it lacks."""
  lines = [json.dumps({'inputs': a, 'targets': b}) for a, b in LINES]
  path = tmp_path / 'some.jsonl'
  path.write_text('\n'.join(lines))
  options |= {'name': str(path), 'num_decodes': 2, 'metrics': ('bleu',)}
  options |= {'decoding': 'both'}
  whole_summary, whole, _ = run(**options)
  path.write_text('\n'.join([*lines, '{"inputs": "cut o', '{"targets": "b"}']))
  summary, records, _ = run(overwrite=True, **options)
  assert records[: len(LINES)] == whole
  first, second = records[len(LINES) :]
  assert first['prediction'] == second['prediction'] == [None, None]
  assert f'line {len(LINES) + 1} is not JSON' in first['error']
  assert first['inputs']['inputs_pretokenized'] == '{"inputs": "cut o'
  assert "no field 'inputs'" in second['error']
  said = [error.split(':')[0] for error in summary['errors']]
  assert said == [f'example {len(LINES) + i}' for i in (0, 1)]
  for name in ('metrics', 'agreement'):
    assert summary[name] == whole_summary[name]
  path.write_text('{\n{\n')
  with pytest.raises(ValueError, match='line 1 is not JSON'):
    run(overwrite=True, **options)


def test_an_example_without_a_target_is_not_scored(run, tmp_path):
  path = tmp_path / 'some.tsv'
  path.write_text('\n'.join(['the dog\tthe cat', 'a tree', 'a dog\tx']))
  _, records, _ = run(name=str(path), mode='score')
  assert [record['score'] is None for record in records] == [False, True, False]
  assert "has no tokens 'targets'" in records[1]['error']


def test_lengths_of_the_longest_example(run, make, tokenizer):
  run(task_feature_lengths=None)
  longest = [
    max(len(tokenizer.encode(p[i])) + 1 for p in LINES) for i in (0, 1)
  ]
  assert make.asked[-1]['max_input_len'] == longest[0]
  assert make.asked[-1]['max_decode_len'] == longest[1]


def never(**options):
  raise AssertionError('the engine was made before the run was checked')


def test_errors_before_the_engine_is_made(run, tmp_path):
  (tmp_path / 'lines.txt').write_text('a\nb\n')
  lines = str(tmp_path / 'lines.txt')
  for options, message in (
    (dict(name=str(tmp_path / 'none.tsv')), 'no file of examples'),
    (
      dict(name=lines, mode='score'),
      r"no tokens 'targets'.* those of \['inputs'\].*TAB",
    ),
    (dict(prompt_feature='prompt'), "example 0 has no tokens 'prompt'"),
    (dict(prompt_feature='targets_pretokenized'), 'has no tokens'),
    (dict(metrics=('blue',)), "no metric 'blue'. Nearest known: bleu"),
    (
      dict(name=lines, task_feature_lengths=None),
      'nothing says how long an output may be',
    ),
  ):
    with pytest.raises(ValueError, match=message):
      run(never, **options)


def test_errors_before_anything_is_compiled(run, tokenizer, make):
  small = Making(tokenizer)
  small.engine = Engine(
    small._models[0], tokenizer=tokenizer, max_input_len=16, max_decode_len=10
  )
  with pytest.raises(ValueError, match='needs a drafter'):
    run(small, decoding='speculative')
  other = Making(tokenizer)
  other._models[1] = Making(tokenizer, 3000)._models[1]
  with pytest.raises(ValueError, match="draft's vocabulary is 3000"):
    run(other, decoding='speculative')
  assert small.engine.num_programs == 0
  run(small, decoding='plain', drafter=never)
  with pytest.raises(AssertionError, match='was made'):
    run(small, decoding='speculative', drafter=never)
  with pytest.raises(ValueError, match='--draft, in gin DRAFT_CHECKPOINT_PATH'):
    infer.load_drafter()


@pytest.mark.parametrize(
  'name, value',
  [
    ('mode', 'predicts'),
    ('decoding', 'fast'),
    ('output_dir', 'gs://bucket/out'),
    ('shard_id', 2),
    ('shard_id', -1),
    ('num_shards', 0),
    ('batch_size', 0),
    ('num_decodes', True),
    ('checkpoint_period', 0),
    ('prompt_from_targets', -1),
    ('prompt_feature', 3),
    ('task_feature_lengths', {'inputs': 5}),
    ('task_feature_lengths', {'inputs': 5, 'targets': '8'}),
    ('split', ''),
    ('drafter', 'small'),
    ('sampling', 1.0),
    ('include_all_inputs', 'no'),
    ('metrics', 5),
    ('metrics', 'bleu'),
    ('metrics', (5,)),
  ],
)
def test_config_names_what_is_wrong(name, value):
  values = {
    'engine': never,
    'tokenizer': None,
    'mixture_or_task_name': 'a',
    'output_dir': 'out',
    'num_shards': 2,
    name: value,
  }
  with pytest.raises(ValueError, match=f'TaskConfig.{name}: expected'):
    infer.TaskConfig(**values)
  with pytest.raises(ValueError, match='num_decodes: expected 1'):
    infer.TaskConfig(never, None, 'a', 'out', mode='score', num_decodes=2)
