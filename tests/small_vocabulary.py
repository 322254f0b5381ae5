"""A small vocabulary and network; JAX's cache kept apart."""

import contextlib

import jax

from specdec_jax import tokenizer as tokenizer_lib
from specdec_jax.models.t5 import T5, T5Config

WORDS = 'the a red blue old house tree dog cat runs sleeps sings here there'
VOCAB_SIZE = 288  # 256 bytes, 3 special pieces, and some of the text


def train(folder):
  """A tokenizer of `VOCAB_SIZE` pieces, its file in `folder`."""
  words = WORDS.split()
  sentences = [
    ' '.join(words[(i * k) % len(words)] for k in range(1, 6))
    for i in range(300)
  ]
  return tokenizer_lib.train_tokenizer(
    sentences, folder / 'vocab.model', VOCAB_SIZE
  )


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


@contextlib.contextmanager
def own_compilation_cache(folder):
  """What is compiled inside goes to `folder`; leaves JAX as it was."""
  before = jax.config.values['jax_compilation_cache_dir']
  jax.config.update('jax_compilation_cache_dir', str(folder / 'xla'))
  try:
    yield
  finally:
    jax.config.update('jax_compilation_cache_dir', before)
