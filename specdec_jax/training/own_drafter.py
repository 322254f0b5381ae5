"""Makes a drafter for an encoder-decoder from texts: `specdec distil`.

The target decodes the texts. Some layers of its decoder become a drafter, which
reads the target's encoder (see `decoder_layers`) and learns from the outputs.
The pair is then calibrated on texts that were held out. Each of these steps
goes on where an earlier run was stopped, as `training.train` does.

All steps share one budget of time. The costs of calls do not depend on what the
drafter has learned, so they are timed before it learns. How long this timing
takes tells how much time the measurements after the training will need.
"""

import dataclasses
import functools
import math
import os
import time
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import numpy as np
from rich.console import Console

from specdec_jax import files
from specdec_jax.checkpoints import huggingface
from specdec_jax.checkpoints.config_json import T5_IDS, SpecialIds
from specdec_jax.checkpoints.huggingface import import_safetensors
from specdec_jax.checks.fields import Bound, check_types, unexpected
from specdec_jax.drafters.ngram_table import NGramTable, fit
from specdec_jax.engine import calibration, loading
from specdec_jax.engine.calibration import Calibration, CalibrationError
from specdec_jax.engine.codec import Codec
from specdec_jax.engine.engine import Engine, codec_of
from specdec_jax.engine.options import EngineConfig
from specdec_jax.engine.pair import own_vocabulary
from specdec_jax.measure import calibrate
from specdec_jax.measure.calls import LEAST_DECODE_LEN, MOST_LEN
from specdec_jax.models.bart import Bart
from specdec_jax.models.base import Params
from specdec_jax.models.model import Model
from specdec_jax.models.t5 import T5
from specdec_jax.report.console import console as terminal
from specdec_jax.report.console import say
from specdec_jax.text.tasks import read_prompts
from specdec_jax.training import run as training_run
from specdec_jax.training.data import PackingConfig
from specdec_jax.training.outputs import OutputsConfig, read_outputs
from specdec_jax.training.run import FromTarget, TrainRun
from specdec_jax.training.trainer import TrainConfig
from specdec_jax.types import Minutes, Positive

CALIBRATION = 'calibration.json'
HELD_OUT = 'held_out.txt'
_TRAINING = 'training'
_LEAST_TEXTS = 8
_MOST_HELD_OUT = 512
_LEAST_MINUTES = 2.0
# In fewer steps than this a drafter learns too little. The training is
# evaluated each time after this many steps.
_FEW_STEPS = 400
# Shares of the run's time: at most _DECODING to decode the texts to learn from,
# at most _TIMING to time calls, and at least _LEARNING to learn.
_DECODING, _TIMING, _LEARNING = 0.25, 0.2, 0.05
# The pair is not calibrated if less than this part of the time planned for the
# calibration is left.
_MEASURABLE = 0.7
# _SAVING_S: seconds to evaluate the drafter for the last time and to write it.
# _STARTED_S: seconds from the start of the process to the call of `distil`.
_SAVING_S, _STARTED_S = 8.0, 5.0
# A shortlist has at most this part of the vocabulary; a longer one would save
# little time.
_SMALL_PART = 0.5


@dataclasses.dataclass(frozen=True)
class DistilConfig:
  """The settings of `distil`.

  Attributes:
    target: a T5, BART, Pegasus or Marian with an encoder and its vocabulary, as
      `specdec_jax.load` returns it.
    texts: file with an input of the target on each line, prefix included.
    output_dir: folder of the drafter; made if needed.
    num_layers: number of the target's decoder layers that the drafter takes.
    max_input_len, max_decode_len: the most tokens of an input and of an output,
      their ends included; longer ones are left out.
    minutes: time of the whole run, from the start of the process to its end. At
      most three tenths of it are used to decode the texts, the rest to learn
      and to measure. It must be 2 or more, since compilation alone takes a
      minute; 0 sets no limit, so that `steps` ends the run.
    source_lang, target_lang: the languages of the texts and of the outputs, for
      a target with tokens of languages.
    steps: the most steps of the training.
    max_gamma, num_tokens, repeats: for the calibration, the largest gamma, the
      number of tokens to measure acceptance on, and the number of times that
      calls are timed.

  Raises:
    ValueError: a value is outside its range.
  """

  target: Model
  texts: str
  output_dir: str
  num_layers: Positive = 1
  max_input_len: Annotated[int, Bound(2, MOST_LEN)] = 128
  max_decode_len: Annotated[int, Bound(2, MOST_LEN)] = 120
  minutes: Minutes = 90.0
  source_lang: str | None = None
  target_lang: str | None = None
  steps: Annotated[int, Bound(1, 10**9)] = 1_000_000
  max_gamma: Annotated[int, Bound(1, calibrate.MOST_GAMMA)] = 8
  num_tokens: Positive = 2000
  repeats: Annotated[int, Bound(2, 10_000)] = 9

  def __post_init__(self):
    check_types(self)
    if 0 < self.minutes < _LEAST_MINUTES:
      expected = f'0 (no limit), or {_LEAST_MINUTES:g} minutes or more'
      raise unexpected('minutes', expected, self.minutes)

  @property
  def languages(self) -> dict[str, Any]:
    """The engine options that set the two languages."""
    return {'source_lang': self.source_lang, 'target_lang': self.target_lang}


def distil(
  config: DistilConfig, console: Console | None = None
) -> Calibration | None:
  """Makes a drafter, and measures its speed-up on this machine.

  It writes to `output_dir`: config.json and model.safetensors, which
  `specdec_jax.load` reads; shortlist.npz, the tokens of the target's outputs,
  if these are a small part of its vocabulary (see `models.other_ids`);
  calibration.json; held_out.txt, the texts that the drafter did not learn from;
  and the training's files in training/. If a call was stopped, another call
  with the same settings goes on from there.

  Returns:
    The calibration; None if the time was over or the timings contradict each
    other. The console then says so, and there is no calibration.json.

  Raises:
    ValueError: the target, the texts or the folder do not fit (raised before
      anything is compiled); or the folder holds a run with other settings.
  """
  end = time.monotonic() - _STARTED_S + (60 * config.minutes or math.inf)
  console = console or terminal()
  draft = draft_network(config)
  tokenizer = own_vocabulary(config.target)
  if tokenizer.language_last:
    expected = 'a model whose texts do not end with their language'
    raise unexpected('target', expected, config.target.name)
  codec = codec_of(config.target, tokenizer, EngineConfig(**config.languages))
  begin = codec.begin(codec.languages())
  import_safetensors()
  folder = config.output_dir
  names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
  if os.path.isfile(folder) or names and _TRAINING not in names:
    expected = 'a new folder, or that of an earlier run'
    raise unexpected(f'output_dir {folder!r}', expected, names or 'a file')
  learned, held_out = _texts(config, codec)
  ids = {text: codec.input_ids(text)[:-1] for text in (*learned, *held_out)}
  sizes = [1 + len(row) for row in ids.values()]
  say(
    console,
    f'{len(learned)} texts to learn from, {len(held_out)} held out; the drafter'
    f' is {config.num_layers} of the decoder layers of {config.target.name!r};'
    f' {config.minutes:g} minutes in all (0: no limit).',
  )
  run = _train_run(config, draft, begin, tokenizer.eos_id, max(sizes))
  files.make_folder(run.model_dir)
  lines = ''.join(f'{text}\n' for text in held_out)
  files.write_atomically(os.path.join(folder, HELD_OUT), lines.encode())
  measured = _Measured(config, int(np.median(sizes)), end, console)
  # A run that was stopped before its first step has a model file too.
  is_trained = _num_steps(run.model_dir) > 0 and os.path.exists(
    os.path.join(run.model_dir, training_run.MODEL_FILE)
  )

  def until(params: Params) -> float:
    if is_trained:
      return time.monotonic()
    measured.time_calls(draft, params)
    return end - measured.closing_s()

  # A pair needs two sides, but its second side is not used, because the
  # target's output replaces it.
  pairs, valid = (
    [(ids[text], ids[text]) for text in texts] for texts in (learned, held_out)
  )
  layers = functools.partial(decoder_layers, num_layers=config.num_layers)
  training_run.train(run, (pairs, valid), layers, until=until)
  if not (steps := _num_steps(run.model_dir)):
    raise measured.too_short()
  if steps < min(config.steps, _FEW_STEPS):
    advice = 'Give another folder and more minutes, or an idle machine.'
    say(console, f'It learned in {steps} steps only, which is little. {advice}')
  _export(config, draft, run.model_dir)
  calibrated = measured.calibrated()
  say(console, f'The drafter is in {folder}.')
  return calibrated


def draft_network(config: DistilConfig) -> T5 | Bart:
  """Returns the drafter's network, without parameters.

  It has the target's configuration, but no encoder and fewer decoder layers.

  Raises:
    ValueError: the target is no T5, BART, Pegasus or Marian with an encoder
      that was loaded from a checkpoint, or has fewer layers than the drafter
      should have.
  """
  target = config.target
  network: Any = target.network
  # The training loads the target again, from the checkpoint `target.name`.
  is_whole = isinstance(network, T5 | Bart) and not network.reads_encoder
  if not (is_whole and target.name):
    expected = 'a T5, BART, Pegasus or Marian with an encoder, in a checkpoint'
    advice = 'For a decoder-only target see gin/runs/train_lm.gin.'
    raise unexpected('target', expected, target, advice)
  num_layers = network.config.num_decoder_layers
  if config.num_layers > num_layers:
    expected = f'at most {num_layers}, the layers of the target'
    raise unexpected('num_layers', expected, config.num_layers)
  sizes = {'num_encoder_layers': 0, 'num_decoder_layers': config.num_layers}
  smaller = dataclasses.replace(network.config, **sizes, dropout_rate=0.0)
  return type(network)(smaller)


def decoder_layers(params: Params, num_layers: int) -> Params:
  """Returns parameters without the encoder and with only some decoder layers.

  A drafter that begins with these parameters only has to learn to work with
  fewer layers.

  Args:
    params: the target's parameters.
    num_layers: number of decoder layers to take, evenly spaced.
  """
  decoder = params['decoder']
  others = {k: v for k, v in decoder.items() if not k.startswith('layers_')}
  places = np.linspace(0, len(decoder) - len(others) - 1, num_layers)
  for new, old in enumerate(places):
    others[f'layers_{new}'] = decoder[f'layers_{round(old)}']
  without = {name: x for name, x in params.items() if name != 'encoder'}
  return without | {'decoder': others}


def _texts(config: DistilConfig, codec: Codec) -> tuple[list[str], list[str]]:
  """Returns the texts to learn from, and the held-out texts to measure with."""
  count, most = codec.num_input_tokens, config.max_input_len
  texts = list(dict.fromkeys(read_prompts(config.texts, count, most)))
  if len(texts) < _LEAST_TEXTS:
    expected = f'{_LEAST_TEXTS} different texts or more, better thousands'
    raise unexpected(f'texts {config.texts!r}', expected, len(texts))
  number = min(_MOST_HELD_OUT, max(2, len(texts) // 20))
  held_out = dict.fromkeys(texts[:: len(texts) // number][:number])
  return [text for text in texts if text not in held_out], list(held_out)


def _train_run(
  config: DistilConfig,
  draft: T5 | Bart,
  begin: Sequence[int],
  eos_id: int,
  longest: int,
) -> TrainRun:
  target, extra = config.target, config.max_decode_len
  # The bucket lengths are powers of two from 16 on. There are few, because a
  # program is compiled for each.
  bits = max(5, max(longest, extra).bit_length() + 1)
  buckets = tuple(1 << i for i in range(4, bits))
  size, minutes = max(2048, buckets[-1]), _DECODING * config.minutes
  part = 256 if jax.default_backend() == 'cpu' else 0
  outputs = OutputsConfig(
    max_minutes=minutes, temperatures=(0.0, 1.0), max_ratio=0.0, max_extra=extra
  )
  return TrainRun(
    model=draft,
    model_dir=os.path.join(config.output_dir, _TRAINING),
    packing=PackingConfig((1.0,), buckets, size, part, eos_id=eos_id),
    training=TrainConfig(
      config.steps,
      eval_every=_FEW_STEPS,
      checkpoint_minutes=5.0,
      warmup_steps=50,
    ),
    learning=FromTarget(target.network, target.name, outputs, begin=begin),
  )


def _num_steps(training: str) -> int:
  """Returns the number of steps of a training's newest state."""
  folder = os.path.join(training, training_run.STATES)
  names = os.listdir(folder) if os.path.isdir(folder) else []
  return max((int(name) for name in names if name.isdigit()), default=0)


def _export(config: DistilConfig, draft: T5 | Bart, training: str) -> None:
  """Writes the drafter as a Hugging Face folder, with its shortlist if any.

  Its config.json also has the fingerprint of the target.
  """
  model = loading.load(os.path.join(training, training_run.MODEL_FILE), draft)
  params, about = model.read(), {'target': model.made_for}
  folder, ends = config.output_dir, config.target.stop_ids or T5_IDS.eos
  ids = SpecialIds(draft.start_id, ends, draft.pad_id)
  huggingface.save_huggingface(folder, draft.config, params, ids, about)
  if (table := _shortlist(config)) is not None:
    table.save(os.path.join(folder, loading.SHORTLIST))


def _shortlist(config: DistilConfig) -> NGramTable | None:
  """Returns a table of the tokens in the target's outputs.

  The result is None if these tokens are too large a part of the vocabulary.
  """
  path = os.path.join(config.output_dir, _TRAINING, 'outputs', 'train.jsonl')
  tokenizer = own_vocabulary(config.target)
  size, fingerprint = tokenizer.vocab_size, tokenizer.fingerprint
  # Ids that only pad the output layer are left out.
  tokens = [x for _, ids in read_outputs(path) for x in ids if x < size]
  table = fit(
    [[0, *tokens]], 1, size, max_continuations=size, fingerprint=fingerprint
  )
  return table if len(table.ids) <= size * _SMALL_PART else None


class _Measured:
  """Measures the pair, before and after the drafter learns."""

  def __init__(
    self, config: DistilConfig, input_len: int, end: float, console: Console
  ):
    self._config, self._end, self._console = config, end, console
    # Seconds for the whole run.
    self._seconds = 60 * config.minutes or math.inf
    folder, dtype = config.output_dir, config.target.dtype
    self._path = os.path.join(folder, CALIBRATION)
    self._costs: calibrate.Costs | None = None
    self._calls_s = 0.0  # seconds that timing the calls took
    self._closing_s = 0.0  # seconds planned for measuring after the training
    self._problem = 'The time is over.'
    self._calibration = calibrate.CalibrateConfig(
      engine=lambda: self._engine(loading.load(folder, dtype=dtype)),
      input_file=os.path.join(folder, HELD_OUT),
      num_tokens=config.num_tokens,
      input_len=input_len,
      decode_len=max(config.max_decode_len, LEAST_DECODE_LEN),
      max_gamma=config.max_gamma,
      repeats=config.repeats,
      minutes=config.minutes,
      output_file=self._path,
    )

  @property
  def _left(self) -> float:
    """The seconds until the run must end."""
    return self._end - time.monotonic()

  def _engine(self, drafter: Model) -> Engine:
    config, options = self._config, self._config.languages
    options['max_input_len'] = config.max_input_len
    options['max_decode_len'] = config.max_decode_len
    return Engine(config.target, drafter, **options)

  def time_calls(self, draft: T5 | Bart, params: Params) -> None:
    """Times calls of the pair before the drafter learns.

    Calls of an untrained drafter cost as much as those of a trained one.
    """
    begin = time.monotonic()
    if self._left < 0.4 * self._seconds:
      self._closing_s = self._seconds  # no time is left for measurements
      return
    model = Model(draft, params, dtype=self._config.target.dtype)
    if (table := _shortlist(self._config)) is not None:
      model = model.with_shortlist([int(token) for token in table.ids])
    try:
      engine, end = self._engine(model), begin + _TIMING * self._seconds
      self._costs = calibrate.time_calls(
        self._calibration, engine, self._console, end
      )
    except CalibrationError as error:
      self._problem = str(error)
    # Measuring after the training takes about as long as this timing: fewer
    # programs are compiled, but more tokens are decoded. If the times here are
    # not usable, calls are timed again then, which takes twice as long.
    # Compiling the training's programs takes less than half of this time.
    self._calls_s = time.monotonic() - begin
    self._closing_s = (1.2 if self._costs else 2.4) * self._calls_s

  def closing_s(self) -> float:
    """Returns the seconds to leave for everything after the training.

    If the measurements after the training would leave too little time to learn,
    they are skipped.

    Raises:
      ValueError: too little time is left to learn.
    """
    left, least = self._left - _SAVING_S, _LEARNING * self._seconds
    if left - self._closing_s >= least + 0.5 * self._calls_s:
      return _SAVING_S + self._closing_s
    if left < least:
      raise self.too_short()
    return _SAVING_S

  def too_short(self) -> ValueError:
    """Returns the error of a run that has too little time to learn."""
    expected = f'more than {self._config.minutes:g} on this machine'
    advice = "The target's outputs are kept: the same command goes on."
    return unexpected('minutes', expected, self._config.minutes, advice)

  def calibrated(self) -> Calibration | None:
    """Returns the calibration of the pair, if possible that of an earlier run.

    The result is None if the pair could not be calibrated; the console then
    says why.
    """
    if os.path.exists(self._path):
      try:
        earlier = calibration.load(self._path)
        earlier.check(self._calibration.engine().fingerprints)
        say(self._console, f'{self._path} is of this pair already.')
        return earlier
      except CalibrationError as error:
        say(self._console, f'{error} It is measured again.')
        os.remove(self._path)
    if self._left >= _MEASURABLE * self._closing_s:
      try:
        return calibrate.calibrate(
          self._calibration, self._console, self._costs, self._end
        )
      except CalibrationError as error:
        self._problem = str(error)
    what = f'No calibration: {self._problem}'
    say(self._console, f'{what} `specdec calibrate` makes one.')
    return None
