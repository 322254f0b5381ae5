"""The engine of a notebook, which can show itself and its last trace."""

from collections.abc import Sequence

import jax
import rich.console

from specdec_jax.checks.memory import gib
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.trace_view import Trace
from specdec_jax.measure import environment, memory
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.causal_lm import CausalLMConfig
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.m2m100 import M2M100Config
from specdec_jax.models.model import Model
from specdec_jax.models.t5 import T5Config
from specdec_jax.models.t5gemma import T5GemmaConfig
from specdec_jax.notebook.show import Facts


class Interactive(Engine):
  """An engine for interactive use; `notebook.load` makes it.

  Attributes:
    last_trace: result of the last call of `trace`; None before the first.
  """

  last_trace: Trace | None = None

  def trace(self, text: str | Sequence[int], **options) -> Trace:
    """`Engine.trace`; the result is kept as `last_trace`."""
    self.last_trace = super().trace(text, **options)
    return self.last_trace

  @property
  def facts(self) -> Facts:
    """What is loaded, how large, and where."""
    tokenizer = self.tokenizer
    both = {
      'device': f'{jax.default_backend()}, {environment.describe()["device"]}',
      'tokenizer': f'{tokenizer.path}, {tokenizer.vocab_size} pieces',
      'gamma': f'{self.gamma} at most' if self.rule else str(self.gamma),
      'longest input': f'{self.max_input_len} tokens',
      'longest output': f'{self.max_decode_len} tokens',
    }
    params = self.params._asdict()
    models = {
      name: _facts(model, params[name]) for name, model in self.models.items()
    }
    return Facts(models, both)

  def __rich__(self) -> rich.console.Group:
    return rich.console.Group(*self._shown)

  def _repr_html_(self) -> str:
    return ''.join(part._repr_html_() for part in self._shown)

  @property
  def _shown(self) -> list[Facts | Trace]:
    last = self.last_trace
    return [self.facts] if last is None else [self.facts, last]


def _facts(model: Model, params) -> dict[str, str]:
  leaves = jax.tree.leaves(params)
  return {
    'checkpoint': model.name,
    'network': type(model.network).__name__,
    **_sizes(model.network),
    'parameters': f'{sum(leaf.size for leaf in leaves):,}',
    'dtype': ', '.join(sorted({str(leaf.dtype) for leaf in leaves})),
    'memory': gib(memory.tree_bytes(leaves)),
  }


def _sizes(network: LanguageModel) -> dict[str, str]:
  config = getattr(network, 'config', None)
  if isinstance(config, T5GemmaConfig):
    layers = f'{config.encoder.num_layers} + {config.decoder.num_layers}'
    config = config.decoder
  elif isinstance(config, T5Config | M2M100Config):
    layers = f'{config.num_encoder_layers} + {config.num_decoder_layers}'
  elif isinstance(config, GPTConfig | CausalLMConfig):
    layers = str(config.num_layers)
  else:
    return {}
  return {
    'layers': layers,
    'width': str(config.emb_dim),
    'heads': f'{config.num_heads} of {config.head_dim}',
    'feed-forward': f'{config.mlp_dim}, {" x ".join(config.mlp_activations)}',
    'vocabulary': str(config.vocab_size),
  }
