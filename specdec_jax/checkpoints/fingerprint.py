"""What identifies a model's parameters, wherever and however they are."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SAMPLED = 64  # values of an array that are looked at


def fingerprint(params: Any) -> str:
  """Identifies a model's parameters as a checkpoint has them.

  Names, shapes and some values of every array, as bfloat16 where they are no
  whole numbers: another shape, another training run or another step of it gives
  another string. Whether they were read as float32 or as bfloat16 does not
  matter: what is rounded to bfloat16 stays when it is rounded again.

  Args:
    params: a pytree of arrays, on the host, on a device or in shards.
  """
  digest = hashlib.sha256()
  flat = jax.tree_util.tree_flatten_with_path(params)[0]
  for path, leaf in flat:
    digest.update(f'{jax.tree_util.keystr(path)}{leaf.shape}'.encode())
    stride = max(1, leaf.size // _SAMPLED)
    # By index: to flatten a shard would gather it.
    index = np.unravel_index(np.arange(0, leaf.size, stride), leaf.shape)
    some = np.asarray(leaf[index])
    if jnp.issubdtype(some.dtype, jnp.floating):
      some = some.astype(jnp.bfloat16)
    digest.update(some.astype(np.float32).tobytes())
  return digest.hexdigest()[:16]
