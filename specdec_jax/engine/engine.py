"""Strings in, strings out: the engine, of a target and perhaps a drafter."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax import partitioning
from specdec_jax.checkpoints.fingerprint import fingerprint
from specdec_jax.checks import memory
from specdec_jax.checks.arguments import check_number
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import DecodeState, Request
from specdec_jax.drafters.base import Drafter
from specdec_jax.drafters.small_model import small_model
from specdec_jax.engine import compilation_cache
from specdec_jax.engine.completion import Completion, Text, without_stop_id
from specdec_jax.engine.loop_programs import LoopPrograms
from specdec_jax.engine.options import check_gamma, options_of
from specdec_jax.engine.pair import (
  Model,
  Room,
  check_bos,
  check_drafter,
  check_pair,
  joined,
  load_model,
)
from specdec_jax.engine.text_batch import (
  STOP_STRING_ROUNDS,
  Limits,
  RowsSoFar,
  TextBatch,
  without_end,
)
from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.types import FinishReason

__all__ = ['Engine', 'Model', 'Texts', 'joined', 'load_model']

_NO_DRAFTER = (
  'Speculative decoding needs a drafter: give Engine a `draft` model, or call'
  ' with speculative=False.'
)
Texts = Sequence[str | Sequence[int]]


class Engine:
  """Decodes texts with a target, plainly or with a drafter's help.

  A program is compiled for a kind of request and a number of rows: 1, 2, 4, 6,
  8, 12, 16, 24, 32, ..., rounded up to a multiple of the devices that share
  them. Texts get the least that holds them, unless that has not been compiled
  and there is a program of up to twice as many. Which it is changes no sample.

  Attributes:
    tokenizer: text to ids and back.
    fingerprints: 'target' and 'draft' -> `checkpoints.fingerprint` of what was
      loaded.
    max_input_len: tokens an input may have, its end included.
    max_decode_len: tokens an output may have, its end included.
    bos_id: what a decoder-only target's texts begin with; None is nothing.
    target: the target's network; over several devices, as `follow` gives it.
    params: of both, as they are placed; the drafter's None if there is none.
    room: whether a run could fit into the memory that there is.
    across_hosts: whether all processes must ask the same of it at the same
      time.
  """

  def __init__(
    self,
    target: Model,
    draft: Model | None = None,
    *,
    tokenizer: Tokenizer,
    gamma: int = 4,
    max_input_len: int = 128,
    max_decode_len: int = 128,
    bos_id: int | None = None,
    drafter: Drafter | None = None,
    placement: partitioning.Placement | None = None,
    draft_placement: partitioning.Placement | None = None,
    cache_folder: str | os.PathLike[str] | None = None,
  ):
    """Checks that the pair fits and puts its parameters on the device.

    Args:
      target: the model whose distribution the output has.
      draft: the small model that proposes; None for plain decoding only. A
        decoder-only one sees nothing of an encoder's input; that is said by a
        warning.
      tokenizer: of both.
      gamma: proposals a round at most, static.
      max_input_len: tokens of the longest input.
      max_decode_len: tokens of the longest output.
      bos_id: put in front of each text of a decoder-only target, which then
        generates from nothing where the text is empty. None puts nothing.
      drafter: made by `small_model` of `draft` unless given; with it, `draft`
        holds what the drafter's `init` and `propose` take as parameters.
      placement: dtype and layout of the target's parameters, and the devices
        that they and the rows of a batch are split over.
      draft_placement: of the drafter's, on the same devices; None is as the
        target's, but for all of the drafter on each device.
      cache_folder: of compiled programs; None is the user's cache folder.

    Raises:
      ValueError: vocabularies or tokenizers differ, a number is too small,
        or too large for any memory, `bos_id` is no id or the target begins by
        itself, a drafter and its parameters do not come together, or devices
        or a model cannot be split as a placement says.
    """
    self.gamma = gamma
    check_number('max_input_len', max_input_len, 2)
    check_number('max_decode_len', max_decode_len, 1)
    check_drafter(draft, drafter)
    check_pair(target, draft, tokenizer)
    check_bos(bos_id, target.network)
    compilation_cache.enable(cache_folder)
    placement = placement or partitioning.Placement()
    draft_placement, partition, draft_partition = partitioning.share_devices(
      placement, draft_placement
    )
    self._partition = partition
    self.across_hosts = placement.across_hosts
    self.room = Room(
      [target] if draft is None else [target, draft],
      placement.dtype,
      memory.device_bytes() if partition is None else memory.all_bytes(),
    )
    self.room.check(1, 1, max_decode_len, gamma)
    self.tokenizer = tokenizer
    self.max_input_len = max_input_len
    self.max_decode_len = max_decode_len
    self.bos_id = bos_id
    self.target = partitioning.follow(target.network, partition)
    self.params = PairParams(partitioning.place(target.params, placement), None)
    self._loops = {False: (Loop(self.target), self.params)}
    self.fingerprints = {'target': fingerprint(target.params)}
    if draft is not None:
      self.fingerprints['draft'] = fingerprint(draft.params)
      if drafter is not None:
        # Two drafters without parameters differ by what they do.
        name = drafter.name or drafter.propose.__qualname__
        self.fingerprints['draft'] += f' {name}'
      self.params = self.params._replace(
        draft=partitioning.place_parts(draft.params, draft_placement)
      )
      drafter = drafter or small_model(
        partitioning.follow(draft.network, draft_partition)
      )
      self._loops[True] = Loop(self.target, drafter), self.params
    self._programs = LoopPrograms(self._loops, self.room, partition)

  @property
  def gamma(self) -> int:
    """Proposals a round at most; it may be set between calls.

    Raises:
      ValueError: it is set to what is no number of proposals.
    """
    return self._gamma

  @gamma.setter
  def gamma(self, value: int) -> None:
    check_gamma(value)
    self._gamma = value

  @property
  def drafter(self) -> Drafter:
    """The drafter.

    Raises:
      ValueError: there is none.
    """
    drafter: Any = self.loop(True)[0].drafter
    return drafter

  def loop(self, speculative: bool) -> tuple[Loop, PairParams]:
    """One of the two loops, and the parameters that it takes.

    Raises:
      ValueError: it is the speculative one, and there is no drafter.
    """
    if speculative not in self._loops:
      raise ValueError(_NO_DRAFTER)
    return self._loops[speculative]

  def input_ids(self, text: str | Sequence[int]) -> list[int]:
    """A text, or ids with or without their end, as the target reads it."""
    first, last = self._limits.around(self.tokenizer)
    return [*first, *without_end(self.tokenizer, text), *last]

  def num_input_tokens(self, text: str) -> int:
    """Tokens of a text as the target reads it; 0 if there is nothing to read.

    A decoder with a `bos_id` reads that of an empty text, and goes on.
    """
    ids = self.input_ids(text)
    first, last = self._limits.around(self.tokenizer)
    return len(ids) if first or len(ids) > len(last) else 0

  def request(
    self, texts: Texts, gamma: int | None = None, **options
  ) -> Request:
    """What `generate` would ask of the loops, for a caller that runs its own.

    Args:
      texts: none of them empty.
      gamma: proposals a round; None is the engine's.
      **options: as for `generate`.

    Raises:
      ValueError: as `generate`; or a text is empty.
    """
    gamma = self.gamma if gamma is None else gamma
    check_gamma(gamma)
    batch = self._batch_of(texts, gamma, options)
    if len(batch.rows) < len(texts):
      raise ValueError('Engine.request takes no empty text; leave it out.')
    return batch.request

  @property
  def num_programs(self) -> int:
    """How many programs have been compiled so far."""
    return len(self._programs)

  def warmup(
    self, texts: Texts, *, speculative: bool = True, **options
  ) -> float:
    """Compiles the programs of as few rows as hold these texts.

    `generate` then takes these and no larger ones, so that it can be timed.

    Args:
      texts: as for `generate`; only their number and lengths matter.
      speculative: as for `generate`.
      **options: as for `generate`.

    Returns:
      Seconds that it took; 0.0 where everything had been compiled.
    """
    before = self.num_programs
    begin = time.perf_counter()
    batch = self.text_batch(texts, speculative, **options)
    if batch.rows:
      whole = not batch.options.stop_strings
      for name in ('decode',) if whole else ('start', 'run'):
        self._programs.get(name, batch.request, speculative)
    return time.perf_counter() - begin if self.num_programs > before else 0.0

  def generate(
    self, texts: Texts, *, speculative: bool = True, **options
  ) -> list[Completion]:
    """Decodes a batch of texts.

    Args:
      texts: any number, as strings or as ids with or without their end of
        sequence; they are decoded together.
      speculative: whether the drafter helps; the output distribution is the
        same.
      **options: the fields of `Options`, such as `sampling`, `seed`,
        `stop_strings`, `min_length`, `max_length`.

    Returns:
      A `Completion` for each text, in order. An empty text gives an empty one.

    Raises:
      ValueError: an option is out of range, or a text is longer than
        `max_input_len` and `on_too_long` is 'error'.
    """
    batch = self.text_batch(texts, speculative, **options)
    if not batch.rows:
      return batch.completions()
    if batch.options.stop_strings:
      for state, _ in self._advance(batch, speculative, STOP_STRING_ROUNDS):
        last = state
      found = _generation(batch.request, last)
    else:
      self._programs.fit(batch, speculative, 'decode')
      decode = self._programs.get('decode', batch.request, speculative)
      found = decode(batch.request)
    return batch.completions(partitioning.on_host(found))

  def stream(
    self, text: str, *, speculative: bool = True, **options
  ) -> Iterator[str]:
    """Yields the output of one text piece by piece, as rounds finish.

    What has been yielded never changes: a piece ends before a character whose
    bytes have not all come, and before what may become a stop string. The
    pieces together are `generate`'s text.

    Args:
      text: the input.
      speculative: as for `generate`.
      **options: as for `generate`.

    Raises:
      ValueError: as for `generate`, or the target's logits became invalid.
    """
    batch = self.text_batch([text], speculative, **options)
    shown = ''
    if not batch.rows:
      return
    for state, seen in self._advance(batch, speculative, rounds=1):
      reason = seen.finish_reason[0]
      if reason == FinishReason.INVALID:
        found = partitioning.on_host(_generation(batch.request, state))
        raise ValueError(batch.completions(found)[0].error)
      tokens = without_stop_id(batch.produced(0, seen), reason)
      output = Text(self.tokenizer, tokens, batch.options.stop_strings)
      ready = output.final if reason != FinishReason.RUNNING else output.stable
      if len(ready) > len(shown):
        yield ready[len(shown) :]
        shown = ready

  def text_batch(self, texts: Texts, speculative: bool, **options) -> TextBatch:
    """What `generate` works on, for a scheduler that runs the loops itself.

    Raises:
      ValueError: as `generate`.
    """
    self.loop(speculative)  # raises where there is no drafter
    return self._batch_of(texts, self.gamma if speculative else 0, options)

  def _batch_of(
    self, texts: Texts, gamma: int, options: Mapping[str, Any]
  ) -> TextBatch:
    asked = options_of(**options)
    return TextBatch(self.tokenizer, self._limits, texts, asked, gamma)

  @property
  def _limits(self) -> Limits:
    return Limits(
      self.max_input_len,
      self.max_decode_len,
      self.target.vocab_size,
      self.target.has_encoder,
      self.bos_id,
      self._partition.row_multiple if self._partition else 1,
    )

  def _advance(
    self, batch, speculative, rounds
  ) -> Iterator[tuple[DecodeState, RowsSoFar]]:
    """Yields the state every `rounds` rounds, and what the host sees of it.

    The host looks for stop strings in between.
    """
    self._programs.fit(batch, speculative, 'start')
    start = self._programs.get('start', batch.request, speculative)
    state = start(batch.request)
    run = self._programs.get('run', batch.request, speculative)
    while True:
      state = run(batch.request, state, np.int32(rounds))
      parts = state.tokens, state.length, state.finish_reason
      seen = RowsSoFar(*partitioning.on_host(parts))
      if batch.options.stop_strings:
        rows = range(len(batch.rows))
        produced = {row: batch.produced(row, seen) for row in rows}
        reasons = batch.with_stop_strings(seen.finish_reason, produced)
        seen = seen._replace(finish_reason=reasons)
        state = state.with_reasons(reasons)
      yield state, seen
      if np.all(seen.finish_reason != FinishReason.RUNNING):
        return


# One program, where its operations one by one took milliseconds a call.
_generation = jax.jit(decode_state.generation)
