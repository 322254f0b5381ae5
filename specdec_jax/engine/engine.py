"""`Engine` decodes strings with a target, and with a drafter if it has one."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax import partitioning
from specdec_jax.checks.fields import check_ids, check_type, unexpected
from specdec_jax.drafters import translation_memory
from specdec_jax.drafters.base import Drafter, check_chain
from specdec_jax.drafters.small_model import alone, as_drafter
from specdec_jax.drafters.with_fallback import with_fallback
from specdec_jax.engine import compilation_cache, pair, scoring, trace
from specdec_jax.engine.codec import Codec, check_texts, encoded_texts
from specdec_jax.engine.completion import Completion
from specdec_jax.engine.long_texts import LongTexts
from specdec_jax.engine.options import (
  EngineConfig,
  Options,
  drafting_of,
  options_of,
)
from specdec_jax.engine.padding import padded_rows
from specdec_jax.engine.pair import MemoryCheck
from specdec_jax.engine.programs import Programs
from specdec_jax.engine.request import TextRequest, Update, joined
from specdec_jax.engine.scheduler import PoolSettings, Scheduler
from specdec_jax.engine.trace import Trace
from specdec_jax.models import backend, cpu_layout
from specdec_jax.models.model import Model
from specdec_jax.request import Drafting, Request
from specdec_jax.rules.options import RuleBook
from specdec_jax.text.tasks import read_pairs
from specdec_jax.text.tokenizer import Tokenizer, Vocabulary
from specdec_jax.tree_shape import TreeShape
from specdec_jax.types import LengthRule, Positive

_PAIRS = 1 << 14  # pairs of a memory file that are tokenised together
USUAL_GAMMA = 4
# The expected tokens of a round (Equation 1), at the acceptance rate that the
# paper measured with T5-small for T5-XXL (Table 3, EnDe, greedy). By default, a
# drafter is used if the predicted speed-up is at least _LEAST_GAIN.
_USUAL_TOKENS = sum(0.75**i for i in range(1 + USUAL_GAMMA))
_LEAST_GAIN = 1.1
Texts = Sequence[str | Sequence[int]]
Gamma = int | str | LengthRule | None  # None: the engine's gamma


class Engine:
  """Decodes texts with a target, plainly or with a drafter's help.

  A program is compiled for each kind of request and each number of rows: 1, 2,
  4, 6, 8, 12, 16, 24, 32, ..., rounded up to a multiple of the devices that
  share the rows. Texts go through the smallest program that holds them; if that
  one has not been compiled yet, through a compiled one of up to twice as many
  rows, if there is one. Samples do not depend on which program is used.

  Attributes:
    config: the settings.
    codec: encodes texts for the target, and decodes its outputs.
    tokenizer: turns text into ids and back.
    rule_book: turns options into rules on tokens.
    programs: the compiled programs, which all schedulers of the engine share.
    fingerprints: 'target' and 'draft' -> `disk_arrays.fingerprint` of the
      parameters.
    target: the target's network; on several devices, its caches are split like
      its parameters.
    models: 'target', and 'draft' if a small model proposes -> the model that
      was given, without its parameters.
    params: the parameters of target and drafter, on the devices; the drafter's
      are None if there is no drafter.
    across_hosts: whether all processes must make the same calls at the same
      time.
    kernel_layout: how the target's kernels are stored, see `Placement`.
    fallback: whether the drafter rests where it makes decoding slower, and by
      which costs, see `EngineConfig`; it may be set between calls.

  Examples:
    >>> engine = sd.Engine(target, draft, gamma=4)
    >>> [done] = engine.generate(['Good morning!'])
    >>> done.text
    'Guten Morgen!'
  """

  def __init__(
    self,
    target: Model,
    drafter: Drafter | Model | None = None,
    config: EngineConfig | None = None,
    **fields: Any,
  ):
    """Checks that the pair fits and puts its parameters on the device.

    Args:
      target: the model whose distribution the output has.
      drafter: a `Drafter` or a small model, which proposes tokens; None for
        plain decoding only. A decoder-only drafter of a target with an encoder
        sees nothing of the input, and causes a warning.
      config: the settings.
      **fields: fields of `EngineConfig`, in place of those of `config`.

    Raises:
      ValueError: vocabularies or tokenizers differ; a setting is out of range;
        `bos_id` is not an id, or is given for a T5, whose texts begin with no
        such id; there is no tokenizer; a language is unknown, or is given for a
        target without languages; a checkpoint is broken; or devices or a model
        cannot be split as the placement says.
    """
    config = dataclasses.replace(config or EngineConfig(), **fields)
    self.config, self.fallback = config, config.fallback
    self.gamma = USUAL_GAMMA if config.gamma is None else config.gamma
    if not isinstance(target, Model):
      expected = 'a Model, such as specdec_jax.load or Model(network, params)'
      raise unexpected('target', expected, target)
    if drafter is not None:
      drafter = pair.fitted(target, as_drafter(drafter))
    tokenizer = _tokenizer_of(target, config)
    pair.check_pair(target, drafter, tokenizer)
    pair.check_positions(target, config.max_input_len)
    special = config.split_special_tokens, config.skip_special_tokens
    tokenizer = tokenizer.for_network(target.network.vocab_size, *special)
    self.tokenizer, self.codec = tokenizer, codec_of(target, tokenizer, config)
    if config.memory is not None:
      memory = _remembered(self.codec, config.memory)
      first = translation_memory.translation_memory(memory)
      pair.check_tables(target, first, tokenizer)
      drafter = first if drafter is None else with_fallback(first, drafter)
    compilation_cache.enable(config.cache_folder)
    placement = config.placement or partitioning.Placement()
    partitioning.check_dtypes(target, placement)
    placement = placement.for_model(target)
    self.across_hosts = placement.across_hosts
    self.kernel_layout = placement.layout
    memory_check = MemoryCheck(target, drafter, placement)
    memory_check.check(1, 1, config.max_decode_len, 1 + self.gamma)
    self.models = {'target': target.without_params()}
    if drafter is not None and (small := alone(drafter)) is not None:
      self.models['draft'] = small.without_params()
    placed = pair.placed_pair(target, drafter, placement)
    memory_check.mark_params_loaded()
    self.target, self.params = placed.target, placed.params
    self._cost_ratio = pair.relative_size(placed.params)
    self.fingerprints = placed.fingerprints
    self.programs = Programs(placed, placement.partition(), memory_check)
    self.rule_book = RuleBook(tokenizer, self.target.vocab_size)

  def __repr__(self) -> str:
    target = self.models['target']
    draft: Any = self.models.get('draft')
    if self.has_drafter and draft is None:
      draft = self.drafter.name or self.drafter.propose.__qualname__
    gamma = f'up to {self.gamma}' if self.drafting.adapts else self.gamma
    leaves = jax.tree.leaves(self.params.target)
    devices = {device for leaf in leaves for device in leaf.devices()}
    kind = next(iter(devices)).device_kind
    return (
      f'{type(self).__name__}({target=}, {draft=}, {gamma=},'
      f' devices={len(devices)} x {kind})'
    )

  @property
  def gamma(self) -> int:
    """The most proposals per round; it may be set between calls.

    It may be set to any gamma that the constructor accepts.

    Raises:
      ValueError: it is set to another value.
    """
    return self._drafting.gamma

  @gamma.setter
  def gamma(self, value: int | str | LengthRule) -> None:
    self._drafting = drafting_of(value)

  @property
  def drafting(self) -> Drafting:
    """The length of drafts, and when the drafter rests."""
    return drafting_of(self._drafting, self.fallback)

  @property
  def has_drafter(self) -> bool:
    """Whether there is a drafter."""
    return self.programs.has_drafter

  @property
  def drafter(self) -> Drafter:
    """The drafter, with its parameters on the devices.

    Raises:
      ValueError: there is no drafter.
    """
    return self.programs.drafter

  @property
  def tree(self) -> TreeShape | None:
    """The tree that the drafter proposes; None: it proposes a chain."""
    return self.drafter.tree if self.has_drafter else None

  @property
  def num_programs(self) -> int:
    """The number of programs of fixed batches compiled so far."""
    return self.programs.count

  def num_input_tokens(self, text: str | Sequence[int]) -> int:
    """Counts the tokens of a text as the target reads it.

    The number is 0 if there is nothing to read. If texts begin with a `bos_id`,
    the target reads this id even of an empty text.
    """
    return self.codec.num_input_tokens(text)

  def generate(
    self, texts: Texts, *, batch_size: int | None = None, **options: Any
  ) -> list[Completion]:
    """Decodes texts; a drafter changes the time, but not the distribution.

    Greedy outputs are those of the target alone, and samples have its
    distribution, unless `lenience` is below 1.

    Args:
      texts: any number of texts, as strings or as ids. Ids may end with the end
        of sequence or not.
      batch_size: the most texts that are decoded together; None is the
        engine's. If there are more, each finished text makes room for the next.
      **options: fields of `Options` and `RuleOptions`, such as `temperature`,
        `top_k`, `top_p`, `max_length`, `min_length`, `num_samples`,
        `stop_strings`, `stop_ids`, `num_beams`, `seed`, `example_ids` and
        `split`; names from other libraries, such as `max_new_tokens`,
        `num_return_sequences` and `stop`; and `gamma` and `speculative` of
        `text_request`.

    Returns:
      A `Completion` for each sample of each text, in order; with `num_samples`
      = 2, both of the first text, then both of the second. An empty text gives
      an empty completion. A beam search returns its `num_samples` best beams,
      from the worst to the best, as T5X sorts them.

    Raises:
      ValueError: an option is out of range or unknown, or a text is longer than
        `max_input_len` and `on_too_long` is 'error'.

    Examples:
      >>> texts = ['Good morning!', 'Where is the station?']
      >>> [done.text for done in engine.generate(texts)]
      ['Guten Morgen!', 'Wo ist der Bahnhof?']
    """
    if options.get('split') is not None:
      names = {'speculative', 'gamma'} & options.keys()
      call = {name: options.pop(name) for name in names}
      of_texts = self.options(**options)
      long = LongTexts(self.codec, self.config, texts, of_texts)
      call |= {'options': long.options, 'batch_size': batch_size}
      return [*long.joined(self.generate(long.parts, **call))]
    rows = self._rows(batch_size)
    request = self.text_request(texts, rows=rows, **options)
    done = self.scheduler(rows).generate(request)
    return _with_top(self, request, done, rows)

  def warmup(
    self, texts: Texts, *, batch_size: int | None = None, **options: Any
  ) -> float:
    """Compiles the smallest programs that hold these texts.

    `generate` then uses these programs and no larger ones, so that it can be
    timed.

    Args:
      texts: as for `generate`; only their number and lengths matter.
      batch_size: as for `generate`.
      **options: as for `generate`.

    Returns:
      Seconds that it took; 0.0 if everything had been compiled.

    Examples:
      >>> seconds = engine.warmup(['Good morning!'])
      >>> engine.warmup(['Good night!'])  # of the same shape
      0.0
    """
    rows = self._rows(batch_size)
    request = self.text_request(texts, rows=rows, **options)
    return self.scheduler(rows).warmup(request)

  def stream(self, text: str | Sequence[int], **options: Any) -> Iterator[str]:
    """Yields the output of one text piece by piece, as rounds finish.

    Text that has been yielded never changes: a piece ends before a character
    whose bytes are not complete, and before text that may become a stop string.
    The pieces together are the text of `generate`.

    Args:
      text: the input.
      **options: as for `generate`.

    Raises:
      ValueError: an error of `generate`; several samples are asked for; or the
        target's logits became invalid.

    Examples:
      >>> ''.join(engine.stream('Good morning!'))
      'Guten Morgen!'
    """
    for update in self.updates(self.text_request([text], **options)):
      if update.text:
        yield update.text

  def updates(
    self, request: TextRequest, shows_rounds: bool = False
  ) -> Iterator[Update]:
    """Yields an update after each round of a request that has one output.

    Args:
      request: the request, made by `text_request`.
      shows_rounds: whether the updates have `Update.round`.

    Raises:
      ValueError: the request has beams or several samples, or the target's
        logits became invalid.
    """
    if (num_beams := request.terms.options.num_beams) is not None:
      expected = 'None in a stream, for no beam is known before its end'
      raise unexpected('num_beams', expected, num_beams)
    if len(request.rows) > 1:
      raise unexpected('num_samples', '1 in a stream', len(request.rows))
    for row in request.rows:
      row.streams, row.shows_rounds = True, shows_rounds
    scheduler = self.scheduler(1)
    scheduler.submit(request.rows)
    for _, update in scheduler.drain():
      for done in update.outputs:
        if done.finish_reason == 'error':
          raise ValueError(done.error)
      yield update

  def score(
    self,
    texts: Texts,
    targets: Texts,
    *,
    source_lang: str | None = None,
    target_lang: str | None = None,
  ) -> list[scoring.Score]:
    """Returns the target's log-probability of each output, given its text.

    Args:
      texts: strings, or ids with or without their end of sequence.
      targets: the outputs, as strings, whose end of sequence is scored too; or
        as ids, which are scored as they are.
      source_lang: language of the texts; None is the engine's.
      target_lang: language of the outputs; None is the engine's.

    Returns:
      A `scoring.Score` for each output, with natural logarithms at temperature
      1.

    Raises:
      ValueError: the numbers of texts and outputs differ, an id is outside the
        vocabulary, a decoder-only target has nothing to read, or an example is
        neither text nor ids.

    Examples:
      >>> texts = ['Good morning!', 'Good morning!']
      >>> good, bad = engine.score(texts, ['Guten Morgen!', 'Gute Nacht!'])
      >>> good.total > bad.total
      True
    """
    check_texts(texts)
    check_texts(targets, 'targets')
    ids = self.codec.output_ids
    outputs = [
      ids(x) if isinstance(x, str) else [*map(int, x)] for x in targets
    ]
    inputs = [self.codec.input_ids(text, source_lang) for text in texts]
    begin = self.codec.begin(self.codec.languages(target_lang=target_lang))
    params = self.params.target
    return scoring.score(self.target, params, inputs, outputs, begin)

  def classify(
    self,
    texts: Texts,
    labels: Texts,
    *,
    source_lang: str | None = None,
    target_lang: str | None = None,
  ) -> np.ndarray:
    """Returns the probability of each label, normalised over the labels.

    Args:
      texts: strings, or ids with or without their end of sequence.
      labels: strings, or ids without their end of sequence.
      source_lang: language of the texts; None is the engine's.
      target_lang: language of the labels; None is the engine's.

    Returns:
      float64[texts, labels]; each row sums to 1. The values of a row are
      proportional to the probabilities that `score` gives to the labels.

    Raises:
      ValueError: an error of `score` or `label_ids`; or there are no labels,
        one occurs twice, or there are too many.

    Examples:
      >>> probs = engine.classify(
      ...   ['Good morning!'], ['Guten Morgen!', 'Danke!']
      ... )
      >>> probs.shape, bool(probs[0, 0] > 0.5)
      ((1, 2), True)
    """
    check_texts(texts)
    outputs, params = self.label_ids(labels), self.params.target
    inputs = [self.codec.input_ids(text, source_lang) for text in texts]
    begin = self.codec.begin(self.codec.languages(target_lang=target_lang))
    return scoring.classify(self.target, params, inputs, outputs, begin)

  def label_ids(self, labels: Texts) -> list[list[int]]:
    """Returns the ids of labels, each with its end of sequence.

    Raises:
      ValueError: a label is neither text nor ids, or the vocabulary cannot
        spell it.
    """
    check_texts(labels, 'labels')
    for label in labels:
      self.rule_book.encoded('labels', label)
    return [self.codec.output_ids(label) for label in labels]

  def trace(self, text: str | Sequence[int], **options: Any) -> Trace:
    """Decodes one text and reports which proposals were accepted.

    Args:
      text: the input.
      **options: as for `generate`, including `gamma`. With `stop_strings` the
        last round keeps the tokens that it produced past the string.

    Returns:
      The rounds, as an object that a terminal (rich) and a notebook can show.

    Raises:
      ValueError: an error of `generate`, or there is no drafter that proposes a
        chain.

    Examples:
      >>> engine.trace('Good morning!')
      Trace('Good morning!': 5 tokens in ... calls of the target; ...)
    """
    check_chain(self.drafter, 'trace')
    request = self.text_request([text], True, **options)
    updates = self.updates(request, shows_rounds=True)
    spelled = trace.spell(trace.rounds_of(updates), self.tokenizer)
    if not isinstance(text, str):
      text = self.tokenizer.decode(text)
    return Trace(text, spelled, request.terms.options.lenience)

  def scheduler(self, settings: PoolSettings | int | None = None) -> Scheduler:
    """Makes a scheduler that runs the engine's programs.

    Args:
      settings: the settings of a pool of slots, which then decodes all rows; or
        the most rows that are decoded together, as one batch where that is
        quicker. None is the engine's `batch_size`.
    """
    if isinstance(settings, PoolSettings):
      return Scheduler(self.programs, settings)
    rows = PoolSettings(rows=self._rows(settings))
    return Scheduler(self.programs, rows, in_batches=True)

  def _rows(self, batch_size: int | None) -> int:
    """Returns a call's batch size, the engine's if it is None.

    Raises:
      ValueError: the batch size is not a positive integer.
    """
    rows = self.config.batch_size if batch_size is None else batch_size
    check_type('batch_size', rows, Positive)
    return rows

  def options(self, options: Options | None = None, **named: Any) -> Options:
    """Makes `Options`; rules that are not given come from the target's folder.

    Args:
      options: the options; None makes them of `named`.
      **named: fields of `Options`, or other libraries' names of them.
    """
    rules = self.models['target'].rules
    # forced_bos_token_id of a multilingual model is the code of the output's
    # language, with which the prompt begins already.
    if self.codec.languages().known:
      rules = {k: v for k, v in rules.items() if k != 'forced_bos_token_id'}
    if options is None:
      return options_of(named, rules)
    left = {k: value for k, value in rules.items() if k not in options.rules}
    return dataclasses.replace(options, **left) if left else options

  def text_request(
    self,
    texts: Texts,
    speculative: bool | None = None,
    *,
    gamma: Gamma = None,
    options: Options | None = None,
    rows: int = 1,
    **named: Any,
  ) -> TextRequest:
    """Checks and encodes texts for a scheduler.

    Args:
      texts: as for `generate`.
      speculative: whether to use the drafter. None uses it if there is one,
        except on a CPU for beam searches, and for greedy rows where
        `speculation_pays` returns False.
      gamma: the gamma of this call, as in `EngineConfig`; None is the engine's.
      options: the options; None makes them of `named`.
      rows: the most rows that are decoded together.
      **named: fields of `Options`, or other libraries' names of them.

    Raises:
      ValueError: an option is out of range or unknown, or a text is longer than
        `max_input_len` and `on_too_long` is 'error'.
    """
    check_texts(texts)
    options = self.options(options, **named)
    if options.split is not None:
      expected = 'None: only Engine.generate and a run split texts'
      raise unexpected('split', expected, options.split)
    check_type('speculative', speculative, bool | None)
    if speculative is None:
      drafts = options.num_beams is None or backend.kind() != 'cpu'
      if gamma is None and drafts and options.sampling.greedy:
        drafts = self.speculation_pays(min(rows, padded_rows(len(texts))))
      speculative = self.has_drafter and drafts
    drafting = Drafting()
    if speculative:
      chosen = self._drafting if gamma is None else gamma
      drafting = drafting_of(chosen, self.fallback)
      pair.check_drafts(self.drafter, drafting.adapts, options.num_beams)
    given = options.stop_ids
    stop_ids = [*map(int, self.codec.stop_ids if given is None else given)]
    check_ids('stop_ids', stop_ids, self.target.vocab_size)
    options = dataclasses.replace(options, stop_ids=stop_ids)
    rules = self.rule_book.rules_of(options, stop_ids)
    return TextRequest(
      self.codec, self.config, texts, options, rules, drafting, self.tree
    )

  def speculation_pays(self, rows: int) -> bool:
    """Returns whether drafts of the default gamma should make decoding faster.

    The prediction uses the costs of calls that were measured on this processor,
    see `cpu_layout.call_cost`, and the acceptance rate of a usual drafter. The
    result is True without a prediction if the device is not one CPU, if nothing
    was measured, if the drafter proposes a tree, or if the user chose a gamma.

    Args:
      rows: the number of greedy rows that are decoded together.
    """
    usual = drafting_of(USUAL_GAMMA, self.fallback)
    was_chosen = self.config.gamma is not None or self.drafting != usual
    proposes_chain = self.has_drafter and self.tree is None
    if was_chosen or not proposes_chain or not backend.is_one_cpu():
      return True
    cost = cpu_layout.call_cost(rows, 1 + USUAL_GAMMA)
    if cost is None:
      return True
    a_round = cost + USUAL_GAMMA * self._cost_ratio
    return _USUAL_TOKENS >= _LEAST_GAIN * a_round

  def request(
    self, texts: Texts, gamma: Gamma = None, **options: Any
  ) -> Request:
    """Makes the `Request` of `generate`, for a caller with its own loop.

    Args:
      texts: the texts, none of them empty.
      gamma: the gamma of the request; None is the engine's.
      **options: as for `generate`.

    Raises:
      ValueError: an error of `generate`, or a text is empty.
    """
    made = self.text_request(texts, gamma=gamma, **options)
    if made.passed_over or not made.rows:
      raise unexpected('texts', 'no empty text in a request', texts)
    request_of = functools.partial(joined, made.rows)
    return self.programs.exactly(request_of, len(made.rows))


def _tokenizer_of(target: Model, config: EngineConfig) -> Vocabulary:
  """Opens the tokenizer of the settings, or returns the target's own.

  Raises:
    ValueError: there is no tokenizer, or it cannot be read.
  """
  tokenizer = config.tokenizer
  if tokenizer is None:
    tokenizer = pair.own_vocabulary(target)
  elif isinstance(tokenizer, str | os.PathLike):
    tokenizer = Tokenizer(tokenizer)
  if not isinstance(tokenizer, Vocabulary):
    expected = 'a Tokenizer, another Vocabulary, or a path'
    raise unexpected('tokenizer', expected, tokenizer)
  return tokenizer


def codec_of(
  target: Model, tokenizer: Vocabulary, config: EngineConfig
) -> Codec:
  """Makes the codec of a target, for the settings of an engine.

  Raises:
    ValueError: `bos_id` or a language does not fit the target.
  """
  bos_id = target.bos_id if config.bos_id is None else config.bos_id
  if bos_id is None:
    bos_id = pair.first_id(target.network, tokenizer)
  pair.check_bos(bos_id, target.network)
  ends = bos_id, target.stop_ids, config.source_lang, config.target_lang
  forced = target.rules.get('forced_bos_token_id')
  return Codec(tokenizer, target.network, *ends, forced)


def _remembered(
  codec: Codec, path: str | os.PathLike[str]
) -> translation_memory.Memory:
  """Reads a memory file, with ids as a target reads and produces them."""
  languages = codec.languages()
  *begin, end = codec.output_ids('')
  tokenizer = codec.tokenizer

  def texts(pairs: Iterator[tuple[str, str]]) -> Iterator[list[int]]:
    while some := [*itertools.islice(pairs, _PAIRS)]:
      sources, targets = zip(*some, strict=True)
      inputs = encoded_texts(tokenizer.inputs, sources)
      outputs = encoded_texts(tokenizer, targets)
      for source, ids, output in zip(sources, inputs, outputs, strict=True):
        if source:
          first, last = codec.around(source, ids, languages)
          ids = [*first, *ids, *last]
        yield [*ids, *begin, *output, end]

  return translation_memory.remember(texts(read_pairs(os.fspath(path))))


def _with_top(
  engine: Engine, request: TextRequest, outputs: list[Completion], rows: int
) -> list[Completion]:
  """Adds `top_log_probs` to completions, if the request asks for them.

  The target reads the outputs once more for this.

  Args:
    engine: the engine that decoded the request.
    request: the request that was decoded.
    outputs: the completions of the request.
    rows: the number of outputs that the target reads together.
  """
  num_top = request.terms.options.top_log_probs
  if not num_top:
    return outputs
  done, sources = list[Completion](), request.sources()
  model = engine.target, engine.params.target
  first: Sequence[int] = ()
  if request.rows and engine.target.has_encoder:
    first = request.rows[0].prompt[:1]  # the decoder's first id
  for at in range(0, len(outputs), rows):
    inputs, begins, ruled = zip(*sources[at : at + rows], strict=True)
    pairs = [*zip(outputs[at : at + rows], begins, strict=True)]
    targets = [[*begin, *output.tokens] for output, begin in pairs]
    options = dict(num_top=num_top, ruled=ruled)
    scores = scoring.score(*model, inputs, targets, first, **options)
    for (output, begin), score in zip(pairs, scores, strict=True):
      log_probs = list(score.log_probs[len(begin) :])
      top = score.top[len(begin) :]
      done.append(
        dataclasses.replace(output, log_probs=log_probs, top_log_probs=top)
      )
  return done
