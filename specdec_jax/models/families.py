"""The families of networks, by their configurations."""

from specdec_jax.models.causal_lm import CausalLM, CausalLMConfig
from specdec_jax.models.gpt import GPT, GPTConfig
from specdec_jax.models.t5 import T5, T5Config

Config = T5Config | GPTConfig | CausalLMConfig
Network = T5 | GPT | CausalLM


def network_of(config: Config) -> Network:
  """The network of a configuration."""
  if isinstance(config, T5Config):
    return T5(config)
  if isinstance(config, GPTConfig):
    return GPT(config)
  return CausalLM(config)
