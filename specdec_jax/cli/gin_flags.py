"""The flags that all commands have: gin files and bindings, as in T5X.

  --gin_file=FILE           a gin file; repeatable, later files override
  --gin.NAME=VALUE          a macro (INPUT_FILE) or a binding (scope/fn.param)
  --gin_bindings=NAME=VALUE the same, in T5X's long form
  --gin_search_paths=A,B    folders searched for gin files and their includes
  --traceback               show where an error came from
  --multiprocess            one of several processes of a TPU pod, or of what
                            Slurm or Open MPI started
  --coordinator_address=HOST:PORT --process_count=N --process_index=I
                            one of several processes anywhere else

A VALUE that is not a gin value is text, so `--gin.DTYPE=int8` and
`--gin.DTYPE='"int8"'` mean the same. gin itself ignores a mistyped macro or
scope; here a name that the gin files do not know is an error.

A command is a function whose docstring is its --help, see `commands`. It has
flags for the fields of what its gin files configure. Such an option is declared
once, as a field with its type, its default and a line in the docstring of its
class. Each field of a plain type, of each class that the gin files configure,
is a flag: `Engine.gamma` is --gamma, and `dtype` in the scope `draft` is
--draft-dtype. A flag binds its field in gin. Where the run file gives that
field by a macro, the flag binds the macro, so that everything else that refers
to the macro follows.
"""

import argparse
import ast
import contextlib
import functools
import importlib.util  # noqa: F401  gin uses it for a missing include.
import inspect
import logging
import re
import tokenize
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeVar

import gin

from specdec_jax.checks.fields import (
  SEQUENCES,
  WORDS,
  is_a,
  nearest,
  unexpected,
)
from specdec_jax.cli import Command
from specdec_jax.files import shipped

if TYPE_CHECKING:
  from specdec_jax.infer import processes

ROOT = shipped.ROOT  # the folder that holds gin/
MACRO = 'gin.macro'
# FIELD or CLASS.FIELD -> the name of its flag, if it is not the field's name;
# '': there is no flag. A FIELD without a class is renamed in every class.
_RENAMED = {
  'ReplicaSettings.cpus': 'replica-cpus',
  'ReplicaSettings.gpus': 'replica-gpus',
  # The languages of a run are those of its engine.
  'Options.source_lang': '',
  'Options.target_lang': '',
  'Options.split_prefix': '',  # a run has `DecodeConfig.prefix` instead
  'Tokenizer.path': 'vocab',
  'load.path': 'target',
  'open_tokenizer.path': 'vocab',
  'batches': 'batch-sizes',
  'checkpoint_path': 'target',
  'input_file': 'input',
  'mixture_or_task_name': 'input',
  'number': 'replicas',
  'output': 'output-dir',
  'stop_strings': 'stop',
  'tokenizer': 'vocab',
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
_PLACE = 'place of '  # prefix of a positional argument's name in argparse
_PLAIN = (int, float, str)

_NAME = re.compile(r'([A-Za-z_]\w*/)*[A-Za-z_]\w*(\.[A-Za-z_]\w*)*')
_INVALID = (SyntaxError, tokenize.TokenError)
_INTERNAL = (MACRO, 'gin.constant')
_REQUIRED = '%gin.REQUIRED'
_MISSING = re.compile(
  r'(\w+)(?:\.__init__)?\(\) missing \d+ required .*?arguments?: (.*)'
)
# Python's error for a value that is no literal; it shows an object.
_NO_LITERAL = re.compile(r'malformed node or string.*?: <ast\..+?>')
# gin's words for a configurable that was called, with its name and scope.
_CALLED = re.compile(
  r"In call to configurable '([\w.]+)' .*?(?: in scope '(\w+)')?$", re.MULTILINE
)
# Python's error for text without an end; it shows a tuple.
_OF_TUPLE = re.compile(r"\('(.+)', \(\d+, \d+\)\)")

# The default of `load`: a program with T5X's flags and no run file of its own.
_NO_COMMAND = Command(lambda: None)
_T = TypeVar('_T')
# Flags of a model and of the lengths of its texts.
_MODEL_FLAGS = '--target --vocab --dtype --adapter --revision'.split()
_MODEL_FLAGS += ['--max-input-len', '--max-decode-len']
# Arguments that give `specdec decode` the models that were loaded.
of_models: list[str] = []
# gin would search a folder twice, and list it twice, if it were added twice.
_search_too = functools.cache(gin.add_config_file_search_path)


class _Flag(NamedTuple):
  names: list[str]  # its spellings, the main one first
  binding: str  # the name in gin: a macro, or 'scope/class.field'
  is_bound: bool  # whether the gin files bind the field
  settings: dict[str, Any]  # arguments of `add_argument`


def bindings() -> dict[tuple[str, str], dict[str, Any]]:
  """Returns gin's loaded values: (scope, full name) -> parameter -> value."""
  # gin shows its bindings only to finalize hooks, which is after the command
  # line has been merged into them.
  return gin.config._CONFIG  # noqa: SLF001


def references() -> list[gin.config.ConfigurableReference]:
  """Returns all references in the values that gin has loaded."""
  return list(gin.config.iterate_references(bindings()))


def add_flags(
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


def _flags() -> list[_Flag]:
  """Returns a flag for each field of plain type that the gin files configure.

  Fields of classes that no gin reference names come first. There are no flags
  for scopes other than `target` and `draft`, for networks, and for classes of
  other libraries.
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
    field: the field's name.
    owner: the class or function that has the field; '': any.
    scope: gin's scope, such as 'draft', which the flag then begins with.
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
  """Returns argparse's settings for a field; {} if its type is not plain."""
  is_class = inspect.isclass(configured)
  function = configured.__init__ if is_class else configured
  members = _members(typing.get_type_hints(function).get(field))
  if bool in members:
    return {'action': argparse.BooleanOptionalAction}
  sequences = [x for x in members if typing.get_origin(x) in SEQUENCES]
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
  """Converts a text on the command line to a value of one of `kinds`.

  For a list the result is a tuple. It has the numbers between the commas of the
  text; or the one text, to which a repeated flag adds others.

  Raises:
    argparse.ArgumentTypeError: the text is of none of `kinds`.
  """
  parts = [text]
  if is_list and str not in kinds:
    parts = text.split(',')
  try:
    values = tuple(_number_or_text(part, kinds) for part in parts)
  except ValueError as error:
    expected = ' or '.join(WORDS[kind] for kind in kinds)
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


# These functions load gin files and parse command lines.


def load(
  argv: Sequence[str], command: Command = _NO_COMMAND, name: str = ''
) -> None:
  """Loads the gin files of a command line, and binds its flags.

  Args:
    argv: arguments after the program's name.
    command: the command that is run.
    name: name of the command, for --help.

  Raises:
    ValueError: no gin file was given, or one is missing or broken; a flag or
      name is unknown (the message has the nearest known ones); a value is
      wrong; or a required macro has no value.
  """
  common, rest = _common(argv)
  files = common.gin_file or [*filter(None, [command.run_file])]
  if not files and not common.help:
    example = '--gin_file=gin/runs/demo.gin'
    raise ValueError(f'No --gin_file was given. Expected one, as {example}.')
  _load_files(files, (common.gin_search_paths or '').split(','))
  parser, flags = _parser(command, name)
  if common.help:
    parser.print_help()
    parser.exit()
  values = _parsed(parser, rest, files)
  given = [f for f in files if not f.endswith(command.run_file or f)]
  if given:  # a --gin_file replaces the default run file, which is named too
    given.append('gin/runs/decode.gin')
  of_models[:] = [
    *(f'--gin_file={f}' for f in given),
    *(f'--gin.{x}' for x in common.gin_bindings or () if '/' not in x),
    *(f'{flags[x]}={values[x]}' for x in values if flags[x] in _MODEL_FLAGS),
  ]
  macros, implied = _macros(), dict[str, Any]()
  for binding in values:
    implied |= command.implied.get(flags[binding], {})
  implied = {macro: implied[macro] for macro in implied.keys() & macros}
  # Later bindings override: explicit bindings come after flags.
  for binding, value in [*implied.items(), *values.items()]:
    _bind(binding, value)
  for text in common.gin_bindings or ():
    binding, _, value = (part.strip() for part in text.partition('='))
    if '=' not in text or not _NAME.fullmatch(binding):
      expected = 'NAME=VALUE, a macro or scope/function.parameter and its value'
      raise unexpected('--gin', expected, text)
    with _explained(f'--gin.{binding}={value[:80]}'):
      value = _gin_value(binding, value)
    _bind(binding, value)
  _check_scopes()
  _check_engines()
  _check_complete(flags)
  with _explained('gin'):
    gin.finalize()


def _check_engines() -> None:
  """Raises ValueError for a setting bound to Engine, as in version 0.2.

  Settings of an engine now belong to its config.
  """
  for (scope, selector), values in bindings().items():
    settings = values.keys() - {'target', 'drafter', 'config'}
    if selector.endswith('engine.Engine') and settings:
      name, config = min(settings), 'engine.EngineConfig'
      expected = f'in {config}, with engine.Engine.config = @{config}()'
      field = f'{scope}/engine.Engine.{name}'.lstrip('/')
      raise unexpected(field, expected, values[name])


def _common(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
  """Parses the flags that all commands have; returns other arguments too."""
  parser = _Parser()
  parser.add_common()
  for arg in argv:
    if arg.startswith('--gin.') and '=' not in arg:
      raise ValueError(f'{arg}: expected --gin.NAME=VALUE, but there is no =.')
  # --gin.NAME=VALUE is --gin_bindings=NAME=VALUE.
  args = [re.sub(r'\A--gin\.', '--gin_bindings=', arg) for arg in argv]
  return parser.parse_known_args(args)


def _load_files(files: Sequence[str], paths: Sequence[str]) -> None:
  """Loads gin files and forgets those that were loaded before.

  gin looks for a file in the working folder, in the search paths and in the
  repository, in this order.

  Raises:
    ValueError: a file is missing or not valid.
  """
  gin.clear_config()
  logging.getLogger().addFilter(_is_no_search_error)
  for folder in (*filter(None, paths), str(ROOT)):
    _search_too(folder)
  for gin_file in files:
    with _explained(gin_file):
      gin.parse_config_file(gin_file)


def _is_no_search_error(record: logging.LogRecord) -> bool:
  """Returns False for gin's error that a searched folder lacks a file."""
  return record.msg != 'Path not found: %s'


class _Parser(argparse.ArgumentParser):
  """An argument parser that raises ValueError for bad arguments."""

  def __init__(self, **settings: Any):
    shape = argparse.RawDescriptionHelpFormatter
    super().__init__(
      formatter_class=shape, add_help=False, allow_abbrev=False, **settings
    )

  def error(self, message: str) -> NoReturn:
    raise ValueError(message.removeprefix('argument '))

  def add_common(self) -> None:
    """Adds the flags of all commands."""
    add = self.add_argument_group('gin, as with T5X').add_argument
    text = 'a run file instead of the usual one'
    add('--gin_file', action='append', metavar='FILE', help=text)
    text = 'also --gin.NAME=VALUE'
    add('--gin_bindings', action='append', metavar='NAME=VALUE', help=text)
    add('--gin_search_paths', metavar='A,B', help='folders with gin files')
    add = self.add_argument_group('more').add_argument
    switch = functools.partial(add, action='store_true')
    number = functools.partial(add, type=int, metavar='N')
    switch('-h', '--help', help='show this and do nothing')
    switch('--traceback', help='show where an error came from')
    switch('--multiprocess', help='one process of a pod or Slurm')
    add('--coordinator_address', metavar='HOST:PORT', help='of process 0')
    number('--process_count', help='how many processes there are')
    number('--process_index', help='which process this is, from 0')


def _parser(command: Command, name: str) -> tuple[_Parser, dict[str, str]]:
  """Returns the parser of a command, and gin's names -> flags."""
  places = [f'[{PLACES[name]}]' for name in command.places]
  parser = _Parser(
    usage=' '.join(filter(None, ['specdec', name, *places, '[FLAGS]'])),
    description=inspect.getdoc(command.function),
    argument_default=argparse.SUPPRESS,
  )
  flags = add_flags(parser, command.places)
  parser.add_common()
  return parser, flags


def _parsed(
  parser: _Parser, argv: Sequence[str], files: Sequence[str]
) -> dict[str, Any]:
  """Returns binding -> value, for the flags of a command line.

  Raises:
    ValueError: a flag is not known; or a positional argument and its flag
      contradict each other.
  """
  flags, dashed = parser._option_string_actions, []  # noqa: SLF001
  for arg in argv:  # --max_length is the flag --max-length
    name, equals, value = arg.partition('=')
    flag = name.replace('_', '-')
    dashed.append(f'{flag}{equals}{value}' if flag in flags else arg)
  args, unknown = parser.parse_known_args(dashed)
  if unknown:
    name, run = unknown[0].split('=')[0], ', '.join(files)
    near = nearest(name, [*flags, '--gin.NAME=VALUE'])
    raise ValueError(f'Unknown argument {name!r} of a run of {run}.{near}')
  values = vars(args)
  values |= {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
  for name in [name for name in values if name.startswith(_PLACE)]:
    binding, place = name.removeprefix(_PLACE), values.pop(name)
    if (given := values.setdefault(binding, place)) != place:
      flag = next(x for x in flags if flags[x].dest == binding)
      advice = f'Give one of them, not {place!r} by its place too.'
      raise unexpected(flag, 'one value', given, advice)
  return values


def meeting_of(argv: Sequence[str]) -> 'processes.Meeting | None':
  """Returns how several processes meet; None for a single process.

  Raises:
    ValueError: the flags about processes are wrong or do not go together.
  """
  args, _ = _common(argv)
  values = (args.coordinator_address, args.process_count, args.process_index)
  if args.multiprocess or any(value is not None for value in values):
    from specdec_jax.infer import processes

    return processes.Meeting(*values)
  return None


# These functions bind macros and parameters.


def _gin_value(name: str, text: str) -> Any:
  """Returns the gin value of a text on the command line, or the text itself.

  Raises:
    ValueError: something follows the value; gin would take another line as a
      statement, which may import.
    SyntaxError, tokenize.TokenError: the text is not a valid value.
  """
  if text[:1] in tuple('\'"[({@%'):
    parser = gin.config_parser.ConfigParser(text, gin.config.ParserDelegate())
    value = parser.parse_value()
    if parser.current_token.string:
      raise ValueError('expected one value (a literal, @reference or %MACRO)')
    return value
  # The text 'false' would count as true; gin spells False as Python does.
  if text.lower() in ('true', 'false', 'none') and text != text.capitalize():
    expected = f'{text.capitalize()}, or text in quotes'
    raise unexpected(f'--gin.{name}', expected, text)
  try:
    # A `#` would start a comment inside a literal and cut the value short.
    return text if '#' in text else ast.literal_eval(text)
  except (SyntaxError, ValueError):
    return text


def _bind(name: str, value: Any) -> None:
  """Binds a macro or a parameter.

  Raises:
    ValueError: no gin file has the macro, gin does not know the parameter, or
      narrower scopes override the binding wherever it is used.
  """
  scope, selector, parameter = gin.config_parser.parse_binding_key(name)
  if not parameter:
    if name not in (macros := _macros()):
      near = nearest(name, macros)
      raise ValueError(f'--gin.{name}: no gin file has it.{near}')
    gin.bind_parameter((name, MACRO, 'value'), value)
    return
  with _explained(f'--gin.{name}'):
    gin.bind_parameter(name, value)
  full = gin.config.ParsedBindingKey.parse(name).complete_selector
  inner = {
    f'{other}/'
    for (other, function), values in bindings().items()
    if function == full and parameter in values and other != scope
    if f'{other}/'.startswith(f'{scope}/' if scope else '')
  }
  uses = [r.config_key[0] for r in references() if r.config_key[1] == full]
  if uses and all(f'{use}/'.startswith(tuple(inner)) for use in uses):
    names = ', '.join(f'{i}{selector}.{parameter}' for i in sorted(inner))
    raise ValueError(
      f'--gin.{name} would change nothing: give {names}, which the gin files'
      ' set and which overrides it.'
    )


def _macros() -> set[str]:
  """Returns the macros that the gin files define or use."""
  keys = [*bindings(), *(ref.config_key for ref in references())]
  return {scope for scope, name in keys if name == MACRO}


def roots() -> set[str]:
  """Returns the full names of bound classes that nothing refers to."""
  referred = {reference.config_key[1] for reference in references()}
  return {name for _, name in bindings()} - referred - {*_INTERNAL}


def _check_scopes() -> None:
  """Raises ValueError for a scope that is bound but never entered.

  Only references in gin files (`@scope/fn()`) enter scopes, because the library
  does not use gin.
  """
  paths = [r.scopes for r in references() if r.config_key[1] not in _INTERNAL]
  # The reference @a/b/fn enters the scopes a and a/b.
  entered = {'/'.join(p[: i + 1]) for p in paths for i in range(len(p))}
  for scope, name in sorted(bindings()):
    if name != MACRO and scope and scope not in entered:
      raise ValueError(
        f'{scope}/{name} is bound, but no reference @{scope}/... enters that'
        f' scope.{nearest(scope, entered)}'
      )


def _check_complete(flags: Mapping[str, str]) -> None:
  """Raises ValueError for macros and parameters without a value.

  If a binding replaces the only reference to a required macro, the macro needs
  no value and is removed.

  Args:
    flags: gin's name of a macro or parameter -> its flag.
  """
  used = {r.config_key[0] for r in references() if r.config_key[1] == MACRO}
  required = []
  for (scope, selector), values in sorted(bindings().items()):
    for parameter in [k for k, v in values.items() if repr(v) == _REQUIRED]:
      if selector != MACRO:
        required.append(f'{scope}/{selector}.{parameter}'.lstrip('/'))
      elif scope in used:
        required.append(scope)
      else:
        del bindings()[scope, selector]
  if required:
    wanted = ' '.join(flags.get(n, f'--gin.{n}=...') for n in required)
    raise ValueError(f'Required and not given: {wanted}')
  defined = {scope for scope, selector in bindings() if selector == MACRO}
  for macro in sorted(used - defined):
    near = nearest(macro, defined)
    raise ValueError(f'The macro %{macro} is used and has no value.{near}')


# These functions build the objects that the gin files describe.


def build(cls: type[_T]) -> _T:
  """Returns the instance of `cls` that the loaded gin files describe.

  Raises:
    ValueError: no gin file configures `cls`, or values refer to each other in a
      circle.
    TypeError: a field has no value, see `is_unbound`.
  """
  name = f'{cls.__module__}.{cls.__qualname__}'
  try:
    configured = gin.get_configurable(cls)
  except ValueError as error:
    names = ', '.join(sorted(roots())) or 'nothing'
    message = f'The gin files configure {names}; this command needs {name}.'
    raise ValueError(message) from error
  try:
    return configured()
  except RecursionError as error:
    raise ValueError(_reason(error)) from error


def builder(cls: type[_T]) -> Callable[[], _T]:
  """Returns a function that calls `build(cls)` in another process.

  The function carries the values that the gin files have given.
  """
  return functools.partial(_built, cls, gin.config_str())


def _built(cls: type[_T], config: str) -> _T:
  gin.clear_config()
  gin.parse_config(config)
  return build(cls)


# These functions word gin's errors for users.


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
  """Turns an error of gin into a ValueError that begins with `where`."""
  try:
    yield
  except Exception as error:
    raise ValueError(f'{where}: {_reason(error)}') from error


def _reason(error: BaseException) -> str:
  if isinstance(error, RecursionError | MemoryError):
    return (
      'not valid gin: brackets are nested too deeply, or values or includes'
      ' need each other in a circle, or in too long a chain.'
    )
  prefix = 'not valid gin: ' if isinstance(error, _INVALID) else ''
  expected = 'expected a literal, @reference or %MACRO.'
  text = _OF_TUPLE.sub(r'\1', _NO_LITERAL.sub(expected, one_line(error)))
  return f'{prefix}{text.rstrip(".")}.'


def is_unbound(error: BaseException) -> bool:
  """Returns whether an argument of a call had no value in the gin files."""
  text = str(error)
  return 'In call to configurable' in text and bool(_MISSING.search(text))


def one_line(error: BaseException, argv: Sequence[str] = ()) -> str:
  """Returns the message without line breaks and without gin's call trail.

  Args:
    error: the error; its message may begin with the field of a configuration.
    argv: the arguments of the command line. If one of their flags gives the
      field, the message names that flag; otherwise gin's name of the field.
  """
  text = str(error)
  if is_unbound(error) and (missing := _MISSING.search(text)):
    return f'{missing[1]} needs a value in the gin files for {missing[2]}.'
  lines = [x for x in text.splitlines() if 'In call to configurable' not in x]
  line = ' '.join(' '.join(lines).split()) or type(error).__name__
  field, colon, rest = line.partition(': ')
  if colon:
    field = _as_written(field, text, argv)
  return f'{field}{colon}{rest}'


def _as_written(field: str, text: str, argv: Sequence[str]) -> str:
  """Returns a field's flag in `argv`, else gin's name, else `field` itself.

  Args:
    field: the name of a field; other words are returned unchanged.
    text: the message, in which gin names the configurable that was called.
    argv: the arguments of the command line.
  """
  flags = [word.partition('=')[0] for word in argv]
  written = {flag.replace('_', '-'): flag for flag in flags}
  names, in_gin = spellings(field), field
  for name, scope in _CALLED.findall(text):
    # Several configurables may have that name.
    with contextlib.suppress(KeyError, ValueError):
      called = gin.config.ConfigurableReference(name, evaluate=False)
      owner = called.configurable.wrapped
      if field in inspect.signature(owner).parameters:
        # The flag of the target's dtype may have given the drafter's dtype.
        names[:0] = spellings(field, owner.__name__, scope)
        in_gin = f'{scope}/{name}.{field}'.lstrip('/')
        break
  return next((written[word] for word in names if word in written), in_gin)
