"""The tokenizer: special ids, round trips, broken model files."""

import json
import shutil

import pytest

import small_vocabulary
from specdec_jax.text import tokenizer
from specdec_jax.text.tokenizer import Tokenizer, contradiction

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


def test_round_trip_by_byte_fallback(path):
  made = Tokenizer(path)
  assert (made.pad_id, made.eos_id, made.unk_id) == (0, 1, 2)
  assert made.vocab_size == 285
  for text in ('the cat sees a tree.', 'Größe 雪 ☃', ''):
    ids = made.encode(text)
    assert made.decode([*ids, 1, 0, 0]) == text
    assert not {0, 1, 2} & set(ids)
    assert made.encode_batch([text, text]) == [ids, ids]
  for token in (-1, 385):  # 285 to 384 are T5's sentinels
    with pytest.raises(ValueError, match=f'{token} is outside .* of 285'):
      made.decode([5, token])


def test_training_is_deterministic(path, tmp_path):
  again = tokenizer.train_tokenizer(SENTENCES, tmp_path / 'v', vocab_size=285)
  assert again.fingerprint == Tokenizer(path).fingerprint
  with pytest.raises(ValueError, match='No vocabulary of 8000 pieces'):
    tokenizer.train_tokenizer(SENTENCES, tmp_path / 'w')
  assert not (tmp_path / 'w').exists()


def test_special_ids_of_others(tmp_path):
  """MADLAD-400's file calls its padding <s>."""
  small_vocabulary.train_as_madlad(tmp_path / 'v', bos_id=1, pad_id=-1)
  made = Tokenizer(tmp_path / 'v')
  assert (made.pad_id, made.eos_id, made.unk_id) == (0, 2, 0)
  ids = made.encode('the old house')
  assert not {0, 1, 2} & set(ids)
  assert made.decode([*ids, 2, 0, 0]) == 'the old house'
  for special, words in (
    ({'unk_id': 1, 'pad_id': -1}, r'id 0 .* got .*, 2\]'),
    ({'eos_id': -1}, r'end of sequence.*, -1\]'),
  ):
    small_vocabulary.train_as_madlad(tmp_path / 'w', **special)
    with pytest.raises(ValueError, match=words):
      Tokenizer(tmp_path / 'w')


def as_tokenizer_json(path, folder, added=()):
  """The pieces of a T5's sentencepiece model as transformers 5 saves them."""
  import sentencepiece
  import tokenizers

  model = sentencepiece.SentencePieceProcessor(model_file=str(path))
  pieces = [
    (model.id_to_piece(i), model.get_score(i)) for i in range(len(model))
  ]
  names = [f'<extra_id_{i}>' for i in reversed(range(100))]
  made = tokenizers.Tokenizer(
    tokenizers.models.Unigram(
      [*pieces, *((name, 0.0) for name in names)], 2, byte_fallback=True
    )
  )
  space = tokenizers.pre_tokenizers.WhitespaceSplit()
  blank = tokenizers.pre_tokenizers.Metaspace()
  made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([space, blank])
  made.decoder = tokenizers.decoders.Sequence(
    [
      tokenizers.decoders.ByteFallback(),
      tokenizers.decoders.Metaspace(),
    ]
  )
  made.add_special_tokens(['<pad>', '</s>', '<unk>', *names])
  made.add_tokens(
    [tokenizers.AddedToken(name, normalized=False) for name in added]
  )
  made.post_processor = tokenizers.processors.TemplateProcessing(
    '$A </s>', special_tokens=[('</s>', 1)]
  )
  folder.mkdir(exist_ok=True)
  made.save(str(folder / 'tokenizer.json'))
  return folder


def as_folder(path, folder, **files):
  """A folder with a sentencepiece model, and JSON files by their names."""
  folder.mkdir(exist_ok=True)
  shutil.copy(path, folder / 'spiece.model')
  for name, value in files.items():
    (folder / f'{name}.json').write_text(json.dumps(value))
  return folder


@pytest.fixture(scope='module')
def kinds(path, tmp_path_factory):
  """One vocabulary with two added tokens, in every kind of folder."""
  folder = tmp_path_factory.mktemp('kinds')
  decoder = {
    385: {'content': '<hl>', 'special': False},
    386: {'content': '<sep>', 'special': True},
  }
  return {
    'tokenizer.json': as_tokenizer_json(
      path, folder / 'json', ['<hl>', '<sep>']
    ),
    'added_tokens.json': as_folder(
      path, folder / 'added', added_tokens={'<hl>': 385, '<sep>': 386}
    ),
    'added_tokens_decoder': as_folder(
      path,
      folder / 'decoder',
      tokenizer_config={'added_tokens_decoder': decoder, 'extra_ids': 100},
    ),
  }


@pytest.mark.parametrize(
  'text, want',
  [
    ('the<hl> cat', ['the', 385, 'cat']),
    ('a <sep>\nbig  <sep>', ['a', 386, 'big', 386]),
    ('The <extra_id_0> dog <extra_id_99>', ['The', 384, 'dog', 285]),
    ('tree</s> the', ['tree', 1, 'the']),
    ('<pad>', [0]),
    ('<extra_id_100> <HL> \u2603', ['<extra_id_100> <HL> \u2603']),
    ('', []),
  ],
)
def test_added_tokens_of_every_file(kinds, path, text, want):
  alone = Tokenizer(path, split_special_tokens=True)
  ids = [
    token
    for part in want
    for token in (alone.encode(part) if isinstance(part, str) else [part])
  ]
  for folder in kinds.values():
    made = Tokenizer(folder)
    assert made.encode(text) == ids
    assert made.whole(text) == [*ids, 1]
    assert (made.before, made.after) == ([], [1])


def test_kinds_of_files_mean_the_same_ids(kinds, path):
  alone = Tokenizer(path)
  for folder in kinds.values():
    made = Tokenizer(folder)
    assert made.fingerprint == alone.fingerprint
    assert not contradiction(made, alone)
    assert (made.vocab_size, made.eos_id, made.pad_id) == (387, 1, 0)
    ids = [*alone.encode('the cat'), 384, *alone.encode('sees'), 385, 386, 1]
    hidden = '' if made.decode([386]) == '' else '<sep>'
    assert made.decode(ids) == f'the cat<extra_id_0> sees<hl>{hidden}'
    every = Tokenizer(folder, skip_special_tokens=False)
    assert every.decode(ids) == 'the cat<extra_id_0> sees<hl><sep></s>'
    none = Tokenizer(folder, skip_special_tokens=True)
    assert none.decode(ids) == f'the cat sees<hl>{hidden}'
    assert none.decode([384, *alone.encode('the cat')]) == 'the cat'


def test_sentinels_of_a_file_are_those_that_the_network_has(path):
  """Only the network says whether they are there, in T5X's checkpoints too."""
  made = Tokenizer(path)
  text = 'the <extra_id_0>'
  assert made.encode(text)[-1] == 384 and made.vocab_size == 285
  wide, narrow = made.for_network(512), made.for_network(285)
  assert wide.encode(text)[-1] == 384 and wide.vocab_size == 385
  assert narrow.decode(narrow.encode(text)) == text
  assert narrow.vocab_size == 285
  # Its control tokens are none of a text, as in seqio.
  assert made.decode(made.encode('the </s>')) == 'the </s>'


PART, JSON = 'all', 'as JSON'
CONFIG, ADDED = 'tokenizer_config.json', 'added_tokens.json'
DECODER = 'added_tokens_decoder'
M2M = 'sentencepiece.bpe.model'
# Files of a folder, and what the error names. A number stands for as many bytes
# of a sentencepiece model, PART for all of them, JSON for the same vocabulary
# with an unknown kind of a field.
BAD = [
  ({}, 'expected tokenizer.json, spiece.model or vocab.json'),
  ({'spiece.model': 0}, 'spiece.model.: 0 bytes'),
  ({'spiece.model': 100}, 'spiece.model.: 100 bytes'),
  (
    {'spiece.model': PART, ADDED: {'<hl>': 'x'}},
    "added_tokens.*'<hl>': .* got 'x'",
  ),
  (
    {'spiece.model': PART, ADDED: {'<hl>': 7}},
    "'<hl>': expected id 7 .* as id 7",
  ),
  ({'spiece.model': PART, CONFIG: '{'}, CONFIG),
  (
    {'spiece.model': PART, CONFIG: {DECODER: {'7': 'x'}}},
    f"{DECODER}.* got {{'7': 'x'}}",
  ),
  (
    {
      'spiece.model': PART,
      CONFIG: {DECODER: {385: {'content': 'x'}}},
      ADDED: {'y': 385},
    },
    "id 385 in added_tokens.json: expected 'x' .*, got 'y'",
  ),
  ({'tokenizer.json': '{"version": "1.0"'}, 'tokenizer.json'),
  ({'tokenizer.json': (JSON, 'model')}, "tokenizer.json.*field 'model'"),
  ({'tokenizer.json': (JSON, 'pre_tokenizer')}, "field 'pre_tokenizer'"),
  ({'vocab.json': {'a': 0}}, 'merges.txt.*No such file'),
  ({M2M: PART, 'vocab.json': '{'}, 'vocab.json'),
  (
    {M2M: PART, 'vocab.json': {'<s>': 0, '<pad>': 1, '</s>': 2, '<unk>': 9}},
    'vocab.json',
  ),
]


@pytest.mark.parametrize('bad, words', BAD)
def test_a_folder_that_is_no_vocabulary(path, tmp_path, bad, words):
  for name, value in bad.items():
    content = value
    if value == PART:
      content = path.read_bytes()
    elif isinstance(value, int):
      content = path.read_bytes()[:value]
    elif isinstance(value, tuple):
      as_tokenizer_json(path, tmp_path)
      fields = json.loads((tmp_path / name).read_text())
      content = json.dumps(fields | {value[1]: {'type': 'New'}})
    elif not isinstance(value, str):
      content = json.dumps(value)
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(data)
  with pytest.raises(ValueError, match=words):
    Tokenizer(tmp_path)
