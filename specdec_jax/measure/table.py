"""One table class for all outputs: console, Markdown, JSON; and plots.

A cell is text, a number, or None for a value that was not measured. Numbers
stay numbers until they are shown, as their column says.

Plots have one style, whatever the user's own matplotlib settings are: the same
values give the same bytes. Progress is a bar on a terminal, and elsewhere a
line on stderr now and then.
"""

import contextlib
import dataclasses
import datetime
import io
import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import rich.console
import rich.measure
import rich.progress
import rich.table
import rich.text

from specdec_jax import files
from specdec_jax.checks.fields import package, unexpected
from specdec_jax.text.tasks import reading

Cell = str | int | float | None

# Those of Okabe and Ito, which can be told apart with every form of colour
# blindness.
PALETTE = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')
_STYLE = {
  'axes.axisbelow': True,
  'axes.grid': True,
  'axes.spines.right': False,
  'axes.spines.top': False,
  'axes.titlesize': 'medium',
  'font.family': 'DejaVu Sans',  # comes with matplotlib: the same everywhere
  'font.size': 10.0,
  'grid.color': '#E3E3E3',
  'legend.frameon': False,
  'lines.linewidth': 1.8,
}
_DPI = 150
_NUMBER = re.compile(r'[-+\d.,%]+')
_NO_EDGE = 10_000  # characters; wider than any output
_TOGETHER_S = 0.1  # so near are steps that come together
EVERY_S = 20.0  # between two lines of progress


@dataclasses.dataclass(frozen=True)
class Column:
  """How the cells of a column are shown.

  Attributes:
    header: name of the column.
    form: format of numbers, such as '.2f'; '' shows three digits of a float.
    align: 'left' or 'right'; '' is right if all cells look like numbers.
  """

  header: str
  form: str = ''
  align: str = ''

  def text(self, cell: Cell) -> str:
    """A cell as it is shown."""
    if cell is None:
      return '-'
    if isinstance(cell, str):
      return cell
    if self.form:
      return format(cell, self.form)
    return f'{cell:.3g}' if isinstance(cell, float) else str(cell)


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows under columns.

  Attributes:
    title: title above the table; '' is none.
    columns: each a `Column`, or only a header.
    rows: rows with a cell for each column.
    notes: sentences below the table.

  Raises:
    ValueError: a row has another number of cells than there are columns.
  """

  title: str
  columns: Sequence[Column | str]
  rows: Sequence[Sequence[Cell]]
  notes: Sequence[str] = ()

  def __post_init__(self):
    for row in self.rows:
      if len(row) != len(self.columns):
        expected = f'{len(self.columns)} cells'
        raise unexpected(f'A row of {self.title!r}', expected, list(row))

  @property
  def _columns(self) -> list[Column]:
    return [Column(c) if isinstance(c, str) else c for c in self.columns]

  @property
  def header(self) -> list[str]:
    """The names of the columns."""
    return [column.header for column in self._columns]

  @property
  def texts(self) -> list[list[str]]:
    """Every row as it is shown."""
    columns = self._columns
    return [
      [column.text(cell) for column, cell in zip(columns, row, strict=True)]
      for row in self.rows
    ]

  def without_empty(self) -> 'Table':
    """The table without columns in which nothing was measured."""
    kept = [
      index
      for index in range(len(self.columns))
      if not self.rows or any(row[index] is not None for row in self.rows)
    ]
    columns = [self.columns[index] for index in kept]
    rows = [[row[index] for index in kept] for row in self.rows]
    return dataclasses.replace(self, columns=columns, rows=rows)

  def _aligned(self, index: int) -> str:
    numbers = all(_NUMBER.fullmatch(row[index]) for row in self.texts)
    return self._columns[index].align or ('right' if numbers else 'left')

  def markdown(self) -> str:
    """The table without title and notes, as GitHub shows it."""
    width = range(len(self.columns))
    rule = ['--:' if self._aligned(i) == 'right' else ':--' for i in width]
    header, *body = (
      [plain_markdown(cell).replace('|', '\\|') for cell in row]
      for row in (self.header, *self.texts)
    )
    return '\n'.join(f'| {" | ".join(row)} |' for row in (header, rule, *body))

  def to_json(self) -> dict[str, Any]:
    """The table as it is shown, for `from_json`."""
    shown = {'title': self.title, 'columns': self.header, 'rows': self.texts}
    return shown | ({'notes': list(self.notes)} if self.notes else {})

  @classmethod
  def of(
    cls,
    title: str,
    columns: Mapping[Column | str, str | Callable[[Any], Cell]],
    rows: Sequence[Mapping[str, Any]],
    notes: Sequence[str] = (),
  ) -> 'Table':
    """A table of what records say.

    Args:
      title: as for the class.
      columns: each column, with the name of its values or a function of a row.
      rows: mappings.
      notes: as for the class.
    """
    cells = [
      [row[of] if isinstance(of, str) else of(row) for of in columns.values()]
      for row in rows
    ]
    return cls(title, list(columns), cells, notes)

  @classmethod
  def from_json(cls, value: Mapping[str, Any]) -> 'Table':
    """A table of texts, from the result of `to_json`."""
    columns, rows = value['columns'], value['rows']
    return cls(value['title'], columns, rows, value.get('notes', ()))

  def __rich_console__(
    self, console: rich.console.Console, options: rich.console.ConsoleOptions
  ) -> rich.console.RenderResult:
    """For `console.print`; leaves out columns in which nothing was measured."""
    table = self.without_empty()
    shown = table._rich()
    wanted = rich.measure.Measurement.get(console, options, shown)
    if wanted.maximum > options.max_width:
      shown = table._rich(narrow=True)
    yield shown
    for note in self.notes:
      yield rich.text.Text(note)

  def _rich(self, narrow: bool = False) -> rich.table.Table:
    """The table for rich; if `narrow`, texts are folded, numbers are not."""
    shown = rich.table.Table(
      title=rich.text.Text(self.title) if self.title else None,
      show_lines=narrow,  # without lines, folded rows would run together
    )
    texts = self.texts
    for i, column in enumerate(self._columns):
      name = column.header
      right = self._aligned(i) == 'right'
      if right and narrow:
        widest = max(len(word) for row in texts for word in row[i].split())
        words = max(map(len, name.split()))
        name = textwrap.fill(name, max(widest, words), break_long_words=False)
      shown.add_column(
        rich.text.Text(name),
        justify='right' if right else 'left',
        overflow='fold',
        no_wrap=right and narrow,
      )
    for row in texts:
      # Text, not str: rich would take parts of an output for markup.
      shown.add_row(*map(rich.text.Text, row))
    return shown


def plain_markdown(text: str) -> str:
  """The text on one line, escaped for Markdown and HTML."""
  flat = ' '.join(text.split()).replace('\\', '\\\\')
  return flat.replace('&', '&amp;').replace('<', '&lt;')


def started(
  config: Any, shown: rich.console.Console | None = None
) -> rich.console.Console:
  """Begins a measurement: checks its outputs, says how its input is read.

  Args:
    config: may have an `input_file`, an `output_file` and a `plot_file`.
    shown: where the measurement is shown; None is `console()`.

  Returns:
    The console.

  Raises:
    ValueError: a file cannot be written, or matplotlib is not installed.
  """
  for name in ('output_file', 'plot_file'):
    if path := vars(config).get(name):
      files.check_writable(path)
  if vars(config).get('plot_file'):
    load_matplotlib()
  shown = shown or console()
  path = vars(config).get('input_file')
  if isinstance(path, str) and (sentence := reading(path)):
    say(shown, sentence)
  return shown


def finish(
  config: Any,
  console: rich.console.Console,
  record: Mapping[str, Any],
  *shown: Table | str,
) -> None:
  """Ends a measurement: writes its record, and shows it.

  The file comes first: who reads the output may leave early.

  Args:
    config: may have an `output_file`.
    console: where it is shown.
    record: what was measured.
    *shown: tables and sentences.

  Raises:
    OSError: the file cannot be written.
  """
  try:
    if config.output_file:
      files.write_json(config.output_file, record)
  finally:
    for part in shown:
      if isinstance(part, str):
        say(console, part)
      else:
        console.print(part)


def say(console: rich.console.Console, sentence: str) -> None:
  """Prints a sentence as it is, without interpreting it as rich's markup."""
  console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def console() -> rich.console.Console:
  """Standard output, as wide as COLUMNS or the terminal says.

  Output to a pipe is not folded, unless COLUMNS is set.
  """
  shown = rich.console.Console()
  given = os.environ.get('COLUMNS', '').isdigit()
  if not (shown.is_terminal or shown.is_jupyter or given):
    shown.width = _NO_EDGE
  return shown


@contextlib.contextmanager
def _lines(describe: Callable[[], str]) -> Iterator[None]:
  """Says what is going on each `EVERY_S`, while the block runs.

  In a thread, because one step may be a compilation of minutes.
  """
  begin = time.monotonic()
  ended = threading.Event()

  def say() -> None:
    while not ended.wait(EVERY_S):
      elapsed = time.monotonic() - begin
      print(f'{describe()}, {elapsed:.0f} s', file=sys.stderr, flush=True)

  thread = threading.Thread(target=say, daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()


@contextlib.contextmanager
def bar(
  console: rich.console.Console, label: str, total: int = 0, done: float = 0
) -> Iterator[Callable[..., None]]:
  """A bar of `total` steps, or only the label, while the block runs.

  It says how many steps are done, how many a second, and the time that is left.
  `done` steps were made before.

  Yields a function that moves it by a number of steps, one by default.
  """
  text, steps, *_ = rich.progress.Progress.get_default_columns()
  progress = rich.progress.Progress(
    rich.progress.SpinnerColumn(),  # it moves while the first step compiles
    text,
    *(
      (steps, rich.progress.TextColumn('{task.fields[pace]}')) if total else ()
    ),
    rich.progress.TimeElapsedColumn(),
    console=console,
    transient=True,
    disable=not console.is_terminal,
  )
  number = progress.add_task(label, total=total, pace='')
  progress.update(number, completed=done)
  first_time, first_steps = 0.0, float(total)

  def pace() -> str:
    (task,) = progress.tasks
    counted = f'{task.completed:.0f} of {total}'
    if task.completed <= first_steps:
      return counted
    rate = (task.completed - first_steps) / (time.monotonic() - first_time)
    left = datetime.timedelta(seconds=round((total - task.completed) / rate))
    return f'{counted}, {rate:.3g} a second, {left} left'

  def advance(count: float = 1) -> None:
    nonlocal first_time, first_steps
    progress.advance(number, count)
    # Before the first steps, which may come together, programs are compiled.
    first_time = first_time or time.monotonic()
    if time.monotonic() - first_time < _TOGETHER_S:
      first_steps = progress.tasks[0].completed
    progress.update(number, pace=pace())

  progress.update(number, pace=pace())

  def describe() -> str:
    return f'{label}: {pace()}' if total else label

  shown = progress if console.is_terminal else _lines(describe)
  with shown:
    yield advance


def save_plot(
  path: str | os.PathLike[str],
  draw: Callable[[Any], None],
  size: tuple[float, float] = (6.4, 4.2),
) -> None:
  """Draws a figure and writes it as PNG, whole or not at all.

  Args:
    path: path of the PNG, in a folder that exists.
    draw: gets a `matplotlib.figure.Figure` to draw on; the user's own
      matplotlib settings have no effect on it.
    size: width and height, inches.

  Raises:
    ValueError: matplotlib is not installed.
    OSError: the file cannot be written.
  """
  matplotlib = load_matplotlib()
  stream = io.BytesIO()
  with matplotlib.rc_context():
    matplotlib.rcdefaults()
    matplotlib.rcParams.update(_STYLE)
    # Without pyplot, which would look for a window system and keep state.
    figure = matplotlib.figure.Figure(figsize=size, layout='constrained')
    draw(figure)
    figure.savefig(stream, format='png', dpi=_DPI, metadata={'Software': None})
  files.write_atomically(path, stream.getvalue())


def load_matplotlib() -> Any:
  """Returns the module matplotlib, with `matplotlib.figure` imported.

  Raises:
    ValueError: it is not installed.
  """
  package('A plot', 'matplotlib.figure', 'plots')
  return package('A plot', 'matplotlib', 'plots')
