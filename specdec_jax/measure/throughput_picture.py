"""A picture of how throughput and latency grow with the batch."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax.measure.canvas import PALETTE, save
from specdec_jax.measure.throughput import BY_LOAD, SPECULATIVE

_MARKERS = ('o', 's', '^')


def plot_throughput(
  path: str | os.PathLike[str], record: Mapping[str, Any]
) -> None:
  """Draws throughput and time in a slot over batch size, a line for each mode.

  Args:
    path: path of the PNG; replaced whole or not at all.
    record: record of `throughput.measure_throughput`, with a sweep.

  Raises:
    ValueError: matplotlib is not installed, or the record has no sweep.
    OSError: the file cannot be written.
  """
  sweep = record['sweep']
  if not sweep:
    raise ValueError('There is no sweep over batch sizes to draw.')
  modes = list(dict.fromkeys(row['mode'] for row in sweep))

  def draw(figure):
    panels = zip(
      figure.subplots(1, 2),
      (
        ('tokens_per_second', 'tokens a second'),
        ('in_slot', 'seconds from slot to output, mean'),
      ),
      strict=True,
    )
    for axes, (key, label) in panels:
      for index, mode in enumerate(modes):
        rows = [row for row in sweep if row['mode'] == mode]
        axes.plot(
          [row['batch_size'] for row in rows],
          [row[key] for row in rows],
          color=PALETTE[index],
          marker=_MARKERS[index % len(_MARKERS)],
          label=mode,
        )
      axes.set_xscale('log', base=2)
      axes.xaxis.set_major_formatter('{x:g}')
      axes.set_xlabel('rows decoded at once')
      axes.set_ylabel(label)
      axes.set_ylim(bottom=0)
      if key == 'tokens_per_second' and (note := _pools(sweep)):
        axes.annotate(
          note,
          (1, 0.03),  # below the curves, where there is room
          xycoords='axes fraction',
          ha='right',
          fontsize='x-small',
        )
    axes.legend()
    machine = record['machine']
    figure.suptitle(
      f'Continuous batching, gamma {record["gamma"]}, temperature'
      f' {record["temperature"]:g}: {machine["device"]}',
      fontsize='medium',
    )

  save(path, draw, (9.0, 4.0))


def _pools(sweep: Sequence[Mapping[str, Any]]) -> str:
  """Why the curve of gamma by rows is above; '' if there is no such curve."""
  largest = max(row['batch_size'] for row in sweep)
  full = {
    row['mode']: row['occupancy']
    for row in sweep
    if row['batch_size'] == largest
  }
  if not {BY_LOAD, SPECULATIVE} <= set(full):
    return ''
  return (
    f'{BY_LOAD}: the last texts move to smaller pools. At {largest} rows,'
    f'\nof those computed {full[BY_LOAD]:.0%} are at work,'
    f' {full[SPECULATIVE]:.0%} without pools'
  )
