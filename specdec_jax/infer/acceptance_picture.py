"""A picture of the acceptance over a run: where texts change, it shows."""

import os

from specdec_jax.engine.monitor import Usual
from specdec_jax.infer import report
from specdec_jax.measure.canvas import PALETTE, save


def plot(
  path: str | os.PathLike[str], mode: report.Mode, usual: Usual | None
) -> None:
  """Draws each output's acceptance, its course, and what is usual.

  Args:
    path: path of the PNG; replaced whole or not at all.
    mode: the results of speculative decoding.
    usual: the acceptance of a calibration's texts, if it is known.

  Raises:
    ValueError: matplotlib is not installed.
    OSError: the file cannot be written.
  """
  done = [
    (index, one.stats.acceptance_rate, one.out_of_distribution)
    for index, one in sorted(mode.completions.items())
  ]

  def draw(figure):
    axes = figure.subplots()
    if usual is not None:
      low, high = (usual.mean + sign * usual.spread for sign in (-1, 1))
      axes.axhspan(low, high, color='#dddddd', label='texts of the calibration')
    for marked, color, label in (
      (False, PALETTE[0], 'an output'),
      (True, PALETTE[1], 'out of distribution'),
    ):
      own = [(i, rate) for i, rate, mark in done if mark == marked]
      if own:
        places, rates = zip(*own, strict=True)
        axes.scatter(places, rates, s=9, color=color, label=label)
    course = report.acceptance_over_run(mode)
    middle = [(i + 0.5) * len(done) / len(course) for i in range(len(course))]
    axes.plot(middle, course, color='#444444', label='parts of the run')
    axes.set_xlabel('output, in the order of the input')
    axes.set_ylabel('acceptance rate')
    axes.set_ylim(-0.02, 1.02)
    axes.legend(loc='lower left')

  save(path, draw)
