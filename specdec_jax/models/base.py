"""The `LanguageModel` contract, which targets and draft models fulfil."""

import dataclasses
import functools
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax

from specdec_jax.tree_shape import Tree

Params = Any  # a nested dict of arrays, named as T5X names them
Cache = TypeVar('Cache')


@runtime_checkable
class LanguageModel(Protocol[Cache]):
  """The contract of a network: pure functions over explicit pytrees.

  The decoding loops read only one field of a cache: `length`, int32[B], the
  number of tokens that each row's cache holds. Slots past `length` are never
  read.

  A network of your own is a subclass: `start_id`, `pad_id`, `ends_inputs`,
  `reads_encoder`, `encoded_dim` and `param_shapes` then have T5's defaults.

  Examples:
    >>> import jax, jax.numpy as jnp
    >>> sizes = sd.GPTConfig(
    ...   vocab_size=50,
    ...   emb_dim=8,
    ...   num_heads=2,
    ...   num_layers=1,
    ...   head_dim=4,
    ...   mlp_dim=16,
    ... )
    >>> network = sd.GPT(sizes)
    >>> params = network.init(jax.random.key(0))
    >>> cache = network.prefill(
    ...   params, jnp.ones((2, 1), jnp.int32), max_length=8
    ... )
    >>> tokens = jnp.array([[3, 4, 5], [6, 7, 8]])
    >>> features, cache = network.extend(params, cache, tokens)
    >>> network.head(params, features).shape
    (2, 3, 50)
    >>> network.rewind(cache, jnp.array([1, 2])).length.tolist()
    [1, 2]
  """

  @property
  def vocab_size(self) -> int:
    """V, the width of the logits."""

  @property
  def has_encoder(self) -> bool:
    """Whether an encoder reads the inputs; otherwise they are in the prompt.

    The decoder of an encoder-decoder begins with its start token and, if the
    caller wants one, a prompt. A decoder-only model begins with its prompt,
    whose first token takes the place of the start token.
    """

  @property
  def input_vocab_size(self) -> int:
    """The number of ids that inputs may have."""
    return self.vocab_size

  @property
  def most_positions(self) -> int:
    """The most tokens of a sequence, if positions are learned; 0: no limit."""
    return 0

  @property
  def start_id(self) -> int:
    """The id that a decoder with an encoder begins with."""
    return 0

  @property
  def pad_id(self) -> int:
    """The id that inputs are padded with; the encoder ignores padding."""
    return 0

  @property
  def ends_inputs(self) -> bool:
    """Whether an end-of-sequence id ends each text that the encoder reads."""
    return True

  @property
  def reads_encoder(self) -> bool:
    """Whether the network is a decoder that reads its target's encoder."""
    return False

  @property
  def encoded_dim(self) -> int | None:
    """Width of the encoder's output; None if no drafter can read it."""
    return None

  def init(self, key: jax.Array) -> Params:
    """Returns random parameters, named and shaped as in a checkpoint."""

  def param_shapes(self) -> Params:
    """Returns names, shapes and dtypes of the parameters that `init` makes."""
    return jax.eval_shape(self.init, jax.random.key(0))

  def encode(self, params: Params, inputs: jax.Array) -> jax.Array:
    """Runs the encoder: maps int32[B, E] to [B, E, `encoded_dim`].

    Only a target whose drafter reads its encoder needs this method.
    """
    raise NotImplementedError

  def prefill(
    self,
    params: Params,
    inputs: jax.Array,
    max_length: int,
    longest: int | None = None,
    encoded: jax.Array | None = None,
  ) -> Cache:
    """Reads the inputs once and returns a cache ready for decoding.

    Args:
      params: the model's parameters.
      inputs: int32[B, E], tokens of the input, `pad_id` past each row's end. A
        decoder-only model only uses their number of rows, B.
      max_length: T, the decoder slots to allocate, for the whole run.
      longest: number of tokens of the longest sequence, if several sequences
        share a row's slots; None means `max_length`.
      encoded: the result of `encode` for these inputs; None runs the encoder.

    Returns:
      A cache with `length` 0 in every row.
    """

  def extend(
    self,
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    tree: Tree | None = None,
  ) -> tuple[jax.Array, Cache]:
    """Reads S more tokens per row, each row at its own position.

    The feature of a token is its hidden state [M] after the final norm; from it
    `head` computes the logits of the next token. The caller makes sure that
    `cache.length + S` never exceeds the number of slots.

    Args:
      params: the model's parameters.
      cache: a result of `prefill`, `extend`, `rewind` or `keep`.
      tokens: int32[B, S], S >= 1.
      tree: the parent of each token; None: each token follows the one before.

    Returns:
      Features, [B, S, M], and the cache with `length` grown by S.
    """

  def head(self, params: Params, features: jax.Array) -> jax.Array:
    """Applies the output layer: [..., M] to logits float32[..., V]."""

  def embed(self, params: Params, tokens: jax.Array) -> jax.Array:
    """Maps tokens int32[...] to the decoder's embeddings [..., M].

    Only drafters that read features call it.
    """

  def rewind(self, cache: Cache, length: jax.Array) -> Cache:
    """Forgets all but the first `length` (int32[B]) tokens per row, in O(1)."""

  def keep(self, cache: Cache, length: jax.Array, slots: jax.Array) -> Cache:
    """Keeps the first `length` (int32[B]) slots per row and some later ones.

    Args:
      cache: a result of `extend` with a tree.
      length: int32[B], the number of first slots that stay as they are.
      slots: int32[B, N], >= length, the slots of the tokens that are kept after
        the first `length`.

    Returns:
      The cache with `length` + N tokens.
    """


def read_prompt(
  model: LanguageModel[Cache],
  params: Params,
  inputs: jax.Array,
  max_length: int,
  prompt: jax.Array,
  longest: int | None = None,
  encoded: jax.Array | None = None,
) -> tuple[jax.Array | None, Cache]:
  """Makes a cache and reads the inputs and all but the last prompt token.

  The first round of decoding reads the last token of a prompt, because it needs
  that token's logits. Rows with shorter prompts also read padding, but the loop
  then rewinds each row to the end of its prompt, so the padding is never used.

  Args:
    model: a `LanguageModel`.
    params: its parameters.
    inputs: int32[B, E], `pad_id` past each row's end.
    max_length: T, the decoder slots to allocate.
    prompt: the prompts, int32[B, P], P < T.
    longest: number of tokens of the longest sequence, as for
      `LanguageModel.prefill`.
    encoded: the encoder's output for the inputs; None runs the encoder.

  Returns:
    The features [B, P - 1, M] of the prompt tokens that were read, None if P is
    1; and a cache with `length` P - 1 in every row.
  """
  cache = model.prefill(params, inputs, max_length, longest, encoded)
  if prompt.shape[1] == 1:
    return None, cache
  return model.extend(params, cache, prompt[:, :-1])


@dataclasses.dataclass(frozen=True)
class NetworkWrapper:
  """Forwards all that a subclass does not override to the wrapped network.

  Attributes:
    network: the wrapped `LanguageModel`.
  """

  network: Any

  def prefill(self, params, inputs, max_length, longest=None, encoded=None):
    params, inputs = self._params(params), self._tokens(inputs)
    return self.network.prefill(params, inputs, max_length, longest, encoded)

  def extend(self, params, cache, tokens, tree=None):
    params, tokens = self._params(params), self._tokens(tokens)
    return self.network.extend(params, cache, tokens, tree)

  def embed(self, params, tokens):
    return self.network.embed(self._params(params), self._tokens(tokens))

  def _params(self, params):
    """Returns the wrapped network's part of the parameters."""
    return params

  def _tokens(self, tokens):
    """Returns the tokens that the wrapped network reads in place of these."""
    return tokens

  def __getattr__(self, name: str) -> Any:
    return getattr(object.__getattribute__(self, 'network'), name)


def param_shapes(network: LanguageModel | NetworkWrapper) -> Params:
  """Returns `network.param_shapes()`; equal networks share the result.

  The result is cached, because tracing `init` for it takes a third of a second
  for 20 layers.
  """
  return _param_shapes(network)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=16)
def _param_shapes(network: LanguageModel) -> Params:
  return network.param_shapes()
