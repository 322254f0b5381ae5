"""M2M-100's vocabulary: pieces of one file, ids of another."""

import io
import json
import pathlib

import pytest
import sentencepiece

from small_vocabulary import sentences
from specdec_jax.text.tokenizer import Tokenizer

SPECIAL = ['<s>', '<pad>', '</s>', '<unk>']  # in this order, as M2M-100's
TEXTS = [
  'The red dog sings here',
  '',
  'a cat </s> __de__',
  'no\u00ebl 12',
  ' x  y',
]


def write(folder, **said):
  """A folder as transformers' `M2M100Tokenizer` reads it."""
  folder.mkdir(exist_ok=True)
  proto = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(sentences()),
    model_writer=proto,
    model_type='bpe',
    vocab_size=60,
    hard_vocab_limit=False,
    minloglevel=2,
  )
  (folder / 'sentencepiece.bpe.model').write_bytes(proto.getvalue())
  model = sentencepiece.SentencePieceProcessor(model_proto=proto.getvalue())
  pieces = [model.id_to_piece(i) for i in range(model.vocab_size())]
  # Another order than the model's, and one piece that has no id.
  known = SPECIAL + sorted(set(pieces[:-1]) - set(SPECIAL))
  ids = {piece: number for number, piece in enumerate(known)}
  (folder / 'vocab.json').write_text(json.dumps(ids))
  said = {
    'language_codes': 'm2m100',
    'tokenizer_class': 'M2M100Tokenizer',
  } | said
  (folder / 'tokenizer_config.json').write_text(json.dumps(said))
  return folder


@pytest.fixture(scope='module')
def vocabulary(folder):
  return Tokenizer(write(folder / 'm2m'))


def test_ids_are_those_of_the_second_file(vocabulary):
  assert isinstance(vocabulary, Tokenizer)
  ids = json.loads(pathlib.Path(vocabulary.path, 'vocab.json').read_text())
  encoded = vocabulary.encode('the dog')
  pieces = {number: piece for piece, number in ids.items()}
  assert ''.join(pieces[i] for i in encoded) == '\u2581the\u2581dog'
  model = sentencepiece.SentencePieceProcessor(
    f'{vocabulary.path}/sentencepiece.bpe.model'
  )
  assert encoded != model.encode('the dog')  # Control: they are not its own.
  assert vocabulary.decode([*encoded, vocabulary.eos_id]) == 'the dog'
  assert vocabulary.encode_batch(TEXTS) == [vocabulary.encode(t) for t in TEXTS]


def test_languages_follow_and_have_no_text(vocabulary):
  assert len(vocabulary.languages) == 100
  first = min(vocabulary.languages.values())
  assert vocabulary.languages['af'] == first
  assert vocabulary.languages['zu'] == first + 99 == vocabulary.vocab_size - 1
  english = vocabulary.languages['en']
  assert vocabulary.decode([english, *vocabulary.encode('a cat')]) == 'a cat'
  with pytest.raises(ValueError, match='outside the vocabulary'):
    vocabulary.decode([vocabulary.vocab_size])


def test_what_transformers_has(vocabulary):
  transformers = pytest.importorskip('transformers')
  languages = vocabulary.languages
  theirs = transformers.M2M100Tokenizer.from_pretrained(
    vocabulary.path,
    src_lang='en',
    tgt_lang='de',
    additional_special_tokens=[f'__{name}__' for name in languages],
  )
  assert languages == {name: theirs.get_lang_id(name) for name in languages}
  for text in TEXTS:
    want = theirs(text).input_ids
    have = [languages['en'], *vocabulary.encode(text), vocabulary.eos_id]
    assert have == want, text
    said = theirs.decode(want, skip_special_tokens=True)  # and stripped
    assert vocabulary.decode(want).strip() == said


def test_another_list_of_languages(vocabulary, tmp_path):
  other = Tokenizer(write(tmp_path / 'wmt', language_codes='wmt21'))
  assert list(other.languages) == 'en ha is ja cs ru zh de'.split()
  assert other.fingerprint != vocabulary.fingerprint
  with pytest.raises(ValueError, match="'m2m100', 'wmt21'"):
    Tokenizer(write(tmp_path / 'other', language_codes='all'))
