"""A JSON schema whose keywords and references are checked.

Each keyword is one that is followed, or one that says nothing of values.
Whatever else a schema has is refused by its JSON pointer.
"""

import functools
import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from specdec_jax.checks.fields import is_a, unexpected
from specdec_jax.rules import scalars
from specdec_jax.rules.languages import check_time

MOST_SUBSCHEMAS = 10_000
MOST_LENGTH = 100_000  # that maxLength and its like may be

TYPES = ('null', 'boolean', 'number', 'string', 'array', 'object')
_SCHEMAS = {*'not if then else items contains additionalProperties'.split()}
_SCHEMAS |= {'propertyNames'}
_LISTS = {*'allOf anyOf oneOf prefixItems'.split()}
_DEFINITIONS = {'$defs', 'definitions'}
_DICTS = {*'properties patternProperties dependentSchemas'.split()}
_DICTS |= _DEFINITIONS
# Of these the subschemas are about the same value.
_IN_PLACE = {
  *'not if then else allOf anyOf oneOf dependentSchemas $ref'.split()
}
_COUNTS = {*'minLength maxLength minItems maxItems minContains'.split()}
_COUNTS |= {*'maxContains minProperties maxProperties'.split()}
_BOUNDS = {*'minimum maximum exclusiveMinimum exclusiveMaximum'.split()}
_TEXTS = {*'pattern $ref $anchor $id'.split()}
_WITHOUT_MEANING = {*'$comment title description default examples'.split()}
_WITHOUT_MEANING |= {*'example deprecated readOnly writeOnly'.split()}
_WITHOUT_MEANING |= {*'contentEncoding contentMediaType contentSchema'.split()}
_WITHOUT_MEANING |= {'discriminator', '$schema', '$id', '$anchor'}
_WITHOUT_MEANING |= _DEFINITIONS
_DRAFTS = ('draft/2020-12', 'draft/2019-09', 'draft-07', 'draft-06')
_MOST_DIGITS = 400  # of a bound


class Schema(dict):
  """A schema that is no boolean; it is compared by identity.

  Attributes:
    at: its JSON pointer.
    parts: pairs of a keyword and a subschema; of `$ref`, of what it means.
    is_recursive: whether it is within itself.
  """

  __hash__, __eq__ = object.__hash__, object.__eq__  # type: ignore[assignment]
  at = '#'
  parts: tuple[tuple[str, Any], ...] = ()
  is_recursive = False

  @property
  def target(self) -> Any:
    """What its `$ref` means, None without one."""
    return dict(self.parts).get('$ref')

  @property
  def says_nothing(self) -> bool:
    """Whether it has no keyword that says something of values."""
    return self.keys() <= _WITHOUT_MEANING

  def refusal(
    self, keyword: str, expected: str, advice: str = ''
  ) -> ValueError:
    """The error of a keyword whose value is not followed."""
    name = f'json_schema: {keyword} at {self.at}'
    return unexpected(name, expected, self[keyword], advice)


def checked(text: str) -> Schema | bool:
  """The schema of a JSON text.

  Raises:
    ValueError: it is none, or it has what is not followed.
  """
  root = json.loads(
    text, object_hook=Schema, parse_float=Decimal, parse_constant=_no_number
  )
  places: dict[str, Any] = {}
  todo = [(root, '#')]
  while todo:
    check_time()
    schema, at = todo.pop()
    if not isinstance(schema, bool | Schema):
      raise unexpected(f'json_schema at {at}', 'a schema', schema)
    places[at] = schema
    if len(places) > MOST_SUBSCHEMAS:
      expected = f'at most {MOST_SUBSCHEMAS} subschemas'
      raise unexpected('json_schema', expected, text)
    if isinstance(schema, Schema):
      schema.at = at
      for keyword, value in schema.items():
        good, expected = _expected(schema, keyword, value)
        if not good:
          raise schema.refusal(keyword, expected)
      below = list(_below(schema))
      schema.parts = tuple((keyword, part) for keyword, part, _ in below)
      todo += [(part, at) for _, part, at in below]
  _follow_references(root, places)
  return root


def _no_number(text: str) -> None:
  raise ValueError(f'{text} is no JSON')


def _below(schema: Schema) -> Iterator[tuple[str, Any, str]]:
  """Keyword, schema and JSON pointer of the subschemas of a schema."""
  for keyword, value in schema.items():
    at = f'{schema.at}/{keyword}'
    if keyword in _SCHEMAS:
      yield keyword, value, at
    elif keyword in _LISTS:
      yield from ((keyword, part, f'{at}/{i}') for i, part in enumerate(value))
    elif keyword in _DICTS:
      for key, part in value.items():
        key = key.replace('~', '~0').replace('/', '~1')
        yield keyword, part, f'{at}/{key}'


def _expected(schema: Schema, keyword: str, value: Any) -> tuple[Any, str]:
  """Whether the value of a keyword is followed, and what is."""
  is_number = isinstance(value, int | Decimal) and not isinstance(value, bool)
  number = Decimal(value) if is_number else Decimal(-1)
  is_dict, is_list = isinstance(value, Schema), isinstance(value, list)
  if keyword in _LISTS:
    return is_list and value, 'a list of schemas'
  if keyword in _DICTS:
    return is_dict, 'a dict of schemas'
  if keyword in _COUNTS:
    is_count = 0 <= number <= MOST_LENGTH and number % 1 == 0
    return is_count, f'a whole number from 0 to {MOST_LENGTH}'
  if keyword in _BOUNDS:
    is_bound = is_number and abs(number.adjusted()) <= _MOST_DIGITS
    return is_bound, f'a number of at most {_MOST_DIGITS} digits'
  if keyword == 'multipleOf':
    is_divisor = number > 0 and scalars.residues(number) is not None
    return is_divisor, f'n / 10^k, n up to {scalars.MOST_RESIDUES}'
  if keyword == 'type':
    names = value if is_list else [value]
    known = names and all(name in (*TYPES, 'integer') for name in names)
    return known, f'one or some of {", ".join(TYPES)}, integer'
  if keyword == 'format':
    return value in scalars.FORMATS, f'one of {", ".join(scalars.FORMATS)}'
  if keyword == '$schema':
    known = any(f'json-schema.org/{x}/' in str(value) for x in _DRAFTS)
    return known, f'one of {", ".join(_DRAFTS)} of json-schema.org'
  if keyword == 'required':
    return is_a(value, list[str]), 'a list of texts'
  if keyword == 'dependentRequired':
    good = is_dict and all(is_a(names, list[str]) for names in value.values())
    return good, 'a dict of lists of texts'
  if keyword in _TEXTS:
    return isinstance(value, str), 'text'
  if keyword == 'enum':
    return is_list, 'a list'
  if keyword == 'uniqueItems':
    is_one = value is True and schema.get('maxItems', 2) in (0, 1)
    return value is False or is_one, 'False, or maxItems of 1 beside it'
  known = {'const'} | _SCHEMAS | _WITHOUT_MEANING
  return keyword in known, 'no such keyword, because it is not followed'


def _follow_references(root: Any, places: dict[str, Any]) -> None:
  """Adds to the parts what references mean, and says which are recursive."""
  schemas = [each for each in places.values() if isinstance(each, Schema)]
  anchors = {each['$anchor']: each for each in schemas if '$anchor' in each}
  base = root.get('$id', '') if isinstance(root, Schema) else ''
  is_old = isinstance(root, Schema) and any(
    draft in root.get('$schema', '') for draft in _DRAFTS[2:]
  )
  for schema in schemas:
    if '$id' in schema and schema is not root:
      raise schema.refusal('$id', 'none below the root')
    if '$ref' not in schema:
      continue
    place = unquote(schema['$ref'].removeprefix(base))
    target = places.get(place, anchors.get(place[1:]))
    if target is None or not place.startswith('#'):
      expected = 'a schema of this document, as "#/$defs/name"'
      raise schema.refusal('$ref', expected)
    if is_old and schema.keys() - {'$ref'} - _WITHOUT_MEANING:
      expected = 'nothing beside it, for this draft ignores that'
      raise schema.refusal('$ref', expected)
    schema.parts = (*schema.parts, ('$ref', target))
  is_within = functools.cache(_is_within)
  for schema in schemas:
    for keyword, target in schema.parts:
      if keyword != '$ref' or isinstance(target, bool):
        continue
      if is_within(target, frozenset(_IN_PLACE)):
        raise schema.refusal('$ref', 'no circle of references')
      every = _IN_PLACE | _SCHEMAS | _LISTS | _DICTS - _DEFINITIONS
      target.is_recursive = is_within(target, frozenset(every))


def _is_within(schema: Schema, keywords: frozenset[str]) -> bool:
  """Whether a schema is below itself by some keywords."""
  known: set[Schema] = set()
  todo = [schema]
  while todo:
    check_time()
    for keyword, part in todo.pop().parts:
      if keyword not in keywords or isinstance(part, bool) or part in known:
        continue
      if part is schema:
        return True
      known.add(part)
      todo.append(part)
  return False
