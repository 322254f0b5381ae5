"""Shows a loaded pair as text, and as HTML."""

import dataclasses
import html
from collections.abc import Mapping

import rich.console
import rich.table
import rich.text

from specdec_jax.measure.table import Table


@dataclasses.dataclass(frozen=True)
class Facts:
  """The facts to show about a loaded pair.

  Attributes:
    models: 'target' and perhaps 'draft' -> name of a fact -> its value.
    both: name of a fact about the whole pair -> its value.
  """

  models: Mapping[str, Mapping[str, str]]
  both: Mapping[str, str]

  @property
  def rows(self) -> list[list[str]]:
    """Each fact's name and its value for each model, '-' if it has none."""
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
