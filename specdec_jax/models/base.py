"""The `LanguageModel` contract, of targets and of models that draft."""

import dataclasses
import functools
from typing import Any, Protocol, TypeVar

import jax

from specdec_jax.tree_shape import Tree

Params = Any  # a nested dict of arrays, named as T5X names them
Cache = TypeVar('Cache')
START_ID = 0  # what decoders begin with, see `start_id`
PAD_ID = 0  # what inputs are padded with, see `pad_id`


class LanguageModel(Protocol[Cache]):
  """The contract of a network: pure functions over explicit pytrees.

  A cache is opaque to the loops except for `length`: int32[B], the tokens that
  each row's cache holds. Slots past `length` are never read.

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
    """Whether an encoder reads the inputs; otherwise the prompt holds them.

    The decoder of an encoder-decoder begins with its start token and, if the
    caller wants one, a prompt. A decoder-only model begins with its prompt,
    whose first token takes the place of the start token.
    """

  def init(self, key: jax.Array) -> Params:
    """Random parameters, with the names and shapes that a checkpoint has."""

  def prefill(
    self,
    params: Params,
    inputs: jax.Array,
    max_length: int,
    longest: int | None = None,
  ) -> Cache:
    """Reads the inputs once and returns a cache ready for decoding.

    A network with an encoder may also have `encode(params, inputs) -> [B, E,
    M]`, and take its result here as `encoded`: then a drafter can read it too,
    see `Drafter.reads_encoder`.

    Args:
      params: the model's parameters.
      inputs: int32[B, E], tokens of the input, `pad_id` past each row's end. A
        decoder-only model uses only B.
      max_length: T, the decoder slots to allocate, for the whole run.
      longest: tokens of the longest sequence, where several share the slots;
        None is `max_length`.

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
    """Reads S more tokens per row, each row at its own place.

    The feature of a token is the last hidden state [M] that the output layer
    reads, after the final norm: `head` makes of it the logits of the token that
    follows. The caller makes sure that `cache.length + S` never exceeds the
    slots.

    Args:
      params: the model's parameters.
      cache: from `prefill`, `extend`, `rewind` or `keep`.
      tokens: int32[B, S], S >= 1.
      tree: how the tokens hang together; None is one after another.

    Returns:
      Features, [B, S, M], and the cache with `length` grown by S.
    """

  def head(self, params: Params, features: jax.Array) -> jax.Array:
    """The output layer: maps features [..., M] to logits float32[..., V]."""

  def embed(self, params: Params, tokens: jax.Array) -> jax.Array:
    """Maps tokens int32[...] to the decoder's embeddings [..., M].

    Only drafters that read features call it.
    """

  def rewind(self, cache: Cache, length: jax.Array) -> Cache:
    """Forgets all but the first `length` (int32[B]) tokens per row, in O(1)."""

  def keep(self, cache: Cache, length: jax.Array, slots: jax.Array) -> Cache:
    """Keeps the first `length` (int32[B]) slots per row and some later ones.

    Args:
      cache: from `extend` with a tree.
      length: int32[B].
      slots: int32[B, N], >= length, the slots whose tokens are to follow.

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
  """A cache that has read the inputs, and each prompt but its last token.

  The last token of a prompt is read by the first round, which needs its logits.
  Prompts differ in length: a shorter row reads padding past its prompt, but
  that lies past the length that the loop rewinds to, and is never used.

  Args:
    model: a `LanguageModel`.
    params: its parameters.
    inputs: int32[B, E], `pad_id` past each row's end.
    max_length: T, the decoder slots to allocate.
    prompt: int32[B, P], P < T.
    longest: as of `LanguageModel.prefill`.
    encoded: float[B, E, M], what an encoder has said of the inputs; None leaves
      it to the model.

  Returns:
    The features of what was read of the prompts, [B, P - 1, M], None of
    nothing; and a cache with `length` P - 1 in every row.
  """
  # A network that knows none of these need not take the argument.
  given: dict[str, Any] = {'longest': longest, 'encoded': encoded}
  known = {name: value for name, value in given.items() if value is not None}
  cache = model.prefill(params, inputs, max_length, **known)
  if prompt.shape[1] == 1:
    return None, cache
  return model.extend(params, cache, prompt[:, :-1])


def reads_encoder(network: Any) -> bool:
  """Whether a network has no encoder of its own and reads a target's."""
  return bool(getattr(network, 'reads_encoder', False))


def start_id(network: Any) -> int:
  """The id that the decoder of a network with an encoder begins with.

  It is 0 (T5's) unless the network has a `start_id` of its own.
  """
  return int(getattr(network, 'start_id', START_ID))


def pad_id(network: Any) -> int:
  """The id that an encoder's inputs are padded with, and that it ignores.

  It is 0 (T5's) unless the network has a `pad_id` of its own.
  """
  return int(getattr(network, 'pad_id', PAD_ID))


def ends_inputs(network: Any) -> bool:
  """Whether the end of sequence follows a text that an encoder reads.

  It does, as in T5, unless the network says otherwise.
  """
  return bool(getattr(network, 'ends_inputs', True))


@dataclasses.dataclass(frozen=True)
class NetworkWrapper:
  """Forwards what a wrapped network says and does, as far as it is the same.

  Attributes:
    network: the `LanguageModel` within.
  """

  network: Any

  def __getattr__(self, name: str) -> Any:
    return getattr(object.__getattribute__(self, 'network'), name)


def param_shapes(network: LanguageModel) -> Params:
  """Names, shapes and dtypes of a network's parameters, as `init` gives them.

  Equal networks share them. A network may know a quicker way than to trace its
  `init`: 20 layers take a third of a second.
  """
  kept: Any = network
  try:
    return _param_shapes(kept)
  except TypeError:  # somebody's own, which cannot be a key
    return _param_shapes.__wrapped__(kept)


@functools.lru_cache(maxsize=16)
def _param_shapes(network: Any) -> Params:
  quick = getattr(network, 'param_shapes', None)
  return quick() if quick else jax.eval_shape(network.init, jax.random.key(0))
