"""Flags of a command: the fields of the classes that its run file configures.

An option is declared once, as a field with its type, its default and a line in
the docstring of its class. Each field of a plain type, of each class that the
gin files configure, is a flag: `Engine.gamma` is --gamma, and `dtype` in the
scope `draft` is --draft-dtype. A flag binds its field in gin. Where the run
file gives that field by a macro, the flag binds the macro, so that everything
else that refers to the macro follows.
"""

import argparse
import collections.abc
import contextlib
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import gin

from specdec_jax.checks.fields import is_a, unexpected

MACRO = 'gin.macro'

# FIELD or CLASS.FIELD -> the name of its flag, if it is not the field's name;
# '': there is no flag. A FIELD without a class is renamed in every class.
_RENAMED = {
  **{'ReplicaSettings.cpus': 'replica-cpus', 'number': 'replicas'},
  **{'ReplicaSettings.gpus': 'replica-gpus', 'batches': 'batch-sizes'},
  # The languages of a run are those of its engine, and its prefix is
  # `DecodeConfig.prefix`.
  **dict.fromkeys(('Options.source_lang', 'Options.target_lang'), ''),
  **{
    'Options.split_prefix': '',
    'output': 'output-dir',
    'stop_strings': 'stop',
  },
  **dict.fromkeys(('Tokenizer.path', 'open_tokenizer.path'), 'vocab'),
  **{'tokenizer': 'vocab', 'load.path': 'target', 'checkpoint_path': 'target'},
  **dict.fromkeys(('input_file', 'mixture_or_task_name'), 'input'),
}
# Flag -> the name that other programs give to it.
_ALIASES = {
  'draft': 'assistant-model',
  'gamma': 'num-speculative-tokens',
  'max-input-len': 'max-input-length',
  'max-length': 'max-new-tokens',
  'num-samples': 'num-return-sequences',
  'output-dir': 'output',
  'output-file': 'output',
  'target': 'model',
  'vocab': 'tokenizer',
}
PLACES = {'input': 'FILE', 'target': 'TARGET', 'draft': 'DRAFT'}
_PLACE = 'place of '  # argparse's name of a positional argument begins so
_PLAIN = (int, float, str)
_SEQUENCES = (tuple, list, collections.abc.Sequence)
_EXPECTED = {int: 'a whole number', float: 'a finite number', str: 'text'}


class _Flag(NamedTuple):
  """A flag that a field may have.

  Attributes:
    names: its spellings, the main one first.
    binding: the name that it binds in gin: a macro, or 'scope/class.field'.
    is_bound: whether the gin files bind the field.
    settings: arguments of `add_argument`.
  """

  names: list[str]
  binding: str
  is_bound: bool
  settings: dict[str, Any]


def bindings() -> dict[tuple[str, str], dict[str, Any]]:
  """Returns gin's loaded values: (scope, full name) -> parameter -> value."""
  # gin shows its bindings only to finalize hooks, which is after the command
  # line has been merged into them.
  return gin.config._CONFIG  # noqa: SLF001


def references() -> list[gin.config.ConfigurableReference]:
  """Returns all references in the values that gin has loaded."""
  return list(gin.config.iterate_references(bindings()))


def add(
  parser: argparse.ArgumentParser, places: Sequence[str] = ()
) -> dict[str, str]:
  """Adds the flags of a command, once its gin files are loaded.

  If several classes have a field of the same name, the flag belongs to the
  first field that the gin files bind.

  Args:
    parser: the parser that the flags are added to.
    places: flags that may also be positional arguments, in this order.

  Returns:
    The name that gin binds (a macro, or 'scope/class.field') -> the flag that
    binds it; the first one if there are two.
  """
  by_place = parser.add_argument_group('inputs')
  group = parser.add_argument_group('options')
  flags = _flags()
  owners: dict[str, _Flag] = {}
  for flag in sorted(flags, key=lambda flag: not flag.is_bound):
    for name in flag.names:
      owners.setdefault(name, flag)
  main: dict[str, str] = {}
  actions: dict[str, argparse.Action] = {}
  for flag in flags:
    names = [name for name in flag.names if owners[name] is flag]
    if names:
      main.setdefault(flag.binding, names[0])
      action = group.add_argument(*names, dest=flag.binding, **flag.settings)
      actions[names[0]] = action
  for action in [actions[f'--{x}'] for x in places if f'--{x}' in actions]:
    place = PLACES[action.option_strings[0][2:]]
    dest, text = f'{_PLACE}{action.dest}', action.help
    by_place.add_argument(dest, nargs='?', metavar=place, help=text)
    action.help = f'the same as {place}'
  return main


def values_of(
  args: argparse.Namespace, main: Mapping[str, str]
) -> dict[str, Any]:
  """Returns binding -> value, for the flags of a command line.

  Args:
    args: what the parser has read; flags that were not given are missing.
    main: the result of `add`.

  Raises:
    ValueError: a positional argument and its flag contradict each other.
  """
  values = {
    name: tuple(value) if isinstance(value, list) else value
    for name, value in vars(args).items()
  }
  for name in [name for name in values if name.startswith(_PLACE)]:
    binding, place = name.removeprefix(_PLACE), values.pop(name)
    if (value := values.setdefault(binding, place)) != place:
      advice = f'Give one of them, not {place!r} by its place too.'
      raise unexpected(main[binding], 'one value', value, advice)
  return values


def _flags() -> list[_Flag]:
  """Returns a flag for each field of plain type that the gin files configure.

  Classes that nothing refers to come first. Only the scopes `target` and
  `draft` count; networks, and classes of other libraries, are left out.
  """
  referred = {reference.config_key for reference in references()}
  keys = dict.fromkeys([*bindings(), *sorted(referred)])
  flags = []
  for scope, selector in sorted(keys, key=lambda key: key in referred):
    reference = gin.config.ConfigurableReference(selector, evaluate=False)
    configured = reference.configurable.wrapped
    package, _, module = configured.__module__.partition('.')
    is_ours = package == 'specdec_jax' and not module.startswith('models.')
    if not is_ours or scope not in ('', 'target', 'draft'):
      continue
    bound = bindings().get((scope, selector), {})
    for field, parameter in inspect.signature(configured).parameters.items():
      names = spellings(field, configured.__name__, scope)
      settings = _settings(configured, field)
      if not (names and settings):
        continue
      binding = f'{scope}/{selector}.{field}'.lstrip('/')
      value = bound.get(field, parameter.default)
      is_reference = isinstance(value, gin.config.ConfigurableReference)
      if is_reference and value.config_key[1] == MACRO:
        binding = value.config_key[0]
        value = bindings().get(value.config_key, {}).get('value')
      text = f'{_sentence(configured, field)}{_default(value)}'
      settings['help'] = text.replace('%', '%%')
      flags.append(_Flag(names, binding, field in bound, settings))
  return flags


def spellings(field: str, owner: str = '', scope: str = '') -> list[str]:
  """Returns the spellings of the flag of a field; [] if it has none.

  Args:
    field: the name.
    owner: the class or function that has the field; '': any.
    scope: gin's scope.
  """
  general = _RENAMED.get(field, field.replace('_', '-'))
  name = _RENAMED.get(f'{owner}.{field}', general)
  # Only drafters have a shortlist, and only targets a tokenizer.
  if (scope, field) in (('target', 'shortlist'), ('draft', 'tokenizer')):
    name = ''
  if scope == 'draft' and name:
    name = 'draft' if name == 'target' else f'draft-{name}'
  return [f'--{x}' for x in (name, _ALIASES.get(name)) if x]


def _settings(configured: Callable, field: str) -> dict[str, Any]:
  """Returns arguments of `add_argument`; {} if the type is not plain."""
  is_class = inspect.isclass(configured)
  function = configured.__init__ if is_class else configured
  members = _members(typing.get_type_hints(function).get(field))
  if bool in members:
    return {'action': argparse.BooleanOptionalAction}
  sequences = [x for x in members if typing.get_origin(x) in _SEQUENCES]
  inside = [item for x in sequences for item in typing.get_args(x)]
  items = [member for item in inside for member in _members(item)]
  kinds = _plain(members) or _plain(items)
  if not kinds:
    return {}
  is_list = not _plain(members)
  number = 'X' if float in kinds else 'N'
  numbers = f'{number},{number}' if is_list else number
  return {
    'metavar': 'TEXT' if str in kinds else numbers,
    'type': functools.partial(_value, kinds=kinds, is_list=is_list),
    'action': 'extend' if is_list else 'store',
  }


def _members(annotation: Any) -> list[Any]:
  """Returns the types of a union; or the annotation, if it is no union."""
  if typing.get_origin(annotation) in (types.UnionType, typing.Union):
    return list(typing.get_args(annotation))
  return [annotation]


def _plain(members: Sequence[Any]) -> list[type]:
  """Returns the types among `members` that text on a command line can give."""
  kinds = {str if typing.get_origin(m) is Literal else m for m in members}
  return [kind for kind in _PLAIN if kind in kinds]


def _value(text: str, kinds: Sequence[type], is_list: bool) -> Any:
  """Converts a text on the command line.

  For a list it returns a tuple: the text, which other texts follow if the flag
  is repeated; or numbers, with commas between them in the text.

  Raises:
    argparse.ArgumentTypeError: the text is of none of these kinds.
  """
  parts = [text]
  if is_list and str not in kinds:
    parts = text.split(',')
  try:
    values = tuple(_number_or_text(part, kinds) for part in parts)
  except ValueError as error:
    expected = ' or '.join(_EXPECTED[kind] for kind in kinds)
    expected += ', with commas between several' * is_list
    message = f'expected {expected}, got {text!r}'
    raise argparse.ArgumentTypeError(message) from error
  return values if is_list else values[0]


def _number_or_text(text: str, kinds: Sequence[type]) -> Any:
  for kind in kinds:
    with contextlib.suppress(ValueError):
      if is_a(value := kind(text), kind):
        return value
  raise ValueError(text)


def _sentence(configured: Callable, field: str) -> str:
  """Returns the first sentence about a field in a docstring, or ''."""
  owners: Sequence[Any] = [configured]
  if inspect.isclass(configured):
    owners = [configured.__init__, *configured.__mro__]
  for owner in owners:
    doc = inspect.cleandoc(owner.__doc__ or '')
    pattern = rf'^  (?:\w+, )*{field}(?:, \w+)*: (.*(?:\n    .*)*)'
    if described := re.search(pattern, doc, re.MULTILINE):
      text = ' '.join(described[1].split())
      # References to code do not help in a terminal.
      text = re.sub(r'[,;:]? see `[\w.]+`', '', text).replace('`', '')
      return re.split(r'\.(?: |$)|; None\b', text)[0]
  return ''


def _default(value: Any) -> str:
  """Returns ' (default: VALUE)'; '' for False, (), '', and other objects."""
  is_plain = isinstance(value, int | float | str | tuple)
  is_shown = is_plain and value not in (False, (), '')
  return f' (default: {value})' if is_shown else ''
