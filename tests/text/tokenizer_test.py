"""Vocabularies: every kind of file, and what is no vocabulary."""

import json
import pathlib
import shutil
import types

import pytest

import small_vocabulary
import specdec_jax
from folders import save_folder
from small_vocabulary import END, as_tokenizer_json
from specdec_jax.checkpoints.config_json import SpecialIds
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.pair import check_vocabulary_size
from specdec_jax.models.model import Model
from specdec_jax.text import tokenizer
from specdec_jax.text.tasks import LocalTask
from specdec_jax.text.tokenizer import Tokenizer, contradiction
from specdec_jax.training.data import PackedBatches, PackingConfig

SIZE = small_vocabulary.VOCAB_SIZE
# T5's sentinels follow, and in the folders below two added tokens.
FIRST, LAST = SIZE + 99, SIZE


@pytest.fixture(scope='module')
def path(_tokenizer):
  return pathlib.Path(_tokenizer.path)


@pytest.fixture(scope='module')
def bpe(folder):
  """One vocabulary as tokenizer.json, and as the files of GPT-2."""
  return small_vocabulary.byte_level(folder)


@pytest.fixture(scope='module')
def m2m(folder):
  return small_vocabulary.m2m(folder / 'm2m')


def as_folder(path, folder, **files):
  """A folder with a sentencepiece model, and JSON files by their names."""
  folder.mkdir(exist_ok=True)
  shutil.copy(path, folder / 'spiece.model')
  for name, value in files.items():
    (folder / f'{name}.json').write_text(json.dumps(value))
  return folder


@pytest.fixture(scope='module')
def kinds(path, folder):
  """One vocabulary with two added tokens, in every kind of folder."""
  added = {'<hl>': FIRST + 1, '<sep>': FIRST + 2}
  special = {'<hl>': False, '<sep>': True}
  decoder = {i: {'content': x, 'special': special[x]} for x, i in added.items()}
  config = {'added_tokens_decoder': decoder, 'extra_ids': 100}
  return (
    as_tokenizer_json(path, folder / 'json', added),
    as_folder(path, folder / 'added', added_tokens=added),
    as_folder(path, folder / 'decoder', tokenizer_config=config),
  )


@pytest.fixture(scope='module')
def vocabularies(path, kinds, bpe, m2m, folder):
  """One of every kind -> its padding, end and unknown token."""
  small_vocabulary.train_as_madlad(folder / 'v', bos_id=1, pad_id=-1)
  return {
    path: (0, 1, 2),
    **dict.fromkeys(kinds, (0, 1, None)),
    folder / 'v': (0, 2, 0),  # MADLAD-400's file calls its padding <s>
    **dict.fromkeys(bpe, (0, 0, 0)),
    m2m: (0, 2, 3),
  }


def test_every_kind_goes_there_and_back(vocabularies, m2m):
  """Byte fallback, or bytes, have any text; M2M-100 has what it knows."""
  for place, (pad, eos, unk) in vocabularies.items():
    made = Tokenizer(place)
    assert (made.pad_id, made.eos_id) == (pad, eos), place
    assert unk is None or made.unk_id == unk
    texts = ['the red dog', 'a cat', '']
    if place != m2m:
      texts += ['Größe 雪 ☃', 'grün 5€ 😀']
    encoded = made.encode_batch(texts)
    assert encoded == [made.encode(text) for text in texts]
    for ids, text in zip(encoded, texts, strict=True):
      assert made.decode([*ids, eos, *[pad] * 2]) == text, place
      assert not {pad, eos, made.unk_id} & {*ids}
    for token in (-1, made.vocab_size + 200):
      words = f'{token} is outside .* of {made.vocab_size}'
      with pytest.raises(ValueError, match=words):
        made.decode([*encoded[0], token])


def test_training_is_deterministic(path, tmp_path):
  again = small_vocabulary.train(tmp_path)
  assert again.fingerprint == Tokenizer(path).fingerprint
  with pytest.raises(ValueError, match='No vocabulary of 8000 pieces'):
    tokenizer.train_tokenizer(small_vocabulary.sentences(), tmp_path / 'w')
  assert not (tmp_path / 'w').exists()


ADDED_TOKENS = {
  'the<hl> cat': ['the', FIRST + 1, 'cat'],
  'a <sep>\nbig  <sep>': ['a', FIRST + 2, 'big', FIRST + 2],
  'The <extra_id_0> dog <extra_id_99>': ['The', FIRST, 'dog', LAST],
  'tree</s> the': ['tree', 1, 'the'],
  '<pad>': [0],
  '<extra_id_100> <HL> \u2603': ['<extra_id_100> <HL> \u2603'],
  '': [],
}


def test_kinds_of_files_mean_the_same_ids(kinds, path):
  alone, plain = Tokenizer(path), Tokenizer(path, split_special_tokens=True)
  for folder in kinds:
    made = Tokenizer(folder)
    for text, want in ADDED_TOKENS.items():
      parts = (plain.encode(x) if isinstance(x, str) else [x] for x in want)
      ids = [token for part in parts for token in part]
      assert made.encode(text) == ids and made.whole(text) == [*ids, 1]
    assert (made.before, made.after) == ([], [1])
    assert made.fingerprint == alone.fingerprint
    assert not contradiction(made, alone)
    assert (made.vocab_size, made.eos_id, made.pad_id) == (FIRST + 3, 1, 0)
    ids = [*alone.encode('the cat'), FIRST, *alone.encode('sees')]
    ids += [FIRST + 1, FIRST + 2, 1]
    hidden = '' if made.decode([FIRST + 2]) == '' else '<sep>'
    assert made.decode(ids) == f'the cat<extra_id_0> sees<hl>{hidden}'
    every = Tokenizer(folder, skip_special_tokens=False)
    assert every.decode(ids) == 'the cat<extra_id_0> sees<hl><sep></s>'
    none = Tokenizer(folder, skip_special_tokens=True)
    assert none.decode(ids) == f'the cat sees<hl>{hidden}'
    assert none.decode([FIRST, *alone.encode('the cat')]) == 'the cat'


def test_sentinels_of_a_file_are_those_that_the_network_has(path):
  """Only the network says whether they are there, in T5X's checkpoints too."""
  made = Tokenizer(path)
  text = 'the <extra_id_0>'
  assert made.encode(text)[-1] == FIRST and made.vocab_size == SIZE
  wide, narrow = made.for_network(512), made.for_network(SIZE)
  assert wide.encode(text)[-1] == FIRST and wide.vocab_size == FIRST + 1
  assert narrow.decode(narrow.encode(text)) == text
  assert narrow.vocab_size == SIZE
  # Its control tokens are none of a text, as in seqio.
  assert made.decode(made.encode('the </s>')) == 'the </s>'


def test_names_of_bpe_are_tokens_or_text(bpe):
  one, two = map(Tokenizer, bpe)
  assert one.encode(END) == two.encode(END) == [one.eos_id]
  for folder in bpe:
    plain = Tokenizer(folder, split_special_tokens=True)
    assert plain.eos_id not in plain.encode(END)
    assert plain.decode(plain.encode(END)) == END
  assert one.encode(' the dogs') == two.encode(' the dogs')
  assert len(one.encode('the red dog')) < 11  # there are merges
  file = pathlib.Path(one.path, 'tokenizer.json')
  prints = {made.fingerprint for made in (one, two, Tokenizer(file))}
  assert prints == {one.fingerprint}
  with pytest.raises(ValueError, match="eos_token for .* got '<eos>'"):
    Tokenizer(bpe[0], eos_token='<eos>')


def edited(bpe, folder, change):
  """The vocabulary with something changed in its tokenizer.json."""
  content = json.loads((bpe[0] / 'tokenizer.json').read_text('utf-8'))
  change(content, content['model']['vocab'], content['added_tokens'])
  path = folder / 'tokenizer.json'
  path.write_text(json.dumps(content, indent=1), 'utf-8')
  return Tokenizer(path)


def rewrite(content, vocab, added):
  """As other versions of the packages write the same."""
  model = content['model']
  model['vocab'] = dict(reversed(vocab.items()))
  model['continuing_subword_prefix'] = model['end_of_word_suffix'] = ''
  added[0]['normalized'] = True
  content['decoder']['trim_offsets'] = False


def lower(content, vocab, added):
  content['normalizer'] = {'type': 'Lowercase'}
  added.append(added[0] | {'id': 268, 'content': '<hl>'})


def swap_ids(content, vocab, added):
  vocab['a'], vocab['b'] = vocab['b'], vocab['a']


def end_last(content, vocab, added):
  """Gives the end of sequence the last id, and '!' the first."""
  vocab[END], vocab['!'] = vocab['!'], 0
  added[0]['id'] = vocab[END]


def test_a_fingerprint_is_of_what_ids_mean(bpe, tmp_path):
  first = Tokenizer(bpe[0])
  for change in (rewrite, lower):
    same = edited(bpe, tmp_path, change)
    assert same.fingerprint == first.fingerprint, change
    assert not contradiction(same, first)
  other = edited(bpe, tmp_path, swap_ids)
  assert other.fingerprint != first.fingerprint
  assert "is 'a' and 'b'" in contradiction(first, other)


def test_which_files_are_taken(bpe, path, tmp_path):
  shutil.copy(path, tmp_path / 'spiece.model')
  assert Tokenizer(tmp_path).fingerprint == Tokenizer(path).fingerprint
  shutil.copy(bpe[0] / 'tokenizer.json', tmp_path)
  with pytest.raises(ValueError, match='two vocabularies: id 0'):
    Tokenizer(tmp_path)
  for name in ('none.model', 'none.json'):
    with pytest.raises(ValueError, match=f'could be read .*{name}'):
      Tokenizer(tmp_path / name)


def test_a_t5_with_the_vocabulary_of_roberta(tmp_path):
  """CodeT5: what is around a text is the same at every door."""
  names = ('<pad>', '<s>', '</s>', '<unk>', '<mask>')
  _, folder = small_vocabulary.byte_level(tmp_path, special=names)
  config = {'cls_token': '<s>', 'sep_token': '</s>', 'eos_token': '</s>'}
  config |= {'tokenizer_class': 'RobertaTokenizer', 'pad_token': '<pad>'}
  (folder / 'tokenizer_config.json').write_text(json.dumps(config))
  vocabulary = Tokenizer(folder)
  network = small_vocabulary.network(1, vocabulary.vocab_size + 3)
  save_folder(folder, network, 0, ids=SpecialIds(0, (2,), 0))
  engine = Engine(specdec_jax.load(folder), max_input_len=32, max_decode_len=8)
  inner = vocabulary.encode('the red dog')
  whole = [1, *inner, 2]
  assert engine.codec.input_ids('the red dog') == whole
  assert engine.codec.input_ids(whole) == engine.codec.input_ids(inner) == whole
  assert engine.codec.output_ids('the red dog') == whole
  path = tmp_path / 'a.tsv'
  path.write_text('the red dog\tthe dogs\n')
  (example,) = LocalTask('a', {'test': path}, folder).examples('test')
  assert example['inputs'].tolist() == whole
  assert example['targets'].tolist() == engine.codec.output_ids('the dogs')
  packing = PackingConfig((1.0,), (32,), eos_id=vocabulary.eos_id)
  (batch,) = PackedBatches([(whole[:-1], [3])], packing).epoch()
  assert batch.inputs[0, 0, : len(whole)].tolist() == whole


def test_an_encoder_refuses_text_as_its_padding(bpe, tmp_path):
  """T5's encoder skips id 0; a decoder-only model reads it."""
  swapped = edited(bpe, tmp_path, end_last)
  network = small_vocabulary.network(1, swapped.vocab_size)
  model = Model(network, small_vocabulary.weights(network, 0))
  with pytest.raises(ValueError, match="id 0 in .*got '!'"):
    Engine(model, tokenizer=swapped)
  decoder = small_vocabulary.decoder_only()
  params = small_vocabulary.weights(decoder, 0)
  Engine(Model(decoder, params), tokenizer=swapped)


def test_m2m_languages_follow_the_ids_of_the_second_file(m2m, tmp_path):
  made = Tokenizer(m2m)
  ids = json.loads((m2m / 'vocab.json').read_text())
  pieces = {number: piece for piece, number in ids.items()}
  encoded = made.encode('a cat')
  assert ''.join(pieces[i] for i in encoded) == '\u2581a\u2581cat'
  languages = made.languages
  assert [*languages.values()] == [*range(len(ids), made.vocab_size)]
  assert len(languages) == 100 and [*languages][::99] == ['af', 'zu']
  assert made.decode([languages['en'], *encoded]) == 'a cat'  # have no text
  other = Tokenizer(small_vocabulary.m2m(tmp_path, language_codes='wmt21'))
  assert list(other.languages) == 'en ha is ja cs ru zh de'.split()
  assert other.fingerprint != made.fingerprint
  with pytest.raises(ValueError, match="'m2m100', 'wmt21'"):
    Tokenizer(small_vocabulary.m2m(tmp_path, language_codes='all'))


def test_ids_of_a_network_for_a_vocabulary():
  """Those of T5 and MADLAD-400; not mT5's with T5's pieces, nor too few."""

  def check(pieces, ids):
    sizes = dict(vocab_size=pieces, least_size=pieces, pieces={})
    check_vocabulary_size('draft', ids, types.SimpleNamespace(**sizes))

  check(32_000, 32_128)
  check(256_000, 256_512)
  for pieces, ids in ((32_000, 250_112), (8_001, 8_000)):
    words = f"draft's vocabulary: .*'s {pieces} ids.* got {ids}"
    with pytest.raises(ValueError, match=words):
      check(pieces, ids)


PART, JSON = 'all', 'as JSON'
SPIECE, FILE, VOCAB = 'spiece.model', 'tokenizer.json', 'vocab.json'
CONFIG, ADDED = 'tokenizer_config.json', 'added_tokens.json'
DECODER, M2M = 'added_tokens_decoder', 'sentencepiece.bpe.model'
X = {400: {'content': 'x'}}
# Files of a folder, and what the error names. A number stands for as many bytes
# of a sentencepiece model, PART for all of them, JSON for the same vocabulary
# with an unknown kind of a field.
BAD = [
  ({}, 'expected tokenizer.json, spiece.model or vocab.json'),
  ({SPIECE: 100}, 'spiece.model.: 100 bytes'),
  ({SPIECE: PART, ADDED: {'<hl>': 'x'}}, "added_tokens.*'<hl>': .* got 'x'"),
  ({SPIECE: PART, ADDED: {'<hl>': 7}}, "'<hl>': expected id 7 .* as id 7"),
  ({SPIECE: PART, CONFIG: '{'}, CONFIG),
  ({SPIECE: PART, CONFIG: {DECODER: {'7': 'x'}}}, f"{DECODER}.* {{'7': 'x'}}"),
  ({SPIECE: PART, CONFIG: {DECODER: X}, ADDED: {'y': 400}}, "'x' .*, got 'y'"),
  ({FILE: '{"version": "1.0"'}, 'tokenizer.json'),
  ({FILE: (JSON, 'model')}, "tokenizer.json.*field 'model'"),
  ({FILE: (JSON, 'pre_tokenizer')}, "field 'pre_tokenizer'"),
  ({VOCAB: {'a': 0}}, 'merges.txt.*No such file'),
  ({M2M: PART, VOCAB: '{'}, VOCAB),
  ({M2M: PART, VOCAB: {'<s>': 0, '<pad>': 1, '</s>': 2, '<unk>': 9}}, VOCAB),
]


@pytest.mark.parametrize('bad, words', BAD)
def test_a_folder_that_is_no_vocabulary(path, tmp_path, bad, words):
  whole = path.read_bytes()
  for name, data in bad.items():
    if isinstance(data, tuple):
      as_tokenizer_json(path, tmp_path)
      new = {data[1]: {'type': 'New'}}
      data = json.loads((tmp_path / name).read_text()) | new
    text = json.dumps(data) if isinstance(data, dict) else str(data)
    size = len(whole) if data == PART else data
    is_part = isinstance(size, int)
    (tmp_path / name).write_bytes(whole[:size] if is_part else text.encode())
  with pytest.raises(ValueError, match=words):
    Tokenizer(tmp_path)


def test_special_ids_that_are_refused(tmp_path):
  swapped = {'unk_id': 1, 'pad_id': -1}, r'id 0 .* got .*, 2\]'
  for special, words in swapped, ({'eos_id': -1}, r'end of sequence.*, -1\]'):
    small_vocabulary.train_as_madlad(tmp_path / 'w', **special)
    with pytest.raises(ValueError, match=words):
      Tokenizer(tmp_path / 'w')


# BART's kin; tests/parity has more of them.


def described(folder, name, model_type, ids=types.MappingProxyType({}), **said):
  folder.mkdir()
  small_vocabulary.sentencepiece_of(
    folder / name, vocab_size=50, hard_vocab_limit=False, **ids
  )
  (folder / 'config.json').write_text(json.dumps({'model_type': model_type}))
  (folder / 'tokenizer_config.json').write_text(json.dumps(said))
  return folder


def test_mbart_has_its_language_behind_or_before(tmp_path):
  for kind, count, last in ('MBart', 25, True), ('MBart50', 52, False):
    said = {'tokenizer_class': f'{kind}Tokenizer'}
    made = Tokenizer(described(tmp_path / kind, M2M, 'mbart', **said))
    first = made.languages['ar_AR']
    assert [*made.languages.values()] == [*range(first, first + count)]
    assert made.language_last == last and (made.eos_id, made.after) == (2, [2])
    assert made.decode([first, *made.encode('a cat'), 2]) == 'a cat'


def test_pegasus_moves_its_pieces(tmp_path):
  ids = dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
  one = 'spiece.model', 'pegasus'
  made = Tokenizer(described(tmp_path / 'one', *one, ids))
  first = '<pad> </s> <mask_1> <mask_2> <unk_2>'
  assert [made.pieces[i] for i in range(5)] == first.split()
  assert min(made.encode('a cat')) > 105
  assert made.decode([*made.encode('a cat'), 1]) == 'a cat'
  with pytest.raises(ValueError, match='first pieces: expected <pad>'):
    Tokenizer(described(tmp_path / 'two', *one))


def test_marian_reads_by_one_model_and_writes_by_another(tmp_path):
  folder = described(tmp_path / 'one', 'source.spm', 'marian')
  model = small_vocabulary.sentencepiece_of(
    folder / 'target.spm', ['und'], vocab_size=50, hard_vocab_limit=False
  )
  pieces = [model.id_to_piece(i) for i in range(3, model.vocab_size())]
  names = ['</s>', '<unk>', *pieces, '>>fra<<', '<pad>']
  ids = {name: i for i, name in enumerate(names)}
  (folder / 'vocab.json').write_text(json.dumps(ids))
  made = Tokenizer(folder)
  code, *rest = made.inputs.encode('>>fra<< a cat')
  assert code == names.index('>>fra<<') and rest == made.inputs.encode('a cat')
  assert made.inputs.encode('>>xyz<< a')[0] == 1
  assert made.decode([*rest, 0]) == 'a cat'
  (folder / 'source.spm').unlink()
  with pytest.raises(ValueError, match='source.spm'):
    Tokenizer(folder)
