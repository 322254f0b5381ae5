"""What gin lets pass: names on the command line that nothing knows.

gin accepts a mistyped macro or scope in silence and names no alternatives in
its errors. These checks look at its loaded configuration and say what is known.
"""

import graphlib
import importlib.util  # noqa: F401  gin uses it for a missing include.
import inspect
import pathlib
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gin

from specdec_jax.checks.names import nearest

_MACRO = 'gin.macro'
_INTERNAL = (_MACRO, 'gin.constant')
_REQUIRED = '%gin.REQUIRED'
_INCLUDE = re.compile(r"""^include\s+['"](.+?)['"]""", re.MULTILINE)
_EXPORTED = re.compile(r'^([A-Z]\w*)\s*=', re.MULTILINE)
_FEW = 3  # files that a message names
_MISSING = re.compile(
  r'(\w+)(?:\.__init__)?\(\) missing \d+ required .*?arguments?: (.*)'
)


class _Names(gin.config_parser.ParserDelegate):
  """Takes every reference and macro: only the form of a value is looked at."""

  def configurable_reference(self, scoped_configurable_name, evaluate):
    return None

  def macro(self, macro_name):
    return None


def check_single(value: str) -> None:
  """Raises ValueError unless a text is one value of gin's and nothing more.

  gin would take what follows on another line as statements: imports too.

  Raises:
    ValueError: something follows the value.
    SyntaxError, tokenize.TokenError: it does not begin with one.
  """
  parser = gin.config_parser.ConfigParser(value, _Names())
  parser.parse_value()
  # The end of a line that the tokenizer adds, or one that is there.
  while parser.current_token.type in (tokenize.NEWLINE, tokenize.NL):
    parser._advance_one_token()  # noqa: SLF001
  if (rest := parser.current_token).type != tokenize.ENDMARKER:
    raise ValueError(
      f'expected one value (a literal, @reference or %MACRO), but'
      f' {rest.string!r} follows it. Text in quotes may hold anything but'
      ' its own quote'
    )


def _config() -> dict[tuple[str, str], dict[str, object]]:
  # gin shows its bindings only to finalize hooks, which is after the command
  # line has been merged into them.
  return gin.config._CONFIG  # noqa: SLF001


def _references() -> list[gin.config.ConfigurableReference]:
  return list(gin.config.iterate_references(_config()))


def _configured() -> set[tuple[str, str]]:
  """Returns each (scope, full name) that is bound or referred to."""
  return set(_config()) | {ref.config_key for ref in _references()}


def configured() -> list[str]:
  """Returns the full name of each function or class that is configured."""
  return sorted({name for _, name in _configured() if name not in _INTERNAL})


def used_macros() -> set[str]:
  """Returns the macros that something refers to."""
  return set(_uses())


def _uses() -> dict[str, set[str]]:
  """Returns macro -> the macros that refer to it; '' stands for all else."""
  found: dict[str, set[str]] = {}
  for (scope, selector), values in _config().items():
    for reference in gin.config.iterate_references(values):
      macro, kind = reference.config_key
      if kind == _MACRO:
        by = scope if selector == _MACRO else ''
        found.setdefault(macro, set()).add(by)
  return found


def given_macros() -> dict[str, Any]:
  """Returns the macros that have a value, not None, as gin holds it."""
  values = {
    scope: values.get('value')
    for (scope, selector), values in _config().items()
    if selector == _MACRO
  }
  return {
    name: value
    for name, value in values.items()
    if value is not None and repr(value) != _REQUIRED
  }


def check_includes(gin_file: str, places: Sequence[str]) -> None:
  """Raises ValueError for a file that includes itself, by others or directly.

  Args:
    gin_file: as it was given.
    places: folders where it and its includes are looked for, in order.
  """
  graph: dict[str, list[str]] = {}
  waiting = [gin_file]
  while waiting:
    name = waiting.pop()
    if name in graph:
      continue
    paths = (pathlib.Path(place, name) for place in places)
    path = next((path for path in paths if path.is_file()), None)
    # What is missing, or no text, is gin's to say.
    text = path.read_text('utf-8', 'replace') if path else ''
    graph[name] = _INCLUDE.findall(text)
    waiting += graph[name]
  if circle := _circle(graph):
    raise ValueError(
      f'{gin_file}: the gin files include each other in a circle:'
      f' {" -> ".join(circle)}. Take one of these includes out.'
    )


def _circle(graph: Mapping[Any, Iterable[Any]]) -> list[Any]:
  """The nodes of one circle, its first one again at the end; mostly none."""
  try:
    graphlib.TopologicalSorter(graph).prepare()
  except graphlib.CycleError as error:
    return list(error.args[1])[::-1]
  return []


class Known:
  """The macros, scopes and names that the gin files define or use."""

  def __init__(self):
    self.macros = {scope for scope, name in _configured() if name == _MACRO}
    self.scopes = _entered_scopes()
    # Parameter -> the macros that set it, with whose it is.
    self._setting: dict[str, dict[str, str]] = {}
    for (_, selector), values in _config().items():
      for parameter, value in values.items():
        if (macro := _macro(value)) and selector != _MACRO:
          by = self._setting.setdefault(parameter, {})
          by[macro] = f'{selector}.{parameter}'

  def hint(self, name: str) -> str:
    """Names the macros that set what a binding's name ends in."""
    parameter = re.split(r'[./]', name)[-1].lower()
    return ''.join(
      f' Give --gin.{macro}=VALUE for {whose}.'
      for macro, whose in sorted(self._setting.get(parameter, {}).items())
    )

  def check(self, name: str) -> None:
    """Raises ValueError for a macro or a scope that no gin file has."""
    scope, selector, parameter = gin.config_parser.parse_binding_key(name)
    hint = self.hint(name)
    if not parameter:
      if name not in self.macros:
        raise ValueError(
          f'--gin.{name}: no gin file defines or uses the macro'
          f' {name}.{nearest(name, self.macros, or_all=not hint)}{hint}'
        )
    elif scope and scope not in self.scopes:
      raise ValueError(
        f'--gin.{name}: no gin file uses the scope'
        f' {scope!r}.{nearest(scope, self.scopes)}{hint}'
      )

  def check_effect(self, name: str) -> None:
    """Raises ValueError if narrower scopes override `name` wherever it is used.

    Called after the binding was made, so that gin has resolved its names.
    """
    scope, selector, parameter = gin.config_parser.parse_binding_key(name)
    if not parameter:
      return
    key = gin.config.ParsedBindingKey.parse(name)
    full = key.complete_selector
    inner = {
      other
      for (other, function), values in _config().items()
      if function == full and parameter in values and _inside(other, scope)
    }
    uses = [r.config_key[0] for r in _references() if r.config_key[1] == full]
    if uses and all(any(_inside(u, i, True) for i in inner) for u in uses):
      names = ', '.join(f'{i}/{selector}.{parameter}' for i in sorted(inner))
      raise ValueError(
        f'--gin.{name} would change nothing: the gin files set {names}, which'
        ' goes before it. Give one of these instead.'
      )


def _inside(scope: str, outer: str, or_same: bool = False) -> bool:
  if scope == outer:
    return or_same
  return not outer or scope.startswith(f'{outer}/')


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


def _macro(value: Any) -> str:
  """The name where a value is %MACRO and nothing else, or ''."""
  if isinstance(value, gin.config.ConfigurableReference):
    scope, selector = value.config_key
    return scope if selector == _MACRO else ''
  return ''


def check_complete(
  shipped: pathlib.Path,
  written: Callable[[str], str] = lambda name: f'--gin.{name}=...',
) -> None:
  """Raises ValueError for macros without a value, or that need themselves.

  gin's own check names one that is required, by an internal name, and follows a
  circle until the stack is full. A required macro that nothing refers to any
  more, since a binding took its place, may stay without a value: it is taken
  out.

  Args:
    shipped: folder of the gin files that export macros.
    written: how a name is written on the command line.
  """
  check_circles()
  used = _uses()
  required = []
  for (scope, selector), values in sorted(_config().items()):
    for parameter, value in values.items():
      if repr(value) != _REQUIRED:
        continue
      if selector != _MACRO:
        full = f'{scope}/{selector}' if scope else selector
        required.append(f'{full}.{parameter}')
      elif scope in used:
        # One that only gives another macro its value is asked for by its name.
        (only,) = used[scope] if len(used[scope]) == 1 else ('',)
        required.append(only or scope)
      else:
        del _config()[scope, selector]
  if required:
    wanted = ' '.join(written(name) for name in required)
    raise ValueError(f'Required and not given: {wanted}')
  defined = {scope for scope, selector in _config() if selector == _MACRO}
  for reference in _references():
    scope, selector = reference.config_key
    if selector == _MACRO and scope not in defined:
      exported = _exported(shipped)
      if files := exported.get(scope, [])[:_FEW]:
        raise ValueError(
          f'The macro %{scope} is used but never given a value. It is exported'
          f' by {" and ".join(files)}: add --gin_file={files[0]}.'
        )
      raise ValueError(
        f'The macro %{scope} is used but never given a value; define it in a'
        f' gin file or by --gin.{scope}=VALUE.'
        f'{nearest(scope, {*defined, *exported})}'
      )


def _exported(folder: pathlib.Path) -> dict[str, list[str]]:
  """Macro -> the gin files that define it, those of models first."""
  found: dict[str, list[str]] = {}
  for path in sorted(folder.rglob('*.gin')):
    name = path.relative_to(folder.parent).as_posix()
    for macro in set(_EXPORTED.findall(path.read_text('utf-8'))):
      found.setdefault(macro, []).append(name)
  return found


def check_circles() -> None:
  """Raises ValueError for a value that is needed to make itself."""
  graph: dict[tuple[str, str], set[tuple[str, str]]] = {}
  waiting = list(_config())
  while waiting:
    scope, selector = key = waiting.pop()
    if key in graph:
      continue
    values: dict[str, Any] = {}
    parts = scope.split('/') if scope else []
    for i in range(len(parts) + 1):  # inner scopes go before outer ones
      values |= _config().get(('/'.join(parts[:i]), selector), {})
    graph[key] = {
      # A reference without a scope is made in the scope that it stands in.
      ('/'.join(ref.scopes) or scope, ref.config_key[1])
      for ref in gin.config.iterate_references(values)
      if ref.evaluate
    }
    waiting += graph[key]
  if circle := _circle(graph):
    shown = [
      f'%{scope}' if selector == _MACRO else f'@{selector}()'
      for scope, selector in circle
    ]
    raise ValueError(
      f'Values in the gin files need each other in a circle:'
      f' {" -> ".join(shown)}. Give one of them a value of its own.'
    )


def explain(error: Exception) -> str:
  """Returns gin's message with the nearest known names after it."""
  text = f'{one_line(error).rstrip(".")}.'
  if isinstance(error, RecursionError | MemoryError):
    return 'not valid gin: its brackets are nested too deep.'
  if isinstance(error, SyntaxError):
    line = f' (line {error.lineno})' if error.lineno else ''
    if found := re.search(r"malformed node.* token '(.*)'", text):
      return f'not valid gin: {found[1]} is no value, text has quotes{line}.'
    return f'not valid gin: {error.msg.rstrip(".")}{line}.'
  if isinstance(error, tokenize.TokenError):
    return f'not valid gin: {error.args[0]}; is a bracket or quote open?'
  if found := re.search(r"Configurable '(\S+)' doesn't .* named '(\w+)'", text):
    reference = gin.config.ConfigurableReference(found[1], evaluate=False)
    signature = inspect.signature(reference.configurable.wrapped)
    return text + nearest(found[2], signature.parameters)
  if found := re.search(r"<module '([\w.]+)'.* no attribute (\w+)", text):
    names = [n for n in vars(sys.modules[found[1]]) if not n.startswith('_')]
    return text + nearest(found[2], names)
  if found := re.search(r"No configurable matching .*?'@?([\w./]+)", text):
    names = configured()
    short = [name.rsplit('.', 1)[1] for name in names if '.' in name]
    return text + nearest(found[1], names + short)
  return text


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
