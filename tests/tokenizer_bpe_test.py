"""Byte-level BPE: round trips, both kinds of files, the engine."""

import json
import pathlib
import shutil

import pytest

import small_vocabulary
import specdec_jax
from specdec_jax.checkpoints import huggingface
from specdec_jax.checkpoints.config_json import SpecialIds
from specdec_jax.engine.engine import Engine
from specdec_jax.models.model import Model
from specdec_jax.text.local_tasks import LocalTask
from specdec_jax.text.tokenizer import Tokenizer, contradiction
from specdec_jax.training.data import PackedBatches, PackingConfig, TokenPairs

END = '<|endoftext|>'
TEXTS = ['the red dog', ' the dog', 'grün 5€ 😀\n\ta', END, '']


def train(folder, texts=('the red dog', 'the red dogs'), special=(END,)):
  """A folder with tokenizer.json, and one with the files of GPT-2."""
  import tokenizers

  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  made.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=[*special],
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


def test_round_trip(trained):
  """Both kinds of files agree."""
  for folder in trained:
    tokenizer = Tokenizer(folder)
    encoded = tokenizer.encode_batch(TEXTS)
    assert encoded == [tokenizer.encode(text) for text in TEXTS]
    assert encoded == Tokenizer(trained[0]).encode_batch(TEXTS)
    texts = [tokenizer.decode(ids) for ids in encoded]
    assert texts == [*TEXTS[:3], '', '']
    assert len(encoded[0]) < len(TEXTS[0])  # there are merges
    # The name of a special token is that token, or text if so asked.
    assert encoded[3] == [tokenizer.eos_id] == [0]
    plain = Tokenizer(folder, split_special_tokens=True)
    assert tokenizer.eos_id not in plain.encode(END)
    assert plain.decode(plain.encode(END)) == END
    with pytest.raises(ValueError, match='outside the vocabulary'):
      tokenizer.decode([tokenizer.vocab_size])
  one, two = map(Tokenizer, trained)
  assert one.vocab_size == two.vocab_size
  assert one.fingerprint == two.fingerprint
  file = pathlib.Path(one.path, 'tokenizer.json')
  assert Tokenizer(file).fingerprint == one.fingerprint
  with pytest.raises(ValueError, match="eos_token for .* got '<eos>'"):
    Tokenizer(trained[0], eos_token='<eos>')


def edited(trained, folder, change):
  """The vocabulary with something changed in its tokenizer.json."""
  said = json.loads((trained[0] / 'tokenizer.json').read_text('utf-8'))
  change(said)
  path = folder / 'tokenizer.json'
  path.write_text(json.dumps(said, indent=1), 'utf-8')
  return Tokenizer(path)


def rewrite(said):
  """As other versions of the packages write the same."""
  model = said['model']
  model['vocab'] = dict(reversed(model['vocab'].items()))
  model['continuing_subword_prefix'] = model['end_of_word_suffix'] = ''
  said['added_tokens'][0]['normalized'] = True
  said['decoder']['trim_offsets'] = False


def swap_ids(said):
  vocab = said['model']['vocab']
  vocab['a'], vocab['b'] = vocab['b'], vocab['a']


def lower(said):
  said['normalizer'] = {'type': 'Lowercase'}


def add_token(said):
  said['added_tokens'].append(
    said['added_tokens'][0] | {'id': 268, 'content': '<hl>'}
  )


def test_a_fingerprint_is_of_what_ids_mean(trained, tmp_path):
  tokenizer = Tokenizer(trained[0])
  for change in (rewrite, lower, add_token):
    same = edited(trained, tmp_path, change)
    assert same.fingerprint == tokenizer.fingerprint, change
    assert not contradiction(same, tokenizer)
  other = edited(trained, tmp_path, swap_ids)
  assert other.fingerprint != tokenizer.fingerprint
  assert "is 'a' and 'b'" in contradiction(tokenizer, other)


def test_which_files_are_taken(trained, tokenizer, tmp_path):
  one, two = trained
  for path in (one, two, str(one / 'tokenizer.json')):
    assert Tokenizer(path).path == str(path)
  shutil.copy(tokenizer.path, tmp_path / 'spiece.model')
  for path in (tokenizer.path, tmp_path):
    assert Tokenizer(path).fingerprint == tokenizer.fingerprint
  shutil.copy(one / 'tokenizer.json', tmp_path)
  with pytest.raises(ValueError, match='two vocabularies: id 0'):
    Tokenizer(tmp_path)
  with pytest.raises(ValueError, match='No tokenizer model .*none.model'):
    Tokenizer(tmp_path / 'none.model')
  with pytest.raises(ValueError, match='No vocabulary could be .*none.json'):
    Tokenizer(tmp_path / 'none.json')


def test_a_t5_with_the_vocabulary_of_roberta(tmp_path):
  """CodeT5: what is around a text is the same at every door."""
  names = ('<pad>', '<s>', '</s>', '<unk>', '<mask>')
  _, folder = train(tmp_path, special=names)
  said = {'cls_token': '<s>', 'sep_token': '</s>', 'eos_token': '</s>'}
  said |= {'tokenizer_class': 'RobertaTokenizer', 'pad_token': '<pad>'}
  (folder / 'tokenizer_config.json').write_text(json.dumps(said))
  vocabulary = Tokenizer(folder)
  network = small_vocabulary.network(1, vocabulary.vocab_size + 3)
  params = small_vocabulary.weights(network, 0)
  ids = SpecialIds(0, (2,), 0)
  huggingface.save_huggingface(folder, network.config, params, ids=ids)
  engine = Engine(specdec_jax.load(folder), max_input_len=32, max_decode_len=8)
  inner = vocabulary.encode('the red dog')
  whole = [1, *inner, 2]
  assert engine.input_ids('the red dog') == whole
  assert engine.input_ids(whole) == engine.input_ids(inner) == whole
  assert engine.output_ids('the red dog') == whole
  assert engine.score(['a'], ['the']) == engine.score(
    ['a'], [[1, *vocabulary.encode('the'), 2]]
  )
  path = tmp_path / 'a.tsv'
  path.write_text('the red dog\tthe dogs\n')
  (example,) = LocalTask('a', {'test': path}, folder).examples('test')
  assert example['inputs'].tolist() == whole
  assert example['targets'].tolist() == engine.output_ids('the dogs')
  pairs = TokenPairs.from_lists([whole[:-1]], [[3]])
  packing = PackingConfig((1.0,), (32,), eos_id=vocabulary.eos_id)
  (batch,) = PackedBatches(pairs, packing).epoch()
  assert batch.inputs[0, 0, : len(whole)].tolist() == whole


def test_an_encoder_refuses_text_as_its_padding(trained, tmp_path):
  """T5's encoder skips id 0; a decoder-only model reads it."""
  swapped = edited(trained, tmp_path, end_last)
  size = swapped.vocab_size
  network = small_vocabulary.network(1, size)
  model = Model(network, small_vocabulary.weights(network, 0))
  with pytest.raises(ValueError, match="id 0 in .*got '!'"):
    Engine(model, tokenizer=swapped)
  decoder = small_vocabulary.decoder_only(1)
  Engine(
    Model(decoder, small_vocabulary.weights(decoder, 0)), tokenizer=swapped
  )


def end_last(said):
  """Gives the end of sequence the last id, and '!' the first."""
  vocab = said['model']['vocab']
  vocab[END], vocab['!'] = vocab['!'], 0
  said['added_tokens'][0]['id'] = vocab[END]
