"""OpenAI's completions: what a request may say.

The fields of `CompletionRequest` are those of a body, in OpenAI's and vLLM's
words. All are checked before anything is queued; a wrong one is answered by
OpenAI's error object, which names it.
"""

import contextlib
import dataclasses
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from specdec_jax.checks.fields import (
  Bound,
  check_type,
  is_a,
  nearest,
  shortened,
  unexpected,
)
from specdec_jax.engine.classification import MOST_NODES
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.request import example_id
from specdec_jax.serving.settings import ServeSettings
from specdec_jax.text.chat import ChatTemplate

_MAX_TOKENS = 16  # OpenAI's default
_MOST_STOPS, _LONGEST_STOP = 16, 256
# Each has a beginning of its own.
_Labels = Annotated[list[str] | list[list[int]], Bound(1, MOST_NODES)]
_MOST_TOP = 20  # log-probabilities of a place
_ID = re.compile(r'[0-9]{1,9}', re.ASCII)

# Fields of OpenAI and vLLM that are not supported. Those of the first kind may
# be there if they are empty, zero or false, the others with these values.
_EMPTY = set(
  'suffix stop_token_ids include_stop_str_in_output'
  ' return_tokens_as_token_ids tools functions store metadata priority'
  ' prompt_cache_options vllm_xargs documents continue_final_message'
  ' chat_template_kwargs guided_grammar guided_whitespace_pattern'.split()
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  'length_penalty': (1,),
  'skip_special_tokens': (True,), 'spaces_between_special_tokens': (True,),
  'tool_choice': ('none', 'auto'), 'function_call': ('none', 'auto'),
  'parallel_tool_calls': (True, False),
  'modalities': (['text'],), 'reasoning_effort': ('none',),
  'include_reasoning': (True,), 'verbosity': ('medium',),
  'prompt_cache_retention': ('in_memory',), 'service_tier': ('auto', 'default'),
  'add_generation_prompt': (True,), 'guided_decoding_backend': ('auto',),
  'add_special_tokens': (True, False),
}  # fmt: skip
# The only values in a beam search.
_OF_A_SEARCH = {
  'temperature': 0, 'top_p': 1, 'top_k': 0, 'min_p': 0, 'stop': [],
  'min_tokens': 0,
  'ignore_eos': False, 'stream': False, 'speculative': True,
}  # fmt: skip
# The only values with `split`, whose answer is put together at its end.
_OF_A_SPLIT = {'stream': False, 'echo': False, 'logprobs': None}
# Rules on tokens that have the names of `Options`.
_RULES = (
  'presence_penalty', 'frequency_penalty', 'repetition_penalty',
  'no_repeat_ngram_size', 'bad_words', 'allowed_token_ids', 'json_blanks',
)  # fmt: skip
# vLLM's words of `structured_outputs`, and behind 'guided_' -> the options.
_STRUCTURED = {'choice': 'choices', 'regex': 'regex', 'json': 'json_schema'}
_ANY_OBJECT = {'type': 'object'}

# Status of HTTP -> OpenAI's type of the error.
_KINDS = {
  401: 'authentication_error',
  429: 'rate_limit_error',
  504: 'timeout_error',
}


class ApiError(Exception):
  """A request that is not answered, or not to its end.

  Attributes:
    status: of HTTP.
    body: OpenAI's error object.
  """

  def __init__(
    self,
    message: str,
    param: str | None = None,
    status: int = 400,
    code: str | None = None,
  ):
    """
    Args:
      message: what is wrong.
      param: the field that is wrong, if it is one.
      status: of HTTP.
      code: OpenAI's word for the error, if it has one.
    """
    super().__init__(message)
    self.status = status
    kind = 'server_error' if status >= 500 else 'invalid_request_error'
    kind = _KINDS.get(status, kind)
    error = {'message': message, 'type': kind, 'param': param, 'code': code}
    self.body: dict[str, Any] = {'error': error}


@dataclasses.dataclass(kw_only=True)
class CompletionRequest:
  """A request for completions or for the next message of a chat.

  The names are those of the fields; docs/serve.md describes them.

  Attributes:
    is_chat: whether the answer is a message of a chat.
    prompts: texts, or ids.
    prompt_ids: the ids of each as the model reads them.
  """

  prompt: Any = None
  messages: Any = None
  model: str | None = None
  n: int = 1
  best_of: int | None = None
  max_tokens: int = _MAX_TOKENS
  max_completion_tokens: int | None = None
  min_tokens: int = 0
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  min_p: float = 0.0
  logit_bias: Mapping[str, float] = dataclasses.field(default_factory=dict)
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  repetition_penalty: float = 1.0
  no_repeat_ngram_size: int = 0
  bad_words: list[str] = dataclasses.field(default_factory=list)
  allowed_token_ids: list[int] | None = None
  structured_outputs: Mapping[str, Any] = dataclasses.field(
    default_factory=dict
  )
  response_format: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  guided_choice: list[str] | None = None
  guided_regex: str | None = None
  guided_json: Mapping[str, Any] | str | None = None
  json_blanks: str = 'one'
  seed: int | None = None
  stop: str | list[str] = dataclasses.field(default_factory=list)
  stream: bool = False
  stream_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  logprobs: int | bool | None = None
  top_logprobs: int = 0
  echo: bool = False
  ignore_eos: bool = False
  use_beam_search: bool = False
  speculative: bool = True
  return_rounds: bool = False
  return_token_ids: bool = False
  source_lang: str | None = None
  target_lang: str | None = None
  split: str | None = None
  split_lang: str | None = None
  split_prefix: str = ''
  user: str | None = None
  safety_identifier: str | None = None
  prompt_cache_key: str | None = None
  session_id: str | None = None

  is_chat: bool = dataclasses.field(default=False, init=False)
  prompts: Sequence[Any] = dataclasses.field(default=(), init=False)
  prompt_ids: list[list[int]] = dataclasses.field(
    default_factory=list, init=False
  )

  @property
  def num_top(self) -> int | None:
    """Likeliest tokens of each place that are wanted.

    None: not even the log-probability of the token that was chosen.
    """
    if self.is_chat:
      return self.top_logprobs if self.logprobs else None
    return self.logprobs

  @property
  def is_scored(self) -> bool:
    """Whether log-probabilities are wanted that decoding does not give."""
    if self.num_top is None:
      return False
    # Of a greedy output the token that was chosen is the likeliest one.
    greedy = not self.temperature and not self.min_tokens
    return self.echo or self.num_top > int(greedy and not self.use_beam_search)

  @property
  def include_usage(self) -> bool:
    """Whether a stream ends with the counts of tokens."""
    return any(self.stream_options.values())

  def rules(self) -> dict[str, Any]:
    """Rules on tokens, of `Engine.generate`; those that a body asks for.

    Raises:
      ValueError: one is in no form that is known.
    """
    rules: dict[str, Any] = {}
    for name in _RULES:
      if (value := getattr(self, name)) != getattr(CompletionRequest, name, []):
        rules[name] = value
    if self.logit_bias:
      if not all(map(_ID.fullmatch, self.logit_bias)):
        raise unexpected('logit_bias', 'ids -> numbers', self.logit_bias)
      rules['logit_bias'] = {int(i): b for i, b in self.logit_bias.items()}
    return rules | self.constraint[1]

  @property
  def constraint(self) -> tuple[str, dict[str, Any]]:
    """The field that says what an output is, and its option; '' if none does.

    Raises:
      ValueError: two fields say it, or one in no form that is known.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    for word, option in _STRUCTURED.items():
      if (value := getattr(self, f'guided_{word}')) is not None:
        found.append((f'guided_{word}', {option: value}))
    for name, value in self.structured_outputs.items():
      if name not in {*_STRUCTURED, 'json_object'} and value:
        expected = f'one of {[*_STRUCTURED, "json_object"]}'
        raise unexpected('structured_outputs', expected, {name: value})
      if name == 'json_object' and value:
        found.append(('structured_outputs', {'json_schema': _ANY_OBJECT}))
      elif name in _STRUCTURED and value is not None:
        found.append(('structured_outputs', {_STRUCTURED[name]: value}))
    form: Any = self.response_format
    schema = form.get('schema') or _ANY_OBJECT
    match form.get('type', 'text'):
      case 'text':
        pass
      case 'json_object':
        found.append(('response_format', {'json_schema': schema}))
      case 'json_schema' if 'schema' in (form.get('json_schema') or ()):
        schema = form['json_schema']['schema']
        found.append(('response_format', {'json_schema': schema}))
      case _:
        expected = 'text, json_object, or json_schema with a schema'
        raise unexpected('response_format', expected, form)
    if len(found) > 1:
      expected = f'nothing beside {found[0][0]}'
      raise unexpected(found[1][0], expected, found[1][1])
    return found[0] if found else ('', {})

  def of_each(self) -> list[tuple[int, dict[str, Any]]]:
    """Index of the prompt and `Engine.generate`'s options of each row.

    A row is an output, or a beam search with n of them. The random numbers are
    those of `Engine.generate` for the same prompts, seed and `num_samples`.
    """
    options: dict[str, Any] = {
      'source_lang': self.source_lang,
      'target_lang': self.target_lang,
      'split': self.split,
      'split_lang': self.split_lang,
      'split_prefix': self.split_prefix,
      'max_length': max(1, self.max_tokens),
      **self.rules(),
    }
    indices = range(len(self.prompts))
    if self.use_beam_search:
      options |= {'num_beams': self.n, 'num_samples': self.n}
      return [(index, options) for index in indices]
    options |= {
      'temperature': float(self.temperature),
      'top_k': max(0, self.top_k),
      'top_p': float(self.top_p),
      'min_p': float(self.min_p),
      'min_length': self.min_tokens,
      'stop_strings': self.stop,
      'stop_ids': () if self.ignore_eos else None,
      'seed': secrets.randbits(32) if self.seed is None else self.seed,
      'log_probs': self.num_top is not None,
    }
    return [
      (index, {**options, 'example_ids': [example_id(index, sample)]})
      for index in indices
      for sample in range(self.n)
    ]


_TYPES: dict[str, Any] = {
  field.name: field.type
  for field in dataclasses.fields(CompletionRequest)
  if field.init
}
_KNOWN = {*_TYPES, *_EMPTY, *_NEUTRAL}


@contextlib.contextmanager
def naming_the_field(
  otherwise: str = 'prompt', constraint: str = ''
) -> Iterator[None]:
  """Inside, a ValueError becomes an ApiError; it begins with the field.

  Args:
    otherwise: the field, where it begins with none.
    constraint: the field that says what an output is.
  """
  try:
    yield
  except ValueError as error:
    message = str(error)[:500]
    name, *_ = re.split(r'\W', message)
    if name in _STRUCTURED.values():
      name = constraint
    name = 'ignore_eos' if name == 'stop_ids' else name
    raise ApiError(message, name if name in _KNOWN else otherwise) from error


def _parse_json(data: bytes) -> dict[str, Any]:
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
  except (RecursionError, ValueError) as error:
    # json's own errors may repeat the body.
    message = f'The body is not JSON in UTF-8: {str(error)[:200]}.'
    raise ApiError(message) from None
  if not isinstance(body, dict):
    raise ApiError('Expected a JSON object such as {"prompt": "..."}.')
  return {name: value for name, value in body.items() if value is not None}


def check_model(asked_for: str, name: str) -> None:
  """Raises ApiError unless a request names the model that is served."""
  if asked_for != name:
    message = f'There is no model {shortened(asked_for)} here, only {name!r}.'
    raise ApiError(message, 'model', 404, 'model_not_found')


def parse(
  data: bytes,
  engine: Engine,
  settings: ServeSettings,
  model: str,
  template: ChatTemplate | None = None,
) -> CompletionRequest:
  """Reads a body that asks for completions or, with a template, of a chat.

  Raises:
    ApiError: a field is wrong or unknown.
  """
  body = _parse_json(data)
  with naming_the_field('messages' if template else 'prompt'):
    request = CompletionRequest(**_checked(body))
    request.is_chat = template is not None
    check_model(request.model or model, model)
    longest = engine.max_decode_len
    if 'max_tokens' not in body:
      given = longest if template or request.split else _MAX_TOKENS
      request.max_tokens = min(given, longest)
    if request.max_completion_tokens is not None:
      request.max_tokens = request.max_completion_tokens
    if isinstance(request.stop, str):
      request.stop = [request.stop]
    if template is not None:
      request.prompts = [_chat_ids(template, request.messages)]
    else:
      request.prompts = _prompts(request.prompt)
    _check(body, request, engine, settings)
    request.prompt_ids = [
      engine.input_ids(prompt, request.source_lang)
      for prompt in request.prompts
    ]
  most = engine.max_input_len
  for index, ids in enumerate(request.prompt_ids):
    if len(ids) > most and not request.split:
      raise ApiError(
        f'prompt {index} has {len(ids)} tokens (its end or start included); the'
        f' model reads {most} at most. Shorten it.',
        'prompt',
        code='context_length_exceeded',
      )
  return request


def parse_labels(
  data: bytes, model: str, settings: ServeSettings
) -> tuple[Sequence[Any], Sequence[Any]]:
  """The texts and the labels of a body that asks to classify.

  Raises:
    ApiError: a field is wrong or unknown.
  """
  body = _parse_json(data)
  with naming_the_field('input'):
    unknown = body.keys() - {'model', 'input', 'labels'}
    if unknown:
      raise unexpected('input', 'model, input and labels', min(unknown))
    check_model(body.get('model', model), model)
    check_type('labels', body.get('labels'), _Labels)
    texts = _prompts(body.get('input'))
    if not 1 <= len(texts) <= settings.max_outputs:
      expected = f'1 to {settings.max_outputs} texts, or ids of each'
      raise unexpected('input', expected, body.get('input'))
  return texts, body['labels']


def _checked(body: Mapping[str, Any]) -> dict[str, Any]:
  """The values of a body's fields.

  Raises:
    ApiError: a field is unknown.
    ValueError: a value is of another type, or asks for what is not supported.
  """
  values = {}
  for name, value in body.items():
    if isinstance(value, float) and value.is_integer():
      value = int(value)  # clients in other languages write 5.0
    if name in _TYPES:
      check_type(name, value, _TYPES[name])
      values[name] = value
    elif name not in _KNOWN:
      near = nearest(name[:64], _KNOWN, or_all=False)
      message = f'There is no field {shortened(name)}.{near} Leave it out.'
      raise ApiError(message, name[:64])
    elif value not in _NEUTRAL.get(name, ()) and (name in _NEUTRAL or value):
      raise unexpected(name, 'nothing: it is not supported', value)
  return values


def _check(
  body: Mapping[str, Any],
  request: CompletionRequest,
  engine: Engine,
  settings: ServeSettings,
) -> None:
  """Raises ValueError for a field that does not fit, alone or with others."""
  n, count = request.n, len(request.prompts)
  most = min(settings.max_outputs, settings.max_waiting)
  longest, stops = engine.max_decode_len, request.stop
  search, beams = request.use_beam_search, list(settings.beams)
  scores = request.num_top is not None
  sampled = request.temperature or request.min_tokens or search or scores
  kind = bool if request.is_chat else int
  echoes = not (engine.target.has_encoder or request.is_chat)
  searches = f'n among {beams}, not {n}' if beams else 'false without --beams'
  ranges = (
    ('n', 1, most),
    ('best_of', n, n),  # none is dropped
    ('max_completion_tokens', 1, longest),
    ('max_tokens', 0 if request.echo else 1, longest),
    ('min_tokens', 0, request.max_tokens),
    ('temperature', 0, 100),
    ('top_k', -1, (1 << 31) - 1),
    ('seed', -(1 << 63), (1 << 64) - 1),
    ('top_logprobs', 0, _MOST_TOP if request.is_chat and scores else 0),
    ('logprobs', 0, _MOST_TOP),
  )
  rules: list[tuple[str, Any, str]] = [
    *(
      (name, value is None or low <= value <= high, f'{low} to {high}')
      for name, low, high in ranges
      for value in [getattr(request, name)]
    ),
    (
      'add_special_tokens',
      not (body.get('add_special_tokens') and request.is_chat),
      'false in a chat, whose template has them',
    ),
    ('prompt', count, 'a text, ids, or a list of either'),
    ('prompt', count * n <= most, f'{most} outputs (prompts * n) at most'),
    ('prompt', not (request.is_chat and request.prompt), 'none in a chat'),
    ('messages', request.is_chat or not request.messages, 'none but in a chat'),
    ('echo', echoes or not request.echo, 'false here'),
    ('logprobs', type(request.logprobs) in (kind, type(None)), kind.__name__),
    ('return_rounds', request.stream or not request.return_rounds, 'a stream'),
    ('use_beam_search', not search or n in beams, searches),
    # A sample without a drafter would depend on the traffic.
    ('speculative', request.speculative or not sampled, 'true unless greedy'),
    (
      'stop',
      len(stops) <= _MOST_STOPS
      and all(0 < len(stop) <= _LONGEST_STOP for stop in stops),
      f'up to {_MOST_STOPS} texts of 1 to {_LONGEST_STOP} characters',
    ),
    (
      'stream_options',
      all(
        not value or (name, value, request.stream) == ('include_usage', 1, True)
        for name, value in request.stream_options.items()
      ),
      '{"include_usage": true}, of a stream',
    ),
    *(
      (name, body.get(name, only) == only, f'{json.dumps(only)} in a search')
      for name, only in _OF_A_SEARCH.items()
      if search
    ),
    *(
      (name, body.get(name, only) == only, f'{json.dumps(only)} with split')
      for name, only in _OF_A_SPLIT.items()
      if request.split
    ),
    ('split', not (request.is_chat and request.split), 'null in a chat'),
  ]
  for name, holds, expected in rules:
    if not holds:
      raise unexpected(name, expected, body.get(name))
  request.rules()  # they have a form that is known


def _prompts(value: Any) -> Sequence[Any]:
  """The prompts of a field that is one of them or several; none if neither."""
  if isinstance(value, str) or value and is_a(value, list[int]):
    return [value]
  are = is_a(value, list[str]) or is_a(value, list[list[int]]) and all(value)
  return value if are else ()


def _chat_ids(template: ChatTemplate, messages: Any) -> list[int]:
  """The ids of a chat, whose parts of a content become one text.

  Raises:
    ValueError: a message is not one, or the template refuses them.
  """
  if not isinstance(messages, list) or not messages:
    raise unexpected('messages', 'a list of messages', messages)
  checked = []
  for message in messages:
    fields = message if isinstance(message, dict) else {}
    fields = {k: v for k, v in fields.items() if v not in (None, [])}
    role = fields.get('role')
    # A model that has only called a tool has content nothing.
    content = fields.get('content', '' if role == 'assistant' else None)
    if isinstance(content, list) and all(map(_is_text, content)):
      content = ''.join(part['text'] for part in content)
    is_text = isinstance(content, str) and isinstance(role, str)
    if not is_text or set(fields) - {'role', 'content', 'name'}:
      expected = 'texts alone, as {"role": "user", "content": "..."}'
      raise unexpected('messages', expected, message)
    checked.append({**fields, 'content': content})
  return template.ids(checked)


def _is_text(part: Any) -> bool:
  """Whether a part of a message's content is a text."""
  is_text = isinstance(part, dict) and part.get('type') == 'text'
  return is_text and isinstance(part.get('text'), str)
