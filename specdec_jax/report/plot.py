"""Draws plots in one style, whatever the user's own matplotlib settings are.

The same values always result in a PNG of the same bytes.
"""

import io
import os
from collections.abc import Callable
from typing import Any

from specdec_jax import files
from specdec_jax.checks.fields import package

# Okabe and Ito's colours, which differ with every form of colour blindness.
PALETTE = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')
_STYLE = {
  'axes.axisbelow': True,
  'axes.grid': True,
  'axes.spines.right': False,
  'axes.spines.top': False,
  'axes.titlesize': 'medium',
  # This font comes with matplotlib, so it is the same on all machines.
  'font.family': 'DejaVu Sans',
  'font.size': 10.0,
  'grid.color': '#E3E3E3',
  'legend.frameon': False,
  'lines.linewidth': 1.8,
}
_DPI = 150


def save_plot(
  path: str | os.PathLike[str],
  draw: Callable[[Any], None],
  size: tuple[float, float] = (6.4, 4.2),
) -> None:
  """Draws a figure and writes it as PNG, whole or not at all.

  Args:
    path: path of the PNG, in a folder that exists.
    draw: function that draws on the `matplotlib.figure.Figure` that it gets.
      The user's own matplotlib settings have no effect on this figure.
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
    # pyplot is not used, because it would look for a window system and keep
    # state between calls.
    figure = matplotlib.figure.Figure(figsize=size, layout='constrained')
    draw(figure)
    figure.savefig(stream, format='png', dpi=_DPI, metadata={'Software': None})
  files.write_atomically(path, stream.getvalue())


def load_matplotlib() -> Any:
  """Returns the module matplotlib, with `matplotlib.figure` imported.

  Raises:
    ValueError: matplotlib is not installed.
  """
  package('A plot', 'matplotlib.figure', 'plots')
  return package('A plot', 'matplotlib', 'plots')
