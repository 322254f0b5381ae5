"""A first look at a pair: a sample, both ways in turn, and what came of it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import rich.console

from specdec_jax.checks.fields import check_types
from specdec_jax.drafters.base import Drafter
from specdec_jax.engine.engine import Engine
from specdec_jax.files import shipped
from specdec_jax.infer import run
from specdec_jax.infer.settings import TASKS_OWN, TaskConfig
from specdec_jax.measure.canvas import check_outputs
from specdec_jax.measure.record import Record
from specdec_jax.measure.table import say
from specdec_jax.models.model import Model
from specdec_jax.models.shortlist import Shortlisted
from specdec_jax.text.local_tasks import LocalTask, kind_of

_MANY_IDS = 100_000  # of an output layer: more than T5's, as mT5 and Gemma have


@dataclasses.dataclass(frozen=True)
class TryConfig:
  """A first look.

  Attributes:
    target: the model whose outputs are wanted.
    drafter: what proposes.
    engine: makes the engine of both.
    input_file: examples, see `infer.examples.find`.
    prefix: put before each input.
    metrics: as of `TaskConfig`.
    max_input_len: tokens of an input at most; longer ones are cut.
    max_decode_len: tokens of an output at most.
    seed: as of `TaskConfig`.
    output_file: JSON of the record; None writes nothing.

  Raises:
    ValueError: a value is of another type.
  """

  target: Model
  drafter: Drafter | Model
  engine: Callable[..., Engine]
  input_file: str
  prefix: str = ''
  metrics: tuple[str, ...] | str | None = TASKS_OWN
  max_input_len: int = 128
  max_decode_len: int = 128
  seed: int = 0
  output_file: str | None = None

  def __post_init__(self):
    check_types(self)


def look(
  config: TryConfig, console: rich.console.Console | None = None
) -> Record:
  """Decodes the sample both ways, prints what came, and writes the record.

  Raises:
    ValueError: the pair does not fit, the target has no vocabulary, or no
      example can be decoded.
  """
  console = console or rich.console.Console()
  check_outputs(config)
  tokenizer = config.target.tokenizer
  if tokenizer is None:
    raise ValueError(
      f'{config.target!r} came without a vocabulary: give one (--vocab, in gin'
      ' VOCAB_PATH).'
    )
  file = shipped.find(config.input_file)
  summary = run.decode_task(
    TaskConfig(
      engine=lambda **options: config.engine(
        target=config.target, tokenizer=tokenizer, **options
      ),
      drafter=lambda: config.drafter,
      tokenizer=tokenizer,
      mixture_or_task_name=LocalTask(
        'sample',
        {'test': file},
        tokenizer.path,
        kind=kind_of(file),
        prefix=config.prefix,
      ),
      output_dir=None,
      task_feature_lengths={
        'inputs': config.max_input_len,
        'targets': config.max_decode_len,
      },
      decoding='both',
      batch_size=1,
      metrics=config.metrics,
      seed=config.seed,
    ),
    console=console,
  )
  names = {
    'target': config.target.name or 'target',
    'draft': config.drafter.name or 'draft',
    'draft_ids': _num_ids(config.drafter),
  }
  head = ('kind', 'version', 'machine')
  measured = {k: value for k, value in summary.items() if k not in head}
  record = Record('try', names | measured)
  for sentence in sentences(record):
    say(console, sentence)
  if config.output_file is not None:
    record.save(config.output_file)
    say(console, f'The record is in {config.output_file}.')
  return record


def sentences(found: Mapping[str, Any]) -> list[str]:
  """What a record says, for people."""
  pair = f'{found["target"]} with {found["draft"]}'
  speed_up = found['speed_up']
  rate = found['speculative']['acceptance_rate']
  differing = len(found['agreement']['disagreements'])
  compared = found['agreement']['compared']
  said = [
    f'{pair}, gamma {found["gamma"]}: {speed_up:.2f} times as quick as plain'
    f' decoding on this machine; {rate:.0%} of the proposals accepted;'
    f' {compared - differing} of {compared} outputs agree.'
  ]
  if speed_up < 1:
    said.append(
      'It does not pay here as it is: `specdec calibrate` says whether another'
      ' gamma does.'
    )
  if (found.get('draft_ids') or 0) >= _MANY_IDS:
    said.append(
      f'The output layer of {found["draft"]} has {found["draft_ids"]:,} ids,'
      ' most of the work of a proposal: with --draft-shortlist TEXTS it keeps'
      ' those of texts like the outputs.'
    )
  return said


def _num_ids(drafter: Drafter | Model) -> int | None:
  """Ids of a model's output layer; None of another drafter."""
  if not isinstance(drafter, Model):
    return None
  if isinstance(drafter.network, Shortlisted):
    return drafter.network.num_ids
  return drafter.network.vocab_size
