"""What drafts cost: that each is measured, and how its cost is counted."""

import json

import pytest
import rich.console

from small_vocabulary import network
from specdec_jax.measure import drafter_costs as costs


@pytest.mark.slow  # how costs are told apart is tested below
def test_every_drafter_beside_one_target(folder, tokenizer):
  """A tiny target; the tables of a file of the same vocabulary."""
  text = folder / 'text.txt'
  text.write_text('the red dog runs\nthe old house sings here\n')
  path = folder / 'costs.json'
  console = rich.console.Console(record=True, width=140)
  record = costs.drafter_costs(
    costs.DrafterCostsConfig(
      network(1),
      network(1),
      train_files=(str(text),),
      vocab_path=tokenizer.path,
      gamma=2,
      temperatures=(0.0,),
      input_len=8,
      decode_len=16,
      calls_a_run=2,
      repeats=2,
      output_file=str(path),
    ),
    console,
  )
  assert json.loads(path.read_text()) == record
  assert [row['drafter'] for row in record['measured']] == [
    'unigram',
    'bigram',
    'prompt_lookup',
    'uniform',
    'small_model',
  ]
  for row in record['measured']:
    assert row['cost_ratio_alone'] > 0
    assert row['draft_of_a_call'] == pytest.approx(2 * row['cost_ratio_alone'])
  assert record['ngrams'].endswith(f'tokens of {text}')
  assert 'bigram' in console.export_text()


def test_costs_are_differences_of_neighbouring_rounds():
  """Of 2 rounds each; the machine is half as fast in the second."""
  config = costs.DrafterCostsConfig(network(1), gamma=4, calls_a_run=2)
  seconds = {'round x': [0.20, 0.40], 'round nothing': [0.16, 0.32]}
  ms = {'median': 0.0, 'error': 0.0}
  times = {'round x': ms, 'round nothing': ms}
  times |= {'call': {'median': 50.0}, 'draft x': {'median': 20.0}}
  row = costs._row(config, 'x', seconds, times)
  # The median of 20 and 40 ms a round, over 4 proposals, in calls of 50 ms.
  assert row['cost_ratio'] == pytest.approx(30 / 4 / 50)
  assert row['cost_ratio_alone'] == pytest.approx(20 / 4 / 50)
  assert row['draft_of_a_call'] == pytest.approx(20 / 50)


def test_random_ids_where_there_is_no_text(tmp_path, monkeypatch):
  monkeypatch.setattr(costs, '_NOISE', (50, 8))
  config = costs.DrafterCostsConfig(
    network(1),
    train_files=(str(tmp_path / 'no.txt'),),
    vocab_path='no.model',
  )
  sequences, corpus = costs._corpus(config)
  assert "400 ids drawn by Zipf's law (no '" in corpus and 'no.txt' in corpus
  assert len(sequences) == 50
  assert all(ids[0] == 0 and len(ids) == 9 for ids in sequences)
  assert max(map(max, sequences)) < network(1).vocab_size


def test_numbers_that_make_no_sense():
  with pytest.raises(ValueError, match='repeats must be at least 1, got 0'):
    costs.DrafterCostsConfig(network(1), repeats=0)
