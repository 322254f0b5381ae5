"""The JSON texts that a JSON schema describes, as a `Language` over bytes.

It supports the part of draft 2020-12 that docs/rules.md lists. The error about
any other keyword has its name and JSON pointer. Texts are written as
`json.dumps` writes them, with `ensure_ascii` or without. The schemas of a value
are split into branches without alternatives. In a branch, the strings and the
numbers that the schemas allow are a `Language`; arrays and objects are graphs
whose edges are their items and members.
"""

import collections
import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from specdec_jax.checks.fields import Bound, check_type, unexpected
from specdec_jax.rules import languages, scalars
from specdec_jax.rules.languages import EMPTY, NOTHING, Language, check_time

MOST_CHARACTERS = 1 << 22  # the most characters of a schema's JSON
MOST_SUBSCHEMAS = 10_000
MOST_LENGTH = 100_000  # the limit of minLength, maxItems and the other counts
_MOST_DIGITS = 400

_TYPES = ('null', 'boolean', 'number', 'string', 'array', 'object')
# Keywords whose subschemas apply to the value itself, and keywords whose
# subschemas apply to its items and members.
_SAME = ['allOf', 'anyOf', 'oneOf', '$ref']
_WITHIN = ['items', 'additionalProperties', 'propertyNames', 'prefixItems']
_WITHIN += ['properties', 'patternProperties']
_LISTS = ['allOf', 'anyOf', 'oneOf', 'prefixItems']
_DICTS = ['properties', 'patternProperties', '$defs', 'definitions']
_COUNTS = [x + y for x in ('min', 'max') for y in ('Length', 'Items')]
_COUNTS += ['minProperties', 'maxProperties']
_BOUNDS = {'minimum', 'maximum', 'exclusiveMinimum', 'exclusiveMaximum'}
_NOTES = {  # these keywords do not restrict values
  *'$comment title description default example examples deprecated'.split(),
  *'readOnly writeOnly contentEncoding contentMediaType contentSchema'.split(),
  *'discriminator $id $schema $defs definitions'.split(),
}
_Type = Literal[(*_TYPES, 'integer')]  # type: ignore[valid-type]
_HINTS: dict[str, Any] = {
  **dict.fromkeys({*_WITHIN, *_NOTES, 'const'}, Any),
  **dict.fromkeys(_LISTS, Annotated[Sequence[Any], Bound(1)]),
  **dict.fromkeys(_DICTS, Mapping[str, Any]),
  **dict.fromkeys(_COUNTS, Annotated[int, Bound(0, MOST_LENGTH)]),
  **dict.fromkeys(['pattern', '$ref', '$id', '$schema'], str),
  'type': _Type | Annotated[Sequence[_Type], Bound(1)],
  **dict.fromkeys(_BOUNDS, float),
  'multipleOf': Annotated[int, Bound(1, scalars.MOST_RESIDUES)],
  'format': Literal[tuple(scalars.FORMATS)],
  'enum': Sequence[Any],
  'required': Sequence[str],
  'uniqueItems': Literal[False],
}
_DRAFTS = ('draft/2020-12', 'draft/2019-09', 'draft-07', 'draft-06')

MOST_RECURSION = 3  # `$ref` may enter a schema within itself so often
MOST_NESTING = 4  # the depth of arrays and objects where any value is allowed
MOST_UNORDERED = 12_000  # automaton states of keys in any order
# The blank after a comma or colon, and the regex of blanks around these and
# inside brackets.
_BLANKS = {'one': (' ', ''), 'none': ('', ''), 'any': ('', '[ \n\r\t]*')}

# Two marks among the names of entered schemas. The first stands for a schema
# without restrictions. With the second, values beyond the depth limits count as
# allowed, not as forbidden.
_ANYTHING, _POSSIBLY = '{}', '?'


class Schema(dict):
  """A schema that is no boolean; it is compared by identity.

  Attributes:
    at: the schema's JSON pointer.
    parts: pairs of a keyword and a subschema; a `$ref` is paired with the
      schema that it refers to.
    is_recursive: whether the schema contains itself.
  """

  __hash__, __eq__ = object.__hash__, object.__eq__  # type: ignore[assignment]
  at = '#'
  parts: tuple[tuple[str, Any], ...] = ()
  is_recursive = False

  def refusal(self, keyword: str, expected: str) -> ValueError:
    """Returns the error of a keyword whose value is not supported."""
    name = f'json_schema: {keyword} at {self.at}'
    return unexpected(name, expected, self[keyword])


_TYPE_OF = {type(None): 'null', bool: 'boolean', str: 'string', list: 'array'}
_TYPE_OF[Schema] = 'object'

_Kinds = dict[str, Language]  # type -> the values that are allowed
# The language of strings has their values here, not their JSON. EVERY stands
# for arrays and objects, whose texts are made later.
_FULL = dict.fromkeys(('string', 'array', 'object'), languages.EVERY)
_FULL['null'] = languages.literal('null')
_FULL['boolean'] = languages.words(['false', 'true'])
_FULL['number'] = scalars.ANY_NUMBER

# A text of JSON; one without an end is read once, not from each of its quotes.
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*+"?')
# The most brackets inside one another. Each takes ten of the 1,000 nested calls
# that Python allows; with one call too many NumPy raises an error other than
# RecursionError.
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
  try:
    text = schema if isinstance(schema, str) else json.dumps(schema)
  except (TypeError, RecursionError) as error:
    raise unexpected('json_schema', 'JSON', schema, f'({error})') from error
  brackets = re.findall(r'[][{}]', _QUOTED.sub('', text))
  depths = itertools.accumulate(1 if x in '[{' else -1 for x in brackets)
  depth = max(depths, default=0)
  languages.check_size(depth, _MOST_DEPTH, 'levels of nesting')
  language = _Texts(blanks).language((_checked(text),), ())
  if language.is_empty:
    raise unexpected('json_schema', 'a schema that has a value', schema)
  return language


class _Texts:
  """Makes the languages of one schema; results are cached."""

  def __init__(self, blanks: str):
    behind, around = _BLANKS[blanks]
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
    schemas = tuple(
      x for x in schemas if x is False or x is not True and x.keys() - _NOTES
    )
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
      For each branch, the allowed values of each type; all schemas that apply
      to the value, which also restrict its items or members; and the schemas
      entered on the path to it.
    """
    stack: list[tuple[Any, ...]] = [(schemas, _FULL, (), (), entered)]
    while stack:
      schemas, kinds, applied, choices, entered = stack.pop()
      todo = [*schemas]
      while todo and kinds:
        check_time()
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
    names = schema.get('type', _TYPES)
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
      nested = [x for x in values if isinstance(x, list | Schema)]
      plain = [x for x in values if not isinstance(x, list | Schema)]
      if nested:
        schemas = (_equal_to(schema, x) for x in nested)
        lists.append([_derived(schema, enum=plain), *schemas])
    return tuple(lists)

  # These methods make the graphs of arrays and objects.

  def _array(self, schemas: tuple[Schema, ...], entered: _Entered) -> Language:
    """Returns the texts of arrays; nodes of the graph are indices of items."""
    least, most, last = _limits(schemas, 'Items')
    firsts = [schema.get('prefixItems', ()) for schema in schemas]
    last = max(1, last, *map(len, firsts))

    def following(place: int) -> Iterator[tuple[Language, int]]:
      if place < most:
        items = tuple(
          first[place] if place < len(first) else schema.get('items', True)
          for first, schema in zip(firsts, schemas, strict=True)
        )
        comma = self._comma if place else EMPTY
        yield comma + self.language(items, entered), min(place + 1, last)

    items = languages.graph(0, following, lambda place: place >= least)
    return self._open['['] + items + self._close[']']

  def _object(self, schemas: tuple[Schema, ...], entered: _Entered) -> Language:
    """Returns the texts of objects.

    Keys may come in any order; a node of the graph then holds the set of the
    schema's keys so far. In a large object the keys that the schema names come
    in its order, and the others after them; a node then holds the index of the
    schema's next key. A node also holds the number of all keys so far.
    """
    least, most, last = _limits(schemas, 'Properties')
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

    def following(node: Any) -> Iterator[tuple[Language, Any]]:
      seen, number, is_behind = node
      comma = self._comma if is_behind else EMPTY
      more = min(number + 1, last)
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

    def is_final(node: Any) -> bool:
      return is_last(node[0]) and node[1] >= least

    inside = languages.graph((0, 0, False), following, is_final)
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
    """Returns the strings that a schema allows, without quotes and escapes."""
    branches = self._branches((schema,), ())
    return languages.union(x.get('string', NOTHING) for x, _, _ in branches)


def _with(entered: _Entered, name: str) -> _Entered:
  return tuple(sorted((*entered, name)))


def _limits(schemas: _Schemas, what: str) -> tuple[int, float, int]:
  """Returns the limits that schemas set on a number of parts.

  Args:
    schemas: schemas that all apply to a value.
    what: the name of the parts, 'Items' or 'Properties'.

  Returns:
    The least number; the greatest number; and the number up to which parts must
    be counted, because all larger numbers are treated alike.
  """
  least = max((x.get(f'min{what}', 0) for x in schemas), default=0)
  most = min((x.get(f'max{what}', math.inf) for x in schemas), default=math.inf)
  return least, most, least if most == math.inf else int(most)


def _derived(source: Schema, **keywords: Any) -> Schema:
  """Makes a schema from keywords; its errors point at the source schema."""
  schema = Schema(keywords)
  schema.at = source.at
  return schema


def _enumerations(schema: Schema) -> list[list[Any]]:
  """Returns lists of values; a value must equal one value of each list."""
  constants = [[schema['const']]] if 'const' in schema else []
  return constants + ([schema['enum']] if 'enum' in schema else [])


def _kinds_of(values: list[Any]) -> _Kinds:
  """Groups values by type; returns the language of each type's values."""
  groups: dict[str, list[Any]] = collections.defaultdict(list)
  for value in values:
    groups[_TYPE_OF.get(type(value), 'number')].append(value)
  makers: dict[str, Callable[[list[Any]], Language]] = {
    'number': lambda numbers: scalars.equal_to([*map(Decimal, numbers)]),
    'string': languages.words,
    'boolean': lambda flags: languages.words([*map(json.dumps, flags)]),
  }
  return {
    kind: makers[kind](some) if kind in makers else _FULL[kind]
    for kind, some in groups.items()
  }


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
  """Yields a language for each restriction that a schema puts on strings."""
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
  """Yields a language for each restriction that a schema puts on numbers."""
  for keyword in _BOUNDS & schema.keys():
    bound = Decimal(schema[keyword])
    numbers = scalars.above(bound)
    if keyword in ('minimum', 'exclusiveMaximum'):
      numbers |= scalars.equal_to([bound])
    is_least = keyword in ('minimum', 'exclusiveMinimum')
    yield numbers if is_least else scalars.NUMBER - numbers
  if 'multipleOf' in schema:
    yield scalars.multiples(schema['multipleOf'])


def _search(schema: Schema, keyword: str, pattern: str) -> Language:
  """Returns the texts in which a pattern matches somewhere.

  Raises:
    ValueError: the pattern is not supported; the error names the keyword.
  """
  try:
    return scalars.pattern(pattern)
  except languages.NotFollowed as error:
    expected = f'regexes that are followed ({error})'
    raise schema.refusal(keyword, expected) from None


def _both(kinds: _Kinds, others: _Kinds) -> _Kinds:
  """Intersects the values of each type; drops types without any value."""
  both = {}
  for kind in kinds.keys() & others.keys():
    left, right, full = kinds[kind], others[kind], _FULL[kind]
    if left is full or right is full:
      both[kind] = right if left is full else left
    elif not (common := left & right).is_empty:
      both[kind] = common
  return both


# These functions parse a schema, and check its keywords and references.


def _checked(text: str) -> Schema | bool:
  """Returns the schema of a JSON text.

  Raises:
    ValueError: the text is no schema, is too large, or has a part that is not
      supported.
  """
  languages.check_size(len(text), MOST_CHARACTERS, 'characters')
  try:
    root = json.loads(
      text, object_hook=Schema, parse_float=_number, parse_constant=_number
    )
  except ValueError as error:
    raise unexpected('json_schema', 'JSON', text, f'({error})') from error
  places: dict[str, Any] = {}
  todo = [(root, '#')]
  while todo:
    check_time()
    schema, at = todo.pop()
    places[at] = schema
    if not isinstance(schema, bool | Schema):
      raise unexpected(f'json_schema at {at}', 'a schema', schema)
    if isinstance(schema, Schema):
      schema.at = at
      for keyword in schema:
        _check(schema, keyword)
      below = list(_below(schema))
      schema.parts = tuple((keyword, part) for keyword, part, _ in below)
      todo += [(part, at) for _, part, at in below]
    languages.check_size(len(places) + len(todo), MOST_SUBSCHEMAS, 'subschemas')
  if isinstance(root, Schema):
    _follow_references(root, places)
  return root


def _number(text: str) -> int | Decimal:
  number = Decimal(text)
  if not number.is_finite() or abs(number.adjusted()) > _MOST_DIGITS:
    raise ValueError(f'{text} is no number of {_MOST_DIGITS} digits')
  return int(number) if number == number.to_integral_value() else number


def _below(schema: Schema) -> Iterator[tuple[str, Any, str]]:
  """Yields keyword, schema and JSON pointer of each direct subschema."""
  for keyword, value in schema.items():
    at = f'{schema.at}/{keyword}'
    if keyword in (*_LISTS, *_DICTS):
      parts = value.items() if keyword in _DICTS else enumerate(value)
      for key, part in parts:
        key = str(key).replace('~', '~0').replace('/', '~1')
        yield keyword, part, f'{at}/{key}'
    elif keyword in _WITHIN:
      yield keyword, value, at


def _check(schema: Schema, keyword: str) -> None:
  """Raises ValueError if a keyword or its value is not supported."""
  value = schema[keyword]
  if keyword not in _HINTS:
    raise schema.refusal(keyword, 'only keywords that are followed')
  number = float(value) if isinstance(value, Decimal) else value
  check_type(f'json_schema: {keyword} at {schema.at}', number, _HINTS[keyword])
  if keyword == '$schema' and not any(
    f'json-schema.org/{draft}/' in value for draft in _DRAFTS
  ):
    raise schema.refusal(keyword, f'one of {", ".join(_DRAFTS)}')


def _follow_references(root: Schema, places: dict[str, Any]) -> None:
  """Resolves each `$ref` into `parts`, and marks the recursive schemas."""
  schemas = [each for each in places.values() if isinstance(each, Schema)]
  is_old = any(x in root.get('$schema', '') for x in _DRAFTS[2:])
  for schema in schemas:
    if '$id' in schema and schema is not root:
      raise schema.refusal('$id', 'none below the root')
    if '$ref' in schema:
      place = unquote(schema['$ref'].removeprefix(root.get('$id', '')))
      if place not in places:
        raise schema.refusal('$ref', 'a part of this schema, as "#/$defs/name"')
      if is_old and schema.keys() - _NOTES != {'$ref'}:
        raise schema.refusal('$ref', 'nothing beside it in this draft')
      schema.parts = (*schema.parts, ('$ref', places[place]))
  is_within = functools.cache(_is_within)
  for schema in schemas:
    for keyword, target in schema.parts:
      if keyword == '$ref' and isinstance(target, Schema):
        if is_within(target, frozenset(_SAME)):
          raise schema.refusal('$ref', 'no circle of references')
        target.is_recursive = is_within(target, frozenset(_SAME + _WITHIN))


def _is_within(schema: Schema, keywords: frozenset[str]) -> bool:
  """Returns whether a schema contains itself through these keywords."""
  visited: set[Schema] = set()
  todo = [schema]
  while todo:
    check_time()
    for keyword, part in todo.pop().parts:
      is_new = isinstance(part, Schema) and part not in visited
      if keyword in keywords and is_new:
        visited.add(part)
        todo.append(part)
  return schema in visited
