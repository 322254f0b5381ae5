"""The families of networks, and which configuration belongs to which."""

from specdec_jax.models.bart import M2M100, Bart, BartConfig
from specdec_jax.models.base import LanguageModel, NetworkWrapper
from specdec_jax.models.causal_lm import CausalLM, CausalLMConfig
from specdec_jax.models.gpt import GPT, GPTConfig
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.models.t5gemma import T5Gemma, T5GemmaConfig

Config = T5Config | GPTConfig | CausalLMConfig | BartConfig | T5GemmaConfig
Network = T5 | GPT | CausalLM | Bart | T5Gemma

_NETWORKS: dict[type, type] = {
  network.__annotations__['config']: network
  for network in (T5, GPT, CausalLM, Bart, M2M100, T5Gemma)
}


def network_of(config: Config) -> Network:
  """Returns the network that a configuration describes."""
  network: Network = _NETWORKS[type(config)](config)
  return network


def config_of(network: LanguageModel | NetworkWrapper | None) -> Config | None:
  """Returns a network's configuration; None outside of these families."""
  while isinstance(network, NetworkWrapper):
    network = network.network
  return network.config if isinstance(network, Network) else None
