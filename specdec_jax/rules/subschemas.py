"""Parses a JSON schema, and checks its keywords and references.

A keyword must be one that `schema` supports, or an annotation. Any other is
refused; the message has its JSON pointer.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from specdec_jax.checks.fields import Bound, check_type, unexpected
from specdec_jax.rules import scalars
from specdec_jax.rules.languages import check_size, check_time

MOST_CHARACTERS = 1 << 22  # the most characters of a schema's JSON
MOST_SUBSCHEMAS = 10_000
MOST_LENGTH = 100_000  # the limit of minLength, maxItems and the other counts
_MOST_DIGITS = 400

TYPES = ('null', 'boolean', 'number', 'string', 'array', 'object')
# Keywords whose subschemas apply to the value itself; then to its items and
# members.
_SAME = ['allOf', 'anyOf', 'oneOf', '$ref']
_WITHIN = ['items', 'additionalProperties', 'propertyNames', 'prefixItems']
_WITHIN += ['properties', 'patternProperties']
_LISTS = ['allOf', 'anyOf', 'oneOf', 'prefixItems']
_DICTS = ['properties', 'patternProperties', '$defs', 'definitions']
_COUNTS = [x + y for x in ('min', 'max') for y in ('Length', 'Items')]
_COUNTS += ['minProperties', 'maxProperties']
BOUNDS = {'minimum', 'maximum', 'exclusiveMinimum', 'exclusiveMaximum'}
NOTES = {  # they say nothing of values
  *'$comment title description default example examples deprecated'.split(),
  *'readOnly writeOnly contentEncoding contentMediaType'.split(),
  *('contentSchema', 'discriminator', '$id', '$schema', '$defs', 'definitions'),
}
_Type = Literal[(*TYPES, 'integer')]  # type: ignore[valid-type]
_HINTS: dict[str, Any] = {
  **dict.fromkeys({*_WITHIN, *NOTES, 'const'}, Any),
  **dict.fromkeys(_LISTS, Annotated[Sequence[Any], Bound(1)]),
  **dict.fromkeys(_DICTS, Mapping[str, Any]),
  **dict.fromkeys(_COUNTS, Annotated[int, Bound(0, MOST_LENGTH)]),
  **dict.fromkeys(['pattern', '$ref', '$id', '$schema'], str),
  'type': _Type | Annotated[Sequence[_Type], Bound(1)],
  **dict.fromkeys(BOUNDS, float),
  'multipleOf': Annotated[int, Bound(1, scalars.MOST_RESIDUES)],
  'format': Literal[tuple(scalars.FORMATS)],
  'enum': Sequence[Any],
  'required': Sequence[str],
  'uniqueItems': Literal[False],
}
_DRAFTS = ('draft/2020-12', 'draft/2019-09', 'draft-07', 'draft-06')


class Schema(dict):
  """A schema that is no boolean; it is compared by identity.

  Attributes:
    at: its JSON pointer.
    parts: pairs of a keyword and a subschema; a `$ref` is paired with the
      schema that it refers to.
    is_recursive: whether the schema contains itself.
  """

  __hash__, __eq__ = object.__hash__, object.__eq__  # type: ignore[assignment]
  at = '#'
  parts: tuple[tuple[str, Any], ...] = ()
  is_recursive = False

  def refusal(self, keyword: str, expected: str) -> ValueError:
    """Returns the error of a keyword whose value is not followed."""
    name = f'json_schema: {keyword} at {self.at}'
    return unexpected(name, expected, self[keyword])


def checked(text: str) -> Schema | bool:
  """Returns the schema of a JSON text.

  Raises:
    ValueError: it is none, is too large, or has what is not followed.
  """
  check_size(len(text), MOST_CHARACTERS, 'characters')
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
    check_size(len(places) + len(todo), MOST_SUBSCHEMAS, 'subschemas')
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
    if keyword in _LISTS:
      yield from ((keyword, part, f'{at}/{i}') for i, part in enumerate(value))
    elif keyword in _DICTS:
      for key, part in value.items():
        key = key.replace('~', '~0').replace('/', '~1')
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
      if is_old and schema.keys() - NOTES != {'$ref'}:
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
  """Returns whether a schema contains itself, by way of these keywords."""
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
