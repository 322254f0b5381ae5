"""Strings in, strings out: an engine with a target and perhaps a drafter."""

import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax import partitioning
from specdec_jax.checks.fields import (
  check_number,
  check_type,
  nearest,
  unexpected,
)
from specdec_jax.decoding.loop import Loop, generation
from specdec_jax.decoding.pool import PoolPrograms
from specdec_jax.decoding.resting import guessed
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import DecodeState
from specdec_jax.drafters.base import Drafter
from specdec_jax.drafters.only_token import only_token
from specdec_jax.drafters.small_model import alone, as_drafter
from specdec_jax.drafters.translation_memory import (
  Memory,
  remember,
  translation_memory,
)
from specdec_jax.drafters.with_fallback import with_fallback
from specdec_jax.engine import compilation_cache, pair, scoring, trace
from specdec_jax.engine.classification import classify
from specdec_jax.engine.completion import Completion
from specdec_jax.engine.long_texts import LongTexts
from specdec_jax.engine.pair import MemoryCheck
from specdec_jax.engine.request import (
  Languages,
  TextBatch,
  as_gamma,
  check_texts,
  encoded,
  encoded_texts,
  options_of,
)
from specdec_jax.engine.scheduler import Continuous, PoolSettings, Update
from specdec_jax.engine.trace import Trace
from specdec_jax.models import backend
from specdec_jax.models.model import Model
from specdec_jax.request import Drafting, Request, RestPolicy
from specdec_jax.rules.options import RuleBook
from specdec_jax.text.chat import RenderedIds
from specdec_jax.text.tasks import read_pairs
from specdec_jax.text.tokenizer import Tokenizer, Vocabulary
from specdec_jax.tree_shape import TreeShape
from specdec_jax.types import FinishReason, Generation, LengthRule

_PAIRS = 1 << 14  # of a memory that are tokenised together
_NO_DRAFTER = (
  'Speculative decoding needs a drafter: Engine(target, drafter), or call with'
  ' speculative=False.'
)
_USUAL_GAMMA = 4
_CONSTRAINED = 'constrained'  # the loop where a drafter does not know rules
Texts = Sequence[str | Sequence[int]]
Gamma = int | str | LengthRule | None  # None is the engine's


class Engine:
  """Decodes texts with a target, plainly or with a drafter's help.

  A program is compiled for each kind of request and each number of rows: 1, 2,
  4, 6, 8, 12, 16, 24, 32, ..., rounded up to a multiple of the devices that
  share the rows. Texts go through the smallest program that holds them; if that
  one has not been compiled yet, through a compiled one of up to twice as many
  rows, if there is one. Samples do not depend on which program is used.

  Attributes:
    tokenizer: turns text into ids and back.
    fingerprints: 'target' and 'draft' -> `disk_arrays.fingerprint` of what was
      loaded.
    max_input_len: tokens an input may have, its end included.
    max_decode_len: tokens an output may have, its end included.
    batch_size: the most texts that are decoded together.
    bos_id: the id that the texts that a target reads begin with; None is none.
    stop_ids: ids that end an output unless a call gives others.
    source_lang: language of the texts unless a call gives another; None is
      none. A model that translates between many needs one.
    target_lang: that of the outputs, likewise.
    target: the target's network; over several devices, as `follow` gives it.
    models: 'target', and 'draft' if a small model proposes -> the model that
      was given, without its parameters.
    params: the parameters of both, as they are placed; the drafter's are None
      if there is no drafter.
    room: checks whether a run could fit into the memory of the devices.
    across_hosts: whether all processes must make the same calls at the same
      time.
    chooses_gamma: whether nobody has said what gamma is, so that a run may
      choose it.
    kernel_layout: how the target's kernels are stored, see `Placement`.

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
    *,
    tokenizer: Vocabulary | str | os.PathLike[str] | None = None,
    gamma: int | str | LengthRule | None = None,
    max_input_len: int = 128,
    max_decode_len: int = 128,
    batch_size: int = 32,
    bos_id: int | None = None,
    placement: partitioning.Placement | None = None,
    cache_folder: str | os.PathLike[str] | None = None,
    fallback: bool | RestPolicy = False,
    source_lang: str | None = None,
    target_lang: str | None = None,
    split_special_tokens: bool | None = None,
    skip_special_tokens: bool | None = None,
    memory: str | os.PathLike[str] | None = None,
  ):
    """Checks that the pair fits and puts its parameters on the device.

    Args:
      target: the model whose distribution the output has.
      drafter: what proposes tokens: any `Drafter`, or a small model (see
        `small_model`); None for plain decoding only. A decoder-only drafter of
        a target with an encoder sees nothing of the input; a warning says so.
      tokenizer: the tokenizer of both, or its path, see `Tokenizer`; None
        is the target's own.
      gamma: tokens that the drafter proposes per round; 'adaptive' ends a draft
        where the drafter is not sure enough. A calibration's rule, too, see
        `drafters.length`. None is 4, or what a run chooses.
      max_input_len: tokens of the longest input.
      max_decode_len: tokens of the longest output.
      batch_size: the most texts that are decoded together. If there are more,
        each finished text makes room for the next.
      bos_id: id put in front of each text of a target whose texts begin with
        one (all but T5), which can then also decode an empty text. None is the
        target's own (bos_token_id of its folder; what the vocabulary of Llama,
        Qwen, Gemma or T5Gemma says, Qwen's none); else the end of sequence of a
        BPE vocabulary, as in GPT-2, or id 0, as in models trained here and
        T5X's.
      placement: dtype and layout of the target's parameters, and the devices
        that they and the rows of a batch are split over. Its dtype is that
        which the target was loaded with, if it was; another is refused.
        Each device holds the whole drafter, in the dtype that it was loaded
        with, or else the target's.
      cache_folder: folder of compiled programs; None is the user's cache
        folder.
      fallback: whether the drafter rests where a text's acceptance makes it
        slower than plain decoding, see `decoding.resting`. True goes by
        guessed costs, a `RestPolicy` (of `Choice.rests`) by measured ones.
      source_lang: language of the texts, such as 'eng_Latn', of a model that
        translates between many, unless a call gives another.
      target_lang: language of the outputs, such as 'deu_Latn'.
      split_special_tokens: whether names of special tokens in a text are text;
        see `Tokenizer`, whose own setting is taken if it is None.
      skip_special_tokens: whether special tokens have no text in an output;
        None takes the tokenizer's own setting.
      memory: file of texts of before, which propose first, see
        `translation_memory`: pairs (.tsv), records of `specdec decode`
        (predictions.jsonl) or of a task (.jsonl), or lines of outputs.

    Raises:
      ValueError: vocabularies or tokenizers differ, a number is too small,
        or too large for any memory, `bos_id` is not an id or the target is a
        T5, whose texts begin with none, there is no tokenizer, a language is
        not known or the target has none, a checkpoint is broken, or devices or
        a model cannot be split as a placement says.
    """
    check_type('fallback', fallback, bool | RestPolicy)
    check_type('placement', placement, partitioning.Placement | None)
    check_type('split_special_tokens', split_special_tokens, bool | None)
    check_type('skip_special_tokens', skip_special_tokens, bool | None)
    check_type('cache_folder', cache_folder, str | os.PathLike | None)
    check_type('memory', memory, str | os.PathLike | None)
    self.chooses_gamma = gamma is None
    self.gamma = _USUAL_GAMMA if gamma is None else gamma
    self.fallback = fallback
    check_number('max_input_len', max_input_len, 2)
    check_number('max_decode_len', max_decode_len, 1)
    check_number('batch_size', batch_size, 1)
    if not isinstance(target, Model):
      expected = 'a Model, such as specdec_jax.load or Model(network, params)'
      raise unexpected('target', expected, target)
    if drafter is not None:
      drafter = pair.fitted(target, as_drafter(drafter))
    if tokenizer is None:
      tokenizer = pair.own_vocabulary(target)
    elif isinstance(tokenizer, str | os.PathLike):
      tokenizer = Tokenizer(tokenizer)
    if not isinstance(tokenizer, Vocabulary):
      expected = 'a Tokenizer, another Vocabulary, or a path'
      raise unexpected('tokenizer', expected, tokenizer)
    pair.check_pair(target, drafter, tokenizer)
    tokenizer = tokenizer.for_network(
      target.network.vocab_size, split_special_tokens, skip_special_tokens
    )
    bos_id = target.bos_id if bos_id is None else bos_id
    if bos_id is None:
      bos_id = pair.first_id(target.network, tokenizer)
    pair.check_bos(bos_id, target.network)
    self.tokenizer, self.target = tokenizer, target.network
    self.source_lang, self.target_lang = source_lang, target_lang
    self.languages()  # or an error
    self.bos_id = bos_id
    self.stop_ids = target.stop_ids or (tokenizer.eos_id,)
    if memory is not None:
      first = translation_memory(self._memory(os.fspath(memory)))
      pair.check_tables(target, first, tokenizer)
      drafter = first if drafter is None else with_fallback(first, drafter)
    compilation_cache.enable(cache_folder)
    placement = placement or partitioning.Placement()
    partitioning.check_dtypes(target, placement)
    placement = placement.for_model(target)
    self._partition = placement.partition()
    self.across_hosts = placement.across_hosts
    self.kernel_layout = placement.layout
    self.room = MemoryCheck(target, drafter, placement)
    self.room.check(1, 1, max_decode_len, 1 + self.gamma)
    self.max_input_len = max_input_len
    self.max_decode_len = max_decode_len
    self.batch_size = batch_size
    self.models = {'target': target.without_params()}
    if drafter is not None and (small := alone(drafter)) is not None:
      self.models['draft'] = small.without_params()
    self.target, drafter, self.params, self.fingerprints = pair.placed_pair(
      target, drafter, placement
    )
    self.room.mark_params_loaded()
    plain = PairParams(self.params.target, None)
    self._loops: dict[Any, tuple[Loop, PairParams]] = {
      False: (Loop(self.target), plain)
    }
    if drafter is not None:
      self._loops[True] = Loop(self.target, drafter), self.params
      if drafter.tree is None and not drafter.follows_rules:
        params = PairParams(self.params.target, ((), self.params.draft))
        ahead = Loop(self.target, with_fallback(only_token(), drafter))
        self._loops[_CONSTRAINED] = ahead, params
    # Of each loop and kind and shape of request, and the rows that these have.
    self._programs: dict[Any, Callable[..., Any]] = {}
    self._program_rows: set[int] = set()
    self.rule_book = RuleBook(tokenizer, self.target.vocab_size)
    self._pool_of = functools.cache(functools.partial(Continuous, self))
    self._pool_programs: dict[Any, PoolPrograms] = {}

  def __repr__(self) -> str:
    target: Any = self.models['target']
    draft: Any = self.models.get('draft')
    if self.has_drafter and draft is None:
      draft = self.drafter.name or self.drafter.propose.__qualname__
    gamma = f'up to {self.gamma}' if self.rule else self.gamma
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

    What it may be set to is what the engine can be made with.

    Raises:
      ValueError: it is set to something else.
    """
    return self._gamma

  @gamma.setter
  def gamma(self, value: int | str | LengthRule) -> None:
    self._gamma, self._rule = as_gamma(value)

  def drafting_of(
    self,
    gamma: int,
    rule: LengthRule | None,
    measured: RestPolicy | None = None,
  ) -> Drafting:
    """How rows are drafted for with `gamma` proposals at most.

    Args:
      gamma: proposals at most; 0 decodes plainly.
      rule: when a draft ends earlier.
      measured: by which costs the drafter rests, if it does at all. None is
        those of the engine, which are of its own gamma: others are guessed.
    """
    if not gamma:
      return Drafting()
    if not self.fallback:
      return Drafting(gamma, rule)
    rests = measured or self.fallback
    if rests is True or len(rests.costs) != gamma + 1:
      rests = guessed(gamma, rule is not None)
    return Drafting(gamma, rule, rests)

  @property
  def rule(self) -> LengthRule | None:
    """When a draft ends, if gamma was set to 'adaptive' or to a rule."""
    return self._rule

  @property
  def batch_multiple(self) -> int:
    """The devices that rows are split over: rows are a multiple of them."""
    return self._partition.row_multiple if self._partition else 1

  @property
  def tree(self) -> TreeShape | None:
    """The tree that the drafter proposes; None is a chain."""
    return self.drafter.tree if self.has_drafter else None

  @property
  def has_drafter(self) -> bool:
    """Whether there is a drafter."""
    return True in self._loops

  @property
  def drafter(self) -> Drafter:
    """The drafter, with its parameters as they are placed.

    Raises:
      ValueError: there is no drafter.
    """
    drafter: Any = self.loop(True)[0].drafter
    return drafter

  def loop(self, speculative: bool) -> tuple[Loop, PairParams]:
    """The speculative or the plain loop, and the parameters that it takes.

    Raises:
      ValueError: the speculative loop is asked for, and there is no drafter.
    """
    if speculative not in self._loops:
      raise ValueError(_NO_DRAFTER)
    return self._loops[speculative]

  def loop_of(self, request: Request) -> tuple[Loop, PairParams]:
    """The loop that decodes a request: without proposals the plain one."""
    if request.gamma and request.automata and _CONSTRAINED in self._loops:
      return self._loops[_CONSTRAINED]
    return self.loop(request.gamma > 0)

  def languages(
    self, source_lang: str | None = None, target_lang: str | None = None
  ) -> Languages:
    """Tokens of these languages; where one is None, of the engine's.

    Raises:
      ValueError: a language is not known, or the target has none.
    """
    # A model without an encoder has no use for languages.
    known: Mapping[str, int] = {}
    if self.target.has_encoder:
      known = self.tokenizer.languages
    asked = {
      'source_lang': source_lang or self.source_lang,
      'target_lang': target_lang or self.target_lang,
    }
    for name, language in asked.items():
      check_type(name, language, str | None)
      if language is not None and not known:
        expected = 'None, for this model has no tokens of languages'
        raise unexpected(name, expected, language)
      if language is not None and language not in known:
        near = nearest(language, known, or_all=False).strip()
        advice = near or f'One is {next(iter(known))!r}.'
        path = self.tokenizer.path
        expected = f'one of the {len(known)} languages of {path!r}'
        raise unexpected(name, expected, language, advice)
    return Languages(known, *(known.get(name or '') for name in asked.values()))

  def ids_around(
    self, text: str | Sequence[int] = ''
  ) -> tuple[list[int], list[int]]:
    """Ids before and after a text as the target reads it.

    An encoder's text ends with the end of sequence, if it does in its family. A
    decoder's does not: the decoder continues the text. Around a rendered chat
    there is nothing.
    """
    if isinstance(text, RenderedIds):
      return [], []
    if self.target.has_encoder and self.target.ends_inputs:
      return [*self.tokenizer.before], [*self.tokenizer.after]
    return [] if self.bos_id is None else [self.bos_id], []

  def bare_ids(self, text: str | Sequence[int]) -> list[int]:
    """The ids of a text; of given ids those between `bos_id` and an end."""
    ids = encoded(self.tokenizer, text)
    if isinstance(text, str | RenderedIds):
      return ids
    first, last = self.ids_around()
    last = last or [self.tokenizer.eos_id]
    if ids[-len(last) :] == last:
      del ids[-len(last) :]
    return ids[len(first) :] if ids[: len(first)] == first else ids

  def input_ids(
    self, text: str | Sequence[int], source_lang: str | None = None
  ) -> list[int]:
    """The ids of a text as the target reads them.

    The text may also be given as ids, with or without the id that texts begin
    with, their end of sequence, and the token of their language.

    Raises:
      ValueError: as for `languages`; or `source_lang` is missing.
    """
    first, last = self.ids_around(text)
    ids = self.bare_ids(text)
    language = self.languages(source_lang).before_text(text, ids)
    return [*first, *language, *ids, *last]

  def output_ids(self, text: str) -> list[int]:
    """The ids of a text as the target would say it, with what ends it."""
    end = self.tokenizer.eos_id
    end = end if end in self.stop_ids else self.stop_ids[0]
    begins = self.target.has_encoder and self.target.ends_inputs
    first = self.ids_around()[0] if begins else []
    return [*first, *encoded(self.tokenizer, text), end]

  def _memory(self, path: str) -> Memory:
    """A memory of the texts of a file, as this engine reads and says them."""
    first, last = self.ids_around()
    languages = self.languages()
    *begin, end = self.output_ids('')

    def texts(pairs: Iterator[tuple[str, str]]) -> Iterator[list[int]]:
      while some := [*itertools.islice(pairs, _PAIRS)]:
        sources, targets = zip(*some, strict=True)
        reads = encoded_texts(self.tokenizer, sources)
        says = encoded_texts(self.tokenizer, targets)
        for source, read, said in zip(sources, reads, says, strict=True):
          if source:
            read = [*first, *languages.before_text(source, read), *read, *last]
          yield [*read, *begin, *said, end]

    return remember(texts(read_pairs(path)))

  def num_input_tokens(self, text: str | Sequence[int]) -> int:
    """Tokens of a text as the target reads it; 0 if there is nothing to read.

    Of an empty text, a target with a `bos_id` reads that id.
    """
    first, _ = self.ids_around(text)
    return len(self.input_ids(text)) if first or self.bare_ids(text) else 0

  def request(
    self, texts: Texts, gamma: Gamma = None, **options: Any
  ) -> Request:
    """The `Request` that `generate` would make, for a caller with its own loop.

    Args:
      texts: the texts, none of them empty.
      gamma: as for `text_batch`.
      **options: as for `generate`.

    Raises:
      ValueError: as for `generate`; or a text is empty.
    """
    batch = self.text_batch(texts, gamma=gamma, **options)
    if batch.passed_over:
      raise unexpected('texts', 'no empty text in a request', texts)
    return batch.request

  @property
  def num_programs(self) -> int:
    """How many programs have been compiled so far."""
    return len(self._programs)

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
    begin, before = time.perf_counter(), self.num_programs
    batch = self.text_batch(texts, **options)
    pool, rows = self._pool(batch, batch_size)
    if pool is not None:
      return pool.warmup(batch)
    for part in batch.parts(rows):
      self._program('decode', part.request)
    return time.perf_counter() - begin if self.num_programs > before else 0.0

  def generate(
    self, texts: Texts, *, batch_size: int | None = None, **options: Any
  ) -> list[Completion]:
    """Decodes texts; with the drafter's help, as the target alone would.

    Args:
      texts: any number, as strings or as ids with or without their end of
        sequence.
      batch_size: texts that are decoded together; None is the engine's. If
        there are more, each finished text makes room for the next.
      **options: fields of `Options` and `RuleOptions`, such as `temperature`,
        `top_k`, `top_p`,
        `max_length`, `min_length`, `num_samples`, `stop_strings`, `stop_ids`,
        `num_beams`, `seed`, `example_ids` and `split`; names from other
        libraries, such as `max_new_tokens`, `num_return_sequences` and `stop`;
        and `gamma` and `speculative` of `text_batch`.

    Returns:
      A `Completion` for each sample of each text, in order; with `num_samples`
      = 2, both of the first text, then both of the second. An empty text gives
      an empty completion. Of a beam search the `num_samples` best beams, from
      the worst to the best, as T5X sorts them.

    Raises:
      ValueError: an option is out of range or unknown, or a text is longer than
        `max_input_len` and `on_too_long` is 'error'.

    Examples:
      >>> texts = ['Good morning!', 'Where is the station?']
      >>> [done.text for done in engine.generate(texts)]
      ['Guten Morgen!', 'Wo ist der Bahnhof?']
    """
    if options.get('split') is not None:
      long = LongTexts(self, texts, options)
      done = self.generate(long.parts, batch_size=batch_size, **long.options)
      return [*long.joined(done)]
    batch = self.text_batch(texts, **options)
    pool, rows = self._pool(batch, batch_size)
    if pool is not None:
      done = pool.generate(batch)
    else:
      done = batch.completions(
        *((part, self._decoded(part)) for part in batch.parts(rows))
      )
    if batch.options.top_log_probs:
      sources = batch.sources()
      for at in range(0, len(done), rows):
        part = slice(at, at + rows)
        number = batch.options.top_log_probs
        ruled = batch.ruled()[part]
        done[part] = self._with_top(done[part], sources[part], number, ruled)
    return done

  def _with_top(
    self,
    outputs: Sequence[Completion],
    sources: Sequence[tuple[Sequence[int], Sequence[int]]],
    num_top: int,
    ruled: Sequence[scoring.Ruled],
  ) -> list[Completion]:
    """Outputs with `top_log_probs`, which the target scores."""
    pairs = list(zip(outputs, sources, strict=True))
    scores = scoring.score(
      self.target,
      self.params.target,
      [source for source, _ in sources],
      [[*begin, *one.tokens] for one, (_, begin) in pairs],
      num_top=num_top,
      ruled=ruled,
    )
    return [
      dataclasses.replace(
        one,
        log_probs=list(score.log_probs[len(begin) :]),
        top_log_probs=score.top[len(begin) :],
      )
      for (one, (_, begin)), score in zip(pairs, scores, strict=True)
    ]

  def _decoded(self, batch: TextBatch) -> Generation:
    """What came of a batch that is decoded together, on the host."""
    self._fit(batch)
    decode = self._program('decode', batch.request)
    return partitioning.on_host(decode(batch.request))

  def _pool(
    self, batch: TextBatch, asked: int | None
  ) -> tuple[Continuous | None, int]:
    """The scheduler of a batch; the rows that are decoded together.

    It is None if one program decodes them as a whole. That is quicker where no
    text waits for another's slot and the host need not look for stop strings.
    Of beam searches, one batch follows another.
    """
    rows = self.batch_size if asked is None else asked
    check_number('batch_size', rows, 1)
    if batch.options.num_beams is not None or not batch.rows:
      return None, rows
    if len(batch.rows) > rows:
      return self._pool_of(PoolSettings(rows=rows)), rows
    return self._at_once(batch) if batch.options.stop_strings else None, rows

  def _at_once(self, batch: TextBatch) -> Continuous:
    """A pool with a slot for each text, which are read together."""
    rows = batch.num_rows if batch.rows else 1
    return self._pool_of(PoolSettings(rows=rows, refill=rows))

  def pool_programs(self, example: Request) -> PoolPrograms:
    """Programs of the pools of a scheduler, compiled where they are used first.

    Args:
      example: rows without text, as many as are read together; with gamma 0
        they are of the plain loop.
    """
    # All widths of inputs have the same programs' functions.
    key = len(example.inputs), _shapes(example.replace(inputs=None))
    if key not in self._pool_programs:
      loop, params = self.loop_of(example)
      self._pool_programs[key] = PoolPrograms(loop, params, example)
    return self._pool_programs[key]

  def forget(self, programs: PoolPrograms | Request) -> None:
    """Frees programs of pools, or those of beam searches of such requests.

    No other thread may compile meanwhile.
    """
    if isinstance(programs, PoolPrograms):
      for key, made in list(self._pool_programs.items()):
        if made is programs:
          del self._pool_programs[key]
    else:
      for name in ('start', 'run'):
        self._programs.pop((name, _shapes(programs)), None)

  def stream(self, text: str | Sequence[int], **options: Any) -> Iterator[str]:
    """Yields the output of one text piece by piece, as rounds finish.

    Text that has been yielded never changes: a piece ends before a character
    whose bytes are not complete, and before text that may become a stop string.
    The pieces together are the text of `generate`.

    Args:
      text: the input.
      **options: as for `generate`.

    Raises:
      ValueError: as for `generate`, several samples are asked for, or the
        target's logits became invalid.

    Examples:
      >>> ''.join(engine.stream('Good morning!'))
      'Guten Morgen!'
    """
    batch = self.text_batch([text], **options)
    if batch.options.num_beams is not None:
      expected = 'None in a stream, for no beam is known before its end'
      raise unexpected('num_beams', expected, batch.options.num_beams)
    if len(batch.rows) > 1:
      raise unexpected('num_samples', '1 in a stream', len(batch.rows))
    for update in self.updates(batch):
      if update.text:
        yield update.text

  def updates(
    self, batch: TextBatch, shows_rounds: bool = False
  ) -> Iterator[Update]:
    """What each round brings the only text of a batch.

    Args:
      batch: from `text_batch`.
      shows_rounds: whether the updates have `Update.round`.

    Raises:
      ValueError: the target's logits became invalid.
    """
    return self._at_once(batch).stream(batch, shows_rounds)

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
      targets: strings, whose end of sequence is scored too; or ids, scored as
        they are.
      source_lang: as for `generate`.
      target_lang: as for `generate`.

    Returns:
      A `scoring.Score` for each output; natural logarithms, temperature 1.

    Raises:
      ValueError: as for `scoring.score`, or an example is neither text nor ids.

    Examples:
      >>> texts = ['Good morning!', 'Good morning!']
      >>> good, bad = engine.score(texts, ['Guten Morgen!', 'Gute Nacht!'])
      >>> good.total > bad.total
      True
    """
    check_texts(texts)
    check_texts(targets, 'targets')
    outputs = [
      self.output_ids(target)
      if isinstance(target, str)
      else [*map(int, target)]
      for target in targets
    ]
    inputs = [self.input_ids(text, source_lang) for text in texts]
    begin = self.languages(target_lang=target_lang).before_output(())
    return scoring.score(
      self.target, self.params.target, inputs, outputs, begin
    )

  def classify(
    self,
    texts: Texts,
    labels: Texts,
    *,
    source_lang: str | None = None,
    target_lang: str | None = None,
  ) -> np.ndarray:
    """Returns the probability of each label of a text, no other allowed.

    Args:
      texts: strings, or ids with or without their end of sequence.
      labels: strings, or ids without their end of sequence.
      source_lang: as for `generate`.
      target_lang: as for `generate`.

    Returns:
      float64[texts, labels]; a row sums to 1. They are in the proportions of
      the probabilities that `score` gives to the labels.

    Raises:
      ValueError: as for `score`, or as for `classification.classify`.

    Examples:
      >>> probs = engine.classify(
      ...   ['Good morning!'], ['Guten Morgen!', 'Danke!']
      ... )
      >>> probs.shape, bool(probs[0, 0] > 0.5)
      ((1, 2), True)
    """
    check_texts(texts)
    check_texts(labels, 'labels')
    outputs = [
      self.output_ids(label)
      if isinstance(label, str)
      else [*map(int, label), self.output_ids('')[-1]]
      for label in labels
    ]
    read = [self.input_ids(text, source_lang) for text in texts]
    begin = self.languages(target_lang=target_lang).before_output(())
    inputs: Any = [[]] * len(read)
    prompts = read
    if self.target.has_encoder:
      inputs, prompts = read, [[self.target.start_id, *begin]] * len(read)
    scoring.check_ids(self.target, inputs=read, labels=outputs)
    params = self.params.target
    return classify(self.target, params, inputs, prompts, outputs)

  def trace(self, text: str | Sequence[int], **options: Any) -> Trace:
    """Decodes one text and says what became of each proposal.

    Args:
      text: the input.
      **options: as for `generate`, including `gamma`.

    Returns:
      The rounds, as an object that a terminal (rich) and a notebook can show.

    Raises:
      ValueError: as for `generate`, or there is no drafter.

    Examples:
      >>> engine.trace('Good morning!')
      Trace('Good morning!': 5 tokens in ... calls of the target; ...)
    """
    rounds = trace.record(self, text, **options)
    spelled = trace.spell(rounds, self.tokenizer)
    if not isinstance(text, str):
      text = self.tokenizer.decode(text)
    return Trace(text, spelled, options.get('lenience', 1.0))

  def text_batch(
    self,
    texts: Texts,
    speculative: bool | None = None,
    *,
    gamma: Gamma = None,
    **options: Any,
  ) -> TextBatch:
    """Checks and encodes what `generate` or a scheduler is to decode.

    Args:
      texts: as for `generate`.
      speculative: whether the drafter helps; None is yes if there is a drafter,
        but no for beams on a CPU, where they are slower with it.
      gamma: as for the engine, of this call; None is the engine's.
      **options: fields of `Options`, or other libraries' names of them.

    Raises:
      ValueError: as for `generate`.
    """
    asked = options_of(options, self.models['target'].rules)
    if asked.split is not None:
      expected = 'None: only Engine.generate and a run split texts'
      raise unexpected('split', expected, asked.split)
    check_texts(texts)
    check_type('speculative', speculative, bool | None)
    if speculative is None:
      drafts = asked.num_beams is None or backend.kind() != 'cpu'
      speculative = self.has_drafter and drafts
    most, rule = (
      as_gamma(gamma) if gamma is not None else (self._gamma, self._rule)
    )
    if speculative:
      pair.check_drafts(self.drafter, rule is not None, asked.num_beams)
    else:
      most, rule = 0, None
    if asked.stop_ids is None:
      asked = dataclasses.replace(asked, stop_ids=self.stop_ids)
    return TextBatch(self, texts, asked, self.drafting_of(most, rule))

  def search(
    self, batch: TextBatch
  ) -> Callable[[int], list[Completion] | None]:
    """A beam search in pieces, for a scheduler with other work beside it.

    Args:
      batch: from `text_batch`, with `num_beams`.

    Returns:
      A function that runs so many more rounds. It returns None until the search
      is over, and then the outputs as `generate` has them.
    """
    state = None

    def advance(rounds: int) -> list[Completion] | None:
      nonlocal state
      if not batch.rows:
        return batch.completions()
      if state is None:
        state = self._program('start', batch.request)(batch.request)
      run = self._program('run', batch.request, state)
      state = run(batch.request, state, np.int32(rounds))
      reasons = partitioning.on_host(state.finish_reason)
      if np.any(reasons == FinishReason.RUNNING):
        return None
      generation = partitioning.on_host(_generation(batch.request, state))
      return batch.completions((batch, generation))

    return advance

  def _fit(self, batch: TextBatch) -> None:
    """Gives a batch as many rows as a compiled program has, if one is near.

    That is the smallest program of at least as many rows as the batch needs
    and at most twice as many: those extra rows cost less than a compilation.
    """
    least = batch.num_rows
    if ('decode', _shapes(batch.request)) in self._programs:
      return
    for rows in sorted(self._program_rows):
      if least < rows <= 2 * least:
        request = batch.request_in(rows)
        if ('decode', _shapes(request)) in self._programs:
          batch.request = request
          return

  def _program(
    self, name: str, request: Request, state: DecodeState | None = None
  ) -> Callable[..., Any]:
    """A compiled function of a loop, with the parameters bound.

    The loop is the plain one for a request with gamma 0.

    Args:
      name: a method of `Loop`: 'decode', or 'start' and after it 'run'.
      request: what it will be called with.
      state: of 'run', what `start` gave.

    Raises:
      ValueError: no memory could hold it.
    """
    key = name, _shapes(request)
    if key not in self._programs:
      rows, width = request.inputs.shape
      self.room.check(rows, width, request.cache_slots, request.call_tokens)
      self._programs[key] = self._compile(name, request, state)
      self._program_rows.add(rows)
    return self._programs[key]

  def _compile(self, name: str, request: Request, state: DecodeState | None):
    loop, params = self.loop_of(request)
    args: list[Any] = [params, request]
    options: dict[str, Any] = {}
    if self._partition is not None:
      args[1] = self._partition.request(request)
      if name == 'decode':  # the host reads it: the whole on each device
        options['out_shardings'] = self._partition.sharding()
    if name == 'run':
      args += [state, np.int32(0)]
      # The state is donated: the caches are updated where they are.
      placed = partitioning.shardings(state)
      options |= {'donate_argnums': 2, 'out_shardings': placed}
    lowered = jax.jit(getattr(loop, name), **options).lower(*args)
    return functools.partial(lowered.compile(), params)


# Jitted: run one by one, its operations took milliseconds per call.
_generation = jax.jit(generation)


def _shapes(request: Request):
  """Structure, shapes and dtypes of a request, as a dictionary key."""
  leaves, tree = jax.tree.flatten(request)
  return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
