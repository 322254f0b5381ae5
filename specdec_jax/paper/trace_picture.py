"""The trace of one generation as a PNG: a line per round, as in Figure 1."""

import os
from collections.abc import Sequence
from typing import Any

from specdec_jax.engine.trace import (
  ACCEPTED,
  MEANING,
  REJECTED,
  TARGET,
  UNUSED,
  Round,
  shown,
  summary,
)
from specdec_jax.measure.canvas import save

# Ink and background. No meaning is colour alone: what was not kept is struck,
# the target's own token is underlined.
_LOOK = {
  ACCEPTED: ('#0B5D1E', '#DDF3E0'),
  REJECTED: ('#A3161D', '#FBE3E4'),
  UNUSED: ('#777777', '#F2F2F2'),
  TARGET: ('#0B4F9E', '#DCE9FA'),
}
_STRUCK = (REJECTED, UNUSED)
_LINE, _MARGIN, _GAP = 0.34, 0.15, 0.06  # inches
_WIDTH = 9.0


def plot_trace(
  path: str | os.PathLike[str], rounds: Sequence[Round[str]], source: str = ''
) -> None:
  """Draws every proposal and what became of it.

  Args:
    path: path of the PNG; replaced whole or not at all.
    rounds: rounds that `trace.spell` gave.
    source: the input text; shown above if it is given.

  Raises:
    ValueError: matplotlib is not installed.
    OSError: the file cannot be written.
  """
  head = ([f'Input: {source}'] if source else []) + [summary(rounds)]
  lines = len(head) + len(rounds) + len(MEANING) + 1
  height = lines * _LINE + 2 * _MARGIN

  def draw(figure):
    figure.set_layout_engine('none')
    pen = _Pen(figure, height)
    for text in head:
      pen.text(text)
      pen.next_line()
    for number, one in enumerate(rounds, start=1):
      pen.text(f'{number:>2}', '#777777')
      pen.x += _GAP
      for kind, piece in one.parts:
        blank, word = shown(piece)
        pen.x += 2 * _GAP if blank else 0
        pen.token(kind, word)
      pen.next_line()
    pen.y -= _LINE / 2
    for kind, meaning in MEANING.items():
      pen.token(kind, meaning)
      pen.next_line()

  save(path, draw, (_WIDTH, height))


class _Pen:
  """Writes from left to right; places are in inches from the top left."""

  def __init__(self, figure: Any, height: float):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    self._figure, self._height = figure, height
    self._renderer = FigureCanvasAgg(figure).get_renderer()
    self.x = _MARGIN
    self.y = height - _MARGIN - _LINE / 2

  def next_line(self) -> None:
    self.x = _MARGIN
    self.y -= _LINE

  def text(self, text: str, color: str = 'black', **options: Any) -> None:
    """Writes a text and moves behind it."""
    found = self._figure.text(
      self.x / _WIDTH,
      self.y / self._height,
      text,
      color=color,
      va='center',
      parse_math=False,
      **options,
    )
    box = found.get_window_extent(self._renderer)
    self.x += box.width / self._figure.dpi + _GAP

  def token(self, kind: str, word: str) -> None:
    """Writes one token on its background."""
    ink, paper = _LOOK[kind]
    begin = self.x
    box = {'facecolor': paper, 'edgecolor': 'none', 'pad': 2.0}
    self.text(word, ink, bbox=box)
    end = self.x - _GAP
    if kind in _STRUCK:
      self._stroke(begin, end, self.y, ink)
    elif kind == TARGET:
      self._stroke(begin, end, self.y - 0.08, ink)

  def _stroke(self, begin: float, end: float, y: float, color: str) -> None:
    from matplotlib.lines import Line2D

    line = Line2D(
      [begin / _WIDTH, end / _WIDTH],
      [y / self._height] * 2,
      color=color,
      linewidth=1.2,
      zorder=10,  # before the background of the text
      transform=self._figure.transFigure,
      figure=self._figure,
    )
    self._figure.add_artist(line)
