"""The families of networks, by their configurations."""

from specdec_jax.models.causal_lm import CausalLM, CausalLMConfig
from specdec_jax.models.gpt import GPT, GPTConfig
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.models.t5gemma import T5Gemma, T5GemmaConfig

Config = T5Config | GPTConfig | CausalLMConfig | T5GemmaConfig
Network = T5 | GPT | CausalLM | T5Gemma


def network_of(config: Config) -> Network:
  """The network of a configuration."""
  if isinstance(config, T5Config):
    return T5(config)
  if isinstance(config, GPTConfig):
    return GPT(config)
  if isinstance(config, T5GemmaConfig):
    return T5Gemma(config)
  return CausalLM(config)
