"""The lines of a file that a measurement can decode."""

from specdec_jax.infer.lines import count_tokens, read_lines
from specdec_jax.tokenizer import Tokenizer


def read_prompts(
  path: str, tokenizer: Tokenizer, limit: int | None = None
) -> list[str]:
  """Returns the lines that can be decoded, in their order.

  Args:
    path: UTF-8 text, one prompt a line.
    tokenizer: of the model.
    limit: tokens of a line, its end included; longer ones are left out. None is
      no limit.

  Raises:
    ValueError: the file cannot be read, or no line of it can be decoded.
  """
  lines = read_lines(path)
  counted = count_tokens(lines, tokenizer, limit)
  texts = [line.text for line in counted if line.num_tokens and not line.error]
  if not texts:
    most = '' if limit is None else f' of at most {limit} tokens a line'
    raise ValueError(
      f'{path!r} has no line that can be decoded: expected UTF-8 text{most},'
      f' found {len(lines)} lines that are empty, too long or not UTF-8.'
    )
  return texts
