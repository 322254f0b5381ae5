"""Strings in, strings out: owns jit, donation and the compiled programs."""

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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
from specdec_jax.engine.job import (
  STOP_STRING_ROUNDS,
  Frame,
  Job,
  Seen,
  check_gamma,
  options_of,
  without_end,
)
from specdec_jax.engine.pair import (
  Model,
  Room,
  check_bos,
  check_drafter,
  check_pair,
  joined,
  load_model,
)
from specdec_jax.models.base import LanguageModel
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
    self._placement, self._partition = placement, partition
    self._room = Room(
      [target] if draft is None else [target, draft],
      placement.dtype,
      memory.device_bytes() if partition is None else memory.all_bytes(),
    )
    self.check_room(1, 1, max_decode_len, gamma)
    self.tokenizer = tokenizer
    self.max_input_len = max_input_len
    self.max_decode_len = max_decode_len
    self.bos_id = bos_id
    self._target = partitioning.follow(target.network, partition)
    self._target_params = partitioning.place(target.params, placement)
    self._drafter = drafter
    self.fingerprints = {'target': fingerprint(target.params)}
    if draft is not None:
      self.fingerprints['draft'] = fingerprint(draft.params)
      if drafter is not None:
        # Two drafters without parameters differ by what they do.
        name = drafter.name or drafter.propose.__qualname__
        self.fingerprints['draft'] += f' {name}'
      self._draft_params = partitioning.place_parts(
        draft.params, draft_placement
      )
      self._drafter = drafter or small_model(
        partitioning.follow(draft.network, draft_partition)
      )
    self._programs: dict[Any, Callable[..., Any]] = {}
    self._rows: set[int] = set()  # of any of them
    self._states: dict[Any, DecodeState] = {}  # shapes only

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
  def target(self) -> LanguageModel:
    """The target's network; over several devices, as `follow` gives it."""
    return self._target

  @property
  def drafter(self) -> Drafter:
    """The drafter.

    Raises:
      ValueError: there is none.
    """
    if self._drafter is None:
      raise ValueError(_NO_DRAFTER)
    return self._drafter

  @property
  def across_hosts(self) -> bool:
    """Whether all processes must ask the same of it at the same time."""
    return self._placement.across_hosts

  @property
  def params(self) -> PairParams:
    """The parameters of both, as they are placed; without a drafter, None."""
    draft = None if self._drafter is None else self._draft_params
    return PairParams(self._target_params, draft)

  def check_room(
    self, batch: int, input_len: int, num_slots: int, gamma: int
  ) -> None:
    """Raises ValueError where no memory could hold such a run; see `Room`."""
    self._room.check(batch, input_len, num_slots, gamma)

  def loop(self, speculative: bool) -> tuple[Loop, PairParams]:
    """A loop with its models, and their parameters as it takes them.

    Raises:
      ValueError: it is the speculative one, and there is no drafter.
    """
    if speculative:
      return Loop(self.target, self.drafter), self.params
    return Loop(self.target), PairParams(self._target_params, None)

  def input_ids(self, text: str | Sequence[int]) -> list[int]:
    """A text, or ids with or without their end, as the target reads it."""
    first, last = self._frame.around(self.tokenizer)
    return [*first, *without_end(self.tokenizer, text), *last]

  def num_input_tokens(self, text: str) -> int:
    """Tokens of a text as the target reads it; 0 if there is nothing to read.

    A decoder with a `bos_id` reads that of an empty text, and goes on.
    """
    ids = self.input_ids(text)
    first, last = self._frame.around(self.tokenizer)
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
    job = Job(self.tokenizer, self._frame, texts, options_of(**options), gamma)
    if len(job.rows) < len(texts):
      raise ValueError('Engine.request takes no empty text; leave it out.')
    return job.request

  @property
  def num_programs(self) -> int:
    """How many programs have been compiled so far."""
    return len(self._programs)

  def warmup(
    self, texts: Texts, *, speculative: bool = True, **options
  ) -> float:
    """Compiles what `generate` would need, were there no program yet.

    Where it has been called, a time is that of no more rows than are needed.

    Args:
      texts: as for `generate`; only their number and lengths matter.
      speculative: as for `generate`.
      **options: as for `generate`.

    Returns:
      Seconds that it took; 0.0 where everything had been compiled.
    """
    before = self.num_programs
    begin = time.perf_counter()
    job = self.job(texts, speculative, **options)
    if job.rows:
      for name in ('start', 'run') if job.options.stop_strings else ('decode',):
        self._program(name, job.request, speculative)
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
    job = self.job(texts, speculative, **options)
    if not job.rows:
      return job.completions()
    if job.options.stop_strings:
      for state, _ in self._advance(job, speculative, STOP_STRING_ROUNDS):
        last = state
      found = _generation(job.request, last)
    else:
      self._fit(job, speculative, 'decode')
      found = self._program('decode', job.request, speculative)(job.request)
    return job.completions(partitioning.on_host(found))

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
    job = self.job([text], speculative, **options)
    shown = ''
    if not job.rows:
      return
    for state, seen in self._advance(job, speculative, rounds=1):
      reason = seen.finish_reason[0]
      if reason == FinishReason.INVALID:
        found = partitioning.on_host(_generation(job.request, state))
        raise ValueError(job.completions(found)[0].error)
      tokens = without_stop_id(job.produced(0, seen), reason)
      output = Text(self.tokenizer, tokens, job.options.stop_strings)
      ready = output.final if reason != FinishReason.RUNNING else output.stable
      if len(ready) > len(shown):
        yield ready[len(shown) :]
        shown = ready

  def job(self, texts: Texts, speculative: bool, **options) -> Job:
    """What `generate` works on, for a scheduler that runs the loops itself.

    Raises:
      ValueError: as `generate`.
    """
    if speculative and self._drafter is None:
      raise ValueError(_NO_DRAFTER)
    gamma = self.gamma if speculative else 0
    return Job(self.tokenizer, self._frame, texts, options_of(**options), gamma)

  @property
  def _frame(self) -> Frame:
    return Frame(
      self.max_input_len,
      self.max_decode_len,
      self._target.vocab_size,
      self._target.has_encoder,
      self.bos_id,
      self._partition.row_multiple if self._partition else 1,
    )

  def _advance(
    self, job, speculative, rounds
  ) -> Iterator[tuple[DecodeState, Seen]]:
    """Yields the state every `rounds` rounds, and what the host sees of it.

    The host looks for stop strings in between.
    """
    self._fit(job, speculative, 'start')
    state = self._program('start', job.request, speculative)(job.request)
    run = self._program('run', job.request, speculative)
    while True:
      state = run(job.request, state, np.int32(rounds))
      parts = state.tokens, state.length, state.finish_reason
      seen = Seen(*partitioning.on_host(parts))
      if job.options.stop_strings:
        seen = job.stop_at_strings(seen)
        where = state.finish_reason.sharding
        reasons = jax.device_put(seen.finish_reason, where)
        state = state.replace(finish_reason=reasons)
      yield state, seen
      if np.all(seen.finish_reason != FinishReason.RUNNING):
        return

  def _fit(self, job: Job, speculative: bool, name: str) -> None:
    """Gives a job as many rows as a program has that there is already.

    Its own if it can be, and not more than twice these, which cost less than
    to compile another.
    """
    least = job.num_rows
    for rows in sorted(self._rows):
      if least <= rows <= 2 * least:
        request = job.request_in(rows)
        if (name, (speculative, _shapes(request))) in self._programs:
          job.request = request
          return

  def _program(self, name: str, request: Request, speculative: bool):
    """A compiled function of a loop, for this kind and shape of request.

    Args:
      name: 'decode', or 'start' and then 'run', of `Loop`.
      request: what it will be called with, the parameters bound.
      speculative: which loop.
    """
    key = (speculative, _shapes(request))
    if (name, key) not in self._programs:
      rows, width = request.inputs.shape
      self.check_room(rows, width, request.cache_slots, request.gamma)
      loop, params = self.loop(speculative)
      functions: dict[str, Callable[..., Any]] = {
        'decode': loop.decode,
        'start': loop.start,
        'run': loop.run,
      }
      args: list[Any] = [params, request]
      options: dict[str, Any] = {}
      if name == 'run':
        args += [self._states[key], jax.ShapeDtypeStruct((), jnp.int32)]
        # The state is donated: the caches are updated where they are.
        options['donate_argnums'] = 2
      if self._partition is not None:
        args[1] = self._partition.request(request)
        if name == 'run':
          options['out_shardings'] = partitioning.shardings(args[2])
        elif name == 'decode':  # what the host reads, whole on each device
          options['out_shardings'] = self._partition.sharding()
      lowered = jax.jit(functions[name], **options).lower(*args)
      compiled = lowered.compile()
      if name == 'start':
        self._states[key] = partitioning.described(
          lowered.out_info, self._partition and compiled.output_shardings
        )
      program = functools.partial(compiled, params)
      self._programs[name, key] = program
      self._rows.add(request.inputs.shape[0])
    return self._programs[name, key]


# One program, where its operations one by one took milliseconds a call.
_generation = jax.jit(decode_state.generation)


def _shapes(request: Request):
  """What a program was compiled for, as a dictionary key."""
  leaves, tree = jax.tree.flatten(request)
  return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
