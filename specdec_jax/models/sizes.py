"""Computes a network's memory from its configuration alone."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specdec_jax.checks import memory
from specdec_jax.models import backend, integers
from specdec_jax.models.base import LanguageModel, param_shapes
from specdec_jax.models.families import Config, network_of
from specdec_jax.models.model import Model


def held_bytes(count: int, dtype: str) -> int:
  """Returns the bytes of `count` parameters of a dtype on the device.

  On a CPU integers of four bits are held as float32, because the compiler would
  convert them in each call, before the call's loop.
  """
  if dtype == integers.INT4 and backend.kind() == 'cpu':
    dtype = 'float32'
  return memory.array_bytes((count,), dtype)


def widened_bytes(network: LanguageModel, dtype: str) -> int:
  """Returns the bytes of float32 copies of parameters in a decoding loop.

  A loop makes such copies only on a CPU, and only of bfloat16 parameters.

  The encoder is not counted, since a loop may be compiled without it.
  """
  if dtype != 'bfloat16' or backend.kind() != 'cpu':
    return 0
  shapes = {**param_shapes(network), 'encoder': {}}
  return 4 * sum(leaf.size for leaf in jax.tree.leaves(shapes))


def run_bytes(
  config: Config, batch: int, input_len: int, num_slots: int, num_tokens: int
) -> int:
  """Returns the least bytes of a network's run, without its parameters.

  Keys and values are counted, and the largest of three arrays: a call's logits,
  one encoder layer's scores over the input, and one decoder layer's scores over
  the slots.

  Args:
    config: configuration of the network.
    batch: B, number of rows.
    input_len: E, tokens of an input; ignored without an encoder.
    num_slots: T, slots of the caches.
    num_tokens: S, tokens that a call reads.
  """
  shape = config.shape
  stack, scores, slots = shape.decoder, 0, num_slots
  if shape.encoder is not None:
    scores = 4 * batch * shape.encoder.num_heads * input_len**2
  if stack.cross != 'none':
    slots += input_len
  width = (stack.num_kv_heads or stack.num_heads) * stack.head_dim
  per_slot = 2 * width * jnp.dtype(stack.dtype).itemsize
  logits = 4 * batch * num_tokens * shape.tokens.vocab_size
  decoder = 4 * batch * stack.num_heads * num_tokens * num_slots
  cache = stack.num_layers * batch * slots * per_slot
  return cache + max(logits, scores, decoder)


def check_params(
  config: Config | None,
  what: str,
  bytes_each: int = 2,
  free: Callable[[], int | None] = memory.most_bytes,
) -> None:
  """Raises an error if a network's parameters do not fit into memory.

  Only the configuration is needed, so the check can run before any array is
  made.

  Args:
    config: configuration of the network; None: nothing is checked.
    what: words for the network in the message.
    bytes_each: bytes of a number; 2 is the least if the dtype is unknown.
    free: function that returns the bytes of the memory, None if unknown; by
      default the memory of the host or of all devices, whichever is larger.

  Raises:
    memory.DoesNotFitError: the parameters need more bytes than there are.
  """
  if config is None:
    return
  count = Model(network_of(config)).num_params
  what = f'{what} has {count} parameters'
  advice = 'Take a smaller network; or are its sizes mistyped?'
  memory.check_room(what, count * bytes_each, free, advice)
