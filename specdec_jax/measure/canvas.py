"""What all plots share: colours, style, and PNG files made by matplotlib.

The same values give the same bytes, whatever the user's own matplotlib settings
are. The colours are those of Okabe and Ito, which can be told apart with every
form of colour blindness.
"""

import io
import os
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from specdec_jax import files

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


def wrapped(title: str, width: int) -> str:
  """Wraps a title into lines; a remark on forced acceptance begins a line."""
  lines = title.replace(' (forced', '\n(forced').splitlines()
  return '\n'.join(textwrap.fill(line, width) for line in lines)


def whiskers(
  values: Sequence[float], intervals: Sequence[Sequence[float]]
) -> list[list[float]]:
  """How far each interval reaches below and above its value.

  As matplotlib wants errors: a list of lengths below, and one of those above.
  """
  both = list(zip(values, intervals, strict=True))
  return [
    [value - low for value, (low, _) in both],
    [high - value for value, (_, high) in both],
  ]


def save(
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


def check_outputs(config: Any) -> None:
  """Checks before a run that its record and its picture can be written.

  Args:
    config: may have an `output_file` and a `plot_file`.

  Raises:
    ValueError: a file cannot be written, or matplotlib is not installed.
  """
  for name in ('output_file', 'plot_file'):
    if path := getattr(config, name, None):
      files.check_writable(path)
  if getattr(config, 'plot_file', None):
    load_matplotlib()


def load_matplotlib() -> Any:
  """Returns the module matplotlib, with `matplotlib.figure` imported.

  Raises:
    ValueError: it is not installed.
  """
  try:
    import matplotlib
    import matplotlib.figure
  except ImportError as error:
    raise ValueError(
      'Plots need matplotlib, which is not installed. Install the extra:'
      " pip install 'specdec_jax[plots]'"
    ) from error
  return matplotlib
