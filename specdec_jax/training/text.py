"""Lines of text as training data of decoder-only models.

Objectives and batches are those of pairs: a line is a target, and its source
is the start token alone, which every text begins with. A decoder-only model
does not look at sources; `outputs.generate_outputs` samples one text for each,
as long as `OutputsConfig.max_extra` allows.
"""

import os
from collections.abc import Sequence

from specdec_jax.files import text_lines
from specdec_jax.text.tokenizer import PAD_ID, Tokenizer
from specdec_jax.training.pairs import TokenPairs


def read_lines(path: str | os.PathLike[str]) -> list[str]:
  """The lines of a UTF-8 file, plain or `.gz`, but for empty ones.

  Raises:
    ValueError: the file cannot be read, or has no line with text.
  """
  lines = [line for line in text_lines(path) if line.strip()]
  if not lines:
    raise ValueError(f'{os.fspath(path)!r} has no line with text.')
  return lines


def tokenise_lines(lines: Sequence[str], tokenizer: Tokenizer) -> TokenPairs:
  """Each line's ids as a target, without the end that batches add."""
  # Decoders begin with id 0, which pads as well (see `losses.shift_right`).
  sources = [[PAD_ID]] * len(lines)
  return TokenPairs.from_lists(sources, tokenizer.encode_batch(list(lines)))
