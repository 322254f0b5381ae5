"""Text out of the engine: streams, characters, stop strings.

The models are chains that say a known text, one token after the other.
"""

import itertools

import numpy as np
import pytest

import small_vocabulary
from small_vocabulary import VOCAB_SIZE, joined
from specdec_jax.engine.completion import Text, decode
from specdec_jax.engine.engine import Engine
from specdec_jax.models.model import Model
from specdec_jax.text.tokenizer import Tokenizer
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
  return Engine(side, side, tokenizer=tokenizer, gamma=3, max_decode_len=40)


def piece_ids(tokenizer, char: str) -> list[int]:
  """Ids of a character without the mark of a word's beginning."""
  return tokenizer.encode(char)[1:] or tokenizer.encode(char)


STOPS = ('😀', 'ü'), ('zzz',), ('{last}zzz', '{mid}'), ('{two}',)


@pytest.mark.parametrize('stops', STOPS)
def test_stop_strings(scripted, stops):
  (whole,) = scripted.generate(['a'])
  text = whole.text
  assert whole.finish_reason == 'stop' and all(x in text for x in 'ü€😀')
  parts = {'last': text[-1], 'mid': text[4:6], 'two': text[3:9]}
  stops = [stop.format(**parts) for stop in stops]
  (done,) = scripted.generate(['a'], stop_strings=stops)
  pieces = list(scripted.stream('a', stop_strings=stops))
  assert ''.join(pieces) == done.text
  assert list(scripted.stream('')) == []
  found = [text.find(stop) for stop in stops if stop in text]
  if not found:
    assert done == whole and len(pieces) > 3
    return
  assert done.finish_reason == 'stop_string'
  assert done.text == text[: min(found)]
  # Its tokens are the fewest that show the stop string.
  assert done.tokens == whole.tokens[: len(done.tokens)]
  shown = [scripted.tokenizer.decode(done.tokens[:n]) for n in (-1, None)]
  assert [any(stop in s for stop in stops) for s in shown] == [False, True]
  assert len(done.log_probs) == len(done.tokens)


KINDS = 'sentencepiece', 'Gemma', 'Llama 2', 'GPT-2'


@pytest.fixture(scope='module', params=KINDS)
def vocabulary(request, tokenizer, folder):
  """One vocabulary of each kind, and its ids of bytes or of any tokens."""
  if request.param == 'sentencepiece':
    return tokenizer
  tokenizers = pytest.importorskip('tokenizers')
  if request.param == 'GPT-2':
    texts = ['the 🙂 語 🙃 grün 語語', 'a b', '🙂 🙂🙃']
    return Tokenizer(small_vocabulary.byte_level(folder, texts)[0])
  strip = tokenizers.decoders.Strip(' ', 1, 0)
  path = folder / f'{request.param}.json'
  strips = [strip] if request.param == 'Llama 2' else []
  small_vocabulary.byte_fallback(path, *strips)
  return Tokenizer(path, '</s>')


WORDS = ['🙂', '語b', 'a 🙂 b', 'the dog. Ω', '\n\n', '  a', 'grün', '\ufffd']


def outputs(tokenizer, number=400):
  """Random outputs: words, bytes that are no character, any ids; cut."""
  rng = np.random.default_rng(0)
  for _ in range(number):
    ids = []
    while len(ids) < 20:
      if rng.random() < 0.5:
        ids += tokenizer.encode(str(rng.choice(WORDS)))
      else:
        most = rng.choice([260, tokenizer.vocab_size + 3])
        ids += rng.integers(0, most, rng.integers(1, 4)).tolist()
    stops = rng.choice(['b', 'the', '語', '\n', '🙂', 'a '], rng.integers(1, 3))
    yield ids[: rng.integers(1, 21)], list(map(str, stops)), rng.integers(0, 6)


def streamed(text, ids, step):
  """What is sent of an output whose tokens arrive `step` at a time."""
  sent = ''
  for at in range(0, len(ids), step):
    text.extend(ids[at : at + step])
    assert text.ready.startswith(sent)
    sent = text.ready
    if text.stop_end is not None:
      break
  assert text.end().startswith(sent)
  return text.end()


def test_text_that_was_sent_never_changes(vocabulary, request):
  """However many tokens come at once, and wherever an output is cut."""
  wrong = 0
  for ids, stops, least in outputs(vocabulary):
    whole = decode(vocabulary, ids)
    # A control: with only a last character held back it would.
    for length in range(len(ids)):
      sent = decode(vocabulary, ids[:length]).rstrip('\ufffd')
      wrong += not whole.startswith(sent)
    for step in (1, 3):
      assert streamed(Text(vocabulary), ids, step) == whole, ids
    texts = {streamed(Text(vocabulary, stops, least), ids, n) for n in (1, 20)}
    (text,) = texts
    assert whole.startswith(text)
    early = Text(vocabulary)
    early.extend(ids[:least])
    for stop in stops:  # one that ends among the first tokens does not count
      at = max(len(early.ready) + 1 - len(stop), 0)
      assert len(ids) <= least or stop not in text[at:], (ids, stops, least)
  kind = request.node.callspec.params['vocabulary']
  assert bool(wrong) == (kind in ('Gemma', 'Llama 2'))


def test_tokens_joined_are_the_text(vocabulary):
  for ids, _, _ in outputs(vocabulary):
    pieces, text = Text(vocabulary).pieces_of(ids), decode(vocabulary, ids)
    assert len(pieces) == len(ids)
    assert ''.join(piece.text for piece in pieces) == text, ids
    assert joined(piece.name for piece in pieces) == text, ids
    data = bytes(byte for piece in pieces for byte in piece.bytes)
    assert data.decode() == text
    ends = [piece.end for piece in pieces]
    assert ends == sorted(ends)


def test_a_stream_that_breaks_says_so(tokenizer):
  ids = tokenizer.encode('the dog')
  model = chain(ids)
  table = model.params['table'].at[ids[-1]].set(np.nan)
  broken = model.params | {'table': table}
  models = Model(model, broken), Model(model, model.params)
  engine = Engine(*models, tokenizer=tokenizer, gamma=1, max_decode_len=12)
  with pytest.raises(ValueError, match=f'NaN.* token {len(ids) + 1}'):
    list(engine.stream('a'))
