"""The macros of version 0.1 that have another name, which still work.

Run files agree on names now: `CHECKPOINT_PATH` is the target's, `OUTPUT_DIR`
the folder of the results, `DECODING` the ways of decoding. An old name, on the
command line or in a gin file of one's own, binds the new one; a line on stderr
says so. Where a run file has a macro of the old name, that one is meant.
"""

import functools
import sys
from collections.abc import Collection

# Old name -> the new one.
NAMES = {
  'DRAFT_PATH': 'DRAFT_CHECKPOINT_PATH',
  'INFER_OUTPUT_DIR': 'OUTPUT_DIR',
  'MODE': 'DECODING',
  'NETWORK': 'TARGET',
  'OUTPUT': 'OUTPUT_DIR',
  'TARGET_CHECKPOINT_PATH': 'CHECKPOINT_PATH',
  'TARGET_PATH': 'CHECKPOINT_PATH',
}


def new_name(name: str, used: Collection[str]) -> str:
  """The name that a macro has now.

  Args:
    name: as it was given.
    used: the macros that the gin files refer to.
  """
  new = NAMES.get(name)
  if new is None or name in used or new not in used:
    return name
  _tell(name, new)
  return new


@functools.cache
def _tell(old: str, new: str) -> None:
  print(f'{old} is now {new}', file=sys.stderr)
