"""A small vocabulary and network."""

import io

import jax
import numpy as np

from specdec_jax.engine.engine import Engine
from specdec_jax.models.gpt import GPT, GPTConfig
from specdec_jax.models.model import Model
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


def train_as_madlad(path, **special):
  """Writes a vocabulary with MADLAD-400's special ids, or with those given."""
  import sentencepiece

  proto = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(sentences()),
    model_writer=proto,
    vocab_size=VOCAB_SIZE,
    byte_fallback=True,
    minloglevel=2,
    **({'unk_id': 0, 'pad_id': 1, 'eos_id': 2, 'bos_id': -1} | special),
  )
  path.write_bytes(proto.getvalue())


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
  return T5(
    T5Config(
      vocab_size=vocab_size,
      emb_dim=16,
      num_heads=2,
      head_dim=8,
      num_encoder_layers=1,
      num_decoder_layers=num_decoder_layers,
      mlp_dim=32,
    )
  )


def decoder_only(num_layers: int) -> GPT:
  """A decoder-only network of that width."""
  return GPT(GPTConfig(VOCAB_SIZE, 16, 2, num_layers, head_dim=8, mlp_dim=32))


def weights(network, seed: int):
  """Random ones for a process that is to start soon: nothing is compiled."""
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    if path[-1].key == 'scale':
      return np.ones(leaf.shape, np.float32)
    spread = leaf.shape[0] ** -0.5 if path[-1].key == 'kernel' else 1.0
    return spread * rng.standard_normal(leaf.shape, np.float32)

  shapes = jax.eval_shape(network.init, jax.random.key(0))
  return jax.tree_util.tree_map_with_path(draw, shapes)


def engine_with_itself(tokenizer):
  """An engine whose target is its own drafter; outputs of 8 tokens."""
  own = network(1)
  model = Model(own, own.init(jax.random.key(0)))
  return Engine(
    model, model, tokenizer=tokenizer, max_input_len=16, max_decode_len=8
  )
