"""Byte-level BPE: round trips, both kinds of files, the engine."""

import importlib.util
import pathlib

import pytest

from specdec_jax.engine import Engine, Model
from specdec_jax.testing import random_markov
from specdec_jax.tokenizer_bpe import BpeTokenizer

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('tokenizers') is None,
  reason="needs tokenizers: pip install -e '.[bpe]'",
)
END = '<|endoftext|>'
TEXTS = ['the red dog', ' the dog', 'grün 5€ 😀\n\ta', END, '']


@pytest.fixture(scope='module')
def trained(folder):
  """A folder with tokenizer.json, and one with the files of GPT-2."""
  import tokenizers

  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  made.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=[END],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  made.train_from_iterator(['the red dog', 'the red dogs'] * 9, trainer)
  one, two = folder / 'one', folder / 'two'
  one.mkdir()
  two.mkdir()
  made.save(str(one / 'tokenizer.json'))
  made.model.save(str(two))
  return one, two


@pytest.mark.parametrize('kind', [0, 1], ids=['tokenizer.json', 'vocab.json'])
def test_round_trip(trained, kind):
  tokenizer = BpeTokenizer(trained[kind])
  encoded = tokenizer.encode_batch(TEXTS)
  assert encoded == [tokenizer.encode(text) for text in TEXTS]
  assert [tokenizer.decode(ids) for ids in encoded] == TEXTS
  assert len(encoded[0]) < len(TEXTS[0])  # there are merges
  # What looks like a special token is text.
  assert tokenizer.eos_id not in encoded[3]
  assert max(map(max, filter(None, encoded))) < tokenizer.vocab_size
  assert tokenizer.decode([*encoded[0], tokenizer.eos_id]) == TEXTS[0]
  with pytest.raises(ValueError, match='outside the vocabulary'):
    tokenizer.decode([tokenizer.vocab_size])


def test_both_kinds_of_files_agree(trained):
  one, two = map(BpeTokenizer, trained)
  assert one.encode_batch(TEXTS) == two.encode_batch(TEXTS)
  assert one.vocab_size == two.vocab_size
  assert one.eos_id == two.eos_id == 0
  assert one.fingerprint != two.fingerprint  # other bytes
  assert one.fingerprint == BpeTokenizer(one.path).fingerprint
  file = pathlib.Path(one.path, 'tokenizer.json')
  assert BpeTokenizer(file).fingerprint == one.fingerprint


@pytest.mark.usefixtures('own_cache')
def test_engine(trained):
  tokenizer = BpeTokenizer(trained[0])
  chain = random_markov(0, tokenizer.vocab_size)
  side = Model(chain, chain.params, tokenizer)
  engine = Engine(side, side, tokenizer=tokenizer, gamma=2, max_decode_len=12)
  done = engine.generate(['the red dog'])[0]
  ids = [token for token in done.tokens if token != tokenizer.eos_id]
  assert done.tokens and done.text == tokenizer.decode(ids)
  pieces = list(engine.stream('the red dog'))
  assert ''.join(pieces) == done.text


@pytest.mark.parametrize('content', ['', '{}', '{"version": "1.0"'])
def test_broken_files(tmp_path, content):
  (tmp_path / 'tokenizer.json').write_text(content)
  with pytest.raises(ValueError, match='not a whole vocabulary'):
    BpeTokenizer(tmp_path)


def test_missing_files(tmp_path, trained):
  with pytest.raises(ValueError, match=r'vocab\.json: No such file'):
    BpeTokenizer(tmp_path)
  with pytest.raises(ValueError, match='Expected tokenizer.json'):
    BpeTokenizer(tmp_path / 'nowhere')
  with pytest.raises(ValueError, match="no token '<eos>'"):
    BpeTokenizer(trained[0], eos_token='<eos>')
