"""Draws the paper's Figures 2 to 5, with measured points.

The curves come from `specdec_jax.analysis`, and all measured values come from
records of `measure.calls.benchmark`. Lines differ in their dashes as well as in
their colours. The functions `plot_...` write a PNG, whole or not at all, and
raise ValueError if matplotlib is not installed.
"""

import itertools
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax import analysis
from specdec_jax.paper.tables import titled
from specdec_jax.report import Record
from specdec_jax.report.plot import PALETTE, save_plot

Path = str | os.PathLike[str]

_DASHES = ('-', '--', '-.', ':', (0, (5, 1, 1, 1, 1, 1)))
GAMMAS = (1, 3, 5, 7, 10)
RATES = np.linspace(0, 1, 201)  # values of alpha
COST_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2)
# Up to this alpha the best gamma is below `MAX_GAMMA` for all `COST_RATIOS`.
MAX_RATE, MAX_GAMMA = 0.95, 64


def plot_figure2(path: Path) -> None:
  """Draws Figure 2: expected tokens per round over alpha."""
  curves = _by_gamma(analysis.expected_tokens)
  title = 'Figure 2: expected tokens, Eq. 1'
  unit = 'tokens per call of the target'
  save_plot(path, lambda figure: _draw(figure.subplots(), curves, unit, title))


def plot_figure3(path: Path) -> None:
  """Draws Figure 3: the best gamma over alpha for several cost ratios c.

  The equation is that of Section 3.5.
  """
  rates, unit = RATES[RATES <= MAX_RATE], r'optimal $\gamma$'
  curves = {
    f'c = {c:g}': analysis.optimal_gamma(rates, c, MAX_GAMMA)
    for c in COST_RATIOS
  }
  title = 'Figure 3: target calls of any length cost the same'

  def draw(figure):
    _draw(figure.subplots(), curves, unit, title, drawstyle='steps-post')

  save_plot(path, draw)


def plot_figure4(path: Path, records: Sequence[Record] = ()) -> None:
  """Draws Figure 4: speed-up and arithmetic operations over alpha.

  The curves are for the cost ratios c = 0 and c-hat = 0.

  Args:
    path: path of the PNG.
    records: benchmarks of one gamma each, which become points. If proposals
      were accepted at random at a given rate (forced acceptance), the point is
      hollow and the title says so.
  """
  speed = 'Figure 4, speed: Theorem 3.8, c = 0'
  if records:
    speed += '\npoints: measured, each with its own c'
  forced = [record['settings']['forced_acceptance'] for record in records]
  colors = dict(zip(GAMMAS, PALETTE, strict=False))
  operations = r'Figure 4, operations: Theorem 3.11, $\hat{c}$ = 0'

  def draw(figure):
    left, right = figure.subplots(1, 2)
    curves = _by_gamma(analysis.walltime_factor, 0.0)
    unit = 'times faster than plain decoding'
    _draw(left, curves, unit, titled(speed, forced))
    for record, marker in zip(records, itertools.cycle('osD^v<>ph*Xd')):
      run = record['gammas'][0]
      gamma, cost_ratio = run['gamma'], run['cost_ratio']
      color = colors.get(gamma, '#222222')
      is_forced = record['settings']['forced_acceptance'] is not None
      label = rf'measured, $\gamma$ = {gamma}, c = {cost_ratio:.2f}'
      style = {'color': color, 'label': label, 'zorder': 3}
      style['markerfacecolor'] = 'white' if is_forced else color
      left.plot(run['acceptance_rate'], run['speed_up'], marker, **style)
    left.legend(fontsize='x-small')
    curves = _by_gamma(analysis.operations_factor, 0.0)
    _draw(right, curves, 'times the arithmetic of plain decoding', operations)

  save_plot(path, draw, size=(10, 4.2))


def _by_gamma(closed_form: Callable[..., Any], *ratio: float) -> dict[str, Any]:
  """Returns a curve over alpha for each gamma, by a closed form."""
  return {rf'$\gamma$ = {g}': closed_form(RATES, g, *ratio) for g in GAMMAS}


def _draw(
  axes: Any, curves: Mapping[str, Any], unit: str, title: str, **style: str
) -> None:
  for (label, heights), color, dashes in zip(
    curves.items(), PALETTE, _DASHES, strict=False
  ):
    (line,) = axes.plot(RATES[: len(heights)], heights, label=label, **style)
    line.set(color=color, linestyle=dashes)
  axes.set_xlabel(r'acceptance rate $\alpha$')
  axes.set_ylabel(unit)
  axes.set_xlim(0, 1)
  axes.set_ylim(bottom=0)
  # A remark on forced acceptance begins on a new line.
  lines = title.replace(' (forced', '\n(forced').splitlines()
  axes.set_title('\n'.join(textwrap.fill(line, 50) for line in lines))
  axes.legend()


# --- Figure 5: when the encoders, the drafter and the target run ------------

TARGET_ENCODER = "target's encoder"
DRAFT_START = 'drafter reads the input'
DRAFT = 'draft call, one token'
TARGET = 'target call'
# Kind of a call -> colour and height of its bar. The colours are near those of
# the paper.
_CALLS = {
  TARGET_ENCODER: ('#F0E442', 0.7),
  DRAFT_START: ('#E69F00', 0.42),
  DRAFT: ('#0072B2', 0.42),
  TARGET: ('#CC79A7', 0.7),
}
# The bar of a call covers this part of the call's time; the rest is a gap.
_FILLED = 0.92
_MOST_COUNTS = 40  # a row of more rounds shows no token counts


class Call(NamedTuple):
  """A call of a network, which is a bar in a row of Figure 5.

  Attributes:
    kind: TARGET_ENCODER, DRAFT_START, DRAFT or TARGET.
    begin_ms: time from the start of the generation to the begin of the call.
    end_ms: time from the start of the generation to the end of the call.
    num_tokens: number of tokens that the call adds to the output; 0 for all
      calls but those of the target.
  """

  kind: str
  begin_ms: float
  end_ms: float
  num_tokens: int = 0


def calls(gamma: int, counts: Sequence[int], costs: Record) -> list[Call]:
  """Returns the calls of a generation with their times, in order.

  Args:
    gamma: proposals per round; 0 is plain decoding.
    counts: number of new tokens of each round, 1 to gamma + 1.
    costs: the record of a benchmark of the pair with this gamma; gamma 0 need
      not be in the record.
  """
  median = {name: ms['median'] for name, ms in costs['times_ms'].items()}
  ratios = {row['gamma']: row['cost_ratio'] for row in costs['gammas']}
  draft_ms = ratios.get(gamma, 0.0) * median['call_1']
  parts = [(TARGET_ENCODER, median['encoder'], 0)]
  # The time is 0 if the drafter reads no input.
  if gamma and median['draft_encoder']:
    parts.append((DRAFT_START, median['draft_encoder'], 0))
  for count in counts:
    parts += [(DRAFT, draft_ms, 0)] * gamma
    parts.append((TARGET, median[f'call_{gamma + 1}'], count))
  row, end = [], 0.0
  for kind, length_ms, count in parts:
    row.append(Call(kind, end, end + length_ms, count))
    end += length_ms
  return row


def plot_figure5(
  path: Path, runs: Mapping[int, Sequence[int]], costs: Record
) -> None:
  """Draws Figure 5: a row of calls for each run.

  The paper has gamma 7, gamma 3 and plain decoding. The width of a call is its
  measured time. Each target call shows the number of its new tokens, and the
  end of a row the number of all tokens and the time.

  Args:
    path: path of the PNG.
    runs: gamma -> number of new tokens of each round; each is a row, from top
      to bottom. The legend has the kinds of the first row's calls.
    costs: the record of a benchmark of the pair.
  """
  rows = [calls(gamma, counts, costs) for gamma, counts in runs.items()]

  def draw(figure):
    axes = figure.subplots()
    for at, row in enumerate(rows):
      _draw_calls(axes, at, row)
    names = [rf'$\gamma$ = {gamma}' if gamma else 'plain' for gamma in runs]
    axes.set_yticks(range(len(runs)), names)
    axes.set_ylim(len(runs) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * max(row[-1].end_ms for row in rows))
    axes.set_xlabel('time, ms')
    axes.grid(axis='y', visible=False)
    axes.set_title('Figure 5: calls over time')
    axes.legend(loc='upper center', bbox_to_anchor=(0.5, -0.18), ncols=4)

  save_plot(path, draw, size=(11, 1.8 + 0.8 * len(runs)))


def _draw_calls(axes: Any, at: int, row: Sequence[Call]) -> None:
  for kind, (color, height) in _CALLS.items():
    # A gap shows where a call ends. White edges of a fixed width would hide
    # short calls completely.
    spans = [
      (call.begin_ms, _FILLED * (call.end_ms - call.begin_ms))
      for call in row
      if call.kind == kind
    ]
    label = kind if spans and not at else None
    # If edges snapped to pixels, some of several equal calls would be wider.
    bars = {'facecolor': color, 'linewidth': 0, 'snap': False, 'label': label}
    axes.broken_barh(spans, (at - height / 2, height), **bars)
  counted = [call for call in row if call.num_tokens]
  for call in counted if len(counted) <= _MOST_COUNTS else ():
    middle = (call.begin_ms + call.end_ms) / 2
    style = {'ha': 'center', 'va': 'center', 'fontsize': 'x-small'}
    axes.text(middle, at, str(call.num_tokens), **style)
  end = row[-1].end_ms
  tokens = sum(call.num_tokens for call in row)
  style = {'textcoords': 'offset points', 'va': 'center', 'fontsize': 'small'}
  axes.annotate(f'{tokens} tokens\n{end:.3g} ms', (end, at), (5, 0), **style)
