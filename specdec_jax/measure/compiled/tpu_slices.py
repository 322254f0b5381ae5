"""What models split over a TPU slice need and exchange, computed without one.

For each pair and slice the speculative program is compiled as `Engine` runs it,
only from shapes with shardings: no array of a model is ever made. The memory is
what the compiler reports, exchanges are read from the program's text, and bytes
that a chip reads are counted from the shapes of its parts.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import rich.console

from specdec_jax import partitioning
from specdec_jax.checks.fields import check_types
from specdec_jax.checks.memory import GIB, gib
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import Request
from specdec_jax.drafters.small_model import small_model
from specdec_jax.measure import memory
from specdec_jax.measure.compiled import (
  collectives,
  compiler,
  slices_report,
  tpu,
)
from specdec_jax.measure.compiled.rows import compile_rows
from specdec_jax.measure.record import Record
from specdec_jax.measure.table import console as terminal
from specdec_jax.models import backend
from specdec_jax.models.base import LanguageModel
from specdec_jax.partitioning import Partition, Placement


@dataclasses.dataclass(frozen=True)
class SlicesConfig:
  """What to compile, and for which slices.

  Attributes:
    pairs: name -> (target, draft), two networks.
    slices: topology, such as 'v4:2x2x1' -> placement of the target on it. The
      drafter is whole on each chip.
    output_dir: folder of results.json and report.md.
    batch: B.
    input_len: tokens of an input, or of a prompt.
    decode_len: the most tokens of a run.
    gamma: proposals per round.
    usable_gib: memory of a chip that programs may use.
    name: name of the report.

  Raises:
    ValueError: a number is too small.
  """

  pairs: Mapping[str, tuple[LanguageModel, LanguageModel]]
  slices: Mapping[str, Placement]
  output_dir: str
  batch: int = 1
  input_len: int = 128
  decode_len: int = 128
  gamma: int = 5
  usable_gib: float = 30.75
  name: str = 'TPU v4 slices'

  def __post_init__(self):
    check_types(self)
    for name in ('batch', 'input_len', 'decode_len', 'gamma', 'usable_gib'):
      if getattr(self, name) <= 0:
        raise ValueError(
          f'SlicesConfig.{name} must be positive: {getattr(self, name)}.'
        )
    for name, placement in self.slices.items():
      if placement.on_one_device:
        raise ValueError(
          f'SlicesConfig.slices[{name!r}] is a placement on one device; set its'
          ' data or model to 0, for all of them.'
        )


def check(
  config: SlicesConfig, console: rich.console.Console | None = None
) -> Record:
  """Compiles every pair for every slice, and writes the report.

  Args:
    config: what to compile.
    console: for the table; None is stdout.

  Returns:
    The contents of results.json: settings, and a result for each row.

  Raises:
    ValueError: libtpu is missing; a placement does not fit its slice or a
      network; the output folder holds results of other settings.
  """
  console = console or terminal()
  devices = {name: tpu.describe_slice(name) for name in config.slices}
  kinds = {one[0].device_kind for one in devices.values()}
  with backend.compiled_for('tpu'):
    results = compile_rows(
      config,
      'tpu_slices',
      {'compiled_for': ', '.join(sorted(kinds))} | tpu.versions(),
      {
        _name(pair, one): functools.partial(
          _check_row, config, pair, one, devices[one]
        )
        for pair in config.pairs
        for one in config.slices
      },
      lambda row: _name(row['pair'], row['slice']),
      slices_report.markdown,
      console,
    )
  slices_report.show(console, results)
  return results


def _name(pair: str, topology: str) -> str:
  return f'{pair} on {topology}'


def _check_row(
  config: SlicesConfig, pair: str, topology: str, devices: list[Any]
) -> dict[str, Any]:
  """Compiles one program, and counts bytes and exchanges."""
  networks, placement = config.pairs[pair], config.slices[topology]
  placements = (placement, placement.replicated())
  partitions: Any = [one.partition(devices) for one in placements]
  params = PairParams(*map(_parameters, networks, placements, partitions))
  target, draft = map(partitioning.follow, networks, partitions)
  ours = partitions[0]
  usable = int(config.usable_gib * GIB)
  request = ours.request(_request(config, target))
  record, text = _compile(target, draft, params, request, ours, usable)
  found = collectives.find(text)
  split = {
    leaf.shape
    for leaf in jax.tree.leaves(params)
    if leaf.sharding.shard_shape(leaf.shape) != leaf.shape
  }
  peak = record.get('peak_bytes')
  return {
    'pair': pair,
    'slice': topology,
    'mesh': dict(ours.mesh.shape),
    'program': record,
    'fits': peak is not None and peak <= usable,
    'target_bytes': memory.tree_bytes(params.target),
    'target_chip_bytes': partitioning.shard_bytes(params.target),
    'draft_chip_bytes': partitioning.shard_bytes(params.draft),
    'target_call_bytes': _call_bytes(target, params.target, request),
    'draft_call_bytes': _call_bytes(draft, params.draft, request),
    'exchanged': collectives.totals(found),
    'weights_gathered': len(collectives.of_weights(found, split)),
  }


def _compile(target, draft, params, request, partition, usable):
  """A record of the whole generation, unless its weights do not fit."""
  held = partitioning.shard_bytes(params)
  if held > usable:  # the compiler would say so too, after a long time
    text = (
      f'{gib(held)} of parameters on a chip of {gib(usable)}; not compiled.'
    )
    return {'refused': text}, ''
  lowered = jax.jit(
    Loop(target, small_model(draft)).decode,
    out_shardings=partition.sharding(),
    keep_unused=True,
  ).lower(params, request)
  return compiler.record_of(lowered, jax.tree.leaves(params))


def _parameters(
  network: LanguageModel, placement: Placement, partition: Partition
) -> Any:
  def init():
    return partitioning.lay_out(network.init(jax.random.key(0)), placement)

  return partition.shapes(jax.eval_shape(init))


def _request(config: SlicesConfig, network: LanguageModel) -> Request:
  return memory.request_shapes(
    config.batch,
    config.input_len,
    config.decode_len,
    config.gamma,
    greedy=False,
    has_encoder=network.has_encoder,
  )


def _call_bytes(network: Any, params: Any, request: Request) -> int:
  """Bytes that a chip reads per call: its parts of weights and all caches."""
  weights = memory.decoder_weights(params)
  cache = jax.eval_shape(
    lambda *args: network.network.prefill(*args, request.cache_slots),
    params,
    request.inputs,
  )
  return partitioning.shard_bytes(weights) + partitioning.shard_bytes(
    network.cache_shapes(cache)
  )
