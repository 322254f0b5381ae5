"""Makes training data: decodes many sources with a model, without a drafter."""

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import numpy as np

from specdec_jax import partitioning
from specdec_jax.checkpoints.disk_arrays import fingerprint
from specdec_jax.checks.fields import Bound, Checked, unexpected
from specdec_jax.decoding import pool
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.state import NO_ROUND_LIMIT, PairParams
from specdec_jax.files import same_run
from specdec_jax.files.run_log import RunLog
from specdec_jax.models.base import LanguageModel, Params
from specdec_jax.probs import SamplingConfig
from specdec_jax.request import Request, example_keys, new_request
from specdec_jax.text.tokenizer import EOS_ID
from specdec_jax.training.data import Pairs, digest
from specdec_jax.types import Amount, Count, FinishReason, Positive

# Kernels have T5X's layout. A CPU packs such a kernel again in each call, but
# the dozens of rows of a call share this cost.
PLACEMENT = partitioning.Placement(kernel_layout='in_out')
# A batch ends when at most this share of its rows is unfinished, and the
# outputs of these rows are not used. Otherwise a row that repeats itself would
# delay the next batch.
_MOST_UNFINISHED = 0.05
_LOG_SECONDS = 15
_COMPLETE = 'complete'  # this is the last line of a file with all outputs


@dataclasses.dataclass(frozen=True)
class OutputsConfig(Checked):
  """The settings that outputs are generated with.

  Attributes:
    num_examples: the most sources to decode; 0 decodes all.
    max_minutes: if > 0, no batch begins after this time; a run that is started
      again has the whole time again. Batches come in random order, so that the
      outputs until then are a fair sample.
    temperatures: the temperatures that batches have in turn; 0 is greedy.
    batch_size: rows that are decoded together; their sources have similar
      lengths.
    max_ratio, max_extra: an output may have max_ratio tokens per token of its
      source, and max_extra more.
    seed: the random numbers of an example derive from this seed and the
      example's index.
  """

  num_examples: Count = 0
  max_minutes: Amount = 0.0
  temperatures: Annotated[tuple[Amount, ...], Bound(1)] = (0.0,)
  batch_size: Positive = 64
  max_ratio: Amount = 1.25
  max_extra: Positive = 8
  seed: int = 0

  def limit(self, source_length: int) -> int:
    """Returns the most tokens of an output, its end-of-sequence id included."""
    return int(self.max_ratio * source_length) + self.max_extra


def decode(
  model: LanguageModel,
  params: Params,
  config: OutputsConfig,
  sources: Sequence[Sequence[int]],
  ids: Sequence[int] | np.ndarray,
  width: int,
  temperature: float = 0.0,
  begin: Sequence[int] = (),
  eos_id: int = EOS_ID,
) -> list[list[int] | None]:
  """Decodes one batch of sources, all in one loop.

  An `Engine`, which replaces each finished row by a waiting one, takes twice as
  long for short outputs. The loop here ends when few rows are unfinished.

  Args:
    model: the network.
    params: its parameters, as `partitioning.place` returns them.
    config: the settings.
    sources: at most `batch_size` lists of ids, without an end of sequence.
    ids: the examples' indices, from which their random numbers derive.
    width: positions for a source and its end-of-sequence id; a program is
      compiled for each width.
    temperature: 0 is greedy.
    begin: the ids that the decoder reads first; without ids, the model's start
      id. A model without an encoder reads only these ids, and no source.
    eos_id: the end-of-sequence id of sources and outputs.

  Returns:
    For each source, the ids of `begin` without the first one, then the output
    without its end-of-sequence id; None if the output was cut off.
  """
  batch = config.batch_size
  inputs = np.full((batch, width), model.pad_id, np.int32)
  max_length = np.zeros(batch, np.int32)
  for row, source in enumerate(sources):
    inputs[row, : len(source)] = source
    inputs[row, len(source)] = eos_id
    max_length[row] = config.limit(len(source))
  numbers = np.resize(np.asarray(ids, np.uint32), batch)
  begin = begin or [model.start_id]
  request = new_request(
    inputs,
    example_keys(config.seed, numbers),
    SamplingConfig(temperature=temperature),
    slots=config.limit(width - 1),
    gamma=0,
    stop_ids=[eos_id],
    max_length=max_length,
    with_log_probs=False,
    prompt=np.tile(np.array(begin, np.int32), (batch, 1)),
    prompt_length=len(begin),
    pad_id=model.pad_id,
  )
  enough = len(sources) - int(_MOST_UNFINISHED * len(sources))
  done = jax.device_get(_decode(model, params, request, np.int32(enough)))
  return [
    [*begin[1:], *done.tokens[row, : done.length[row] - 1].tolist()]
    if done.finish_reason[row] == FinishReason.STOP
    else None
    for row in range(len(sources))
  ]


# The module's own jitted function, so that all batches of the same model and
# shape share a compiled program.
@functools.partial(jax.jit, static_argnums=0)
def _decode(
  model: LanguageModel, params: Params, request: Request, enough: jax.Array
):
  """Decodes without a drafter until `enough` rows (int32[]) are finished."""
  loop, pair = Loop(model), PairParams(params, None)
  rows = pool.read(loop, pair, request)
  _, view = pool.run(loop, pair, rows, NO_ROUND_LIMIT, enough, request.drafting)
  return view.generation


def generate_outputs(
  model: LanguageModel,
  params: Params,
  sources: Sequence[Sequence[int]],
  path: str | os.PathLike[str],
  config: OutputsConfig = OutputsConfig(),
  begin: Sequence[int] = (),
  eos_id: int = EOS_ID,
  log: Callable[[str], None] = print,
) -> Pairs:
  """Decodes sources with the model, and returns pairs of source and output.

  The pairs of each batch are appended to a `RunLog`, from which a killed run
  goes on. When all sources are decoded, or `max_minutes` are over, a last line
  says that the outputs are complete. An output that was cut off is left out,
  because training appends an end-of-sequence id to every output.

  Args:
    model: a `LanguageModel`.
    params: its parameters, as a checkpoint has them.
    sources: the ids of examples, in random order.
    path: the `.jsonl` file; if all outputs are in it, it is only read.
    config: the settings.
    begin: the ids that the decoder reads first, as for `decode`.
    eos_id: the end-of-sequence id of sources and outputs.
    log: function that gets lines of progress.

  Returns:
    The pairs, in another order than the sources.

  Raises:
    ValueError: `path` was written with another model, other sources or another
      `config`, or is damaged; or no output ended by itself.
  """
  path = os.fspath(path)
  batches = _batches(sources, config)
  settings: dict[str, Any] = {'params': fingerprint(params)}
  settings['sources'] = digest([(source, ()) for source in sources])
  settings |= {'begin': [*begin], 'eos_id': eos_id}
  settings['outputs'] = dataclasses.asdict(config) | {'max_minutes': None}
  run_log, done = RunLog(path, settings), []
  if os.path.exists(path):
    what = f'{path!r} belongs to a run with other settings'
    same_run.check(run_log.settings(), settings, what)
    done = _batches_of(run_log)
  if done[-1:] != [_COMPLETE]:
    placed = partitioning.place(params, PLACEMENT)
    longest = 1 + max(map(len, sources))
    start = due = time.monotonic()
    end = start + 60 * (config.max_minutes or math.inf)
    for number in range(len(done), len(batches)):
      if (now := time.monotonic()) >= end:
        break
      if now >= due:
        due, minutes = now + _LOG_SECONDS, (now - start) / 60
        log(f'outputs {number}/{len(batches)} batches, {minutes:.1f} min')
      ids = batches[number]
      texts = [[*map(int, sources[i])] for i in ids]
      bits = max(4, max(map(len, texts)).bit_length())
      outputs = decode(
        model,
        placed,
        config,
        texts,
        ids,
        min(1 << bits, longest),
        config.temperatures[number % len(config.temperatures)],
        begin,
        eos_id,
      )
      both = zip(texts, outputs, strict=True)
      done.append([[text, output] for text, output in both if output])
      run_log.append(done[-1])
    if any(done):
      run_log.append(_COMPLETE)
  if not (pairs := _pairs_of(done)):
    raise ValueError(
      f'None of {len(sources)} outputs ended by itself; is the model trained?'
    )
  log(f'outputs: {len(pairs)} of {sum(map(len, batches))} ended by themselves')
  return pairs


def read_outputs(path: str | os.PathLike[str]) -> Pairs:
  """Reads the pairs of a file that `generate_outputs` has written."""
  return _pairs_of(_batches_of(RunLog(path)))


def _batches_of(run_log: RunLog) -> list[Any]:
  """Returns the pairs of each batch, then `_COMPLETE` if the log has it.

  Raises:
    ValueError: a line is damaged.
  """
  batches, damaged = run_log.read_new()
  if damaged:
    raise unexpected(run_log.path, 'lines of JSON', damaged[0][:200])
  return batches


def _pairs_of(batches: list[Any]) -> Pairs:
  return [pair for batch in batches if batch != _COMPLETE for pair in batch]


def _batches(
  sources: Sequence[Sequence[int]], config: OutputsConfig
) -> list[np.ndarray]:
  """Groups sources of similar length into batches, in random order.

  Returns:
    The indices of the sources of each batch, int64[batch_size] or fewer.
  """
  lengths = np.array([*map(len, sources)])
  usable = np.flatnonzero(lengths > 0)[: config.num_examples or None]
  if not len(usable):
    got = f'{len(sources)} empty ones'
    raise unexpected('The sources', 'one that is not empty', got)
  order = usable[np.argsort(lengths[usable], kind='stable')]
  starts = range(config.batch_size, len(order), config.batch_size)
  batches = np.split(order, starts)
  np.random.default_rng(config.seed).shuffle(batches)
  return batches
