"""The settings of a training run, checked."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from specdec_jax.checks.arguments import check_at_least
from specdec_jax.checks.fields import check_types
from specdec_jax.drafters.heads import Heads
from specdec_jax.files import shipped
from specdec_jax.models.base import (
  PAD_ID,
  LanguageModel,
  gives_features,
  pad_id,
  reads_encoder,
)
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
    slice_layers: which of the target's layers the slice has, see there.
    outputs: how the target's own outputs for the data's sources are made; None
      takes the data's targets instead.
    with_references: whether to train on the data's targets as well as on the
      outputs: more to learn from if there is no time for many outputs.
    num_eval_outputs: how many outputs are made for the held-out sources.
    outputs_folder: folder that outputs are written to, or found in; None is a
      folder in `TrainRun.model_dir`.
    only_outputs: whether to end when the outputs exist.
    head_decay: of heads, the weight of each head's loss divided by that of the
      head before it.
  """

  target: LanguageModel
  checkpoint_path: str
  weights: DistillationWeights = DistillationWeights()
  slice_target: bool = False
  slice_layers: str = 'spaced'
  outputs: OutputsConfig | None = OutputsConfig()
  with_references: bool = False
  num_eval_outputs: int = 512
  outputs_folder: str | None = None
  only_outputs: bool = False
  head_decay: float = 0.8


@dataclasses.dataclass(frozen=True)
class TrainRun:
  """One run of training.

  The data are a UTF-8 file (`.gz` or not) of source<TAB>target lines, or of
  lines of text for a decoder-only model; a `.npz` file as `TokenPairs.save`
  writes it; or a task.

  Attributes:
    model: the network to train, such as a T5 or a GPT. A T5 without encoder
      layers learns from a target, whose encoder it reads; so do `Heads` from
      its features.
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
    init_model: the network of `init_checkpoint_path` where it has other numbers
      of layers than `model`, or is narrower: see `resizing.resized`. None is
      `model`.
    packing: how pairs become batches.
    training: length, optimiser, evaluation.
    learning: what the model learns from: the data, or another model.
    export_dtype: dtype of the parameters in model.msgpack.
    bleu_examples: held-out sources that are decoded at each evaluation, for
      BLEU; 0 is none.

  Raises:
    ValueError: a value is outside its range.
  """

  model: LanguageModel | Heads
  model_dir: str
  train_file: str | None = None
  eval_file: str | None = None
  task: str | LocalTask | None = None
  task_feature_lengths: Mapping[str, int] | None = None
  vocab_path: str | None = None
  init_checkpoint_path: str | None = None
  init_model: LanguageModel | None = None
  packing: PackingConfig = PackingConfig()
  training: TrainConfig = TrainConfig()
  learning: Likelihood | FromTarget = Likelihood()
  export_dtype: str = 'float32'
  bleu_examples: int = 0

  def __post_init__(self):
    check_types(self)
    self._check_encoder()
    self._check_padding()
    if not self.model_dir or not isinstance(self.model_dir, str):
      raise ValueError(
        'TrainRun.model_dir: expected a folder to write to, got'
        f' {self.model_dir!r}.'
      )
    if self.init_model is not None and self.init_checkpoint_path is None:
      raise ValueError(
        'TrainRun.init_model is the network of a checkpoint to begin with;'
        ' expected an init_checkpoint_path as well, got None.'
      )
    if isinstance(self.model, Heads):
      self._check_heads(self.model)
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

  def _check_padding(self) -> None:
    target = getattr(self.learning, 'target', None)
    for name, network in (('model', self.model), ('target', target)):
      if pad_id(network) != PAD_ID:
        raise ValueError(
          f'TrainRun: the {name} pads with id {pad_id(network)}, and batches'
          f' are padded with {PAD_ID} here: {type(network).__name__} cannot be'
          ' trained, or followed in training.'
        )

  def _check_encoder(self) -> None:
    if not reads_encoder(self.model):
      return
    if self.bleu_examples:
      raise ValueError(
        'TrainRun.bleu_examples: a model without an encoder decodes nothing by'
        ' itself; expected 0.'
      )
    model: Any = self.model
    wanted = model.config.encoded_dim
    target: Any = getattr(self.learning, 'target', None)
    found = None
    if hasattr(target, 'encode') and not reads_encoder(target):
      found = target.config.emb_dim
    if found != wanted:
      raise ValueError(
        f'TrainRun.model has no encoder and reads one of width {wanted}; the'
        f' target ({type(target).__name__}) has'
        f' {"none" if found is None else found}. Expected learning=FromTarget'
        ' with a T5 as target, and its emb_dim as encoder_dim.'
      )

  @property
  def network(self) -> LanguageModel:
    """The network whose texts are learnt: the target of heads, else `model`."""
    if isinstance(self.model, Heads):
      assert isinstance(self.learning, FromTarget)
      return self.learning.target
    return self.model

  def _check_heads(self, heads: Heads) -> None:
    learning = self.learning
    if not isinstance(learning, FromTarget):
      raise ValueError(
        'TrainRun.learning: heads read the features of a target; expected a'
        f' FromTarget, got {type(learning).__name__}.'
      )
    if not gives_features(learning.target):
      raise ValueError(
        'FromTarget.target: expected a network that gives its features, such'
        f' as T5 or GPT, got {type(learning.target).__name__}.'
      )
    own = getattr(getattr(learning.target, 'config', None), 'emb_dim', None)
    width = heads.config.emb_dim
    if own not in (None, width):
      raise ValueError(
        f'HeadsConfig.emb_dim is {width}; expected {own}, that of the target.'
      )
    if learning.slice_target or self.bleu_examples:
      raise ValueError(
        'Heads write no texts and are no slice of a target: leave slice_target'
        f' False and bleu_examples 0, got {learning.slice_target} and'
        f' {self.bleu_examples}.'
      )
    check_at_least(learning, head_decay=0.0)
