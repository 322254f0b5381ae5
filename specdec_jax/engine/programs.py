"""The compiled programs of a pair: fixed batches, and pools of slots.

A program is compiled for each kind of request and each number of rows. Threads
may share a `Programs` object if no two of them compile at the same time.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from specdec_jax import partitioning
from specdec_jax.decoding.loop import Loop, generation
from specdec_jax.decoding.pool import PoolPrograms
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import DecodeState
from specdec_jax.drafters.base import Drafter
from specdec_jax.drafters.with_fallback import only_token, with_fallback
from specdec_jax.engine.padding import padded_rows, rounded_up
from specdec_jax.engine.pair import MemoryCheck, PlacedPair
from specdec_jax.request import Request
from specdec_jax.types import FinishReason, Generation

_Bound = tuple[Loop, PairParams]
_RequestOf = Callable[[int], Request]  # number of rows -> request


class Programs:
  """Compiles the loops of a pair when they are first needed, and keeps them.

  Attributes:
    memory_check: checks whether a run could fit into the memory of the devices.
    has_drafter: whether there is a drafter.
    row_multiple: the number of devices that rows are split over; the rows of
      each program are a multiple of it.
  """

  def __init__(
    self,
    pair: PlacedPair,
    partition: partitioning.Partition | None,
    memory_check: MemoryCheck,
  ):
    """Keeps the arguments; programs are compiled when they are first needed.

    Args:
      pair: the models, on their devices.
      partition: how rows are split over devices; None: they are not split.
      memory_check: checks whether a run fits into memory.
    """
    self.memory_check, self._partition = memory_check, partition
    self.row_multiple = partition.row_multiple if partition else 1
    drafter, params = pair.drafter, pair.params
    self.has_drafter = drafter is not None
    self._plain = Loop(pair.target), PairParams(params.target, None)
    if drafter is not None:
      loop = Loop(pair.target, drafter)
      self._speculative: _Bound = loop, params
      self._constrained = self._speculative
      if drafter.tree is None and not drafter.follows_rules:
        # If a constraint allows only one token, that token is proposed first.
        ahead = with_fallback(only_token(), drafter)
        ahead_params = PairParams(params.target, ((), params.draft))
        self._constrained = Loop(pair.target, ahead), ahead_params
    self._whole: dict[Any, Callable[..., Any]] = {}
    self._whole_rows: set[int] = set()
    self._pools: dict[Any, PoolPrograms] = {}

  @property
  def drafter(self) -> Drafter:
    """The drafter, with its parameters on the devices.

    Raises:
      ValueError: there is no drafter.
    """
    loop, _ = self._loop(True)
    assert loop.drafter is not None
    return loop.drafter

  def _loop(self, speculative: bool, constrained: bool = False) -> _Bound:
    """Returns the speculative or the plain loop, and its parameters.

    Args:
      speculative: whether the drafter proposes.
      constrained: whether constraints may allow a single token.

    Raises:
      ValueError: the speculative loop is asked for, and there is no drafter.
    """
    if not speculative:
      return self._plain
    if not self.has_drafter:
      advice = 'Engine(target, drafter), or call with speculative=False.'
      raise ValueError(f'Speculative decoding needs a drafter: {advice}')
    return self._constrained if constrained else self._speculative

  @property
  def count(self) -> int:
    """The number of programs of fixed batches compiled so far."""
    return len(self._whole)

  def exactly(self, request_of: _RequestOf, num_rows: int) -> Request:
    """Returns a request with the fewest rows that hold `num_rows` texts.

    Args:
      request_of: makes the request, given its number of rows.
      num_rows: the number of rows with a text.
    """
    return request_of(rounded_up(padded_rows(num_rows), self.row_multiple))

  def compile(self, request_of: _RequestOf, num_rows: int) -> None:
    """Compiles the smallest program that `decode` may use for such requests.

    Args:
      request_of: makes the request, given its number of rows.
      num_rows: the number of rows with a text.

    Raises:
      ValueError: the program cannot fit into memory.
    """
    self._program('decode', self.exactly(request_of, num_rows))

  def decode(self, request_of: _RequestOf, num_rows: int) -> Generation:
    """Decodes a fixed batch in one call; returns the result on the host.

    It uses the smallest compiled program with at least the needed rows and at
    most twice as many, because extra rows cost less than a compilation. If
    there is none, it compiles one.

    Args:
      request_of: makes the request, given its number of rows.
      num_rows: the number of rows with a text.

    Raises:
      ValueError: the program cannot fit into memory.
    """
    exact = self.exactly(request_of, num_rows)
    least = len(exact.inputs)
    sizes = [x for x in sorted(self._whole_rows) if least < x <= 2 * least]
    fits = itertools.chain([exact], map(request_of, sizes))
    compiled = (x for x in fits if ('decode', _shapes(x)) in self._whole)
    request = next(compiled, exact)
    return partitioning.on_host(self._program('decode', request)(request))

  def decode_in_pieces(
    self, request: Request, num_rounds: int
  ) -> Iterator[Generation | None]:
    """Decodes a fixed batch, `num_rounds` rounds at a time.

    Args:
      request: the batch.
      num_rounds: the most rounds between two yields.

    Yields:
      None after so many rounds, until all rows have finished; then the result,
      on the host.
    """
    state = self._program('start', request)(request)
    run = self._program('run', request, state)
    while True:
      state, outputs = run(request, state, np.int32(num_rounds))
      reasons = partitioning.on_host(state.finish_reason)
      if not np.any(reasons == FinishReason.RUNNING):
        break
      yield None
    yield partitioning.on_host(outputs)

  def pool(self, example: Request) -> PoolPrograms:
    """Returns the programs of the pools for one kind of request.

    Each program is compiled when it is first used.

    Args:
      example: a request of placeholder rows, which have no text, as many as are
        prefilled together; gamma 0 selects the plain loop.
    """
    # One set of jitted functions serves all widths of inputs.
    key = len(example.inputs), _shapes(example.replace(inputs=None))
    if key not in self._pools:
      loop, params = self._loop(example.gamma > 0, example.automata is not None)
      self._pools[key] = PoolPrograms(loop, params, example)
    return self._pools[key]

  def forget(self, programs: PoolPrograms | Request) -> None:
    """Frees programs. No other thread may compile in the meantime.

    Args:
      programs: the programs of pools; or a request whose programs of
        `decode_in_pieces` are freed.
    """
    if isinstance(programs, Request):
      for name in ('start', 'run'):
        self._whole.pop((name, _shapes(programs)), None)
    for key in [key for key, x in self._pools.items() if x is programs]:
      del self._pools[key]

  def _program(
    self, name: str, request: Request, state: DecodeState | None = None
  ) -> Callable[..., Any]:
    """Returns a compiled method of a loop, with the parameters bound.

    Args:
      name: a method of `Loop`: 'decode', or 'start' and after it 'run'.
      request: the request that it will be called with.
      state: for 'run', the result of `start`.

    Raises:
      ValueError: the program cannot fit into memory.
    """
    key = name, _shapes(request)
    if key not in self._whole:
      rows, width = request.inputs.shape
      call = request.cache_slots, request.call_tokens
      self.memory_check.check(rows, width, *call)
      self._whole[key] = self._compile(name, request, state)
      self._whole_rows.add(rows)
    return self._whole[key]

  def _compile(self, name: str, request: Request, state: DecodeState | None):
    loop, params = self._loop(request.gamma > 0, request.automata is not None)
    function, args = getattr(loop, name), list[Any]([params, request])
    options: dict[str, Any] = {}
    if self._partition is not None:
      args[1] = self._partition.request(request)
      # Each device gets the whole result, so that every host can read it.
      if name == 'decode':
        options['out_shardings'] = self._partition.sharding()
    if name == 'run':
      function = functools.partial(_run, loop)
      args += [state, np.int32(0)]
      # The state is donated, so that the caches are updated in place.
      placed = partitioning.shardings(state), None
      options |= {'donate_argnums': 2, 'out_shardings': placed}
    lowered = jax.jit(function, **options).lower(*args)
    return functools.partial(lowered.compile(), params)


def _run(loop: Loop, params: PairParams, request: Request, *state: Any):
  """Runs rounds as `Loop.run` does; returns the state and its outputs."""
  state = loop.run(params, request, *state)
  return state, generation(request, state)


def _shapes(request: Request):
  """Returns structure, shapes and dtypes of a request, as a dictionary key."""
  leaves, tree = jax.tree.flatten(request)
  return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
