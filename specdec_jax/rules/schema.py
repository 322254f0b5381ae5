"""The JSON texts that a JSON schema describes, as a `Language` over bytes.

It supports the part of draft 2020-12 that docs/rules.md lists, and refuses
other keywords by name. Texts are written as `json.dumps` writes them, with
`ensure_ascii` or without. The schemas of a value are split into branches
without alternatives. In a branch, the strings and the numbers that the schemas
allow are a `Language`; arrays and objects are graphs whose edges are their
items and members.
"""

import collections
import functools
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from specdec_jax.checks.fields import check_choice, unexpected
from specdec_jax.rules import languages, scalars, subschemas
from specdec_jax.rules.languages import EMPTY, NOTHING, Language
from specdec_jax.rules.subschemas import Schema

MOST_RECURSION = 3  # `$ref` may enter a schema within itself so often
MOST_NESTING = 4  # the depth of arrays and objects where any value is allowed
MOST_UNORDERED = 12_000  # the most states of an object with keys in any order
# The blank after a comma or colon, and the regex of blanks around these and
# inside brackets.
BLANKS = {'one': (' ', ''), 'none': ('', ''), 'any': ('', '[ \n\r\t]*')}

# Marks among the schemas entered: one without restrictions; and a flag that
# values beyond the depth limits count as allowed, not as forbidden.
_ANYTHING, _POSSIBLY = '{}', '?'
_TYPE_OF = {type(None): 'null', bool: 'boolean', str: 'string', list: 'array'}
_TYPE_OF[Schema] = 'object'

_Kinds = dict[str, Language]  # type -> the values that are allowed
# Strings have their values here, not JSON. EVERY marks arrays and objects.
_FULL = dict.fromkeys(('string', 'array', 'object'), languages.EVERY)
_FULL['null'] = languages.literal('null')
_FULL['boolean'] = languages.words(['false', 'true'])
_FULL['number'] = scalars.ANY_NUMBER

_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
# The most brackets in each other. Each takes ten of the 1,000 nested calls that
# Python allows; with one call too many NumPy raises another error.
_MOST_DEPTH = 64
_Member = tuple[Language, Language]  # the languages of a key and its value
_Schemas = tuple[Any, ...]  # schemas that all apply to a value
_Entered = tuple[str, ...]  # schemas entered on the path to a value, sorted


def language_of(
  schema: Mapping[str, Any] | str | bool, blanks: str = 'one'
) -> Language:
  """Returns the UTF-8 of the JSON texts that a schema allows.

  Args:
    schema: the schema, or its JSON.
    blanks: the blanks between the parts of a text: 'one' after each comma and
      colon, as `json.dumps` writes them; 'none'; or 'any'.

  Raises:
    ValueError: the schema is invalid, has a keyword that is not supported,
      allows no text, or needs an automaton that is too large.
  """
  check_choice('blanks', blanks, BLANKS)
  try:
    text = schema if isinstance(schema, str) else json.dumps(schema)
  except (TypeError, RecursionError) as error:
    raise unexpected('json_schema', 'JSON', schema, f'({error})') from error
  brackets = re.findall(r'[][{}]', _QUOTED.sub('', text))
  depths = itertools.accumulate(1 if x in '[{' else -1 for x in brackets)
  depth = max(depths, default=0)
  languages.check_size(depth, _MOST_DEPTH, 'levels of nesting')
  language = _Texts(blanks).language((subschemas.checked(text),), ())
  if language.is_empty:
    raise unexpected('json_schema', 'a schema that has a value', schema)
  return language


class _Texts:
  """Makes the languages of one schema; results are cached."""

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
    """Returns the texts of the values that satisfy all of the schemas."""
    schemas = tuple(schema for schema in schemas if not _is_open(schema))
    if not schemas:
      if entered.count(_ANYTHING) >= MOST_NESTING:
        return _FULL['null'] if _POSSIBLY in entered else NOTHING
      entered = _with(entered, _ANYTHING)
    parts = []
    for kinds, applied, inside in self._branches(schemas, entered):
      plain = ('null', 'boolean', 'number')
      parts += [kinds[kind] for kind in plain if kind in kinds]
      if 'string' in kinds:
        parts.append(self._string(kinds['string']))
      if 'array' in kinds:
        parts.append(self._array(applied, inside))
      if 'object' in kinds:
        parts.append(self._object(applied, inside))
    return languages.union(dict.fromkeys(parts))

  # These methods split schemas into branches.

  def _branches(
    self, schemas: _Schemas, entered: _Entered
  ) -> Iterator[tuple[_Kinds, tuple[Schema, ...], _Entered]]:
    """Splits schemas that apply to a value into branches without alternatives.

    Yields:
      The allowed values of each type; all schemas that apply to the value, for
      its items or members; and the schemas entered on the path to it.
    """
    stack: list[tuple[Any, ...]] = [(schemas, _FULL, (), (), entered)]
    while stack:
      schemas, kinds, applied, choices, entered = stack.pop()
      todo = [*schemas]
      while todo and kinds:
        languages.check_time()
        schema = todo.pop(0)
        if schema is True or schema in applied:
          continue
        is_recursive = schema and schema.is_recursive
        if is_recursive and entered.count(schema.at) >= MOST_RECURSION:
          schema = _POSSIBLY in entered
        elif is_recursive:
          entered = _with(entered, schema.at)
        if isinstance(schema, bool):
          kinds = kinds if schema else {}
          continue
        applied = (*applied, schema)
        kinds = _both(kinds, self._kinds(schema))
        todo += schema.get('allOf', ())
        todo += (part for keyword, part in schema.parts if keyword == '$ref')
        choices += self._alternatives(schema)
      if kinds and choices:
        first, *rest = sorted(choices, key=len)
        stack += (
          ((part,), kinds, applied, tuple(rest), entered)
          for part in reversed(first)
        )
      elif kinds:
        yield kinds, applied, entered

  def _kinds(self, schema: Schema) -> _Kinds:
    """Returns the values of each type that a schema allows by itself."""
    names = schema.get('type', subschemas.TYPES)
    names = [names] if isinstance(names, str) else names
    kinds = {name: full for name, full in _FULL.items() if name in names}
    if 'integer' in names and 'number' not in names:
      kinds['number'] = scalars.INTEGER
    for values in _enumerations(schema):
      kinds = _both(kinds, _kinds_of(values))
    for kind, limits in (('string', _strings), ('number', _numbers)):
      for language in limits(schema) if kind in kinds else ():
        kinds = _both(kinds, {**_FULL, kind: language})
    return kinds

  def _alternatives(self, schema: Schema) -> tuple[list[Any], ...]:
    """Returns lists of schemas; a value must satisfy one of each list."""
    lists = [schema[key] for key in ('anyOf', 'oneOf') if key in schema]
    for pair in itertools.combinations(schema.get('oneOf', ()), 2):
      if not self.language(pair, (_POSSIBLY,)).is_empty:
        expected = 'alternatives of which no value has two'
        raise schema.refusal('oneOf', expected)
    for values in _enumerations(schema):
      nested = [_equal_to(schema, x) for x in values if _is_nested(x)]
      plain = [value for value in values if not _is_nested(value)]
      if nested:
        lists.append([_derived(schema, enum=plain), *nested])
    return tuple(lists)

  # These methods make the graphs of arrays and objects.

  def _array(self, schemas: tuple[Schema, ...], entered: _Entered) -> Language:
    """Returns the texts of arrays; nodes of the graph are indices of items."""
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
    """Returns the texts of objects; nodes of the graph are the keys so far.

    Keys may come in any order. In a large object the keys that the schema names
    come in its order, and the others after them; then a node of the graph is
    the index in the schema, with the number of keys.
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
    """Returns the members that the schemas name, and those with other keys."""
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
    """Splits keys by the schemas of their values.

    Args:
      schema: the schema of an object.
      name: the only key in `keys`; None for the keys that no schema names.
      keys: the keys to split.
    """
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
    """Returns the strings that a schema allows, as values and not as JSON."""
    branches = self._branches((schema,), ())
    return languages.union(x.get('string', NOTHING) for x, _, _ in branches)


def _is_open(schema: Any) -> bool:
  """Returns whether a schema allows every value."""
  is_schema = isinstance(schema, Schema)
  return schema is True or is_schema and schema.keys() <= subschemas.NOTES


def _with(entered: _Entered, name: str) -> _Entered:
  return tuple(sorted((*entered, name)))


def _counts(schemas: Iterable[Schema], keyword: str) -> list[int]:
  return [schema[keyword] for schema in schemas if keyword in schema]


def _at(schema: Schema, place: int) -> Any:
  """Returns the schema of an array's item at an index."""
  first = schema.get('prefixItems', ())
  return first[place] if place < len(first) else schema.get('items', True)


def _derived(source: Schema, **keywords: Any) -> Schema:
  """Makes a schema from keywords; its errors point at the source schema."""
  schema = Schema(keywords)
  schema.at = source.at
  return schema


def _is_nested(value: Any) -> bool:
  return isinstance(value, list | Schema)


def _enumerations(schema: Schema) -> list[list[Any]]:
  """Returns lists of values; a value must equal one value of each list."""
  constants = [[schema['const']]] if 'const' in schema else []
  return constants + [schema[x] for x in ('enum',) if x in schema]


def _kinds_of(values: list[Any]) -> _Kinds:
  """Groups values by type, as languages."""
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
  """Returns the schema that only a given array or object satisfies."""
  part = functools.partial(_derived, schema)
  if isinstance(value, list):
    items = [part(const=item) for item in value]
    return part(
      type='array', prefixItems=items, minItems=len(items), items=False
    )
  parts = {key: part(const=each) for key, each in value.items()}
  closed = {'required': [*value], 'additionalProperties': False}
  return part(type='object', properties=parts, **closed)


def _strings(schema: Schema) -> Iterator[Language]:
  """Yields the restrictions of strings that a schema has, as languages."""
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
  """Yields the restrictions of numbers that a schema has, as languages."""
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
  """Returns the texts in which a pattern matches; names the keyword if not."""
  try:
    return scalars.pattern(pattern)
  except languages.NotFollowed as error:
    expected = f'regexes that are followed ({error})'
    raise schema.refusal(keyword, expected) from None


def _both(kinds: _Kinds, others: _Kinds) -> _Kinds:
  """Intersects the values of each type; drops types without any."""
  both = {}
  for kind in kinds.keys() & others.keys():
    left, right, full = kinds[kind], others[kind], _FULL[kind]
    if left is full or right is full:
      both[kind] = right if left is full else left
    elif not (common := left & right).is_empty:
      both[kind] = common
  return both
