"""OpenAI's requests: the fields of a body, and what they may be.

`CompletionRequest` has all fields that a body may have, named as in OpenAI's
API and vLLM. They are checked before anything is queued. A wrong field is
answered with OpenAI's error object, which names the field.
"""

import contextlib
import dataclasses
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from specdec_jax.checks import fields as checks
from specdec_jax.checks.fields import Bound, check_type, is_a, unexpected
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.options import Options
from specdec_jax.engine.scoring import MOST_NODES
from specdec_jax.serving.settings import ServeSettings
from specdec_jax.text.chat import RenderedIds, template_of
from specdec_jax.types import Count, Positive

Prompt = str | list[int]

_MAX_TOKENS, _TEMPERATURE = 16, 1.0  # OpenAI's defaults
_Stop = Annotated[str, Bound(1, 256)]
# Each label ends at a node of its own in the tree of labels, whose size is
# limited.
_Labels = Annotated[list[str] | list[list[int]], Bound(1, MOST_NODES)]
_NumTop = Annotated[int, Bound(0, 20)]  # likeliest tokens per position
_Object = Mapping[str, Any]
_ID = re.compile(r'[0-9]{1,9}', re.ASCII)

# Field of OpenAI or vLLM that is not supported -> the values that are accepted,
# because they ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = dict.fromkeys(
  'suffix stop_token_ids include_stop_str_in_output'
  ' return_tokens_as_token_ids tools functions store metadata priority'
  ' prompt_cache_options vllm_xargs documents continue_final_message'
  ' chat_template_kwargs guided_grammar guided_whitespace_pattern'.split(),
  ('', [], {}, False),
) | {
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
# Field -> words for messages, and the only values that other fields may have in
# a request with that field.
_ONLY: dict[str, tuple[str, dict[str, Any]]] = {
  'use_beam_search': ('in a beam search', {
    'temperature': 0, 'top_p': 1, 'top_k': 0, 'min_p': 0, 'min_tokens': 0,
    'stop': [], 'ignore_eos': False, 'stream': False,
  }),
  # The outputs of the sentences are joined only when all are finished.
  'split': ('with split', {'stream': False, 'echo': False, 'logprobs': None}),
  # A chat's template adds the special tokens itself.
  'is_chat': (
    'in a chat', {'echo': False, 'split': None, 'add_special_tokens': False}
  ),
}  # fmt: skip
# Key of vLLM's `structured_outputs`, which is also the KEY of an older field
# `guided_KEY` -> the option of the engine.
_STRUCTURED = {'choice': 'choices', 'regex': 'regex', 'json': 'json_schema'}
_ANY_OBJECT = {'type': 'object'}

# HTTP status -> OpenAI's type of the error.
_KINDS = {401: 'authentication', 429: 'rate_limit', 504: 'timeout'}


class ApiError(Exception):
  """An error that is sent to a client whose request cannot be answered.

  Attributes:
    status: the HTTP status.
    body: OpenAI's error object.
  """

  def __init__(
    self,
    message: str,
    param: str | None = None,
    status: int = 400,
    code: str | None = None,
  ):
    """Makes the error object.

    Args:
      message: says what is wrong.
      param: the field that is wrong; None if no field is.
      status: the HTTP status.
      code: OpenAI's word for the error; None if it has no word.
    """
    super().__init__(message)
    self.status = status
    usual = 'server' if status >= 500 else 'invalid_request'
    kind = f'{_KINDS.get(status, usual)}_error'
    error = {'message': message, 'type': kind, 'param': param, 'code': code}
    self.body: dict[str, Any] = {'error': error}


@dataclasses.dataclass(kw_only=True)
class CompletionRequest:
  """A request for completions or for the next message of a chat.

  Each field that a body may have stands here once, with its type, bounds and
  default; None leaves the value to the engine. docs/serve.md explains the
  fields.

  Attributes:
    is_chat: whether the answer is a message of a chat.
    max_length: the most tokens of an output.
    prompts: texts, or ids, as the client gave them.
    prompt_ids: the ids of each prompt, as the model reads them.
    inputs: each prompt as it is passed to the engine: as ids, or unchanged if
      it is empty.
  """

  prompt: Any = None
  messages: Any = None
  model: str | None = None
  source_lang: str | None = None
  target_lang: str | None = None
  split: Literal['sentences'] | None = None
  split_lang: str | None = None
  split_prefix: str | None = None

  n: Positive = 1
  best_of: int | None = None
  max_tokens: Count | None = None
  max_completion_tokens: Positive | None = None
  min_tokens: Count = 0
  stop: _Stop | Annotated[list[_Stop], Bound(0, 16)] | None = None
  ignore_eos: bool = False

  temperature: Annotated[float, Bound(0, 100)] | None = None
  top_p: float | None = None
  top_k: Annotated[int, Bound(-1, (1 << 31) - 1)] = 0
  min_p: float | None = None
  seed: Annotated[int, Bound(-(1 << 63), (1 << 64) - 1)] | None = None
  use_beam_search: bool = False
  speculative: bool = True

  logit_bias: Mapping[str, float] | None = None
  presence_penalty: float | None = None
  frequency_penalty: float | None = None
  repetition_penalty: float | None = None
  no_repeat_ngram_size: int | None = None
  bad_words: list[str] | None = None
  allowed_token_ids: Annotated[list[int], Bound(1)] | None = None
  structured_outputs: _Object | None = None
  response_format: _Object | None = None
  guided_choice: list[str] | None = None
  guided_regex: str | None = None
  guided_json: _Object | str | None = None
  json_blanks: str | None = None

  stream: bool = False
  stream_options: _Object | None = None
  logprobs: _NumTop | bool | None = None
  top_logprobs: _NumTop = 0
  echo: bool = False
  return_rounds: bool = False
  return_token_ids: bool = False

  user: str | None = None
  safety_identifier: str | None = None
  prompt_cache_key: str | None = None
  session_id: str | None = None

  is_chat: bool = dataclasses.field(default=False, init=False)
  max_length: int = dataclasses.field(default=0, init=False)
  prompts: Sequence[Prompt] = dataclasses.field(default=(), init=False)
  prompt_ids: Sequence[list[int]] = dataclasses.field(default=(), init=False)
  inputs: Sequence[Prompt] = dataclasses.field(default=(), init=False)

  @property
  def num_top(self) -> int | None:
    """How many of the likeliest tokens the client wants at each position.

    0: only the log-probability of the chosen token; None: no log-probabilities.
    """
    if self.is_chat:
      return self.top_logprobs if self.logprobs else None
    return self.logprobs

  @property
  def is_greedy(self) -> bool:
    """Whether each output token is the likeliest one at its position."""
    draws = self.temperature != 0
    return not (draws or self.min_tokens or self.use_beam_search)

  @property
  def is_scored(self) -> bool:
    """Whether the client wants log-probabilities that decoding lacks."""
    if self.num_top is None:
      return False
    # In a greedy output the chosen token is the likeliest one.
    return self.echo or self.num_top > int(self.is_greedy)

  @property
  def constraint(self) -> tuple[str, dict[str, Any]]:
    """The field that constrains whole outputs, and the engine's option for it.

    Without such a field they are '' and {}.

    Raises:
      ValueError: two fields constrain outputs, or one has an unknown form.
    """
    constraints: dict[str, _Object] = {
      **{f'guided_{x}': {x: getattr(self, f'guided_{x}')} for x in _STRUCTURED},
      'structured_outputs': self.structured_outputs or {},
      'response_format': {'json': self._schema()},
    }
    options = []
    for field, words in constraints.items():
      for word, value in words.items():
        if word == 'json_object':
          check_type(field, value, bool | None)
          word, value = 'json', _ANY_OBJECT if value else None
        if word in _STRUCTURED and value is not None:
          options.append((field, {_STRUCTURED[word]: value}))
        elif value:
          expected = f'one of {[*_STRUCTURED, "json_object"]}'
          raise unexpected(field, expected, {word: value})
    if len(options) > 1:
      (first, option), (second, other) = options[:2]
      expected = f'no constraint beside {[*option][0]} of {first}'
      raise unexpected(second, expected, other)
    return options[0] if options else ('', {})

  def _schema(self) -> Any:
    """Returns the JSON schema of `response_format`; None if it has none."""
    form = self.response_format or {'type': 'text'}
    given = {name for name, value in form.items() if value is not None}
    match form:
      case {'type': 'text'} if given == {'type'}:
        return None
      case {'type': 'json_object'} if given <= {'type', 'schema'}:
        return form.get('schema') or _ANY_OBJECT
      case {'type': 'json_schema', 'json_schema': {'schema': schema}}:
        if schema is not None:
          return schema
    expected = 'text, json_object, or json_schema with a schema'
    raise unexpected('response_format', expected, form)

  def options(self) -> dict[str, Any]:
    """Returns the options of `Engine.generate` for all prompts.

    Without a seed each call draws one.

    Raises:
      ValueError: a field has an unknown form.
    """
    names = (x.name for x in dataclasses.fields(Options) if x.name in _TYPES)
    values = {name: getattr(self, name) for name in names}
    options = {x: y for x, y in values.items() if y not in (None, [])}
    if self.logit_bias is not None:
      if not all(map(_ID.fullmatch, self.logit_bias)):
        raise unexpected('logit_bias', 'ids -> numbers', self.logit_bias)
      bias = {int(i): bias for i, bias in self.logit_bias.items()}
      options['logit_bias'] = bias or None
    options |= self.constraint[1]
    options |= {'max_length': max(1, self.max_length), 'num_samples': self.n}
    if self.use_beam_search:
      return options | {'num_beams': self.n}
    stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
    drawn = {'temperature': _TEMPERATURE, 'seed': secrets.randbits(32)}
    return {**drawn, **options} | {
      'top_k': max(0, self.top_k),
      'min_length': self.min_tokens,
      'stop_strings': stops,
      'stop_ids': () if self.ignore_eos else None,
      'log_probs': self.num_top is not None,
    }


_FIELDS = dataclasses.fields(CompletionRequest)
_TYPES: dict[str, Any] = {x.name: x.type for x in _FIELDS if x.init}
_KNOWN = {*_TYPES, *_NEUTRAL}


@contextlib.contextmanager
def naming_the_field(
  otherwise: str = 'prompt', constraint: str = ''
) -> Iterator[None]:
  """Turns a ValueError, which begins with the wrong field, into an ApiError.

  Args:
    otherwise: the field to name if the error begins with none.
    constraint: the request's field that constrains whole outputs. The error
      names this field in place of the engine's option.
  """
  try:
    yield
  except ValueError as error:
    message = str(error)[:500]
    name, *_ = re.split(r'\W', message)
    if constraint and name in _STRUCTURED.values():
      message, name = message.replace(name, constraint, 1), constraint
    raise ApiError(message, name if name in _KNOWN else otherwise) from error


class Parser:
  """Reads the bodies of requests for one model."""

  def __init__(self, engine: Engine, settings: ServeSettings, model: str):
    """Keeps the arguments, and looks for the model's chat template.

    Args:
      engine: decodes the requests.
      settings: the limits of a request.
      model: the name by which requests call the model.
    """
    self._engine, self._settings, self._model = engine, settings, model
    self._template, why = None, 'it has no chat template. Use /v1/completions.'
    try:
      self._template = template_of(engine.tokenizer)
    except ValueError as error:  # completions need no template
      why = str(error)
    self._no_chat = f'{model!r} cannot answer a chat: {why}'

  def check_model(self, name: str) -> None:
    """Raises ApiError unless a request names the model that is served."""
    if name != self._model:
      shown = checks.shortened(name)
      message = f'There is no model {shown} here, only {self._model!r}.'
      raise ApiError(message, 'model', 404, 'model_not_found')

  def completion(self, data: bytes, is_chat: bool = False) -> CompletionRequest:
    """Reads a body that asks for completions, or for a message of a chat.

    Raises:
      ApiError: a field is wrong or unknown, or there is no chat template.
    """
    if is_chat and self._template is None:
      raise ApiError(self._no_chat)
    body, engine = _parse_json(data), self._engine
    with naming_the_field('messages' if is_chat else 'prompt'):
      request = CompletionRequest(**_checked(body))
      request.is_chat = is_chat
      self.check_model(request.model or self._model)
      longest = engine.config.max_decode_len
      usual = longest if is_chat or request.split else min(_MAX_TOKENS, longest)
      length = request.max_completion_tokens or request.max_tokens
      request.max_length = usual if length is None else length
      request.prompts = _prompts(request.prompt)
      if is_chat:
        request.prompts = [_chat_ids(self._template, request.messages)]
      self._check(body, request)
      pairs = [encoded(engine, x, request.source_lang) for x in request.prompts]
      request.prompt_ids, request.inputs = zip(*pairs, strict=True)
    if not request.split:
      check_lengths(engine, request.prompt_ids)
    return request

  def labels(self, data: bytes) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """Reads the texts and the labels of a body that asks to classify.

    Raises:
      ApiError: a field is wrong or unknown.
    """
    body, limit = _parse_json(data), self._settings.max_outputs
    with naming_the_field('input'):
      unknown = body.keys() - {'model', 'input', 'labels'}
      if unknown:
        raise unexpected('input', 'model, input and labels', min(unknown))
      self.check_model(body.get('model', self._model))
      check_type('labels', body.get('labels'), _Labels)
      texts = _prompts(body.get('input'))
      if not 1 <= len(texts) <= limit:
        expected = f'1 to {limit} texts, or ids of each'
        raise unexpected('input', expected, body.get('input'))
    return texts, body['labels']

  def _check(self, body: _Object, request: CompletionRequest) -> None:
    """Raises ValueError for a value that the model or another field forbids."""

    def check(name: str, holds: Any, expected: str) -> None:
      if not holds:
        raise unexpected(name, expected, body.get(name))

    settings, stream, chat = self._settings, request.stream, request.is_chat
    outputs = min(settings.max_outputs, settings.max_waiting)
    n, count, beams = request.n, len(request.prompts), list(settings.beams)
    check('n', n <= outputs, f'1 to {outputs}')
    check('best_of', request.best_of in (None, n), f'{n}, as n is')
    length, longest = request.max_length, self._engine.config.max_decode_len
    is_new = request.max_completion_tokens is not None  # OpenAI's newer name
    name = 'max_completion_tokens' if is_new else 'max_tokens'
    least = int(not request.echo)
    check(name, least <= length <= longest, f'{least} to {longest}')
    check('min_tokens', request.min_tokens <= length, f'0 to {length}')
    constraint, _ = request.constraint
    has_end = not (constraint and request.ignore_eos)
    check('ignore_eos', has_end, f'false beside {constraint}')
    check('prompt', count, 'a text, ids, or a list of either')
    expected = f'{outputs} outputs (prompts * n) at most'
    check('prompt', count * n <= outputs, expected)
    check('prompt', not (chat and request.prompt), 'none in a chat')
    check('messages', chat or not request.messages, 'none but in a chat')
    echoes = not self._engine.target.has_encoder
    check('echo', echoes or not request.echo, 'false with an encoder')
    kind = bool if chat else int
    check('logprobs', is_a(request.logprobs, kind | None), kind.__name__)
    scores = request.num_top is not None
    has_top = chat and scores or not request.top_logprobs
    check('top_logprobs', has_top, '0 but in a chat with logprobs')
    check('return_rounds', stream or not request.return_rounds, 'a stream')
    expected = f'n among {beams}, not {n}' if beams else 'false without --beams'
    is_served = n in beams or not request.use_beam_search
    check('use_beam_search', is_served, expected)
    # A row is decoded without the drafter only while no other row runs. So a
    # sample would depend on other requests.
    fits = request.speculative or request.is_greedy and not scores
    check('speculative', fits, 'true unless greedy')
    wants = [name for name, on in (request.stream_options or {}).items() if on]
    fits = not wants or stream and wants == ['include_usage']
    check('stream_options', fits, '{"include_usage": true}, of a stream')
    for kind_of, (where, fields) in _ONLY.items():
      for name, only in fields.items() if getattr(request, kind_of) else ():
        fits = body.get(name, only) == only
        check(name, fits, f'{json.dumps(only)} {where}')
    request.options()  # raises if a field has an unknown form


def encoded(
  engine: Engine, prompt: Prompt, source_lang: str | None = None
) -> tuple[list[int], Prompt]:
  """Returns a prompt's ids, and the input that the engine gets for the prompt.

  The input is the ids, so that the engine does not encode a text again. For an
  empty prompt the input is the prompt itself.

  Raises:
    ValueError: a language is unknown or missing, or the prompt has bad ids.
  """
  ids = engine.codec.input_ids(prompt, source_lang)
  first, last = engine.codec.ids_around(prompt)
  num_around = len(first) + len(last) + bool(engine.codec.languages().known)
  if len(ids) <= num_around:
    return ids, prompt
  # The engine drops the end of sequence from given ids, and adds it again. If
  # the vocabulary adds none to texts, the engine would only drop one that the
  # user wrote. `RenderedIds` stay as they are.
  return ids, ids if last else RenderedIds(ids)


def check_lengths(
  engine: Engine, rows: Sequence[Sequence[int]], field: str = 'prompt'
) -> None:
  """Raises ApiError if one of the texts of a field, as ids, is too long."""
  limit = engine.config.max_input_len
  for index, ids in enumerate(rows):
    if len(ids) > limit:
      message = (
        f'{field} {index} has {len(ids)} tokens (its end or start included);'
        f' the model reads {limit} at most. Shorten it.'
      )
      raise ApiError(message, field, code='context_length_exceeded')


def _parse_json(data: bytes) -> dict[str, Any]:
  """Returns the object of a body, without its fields that are null.

  Raises:
    ApiError: the body is not a JSON object.
  """

  def refuse(name: str) -> None:
    raise ValueError(f'{name} is no number of JSON')

  try:
    body = json.loads(data.decode('utf-8'), parse_constant=refuse)
    if b'\\u' in data:  # a lone surrogate is not text
      json.dumps(body, ensure_ascii=False).encode('utf-8')
  except (RecursionError, ValueError) as error:
    # An error of json may quote the body, so it is cut.
    message = f'The body is not JSON in UTF-8: {str(error)[:200]}.'
    raise ApiError(message) from None
  if not isinstance(body, dict):
    raise ApiError('Expected a JSON object such as {"prompt": "..."}.')
  return {name: value for name, value in body.items() if value is not None}


def _checked(body: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the values of a body's fields.

  Raises:
    ApiError: a field is unknown.
    ValueError: a value has the wrong type, or asks for what is not supported.
  """
  values = {}
  for name, value in body.items():
    if isinstance(value, float) and value.is_integer():
      value = int(value)  # clients in other languages write 5.0
    if name in _TYPES:
      check_type(name, value, _TYPES[name])
      values[name] = value
    elif name not in _KNOWN:
      near = checks.nearest(name[:64], _KNOWN, or_all=False)
      message = f'There is no field {checks.shortened(name)}.{near} Omit it.'
      raise ApiError(message, name[:64])
    elif value not in _NEUTRAL[name]:
      raise unexpected(name, 'nothing: it is not supported', value)
  return values


def _prompts(value: Any) -> Sequence[Prompt]:
  """Returns a field's value as a list of prompts; () if it has another form."""
  if isinstance(value, str) or value and is_a(value, list[int]):
    return [value]
  are = is_a(value, list[str]) or is_a(value, list[list[int]]) and all(value)
  return value if are else ()


def _chat_ids(template: Any, messages: Any) -> list[int]:
  """Returns the ids of a chat.

  The text parts of a message's content are joined into one text.

  Raises:
    ValueError: a message has an unknown form, or the template refuses it.
  """
  if not isinstance(messages, list) or not messages:
    raise unexpected('messages', 'a list of messages', messages)
  checked = []
  for message in messages:
    fields = message if isinstance(message, dict) else {}
    fields = {k: v for k, v in fields.items() if v not in (None, [])}
    role = fields.get('role')
    # A model's message without content, such as a call of a tool, is empty.
    content = fields.get('content', '' if role == 'assistant' else None)
    with contextlib.suppress(KeyError, TypeError):  # parts of another form
      if isinstance(content, list) and {x['type'] for x in content} == {'text'}:
        content = ''.join(part['text'] for part in content)
    are_texts = is_a([content, role], list[str])
    if not are_texts or set(fields) - {'role', 'content', 'name'}:
      expected = 'texts alone, as {"role": "user", "content": "..."}'
      raise unexpected('messages', expected, message)
    checked.append({**fields, 'content': content})
  return template.ids(checked)
