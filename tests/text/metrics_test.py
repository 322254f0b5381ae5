"""BLEU and ROUGE: known values, several references, what is refused."""

import sys

import pytest

from specdec_jax.text import metrics

SENTENCE = 'the cat sat on the mat'


def test_bleu_of_a_known_pair():
  same = metrics.bleu([SENTENCE], [SENTENCE])
  assert same['bleu'] == pytest.approx(100)
  assert 'tok:13a' in same['bleu_signature']
  # 5 of 6 words, 3 of 5 pairs, 1 of 4 triples and none of 3 quadruples are
  # right; sacrebleu smooths the first zero to a half.
  one_off = metrics.bleu([SENTENCE], ['the cat sat in the mat'])
  expected = 100 * (5 / 6 * 3 / 5 * 1 / 4 * 0.5 / 3) ** 0.25
  assert one_off['bleu'] == pytest.approx(expected, rel=1e-6)


def test_bleu_of_lines_that_are_too_short_for_its_order():
  """None has four words, so the defaults say 0."""
  targets = ['Guten Abend!', 'Danke.']
  scores = metrics.bleu(targets, ['Abend!', 'Danke.'])
  assert 0 < scores['bleu'] < 100 and 'eff:yes' in scores['bleu_signature']


def test_bleu_takes_the_references_that_each_prediction_has():
  targets = [['a red house', SENTENCE], 'one reference only here']
  outputs = [SENTENCE, 'one reference only here']
  assert metrics.bleu(targets, outputs)['bleu'] == pytest.approx(100)
  assert metrics.first_bleu(targets, outputs)['first_bleu'] < 70
  # T5's tokenizes the punctuation of all languages.
  targets, outputs = ['ein „Haus“ am See'], ['ein Haus am See']
  ours, t5s = (f(targets, outputs) for f in (metrics.bleu, metrics.t5_bleu))
  assert 'tok:intl' in t5s['bleu_signature'] and ours['bleu'] != t5s['bleu']


def test_rouge_of_a_known_pair():
  # 6 words and 4: 4 in common, in order; 1 pair of 5 and 3 in common.
  short = 'the cat on mat'
  rouge = metrics.rouge([SENTENCE], [short])
  assert rouge['rouge1'] == rouge['rougeL'] == pytest.approx(80)
  assert rouge['rouge2'] == pytest.approx(100 * 2 * 1 / (5 + 3))
  two = metrics.rouge([SENTENCE, SENTENCE], [short, SENTENCE])
  assert two['rouge1'] == pytest.approx((80 + 100) / 2)
  best = metrics.rouge([['nothing alike', SENTENCE]], [SENTENCE])
  assert best['rougeLsum'] == pytest.approx(100)
  # Its sum goes by sentences.
  swapped = ['the sun was out . it rains today']
  rouge = metrics.rouge(['it rains today .\nthe sun was out'], swapped)
  assert rouge['rougeLsum'] == pytest.approx(100) and rouge['rougeL'] < 60


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
  for name in ('sacrebleu.metrics', 'rouge_score.rouge_scorer'):
    monkeypatch.setitem(sys.modules, name, None)
  for metric in (metrics.bleu, metrics.rouge):
    with pytest.raises(ValueError, match=r"'specdec_jax\[metrics\]'"):
      metric(['a'], ['a'])
