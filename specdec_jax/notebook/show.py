"""How a loaded pair and a trace show themselves: as text, and as HTML."""

import dataclasses
import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
import rich.table
import rich.text

from specdec_jax.measure.table import Table
from specdec_jax.paper import trace, trace_page
from specdec_jax.paper.trace import Round

# Heights of a trace's frame: of a row, of what is around the rows, the most.
_ROW_REM, _AROUND_REM, _MOST_REM = 2.2, 22, 40


@dataclasses.dataclass(frozen=True)
class Trace:
  """What became of each proposal of one decode; shows itself.

  Attributes:
    source: the input.
    rounds: in order, as text.
    lenience: that they were accepted with; below 1 the output is lossy.
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
    """The lines of `trace.print_trace`, as that console would show them."""
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


@dataclasses.dataclass(frozen=True)
class Facts:
  """What is to be said of a loaded pair.

  Attributes:
    models: 'target' and perhaps 'draft' -> name of a fact -> its value.
    both: name -> value of what holds for both.
  """

  models: Mapping[str, Mapping[str, str]]
  both: Mapping[str, str]

  @property
  def rows(self) -> list[list[str]]:
    """Name and a value of each model, '-' where it has none."""
    names = dict.fromkeys(name for one in self.models.values() for name in one)
    return [
      [name, *(one.get(name, '-') for one in self.models.values())]
      for name in names
    ]

  def __rich__(self) -> rich.console.Group:
    models = Table('', ['', *self.models], self.rows)
    both = rich.table.Table.grid(padding=(0, 2))
    for name, value in self.both.items():
      both.add_row(name, rich.text.Text(value))
    return rich.console.Group(models, both)

  def _repr_html_(self) -> str:
    head = ''.join(f'<th scope="col">{name}</th>' for name in self.models)
    return (
      f'<table><thead><tr><td></td>{head}</tr></thead><tbody>'
      + ''.join(_html_row(*row) for row in self.rows)
      + '</tbody></table><table><tbody>'
      + ''.join(_html_row(*row) for row in self.both.items())
      + '</tbody></table>'
    )


def _html_row(name: str, *values: str) -> str:
  cells = ''.join(f'<td>{html.escape(value)}</td>' for value in values)
  return f'<tr><th scope="row">{html.escape(name)}</th>{cells}</tr>'
