"""The JSON texts that a JSON schema describes, as a `Language`.

A stated part of draft 2020-12, see docs/rules.md. Texts are written as
`json.dumps` writes them, with `ensure_ascii` or without. What a schema says is
split into branches without alternatives. In a branch, what is said of strings
and numbers is a `Language`; arrays and objects are graphs whose edges are their
items and members. `not` is moved inwards to where it is exact. What cannot be
followed is refused by name.
"""

import collections
import functools
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from specdec_jax.checks.fields import check_choice, unexpected
from specdec_jax.rules import languages, scalars, subschemas
from specdec_jax.rules.languages import EMPTY, NOTHING, Language
from specdec_jax.rules.subschemas import Schema

MOST_RECURSION = 3  # times that `$ref` enters a schema within itself
MOST_NESTING = 4  # of arrays and objects where any value may be
MOST_UNORDERED = 5_000  # states of an object whose keys have any order
# What is behind a comma and a colon, and what is around these and in brackets.
BLANKS = {'one': (' ', ''), 'none': ('', ''), 'any': ('', '[ \n\r\t]*')}

_ANYTHING = '{}'  # among the schemas entered: one that says nothing
_POSSIBLY = '?'  # what is cut off counts as possible
_TYPE_OF = {type(None): 'null', bool: 'boolean', str: 'string', list: 'array'}
_TYPE_OF[Schema] = 'object'
_OF_ALL_KEYS = {'additionalProperties', 'patternProperties', 'propertyNames'}
_DENIED = ' within not, if, or alternatives of oneOf that overlap'


class _Kinds(dict[str, Language]):
  """What is possible of each type, nothing of others; a schema that says it."""

  __hash__, __eq__ = object.__hash__, object.__eq__  # type: ignore[assignment]


# Of strings the values; arrays and objects have a mark.
_FULL = _Kinds(dict.fromkeys(('string', 'array', 'object'), languages.EVERY))
_FULL['null'] = languages.literal('null')
_FULL['boolean'] = languages.words(['false', 'true'])
_FULL['number'] = scalars.NUMBER

# A schema, and whether a value is to be one of it or none of it.
_Item = tuple[Any, bool]
_Items = tuple[_Item, ...]
_Entered = tuple[str, ...]  # what was entered on the path to a value, sorted
_Member = tuple[Language, Language]  # key and value


class _Branch(NamedTuple):
  """What is said of a value, without alternatives.

  Attributes:
    kinds: what is possible of each type.
    schemas: those that say something of items or members.
    entered: what was entered on the path to it.
  """

  kinds: _Kinds
  schemas: tuple[Schema, ...]
  entered: _Entered


def language_of(
  schema: Mapping[str, Any] | str | bool, blanks: str = 'one'
) -> Language:
  """The JSON texts of the values that a schema describes.

  Args:
    schema: the schema, or JSON of it.
    blanks: the blanks between the parts of a text: 'one' behind each comma and
      colon, as `json.dumps` writes them; 'none'; or 'any'.

  Raises:
    ValueError: it is no schema, or it has what is not followed; or no text, or
      an automaton that is too large, belongs to it.
  """
  check_choice('blanks', blanks, BLANKS)
  try:
    text = schema if isinstance(schema, str) else json.dumps(schema)
  except (TypeError, RecursionError) as error:
    raise unexpected('json_schema', 'JSON', schema, f'({error})') from error
  try:
    root = subschemas.checked(text)
    language = _Texts(blanks).language(((root, True),), ())
    is_empty = language.is_empty
  except RecursionError:
    raise unexpected('json_schema', 'less nesting', schema) from None
  if is_empty:
    raise unexpected('json_schema', 'a schema that has a value', schema)
  return language


class _Texts:
  """Makes the languages of one schema; what was made once is kept."""

  def __init__(self, blanks: str):
    behind, around = BLANKS[blanks]
    pad = languages.regex(around)
    self._comma = pad + languages.literal(',' + behind) + pad
    self._colon = pad + languages.literal(':' + behind) + pad
    self._open = {x: languages.literal(x) + pad for x in '[{'}
    self._close = {x: pad + languages.literal(x) for x in ']}'}
    self._string = functools.cache(languages.json_string)
    for name in ('language', '_conjuncts', '_denials', '_names'):
      setattr(self, name, functools.cache(getattr(self, name)))

  def language(self, items: _Items, entered: _Entered) -> Language:
    """The texts of values of which some schemas hold, others do not."""
    items = tuple(x for x in items if not (x[1] and _is_open(x[0])))
    if not items:
      if entered.count(_ANYTHING) >= MOST_NESTING:
        return _FULL['null'] if _POSSIBLY in entered else NOTHING
      entered = _with(entered, _ANYTHING)
    parts = []
    for kinds, schemas, inside in self._branches(items, entered):
      number = kinds.get('number', NOTHING)
      parts += [kinds[kind] for kind in ('null', 'boolean') if kind in kinds]
      parts.append(scalars.ANY_NUMBER if number is scalars.NUMBER else number)
      if 'string' in kinds:
        parts.append(self._string(kinds['string']))
      if 'array' in kinds:
        parts.append(self._array(schemas, inside))
      if 'object' in kinds:
        parts.append(self._object(schemas, inside))
    return languages.union(dict.fromkeys(parts))

  # Branches.

  def _branches(self, items: _Items, entered: _Entered) -> Iterator[_Branch]:
    """What is said of a value, without alternatives."""
    start = (items, _FULL, (), (), entered, frozenset[_Item]())
    stack: list[tuple[Any, ...]] = [start]
    while stack:
      items, kinds, schemas, choices, entered, done = stack.pop()
      todo = list(items)
      while todo and kinds:
        languages.check_time()
        schema, holds = item = todo.pop(0)
        if item in done:
          continue
        done |= {item}
        if isinstance(schema, bool):
          kinds = kinds if schema is holds else _Kinds()
        elif isinstance(schema, _Kinds):
          kinds = _both(kinds, schema if holds else _rest(schema))
        elif not holds:
          choices += (self._denials(schema),)
        elif schema.is_recursive and entered.count(schema.at) >= MOST_RECURSION:
          kinds = kinds if _POSSIBLY in entered else _Kinds()
        else:
          if schema.is_recursive:
            entered = _with(entered, schema.at)
          schemas = (*schemas, schema)
          for said in self._conjuncts(schema):
            todo += said if len(said) == 1 else ()
            choices += ([(item,) for item in said],) if len(said) > 1 else ()
      if kinds and choices:
        first, *rest = sorted(choices, key=len)
        stack += (
          (alternative, kinds, schemas, tuple(rest), entered, done)
          for alternative in reversed(first)
        )
      elif kinds:
        yield _Branch(kinds, schemas, entered)

  def _conjuncts(self, schema: Schema) -> list[_Items]:
    """What a schema says of the value itself: of each list one item holds."""
    made = functools.partial(_made, schema)
    said: list[_Items] = [((self._kinds(schema), True),)]
    said += (((part, True),) for part in schema.get('allOf', ()))
    said += (((target, True),) for key, target in schema.parts if key == '$ref')
    if 'not' in schema:
      said.append(((schema['not'], False),))
    if 'anyOf' in schema:
      said.append(tuple((part, True) for part in schema['anyOf']))
    if 'oneOf' in schema:
      said.append(tuple((part, True) for part in self._alone(schema)))
    if 'if' in schema:
      said.append(((schema['if'], False), (schema.get('then', True), True)))
      said.append(((schema['if'], True), (schema.get('else', True), True)))
    for keyword in {'const', 'enum'} & schema.keys():
      values = schema[keyword] if keyword == 'enum' else [schema[keyword]]
      said.append(tuple((part, True) for part in _equals(schema, values)))
    lists = schema.get('dependentRequired', {}).items()
    dependents = [(key, made(required=names)) for key, names in lists]
    for key, part in (*dependents, *schema.get('dependentSchemas', {}).items()):
      without = made(properties={key: False})
      said.append(((without, True), (part, True)))
    return said

  def _alone(self, schema: Schema) -> Iterator[Schema]:
    """Of each part of oneOf that it holds and no other one."""

    def may_meet(*parts: Any) -> bool:
      items = tuple((part, True) for part in parts)
      return not self.language(items, (_POSSIBLY,)).is_empty

    for i, part in enumerate(parts := schema['oneOf']):
      others = [x for x in parts[:i] + parts[i + 1 :] if may_meet(part, x)]
      denied = [_made(schema, **{'not': other}) for other in others]
      yield _made(schema, allOf=[part, *denied])

  def _denials(self, schema: Schema) -> list[_Items]:
    """Of what is the case where a schema does not hold the alternatives."""
    size, places = scalars.residues(schema.get('multipleOf', 1)) or (1, 0)
    if 10**places % size:
      raise schema.refusal('multipleOf', f'none{_DENIED}')
    for keyword in _OF_ALL_KEYS & schema.keys():
      if not _is_open(schema[keyword]) or keyword == 'patternProperties':
        raise schema.refusal(keyword, f'none{_DENIED}')
    for keyword, part in schema.parts:
      if keyword == '$ref' and isinstance(part, Schema) and part.is_recursive:
        raise schema.refusal('$ref', f'no recursion{_DENIED}')
    said = self._conjuncts(schema)
    denials = [tuple((part, not holds) for part, holds in x) for x in said]
    return denials + [((part, True),) for part in _counterparts(schema)]

  def _kinds(self, schema: Schema) -> _Kinds:
    """What a schema says of each type."""
    names = schema.get('type', subschemas.TYPES)
    names = [names] if isinstance(names, str) else names
    kinds = _Kinds({name: x for name, x in _FULL.items() if name in names})
    if 'integer' in names and 'number' not in names:
      kinds['number'] = scalars.INTEGER
    for kind, said in (('string', _strings), ('number', _numbers)):
      for language in said(schema) if kind in kinds else ():
        kinds = _both(kinds, _Kinds({**_FULL, kind: language}))
    return kinds

  # Arrays and objects.

  def _array(self, schemas: tuple[Schema, ...], entered: _Entered) -> Language:
    """Arrays; a state is the place and how many items of each `contains`."""
    least = max(_counts(schemas, 'minItems'), default=0)
    most = min(_counts(schemas, 'maxItems'), default=math.inf)
    counters = [_Counter(schema) for schema in schemas if 'contains' in schema]
    last = max(
      *(len(schema.get('prefixItems', ())) for schema in schemas),
      *(counter.begin for counter in counters),
      *(1, least if most == math.inf else int(most)),
    )
    graph = _Graph(self._open['['], self._comma, self._close[']'])
    for place, counts in graph.nodes((0, (0,) * len(counters))):
      enough = all(n >= c.least for c, n in zip(counters, counts, strict=True))
      if place >= least and enough:
        graph.end((place, counts))
      if place >= most:
        continue
      items = tuple((_at(schema, place), True) for schema in schemas)
      following = (
        counter.following(count, place)
        for counter, count in zip(counters, counts, strict=True)
      )
      for options in itertools.product(*following):
        target = min(place + 1, last), tuple(count for _, count in options)
        value = self.language(items + tuple(x for x, _ in options), entered)
        graph.add((place, counts), EMPTY, value, target, place > 0)
    return graph.language

  def _object(self, schemas: tuple[Schema, ...], entered: _Entered) -> Language:
    """Objects; a state is which keys there are, and how many.

    Keys have any order. In a large object those that are not in the schema are
    behind the others, and in a larger one these have the order of the schema;
    then a state is the place in it.
    """
    least = max(_counts(schemas, 'minProperties'), default=0)
    most = min(_counts(schemas, 'maxProperties'), default=math.inf)
    enough = least if most == math.inf else most
    members, others = self._members(schemas, entered)
    required = {name for x in schemas for name in x.get('required', ())}
    if not required <= members.keys():
      return NOTHING
    count = len(members)
    size, rest = (
      sum(len(value.dfa.step) for _, value in each) << min(count, 20)
      for each in (members.values(), others)
    )
    is_free = size // 2 <= MOST_UNORDERED
    is_mixed = is_free and size // 2 + rest <= MOST_UNORDERED
    needed = sum(1 << i for i, name in enumerate(members) if name in required)
    every = (1 << count) - 1 if is_free else count
    graph = _Graph(self._open['{'], self._comma, self._close['}'])
    for node in graph.nodes((0, 0, False)):
      seen, number, is_behind = node
      is_last = seen & needed == needed if is_free else seen == every
      if is_last and number >= least:
        graph.end(node)
      more = min(number + 1, enough)
      for i, (name, (key, value)) in enumerate(members.items()):
        if number < most and (not seen >> i & 1 if is_free else i == seen):
          after = seen | 1 << i if is_free else i + 1
          graph.add(node, key, value, (after, more, True), is_behind)
        if not is_free and i == seen and name not in required:
          graph.add(node, EMPTY, EMPTY, (i + 1, number, is_behind), False)
      after = seen if is_mixed else every
      for key, value in (
        others if number < most and (is_mixed or is_last) else ()
      ):
        graph.add(node, key, value, (after, more, True), is_behind)
    return graph.language

  def _members(
    self, schemas: tuple[Schema, ...], entered: _Entered
  ) -> tuple[dict[str, _Member], list[_Member]]:
    """The members with a name that is in the schemas, and all others."""
    names = dict.fromkeys(
      name
      for schema in schemas
      for name in (*schema.get('properties', ()), *schema.get('required', ()))
    )
    groups: list[tuple[str | None, Language, _Items]] = [
      *((name, languages.literal(name), ()) for name in names),
      (None, languages.EVERY - languages.words([*names]), ()),
    ]
    for schema in schemas:
      if 'propertyNames' in schema:
        allowed = self._names(schema['propertyNames'])
        groups = [(name, keys & allowed, items) for name, keys, items in groups]
      groups = [
        (name, part, items + more)
        for name, keys, items in groups
        for part, more in _split(schema, name, keys)
      ]
    members = [
      (name, (self._string(keys) + self._colon, self.language(items, entered)))
      for name, keys, items in groups
      if (False, True) not in items and not keys.is_empty
    ]
    named = {name: x for name, x in members if name and not x[1].is_empty}
    return named, [member for name, member in members if name is None]

  def _names(self, schema: Any) -> Language:
    """The values of strings that a schema describes."""
    branches = self._branches(((schema, True),), ())
    return languages.union(x.kinds.get('string', NOTHING) for x in branches)


class _Graph:
  """The texts of an array or an object; nodes have any hashable names."""

  def __init__(self, begin: Language, comma: Language, end: Language):
    self._numbers: Any = collections.defaultdict(itertools.count().__next__)
    self._begin, self._comma, self._end = begin, comma, end
    self._edges: list[tuple[int, Language, int]] = []
    self._nodes: list[Any] = []

  def nodes(self, start: Any) -> Iterator[Any]:
    """The start and, as they are added, all that can be reached from it."""
    self._edge('begin', self._begin, start)
    for node in self._nodes:  # it grows
      languages.check_time()
      yield node

  def add(
    self, node: Any, key: Language, value: Language, target: Any, behind: bool
  ) -> None:
    """Adds an item or a member; it has a comma if it is behind another."""
    entry = ('value', id(value), target)  # which many of them may share
    is_new = entry not in self._numbers
    head = self._comma + key if behind else key
    self._edges.append((self._numbers[node], head, self._numbers[entry]))
    if is_new:
      self._edge(entry, value, target)

  def end(self, node: Any) -> None:
    """Lets the text end behind a node."""
    self._edges.append((self._numbers[node], self._end, self._numbers['end']))

  def _edge(self, node: Any, part: Language, target: Any) -> None:
    if target not in self._numbers:
      self._nodes.append(target)
    self._edges.append((self._numbers[node], part, self._numbers[target]))

  @property
  def language(self) -> Language:
    """The texts."""
    ends = (self._numbers['begin'], [self._numbers['end']])
    return languages.graph(self._edges, *ends)


class _Counter:
  """Counts the items of an array that a schema describes."""

  def __init__(self, schema: Schema):
    self.part = schema['contains']
    self.least = schema.get('minContains', 1)
    self.most = schema.get('maxContains')
    self.begin = schema.get('begin', 0)  # items before are not counted

  def following(self, count: int, place: int) -> list[tuple[_Item, int]]:
    """What may be said of the item at a place, and the count behind it."""
    ignored = ((True, True), count)
    counted = ((self.part, True), count + 1)
    if place < self.begin:
      return [ignored]
    if self.most is None:
      return [ignored, counted] if count < self.least else [ignored]
    others = ((self.part, False), count)
    return [others, counted] if count < self.most else [others]


def _is_open(schema: Any) -> bool:
  """Whether a schema says nothing of values."""
  return schema is True or isinstance(schema, Schema) and schema.says_nothing


def _with(entered: _Entered, name: str) -> _Entered:
  return tuple(sorted((*entered, name)))


def _counts(schemas: Iterable[Schema], keyword: str) -> list[int]:
  return [schema[keyword] for schema in schemas if keyword in schema]


def _at(schema: Schema, place: int) -> Any:
  """What a schema says of the item at a place."""
  first = schema.get('prefixItems', ())
  return first[place] if place < len(first) else schema.get('items', True)


def _split(
  schema: Schema, name: str | None, keys: Language
) -> list[tuple[Language, _Items]]:
  """What a schema says of the values of keys; name is that of one key."""
  properties = schema.get('properties', {})
  items: _Items = ((properties[name], True),) if name in properties else ()
  parts = [(keys, items)]
  for pattern, value in schema.get('patternProperties', {}).items():
    search = _search(schema, 'patternProperties', pattern)
    within = [(keys & search, (*items, (value, True))) for keys, items in parts]
    parts = within + [(keys - search, items) for keys, items in parts]
  rest = ((schema.get('additionalProperties', True), True),)
  return [(keys, items or rest) for keys, items in parts]


def _made(of: Schema, **keywords: Any) -> Schema:
  """A schema that is not written, but follows from another one."""
  made = Schema(keywords)
  made.at = of.at
  return made


def _equals(of: Schema, values: list[Any]) -> list[Any]:
  """Schemas of which a value is one if it equals one of some values."""
  groups: dict[str, list[Any]] = collections.defaultdict(list)
  for value in values:
    groups[_TYPE_OF.get(type(value), 'number')].append(value)
  others = []
  for value in groups.pop('array', []):
    items = [_made(of, const=item) for item in value]
    lengths = {'minItems': len(items), 'items': False}
    others.append(_made(of, type='array', prefixItems=items, **lengths))
  for value in groups.pop('object', []):
    parts = {key: _made(of, const=part) for key, part in value.items()}
    keys = {'required': list(value), 'additionalProperties': False}
    others.append(_made(of, type='object', properties=parts, **keys))
  kinds = _Kinds()
  if numbers := groups.pop('number', []):
    kinds['number'] = scalars.equal_to([*map(Decimal, numbers)])
  for kind, of_kind in groups.items():
    texts = of_kind if kind == 'string' else [*map(json.dumps, of_kind)]
    kinds[kind] = languages.words(texts)
  return [kinds, *others]


def _strings(schema: Schema) -> Iterator[Language]:
  """What a schema says of strings."""
  if 'pattern' in schema:
    yield _search(schema, 'pattern', schema['pattern'])
  if 'format' in schema:
    yield languages.regex(scalars.FORMATS[schema['format']])
  least, most = schema.get('minLength', 0), schema.get('maxLength')
  if most is not None and most < least:
    yield NOTHING
  elif least or most is not None:
    yield languages.ANY.repeat(least, most)


def _numbers(schema: Schema) -> Iterator[Language]:
  """What a schema says of numbers."""
  for keyword in subschemas.BOUNDS & schema.keys():
    bound = Decimal(schema[keyword])
    numbers = scalars.above(bound)
    if keyword in ('minimum', 'exclusiveMaximum'):
      numbers |= scalars.equal_to([bound])
    is_least = keyword in ('minimum', 'exclusiveMinimum')
    yield numbers if is_least else scalars.NUMBER - numbers
  if 'multipleOf' in schema:
    size, places = scalars.residues(schema['multipleOf']) or (1, 0)
    if 10**places % size == 0 and schema.get('type') == 'integer':
      return
    if schema['multipleOf'] < scalars.LEAST:
      expected = f'{scalars.LEAST} or more, or the type integer beside it'
      raise schema.refusal('multipleOf', expected)
    yield scalars.multiples(size, places)


def _search(schema: Schema, keyword: str, pattern: str) -> Language:
  """The texts in which a pattern is."""
  try:
    return scalars.pattern(pattern)
  except languages.TooLarge:
    raise
  except ValueError as error:
    expected = f'regexes that are followed ({error})'
    raise schema.refusal(keyword, expected) from None


def _both(kinds: _Kinds, others: _Kinds) -> _Kinds:
  """What is possible of each type by both."""
  both = _Kinds()
  for kind in kinds.keys() & others.keys():
    one, other, full = kinds[kind], others[kind], _FULL[kind]
    if one is full or other is full:
      both[kind] = other if one is full else one
    elif not (met := one & other).is_empty:
      both[kind] = met
  return both


def _rest(kinds: _Kinds) -> _Kinds:
  """What is possible of each type where none of some kinds is."""
  rest = _Kinds()
  for kind, full in _FULL.items():
    if kind not in kinds:
      rest[kind] = full
    elif kinds[kind] is not full and not (left := full - kinds[kind]).is_empty:
      rest[kind] = left
  return rest


def _counterparts(schema: Schema) -> list[Schema]:
  """Schemas of arrays and objects of which a schema does not hold."""
  array = functools.partial(_made, schema, type='array')
  object_ = functools.partial(_made, schema, type='object')

  def denied(part: Any) -> Schema:
    return _made(schema, **{'not': part})

  names, properties = schema.get('required', ()), schema.get('properties', {})
  made = [object_(properties={name: False}) for name in names]
  for name, part in properties.items():
    made.append(object_(properties={name: denied(part)}, required=[name]))
  first = schema.get('prefixItems', [])
  for place, part in enumerate(first):
    items = [True] * place + [denied(part)]
    made.append(array(prefixItems=items, minItems=place + 1))
  if 'items' in schema:
    made.append(array(contains=denied(schema['items']), begin=len(first)))
  if 'contains' in schema:
    counted = functools.partial(array, contains=schema['contains'])
    least, most = schema.get('minContains', 1), schema.get('maxContains')
    if least:
      made.append(counted(minContains=0, maxContains=least - 1))
    if most is not None:
      made.append(counted(minContains=most + 1))
  for make, of in ((array, 'Items'), (object_, 'Properties')):
    if schema.get(f'min{of}', 0):
      made.append(make(**{f'max{of}': schema[f'min{of}'] - 1}))
    if f'max{of}' in schema:
      made.append(make(**{f'min{of}': schema[f'max{of}'] + 1}))
  return made
