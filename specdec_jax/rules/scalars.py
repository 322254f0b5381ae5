"""Languages of the strings and numbers that keywords of a schema describe."""

import functools
import re
from collections.abc import Iterator
from decimal import Decimal

from specdec_jax.rules import languages
from specdec_jax.rules.languages import Language, concat

# The largest `multipleOf`; its automaton has a state per residue.
MOST_RESIDUES = 2_000

_WHOLE = r'(?:0|[1-9][0-9]*)'
# Numbers of a schema with bounds are written without an exponent, and without
# zeros at the end of a fraction.
NUMBER = languages.regex(rf'-?{_WHOLE}(?:\.(?:0|[0-9]{{0,19}}[1-9]))?')
INTEGER = languages.regex(rf'-?{_WHOLE}(?:\.0)?')
# Any number of JSON, for schemas that do not restrict its value.
ANY_NUMBER = languages.regex(rf'-?{_WHOLE}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?')

_YEAR = r'[0-9]{4}'
_LEAP = (
  r'(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])'
  r'|(?:[02468][048]|[13579][26])00)'
)
_DATE = (
  rf'(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])'
  r'|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))'
  rf'|{_LEAP}-02-29)'
)
_HOUR = r'(?:[01][0-9]|2[0-3])'
_TIME = (
  rf'(?:{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?'
  rf'(?:[zZ]|[+-]{_HOUR}:[0-5][0-9])'
  r'|23:59:60(?:\.[0-9]+)?(?:[zZ]|[+-]00:00))'
)
_DAYS = r'(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)'
_HOURS = r'T(?:[0-9]+S|[0-9]+M(?:[0-9]+S)?|[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?)'
_BYTE = r'(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])'
_IPV4 = rf'{_BYTE}(?:\.{_BYTE}){{3}}'
_GROUP = '[0-9A-Fa-f]{1,4}'
_PAIR = rf'(?:{_GROUP}:{_GROUP}|{_IPV4})'
_IPV6 = (
  rf'(?:(?:{_GROUP}:){{6}}{_PAIR}|::(?:{_GROUP}:){{5}}{_PAIR}'
  + ''.join(
    rf'|(?:(?:{_GROUP}:){{0,{n}}}{_GROUP})?::(?:{_GROUP}:){{{4 - n}}}{_PAIR}'
    for n in range(5)
  )
  + rf'|(?:(?:{_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}'
  + rf'|(?:(?:{_GROUP}:){{0,6}}{_GROUP})?::)'
)
_LABEL = r'[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?'
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_EMAIL = (
  rf'(?:{_ATOM}(?:\.{_ATOM})*|"(?:[ !#-\[\]-~]|\\[ -~])*")@'
  rf'(?:{_LABEL}(?:\.{_LABEL})*|\[(?:{_IPV4}|IPv6:{_IPV6})\])'
)
_PCT = '%[0-9A-Fa-f]{2}'
_USER = rf"(?:[A-Za-z0-9._~!$&'()*+,;=-]|{_PCT})"
_PCHAR = rf'(?:{_USER}|[:@])'
_HOST = rf'(?:\[{_IPV6}\]|{_USER}*)'
_PATH = rf'{_PCHAR}+(?:/{_PCHAR}*)*'
_AUTHORITY = rf'//(?:(?:{_USER}|:)*@)?{_HOST}(?::[0-9]*)?(?:/{_PCHAR}*)*'
_REST = rf'(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?'
_URI = rf'[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}|/?{_PATH}|/)?{_REST}'
FORMATS = {
  'date': _DATE,
  'time': _TIME,
  'date-time': f'{_DATE}[tT]{_TIME}',
  'duration': rf'P(?:[0-9]+W|{_DAYS}(?:{_HOURS})?|{_HOURS})',
  'uuid': r'[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}',
  'ipv4': _IPV4,
  'ipv6': _IPV6,
  'email': _EMAIL,
  'uri': _URI,
}


# `\s` and `\S` mean something else in ECMA-262 than in Python.
_BLANKS = r'\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff'
_NO_BLANKS = (
  r'\0-\x08\x0e-\x1f!-\x9f\u00a1-\u167f\u1681-\u1fff\u200b-\u2027\u202a-\u202e'
  r'\u2030-\u205e\u2060-\u2fff\u3001-\ufefe\uff00-\U0010ffff'
)
_CLASSES = {r'\s': _BLANKS, r'\S': _NO_BLANKS}


@functools.lru_cache
def pattern(text: str) -> Language:
  r"""Returns the texts in which a pattern of ECMA-262 matches somewhere.

  Python's parser reads the pattern, as ASCII: `\d`, `\w` and `\b` then mean the
  same as in ECMA-262. `$` matches only at the end of the text. `\s` and `.` are
  replaced by the characters that they match in ECMA-262.

  Raises:
    ValueError: the pattern has a part that `languages.regex` does not support.
  """
  parts, is_class = [], False
  for part in re.findall(r'\\.|.', text, re.DOTALL):
    within = _CLASSES.get(part)
    if within is not None:
      part = within if is_class else f'[{within}]'
    elif part == '.' and not is_class:
      part = r'[^\n\r\u2028\u2029]'
    elif part in '[]':
      is_class = part == '['
    parts.append(part)
  return languages.regex(''.join(parts), search=True)


def equal_to(values: list[Decimal]) -> Language:
  """Returns the texts of the numbers that equal one of the values."""
  texts = []
  for value in values:
    whole, _, part = f'{abs(value):f}'.partition('.')
    part = part.rstrip('0')
    sizes = [f'{whole}.{part}'] if part else [whole, f'{whole}.0']
    signs = ['', '-'] if not value else ['-'] if value < 0 else ['']
    texts += [sign + size for sign in signs for size in sizes]
  return languages.words(texts)


def above(bound: Decimal) -> Language:
  """Returns the texts of the numbers above a bound."""
  minus = languages.literal('-')
  if bound < 0:
    return NUMBER - (minus + (_sizes_above(-bound) | equal_to([-bound])))
  return (NUMBER - (minus + languages.EVERY)) & _sizes_above(bound)


def _sizes_above(bound: Decimal) -> Language:
  """Returns the texts of the numbers above a bound >= 0, without a sign."""
  whole, _, part = f'{bound:f}'.partition('.')
  part = part.rstrip('0')

  def higher(digits: str, rest: str) -> list[str]:
    """Returns regexes of numbers with a higher digit after equal digits.

    Args:
      digits: the digits to exceed.
      rest: a regex of the digits after the higher one; `{}` is their number.
    """
    return [
      f'{digits[:i]}[{int(digit) + 1}-9]{rest.format(len(digits) - i - 1)}'
      for i, digit in enumerate(digits)
      if digit != '9'
    ]

  wholes = [f'[1-9][0-9]{{{len(whole)},}}', *higher(whole, '[0-9]{{{}}}')]
  parts = [*higher(part, '[0-9]*'), f'{part}[0-9]*[1-9][0-9]*']
  return languages.regex(
    rf'(?:{"|".join(wholes)})(?:\.[0-9]+)?|{whole}\.(?:{"|".join(parts)})'
  )


def multiples(divisor: int) -> Language:
  """Returns the texts of the multiples of a whole number.

  Its states are the remainders, by `divisor`, of the number read so far.
  """

  def following(residue: int) -> Iterator[tuple[Language, int]]:
    for digit in range(10):
      target = (10 * residue + digit) % divisor
      yield languages.literal(str(digit)), target

  digits = languages.graph(0, following, lambda residue: residue == 0)
  minus, point = languages.literal('-'), languages.literal('.0')
  return concat([minus.repeat(0, 1), digits, point.repeat(0, 1)]) & INTEGER
