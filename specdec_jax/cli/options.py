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
from collections.abc import Callable, Collection, Sequence
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

  @property
  def is_switch(self) -> bool:
    """Whether it is given without a value."""
    return self.kinds == (bool,)

  @property
  def metavar(self) -> str:
    """What --help calls its value."""
    if str in self.kinds:
      return 'TEXT'
    name = 'X' if float in self.kinds else 'N'
    return f'{name},{name}' if self.is_list else name

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


def _configurables() -> list[tuple[str, str, Callable]]:
  """Returns (scope, full name, class or function) of what is configured.

  What nothing refers to comes first. Of scopes only `target` and `draft`
  count; networks and what is no part of this library are left out.
  """
  referred = {reference.config_key for reference in references()}
  keys = dict.fromkeys([*bindings(), *sorted(referred)])
  entries = []
  for scope, selector in sorted(keys, key=lambda key: key in referred):
    reference = gin.config.ConfigurableReference(selector, evaluate=False)
    made = reference.configurable.wrapped
    room, _, inner = made.__module__.partition('.')
    is_ours = room == 'specdec_jax' and not inner.startswith('models.')
    if is_ours and scope in ('', 'target', 'draft'):
      entries.append((scope, selector, made))
  return entries


def flags(places: Sequence[str] = ()) -> list[Flag]:
  """Returns the flags of a command, once its gin files are loaded.

  Where two classes have fields of one name, the flag is that of the field that
  the gin files bind, of two that they bind the first one's.

  Args:
    places: flags that may be given by their place on the command line.
  """
  fields = [
    (scope, name, configurable, parameter)
    for scope, name, configurable in _configurables()
    for parameter in inspect.signature(configurable).parameters.values()
  ]

  def is_free(number: int) -> bool:
    scope, name, _, parameter = fields[number]
    return parameter.name not in bindings().get((scope, name), {})

  taken: set[str] = set()
  found: list[tuple[int, int, Flag]] = []  # with what it is sorted by
  for number in sorted(range(len(fields)), key=is_free):
    flag = _flag(*fields[number], taken=taken, places=places)
    if flag is not None:
      taken |= {*flag.names}
      name = flag.names[0].removeprefix('--')
      place = places.index(name) if name in places else len(places)
      found.append((place, number, flag))
  return [flag for *_, flag in sorted(found, key=lambda entry: entry[:2])]


def _flag(
  scope: str,
  name: str,
  configurable: Callable,
  parameter: inspect.Parameter,
  *,
  taken: Collection[str],
  places: Sequence[str],
) -> Flag | None:
  """Returns the flag of a field; None if it is of no plain type, or taken."""
  field = parameter.name
  is_class = inspect.isclass(configurable)
  made = configurable.__init__ if is_class else configurable
  kinds, is_list = _kinds(typing.get_type_hints(made).get(field))
  flag = _name(scope, configurable.__name__, field)
  names = [f'--{name}' for name in (flag, _ALIASES.get(flag)) if name]
  names = [name for name in names if name not in taken]
  if not kinds or not names:
    return None
  binding = f'{scope}/{name}.{field}'.lstrip('/')
  value = bindings().get((scope, name), {}).get(field, parameter.default)
  if isinstance(value, gin.config.ConfigurableReference):
    macro, selector = value.config_key
    if selector == MACRO:
      binding, value = macro, bindings().get((macro, MACRO), {}).get('value')
  return Flag(
    names=tuple(names),
    place=_PLACES[flag] if flag in places else '',
    binding=binding,
    kinds=kinds,
    is_list=is_list,
    help=_described(configurable, field),
    default=value,
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


def _kinds(annotation: Any) -> tuple[tuple[type, ...], bool]:
  """Returns the plain types of an annotation, and whether it is of several."""
  members = _members(annotation)
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


def _described(configurable: Callable, field: str) -> str:
  """Returns the first sentence about a field in a docstring; '' is none."""
  places: Sequence[Any] = [configurable]
  if inspect.isclass(configurable):
    places = [configurable.__init__, *configurable.__mro__]
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
    settings: dict[str, Any] = {'metavar': flag.metavar, 'type': flag.value}
    if flag.is_list:
      settings['action'] = 'extend'
    if flag.is_switch:
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
