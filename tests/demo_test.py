"""The shipped demo pair: speculative output is the plain one, in float32."""

import csv
import functools
import gzip
import pathlib

import gin
import numpy as np
import pytest

from specdec_jax import Engine, Tokenizer, load
from specdec_jax.cli import gin_flags
from specdec_jax.partitioning import Placement

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = ROOT / 'demo'
TEST_SPLIT = ROOT.parent / 'shared' / 'data' / 'ende' / 'tatoeba.test.tsv.gz'
RAGGED = 7  # rows of different lengths that finish at their own times

pytestmark = pytest.mark.skipif(
  not (DEMO / 'target.msgpack').exists(),
  reason='demo/target.msgpack, the demo pair, is not there',
)


@pytest.fixture(scope='module')
def models():
  gin_flags.load(['--gin_file=gin/models/demo_pair.gin'])
  pair = []
  for scope in ('target', 'draft'):
    with gin.config_scope(scope):
      pair.append(gin.get_configurable(load)())
  gin.clear_config()
  return *pair, Tokenizer(DEMO / 'vocab.model')


@pytest.fixture(scope='module')
def sources() -> list[str]:
  """Distinct English sentences, from the test split where it is there."""
  if TEST_SPLIT.exists():
    with gzip.open(TEST_SPLIT, 'rt', encoding='utf-8', newline='') as lines:
      rows = csv.reader(lines, delimiter='\t', quoting=csv.QUOTE_NONE)
      return list(dict.fromkeys(row[0] for row in rows))
  return (DEMO / 'input.txt').read_text('utf-8').split('\n')[:-1]


def decode(engine, texts, batch, speculative):
  """Token ids of each text; all batches have the same shape."""
  outputs = []
  for at in range(0, len(texts), batch):
    part = texts[at : at + batch]
    filled = [*part, *[part[-1]] * (batch - len(part))]
    done = engine.generate(filled, speculative=speculative)
    outputs += [completion.tokens for completion in done][: len(part)]
  return outputs


@pytest.fixture(scope='module')
def oracle(models):
  """The plain loop's outputs of texts in batches, each computed once."""
  target, _, tokenizer = models
  engine = Engine(target, tokenizer=tokenizer)

  @functools.cache
  def plain(texts, batch):
    return decode(engine, texts, batch, speculative=False)

  return plain


def check_equal(models, oracle, texts, gamma, batch):
  """Speculative and plain outputs agree, token for token."""
  target, draft, tokenizer = models
  engine = Engine(target, draft, tokenizer=tokenizer, gamma=gamma)
  have = decode(engine, texts, batch, speculative=True)
  want = oracle(tuple(texts), batch)
  assert len(have) == len(want) == len(texts) > 0
  differing = [
    outputs
    for outputs in zip(texts, have, want, strict=True)
    if outputs[1] != outputs[2]
  ]
  assert not differing, f'{len(differing)} of {len(texts)}: {differing[:3]}'
  assert sum(map(len, want)) > len(texts)


def test_one_core_gives_the_same(models, sources):
  """Its kernels are in blocks, and those of several cores are whole.

  Plain outputs of one layout are the speculative ones of the other.
  """
  target, draft, tokenizer = models
  outputs = []
  for layout, speculative in (('in_out', False), ('blocks', True)):
    engine = Engine(
      target,
      draft,
      tokenizer=tokenizer,
      max_decode_len=120,
      placement=Placement(kernel_layout=layout),
    )
    outputs.append(decode(engine, sources[:RAGGED], RAGGED, speculative))
    modules = engine.params.target['decoder']['logits_dense']
    assert ('kernel_blocks' in modules) == (layout == 'blocks')
  assert outputs[0] == outputs[1]
  assert len({tuple(tokens) for tokens in outputs[0]}) == RAGGED


@pytest.mark.slow
@pytest.mark.parametrize('gamma', [1, 4, 7])
def test_greedy_equals_plain_on_a_thousand(models, oracle, sources, gamma):
  if not TEST_SPLIT.exists():
    pytest.skip(f'{TEST_SPLIT}, the test split, is not there')
  assert len(sources) >= 1000
  check_equal(models, oracle, sources[:1024], gamma, RAGGED)
  check_equal(models, oracle, sources[:1024], gamma, 1)


@pytest.mark.slow
def test_paragraphs_equal_plain(models, oracle):
  """The shipped input has longer outputs than single sentences."""
  lines = (DEMO / 'input.txt').read_text('utf-8').split('\n')
  texts = sorted(filter(None, lines), key=len)[-RAGGED:]
  check_equal(models, oracle, texts, 4, RAGGED)


@pytest.mark.slow
def test_beams_equal_plain_on_a_thousand(models, sources):
  """All beams of all texts agree, token for token, their scores to 1e-4."""
  target, draft, tokenizer = models
  limits = {'max_input_len': 64, 'max_decode_len': 40, 'batch_size': RAGGED}
  engine = Engine(target, draft, tokenizer=tokenizer, gamma=3, **limits)
  # Where the test split is not there the shipped sentences are repeated.
  texts = [sources[i % len(sources)] for i in range(1000)]
  have, want = (
    engine.generate(texts, num_beams=4, num_samples=4, speculative=speculative)
    for speculative in (True, False)
  )
  assert [one.tokens for one in have] == [one.tokens for one in want]
  scores = [[one.score for one in done] for done in (have, want)]
  np.testing.assert_allclose(*scores, atol=1e-4)
  calls = [sum(x.stats.num_target_calls for x in done) for done in (have, want)]
  assert calls[0] < calls[1]
