"""Are a tree's tokens a call what the acceptance of its ranks predicts?

Half of the texts are measured by rank; the other half is decoded with trees.
Three predictions stand beside what was decoded: from the mean acceptance of
each rank, from that of each level and rank, and from each rank at each place.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import rich.console

from specdec_jax.checks.arguments import check_all_at_least, check_at_least
from specdec_jax.checks.fields import check_types
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.loop import Loop
from specdec_jax.drafters.best_tree import (
  expected_tokens,
  tokens_per_call,
)
from specdec_jax.drafters.small_model_tree import tree_of
from specdec_jax.engine.engine import Engine
from specdec_jax.measure import trees
from specdec_jax.measure.acceptance import Rate, Workload, ratio
from specdec_jax.measure.progress import bar
from specdec_jax.measure.prompts import read_prompts
from specdec_jax.measure.record import Record
from specdec_jax.measure.table import Column, Table, show, started
from specdec_jax.probs import SamplingConfig
from specdec_jax.tree_shape import TreeShape

_PREDICTIONS = 'by rank', 'by level and rank', 'by place and rank'


@dataclasses.dataclass(frozen=True)
class TreePredictionConfig:
  """Trees whose tokens a call are predicted and measured.

  Attributes:
    engine: makes the engine, whose drafter is a small model.
    shapes: the trees.
    input_file: the texts, one a line; every second one is decoded with trees,
      the others are measured by rank.
    temperatures: 0 is greedy.
    num_lines: how many lines are taken; None is all of them.
    num_tokens: of each half and tree, at most; above temperature 0 the texts
      are repeated until there are so many.
    batch_size: texts decoded together.
    seed: of the samples.
    output_file: path of the record, JSON; None writes none.
    name: of the pair, for the title.

  Raises:
    ValueError: a number is too small.
  """

  engine: Callable[[], Engine]
  shapes: Sequence[TreeShape]
  input_file: str
  temperatures: Sequence[float] = (0.0, 1.0)
  num_lines: int | None = None
  num_tokens: int = 20_000
  batch_size: int = 16
  seed: int = 0
  output_file: str | None = None
  name: str = 'trees'

  def __post_init__(self):
    check_types(self)
    check_at_least(self, num_tokens=1, batch_size=1)
    check_all_at_least(self, temperatures=0)
    if self.num_lines is not None:
      check_at_least(self, num_lines=4)


def predict_trees(
  config: TreePredictionConfig, console: rich.console.Console | None = None
) -> Record:
  """Predicts and measures every tree; prints a table, writes the record.

  Returns:
    The record: its table as `Table.to_json` has it, and `trees`: of each
    temperature and tree its tokens a call, their standard error over texts, and
    the three predictions.

  Raises:
    ValueError: there are fewer than four texts, or the drafter is no small
      model.
  """
  console = started(config, console)
  engine = config.engine()
  texts = read_prompts(
    config.input_file, engine.num_input_tokens, engine.max_input_len
  )[: config.num_lines]
  if len(texts) < 4:
    raise ValueError(
      f'{config.input_file!r} has {len(texts)} texts that can be decoded;'
      ' expected 4 or more: half of them predict, half are decoded.'
    )
  found = []
  steps = len(config.temperatures) * (1 + len(config.shapes))
  with bar(console, 'Trees', steps) as advance:
    for temperature in config.temperatures:
      sampling = SamplingConfig(temperature=temperature)
      seen, held_out = (
        Workload(
          engine,
          part,
          sampling,
          config.num_tokens,
          config.batch_size,
          config.seed,
        )
        for part in (texts[::2], texts[1::2])
      )
      places = seen.rates_by_rank(lambda _: None, trees.RANKS).places
      advance()
      for shape in config.shapes:
        found.append(_of_shape(shape, places, held_out, temperature))
        advance()
  record = _record(config, found, len(texts))
  show(console, record, config.output_file)
  return record


def _of_shape(
  shape: TreeShape,
  places: Sequence[np.ndarray],
  held_out: Workload,
  temperature: float,
) -> dict[str, Any]:
  means = np.concatenate(places).mean(axis=0)
  table = trees.by_level(places, shape.depth)
  measured = measure(shape, held_out)
  predicted = (
    expected_tokens(shape, means.tolist()),
    expected_tokens(shape, table.tolist()),
    tokens_per_call(shape, places),
  )
  return {
    'temperature': temperature,
    'parents': shape.parents,
    'tokens_per_call': measured.mean,
    'standard_error': measured.standard_error,
    'calls': measured.num_tokens,
    'predicted': dict(zip(_PREDICTIONS, predicted, strict=True)),
  }


def measure(shape: TreeShape, work: Workload) -> Rate:
  """Tokens a call of a tree; its error is over texts."""
  engine = work.engine
  loop = Loop(engine.target, tree_of(engine.drafter, shape))
  program: Any = jax.jit(loop.decode)
  tokens: list[int] = []
  calls: list[int] = []
  for request in work.requests(shape.depth):
    asked = dataclasses.replace(
      request, tree=shape, verification=decode_state.TOKEN
    )
    done = jax.device_get(program(engine.params, asked))
    real = np.asarray(request.max_length) > 0  # the others fill up a batch
    tokens += done.length[real].tolist()
    calls += done.stats.num_rounds[real].tolist()
    if sum(tokens) >= work.num_tokens:
      break
  texts = [index % len(work.texts) for index in range(len(tokens))]
  return ratio(tokens, calls, texts)


def _record(
  config: TreePredictionConfig, found: Sequence[Any], lines: int
) -> Record:
  columns: list[Column | str] = [
    Column('T', 'g'),
    'nodes',
    'levels',
    Column('tokens per call', '.3f'),
    Column('error', '.3f'),
  ]
  for name in _PREDICTIONS:
    columns += [Column(f'predicted {name}', '.3f'), Column('off, %', '.1f')]
  cells = []
  for row in found:
    shape, measured = TreeShape(row['parents']), row['tokens_per_call']
    cells.append([row['temperature'], shape.num_nodes, shape.depth, measured])
    cells[-1].append(row['standard_error'])
    for value in row['predicted'].values():
      cells[-1] += [value, 100 * (value / measured - 1)]
  title = (
    f'{config.name}: {lines} lines of {config.input_file}, half to predict from'
    ' and half to decode; errors over texts'
  )
  return Table(title, columns, cells).record(trees=list(found))
