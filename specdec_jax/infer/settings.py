"""What a run of scripts/decode.py can be asked: over lines, or over a task."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from specdec_jax.checks.fields import check_types
from specdec_jax.checks.names import check_choice
from specdec_jax.decoding import fallback
from specdec_jax.decoding.state import BLOCK
from specdec_jax.drafters.base import Drafter
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.loading import load
from specdec_jax.engine.options import ALPHA, MOST_ROWS, options_of
from specdec_jax.engine.schedule import PoolSettings
from specdec_jax.infer.report import PLAIN, SCORING, SPECULATIVE
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.model import Model
from specdec_jax.probs import SamplingConfig
from specdec_jax.text.local_tasks import LocalTask
from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.text.vocabulary import open_vocabulary

# Whom to ask for what: the ways of decoding that run, in turn.
_WAYS = {
  'both': (PLAIN, SPECULATIVE),
  PLAIN: (PLAIN,),
  SPECULATIVE: (SPECULATIVE,),
}
PREDICT, SCORE, PREDICT_WITH_AUX = 'predict', 'score', 'predict_with_aux'
FIXED, CONTINUOUS = 'fixed', 'continuous'
BATCHINGS = (FIXED, CONTINUOUS)
TASKS_OWN = 'task'  # metrics: those that the task names
SAMPLE, BEAM = 'sample', 'beam'
DECODERS = (SAMPLE, BEAM)
_OF_BEAMS = 'alpha', 'length_penalty', 'draft_beams'
TASK_MODES = (PREDICT, SCORE, PREDICT_WITH_AUX)
# What a beam search leaves no choice of, and what to do.
_WITH_BEAMS = {
  'lenience': (1.0, 'with beams, which are exact (gin: LENIENCE)'),
  'batching': (FIXED, 'with beams (--batching fixed; gin: BATCHING)'),
}
_NO_BEAMS = "no beams (no --num-beams; gin: DECODER = 'sample')"
# What goes to stdout: the report; or the outputs, and the report to stderr.
REPORT, OUTPUTS = 'report', 'outputs'


@dataclasses.dataclass(frozen=True)
class Beams:
  """Whether outputs come of a beam search, and of which.

  Attributes:
    decoder: 'beam', or 'sample', which is greedy at temperature 0.
    num_beams: width of the search; of a task it is `num_decodes`.
    alpha: T5X's exponent of its brevity penalty; None is 0.6, or none where
      there is a `length_penalty`.
    length_penalty: that of transformers, with its rules; None is T5X's.
    draft_beams: beams of the drafter; None is twice as many, or those of a
      calibration.

  Raises:
    ValueError: a value is outside its range, or it is of a beam search and
      there is none.
  """

  decoder: str = 'sample'
  num_beams: int = 4
  alpha: float | None = None
  length_penalty: float | None = None
  draft_beams: int | None = None

  def __post_init__(self):
    check_types(self)
    check_choice('Beams.decoder', self.decoder, DECODERS)
    if self.searches:
      options_of(self.options)
    for name in _OF_BEAMS:
      value = getattr(self, name)
      if value is not None and not self.searches:
        raise ValueError(
          f'Beams.{name} = {value!r} is of a beam search, and there is none:'
          " give its width (--num-beams 4; gin: DECODER = 'beam'), or leave"
          f' {name} out.'
        )

  @property
  def searches(self) -> bool:
    """Whether it is a beam search."""
    return self.decoder == BEAM

  @property
  def options(self) -> dict[str, Any]:
    """What an engine is told; nothing without a beam search."""
    if not self.searches:
      return {}
    own = {name: getattr(self, name) for name in _OF_BEAMS}
    given = {name: value for name, value in own.items() if value is not None}
    return {'num_beams': self.num_beams} | given

  @property
  def identity(self) -> dict[str, Any] | None:
    """What decides the results, as JSON values; None without a search."""
    if not self.searches:
      return None
    own = dataclasses.asdict(self)
    if self.alpha is None and self.length_penalty is None:
      own['alpha'] = ALPHA
    return own


class _Rows:
  """The rows of a configuration."""

  batch_size: int
  batching: str
  beams: Beams
  deterministic: bool
  lenience: float
  sampling: SamplingConfig
  stdout: str
  verification: str | None

  @property
  def rows(self) -> int:
    """Rows that are decoded together."""
    return self.batch_size

  @property
  def log_probs(self) -> bool:
    """Whether log-probabilities are wanted."""
    return True

  @property
  def judges_blocks(self) -> bool:
    """Whether drafts are judged as a whole: none are at temperature 0."""
    asked = {'lenience': self.lenience, 'verification': self.verification}
    return not self.sampling.greedy and options_of(asked).judges_blocks

  @property
  def prints_outputs(self) -> bool:
    """Whether stdout is for the outputs."""
    return self.stdout == OUTPUTS

  @property
  def slots(self) -> PoolSettings | None:
    """Settings of continuous batching; None where batches are fixed."""
    if self.batching == FIXED:
      return None
    return PoolSettings(rows=self.rows, deterministic=self.deterministic)


@dataclasses.dataclass(frozen=True)
class DecodeConfig(_Rows):
  """One run of decoding a file of lines.

  Attributes:
    engine: makes the engine; called after all that is cheap was checked.
    drafter: makes the drafter that `engine` is called with, where anything is
      decoded speculatively; None leaves it to `engine`.
    input_file: UTF-8 text, one example a line, plain or `.gz`, or a named
      pipe; '-' reads stdin. See `files.lines`.
    output_dir: where the results go; None writes nothing.
    overwrite: whether what is in `output_dir` may be replaced: finished
      results, or an unfinished run of another configuration. Without it
      finished results are kept, and an unfinished run of the same configuration
      is gone on with.
    mode: 'both', 'plain' or 'speculative'. 'both' decodes each batch plainly,
      then speculatively, so that a machine that slows down slows both.
    batch_size: lines decoded together, if there are as many.
    batching: 'fixed' decodes batch after batch in the order of the lines,
      'continuous' gives the place of a line that is finished to the next one,
      see `Continuous`: with many lines it is quicker.
    sampling: how tokens are drawn, for every line the same.
    lenience: of speculative decoding, in (0, 1]; below 1 it is lossy: see
      `engine.options.Options`.
    verification: how sampled drafts are judged, likewise: 'token', 'block', or
      None, which is 'block' unless lenience is below 1.
    seed: with the line number, what all random numbers derive from.
    on_too_long: 'error' makes a line of more than `engine.max_input_len`
      tokens a record with an error; 'truncate' decodes its beginning.
    num_shown: how many results are printed as examples.
    require_agreement: whether differing greedy outputs fail the run; see
      `decode`. Where lenience is below 1 they may differ.
    calibration: a file of scripts/calibrate.py that chooses the engine's gamma
      for as many rows as are decoded together, or for a beam search that it
      measured; None leaves it as it is. Where speculation does not pay, only
      the plain loop runs.
    acceptance: record of how often this target accepts this drafter, see
      `measure.alpha`. With it, and neither a calibration nor a gamma, the run
      chooses the gamma that pays on this host, see `measure.host_gamma`.
    deterministic: whether a sample must not depend on how many rows ran beside
      it. At temperature 0 no output does. Otherwise the last rows of continuous
      batching keep their gamma, though another would pay.
    checkpoint_period: batches after which finished work is kept, if half a
      minute has not passed before; a killed run goes on from there.
    num_samples: outputs of each line; above 1 a record has lists of them.
    beams: whether they come of a beam search. They are its best `num_samples`
      beams then, from the worst to the best.
    stop_strings: texts that end an output and are no part of it.
    chat: whether each line is a user's message, which is put into the target's
      chat template; see `text.chat`.
    stdout: 'report', or 'outputs': these then go to stdout, a line for each in
      the order of the input, and the report to stderr.
    plot_file: a PNG of the acceptance over the run; None draws none.

  Raises:
    ValueError: a value is outside its range.
  """

  engine: Callable[..., Engine]
  input_file: str = '-'
  output_dir: str | None = None
  overwrite: bool = False
  mode: str = 'both'
  batch_size: int = 1
  batching: str = FIXED
  sampling: SamplingConfig = SamplingConfig(temperature=0.0)
  lenience: float = 1.0
  verification: str | None = None
  seed: int = 0
  on_too_long: str = 'error'
  num_shown: int = 5
  require_agreement: bool = False
  calibration: str | None = None
  acceptance: str | None = None
  deterministic: bool = True
  checkpoint_period: int = 100
  num_samples: int = 1
  stop_strings: Sequence[str] = ()
  stdout: str = REPORT
  drafter: Callable[[], Drafter | Model] | None = None
  beams: Beams = Beams()
  plot_file: str | None = None
  chat: bool = False

  def __post_init__(self):
    check = _Check(self)
    check.path('input_file')
    check.expect(
      'on_too_long',
      not self.chat or self.on_too_long == 'error',
      "'error' in a chat, whose messages end with what the template adds",
    )
    if self.plot_file is not None:
      check.path('plot_file')
    check.choice('mode', _WAYS)
    check.choice('on_too_long', ('error', 'truncate'))
    check.at_least(0, 'num_shown')
    check.at_least(1, 'num_samples')
    check.at_most(MOST_ROWS, 'num_samples')
    if self.beams.searches:
      most = self.beams.num_beams
      check.expect(
        'num_samples',
        self.num_samples <= most,
        f'at most {most}, the width of the search (or take a wider one:'
        ' --num-beams; gin: NUM_BEAMS)',
      )
      check.expect(
        'stop_strings',
        not self.stop_strings,
        'none with beams, which end at ids (leave --stop out; gin:'
        f' STOP_STRINGS), or {_NO_BEAMS}',
      )
    else:
      check.expect(
        'num_samples',
        self.num_samples == 1 or not self.sampling.greedy,
        '1 at temperature 0, where all samples are the same',
      )
    texts = self.stop_strings
    check.expect(
      'stop_strings',
      not isinstance(texts, str)
      and all(isinstance(text, str) and text for text in texts),
      'texts, none of them empty',
    )

  @property
  def ways(self) -> tuple[str, ...]:
    """The ways of decoding, in turn."""
    return _WAYS[self.mode]

  @property
  def num_outputs(self) -> int:
    """Outputs of each line."""
    return self.num_samples

  @property
  def rows(self) -> int:
    """Outputs that are decoded together: of each line, all."""
    return self.batch_size * self.num_outputs

  def plainly(self) -> 'DecodeConfig':
    """This run without the drafter's help."""
    return dataclasses.replace(self, mode=PLAIN)


@dataclasses.dataclass(frozen=True)
class TaskConfig(_Rows):
  """One run over a task, or over a file of examples, as T5X users know it.

  Attributes:
    engine: makes the engine; called after all that is cheap was checked, with
      `max_input_len` and `max_decode_len`.
    tokenizer: of the models, for files of text.
    mixture_or_task_name: of a task, see `text.tasks`; or a local task;
      or the path of a file, see `examples.find`.
    output_dir: where the results go, see `infer.decode_task`; None writes
      nothing.
    drafter: makes the drafter that `engine` is called with, where anything is
      decoded speculatively; None leaves it to `engine`.
    task_feature_lengths: feature -> tokens at most, its end included: longer
      'inputs' and 'targets' are cut, and an output has at most as many tokens
      as 'targets'. None is what the longest example has.
    split: of the task; a file has only one.
    mode: 'predict', 'score' (the log-probability of the targets), or
      'predict_with_aux' (predictions, their log-probabilities and counts).
    decoding: 'speculative', 'plain', or 'both' in turn: then the summary
      compares them, and the predictions are the speculative ones.
    batch_size: examples decoded together, if there are as many.
    batching: as of `DecodeConfig`; scores come in fixed batches.
    num_decodes: samples of each example, or the width of a beam search.
    beams: whether outputs come of a beam search, `num_decodes` wide.
    return_all_decodes: of a beam search, whether all beams are outputs, from
      the worst to the best, or only the best one. Of samples all are.
    prompt_from_targets: with so many of its targets' first tokens each output
      begins.
    prompt_feature: a feature whose tokens each output begins with; 'targets' is
      what T5X calls prompt_with_targets.
    sampling: how tokens are drawn, for every example the same.
    lenience: as of `DecodeConfig`.
    verification: likewise.
    seed: with the example's index and the sample's, what all random numbers
      derive from.
    calibration: as of `DecodeConfig`.
    deterministic: likewise.
    shard_id: of the examples, those whose index leaves this remainder when
      divided by `num_shards` are decoded.
    num_shards: see `shard_id`.
    checkpoint_period: as of `DecodeConfig`.
    include_all_inputs: whether results hold all features of an example, not
      only its texts; as `results.plain` says where JSON has no such value.
    metrics: names of functions of `text.metrics`; 'task' is what the
      task names, or BLEU for a file with targets that names none (a summary
      without it says which package to install); () or None is none. Examples
      without a target do not count.
    overwrite: as of `DecodeConfig`.
    stdout: as of `DecodeConfig`; scores in the mode 'score'.

  Raises:
    ValueError: a value is outside its range.
  """

  engine: Callable[..., Engine]
  tokenizer: Tokenizer
  mixture_or_task_name: str | LocalTask
  output_dir: str | None
  drafter: Callable[[], Drafter | Model] | None = None
  task_feature_lengths: Mapping[str, int] | None = None
  split: str = 'test'
  mode: str = PREDICT
  decoding: str = SPECULATIVE
  batch_size: int = 32
  batching: str = FIXED
  num_decodes: int = 1
  prompt_from_targets: int = 0
  prompt_feature: str | None = None
  sampling: SamplingConfig = SamplingConfig(temperature=0.0)
  lenience: float = 1.0
  verification: str | None = None
  seed: int = 0
  calibration: str | None = None
  deterministic: bool = True
  shard_id: int = 0
  num_shards: int = 1
  checkpoint_period: int = 100
  include_all_inputs: bool = False
  metrics: tuple[str, ...] | str | None = TASKS_OWN
  overwrite: bool = False
  stdout: str = REPORT
  beams: Beams = Beams()
  return_all_decodes: bool = False

  def __post_init__(self):
    check = _Check(self)
    check.expect('split', bool(self.split), 'text')
    check.expect(
      'mixture_or_task_name', bool(self.mixture_or_task_name), 'text'
    )
    check.choice('mode', TASK_MODES)
    check.choice('decoding', _WAYS)
    check.at_least(0, 'shard_id', 'prompt_from_targets')
    check.at_least(1, 'num_decodes', 'num_shards')
    check.at_most(MOST_ROWS, 'num_decodes')
    if isinstance(self.metrics, list):
      object.__setattr__(self, 'metrics', tuple(self.metrics))
    check.expect(
      'metrics',
      self.metrics in (None, TASKS_OWN) or isinstance(self.metrics, tuple),
      f"names, as ('bleu',), {TASKS_OWN!r} (the task's own), or () for none",
    )
    check.expect(
      'shard_id',
      self.shard_id < self.num_shards,
      f'less than num_shards = {self.num_shards}, counted from 0',
    )
    lengths = self.task_feature_lengths
    check.expect(
      'task_feature_lengths',
      lengths is None
      or (
        {'inputs', 'targets'} <= set(lengths)
        and all(type(v) is int and v >= 1 for v in lengths.values())
        and lengths['inputs'] >= 2
      ),
      "tokens of 'inputs' (2 or more) and 'targets' (1 or more), as"
      " {'inputs': 512, 'targets': 128}, or None",
    )
    check.expect(
      'prompt_feature',
      self.prompt_feature is None or not self.prompt_from_targets,
      "a feature's name or None, and None where prompt_from_targets is set",
    )
    check.expect(
      'num_decodes',
      self.mode != SCORE or self.num_decodes == 1,
      "1 in the mode 'score'",
    )
    if self.beams.searches:
      beams = dataclasses.replace(self.beams, num_beams=self.num_decodes)
      object.__setattr__(self, 'beams', beams)

  def index(self, number: int) -> int:
    """The index in the task of the shard's example `number`."""
    return number * self.num_shards + self.shard_id

  @property
  def ways(self) -> tuple[str, ...]:
    """The ways of decoding, in turn, or scoring."""
    return (SCORING,) if self.mode == SCORE else _WAYS[self.decoding]

  @property
  def log_probs(self) -> bool:
    """Whether log-probabilities are wanted."""
    return self.mode != PREDICT

  def plainly(self) -> 'TaskConfig':
    """This run without the drafter's help."""
    return dataclasses.replace(self, decoding=PLAIN)

  @property
  def num_outputs(self) -> int:
    """Outputs of each example."""
    if self.beams.searches and not self.return_all_decodes:
      return 1
    return self.num_decodes

  @property
  def rows(self) -> int:
    """Outputs that are decoded together: of each example, all."""
    return self.batch_size * self.num_outputs


def by_rows(gammas: Mapping[int, int] | None) -> dict[str, int] | None:
  """Rows -> gamma, as JSON has it."""
  if gammas is None:
    return None
  return {str(rows): gamma for rows, gamma in gammas.items()}


def as_blocks(config: DecodeConfig | TaskConfig, engine: Engine) -> bool:
  """Whether a run judges drafts as a whole: not those that branch."""
  branches = engine.has_drafter and engine.drafter.tree is not None
  return config.judges_blocks and not branches


def settings_of(
  config: DecodeConfig | TaskConfig,
  engine: Engine,
  gammas: Mapping[int, int] | None,
) -> dict[str, Any]:
  """What a summary says of how a run decoded, lines or a task."""
  return {
    'batch_size': config.batch_size,
    'sampling': dataclasses.asdict(config.sampling),
    **({'beams': config.beams.identity} if config.beams.searches else {}),
    'lenience': config.lenience,
    **({'verification': BLOCK} if as_blocks(config, engine) else {}),
    'seed': config.seed,
    'gamma': engine.gamma,
    'rule': None if engine.rule is None else engine.rule.to_json(),
    'fallback': fallback.to_json(engine.fallback),
    'kernel_layout': engine.kernel_layout,
    'gammas': by_rows(gammas),
    'max_input_len': engine.max_input_len,
    'max_decode_len': engine.max_decode_len,
  }


def load_drafter(
  path: str | None = None,
  network: LanguageModel | None = None,
  dtype: str | None = None,
  adapter: str | None = None,
  shortlist: str | None = None,
) -> Model:
  """Loads a drafter that a run file may leave out, by `engine.load`.

  Args:
    path: of its checkpoint; None where it was left out.
    network: as of `engine.load`.
    dtype: likewise.
    adapter: likewise.
    shortlist: likewise.

  Raises:
    ValueError: it was left out; or as `engine.load`.
  """
  if path is None:
    raise ValueError(
      'Speculative decoding needs a drafter: give its checkpoint (--draft, in'
      ' gin DRAFT_CHECKPOINT_PATH) and, unless that describes itself, its'
      ' network (DRAFT); or decode without one (--mode plain, in gin DECODING ='
      " 'plain')."
    )
  return load(path, network, dtype=dtype, adapter=adapter, shortlist=shortlist)


def open_tokenizer(
  path: str | None = None, target: Callable[[], Model] | None = None
) -> Tokenizer:
  """Opens the vocabulary of a run.

  Args:
    path: for `vocabulary.open_vocabulary`; None is the target's own.
    target: makes the target; called where there is no path.

  Raises:
    ValueError: it cannot be read, or the target has none.
  """
  if path is not None:
    return open_vocabulary(path)
  model = None if target is None else target()
  if model is None or model.tokenizer is None:
    of = '' if model is None else f' of {model.name!r}'
    raise ValueError(
      f'No vocabulary{of} is known: give one (--vocab, in gin VOCAB_PATH).'
    )
  return model.tokenizer


class _Check:
  """Says of a configuration's fields what was expected and what came."""

  def __init__(self, config: DecodeConfig | TaskConfig):
    """Checks the types of all fields, and what both configurations have."""
    self._config = config
    check_types(config)
    for name in ('output_dir', 'calibration'):
      if getattr(config, name) is not None:
        self.path(name)
    self.choice('batching', BATCHINGS)
    self.choice('stdout', (REPORT, OUTPUTS))
    self.at_least(0, 'seed')
    self.at_least(1, 'batch_size', 'checkpoint_period')
    self.at_most(MOST_ROWS, 'batch_size')
    self.expect(
      'sampling',
      isinstance(config.sampling.temperature, int | float),
      'a SamplingConfig with one temperature',
    )
    options_of(
      {'lenience': config.lenience, 'verification': config.verification}
    )
    if config.beams.searches:
      for name, (wanted, how) in _WITH_BEAMS.items():
        own = getattr(config, name)
        self.expect(name, own == wanted, f'{wanted!r} {how}, or {_NO_BEAMS}')
      self.expect(
        'sampling',
        config.sampling.greedy,
        'temperature 0 with beams, which draw nothing (--temperature 0; gin:'
        f' TEMPERATURE), or {_NO_BEAMS}',
      )

  def expect(self, name: str, condition: bool, expected: str) -> None:
    """Raises ValueError unless `condition`."""
    if not condition:
      owner = type(self._config).__name__
      raise ValueError(
        f'{owner}.{name}: expected {expected}, got'
        f' {getattr(self._config, name)!r}'
      )

  def path(self, name: str) -> None:
    """A path that is on this machine."""
    value = getattr(self._config, name)
    self.expect(name, bool(value), 'a path, as text')
    self.expect(
      name,
      '://' not in value,
      'a path on this machine (only checkpoints and vocabularies may lie in a'
      ' bucket; copy the rest)',
    )

  def choice(self, name: str, known: Iterable[str]) -> None:
    """One of the words that are known."""
    value = getattr(self._config, name)
    self.expect(name, value in tuple(known), f'one of {list(known)}')

  def at_least(self, least: int, *names: str) -> None:
    """Python's own whole numbers, which JSON can hold, and large enough."""
    for name in names:
      value = getattr(self._config, name)
      ok = type(value) is int and value >= least
      self.expect(name, ok, f'a whole number >= {least}')

  def at_most(self, most: int, *names: str) -> None:
    """Numbers that are small enough."""
    for name in names:
      value = getattr(self._config, name)
      self.expect(name, value <= most, f'a whole number <= {most}')
