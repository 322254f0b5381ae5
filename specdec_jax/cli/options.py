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

from specdec_jax.checks.fields import unexpected
from specdec_jax.cli import gin_checks

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


def flags(places: Sequence[str] = ()) -> list[Flag]:
  """Returns the flags of a command, once its gin files are loaded.

  Where two classes have fields of one name, the flag is that of the field that
  the gin files bind, of two that they bind the first one's.

  Args:
    places: flags that may be given by their place on the command line.
  """
  fields = [
    (scope, name, configurable, parameter)
    for scope, name, configurable in gin_checks.configurables()
    for parameter in inspect.signature(configurable).parameters.values()
  ]

  def is_free(number: int) -> bool:
    _, name, _, parameter = fields[number]
    return gin_checks.bound(f'{name}.{parameter.name}') is gin_checks.UNBOUND

  taken: set[str] = set()
  by_field: dict[int, Flag] = {}
  for number in sorted(range(len(fields)), key=is_free):
    flag = _flag(*fields[number], taken=taken, places=places)
    if flag is not None:
      taken |= set(flag.names)
      by_field[number] = flag
  in_order = [by_field[number] for number in sorted(by_field)]
  return sorted(in_order, key=lambda flag: _order(flag, places))


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
  binding = f'{name}.{field}'
  value = gin_checks.bound(binding)
  if macro := gin_checks.macro_of(value):
    binding, value = macro, gin_checks.value_of(macro)
  return Flag(
    names=tuple(names),
    place=_PLACES[flag] if flag in places else '',
    binding=binding,
    kinds=kinds,
    is_list=is_list,
    help=_described(configurable, field),
    default=parameter.default if value is gin_checks.UNBOUND else value,
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


def _order(flag: Flag, places: Sequence[str]) -> int:
  """Puts what has a place first, in the order of the places."""
  name = flag.names[0].removeprefix('--')
  return places.index(name) if name in places else len(places)


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


class _Bind(argparse.Action):
  """Keeps the last value of a flag, which a place may not contradict."""

  def __call__(self, parser, namespace, values, option_string=None):
    before = getattr(namespace, self.dest)
    if values is None:  # a place that was left out
      return
    kinds = vars(namespace).setdefault('given as', {})
    kind = bool(option_string)
    if before is not None and isinstance(values, tuple):
      values = before + values
    elif before not in (None, values) and kind != kinds[self.dest]:
      name = option_string or str(self.metavar)
      advice = f'Give one of them, not {before!r} too.'
      raise unexpected(name, 'one value', values, advice)
    kinds[self.dest] = kind
    setattr(namespace, self.dest, values)


def add(parser: argparse.ArgumentParser, known: Sequence[Flag]) -> None:
  """Adds the flags to a parser; `given` reads what was given."""
  places = parser.add_argument_group('inputs')
  group = parser.add_argument_group('options')
  for flag in known:
    text, default = flag.help.replace('%', '%%'), _default(flag.default)
    settings: dict[str, Any] = {
      'action': _Bind,
      'metavar': flag.metavar,
      'type': flag.value,
    }
    if flag.place:
      place = settings | {'metavar': flag.place, 'nargs': '?', 'help': text}
      places.add_argument(flag.binding, **place)
      text = f'the same as {flag.place}'
    if flag.is_switch:
      settings = {'action': argparse.BooleanOptionalAction}
    group.add_argument(
      *flag.names, dest=flag.binding, help=f'{text}{default}', **settings
    )


def _default(value: Any) -> str:
  """Returns ' (default: VALUE)' for a value that says something."""
  if not isinstance(value, int | float | str | tuple):
    return ''
  if value in (False, (), ''):
    return ''
  return f' (default: {value})'.replace('%', '%%')


def given(args: argparse.Namespace, known: Sequence[Flag]) -> dict[str, Any]:
  """Returns binding -> its value, of the flags that were given."""
  values = {flag.binding: getattr(args, flag.binding) for flag in known}
  return {name: value for name, value in values.items() if value is not None}
