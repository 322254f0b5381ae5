"""The public names, for editors and for `__init__.py`, which imports them."""
# ruff: noqa: F401

from specdec_jax.checkpoints import check_params as check_params
from specdec_jax.checkpoints import save_orbax as save_orbax
from specdec_jax.drafters.base import Context as Context
from specdec_jax.drafters.base import Drafter as Drafter
from specdec_jax.drafters.cascade import cascade as cascade
from specdec_jax.drafters.heads import load as load_heads
from specdec_jax.drafters.ngram import ngram as ngram
from specdec_jax.drafters.ngram_table import NGramTable as NGramTable
from specdec_jax.drafters.ngram_table import fit as fit_ngram_table
from specdec_jax.drafters.ngram_table import load as load_ngram_table
from specdec_jax.drafters.prompt_lookup import prompt_lookup as prompt_lookup
from specdec_jax.drafters.small_model import small_model as small_model
from specdec_jax.drafters.small_model_tree import (
  small_model_tree as small_model_tree,
)
from specdec_jax.drafters.translation_memory import Memory as Memory
from specdec_jax.drafters.translation_memory import remember as remember
from specdec_jax.drafters.translation_memory import (
  translation_memory as translation_memory,
)
from specdec_jax.drafters.uniform import uniform as uniform
from specdec_jax.drafters.with_fallback import with_fallback as with_fallback
from specdec_jax.engine.completion import Completion as Completion
from specdec_jax.engine.completion import CompletionStats as CompletionStats
from specdec_jax.engine.engine import Engine as Engine
from specdec_jax.engine.loading import load as load
from specdec_jax.engine.options import EngineConfig as EngineConfig
from specdec_jax.models.bart import M2M100 as M2M100
from specdec_jax.models.bart import Bart as Bart
from specdec_jax.models.bart import BartConfig as BartConfig
from specdec_jax.models.bart import M2M100Config as M2M100Config
from specdec_jax.models.base import LanguageModel as LanguageModel
from specdec_jax.models.causal_lm import CausalLM as CausalLM
from specdec_jax.models.causal_lm import CausalLMConfig as CausalLMConfig
from specdec_jax.models.gpt import GPT as GPT
from specdec_jax.models.gpt import GPTConfig as GPTConfig
from specdec_jax.models.model import Model as Model
from specdec_jax.models.rope import Rope as Rope
from specdec_jax.models.t5 import T5 as T5
from specdec_jax.models.t5 import T5Config as T5Config
from specdec_jax.models.t5gemma import T5Gemma as T5Gemma
from specdec_jax.models.t5gemma import T5GemmaConfig as T5GemmaConfig
from specdec_jax.partitioning import Placement as Placement
from specdec_jax.probs import SamplingConfig as SamplingConfig
from specdec_jax.text.tokenizer import Tokenizer as Tokenizer
from specdec_jax.tree_shape import TreeShape as TreeShape
from specdec_jax.tree_shape import branching as branching
from specdec_jax.types import DecodeStats as DecodeStats
from specdec_jax.types import Draft as Draft
from specdec_jax.types import FinishReason as FinishReason
from specdec_jax.types import Generation as Generation
from specdec_jax.types import Verdict as Verdict

__version__: str
