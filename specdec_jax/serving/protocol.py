"""OpenAI's completions: what a request may say.

`_fields` and `_chat_fields` declare the fields of a body. All of them are
checked before anything is queued; a wrong one is answered by OpenAI's error
object, which names it.
"""

import dataclasses
import json
import secrets
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specdec_jax.checks.fields import nearest
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.request import example_id
from specdec_jax.serving.settings import ServeSettings
from specdec_jax.text.chat import ChatTemplate

_MAX_TOKENS = 16  # OpenAI's default
_MOST_STOPS, _LONGEST_STOP = 16, 256
_MOST_TOP = 20  # log-probabilities of a place
_LANGUAGES = ('source_lang', 'target_lang')
_LABELS = ('user', 'safety_identifier', 'prompt_cache_key', 'session_id')

# Fields of OpenAI and vLLM that are not supported -> the values that ask for
# nothing. null asks for nothing in any field.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  'suffix': ('',), 'logit_bias': ({},), 'allowed_token_ids': ([],),
  'bad_words': ([],), 'min_p': (0,), 'presence_penalty': (0,),
  'frequency_penalty': (0,), 'repetition_penalty': (1,), 'length_penalty': (1,),
  'stop_token_ids': ([],), 'include_stop_str_in_output': (False,),
  'skip_special_tokens': (True,), 'spaces_between_special_tokens': (True,),
  'return_tokens_as_token_ids': (False,), 'tools': ([],), 'functions': ([],),
  'tool_choice': ('none', 'auto'), 'function_call': ('none', 'auto'),
  'parallel_tool_calls': (True, False), 'response_format': ({'type': 'text'},),
  'modalities': (['text'],), 'reasoning_effort': ('none',),
  'include_reasoning': (True,), 'verbosity': ('medium',), 'store': (False,),
  'metadata': ({},), 'prompt_cache_options': ({},),
  'prompt_cache_retention': ('in_memory',), 'priority': (0,),
  'service_tier': ('auto', 'default'), 'vllm_xargs': ({},),
}  # fmt: skip
_NEUTRAL_IN_A_CHAT: dict[str, tuple[Any, ...]] = {
  'prompt': (), 'best_of': (1,), 'documents': ([],), 'echo': (False,),
  'add_generation_prompt': (True,), 'add_special_tokens': (False,),
  'chat_template_kwargs': ({},), 'continue_final_message': (False,),
}  # fmt: skip
# The only values in a beam search.
_OF_A_SEARCH = {
  'temperature': 0, 'top_p': 1, 'top_k': 0, 'stop': [], 'min_tokens': 0,
  'ignore_eos': False, 'stream': False, 'speculative': True,
}  # fmt: skip


class ApiError(Exception):
  """A request that is not answered, or not to its end.

  Attributes:
    param: the field that is wrong, if it is one.
    status: of HTTP.
    body: OpenAI's error object.
  """

  def __init__(
    self,
    message: str,
    param: str | None = None,
    status: int = 400,
    code: str | None = None,
    kind: str = 'invalid_request_error',
  ):
    super().__init__(message)
    self.param, self.status = param, status
    error = {'message': message, 'type': kind, 'param': param, 'code': code}
    self.body: dict[str, Any] = {'error': error}


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
  """A request for completions, checked.

  Attributes:
    prompts: texts, or ids.
    prompt_ids: the ids of each as the model reads them.
    n: outputs of each.
    options: of `Engine.generate`, the same for all.
    searches: whether the n outputs of a prompt are those of one beam search.
    stream: whether text is sent as it comes.
    include_usage: whether a stream ends with the counts of tokens.
    log_probs: candidates of each place whose log-probabilities are wanted; None
      is not even those of the tokens that were chosen.
    echo: whether an output begins with its prompt.
    return_token_ids: whether ids are wanted beside the text.
    return_rounds: whether a piece of a stream says what became of the draft.
    plain: whether no drafter is wanted, see `Worker.row`.
    chat: whether the answer is a message of a chat.
  """

  prompts: Sequence[str | Sequence[int]]
  prompt_ids: Sequence[Sequence[int]]
  n: int
  options: Mapping[str, Any]
  searches: bool
  stream: bool
  include_usage: bool
  log_probs: int | None
  echo: bool
  return_token_ids: bool
  return_rounds: bool
  plain: bool
  chat: bool

  @property
  def is_scored(self) -> bool:
    """Whether log-probabilities are wanted that decoding does not give."""
    if self.log_probs is None:
      return False
    greedy = self.options.get('temperature') == 0
    # Then the token that was chosen is the likeliest one.
    greedy = greedy and not self.options['min_length']
    return self.echo or self.log_probs > int(greedy)

  def of_each(self) -> list[tuple[int, dict[str, Any]]]:
    """Index of the prompt and options of each row, in order.

    A row is an output, or a beam search with n of them. The random numbers are
    those of `Engine.generate` for the same prompts, seed and `num_samples`.
    """
    if self.searches:
      return [(index, {**self.options}) for index in range(len(self.prompts))]
    return [
      (index, {**self.options, 'example_ids': [example_id(index, sample)]})
      for index in range(len(self.prompts))
      for sample in range(self.n)
    ]


class _Field(NamedTuple):
  """A field of a body: its right values in words, their test, its default."""

  expected: str
  is_right: Callable[[Any], bool]
  default: Any = None


def _whole(default: int | None, least: int, most: int) -> _Field:
  return _Field(
    f'a whole number from {least} to {most}',
    lambda value: type(value) is int and least <= value <= most,
    default,
  )


def _one_of(values: Sequence[Any], more: str) -> _Field:
  expected = ' or '.join(map(json.dumps, values)) or 'nothing'
  return _Field(f'{expected}{more}', lambda value: value in values)


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


def _is_ids(value: Any) -> bool:
  ids = isinstance(value, list) and bool(value)
  return ids and all(type(token) is int for token in value)


def _is_prompt(value: Any) -> bool:
  if isinstance(value, str) or _is_ids(value):
    return True
  if not isinstance(value, list) or not value:
    return False
  return all(isinstance(v, str) for v in value) or all(map(_is_ids, value))


def _is_stop(value: Any) -> bool:
  stops = [value] if isinstance(value, str) else value
  return (
    isinstance(stops, list)
    and len(stops) <= _MOST_STOPS
    and all(isinstance(x, str) and 0 < len(x) <= _LONGEST_STOP for x in stops)
  )


def _is_stream_options(value: Any) -> bool:
  """false asks for nothing, as null does."""
  return isinstance(value, dict) and all(
    not option or (name, option) == ('include_usage', True)
    for name, option in value.items()
  )


_TEXT = _Field('a text', lambda value: isinstance(value, str))
_SWITCH = _Field('true or false', lambda value: type(value) is bool, False)


def _fields(longest: int, outputs: int) -> dict[str, _Field]:
  """The fields of a request for completions.

  Args:
    longest: tokens of an output at most.
    outputs: outputs at most.
  """
  return {
    **{name: _TEXT for name in ('model', *_LABELS, *_LANGUAGES)},
    **{
      name: _one_of(values, ', or nothing: it is not supported')
      for name, values in _NEUTRAL.items()
    },
    'prompt': _Field(
      'a text, a list of texts, ids, or a list of lists of ids', _is_prompt
    ),
    'n': _whole(1, 1, outputs),
    'best_of': _whole(None, 1, outputs),
    'max_tokens': _whole(min(_MAX_TOKENS, longest), 0, longest),
    'min_tokens': _whole(0, 0, longest),
    'temperature': _Field(
      'a number from 0 to 100', lambda x: _is_number(x) and 0 <= x <= 100, 1
    ),
    'top_p': _Field(
      'a number above 0, and 1 at most',
      lambda x: _is_number(x) and 0 < x <= 1,
      1,
    ),
    'top_k': _whole(0, -1, (1 << 31) - 1),
    'seed': _whole(None, -(1 << 63), (1 << 64) - 1),
    'stop': _Field(
      f'a text, or up to {_MOST_STOPS}, each of 1 to {_LONGEST_STOP}'
      ' characters',
      _is_stop,
      [],
    ),
    'stream_options': _Field('{"include_usage": true}', _is_stream_options, {}),
    'logprobs': _whole(None, 0, _MOST_TOP),
    'speculative': _SWITCH._replace(default=True),
    'stream': _SWITCH,
    'echo': _SWITCH,
    'ignore_eos': _SWITCH,
    'use_beam_search': _SWITCH,
    'return_token_ids': _SWITCH,
    'return_rounds': _SWITCH,
  }


def _chat_fields(longest: int) -> dict[str, _Field]:
  """The fields of a chat that completions do not have, or differently."""
  return {
    **{
      name: _one_of(values, ' in a chat')
      for name, values in _NEUTRAL_IN_A_CHAT.items()
    },
    'messages': _Field(
      'a list of {"role": "user", "content": "..."}',
      lambda value: isinstance(value, list) and bool(value),
    ),
    'max_tokens': _whole(longest, 1, longest),
    'max_completion_tokens': _whole(None, 1, longest),
    'logprobs': _SWITCH,
    'top_logprobs': _whole(0, 0, _MOST_TOP),
  }


def _wrong(name: str, expected: str, value: Any) -> ApiError:
  return ApiError(f'{name}: expected {expected}; got {_short(value)}.', name)


def _checked(
  body: Mapping[str, Any], fields: Mapping[str, _Field]
) -> dict[str, Any]:
  """The value of each field, given or not.

  Raises:
    ApiError: a field is unknown or has a wrong value.
  """
  for name in body:
    if name not in fields:
      raise ApiError(
        f'There is no field {_short(name)}.'
        f'{nearest(name[:64], fields)} Leave it out.',
        name[:64],
      )
  values = {}
  for name, field in fields.items():
    value = body.get(name)
    # Clients in other languages write 5.0.
    if isinstance(value, float) and value.is_integer():
      value = int(value)
    if value is not None and not field.is_right(value):
      raise _wrong(name, field.expected, value)
    values[name] = field.default if value is None else value
  return values


def parse_json(data: bytes) -> dict[str, Any]:
  """The object that a body holds, without its fields that are null.

  Raises:
    ApiError: it holds none.
  """

  def refuse(name: str) -> None:
    raise ValueError(f'{name} is no number of JSON')

  try:
    body = json.loads(data.decode('utf-8'), parse_constant=refuse)
    if b'\\u' in data:  # half of a character is no text
      json.dumps(body, ensure_ascii=False).encode('utf-8')
  except RecursionError:
    raise ApiError('The body is nested too deeply for JSON.') from None
  except ValueError as error:
    # json's own errors may repeat the body.
    raise ApiError(
      f'The body is not JSON in UTF-8: {str(error)[:200]}.'
    ) from None
  if not isinstance(body, dict):
    raise ApiError(
      f'Expected a JSON object such as {{"prompt": "..."}}, got {_short(body)}.'
    )
  return {name: value for name, value in body.items() if value is not None}


def check_model(given: str, name: str) -> None:
  """Raises ApiError unless a request names the model that is served."""
  if given != name:
    raise ApiError(
      f'There is no model {_short(given)} here, only {name!r}.',
      'model',
      404,
      'model_not_found',
    )


def parse(
  body: Mapping[str, Any],
  engine: Engine,
  settings: ServeSettings,
  model: str,
  template: ChatTemplate | None = None,
) -> CompletionRequest:
  """Checks a request for completions or, with a template, of a chat.

  Raises:
    ApiError: a field is wrong or unknown.
  """
  longest, outputs = engine.max_decode_len, settings.most_outputs
  fields = _fields(longest, outputs)
  if template is not None:
    fields |= _chat_fields(longest)
  value = types.SimpleNamespace(**_checked(body, fields))
  check_model(value.model or model, model)
  if template is not None:
    if value.messages is None:
      raise _wrong('messages', fields['messages'].expected, None)
    value.prompt = [_chat_ids(template, value.messages)]
    value.max_tokens = value.max_completion_tokens or value.max_tokens
    value.logprobs = value.top_logprobs if value.logprobs else None
  elif isinstance(value.prompt, str) or _is_ids(value.prompt):
    value.prompt = [value.prompt]
  value.include_usage = any(value.stream_options.values())
  _check_together(body, value, engine, settings)
  languages = _languages(value, engine)
  stops = [value.stop] if isinstance(value.stop, str) else value.stop
  options: dict[str, Any] = {
    'temperature': float(value.temperature),
    'top_k': max(0, value.top_k),
    'top_p': float(value.top_p),
    'max_length': value.max_tokens,
    'min_length': value.min_tokens,
    'stop_strings': tuple(stops),
    'seed': secrets.randbits(32) if value.seed is None else value.seed,
    'log_probs': value.logprobs is not None,
  }
  if value.ignore_eos:
    options['stop_ids'] = ()
  if value.use_beam_search:
    options = {'max_length': value.max_tokens}
    options |= {'num_beams': value.n, 'num_samples': value.n}
  language = languages.get('source_lang')
  return CompletionRequest(
    prompts=value.prompt,
    prompt_ids=[_ids(engine, *x, language) for x in enumerate(value.prompt)],
    n=value.n,
    options=options | languages,
    searches=value.use_beam_search,
    stream=value.stream,
    include_usage=value.include_usage,
    log_probs=value.logprobs,
    echo=value.echo or False,
    return_token_ids=value.return_token_ids,
    return_rounds=value.return_rounds,
    plain=not value.speculative,
    chat=template is not None,
  )


def _check_together(
  body: Mapping[str, Any],
  value: types.SimpleNamespace,
  engine: Engine,
  settings: ServeSettings,
) -> None:
  """Raises ApiError for a field that does not go together with another."""
  n, most, outputs = value.n, value.max_tokens, settings.most_outputs
  count, echo, stream = len(value.prompt or ()), value.echo, value.stream
  search, beams = value.use_beam_search, list(settings.beams)
  scored = value.logprobs is not None
  greedy = not (value.temperature or value.min_tokens or search or scored)
  encodes, longest = engine.target.has_encoder, engine.max_decode_len
  no_top = not getattr(value, 'top_logprobs', 0)
  rules = [
    ('prompt', count, 'a text, a list of texts, or ids'),
    (
      'prompt',
      count * n <= outputs,
      f'{outputs} outputs (prompts * n) at most',
    ),
    ('best_of', value.best_of in (None, n), f'n = {n}: no output is dropped'),
    ('echo', not (echo and encodes), 'false: the model has an encoder'),
    ('max_tokens', most or echo, f'a whole number from 1 to {longest}'),
    ('min_tokens', value.min_tokens <= most, f'a number from 0 to {most}'),
    ('top_logprobs', scored or no_top, '0 unless logprobs is true'),
    ('stream_options', stream or not value.include_usage, 'null or stream'),
    ('return_rounds', stream or not value.return_rounds, 'false or stream'),
    ('use_beam_search', not search or n in beams, f'n among {beams}, not {n}'),
    *(
      (name, body.get(name, only) == only, f'{json.dumps(only)} in a search')
      for name, only in _OF_A_SEARCH.items()
      if search
    ),
    # A sample without a drafter would depend on the traffic.
    (
      'speculative',
      greedy or value.speculative,
      'true unless decoding greedily',
    ),
  ]
  for name, holds, expected in rules:
    if not holds:
      raise _wrong(name, expected, body.get(name))


def _languages(value: types.SimpleNamespace, engine: Engine) -> dict[str, str]:
  """Those that are named, of models that translate between many."""
  named = {name: getattr(value, name) for name in _LANGUAGES}
  given = {name: lang for name, lang in named.items() if lang is not None}
  name = 'target_lang'
  try:
    for name, lang in given.items():
      engine.languages(**{name: lang})
    name = 'target_lang'
    engine.languages(**given).before_output(())
  except ValueError as error:
    raise ApiError(str(error)[:500], name) from error
  return given


def _chat_ids(template: ChatTemplate, messages: Sequence[Any]) -> list[int]:
  """The ids of a chat, whose parts of a content become one text."""
  checked = []
  for number, message in enumerate(messages):
    fields = message if isinstance(message, dict) else {}
    fields = {k: v for k, v in fields.items() if v not in (None, [])}
    role = fields.get('role')
    # A model that has only called a tool has content nothing.
    content = fields.get('content', '' if role == 'assistant' else None)
    if isinstance(content, list) and all(map(_is_text, content)):
      content = ''.join(part['text'] for part in content)
    if not isinstance(content, str) or not isinstance(role, str):
      raise ApiError(
        'messages: expected {"role": "user", "content": "..."}; got'
        f' {_short(message)} as message {number}. Only text is read: no images,'
        ' sounds or files.',
        'messages',
      )
    if others := set(fields) - {'role', 'content', 'name'}:
      raise ApiError(
        f'messages: message {number} has {_short(min(others))}, which is not'
        ' supported. Leave it out.',
        'messages',
      )
    checked.append({**fields, 'content': content})
  try:
    return template.ids(checked)
  except ValueError as error:
    raise ApiError(str(error)[:500], 'messages') from error


def _ids(
  engine: Engine, index: int, prompt: Any, language: str | None
) -> list[int]:
  """A prompt as the model reads it, which is not too long."""
  size, most = engine.target.vocab_size, engine.max_input_len
  for token in prompt if isinstance(prompt, list) else ():
    if not 0 <= token < size:
      raise ApiError(
        f'prompt {index} holds {_short(token)}, which is outside the'
        f' vocabulary: ids are from 0 to {size - 1}.',
        'prompt',
      )
  try:
    ids = engine.input_ids(prompt, language)
  except ValueError as error:
    raise ApiError(str(error), 'source_lang') from error
  if len(ids) > most:
    raise ApiError(
      f'prompt {index} has {len(ids)} tokens (its end or start included); the'
      f' model reads {most} at most. Shorten it.',
      'prompt',
      code='context_length_exceeded',
    )
  return ids


def _is_text(part: Any) -> bool:
  """Whether a part of a message's content is a text."""
  return (
    isinstance(part, dict)
    and part.get('type') == 'text'
    and isinstance(part.get('text'), str)
  )


def _short(value: Any) -> str:
  """A value for a message, whatever a client has sent."""
  if isinstance(value, int) and abs(value) >= 1 << 64:
    return 'a huge number'
  if isinstance(value, str):
    value = value[:80]
  elif isinstance(value, list | dict):
    return (
      f'{"a list" if isinstance(value, list) else "an object"} of {len(value)}'
    )
  return json.dumps(value)[:100]
