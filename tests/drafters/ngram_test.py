"""N-gram tables: fitting, files, the look-up on the device."""

import collections
import dataclasses
import json
import types

import jax
import numpy as np
import pytest
import rich.console

import toy_models
from specdec_jax.drafters import ngram_table
from specdec_jax.drafters.ngram import longest_context, ngram
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
SKEWED = [[0, 2, token] for token in FOLLOWS for _ in range(FOLLOWS[token])]


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


def likeliest(counts, text, order):
  """(id, count) of what follows a text's longest known end, in order."""
  ends = [text[len(text) - n :] for n in range(min(order, len(text) + 1))]
  # The longest end all of whose own ends are known as well.
  follow = counts[max((end for end in ends if end in counts), key=len)]
  return sorted(follow.items(), key=lambda item: (-item[1], item[0]))


@jax.jit
def propose(table, state, context):
  return ngram(table, VOCAB + 3).propose(table, state, context)


@pytest.mark.parametrize('order', [1, 3])
@pytest.mark.parametrize('min_count', [1, 3])
def test_table_holds_the_counts(order, min_count):
  """Every context of the corpus, and others that must back off."""
  want = counts_of(CORPUS, order, min_count)
  table = fit(CORPUS, order, VOCAB, max_continuations=4, min_count=min_count)
  assert sum(table.num_contexts) == len(want)
  rng = np.random.default_rng(0)
  texts = [*want, *(tuple(row) for row in rng.integers(0, 14, (200, 6)))]
  assert order == 1 or any(text[-2:] not in want for text in texts)
  draft, _ = propose(table, (), context_of(texts, 1, SamplingConfig()))
  for text, law in zip(texts, np.asarray(draft.probs)[:, 0], strict=True):
    counts = np.zeros(VOCAB + 3)
    for token, count in likeliest(want, text, order)[:4]:
      counts[token] = count
    np.testing.assert_allclose(law, counts / counts.sum(), atol=1e-6)


def test_search_among_many_children():
  """Every child is found in three steps, what is not there never is."""
  known = np.sort(np.random.default_rng(1).permutation(32_000)[:5_000])
  table = fit([[i, 7] for i in known], 2, 32_000)
  assert table.fanouts == (5_000,)
  ids = np.arange(32_000, dtype=np.int32)
  nodes = jax.jit(longest_context)(table, ids[:, None], np.ones_like(ids))
  np.testing.assert_array_equal(np.flatnonzero(nodes), known)
  np.testing.assert_array_equal(table.tokens[nodes[known]], known)


def test_greedy_proposals_follow_the_first_guess():
  """Across the empty context, and into what was proposed itself."""
  table, counts = fit(CORPUS, 3, VOCAB), counts_of(CORPUS, 3, 1)
  texts = [(0,), (0, 3), (0, 3, 2, 1), (0, 39, 39)]
  draft, _ = propose(table, (), context_of(texts, 5, SamplingConfig(0.0)))
  assert draft.probs is None
  np.testing.assert_array_equal(draft.length, 5)
  for text, tokens in zip(texts, np.asarray(draft.tokens), strict=True):
    for token in tokens.tolist():
      assert token == likeliest(counts, text, 3)[0][0]
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


def test_what_cannot_be_fitted(tokenizer):
  for sequences, order, words in (
    (CORPUS, 0, 'order'),
    ([], 2, 'sequences: .*0 sequences'),
    ([[0, 5, 6]], 4, 'sequences: .* follows 4 others'),
    ([[0, VOCAB]], 2, 'sequences: .*ids'),
  ):
    with pytest.raises(ValueError, match=words):
      fit(sequences, order, VOCAB)
  for settings in (
    {'train_files': []},
    {'train_files': 'a.txt'},
    *({'start_id': value} for value in ('0', 0.5, -1, 288)),
    {'output_file': ''},
  ):
    with pytest.raises(ValueError, match=next(iter(settings))):
      fitting.FitNgramConfig(
        tokenizer, **{'train_files': ['a'], 'output_file': 'x'} | settings
      )


def test_file(tmp_path):
  path = tmp_path / 'new' / 'table.npz'
  table = fit(CORPUS, 3, VOCAB, fingerprint='abc')
  table.save(path)
  words, others, longer = (  # the last is a fine-tune's, with an added token
    types.SimpleNamespace(vocab_size=size, fingerprint=name)
    for size, name in ((VOCAB, 'abc'), (VOCAB, 'abd'), (VOCAB + 1, 'abc'))
  )
  again = ngram_table.load(path, words)
  jax.tree.map(np.testing.assert_array_equal, again, table)
  assert again.fanouts == table.fanouts

  assert ngram_table.load(path, longer).vocab_size == VOCAB
  with pytest.raises(ValueError, match='vocabulary of table'):
    ngram_table.load(path, others)
  fit(CORPUS, 3, VOCAB).save(path)
  with pytest.raises(ValueError, match='vocabulary of table'):
    ngram_table.load(path, longer)


def test_broken_files(tmp_path):
  path = tmp_path / 'table.npz'
  with pytest.raises(ValueError, match='fit_ngram.*No such file'):
    ngram_table.load(path)
  fit(CORPUS, 2, VOCAB).save(path)
  whole = path.read_bytes()
  with np.load(path) as archive:
    arrays = dict(archive)
  for broken in (
    whole[: len(whole) // 2],
    b'no archive',
    {'log_probs': arrays['log_probs'][1:]},
    {'ids': arrays['ids'] + VOCAB},
    {'starts': arrays['starts'][:-1]},
    {'about': np.array(json.dumps({'kind': 'other'}))},
  ):
    if isinstance(broken, bytes):
      path.write_bytes(broken)
    else:
      np.savez(path, **(arrays | broken))
    with pytest.raises(ValueError, match='n-gram table: expected a whole file'):
      ngram_table.load(path)


def test_a_table_is_fitted_to_any_kind_of_file(folder, tokenizer):
  """Lines, an empty one among them, pairs, and a target's own records."""
  texts = ['the red dog runs', 'a cat sleeps', 'the old house sings here']
  ids = [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]
  records = [{'ids': row, 'text': x} for row, x in zip(ids, texts, strict=True)]
  records.append({'ids': ids, 'text': texts})  # samples
  shard, out = 'a.jsonl-00000-of-00001', str(folder / 'out' / 'table.npz')
  for name, field, lines, times in (
    ('a.txt', '', [texts[0], '', *texts[1:]], 1),
    ('a.tsv', '', [f'x\t{text}' for text in texts], 1),
    (shard, 'ids', map(json.dumps, records), 2),
    (shard, 'text', map(json.dumps, records), 2),
  ):
    path = folder / name
    path.write_text('\n'.join(lines))
    config = fitting.FitNgramConfig(tokenizer, [str(path)], out, 4, field)
    have = fitting.fit_ngram(config, rich.console.Console(quiet=True))
    want = fit([[0, *row] for row in ids * times], 4, tokenizer.vocab_size)
    want = want.replace(fingerprint=tokenizer.fingerprint)
    for table in (have, ngram_table.load(out, tokenizer)):
      jax.tree.map(np.testing.assert_array_equal, table, want)
  config = dataclasses.replace(config, field='texts')
  with pytest.raises(ValueError, match="line 1 has no field 'texts'"):
    fitting.fit_ngram(config)
