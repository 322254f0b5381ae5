"""A run that several processes share: who decodes what, and the one result.

Where each has models of its own, it decodes every n-th example by programs of
its own. Where one model is split over the devices of all, they decode the same
examples in lockstep. Chunks lie in the output folder, which all of them must
see; the first one writes what one process alone would have written.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
from jax.experimental import multihost_utils

from specdec_jax.infer import batches, report, resume
from specdec_jax.infer.processes import Processes

_LOOK_S = 0.2  # between two looks for what another process has finished

Modes = dict[str, report.Mode]
# `resume.Folder.begin`, given what decides the result.
Begin = Callable[[resume.Folder], resume.Chunks]
# Decodes items but those of the chunks that are there, keeps chunks in a folder
# or nowhere.
Run = Callable[
  [Sequence[batches.Item], resume.Folder | None, resume.Chunks], Modes
]


def meet(what: str, who: Processes) -> None:
  """Waits until all processes have come here."""
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
  """Decodes a process's items: all samples of every n-th example.

  Args:
    whole: the folder of the result.
    begin: begins or goes on with a folder.
    items: of all processes.
    every: samples of each example.
    run: decodes.
    who: this process.

  Returns:
    In the first process all that was decoded; in another None, once the first
    one has written the result.
  """
  own = whole.share(who.index, who.count)
  mine = [x for x in items if (x.number // every) % who.count == who.index]
  modes = run(mine, own, begin(own))
  own.mark_decoded()
  if who.index:
    while not whole.finished:
      time.sleep(_LOOK_S)
    own.discard()
    return None
  begin(whole)
  for index in range(1, who.count):
    other = whole.share(index, who.count)
    while (chunks := other.decoded(own)) is None:
      time.sleep(_LOOK_S)
    for chunk in chunks:
      for name, mode in modes.items():
        mode.add(report.Mode.from_json(chunk[name]))
  return modes


def in_lockstep(
  whole: resume.Folder,
  begin: Begin,
  items: Sequence[batches.Item],
  run: Run,
  who: Processes,
) -> Modes | None:
  """Decodes all items in every process; the first one alone keeps chunks.

  Arguments and what is returned are those of `each_its_own`.
  """
  first = who.index == 0
  done = begin(whole) if first else {}
  # A chunk may be kept between two looks: the first one's look counts. Behind
  # a chunk that was broken all are decoded again: one number says which.
  whole_ones = next(n for n in range(len(done) + 1) if n not in done)
  count = int(multihost_utils.broadcast_one_to_all(np.int32(whole_ones)))
  chunk = done.__getitem__ if first else whole.chunk
  done = {number: chunk(number) for number in range(count)}
  modes = run(items, whole if first else None, done)
  return modes if first else None
