"""A run that several processes share: who decodes what, and the one result.

If each process has its own models, it decodes every n-th example with its own
programs. If one model is split over the devices of all processes, they decode
the same examples in lockstep. Chunks lie in the output folder, which all
processes must see; the first process writes the result, which is the same as
that of a single process.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from jax.experimental import multihost_utils

from specdec_jax.infer import batches, report, resume
from specdec_jax.infer.processes import Processes

_LOOK_S = 0.2  # time between two looks whether another process has finished
# Longer than a program compiles, and a batch or the metrics take. Finished work
# is written each half minute.
_MOST_SILENCE_S = 1800.0

_Found = TypeVar('_Found')
Modes = dict[str, report.Mode]
# `resume.Folder.begin` with its other arguments bound.
Begin = Callable[[resume.Folder], resume.Chunks]
# Decodes the items that are not in the given chunks; keeps chunks in a folder,
# or nowhere if that is None.
Run = Callable[
  [Sequence[batches.Item], resume.Folder | None, resume.Chunks], Modes
]


def meet(what: str, who: Processes) -> None:
  """Waits until all processes have called it."""
  if not who.alone:
    multihost_utils.sync_global_devices(what)


def each_its_own(
  whole: resume.Folder,
  begin: Begin,
  items: Sequence[batches.Item],
  every: int,
  run: Run,
  who: Processes,
) -> Modes | None:
  """Decodes the items of one process: all samples of every n-th example.

  Args:
    whole: the folder of the result.
    begin: starts or resumes the run in a folder.
    items: the items of all processes.
    every: samples per example.
    run: decodes items.
    who: this process.

  Returns:
    In the first process the results of all processes; in another process None,
    after the first has written the result.

  Raises:
    ValueError: another process is waited for in vain.
  """
  own = whole.share(who.index, who.count)
  mine = [x for x in items if (x.number // every) % who.count == who.index]
  modes = run(mine, own, begin(own))
  own.mark_decoded()
  if who.index:
    _awaited(lambda: whole.finished or None, whole, 0)
    own.discard()
    return None
  begin(whole)
  for index in range(1, who.count):
    other = whole.share(index, who.count)
    for chunk in _awaited(functools.partial(other.decoded, own), whole, index):
      for name, mode in modes.items():
        mode.add(report.Mode.from_json(chunk[name]))
  return modes


def _awaited(
  look: Callable[[], _Found | None], whole: resume.Folder, index: int
) -> _Found:
  """Waits for another process, for as long as any of them writes something.

  Args:
    look: returns what is waited for; None while it is not there.
    whole: the folder of the result, beside which all processes write.
    index: of the process that is waited for.

  Raises:
    ValueError: no process has written anything for `_MOST_SILENCE_S`.
  """
  seen, since = whole.written(), time.monotonic()
  while (found := look()) is None:
    time.sleep(_LOOK_S)
    now = whole.written()
    if now != seen:
      seen, since = now, time.monotonic()
    elif time.monotonic() - since > _MOST_SILENCE_S:
      raise ValueError(
        f'Nothing was written in {str(whole.path)!r} for'
        f' {_MOST_SILENCE_S / 60:g} minutes, and this process waits for process'
        f' {index} there. Is it the same folder for all processes, and does'
        ' that process still run? Start all of them again: finished work is'
        ' kept.'
      )
  return found


def in_lockstep(
  whole: resume.Folder,
  begin: Begin,
  items: Sequence[batches.Item],
  run: Run,
  who: Processes,
) -> Modes | None:
  """Decodes all items in every process; only the first process keeps chunks.

  Arguments and result are those of `each_its_own`.
  """
  first = who.index == 0
  done = begin(whole) if first else {}
  # The chunks that the first process has found count, because it may keep
  # another one before the other processes look. What follows a missing or
  # broken chunk is decoded again, so one number says which are kept.
  whole_ones = next(n for n in range(len(done) + 1) if n not in done)
  for number in done:
    if number > whole_ones:
      whole.drop(number)
  count = int(multihost_utils.broadcast_one_to_all(np.int32(whole_ones)))
  chunk = done.__getitem__ if first else whole.chunk
  done = {number: chunk(number) for number in range(count)}
  modes = run(items, whole if first else None, done)
  return modes if first else None
