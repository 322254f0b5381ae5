"""Finds fallbacks and copies of weights in the text of a compiled program."""

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Iterator

_HEAD = re.compile(r'^(ENTRY )?%?([\w.-]+) \(.*\{$')
_INSTRUCTION = re.compile(
  r'^\s+(?:ROOT )?%?([\w.-]+) = (\w+)\[([\d,]*)\](?:\{([^}]*)\})?\S* '
  r'([\w-]+)\(%?([\w.-]*)(,?)'
)
_CALLED = re.compile(
  r'(?:body|condition|calls|called_computations|to_apply|true_computation'
  r'|false_computation)=\{?%?([\w.-]+)'
)
_LOOP = re.compile(r'(condition|body)=%?([\w.-]+)')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_ENTRY = re.compile(r'^ENTRY %?([\w.-]+)', re.MULTILINE)
_OPERATION = re.compile(r'^\s+(?:ROOT )?%?([\w.-]+) = ')
_OP = re.compile(r'\s*([\w-]+)\(')
_SHAPE = re.compile(r'([a-z]\w*)\[([\d,]*)\]')
_NAME = re.compile(r'%([\w.-]+)')
_BITS = re.compile(r'\D+(\d+)')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# Transfers to and from the host; on a TPU a callback is a pair of these.
_HOST = re.compile(
  r' (?:infeed|outfeed)\(|is_host_transfer=true'
  r'|custom_call_target="[^"]*callback[^"]*"'
)
# What a TPU computes in a loop over its rows, many small operations each.
_ROW_LOOP = re.compile(r' while\(.*op_name="[^"]*/(scatter|gather)"')
# Instructions that pass a parameter on without computing: an operand made by
# one of these is a weight, not an activation that only has a weight's shape.
_CARRIERS = frozenset(
  ['parameter', 'get-tuple-element', 'bitcast', 'copy', 'copy-done']
  + ['slice-done', 'custom-call']
)


@dataclasses.dataclass(frozen=True)
class WeightCopies:
  """Copies of whole weights or caches that a program makes.

  Attributes:
    count: how many instructions make copies.
    once_bytes: bytes copied once per run of the program.
    looped_bytes: bytes copied in each round of a loop.
  """

  count: int = 0
  once_bytes: int = 0
  looped_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Findings:
  """What was found in a program.

  Attributes:
    custom_calls: name -> how many calls.
    host_transfers: how many instructions wait for the host.
    float32_weights: weights converted to float32 in memory.
    relaid_weights: weights copied to another layout in memory.
    relaid_caches: caches likewise.
    row_loops: how many scatters and gathers became loops over rows.
  """

  custom_calls: dict[str, int]
  host_transfers: int
  float32_weights: WeightCopies
  relaid_weights: WeightCopies
  relaid_caches: WeightCopies = WeightCopies()
  row_loops: int = 0


@dataclasses.dataclass(frozen=True)
class _Instruction:
  name: str
  dtype: str
  shape: tuple[int, ...]
  layout: str
  op: str
  operand: str  # the first operand
  only_operand: bool
  looped: bool


def inspect(
  text: str,
  weights: Collection[tuple[int, ...]],
  caches: Collection[tuple[int, ...]] = (),
) -> Findings:
  """Reads the text of an optimised program.

  Args:
    text: text from `compiled.as_text()`.
    weights: shapes of the matrices that should not be copied.
    caches: shapes of the arrays that should be updated where they are.

  Returns:
    The findings. Values inside a fusion are not in memory, and do not count.
  """
  weights, caches = set(weights), set(caches)
  known: dict[str, _Instruction] = {}
  widened: list[tuple[float, _Instruction]] = []
  relaid: list[tuple[float, _Instruction]] = []
  moved: list[tuple[float, _Instruction]] = []
  for one in _instructions(text):
    known[one.name] = one
    source = known.get(one.operand)
    if one.shape in caches and source is not None and _relays(one, source):
      moved.append((itemsize(one.dtype), one))
    if one.shape not in weights or source is None or not one.only_operand:
      continue
    if source.op not in _CARRIERS or source.shape != one.shape:
      continue
    if one.dtype == 'f32' and source.dtype == 'bf16':
      widened.append((4, one))
    elif _relays(one, source):
      relaid.append((itemsize(one.dtype), one))
  return Findings(
    custom_calls=dict(
      sorted(collections.Counter(_TARGET.findall(text)).items())
    ),
    host_transfers=sum(1 for _ in _HOST.finditer(text)),
    float32_weights=_summarise(widened),
    relaid_weights=_summarise(relaid),
    relaid_caches=_summarise(moved),
    row_loops=sum(1 for _ in _ROW_LOOP.finditer(text)),
  )


def _relays(one: _Instruction, source: _Instruction) -> bool:
  return one.op == 'copy' and _order(one.layout) != _order(source.layout)


def _summarise(found: Collection[tuple[float, _Instruction]]) -> WeightCopies:
  sizes = {True: 0, False: 0}
  for size, one in found:
    sizes[one.looped] += int(size * math.prod(one.shape))
  return WeightCopies(len(found), sizes[False], sizes[True])


def _order(layout: str) -> str:
  """Only the order of dimensions: `1,0` for `1,0:T(8,128)(2,1)S(3)`."""
  return layout.partition(':')[0]


def computations(text: str) -> dict[str, list[str]]:
  """Name of each computation -> its lines."""
  found: dict[str, list[str]] = {}
  lines: list[str] = []
  for line in text.splitlines():
    if head := _HEAD.match(line):
      lines = found.setdefault(head[2], [])
    else:
      lines.append(line)
  return found


def called_by(line: str) -> set[str]:
  """Names of the computations that an instruction calls."""
  names = set(_CALLED.findall(line))
  for branches in _BRANCHES.findall(line):
    names |= {part.strip().lstrip('%') for part in branches.split(',')}
  return names


def entry(text: str) -> str:
  """Name of the computation that a program begins with; '' without one."""
  found = _ENTRY.search(text)
  return found[1] if found else ''


def loop_parts(line: str) -> list[str]:
  """Names of the condition and of the body of a loop."""
  parts = dict(_LOOP.findall(line))
  return [parts['condition'], parts['body']]


def itemsize(dtype: str) -> float:
  """Bytes of a number, from its name in a program."""
  bits = _BITS.match(dtype)
  return int(bits[1]) / 8 if bits else 1


@dataclasses.dataclass(frozen=True)
class Operation:
  """A line of a computation.

  Attributes:
    name: of its result.
    parts: dtype and shape of the result, or of each part of a tuple.
    op: such as 'fusion'.
    operands: names.
    text: the line.
  """

  name: str
  parts: tuple[tuple[str, tuple[int, ...]], ...]
  op: str
  operands: tuple[str, ...]
  text: str


def operation(line: str) -> Operation | None:
  """Reads a line of a computation; None if it is of another form."""
  head = _OPERATION.match(line)
  if head is None:
    return None
  end = _past(line, head.end())
  found = _OP.match(line, end)
  if found is None:
    return None
  inside = line[found.end() : _past(line, found.end() - 1)]
  parts = tuple(
    (dtype, tuple(int(size) for size in dims.split(',') if size))
    for dtype, dims in _SHAPE.findall(line[head.end() : end])
  )
  return Operation(head[1], parts, found[1], tuple(_NAME.findall(inside)), line)


def _past(line: str, begin: int) -> int:
  """Where the word, or what is in brackets, ends that begins there."""
  depth = 0
  for place in range(begin, len(line)):
    letter = line[place]
    if letter == ' ' and depth == 0:
      return place
    depth += (letter in '([{') - (letter in ')]}')
    if letter == ')' and depth == 0:
      return place + 1
  return len(line)


def _instructions(text: str) -> Iterator[_Instruction]:
  """All instructions outside fusions, by computation."""
  known = computations(text)
  called: dict[str, set[str]] = collections.defaultdict(set)
  bodies: set[str] = set()
  fused: set[str] = set()
  for name, lines in known.items():
    for line in lines:
      names = called_by(line)
      called[name] |= names
      if ' while(' in line:
        bodies |= names
      elif ' fusion(' in line:
        fused |= names
  looped = _reachable(bodies, called)
  fused = _reachable(fused, called)
  for name, lines in known.items():
    if name in fused:
      continue
    for line in lines:
      if found := _INSTRUCTION.match(line):
        yield _Instruction(
          name=found[1],
          dtype=found[2],
          shape=tuple(int(size) for size in found[3].split(',') if size),
          layout=found[4] or '',
          op=found[5],
          operand=found[6],
          only_operand=not found[7],
          looped=name in looped,
        )


def _reachable(names: set[str], called: dict[str, set[str]]) -> set[str]:
  found: set[str] = set()
  waiting = set(names)
  while waiting:
    name = waiting.pop()
    found.add(name)
    waiting |= called.get(name, set()) - found
  return found
