"""Figures 2, 3 and 4 with measured points over them, and tables as plots.

The curves come from `specdec_jax.analysis`; `*_curves` return them as numbers.
Lines differ in their dashes as well as in their colours.
"""

import os
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax import analysis
from specdec_jax.measure.canvas import PALETTE, save, whiskers, wrapped
from specdec_jax.paper import report

_DASHES = ('-', '--', '-.', ':', (0, (5, 1, 1, 1, 1, 1)), (0, (1, 2)))
_RATE_LABEL = r'acceptance rate $\alpha$'

GAMMAS = (1, 3, 5, 7, 10)
COST_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2)
# Up to this rate the optimum is below `MAX_GAMMA` for all `COST_RATIOS`.
MAX_RATE, MAX_GAMMA = 0.95, 64


class Curve(NamedTuple):
  """One line of a figure.

  Attributes:
    parameter: gamma, or the cost ratio.
    rates: float[N], alpha.
    values: float[N].
  """

  parameter: float
  rates: np.ndarray
  values: np.ndarray


class Point(NamedTuple):
  """One measured value.

  Attributes:
    acceptance_rate: alpha.
    value: the value, in the unit of the figure.
    label: text beside the figure's curves, with a line to the point.
    parameter: parameter of the curve that the point belongs to, or None.
    forced_acceptance: as in `report.Row`. Such a point is drawn hollow, and the
      title says so.
  """

  acceptance_rate: float
  value: float
  label: str = ''
  parameter: float | None = None
  forced_acceptance: float | None = None


def gamma_curves(closed_form: Callable[..., Any], *ratio: float) -> list[Curve]:
  """A closed form over alpha in [0, 1], one curve for each of `GAMMAS`.

  Args:
    closed_form: a function of `analysis`: alpha, gamma, `ratio` -> value.
    *ratio: c or c-hat, if the function takes one.
  """
  rates = np.linspace(0, 1, 191)
  return [
    Curve(gamma, rates, np.asarray(closed_form(rates, gamma, *ratio)))
    for gamma in GAMMAS
  ]


def optimal_gamma_curves() -> list[Curve]:
  """The best gamma over alpha in [0, MAX_RATE], one curve for each c.

  Section 3.5 of the paper; target calls of any length cost the same.
  """
  rates = np.linspace(0, MAX_RATE, 191)
  return [
    Curve(c, rates, np.asarray(analysis.optimal_gamma(rates, c, MAX_GAMMA)))
    for c in COST_RATIOS
  ]


def plot_expected_tokens(
  path: str | os.PathLike[str], points: Sequence[Point] = ()
) -> None:
  """Figure 2: expected tokens per round over alpha, and measured ones.

  Args:
    path: path of the PNG; replaced whole or not at all.
    points: measured tokens per call of the target; `parameter` is gamma.

  Raises:
    ValueError: matplotlib is not installed.
  """

  def draw(figure):
    axes = figure.subplots()
    _draw_curves(axes, gamma_curves(analysis.expected_tokens), _gamma_label)
    _draw_points(axes, points, GAMMAS)
    _finish(
      axes,
      'tokens per call of the target',
      points,
      'Figure 2: expected tokens, Eq. 1',
    )

  save(path, draw)


def plot_optimal_gamma(
  path: str | os.PathLike[str], points: Sequence[Point] = ()
) -> None:
  """Figure 3: the best gamma over alpha, for several c.

  Args:
    path: path of the PNG; replaced whole or not at all.
    points: the best gammas that were measured; `parameter` is c.

  Raises:
    ValueError: matplotlib is not installed.
  """

  def draw(figure):
    axes = figure.subplots()
    _draw_curves(
      axes, optimal_gamma_curves(), lambda cost: f'c = {cost:g}', steps=True
    )
    _draw_points(axes, points, COST_RATIOS)
    title = 'Figure 3: target calls of any length cost the same'
    _finish(axes, r'optimal $\gamma$', points, title)

  save(path, draw)


def plot_tradeoff(
  path: str | os.PathLike[str],
  speed_points: Sequence[Point] = (),
  operations_points: Sequence[Point] = (),
) -> None:
  """Figure 4: speed-up, and increase of arithmetic, over alpha; c = c-hat = 0.

  Args:
    path: path of the PNG; replaced whole or not at all.
    speed_points: measured speed-ups; `parameter` is gamma.
    operations_points: measured increases; `parameter` is gamma.

  Raises:
    ValueError: matplotlib is not installed.
  """

  def draw(figure):
    left, right = figure.subplots(1, 2)
    speed = gamma_curves(analysis.walltime_factor, 0.0)
    _draw_curves(left, speed, _gamma_label)
    _draw_points(left, speed_points, GAMMAS)
    _finish(
      left,
      'times faster than plain decoding',
      speed_points,
      'Figure 4, speed: Theorem 3.8, c = 0'
      + ('\npoints: measured, each with its own c' if speed_points else ''),
    )
    operations = gamma_curves(analysis.operations_factor, 0.0)
    _draw_curves(right, operations, _gamma_label)
    _draw_points(right, operations_points, GAMMAS)
    _finish(
      right,
      'times the arithmetic of plain decoding',
      operations_points,
      r'Figure 4, operations: Theorem 3.11, $\hat{c}$ = 0',
      free='upper right',
    )

  save(path, draw, size=(10, 4.2))


def plot_comparison(
  path: str | os.PathLike[str], table: report.Comparison
) -> None:
  """A table as a plot: paper, predicted and measured, one line per row.

  Args:
    path: path of the PNG; replaced whole or not at all.
    table: such as Table 2; a vertical line marks `table.even`, where nothing is
      gained. In a row that was not measured the plot says so.

  Raises:
    ValueError: matplotlib is not installed.
  """
  series = (('paper', 'D', -0.22), ('predicted', 's', 0.0))

  def draw(figure):
    axes = figure.subplots()
    for colour, (name, marker, shift) in zip(PALETTE, series, strict=False):
      found = [
        (getattr(row, name), i + shift) for i, row in enumerate(table.rows)
      ]
      found = [(value, at) for value, at in found if value is not None]
      if found:
        axes.plot(*zip(*found, strict=True), marker, color=colour, label=name)
    _draw_measured(axes, table)
    axes.set_yticks(
      range(len(table.rows)), [textwrap.fill(r.name, 44) for r in table.rows]
    )
    axes.set_ylim(len(table.rows) - 0.5, -0.5)
    axes.set_xlim(left=0)
    if table.even is not None:
      axes.axvline(table.even, color='#555555', linewidth=1, label='no gain')
    axes.set_xlabel(table.quantity)
    axes.set_title(wrapped(table.full_title, 70))
    axes.legend(loc='upper left', bbox_to_anchor=(1, 1))

  save(path, draw, size=(9, 1.6 + 0.42 * len(table.rows)))


def _draw_measured(axes, table: report.Comparison) -> None:
  """Draws measured values: filled for real acceptance, hollow for forced."""
  shift = 0.22
  for forced in (False, True):
    found = [
      (row.measured, row.spread, at + shift)
      for at, row in enumerate(table.rows)
      if row.measured is not None
      and (row.forced_acceptance is not None) == forced
    ]
    if not found:
      continue
    values = [value for value, _, _ in found]
    spreads = [spread or (value, value) for value, spread, _ in found]
    axes.errorbar(
      values,
      [at for _, _, at in found],
      xerr=whiskers(values, spreads),
      fmt='o',
      color=PALETTE[2],
      markerfacecolor='white' if forced else PALETTE[2],
      label='measured, forced' if forced else 'measured',
    )
  for at, row in enumerate(table.rows):
    if row.measured is None:
      axes.annotate(
        'not measured',
        (0, at + shift),
        xytext=(4, 0),
        textcoords='offset points',
        va='center',
        fontsize='x-small',
        color='#555555',
      )


def _gamma_label(gamma: float) -> str:
  return rf'$\gamma$ = {gamma:g}'


def _look(index: int) -> dict[str, Any]:
  return {
    'color': PALETTE[index % len(PALETTE)],
    'linestyle': _DASHES[index % len(_DASHES)],
  }


def _draw_curves(axes, curves: Sequence[Curve], label, steps=False) -> None:
  for index, curve in enumerate(curves):
    axes.plot(
      curve.rates,
      curve.values,
      label=label(curve.parameter),
      drawstyle='steps-post' if steps else 'default',
      **_look(index),
    )


def _draw_points(axes, points: Sequence[Point], parameters) -> None:
  shown = set()
  for point in sorted(points):
    forced = point.forced_acceptance is not None
    known = point.parameter in parameters
    colour = '#222222'
    if known:
      colour = _look(list(parameters).index(point.parameter))['color']
    name = 'measured, forced' if forced else 'measured'
    axes.plot(
      point.acceptance_rate,
      point.value,
      'o',
      color=colour,
      markerfacecolor='white' if forced else colour,
      label=None if name in shown else name,
      zorder=3,
    )
    shown.add(name)
  _draw_labels(axes, sorted(point for point in points if point.label))


def _draw_labels(axes, points: Sequence[Point]) -> None:
  """Writes labels one above the other, left of the steep part of the curves.

  A line leads from each label to its point.
  """
  # The point furthest to the right has the top label: no two lines cross.
  for index, point in enumerate(reversed(points)):
    axes.annotate(
      point.label,
      (point.acceptance_rate, point.value),
      xytext=(0.56, 0.95 - 0.045 * index),
      textcoords='axes fraction',
      ha='right',
      va='center',
      fontsize='x-small',
      arrowprops={
        'arrowstyle': '-',
        'color': '#999999',
        'linewidth': 0.6,
        'relpos': (1.0, 0.5),  # from the end of the text
        'shrinkA': 0,
        'shrinkB': 4,
      },
    )


def _finish(
  axes, label: str, points: Sequence[Point], title: str, free='upper left'
) -> None:
  title = report.titled(title, [point.forced_acceptance for point in points])
  axes.set_title(wrapped(title, 50))
  axes.set_xlabel(_RATE_LABEL)
  axes.set_ylabel(label)
  axes.set_xlim(0, 1)
  axes.set_ylim(bottom=0)
  axes.legend(loc=free)
