"""scripts/decode.py with gin/runs/infer.gin and the demo pair."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FLAGS = {
  'TARGET': '%DEMO_TARGET',
  'CHECKPOINT_PATH': 'demo/target.msgpack',
  'VOCAB_PATH': 'demo/vocab.model',
  'TASK_FEATURE_LENGTHS': "{'inputs': 32, 'targets': 24}",
  'BATCH_SIZE': 2,
}
DRAFT = {
  'DRAFT': '%DEMO_DRAFT',
  'DRAFT_CHECKPOINT_PATH': 'demo/draft.msgpack',
}

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    not (ROOT / 'demo' / 'target.msgpack').exists(),
    reason='demo/target.msgpack, the demo pair, is not there',
  ),
]


def script(**macros):
  files = ('models/demo/target', 'models/demo/draft', 'runs/infer')
  flags = [f'--gin_file=gin/{name}.gin' for name in files]
  flags += [f'--gin.{name}={value}' for name, value in macros.items()]
  return subprocess.run(
    [sys.executable, 'scripts/decode.py', *flags],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )


@pytest.fixture
def macros(tmp_path):
  (tmp_path / 'pairs.tsv').write_text('A cat.\tEine Katze.\nNo.\tNein.\n')
  return FLAGS | {
    'MIXTURE_OR_TASK_NAME': tmp_path / 'pairs.tsv',
    'INFER_OUTPUT_DIR': tmp_path / 'out',
  }


def records(tmp_path, mode):
  path = tmp_path / 'out' / f'pairs-{mode}.jsonl-00000-of-00001'
  return [json.loads(line) for line in path.read_text('utf-8').splitlines()]


def test_scoring_needs_no_drafter(macros, tmp_path):
  done = script(**macros, MODE='score')
  assert done.returncode == 0, done.stderr
  good = [record['score'] for record in records(tmp_path, 'score')]
  assert all(score < 0 for score in good)
  assert 'Mean log-probability' in done.stdout
  # Another output of the same source is less likely.
  (tmp_path / 'pairs.tsv').write_text('A cat.\tNein.\nNo.\tEine Katze.\n')
  done = script(**macros, MODE='score')
  assert done.returncode == 2
  assert 'finished results of another configuration' in done.stderr
  assert 'examples_sha256 was' in done.stderr
  done = script(**macros, MODE='score', OVERWRITE=True)
  assert done.returncode == 0, done.stderr
  bad = [record['score'] for record in records(tmp_path, 'score')]
  assert all(a > b for a, b in zip(good, bad, strict=True))


def test_both_ways_agree(macros, tmp_path):
  name = 'pairs-predict.jsonl-00000-of-00001'
  done = script(**macros, **DRAFT, DECODING='both')
  assert done.returncode == 0, done.stderr
  assert 'agree token for token: 2 of 2' in done.stdout
  folder = tmp_path / 'out'
  assert "MODE = 'predict'" in (
    folder / f'{name}.operative_config.gin'
  ).read_text('utf-8')
  assert (folder / f'{name}.COMPLETED').exists()


def test_errors_are_one_line(macros):
  for wrong, message in (
    ({}, 'Speculative decoding needs a drafter'),
    ({'SHARD_ID': 1}, 'less than num_shards = 1'),
    ({'MODE': 'scores'}, "one of ['predict', 'score'"),
    ({'MIXTURE_OR_TASK_NAME': 'none.tsv'}, "no file of examples 'none.tsv'"),
    ({'NUM_DECODE': 2}, 'Nearest known: NUM_DECODES'),
  ):
    done = script(**(macros | wrong))
    assert done.returncode == 2, (wrong, done.stdout)
    assert message in done.stderr, (wrong, done.stderr)
    assert done.stderr.count('\n') == 1
