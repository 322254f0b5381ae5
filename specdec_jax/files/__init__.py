"""Files and folders, here or in a bucket: lines, whole writes, checks."""

from specdec_jax.files.reading import (
  MAX_LINE,
  MAX_PIPE,
  MAX_PIPE_LINES,
  MAX_RATIO,
  BrokenOff,
  TextLine,
  check_all_regular,
  check_regular,
  check_size,
  lines,
  open_regular,
  read_json,
  read_small,
  text_lines,
  until_broken,
  writable,
)
from specdec_jax.files.writing import (
  check_writable,
  make_folder,
  write_atomically,
  write_json,
)

__all__ = [
  'BrokenOff',
  'MAX_LINE',
  'MAX_PIPE',
  'MAX_PIPE_LINES',
  'MAX_RATIO',
  'TextLine',
  'check_all_regular',
  'check_regular',
  'check_size',
  'check_writable',
  'lines',
  'make_folder',
  'open_regular',
  'read_json',
  'read_small',
  'text_lines',
  'until_broken',
  'writable',
  'write_atomically',
  'write_json',
]
