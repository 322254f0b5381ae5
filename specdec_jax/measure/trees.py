"""Which tree of proposals pays: acceptance by rank, and the time of a round.

What a tree keeps is known from the acceptance of each rank at each place of the
outputs that were measured: hard places come together, rounds begin behind them,
and outputs end, so that a mean by rank alone says too much. What a round of a
tree takes is timed: a drafter's call over a whole level, the mask and the moved
cache are not in the cost of a chain's calls.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax.decoding.loop import Loop
from specdec_jax.drafters.best_tree import best_tree, tokens_per_call
from specdec_jax.drafters.small_model_tree import tree_of
from specdec_jax.engine.engine import Engine
from specdec_jax.measure import calls, timing
from specdec_jax.measure.acceptance import RankRates
from specdec_jax.probs import SamplingConfig
from specdec_jax.tree_shape import TreeShape

RANKS = 4  # children of a node, at most
_MOST_LEVELS = 8


@dataclasses.dataclass(frozen=True)
class TreeChoice:
  """The best tree for a number of rows.

  Attributes:
    parents: of its nodes, as of `TreeShape`.
    tokens_per_call: that it should keep, of outputs like those measured.
    cost: time of a round, in tokens of the plain loop.
  """

  parents: tuple[int, ...]
  tokens_per_call: float
  cost: float

  @property
  def expected_speed_up(self) -> float:
    """What it should gain over the plain loop."""
    return self.tokens_per_call / self.cost


def by_level(places: Sequence[np.ndarray], depth: int) -> np.ndarray:
  """Acceptance by level and rank, given that all levels above were accepted.

  Args:
    places: of each output float[L, C], the acceptance of each rank.
    depth: D.

  Returns:
    float64[D, C].
  """
  hits = np.zeros((depth, places[0].shape[1]))
  tries = np.zeros((depth, 1))
  for rows in places:
    begun = np.ones((len(rows),))  # some rank was accepted at each level so far
    for level in range(min(depth, len(rows))):
      now = rows[level:]
      begun = begun[: len(now)]
      hits[level] += begun @ now
      tries[level] += begun.sum()
      begun = begun * now.sum(axis=1)
  return hits / np.maximum(tries, 1e-9)


def best_shape(
  places: Sequence[np.ndarray],
  num_nodes: int,
  cost: Callable[[TreeShape], float],
) -> TreeShape:
  """The tree of so many nodes, at most, that gains most by given costs.

  Args:
    places: as of `by_level`.
    num_nodes: N.
    cost: time of a round of a tree.

  Raises:
    ValueError: no proposal was ever accepted.
  """
  most = min(num_nodes, _MOST_LEVELS)
  table = by_level(places, most).tolist()
  shapes = [best_tree(table, num_nodes, depth + 1) for depth in range(most)]
  return max(shapes, key=lambda one: tokens_per_call(one, places) / cost(one))


def choose(
  engine: Engine,
  found: RankRates,
  num_nodes: Sequence[int],
  rows: int,
  costs: tuple[float | None, Sequence[float]],
  setting: Any,
) -> TreeChoice:
  """The best tree for `rows` rows, of one for each number of nodes.

  Args:
    engine: an engine whose drafter is a small model.
    found: acceptance by rank.
    num_nodes: the most nodes of each tree that is timed.
    rows: rows that are decoded together.
    costs: c, and v(1), v(2), ...: of all trees of a size the one is timed that
      is best by these.
    setting: a `CalibrateConfig`.
  """
  cost_ratio, call_cost = costs[0] or 0.0, costs[1]

  def by_calls(shape: TreeShape) -> float:
    tokens = min(shape.num_nodes + 1, len(call_cost))
    return call_cost[tokens - 1] + cost_ratio * shape.depth

  shapes = {best_shape(found.places, most, by_calls) for most in num_nodes}
  times = _round_costs(engine, sorted(shapes, key=str), rows, setting)
  made = [
    TreeChoice(shape.parents, tokens_per_call(shape, found.places), cost)
    for shape, cost in times.items()
  ]
  return max(made, key=lambda one: one.expected_speed_up)


def _round_costs(
  engine: Engine, shapes: Sequence[TreeShape], rows: int, setting: Any
) -> dict[TreeShape, float]:
  """Time of a round of each tree, in tokens of the plain loop."""
  has_encoder = engine.target.has_encoder
  plain = calls.make_request(
    calls.random_inputs(engine.target, rows, setting.input_len, setting.seed),
    setting.decode_len,
    0,
    SamplingConfig(temperature=setting.temperature),
    setting.seed,
    has_encoder,
  )
  alone = Loop(engine.target)
  params = engine.params._replace(draft=None)
  run, _ = calls.loop(alone.start, alone.run, params, plain)
  functions, rounds = {'plain': run}, {'plain': setting.decode_len}
  for shape in shapes:
    name = str(shape.parents)
    loop = Loop(engine.target, tree_of(engine.drafter, shape))
    asked = dataclasses.replace(plain, gamma=shape.depth, tree=shape)
    run, _ = calls.loop(loop.start, loop.run, engine.params, asked)
    functions[name] = run
    rounds[name] = int(jax.device_get(run()()).stats.num_rounds.max())
  seconds = timing.interleave(functions, setting.repeats)
  each = {
    name: timing.summarise(values)['median'] / rounds[name]
    for name, values in seconds.items()
  }
  return {shape: each[str(shape.parents)] / each['plain'] for shape in shapes}
