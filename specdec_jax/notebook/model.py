"""The object that a notebook asks."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import rich.console

from specdec_jax.checks.memory import gib
from specdec_jax.engine import scoring
from specdec_jax.engine.completion import Completion
from specdec_jax.engine.engine import Engine, Texts
from specdec_jax.measure import environment, memory
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.t5 import T5Config
from specdec_jax.notebook.show import Facts, Trace
from specdec_jax.paper import trace


@dataclasses.dataclass(frozen=True)
class Side:
  """One of the two models: where it came from, and its network."""

  checkpoint: str
  network: LanguageModel


class Interactive:
  """A pair of models that is asked by hand; `notebook.load` makes it.

  Attributes:
    engine: that decodes; its `gamma` may be set between calls.
    sides: 'target', and 'draft' if there is one.
    stop_ids: ids that end an output unless a call gives others; None is the
      tokenizer's end of sequence.
    last_trace: of the last call of `trace`; None before it.
  """

  def __init__(
    self,
    engine: Engine,
    sides: Mapping[str, Side],
    stop_ids: Sequence[int] | None = None,
  ):
    self.engine = engine
    self.stop_ids = stop_ids
    self.sides = dict(sides)
    self.last_trace: Trace | None = None

  def generate(
    self, texts: Texts, *, speculative: bool | None = None, **options
  ) -> list[Completion]:
    """Decodes a batch of texts, by `Engine.generate`.

    Args:
      texts: a sequence of strings or of ids.
      speculative: whether the drafter helps; None is yes if there is one.
      **options: as for `Engine.generate`: `sampling`, `seed`, `max_length`...

    Raises:
      ValueError: as `Engine.generate`.
    """
    return self.engine.generate(
      texts,
      speculative=self._speculates(speculative),
      **self._defaults | options,
    )

  def stream(
    self, text: str, *, speculative: bool | None = None, **options
  ) -> Iterator[str]:
    """Yields the output of one text piece by piece, by `Engine.stream`.

    Arguments and errors are those of `generate`.
    """
    return self.engine.stream(
      text,
      speculative=self._speculates(speculative),
      **self._defaults | options,
    )

  def score(
    self,
    texts: Sequence[str | Sequence[int]],
    targets: Sequence[str | Sequence[int]],
  ) -> list[scoring.Score]:
    """The target's log-probability of each output, given its text.

    Args:
      texts: strings, or ids with or without their end of sequence.
      targets: strings, whose end of sequence counts; or ids as they are.

    Returns:
      A `scoring.Score` for each; natural logarithms, temperature 1.

    Raises:
      ValueError: as `scoring.score`, or one string came instead of several.
    """
    for name, value in (('texts', texts), ('targets', targets)):
      if isinstance(value, str):
        raise ValueError(
          f'{name} must be a sequence of strings, got one string: {value!r}.'
        )
    tokenizer = self.engine.tokenizer
    end = tokenizer.eos_id
    if self.stop_ids and end not in self.stop_ids:
      end = self.stop_ids[0]
    outputs = [
      [*tokenizer.encode(one), end]
      if isinstance(one, str)
      else [int(token) for token in one]
      for one in targets
    ]
    inputs = [self.engine.input_ids(text) for text in texts]
    network, params = self.engine.target, self.engine.params.target
    return scoring.score(network, params, inputs, outputs)

  def trace(self, text: str, **options) -> Trace:
    """Decodes one text and shows which proposals were accepted.

    It is kept as `last_trace`. Compiles programs of its own.

    Args:
      text: the input.
      **options: as for `generate`.

    Raises:
      ValueError: as `generate`, or there is no drafter.
    """
    rounds = trace.record(self.engine, text, **self._defaults | options)
    spelled = trace.spell(rounds, self.engine.tokenizer)
    self.last_trace = Trace(text, spelled, options.get('lenience', 1.0))
    return self.last_trace

  @property
  def _defaults(self) -> dict[str, Any]:
    return {'stop_ids': self.stop_ids}

  def _speculates(self, asked: bool | None) -> bool:
    return 'draft' in self.sides if asked is None else asked

  @property
  def facts(self) -> Facts:
    """What is loaded, how large, and where."""
    engine = self.engine
    tokenizer = engine.tokenizer
    both = {
      'device': f'{jax.default_backend()}, {environment.describe()["device"]}',
      'tokenizer': f'{tokenizer.path}, {tokenizer.vocab_size} pieces',
      'gamma': str(engine.gamma),
      'longest input': f'{engine.max_input_len} tokens',
      'longest output': f'{engine.max_decode_len} tokens',
    }
    params = engine.params._asdict()
    models = {
      name: _facts(side, params[name]) for name, side in self.sides.items()
    }
    return Facts(models, both)

  def __repr__(self) -> str:
    paths = ', '.join(
      f'{name}={side.checkpoint!r}' for name, side in self.sides.items()
    )
    return f'Interactive({paths}, gamma={self.engine.gamma})'

  def __rich__(self) -> rich.console.Group:
    return rich.console.Group(*self._shown)

  def _repr_html_(self) -> str:
    return ''.join(part._repr_html_() for part in self._shown)

  @property
  def _shown(self) -> list[Facts | Trace]:
    last = self.last_trace
    return [self.facts] if last is None else [self.facts, last]


def _facts(side: Side, params) -> dict[str, str]:
  leaves = jax.tree.leaves(params)
  return {
    'checkpoint': side.checkpoint,
    'network': type(side.network).__name__,
    **_sizes(side.network),
    'parameters': f'{sum(leaf.size for leaf in leaves):,}',
    'dtype': ', '.join(sorted({str(leaf.dtype) for leaf in leaves})),
    'memory': gib(memory.tree_bytes(leaves)),
  }


def _sizes(network: LanguageModel) -> dict[str, str]:
  config = getattr(network, 'config', None)
  if isinstance(config, T5Config):
    layers = f'{config.num_encoder_layers} + {config.num_decoder_layers}'
  elif isinstance(config, GPTConfig):
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
