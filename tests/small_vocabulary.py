"""A small vocabulary, and JAX's cache kept apart; shared by tests of text."""

import contextlib

import jax

from specdec_jax import tokenizer as tokenizer_lib

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


@contextlib.contextmanager
def own_compilation_cache(folder):
  """What is compiled inside goes to `folder`; leaves JAX as it was."""
  before = jax.config.values['jax_compilation_cache_dir']
  jax.config.update('jax_compilation_cache_dir', str(folder / 'xla'))
  try:
    yield
  finally:
    jax.config.update('jax_compilation_cache_dir', before)
