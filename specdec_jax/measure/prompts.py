"""The texts that a measurement can decode."""

import math
from collections.abc import Callable

from specdec_jax.text.tasks import LocalTask, read_inputs

SPLIT = 'test'  # the split of a task that is read


def read_prompts(
  source: str | LocalTask,
  count: Callable[[str], int],
  limit: int | None = None,
) -> list[str]:
  """Returns the texts that can be decoded, in their order.

  Args:
    source: path of UTF-8 text, one prompt per line, see `tasks.read`; or
      a task, whose inputs of the split 'test' are taken, each text once.
    count: counts the tokens of a text, such as `Engine.num_input_tokens`.
    limit: the most tokens of a text; longer texts are left out. None is no
      limit.

  Raises:
    ValueError: the file cannot be read, a line of it is not UTF-8 or has more
      than `files.MAX_LINE` bytes, or no line can be decoded.
  """
  if isinstance(source, str):
    name = source
    texts = read_inputs(source)
  else:
    name = str(source.files.get(SPLIT))
    # A text with several references is there several times.
    inputs = [example['inputs'] for example in source.texts(SPLIT)]
    texts = list(dict.fromkeys(inputs))
  # Empty texts are left out: any output may follow, which says little about a
  # pair.
  most_tokens = math.inf if limit is None else limit
  usable = [text for text in texts if text and 0 < count(text) <= most_tokens]
  if not usable:
    most = '' if limit is None else f' of at most {limit} tokens per line'
    raise ValueError(
      f'{name!r} has no line that can be decoded: expected UTF-8 text{most},'
      f' got {len(texts)} lines that are empty or too long.'
    )
  return usable
