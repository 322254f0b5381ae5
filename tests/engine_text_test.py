"""Text out of the engine: streams, characters, stop strings.

The models are chains that say a known text, one token after the other.
"""

import itertools

import numpy as np
import pytest

from small_vocabulary import VOCAB_SIZE
from specdec_jax.engine.completion import Text
from specdec_jax.engine.engine import Engine
from specdec_jax.models.model import Model
from toy_models import MarkovModel

SCRIPT = 'the dog <end> grün 5€ 😀 a cat'


def chain(tokens) -> MarkovModel:
  """A model that says `tokens` (all different), then the last one again."""
  table = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
  for before, after in itertools.pairwise([0, *tokens, tokens[-1]]):
    table[before, after] = 30.0
  return MarkovModel(table)


@pytest.fixture(scope='module')
def scripted(tokenizer):
  """An engine that says `SCRIPT`, but for tokens that came before."""
  ids = [i for char in SCRIPT for i in piece_ids(tokenizer, char)]
  # What a chain of order 1 says twice, it says for ever.
  model = chain([*dict.fromkeys(ids), tokenizer.eos_id])
  side = Model(model, model.params)
  return Engine(
    side,
    side,
    tokenizer=tokenizer,
    gamma=3,
    max_input_len=16,
    max_decode_len=40,
  )


def piece_ids(tokenizer, char: str) -> list[int]:
  """Ids of a character without the mark of a word's beginning."""
  return tokenizer.encode(char)[1:] or tokenizer.encode(char)


def test_scripted_text(scripted):
  for speculative in (False, True):
    done = scripted.generate(['a'], speculative=speculative)[0]
    assert done.finish_reason == 'stop'
    assert all(char in done.text for char in 'ü€😀')
  assert done.stats.acceptance_rate == 1.0


@pytest.mark.parametrize('speculative', [False, True])
def test_stream_gives_whole_characters(tokenizer, scripted, speculative):
  want = scripted.generate(['a'], speculative=speculative)[0].text
  pieces = list(scripted.stream('a', speculative=speculative))
  assert ''.join(pieces) == want and len(pieces) > 3
  assert not any('\ufffd' in piece for piece in pieces)
  # An output may end inside a character: only its last piece shows that.
  for limit in range(1, 12):
    options = dict(speculative=speculative, max_length=limit)
    want = scripted.generate(['a'], **options)[0].text
    pieces = list(scripted.stream('a', **options))
    assert ''.join(pieces) == want
    assert not any('\ufffd' in piece for piece in pieces[:-1])
  assert list(scripted.stream('')) == []


@pytest.mark.parametrize('speculative', [False, True])
@pytest.mark.parametrize(
  'stops', [('€',), ('😀', 'ü'), ('zzz',), ('{last}zzz', '{mid}'), ('{two}',)]
)
def test_stop_strings(scripted, stops, speculative):
  whole = scripted.generate(['a'], speculative=speculative)[0]
  text = whole.text
  parts = {'last': text[-1], 'mid': text[4:6], 'two': text[3:9]}
  stops = [stop.format(**parts) for stop in stops]
  options = dict(speculative=speculative, stop_strings=stops)
  done = scripted.generate(['a'], **options)[0]
  pieces = list(scripted.stream('a', **options))
  assert ''.join(pieces) == done.text
  found = [text.find(stop) for stop in stops if stop in text]
  if not found:
    assert done == whole
    return
  assert done.finish_reason == 'stop_string'
  assert done.text == text[: min(found)]
  # Its tokens are the fewest that show the stop string.
  assert done.tokens == whole.tokens[: len(done.tokens)]
  shown = [scripted.tokenizer.decode(done.tokens[:n]) for n in (-1, None)]
  assert [any(stop in s for stop in stops) for s in shown] == [False, True]
  assert len(done.log_probs) == len(done.tokens)


def test_the_stop_string_complete_first_counts(tokenizer):
  """However many tokens come at once, and though another began earlier."""
  ids = tokenizer.encode('the dog sings')
  text = tokenizer.decode(ids)
  stops = [text[2:], text[6]]
  for length in range(1, len(ids) + 1):
    output = Text(tokenizer, ids[:length], stops)
    if output.has_stop_string:
      assert output.final == text[: text.index(text[6])]
    assert text[: text.index(text[6])].startswith(output.stable)


def test_stable_text_never_changes(tokenizer):
  """Any tokens at all, bytes that are no character among them."""
  rng = np.random.default_rng(0)
  for _ in range(100):
    ids = rng.integers(0, VOCAB_SIZE, 12)
    ids[rng.integers(0, 6) :][:4] = tokenizer.encode('😀')[-4:]
    whole = Text(tokenizer, ids, ()).final
    seen = [Text(tokenizer, ids[:n], ()).stable for n in range(len(ids) + 1)]
    assert all(whole.startswith(part) for part in seen), (ids, whole, seen)
    assert seen == sorted(seen, key=len)


@pytest.mark.parametrize('speculative', [False, True])
def test_a_stream_that_breaks_says_so(tokenizer, speculative):
  ids = tokenizer.encode('the dog')
  model = chain(ids)
  broken = dict(model.params)
  broken['table'] = broken['table'].at[ids[-1]].set(np.nan)
  engine = Engine(
    Model(model, broken),
    Model(model, model.params),
    tokenizer=tokenizer,
    gamma=1,
    max_decode_len=12,
  )
  pieces = []
  with pytest.raises(ValueError, match=f'NaN.* token {len(ids) + 1}'):
    pieces.extend(engine.stream('a', speculative=speculative))
