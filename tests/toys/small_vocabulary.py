"""Small vocabularies of every kind of file, and a small network."""

import io
import json

import jax
import numpy as np

from specdec_jax.models.gpt import GPT, GPTConfig
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.text import tokenizer as tokenizer_lib

WORDS = 'the a red blue old house tree dog cat runs sleeps sings here there'
VOCAB_SIZE = 288  # 256 bytes, 3 special pieces, and some of the text


def sentences():
  words = WORDS.split()
  return [
    ' '.join(words[(i * k) % len(words)] for k in range(1, 6))
    for i in range(300)
  ]


def train(folder):
  """A tokenizer of `VOCAB_SIZE` pieces, its file in `folder`."""
  return tokenizer_lib.train_tokenizer(
    sentences(), folder / 'vocab.model', VOCAB_SIZE
  )


def sentencepiece_of(path, more=(), **options):
  """Writes a sentencepiece model of the sentences, and of more."""
  import sentencepiece

  proto = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter([*sentences(), *more]),
    model_writer=proto,
    minloglevel=2,
    **options,
  )
  path.write_bytes(proto.getvalue())
  return sentencepiece.SentencePieceProcessor(model_proto=proto.getvalue())


def train_as_madlad(path, **special):
  """Writes a vocabulary with MADLAD-400's special ids, or with those given."""
  ids = {'unk_id': 0, 'pad_id': 1, 'eos_id': 2, 'bos_id': -1} | special
  sentencepiece_of(path, vocab_size=VOCAB_SIZE, byte_fallback=True, **ids)


def m2m(folder, **settings):
  """A folder as transformers' `M2M100Tokenizer` reads it."""
  folder.mkdir(exist_ok=True)
  model = sentencepiece_of(
    folder / 'sentencepiece.bpe.model',
    model_type='bpe',
    vocab_size=60,
    hard_vocab_limit=False,
  )
  pieces = [model.id_to_piece(i) for i in range(model.vocab_size())]
  special = ['<s>', '<pad>', '</s>', '<unk>']
  # Another order than the model's, and one piece that has no id.
  known = special + sorted({*pieces[:-1]} - {*special})
  ids = {piece: number for number, piece in enumerate(known)}
  (folder / 'vocab.json').write_text(json.dumps(ids))
  named = {'language_codes': 'm2m100', 'tokenizer_class': 'M2M100Tokenizer'}
  (folder / 'tokenizer_config.json').write_text(json.dumps(named | settings))
  return folder


END = '<|endoftext|>'


def trained_bpe(pre_tokenizer, texts, special=(), alphabet=(), size=300, **bpe):
  """A tokenizer of the package tokenizers."""
  import tokenizers

  made = tokenizers.Tokenizer(tokenizers.models.BPE(**bpe))
  made.pre_tokenizer = pre_tokenizer
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=size,
    special_tokens=[*special],
    initial_alphabet=[*alphabet],
    show_progress=False,
  )
  made.train_from_iterator(texts, trainer)
  return made


def byte_level(folder, texts=('the red dog', 'the red dogs'), special=(END,)):
  """A folder with tokenizer.json, and one with the files of GPT-2."""
  import tokenizers

  level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  made = trained_bpe(level, [*texts] * 9, special, level.alphabet())
  made.decoder = tokenizers.decoders.ByteLevel()
  one, two = folder / 'one', folder / 'two'
  one.mkdir()
  two.mkdir()
  made.save(str(one / 'tokenizer.json'))
  made.model.save(str(two))
  return one, two


def as_tokenizer_json(path, folder, added=()):
  """The pieces of a T5's sentencepiece model as transformers 5 saves them."""
  import sentencepiece
  import tokenizers

  model = sentencepiece.SentencePieceProcessor(model_file=str(path))
  pieces = [
    (model.id_to_piece(i), model.get_score(i)) for i in range(len(model))
  ]
  names = [f'<extra_id_{i}>' for i in reversed(range(100))]
  pieces += [(name, 0.0) for name in names]
  unigram = tokenizers.models.Unigram(pieces, 2, byte_fallback=True)
  made = tokenizers.Tokenizer(unigram)
  parts, kinds = tokenizers.pre_tokenizers, tokenizers.decoders
  blanks = [parts.WhitespaceSplit(), parts.Metaspace()]
  made.pre_tokenizer = parts.Sequence(blanks)
  made.decoder = kinds.Sequence([kinds.ByteFallback(), kinds.Metaspace()])
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


def byte_fallback(path, *decoders):
  """Writes a tokenizer.json as Gemma's: characters, else bytes, ▁ for blanks.

  Args:
    path: the file.
    *decoders: what follows in the decoder, such as Llama 2's strip of a blank.
  """
  import tokenizers

  bytes_ = [f'<0x{value:02X}>' for value in range(256)]
  pieces = ['▁', '▁▁', '▁the', 'dog', 'a', 'b', '▁a', '🙂', '. ', '\ufffd']
  pieces = ['<pad>', '</s>', '<unk>', *bytes_, *pieces]
  ids = {piece: number for number, piece in enumerate(pieces)}
  made = tokenizers.Tokenizer(
    tokenizers.models.BPE(ids, [], byte_fallback=True, unk_token='<unk>')
  )
  made.normalizer = tokenizers.normalizers.Replace(' ', '▁')
  kinds = tokenizers.decoders
  made.decoder = kinds.Sequence(
    [kinds.Replace('▁', ' '), kinds.ByteFallback(), kinds.Fuse(), *decoders]
  )
  made.add_special_tokens(['<pad>', '</s>'])
  made.save(str(path))


def network(num_decoder_layers: int, vocab_size: int = VOCAB_SIZE) -> T5:
  """A T5 1.1 that compiles in no time."""
  layers = {'num_encoder_layers': 1, 'num_decoder_layers': num_decoder_layers}
  return T5(T5Config(vocab_size, 16, 2, **layers, head_dim=8, mlp_dim=32))


def decoder_only() -> GPT:
  """A decoder-only network of that width, with one layer."""
  return GPT(GPTConfig(VOCAB_SIZE, 16, 2, 1, head_dim=8, mlp_dim=32))


def weights(network, seed: int):
  """Random ones that NumPy draws: nothing is compiled."""
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    if path[-1].key == 'scale':
      return np.ones(leaf.shape, np.float32)
    spread = leaf.shape[0] ** -0.5 if path[-1].key == 'kernel' else 1.0
    return spread * rng.standard_normal(leaf.shape, np.float32)

  shapes = jax.eval_shape(network.init, jax.random.key(0))
  return jax.tree_util.tree_map_with_path(draw, shapes)


def make_texts(count, seed=0):
  """Ragged; one in four needs the wider of two input buckets."""
  rng = np.random.default_rng(seed)
  words = WORDS.split()
  sizes = rng.integers(1, 8, count)
  sizes[::4] += 20
  return [' '.join(rng.choice(words, size)) for size in sizes]


def joined(names):
  """The text of tokens as a client has them, some of them as bytes."""
  data = b''
  for name in names:
    if name.startswith('bytes:'):
      data += bytes.fromhex(name.removeprefix('bytes:').replace('\\x', ''))
    else:
      data += name.encode()
  return data.decode()
