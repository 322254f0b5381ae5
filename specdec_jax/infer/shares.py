"""A run that several processes share: who decodes what, and the one result.

Each process decodes every n-th example by programs of its own, and keeps its
chunks in the output folder, which all of them must see. The first one waits for
the others and writes what one process alone would have written.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from jax.experimental import multihost_utils

from specdec_jax.infer import batches, report, resume
from specdec_jax.processes import Processes

_LOOK_S = 0.2  # between two looks for what another process has finished


def folder_of(whole: resume.Folder, who: Processes) -> resume.Folder:
  """Where a process keeps what it has decoded of a run."""
  if who.alone:
    return whole
  name = f'{whole.name}.process-{who.index:05}-of-{who.count:05}'
  return resume.Folder(str(whole.path), name)


def items_of(
  items: Sequence[batches.Item], num_decodes: int, who: Processes
) -> list[batches.Item]:
  """A process's items: all samples of every n-th example."""
  return [
    item
    for item in items
    if (item.number // num_decodes) % who.count == who.index
  ]


def meet(what: str, who: Processes) -> None:
  """Waits until all processes have come here."""
  if not who.alone:
    multihost_utils.sync_global_devices(what)


def gather(
  whole: resume.Folder,
  decides: Mapping[str, Any],
  modes: Mapping[str, report.Mode],
  who: Processes,
) -> Mapping[str, report.Mode] | None:
  """Waits for the other processes.

  Args:
    whole: the folder of the result.
    decides: what decides it, as `resume.Folder.begin` had it.
    modes: what this process has decoded; all of it is in its own folder.
    who: this process.

  Returns:
    In the first process all that was decoded; in another None, once the first
    one has written the result.
  """
  if who.alone:
    return modes
  own = folder_of(whole, who)
  own.mark_decoded()
  if who.index:
    while not whole.finished:
      time.sleep(_LOOK_S)
    own.discard()
    return None
  for index in range(1, who.count):
    other = folder_of(whole, Processes(index, who.count))
    while (chunks := other.decoded(decides)) is None:
      time.sleep(_LOOK_S)
    for chunk in chunks:
      for name, mode in modes.items():
        mode.add(report.Mode.from_json(chunk[name]))
  return modes
