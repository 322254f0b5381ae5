"""Byte-level BPE: round trips, both kinds of files, the engine."""

import importlib.util
import json
import pathlib
import shutil

import pytest

from specdec_jax.engine.engine import Engine
from specdec_jax.models.model import Model
from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.text.tokenizer_bpe import BpeTokenizer
from specdec_jax.text.vocabulary import open_vocabulary
from toy_models import random_markov

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('tokenizers') is None,
  reason="needs tokenizers: pip install 'specdec_jax[bpe]'",
)
END = '<|endoftext|>'
TEXTS = ['the red dog', ' the dog', 'grün 5€ 😀\n\ta', END, '']


def train(folder, texts=('the red dog', 'the red dogs')):
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
  made.train_from_iterator([*texts] * 9, trainer)
  one, two = folder / 'one', folder / 'two'
  one.mkdir()
  two.mkdir()
  made.save(str(one / 'tokenizer.json'))
  made.model.save(str(two))
  return one, two


@pytest.fixture(scope='module')
def trained(folder):
  """The two folders of `train`."""
  return train(folder)


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
  assert one.fingerprint == two.fingerprint
  file = pathlib.Path(one.path, 'tokenizer.json')
  assert BpeTokenizer(file).fingerprint == one.fingerprint


def edited(trained, folder, change):
  """The vocabulary with something changed in its tokenizer.json."""
  said = json.loads((trained[0] / 'tokenizer.json').read_text('utf-8'))
  change(said)
  path = folder / 'tokenizer.json'
  path.write_text(json.dumps(said, indent=1), 'utf-8')
  return BpeTokenizer(path)


def rewrite(said):
  """As other versions of the packages write the same."""
  model = said['model']
  model['vocab'] = dict(reversed(model['vocab'].items()))
  model['merges'] = [
    merge if isinstance(merge, str) else ' '.join(merge)
    for merge in model['merges']
  ]
  model['continuing_subword_prefix'] = model['end_of_word_suffix'] = ''
  said['added_tokens'][0]['normalized'] = True
  said['decoder']['trim_offsets'] = False
  said['truncation'] = {
    'direction': 'Right',
    'max_length': 9,
    'strategy': 'LongestFirst',
    'stride': 0,
  }


def swap_ids(said):
  vocab = said['model']['vocab']
  vocab['a'], vocab['b'] = vocab['b'], vocab['a']


def drop_merge(said):
  said['model']['merges'].pop()


def add_space(said):
  said['pre_tokenizer']['add_prefix_space'] = True


def lower(said):
  said['normalizer'] = {'type': 'Lowercase'}


def test_a_fingerprint_is_of_what_decides_ids(trained, tmp_path):
  tokenizer = BpeTokenizer(trained[0])
  same = edited(trained, tmp_path, rewrite)
  assert same.fingerprint == tokenizer.fingerprint
  assert same.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
  texts = [*TEXTS, 'ab', 'the red dogs', 'The']
  found = {tokenizer.fingerprint}
  for change in (swap_ids, drop_merge, add_space, lower):
    other = edited(trained, tmp_path, change)
    assert other.encode_batch(texts) != tokenizer.encode_batch(texts), change
    found.add(other.fingerprint)
  assert len(found) == 5


def test_open_vocabulary_knows_both_kinds(trained, tokenizer, tmp_path):
  one, two = trained
  for path in (one, two, str(one / 'tokenizer.json')):
    found = open_vocabulary(path)
    assert type(found) is BpeTokenizer
    assert found.path == str(path)
  # A folder of T5's has a tokenizer.json as well, which is no BPE.
  shutil.copy(tokenizer.path, tmp_path / 'spiece.model')
  shutil.copy(one / 'tokenizer.json', tmp_path)
  for path in (tokenizer.path, tmp_path):
    found = open_vocabulary(path)
    assert type(found) is Tokenizer
    assert found.fingerprint == tokenizer.fingerprint
  with pytest.raises(ValueError, match='No tokenizer model .*none.model'):
    open_vocabulary(tmp_path / 'none.model')
  with pytest.raises(ValueError, match='No vocabulary could be .*none.json'):
    open_vocabulary(tmp_path / 'none.json')
  (tmp_path / 'empty').mkdir()
  with pytest.raises(ValueError, match='empty.*no spiece.model, tokenizer.js'):
    open_vocabulary(tmp_path / 'empty')


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
