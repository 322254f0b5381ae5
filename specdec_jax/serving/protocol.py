"""OpenAI's completions: what a request may say.

Each field is checked here, before anything is queued; a wrong one is answered
by OpenAI's error object, which names it.
"""

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax.checks.names import nearest
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.options import example_id
from specdec_jax.serving.settings import ServeSettings
from specdec_jax.text.chat import ChatTemplate

_MAX_TOKENS = 16  # where none are asked for, as OpenAI has it
_MOST_STOPS, _LONGEST_STOP = 16, 256
PACES = ('rounds', 'even')
_LANGUAGES = ('source_lang', 'target_lang')

# Fields of OpenAI's that have no meaning here, and values that ask for nothing.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
  'suffix': ((None, ''), 'the model does not insert text'),
  'logit_bias': ((None, {}), 'logits are not changed'),
  'presence_penalty': ((None, 0), 'tokens are not penalised'),
  'frequency_penalty': ((None, 0), 'tokens are not penalised'),
}


# What a beam search leaves no choice of.
_OF_A_SEARCH = {
  'temperature': 0, 'top_p': 1, 'top_k': 0, 'stop': [], 'min_tokens': 0,
  'ignore_eos': False, 'stream': False, 'speculative': True,
}  # fmt: skip


# Fields of completions that a chat has not, or not with this meaning, and the
# values that ask for nothing.
_NOT_IN_A_CHAT: dict[str, tuple[Any, ...]] = {
  'prompt': (None,),
  'best_of': (None,),
  'echo': (None, False),
  'logprobs': (None, False),
  'top_logprobs': (None, 0),
}


class BadRequest(Exception):
  """A request that cannot be answered.

  Attributes:
    param: the field that is wrong, if it is one.
    status: of HTTP.
    code: OpenAI's, if it has one.
    kind: OpenAI's type of the error.
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
    self.code, self.kind = code, kind

  @property
  def body(self) -> dict[str, Any]:
    """OpenAI's error object."""
    return error_object(str(self), self.kind, self.param, self.code)


def error_object(
  message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
  """An error as OpenAI's clients read it."""
  return {
    'error': {'message': message, 'type': kind, 'param': param, 'code': code}
  }


@dataclasses.dataclass(frozen=True)
class Asked:
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
    pace: how text is sent, one of PACES.
    plain: whether no drafter is wanted, see `Scheduler.row`.
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
  pace: str
  plain: bool
  chat: bool = False

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


def parse_json(data: bytes) -> dict[str, Any]:
  """The object that a body holds.

  Raises:
    BadRequest: it holds none.
  """

  def refuse(name: str) -> None:
    raise ValueError(f'{name} is no number of JSON')

  try:
    body = json.loads(data.decode('utf-8'), parse_constant=refuse)
    if b'\\u' in data:  # half of a character is no text
      json.dumps(body, ensure_ascii=False).encode('utf-8')
  except RecursionError:
    raise BadRequest('The body is nested too deeply for JSON.') from None
  except ValueError as error:
    # json's own errors may repeat the body.
    raise BadRequest(
      f'The body is not JSON in UTF-8: {str(error)[:200]}.'
    ) from None
  if not isinstance(body, dict):
    raise BadRequest(
      f'Expected a JSON object such as {{"prompt": "..."}}, got {_short(body)}.'
    )
  return body


def parse(
  body: Mapping[str, Any], engine: Engine, settings: ServeSettings, model: str
) -> Asked:
  """Checks a request for completions.

  Raises:
    BadRequest: a field is wrong or unknown.
  """
  fields = _Fields(body)
  fields.check_names()
  fields.check_model(model)
  fields.text('user')
  stream = fields.boolean('stream')
  prompts = fields.prompts()
  n = fields.whole('n', 1, 1, settings.most_outputs)
  best_of = fields.whole('best_of', n, 1, settings.most_outputs)
  if best_of != n:
    raise fields.wrong('best_of', f'n = {n}, or nothing: no output is dropped')
  if len(prompts) * n > settings.most_outputs:
    raise fields.wrong(
      'prompt',
      f'{settings.most_outputs} outputs at most (prompts times n), not'
      f' {len(prompts)} * {n}',
    )
  languages = fields.languages(engine)
  prompt_ids = [
    fields.ids(engine, *one, languages) for one in enumerate(prompts)
  ]
  longest = engine.max_decode_len
  most = fields.whole('max_tokens', min(_MAX_TOKENS, longest), 1, longest)
  least = fields.whole('min_tokens', 0, 0, most)
  temperature = fields.number('temperature', 1.0, 0.0, 100.0)
  top_p = fields.number('top_p', 1.0, 0.0, 1.0)
  if top_p == 0:
    raise fields.wrong('top_p', 'a number above 0, and 1 at most')
  top_k = max(0, fields.whole('top_k', 0, -1, (1 << 31) - 1))
  searches = fields.boolean('use_beam_search')
  # Then the token that was chosen is the likeliest one.
  greedy = temperature == 0 and not least and not searches
  log_probs = body.get('logprobs')
  if log_probs is not None:
    if not greedy and log_probs != 0:
      raise fields.wrong(
        'logprobs',
        '0 or nothing where tokens are drawn, beams are searched or min_tokens'
        ' is set, as then the likeliest token may be another one (1 is for'
        ' temperature 0)',
      )
    log_probs = fields.whole('logprobs', 0, 0, 1)
  seed = fields.whole('seed', secrets.randbits(32), -(1 << 63), (1 << 64) - 1)
  options: dict[str, Any] = {
    'temperature': temperature,
    'top_k': top_k,
    'top_p': top_p,
    'max_length': most,
    'min_length': least,
    'stop_strings': fields.stops(),
    'seed': seed,
    'log_probs': log_probs is not None,
    **languages,
  }
  if fields.boolean('ignore_eos'):
    options['stop_ids'] = ()
  if searches:
    fields.check_search(settings.beams, n)
    options = {'max_length': most, 'num_beams': n, 'num_samples': n}
    options |= languages
  return Asked(
    prompts=prompts,
    prompt_ids=prompt_ids,
    n=n,
    options=options,
    searches=searches,
    stream=stream,
    include_usage=fields.include_usage(stream),
    log_probs=log_probs,
    echo=fields.echo(engine, log_probs),
    return_token_ids=fields.boolean('return_token_ids'),
    return_rounds=fields.return_rounds(stream),
    pace=fields.pace(),
    plain=fields.plain(greedy and log_probs is None),
  )


def parse_chat(
  body: Mapping[str, Any],
  engine: Engine,
  settings: ServeSettings,
  model: str,
  template: ChatTemplate,
) -> Asked:
  """Checks a request for the next message of a chat.

  Raises:
    BadRequest: a field is wrong or unknown.
  """
  fields = _Fields(body)
  for name, values in _NOT_IN_A_CHAT.items():
    if body.get(name) not in values:
      raise fields.wrong(name, f'{json.dumps(values[-1])} in a chat')
  longest = engine.max_decode_len
  most = fields.whole('max_tokens', longest, 1, longest)
  most = fields.whole('max_completion_tokens', most, 1, longest)
  try:
    ids = template.ids(fields.messages(), engine.bos_id)
  except ValueError as error:
    raise BadRequest(str(error)[:500], 'messages') from error
  own = ('messages', 'max_completion_tokens', *_NOT_IN_A_CHAT)
  rest = {name: value for name, value in body.items() if name not in own}
  asked = parse(
    rest | {'prompt': ids, 'max_tokens': most}, engine, settings, model
  )
  return dataclasses.replace(asked, chat=True)


class _Fields:
  """The fields of a body, each with its check."""

  known = {
    'model', 'prompt', 'max_tokens', 'n', 'best_of', 'seed', 'stop', 'stream',
    'stream_options', 'temperature', 'top_p', 'top_k', 'min_tokens', 'logprobs',
    'echo', 'ignore_eos', 'return_token_ids', 'pace', 'user', 'use_beam_search',
    'return_rounds', 'speculative', *_LANGUAGES, *_NEUTRAL,
  }  # fmt: skip

  def __init__(self, body: Mapping[str, Any]):
    self._body = body

  def wrong(self, name: str, expected: str) -> BadRequest:
    """The error for a field."""
    came = _short(self._body.get(name))
    return BadRequest(f'{name}: expected {expected}; got {came}.', name)

  def check_names(self) -> None:
    """Raises BadRequest for a field that has no meaning here."""
    for name, value in self._body.items():
      if name not in self.known:
        raise BadRequest(
          f'There is no field {_short(name)}.'
          f'{nearest(name[:64], self.known)} Leave it out.',
          name[:64],
        )
      values, why = _NEUTRAL.get(name, ((value,), ''))
      if value not in values:
        raise BadRequest(
          f'{name} = {_short(value)} is not supported: {why}. Leave it out.',
          name,
        )

  def check_model(self, name: str) -> None:
    """Raises BadRequest unless the request is for this model, or for none."""
    asked = self.text('model')
    if asked is not None and asked != name:
      raise BadRequest(
        f'There is no model {_short(asked)} here, only {name!r}.',
        'model',
        404,
        'model_not_found',
      )

  def text(self, name: str) -> str | None:
    """A text, or None."""
    value = self._body.get(name)
    if value is not None and not isinstance(value, str):
      raise self.wrong(name, 'a text')
    return value

  def boolean(self, name: str) -> bool:
    """True, or False, which is the default."""
    value = self._body.get(name)
    if not isinstance(value, bool | None):
      raise self.wrong(name, 'true or false')
    return bool(value)

  def whole(self, name: str, default: int, least: int, most: int) -> int:
    """A whole number."""
    value = self._body.get(name)
    if value is None:
      return default
    # Clients in other languages write 5.0.
    if isinstance(value, float) and value.is_integer():
      value = int(value)
    if type(value) is not int or not least <= value <= most:
      raise self.wrong(name, f'a whole number from {least} to {most}')
    return value

  def number(
    self, name: str, default: float, least: float, most: float
  ) -> float:
    """A number."""
    value = self._body.get(name)
    if value is None:
      return default
    ok = isinstance(value, int | float) and not isinstance(value, bool)
    if not ok or not least <= value <= most:
      raise self.wrong(name, f'a number from {least:g} to {most:g}')
    return float(value)

  def languages(self, engine: Engine) -> dict[str, str]:
    """Those that are named, of models that translate between many."""
    named = {name: self.text(name) for name in _LANGUAGES}
    found = {name: one for name, one in named.items() if one is not None}
    for name, one in found.items():
      try:
        engine.languages(**{name: one})
      except ValueError as error:
        raise BadRequest(str(error)[:500], name) from error
    try:
      engine.languages(**found).before_output(())
    except ValueError as error:
      raise BadRequest(str(error), 'target_lang') from error
    return found

  def stops(self) -> tuple[str, ...]:
    """Texts that end an output."""
    value = self._body.get('stop')
    if value is None:
      return ()
    stops = [value] if isinstance(value, str) else value
    if (
      not isinstance(stops, list)
      or len(stops) > _MOST_STOPS
      or not all(
        isinstance(one, str) and 0 < len(one) <= _LONGEST_STOP for one in stops
      )
    ):
      raise self.wrong(
        'stop',
        f'a text, or up to {_MOST_STOPS}, each of 1 to {_LONGEST_STOP}'
        ' characters',
      )
    return tuple(stops)

  def check_search(self, widths: Sequence[int], n: int) -> None:
    """Raises BadRequest unless a beam search can be done as it is asked."""
    if n not in widths:
      served = f'n among {list(widths)}' if widths else 'false: none is served'
      raise self.wrong(
        'use_beam_search', f'{served} (`specdec serve --beams N,N`), n is {n}'
      )
    for name, value in _OF_A_SEARCH.items():
      if self._body.get(name, value) not in (None, value):
        raise self.wrong(name, f'{json.dumps(value)} in a beam search')

  def include_usage(self, stream: bool) -> bool:
    """Of `stream_options`."""
    value = self._body.get('stream_options')
    if value is None:
      return False
    if not stream:
      raise self.wrong('stream_options', 'nothing unless stream is true')
    usage = value.get('include_usage', False) if type(value) is dict else None
    if type(usage) is not bool or set(value) - {'include_usage'}:
      raise self.wrong('stream_options', '{"include_usage": true}')
    return usage

  def echo(self, engine: Engine, log_probs: int | None) -> bool:
    """Whether outputs begin with their prompts."""
    if not self.boolean('echo'):
      return False
    if engine.target.has_encoder:
      raise BadRequest(
        'echo: the model has an encoder, which reads the prompt; the output'
        ' does not go on from it. Leave echo out.',
        'echo',
      )
    if log_probs is not None:
      raise self.wrong('echo', 'false where logprobs is given')
    return True

  def return_rounds(self, stream: bool) -> bool:
    """Whether rounds are wanted."""
    asked = self.boolean('return_rounds')
    if asked and not stream:
      raise self.wrong('return_rounds', 'false unless stream is true')
    return asked

  def plain(self, is_simple: bool) -> bool:
    """Whether no drafter is wanted."""
    self.boolean('speculative')
    plain = self._body.get('speculative') is False
    if plain and not is_simple:
      raise self.wrong(
        'speculative',
        'true unless temperature is 0 and there is neither min_tokens nor'
        ' logprobs: a sample would depend on the traffic',
      )
    return plain

  def pace(self) -> str:
    """How text is sent."""
    pace = self.text('pace') or PACES[0]
    if pace not in PACES:
      raise self.wrong('pace', f'one of {list(PACES)}')
    return pace

  def prompts(self) -> list[Any]:
    """Texts or lists of ids, at least one."""
    value = self._body.get('prompt')
    if isinstance(value, str) or _is_ids(value):
      value = [value]
    if (
      not isinstance(value, list)
      or not value
      or not (
        all(isinstance(v, str) for v in value) or all(map(_is_ids, value))
      )
    ):
      raise self.wrong(
        'prompt', 'a text, a list of texts, ids, or a list of lists of ids'
      )
    return value

  def messages(self) -> list[dict[str, Any]]:
    """Of a chat, at least one; parts of a content become one text."""
    value = self._body.get('messages')
    expected = 'a list of {"role": "user", "content": "..."}'
    if not isinstance(value, list) or not value:
      raise self.wrong('messages', expected)
    found = []
    for number, one in enumerate(value):
      said = one.get('content') if isinstance(one, dict) else None
      if isinstance(said, list) and all(map(_is_text, said)):
        said = ''.join(part['text'] for part in said)
      if not isinstance(said, str) or not isinstance(one.get('role'), str):
        raise BadRequest(
          f'messages: expected {expected}; got {_short(one)} as message'
          f' {number}. Only text is read: no images, sounds or files.',
          'messages',
        )
      if others := set(one) - {'role', 'content', 'name'}:
        raise BadRequest(
          f'messages: message {number} has {_short(sorted(others)[0])}, which'
          ' is not supported. Leave it out.',
          'messages',
        )
      found.append({**one, 'content': said})
    return found

  @staticmethod
  def ids(
    engine: Engine, index: int, prompt: Any, languages: Mapping[str, str]
  ) -> list[int]:
    """A prompt as the model reads it, which is not too long."""
    size, most = engine.target.vocab_size, engine.max_input_len
    for token in prompt if isinstance(prompt, list) else ():
      if not 0 <= token < size:
        raise BadRequest(
          f'prompt {index} holds {_short(token)}, which is outside the'
          f' vocabulary: ids are from 0 to {size - 1}.',
          'prompt',
        )
    try:
      ids = engine.input_ids(prompt, languages.get('source_lang'))
    except ValueError as error:
      raise BadRequest(str(error), 'source_lang') from error
    if len(ids) > most:
      raise BadRequest(
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


def _is_ids(value: Any) -> bool:
  ids = isinstance(value, list) and bool(value)
  return ids and all(type(token) is int for token in value)


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
