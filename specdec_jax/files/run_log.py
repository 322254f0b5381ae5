"""A log file of a run that may be killed.

The first line of the file holds the settings of the run. Each other line holds
the result of one piece of work. All lines are JSON. A run that is started again
reads these results and appends the missing ones. A last line without a line
feed was cut when the run was killed: it is not read, and the next append
overwrites it.
"""

import json
import os
from typing import Any

from specdec_jax import files
from specdec_jax.checks.fields import unexpected


class RunLog:
  """A log file; each reading goes on where the last one has stopped.

  Attributes:
    path: the file; it need not exist before the first `append`.
  """

  def __init__(self, path: str | os.PathLike[str], settings: Any = None):
    """Keeps the arguments; the file is opened when it is read or written.

    Args:
      path: the file.
      settings: JSON values that become the first line of a new file; they are
        not needed to read a file.
    """
    self.path = os.fspath(path)
    self._settings = settings
    self._end = 0  # the position up to which the file was read or written

  def settings(self) -> Any:
    """Reads the settings that the file begins with.

    Raises:
      ValueError: the file has no first line of JSON.
    """
    try:
      with files.open_regular(self.path) as stream:
        return json.loads(stream.readline())
    except (OSError, ValueError, RecursionError) as error:
      expected = 'lines of JSON, the first one with settings'
      raise unexpected(self.path, expected, str(error)) from error

  def read_new(self) -> tuple[list[Any], list[bytes]]:
    """Reads the results that were appended since the last call.

    Returns:
      The results, in order; and the lines that are not JSON.

    Raises:
      OSError: the file cannot be read.
    """
    with files.open_regular(self.path) as stream:
      stream.seek(self._end)
      data = stream.read()
    *lines, cut = data.split(b'\n')
    values, damaged = [], []
    # The first line has the settings.
    for line in lines if self._end else lines[1:]:
      try:
        values.append(json.loads(line))
      except (ValueError, RecursionError):
        damaged.append(line)
    self._end += len(data) - len(cut)
    return values, damaged

  def append(self, value: Any) -> None:
    """Writes a result behind the last line that was read or written.

    A killed process loses nothing that was written. The file is not synced:
    that would take longer than many batches, and the system writes the data to
    the disk within a minute.

    Raises:
      OSError: the result could not be written; earlier results are kept.
    """
    lines = [value] if self._end else [self._settings, value]
    data = ''.join(f'{json.dumps(line)}\n' for line in lines).encode()
    with open(self.path, 'ab') as stream:
      stream.truncate(self._end)
      stream.write(data)
    self._end += len(data)
