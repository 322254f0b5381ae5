"""The memory that a network takes, computed from its configuration alone."""

from collections.abc import Callable

import flax.traverse_util
import jax
import jax.numpy as jnp

from specdec_jax.checks import memory
from specdec_jax.models import backend, integers
from specdec_jax.models.base import LanguageModel, param_shapes
from specdec_jax.models.families import Config, network_of


def num_params(config: Config) -> int:
  """How many numbers the parameters of a network have."""
  leaves = jax.tree.leaves(param_shapes(network_of(config)))
  return sum(leaf.size for leaf in leaves)


def held_bytes(count: int, dtype: str) -> int:
  """Bytes of `count` parameters of a dtype as they lie on the device.

  On a CPU integers are held as float32: the compiler would make these in each
  call, before its loop.
  """
  if integers.is_integers(dtype) and backend.kind() == 'cpu':
    dtype = 'float32'
  return memory.array_bytes((count,), dtype)


def widened_bytes(network: LanguageModel, dtype: str) -> int:
  """Bytes of the float32 that a loop holds beside parameters of a dtype.

  An encoder's are not counted: a loop may be compiled without it.
  """
  if dtype != 'bfloat16' or backend.kind() != 'cpu':
    return 0
  shapes = flax.traverse_util.flatten_dict(param_shapes(network), sep='/')
  return sum(
    4 * leaf.size
    for name, leaf in shapes.items()
    if not name.startswith('encoder/')
  )


def run_bytes(
  config: Config, batch: int, input_len: int, num_slots: int, num_tokens: int
) -> int:
  """The least bytes that a run of a network holds beside its parameters.

  Counts keys and values, and the larger of three arrays: a call's logits, one
  encoder layer's scores over the input, and one decoder layer's over the slots.

  Args:
    config: configuration of the network.
    batch: B.
    input_len: E; ignored without an encoder.
    num_slots: T, of the caches.
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
  own = 4 * batch * stack.num_heads * num_tokens * num_slots
  cache = stack.num_layers * batch * slots * per_slot
  return cache + max(logits, scores, own)


def check_params(
  config: Config | None,
  what: str,
  bytes_each: int = 2,
  free: Callable[[], int | None] = memory.most_bytes,
) -> None:
  """Raises an error for a network whose parameters do not fit into memory.

  It needs only the configuration, so that it can be called before any array is
  made or found.

  Args:
    config: configuration of the network; None is not checked.
    what: the network, for the message.
    bytes_each: bytes of one number; 2 is the least of a dtype that is unknown.
    free: returns the bytes of the memory, None if unknown. By default that of
      the host or of all devices, whichever is larger.

  Raises:
    memory.DoesNotFitError: the parameters need more bytes than there are.
  """
  if config is None:
    return
  count = num_params(config)
  memory.check_room(
    f'{what} has {count} parameters',
    count * bytes_each,
    free,
    'Take a smaller network; or are its sizes mistyped?',
  )
