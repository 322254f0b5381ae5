"""Decodes files of lines, and tasks, for scripts/decode.py.

`DecodeConfig` describes a run over lines, which compares plain and speculative
decoding, and `decode` runs it. `TaskConfig` describes a run over a task as T5X
users know it, and `decode_task` runs it. Both can be killed and resumed. `look`
is a first look at a pair, and `distil` makes a drafter for a target.
"""

from typing import TYPE_CHECKING, Any

from specdec_jax.infer.failures import AllFailedError
from specdec_jax.infer.first_look import TryConfig, look
from specdec_jax.infer.run import decode, decode_task
from specdec_jax.infer.settings import (
  Beams,
  DecodeConfig,
  TaskConfig,
  load_drafter,
  open_tokenizer,
)

if TYPE_CHECKING:
  from specdec_jax.infer.own_drafter import DistilConfig, distil

__all__ = [
  'AllFailedError',
  'Beams',
  'DecodeConfig',
  'DistilConfig',
  'TaskConfig',
  'TryConfig',
  'decode',
  'decode_task',
  'distil',
  'load_drafter',
  'look',
  'open_tokenizer',
]


def __getattr__(name: str) -> Any:
  """What `own_drafter` has, which imports all that trains, when it is used."""
  if name not in ('DistilConfig', 'distil'):
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  from specdec_jax.infer import own_drafter

  return getattr(own_drafter, name)
