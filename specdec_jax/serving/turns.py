"""Scoring and classification on a server: requests take turns.

The target scores on a thread beside the scheduler, which decodes. A long
request is split into pieces, and other requests may run between two pieces.
"""

import asyncio
import concurrent.futures
import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from specdec_jax.engine import scoring
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.padding import next_power_of_two
from specdec_jax.serving import protocol
from specdec_jax.serving.protocol import Prompt

_PIECE = 2048  # tokens that are read at once, unless one text has more
_Value = TypeVar('_Value')


class Turns:
  """Runs pieces of bounded work one after another, in the order they came in.

  Memory is needed for one piece at a time, and a new request waits for at most
  one piece of each other request.
  """

  def __init__(self, engine: Engine, max_seconds: float):
    """Takes the engine that scores, and the most seconds of a request."""
    self._engine, self._max_seconds = engine, max_seconds
    self._thread = concurrent.futures.ThreadPoolExecutor(1, 'turns')

  async def run(self, pieces: Sequence[Callable[[], _Value]]) -> list[_Value]:
    """Runs the pieces of a request, each at its turn; returns their values.

    A piece that has begun runs to its end, and other requests wait for it, even
    if its own request is cancelled.

    Raises:
      ApiError: the time of the request is over.
    """
    loop = asyncio.get_running_loop()
    try:
      async with asyncio.timeout(self._max_seconds):
        return [await loop.run_in_executor(self._thread, x) for x in pieces]
    except TimeoutError:
      raise protocol.without_end('deadline') from None

  async def classify(
    self, texts: Sequence[Prompt], labels: Sequence[Prompt]
  ) -> np.ndarray:
    """Returns what `Engine.classify` does; it reads the texts in pieces.

    Raises:
      ApiError: the engine refuses them, or the time of the request is over.
    """
    with protocol.naming_the_field('input'):
      pieces = await asyncio.to_thread(self._pieces, texts, labels)
      return np.concatenate(await self.run(pieces))

  def _pieces(
    self, texts: Sequence[Prompt], labels: Sequence[Prompt]
  ) -> list[Callable[[], np.ndarray]]:
    """Encodes and checks everything, before the first piece is read."""
    engine = self._engine
    ids, inputs = zip(
      *(protocol.encoded(engine, x) for x in texts), strict=True
    )
    scoring.check_ids(engine.target, inputs=ids)
    # `Engine.classify` adds the end of an output to ids.
    outputs = [ids[:-1] for ids in engine.label_ids(labels)]
    longest = next_power_of_two(max(map(len, ids)))
    number = max(1, _PIECE // (longest + sum(map(len, outputs))))
    return [
      functools.partial(engine.classify, inputs[at : at + number], outputs)
      for at in range(0, len(inputs), number)
    ]
