"""The shipped demo pair: speculative output is the plain one, in float32."""

import copy
import csv
import functools
import gzip

import gin
import numpy as np
import pytest

from repository import ROOT, TEST_SPLIT
from specdec_jax import Engine, load
from specdec_jax.cli import gin_flags
from specdec_jax.partitioning import Placement

DEMO = ROOT / 'demo'
RAGGED = 7  # rows of different lengths that finish at their own times


@pytest.fixture(scope='module')
def engine():
  """Makes an engine of the pair, with options."""
  return functools.partial(Engine, load('demo'), load('demo-draft'))


def test_arrays_show_the_sizes_that_gin_has():
  gin_flags.load(['--gin_file=gin/models/demo.gin'])
  for part, name in (('target', 'demo'), ('draft', 'demo-draft')):
    macro = gin.query_parameter(f'DEMO_{part.upper()}/gin.macro.value')
    described = load(f'demo/{part}.msgpack', copy.deepcopy(macro))
    assert described.network == load(name).network
  gin.clear_config()


@pytest.fixture(scope='module')
def texts() -> list[str]:
  """A thousand English sentences; the shipped ones are repeated for it.

  After them come the longest paragraphs of the shipped input.
  """
  lines = [*filter(None, (DEMO / 'input.txt').read_text('utf-8').split('\n'))]
  sentences = lines
  if TEST_SPLIT.exists():
    with gzip.open(TEST_SPLIT, 'rt', encoding='utf-8', newline='') as stream:
      rows = csv.reader(stream, delimiter='\t', quoting=csv.QUOTE_NONE)
      sentences = list(dict.fromkeys(row[0] for row in rows))
  chosen = [sentences[i % len(sentences)] for i in range(1000)]
  return chosen + sorted(lines, key=len)[-RAGGED:]


def test_one_core_gives_the_same(engine, texts):
  """Its kernels are in blocks, and those of several cores are whole.

  Plain outputs of one layout are the speculative ones of the other.
  """
  outputs = []
  for layout, speculative in (('in_out', False), ('blocks', True)):
    placement = Placement(kernel_layout=layout)
    made = engine(max_decode_len=120, placement=placement)
    done = made.generate(texts[:RAGGED], speculative=speculative)
    outputs.append([one.tokens for one in done])
    modules = made.params.target['decoder']['logits_dense']
    assert ('kernel_blocks' in modules) == (layout == 'blocks')
  assert outputs[0] == outputs[1]
  assert len({tuple(tokens) for tokens in outputs[0]}) == RAGGED


@pytest.mark.slow
@pytest.mark.parametrize('rows', [1, RAGGED])
def test_greedy_equals_plain_on_a_thousand(engine, texts, rows):
  made = engine(batch_size=rows)
  plain = made.generate(texts, speculative=False)
  for gamma in (1, 4, 7):
    done = made.generate(texts, gamma=gamma)
    assert [one.tokens for one in done] == [one.tokens for one in plain]


@pytest.mark.slow
def test_beams_equal_plain_on_a_thousand(engine, texts):
  """All beams of all texts agree, token for token, their scores to 1e-4."""
  limits = {'max_input_len': 64, 'max_decode_len': 40, 'batch_size': RAGGED}
  made = engine(gamma=3, **limits)
  options = {'num_beams': 4, 'num_samples': 4}
  have = made.generate(texts[:1000], **options, speculative=True)
  want = made.generate(texts[:1000], **options, speculative=False)
  assert [one.tokens for one in have] == [one.tokens for one in want]
  scores = [[one.score for one in done] for done in (have, want)]
  np.testing.assert_allclose(*scores, atol=1e-4)
  calls = [sum(x.stats.num_target_calls for x in done) for done in (have, want)]
  assert calls[0] < calls[1]
