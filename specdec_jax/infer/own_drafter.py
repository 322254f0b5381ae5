"""A drafter for a T5 of one's own, from texts alone: `specdec distil`.

The target decodes the texts; some layers of its decoder become a drafter that
reads its encoder (see `training.slicing`) and learns to say what it says; the
pair is calibrated on texts that were held out. Each step is resumed where it
was stopped, by the rules of `training.train`.
"""

import dataclasses
import os

import numpy as np
import rich.console

from specdec_jax import files
from specdec_jax.checkpoints import huggingface, huggingface_arrays
from specdec_jax.checks.arguments import check_at_least
from specdec_jax.checks.fields import check_types
from specdec_jax.checks.names import check_choice
from specdec_jax.drafters.ngram_fit import fit
from specdec_jax.engine import loading
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.pair import own_vocabulary
from specdec_jax.measure import calibrate, calibration
from specdec_jax.measure.benchmark import LEAST_DECODE_LEN
from specdec_jax.measure.calibration import Calibration
from specdec_jax.measure.environment import describe
from specdec_jax.measure.prompts import read_prompts
from specdec_jax.measure.table import console as terminal
from specdec_jax.measure.table import say
from specdec_jax.models.base import reads_encoder
from specdec_jax.models.layers import DTYPES
from specdec_jax.models.model import Model
from specdec_jax.models.t5 import T5
from specdec_jax.text.local_tasks import reading
from specdec_jax.training import FromTarget, TrainRun, train
from specdec_jax.training.data import PackingConfig
from specdec_jax.training.losses import DistillationWeights
from specdec_jax.training.optimizer import OptimizerConfig
from specdec_jax.training.outputs import OutputsConfig
from specdec_jax.training.pairs import TokenPairs
from specdec_jax.training.run import MODEL_FILE, OUTPUTS
from specdec_jax.training.slicing import KEPT
from specdec_jax.training.trainer import TrainConfig

CALIBRATION = 'calibration.json'
_TRAINING = 'training'
_LEAST_TEXTS = 8
_REST_MINUTES = 10
_MOST_HELD_OUT = 512
_SMALL_PART = 0.5  # of a vocabulary: a shortlist of more gains little
_WIDTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclasses.dataclass(frozen=True)
class DistilConfig:
  """What a drafter is made of.

  Attributes:
    target: a T5 with an encoder and its vocabulary, as `specdec_jax.load`
      gives it.
    texts: file of inputs as the target gets them, prefix included, one a line.
    output_dir: folder of the drafter; made if needed.
    num_layers: of the target's decoder that become the drafter's.
    kept: which ones, see `slicing.sliced`.
    max_input_len, max_decode_len: tokens of an input and of an output at most,
      their ends included; longer ones are left out.
    minutes: of all of it, see `_shares`; 0 is no limit, and `steps` ends it.
    steps: ends the training as well.
    learning_rate: at its peak.
    tokens_per_batch, tokens_per_part: as of `PackingConfig`.
    export_dtype: of the drafter's file.
    max_gamma, num_tokens, repeats: of the calibration, see there.
    seed: of the training.

  Raises:
    ValueError: a value is outside its range.
  """

  target: Model
  texts: str
  output_dir: str
  num_layers: int = 1
  kept: str = 'spaced'
  max_input_len: int = 128
  max_decode_len: int = 120
  minutes: float = 90.0
  steps: int = 1_000_000
  learning_rate: float = 2e-3
  tokens_per_batch: int = 2048
  tokens_per_part: int = 256
  export_dtype: str = 'float32'
  max_gamma: int = 16
  num_tokens: int = 2000
  repeats: int = 9
  seed: int = 0

  def __post_init__(self):
    check_types(self)
    check_choice('DistilConfig.kept', self.kept, KEPT)
    check_choice('DistilConfig.export_dtype', self.export_dtype, DTYPES)
    check_at_least(self, num_layers=1, max_input_len=2, max_decode_len=2)
    check_at_least(self, minutes=0.0, steps=1)
    check_at_least(self, max_gamma=1, num_tokens=1, repeats=2)


def distil(
  config: DistilConfig, console: rich.console.Console | None = None
) -> Calibration:
  """Makes the drafter, and says what it is worth here.

  Leaves in `output_dir`: config.json and model.safetensors, which
  `specdec_jax.load` reads; shortlist.npz, the tokens of what the target said,
  if these are a small part of its vocabulary (see `models.shortlist`);
  calibration.json; held_out.txt, the texts that were not learned from; the
  training's files in training/. The same call goes on where one was stopped.

  Raises:
    ValueError: the target, the texts or the folder are not what is needed
      (raised before anything is compiled); or a run with other settings began
      in the folder.
  """
  console = console or terminal()
  draft = draft_network(config)
  own_vocabulary(config.target)  # or an error that says what to do
  huggingface_arrays.import_safetensors()
  _check_folder(config.output_dir)
  if sentence := reading(config.texts):
    say(console, sentence)
  learned, held_out, lengths = _texts(config)
  say(
    console,
    f'{len(learned)} texts to learn from, {len(held_out)} held out; the drafter'
    f' is {config.num_layers} of {config.target.name!r}'
    f"'s {_t5(config.target).config.num_decoder_layers} decoder layers.",
  )
  if config.minutes:
    decoding, learning = _shares(config.minutes)
    say(
      console,
      f'{config.minutes:g} minutes in all: {decoding:.2g} at most to decode'
      f' them, {learning:.2g} to learn; the rest to compile and to calibrate,'
      ' which takes some minutes however few these are.',
    )
  training = os.path.join(config.output_dir, _TRAINING)
  files.make_folder(training)
  held_out_file = os.path.join(config.output_dir, 'held_out.txt')
  lines = ''.join(f'{text}\n' for text in held_out)
  files.write_atomically(held_out_file, lines.encode())
  train(_train_run(config, draft, training, learned, held_out, max(lengths)))
  _export(config, draft, training)
  _export_shortlist(config, training)
  path = os.path.join(config.output_dir, CALIBRATION)
  found = _calibrate(config, draft, held_out_file, lengths, path, console)
  say(
    console,
    f'The drafter is in {config.output_dir}: specdec decode --target'
    f' {config.target.name} --draft {config.output_dir} --calibration {path}',
  )
  return found


def _shares(minutes: float) -> tuple[float, float]:
  """Minutes of decoding at most, and of training, that leave room for the rest.

  Compilation and the calibration are not of one length; a third, or
  `_REST_MINUTES` of many, is enough for the pairs that were tried.
  """
  third = minutes / 3
  return third, minutes - third - min(third, _REST_MINUTES)


def _t5(target: Model) -> T5:
  network = target.network
  if not isinstance(network, T5) or reads_encoder(network):
    raise ValueError(
      'specdec distil cuts a drafter out of a T5 with an encoder, got'
      f' {target!r}. For a decoder-only target see gin/runs/distill_lm.gin.'
    )
  return network


def draft_network(config: DistilConfig) -> T5:
  """The drafter's network.

  Raises:
    ValueError: the target is no T5 with an encoder that was loaded from a
      checkpoint, or has fewer layers than the drafter should have.
  """
  sizes = _t5(config.target).config
  if not config.target.name:
    raise ValueError(
      'Expected a target from a checkpoint, such as specdec_jax.load returns,'
      f' got {config.target!r}: it is read again for the training.'
    )
  if config.num_layers > sizes.num_decoder_layers:
    raise ValueError(
      f'num_layers is {config.num_layers}; expected at most the target'
      f"'s {sizes.num_decoder_layers} decoder layers."
    )
  return T5(
    dataclasses.replace(
      sizes,
      num_encoder_layers=0,
      num_decoder_layers=config.num_layers,
      dropout_rate=0.0,
    )
  )


def _check_folder(folder: str) -> None:
  """Raises ValueError if something else than a drafter of ours is there."""
  names = os.listdir(folder) if os.path.isdir(folder) else []
  if os.path.exists(folder) and not os.path.isdir(folder):
    raise ValueError(f'output_dir {folder!r} is a file; expected a folder.')
  if names and _TRAINING not in names:
    raise ValueError(
      f'output_dir {folder!r} holds {sorted(names)[:4]} and no drafter that was'
      ' begun here. Expected a new folder, or that of an earlier run.'
    )


def _texts(config: DistilConfig) -> tuple[list[str], list[str], list[int]]:
  """Texts to learn from, those held out, and the tokens of each of them."""
  tokenizer = own_vocabulary(config.target)

  def count(text: str) -> int:
    return len(tokenizer.encode(text)) + 1

  found = read_prompts(config.texts, count, config.max_input_len)
  texts = list(dict.fromkeys(found))
  if len(texts) < _LEAST_TEXTS:
    raise ValueError(
      f'{config.texts!r} has {len(texts)} different texts of at most'
      f' {config.max_input_len} tokens; expected {_LEAST_TEXTS} or more, better'
      ' thousands. Give more texts, or a larger max_input_len.'
    )
  number = min(_MOST_HELD_OUT, max(2, len(texts) // 20))
  step = len(texts) // number
  held_out = texts[::step][:number]
  kept = set(held_out)
  learned = [text for text in texts if text not in kept]
  return learned, held_out, [count(text) for text in texts]


def _train_run(
  config: DistilConfig,
  draft: T5,
  folder: str,
  learned: list[str],
  held_out: list[str],
  longest: int,
) -> TrainRun:
  tokenizer = own_vocabulary(config.target)
  decoding, learning = _shares(config.minutes)
  paths = []
  for name, texts in (('train', learned), ('held_out', held_out)):
    ids = [tokenizer.encode(text) for text in texts]
    paths.append(os.path.join(folder, f'{name}.npz'))
    # The targets are the target's own, which are made from these sources.
    TokenPairs.from_lists(ids, ids).save(paths[-1])
  # One program is compiled for each width.
  widths = _widths(longest)
  buckets = _widths(max(longest, config.max_decode_len))
  return TrainRun(
    model=draft,
    model_dir=folder,
    train_file=paths[0],
    eval_file=paths[1],
    packing=PackingConfig(
      weights=(1.0,),
      buckets=buckets,
      tokens_per_batch=max(config.tokens_per_batch, buckets[-1]),
      tokens_per_part=config.tokens_per_part,
      seed=config.seed,
    ),
    training=TrainConfig(
      steps=config.steps,
      max_minutes=learning,
      eval_every=400,
      checkpoint_minutes=5.0,
      seed=config.seed,
      optimizer=OptimizerConfig(
        'muon', learning_rate=config.learning_rate, warmup_steps=50
      ),
    ),
    learning=FromTarget(
      target=_t5(config.target),
      checkpoint_path=config.target.name,
      weights=DistillationWeights(1.0, 0.0, 1.0),
      slice_target=True,
      slice_layers=config.kept,
      outputs=OutputsConfig(
        max_minutes=decoding,
        widths=widths,
        max_ratio=0.0,
        max_extra=config.max_decode_len,
        seed=config.seed,
      ),
    ),
  )


def _widths(longest: int) -> tuple[int, ...]:
  """The widths of batches whose longest row has so many tokens."""
  shorter = [width for width in _WIDTHS if width < longest]
  last = next((width for width in _WIDTHS if width >= longest), longest)
  return (*shorter, last)


def _export(config: DistilConfig, draft: T5, training: str) -> None:
  """Writes the folder that describes itself and names its target."""
  file = os.path.join(training, MODEL_FILE)
  made = loading.load(file, draft)
  huggingface.save_huggingface(
    config.output_dir,
    draft.config,
    made.read(config.export_dtype),
    about={'target': made.made_for} if made.made_for else None,
  )


def _export_shortlist(config: DistilConfig, training: str) -> None:
  """Writes the tokens that the target said."""
  tokenizer = own_vocabulary(config.target)
  size = tokenizer.vocab_size
  said = TokenPairs.load(os.path.join(training, OUTPUTS, 'train.npz')).targets
  table = fit(
    [[0, *said[said < size]]],  # no padding of the output layer
    1,
    size,
    max_continuations=size,
    fingerprint=tokenizer.fingerprint,
  )
  if len(table.ids) <= size * _SMALL_PART:
    table.save(os.path.join(config.output_dir, loading.SHORTLIST))


def _calibrate(config, draft, texts, lengths, path, console) -> Calibration:
  """Measures the pair; one that has been measured on this device is not."""
  target = config.target

  def engine() -> Engine:
    return Engine(
      target,
      loading.load(config.output_dir, dtype=target.dtype),
      max_input_len=config.max_input_len,
      max_decode_len=config.max_decode_len,
    )

  if os.path.exists(path):
    found = calibration.load(path)
    here = engine().fingerprints, describe()['device']
    if (found.fingerprints, found.device) == here:
      say(console, f'{path} is of this pair already.')
      return found
  return calibrate.calibrate(
    calibrate.CalibrateConfig(
      engine=engine,
      target=target.network,
      draft=draft,
      input_file=texts,
      num_tokens=config.num_tokens,
      input_len=int(np.median(lengths)),
      decode_len=max(config.max_decode_len, LEAST_DECODE_LEN),
      max_gamma=config.max_gamma,
      repeats=config.repeats,
      seed=config.seed,
      output_file=path,
    ),
    console,
  )
