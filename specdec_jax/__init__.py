"""Speculative decoding of T5-family models in JAX.

A drafter proposes a `Draft`, the target extends its cache over it in one call,
`verify` returns a `Verdict`, and the caches rewind to what was kept.

  target = specdec_jax.load('google/flan-t5-xl', dtype='bfloat16')
  draft = specdec_jax.load('google/flan-t5-small', dtype='bfloat16')
  engine = specdec_jax.Engine(target, draft)
  for done in engine.generate(['Translate to German: Good morning!']):
    print(done.text, done.stats.acceptance_rate)
"""
# ruff: noqa: F401

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors; at run time a name is imported when used
  from specdec_jax.checkpoints import check_params, save_orbax
  from specdec_jax.drafters.base import Context, Drafter
  from specdec_jax.drafters.cascade import cascade
  from specdec_jax.drafters.heads import load as load_heads
  from specdec_jax.drafters.ngram import ngram
  from specdec_jax.drafters.ngram_table import NGramTable
  from specdec_jax.drafters.ngram_table import fit as fit_ngram_table
  from specdec_jax.drafters.ngram_table import load as load_ngram_table
  from specdec_jax.drafters.prompt_lookup import prompt_lookup
  from specdec_jax.drafters.small_model import small_model
  from specdec_jax.drafters.small_model_tree import small_model_tree
  from specdec_jax.drafters.uniform import uniform
  from specdec_jax.drafters.with_fallback import with_fallback
  from specdec_jax.engine.completion import Completion, CompletionStats
  from specdec_jax.engine.engine import Engine
  from specdec_jax.engine.loading import load
  from specdec_jax.models.base import LanguageModel
  from specdec_jax.models.causal_lm import CausalLM, CausalLMConfig
  from specdec_jax.models.gpt import GPT, GPTConfig
  from specdec_jax.models.m2m100 import M2M100, M2M100Config
  from specdec_jax.models.model import Model
  from specdec_jax.models.rope import Rope
  from specdec_jax.models.t5 import T5, T5Config
  from specdec_jax.models.t5gemma import T5Gemma, T5GemmaConfig
  from specdec_jax.partitioning import Placement
  from specdec_jax.probs import SamplingConfig
  from specdec_jax.text.tokenizer import Tokenizer
  from specdec_jax.tree_shape import TreeShape, branching
  from specdec_jax.types import (
    DecodeStats,
    Draft,
    FinishReason,
    Generation,
    Verdict,
  )

  __version__: str

# Module -> names, and `name=what it is called there` where that differs.
# `import specdec_jax` alone is quick: JAX is imported with the first name.
_NAMES = {
  'checkpoints': 'check_params save_orbax',
  'drafters.base': 'Context Drafter',
  'drafters.cascade': 'cascade',
  'drafters.heads': 'load_heads=load',
  'drafters.ngram': 'ngram',
  'drafters.ngram_table': (
    'NGramTable fit_ngram_table=fit load_ngram_table=load'
  ),
  'drafters.prompt_lookup': 'prompt_lookup',
  'drafters.small_model': 'small_model',
  'drafters.small_model_tree': 'small_model_tree',
  'drafters.uniform': 'uniform',
  'drafters.with_fallback': 'with_fallback',
  'engine.completion': 'Completion CompletionStats',
  'engine.engine': 'Engine',
  'engine.loading': 'load',
  'models.base': 'LanguageModel',
  'models.causal_lm': 'CausalLM CausalLMConfig',
  'models.gpt': 'GPT GPTConfig',
  'models.m2m100': 'M2M100 M2M100Config',
  'models.model': 'Model',
  'models.rope': 'Rope',
  'models.t5': 'T5 T5Config',
  'models.t5gemma': 'T5Gemma T5GemmaConfig',
  'partitioning': 'Placement',
  'probs': 'SamplingConfig',
  'text.tokenizer': 'Tokenizer',
  'tree_shape': 'TreeShape branching',
  'types': 'DecodeStats Draft FinishReason Generation Verdict',
}
_PLACES = {
  name.partition('=')[0]: (module, name.rpartition('=')[2])
  for module, names in _NAMES.items()
  for name in names.split()
}

# Written out: type checkers do not compute it.
__all__ = [
  'CausalLM', 'CausalLMConfig', 'Completion', 'CompletionStats', 'Context',
  'DecodeStats', 'Draft', 'Drafter', 'Engine', 'FinishReason', 'GPT',
  'GPTConfig', 'Generation', 'LanguageModel', 'M2M100', 'M2M100Config', 'Model',
  'NGramTable', 'Placement', 'Rope', 'SamplingConfig', 'T5', 'T5Config',
  'T5Gemma', 'T5GemmaConfig', 'Tokenizer', 'TreeShape', 'Verdict',
  'branching', 'cascade', 'check_params', 'fit_ngram_table', 'load',
  'load_heads', 'load_ngram_table', 'ngram', 'prompt_lookup',
  'save_orbax', 'small_model', 'small_model_tree',
  'uniform', 'with_fallback',
]  # fmt: skip


def __getattr__(name: str) -> Any:
  if name == '__version__':
    from importlib import metadata

    return metadata.version(__name__)
  if name not in _PLACES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  module, there = _PLACES[name]
  value = getattr(importlib.import_module(f'{__name__}.{module}'), there)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
