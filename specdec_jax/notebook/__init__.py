"""A target and its drafter in a notebook, like T5X's InteractiveModel.

  model = notebook.load('google/flan-t5-xl', 'google/flan-t5-small')
  model.generate(['Translate to German: Good morning!'])

The last value of a cell is shown: for a model what was loaded and its last
trace, for a trace its rounds; as text on a terminal, as HTML in a notebook.
"""

from specdec_jax.notebook.loading import load
from specdec_jax.notebook.model import Interactive

__all__ = ['Interactive', 'load']
