"""Decodes files of lines, and tasks, for scripts/decode.py.

`DecodeConfig` describes a run over lines, which compares plain and speculative
decoding, and `decode` runs it. `TaskConfig` describes a run over a task as T5X
users know it, and `decode_task` runs it. Both can be killed and resumed.
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
