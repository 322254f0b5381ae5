"""Flags of a command: the fields of what its run file configures.

An option is declared once, as a field with its type, its default and a line in
the docstring of its class. Each field of a plain type, of each class that the
gin files configure, is a flag: `Engine.gamma` is --gamma, and `dtype` in the
scope `draft` is --draft-dtype. A flag binds its field in gin. Where the run
file gives that field by a macro, the flag binds the macro, so that everything
else that refers to it follows.
"""

import argparse
import collections.abc
import contextlib
import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gin

from specdec_jax.checks.fields import unexpected

MACRO = 'gin.macro'

# Field, also CLASS.FIELD -> its flag, where that has another name.
_RENAMED = {
  'DecodeConfig.mode': 'task-mode',
  'ReplicaSettings.cpus': 'replica-cpus',
  'ReplicaSettings.gpus': 'replica-gpus',
  # A run's languages are its engine's.
  'Options.source_lang': '',
  'Options.target_lang': '',
  'Tokenizer.path': 'vocab',
  'load.path': 'target',
  'open_tokenizer.path': 'vocab',
  'batches': 'batch-sizes',
  'checkpoint_path': 'target',
  'decoding': 'mode',
  'input_file': 'input',
  'max_decode_len': 'max-length',
  'max_input_len': 'max-input-length',
  'mixture_or_task_name': 'input',
  'number': 'replicas',
  'output': 'output-dir',
  'stop_strings': 'stop',
  'tokenizer': 'vocab',
}
# Flag -> its name in other programs.
_ALIASES = {
  'draft': 'assistant-model',
  'gamma': 'num-speculative-tokens',
  'max-length': 'max-new-tokens',
  'num-samples': 'num-return-sequences',
  'output-dir': 'output',
  'output-file': 'output',
  'target': 'model',
  'vocab': 'tokenizer',
}
_PLACE = 'place of '  # before a binding: what was given by its place
_PLACES = {'input': 'FILE', 'target': 'TARGET', 'draft': 'DRAFT'}
_PLAIN = (int, float, str)
_SEQUENCES = (tuple, list, collections.abc.Sequence)
_EXPECTED = {int: 'a whole number', float: 'a finite number', str: 'text'}


@dataclasses.dataclass(frozen=True)
class Flag:
  """A flag of a command.

  Attributes:
    names: its spellings, the main one first.
    place: what it is called where it may be given by its place; '' may not.
    binding: what gin binds: a macro, or 'scope/class.field'.
    kinds: the types that its text may stand for; (bool,) is a switch.
    is_list: whether the value is a tuple: of texts, where the flag is given
      again for each, or of numbers with commas between them.
    help: its line in --help.
    default: its value in the run file.
  """

  names: tuple[str, ...]
  place: str
  binding: str
  kinds: tuple[type, ...]
  is_list: bool
  help: str
  default: Any

  def value(self, text: str) -> Any:
    """Returns the value that a text on the command line stands for.

    Raises:
      argparse.ArgumentTypeError: the text is none of the flag's kinds.
    """
    parts = [text]
    if self.is_list and str not in self.kinds:
      parts = text.split(',')
    try:
      values = tuple(_value(part, self.kinds) for part in parts)
    except ValueError as error:
      expected = ' or '.join(_EXPECTED[kind] for kind in self.kinds)
      between = ', with commas between several' if self.is_list else ''
      raise argparse.ArgumentTypeError(
        f'expected {expected}{between}, got {text!r}'
      ) from error
    return values if self.is_list else values[0]


def _value(text: str, kinds: Sequence[type]) -> Any:
  for kind in _PLAIN:
    if kind in kinds:
      with contextlib.suppress(ValueError):
        value = kind(text)
        if not isinstance(value, float) or math.isfinite(value):
          return value
  raise ValueError(text)


def bindings() -> dict[tuple[str, str], dict[str, Any]]:
  """What gin has loaded: (scope, full name) -> parameter -> value."""
  # gin shows its bindings only to finalize hooks, which is after the command
  # line has been merged into them.
  return gin.config._CONFIG  # noqa: SLF001


def references() -> list[gin.config.ConfigurableReference]:
  """All references in the values that gin has loaded."""
  return list(gin.config.iterate_references(bindings()))


def _fields() -> list[tuple[str, str, Callable, inspect.Parameter]]:
  """Returns (scope, full name, class or function, field) of what is configured.

  What nothing refers to comes first. Of scopes only `target` and `draft`
  count; networks and what is no part of this library are left out.
  """
  referred = {reference.config_key for reference in references()}
  keys = dict.fromkeys([*bindings(), *sorted(referred)])
  fields = []
  for scope, selector in sorted(keys, key=lambda key: key in referred):
    reference = gin.config.ConfigurableReference(selector, evaluate=False)
    made = reference.configurable.wrapped
    room, _, inner = made.__module__.partition('.')
    is_ours = room == 'specdec_jax' and not inner.startswith('models.')
    if is_ours and scope in ('', 'target', 'draft'):
      parameters = inspect.signature(made).parameters.values()
      fields += [(scope, selector, made, parameter) for parameter in parameters]
  return fields


def flags(places: Sequence[str] = ()) -> list[Flag]:
  """Returns the flags of a command, once its gin files are loaded.

  Where two classes have fields of one name, the flag is that of the field that
  the gin files bind, of two that they bind the first one's.

  Args:
    places: flags that may be given by their place on the command line.
  """
  fields = _fields()
  bound = [
    bindings().get((scope, selector), {}) for scope, selector, *_ in fields
  ]
  found: dict[int, Flag] = {}
  taken: set[str] = set()
  for number in sorted(
    range(len(fields)), key=lambda i: fields[i][3].name not in bound[i]
  ):
    scope, selector, made, parameter = fields[number]
    field = parameter.name
    name = _name(scope, made.__name__, field)
    spellings = (f'--{x}' for x in (name, _ALIASES.get(name)) if x)
    names = tuple(x for x in spellings if x not in taken)
    kinds, is_list = _kinds(made, field)
    if not kinds or not names:
      continue
    binding = f'{scope}/{selector}.{field}'.lstrip('/')
    value = bound[number].get(field, parameter.default)
    if isinstance(value, gin.config.ConfigurableReference):
      macro, kind = value.config_key
      if kind == MACRO:
        binding, value = macro, bindings().get((macro, MACRO), {}).get('value')
    place = _PLACES[name] if name in places else ''
    text = _described(made, field)
    taken |= {*names}
    found[number] = Flag(names, place, binding, kinds, is_list, text, value)
  by_place = {_PLACES[name]: i for i, name in enumerate(places)}
  return sorted(
    (found[number] for number in sorted(found)),
    key=lambda flag: by_place.get(flag.place, len(places)),
  )


def _name(scope: str, class_name: str, field: str) -> str:
  """Returns the flag of a field, without dashes in front."""
  general = _RENAMED.get(field, field.replace('_', '-'))
  name = _RENAMED.get(f'{class_name}.{field}', general)
  # A target must be able to say everything; a drafter has its vocabulary.
  if (scope, field) in (('target', 'shortlist'), ('draft', 'tokenizer')):
    return ''
  if scope != 'draft' or not name:
    return name
  return 'draft' if name == 'target' else f'draft-{name}'


def _kinds(made: Callable, field: str) -> tuple[tuple[type, ...], bool]:
  """Returns the plain types of a field, and whether it is of several."""
  function = made.__init__ if inspect.isclass(made) else made
  members = _members(typing.get_type_hints(function).get(field))
  members = [str if typing.get_origin(m) is Literal else m for m in members]
  if bool in members:
    return (bool,), False
  if kinds := tuple(kind for kind in _PLAIN if kind in members):
    return kinds, False
  for member in members:
    if typing.get_origin(member) in _SEQUENCES:
      inner = [k for part in typing.get_args(member) for k in _members(part)]
      return tuple(kind for kind in _PLAIN if kind in inner), True
  return (), False


def _members(annotation: Any) -> list[Any]:
  """Returns the types of a union; of another annotation, itself."""
  if typing.get_origin(annotation) in (types.UnionType, typing.Union):
    return list(typing.get_args(annotation))
  return [annotation]


def _described(made: Callable, field: str) -> str:
  """Returns the first sentence about a field in a docstring; '' is none."""
  places: Sequence[Any] = [made]
  if inspect.isclass(made):
    places = [made.__init__, *made.__mro__]
  for place in places:
    doc = inspect.cleandoc(place.__doc__ or '')
    pattern = rf'^  (?:\w+, )*{field}(?:, \w+)*: (.*(?:\n    .*)*)'
    if described := re.search(pattern, doc, re.MULTILINE):
      text = ' '.join(described[1].split())
      # What is a place in the code says nothing in a terminal.
      text = re.sub(r'[,;:]? see `[\w.]+`', '', text).replace('`', '')
      return re.split(r'\.(?: |$)|; None\b', text)[0]
  return ''


def add(parser: argparse.ArgumentParser, known: Sequence[Flag]) -> None:
  """Adds the flags to a parser; `given` reads what was given."""
  places = parser.add_argument_group('inputs')
  group = parser.add_argument_group('options')
  for flag in known:
    text = flag.help.replace('%', '%%')
    if flag.place:
      place = f'{_PLACE}{flag.binding}'
      places.add_argument(place, metavar=flag.place, nargs='?', help=text)
      text = f'the same as {flag.place}'
    number = 'X' if float in flag.kinds else 'N'
    shown = f'{number},{number}' if flag.is_list else number
    settings: dict[str, Any] = {
      'metavar': 'TEXT' if str in flag.kinds else shown,
      'type': flag.value,
      'action': 'extend' if flag.is_list else 'store',
    }
    if flag.kinds == (bool,):
      settings = {'action': argparse.BooleanOptionalAction}
    settings['help'] = f'{text}{_default(flag.default)}'
    group.add_argument(*flag.names, dest=flag.binding, **settings)


def _default(value: Any) -> str:
  """Returns ' (default: VALUE)' for a value that says something."""
  if not isinstance(value, int | float | str | tuple):
    return ''
  if value in (False, (), ''):
    return ''
  return f' (default: {value})'.replace('%', '%%')


def given(args: argparse.Namespace, known: Sequence[Flag]) -> dict[str, Any]:
  """Returns binding -> its value, of the flags that were given.

  Raises:
    ValueError: a place and its flag contradict each other.
  """
  values = {}
  for flag in known:
    value = getattr(args, flag.binding)
    place = getattr(args, f'{_PLACE}{flag.binding}', None)
    if None not in (value, place) and value != place:
      advice = f'Give one of them, not {flag.place} {place!r} too.'
      raise unexpected(flag.names[0], 'one value', value, advice)
    value = place if value is None else value
    if value is not None:
      values[flag.binding] = tuple(value) if flag.is_list else value
  return values
