"""Decodes files of lines, and tasks, with an engine.

`DecodeConfig` describes a run and `decode` runs it; it can be killed at any
moment and started again. `evaluate` measures the quality of a pair.
"""

from specdec_jax.engine.request import Options
from specdec_jax.infer.data import (
  DecodeConfig,
  RunOptions,
  load_drafter,
  open_tokenizer,
)
from specdec_jax.infer.quality import EvaluateConfig, evaluate
from specdec_jax.infer.run import AllFailedError, decode

__all__ = [
  'AllFailedError',
  'DecodeConfig',
  'EvaluateConfig',
  'Options',
  'RunOptions',
  'decode',
  'evaluate',
  'load_drafter',
  'open_tokenizer',
]
