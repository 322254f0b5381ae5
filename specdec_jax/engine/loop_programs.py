"""The compiled programs of both loops: when one is made, and when reused."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import partitioning
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import DecodeState, Request
from specdec_jax.engine.pair import Room
from specdec_jax.engine.request import TextBatch
from specdec_jax.models import backend


class LoopPrograms:
  """What has been compiled, for each loop and kind and shape of request."""

  def __init__(
    self,
    loops: Mapping[bool, tuple[Loop, PairParams]],
    room: Room,
    partition: partitioning.Partition | None,
  ):
    """
    Args:
      loops: speculative or not -> a loop, and its parameters as placed.
      room: the memory that a program must fit into.
      partition: how rows and parameters are split over devices; None is one
        device.
    """
    self._loops, self._room, self._partition = loops, room, partition
    self._programs: dict[Any, Callable[..., Any]] = {}
    self._rows: set[int] = set()  # numbers of rows that have a program
    self._states: dict[Any, DecodeState] = {}  # shapes only

  def __len__(self) -> int:
    return len(self._programs)

  def fit(self, batch: TextBatch, speculative: bool, name: str) -> None:
    """Gives a batch as many rows as a compiled program has, if one is near.

    That is the smallest program of at least as many rows as the batch needs
    and at most twice as many: those extra rows cost less than a compilation.
    """
    least = batch.num_rows
    if (name, (speculative, _shapes(batch.request))) in self._programs:
      return
    for rows in sorted(self._rows):
      if least < rows <= 2 * least:
        request = batch.request_in(rows)
        if (name, (speculative, _shapes(request))) in self._programs:
          batch.request = request
          return

  def get(
    self, name: str, request: Request, speculative: bool
  ) -> Callable[..., Any]:
    """A compiled function of a loop, with the parameters bound.

    Args:
      name: a method of `Loop`: 'decode', or 'start' and after it 'run'.
      request: what it will be called with.
      speculative: which loop.

    Raises:
      ValueError: no memory could hold it.
    """
    key = (speculative, _shapes(request))
    if (name, key) not in self._programs:
      rows, width = request.inputs.shape
      self._room.check(rows, width, request.cache_slots, request.call_tokens)
      self._programs[name, key] = self._compile(name, request, key)
      self._rows.add(rows)
    return self._programs[name, key]

  def _compile(self, name: str, request: Request, key: Any):
    loop, params = self._loops[key[0]]
    functions: dict[str, Callable[..., Any]] = {
      'decode': loop.decode,
      'start': loop.start,
      'run': loop.run,
    }
    args: list[Any] = [params, request]
    options: dict[str, Any] = {}
    if name == 'run':
      args += [self._states[key], jax.ShapeDtypeStruct((), jnp.int32)]
      # The state is donated: the caches are updated where they are.
      options['donate_argnums'] = 2
    if self._partition is not None:
      args[1] = self._partition.request(request)
      if name == 'run':
        options['out_shardings'] = partitioning.shardings(args[2])
      elif name == 'decode':  # the host reads it: the whole on each device
        options['out_shardings'] = self._partition.sharding()
    lowered = jax.jit(functions[name], **options).lower(*args)
    compiled = lowered.compile(compiler_options=backend.compiler_options())
    if name == 'start':
      self._states[key] = partitioning.described(
        lowered.out_info, self._partition and compiled.output_shardings
      )
    return functools.partial(compiled, params)


def _shapes(request: Request):
  """Structure, shapes and dtypes of a request, as a dictionary key."""
  leaves, tree = jax.tree.flatten(request)
  return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
