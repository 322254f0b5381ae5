"""N-gram tables: fitting, files, the look-up on the device."""

import collections
import json
import math

import jax
import numpy as np
import pytest
import rich.console

import toy_models
from specdec_jax.drafters import ngram_table
from specdec_jax.drafters.ngram import longest_known, ngram
from specdec_jax.drafters.ngram_table import fit
from specdec_jax.probs import SamplingConfig
from specdec_jax.training import ngram as fitting
from toy_requests import context_of

VOCAB = 40
CORPUS = [
  [0, *np.random.default_rng(row).integers(0, VOCAB, 30) % (4 + row % 9), 1]
  for row in range(60)
]


# What follows 2, and how often.
FOLLOWS = {7: 40, 30: 20, 9: 16, 8: 8, 12: 6, 5: 2}
SKEWED = [
  [0, 2, token] for token, count in FOLLOWS.items() for _ in range(count)
]


def counts_of(corpus, order, min_count):
  """Context -> Counter of what follows: the plainest way to count."""
  found = collections.defaultdict(collections.Counter)
  for ids in corpus:
    for place in range(1, len(ids)):
      for size in range(min(order - 1, place) + 1):
        context = tuple(int(i) for i in ids[place - size : place])
        found[context][int(ids[place])] += 1
  return {
    context: follow
    for context, follow in found.items()
    if not context or follow.total() >= min_count
  }


find = jax.jit(longest_known)


def look_up(table, texts):
  """Entries of each text's longest known end: [(id, probability), ...]."""
  size = table.order - 1
  recent = np.zeros((len(texts), size), np.int32)
  for row, text in enumerate(texts):
    near = list(text)[::-1][:size]
    recent[row, : len(near)] = near
  known = np.array([len(text) for text in texts], np.int32)
  nodes = find(table, recent, known)
  return [
    [
      (int(table.ids[i]), math.exp(table.log_probs[i]))
      for i in range(table.starts[node], table.starts[node + 1])
    ]
    for node in np.asarray(nodes)
  ]


@pytest.mark.parametrize('order', [1, 3])
@pytest.mark.parametrize('min_count', [1, 3])
def test_table_holds_the_counts(order, min_count):
  """Every context of the corpus, and others that must back off."""
  want = counts_of(CORPUS, order, min_count)
  table = fit(CORPUS, order, VOCAB, max_continuations=4, min_count=min_count)
  assert sum(table.num_contexts) == len(want)
  rng = np.random.default_rng(0)
  texts = [*want, *(tuple(row) for row in rng.integers(0, 14, (200, 6)))]
  backed_off = 0
  for text, entries in zip(texts, look_up(table, texts), strict=True):
    ends = [text[len(text) - n :] for n in range(min(order, len(text) + 1))]
    # The longest end all of whose own ends are known as well.
    end = max((e for e in ends if e in want), key=len)
    backed_off += len(end) < min(order - 1, len(text))
    likeliest = sorted(want[end].items(), key=lambda kv: (-kv[1], kv[0]))[:4]
    total = want[end].total()
    assert [id_ for id_, _ in entries] == [id_ for id_, _ in likeliest]
    np.testing.assert_allclose(
      [prob for _, prob in entries], [n / total for _, n in likeliest], 1e-6
    )
  assert backed_off or order == 1


def test_search_among_many_children():
  """Every child is found in three steps, what is not there never is."""
  known = np.random.default_rng(1).permutation(32_000)[:5_000]
  table = fit([[i, 7] for i in known], 2, 32_000)
  assert table.fanouts == (5_000,)
  ids = np.arange(32_000, dtype=np.int32)
  nodes = find(table, ids[:, None], np.ones(32_000, np.int32))
  np.testing.assert_array_equal(np.flatnonzero(nodes), np.sort(known))
  found = np.asarray(nodes)[np.sort(known)]
  np.testing.assert_array_equal(table.tokens[found], np.sort(known))


@jax.jit
def propose(table, state, context):
  return ngram(table, VOCAB + 3).propose(table, state, context)


def test_greedy_proposals_follow_the_first_guess():
  """Across the empty context, and into what was proposed itself."""
  table = fit(CORPUS, 3, VOCAB)
  texts = [(0,), (0, 3), (0, 3, 2, 1), (0, 39, 39)]
  draft, _ = propose(table, (), context_of(texts, 5, SamplingConfig(0.0)))
  assert draft.probs is None
  np.testing.assert_array_equal(draft.length, 5)
  for text, tokens in zip(texts, np.asarray(draft.tokens), strict=True):
    for token in tokens.tolist():
      assert token == look_up(table, [text])[0][0][0]
      text = (*text, token)


def test_drawn_proposals_have_the_probabilities_they_state():
  """chi-squared of 4000 draws; a proposal's own row of [B, G, V]."""
  table = fit(SKEWED, 2, VOCAB)
  rows, temperature = 4000, 0.7
  sampling = SamplingConfig(temperature, top_k=5, top_p=0.99)
  context = context_of([(0, 2)] * rows, 2, sampling)
  draft, _ = propose(table, (), context)
  tokens, stated = np.asarray(draft.tokens), np.asarray(draft.probs)
  assert stated.shape == (rows, 2, VOCAB + 3)
  np.testing.assert_allclose(stated.sum(-1), 1, atol=1e-5)
  assert (np.take_along_axis(stated, tokens[..., None], -1) > 0).all()
  weights = np.zeros(VOCAB + 3)
  for token, count in list(FOLLOWS.items())[:5]:  # top-k drops the sixth
    weights[token] = count ** (1 / temperature)
  want = weights / weights.sum()
  np.testing.assert_allclose(stated[:, 0], np.tile(want, (rows, 1)), atol=1e-6)
  observed = np.bincount(tokens[:, 0], minlength=VOCAB + 3)
  assert toy_models.chi_squared_p_value(observed, want) > 1e-3
  # The control: not the law of temperature 1.
  flat = want**temperature
  assert toy_models.chi_squared_p_value(observed, flat / flat.sum()) < 1e-3


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'order': 0}, 'order: .* from 1, got 0'),
    ({'sequences': []}, 'got .0 tokens in 0 sequences'),
    ({'order': 4, 'sequences': [[0, 5, 6]]}, 'follows 4 others 1 times'),
    ({'sequences': [[0, VOCAB]]}, r'ids in \[0, 40\), got \(0, 40\)'),
  ],
)
def test_what_cannot_be_fitted(change, message):
  args = {'sequences': CORPUS, 'order': 2, 'vocab_size': VOCAB} | change
  with pytest.raises(ValueError, match=message):
    fit(**args)


class Words:
  vocab_size = VOCAB
  fingerprint = 'abc'


def test_file(tmp_path):
  path = tmp_path / 'new' / 'table.npz'
  table = fit(CORPUS, 3, VOCAB, fingerprint='abc')
  table.save(path)
  again = ngram_table.load(path, Words)
  jax.tree.map(np.testing.assert_array_equal, again, table)
  assert again.fanouts == table.fanouts
  assert [p.name for p in path.parent.iterdir()] == ['table.npz']

  class Others(Words):
    fingerprint = 'abd'

  class Longer(Words):  # a fine-tune's, with an added token
    vocab_size = VOCAB + 1

  assert ngram_table.load(path, Longer).vocab_size == VOCAB
  with pytest.raises(ValueError, match='vocabulary of table'):
    ngram_table.load(path, Others)
  fit(CORPUS, 3, VOCAB).save(path)
  with pytest.raises(ValueError, match='vocabulary of table'):
    ngram_table.load(path, Longer)


def test_broken_files(tmp_path):
  path = tmp_path / 'table.npz'
  with pytest.raises(ValueError, match='fit_ngram.*No such file'):
    ngram_table.load(path)
  fit(CORPUS, 2, VOCAB).save(path)
  whole = path.read_bytes()
  with np.load(path) as archive:
    arrays = dict(archive)
  broken = {'cut': whole[: len(whole) // 2], 'text': b'no archive'}
  changed = {
    'without ids': {'ids': None},
    'ids outside': {'ids': arrays['ids'] + VOCAB},
    'starts': {'starts': arrays['starts'][:-1]},
    'kind': {'about': np.array(json.dumps({'kind': 'other'}))},
  }
  for name, change in changed.items():
    kept = {k: v for k, v in (arrays | change).items() if v is not None}
    np.savez(tmp_path / f'{name}.npz', **kept)
    broken[name] = (tmp_path / f'{name}.npz').read_bytes()
  for name, data in broken.items():
    path.write_bytes(data)
    with pytest.raises(ValueError, match='n-gram table: expected a whole file'):
      ngram_table.load(path)
      pytest.fail(name)


def test_fit_ngram(folder, tokenizer):
  """A table of lines, an empty one among them, is the one in the file."""
  (folder / 'a.txt').write_text('the red dog runs\n\nthe old house sings here')
  config = fitting.FitNgramConfig(
    tokenizer,
    train_files=[str(folder / 'a.txt')],
    output_file=str(folder / 'out' / 'table.npz'),
    order=4,
  )
  fitted = fitting.fit_ngram(config, rich.console.Console(quiet=True))
  loaded = ngram_table.load(config.output_file, tokenizer)
  jax.tree.map(np.testing.assert_array_equal, loaded, fitted)


def test_bad_settings(tokenizer):
  for field, values in (
    ('order', [0]),
    ('train_files', [[], 'a.txt']),
    ('start_id', ['0', 0.5, -1, 288]),
    ('output_file', ['']),
  ):
    for value in values:
      settings = {'train_files': ['a'], 'output_file': 'x'} | {field: value}
      with pytest.raises(ValueError, match=field):
        fitting.fit_ngram(fitting.FitNgramConfig(tokenizer, **settings))
