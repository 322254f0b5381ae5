"""Requests on the host: texts and options become rows, rows become arrays.

A `TextRequest` checks and encodes texts and options before anything is
compiled. Each of its `Row`s is one output to decode. `joined` makes the arrays
of the rows that are prefilled in one call, just before that call. The listener
of a row gets `Update`s; the last one has the `Completion`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax.checks.fields import check_ids, unexpected
from specdec_jax.decoding import speculative
from specdec_jax.decoding.pool import PoolView
from specdec_jax.engine import completion, padding
from specdec_jax.engine.codec import Codec
from specdec_jax.engine.completion import Completion, Text
from specdec_jax.engine.options import (
  KEY_BITS,
  EngineConfig,
  Options,
  example_id,
)
from specdec_jax.engine.scoring import Ruled
from specdec_jax.engine.trace import Round
from specdec_jax.request import Drafting, Request, keys_of_rows, new_request
from specdec_jax.rules.options import NO_RULES, RowRules, ruling_of
from specdec_jax.tree_shape import TreeShape
from specdec_jax.types import Array, FinishReason, Generation

# The ids of an input, the ids of its prompt, and the rules on the output.
Source = tuple[Sequence[int], Sequence[int], Ruled]


@dataclasses.dataclass(frozen=True)
class Update:
  """One message to the listener of a row.

  Attributes:
    text: text since the last update; it will not change.
    tokens: ids since the last update.
    log_probs: the log-probabilities of these ids, if the row wants them.
    outputs: in the last update the completed output, or the best beams of a
      search, the best one last; before that ().
    round: the last round, with its accepted proposals, if the row shows rounds.
    error: why the row ends without an output: 'deadline' (its time is over),
      'stopped' (the server stops), 'failed' (the whole server failed), or
      'failed alone' (only the rows of this row's lane failed). None: no error.
  """

  text: str = ''
  tokens: Sequence[int] = ()
  log_probs: Sequence[float] = ()
  outputs: Sequence[Completion] = ()
  round: Round[int] | None = None
  error: str | None = None

  @property
  def is_last(self) -> bool:
    """Whether this is the row's last update."""
    return bool(self.outputs) or self.error is not None


@dataclasses.dataclass(frozen=True)
class Terms:
  """The data that all rows of a request share.

  Attributes:
    options: the options that the caller asked for.
    rules: the rules on the tokens of the outputs.
    shared: a `Request` of one placeholder row, which has no text; its static
      fields, and its arrays without an entry per row, hold for all rows.
    codec: turns texts into ids and ids into texts.
  """

  options: Options
  rules: RowRules
  shared: Request
  codec: Codec

  @functools.cached_property
  def kind(self) -> Any:
    """A dictionary key; rows of equal kinds and widths share programs."""
    leaves, tree = jax.tree.flatten(self.shared)
    has_min_p = bool(self.options.min_p)
    return tree, *map(np.shape, leaves), has_min_p, self.rules.sizes

  @property
  def pool_key(self) -> Any:
    """A dictionary key; rows of a kind with equal keys may be in one pool."""
    return self.shared.stop_ids.tobytes(), id(self.rules.automaton)

  @property
  def num_outputs(self) -> int:
    """The number of outputs of a row; only a beam search may have several."""
    searches = self.options.num_beams is not None
    return self.options.num_samples if searches else 1

  def completion(self, generation: Generation, row: int) -> Completion:
    """Returns the completion of one row of a `Generation` on the host."""
    lossless, tokenizer = self.shared.lenience is None, self.codec.tokenizer
    return completion.from_generation(generation, row, tokenizer, lossless)

  def outputs(self, generation: Generation, place: int) -> Sequence[Completion]:
    """Returns the outputs of one row, from a `Generation` on the host.

    Those of a beam search are its `num_samples` best beams, the best one last.

    Args:
      generation: the results of all rows; in a beam search each row has
        `num_beams` entries, from the worst to the best.
      place: the index of the row.
    """
    last = (place + 1) * (self.options.num_beams or 1)
    places = range(last - self.num_outputs, last)
    return [self.completion(generation, i) for i in places]


@dataclasses.dataclass(eq=False, slots=True)
class Row:
  """One output that is to be decoded, or a beam search.

  Attributes:
    terms: the data that all rows of its request share.
    index: the row's position among the outputs of the request.
    inputs: ids that the encoder reads; () without an encoder.
    prompt: ids that the decoder begins with.
    widths: the widths to which inputs and prompt are padded.
    example_id: the row's random numbers derive from this and the seed.
    temperature: 0 is greedy; above 0 the output is sampled.
    max_length: tokens after which the row stops; 0 for a placeholder row, which
      only fills up a batch.
    streams: whether there are updates before the end.
    is_plain: whether the row should be decoded without a drafter while no other
      row runs beside it.
    shows_rounds: whether updates have a `Round`; such a row must stream.
    tell: a function that the decoding thread calls with `index` and each
      update; None if the scheduler's caller reads the updates.
    deadline: `time.monotonic()` at which the row ends in any case.
    is_cancelled: whether the row is to end without an update.
    num_accepted: accepted proposals in the rounds that updates had so far.
    num_passed: proposals in these rounds that passed Algorithm 1's test.
    slot_text: the text so far; None until `read` is called.
    passed_over: the outputs of a row that needs no decoding.
  """

  terms: Terms
  index: int
  inputs: Sequence[int] = ()
  prompt: Sequence[int] = ()
  widths: tuple[int, int] = (1, 1)
  example_id: int = 0
  temperature: float = 0.0
  max_length: int = 0
  streams: bool = False
  is_plain: bool = False
  shows_rounds: bool = False
  tell: Callable[[int, Update], None] | None = None
  deadline: float = math.inf
  is_cancelled: bool = False
  num_accepted: int = 0
  num_passed: int = 0
  num_told: int = 0  # number of tokens in the updates so far
  num_sent: int = 0  # number of characters in the updates so far
  num_read: int = 0  # number of tokens in `slot_text`
  slot_text: Text | None = None
  passed_over: Sequence[Completion] = ()

  @property
  def options(self) -> Options:
    """The options of the row's request."""
    return self.terms.options

  @property
  def is_simple(self) -> bool:
    """Whether the row is greedy, without log-probabilities and `min_length`."""
    options = self.options
    greedy = options.sampling.greedy and not options.min_length
    return greedy and not options.log_probs

  @property
  def kind(self) -> Any:
    """A dictionary key; rows of equal kinds have the same programs."""
    return self.terms.kind, self.is_plain, self.widths

  @property
  def ruled(self) -> Ruled:
    """The rules on the tokens of the row's output."""
    has_encoder = self.terms.codec.network.has_encoder
    before = len(self.prompt) - 1 if has_encoder else 0
    is_beam = self.options.num_beams is not None
    return Ruled(self.terms.rules, before, self.max_length, is_beam)

  def shortened(self, length: int) -> 'Row':
    """Returns a row like this one that streams at most `length` tokens."""
    length = min(length, self.terms.shared.slots)
    return dataclasses.replace(
      self, max_length=length, streams=True, tell=None, deadline=math.inf
    )

  def read(self, generation: Generation, slot: int) -> Text:
    """Adds the new tokens of a slot to the row's text; returns the text.

    A stop id at the end is left out.

    Args:
      generation: the outputs of all slots so far.
      slot: the slot of the row.
    """
    if self.slot_text is None:
      ends = self.options.stop_strings, self.options.min_length
      self.slot_text = Text(self.terms.codec.tokenizer, *ends)
    has_stop_id = bool(generation.finish_reason[slot] == FinishReason.STOP)
    end = int(generation.length[slot]) - has_stop_id
    tokens = np.asarray(generation.tokens[slot, self.num_read : end])
    self.slot_text.extend(tokens)
    self.num_read += len(tokens)
    return self.slot_text

  def update(self, view: PoolView, slot: int, is_last: bool) -> Update:
    """Returns the text and tokens since the row's last update.

    Text that later tokens could change waits for a later update.

    Args:
      view: the host's view of the pool.
      slot: the slot of the row.
      is_last: whether the row has finished.
    """
    generation, told = view.generation, self.num_told
    outputs: Sequence[Completion] = ()
    if is_last:
      done = self.terms.completion(generation, slot)
      if self.options.stop_strings:
        done = self.read(generation, slot).cut(done)
      text, tokens, log_probs = done.text, done.tokens, done.log_probs
      outputs = [done]
    else:
      length = int(generation.length[slot])
      text = self.read(generation, slot).ready
      tokens = generation.tokens[slot, :length].tolist()
      log_probs = generation.log_probs[slot, :length].tolist()
    log_probs = log_probs[told:] if self.options.log_probs else []
    new = text[self.num_sent :], tokens[told:], log_probs, outputs
    update = Update(*new, self._last_round(view, slot))
    self.num_sent, self.num_told = len(text), len(tokens)
    return update

  def _last_round(self, view: PoolView, slot: int) -> Round[int] | None:
    """Returns the row's last round.

    It is None if the row shows no rounds, or if no chain was proposed.

    Args:
      view: the host's view of a pool that has run one round.
      slot: the slot of the row.
    """
    draft, generation = view.draft, view.generation
    if not self.shows_rounds or draft is None or draft.tree is not None:
      return None
    proposed = draft.tokens[slot, : int(draft.length[slot])].tolist()
    end = int(generation.length[slot])
    new = generation.tokens[slot, self.num_told : end].tolist()
    accepted = int(generation.stats.num_accepted[slot]) - self.num_accepted
    passed = int(generation.stats.num_passed[slot]) - self.num_passed
    self.num_accepted += accepted
    self.num_passed += passed
    after = new[accepted] if accepted < len(new) else None
    as_block = self.terms.shared.judges_blocks
    return Round(proposed, accepted, after, passed if as_block else None)


def widest_of(
  rows: Iterable[Row], least: tuple[int, int] = (1, 1)
) -> tuple[int, int]:
  """Returns the greatest widths of inputs and prompts, at least `least`."""
  widths = zip(least, *(row.widths for row in rows), strict=True)
  inputs, prompts = map(max, widths)
  return inputs, prompts


def joined(
  rows: Sequence[Row],
  size: int | None = None,
  least: tuple[int, int] = (1, 1),
  shared: Request | None = None,
) -> Request:
  """Makes the request of rows that are prefilled in one call.

  Args:
    rows: the rows.
    size: B; placeholder rows, which have no text, fill up the batch to it. None
      is the number of rows.
    least: the least widths of inputs and prompts.
    shared: the request from which static fields and shared arrays are taken;
      None: `Terms.shared` of the first row.
  """
  shared = rows[0].terms.shared if shared is None else shared
  if size is not None:
    filler = dataclasses.replace(
      rows[0], inputs=(), prompt=(), widths=(1, 1), max_length=0
    )
    rows = [*rows, *[filler] * (size - len(rows))]

  def each(dtype: Any, values: Iterable[Any]) -> Any:
    return np.fromiter(values, dtype, len(rows))

  width, prompt_width = widest_of(rows, least)
  options = [row.options for row in rows]
  min_p = each(np.float32, (x.min_p for x in options))
  sampling = shared.sampling.replace(
    temperature=each(np.float32, (row.temperature for row in rows)),
    top_k=each(np.int32, (x.top_k for x in options)),
    top_p=each(np.float32, (x.top_p for x in options)),
    min_p=min_p if np.any(min_p) else None,
  )

  def padded(ids: Iterable[Sequence[int]], width: int, pad_id: int = 0):
    return padding.padded([*ids], len(rows), width, pad_id)

  prompt, prompt_length = padded((row.prompt for row in rows), prompt_width)
  stop_ids: Array = shared.stop_ids
  if np.ndim(stop_ids) > 1:  # the rows have different stop ids
    listed = (x.stop_ids or () for x in options)
    stop_ids, _ = padded(listed, stop_ids.shape[1], -1)
  max_length = each(np.int32, (row.max_length for row in rows))
  # Without an encoder the prompt is the input.
  texts = (row.inputs if len(row.inputs) else row.prompt for row in rows)
  read, _ = padded(texts, max(width, prompt_width), -1)
  ruled = [row.terms.rules for row in rows]
  end = prompt_length + max_length
  rules, automata = ruling_of(ruled, prompt_length, end, read)
  seeds = each(np.uint32, (x.seed & 0xFFFFFFFF for x in options))
  ids = each(np.uint32, (row.example_id for row in rows))
  return shared.replace(
    inputs=padded((row.inputs for row in rows), width, shared.pad_id)[0],
    prompt=prompt,
    prompt_length=prompt_length,
    stop_ids=stop_ids,
    keys=keys_of_rows(seeds, ids),
    sampling=sampling,
    min_length=each(np.int32, (x.min_length for x in options)),
    max_length=max_length,
    token_rules=rules,
    automata=automata,
  )


class TextRequest:
  """Texts with options, checked and encoded.

  It holds the ids of each text, but no padded arrays.

  Attributes:
    terms: the data that all rows share.
    rows: a `Row` for each output that is decoded; for a beam search, one for
      each text.
    passed_over: index among the outputs -> outputs that need no decoding, such
      as that of an empty text.
    num_outputs: the number of outputs of all texts; all beams of a search count
      as one.
  """

  def __init__(
    self,
    codec: Codec,
    config: EngineConfig,
    texts: Sequence[str | Sequence[int]],
    options: Options,
    rules: RowRules,
    drafting: Drafting,
    tree: TreeShape | None = None,
  ):
    """Checks the options, and encodes each text once.

    Args:
      codec: encodes the texts.
      config: the engine's settings, for the most tokens of inputs and outputs.
      texts: the texts.
      options: the options of the call, with `stop_ids` filled in.
      rules: the rules that the options ask for.
      drafting: the lengths of drafts, and when the drafter rests.
      tree: the tree that the drafter proposes; None: a chain.

    Raises:
      ValueError: an option does not fit the texts or the pair; or a text cannot
        be read and `on_too_long` is not 'report'.
    """
    self._codec, self._config = codec, config
    self._languages = codec.languages(options.source_lang, options.target_lang)
    shared = self._shared(options, drafting, tree)
    self.terms = Terms(options, rules, shared, codec)
    samples = options.num_samples // self.terms.num_outputs
    self.num_outputs = len(texts) * samples
    self.passed_over: dict[int, Sequence[Completion]] = {}
    self.rows: list[Row] = []
    self._check_sizes(len(texts))
    for number, text in enumerate(texts):
      ids = self._encode(number, text)
      for sample in range(samples):
        index = number * samples + sample
        if isinstance(ids, Completion):
          self.passed_over[index] = [ids] * self.terms.num_outputs
        else:
          self.rows.append(self._row(index, number, sample, ids))

  def _shared(
    self, options: Options, drafting: Drafting, tree: TreeShape | None
  ) -> Request:
    """Makes the request of one placeholder row, which has no text.

    Its static fields and shared arrays hold for all rows, see `Terms.shared`.

    Raises:
      ValueError: a length or a number of beams is above its limit.
    """
    codec, most = self._codec, self._config.max_decode_len
    network, gamma = codec.network, drafting.gamma
    stop_ids = [*(options.stop_ids or ())]
    # The token of a language is a prompt here, but output in transformers.
    has_language = bool(codec.languages().known) and options.prompts is None
    num_forced = int(has_language and not codec.tokenizer.language_last)
    beams = options.beam_settings(len(stop_ids), num_forced)
    longest = options.max_length or most
    limits = [('max_length', longest, most, 'max_decode_len = ')]
    limits += [('min_length', options.min_length, longest, 'max_length = ')]
    if beams is not None:
      widest = network.vocab_size // (beams.num_candidates // beams.width)
      limits += [('num_beams', beams.width, widest, '')]
      limits += [('draft_beams', beams.draft_width, network.vocab_size, '')]
      if not gamma:  # so that plain searches share one program
        beams = beams.replace(draft_width=beams.width)
    for name, value, limit, of in limits:
      if value > limit:
        raise unexpected(name, f'at most {of}{limit}', value)
    # None selects the simpler program without lenience.
    lenience: Array | None = None
    if gamma and options.lenience != 1:
      lenience = np.asarray(options.lenience, np.float32)
    # Greedy outputs are the same either way, so one program is enough.
    as_blocks = options.judges_blocks and not options.sampling.greedy
    if tree is not None and options.verification is None:
      as_blocks = False  # only a chain can be judged as a block
    # These are NumPy arrays, so that the call of a program moves all of them to
    # the device together.
    nothing = np.zeros((1, 1), np.int32)
    request = new_request(
      nothing,
      nothing,
      dataclasses.replace(options.sampling, temperature=0.0),
      slots=most,
      stop_ids=stop_ids,
      min_length=options.min_length,
      # All texts count, including those that are too long and passed over.
      greedy=options.sampling.greedy,
      with_log_probs=options.log_probs,
      lenience=lenience,
      verification='block' if as_blocks else 'token',
      beams=beams,
      drafting=drafting,
      tree=tree if gamma else None,
      pad_id=codec.network.pad_id,
    )
    if request.tree is not None:
      speculative.check_tree(request, request.tree.cut(gamma))
    return request

  def widen(self, least: tuple[int, int]) -> None:
    """Raises the rows' widths of inputs and prompts to at least `least`."""
    for row in self.rows:
      row.widths = widest_of([row], least)

  def _check_sizes(self, num_texts: int) -> None:
    """Checks the options that have a value for each text."""
    options = self.terms.options
    if options.prompts is not None and not self._codec.network.has_encoder:
      expected = 'None: texts are the prompts of a model without an encoder'
      raise unexpected('prompts', expected, options.prompts)
    for name in ('prompts', 'example_ids', 'temperature'):
      values = getattr(options, name)
      is_one = isinstance(values, float | int | None)
      if not is_one and len(values) != num_texts:
        raise unexpected(name, f'one for each of {num_texts} texts', values)
    ids = () if options.example_ids is None else options.example_ids
    if any(not 0 <= number < 1 << KEY_BITS for number in ids):
      raise unexpected('example_ids', 'numbers in [0, 2**32)', ids)

  def _encode(
    self, index: int, text: str | Sequence[int]
  ) -> list[int] | Completion:
    """Returns the ids of a text, or the completion of an unreadable text.

    Raises:
      ValueError: the text cannot be read, and `on_too_long` is not 'report'.
    """
    codec, limit = self._codec, self._config.max_input_len
    try:
      ids = codec.bare_ids(text)
      check_ids(f'Text {index}', ids, codec.network.input_vocab_size)
    except ValueError as error:
      return self._reported(error)
    if not ids and not codec.ids_around(text)[0]:
      return completion.passed_over('empty')
    first, last = codec.around(text, ids, self._languages)
    free = limit - len(first) - len(last)
    if len(ids) > free and self.terms.options.on_too_long != 'truncate':
      expected = f'at most max_input_len = {limit} tokens with start and end'
      values = f'Text {index}', expected, len(ids) + limit - free
      advice = "Shorten it, or set on_too_long='truncate'."
      return self._reported(unexpected(*values, advice))
    return [*first, *ids[:free], *last]

  def _reported(self, error: ValueError) -> Completion:
    """Returns the completion of a text that cannot be read, or raises."""
    if self.terms.options.on_too_long != 'report':
      raise error
    return completion.passed_over('error', str(error))

  def _row(
    self, index: int, number: int, sample: int, ids: Sequence[int]
  ) -> Row:
    """Makes the row of a sample of a text.

    Args:
      index: the position of the sample among all outputs.
      number: the position of the text among the texts.
      sample: the position of the sample among those of the text.
      ids: the ids of the text.
    """
    options, most = self.terms.options, self._config.max_input_len
    temperature: Any = options.sampling.temperature
    if isinstance(temperature, tuple):
      temperature = temperature[number]
    example = number
    if options.example_ids is not None:
      example = options.example_ids[number]
    inputs: Sequence[int] = ()
    prompt, width = ids, 1
    if has_encoder := self._codec.network.has_encoder:
      width = max(padding.SMALLEST_INPUT, padding.next_power_of_two(len(ids)))
      inputs, width = ids, min(width, most)
      given = () if options.prompts is None else options.prompts[number]
      begin = [int(token) for token in given]
      check_ids(f'Prompt {number}', begin, self._codec.network.vocab_size)
      prompt = self._codec.begin(self._languages, begin)
    # The prompt of a translation is usually just the language's token.
    smallest = 1 if self._languages.known else padding.SMALLEST_PROMPT
    # Add one to a power of two, because the first round reads the last token.
    prompt_width = 1 + max(smallest, padding.next_power_of_two(len(prompt) - 1))
    if not has_encoder:  # the prompt is the text, whose length is limited
      prompt_width = min(prompt_width, most)
    elif options.prompts is None and not self._languages.known:
      prompt_width = 1
    return Row(
      self.terms,
      index,
      inputs,
      prompt,
      widths=(width, prompt_width),
      example_id=example_id(example, sample),
      temperature=temperature,
      max_length=options.max_length or self._config.max_decode_len,
    )

  def completions(
    self, outputs: Mapping[int, Sequence[Completion]]
  ) -> list[Completion]:
    """Returns all completions, in the order of the texts.

    Args:
      outputs: index of each row -> its one output, or its best beams.
    """
    every = {**self.passed_over, **outputs}
    return [done for i in range(self.num_outputs) for done in every[i]]

  def sources(self) -> list[Source]:
    """Returns the input, prompt and rules of each of the `completions`.

    The input is the ids that the encoder reads, and the prompt the ids after
    the decoder's start token. Without an encoder all ids are input, and the
    prompt is ().
    """
    network = self._codec.network
    nothing = [network.start_id], (), Ruled(NO_RULES, 0, 1)
    sources: list[Source] = [nothing] * self.num_outputs
    for row in self.rows:
      sources[row.index] = row.prompt, (), row.ruled
      if network.has_encoder:
        sources[row.index] = row.inputs, row.prompt[1:], row.ruled
    return [source for source in sources for _ in range(self.terms.num_outputs)]
