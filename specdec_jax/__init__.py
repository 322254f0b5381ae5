"""Speculative decoding of T5-family models in JAX.

A drafter proposes a `Draft`, the target extends its cache over it in one call,
`verify` returns a `Verdict`, and the caches rewind to what was kept.
"""

from specdec_jax.checkpoints import (
  check_params,
  load,
  save_orbax,
)
from specdec_jax.drafters.base import Context, Drafter
from specdec_jax.drafters.cascade import cascade
from specdec_jax.drafters.copy import copy
from specdec_jax.drafters.first_of import first_of
from specdec_jax.drafters.ngram import ngram
from specdec_jax.drafters.ngram_fit import fit as fit_ngram_table
from specdec_jax.drafters.ngram_table import NGramTable
from specdec_jax.drafters.ngram_table import load as load_ngram_table
from specdec_jax.drafters.small_model import small_model
from specdec_jax.drafters.uniform import uniform
from specdec_jax.engine.completion import Completion, CompletionStats
from specdec_jax.engine.engine import Engine, Model, joined, load_model
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.gpt import GPT, GPTConfig
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.partitioning import Placement
from specdec_jax.probs import SamplingConfig
from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.types import (
  DecodeStats,
  Draft,
  FinishReason,
  Generation,
  Verdict,
)

__all__ = [
  'Completion',
  'CompletionStats',
  'Context',
  'DecodeStats',
  'Draft',
  'Drafter',
  'Engine',
  'FinishReason',
  'GPT',
  'GPTConfig',
  'Generation',
  'LanguageModel',
  'Model',
  'NGramTable',
  'Placement',
  'SamplingConfig',
  'T5',
  'T5Config',
  'Tokenizer',
  'Verdict',
  'cascade',
  'check_params',
  'copy',
  'first_of',
  'fit_ngram_table',
  'joined',
  'load',
  'load_model',
  'load_ngram_table',
  'ngram',
  'save_orbax',
  'small_model',
  'uniform',
]
