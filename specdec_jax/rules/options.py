"""The options that restrict an output's tokens, and the rules of a batch."""

import dataclasses
import functools
import itertools
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np

from specdec_jax.checks.fields import Bound, check_ids, unexpected
from specdec_jax.rules import automata, languages
from specdec_jax.rules.automata import Automata, Automaton
from specdec_jax.rules.schema import language_of
from specdec_jax.rules.tokens import Rules
from specdec_jax.types import Count

_REMEMBERED = 16  # an engine keeps the automata of the last so many constraints
_CONSTRAINTS = ('choices', 'regex', 'json_schema')
_SEQUENCES = ('sequences', 'sequence_bias')
_DTYPES = {int: np.int32, float: np.float32}
_LEAST_WIDTH = 4  # the least padded length of a sequence, and of a list of them
_MOST_WORDS = 4096  # the most bad words, and the most sequences with a bias
# The most ids of all bad words and sequences of a row, padded to the longest.
_MOST_IN_WORDS = 1 << 16
_MOST_CHOICES = 100_000
_Added = Annotated[float, Bound(-100, 100)]  # a number that is added to a logit


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleOptions:
  """Rules on the tokens of an output; by default there are none.

  They are applied in this order, as in transformers, to the logits before
  temperature; in a beam search, to the log-probabilities.

  Attributes:
    logit_bias: id -> the number that is added to its logit, from -100 to 100.
    sequence_bias: pairs of a sequence of ids and a number, which is added to
      the logit of the last id where the others come right before it.
    bad_words: words that no output has, as text or as ids.
    suppress_tokens: ids that no output has.
    allowed_token_ids: the only ids that an output may have, beside those that
      end it; None allows all ids.
    repetition_penalty: divides the positive and multiplies the negative logits
      of tokens in the prompt or output; above 1 they are repeated less often.
    presence_penalty: is subtracted once from the logits of tokens that occur in
      the output.
    frequency_penalty: is subtracted from a token's logit once for each time
      that the token occurs in the output.
    no_repeat_ngram_size: no sequence of so many tokens occurs twice, the prompt
      included; 0 is off.
    encoder_no_repeat_ngram_size: no sequence of so many tokens of the input
      occurs in the output; 0 is off.
    begin_suppress_tokens: ids that no output begins with.
    forced_bos_token_id: the first id of an output without a prompt; None allows
      any id.
    forced_eos_token_id: the last id of an output of full length; None allows
      any id.
    choices: the only outputs that are allowed, as texts or as ids; None allows
      any output.
    regex: a regex that the whole text of an output matches.
    json_schema: the JSON schema that the whole output matches.
    json_blanks: the blanks between the parts of that JSON: 'one' behind each
      comma and colon, as `json.dumps` writes them, 'none', or 'any'.
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
    """Turns arrays into lists, and checks what the fields' types do not cover.

    Raises:
      ValueError: two options contradict each other, or an option is empty.
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
_IDS = {  # option whose value is ids -> field of `Rules`
  'begin_suppress_tokens': 'begin_suppress',
  'forced_bos_token_id': 'forced_begin',
  'forced_eos_token_id': 'forced_end',
}
# Field of `Rules` -> the value that turns it off.
_OFF = {**_NUMBERS, 'bias': 0.0, 'sequence_bias': 0.0, 'sequences': -1}
_OFF |= dict.fromkeys(_IDS.values(), -1)


class RowRules(NamedTuple):
  """The rules of one row on the host.

  Attributes:
    vocab_size: V, the number of the target's ids.
    values: field of `Rules` -> the row's value; only of rules that are set.
    automaton: the automaton of the row's constraint; None: no constraint.
  """

  vocab_size: int = 0
  values: Mapping[str, np.ndarray] = {}
  automaton: Automaton | None = None

  @property
  def sizes(self) -> Any:
    """A hashable key; rows with equal keys have rules of the same shapes."""
    shapes: Any = ()
    if self.automaton is not None:
      tables, _ = automata.joined((self.automaton,), self.vocab_size)
      shapes = tables.by_id is None, *map(np.shape, jax.tree.leaves(tables))
    sizes = ((k, *map(_power, x.shape)) for k, x in self.values.items())
    return frozenset(sizes), *shapes

  def allows_any(self, texts: Iterable[Sequence[int]]) -> bool:
    """Returns whether the row's output may begin with one of the texts.

    The row's automaton is not considered.

    Args:
      texts: the ids of each text.
    """
    values, bias = self.values, self.values.get('bias')
    size = int(values.get('no_repeat_ngram_size', 0))
    pairs = zip(*(values.get(x, ()) for x in _SEQUENCES), strict=True)
    bans = [ids[ids >= 0].tolist() for ids, added in pairs if added == -np.inf]
    begin = values.get('forced_begin', -1)

    def allows(ids: Sequence[int]) -> bool:
      grams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
      return (
        (bias is None or bool(np.all(bias[ids] > -np.inf)))
        and (not size or len(grams) == len({*grams}))
        and not any(
          ids[i : i + len(banned)] == banned
          for banned in bans
          for i in range(len(ids))
        )
        and ids[0] not in values.get('begin_suppress', ())
        and begin in (-1, ids[0])
      )

    return any(map(allows, texts))


NO_RULES = RowRules()


class RuleBook:
  """Turns options into rules; caches the automata of constraints."""

  def __init__(self, tokenizer: Any, vocab_size: int):
    """Takes the tokenizer of outputs, and V, the number of the target's ids."""
    self._tokenizer = tokenizer
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
      ValueError: an id is outside the vocabulary, or no output can follow the
        rules.
    """
    given = options.rules
    if not given:
      return NO_RULES
    values = self._sequences(options) | self._bias(options, stop_ids)
    for name, value in given.items():
      if name in _NUMBERS:
        values[name] = np.asarray(value, _DTYPES[type(_NUMBERS[name])])
      elif name in _IDS and np.size(value):
        ids = self._ids(name, np.ravel(value).tolist())
        values[_IDS[name]] = np.array(ids, np.int32).reshape(np.shape(value))
    automaton = self._constraint(options, stop_ids)
    row = RowRules(self._vocab_size, values, automaton)
    self._check_possible(given, row, stop_ids)
    return row

  def _check_possible(
    self, given: Mapping[str, Any], row: RowRules, stop_ids: Sequence[int]
  ) -> None:
    """Raises ValueError for rules that clearly exclude every output.

    With choices, it checks each choice as a whole; without choices it checks
    only which tokens may come first.
    """
    others = [x for x in given if x not in (*_CONSTRAINTS, 'json_blanks')]
    if not others:
      return
    if 'choices' in given:
      choices = (self.encoded('choices', x) for x in given['choices'])
      is_possible = row.allows_any([*x, *stop_ids[:1]] for x in choices)
    else:
      firsts = np.arange(self._vocab_size)
      if row.automaton is not None:
        firsts = row.automaton.first_tokens(self._vocab_size)
      if 'bias' in row.values:
        firsts = firsts[row.values['bias'][firsts] > -np.inf]
      is_possible = row.allows_any([token] for token in firsts.tolist())
    if not is_possible:
      (name,) = [x for x in _CONSTRAINTS if x in given] or others[:1]
      expected = f'what {" and ".join(others)} leave possible'
      raise unexpected(name, expected, given[name])

  def _ids(self, name: str, ids: Sequence[int]) -> list[int]:
    check_ids(name, ids, self._vocab_size)
    if len(ids) > self._vocab_size:
      expected = f'each id of {self._vocab_size} once'
      raise unexpected(name, expected, f'{len(ids)} ids')
    return [int(token) for token in ids]

  def _sequences(self, options: RuleOptions) -> dict[str, np.ndarray]:
    """Returns the ids and the biases of words and sequences, if there are any.

    A bad word that is given as text is banned with and without a blank before
    it.
    """
    lists, added = list[list[int]](), list[float]()
    for word in options.bad_words:
      spelled = self._spelled(word) if isinstance(word, str) else [word]
      lists += (self._ids('bad_words', ids) for ids in spelled)
    added += [-np.inf] * len(lists)
    for ids, bias in options.sequence_bias:
      lists.append(self._ids('sequence_bias', ids))
      added.append(bias)
    if not lists:
      return {}
    longest = max(map(len, lists))
    if _power(longest) * _power(len(lists)) > _MOST_IN_WORDS:
      name = 'bad_words' if options.bad_words else 'sequence_bias'
      expected = f'at most {_MOST_IN_WORDS} ids, each as long as the longest'
      size = f'{len(lists)} of up to {_power(longest)} ids'
      raise unexpected(name, expected, size)
    table = [[-1] * (longest - len(ids)) + ids for ids in lists]
    arrays = np.array(table, np.int32), np.array(added, np.float32)
    return dict(zip(_SEQUENCES, arrays, strict=True))

  def _spell(self, word: str) -> list[tuple[int, ...]]:
    encode = self._tokenizer.encode
    return sorted({tuple(encode(blank + word)) for blank in ('', ' ')} - {()})

  def _bias(
    self, options: RuleOptions, stop_ids: Sequence[int]
  ) -> dict[str, np.ndarray]:
    suppressed, allowed = options.suppress_tokens, options.allowed_token_ids
    added = options.logit_bias or {}
    if not added and not len(suppressed) and allowed is None:
      return {}
    bias = np.zeros((self._vocab_size,), np.float32)
    if allowed is not None:
      bias[:] = -np.inf
      bias[[*self._ids('allowed_token_ids', allowed), *stop_ids]] = 0.0
    bias[self._ids('logit_bias', [*added])] += [*added.values()]
    bias[self._ids('suppress_tokens', suppressed)] = -np.inf
    return {'bias': bias}

  def _constraint(
    self, options: RuleOptions, stop_ids: Sequence[int]
  ) -> Automaton | None:
    names = [name for name in _CONSTRAINTS if name in options.rules]
    if not names:
      return None
    if not stop_ids:
      expected = 'an id that ends an output beside choices, regex, json_schema'
      raise unexpected('stop_ids', expected, stop_ids)
    value = getattr(options, names[0])
    listed = [names[0], value, options.json_blanks, stop_ids]
    with self._lock:
      return self._automaton(json.dumps(listed, default=lambda x: x.tolist()))

  def _make_automaton(self, key: str) -> Automaton:
    """Makes the automaton of a constraint.

    Args:
      key: the JSON of a list with the option's name, its value, `json_blanks`
        and the stop ids.
    """
    name, value, blanks, stop_ids = json.loads(key)
    if name == 'choices':
      ids = [self.encoded(name, choice) for choice in value]
      return automata.of_choices(ids, stop_ids, self._vocab_size)
    try:
      with languages.deadline(automata.SECONDS):
        if name == 'json_schema':
          language = language_of(value, blanks)
        else:
          language = languages.in_bytes(languages.regex(value))
        return self._vocabulary.automaton(name, language, stop_ids)
    except (languages.TooLarge, languages.NotFollowed) as error:
      raise unexpected(name, error.expected, value, f'({error})') from error

  def encoded(self, name: str, text: str | Sequence[int]) -> list[int]:
    """Returns the ids of a text; ids are checked and returned as they are.

    Raises:
      ValueError: an id is outside the vocabulary, or the text's ids decode to
        another text, blanks aside, as the vocabulary lacks some characters.
    """
    if not isinstance(text, str):
      return self._ids(name, text)
    ids = self._tokenizer.encode(text)
    if self._tokenizer.decode(ids).split() != text.split():
      raise self._vocabulary.unwritable(name, text)
    return ids

  @functools.cached_property
  def _vocabulary(self) -> automata.Vocabulary:
    words, begins_blank = self._tokenizer.spellings(self._vocab_size)
    return automata.Vocabulary(words, begins_blank, self._vocab_size)


def ruling_of(
  rows: Sequence[RowRules], begin: Any, end: Any, inputs: Any
) -> tuple[Rules | None, Automata | None]:
  """Stacks the rules of rows; returns a batch's rules and automata, or None.

  A rule is on if any row has it; sizes are rounded up to powers of two.

  Args:
    rows: the rules of each row.
    begin: int32[B], tokens before the output, the start token counted.
    end: int32[B], the most tokens, those before the output counted.
    inputs: int32[B, E], what the encoder reads; -1 past each row's end.
  """
  is_same = all(row is rows[0] for row in rows)
  each = [row.values for row in (rows[:1] if is_same else rows)]
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
  """Stacks one field of all rows; padding in front turns the rule off."""
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
