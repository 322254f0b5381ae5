"""Two forms of one target beside each other, by `scripts/evaluate.py`."""

import dataclasses
import io
import math

import jax
import numpy as np
import pytest
import rich.console

from small_vocabulary import network, weights
from specdec_jax.engine import scoring
from specdec_jax.engine.engine import Engine
from specdec_jax.infer import quality
from specdec_jax.models.model import Model
from specdec_jax.models.t5 import T5

NET = network(2)
PAIRS = [
  ('the red dog runs', 'a cat'),
  ('a cat', 'the old house sings'),
  ('the red dog runs', 'blue tree runs here'),
  ('cat cat', 'red'),
]
INPUTS = [[5, 9, 1], [7, 1]]
TARGETS = [[3, 4, 6, 1], [8, 1]]


@jax.jit
def logits_of(params):
  """Of both examples in one call, as in training."""
  inputs = np.array([[5, 9, 1], [7, 1, 0]])
  return NET.logits(params, inputs, np.array([[0, 3, 4, 6], [0, 8, 0, 0]]))


def test_a_comparison_is_that_of_both_scores():
  each = weights(NET, 0), weights(NET, 1)
  found = scoring.compare((NET, NET), each, INPUTS, TARGETS)
  for name, params in zip(('log_probs', 'other_log_probs'), each, strict=True):
    scores = scoring.score(NET, params, INPUTS, TARGETS)
    for one, score in zip(found, scores, strict=True):
      np.testing.assert_allclose(one[name], score.log_probs, atol=1e-5)
  first, second = (np.asarray(logits_of(p), np.float64) for p in each)
  first -= first.mean(-1, keepdims=True)
  second -= second.mean(-1, keepdims=True)
  squares = {
    'logits': np.square(first).mean(-1),
    'errors': np.square(first - second).mean(-1),
  }
  for name, want in squares.items():
    for one, row in zip(found, want, strict=True):
      np.testing.assert_allclose(one[name], row[: len(one[name])], rtol=1e-3)
  with pytest.raises(ValueError, match='outside the vocabulary'):
    scoring.compare((NET, NET), each, INPUTS, [[9999], [1]])
  assert scoring.compare((NET, NET), each, [], []) == []


@pytest.fixture(scope='module')
def summaries(tokenizer, tmp_path_factory):
  """Of a target of floats beside itself, in eight bits, and another one."""
  pytest.importorskip('sacrebleu', reason='sacrebleu is in the extra [test]')
  path = tmp_path_factory.mktemp('pairs') / 'pairs.tsv'
  path.write_text(''.join(f'{a}\t{b}\n' for a, b in PAIRS))
  draft = T5(dataclasses.replace(NET.config, num_decoder_layers=1))
  drafter = Model(draft, weights(draft, 2))
  limits = dict(tokenizer=tokenizer, max_input_len=16, max_decode_len=8)
  plain = Engine(Model(NET, weights(NET, 0)), **limits)

  def summary_of(seed, dtype):
    target = Model(NET, weights(NET, seed), dtype=dtype)
    config = quality.EvaluateConfig(
      lambda: Engine(target, drafter, gamma=2, **limits),
      str(path),
      batch_size=2,
      temperatures=(0.0,),
      compared=lambda: plain,
    )
    console = rich.console.Console(file=io.StringIO())
    return quality.evaluate(config, console=console)

  scores = plain.score(*zip(*PAIRS, strict=True))
  total = sum(one.total for one in scores)
  count = sum(len(one.log_probs) for one in scores)
  made = {
    name: summary_of(seed, dtype)
    for name, seed, dtype in (
      ('itself', 0, 'float32'),
      ('int8', 0, 'int8'),
      ('another', 1, 'float32'),
    )
  }
  return made, math.exp(-total / count), count


def test_a_target_beside_itself_and_others(summaries):
  made, perplexity, count = summaries
  found = {name: one['compared'] for name, one in made.items()}
  for one in found.values():
    assert one['sources'] == 3 and one['tokens'] == count
    assert one['other_perplexity'] == pytest.approx(perplexity, rel=1e-4)
  itself, rounded, another = found.values()
  assert itself['equal'] == 3 and itself['logits_error'] == 0
  assert itself['largest_difference'] == itself['mean_difference'] == 0
  assert itself['perplexity'] == itself['other_perplexity']
  assert itself['bleu'] == made['itself']['bleu']
  assert 0 < rounded['logits_error'] < 0.1
  assert 0 < rounded['mean_difference'] < rounded['largest_difference']
  # Control: another model is another one.
  assert another['equal'] == 0 and another['logits_error'] > 0.5
  assert another['mean_difference'] > 10 * rounded['mean_difference']


def test_what_is_shown(summaries):
  made, perplexity, _ = summaries
  rows = dict(quality.table(made['int8']).texts)
  assert rows['their perplexity by the other target'] == f'{perplexity:.3f}'
  name = "greedy outputs equal to the other target's"
  assert rows[name].endswith(' of 3')
  without = {k: v for k, v in made['int8'].items() if k != 'compared'}
  assert name not in dict(quality.table(without).texts)


def test_beside_a_target_that_was_not_compared(summaries):
  made, perplexity, _ = summaries
  without = {k: v for k, v in made['itself'].items() if k != 'compared'}
  shown = quality.side_by_side({'float32': without, 'int8': made['int8']})
  assert shown.texts[0][-3:] == ['-'] * 3
  assert shown.texts[1][-2].endswith(f'({perplexity:.3f})')
  alone = quality.side_by_side({'float32': without})
  assert len(alone.texts[0]) == len(shown.texts[0]) - 3


def test_two_vocabularies(tmp_path):
  class Other:
    """Of an engine only its vocabulary is looked at."""

    def __init__(self, name):
      self.tokenizer, self.path, self.fingerprint = self, name, name

  path = tmp_path / 'pairs.tsv'
  path.write_text('a\tb\n')
  config = quality.EvaluateConfig(
    lambda: Other('x'), str(path), compared=lambda: Other('y')
  )
  with pytest.raises(ValueError, match="has the vocabulary 'y', and the one"):
    quality.evaluate(config)
