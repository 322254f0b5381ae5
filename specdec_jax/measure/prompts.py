"""The texts that a measurement can decode."""

from collections.abc import Callable

from specdec_jax.text.lines import Line, count_tokens, read_inputs
from specdec_jax.text.local_tasks import LocalTask

SPLIT = 'test'  # the split of a task that is read


def read_prompts(
  source: str | LocalTask,
  count: Callable[[str], int],
  limit: int | None = None,
) -> list[str]:
  """Returns the texts that can be decoded, in their order.

  Args:
    source: path of UTF-8 text, one prompt per line, see `lines.read_lines`; or
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
    lines = [Line(text) for text in read_inputs(source)]
  else:
    name = str(source.files.get(SPLIT))
    # A text with several references is there several times.
    texts = dict.fromkeys(one['inputs'] for one in source.texts(SPLIT))
    lines = [Line(text) for text in texts]
  counted = count_tokens(lines, count, limit)
  # Empty texts are left out: any output may follow, which says little about a
  # pair.
  found = [
    line.text
    for line in counted
    if line.text and line.num_tokens and not line.error
  ]
  if not found:
    most = '' if limit is None else f' of at most {limit} tokens per line'
    raise ValueError(
      f'{name!r} has no line that can be decoded: expected UTF-8 text{most},'
      f' found {len(lines)} lines that are empty or too long.'
    )
  return found
