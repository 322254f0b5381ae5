"""Strings in, strings out: an engine with a target and perhaps a drafter."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax import partitioning
from specdec_jax.checks import memory
from specdec_jax.checks.fields import check_number, check_type, unexpected
from specdec_jax.decoding.fallback import Fallback, guessed
from specdec_jax.decoding.loop import Loop, generation
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import Request
from specdec_jax.drafters.base import Drafter
from specdec_jax.drafters.small_model import as_drafter
from specdec_jax.engine import compilation_cache, scoring, trace
from specdec_jax.engine.completion import Completion, UsualAcceptance
from specdec_jax.engine.continuous import Continuous
from specdec_jax.engine.loop_programs import LoopPrograms
from specdec_jax.engine.pair import (
  Room,
  check_adapts,
  check_beam_drafter,
  check_bos,
  check_pair,
  first_id,
  fitted,
  models_of,
  own_vocabulary,
  placed_pair,
  placement_of,
)
from specdec_jax.engine.request import (
  Drafting,
  Languages,
  Options,
  TextBatch,
  around,
  as_gamma,
  check_texts,
  encoded,
  languages_of,
  options_of,
  repeated,
)
from specdec_jax.engine.scheduler import PoolSettings, Update
from specdec_jax.engine.trace import Trace
from specdec_jax.models import backend
from specdec_jax.models.base import ends_inputs
from specdec_jax.models.model import Model
from specdec_jax.text.chat import RenderedIds
from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.tree_shape import TreeShape
from specdec_jax.types import FinishReason, Generation, LengthRule

_NO_DRAFTER = (
  'Speculative decoding needs a drafter: Engine(target, drafter), or call with'
  ' speculative=False.'
)
_USUAL_GAMMA = 4
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
    usual: the acceptance of a calibration's texts, which completions are
      compared with; None does not compare.
  """

  def __init__(
    self,
    target: Model,
    drafter: Drafter | Model | None = None,
    *,
    tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
    gamma: int | str | LengthRule | None = None,
    max_input_len: int = 128,
    max_decode_len: int = 128,
    batch_size: int = 32,
    bos_id: int | None = None,
    placement: partitioning.Placement | None = None,
    draft_placement: partitioning.Placement | None = None,
    cache_folder: str | os.PathLike[str] | None = None,
    fallback: bool | Fallback = False,
    source_lang: str | None = None,
    target_lang: str | None = None,
    split_special_tokens: bool | None = None,
    skip_special_tokens: bool | None = None,
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
      draft_placement: the same for the drafter's parameters, on the same
        devices; None is the target's placement, except that each device holds
        the whole drafter. A dtype that it does not give is that which the
        drafter was loaded with, or else the target's.
      cache_folder: folder of compiled programs; None is the user's cache
        folder.
      fallback: whether the drafter rests where a text's acceptance makes it
        slower than plain decoding, see `decoding.fallback`. True goes by
        guessed costs, a `Fallback` (of `Choice.fallback`) by measured ones.
      source_lang: language of the texts, such as 'eng_Latn', of a model that
        translates between many, unless a call gives another.
      target_lang: language of the outputs, such as 'deu_Latn'.
      split_special_tokens: whether names of special tokens in a text are text;
        see `Tokenizer`, whose own setting is taken if it is None.
      skip_special_tokens: whether special tokens have no text in an output;
        None takes the tokenizer's own setting.

    Raises:
      ValueError: vocabularies or tokenizers differ, a number is too small,
        or too large for any memory, `bos_id` is not an id or the target is a
        T5, whose texts begin with none, there is no tokenizer, a language is
        not known or the target has none, a checkpoint is broken, or devices or
        a model cannot be split as a placement says.
    """
    for name, value, kind in (
      ('fallback', fallback, bool | Fallback),
      ('placement', placement, partitioning.Placement | None),
      ('draft_placement', draft_placement, partitioning.Placement | None),
      ('split_special_tokens', split_special_tokens, bool | None),
      ('skip_special_tokens', skip_special_tokens, bool | None),
      ('cache_folder', cache_folder, str | os.PathLike | None),
    ):
      check_type(name, value, kind)
    self.chooses_gamma = gamma is None
    self.gamma = _USUAL_GAMMA if gamma is None else gamma
    self.fallback = fallback
    self.usual: UsualAcceptance | None = None
    check_number('max_input_len', max_input_len, 2)
    check_number('max_decode_len', max_decode_len, 1)
    check_number('batch_size', batch_size, 1)
    if not isinstance(target, Model):
      expected = 'a Model, such as specdec_jax.load or Model(network, params)'
      raise unexpected('target', expected, target)
    if drafter is not None:
      drafter = fitted(target, as_drafter(drafter))
    if tokenizer is None:
      tokenizer = own_vocabulary(target)
    elif isinstance(tokenizer, str | os.PathLike):
      tokenizer = Tokenizer(tokenizer)
    if not hasattr(tokenizer, 'encode'):  # somebody's own has it
      raise unexpected('tokenizer', 'a Tokenizer or a path', tokenizer)
    check_pair(target, drafter, tokenizer)
    if isinstance(tokenizer, Tokenizer):
      tokenizer = tokenizer.for_network(
        target.network.vocab_size, split_special_tokens, skip_special_tokens
      )
    bos_id = target.bos_id if bos_id is None else bos_id
    if bos_id is None:
      bos_id = first_id(target.network, tokenizer, {})
    check_bos(bos_id, target.network)
    languages_of(
      tokenizer, target.network.has_encoder, source_lang, target_lang
    )
    compilation_cache.enable(cache_folder)
    placement = (placement or partitioning.Placement()).loaded(target)
    if drafter is not None:
      draft_placement = placement_of(drafter, placement, draft_placement)
    draft_placement, partition, _ = partitioning.share_devices(
      placement, draft_placement
    )
    self._partition = partition
    self.across_hosts = placement.across_hosts
    self.kernel_layout = placement.layout
    self.room = Room(
      target,
      drafter,
      (placement.param_dtype, draft_placement.param_dtype),
      memory.device_bytes if partition is None else memory.all_bytes,
    )
    self.room.check(1, 1, max_decode_len, 1 + self.gamma)
    self.tokenizer = tokenizer
    self.max_input_len = max_input_len
    self.max_decode_len = max_decode_len
    self.batch_size = batch_size
    self.bos_id = bos_id
    self.source_lang, self.target_lang = source_lang, target_lang
    self.stop_ids = target.stop_ids or (tokenizer.eos_id,)
    self.models = models_of(target, drafter)
    pair = placed_pair(target, drafter, placement, draft_placement)
    self.room.placed()
    self.target, self.params = pair.target, pair.params
    self.fingerprints = pair.fingerprints
    plain = PairParams(self.params.target, None)
    self._loops = {False: (Loop(self.target), plain)}
    if pair.drafter is not None:
      self._loops[True] = Loop(self.target, pair.drafter), self.params
    self._programs = LoopPrograms(self._loops, self.room, partition)
    self._pools: dict[PoolSettings, Continuous] = {}

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

  def drafting_of(self, gamma: int, rule: LengthRule | None) -> Drafting:
    """How rows are drafted for with `gamma` proposals at most.

    Measured costs of the engine's fallback are of its own gamma; another one
    has guessed costs.

    Raises:
      ValueError: gamma is more than the rule's proposals.
    """
    if rule is not None and gamma > rule.most:
      expected = f'at most {rule.most}, the longest draft of an adaptive gamma'
      raise unexpected('gammas', expected, gamma)
    rests = self.fallback
    if not gamma:
      return Drafting()
    if not rests:
      return Drafting(gamma, rule)
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

  def languages(
    self, source_lang: str | None = None, target_lang: str | None = None
  ) -> Languages:
    """Tokens of these languages; where one is None, of the engine's.

    Raises:
      ValueError: a language is not known, or the target has none.
    """
    return languages_of(
      self.tokenizer,
      self.target.has_encoder,
      source_lang or self.source_lang,
      target_lang or self.target_lang,
    )

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
    if self.target.has_encoder and ends_inputs(self.target):
      return around(self.tokenizer)
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
    language = self.languages(source_lang).before_text(ids)
    return [*first, *language, *ids, *last]

  def output_ids(self, text: str) -> list[int]:
    """The ids of a text as the target would say it, with what ends it."""
    end = self.tokenizer.eos_id
    end = end if end in self.stop_ids else self.stop_ids[0]
    begins = self.target.has_encoder and ends_inputs(self.target)
    first = self.ids_around()[0] if begins else []
    return [*first, *encoded(self.tokenizer, text), end]

  def num_input_tokens(self, text: str | Sequence[int]) -> int:
    """Tokens of a text as the target reads it; 0 if there is nothing to read.

    Of an empty text, a target with a `bos_id` reads that id.
    """
    first, _ = self.ids_around(text)
    return len(self.input_ids(text)) if first or self.bare_ids(text) else 0

  def request(self, texts: Texts, gamma: Gamma = None, **options) -> Request:
    """The `Request` that `generate` would make, for a caller with its own loop.

    Args:
      texts: the texts, none of them empty.
      gamma: proposals per round; None is the engine's.
      **options: as for `generate`.

    Raises:
      ValueError: as for `generate`; or a text is empty.
    """
    batch = self._batch_of(texts, *self._gamma_of(gamma), options_of(options))
    if len(batch.rows) < len(texts):
      raise unexpected('texts', 'no empty text in a request', texts)
    return batch.request

  @property
  def num_programs(self) -> int:
    """How many programs have been compiled so far."""
    return len(self._programs)

  def warmup(
    self, texts: Texts, *, speculative: bool | None = None, **options
  ) -> float:
    """Compiles the smallest programs that hold these texts.

    `generate` then uses these programs and no larger ones, so that it can be
    timed.

    Args:
      texts: as for `generate`; only their number and lengths matter.
      speculative: as for `generate`.
      **options: as for `generate`.

    Returns:
      Seconds that it took; 0.0 if everything had been compiled.
    """
    before = self.num_programs
    begin = time.perf_counter()
    size = options.pop('batch_size', None)
    gamma = options.pop('gamma', None)
    asked = options_of(options)
    speculative = self._speculates(speculative, asked)
    batch = self._text_batch(texts, speculative, gamma, asked)
    pool = self._pool(batch, size)
    if pool is not None:
      return pool.warm_up(batch)
    for part in batch.parts(self._rows_of(size)):
      self._programs.get('decode', part.request, speculative)
    return time.perf_counter() - begin if self.num_programs > before else 0.0

  def generate(
    self,
    texts: Texts,
    *,
    temperature: float | Sequence[float] = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    max_length: int | None = None,
    min_length: int = 0,
    num_samples: int = 1,
    stop_strings: str | Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    num_beams: int | None = None,
    seed: int = 0,
    gamma: Gamma = None,
    speculative: bool | None = None,
    batch_size: int | None = None,
    **options: Any,
  ) -> list[Completion]:
    """Decodes texts; with the drafter's help, as the target alone would.

    Args:
      texts: any number, as strings or as ids with or without their end of
        sequence.
      temperature: one for all texts or one for each; 0 is greedy.
      top_k: samples only from the k likeliest tokens; 0 is off.
      top_p: samples only from the likeliest tokens that together have this
        probability; 1 is off.
      max_length: the most tokens of an output; None is `max_decode_len`.
      min_length: tokens that an output must have before it may end.
      num_samples: outputs per text.
      stop_strings: strings that end an output; they are not part of it.
      stop_ids: ids that end an output; None is the engine's `stop_ids`.
      num_beams: a beam search of this width, with T5X's length penalty
        (`alpha`, 0.6 by default) or that of transformers (`length_penalty`);
        None is none. `num_samples` says how many of its beams are returned,
        from the worst to the best, as T5X sorts them.
      seed: seed of all random numbers. A sample depends on the seed, on the
        place of its text among `texts` and on the sample's number, not on the
        texts that are decoded beside it.
      gamma: as for the engine; None is the engine's.
      speculative: whether the drafter helps; None is yes if there is a drafter,
        but no for beams on a CPU, where they are slower with it.
      batch_size: texts that are decoded together; None is the engine's. If
        there are more, each finished text makes room for the next.
      **options: rarer options, see `Options`: `example_ids`, `prompts`,
        `on_too_long`, `log_probs`, `top_log_probs`, `lenience`, `alpha`,
        `length_penalty`, `draft_beams`, `source_lang`, `target_lang`; and names
        from other libraries, such as `max_new_tokens`, `num_return_sequences`
        and `stop`.

    Returns:
      A `Completion` for each sample of each text, in order: with `num_samples`
      = 2, both of the first text, then both of the second. An empty text gives
      an empty completion.

    Raises:
      ValueError: an option is out of range or unknown, or a text is longer than
        `max_input_len` and `on_too_long` is 'error'.
    """
    named = {
      'temperature': temperature,
      'top_k': top_k,
      'top_p': top_p,
      'max_length': max_length,
      'min_length': min_length,
      'num_samples': num_samples,
      'stop_strings': stop_strings,
      'stop_ids': stop_ids,
      'num_beams': num_beams,
      'seed': seed,
    }
    asked = options_of(options | named)
    speculative = self._speculates(speculative, asked)
    batch = self._text_batch(texts, speculative, gamma, asked)
    pool = self._pool(batch, batch_size)
    if pool is not None:
      done = pool.completions(batch)
    else:
      parts = batch.parts(self._rows_of(batch_size))
      done = batch.completions(
        *((part, self._decoded(part, speculative)) for part in parts)
      )
    if asked.top_log_probs:
      rows, sources = self._rows_of(batch_size), batch.sources()
      for at in range(0, len(done), rows):
        part = slice(at, at + rows)
        done[part] = self._with_top(done[part], sources[part], asked)
    return done

  def _with_top(
    self,
    outputs: Sequence[Completion],
    sources: Sequence[tuple[list[int], list[int]]],
    asked: Options,
  ) -> list[Completion]:
    """Outputs with `top_log_probs`, which the target scores."""
    pairs = list(zip(outputs, sources, strict=True))
    scores = scoring.score(
      self.target,
      self.params.target,
      [source for source, _ in sources],
      [[*begin, *one.tokens] for one, (_, begin) in pairs],
      num_top=asked.top_log_probs,
    )
    return [
      dataclasses.replace(
        one,
        log_probs=list(score.log_probs[len(begin) :]),
        top_log_probs=score.top[len(begin) :],
      )
      for (one, (_, begin)), score in zip(pairs, scores, strict=True)
    ]

  def _decoded(self, batch: TextBatch, speculative: bool) -> Generation:
    """What came of a batch that is decoded together, on the host."""
    self._programs.fit(batch, speculative, 'decode')
    decode = self._programs.get('decode', batch.request, speculative)
    return partitioning.on_host(decode(batch.request))

  def _speculates(self, told: bool | None, asked: Options) -> bool:
    if told is not None:
      check_type('speculative', told, bool | None)
      return told
    drafts = asked.num_beams is None or backend.kind() != 'cpu'
    return self.has_drafter and drafts

  def _gamma_of(self, asked: Gamma) -> tuple[int, LengthRule | None]:
    return (self._gamma, self._rule) if asked is None else as_gamma(asked)

  def _rows_of(self, asked: int | None) -> int:
    rows = self.batch_size if asked is None else asked
    check_number('batch_size', rows, 1)
    return rows

  def _pool(self, batch: TextBatch, rows: int | None) -> Continuous | None:
    """The scheduler of a batch; None if one program decodes it as a whole.

    That is quicker where no text waits for another's slot and the host need not
    look for stop strings. Of beam searches, one batch follows another.
    """
    rows = self._rows_of(rows)
    if batch.options.num_beams is not None or not batch.rows:
      return None
    if len(batch.rows) > rows:
      return self._continuous(PoolSettings(rows=rows))
    return self._at_once(batch) if batch.options.stop_strings else None

  def _at_once(self, batch: TextBatch) -> Continuous:
    """A pool with a slot for each text, which are read together."""
    rows = batch.num_rows if batch.rows else 1
    return self._continuous(PoolSettings(rows=rows, refill=rows))

  def _continuous(self, settings: PoolSettings) -> Continuous:
    if settings not in self._pools:
      self._pools[settings] = Continuous(self, settings)
    return self._pools[settings]

  def stream(
    self,
    text: str | Sequence[int],
    *,
    gamma: Gamma = None,
    speculative: bool | None = None,
    **options: Any,
  ) -> Iterator[str]:
    """Yields the output of one text piece by piece, as rounds finish.

    Text that has been yielded never changes: a piece ends before a character
    whose bytes are not complete, and before text that may become a stop string.
    The pieces together are the text of `generate`.

    Args:
      text: the input.
      gamma: as for `generate`.
      speculative: as for `generate`.
      **options: as for `generate`.

    Raises:
      ValueError: as for `generate`, several samples are asked for, or the
        target's logits became invalid.
    """
    asked = options_of(options)
    speculative = self._speculates(speculative, asked)
    batch = self._text_batch([text], speculative, gamma, asked)
    if asked.num_beams is not None:
      expected = 'None in a stream, for no beam is known before its end'
      raise unexpected('num_beams', expected, asked.num_beams)
    if len(batch.rows) > 1:
      raise unexpected('num_samples', '1 in a stream', len(batch.rows))
    for update in self.updates(batch):
      if update.text:
        yield update.text

  def updates(
    self, batch: TextBatch, shows_rounds: bool = False
  ) -> Iterator[Update]:
    """Yields what each round brings the only text of a batch.

    Args:
      batch: from `text_batch`.
      shows_rounds: whether the updates have `Update.round`.

    Raises:
      ValueError: the target's logits became invalid.
    """
    for update in self._at_once(batch).stream(batch, shows_rounds):
      done = update.completion
      if done is not None and done.finish_reason == 'error':
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
    """The target's log-probability of each output, given its text.

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

  def trace(self, text: str | Sequence[int], **options: Any) -> Trace:
    """Decodes one text and says what became of each proposal.

    Args:
      text: the input.
      **options: as for `generate`, including `gamma`.

    Returns:
      The rounds, as an object that a terminal (rich) and a notebook can show.

    Raises:
      ValueError: as for `generate`, or there is no drafter.
    """
    rounds = trace.record(self, text, **options)
    spelled = trace.spell(rounds, self.tokenizer)
    if not isinstance(text, str):
      text = self.tokenizer.decode(text)
    return Trace(text, spelled, options.get('lenience', 1.0))

  def text_batch(
    self,
    texts: Texts,
    speculative: bool,
    *,
    gamma: Gamma = None,
    **options: Any,
  ) -> TextBatch:
    """The batch that `generate` works on, for a scheduler with its own loops.

    Raises:
      ValueError: as for `generate`.
    """
    return self._text_batch(texts, speculative, gamma, options_of(options))

  def search(
    self, batch: TextBatch, speculative: bool
  ) -> Callable[[int], list[Completion] | None]:
    """A beam search in pieces, for a scheduler with other work beside it.

    Args:
      batch: from `text_batch`, with `num_beams`.
      speculative: as `text_batch` was told.

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
        start = self._programs.get('start', batch.request, speculative)
        state = start(batch.request)
      run = self._programs.get('run', batch.request, speculative)
      state = run(batch.request, state, np.int32(rounds))
      reasons = partitioning.on_host(state.finish_reason)
      if np.any(reasons == FinishReason.RUNNING):
        return None
      generation = partitioning.on_host(_generation(batch.request, state))
      return batch.completions((batch, generation))

    return advance

  def _text_batch(
    self, texts: Texts, speculative: bool, gamma: Gamma, asked: Options
  ) -> TextBatch:
    loop, _ = self.loop(speculative)  # raises if there is no drafter
    most, rule = self._gamma_of(gamma)
    if not speculative:
      most, rule = 0, None
    if asked.num_beams is not None and speculative:
      check_beam_drafter(loop.drafter)
    return self._batch_of(texts, most, rule, asked)

  def _batch_of(
    self, texts: Texts, gamma: int, rule: LengthRule | None, asked: Options
  ) -> TextBatch:
    if rule is not None:
      check_adapts(self.drafter, asked.num_beams)
    if asked.stop_ids is None:
      asked = dataclasses.replace(asked, stop_ids=self.stop_ids)
    if asked.num_samples > 1 and asked.num_beams is None:
      check_texts(texts)  # as `TextBatch` does, before they are repeated
      number, times = len(texts), asked.num_samples
      texts, asked = repeated(texts, times), asked.of_samples(number)
    return TextBatch(self, texts, asked, self.drafting_of(gamma, rule))


# Jitted: run one by one, its operations took milliseconds per call.
_generation = jax.jit(generation)
