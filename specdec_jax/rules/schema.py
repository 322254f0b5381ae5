"""The JSON texts that a JSON schema describes, as a `Language` over bytes.

A stated part of draft 2020-12, see docs/rules.md. Texts are written as
`json.dumps` writes them, with `ensure_ascii` or without. What schemas say of a
value is split into branches without alternatives. In a branch, what is said of
strings and numbers is a `Language`; arrays and objects are graphs whose edges
are their items and members. What cannot be followed is refused by name.
"""

import collections
import functools
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from specdec_jax.checks.fields import check_choice, unexpected
from specdec_jax.rules import languages, scalars, subschemas
from specdec_jax.rules.languages import EMPTY, NOTHING, Language
from specdec_jax.rules.subschemas import Schema

MOST_RECURSION = 3  # times that `$ref` enters a schema within itself
MOST_NESTING = 4  # of arrays and objects where any value may be
MOST_UNORDERED = 12_000  # states of an object whose keys have any order
# What is behind a comma and a colon, and what is around these and in brackets.
BLANKS = {'one': (' ', ''), 'none': ('', ''), 'any': ('', '[ \n\r\t]*')}

_ANYTHING = '{}'  # among the schemas entered: one that says nothing
_POSSIBLY = '?'  # what is cut off counts as possible
_TYPE_OF = {type(None): 'null', bool: 'boolean', str: 'string', list: 'array'}
_TYPE_OF[Schema] = 'object'

_Kinds = dict[str, Language]  # what is possible of each type
# Of strings the values; arrays and objects have a mark.
_FULL = dict.fromkeys(('string', 'array', 'object'), languages.EVERY)
_FULL['null'] = languages.literal('null')
_FULL['boolean'] = languages.words(['false', 'true'])
_FULL['number'] = scalars.ANY_NUMBER

_Member = tuple[Language, Language]  # key and value
_Schemas = tuple[Any, ...]  # of which a value is one
_Entered = tuple[str, ...]  # what was entered on the path to a value, sorted


def language_of(
  schema: Mapping[str, Any] | str | bool, blanks: str = 'one'
) -> Language:
  """The UTF-8 of the JSON texts of the values that a schema describes.

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
    language = _Texts(blanks).language((subschemas.checked(text),), ())
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
    for name in ('language', '_kinds', '_alternatives', '_names'):
      setattr(self, name, functools.cache(getattr(self, name)))

  def language(self, schemas: _Schemas, entered: _Entered) -> Language:
    """The texts of values that are of each of some schemas."""
    schemas = tuple(schema for schema in schemas if not _is_open(schema))
    if not schemas:
      if entered.count(_ANYTHING) >= MOST_NESTING:
        return _FULL['null'] if _POSSIBLY in entered else NOTHING
      entered = _with(entered, _ANYTHING)
    parts = []
    for kinds, said, inside in self._branches(schemas, entered):
      plain = ('null', 'boolean', 'number')
      parts += [kinds[kind] for kind in plain if kind in kinds]
      if 'string' in kinds:
        parts.append(self._string(kinds['string']))
      if 'array' in kinds:
        parts.append(self._array(said, inside))
      if 'object' in kinds:
        parts.append(self._object(said, inside))
    return languages.union(dict.fromkeys(parts))

  # Branches.

  def _branches(
    self, schemas: _Schemas, entered: _Entered
  ) -> Iterator[tuple[_Kinds, tuple[Schema, ...], _Entered]]:
    """What is said of a value, without alternatives.

    Yields:
      What is possible of each type; the schemas that say something of it, of
      its items or members; and what was entered on the path to it.
    """
    stack: list[tuple[Any, ...]] = [(schemas, _FULL, (), (), entered)]
    while stack:
      schemas, kinds, said, choices, entered = stack.pop()
      todo = [*schemas]
      while todo and kinds:
        languages.check_time()
        schema = todo.pop(0)
        if schema is True or schema in said:
          continue
        is_recursive = schema and schema.is_recursive
        if is_recursive and entered.count(schema.at) >= MOST_RECURSION:
          schema = _POSSIBLY in entered
        elif is_recursive:
          entered = _with(entered, schema.at)
        if isinstance(schema, bool):
          kinds = kinds if schema else {}
          continue
        said = (*said, schema)
        kinds = _both(kinds, self._kinds(schema))
        todo += schema.get('allOf', ())
        todo += (part for keyword, part in schema.parts if keyword == '$ref')
        choices += self._alternatives(schema)
      if kinds and choices:
        first, *rest = sorted(choices, key=len)
        stack += (
          ((part,), kinds, said, tuple(rest), entered)
          for part in reversed(first)
        )
      elif kinds:
        yield kinds, said, entered

  def _kinds(self, schema: Schema) -> _Kinds:
    """What a schema says of each type."""
    names = schema.get('type', subschemas.TYPES)
    names = [names] if isinstance(names, str) else names
    kinds = {name: full for name, full in _FULL.items() if name in names}
    if 'integer' in names and 'number' not in names:
      kinds['number'] = scalars.INTEGER
    for values in _enumerations(schema):
      kinds = _both(kinds, _kinds_of(values))
    for kind, said in (('string', _strings), ('number', _numbers)):
      for language in said(schema) if kind in kinds else ():
        kinds = _both(kinds, {**_FULL, kind: language})
    return kinds

  def _alternatives(self, schema: Schema) -> tuple[list[Any], ...]:
    """Lists of schemas, of each of which one holds where a schema does."""
    lists = [schema[key] for key in ('anyOf', 'oneOf') if key in schema]
    for pair in itertools.combinations(schema.get('oneOf', ()), 2):
      if not self.language(pair, (_POSSIBLY,)).is_empty:
        expected = 'alternatives of which no value has two'
        raise schema.refusal('oneOf', expected)
    for values in _enumerations(schema):
      nested = [_equal_to(schema, x) for x in values if _is_nested(x)]
      plain = [value for value in values if not _is_nested(value)]
      if nested:
        lists.append([_made(schema, enum=plain), *nested])
    return tuple(lists)

  # Arrays and objects.

  def _array(self, schemas: tuple[Schema, ...], entered: _Entered) -> Language:
    """Arrays; a node is the place of an item."""
    least = max(_counts(schemas, 'minItems'), default=0)
    most = min(_counts(schemas, 'maxItems'), default=math.inf)
    last = max(
      *(len(schema.get('prefixItems', ())) for schema in schemas),
      *(1, least if most == math.inf else int(most)),
    )

    def following(place: int) -> Iterator[tuple[Language, int]]:
      if place < most:
        items = tuple(_at(schema, place) for schema in schemas)
        comma = self._comma if place else EMPTY
        yield comma + self.language(items, entered), min(place + 1, last)

    items = languages.graph(0, following, lambda place: place >= least)
    return self._open['['] + items + self._close[']']

  def _object(self, schemas: tuple[Schema, ...], entered: _Entered) -> Language:
    """Objects; a node is which keys there are, and how many.

    Keys have any order. In a large object those in the schema have its order,
    and the others are behind them; then a node has the place in the schema.
    """
    least = max(_counts(schemas, 'minProperties'), default=0)
    most = min(_counts(schemas, 'maxProperties'), default=math.inf)
    members, others = self._members(schemas, entered)
    required = {name for x in schemas for name in x.get('required', ())}
    if not required <= members.keys():
      return NOTHING
    count = len(members)
    listed = [*members.values(), *others]
    size = sum(len(value.dfa.step) for _, value in listed)
    is_free = size << min(count, 20) <= MOST_UNORDERED
    needed = sum(1 << i for i, name in enumerate(members) if name in required)

    def is_last(seen: int) -> bool:
      return seen & needed == needed if is_free else seen == count

    def following(
      node: tuple[int, int, bool],
    ) -> Iterator[tuple[Language, Any]]:
      seen, number, is_behind = node
      comma = self._comma if is_behind else EMPTY
      more = min(number + 1, least if most == math.inf else most)
      for i, (name, (key, value)) in enumerate(members.items()):
        if seen >> i & 1 if is_free else i != seen:
          continue
        after = seen | 1 << i if is_free else i + 1
        if number < most:
          yield comma + key + value, (after, more, True)
        if not is_free and name not in required:
          yield EMPTY, (after, number, is_behind)
      for key, value in others if is_free or is_last(seen) else ():
        if number < most:
          yield comma + key + value, (seen, more, True)

    inside = languages.graph(
      (0, 0, False),
      following,
      lambda node: is_last(node[0]) and node[1] >= least,
    )
    return self._open['{'] + inside + self._close['}']

  def _members(
    self, schemas: tuple[Schema, ...], entered: _Entered
  ) -> tuple[dict[str, _Member], list[_Member]]:
    """The members with a name that is in the schemas, and all others."""
    names = dict.fromkeys(
      name
      for schema in schemas
      for name in (*schema.get('properties', ()), *schema.get('required', ()))
    )
    groups: list[tuple[str | None, Language, _Schemas]] = [
      *((name, languages.literal(name), ()) for name in names),
      (None, languages.EVERY - languages.words([*names]), ()),
    ]
    for schema in schemas:
      groups = [
        (name, part, values + more)
        for name, keys, values in groups
        for part, more in self._split(schema, name, keys)
      ]
    named: dict[str, _Member] = {}
    others: list[_Member] = []
    for name, keys, values in groups:
      value = self.language(values, entered)
      if keys.is_empty or value.is_empty:
        continue
      member = self._string(keys) + self._colon, value
      if name is None:
        others.append(member)
      else:
        named[name] = member
    return named, others

  def _split(
    self, schema: Schema, name: str | None, keys: Language
  ) -> list[tuple[Language, _Schemas]]:
    """What a schema says of the values of keys; name is that of one key."""
    if 'propertyNames' in schema:
      keys &= self._names(schema['propertyNames'])
    properties = schema.get('properties', {})
    values = (properties[name],) if name in properties else ()
    parts: list[tuple[Language, _Schemas]] = [(keys, values)]
    for pattern, value in schema.get('patternProperties', {}).items():
      search = _search(schema, 'patternProperties', pattern)
      within = [(keys & search, (*values, value)) for keys, values in parts]
      parts = within + [(keys - search, values) for keys, values in parts]
    rest = (schema.get('additionalProperties', True),)
    return [(keys, values or rest) for keys, values in parts]

  def _names(self, schema: Any) -> Language:
    """The values of strings that a schema describes."""
    branches = self._branches((schema,), ())
    return languages.union(x.get('string', NOTHING) for x, _, _ in branches)


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


def _made(like: Schema, **keywords: Any) -> Schema:
  """A schema that is not written, but follows from another one."""
  made = Schema(keywords)
  made.at = like.at
  return made


def _is_nested(value: Any) -> bool:
  return isinstance(value, list | Schema)


def _enumerations(schema: Schema) -> list[list[Any]]:
  """Lists of values, of each of which a value equals one."""
  constants = [[schema['const']]] if 'const' in schema else []
  return constants + [schema[x] for x in ('enum',) if x in schema]


def _kinds_of(values: list[Any]) -> _Kinds:
  """The values of each type."""
  groups: dict[str, list[Any]] = collections.defaultdict(list)
  for value in values:
    groups[_TYPE_OF.get(type(value), 'number')].append(value)
  kinds = {kind: _FULL[kind] for kind in groups}
  if numbers := groups.pop('number', []):
    kinds['number'] = scalars.equal_to([*map(Decimal, numbers)])
  if strings := groups.pop('string', []):
    kinds['string'] = languages.words(strings)
  for kind in groups.keys() & {'boolean'}:
    kinds[kind] = languages.words([*map(json.dumps, groups[kind])])
  return kinds


def _equal_to(schema: Schema, value: Any) -> Schema:
  """The schema of an array or an object that equals another one."""
  part = functools.partial(_made, schema)
  if isinstance(value, list):
    items = [part(const=item) for item in value]
    return part(
      type='array', prefixItems=items, minItems=len(items), items=False
    )
  parts = {key: part(const=each) for key, each in value.items()}
  closed = {'required': [*value], 'additionalProperties': False}
  return part(type='object', properties=parts, **closed)


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
    yield scalars.multiples(schema['multipleOf'])


def _search(schema: Schema, keyword: str, pattern: str) -> Language:
  """The texts in which a pattern is."""
  try:
    return scalars.pattern(pattern)
  except languages.NotFollowed as error:
    expected = f'regexes that are followed ({error})'
    raise schema.refusal(keyword, expected) from None


def _both(kinds: _Kinds, others: _Kinds) -> _Kinds:
  """What is possible of each type by both."""
  both = {}
  for kind in kinds.keys() & others.keys():
    one, other, full = kinds[kind], others[kind], _FULL[kind]
    if one is full or other is full:
      both[kind] = other if one is full else one
    elif not (met := one & other).is_empty:
      both[kind] = met
  return both
