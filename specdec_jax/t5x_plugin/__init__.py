"""Speculative decoding inside T5X: names for its gin files.

  MODEL = @t5x_plugin.EncoderDecoderModel()

See docs/from-t5x.md, and `gin/t5x/speculative.gin`, which has all bindings. The
classes derive from T5X's; T5X is imported when one of them is first used.
"""

import functools
from typing import Any

from specdec_jax.t5x_plugin import model
from specdec_jax.t5x_plugin.model import (
  beam_search,
  restore_drafter,
  temperature_sample,
)

__all__ = [
  'EncoderDecoderModel',
  'InteractiveModel',
  'beam_search',
  'restore_drafter',
  'temperature_sample',
]


_BASES = {
  'EncoderDecoderModel': (model.Speculates, 'models'),
  'InteractiveModel': (model.RestoresDrafter, 'interactive_model'),
}


def __getattr__(name: str) -> Any:
  if name not in _BASES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return _class_of(name)


@functools.cache
def _class_of(name: str) -> Any:
  base, module = _BASES[name]
  t5x_base = getattr(model.import_t5x(module), name)
  return type(name, (base, t5x_base), {'__module__': __name__})
