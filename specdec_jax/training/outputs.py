"""A model's own outputs for many sources, made by the plain decoding loop."""

import dataclasses
import hashlib
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import files, partitioning
from specdec_jax.checks.arguments import (
  check_all_at_least,
  check_at_least,
  check_increasing,
)
from specdec_jax.checks.fields import check_types
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import Request, example_keys, new_request
from specdec_jax.models.base import LanguageModel, Params
from specdec_jax.probs import SamplingConfig
from specdec_jax.text.tokenizer import EOS_ID, PAD_ID
from specdec_jax.training.pairs import TokenPairs
from specdec_jax.training.settings import claim
from specdec_jax.types import FinishReason

# A call has dozens of rows, which share the cost of packing a kernel.
PLACEMENT = partitioning.Placement(kernel_layout='in_out')
_ROUNDS_A_LOOK = 4  # rounds between two looks of the host for unfinished rows


@dataclasses.dataclass(frozen=True)
class OutputsConfig:
  """How outputs are generated.

  Attributes:
    num_examples: the most sources to decode; 0 is all.
    max_minutes: if > 0, no chunk is begun after this time. Batches come in
      random order, so that the outputs made until then are a fair sample.
    temperatures: batches take these alternately; 0 is greedy.
    batch_size: rows decoded together, of similar source lengths.
    widths: increasing lengths of a batch of sources, ends included; one program
      is compiled for each. A source longer than the last width is left out.
    max_ratio, max_extra: an output may have max_ratio tokens per token of its
      source, and max_extra more.
    max_unfinished: a batch ends when at most this share of its rows is
      unfinished, and these rows are cut off: a row that repeats itself does not
      hold up the others.
    chunk_batches: batches per file; a run that is killed loses at most so many.
    seed: the random numbers of an example derive from this seed and the
      example's number.
  """

  num_examples: int = 0
  max_minutes: float = 0.0
  temperatures: tuple[float, ...] = (0.0,)
  batch_size: int = 64
  widths: tuple[int, ...] = (16, 32, 96)
  max_ratio: float = 1.25
  max_extra: int = 8
  max_unfinished: float = 0.05
  chunk_batches: int = 8
  seed: int = 0

  def __post_init__(self):
    check_types(self)
    check_at_least(
      self,
      num_examples=0,
      max_minutes=0.0,
      batch_size=1,
      chunk_batches=1,
      max_ratio=0.0,
      max_extra=1,
    )
    if not 0 <= self.max_unfinished < 1:
      raise ValueError(
        f'OutputsConfig.max_unfinished is {self.max_unfinished}; expected a'
        ' share in [0, 1).'
      )
    check_all_at_least(self, temperatures=0)
    check_increasing(self, widths=2)

  def limit(self, source_length: int) -> int:
    """Tokens that the output of a source may have, its end included."""
    return int(self.max_ratio * source_length) + self.max_extra


class Output(NamedTuple):
  """One output.

  Attributes:
    tokens: int32[n], without the end of sequence.
    ended: whether the output ended by itself, not by a limit.
  """

  tokens: np.ndarray
  ended: bool


class Decoder:
  """Makes greedy or sampled outputs for sources of ids, batch by batch."""

  def __init__(self, model: LanguageModel, config: OutputsConfig):
    self._model, self._config = model, config

  def __call__(
    self,
    params: Params,
    sources: Sequence[np.ndarray],
    ids: Sequence[int],
    temperature: float = 0.0,
  ) -> list[Output]:
    """Decodes at most `batch_size` sources, each shorter than `widths[-1]`.

    Args:
      params: the parameters, as `partitioning.place` returns them.
      sources: int32[n], each without its end of sequence.
      ids: the examples' numbers, from which their random numbers derive.
      temperature: 0 is greedy.

    Returns:
      An output for each source.
    """
    request = self._request(sources, ids, temperature)
    loop, pair = Loop(self._model), PairParams(params, None)
    state = _start(loop, pair, request)
    rounds = jnp.int32(_ROUNDS_A_LOOK)
    allowed = int(self._config.max_unfinished * len(sources))
    while np.sum(np.asarray(state.running)) > allowed:
      state = _run(loop, pair, request, state, rounds)
    tokens, length, reason = jax.device_get(
      (state.tokens, state.length, state.finish_reason)
    )
    ended = reason == FinishReason.STOP
    ends = length - ended  # leaves out the end of sequence
    return [
      Output(tokens[row, 1 : ends[row]], bool(ended[row]))
      for row in range(len(sources))
    ]

  def _request(self, sources, ids, temperature) -> Request:
    config, batch = self._config, self._config.batch_size
    longest = max(map(len, sources)) + 1
    width = config.widths[int(np.searchsorted(config.widths, longest))]
    inputs = np.full((batch, width), PAD_ID, np.int32)
    max_length = np.zeros(batch, np.int32)
    for row, source in enumerate(sources):
      inputs[row, : len(source)] = source
      inputs[row, len(source)] = EOS_ID
      max_length[row] = config.limit(len(source))
    numbers = np.zeros(batch, np.uint32)
    numbers[: len(ids)] = ids
    request = new_request(
      inputs,
      example_keys(config.seed, numbers),
      SamplingConfig(temperature=temperature),
      slots=config.limit(width - 1),
      gamma=0,
      stop_ids=[EOS_ID],
      max_length=max_length,
      with_log_probs=False,
    )
    return jax.device_put(request)  # it is used several times


# Jitted here, so that all `Decoder`s of a model and a shape share a program.
_start = jax.jit(Loop.start, static_argnums=0)
_run = jax.jit(Loop.run, static_argnums=0, donate_argnums=3)


def generate_outputs(
  model: LanguageModel,
  params: Params,
  sources: TokenPairs,
  path: str | os.PathLike[str],
  config: OutputsConfig = OutputsConfig(),
  log: Callable[[str], None] = print,
) -> TokenPairs:
  """Makes pairs of each source with the model's own output for it.

  The pairs are written to `path` by `TokenPairs.save`. Until all exist, chunks
  lie in a folder beside it, and a run that was killed is resumed after the last
  chunk. Each chunk is sealed with a checksum (see `files.write_sealed`) that
  also covers its number and everything that decides its contents. A chunk that
  is damaged, of another run, or from an earlier version without checksums is
  reported and made again. An output that does not end by itself is left out, so
  that every pair can get its end of sequence, as the pairs of other data do.

  Args:
    model: a `LanguageModel`.
    params: its parameters, as a checkpoint has them.
    sources: examples in random order; their targets are ignored.
    path: the `.npz` file; if it exists, it is only read.
    config: how outputs are generated.
    log: gets lines of progress.

  Returns:
    The pairs, in another order than the sources.

  Raises:
    ValueError: `path` was written with another model, other sources or another
      `config`, or is damaged; or no output ended by itself.
  """
  path = os.fspath(path)
  parts = f'{path}.parts'
  batches = _batches(sources, config)
  settings = {
    'params': digest(params),
    'sources': digest(sources.inputs, sources.inputs_offsets),
    'outputs': dataclasses.asdict(config) | {'max_minutes': None},
  }
  of = _claim(path, settings, log)
  if os.path.exists(path):
    return TokenPairs.load(path)
  os.makedirs(parts, exist_ok=True)
  decoder = Decoder(model, config)
  placed = partitioning.place(params, PLACEMENT)
  chunks = [
    batches[at : at + config.chunk_batches]
    for at in range(0, len(batches), config.chunk_batches)
  ]
  progress = _Progress(len(batches), config.max_minutes, log)
  made = []
  for number, chunk in enumerate(chunks):
    name = os.path.join(parts, f'{number:05d}.npz')
    pairs = _kept(name, f'{number} {of}', log)
    if pairs is None:
      if progress.time_is_up:
        break
      pairs, tokens = _one_chunk(
        decoder, placed, sources, chunk, number * config.chunk_batches, config
      )
      files.write_sealed(name, pairs.to_bytes(), f'{number} {of}')
      progress.chunk(len(chunk), len(pairs), tokens)
    else:
      progress.found(len(chunk))
    made.append(pairs)
  pairs = TokenPairs.joined(made)
  if not len(pairs):
    raise ValueError(
      f'None of {len(sources)} outputs ended by itself; is the model trained?'
    )
  pairs.save(path)
  shutil.rmtree(parts)
  return pairs


def _claim(path: str, settings: dict[str, Any], log) -> str:
  """Calls `claim`; a broken settings file is replaced if there are only chunks.

  Chunks do not need it: each is sealed with the settings.
  """
  known = f'{path}.settings.json'
  try:
    return claim(known, settings)
  except files.BrokenFileError as error:
    if os.path.exists(path):
      raise
    log(f'{known!r} is written again: {error}')
    os.unlink(known)
    return claim(known, settings)


def _kept(name: str, of: str, log) -> TokenPairs | None:
  """A chunk; None if it is missing, or broken, which is logged."""
  if not os.path.lexists(name):
    return None
  try:
    return TokenPairs.from_bytes(files.read_sealed(name, of))
  except files.BrokenFileError as error:
    log(f'{error}; it is made again')
    return None


def digest(*trees: Any) -> str:
  """sha256 (hex) of the bytes of all arrays, and of their names and types."""
  found = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
    array = np.ascontiguousarray(leaf)
    name = jax.tree_util.keystr(path)
    found.update(f'{name} {array.dtype} {array.shape}'.encode())
    found.update(array.tobytes())
  return found.hexdigest()


def _batches(sources: TokenPairs, config: OutputsConfig) -> list[np.ndarray]:
  """Numbers of sources of similar length, in batches in random order."""
  lengths = np.diff(sources.inputs_offsets)
  usable = np.flatnonzero((lengths > 0) & (lengths < config.widths[-1]))
  if config.num_examples:
    usable = usable[: config.num_examples]
  if not len(usable):
    raise ValueError(
      f'None of the {len(sources)} sources is non-empty and shorter than the'
      f' longest width ({config.widths[-1]} tokens with its end).'
    )
  order = usable[np.argsort(lengths[usable], kind='stable')]
  size = config.batch_size
  batches = [order[at : at + size] for at in range(0, len(order), size)]
  np.random.default_rng(config.seed).shuffle(batches)
  return batches


def _one_chunk(decoder, params, sources, chunk, first, config):
  """The chunk's pairs, and how many tokens were generated for it."""
  inputs, outputs = [], []
  for number, batch in enumerate(chunk, first):
    temperature = config.temperatures[number % len(config.temperatures)]
    texts = [sources[i][0] for i in batch]
    found = decoder(params, texts, batch, temperature)
    for source, output in zip(texts, found, strict=True):
      if output.ended and len(output.tokens):
        inputs.append(source)
        outputs.append(output.tokens)
  pairs = TokenPairs.from_lists(inputs, outputs)
  return pairs, len(pairs.targets) + len(pairs)


class _Progress:
  """Logs how far, how fast and how much is left, every 15 seconds at most."""

  def __init__(self, total: int, max_minutes: float, log):
    self._total, self._log = total, log
    self._end_s = 60 * max_minutes if max_minutes else math.inf
    self._start = time.monotonic()
    self._shown_s = 0.0
    self._found = self._batches = self._pairs = self._tokens = 0

  @property
  def time_is_up(self) -> bool:
    return time.monotonic() - self._start >= self._end_s

  def found(self, batches: int) -> None:
    """Counts batches of an earlier run."""
    self._found += batches

  def chunk(self, batches: int, pairs: int, tokens: int) -> None:
    """Counts batches that were made now."""
    self._batches += batches
    self._pairs += pairs
    self._tokens += tokens
    elapsed = time.monotonic() - self._start
    done = self._found + self._batches
    if elapsed - self._shown_s < 15 and done < self._total:
      return
    self._shown_s = elapsed
    left_s = (self._total - done) * elapsed / self._batches
    left_s = min(left_s, max(self._end_s - elapsed, 0.0))
    self._log(
      f'outputs {done}/{self._total} batches, {self._pairs} examples,'
      f' {self._tokens / elapsed:.0f} tokens/s, {left_s / 60:.1f} min left'
    )
