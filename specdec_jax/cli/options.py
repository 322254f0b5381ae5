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
import functools
import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import gin

from specdec_jax.checks.fields import is_a, unexpected

MACRO = 'gin.macro'

# Field, also CLASS.FIELD -> its flag, where that has another name; '' is none.
# A field without a class is renamed in every class.
_RENAMED = {
  'DecodeConfig.mode': 'task-mode',
  'DecodeConfig.split': 'task-split',
  'ReplicaSettings.cpus': 'replica-cpus',
  'ReplicaSettings.gpus': 'replica-gpus',
  # A run's languages are its engine's.
  'Options.source_lang': '',
  'Options.target_lang': '',
  'Options.split_prefix': '',  # `DecodeConfig.prefix`
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
PLACES = {'input': 'FILE', 'target': 'TARGET', 'draft': 'DRAFT'}
_PLACE = 'place of '  # before a binding: what was given by its place
_PLAIN = (int, float, str)
_SEQUENCES = (tuple, list, collections.abc.Sequence)
_EXPECTED = {int: 'a whole number', float: 'a finite number', str: 'text'}


class _Flag(NamedTuple):
  """What a field could be on the command line.

  Attributes:
    names: its spellings, the main one first.
    binding: what gin binds: a macro, or 'scope/class.field'.
    is_bound: whether the gin files bind the field.
    settings: of `add_argument`.
  """

  names: list[str]
  binding: str
  is_bound: bool
  settings: dict[str, Any]


def bindings() -> dict[tuple[str, str], dict[str, Any]]:
  """What gin has loaded: (scope, full name) -> parameter -> value."""
  # gin shows its bindings only to finalize hooks, which is after the command
  # line has been merged into them.
  return gin.config._CONFIG  # noqa: SLF001


def references() -> list[gin.config.ConfigurableReference]:
  """All references in the values that gin has loaded."""
  return list(gin.config.iterate_references(bindings()))


def add(
  parser: argparse.ArgumentParser, places: Sequence[str] = ()
) -> dict[str, str]:
  """Adds the flags of a command, once its gin files are loaded.

  Where two classes have fields of one name, the flag is that of the field that
  the gin files bind, of two that they bind the first one's.

  Args:
    parser: gets the flags, for `given`.
    places: flags that may be given by their place on the command line.

  Returns:
    What gin binds (a macro, or 'scope/class.field') -> the flag that binds it;
    of two flags the first one.
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
  for action in filter(None, [actions.get(f'--{name}') for name in places]):
    place = PLACES[action.option_strings[0][2:]]
    shown: Any = {'metavar': place, 'help': action.help}
    by_place.add_argument(f'{_PLACE}{action.dest}', nargs='?', **shown)
    action.help = f'the same as {place}'
  return main


def given(args: argparse.Namespace, main: Mapping[str, str]) -> dict[str, Any]:
  """Returns binding -> its value, of the flags that were given.

  Args:
    args: what a parser has read that leaves out what was not given.
    main: as `add` returned it.

  Raises:
    ValueError: a place and its flag contradict each other.
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
  """Returns the flags of the fields of what is configured.

  What nothing refers to comes first. Of scopes only `target` and `draft`
  count; networks and what is no part of this library are left out.
  """
  referred = {reference.config_key for reference in references()}
  keys = dict.fromkeys([*bindings(), *sorted(referred)])
  flags = []
  for scope, selector in sorted(keys, key=lambda key: key in referred):
    reference = gin.config.ConfigurableReference(selector, evaluate=False)
    made = reference.configurable.wrapped
    room, _, inner = made.__module__.partition('.')
    is_ours = room == 'specdec_jax' and not inner.startswith('models.')
    if not is_ours or scope not in ('', 'target', 'draft'):
      continue
    bound = bindings().get((scope, selector), {})
    for field, parameter in inspect.signature(made).parameters.items():
      names = spellings(field, made.__name__, scope)
      settings = _settings(made, field)
      if not (names and settings):
        continue
      binding = f'{scope}/{selector}.{field}'.lstrip('/')
      value = bound.get(field, parameter.default)
      is_reference = isinstance(value, gin.config.ConfigurableReference)
      if is_reference and value.config_key[1] == MACRO:
        binding = value.config_key[0]
        value = bindings().get(value.config_key, {}).get('value')
      text = f'{_described(made, field)}{_default(value)}'.replace('%', '%%')
      settings['help'] = text
      flags.append(_Flag(names, binding, field in bound, settings))
  return flags


def spellings(field: str, owner: str = '', scope: str = '') -> list[str]:
  """Returns the spellings of the flag of a field; [] if it has none.

  Args:
    field: the name.
    owner: the class or function that has the field; '' is any.
    scope: of gin.
  """
  general = _RENAMED.get(field, field.replace('_', '-'))
  name = _RENAMED.get(f'{owner}.{field}', general)
  # A target must be able to say everything; a drafter has its vocabulary.
  if (scope, field) in (('target', 'shortlist'), ('draft', 'tokenizer')):
    name = ''
  if scope == 'draft' and name:
    name = 'draft' if name == 'target' else f'draft-{name}'
  return [f'--{x}' for x in (name, _ALIASES.get(name)) if x]


def _settings(made: Callable, field: str) -> dict[str, Any]:
  """Returns how argparse reads a field; {} for one that is of no plain type."""
  function = made.__init__ if inspect.isclass(made) else made
  members = _members(typing.get_type_hints(function).get(field))
  if bool in members:
    return {'action': argparse.BooleanOptionalAction}
  kinds, is_list = _plain(members), False
  for member in members:
    if not kinds and typing.get_origin(member) in _SEQUENCES:
      inner = map(_members, typing.get_args(member))
      kinds, is_list = _plain([*itertools.chain(*inner)]), True
  number = 'X' if float in kinds else 'N'
  shown = f'{number},{number}' if is_list else number
  settings = {
    'metavar': 'TEXT' if str in kinds else shown,
    'type': functools.partial(_value, kinds=kinds, is_list=is_list),
    'action': 'extend' if is_list else 'store',
  }
  return settings if kinds else {}


def _members(annotation: Any) -> list[Any]:
  """Returns the types of a union; of another annotation, itself."""
  if typing.get_origin(annotation) in (types.UnionType, typing.Union):
    return list(typing.get_args(annotation))
  return [annotation]


def _plain(members: Sequence[Any]) -> list[type]:
  """Returns the types among these that the text of a flag may stand for."""
  found = {str if typing.get_origin(m) is Literal else m for m in members}
  return [kind for kind in _PLAIN if kind in found]


def _value(text: str, kinds: Sequence[type], is_list: bool) -> Any:
  """Returns the value that a text on the command line stands for.

  That of a list is a tuple: of texts, where the flag is given again for each,
  or of numbers with commas between them.

  Raises:
    argparse.ArgumentTypeError: the text is none of these kinds.
  """
  parts = [text]
  if is_list and str not in kinds:
    parts = text.split(',')
  try:
    values = tuple(_number_or_text(part, kinds) for part in parts)
  except ValueError as error:
    expected = ' or '.join(_EXPECTED[kind] for kind in kinds)
    between = ', with commas between several' if is_list else ''
    raise argparse.ArgumentTypeError(
      f'expected {expected}{between}, got {text!r}'
    ) from error
  return values if is_list else values[0]


def _number_or_text(text: str, kinds: Sequence[type]) -> Any:
  for kind in kinds:
    with contextlib.suppress(ValueError):
      if is_a(value := kind(text), kind):
        return value
  raise ValueError(text)


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


def _default(value: Any) -> str:
  """Returns ' (default: VALUE)' for a value that says something."""
  is_plain = isinstance(value, int | float | str | tuple)
  says = is_plain and value not in (False, (), '')
  return f' (default: {value})' if says else ''
