"""Decoding files of text lines; what scripts/decode.py runs.

`DecodeConfig` describes a run, `decode` does it.
"""

from specdec_jax.infer.run import DecodeConfig, decode

__all__ = ['DecodeConfig', 'decode']
