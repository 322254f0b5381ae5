"""A pair in a notebook: what T5X's InteractiveModel is to its users.

  model = notebook.load('google/flan-t5-xl', 'google/flan-t5-small')
  model.generate(['Translate to German: Good morning!'])

Whatever is last in a cell shows itself: the model what was loaded and its last
trace, a trace its rounds; as text on a terminal, as HTML in a notebook.
"""

from specdec_jax.notebook.loading import load
from specdec_jax.notebook.model import Interactive

__all__ = ['Interactive', 'load']
