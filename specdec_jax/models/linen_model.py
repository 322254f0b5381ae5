"""What the networks made of linen modules share: one call, one method."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from specdec_jax.models.base import Params


class LinenModel:
  """Most of a `FeatureModel`, by methods of the same names of a linen module.

  Heirs add what differs: `init`, `prefill`, teacher-forced calls, and `_apply`.

  Attributes:
    config: the shape of the network.
  """

  config: Any

  def _apply(self, params: Params, *args: Any, **kwargs: Any) -> Any:
    """Calls the linen module, with those of `params` that are its own."""
    raise NotImplementedError

  @property
  def vocab_size(self) -> int:
    """V, the width of the logits."""
    return self.config.vocab_size

  def param_shapes(self) -> Params:
    """What `models.base.param_shapes` gives, by one layer of each stack."""
    fields = [field.name for field in dataclasses.fields(self.config)]
    stacks = {
      'decoder' if name == 'num_layers' else name.split('_')[1]: name
      for name in ('num_encoder_layers', 'num_decoder_layers', 'num_layers')
      if name in fields and getattr(self.config, name)
    }
    one = dataclasses.replace(self.config, **dict.fromkeys(stacks.values(), 1))
    made: Any = type(self)
    shapes = jax.eval_shape(made(one).init, jax.random.key(0))
    for stack, name in stacks.items():
      for i in range(1, getattr(self.config, name)):
        shapes[stack][f'layers_{i}'] = shapes[stack]['layers_0']
    return shapes

  def extend(self, params, cache, tokens, tree=None):
    """Reads tokens int32[B, S]; returns float32[B, S, V] and the cache."""
    features, cache = self.extend_features(params, cache, tokens, tree)
    return self.head(params, features), cache

  def extend_features(self, params, cache, tokens, tree=None):
    """As `extend`; features [B, S, M] in the place of logits."""
    return self._apply(params, cache, tokens, tree, method='extend_features')

  def embed(self, params: Params, tokens: jax.Array) -> jax.Array:
    """Maps int32[...] to the decoder's embeddings [..., M], no positions."""
    return self._apply(params, tokens, method='embed')

  def head(self, params: Params, features: jax.Array) -> jax.Array:
    """The output layer: maps [..., M] to logits float32[..., V]."""
    return self._apply(params, features, method='head')

  def rewind(self, cache, length):
    """Forgets all but the first `length` (int32[B]) tokens of each row."""
    return cache.rewind(length)

  def keep(self, cache, length, slots):
    """Keeps the first `length` slots and those in `slots`, int32[B, N]."""
    return cache.keep(length, slots)


class DecoderOnly(LinenModel):
  """A `LinenModel` without an encoder.

  Parameters lie under 'decoder/', where T5X's decoder-only network has them.
  Heirs add `_decoder`, `prefill` and teacher-forced calls.
  """

  @property
  def _decoder(self) -> nn.Module:
    """The linen module."""
    raise NotImplementedError

  @property
  def has_encoder(self) -> bool:
    """False: the model continues its prompt."""
    return False

  def init(self, key: jax.Array) -> Params:
    """Returns random float32 parameters, a nested dict with T5X's names."""
    token = jnp.ones((1, 1), jnp.int32)
    return {'decoder': self._decoder.init(key, token)['params']}

  def _apply(self, params: Params, *args: Any, **kwargs: Any) -> Any:
    return self._decoder.apply({'params': params['decoder']}, *args, **kwargs)


class EncodesInputs(LinenModel):
  """A `LinenModel` whose decoder reads what an encoder says of the inputs.

  Heirs add `_module`, whose methods have the names that are called here. Their
  configurations have `num_encoder_layers`, which is 0 of a decoder alone, and
  `encoded_dim`, the width of the encoder's output.
  """

  @property
  def _module(self) -> nn.Module:
    """The linen module."""
    raise NotImplementedError

  @property
  def has_encoder(self) -> bool:
    """True: an encoder reads the inputs, its own or another's."""
    return True

  @property
  def reads_encoder(self) -> bool:
    """Whether it is a decoder alone, which must be given `encoded`."""
    return self.config.num_encoder_layers == 0

  def init(self, key: jax.Array) -> Params:
    """Returns random float32 parameters, a nested dict with T5X's names."""
    token = jnp.ones((1, 1), jnp.int32)
    encoded = None
    if self.reads_encoder:
      encoded = jnp.ones((1, 1, self.config.encoded_dim), jnp.float32)
    made = self._module.init(key, token, token, encoded=encoded)
    return cast(Params, made['params'])

  def encode(self, params: Params, inputs: jax.Array) -> jax.Array:
    """The encoder's output for inputs int32[B, E]: float[B, E, M]."""
    self._check_encoded(None)
    encoded = self._apply(params, inputs, method='encode')
    return cast(jax.Array, encoded)

  def _check_encoded(self, encoded: jax.Array | None) -> None:
    if not self.reads_encoder:
      return
    width = self.config.encoded_dim
    if encoded is None:
      raise ValueError(
        'This network has no encoder (num_encoder_layers is 0): expected the'
        f" output [B, E, {width}] of its target's encoder, got none. It can"
        ' only draft for that target.'
      )
    if encoded.shape[-1] != width:
      raise ValueError(
        f'This network reads an encoder of width {width}, got one of width'
        f' {encoded.shape[-1]}: take the target that it was made for.'
      )

  def logits(
    self,
    params: Params,
    inputs: jax.Array,
    decoder_inputs: jax.Array,
    dropout_key: jax.Array | None = None,
    encoded: jax.Array | None = None,
  ) -> jax.Array:
    """Teacher-forced logits, as training and scoring need them.

    Args:
      params: the parameters.
      inputs: int32[B, E], `pad_id` past each row's end.
      decoder_inputs: int32[B, S], the targets shifted right, the start
        token first.
      dropout_key: turns dropout on; consumed.
      encoded: float[B, E, M], what an encoder says of the inputs; None runs its
        own.

    Returns:
      float32[B, S, V].
    """
    self._check_encoded(encoded)
    rngs = None if dropout_key is None else {'dropout': dropout_key}
    logits = self._apply(
      params,
      inputs,
      decoder_inputs,
      deterministic=dropout_key is None,
      encoded=encoded,
      rngs=rngs,
    )
    return cast(jax.Array, logits)

  def features(
    self, params: Params, inputs: jax.Array, decoder_inputs: jax.Array
  ) -> jax.Array:
    """Teacher-forced features [B, S, M]: what `head` makes `logits` of."""
    features = self._apply(params, inputs, decoder_inputs, method='features')
    return cast(jax.Array, features)

  def prefill(self, params, inputs, max_length, longest=None, encoded=None):
    """Runs the encoder once, unless `encoded` is what an encoder has said.

    Returns:
      A `KVCache` with `length` 0.
    """
    del longest  # positions have no end
    self._check_encoded(encoded)
    return self._apply(params, inputs, max_length, encoded, method='prefill')

  def _apply(self, params: Params, *args: Any, **kwargs: Any) -> Any:
    return self._module.apply({'params': params}, *args, **kwargs)
