"""Chat templates: the messages of a chat as the ids that a model reads.

A model's folder may have a template in Jinja's language. The template gets the
same variables and functions as in transformers. It runs in Jinja's sandbox, for
a bounded time. The package jinja2 comes with the extra `[chat]`.
"""

import contextvars
import datetime
import functools
import inspect
import json
import os
import pathlib
import re
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec_jax import files
from specdec_jax.checks.fields import package
from specdec_jax.text import vocabulary
from specdec_jax.text.tokenizer import Tokenizer, Vocabulary

FILE = 'chat_template.jinja'
_SECONDS = 1.0  # the most processor time for rendering one text
_MOST = 1 << 23  # the most characters of a text, and bits of a number
# Filters with a width or a count among their arguments.
_SIZED = ('batch', 'center', 'indent', 'round', 'slice', 'tojson')
# The time at which rendering must have ended.
_END = contextvars.ContextVar[float]('_END')

Messages = Sequence[Mapping[str, Any]]


class RenderedIds(list[int]):
  """Ids of a rendered chat, which a model reads unchanged.

  An engine adds neither its `bos_id` nor an end of sequence: the template has
  written all that the model was trained on.
  """


class ChatTemplate:
  """A chat template, and the vocabulary that turns its text into ids."""

  def __init__(
    self,
    source: str,
    tokenizer: Tokenizer,
    tokens: Mapping[str, str] = types.MappingProxyType({}),
    name: str = 'The chat template',
  ):
    """Compiles a template.

    Args:
      source: the template in Jinja's language.
      tokenizer: the vocabulary.
      tokens: variables of the template and their texts, such as 'bos_token' ->
        '<s>'.
      name: where the template stands, for errors.

    Raises:
      ValueError: the package jinja2 is not installed, or `source` is not a
        template.
    """
    self._tokenizer, self._tokens, self._name = tokenizer, dict(tokens), name
    environment = _environment()
    try:
      self._template = _compiled(environment, source)
    except Exception as error:
      raise ValueError(f'{name} is no template: {_why(error)}.') from error

  def text(self, messages: Messages) -> str:
    """Renders the text that the model reads before its answer.

    Args:
      messages: dicts with a 'role' and a 'content', in their order. Entries
        that are None are left out.

    Raises:
      ValueError: the template does not take such messages.
    """
    end = _END.set(time.thread_time() + _SECONDS)
    names = {'tools': None, 'documents': None, 'add_generation_prompt': True}
    try:
      plain = [{k: x for k, x in m.items() if x is not None} for m in messages]
      text: str = self._template.render(messages=plain, **names, **self._tokens)
      _check_sizes(len(text))
    except Exception as error:  # the template may raise anything
      why = f'{self._name} does not take these messages: {_why(error)}.'
      raise ValueError(why) from error
    finally:
      _END.reset(end)
    return text

  def ids(self, messages: Messages) -> RenderedIds:
    """Returns the ids of `text`.

    The name of a special token is plain text if a message has it, and that
    token if the template has it.

    Raises:
      ValueError: the template does not take such messages, or the vocabulary
        reads a special token out of plain text.
    """
    marked = _each_text(self._tokenizer.hide_names, [*messages])
    return RenderedIds(self._tokenizer.encode_marked(self.text(marked)))


def template_of(tokenizer: Vocabulary) -> ChatTemplate | None:
  """Returns the chat template in a vocabulary's folder, or None.

  Raises:
    ValueError: the file cannot be read, its text is not a template, or the
      package jinja2 is not installed.
  """
  if not isinstance(tokenizer, Tokenizer):
    return None
  path = pathlib.Path(tokenizer.path)
  folder = path if path.is_dir() else path.parent
  config, file = vocabulary.settings(folder), folder / FILE
  name = f'{str(folder / vocabulary.SETTINGS)!r}: chat_template'
  source = config.get('chat_template')
  if os.path.lexists(file):
    name = repr(str(file))
    try:
      source = files.read_small(file, vocabulary.MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
      raise ValueError(f'{str(file)!r} cannot be read: {error}.') from error
  # A list holds several templates, each with a name.
  if isinstance(source, list):
    entries = [entry for entry in source if isinstance(entry, dict)]
    named = {entry.get('name'): entry.get('template') for entry in entries}
    source = named.get('default')
  if not isinstance(source, str):
    return None
  texts = {n: vocabulary.content(x) for n, x in config.items()}
  tokens = {n: x for n, x in texts.items() if x and n.endswith('_token')}
  return ChatTemplate(source, tokenizer, tokens, name)


@functools.cache
def _environment() -> Any:
  """Makes a Jinja environment like that of transformers, but with limits."""
  package('A chat template', 'jinja2', 'chat')
  from jinja2 import TemplateError, ext, nodes, sandbox

  class Generation(ext.Extension):
    """The tag `{% generation %}`, which surrounds a model's outputs."""

    tags = {'generation'}

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
      return nodes.Scope(body, lineno=line)

  def refuse(message: str) -> None:
    raise TemplateError(message)

  class Bounded(sandbox.ImmutableSandboxedEnvironment):
    """A sandbox without products, widths and counts that make a huge value."""

    intercepted_binops = frozenset({'*', '**', '%'})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any):
      _check_operands(operator, left, right)
      return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any):
      method = inspect.unwrap(function)
      text = getattr(method, '__self__', None)
      if isinstance(text, str) and method.__name__.startswith('format'):
        _check_form(text, [*args, *kwargs.values()])
      elif isinstance(text, str | bytes):
        _check_sizes(*args, *kwargs.values())
      return super().call(context, function, *args, **kwargs)

  extensions = [Generation, 'jinja2.ext.loopcontrols']
  trim = {'trim_blocks': True, 'lstrip_blocks': True}
  environment = Bounded(**trim, extensions=extensions)
  environment.filters |= {'tojson': _to_json, 'format': _format}
  for name in _SIZED:
    environment.filters[name] = _sized(environment.filters[name])
  environment.globals |= {
    'raise_exception': refuse,
    'strftime_now': lambda form: datetime.datetime.now().strftime(form),
  }
  del environment.globals['lipsum']  # may take arbitrarily long
  environment.extend(step=_step)
  return environment


def _compiled(environment: Any, source: str) -> Any:
  """Compiles a template; adds a call of `_step` to parts that may repeat.

  `_step` ends a rendering that takes too long.
  """
  from jinja2 import nodes

  tree = environment.parse(source)
  repeated = nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block
  for node in list(tree.find_all(repeated)):
    call = nodes.Call(nodes.EnvironmentAttribute('step'), [], [], None, None)
    node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
  return environment.from_string(tree.set_environment(environment))


def _step() -> None:
  if time.thread_time() > _END.get():
    raise TimeoutError(f'it takes longer than {_SECONDS:g} s')


def _check_operands(operator: str, left: Any, right: Any) -> None:
  """Raises OverflowError if an operation would make a huge value."""
  if operator == '%' and isinstance(left, str | bytes):
    _check_form(left, right if isinstance(right, tuple) else [right])
  elif operator == '**' and isinstance(left, int) and isinstance(right, int):
    _check_sizes(left.bit_length() * right)
  elif operator == '*':
    for value, times in ((left, right), (right, left)):
      if isinstance(times, int) and hasattr(value, '__len__'):
        _check_sizes(len(value) * times)


def _format(form: Any, *args: Any, **named: Any) -> str:
  values = named or args
  _check_operands('%', str(form), values)
  return str(form) % values


def _check_form(form: str | bytes, values: Sequence[Any]) -> None:
  """Checks the widths in a format string, and values that may be widths."""
  text = str(form)
  _check_sizes(*map(int, re.findall('[0-9]{1,20}', text)))
  if re.search(r'%[^a-zA-Z%]*\*|:[^}:{]*\{', text):
    for value in values:
      _check_sizes(*(value.values() if isinstance(value, Mapping) else [value]))


def _sized(function: Callable[..., Any]) -> Callable[..., Any]:
  """Wraps a filter to check its arguments after the first."""

  @functools.wraps(function)
  def checked(*args: Any, **kwargs: Any) -> Any:
    _check_sizes(*args[1:], *kwargs.values())
    return function(*args, **kwargs)

  return checked


def _check_sizes(*values: Any) -> None:
  """Raises OverflowError if one of the values is a number above `_MOST`."""
  for size in values:
    if isinstance(size, int) and size > _MOST:
      raise OverflowError(f'a value of size {size}; {_MOST} at most')


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
  # Jinja's own filter escapes for HTML, and has fewer arguments.
  text = json.dumps(value, ensure_ascii=ensure_ascii, **options)
  return text.replace(json.dumps(vocabulary.MARK)[1:-1], vocabulary.MARK)


def _each_text(function: Callable[[str], str], value: Any) -> Any:
  """Applies a function to each text in nested dicts and lists."""
  if isinstance(value, str):
    return function(value)
  if isinstance(value, Mapping):
    return {key: _each_text(function, item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_each_text(function, item) for item in value]
  return value


def _why(error: Exception) -> str:
  """Returns an error as a short line."""
  line = ' '.join(str(error).split())[:300]
  return line.rstrip('.') or type(error).__name__
