"""Which kernels a program for a GPU launches, and what they write."""

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from specdec_jax.measure.compiled import program_text
from specdec_jax.measure.compiled.program_text import Operation

# What launches nothing: names of what is there, and what runs others. The
# second half of what is asynchronous waits for the first.
_NOTHING = frozenset(
  ['parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while']
  + ['conditional', 'call', 'after-all', 'add-dependency', 'opt-barrier']
  + ['partition-id', 'replica-id', 'async-done', 'async-update', 'copy-done']
)
_CARRIERS = frozenset(['parameter', 'get-tuple-element'])
_UPDATES = {'dynamic-update-slice': 1, 'scatter': 2}  # op -> the operand of it
_LAYER = re.compile(r'op_name="[^"]*layers_(\d+)')
# What a hand-written kernel says of an array that it changes where it is, and
# of how often its programs wait for each other.
_SAID = re.compile(r'(updated_bytes|waits)\\22: \\22(\d+)')
_ALIASED = re.compile(r'output_to_operand_aliasing=(\{(?:[^{}]|\{[^{}]*\})*\})')
_RESULT = re.compile(r'\{(\d*)\}: ')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A kernel, or a conditional, which copies its index to the host and waits.

  Attributes:
    name: of the instruction.
    loops: names of the loops that it is in, outermost first.
    times: how often it runs in a run of the program, or in one round of the
      loop whose number of rounds is not known.
    in_branch: whether it is in the branch of a conditional; of the branches
      that one is counted which launches the least.
    in_layer: whether a layer of a network is what it computes.
    conditional: whether it is one, and no kernel.
    written: bytes of new arrays.
    updated: bytes written into arrays that are there, such as caches.
    rewritten: bytes of `written` that are a weight in another form: copied,
      relaid, converted, joined to others, or each element multiplied.
    copied: bytes of `written` that are all of a cache.
    most: of a conditional, kernels of the branch that launches the most, as
      often as they run.
    waits: how often its programs wait for each other.
  """

  name: str
  loops: tuple[str, ...]
  times: int
  in_branch: bool
  in_layer: bool
  conditional: bool = False
  written: int = 0
  updated: int = 0
  rewritten: int = 0
  copied: int = 0
  most: int = 0
  waits: int = 0


def find(
  text: str,
  weights: Collection[tuple[int, ...]] = (),
  caches: Collection[tuple[int, ...]] = (),
) -> list[Kernel]:
  """Reads the text of an optimised program, `compiled.as_text()`.

  Args:
    text: the program's.
    weights: shapes of the matrices that are to stay as they are.
    caches: shapes of the arrays that are to be updated in place.

  Returns:
    All that it launches, in order.
  """
  return list(_Walk(text, set(weights), set(caches)).entry())


class _Place(NamedTuple):
  """Where something runs: what `Kernel` says of it, in its order."""

  loops: tuple[str, ...] = ()
  times: int = 1
  in_branch: bool = False
  in_layer: bool = False


class _Walk:
  """The computations of a program, walked as they run."""

  def __init__(self, text, weights, caches):
    self._weights, self._caches = weights, caches
    self._known = {
      name: {one.name: one for one in map(program_text.operation, lines) if one}
      for name, lines in program_text.computations(text).items()
    }
    self._entry = program_text.entry(text)

  def entry(self) -> Iterator[Kernel]:
    return self._walk(self._entry, _Place())

  def _walk(self, computation: str, place: '_Place') -> Iterator[Kernel]:
    operations = self._known.get(computation, {})
    for one in operations.values():
      if 'op_name="' in one.text:  # else it belongs to what is before it
        place = place._replace(in_layer=_LAYER.search(one.text) is not None)
      if one.op == 'while':
        yield from self._loop(one, place)
      elif one.op == 'conditional':
        inside = place._replace(in_branch=True)
        branches = [
          list(self._walk(name, inside))
          for name in sorted(program_text.called_by(one.text))
        ]
        branches.sort(key=num_launched)
        most = num_launched(branches[-1])
        yield Kernel(one.name, *place, conditional=True, most=most)
        yield from branches[0]
      elif one.op == 'call':
        for name in program_text.called_by(one.text):
          yield from self._walk(name, place)
      elif one.op not in _NOTHING and 'AllocateBuffer' not in one.text:
        here = Kernel(one.name, *place)
        yield dataclasses.replace(here, **self._written(one, operations))

  def _loop(self, one: Operation, place: '_Place') -> Iterator[Kernel]:
    trips = _TRIPS.search(one.text)
    inside = place._replace(
      loops=(*place.loops, one.name),
      # The rounds are the one loop that ends when its rows are finished.
      times=place.times * int(trips[1]) if trips else 1,
    )
    condition, body = program_text.loop_parts(one.text)
    if not trips:  # where the number is known nobody asks
      yield from self._walk(condition, inside)
    yield from self._walk(body, inside)

  def _written(self, one: Operation, around) -> dict[str, Any]:
    made: dict[str, int] = collections.Counter()
    if one.op == 'custom-call':
      said = dict(_SAID.findall(one.text))
      made['updated'] += int(said.get('updated_bytes', 0))
      made['waits'] += int(said.get('waits', 0))
    for part, source, operations in self._results(one, around):
      if source is not None and source.op in _UPDATES:
        operand = operations.get(source.operands[_UPDATES[source.op]])
        made['updated'] += sum(map(_bytes, operand.parts)) if operand else 0
        continue
      made['written'] += _bytes(part)
      if part[1] in self._caches:
        made['copied'] += _bytes(part)
    size = self._weight_read(one, around)
    results = [part for part in one.parts if 0 < size <= math.prod(part[1])]
    if results and not self._multiplies(one):
      made['rewritten'] += sum(map(_bytes, results))
    return dict(made)

  def _results(self, one: Operation, around):
    """(dtype and shape, what made it, where that is) of each result."""
    operations, root = around, one
    if one.op == 'custom-call':
      aliased = _ALIASED.search(one.text)
      in_place = set(_RESULT.findall(aliased[1])) if aliased else set()
      for i, part in enumerate(one.parts):
        if str(i) not in in_place and '' not in in_place:
          yield part, None, around
      return
    if one.op == 'fusion':
      (name,) = program_text.called_by(one.text)
      operations = self._known[name]
      root = list(operations.values())[-1]
    sources = [root]
    if root.op == 'tuple':
      sources = [operations[name] for name in root.operands]
    for part, source in zip(one.parts, sources, strict=False):
      while source.op == 'bitcast' and source.operands[0] in operations:
        source = operations[source.operands[0]]
      yield part, source, operations

  def _weight_read(self, one: Operation, around) -> int:
    """Elements of the largest weight that a kernel reads."""
    sizes = [0]
    for name in one.operands:
      source = around.get(name)
      while source and source.op == 'bitcast':
        source = around.get(source.operands[0])
      if source and source.op in _CARRIERS:
        sizes += [math.prod(s) for _, s in source.parts if s in self._weights]
    return max(sizes)

  def _multiplies(self, one: Operation) -> bool:
    """Whether it is a product of matrices, which may be as large as one."""
    if one.op in ('dot', 'custom-call'):
      return True
    called = program_text.called_by(one.text)
    return any(
      self._multiplies(inner)
      for name in called
      for inner in self._known.get(name, {}).values()
    )


def _bytes(part: tuple[str, tuple[int, ...]]) -> int:
  dtype, shape = part
  return int(math.prod(shape) * program_text.itemsize(dtype))


def num_launched(found: Collection[Kernel]) -> int:
  """Kernels that run, each as often as it does; conditionals are none."""
  return sum(one.times for one in found if not one.conditional)


def summary(found: Collection[Kernel]) -> dict[str, Any]:
  """Counts of some kernels, such as those of a round."""
  kernels = [one for one in found if not one.conditional]
  sums = {
    name: sum(one.times * getattr(one, name) for one in kernels)
    for name in ('written', 'updated', 'rewritten', 'copied')
  }
  return {
    'kernels': num_launched([one for one in kernels if not one.in_branch]),
    'branch_kernels': num_launched([one for one in kernels if one.in_branch]),
    'most_branch_kernels': sum(one.most for one in found),
    'conditionals': sum(one.times for one in found if one.conditional),
    'layer_kernels': num_launched([one for one in kernels if one.in_layer]),
    'waits': sum(one.times * one.waits for one in kernels),
    **{f'{name}_bytes': size for name, size in sums.items()},
  }


def by_loop(found: Collection[Kernel]) -> Mapping[str, dict[str, Any]]:
  """What a program launches, apart.

  Returns:
    `summary` of 'once': outside of the loop of rounds; 'round': one of it,
    the draft's steps in it; and 'step': one round of the busiest loop inside of
    a round, the draft's. What is not there is left out.
  """
  inside: dict[str, list[Kernel]] = collections.defaultdict(list)
  for one in found:
    if len(one.loops) > 1 and not one.in_branch:
      inside[one.loops[1]].append(one)
  parts = {
    'once': [one for one in found if not one.loops],
    'round': [one for one in found if one.loops],
  }
  if inside:
    name = max(inside, key=lambda name: num_launched(inside[name]))
    trips = min(one.times for one in inside[name])
    parts['step'] = [
      dataclasses.replace(one, times=one.times // trips, most=one.most // trips)
      for one in found
      if one.loops[1:2] == (name,)
    ]
  return {name: summary(part) for name, part in parts.items() if part}
