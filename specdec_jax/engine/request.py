"""What a caller asks of an engine: texts and options in, completions out.

`Options` are checked before anything is compiled. A `TextBatch` makes of texts
and options the `Request` that the loops take, and of what came of it
`Completion`s. `Languages` are tokens before texts and outputs, of models that
translate between many.
"""

import copy
import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from specdec_jax.checks.fields import (
  Bound,
  check_ids,
  check_number,
  check_types,
  is_a,
  nearest,
  unexpected,
)
from specdec_jax.decoding import tree_round
from specdec_jax.drafters.length import plain_rule
from specdec_jax.engine import padding
from specdec_jax.engine.completion import (
  Completion,
  Text,
  from_generation,
  passed_over,
)
from specdec_jax.engine.padding import next_power_of_two
from specdec_jax.engine.scoring import Ruled
from specdec_jax.probs import SamplingConfig
from specdec_jax.request import (
  BLOCK,
  TOKEN,
  BeamScoring,
  BeamSettings,
  Drafting,
  Request,
  keys_of_rows,
  new_request,
)
from specdec_jax.rules.options import NO_RULES, RowRules, RuleOptions, ruling_of
from specdec_jax.text.tokenizer import Vocabulary
from specdec_jax.types import Count, Generation, LengthRule, Positive
from specdec_jax.verify import check_lenience

MAX_GAMMA = 256
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
  'bad_words_ids': 'bad_words',
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
  'forced_bos_token_id': 'prompts says it: [[id]] * len(texts).',
  'prefix_allowed_tokens_fn': 'choices, regex and json_schema say it.',
  'early_stopping': 'a beam search ends as T5X ends it, or with length_penalty'
  ' as transformers does where early_stopping is False.',
}
ALPHA = 0.6  # of T5's papers and of T5X


@dataclasses.dataclass(frozen=True)
class Options(RuleOptions):
  """The options of `generate` and `stream`; also those of `RuleOptions`.

  Attributes:
    temperature: 0 is greedy; above it outputs are sampled. One for all texts
      or one for each.
    top_k: samples only from the k likeliest tokens, see `SamplingConfig`; 0 is
      off.
    top_p: samples only from the likeliest tokens that together have this
      probability; 1 is off.
    min_p: samples only from tokens with this part of the likeliest one's
      probability; 0 is off.
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
    split: 'sentences' decodes each sentence of a text by itself, and puts the
      outputs together as lines and paragraphs were, see `text.sentences`. All
      other options are those of a sentence.
    split_lang: language whose rules find the sentences, such as 'de'; None is
      `source_lang`, or English.
    split_prefix: put before each sentence, such as 'translate English to
      German: ' of a T5 or '<2de> ' of MADLAD-400.
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
  min_p: float = 0.0
  max_length: Positive | None = None
  min_length: Count = 0
  num_samples: Annotated[int, Bound(1, MOST_ROWS)] = 1
  stop_strings: Sequence[str] = ()
  stop_ids: Sequence[int] | None = None
  seed: Annotated[int, Bound(-(1 << 63), (1 << 64) - 1)] = 0
  example_ids: Sequence[int] | None = None
  prompts: Sequence[Sequence[int]] | None = None
  on_too_long: Literal['error', 'truncate', 'report'] = 'error'
  log_probs: bool = True
  top_log_probs: Count = 0
  lenience: float = 1.0
  verification: Literal['token', 'block'] | None = None
  num_beams: Positive | None = None
  alpha: Annotated[float, Bound(0, 10)] | None = None
  length_penalty: Annotated[float, Bound(-10, 10)] | None = None
  draft_beams: Positive | None = None
  source_lang: str | None = None
  target_lang: str | None = None
  split: Literal['sentences'] | None = None
  split_lang: str | None = None
  split_prefix: str = ''

  def __post_init__(self):
    for name, value in dataclasses.asdict(self.sampling).items():
      object.__setattr__(self, name, value)
    if isinstance(self.sequence_bias, Mapping):  # as transformers has it
      pairs = tuple(self.sequence_bias.items())
      object.__setattr__(self, 'sequence_bias', pairs)
    if isinstance(self.stop_strings, str):
      object.__setattr__(self, 'stop_strings', (self.stop_strings,))
    check_lenience(self.lenience)
    check_types(self)
    self.check_rules()
    if '' in self.stop_strings:
      raise unexpected('stop_strings', 'no empty string', self.stop_strings)
    if self.judges_blocks and self.lenience != 1:
      expected = "'token' with a lenience below 1, a rule for single tokens"
      raise unexpected('verification', expected, self.verification)
    if self.split and self.prompts is not None:
      raise unexpected('prompts', 'None with split', self.prompts)
    for name in ('split_lang', 'split_prefix'):
      if getattr(self, name) and not self.split:
        raise unexpected(name, 'nothing without split', getattr(self, name))
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
    scoring, penalty = BeamScoring.TRANSFORMERS, self.length_penalty
    if penalty is None:
      scoring = BeamScoring.T5X
      penalty = ALPHA if self.alpha is None else self.alpha
    number: Any = np.float32(penalty)
    return BeamSettings(
      penalty=number,
      width=self.num_beams,
      draft_width=self.draft_beams or 2 * self.num_beams,
      num_ends=num_ends,
      scoring=scoring,
    )

  @functools.cached_property
  def sampling(self) -> SamplingConfig:
    """Temperature, top-k, top-p and min-p."""
    return SamplingConfig(self.temperature, self.top_k, self.top_p, self.min_p)


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


def sentence_id(example: int, sentence: int) -> int:
  """The id that the random numbers of a sentence of an example derive from.

  That of the first one is the example's own: a text of one sentence is decoded
  as it is without a split.
  """
  if not sentence:
    return example
  digest = hashlib.blake2b(f'{example} {sentence}'.encode(), digest_size=4)
  return int.from_bytes(digest.digest())


def options_of(
  named: Mapping[str, Any], otherwise: Mapping[str, Any] | None = None
) -> Options:
  """Makes `Options`; accepts the names that other libraries use as well.

  Args:
    named: what is asked for.
    otherwise: options that hold where nothing else is asked for.

  Raises:
    ValueError: a name is unknown, an option is given twice, or a value is out
      of range.
  """
  defaults = {x.name: x.default for x in dataclasses.fields(Options)}
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
  return Options(**{**(otherwise or {}), **values})


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
    ends_nothing = not (np.any(value.worth) or np.any(value.worth_asking))
    return value.most, None if ends_nothing else value
  if not isinstance(value, str):
    check_number('gamma', value, 0)
    # Caches and logits grow with gamma, and more gain nothing.
    if value > MAX_GAMMA:
      raise unexpected('gamma', f'at most {MAX_GAMMA}', value)
    return value, None
  if value != ADAPTIVE:
    raise unexpected('gamma', f'a whole number or {ADAPTIVE!r}', value)
  rule = plain_rule()
  return rule.most, rule


# Languages of translation models: the vocabulary has a token for each. That of
# the source stands before a text that the encoder reads; that of the target is
# a prompt of the decoder, behind its start token, and no part of the output.

_SHOWN = 3


class Languages(NamedTuple):
  """Languages of a call, see `Engine.languages`.

  Attributes:
    known: name -> token, of all languages; empty if the model has none.
    source: token of the texts' language; None if it was not said.
    target: token of the outputs' language; None if it was not said.
  """

  known: Mapping[str, int]
  source: int | None
  target: int | None

  def before_text(
    self, text: str | Sequence[int], ids: Sequence[int]
  ) -> list[int]:
    """Returns the tokens to put before the ids of a text.

    Words of a text that look like a language's token are text where its
    language is known, as in transformers: 'deu_Latn' in English is English.
    Ids that begin with a language say it themselves.

    Args:
      text: what the caller gave, a text or its ids.
      ids: the ids of the text.

    Raises:
      ValueError: `source_lang` is missing, and the ids do not begin with a
        language.
    """
    if isinstance(text, str) and self.source is not None:
      return [self.source]
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


# Texts with options.


@dataclasses.dataclass(frozen=True)
class TextRow:
  """One output that is to be decoded, as a `Request` has it.

  Attributes:
    index: its place among all outputs of a batch.
    inputs: ids that the encoder reads; none without an encoder.
    prompt: ids that the decoder begins with.
    widths: of the arrays that inputs and prompt are read in.
    options: the caller's.
    example_id: what its random numbers derive from, beside the seed.
    temperature: its own.
    max_length: tokens after which it stops; 0 for a row without a text.
    rules: on its tokens.
  """

  index: int = 0
  inputs: Sequence[int] = ()
  prompt: Sequence[int] = ()
  widths: tuple[int, int] = (1, 1)
  options: Options = Options()
  example_id: int = 0
  temperature: float = 0.0
  max_length: int = 0
  rules: RowRules = NO_RULES


_NO_TEXT = TextRow(options=Options(stop_ids=()))


def joined(
  rows: Sequence[TextRow], like: Request, least: tuple[int, int] = (1, 1)
) -> Request:
  """One request of all rows.

  Args:
    rows: the rows.
    like: has what all rows share: static fields, and the values of which it has
      one for all rows.
    least: widths that inputs and prompts have at least.
  """

  def each(dtype: Any, values: Iterable[Any]) -> Any:
    return np.fromiter(values, dtype, len(rows))

  widths = zip(least, *(row.widths for row in rows), strict=True)
  width, prompt_width = map(max, widths)
  options = [row.options for row in rows]
  min_p = each(np.float32, (one.min_p for one in options))
  sampling = like.sampling.replace(
    temperature=each(np.float32, (row.temperature for row in rows)),
    top_k=each(np.int32, (one.top_k for one in options)),
    top_p=each(np.float32, (one.top_p for one in options)),
    min_p=min_p if np.any(min_p) else None,
  )
  prompts = [row.prompt for row in rows]
  prompt, prompt_length = padding.padded(prompts, len(rows), prompt_width)
  inputs, _ = padding.padded(
    [row.inputs for row in rows], len(rows), width, like.pad_id
  )
  stop_ids: Any = like.stop_ids
  if np.ndim(stop_ids) > 1:  # each row has values of its own
    own: Any = [one.stop_ids for one in options]
    stop_ids, _ = padding.padded(own, len(rows), stop_ids.shape[1], -1)
  max_length = each(np.int32, (row.max_length for row in rows))
  # Without an encoder the prompt is the input.
  read = [row.inputs if len(row.inputs) else row.prompt for row in rows]
  widest = max(width, prompt_width)
  rules, automata = ruling_of(
    [row.rules for row in rows],
    prompt_length,
    prompt_length + max_length,
    padding.padded(read, len(rows), widest, -1)[0],
  )
  return like.replace(
    inputs=inputs,
    prompt=prompt,
    prompt_length=prompt_length,
    stop_ids=stop_ids,
    keys=keys_of_rows(
      each(np.uint32, (one.seed & 0xFFFFFFFF for one in options)),
      each(np.uint32, (row.example_id for row in rows)),
    ),
    sampling=sampling,
    min_length=each(np.int32, (one.min_length for one in options)),
    max_length=max_length,
    token_rules=rules,
    automata=automata,
  )


class TextBatch:
  """One batch of texts on its way through the engine.

  Attributes:
    options: what the caller asked for.
    rows: the outputs that are decoded; of a beam search one for each text.
    request: what the loops are asked: these rows, and padding rows. There is no
      such attribute if no text is decoded.
    passed_over: index -> completion of each output that is not decoded at all.
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
    # A beam search gives all outputs of its row.
    self._per_row = 1 if options.num_beams is None else options.num_samples
    samples = options.num_samples // self._per_row
    self._num_outputs = len(texts) * samples
    self._languages = engine.languages(options.source_lang, options.target_lang)
    self.passed_over: dict[int, Completion] = {}
    self.rows: list[TextRow] = []
    self._rules = engine.rule_book.rules_of(options, self._stop_ids)
    self._check_sizes(len(texts))
    for number, text in enumerate(texts):
      ids = self._encode(number, text)
      for sample in range(samples):
        index = number * samples + sample
        if isinstance(ids, Completion):
          self.passed_over[index] = ids
        else:
          self.rows.append(self._row(index, number, sample, ids))
    if self.rows:
      self._like = self._request_of_one(drafting)
      self.request = self.request_in(self.num_rows)

  @property
  def num_rows(self) -> int:
    """The least number of rows of the request."""
    least = padding.padded_rows(len(self.rows))
    return padding.rounded_up(least, self._engine.batch_multiple)

  def _check_sizes(self, num_texts: int) -> None:
    """Checks the options that have a value for each text."""
    options = self.options
    if options.prompts is not None and not self._target.has_encoder:
      expected = 'None: texts are the prompts of a model without an encoder'
      raise unexpected('prompts', expected, options.prompts)
    for name in ('prompts', 'example_ids', 'temperature'):
      values = getattr(options, name)
      if isinstance(values, float | int | None) or len(values) == num_texts:
        continue
      raise unexpected(name, f'one for each of {num_texts} texts', values)
    ids = () if options.example_ids is None else options.example_ids
    if any(not 0 <= number < 1 << _KEY_BITS for number in ids):
      raise unexpected('example_ids', 'numbers in [0, 2**32)', ids)

  def _encode(
    self, index: int, text: str | Sequence[int]
  ) -> list[int] | Completion:
    """Ids as the model reads them; or the completion of one that is not read.

    Raises:
      ValueError: it cannot be read, and `on_too_long` is not 'report'.
    """
    limit = self._engine.max_input_len
    try:
      ids = self._engine.bare_ids(text)
      self._check_ids(f'Text {index}', ids)
    except ValueError as error:
      return self._reported(error)
    first, last = self._engine.ids_around(text)
    if not ids and not first:
      return passed_over('empty')
    first = [*first, *self._languages.before_text(text, ids)]
    room = limit - len(first) - len(last)
    if len(ids) > room and self.options.on_too_long != 'truncate':
      expected = (
        f'at most max_input_len = {limit} tokens with its start and end'
      )
      count = len(ids) + limit - room
      advice = "Shorten it, or set on_too_long='truncate'."
      return self._reported(
        unexpected(f'Text {index}', expected, count, advice)
      )
    return [*first, *ids[:room], *last]

  def _reported(self, error: ValueError) -> Completion:
    """The completion of a text that cannot be read; or raises the error."""
    if self.options.on_too_long != 'report':
      raise error
    return passed_over('error', str(error))

  def _check_ids(self, what: str, ids: Sequence[int]) -> None:
    """Raises ValueError for an id that is outside the vocabulary."""
    check_ids(what, ids, self._target.vocab_size)

  def _row(
    self, index: int, number: int, sample: int, ids: list[int]
  ) -> TextRow:
    """The row of a sample of a text."""
    options, most = self.options, self._engine.max_input_len
    temperature: Any = options.sampling.temperature
    if isinstance(temperature, tuple):
      temperature = temperature[number]
    example = number
    if options.example_ids is not None:
      example = options.example_ids[number]
    has_encoder = self._target.has_encoder
    prompt = self._prompt(number) if has_encoder else ids
    width = 1
    if has_encoder:
      width = max(padding.SMALLEST_INPUT, next_power_of_two(len(ids)))
      width = min(width, most)
    # A language alone is all that most prompts of translations are.
    smallest = 1 if self._languages.known else padding.SMALLEST_PROMPT
    # One more than a power of two: the last token is read by the first round.
    prompt_width = 1 + max(smallest, next_power_of_two(len(prompt) - 1))
    if not has_encoder:  # prompts are texts, limited as such
      prompt_width = min(prompt_width, most)
    return TextRow(
      index=index,
      inputs=ids if has_encoder else (),
      prompt=prompt,
      widths=(width, prompt_width if self._has_prompts else 1),
      options=options,
      example_id=example_id(example, sample),
      temperature=temperature,
      max_length=options.max_length or self._engine.max_decode_len,
      rules=self._rules,
    )

  @property
  def _has_prompts(self) -> bool:
    """Whether decoders begin with more than the start token."""
    has_encoder, prompts = self._target.has_encoder, self.options.prompts
    return not has_encoder or prompts is not None or bool(self._languages.known)

  def _prompt(self, number: int) -> list[int]:
    """Ids that the decoder of a model with an encoder begins with."""
    ids: list[int] = []
    if self.options.prompts is not None:
      ids = [int(token) for token in self.options.prompts[number]]
      self._check_ids(f'Prompt {number}', ids)
    return [self._target.start_id, *self._languages.before_output(ids), *ids]

  def _request_of_one(self, drafting: Drafting) -> Request:
    """A request with what all rows share."""
    engine, options, gamma = self._engine, self.options, drafting.gamma
    most = engine.max_decode_len
    if options.max_length is not None and options.max_length > most:
      expected = f'at most max_decode_len = {most}'
      raise unexpected('max_length', expected, options.max_length)
    max_length = self.rows[0].max_length
    if options.min_length > max_length:
      expected = f'at most max_length = {max_length}'
      raise unexpected('min_length', expected, options.min_length)
    lenience: Any = None  # its program differs from that of all numbers
    if gamma and options.lenience != 1:
      lenience = np.asarray(options.lenience, np.float32)
    # NumPy arrays: the call of a program moves them to the device together.
    nothing: Any = np.zeros((1, 1), np.int32)
    request = new_request(
      nothing,
      nothing,
      dataclasses.replace(options.sampling, temperature=0.0),
      slots=most,
      stop_ids=self._stop_ids,
      min_length=options.min_length,
      # From all texts, including those that are not decoded.
      greedy=options.sampling.greedy,
      with_log_probs=options.log_probs,
      lenience=lenience,
      verification=self._verification,
      beams=self._beams(gamma),
      drafting=drafting,
      tree=engine.tree if gamma else None,
      pad_id=self._target.pad_id,
    )
    if request.tree is not None:
      tree_round.check(request, request.tree.cut(gamma))
    return request

  def request_in(self, batch: int) -> Request:
    """The request with `batch` rows: `num_rows` or more, the rest padding."""
    empty = dataclasses.replace(_NO_TEXT, rules=self._rules)
    padding_rows = [empty] * (batch - len(self.rows))
    return joined([*self.rows, *padding_rows], self._like)

  @property
  def _verification(self) -> str:
    options = self.options
    if self._engine.tree is not None and options.verification is None:
      return TOKEN  # blocks are chains
    # Greedy programs have no such choice: they stay the same ones.
    as_blocks = options.judges_blocks and not options.sampling.greedy
    return BLOCK if as_blocks else TOKEN

  def _beams(self, gamma: int) -> BeamSettings | None:
    settings = self.options.beam_settings(len(self._stop_ids))
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

  @functools.cached_property
  def _stop_ids(self) -> list[int]:
    assert self.options.stop_ids is not None  # `Engine.text_batch` gives them
    ids = [int(token) for token in self.options.stop_ids]
    self._check_ids('stop_ids', ids)
    return ids

  def parts(self, most: int) -> list['TextBatch']:
    """Batches of at most `most` of the rows each; none if none is decoded."""
    if 0 < len(self.rows) <= most:
      return [self]
    batches = []
    for at in range(0, len(self.rows), most):
      part = copy.copy(self)
      part.rows = self.rows[at : at + most]
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
    number, width = self._per_row, self.options.num_beams or 1
    outputs = {i: [output] * number for i, output in self.passed_over.items()}
    for part, generation in parts:
      for place, row in enumerate(part.rows):
        # Of beams the best ones, which are last.
        last = (place + 1) * width
        outputs[row.index] = [
          part.completion(generation, i) for i in range(last - number, last)
        ]
    return [output for i in range(self._num_outputs) for output in outputs[i]]

  def completion(self, generation: Generation, row: int) -> Completion:
    """The completion of one row of a `Generation` on the host."""
    lossless = self.request.lenience is None
    return from_generation(generation, row, self._tokenizer, lossless)

  def sources(self) -> list[tuple[Sequence[int], Sequence[int]]]:
    """What each of the `completions` was decoded from.

    Returns:
      The ids of its input, and with an encoder those that the output begins
      with after the start token.
    """
    nothing: tuple[Sequence[int], Sequence[int]] = [self._target.start_id], ()
    sources = [nothing] * self._num_outputs
    for row in self.rows:
      sources[row.index] = (row.inputs, row.prompt[1:])
      if not self._target.has_encoder:
        sources[row.index] = row.prompt, ()
    return [source for source in sources for _ in range(self._per_row)]

  def ruled(self) -> list[Ruled]:
    """The rules that each of the `completions` was decoded by."""
    nothing = Ruled(NO_RULES, 0, 1)
    ruled = [nothing] * self._num_outputs
    for row in self.rows:
      before = len(row.prompt) - 1 if self._target.has_encoder else 0
      is_beam = self.options.num_beams is not None
      ruled[row.index] = Ruled(row.rules, before, row.max_length, is_beam)
    return [one for one in ruled for _ in range(self._per_row)]

  def text(self) -> Text:
    """The text of an output of this batch, before its first token."""
    options = self.options
    return Text(self._tokenizer, options.stop_strings, options.min_length)


def encoded(tokenizer: Vocabulary, text: str | Sequence[int]) -> list[int]:
  """The ids of a text, or those that were given in its place.

  Raises:
    ValueError: it is neither, or a text with half a character.
  """
  check_texts([text])
  if not isinstance(text, str):
    return [int(token) for token in text]
  check_unicode(text)
  return tokenizer.encode(text)


def encoded_texts(
  tokenizer: Vocabulary, texts: Sequence[str]
) -> list[list[int]]:
  """`encoded` of many texts, in less time than of each by itself."""
  for text in texts:
    check_unicode(text)
  return tokenizer.encode_batch(texts)


def check_unicode(text: str) -> None:
  """Raises ValueError for a text with half a character."""
  try:
    text.encode()
  except UnicodeEncodeError as error:
    expected = f'no lone surrogate (it has one at place {error.start})'
    raise unexpected('text', expected, text, 'Read it as UTF-8.') from error


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
