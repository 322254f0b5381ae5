"""Decoding files of lines, and tasks; what scripts/decode.py runs.

`DecodeConfig` describes a run over lines, which compares both ways of decoding,
and `decode` does it. `TaskConfig` describes a run over a task as T5X users know
it, and `decode_task` does it. Both can be killed and go on where they were.
"""

from specdec_jax.infer.failures import AllFailedError
from specdec_jax.infer.run import decode, decode_task
from specdec_jax.infer.settings import (
  DecodeConfig,
  TaskConfig,
  load_drafter,
)

__all__ = [
  'AllFailedError',
  'DecodeConfig',
  'TaskConfig',
  'decode',
  'decode_task',
  'load_drafter',
]
