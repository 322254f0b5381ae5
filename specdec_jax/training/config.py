"""The settings of a training run, checked."""

import dataclasses
import os
from collections.abc import Mapping

from specdec_jax.checks.fields import check_types
from specdec_jax.files import shipped
from specdec_jax.models.base import LanguageModel
from specdec_jax.text.local_tasks import LocalTask
from specdec_jax.training.data import PackingConfig
from specdec_jax.training.losses import DistillationWeights
from specdec_jax.training.outputs import OutputsConfig
from specdec_jax.training.trainer import TrainConfig


@dataclasses.dataclass(frozen=True)
class Likelihood:
  """Learning from the data's own targets; see `losses.cross_entropy`."""

  label_smoothing: float = 0.0
  z_loss: float = 0.0


@dataclasses.dataclass(frozen=True)
class FromTarget:
  """Learning from another model: distillation.

  Attributes:
    target: the model to follow.
    checkpoint_path: its parameters, a single-file T5X checkpoint.
    weights: weights of the loss's terms.
    slice_target: whether to begin with a slice of the target if there is no
      checkpoint to begin with; see `slicing.sliced`.
    outputs: how the target's own outputs for the data's sources are made; None
      takes the data's targets instead.
    with_references: whether to train on the data's targets as well as on the
      outputs: more to learn from if there is no time for many outputs.
    num_eval_outputs: how many outputs are made for the held-out sources.
    outputs_folder: folder that outputs are written to, or found in; None is a
      folder in `TrainRun.model_dir`.
    only_outputs: whether to end when the outputs exist.
  """

  target: LanguageModel
  checkpoint_path: str
  weights: DistillationWeights = DistillationWeights()
  slice_target: bool = False
  outputs: OutputsConfig | None = OutputsConfig()
  with_references: bool = False
  num_eval_outputs: int = 512
  outputs_folder: str | None = None
  only_outputs: bool = False


@dataclasses.dataclass(frozen=True)
class TrainRun:
  """One run of training.

  The data are a UTF-8 file (`.gz` or not) of source<TAB>target lines, or of
  lines of text for a decoder-only model; a `.npz` file as `TokenPairs.save`
  writes it; or a task.

  Attributes:
    model: the network to train, such as a T5 or a GPT.
    model_dir: folder that gets the parameters (model.msgpack, a T5X
      checkpoint), the states from which a killed run is resumed, and the other
      files of the run.
    train_file: training data, unless there is a task.
    eval_file: held-out data; None is none.
    task: name of a seqio task with the splits 'train' and 'validation', or a
      `LocalTask` with these splits.
    task_feature_lengths: 'inputs', 'targets' -> length that a task's examples
      are cut to, their ends included; None cuts nothing.
    vocab_path: sentencepiece model. If it does not exist yet, it is trained on
      both sides of `train_file`. Only text needs a vocabulary.
    init_checkpoint_path: parameters to begin with, a single-file T5X
      checkpoint; None begins with random parameters.
    packing: how pairs become batches.
    training: length, optimiser, evaluation.
    learning: what the model learns from: the data, or another model.
    export_dtype: dtype of the parameters in model.msgpack.
    bleu_examples: held-out sources that are decoded at each evaluation, for
      BLEU; 0 is none.

  Raises:
    ValueError: a value is outside its range.
  """

  model: LanguageModel
  model_dir: str
  train_file: str | None = None
  eval_file: str | None = None
  task: str | LocalTask | None = None
  task_feature_lengths: Mapping[str, int] | None = None
  vocab_path: str | None = None
  init_checkpoint_path: str | None = None
  packing: PackingConfig = PackingConfig()
  training: TrainConfig = TrainConfig()
  learning: Likelihood | FromTarget = Likelihood()
  export_dtype: str = 'float32'
  bleu_examples: int = 0

  def __post_init__(self):
    check_types(self)
    if not self.model_dir or not isinstance(self.model_dir, str):
      raise ValueError(
        'TrainRun.model_dir: expected a folder to write to, got'
        f' {self.model_dir!r}.'
      )
    if (self.train_file is None) == (self.task is None):
      raise ValueError(
        'TrainRun: expected either a train_file or a task, got'
        f' train_file={self.train_file!r} and task={self.task!r}.'
      )
    for name in ('train_file', 'eval_file', 'init_checkpoint_path'):
      path = getattr(self, name)
      if path is not None and not os.path.isfile(shipped.find(path)):
        raise ValueError(f'TrainRun.{name}: there is no file {path!r}.')
    if self.export_dtype not in ('float32', 'bfloat16'):
      raise ValueError(
        "TrainRun.export_dtype: expected 'float32' or 'bfloat16', got"
        f' {self.export_dtype!r}.'
      )
    needs_vocab = any(
      path is not None and not path.endswith('.npz')
      for path in (self.train_file, self.eval_file)
    )
    if self.vocab_path is None and (needs_vocab or self.bleu_examples):
      raise ValueError(
        'TrainRun.vocab_path: text and BLEU need the path of a sentencepiece'
        ' model, which is trained there if it does not exist; only .npz files'
        ' and tasks need none.'
      )
