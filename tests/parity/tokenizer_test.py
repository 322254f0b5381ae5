"""Ids and texts of each family's vocabulary are those of transformers."""

import functools
import json
import os
import random
import shutil
import unicodedata

import pytest

import parity
import small_vocabulary
from folders import write_vocabulary
from repository import SHARED
from small_vocabulary import sentences
from specdec_jax.text.tokenizer import Tokenizer

pytestmark = parity.MARKS
T5_VOCAB = SHARED / 'data' / 'vocab' / 't5.spiece.model'
ADDED = ['<hl>', '<sep>', '{', '}', '<think>']
# What public reports had in their texts.
PARTS = [
  *('the red dog', ' The', 'cat\n', '\n\n', '\t', '  ', '{', '}', "it's", 'x1'),
  *('<extra_id_0>', '<extra_id_99>', '<extra_id_1>,', '<hl>', ' <sep>', '<HL>'),
  *('<think>', '</s>', '<s>', '<pad>', '<unk>', '<bos>', '<eos>', '<|im_end|>'),
  *('<|endoftext|>', 'eng_Latn', '\ufb01\u2460', 'e\u0301', '\u00e9', '\u200b'),
  *('\u3000', '\U0001f642', '\u8a9e', '\u2581', '.', ', ', '12 345', ' '),
]


def texts():
  draw = random.Random(0)
  sizes = (draw.randint(2, 8) for _ in range(200))
  return ['', *PARTS, *(''.join(draw.choices(PARTS, k=n)) for n in sizes)]


T5_KIND = {'tokenizer_class': 'T5Tokenizer'}
T5_IDS = {'pad_id': 0, 'eos_id': 1, 'unk_id': 2, 'bos_id': -1}


def unigram(folder, name='sentencepiece.bpe.model', **options):
  """A folder with a sentencepiece model like that of XLM-R."""
  folder.mkdir(parents=True)
  options = {'vocab_size': 70, 'hard_vocab_limit': False} | options
  more = ['is { 1 } 2 3 4 5 x ,.']
  small_vocabulary.sentencepiece_of(folder / name, more, **options)
  return folder


def t5(folder):
  if os.path.exists(T5_VOCAB):
    folder.mkdir(parents=True)
    shutil.copy(T5_VOCAB, folder / 'spiece.model')
  else:
    unigram(folder, 'spiece.model', **T5_IDS)
  return settings(folder, 't5')


def settings(folder, model_type, **said):
  (folder / 'config.json').write_text(json.dumps({'model_type': model_type}))
  if said:
    (folder / 'tokenizer_config.json').write_text(json.dumps(said))
  return folder


def saved(folder, tokenizer, model_type):
  """What `save_pretrained` writes."""
  tokenizer.save_pretrained(folder)
  return settings(folder, model_type)


def resaved(old, kind, model_type):
  """A family whose folder transformers has read, and saved."""

  def family(folder):
    import transformers

    made = getattr(transformers, kind).from_pretrained(old(folder / 'before'))
    return saved(folder / 'after', made, model_type)

  return family


def flan(folder):
  import transformers

  made = transformers.AutoTokenizer.from_pretrained(t5(folder / 'before'))
  token = functools.partial(transformers.AddedToken, normalized=False)
  made.add_tokens([*map(token, ADDED)])
  made.add_special_tokens({'additional_special_tokens': ['<|im_end|>']})
  return saved(folder / 'after', made, 't5')


def old_flan(folder):
  """As transformers 4 wrote it: spiece.model and added_tokens_decoder."""
  t5(folder)
  size = Tokenizer(folder / 'spiece.model').vocab_size
  sentinels = [f'<extra_id_{i}>' for i in range(100)]
  names = {'pad_token': '<pad>', 'eos_token': '</s>', 'unk_token': '<unk>'}
  special = [*names.values(), *[None] * (size - 3), *sentinels[::-1]]
  decoder = {
    i: {'content': name, 'special': i < size + 100, 'normalized': False}
    for i, name in enumerate([*special, *ADDED])
    if name
  }
  said = {'added_tokens_decoder': decoder, 'extra_ids': 100}
  said |= {'additional_special_tokens': sentinels}
  return settings(folder, 't5', **T5_KIND, **said, **names)


def mt5(folder):
  own = [f'\u2581<extra_id_{i}>' for i in range(99, -1, -1)]
  options = T5_IDS | {'user_defined_symbols': own, 'vocab_size': 170}
  unigram(folder, 'spiece.model', **options)
  said = {'extra_ids': 0, 'additional_special_tokens': None}
  return settings(folder, 'mt5', **T5_KIND, **said)


def umt5(folder):
  import transformers

  made = transformers.AutoTokenizer.from_pretrained(mt5(folder / 'before'))
  after = saved(folder / 'after', made, 'umt5')
  said = json.loads((after / 'tokenizer_config.json').read_text())
  said['tokenizer_class'] = 'TokenizersBackend'  # as transformers asks for
  return settings(after, 'umt5', **said)


def bpe(special, alphabet):
  """A vocabulary and merges."""
  import tokenizers

  cut, text = tokenizers.pre_tokenizers.Metaspace(), sentences() * 3
  made = small_vocabulary.trained_bpe(cut, text, special, [*alphabet], 600)
  model = json.loads(made.to_str())['model']
  return model['vocab'], [tuple(merge) for merge in model['merges']]


def byte_level(folder, special=()):
  """A folder with vocab.json and merges.txt."""
  folder.mkdir(parents=True)
  return small_vocabulary.byte_level(folder, sentences(), special)[1]


ROBERTA = dict(
  bos_token='<s>', eos_token='</s>', unk_token='<unk>', sep_token='</s>',
  cls_token='<s>', pad_token='<pad>', mask_token='<mask>',
  tokenizer_class='RobertaTokenizer',
)  # fmt: skip


def old_codet5(folder):
  names = ['<pad>', '<s>', '</s>', '<unk>', '<mask>']
  return settings(byte_level(folder, names), 't5', **ROBERTA)


def old_qwen(folder):
  folder = byte_level(folder)
  size = len(json.loads((folder / 'vocab.json').read_text()))
  names = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
  decoder = {
    size + i: {'content': name, 'special': i < 3}
    for i, name in enumerate([*names, '<think>'])
  }
  said = {'eos_token': '<|im_end|>', 'pad_token': '<|endoftext|>'}
  said |= {'bos_token': None, 'add_bos_token': False}
  said |= {'tokenizer_class': 'Qwen2Tokenizer'}
  return settings(folder, 'qwen2', added_tokens_decoder=decoder, **said)


def gemma(folder):
  import transformers

  names = ['<pad>', '<eos>', '<bos>', '<unk>', '<mask>', '<|im_end|>']
  special = [*names, *(f'<0x{i:02X}>' for i in range(256))]
  vocab, merges = bpe(special, '\u2581\n\t{}')
  made = transformers.GemmaTokenizer(vocab, merges, add_bos_token=True)
  made.add_special_tokens({'additional_special_tokens': ['<|im_end|>']})
  return saved(folder / 'one', made, 'gemma3_text')


def nllb(folder):
  import transformers

  vocab, merges = bpe(['<s>', '<pad>', '</s>', '<unk>'], '\u2581.,')
  more = {'extra_special_tokens': ['deu_Latn', 'eng_Latn']}
  made = transformers.NllbTokenizer(vocab, merges, **more)
  return saved(folder / 'one', made, 'm2m_100')


def old_bart(folder):
  names = ['<s>', '<pad>', '</s>', '<unk>', '<mask>']
  return settings(byte_level(folder, names), 'bart')


def old_mbart(folder, kind='MBartTokenizer'):
  said = {'tokenizer_class': kind, 'mask_token': '<mask>'}
  return settings(unigram(folder), 'mbart', **said)


def old_mbart50(folder):
  return old_mbart(folder, 'MBart50Tokenizer')


def plbart(folder):
  return settings(unigram(folder), 'plbart', tokenizer_class='PLBartTokenizer')


def old_pegasus(folder):
  folder = unigram(folder, 'spiece.model', **T5_IDS)
  # As the folders of Google have them; the defaults are the other way round.
  masks = {'mask_token': '<mask_1>', 'mask_token_sent': '<mask_2>'}
  masks['tokenizer_class'] = 'PegasusTokenizer'
  return settings(folder, 'pegasus', **masks)


def marian(folder, own=False):
  """As transformers' `MarianTokenizer` reads it."""
  folder.mkdir(parents=True)
  known = {}
  for name, more in (('source.spm', 'is 1 2'), ('target.spm', 'und { 3 }')):
    model = small_vocabulary.sentencepiece_of(
      folder / name, [more] * 9, vocab_size=50, hard_vocab_limit=False
    )
    pieces = map(model.id_to_piece, range(3, model.vocab_size()))
    known[name] = {*pieces}
  source, target = known.values()
  if not own:
    source = target = source | target
  files = {'vocab.json': source, 'target_vocab.json': target}
  for name, pieces in files.items():
    some = sorted(pieces)[2:]  # two pieces have no id
    every = ['</s>', '<unk>', *some, *['>>fra<<'] * (not own), '<pad>']
    if own or name == 'vocab.json':
      numbers = {piece: number for number, piece in enumerate(every)}
      (folder / name).write_text(json.dumps(numbers))
  said = {'source_lang': 'eng', 'target_lang': 'mul', 'separate_vocabs': own}
  return settings(folder, 'marian', tokenizer_class='MarianTokenizer', **said)


def own_marian(folder):
  return marian(folder, own=True)


def llama(folder):
  folder.mkdir(parents=True)
  said = {'bos_token': '<bos>', 'eos_token': '<turn>'}
  said['tokenizer_class'] = 'PreTrainedTokenizerFast'
  return settings(write_vocabulary(folder, '<bos>', **said), 'llama', **said)


FAMILIES = [
  *(t5, flan, old_flan, mt5, umt5, old_codet5),
  *(gemma, nllb, llama, old_qwen, old_bart),
]
FAMILIES = {family.__name__: family for family in FAMILIES} | {
  'codet5': resaved(old_codet5, 'RobertaTokenizer', 't5'),
  'qwen': resaved(old_qwen, 'Qwen2Tokenizer', 'qwen3'),
  'bart': resaved(old_bart, 'BartTokenizer', 'bart'),
  'mbart': resaved(old_mbart, 'MBartTokenizer', 'mbart'),
  'mbart50': resaved(old_mbart50, 'MBart50Tokenizer', 'mbart'),
  'pegasus': resaved(old_pegasus, 'PegasusTokenizer', 'pegasus'),
}


@pytest.mark.filterwarnings('ignore')  # those of transformers
@pytest.mark.parametrize('family', FAMILIES)
def test_ids_and_texts(family, tmp_path):
  import transformers

  folder = FAMILIES[family](tmp_path / family)
  theirs = transformers.AutoTokenizer.from_pretrained(folder)
  skips = True, False
  kinds = {x: Tokenizer(folder, skip_special_tokens=x) for x in skips}
  ours = kinds[True]
  names = {'eng_Latn', 'en_XX'} & ours.languages.keys()
  first, last = [ours.languages[name] for name in names], []
  if ours.language_last:
    first, last = last, first
  for text in texts():
    want = theirs(text).input_ids
    have = [*first, *ours.before, *ours.encode(text), *ours.after, *last]
    assert have == want, text
    for skip, made in kinds.items():
      said = theirs.decode(want, skip_special_tokens=skip)
      assert made.decode(want) == said, (text, skip)


def test_m2m_without_a_tokenizer_json(tmp_path):
  import transformers

  made = Tokenizer(small_vocabulary.m2m(tmp_path))
  known = made.languages
  options = {'additional_special_tokens': [f'__{name}__' for name in known]}
  options['src_lang'] = 'en'
  theirs = transformers.M2M100Tokenizer.from_pretrained(made.path, **options)
  assert known == {name: theirs.get_lang_id(name) for name in known}
  for text in texts():
    want = theirs(text).input_ids
    assert [known['en'], *made.encode(text), made.eos_id] == want, text
    shown = theirs.decode(want, skip_special_tokens=True)  # and stripped
    assert made.decode(want).strip() == shown


PIECES = old_mbart, old_mbart50, plbart, old_pegasus, marian, own_marian
# sentencepiece itself and transformers' copies of it do not read alike a blank
# at an end, more than one, and those around the name of a special token.
_NAMES = ('</s>', '<s>', '<pad>', '<unk>')
PLAIN = [x.strip() for x in PARTS if len(x.strip()) > 1 and x not in _NAMES]


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('family', PIECES, ids=lambda one: one.__name__)
def test_ids_and_texts_of_sentencepiece(family, tmp_path):
  import transformers

  folder = family(tmp_path / family.__name__)
  said = json.loads((folder / 'tokenizer_config.json').read_text())
  kind = getattr(transformers, said['tokenizer_class'])
  theirs, ours = kind.from_pretrained(folder), Tokenizer(folder)
  draw, language = random.Random(0), []
  if ours.languages:
    language = [ours.languages['en_XX']]
    theirs.src_lang = 'en_XX' if family is not plbart else '__en_XX__'
  for number in range(200):
    text = ' '.join(draw.choices(PLAIN, k=draw.randint(1, 8)))
    if family is old_mbart:  # transformers 5 leaves this one's NFKC out
      text = unicodedata.normalize('NFKC', text)
    if family is marian and number % 2:
      text = f'>>fra<< {text}'
    want = theirs(text).input_ids
    have = [*ours.inputs.before, *ours.inputs.encode(text), *ours.after]
    have = have + language if ours.language_last else language + have
    assert have == want, text
    shown = theirs.decode(want, skip_special_tokens=True)
    if family is own_marian:
      want = theirs(text_target=text).input_ids
      shown = theirs.decode(want, skip_special_tokens=True)
      assert [*ours.encode(text), *ours.after] == want, text
    assert ours.decode(want).strip() == shown.strip(), text
