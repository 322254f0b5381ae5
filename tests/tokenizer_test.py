"""The tokenizer: special ids, round trips, broken model files."""

import pytest

import small_vocabulary
from specdec_jax.text import tokenizer

pytest.importorskip('sentencepiece')

WORDS = 'the a cat dog sees likes big small house tree and or runs to old new'
SENTENCES = [
  f'{a} {b} {c} {d}.'
  for a in WORDS.split()[:2]
  for b in WORDS.split()
  for c in WORDS.split()
  for d in WORDS.split()[::4]
]


@pytest.fixture(scope='module')
def path(tmp_path_factory):
  path = tmp_path_factory.mktemp('vocabulary') / 'vocab.model'
  tokenizer.train_tokenizer(SENTENCES, path, vocab_size=285)
  return path


def test_special_ids(path):
  made = tokenizer.Tokenizer(path)
  assert (made.pad_id, made.eos_id, made.unk_id) == (0, 1, 2)
  assert made.vocab_size == 285


@pytest.mark.parametrize('text', ['the cat sees a tree.', 'Größe 雪 ☃', ''])
def test_round_trip_by_byte_fallback(path, text):
  made = tokenizer.Tokenizer(path)
  ids = made.encode(text)
  assert made.decode(ids) == text
  assert not {0, 1, 2} & set(ids)
  assert made.encode_batch([text, text]) == [ids, ids]


def test_padding_and_end_give_no_text(path):
  made = tokenizer.Tokenizer(path)
  ids = made.encode('a dog runs.')
  assert made.decode([*ids, 1, 0, 0]) == 'a dog runs.'


@pytest.mark.parametrize('token', [-1, 285])
def test_id_outside_the_vocabulary(path, token):
  with pytest.raises(ValueError, match=f'{token} is outside .* of 285'):
    tokenizer.Tokenizer(path).decode([5, token])


def test_training_is_deterministic(path, tmp_path):
  again = tokenizer.train_tokenizer(SENTENCES, tmp_path / 'v', vocab_size=285)
  assert again.fingerprint == tokenizer.Tokenizer(path).fingerprint
  other = tokenizer.train_tokenizer(SENTENCES, tmp_path / 'w', vocab_size=280)
  assert again.fingerprint != other.fingerprint


def test_too_many_pieces(tmp_path):
  with pytest.raises(ValueError, match='No vocabulary of 8000 pieces'):
    tokenizer.train_tokenizer(SENTENCES, tmp_path / 'v')
  assert not list(tmp_path.iterdir())


# MADLAD-400's file calls its padding <s>.
@pytest.mark.parametrize('special', [{}, {'bos_id': 1, 'pad_id': -1}])
def test_special_ids_of_others(tmp_path, special):
  small_vocabulary.train_as_madlad(tmp_path / 'v', **special)
  made = tokenizer.Tokenizer(tmp_path / 'v')
  assert (made.pad_id, made.eos_id, made.unk_id) == (0, 2, 0)
  ids = made.encode('the old house')
  assert not {0, 1, 2} & set(ids)
  assert made.decode([*ids, 2, 0, 0]) == 'the old house'


@pytest.mark.parametrize(
  'special, words',
  [
    ({'unk_id': 1, 'pad_id': -1}, r'piece .+ as id 0 and end-of-sequence id 2'),
    ({'eos_id': -1}, "'<unk>' as id 0 and end-of-sequence id -1"),
  ],
)
def test_special_ids_that_cannot_be(tmp_path, special, words):
  small_vocabulary.train_as_madlad(tmp_path / 'v', **special)
  with pytest.raises(ValueError, match=words):
    tokenizer.Tokenizer(tmp_path / 'v')


def test_missing_file(tmp_path):
  with pytest.raises(ValueError, match='No tokenizer model .*No such file'):
    tokenizer.Tokenizer(tmp_path / 'none.model')


@pytest.mark.parametrize('kept', [0, 100, 3000])
def test_truncated_file(path, tmp_path, kept):
  broken = tmp_path / 'vocab.model'
  broken.write_bytes(path.read_bytes()[:kept])
  with pytest.raises(ValueError, match=f'{kept} bytes.* not a whole'):
    tokenizer.Tokenizer(broken)


def test_other_file(tmp_path):
  broken = tmp_path / 'vocab.model'
  broken.write_bytes(b'this is no model' * 100)
  with pytest.raises(ValueError, match='not a whole sentencepiece model'):
    tokenizer.Tokenizer(broken)
