"""Figure 5: when the encoders, the drafter and the target run.

A row is one run: with gamma proposals per round, or plain (gamma 0). The width
of a call is its measured time; the calls are drawn one after the other.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from specdec_jax.checks.arguments import check_at_least
from specdec_jax.measure import canvas
from specdec_jax.paper import report

TARGET_ENCODER = "target's encoder"
DRAFT_ENCODER = "drafter's encoder"
DRAFT = 'draft call, one token'
TARGET = 'target call'
# The paper's colours, as near as the palette has them. Heights differ too.
_COLOURS = {
  TARGET_ENCODER: '#F0E442',
  DRAFT_ENCODER: '#E69F00',
  DRAFT: '#0072B2',
  TARGET: '#CC79A7',
}
_HEIGHTS = {
  TARGET_ENCODER: 0.7,
  DRAFT_ENCODER: 0.42,
  DRAFT: 0.42,
  TARGET: 0.7,
}
_DRAWN = 0.92  # drawn part of a call's time; the rest is a gap
_MOST_COUNTS = 40  # most rounds of a row whose token counts are written


@dataclasses.dataclass(frozen=True)
class CallTimes:
  """Measured times of one pair on one machine, milliseconds.

  Attributes:
    target_encoder_ms: the target's encoder, once per input.
    draft_encoder_ms: the drafter's encoder, once per input; 0 without one.
    draft_ms: a draft call over one token.
    target_ms: m -> a target call over m tokens.

  Raises:
    ValueError: a time is negative, or that of a target call is 0.
  """

  target_encoder_ms: float
  draft_encoder_ms: float
  draft_ms: float
  target_ms: Mapping[int, float]

  def __post_init__(self):
    check_at_least(self, target_encoder_ms=0.0, draft_encoder_ms=0.0)
    check_at_least(self, draft_ms=0.0)
    for size, value in self.target_ms.items():
      if not value > 0:
        raise ValueError(
          f'CallTimes.target_ms[{size}] must be above 0, got {value}.'
        )


@dataclasses.dataclass(frozen=True)
class Run:
  """One row of the figure.

  Attributes:
    gamma: proposals per round; 0 is plain decoding.
    tokens_per_round: tokens that each round yielded, 1..gamma + 1.
    forced_acceptance: as in `report.Row`.

  Raises:
    ValueError: there is no round, or a number is out of range.
  """

  gamma: int
  tokens_per_round: Sequence[int]
  forced_acceptance: float | None = None

  def __post_init__(self):
    check_at_least(self, gamma=0)
    if not self.tokens_per_round:
      raise ValueError('Run.tokens_per_round must hold at least one round.')
    for count in self.tokens_per_round:
      if not 1 <= count <= self.gamma + 1:
        raise ValueError(
          f'A round of gamma = {self.gamma} yields 1 to {self.gamma + 1}'
          f' tokens, got {count}.'
        )

  @property
  def num_tokens(self) -> int:
    return sum(self.tokens_per_round)

  @property
  def name(self) -> str:
    return rf'$\gamma$ = {self.gamma}' if self.gamma else 'plain'


class Block(NamedTuple):
  """One call.

  Attributes:
    kind: TARGET_ENCODER, DRAFT_ENCODER, DRAFT or TARGET.
    begin_ms: when the call begins, since the start.
    width_ms: how long it takes.
    num_tokens: tokens by which the output grew; 0 for all but target calls.
  """

  kind: str
  begin_ms: float
  width_ms: float
  num_tokens: int = 0


def blocks(run: Run, times: CallTimes) -> list[Block]:
  """Returns the calls of a run, one after the other.

  Raises:
    ValueError: `times` lacks the target call over gamma + 1 tokens.
  """
  size = run.gamma + 1
  if size not in times.target_ms:
    raise ValueError(
      f'A run of gamma = {run.gamma} needs the time of a target call over'
      f' {size} tokens; there are times for {sorted(times.target_ms)}.'
    )
  widths = [(TARGET_ENCODER, times.target_encoder_ms, 0)]
  if run.gamma:
    widths.append((DRAFT_ENCODER, times.draft_encoder_ms, 0))
  for count in run.tokens_per_round:
    widths += [(DRAFT, times.draft_ms, 0)] * run.gamma
    widths.append((TARGET, times.target_ms[size], count))
  found = []
  now = 0.0
  for kind, width, count in widths:
    found.append(Block(kind, now, width, count))
    now += width
  return found


def plot_timeline(
  path: str | os.PathLike[str],
  runs: Sequence[Run],
  times: CallTimes,
  *,
  title: str = 'Figure 5: calls over time',
) -> None:
  """Draws a row for each run; the paper has gamma 7, gamma 3 and plain.

  On each target call stands how many tokens it added, and at the end of a row
  how many tokens it made and how long that took.

  Args:
    path: path of the PNG; replaced whole or not at all.
    runs: from top to bottom.
    times: the measured times of the pair.
    title: the title; a remark is added if acceptance was forced.

  Raises:
    ValueError: there is no run, a time is missing, or matplotlib is not
      installed.
  """
  if not runs:
    raise ValueError('A timeline needs at least one run, got none.')
  rows = [blocks(run, times) for run in runs]
  end = max(row[-1].begin_ms + row[-1].width_ms for row in rows)

  def draw(figure):
    axes = figure.subplots()
    for at, (run, row) in enumerate(zip(runs, rows, strict=True)):
      _draw_row(axes, at, row)
      took = row[-1].begin_ms + row[-1].width_ms
      axes.annotate(
        f'{run.num_tokens} tokens\n{took:.3g} ms',
        (took, at),
        xytext=(5, 0),
        textcoords='offset points',
        va='center',
        fontsize='small',
      )
    axes.set_yticks(range(len(runs)), [run.name for run in runs])
    axes.set_ylim(len(runs) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * end)
    axes.set_xlabel('time, ms')
    axes.grid(axis='y', visible=False)
    full = report.titled(title, [run.forced_acceptance for run in runs])
    axes.set_title(canvas.wrapped(full, 100))
    handles, names = axes.get_legend_handles_labels()
    first = dict(zip(reversed(names), reversed(handles), strict=True))
    ordered = {kind: first[kind] for kind in _COLOURS if kind in first}
    axes.legend(
      ordered.values(),
      ordered.keys(),
      loc='upper center',
      bbox_to_anchor=(0.5, -0.18),
      ncols=4,
    )

  canvas.save(path, draw, size=(11, 1.8 + 0.8 * len(runs)))


def _draw_row(axes, at: int, row: Sequence[Block]) -> None:
  for kind, colour in _COLOURS.items():
    calls = [block for block in row if block.kind == kind]
    if not calls:
      continue
    height = _HEIGHTS[kind]
    axes.broken_barh(
      # A gap shows where a call ends. White edges of a fixed width would hide
      # short calls completely.
      [(block.begin_ms, _DRAWN * block.width_ms) for block in calls],
      (at - height / 2, height),
      facecolor=colour,
      linewidth=0,
      snap=False,  # with it, some of several equal calls are a pixel wider
      label=kind,
    )
  counted = [block for block in row if block.num_tokens]
  if len(counted) > _MOST_COUNTS:
    return
  for block in counted:
    axes.text(
      block.begin_ms + block.width_ms / 2,
      at,
      str(block.num_tokens),
      ha='center',
      va='center',
      fontsize='x-small',
    )
