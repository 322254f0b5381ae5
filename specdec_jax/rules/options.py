"""The options that restrict an output's tokens, and the rules of a batch."""

import dataclasses
import functools
import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np

from specdec_jax.checks.fields import Bound, check_ids, unexpected
from specdec_jax.rules import automata, constraints, languages
from specdec_jax.rules.automata import Automata, Automaton
from specdec_jax.rules.schema import language_of
from specdec_jax.rules.tokens import Rules
from specdec_jax.types import Count

_REMEMBERED = 16  # an engine keeps the automata of the last so many constraints
_CONSTRAINTS = ('choices', 'regex', 'json_schema')
_DTYPES = {int: np.int32, float: np.float32}
_LEAST_WIDTH = 4  # the least padded length of a sequence, and of a list of them
_MOST_WORDS = 4096  # the most bad words, and the most sequences with a bias
# The most ids of a row's words, each padded to the longest.
_MOST_IN_WORDS = 1 << 16
_MOST_CHOICES = 100_000
_Added = Annotated[float, Bound(-100, 100)]  # a number that is added to a logit


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleOptions:
  """Rules on the tokens of an output; by default none.

  They are applied in this order, as in transformers: of the logits before
  temperature, in a beam search of the log-probabilities.

  Attributes:
    logit_bias: id -> what is added to its logit, from -100 to 100.
    sequence_bias: pairs of a sequence of ids and what is added to the logit of
      its last id where the others were said.
    bad_words: words that no output has, as text or as ids.
    suppress_tokens: ids that no output has.
    allowed_token_ids: the only ids that an output may have, beside what ends
      it; None is all.
    repetition_penalty: divides positive and multiplies negative logits of
      tokens that were said; above 1 they come less often.
    presence_penalty: is subtracted from logits of tokens of the output.
    frequency_penalty: is subtracted as often as a token was said.
    no_repeat_ngram_size: no output says so many tokens a second time; 0 is off.
    encoder_no_repeat_ngram_size: no output says so many tokens of its input; 0
      is off.
    begin_suppress_tokens: ids that no output begins with.
    forced_bos_token_id: the first id of an output without a prompt; None is
      any.
    forced_eos_token_id: the last id of an output of full length; None is any.
    choices: the only outputs, as texts or as ids; None is all.
    regex: what the whole text of an output matches.
    json_schema: the JSON schema that the whole output matches.
    json_blanks: the blanks between the parts of that JSON: 'one' behind each
      comma and colon, as `json.dumps` writes it, 'none', or 'any'.
  """

  logit_bias: Mapping[int, _Added] | None = None
  sequence_bias: Annotated[
    Sequence[tuple[Sequence[int], _Added]], Bound(0, _MOST_WORDS)
  ] = ()
  bad_words: Annotated[
    Sequence[str | Sequence[int]], Bound(0, _MOST_WORDS)
  ] = ()
  suppress_tokens: Sequence[int] = ()
  allowed_token_ids: Sequence[int] | None = None
  repetition_penalty: Annotated[float, Bound(0.01, 100)] = 1.0
  presence_penalty: _Added = 0.0
  frequency_penalty: _Added = 0.0
  no_repeat_ngram_size: Count = 0
  encoder_no_repeat_ngram_size: Count = 0
  begin_suppress_tokens: Sequence[int] = ()
  forced_bos_token_id: int | None = None
  forced_eos_token_id: int | None = None
  choices: (
    Annotated[Sequence[str | Sequence[int]], Bound(0, _MOST_CHOICES)] | None
  ) = None
  regex: str | None = None
  json_schema: Mapping[str, Any] | str | None = None
  json_blanks: Literal['one', 'none', 'any'] = 'one'

  def check_rules(self) -> None:
    """Makes lists of arrays, and checks what the fields' types do not say.

    Raises:
      ValueError: two of them contradict each other, or one is empty.
    """
    for field in dataclasses.fields(RuleOptions):
      if hasattr(value := getattr(self, field.name), 'tolist'):
        object.__setattr__(self, field.name, value.tolist())
    given = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
    if len(given) > 1:
      expected = f'None beside {given[0]}'
      raise unexpected(given[1], expected, getattr(self, given[1]))
    if self.json_schema is None and self.json_blanks != 'one':
      expected = "'one' without a json_schema"
      raise unexpected('json_blanks', expected, self.json_blanks)
    for name in ('choices', 'bad_words', 'allowed_token_ids'):
      values = getattr(self, name)
      if values is None or name == 'bad_words' and not len(values):
        continue
      lengths = [len(x) for x in values if hasattr(x, '__len__')]
      if not len(values) or 0 in lengths:
        raise unexpected(name, 'no empty entry, and at least one', values)

  @property
  def rules(self) -> dict[str, Any]:
    """The rules that are set: name -> value."""
    fields = dataclasses.fields(RuleOptions)
    values = ((field, getattr(self, field.name)) for field in fields)
    return {f.name: value for f, value in values if value != f.default}


_NUMBERS = {
  field.name: field.default
  for field in dataclasses.fields(RuleOptions)
  if isinstance(field.default, int | float)
}
# Field of `Rules` -> the value that turns it off.
_OFF = {**_NUMBERS, 'bias': 0.0, 'sequence_bias': 0.0}
_FORCED = {
  'forced_bos_token_id': 'forced_begin',
  'forced_eos_token_id': 'forced_end',
}
_IDS = ('sequences', 'begin_suppress', *_FORCED.values())
_OFF |= dict.fromkeys(_IDS, -1)


class RowRules(NamedTuple):
  """The rules of one row on the host.

  Attributes:
    vocab_size: V.
    numbers: name -> value, for the rules that are a number and are on.
    bias: float32[V], added to the logits; None: no bias.
    sequences: pairs of ids and bias, see `RuleOptions.sequence_bias`.
    begin_suppress: ids that the output must not begin with.
    forced_begin: the first id of an output without a prompt; -1: any.
    forced_end: the last id of an output of full length; -1: any.
    automaton: the automaton of the row's constraint; None: no constraint.
  """

  vocab_size: int = 0
  numbers: Mapping[str, float] = {}
  bias: np.ndarray | None = None
  sequences: Sequence[tuple[Sequence[int], float]] = ()
  begin_suppress: Sequence[int] = ()
  forced_begin: int = -1
  forced_end: int = -1
  automaton: Automaton | None = None

  def values(self) -> dict[str, np.ndarray]:
    """Returns the fields of `Rules` that are on, for this row alone."""
    values = {
      name: np.asarray(value, _DTYPES[type(_OFF[name])])
      for name, value in self.numbers.items()
    }
    if self.bias is not None:
      values['bias'] = self.bias
    if self.sequences:
      lists, biases = zip(*self.sequences, strict=True)
      width = max(map(len, lists))
      table = [[-1] * (width - len(ids)) + [*ids] for ids in lists]
      values['sequences'] = np.array(table, np.int32)
      values['sequence_bias'] = np.array(biases, np.float32)
    if self.begin_suppress:
      values['begin_suppress'] = np.array(self.begin_suppress, np.int32)
    for name in _FORCED.values():
      if (token := getattr(self, name)) >= 0:
        values[name] = np.asarray(token, np.int32)
    return values

  @property
  def sizes(self) -> Any:
    """A key: rows that share it get arrays of the same shapes by `ruling_of`.

    It is made without these arrays, but for the tables of an automaton, which
    are kept.
    """
    longest = max((len(ids) for ids, _ in self.sequences), default=0)
    lengths = len(self.sequences), longest, len(self.begin_suppress)
    sizes = [length and _power(length) for length in lengths]
    are_on = self.bias is not None, self.forced_end >= 0
    shapes: Any = ()
    if self.automaton is not None:
      tables, _ = automata.joined((self.automaton,), self.vocab_size)
      shapes = tables.by_id is None, *map(np.shape, jax.tree.leaves(tables))
    return frozenset(self.numbers), *sizes, *are_on, *shapes

  def allows(self, ids: Sequence[int]) -> bool:
    """Returns whether an output may begin with ids, its automaton aside."""
    size = int(self.numbers.get('no_repeat_ngram_size', 0))
    grams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
    bans = [tuple(banned) for banned, bias in self.sequences if bias == -np.inf]
    return (
      (self.bias is None or bool(np.all(self.bias[ids] > -np.inf)))
      and (not size or len(grams) == len({*grams}))
      and not any(
        tuple(ids[i : i + len(banned)]) == banned
        for banned in bans
        for i in range(len(ids))
      )
      and ids[0] not in self.begin_suppress
      and self.forced_begin in (-1, ids[0])
    )


NO_RULES = RowRules()


class RuleBook:
  """Turns options into rules; caches the automata of constraints."""

  def __init__(self, tokenizer: Any, vocab_size: int):
    """Takes the vocabulary of outputs, and the target's number of ids."""
    self._tokenizer: Any = tokenizer
    self._vocab_size = vocab_size
    self._automaton = functools.lru_cache(_REMEMBERED)(self._make_automaton)
    self._spelled = functools.lru_cache(2 * _MOST_WORDS)(self._spell)
    # Threads make one automaton at a time, since each takes much memory.
    self._lock = threading.Lock()

  def rules_of(self, options: RuleOptions, stop_ids: Sequence[int]) -> RowRules:
    """Makes the rules of a row.

    Args:
      options: the options of the row.
      stop_ids: ids that end its output.

    Raises:
      ValueError: an id is outside the vocabulary, or a constraint cannot be
        followed.
    """
    if not options.rules:
      return NO_RULES
    sequences = [
      (self._ids('bad_words', w), -np.inf) for w in self._words(options)
    ]
    sequences += [
      (self._ids('sequence_bias', ids), bias)
      for ids, bias in options.sequence_bias
    ]
    width = _power(max((len(ids) for ids, _ in sequences), default=0))
    if width * _power(len(sequences)) > _MOST_IN_WORDS:
      name = 'bad_words' if options.bad_words else 'sequence_bias'
      expected = f'at most {_MOST_IN_WORDS} ids, each as long as the longest'
      raise unexpected(name, expected, f'{len(sequences)} of up to {width} ids')
    given = {name: getattr(options, name) for name in _FORCED}
    forced = {
      _FORCED[name]: self._ids(name, [token])[0]
      for name, token in given.items()
      if token is not None
    }
    row = RowRules(
      self._vocab_size,
      numbers={k: x for k, x in options.rules.items() if k in _NUMBERS},
      bias=self._bias(options, stop_ids),
      sequences=sequences,
      begin_suppress=self._ids(
        'begin_suppress_tokens', options.begin_suppress_tokens
      ),
      automaton=self._constraint(options, stop_ids),
      **forced,
    )
    self._check_possible(options, row, stop_ids)
    return row

  def _check_possible(
    self, options: RuleOptions, row: RowRules, stop_ids: Sequence[int]
  ) -> None:
    """Raises ValueError for rules that are seen to exclude every output.

    It checks each choice as a whole; without choices, the first token.
    """
    of_constraints = {*_CONSTRAINTS, 'json_blanks'}
    others = [name for name in options.rules if name not in of_constraints]
    if not others:
      return
    if (choices := options.choices) is not None:
      ids = [self.encoded('choices', choice) for choice in choices]
      is_possible = any(row.allows([*x, *stop_ids[:1]]) for x in ids)
    else:
      firsts = np.arange(self._vocab_size)
      if row.automaton is not None:
        firsts = row.automaton.first_tokens(self._vocab_size)
      if row.bias is not None:
        firsts = firsts[row.bias[firsts] > -np.inf]
      is_possible = any(row.allows([token]) for token in firsts.tolist())
    if not is_possible:
      (name,) = [n for n in _CONSTRAINTS if n in options.rules] or others[:1]
      expected = f'what {" and ".join(others)} leave possible'
      raise unexpected(name, expected, getattr(options, name))

  def _ids(self, name: str, ids: Sequence[int]) -> list[int]:
    check_ids(name, ids, self._vocab_size)
    if len(ids) > self._vocab_size:
      expected = f'each id of {self._vocab_size} once'
      raise unexpected(name, expected, f'{len(ids)} ids')
    return [int(token) for token in ids]

  def _words(self, options: RuleOptions) -> list[Sequence[int]]:
    """Returns the ids of the bad words, each also with a blank before it."""
    words: list[Sequence[int]] = []
    for word in options.bad_words:
      words += self._spelled(word) if isinstance(word, str) else [word]
    return words

  def _spell(self, word: str) -> list[tuple[int, ...]]:
    encode = self._tokenizer.encode
    return sorted({tuple(encode(blank + word)) for blank in ('', ' ')} - {()})

  def _bias(
    self, options: RuleOptions, stop_ids: Sequence[int]
  ) -> np.ndarray | None:
    suppressed, allowed = options.suppress_tokens, options.allowed_token_ids
    if not options.logit_bias and not len(suppressed) and allowed is None:
      return None
    bias = np.zeros((self._vocab_size,), np.float32)
    if allowed is not None:
      bias[:] = -np.inf
      bias[[*self._ids('allowed_token_ids', allowed), *stop_ids]] = 0.0
    added = options.logit_bias or {}
    bias[self._ids('logit_bias', [*added])] += [*added.values()]
    bias[self._ids('suppress_tokens', suppressed)] = -np.inf
    return bias

  def _constraint(
    self, options: RuleOptions, stop_ids: Sequence[int]
  ) -> Automaton | None:
    values = [getattr(options, name) for name in _CONSTRAINTS]
    if values == [None] * len(values):
      return None
    if not stop_ids:
      expected = 'an id that ends an output beside choices, regex, json_schema'
      raise unexpected('stop_ids', expected, stop_ids)
    listed = [*values, options.json_blanks, stop_ids]
    with self._lock:
      return self._automaton(json.dumps(listed, default=lambda x: x.tolist()))

  def _make_automaton(self, key: str) -> Automaton:
    """Makes the automaton of a constraint and its stop ids, given as JSON."""
    choices, pattern, schema, blanks, stop_ids = json.loads(key)
    if choices is not None:
      ids = [self.encoded('choices', choice) for choice in choices]
      return constraints.of_choices(ids, stop_ids, self._vocab_size)
    name, value = 'regex', pattern
    if pattern is None:
      name, value = 'json_schema', schema
    try:
      with languages.deadline(constraints.SECONDS):
        if schema is not None:
          language = language_of(schema, blanks)
        else:
          language = languages.in_bytes(languages.regex(pattern))
        return self._vocabulary.automaton(name, language, stop_ids)
    except (languages.TooLarge, languages.NotFollowed) as error:
      raise unexpected(name, error.expected, value, f'({error})') from error

  def encoded(self, name: str, text: str | Sequence[int]) -> list[int]:
    """Returns the ids of a text; ids are checked and returned as they are.

    Raises:
      ValueError: its tokens are those of another text, blanks aside, since the
        vocabulary has none for some of its characters.
    """
    if not isinstance(text, str):
      return self._ids(name, text)
    ids = self._tokenizer.encode(text)
    if self._tokenizer.decode(ids).split() != text.split():
      raise constraints.unwritable(name, text, self._vocabulary.missing(text))
    return ids

  @functools.cached_property
  def _vocabulary(self) -> constraints.Vocabulary:
    words, begins_blank = self._tokenizer.spellings(self._vocab_size)
    return constraints.Vocabulary(words, begins_blank, self._vocab_size)


def ruling_of(
  rows: Sequence[RowRules], begin: Any, end: Any, inputs: Any
) -> tuple[Rules | None, Automata | None]:
  """Stacks the rules of rows; returns a batch's rules and automata, or None.

  A rule is on if any row has it; sizes are rounded up to powers of two.

  Args:
    rows: the rules of each row.
    begin: int32[B], see `Rules`.
    end: int32[B], see `Rules`.
    inputs: int32[B, E], -1 past their ends.
  """
  is_same = all(row is rows[0] for row in rows)
  each = [row.values() for row in (rows[:1] if is_same else rows)]
  values: dict[str, Any] = {}
  for name in dict.fromkeys(itertools.chain(*each)):
    table = _stacked(name, [row.get(name) for row in each])
    # If all rows are the same, this is a view: memory does not grow with B.
    values[name] = np.broadcast_to(table, (len(rows), *table.shape[1:]))
  if 'encoder_no_repeat_ngram_size' in values:
    values['inputs'] = inputs
  tables, parts = None, dict.fromkeys(row.automaton for row in rows)
  parts.pop(None, None)
  if parts:
    vocab_size = max(row.vocab_size for row in rows)
    tables, starts = automata.joined((*parts,), vocab_size)
    start_of = {None: automata.FREE, **dict(zip(parts, starts, strict=True))}
    states = [start_of[row.automaton] for row in rows]
    values['automaton'] = np.array(states, np.int32)
  return (Rules(begin, end, **values), tables) if values else (None, None)


def _stacked(name: str, values: Sequence[np.ndarray | None]) -> np.ndarray:
  """Stacks one field of all rows, padded in front by the field's off value."""
  arrays = [value for value in values if value is not None]
  sizes = np.max([array.shape for array in arrays], axis=0).astype(int).tolist()
  if name != 'bias':
    sizes = [_power(size) for size in sizes]
  table = np.full((len(values), *sizes), _OFF[name], arrays[0].dtype)
  for row, value in enumerate(values):
    if value is not None:
      places: Any = [slice(-size, None) for size in value.shape]
      table[(row, *places)] = value
  return table


def _power(size: int) -> int:
  return max(_LEAST_WIDTH, 1 << (size - 1).bit_length())
