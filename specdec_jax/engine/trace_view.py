"""A trace that shows itself: on a terminal, and as HTML in a notebook."""

import dataclasses
import html
import io
from collections.abc import Sequence
from typing import Any

import rich.console
import rich.text

from specdec_jax.engine import trace, trace_page
from specdec_jax.engine.trace import Round

# Heights of a trace's frame: one row, everything around the rows, the maximum.
_ROW_REM, _AROUND_REM, _MOST_REM = 2.2, 22, 40


@dataclasses.dataclass(frozen=True)
class Trace:
  """What became of each proposal of one decode; shows itself.

  Attributes:
    source: the input.
    rounds: the rounds in order, as text.
    lenience: lenience of the decode; below 1 the output is lossy.
  """

  source: str
  rounds: Sequence[Round[str]]
  lenience: float = 1.0

  @property
  def _lossy(self) -> str:
    if self.lenience == 1:
      return ''
    return f', lossy (lenience {self.lenience:g})'

  @property
  def _title(self) -> str:
    return f'Accepted and rejected proposals{self._lossy}'

  def __repr__(self) -> str:
    said = trace.summary(self.rounds)
    return f'Trace({self.source!r}: {said}{self._lossy})'

  def __rich_console__(
    self, console: rich.console.Console, options: rich.console.ConsoleOptions
  ) -> rich.console.RenderResult:
    """The lines of `trace.print_trace`, as the given console shows them."""
    system: Any = console.color_system
    page = rich.console.Console(
      file=io.StringIO(),
      width=options.max_width,
      force_terminal=console.is_terminal,
      color_system=system,
      no_color=console.no_color,
      legacy_windows=False,
    )
    with page.capture() as captured:
      trace.print_trace(page, self.rounds, self._title)
    yield rich.text.Text.from_ansi(captured.get())

  def _repr_html_(self) -> str:
    """The page of `trace_page`, in a frame that keeps its style to itself."""
    page = trace_page.html_page(
      self.rounds, title=self._title, source=self.source
    )
    height = min(_AROUND_REM + _ROW_REM * len(self.rounds), _MOST_REM)
    return (
      f'<iframe sandbox title="Trace" srcdoc="{html.escape(page)}"'
      f' style="width: 100%; height: {height:g}rem; border: 0"></iframe>'
    )
