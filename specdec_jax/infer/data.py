"""What a run decodes and how: `DecodeConfig`, and the examples of its data set.

A data set is a file of lines, or a task: one that seqio knows, or a file of
examples (`.tsv`, `.jsonl`, lines) for which neither seqio nor TensorFlow is
needed.
"""

import dataclasses
import hashlib
import itertools
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from specdec_jax import files
from specdec_jax.checks.fields import (
  check_at_least,
  check_choice,
  check_types,
  unexpected,
)
from specdec_jax.drafters.base import Drafter
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.loading import load
from specdec_jax.engine.request import (
  ALPHA,
  MOST_ROWS,
  Options,
  example_id,
)
from specdec_jax.engine.scheduler import PoolSettings
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.model import Model
from specdec_jax.text import local_tasks, tasks
from specdec_jax.text.chat import template_of
from specdec_jax.text.local_tasks import BROKEN, LocalTask
from specdec_jax.text.tokenizer import Tokenizer

PLAIN, SPECULATIVE, SCORING = 'plain', 'speculative', 'scoring'
# Decoding -> the ways that run, in turn.
WAYS = {
  'both': (PLAIN, SPECULATIVE),
  PLAIN: (PLAIN,),
  SPECULATIVE: (SPECULATIVE,),
}
INPUTS, TARGETS = 'inputs', 'targets'
PREDICTIONS = 'predictions.jsonl'  # the results of a run over lines
_PATHS = ('input_file', 'output_dir', 'calibration', 'plot_file', 'output_file')
# Fields that decide no result, or only by what the identity describes.
_NOT_DECIDING = frozenset(
  'engine drafter tokenizer input_file mixture_or_task_name output_dir'
  ' overwrite metrics calibration acceptance checkpoint_period stdout num_shown'
  ' require_agreement plot_file output_file'.split()
)


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
  """One run over the lines of a file, or over a task as T5X users know it.

  Attributes:
    engine: makes the engine; called after all that is cheap was checked. For a
      task it is given `max_input_len` and `max_decode_len`.
    input_file: UTF-8 text, one input a line, plain or `.gz`, or a named pipe;
      '-' is stdin. It is read where there is no `mixture_or_task_name`.
    output_dir: folder of the results; None writes none.
    mixture_or_task_name: name of a task or a mixture, a local task, or the path
      of a file of examples.
    tokenizer: the models' tokenizer; a task needs it.
    drafter: makes the drafter that `engine` is called with, where anything is
      decoded speculatively; None leaves it to `engine`.
    options: how an output is decoded: temperature, seed, beams, lenience, ...
      With several samples or beams, a record has lists. For lines, its
      `on_too_long` is 'error', which makes a line that is too long a record
      with an error, or 'truncate'.
    task_feature_lengths: feature -> tokens at most, the end included; longer
      'inputs' and 'targets' are cut. None: the lengths of the longest example.
    split: split of the task; a file has only one.
    mode: 'predict', 'score' (the log-probability of the targets), or
      'predict_with_aux' (predictions with scores and counts).
    decoding: 'speculative', 'plain', or 'both'. 'both' decodes each batch
      plainly and then speculatively, compares the two, and keeps the
      speculative outputs.
    batch_size: examples decoded together, if there are as many.
    batching: 'fixed' decodes batch after batch; 'continuous' gives the place
      of a finished example to the next one. Scores come in fixed batches.
    prompt_from_targets: number of the target's first tokens that each output
      begins with.
    prompt_feature: feature whose tokens each output begins with; 'targets' is
      T5X's prompt_with_targets.
    shard_id: examples with index % `num_shards` == `shard_id` are decoded.
    num_shards: number of shards that the examples are split into.
    checkpoint_period: batches that continuous batching takes together.
    include_all_inputs: whether records hold all features, not only texts.
    prefix: text before each input of a file of examples, such as
      'summarize: '.
    metrics: names of functions of `text.metrics`; 'task' is what the task
      names, or BLEU for a file with targets; () or None is none.
    chat: takes each line for a user's message, and puts it into the target's
      chat template.
    calibration: file of `specdec calibrate`, which chooses gamma for the rows
      that are decoded together, or says that speculation does not pay.
    acceptance: record of how often this target accepts this drafter. With it,
      and neither a calibration nor a gamma, the run chooses the gamma that pays
      on this host.
    overwrite: replaces results, and the unfinished run of another
      configuration, in the output folder.
    stdout: 'report'; or 'outputs', which go to stdout, a line for each, and the
      report to stderr.
    num_shown: number of lines that the report shows as examples.
    require_agreement: whether differing greedy outputs fail the run.
    plot_file: a PNG of the acceptance over the run; None draws none.
    output_file: JSON of a first look at the pair, decoded both ways: a record
      of kind 'try'; None writes none.

  Raises:
    ValueError: a value has another type or is outside its range.
  """

  engine: Callable[..., Engine]
  input_file: str = '-'
  output_dir: str | None = None
  _: dataclasses.KW_ONLY
  mixture_or_task_name: str | LocalTask | None = None
  tokenizer: Tokenizer | None = None
  drafter: Callable[[], Drafter | Model] | None = None
  options: Options = Options()
  task_feature_lengths: Mapping[str, int] | None = None
  split: str = 'test'
  mode: Literal['predict', 'score', 'predict_with_aux'] = 'predict'
  decoding: Literal['both', 'plain', 'speculative'] = 'both'
  batch_size: int = 1
  batching: Literal['fixed', 'continuous'] = 'fixed'
  prompt_from_targets: int = 0
  prompt_feature: str | None = None
  shard_id: int = 0
  num_shards: int = 1
  checkpoint_period: int = 100
  include_all_inputs: bool = False
  prefix: str = ''
  metrics: tuple[str, ...] | str | None = 'task'
  chat: bool = False
  calibration: str | None = None
  acceptance: str | None = None
  overwrite: bool = False
  stdout: Literal['report', 'outputs'] = 'report'
  num_shown: int = 5
  require_agreement: bool = False
  plot_file: str | None = None
  output_file: str | None = None

  def __post_init__(self):
    check_types(self)
    if isinstance(self.metrics, list):
      object.__setattr__(self, 'metrics', tuple(self.metrics))
    check_at_least(
      self,
      batch_size=1,
      checkpoint_period=1,
      num_shards=1,
      num_shown=0,
      prompt_from_targets=0,
      shard_id=0,
    )
    self._check_paths_and_sizes()
    self._check_options()
    if self.is_task:  # its examples are cut already
      changes: dict[str, Any] = {
        'log_probs': self.mode != 'predict',
        'on_too_long': 'truncate',
      }
      options = dataclasses.replace(self.options, **changes)
      object.__setattr__(self, 'options', options)

  def _expect(self, name: str, expected: str, is_right: Any) -> None:
    if not is_right:
      value = operator.attrgetter(name)(self)
      raise unexpected(f'DecodeConfig.{name}', expected, value)

  def _check_paths_and_sizes(self) -> None:
    local = 'a path on this machine (a bucket may hold the models alone)'
    for name in _PATHS:
      path = getattr(self, name)
      self._expect(name, local, path is None or (path and '://' not in path))
    for name in ('split', 'mixture_or_task_name'):
      self._expect(name, 'text', getattr(self, name) != '')
    self._expect(
      'batch_size', f'at most {MOST_ROWS}', self.batch_size <= MOST_ROWS
    )
    shards = f'less than num_shards = {self.num_shards}, counted from 0'
    self._expect('shard_id', shards, self.shard_id < self.num_shards)
    names = "names, as ('bleu',), 'task' (the task's own), or () for none"
    is_names = self.metrics in (None, 'task') or isinstance(self.metrics, tuple)
    self._expect('metrics', names, is_names)
    lengths = self.task_feature_lengths
    if lengths is not None:
      sizes = lengths.get(INPUTS, 0), lengths.get(TARGETS, 0)
      are_sizes = all(type(size) is int for size in sizes)
      self._expect(
        'task_feature_lengths',
        "as {'inputs': 512, 'targets': 128}, at least 2 and 1",
        are_sizes and sizes[0] >= 2 and sizes[1] >= 1,
      )
    alone = "a feature's name, or None where prompt_from_targets is set"
    is_alone = self.prompt_feature is None or not self.prompt_from_targets
    self._expect('prompt_feature', alone, is_alone)

  def _check_options(self) -> None:
    """Checks what a run cannot do with options that `generate` has."""
    options, samples = self.options, self.options.num_samples
    one_number = isinstance(options.temperature, int | float)
    self._expect('options.temperature', 'one number', one_number)
    self._expect('options.seed', 'a whole number >= 0', options.seed >= 0)
    for name in ('example_ids', 'prompts'):
      self._expect(f'options.{name}', 'None', getattr(options, name) is None)
    differ = self.is_task or self.searches or not options.sampling.greedy
    self._expect(
      'options.num_samples',
      "1 in the mode 'score' (gin: NUM_DECODES) and for lines at temperature 0",
      samples == 1 or (differ and self.mode != 'score'),
    )
    self._expect(
      'options.on_too_long',
      "'error' in a chat, whose messages end with what the template adds",
      not self.chat or options.on_too_long == 'error',
    )
    self._expect(
      'batching',
      "'fixed' with beams (--batching fixed), or no beams",
      not self.searches or self.batching == 'fixed',
    )

  @property
  def is_task(self) -> bool:
    """Whether the run is over a task, not over lines."""
    return self.mixture_or_task_name is not None

  @property
  def task(self) -> str | LocalTask:
    """The task of a run over a task."""
    assert self.mixture_or_task_name is not None
    return self.mixture_or_task_name

  @property
  def vocabulary(self) -> Tokenizer:
    """The tokenizer of a run over a task."""
    assert self.tokenizer is not None
    return self.tokenizer

  @property
  def ways(self) -> tuple[str, ...]:
    """The ways of decoding, in turn; or scoring."""
    return (SCORING,) if self.mode == 'score' else WAYS[self.decoding]

  @property
  def searches(self) -> bool:
    """Whether outputs come from a beam search."""
    return self.options.num_beams is not None

  @property
  def rows(self) -> int:
    """Outputs that are decoded together: those of each example."""
    return self.batch_size * self.options.num_samples

  @property
  def slots(self) -> PoolSettings | None:
    """Settings of continuous batching; None where batches are fixed."""
    if self.batching == 'fixed' or self.mode == 'score':
      return None
    return PoolSettings(rows=self.rows)

  @property
  def results_name(self) -> str:
    """The name of the file of records; for a task it is T5X's."""
    if not self.is_task:
      return PREDICTIONS
    shard = f'{self.shard_id:05}-of-{self.num_shards:05}'
    return f'{self.task_name}-{self.mode}.jsonl-{shard}'

  @property
  def files_prefix(self) -> str:
    """What the names of all other files begin with."""
    return f'{self.results_name}.' if self.is_task else ''

  @property
  def task_name(self) -> str:
    """The name that a task's results have."""
    task = self.mixture_or_task_name
    name = task.name if isinstance(task, LocalTask) else str(task)
    return name.replace(os.sep, '_')

  def index(self, number: int) -> int:
    """The index in the task of the shard's example `number`."""
    return number * self.num_shards + self.shard_id

  def judges_blocks(self, engine: Engine) -> bool:
    """Whether sampled drafts are judged as a whole."""
    branches = engine.has_drafter and engine.drafter.tree is not None
    greedy = self.options.sampling.greedy
    return self.options.judges_blocks and not greedy and not branches

  @property
  def beams(self) -> dict[str, Any] | None:
    """The settings of a beam search, as JSON values; None without one."""
    if not self.searches:
      return None
    names = ('num_beams', 'alpha', 'length_penalty', 'draft_beams')
    beams = {name: getattr(self.options, name) for name in names}
    if self.options.length_penalty is None and self.options.alpha is None:
      beams['alpha'] = ALPHA
    return beams

  def identity(self) -> dict[str, Any]:
    """The fields that decide the results, as JSON values."""
    fields = (field.name for field in dataclasses.fields(self))
    settings = {
      name: getattr(self, name) for name in fields if name not in _NOT_DECIDING
    }
    settings['options'] = dataclasses.asdict(self.options)
    if self.is_task:
      settings['task'] = self.task_name
    return settings


@dataclasses.dataclass(frozen=True)
class RunOptions(Options):
  """The options of a run; `num_beams` counts where `decoder` is 'beam'.

  Attributes:
    temperature: 0 is greedy; above it outputs are sampled.
    lenience: below 1 more proposals pass, and the output is lossy.
    verification: how sampled drafts are judged, 'token' or 'block'; None is
      'block' unless lenience is below 1.
    num_beams: width of a beam search, 4 where only `decoder` asks for one.
    decoder: 'beam'; or 'sample', which is greedy at temperature 0.
    return_all_decodes: whether a beam search gives `num_samples` beams, or only
      the best one.

  Raises:
    ValueError: an option is out of range.
  """

  decoder: str = 'sample'
  return_all_decodes: bool = True

  def __post_init__(self):
    check_choice('decoder', self.decoder, ('sample', 'beam'))
    if self.decoder == 'sample':
      object.__setattr__(self, 'num_beams', None)
    else:
      if self.num_beams is None:
        object.__setattr__(self, 'num_beams', 4)
      if not self.return_all_decodes:
        object.__setattr__(self, 'num_samples', 1)
    super().__post_init__()


def load_drafter(
  path: str | None = None,
  network: LanguageModel | None = None,
  dtype: str | None = None,
  adapter: str | None = None,
  shortlist: str | None = None,
  revision: str | None = None,
) -> Model:
  """Loads a drafter that a run may leave out, by `engine.load`.

  Args:
    path: the drafter's checkpoint, of any kind that the target may have; None
      where it was left out.
    network: the drafter's network, if its checkpoint does not say its sizes.
    dtype: the drafter's dtype; 'int8' changes no output.
    adapter: folder of a LoRA adapter of the drafter (PEFT's).
    shortlist: file of texts like the outputs: the drafter proposes their tokens
      alone, which is quicker where its vocabulary is large.
    revision: branch, tag or commit of the drafter on the Hugging Face hub.

  Raises:
    ValueError: there is no path; or as `engine.load`.
  """
  if path is None:
    raise ValueError(
      'Speculative decoding needs a drafter: give its checkpoint (--draft, in'
      ' gin DRAFT_CHECKPOINT_PATH) and, unless that describes itself, its'
      ' network (DRAFT); or decode without one (--mode plain).'
    )
  return load(
    path,
    network,
    dtype=dtype,
    adapter=adapter,
    shortlist=shortlist,
    revision=revision,
  )


def open_tokenizer(
  path: str | None = None, target: Callable[[], Model] | None = None
) -> Tokenizer:
  """Opens a vocabulary, or that of the target where there is no path.

  Args:
    path: a file or a folder that holds a vocabulary; None: the target's own.
    target: loads the target; called where there is no path.

  Raises:
    ValueError: it cannot be read, or the target has none.
  """
  if path is not None:
    return Tokenizer(path)
  model = None if target is None else target()
  if model is None or model.tokenizer is None:
    name = '' if model is None else f' of {model.name!r}'
    raise ValueError(
      f'No vocabulary{name} is known: give one (--vocab, in gin VOCAB_PATH).'
    )
  return model.tokenizer


class Example(NamedTuple):
  """One input of a run.

  Attributes:
    source: the input, as text or as ids.
    features: what a record may show: the text of a line, or all features.
    target: ids of the target; empty without one.
    prompt: ids that the output begins with; None: no prompt.
    num_tokens: tokens of a line; 0 where there is nothing to read.
    error: why it cannot be decoded, or None.
  """

  source: str | Sequence[int]
  features: Any
  target: Sequence[int] = ()
  prompt: Sequence[int] | None = None
  num_tokens: int = 0
  error: str | None = None

  @property
  def reference(self) -> Any:
    """The correct text, or a list of several; None without one."""
    references = self.features.get('references')
    return references or self.features.get('targets_pretokenized') or None


class Item(NamedTuple):
  """One output to decode, or one target to score.

  Attributes:
    number: its place among the outputs; those of an example lie together.
    source: the input, as text or as ids.
    example_id: its random numbers derive from this and the seed.
    prompt: ids that the output begins with; None: no prompt.
    target: ids to score.
  """

  number: int
  source: str | Sequence[int]
  example_id: int
  prompt: Sequence[int] | None = None
  target: Sequence[int] = ()


@dataclasses.dataclass
class DataSet:
  """The examples of a run.

  Attributes:
    examples: the examples of the run's shard, in order.
    broken_off: why the file could not be read to its end, or None.
    reading: a sentence on how the file is read; None for lines of text.
    limit: most tokens of a line that are read; None before `prepare`.
  """

  examples: list[Example]
  broken_off: str | None
  reading: str | None
  limit: int | None = None

  def prepare(self, config: DecodeConfig, engine: Engine) -> list[Item]:
    """Checks the examples with an engine; the items of those without error.

    Raises:
      ValueError: the task was made for another vocabulary, the engine has no
        chat template, or numbers of examples and samples are too large.
    """
    self.limit = engine.max_input_len
    if config.is_task:
      _check_vocabulary(config, engine, self.examples)
    else:
      self.examples = _counted(config, engine, self.examples)
    samples = config.options.num_samples
    if self.examples:  # the largest number first: there may be very many
      example_id(config.index(len(self.examples) - 1), samples - 1)
    return [
      Item(
        number * samples + sample,
        example.source,
        example_id(config.index(number), sample),
        example.prompt,
        example.target,
      )
      for number, example in enumerate(self.examples)
      if not example.error and (config.is_task or example.num_tokens)
      for sample in range(samples)
    ]

  def identity(self) -> dict[str, Any]:
    """What tells this data set from others, as JSON values."""
    digest = hashlib.sha256()
    for example in self.examples:
      shown = example.features
      if isinstance(shown, Mapping):
        shown = sorted((key, _listed(value)) for key, value in shown.items())
      digest.update(repr((shown, example.error)).encode())
    return {
      'examples': len(self.examples),
      'examples_sha256': digest.hexdigest(),
    }

  def engine_options(self, config: DecodeConfig) -> dict[str, Any]:
    """Lengths and languages for a task's engine.

    Raises:
      ValueError: nothing says how long an output may be.
    """
    if not config.is_task:
      return {}
    lengths = config.task_feature_lengths or {
      INPUTS: max((len(one.source) for one in self.examples), default=2),
      TARGETS: max((len(one.target) for one in self.examples), default=2),
    }
    if self.examples and not lengths[TARGETS] and config.mode != 'score':
      raise ValueError(
        f'{config.task_name!r} has no targets, so nothing says how long an'
        ' output may be: set task_feature_lengths (gin: TASK_FEATURE_LENGTHS ='
        " {'inputs': 512, 'targets': 128})."
      )
    # The token of a language stands before the text.
    more = 1 if getattr(config.tokenizer, 'languages', {}) else 0
    options: dict[str, Any] = {
      'max_input_len': max(2, lengths[INPUTS] + more),
      'max_decode_len': max(1, lengths[TARGETS]),
    }
    task = tasks.find_local(config.task)
    for name in ('source_lang', 'target_lang'):
      if getattr(task, name, None) is not None:
        options[name] = getattr(task, name)
    return options


def read(config: DecodeConfig) -> DataSet:
  """Reads the examples of a run; those that are broken have an error.

  Raises:
    ValueError: they cannot be read, or all of them are broken.
  """
  if config.is_task:
    return _read_task(config)
  path = config.input_file
  lines, broken_off = files.until_broken(local_tasks.read_lines(path))
  if lines and all(line.error for line in lines):
    raise ValueError(
      f'{path!r} has no line of text; expected UTF-8, one example per line.'
      f' {lines[0].error}.'
    )
  examples = [Example(text, text, error=error) for text, error in lines]
  return DataSet(examples, broken_off, local_tasks.reading(path))


def _counted(
  config: DecodeConfig, engine: Engine, examples: Sequence[Example]
) -> list[Example]:
  """Lines with their tokens counted; those that are too long get an error."""
  template = None
  if config.chat:
    template = template_of(engine.tokenizer)
    if template is None:
      raise ValueError(
        f'{engine.tokenizer.path!r} has no chat template (chat_template.jinja,'
        ' or an entry of tokenizer_config.json) beside its vocabulary. Leave'
        ' --chat out, or take a model that was trained on chats.'
      )
  truncates = config.options.on_too_long == 'truncate'
  counted = []
  for number, example in enumerate(examples, 1):
    source, error, count = example.source, example.error, 0
    if error is None:
      if template is not None:
        source = template.ids([{'role': 'user', 'content': source}])
      count = engine.num_input_tokens(source)
      if not truncates and count > engine.max_input_len:
        error = (
          f'line {number}: {count} tokens (its end included), at most'
          f" {engine.max_input_len}. Shorten it, or set on_too_long='truncate'"
        )
    changed = example._replace(source=source, num_tokens=count, error=error)
    counted.append(changed)
  return counted


def _read_task(config: DecodeConfig) -> DataSet:
  task = config.task
  features = tasks.examples(
    task, config.split, config.task_feature_lengths, config.tokenizer, True
  )
  places = itertools.islice(features, config.shard_id, None, config.num_shards)
  shard, broken_off = files.until_broken(places)
  examples = [_task_example(config, *pair) for pair in enumerate(shard)]
  if examples and all(one.error for one in examples):
    raise ValueError(examples[0].error)
  local = tasks.find_local(task)
  return DataSet(
    examples, broken_off, local.reading(config.split) if local else None
  )


def _task_example(
  config: DecodeConfig, number: int, features: Mapping[str, Any]
) -> Example:
  """An example of a task, with an error where it lacks what the run needs."""
  features = dict(features)
  error = features.pop(BROKEN, None)
  prompt_feature = config.prompt_feature
  if config.prompt_from_targets:
    prompt_feature = TARGETS
  is_scored = config.mode == 'score'
  for feature in (INPUTS, TARGETS if is_scored else None, prompt_feature):
    if feature is None or error:
      continue
    ids = features.get(feature, '')
    scored = is_scored and feature == TARGETS
    if not _is_ids(ids) or (scored and not len(ids)):
      present = sorted(k for k, v in features.items() if _is_ids(v) and len(v))
      error = (
        f'{config.task_name!r}: example {config.index(number)} has no tokens'
        f' {feature!r}, which this run needs; it has those of {present}.'
      )
      if scored:
        error += ' A line is inputs<TAB>targets (.tsv), or has both (.jsonl).'
  if error:
    return Example((), features, error=error)
  prompt = None
  if prompt_feature is not None:
    prompt = _ids(features, prompt_feature)
    # Without its end: an output that begins with it would be over.
    if prompt[-1:] == [config.vocabulary.eos_id]:
      del prompt[-1]
    prompt = prompt[: config.prompt_from_targets or None]
  target = _ids(features, TARGETS) if _is_ids(features.get(TARGETS, '')) else []
  return Example(_ids(features, INPUTS), features, target, prompt)


def _check_vocabulary(
  config: DecodeConfig, engine: Engine, examples: Sequence[Example]
) -> None:
  """Raises ValueError for a task or a tokenizer of another vocabulary."""
  if engine.tokenizer.fingerprint != config.vocabulary.fingerprint:
    raise ValueError(
      f"The run's tokenizer {config.vocabulary.path!r} is not the engine's,"
      f' {engine.tokenizer.path!r} (their fingerprints differ).'
    )
  size = engine.target.vocab_size
  for number, example in enumerate(examples):
    for feature, ids in ((INPUTS, example.source), (TARGETS, example.target)):
      if (highest := int(max(ids, default=0))) >= size:
        raise ValueError(
          f'{config.task_name!r}: {feature!r} of example'
          f' {config.index(number)} holds the id {highest}, the target has'
          f' {size}: the task was made for another vocabulary.'
        )


def _is_ids(value: Any) -> bool:
  array = np.asarray(value)
  return array.ndim == 1 and (
    not array.size or np.issubdtype(array.dtype, np.integer)
  )


def _ids(features: Mapping[str, Any], feature: str) -> list[int]:
  return [int(token) for token in features.get(feature, ())]


def _listed(value: Any) -> Any:
  return value.tolist() if isinstance(value, np.ndarray) else value
