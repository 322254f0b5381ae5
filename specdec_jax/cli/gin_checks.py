"""What gin lets pass: names on the command line that nothing knows.

gin accepts a mistyped macro or scope in silence and names no alternatives in
its errors. These checks look at its loaded configuration and say what is known.
"""

import importlib.util  # noqa: F401  gin uses it for a missing include.
import inspect
import pathlib
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import gin

from specdec_jax.checks.fields import nearest

_MACRO = 'gin.macro'
_INTERNAL = (_MACRO, 'gin.constant')
_REQUIRED = '%gin.REQUIRED'
_EXPORTED = re.compile(r'^([A-Z]\w*)\s*=', re.MULTILINE)
_WITH_FLAGS, _NETWORKS = 'specdec_jax.', 'specdec_jax.models.'
_MISSING = re.compile(
  r'(\w+)(?:\.__init__)?\(\) missing \d+ required .*?arguments?: (.*)'
)


class _Names(gin.config_parser.ParserDelegate):
  """Takes every reference and macro: only the form of a value is looked at."""

  def configurable_reference(self, scoped_configurable_name, evaluate):
    return None

  def macro(self, macro_name):
    return None


def check_single(name: str, value: str) -> None:
  """Raises ValueError unless a text is one value of gin's and nothing more.

  gin would take what follows on another line as statements: imports too.

  Raises:
    ValueError: something follows the value.
    SyntaxError, tokenize.TokenError: it is no value.
  """
  text = f'{name} = {value}'
  if len([*gin.config_parser.ConfigParser(text, _Names())]) > 1:
    raise ValueError('expected one value (a literal, @reference or %MACRO)')


def _config() -> dict[tuple[str, str], dict[str, object]]:
  # gin shows its bindings only to finalize hooks, which is after the command
  # line has been merged into them.
  return gin.config._CONFIG  # noqa: SLF001


UNBOUND = object()  # `bound` of a field that no gin file binds


def configurables() -> list[tuple[str, str, Callable]]:
  """Returns (scope, scoped name, class or function) of what is configured.

  What nothing refers to comes first. Of scopes only `target` and `draft`
  count; networks and what is no part of this library are left out.
  """
  referred = {reference.config_key for reference in _references()}
  keys = dict.fromkeys([*_config(), *sorted(referred)])
  entries = []
  for scope, selector in sorted(keys, key=lambda key: key in referred):
    if selector in _INTERNAL or scope not in ('', 'target', 'draft'):
      continue
    reference = gin.config.ConfigurableReference(selector, evaluate=False)
    made = reference.configurable.wrapped
    if made.__module__.startswith(_WITH_FLAGS) and not (
      made.__module__.startswith(_NETWORKS)
    ):
      name = f'{scope}/{selector}' if scope else selector
      entries.append((scope, name, made))
  return entries


def bound(binding: str) -> Any:
  """Returns what the gin files bind 'scope/class.field' to, or UNBOUND."""
  name, _, field = binding.rpartition('.')
  scope, _, selector = name.rpartition('/')
  return _config().get((scope, selector), {}).get(field, UNBOUND)


def macro_of(value: Any) -> str:
  """Returns the name of a value that is %MACRO and nothing else, or ''."""
  if isinstance(value, gin.config.ConfigurableReference):
    scope, selector = value.config_key
    return scope if selector == _MACRO else ''
  return ''


def value_of(macro: str) -> Any:
  """Returns the value of a macro, through other macros; None for none."""
  seen: set[str] = set()
  value: Any = None
  while macro and macro not in seen:
    seen.add(macro)
    value = _config().get((macro, _MACRO), {}).get('value')
    macro = macro_of(value)
  return None if macro else value


def _references() -> list[gin.config.ConfigurableReference]:
  return list(gin.config.iterate_references(_config()))


def _configured() -> set[tuple[str, str]]:
  """Returns each (scope, full name) that is bound or referred to."""
  return set(_config()) | {ref.config_key for ref in _references()}


def configured() -> list[str]:
  """Returns the full name of each function or class that is configured."""
  return sorted({name for _, name in _configured() if name not in _INTERNAL})


def roots() -> set[str]:
  """Returns the full names of what is bound and nothing refers to."""
  referred = {reference.config_key[1] for reference in _references()}
  return {name for _, name in _config()} - referred - set(_INTERNAL)


def macros() -> set[str]:
  """Returns the macros that the gin files define or use."""
  return {scope for scope, name in _configured() if name == _MACRO}


def check_name(name: str) -> None:
  """Raises ValueError for a macro or a scope that no gin file has."""
  scope, _, parameter = gin.config_parser.parse_binding_key(name)
  if not parameter and name not in macros():
    known = nearest(name, macros())
    raise ValueError(f'--gin.{name}: no gin file has it.{known}')
  entered = _entered_scopes()
  if parameter and scope and scope not in entered:
    known = nearest(scope, entered)
    raise ValueError(
      f'--gin.{name}: no gin file uses the scope {scope!r}.{known}'
    )


def check_effect(name: str) -> None:
  """Raises ValueError if narrower scopes override `name` wherever it is used.

  Called after the binding was made, so that gin has resolved its names.
  """
  scope, selector, parameter = gin.config_parser.parse_binding_key(name)
  if not parameter:
    return
  full = gin.config.ParsedBindingKey.parse(name).complete_selector
  inner = {
    f'{other}/'
    for (other, function), values in _config().items()
    if function == full and parameter in values and other != scope
    if f'{other}/'.startswith(f'{scope}/' if scope else '')
  }
  uses = [r.config_key[0] for r in _references() if r.config_key[1] == full]
  if uses and all(f'{use}/'.startswith(tuple(inner)) for use in uses):
    names = ', '.join(f'{i}{selector}.{parameter}' for i in sorted(inner))
    raise ValueError(
      f'--gin.{name} would change nothing: give {names}, which the gin files'
      ' set and which goes before it.'
    )


def check_scopes() -> None:
  """Raises ValueError for a scope that is bound but never entered.

  Scopes are entered by references (`@scope/fn()`) alone: the library knows
  nothing of gin.
  """
  entered = _entered_scopes()
  for scope, name in sorted(_config()):
    if name != _MACRO and scope and scope not in entered:
      raise ValueError(
        f'{scope}/{name} is bound in a gin file, but no reference'
        f' @{scope}/... enters that scope.{nearest(scope, entered)}'
      )


def _entered_scopes() -> set[str]:
  """Returns the scopes of all references, a/b as a and a/b."""
  paths = [
    reference.scopes
    for reference in _references()
    if reference.config_key[1] not in _INTERNAL
  ]
  return {'/'.join(path[: i + 1]) for path in paths for i in range(len(path))}


def check_complete(
  shipped: pathlib.Path, flags: Mapping[str, str] | None = None
) -> None:
  """Raises ValueError for macros and parameters without a value.

  A required macro that nothing refers to any more, since a binding took its
  place, may stay without a value: it is taken out.

  Args:
    shipped: folder of the gin files that export macros.
    flags: binding -> the flag that makes it.
  """
  used = {r.config_key[0] for r in _references() if r.config_key[1] == _MACRO}
  required = []
  for (scope, selector), values in sorted(_config().items()):
    for parameter, value in values.items():
      if repr(value) != _REQUIRED:
        continue
      if selector != _MACRO:
        full = f'{scope}/{selector}' if scope else selector
        required.append(f'{full}.{parameter}')
      elif scope in used:
        required.append(scope)
      else:
        del _config()[scope, selector]
  if required:
    written = {n: f'--gin.{n}=...' for n in required} | dict(flags or {})
    wanted = ' '.join(written[name] for name in required)
    raise ValueError(f'Required and not given: {wanted}')
  defined = {scope for scope, selector in _config() if selector == _MACRO}
  for macro in sorted(used - defined):
    exported = _exported(shipped)
    hint = nearest(macro, {*defined, *exported})
    if file := exported.get(macro):
      hint = f' It is exported by {file}: add --gin_file={file}.'
    raise ValueError(f'The macro %{macro} is used and has no value.{hint}')


def _exported(folder: pathlib.Path) -> dict[str, str]:
  """Macro -> the gin file that defines it, one of models if there are more."""
  return {
    macro: path.relative_to(folder.parent).as_posix()
    for path in sorted(folder.rglob('*.gin'), reverse=True)
    for macro in _EXPORTED.findall(path.read_text('utf-8'))
  }


def explain(error: Exception) -> str:
  """Returns gin's message with the nearest known names after it."""
  text = f'{one_line(error).rstrip(".")}.'
  if isinstance(error, RecursionError | MemoryError):
    return (
      'not valid gin: brackets are nested too deeply, or values or includes'
      ' need each other in a circle, or in too long a chain.'
    )
  if isinstance(error, SyntaxError):
    line = f' (line {error.lineno})' if error.lineno else ''
    if match := re.search(r"malformed node.* token '(.*)'", text):
      return f'not valid gin: {match[1]} is no value, text has quotes{line}.'
    return f'not valid gin: {error.msg.rstrip(".")}{line}.'
  if isinstance(error, tokenize.TokenError):
    return f'not valid gin: {error.args[0]}; is a bracket or quote open?'
  for pattern, names_of in _UNKNOWN.items():
    if match := re.search(pattern, text):
      return text + nearest(match[2], names_of(match[1]))
  return text


def _parameters(configurable: str) -> Iterable[str]:
  reference = gin.config.ConfigurableReference(configurable, evaluate=False)
  return inspect.signature(reference.configurable.wrapped).parameters


def _short_names(_: str) -> Iterable[str]:
  names = configured()
  return [*names, *(name.rsplit('.', 1)[-1] for name in names)]


# gin's words for a name that it does not know -> which names there are.
_UNKNOWN: dict[str, Callable[[str], Iterable[str]]] = {
  r"Configurable '(\S+)' doesn't .* named '(\w+)'": _parameters,
  r"<module '([\w.]+)'.* no attribute (\w+)": lambda m: vars(sys.modules[m]),
  r"(No configurable) matching .*?'@?([\w./]+)": _short_names,
}


def is_unbound(error: BaseException) -> bool:
  """Whether `error` says that gin had no value for an argument."""
  text = str(error)
  return 'In call to configurable' in text and bool(_MISSING.search(text))


def one_line(error: BaseException) -> str:
  """Returns the message without line breaks and without gin's call trail."""
  text = str(error)
  if is_unbound(error) and (missing := _MISSING.search(text)):
    return f'{missing[1]} needs a value in the gin files for {missing[2]}.'
  lines = (line.strip() for line in text.splitlines())
  kept = [
    line for line in lines if line and 'In call to configurable' not in line
  ]
  # Where a binding came from the command line, it is named already.
  text = ' '.join(kept).partition(' In bindings string')[0]
  return text or type(error).__name__
