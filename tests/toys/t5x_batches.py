"""Batches as T5X gives them to a model."""

import numpy as np

LENGTH, EOS = 12, 1


def batch(rows=3, num_inputs=7, length=LENGTH, vocab_size=40):
  """One short input; an ended prompt, one of L - 1 tokens, and a part."""
  rng = np.random.default_rng(0)
  inputs = rng.integers(2, vocab_size, (rows, num_inputs), np.int32)
  inputs[1, 3 * num_inputs // 8 :] = 0
  prompt, part = np.zeros((rows, length), np.int32), 3 * length // 8
  prompt[0, 1:4] = 17, 30, EOS
  prompt[1, 1:] = rng.integers(2, vocab_size, length - 1)
  prompt[2, 1 : part + 1] = rng.integers(2, vocab_size, part)
  return {'encoder_input_tokens': inputs, 'decoder_input_tokens': prompt}
