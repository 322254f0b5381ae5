"""The shipped demo pair: speculative output is the plain one, in float32."""

import csv
import gzip
import itertools
import pathlib

import pytest

from specdec_jax import T5, Engine, T5Config, Tokenizer, load
from specdec_jax.partitioning import Placement

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = ROOT / 'demo'
TEST_SPLIT = ROOT.parent / 'shared' / 'data' / 'ende' / 'tatoeba.test.tsv.gz'
SIZES = dict(num_heads=4, head_dim=64)
TARGET = (
  dict(emb_dim=256, num_encoder_layers=3, num_decoder_layers=6, mlp_dim=1664)
  | SIZES
)
DRAFT = (
  dict(
    emb_dim=56,
    num_encoder_layers=0,
    num_decoder_layers=1,
    encoder_dim=256,
    mlp_dim=832,
  )
  | SIZES
)
RAGGED = 7  # rows of different lengths that finish at their own times

pytestmark = pytest.mark.skipif(
  not (DEMO / 'target.msgpack').exists(),
  reason='demo/target.msgpack, the demo pair, is not there',
)


@pytest.fixture(scope='module')
def models():
  tokenizer = Tokenizer(DEMO / 'vocab.model')
  pair = [
    load(
      DEMO / name, T5(T5Config(tokenizer.vocab_size, **size)), dtype='float32'
    )
    for size, name in ((TARGET, 'target.msgpack'), (DRAFT, 'draft.msgpack'))
  ]
  return *pair, tokenizer


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


class Oracle:
  """The plain loop's outputs, each computed once."""

  def __init__(self, models):
    target, _, tokenizer = models
    self._engine = Engine(target, tokenizer=tokenizer)
    self._known: dict[tuple[int, str], list[int]] = {}

  def __call__(self, texts, batch):
    todo = [text for text in texts if (batch, text) not in self._known]
    found = decode(self._engine, todo, batch, speculative=False)
    keys = zip(itertools.repeat(batch), todo)
    self._known |= dict(zip(keys, found, strict=False))
    return [self._known[batch, text] for text in texts]


@pytest.fixture(scope='module')
def oracle(models):
  return Oracle(models)


def check_equal(models, oracle, texts, gamma, batch, **options):
  """Speculative and plain outputs agree, token for token."""
  target, draft, tokenizer = models
  engine = Engine(target, draft, tokenizer=tokenizer, gamma=gamma, **options)
  have = decode(engine, texts, batch, speculative=True)
  want = oracle(texts, batch)
  assert len(have) == len(want) == len(texts) > 0
  differing = [
    (text, one, other)
    for text, one, other in zip(texts, have, want, strict=True)
    if one != other
  ]
  assert not differing, f'{len(differing)} of {len(texts)}: {differing[:3]}'
  num_tokens = sum(map(len, want))
  assert num_tokens > len(texts)
  print(
    f'gamma {gamma}, batch {batch}: {len(texts)} outputs, {num_tokens} tokens'
  )


def test_one_core_gives_the_same(models, sources):
  """Its kernels are in blocks, and those of several cores are whole."""
  target, draft, tokenizer = models
  texts = sources[:RAGGED]
  found = {}
  for layout in ('in_out', 'blocks'):
    engine = Engine(
      target,
      draft,
      tokenizer=tokenizer,
      max_decode_len=120,
      placement=Placement(kernel_layout=layout),
    )
    for speculative in (False, True):
      found[layout, speculative] = decode(engine, texts, RAGGED, speculative)
    modules = engine.params.target['decoder']['logits_dense']
    assert ('kernel_blocks' in modules) == (layout == 'blocks')
  want = found['in_out', False]
  assert all(have == want for have in found.values())
  assert len({tuple(one) for one in want}) == RAGGED


# In small: the demo of `.ci/run`, which fails where outputs differ.
@pytest.mark.slow
def test_greedy_equals_plain(models, oracle, sources):
  # Sentences are short: with one bucket of slots there is half to compile.
  texts = sources[: 4 * RAGGED]
  assert max(map(len, oracle(texts, RAGGED))) < 120
  check_equal(models, oracle, texts, 4, RAGGED, max_decode_len=120)


@pytest.mark.slow
@pytest.mark.parametrize('gamma', range(1, 9))
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
def test_stream_is_the_same_text(models):
  target, draft, tokenizer = models
  engine = Engine(target, draft, tokenizer=tokenizer)
  text = 'Where can I buy a ticket?'
  assert ''.join(engine.stream(text)) == engine.generate([text])[0].text
