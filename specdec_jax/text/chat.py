"""Chat templates: the messages of a chat as the ids that a model reads.

A folder brings its own template, in Jinja's language, which runs in Jinja's
sandbox. As in transformers, names of special tokens in a message are those
tokens. The package jinja2 comes with the extra `[bpe]`.
"""

import datetime
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax import files
from specdec_jax.checks.packages import package
from specdec_jax.text.tokenizer import MOST_BYTES, Tokenizer
from specdec_jax.text.tokenizer_bpe import BpeTokenizer, content, settings

FILE = 'chat_template.jinja'
_ENTRY = 'chat_template'  # of tokenizer_config.json

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
  """A template with the vocabulary that it writes for."""

  def __init__(
    self, source: str, tokenizer: BpeTokenizer, tokens: Mapping[str, str]
  ):
    """Compiles a template.

    Args:
      source: in Jinja's language.
      tokenizer: the vocabulary.
      tokens: what the template may name, such as 'bos_token', and its text.

    Raises:
      ValueError: the package jinja2 is not installed, or it is no template.
    """
    sandbox = package('A chat template', 'jinja2.sandbox', 'bpe')
    self._jinja = package('A chat template', 'jinja2', 'bpe')
    self._tokenizer, self._tokens = tokenizer, dict(tokens)
    environment = sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=['jinja2.ext.loopcontrols'],
    )
    environment.filters['tojson'] = _to_json
    environment.globals['raise_exception'] = self._refuse
    environment.globals['strftime_now'] = _now
    try:
      self._template = environment.from_string(source)
    except self._jinja.TemplateError as error:
      raise ValueError(
        f'The chat template of {tokenizer.path!r} is none: {error}.'
      ) from error

  def _refuse(self, message: str) -> None:
    raise self._jinja.TemplateError(message)

  def text(self, messages: Messages) -> str:
    """What the model reads before its answer.

    Args:
      messages: each with a 'role' and a 'content', in their order.

    Raises:
      ValueError: the template does not take such messages.
    """
    try:
      return self._template.render(
        messages=messages, add_generation_prompt=True, **self._tokens
      )
    except (self._jinja.TemplateError, TypeError, ValueError) as error:
      raise ValueError(
        f'The chat template does not take these messages: {error}.'
      ) from error

  def ids(self, messages: Messages, bos_id: int | None = None) -> list[int]:
    """The ids of `text`, without a `bos_id` that an engine puts before them.

    Raises:
      ValueError: as of `text`.
    """
    found = self._tokenizer.encode_marked(self.text(messages))
    return found[1:] if found[:1] == [bos_id] else found


def template_of(tokenizer: Tokenizer) -> ChatTemplate | None:
  """The chat template in the folder of a vocabulary; None if there is none.

  Raises:
    ValueError: as of `ChatTemplate`, or the file cannot be read.
  """
  if not isinstance(tokenizer, BpeTokenizer):
    return None
  path = pathlib.Path(tokenizer.path)
  folder = path if path.is_dir() else path.parent
  said = settings(folder)
  file = folder / FILE
  if file.exists():
    try:
      source: Any = files.read_small(file, MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
      raise ValueError(f'{str(file)!r} cannot be read: {error}.') from error
  else:
    source = said.get(_ENTRY)
    if isinstance(source, list):  # several by their names
      named = {one.get('name'): one for one in source if isinstance(one, dict)}
      source = named.get('default', {}).get('template')
  if not isinstance(source, str):
    return None
  tokens = {
    name: content(value)
    for name, value in said.items()
    if name.endswith('_token') and content(value)
  }
  return ChatTemplate(source, tokenizer, tokens)


def _to_json(value: Any, indent: int | None = None) -> str:
  # Jinja's own filter writes for HTML.
  return json.dumps(value, ensure_ascii=False, indent=indent)


def _now(form: str) -> str:
  return datetime.datetime.now().strftime(form)
