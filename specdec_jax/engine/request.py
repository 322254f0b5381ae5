"""What a caller asks of an engine: texts and options in, completions out.

`Options` are checked before anything is compiled. A `TextBatch` makes of texts
and options the `Request` that the loops take, and of what came of it
`Completion`s. `Languages` are tokens before texts and outputs, of models that
translate between many.
"""

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.checks.fields import (
  check_at_least,
  check_choice,
  check_number,
  check_type,
  check_types,
  is_a,
  nearest,
  unexpected,
)
from specdec_jax.decoding import tree_round
from specdec_jax.decoding.fallback import Fallback
from specdec_jax.decoding.state import (
  BLOCK,
  TOKEN,
  VERIFICATIONS,
  BeamSettings,
  Request,
  Rule,
  example_keys,
  new_request,
)
from specdec_jax.drafters.length import ends_nothing, plain_rule
from specdec_jax.engine.completion import (
  Completion,
  Text,
  cut_at_stop_string,
  decode,
  from_generation,
  passed_over,
)
from specdec_jax.engine.padding import (
  SMALLEST_INPUT,
  SMALLEST_PROMPT,
  next_power_of_two,
  padded,
  padded_rows,
  rounded_up,
)
from specdec_jax.models.base import pad_id, start_id
from specdec_jax.probs import SamplingConfig
from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.types import Generation, LengthRule
from specdec_jax.verify import check_lenience

MAX_GAMMA = 256
ON_TOO_LONG = ('error', 'truncate', 'report')
MOST_ROWS = 1 << 16  # that are decoded together, or samples of an example
ADAPTIVE = 'adaptive'  # a draft ends where its drafter is not sure enough
_KEY_BITS = 32  # of the number that an example's random numbers derive from
# Names of these options in other libraries.
_USUAL_NAMES = {
  'max_new_tokens': 'max_length',
  'max_tokens': 'max_length',
  'max_decode_len': 'max_length',
  'min_new_tokens': 'min_length',
  'min_tokens': 'min_length',
  'num_return_sequences': 'num_samples',
  'num_decodes': 'num_samples',
  'n': 'num_samples',
  'stop': 'stop_strings',
  'stop_token_ids': 'stop_ids',
  'beam_size': 'num_beams',
  'beam_width': 'num_beams',
  'brevity_penalty': 'alpha',
  'src_lang': 'source_lang',
  'tgt_lang': 'target_lang',
}
# Names that have no other here, and what to do instead.
_INSTEAD = {
  'sampling': 'give temperature, top_k and top_p by themselves.',
  'do_sample': 'temperature says it; 0 is greedy, anything above samples.',
  'early_stopping': 'a beam search ends as T5X ends it, or with length_penalty'
  ' as transformers does where early_stopping is False.',
}
ALPHA = 0.6  # of T5's papers and of T5X


@dataclasses.dataclass(frozen=True)
class Options:
  """The options of `generate` and `stream`.

  Attributes:
    temperature: 0 is greedy; above it outputs are sampled. One for all texts
      or one for each.
    top_k: samples only from the k likeliest tokens, see `SamplingConfig`; 0 is
      off.
    top_p: samples only from the likeliest tokens that together have this
      probability; 1 is off.
    max_length: the most tokens of an output; None is the engine's maximum.
    min_length: tokens that an output must have before a stop id is allowed, or
      behind which a stop string must end.
    num_samples: outputs per text; they follow one another in the result.
    stop_strings: strings that end an output; they are not part of its text.
    stop_ids: ids that end an output; None is the engine's.
    seed: all random numbers of an example derive from this seed and the
      example's id.
    example_ids: ids of the texts; 0, 1, ... by default. A text's sample depends
      on its id, not on its place in a batch or on its neighbours.
    prompts: ids that the output of each text begins with, after the decoder's
      start token. They are read, not produced, and are not part of the result.
      None is no prompts.
    source_lang: language of the texts, of a model that translates between many,
      such as 'eng_Latn'; None is the engine's.
    target_lang: language of the outputs, such as 'deu_Latn'.
    on_too_long: what happens to an input that is too long: 'error' raises,
      'truncate' keeps its beginning, 'report' gives a completion with an error
      (and does so for ids outside the vocabulary too).
    log_probs: whether log-probabilities are wanted.
    top_log_probs: how many of the likeliest tokens at each place of an output
      are wanted with their log-probabilities; the target reads the output once
      more for them.
    num_beams: a beam search of this width, see `decoding.beams`; None is none.
      `num_samples` outputs come of it, the best one last.
    alpha: of a beam search: T5X's exponent of its brevity penalty, score =
      log_prob / ((5 + tokens) / 6) ** alpha; None is 0.6 unless
      `length_penalty` is given.
    length_penalty: of a beam search as transformers has it: score = log_prob /
      tokens ** length_penalty; below 0 shorter outputs score better.
    draft_beams: beams of the drafter; None is 2 * `num_beams`.
    lenience: below 1 more proposals pass, and the output is lossy. A token may
      come up to 1 / lenience times as often as it should; at temperature 0 a
      token may have only `lenience` times the probability of the best token.
      See `verify`; the plain loop ignores it.
    verification: how sampled drafts are judged: 'token', by the paper's
      Algorithm 1, or 'block', as a whole, which keeps more of them. Both are
      lossless (see `verify_block`). None is 'block', and 'token' where
      `lenience` is below 1. At temperature 0 both are the same.

  Raises:
    ValueError: a value is outside its range.
  """

  temperature: float | Sequence[float] = 0.0
  top_k: int = 0
  top_p: float = 1.0
  max_length: int | None = None
  min_length: int = 0
  num_samples: int = 1
  stop_strings: Sequence[str] = ()
  stop_ids: Sequence[int] | None = None
  seed: int = 0
  example_ids: Sequence[int] | None = None
  prompts: Sequence[Sequence[int]] | None = None
  on_too_long: str = 'error'
  log_probs: bool = True
  top_log_probs: int = 0
  lenience: float = 1.0
  verification: str | None = None
  num_beams: int | None = None
  alpha: float | None = None
  length_penalty: float | None = None
  draft_beams: int | None = None
  source_lang: str | None = None
  target_lang: str | None = None

  def __post_init__(self):
    for name, value in dataclasses.asdict(self.sampling).items():
      object.__setattr__(self, name, value)
    if isinstance(self.stop_strings, str):
      object.__setattr__(self, 'stop_strings', (self.stop_strings,))
    check_lenience(self.lenience)
    check_types(self)
    check_at_least(self, min_length=0, top_log_probs=0, num_samples=1)
    if self.num_samples > MOST_ROWS:
      raise unexpected('num_samples', f'at most {MOST_ROWS}', self.num_samples)
    if self.max_length is not None:
      check_number('max_length', self.max_length, 1)
    check_choice('on_too_long', self.on_too_long, ON_TOO_LONG)
    if '' in self.stop_strings:
      raise unexpected('stop_strings', 'no empty string', self.stop_strings)
    if self.verification is not None:
      check_choice('verification', self.verification, VERIFICATIONS)
    if self.judges_blocks and self.lenience != 1:
      expected = "'token' with a lenience below 1, a rule for single tokens"
      raise unexpected('verification', expected, self.verification)
    self._check_beams()

  @property
  def judges_blocks(self) -> bool:
    """Whether sampled drafts are judged as a whole."""
    if self.verification is None:
      return self.lenience == 1
    return self.verification == BLOCK

  def _check_beams(self) -> None:
    width = self.num_beams
    if width is None:
      for name in ('alpha', 'length_penalty', 'draft_beams'):
        if (value := getattr(self, name)) is not None:
          raise unexpected(name, 'None without num_beams', value)
      return
    check_number('num_beams', width, 1, 'Leave it out to search nothing.')
    if self.alpha is not None:
      check_number('alpha', self.alpha, 0.0)
    if self.draft_beams is not None:
      check_number('draft_beams', self.draft_beams, width)
    rules = (self.alpha, self.length_penalty)
    for name, fits, expected in (
      ('temperature', self.sampling.greedy, '0'),
      ('lenience', self.lenience == 1, '1'),
      ('stop_strings', not self.stop_strings, 'none, but stop_ids,'),
      ('num_samples', self.num_samples <= width, f'at most {width}'),
      ('length_penalty', None in rules, 'None beside alpha'),
    ):
      if not fits:
        expected += f' in a beam search (num_beams = {width})'
        raise unexpected(name, expected, getattr(self, name))

  def beam_settings(self, num_ends: int) -> BeamSettings | None:
    """What the loops are asked for; None without a beam search.

    Args:
      num_ends: how many ids end an output.
    """
    if self.num_beams is None:
      return None
    rule, penalty = Rule.TRANSFORMERS, self.length_penalty
    if penalty is None:
      rule, penalty = Rule.T5X, ALPHA if self.alpha is None else self.alpha
    number: Any = np.float32(penalty)
    return BeamSettings(
      penalty=number,
      width=self.num_beams,
      draft_width=self.draft_beams or 2 * self.num_beams,
      num_ends=num_ends,
      rule=rule,
    )

  @functools.cached_property
  def sampling(self) -> SamplingConfig:
    """Temperature, top-k and top-p."""
    return SamplingConfig(self.temperature, self.top_k, self.top_p)

  def of_samples(self, num_texts: int) -> 'Options':
    """The options for texts that are each repeated `num_samples` times.

    Values that are given per text are repeated with them.

    Raises:
      ValueError: an index and a sample number do not fit into one example id.
    """
    if self.num_samples == 1:
      return self
    times = self.num_samples
    ids = self.example_ids
    changes: dict[str, Any] = {
      'num_samples': 1,
      'example_ids': [
        example_id(index, sample)
        for index in (range(num_texts) if ids is None else ids)
        for sample in range(times)
      ],
    }
    if self.prompts is not None:
      changes['prompts'] = repeated(self.prompts, times)
    if isinstance(self.sampling.temperature, tuple):
      changes['temperature'] = repeated(self.sampling.temperature, times)
    return dataclasses.replace(self, **changes)


def repeated(values: Sequence[Any], times: int) -> list[Any]:
  """Each value `times` times, before the next value: a, a, b, b, ..."""
  return [value for value in values for _ in range(times)]


def example_id(index: int, sample: int) -> int:
  """The id that the random numbers of one sample of one example derive from.

  The bits of `sample` are filled in from the highest bit down, those of `index`
  from the lowest bit up: so all pairs that fit have different ids, and the
  first sample's id does not depend on how many samples there are.

  Raises:
    ValueError: the two do not fit into 32 bits.
  """
  if index.bit_length() + sample.bit_length() > _KEY_BITS:
    expected = f'less than {_KEY_BITS} bits with example {index}'
    advice = 'Ask for fewer samples (gin: NUM_DECODES), or take another seed.'
    raise unexpected('num_samples', expected, sample, advice)
  return index | int(f'{sample:0{_KEY_BITS}b}'[::-1], 2)


def options_of(named: Mapping[str, Any]) -> Options:
  """Makes `Options`; accepts the names that other libraries use as well.

  Raises:
    ValueError: a name is unknown, an option is given twice, or a value is out
      of range.
  """
  defaults = {
    option.name: option.default for option in dataclasses.fields(Options)
  }
  values = {name: named[name] for name in defaults if name in named}
  for name in named.keys() - defaults.keys():
    if name in _INSTEAD:
      raise ValueError(f'{name}: {_INSTEAD[name]}')
    if name not in _USUAL_NAMES:
      raise ValueError(f'There is no option {name!r}.{nearest(name, defaults)}')
    field = _USUAL_NAMES[name]
    if values.get(field, defaults[field]) != defaults[field]:
      raise unexpected(name, f'none beside {field}, its name here', named[name])
    values[field] = named[name]
  return Options(**values)


def as_gamma(value: int | str | LengthRule) -> tuple[int, LengthRule | None]:
  """The most proposals of a round, and the rule that may end a draft earlier.

  Args:
    value: a number of proposals; or 'adaptive', see `length.plain_rule`; or a
      rule, as `Calibration.rule` gives it.

  Raises:
    ValueError: it is none of these.
  """
  if isinstance(value, LengthRule):
    # The loop of a number has less to do.
    return value.most, None if ends_nothing(value) else value
  if not isinstance(value, str):
    check_gamma(value)
    return value, None
  if value != ADAPTIVE:
    raise unexpected('gamma', f'a whole number or {ADAPTIVE!r}', value)
  rule = plain_rule()
  return rule.most, rule


def check_gamma(gamma: int) -> None:
  """Raises ValueError unless a round may have `gamma` proposals.

  Caches and logits grow with gamma, and more than `MAX_GAMMA` gain nothing.
  """
  check_number('gamma', gamma, 0)
  if gamma > MAX_GAMMA:
    raise unexpected('gamma', f'at most {MAX_GAMMA}', gamma)


# Languages of translation models: the vocabulary has a token for each. That of
# the source stands before a text that the encoder reads; that of the target is
# a prompt of the decoder, behind its start token, and no part of the output.

_SHOWN = 3
_ALIKE = 3  # letters


class Languages(NamedTuple):
  """Languages of a call.

  Attributes:
    known: name -> token, of all languages; empty if the model has none.
    source: token of the texts' language; None if it was not said.
    target: token of the outputs' language; None if it was not said.
  """

  known: Mapping[str, int]
  source: int | None
  target: int | None

  def before_text(self, ids: Sequence[int]) -> list[int]:
    """Tokens to put before the ids of a text.

    Raises:
      ValueError: `source_lang` is missing, and the ids do not begin with a
        language.
    """
    return self._before(ids, self.source, 'source_lang', 'the texts')

  def before_output(self, ids: Sequence[int]) -> list[int]:
    """Tokens to put before the ids that an output is to begin with.

    Raises:
      ValueError: `target_lang` is missing, and the ids do not begin with a
        language.
    """
    return self._before(ids, self.target, 'target_lang', 'the outputs')

  def _before(self, ids, token, name, whose) -> list[int]:
    if not self.known or (len(ids) and ids[0] in self.known.values()):
      return []
    if token is None:
      some = ', '.join(map(repr, list(self.known)[:_SHOWN]))
      raise unexpected(name, f'the language of {whose}, such as {some}', None)
    return [token]


def _alike(language: str, known: Mapping[str, int]) -> str:
  """Names that begin as an English word does: 'eng_Latn' for 'English'."""
  first = language[:_ALIKE].lower()
  names = [name for name in known if first and name.lower().startswith(first)]
  return f' Nearest known: {", ".join(names[:_SHOWN])}.' if names else ''


def languages_of(
  tokenizer: Any,
  has_encoder: bool,
  source_lang: str | None,
  target_lang: str | None,
) -> Languages:
  """Looks up the languages of a call.

  Args:
    tokenizer: the engine's; one of somebody's own need not have `languages`.
    has_encoder: whether the target has an encoder; a model that has none has no
      use for languages.
    source_lang: name of the texts' language, such as 'eng_Latn'.
    target_lang: that of the outputs.

  Raises:
    ValueError: a language is not known (the message has the nearest names), or
      the model has none.
  """
  known = getattr(tokenizer, 'languages', {}) if has_encoder else {}
  names = {'source_lang': source_lang, 'target_lang': target_lang}
  for name, language in names.items():
    check_type(name, language, str | None)
    if language is not None and not known:
      expected = 'None, for this model has no tokens of languages'
      raise unexpected(name, expected, language)
    if language is not None and language not in known:
      near = nearest(language, known, or_all=False) or _alike(language, known)
      advice = near.strip() or f'One is {next(iter(known))!r}.'
      expected = f'one of the {len(known)} languages of {tokenizer.path!r}'
      raise unexpected(name, expected, language, advice)
  source, target = (
    None if language is None else known[language] for language in names.values()
  )
  return Languages(known, source, target)


# Texts with options.


class Drafting(NamedTuple):
  """How rows are drafted for; by default not at all.

  Attributes:
    gamma: proposals at most; 0 decodes plainly.
    rule: where drafts end before gamma; None: they do not.
    fallback: when the drafter rests; None: never.
  """

  gamma: int = 0
  rule: LengthRule | None = None
  fallback: Fallback | None = None

  def __bool__(self) -> bool:
    """Whether anything is proposed."""
    return self.gamma > 0


class TextBatch:
  """One batch of texts on its way through the engine.

  Attributes:
    options: what the caller asked for.
    rows: indices of the texts that are decoded.
    request: what the loops are asked: one row for each of these texts, and
      padding rows. There is no such attribute if no text is decoded.
    passed_over: index -> completion of each text that is not decoded at all.
  """

  def __init__(
    self,
    engine: Any,
    texts: Sequence[str | Sequence[int]],
    options: Options,
    drafting: Drafting,
  ):
    """Encodes the texts, and makes the request.

    Args:
      engine: the `Engine` that decodes them.
      texts: the texts.
      options: what the caller asked for.
      drafting: how they are drafted for.
    """
    self.options = options
    self._engine, self._target = engine, engine.target
    self._tokenizer = engine.tokenizer
    self._num_texts = len(texts)
    self._languages = engine.languages(options.source_lang, options.target_lang)
    self.passed_over: dict[int, Completion] = {}
    inputs = [self._encode(i, text) for i, text in enumerate(texts)]
    self.rows = [i for i, ids in enumerate(inputs) if ids]
    if self.rows:
      self._inputs = [inputs[i] for i in self.rows]
      self._prompts = self._prompts_of(self._inputs)
      self._drafting = drafting
      self.request = self.request_in(self.num_rows)

  @property
  def num_rows(self) -> int:
    """The least number of rows of the request."""
    return rounded_up(padded_rows(len(self.rows)), self._engine.batch_multiple)

  def _encode(self, index: int, text: str | Sequence[int]) -> list[int]:
    """Ids as the model reads them; empty if the text is not to be decoded."""
    limit = self._engine.max_input_len
    try:
      ids = self._engine.bare_ids(text)
      self._check_ids(f'Text {index}', ids)
    except ValueError as wrong:
      if self.options.on_too_long != 'report':
        raise
      self.passed_over[index] = passed_over('error', str(wrong))
      return []
    first, last = self._engine.ids_around(text)
    if not ids and not first:
      self.passed_over[index] = passed_over('empty')
      return []
    first = [*first, *self._languages.before_text(ids)]
    room = limit - len(first) - len(last)
    if len(ids) > room and self.options.on_too_long != 'truncate':
      expected = (
        f'at most max_input_len = {limit} tokens with its start and end'
      )
      count = len(ids) + limit - room
      advice = "Shorten it, or set on_too_long='truncate'."
      error = unexpected(f'Text {index}', expected, count, advice)
      if self.options.on_too_long == 'error':
        raise error
      self.passed_over[index] = passed_over('error', str(error))
      return []
    return [*first, *ids[:room], *last]

  def _check_ids(self, what: str, ids: Sequence[int]) -> None:
    """Raises ValueError for an id that is outside the vocabulary."""
    size = self._target.vocab_size
    for token in ids:
      if not 0 <= token < size:
        raise unexpected(what, f'ids of the vocabulary of {size}', token)

  def _prompts_of(self, inputs) -> list[list[int]] | None:
    """Ids that each decoder row begins with; None is only the start token."""
    prompts = self.options.prompts
    if not self._target.has_encoder:
      if prompts is not None:
        expected = 'None: texts are the prompts of a model without an encoder'
        raise unexpected('prompts', expected, prompts)
      return inputs
    languages = self._languages
    if prompts is None:
      if not languages.known:
        return None
      prompts = [()] * self._num_texts
    if len(prompts) != self._num_texts:
      raise unexpected('prompts', f'{self._num_texts}', len(prompts))
    given = [[int(token) for token in prompts[i]] for i in self.rows]
    for i, ids in zip(self.rows, given, strict=True):
      self._check_ids(f'Prompt {i}', ids)
    first = start_id(self._target)
    return [[first, *languages.before_output(ids), *ids] for ids in given]

  def widths(self, *rows: int) -> tuple[int, int]:
    """Widths of the arrays that some rows' inputs and prompts are read in."""
    has_encoder, most = self._target.has_encoder, self._engine.max_input_len
    inputs = prompts = 1
    if has_encoder:
      longest = max(len(self._inputs[row]) for row in rows)
      inputs = min(max(SMALLEST_INPUT, next_power_of_two(longest)), most)
    if self._prompts is not None:
      # One more than a power of two: the last token is read by the first round.
      longest = max(len(self._prompts[row]) for row in rows) - 1
      # A language alone is all that most prompts of translations are.
      smallest = 1 if self._languages.known else SMALLEST_PROMPT
      prompts = 1 + max(smallest, next_power_of_two(longest))
      if not has_encoder:  # prompts are texts, limited as such
        prompts = min(prompts, most)
    return inputs, prompts

  def ids(self, row: int) -> tuple[list[int], list[int]]:
    """What the encoder reads of a row, and what its decoder begins with."""
    prompt = [] if self._prompts is None else self._prompts[row]
    return self._inputs[row] if self._target.has_encoder else [], prompt

  def request_in(self, batch: int) -> Request:
    """The request with `batch` rows: `num_rows` or more, the rest padding."""
    engine, options = self._engine, self.options
    drafting, gamma = self._drafting, self._drafting.gamma
    padding = pad_id(self._target)
    width, prompt_width = self.widths(*range(len(self.rows)))
    # NumPy arrays: the call of a program moves them to the device together.
    prompt: Any = None
    prompt_length: Any = None
    if self._prompts is not None:
      prompt, prompt_length = padded(self._prompts, batch, prompt_width)
    inputs: Any = np.zeros((batch, 1), np.int32)
    if self._target.has_encoder:
      inputs, _ = padded(self._inputs, batch, width, padding)
    max_length = engine.max_decode_len
    if options.max_length is not None:
      if options.max_length > max_length:
        expected = f'at most max_decode_len = {max_length}'
        raise unexpected('max_length', expected, options.max_length)
      max_length = options.max_length
    if options.min_length > max_length:
      expected = f'at most max_length = {max_length}'
      raise unexpected('min_length', expected, options.min_length)
    lenience: Any = None  # its program differs from that of all numbers
    if gamma and options.lenience != 1:
      lenience = np.asarray(options.lenience, np.float32)
    budgets = np.zeros((batch,), np.int32)
    budgets[: len(self.rows)] = max_length
    request = new_request(
      inputs,
      self._keys(batch),
      self._sampling(batch),
      slots=engine.max_decode_len,
      gamma=gamma,
      stop_ids=self._stop_ids(),
      min_length=options.min_length,
      max_length=budgets,
      # From all texts, including those that are not decoded.
      greedy=options.sampling.greedy,
      with_log_probs=options.log_probs,
      prompt=prompt,
      prompt_length=prompt_length,
      lenience=lenience,
      verification=self._verification,
      beams=self._beams(gamma),
      rule=drafting.rule,
      fallback=drafting.fallback,
      tree=engine.tree if gamma else None,
      pad_id=padding,
    )
    if request.tree is not None:
      tree_round.check(request, request.tree.cut(gamma))
    return request

  @property
  def _verification(self) -> str:
    # Greedy programs have no such choice: they stay the same ones.
    options = self.options
    as_blocks = options.judges_blocks and not options.sampling.greedy
    if self._engine.tree is not None and options.verification is None:
      return TOKEN  # blocks are chains
    return BLOCK if as_blocks else TOKEN

  def _beams(self, gamma: int) -> BeamSettings | None:
    settings = self.options.beam_settings(len(self._stop_ids()))
    if settings is None:
      return None
    size = self._target.vocab_size
    most = size // max(2, 1 + settings.num_ends)
    if settings.num_candidates > size:
      raise unexpected('num_beams', f'at most {most}', settings.width)
    if settings.draft_width > size:
      raise unexpected('draft_beams', f'at most {size}', settings.draft_width)
    # One program for all plain searches.
    return settings if gamma else settings.replace(draft_width=settings.width)

  def _keys(self, batch: int) -> jax.Array:
    ids = self.options.example_ids
    if ids is None:
      ids = range(self._num_texts)
    if len(ids) != self._num_texts:
      raise unexpected('example_ids', f'{self._num_texts}', len(ids))
    if any(not 0 <= number < 1 << 32 for number in ids):
      raise unexpected('example_ids', 'numbers in [0, 2**32)', ids)
    chosen = np.zeros((batch,), np.uint32)
    chosen[: len(self.rows)] = [ids[i] for i in self.rows]
    return example_keys(self.options.seed, chosen)

  def _sampling(self, batch: int) -> SamplingConfig:
    sampling = self.options.sampling
    if isinstance(sampling.temperature, tuple):
      if len(sampling.temperature) != self._num_texts:
        sampling.params(self._num_texts)  # raises, naming both numbers
      rows = [sampling.temperature[i] for i in self.rows]
      rows += [0.0] * (batch - len(rows))
      sampling = dataclasses.replace(sampling, temperature=rows)
    return sampling

  def _stop_ids(self) -> list[int]:
    assert self.options.stop_ids is not None  # `Engine.text_batch` gives them
    ids = [int(token) for token in self.options.stop_ids]
    self._check_ids('stop_ids', ids)
    return ids

  def has_stop_string(self, tokens: np.ndarray) -> bool:
    """Whether an output of these tokens ends at a stop string."""
    shown = decode(self._tokenizer, tokens.tolist())
    if not any(string in shown for string in self.options.stop_strings):
      return False
    text = self.text()
    text.extend(tokens)
    return text.stop_end is not None

  def parts(self, most: int) -> list['TextBatch']:
    """Batches of at most `most` of the texts each; none if none is decoded."""
    if 0 < len(self.rows) <= most:
      return [self]
    batches = []
    for at in range(0, len(self.rows), most):
      part = copy.copy(self)
      part.rows = self.rows[at : at + most]
      part._inputs = self._inputs[at : at + most]
      if self._prompts is not None:
        part._prompts = self._prompts[at : at + most]
      part.request = part.request_in(part.num_rows)
      batches.append(part)
    return batches

  def completions(self, *parts: 'tuple[TextBatch, Generation]'):
    """Results in the order of the texts: `num_samples` of each beam search.

    Args:
      *parts: the decoded `parts`, and what came of each, on the host; none if
        no text was decoded.

    Returns:
      A list of `Completion`s.
    """
    searches = self.options.num_beams is not None
    number = self.options.num_samples if searches else 1
    outputs = {i: [output] * number for i, output in self.passed_over.items()}
    for part, generation in parts:
      for row, index in enumerate(part.rows):
        if searches:
          outputs[index] = part._beams_of(generation, row)
        else:
          outputs[index] = [part.completion(generation, row)]
    return [output for i in range(self._num_texts) for output in outputs[i]]

  def _beams_of(self, generation: Generation, row: int) -> list[Completion]:
    """The best `num_samples` beams of a row, the best one last."""
    width = self.options.num_beams or 1
    number = self.options.num_samples
    last = (row + 1) * width
    rows = range(last - number, last)
    return [from_generation(generation, i, self._tokenizer) for i in rows]

  def completion(self, generation: Generation, row: int) -> Completion:
    """The completion of one row of a `Generation` on the host."""
    output = from_generation(generation, row, self._tokenizer)
    if self.request.lenience is not None:
      output = dataclasses.replace(output, lossless=False)
    if self._engine.usual is not None and self._drafting.gamma:
      output = self._engine.usual.judged(output)
    options = self.options
    return cut_at_stop_string(
      output, self._tokenizer, options.stop_strings, options.min_length
    )

  def sources(self) -> list[tuple[list[int], list[int]]]:
    """What each of the `completions` was decoded from.

    Returns:
      The ids of its input, and with an encoder those that the output begins
      with after the start token.
    """
    options, start = self.options, start_id(self._target)
    sources = [([start], list[int]())] * self._num_texts
    if self.rows:
      prompts = self._prompts if self._target.has_encoder else None
      prompts = prompts or [[start]] * len(self.rows)
      each = zip(self.rows, self._inputs, prompts, strict=True)
      for index, ids, prompt in each:
        sources[index] = ids, prompt[1:]
    searches = options.num_beams is not None
    return repeated(sources, options.num_samples if searches else 1)

  def text(self) -> Text:
    """The text of an output of this batch, before its first token."""
    options = self.options
    return Text(self._tokenizer, options.stop_strings, options.min_length)


def encoded(tokenizer: Tokenizer, text: str | Sequence[int]) -> list[int]:
  """The ids of a text, or those that were given in its place.

  Raises:
    ValueError: it is neither, or a text with half a character.
  """
  check_texts([text])
  if not isinstance(text, str):
    return [int(token) for token in text]
  try:
    text.encode()
  except UnicodeEncodeError as error:
    expected = f'no lone surrogate (it has one at place {error.start})'
    raise unexpected('text', expected, text, 'Read it as UTF-8.') from error
  return tokenizer.encode(text)


def check_texts(texts: Any, name: str = 'texts') -> None:
  """Raises ValueError unless it is a sequence of strings or lists of ids."""
  expected = 'a sequence of strings or of lists of ids'
  if isinstance(texts, str) or not is_a(texts, Sequence):
    raise unexpected(name, expected, texts)
  for index, text in enumerate(texts):
    if not isinstance(text, str) and not is_a(text, Sequence[int]):
      advice = 'One text of ids is a list such as [[5, 6, 7]].'
      expected = 'a string or a list of ids'
      raise unexpected(f'{name[:-1]} {index}', expected, text, advice)
