"""The configuration of a run, `DecodeConfig`, and the examples of its data set.

A data set is a file of lines, or a task. A task is a seqio task, or a file of
examples (`.tsv`, `.jsonl`, lines), which needs neither seqio nor TensorFlow.
"""

import dataclasses
import hashlib
import itertools
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from specdec_jax import files
from specdec_jax.checks.fields import Bound, check_types, unexpected
from specdec_jax.drafters.base import Drafter
from specdec_jax.engine import options as options_lib
from specdec_jax.engine.completion import Completion, joined, passed_over
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.long_texts import splitter
from specdec_jax.engine.options import MOST_ROWS, Options
from specdec_jax.engine.scheduler import PoolSettings
from specdec_jax.models.model import Model
from specdec_jax.text import tasks
from specdec_jax.text.chat import template_of
from specdec_jax.text.sentences import Sentences
from specdec_jax.text.tokenizer import Tokenizer, Vocabulary
from specdec_jax.types import Count, Positive

PLAIN, SPECULATIVE, SCORING = 'plain', 'speculative', 'scoring'
INPUTS, TARGETS = 'inputs', 'targets'
PREDICTIONS = 'predictions.jsonl'  # the results of a run over lines

# Fields that do not change results, or that the run's settings have in another
# form.
_NOT_DECIDING = frozenset(
  'engine drafter tokenizer input_file mixture_or_task_name output_dir'
  ' overwrite metrics calibration acceptance checkpoint_period stdout'
  ' require_agreement'.split()
)


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
  """A run over the lines of a file, or over a task as T5X users know it.

  Attributes:
    engine: makes the engine; it is called after the cheap checks, and for a
      task it gets the arguments `max_input_len` and `max_decode_len`.
    input_file: UTF-8 text, one input a line, plain or `.gz`, or a named pipe;
      '-' is stdin. It is read if there is no `mixture_or_task_name`.
    output_dir: folder of the results; None writes none. Several processes, and
      shards, may share it.
    mixture_or_task_name: name of a task or a mixture, a local task, or the path
      of a file of examples.
    tokenizer: the models' tokenizer; a task needs it.
    drafter: makes the drafter, which is passed to `engine` if a mode is
      speculative; None: `engine` has the drafter already.
    options: how an output is decoded: temperature, seed, beams, lenience, ...
      With several samples or beams, a record has lists. For lines,
      `on_too_long` is 'error' or 'truncate'; with 'error' the record of a line
      that is too long has an error.
    task_feature_lengths: feature -> the most tokens, the end included; longer
      'inputs' and 'targets' are cut. None: the lengths of the longest example.
    task_split: split of the task; a file has only one.
    task_mode: 'predict', 'score' (the log-probability of the targets), or
      'predict_with_aux' (predictions with scores and counts). A file of lines
      is never in mode 'predict', but in 'predict_with_aux' instead.
    mode: 'speculative', 'plain', or 'both'. 'both' decodes each batch
      plainly and then speculatively, compares the two, and keeps the
      speculative outputs.
    batch_size: the most examples that are decoded together.
    batching: 'fixed' decodes batch after batch; 'continuous' replaces a
      finished example by the next one, and on a CPU decodes on each core.
      None: 'continuous' on a CPU for more than 256 outputs and several rows.
      Scoring and beams use fixed batches.
    prompt_feature: feature whose tokens each output begins with; 'targets' is
      T5X's prompt_with_targets.
    shard_id: examples with index % `num_shards` == `shard_id` are decoded;
      needed where there are several shards.
    num_shards: number of shards that the examples are split into.
    checkpoint_period: number of batches whose examples one pass of continuous
      batching decodes.
    include_all_inputs: whether records hold all features, not only texts.
    prefix: text before each input of a file, such as 'summarize: '; before each
      sentence if texts are split.
    distinct: whether lines with the same input, in a file of examples, become
      one example, whose references are the targets of all these lines.
    metrics: names of metrics in `text.metrics`; 'task': the metrics that the
      task names, or BLEU for a file with targets; () or None: no metrics.
    chat: treats each line as a user's message, and puts it into the target's
      chat template.
    calibration: file of `specdec calibrate`, which says the best gamma for the
      number of rows that are decoded together, or that speculation does not
      pay.
    acceptance: record of how often this target accepts this drafter. If it is
      given without a calibration and a gamma, the run chooses the gamma that
      pays on this host by the times of some calls. These times are measured
      once, by the first run of more than 256 lines. Runs before that have the
      default gamma.
    overwrite: replaces results, and the unfinished run of another
      configuration, in the output folder.
    stdout: 'report' prints the report; 'outputs' prints the outputs, a line for
      each, and the report goes to stderr.
    require_agreement: whether the run fails if plain and speculative greedy
      outputs differ.

  Raises:
    ValueError: a value has another type or is outside its range.
  """

  engine: Callable[..., Engine]
  input_file: str = '-'
  output_dir: str | None = None
  _: dataclasses.KW_ONLY
  mixture_or_task_name: str | tasks.Task | None = None
  tokenizer: Vocabulary | None = None
  drafter: Callable[[], Drafter | Model] | None = None
  options: Options = Options()
  task_feature_lengths: Mapping[str, int] | None = None
  task_split: str = 'test'
  task_mode: Literal['predict', 'score', 'predict_with_aux'] = 'predict'
  mode: Literal['both', 'plain', 'speculative'] = 'both'
  batch_size: Annotated[int, Bound(1, MOST_ROWS)] = 1
  batching: Literal['fixed', 'continuous'] | None = None
  prompt_feature: str | None = None
  shard_id: Count | None = None
  num_shards: Positive = 1
  checkpoint_period: Positive = 100
  include_all_inputs: bool = False
  prefix: str = ''
  distinct: bool = False
  metrics: tuple[str, ...] | Literal['task'] | None = 'task'
  chat: bool = False
  calibration: str | None = None
  acceptance: str | None = None
  overwrite: bool = False
  stdout: Literal['report', 'outputs'] = 'report'
  require_agreement: bool = False

  def __post_init__(self):
    check_types(self)
    for name, is_right, expected in self._conditions():
      if not is_right:
        value = operator.attrgetter(name)(self)
        raise unexpected(name.removeprefix('options.'), expected, value)
    object.__setattr__(self, 'shard_id', self.shard_id or 0)
    if self.is_task:  # the examples of a task are already cut to the lengths
      log_probs = self.task_mode != 'predict'
      options = dataclasses.replace(
        self.options, log_probs=log_probs, on_too_long='truncate'
      )
      object.__setattr__(self, 'options', options)
    elif self.task_mode == 'predict':
      object.__setattr__(self, 'task_mode', 'predict_with_aux')

  def _conditions(self) -> Iterator[tuple[str, Any, str]]:
    """Yields a field's name, whether its value is valid, and valid values."""
    local = 'a path on this machine (a bucket may hold the models alone)'
    for name in ('input_file', 'output_dir', 'calibration'):
      path = getattr(self, name)
      yield name, path is None or (path and '://' not in path), local
    shards, shard = self.num_shards, self.shard_id
    is_shard = shards == 1 if shard is None else shard < shards
    yield 'shard_id', is_shard, f'less than {shards} (num_shards)'
    lengths = self.task_feature_lengths or {INPUTS: 2, TARGETS: 1}
    expected = "as {'inputs': 512, 'targets': 128}, at least 2 and 1"
    are_right = lengths.get(INPUTS, 0) >= 2 and lengths.get(TARGETS, 0) >= 1
    yield 'task_feature_lengths', are_right, expected
    options, samples = self.options, self.options.num_samples
    one_number = isinstance(options.temperature, int | float)
    yield 'options.temperature', one_number, 'one number'
    yield 'options.seed', options.seed >= 0, 'a whole number >= 0'
    yield 'options.example_ids', options.example_ids is None, 'None'
    yield 'options.prompts', options.prompts is None, 'None'
    unsplit = options.split is None or not self.is_task
    yield 'options.split', unsplit, 'None for a task, but for lines'
    differ = self.is_task or self.searches or not options.sampling.greedy
    may_differ = samples == 1 or (differ and self.task_mode != 'score')
    expected = "1 in the task mode 'score' and for lines at temperature 0"
    yield 'options.num_samples', may_differ, f'{expected} (gin: NUM_DECODES)'
    cuts = self.chat and options.on_too_long != 'error'
    expected = "'error' in a chat, where the template ends a message"
    yield 'options.on_too_long', not cuts, expected
    expected = 'None with num_beams, for it is of single outputs'
    drafts = self.searches and SPECULATIVE in self.modes
    yield 'calibration', not (drafts and self.calibration), expected
    fixed = not self.searches or self.batching != 'continuous'
    yield 'batching', fixed, "'fixed' with beams (--batching fixed)"

  @property
  def is_task(self) -> bool:
    """Whether the data set is a task; otherwise it is a file of lines."""
    return self.mixture_or_task_name is not None

  @property
  def modes(self) -> tuple[str, ...]:
    """The modes that run in turn: scoring; or plain, speculative, or both."""
    if self.task_mode == 'score':
      return (SCORING,)
    return (PLAIN, SPECULATIVE) if self.mode == 'both' else (self.mode,)

  @property
  def searches(self) -> bool:
    """Whether outputs come from a beam search."""
    return self.options.num_beams is not None

  @property
  def rows(self) -> int:
    """The number of outputs that are decoded together."""
    return self.batch_size * self.options.num_samples

  @property
  def slots(self) -> PoolSettings | None:
    """The settings of continuous batching; None for fixed batches."""
    pooled = self.batching == 'continuous' or self.options.split is not None
    return PoolSettings(rows=self.rows) if pooled and self.may_pool else None

  @property
  def may_pool(self) -> bool:
    """Whether continuous batching is possible; not for beams and scoring."""
    return not self.searches and self.task_mode != 'score'

  @property
  def results_name(self) -> str:
    """The name of the file of records; for a task it is as in T5X."""
    shard = f'{self.shard_id:05}-of-{self.num_shards:05}'
    if not self.is_task:
      return PREDICTIONS if self.num_shards == 1 else f'{PREDICTIONS}-{shard}'
    return f'{self.task_name}-{self.task_mode}.jsonl-{shard}'

  @property
  def files_prefix(self) -> str:
    """The prefix of the names of the run's other files."""
    name = self.results_name
    return '' if name == PREDICTIONS else f'{name}.'

  @property
  def task_name(self) -> str:
    """The task's name in the names of files."""
    return self.task.name.replace(os.sep, '_')

  @property
  def task(self) -> tasks.Task:
    """The task, after `tasks.find` has replaced its name by a `Task`."""
    task = self.mixture_or_task_name
    assert task is not None and not isinstance(task, str)
    return task

  def index(self, number: int) -> int:
    """Returns the index in the data set of the shard's example `number`."""
    return number * self.num_shards + (self.shard_id or 0)

  def identity(self) -> dict[str, Any]:
    """Returns the fields that decide the results, as JSON values."""
    settings = {k: x for k, x in vars(self).items() if k not in _NOT_DECIDING}
    settings['options'] = dataclasses.asdict(self.options)
    return settings | ({'task': self.task_name} if self.is_task else {})


def open_tokenizer(
  path: str | None = None, target: Callable[[], Model] | None = None
) -> Vocabulary:
  """Opens a vocabulary; without a path, the target's vocabulary.

  Args:
    path: a file or a folder that holds a vocabulary; None: the target's own.
    target: loads the target; it is called only without a path.

  Raises:
    ValueError: the vocabulary cannot be read, or the target has none.
  """
  if path is not None:
    return Tokenizer(path)
  model = None if target is None else target()
  if model is None or model.tokenizer is None:
    name = '' if model is None else f' of {model.name!r}'
    raise ValueError(f'No vocabulary{name}: give --vocab (in gin VOCAB_PATH).')
  return model.tokenizer


class Example(NamedTuple):
  """One input of a run.

  Attributes:
    source: the input, as text or as ids.
    features: the text of a line, or all features of a task's example; a record
      shows them.
    target: ids of the correct output; empty if none is given.
    prompt: ids that the output begins with; None: no prompt.
    skipped: the completion of an example that is not decoded, because it is
      broken or empty; else None.
    sentences: the sentences of a text that is split; else None.
    sources: the inputs that the model reads for `sentences`, with prefixes.
  """

  source: str | Sequence[int]
  features: Any
  target: Sequence[int] = ()
  prompt: Sequence[int] | None = None
  skipped: Completion | None = None
  sentences: Sentences | None = None
  sources: Sequence[str | Sequence[int]] = ()

  @property
  def parts(self) -> list['Example']:
    """The sentences of a split text as examples, or only this example."""
    if self.sentences is None:
      return [self]
    return [self._replace(source=source) for source in self.sources]

  def output(self, outputs: Sequence[Any]) -> Completion:
    """Returns the output of the example; joins the outputs of its parts."""
    if self.sentences is not None:
      return joined(self.sentences, outputs)
    return self.skipped or outputs[0]

  @property
  def reference(self) -> Any:
    """The correct text, or a list of correct texts; None if none is given."""
    if self.skipped or not isinstance(self.features, Mapping):
      return None
    references = self.features.get('references')
    return references or self.features.get('targets_pretokenized') or None


class Item(NamedTuple):
  """One output to decode, or one target to score.

  Attributes:
    number: the index of the output; the samples of an example, or of each of
      its sentences, follow one another.
    example_id: a number from which, with the seed, the random numbers derive.
    example: the example, or one of its parts.
  """

  number: int
  example_id: int
  example: Example


@dataclasses.dataclass
class DataSet:
  """The examples of a run.

  Attributes:
    examples: the examples of the run's shard, in order.
    broken_off: why the file could not be read to its end, or None.
    reading: a sentence on how the file is read; None for lines of text.
    lines: for each text or sentence to decode, the index of its example;
      `prepare` sets them.
  """

  examples: list[Example]
  broken_off: str | None
  reading: str | None
  lines: list[int] = dataclasses.field(default_factory=list)

  def prepare(self, config: DecodeConfig, engine: Engine) -> list[Item]:
    """Checks the examples with an engine; returns the items to decode.

    Raises:
      ValueError: the task was made for another vocabulary, the engine has no
        chat template, or there are too many examples or samples.
    """
    of_task, of_engine = config.tokenizer, engine.tokenizer
    if not config.is_task:
      self.examples = _checked_lines(config, engine, self.examples)
      split = [x.sentences for x in self.examples if x.sentences and x.sources]
      notes = [self.reading] if self.reading else []
      if count := sum(len(x.spans) for x in split):
        notes.append(
          f'Lines that were split: {len(split)}, into {count} parts.'
        )
      if cut := sum(x.num_cut for x in split):
        notes.append(f'Sentences that were too long, and were cut: {cut}.')
      self.reading = ' '.join(notes) or None
    elif of_task and of_task.fingerprint != of_engine.fingerprint:
      expected = f"the engine's vocabulary, {of_engine.path!r}"
      raise unexpected('tokenizer', expected, of_task.path)
    samples = config.options.num_samples
    if self.examples:  # a number that is too large fails before a long loop
      options_lib.example_id(config.index(len(self.examples) - 1), samples - 1)
    self.lines, items = [], list[Item]()
    for number, example in enumerate(self.examples):
      for place, part in enumerate(example.parts):
        first = len(self.lines) * samples
        self.lines.append(number)
        for sample in range(samples) if part.skipped is None else ():
          whole_id = options_lib.example_id(config.index(number), sample)
          part_id = options_lib.sentence_id(whole_id, place)
          items.append(Item(first + sample, part_id, part))
    return items

  def identity(self) -> dict[str, Any]:
    """Returns a digest and the number of the examples, as JSON values."""
    sha256 = hashlib.sha256()
    for example in self.examples:
      features = example.features
      if isinstance(features, Mapping):
        features = sorted(
          (key, value.tolist() if isinstance(value, np.ndarray) else value)
          for key, value in features.items()
        )
      error = example.skipped and example.skipped.error
      spans = example.sentences and example.sentences.spans
      sha256.update(repr((features, error, spans)).encode())
    digest = sha256.hexdigest()
    return {'examples': len(self.examples), 'examples_sha256': digest}

  @property
  def references(self) -> dict[int, Any]:
    """The references, by the index of their example."""
    references = {n: x.reference for n, x in enumerate(self.examples)}
    return {n: text for n, text in references.items() if text is not None}

  def engine_options(self, config: DecodeConfig) -> dict[str, Any]:
    """Returns the length limits of the engine for a task; {} for lines.

    Raises:
      ValueError: the task has no targets, and `task_feature_lengths` is None.
    """
    if not config.is_task:
      return {}
    lengths = config.task_feature_lengths or {
      INPUTS: max((len(x.source) for x in self.examples), default=2),
      TARGETS: max((len(x.target) for x in self.examples), default=2),
    }
    if self.examples and not lengths[TARGETS] and config.task_mode != 'score':
      expected = f'lengths, because {config.task_name!r} has no targets'
      field = 'task_feature_lengths (gin: TASK_FEATURE_LENGTHS)'
      advice = "Write {'inputs': 512, 'targets': 128}."
      raise unexpected(field, expected, config.task_feature_lengths, advice)
    # The token of the language comes before the text.
    more = 1 if config.tokenizer and config.tokenizer.languages else 0
    return {
      'max_input_len': max(2, lengths[INPUTS] + more),
      'max_decode_len': max(1, lengths[TARGETS]),
    }


def read(config: DecodeConfig) -> DataSet:
  """Reads the examples of a run; broken examples have an error.

  Raises:
    ValueError: the examples cannot be read, or all of them are broken.
  """
  if config.is_task:
    features = config.task.examples(
      config.task_split, config.task_feature_lengths, True, config.tokenizer
    )
    reading = config.task.reading(config.task_split)
  else:
    features = tasks.read(config.input_file, targets_field=None)
    reading = tasks.reading(config.input_file)
  shard = itertools.islice(features, config.shard_id, None, config.num_shards)
  values, broken_off = files.until_broken(shard)
  if config.is_task:
    examples = [_task_example(config, *pair) for pair in enumerate(values)]
  else:
    lines = [(x[INPUTS], _failed(x.get(tasks.BROKEN))) for x in values]
    examples = [Example(text, text, skipped=failed) for text, failed in lines]
  if examples and all(example.skipped for example in examples):
    first = examples[0].skipped
    raise ValueError(first and first.error)
  return DataSet(examples, broken_off, reading)


def _failed(error: str | None) -> Completion | None:
  return passed_over('error', error) if error else None


def _checked_lines(
  config: DecodeConfig, engine: Engine, examples: Sequence[Example]
) -> list[Example]:
  """Prepares lines for an engine; marks empty or too long lines as skipped."""
  template = template_of(engine.tokenizer) if config.chat else None
  if config.chat and template is None:
    expected = f'a chat template beside {engine.tokenizer.path!r}'
    advice = 'Leave --chat out, or take a model that was trained on chats.'
    raise unexpected('chat', expected, None, advice)

  def as_input(text: Any) -> Any:
    text = config.prefix + text
    if template is None:
      return text
    return template.ids([{'role': 'user', 'content': text}])

  limit, options = engine.config.max_input_len, config.options
  splits = None
  if options.split:
    splits = splitter(engine.codec, engine.config, options, as_input)
  checked = []
  for number, example in enumerate(examples):
    source, skipped = example.source, example.skipped
    if skipped is None and splits:
      sentences = splits(str(source))
      sources = [as_input(options.split_prefix + x) for x in sentences.parts]
      example = example._replace(sentences=sentences, sources=sources)
    elif skipped is None:
      bare, source = source, as_input(source)
      count = engine.num_input_tokens(source)
      if not count or config.prefix and not engine.num_input_tokens(bare):
        skipped = passed_over('empty')
      elif options.on_too_long != 'truncate' and count > limit:
        skipped = _failed(
          f'line {1 + config.index(number)}: {count} tokens (its end'
          f' included), at most {limit}. Shorten it, or set'
          " on_too_long='truncate'"
        )
    checked.append(example._replace(source=source, skipped=skipped))
  return checked


def _task_example(
  config: DecodeConfig, number: int, features: Mapping[str, Any]
) -> Example:
  """Returns an example of a task; it has an error if needed ids are missing."""
  features = dict(features)
  error = features.pop(tasks.BROKEN, None)
  arrays = {k: v for k, v in features.items() if isinstance(v, np.ndarray)}
  ids = {feature: array.tolist() for feature, array in arrays.items()}
  prompt_feature = config.prompt_feature or INPUTS
  missing = [x for x in (INPUTS, prompt_feature) if x not in ids]
  if config.task_mode == 'score' and not ids.get(TARGETS):
    missing = [TARGETS]
  if missing and not error:
    error = (
      f'{config.task_name!r}: example {config.index(number)} has no tokens'
      f' {missing[0]!r}, which this run needs; it has those of'
      f' {sorted(x for x in ids if ids[x])}.'
    )
    if missing == [TARGETS]:
      error += ' A line is inputs<TAB>targets (.tsv), or has both (.jsonl).'
  if error:
    return Example((), features, skipped=_failed(error))
  prompt = None
  if config.prompt_feature is not None:
    prompt = ids[prompt_feature]
    # The prompt loses its end of sequence, which would end the output.
    if config.tokenizer and prompt[-1:] == [config.tokenizer.eos_id]:
      prompt = prompt[:-1]
  return Example(ids[INPUTS], features, ids.get(TARGETS, []), prompt)
