"""transformers' models and these on the same batch; T5 module by module.

`compare` is the whole comparison of a T5; where it fails it names the first
module, in the order of execution, whose output differs. What the suite of GPT-2
needs as well is here too. For suites that have torch.
"""

import dataclasses
import functools
import importlib.util
import re
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints import huggingface_names as names
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import Request
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.t5 import T5, EncoderDecoder, T5Config
from specdec_jax.probs import SamplingConfig

MARKS = [
  pytest.mark.skipif(
    any(
      importlib.util.find_spec(name) is None
      for name in ('transformers', 'torch', 'safetensors')
    ),
    reason="needs transformers and torch: pip install 'specdec_jax[parity]'",
  ),
  pytest.mark.filterwarnings('ignore'),  # those of torch and transformers
]
_ADDED = re.compile(r'(?<=^decoder\.block\.)(\d+\.layer\.\d)\.\w+\.w?o$')
TOLERANCE = 1e-4  # of the largest value of an output
BUDGET = 24  # tokens a row
EOS = 1


@dataclasses.dataclass(frozen=True)
class Batch:
  """Ragged inputs int32[B, E], and what the decoder is forced to read."""

  inputs: np.ndarray
  targets: np.ndarray


def make_batch(vocab_size: int, seed: int = 1) -> Batch:
  """Rows of 1 to 40 tokens, the last of each an end of sequence."""
  rng = np.random.default_rng(seed)
  lengths = [7, 2, 40, 1, 19]
  inputs = np.zeros((len(lengths), max(lengths)), np.int32)
  for row, length in zip(inputs, lengths, strict=True):
    row[: length - 1] = rng.integers(2, vocab_size, length - 1)
    row[length - 1] = 1
  targets = rng.integers(2, vocab_size, (len(lengths), 11)).astype(np.int32)
  targets[:, 0] = 0
  return Batch(inputs, targets)


def module_pairs(config: T5Config) -> dict[str, str]:
  """Their name: ours, of each module that has an output of its own.

  The embedding, which both stacks call, is among them once. A decoder's last
  product of a block adds the residual here; there the block around it does.
  """
  pairs = {
    _ADDED.sub(r'\1', row.name.removesuffix('.weight')): ours.rsplit('/', 1)[0]
    for ours, row in names.table(config).items()
  }
  for stack in ('encoder', 'decoder'):
    for i in range(getattr(config, f'num_{stack}_layers')):
      pairs[f'{stack}.block.{i}'] = f'{stack}/layers_{i}'
  return pairs


@functools.cache
def _capture(config: T5Config) -> Any:
  @jax.jit
  def run(params, inputs, targets):
    return EncoderDecoder(config).apply(
      {'params': params},
      inputs,
      targets,
      capture_intermediates=True,
      mutable=['intermediates'],
    )[1]

  return run


def our_outputs(
  config: T5Config, params: Any, batch: Batch
) -> dict[str, list[np.ndarray]]:
  """Each module's outputs in the order of its calls."""
  state = _capture(config)(params, batch.inputs, batch.targets)
  flat = flax.traverse_util.flatten_dict(
    jax.device_get(state)['intermediates'], sep='/'
  )
  return {
    name.removesuffix('/__call__'): [
      # A layer of the decoder returns its keys and values too.
      value[0] if isinstance(value, tuple) else value
      for value in values
    ]
    for name, values in flat.items()
  }


def their_outputs(
  model: Any, batch: Batch
) -> tuple[np.ndarray, list[tuple[str, np.ndarray]]]:
  """Logits, and (module, output) in the order of execution."""
  import torch

  called: list[tuple[str, np.ndarray]] = []

  def record(name, module, args, output):
    del module, args
    value = output[0] if isinstance(output, tuple) else output
    if isinstance(value, torch.Tensor):
      called.append((name, value.detach().numpy().copy()))

  hooks = [
    module.register_forward_hook(functools.partial(record, name))
    for name, module in model.named_modules()
  ]
  inputs = torch.tensor(batch.inputs).long()
  try:
    with torch.no_grad():
      logits = model(
        input_ids=inputs,
        attention_mask=(inputs != 0).long(),
        decoder_input_ids=torch.tensor(batch.targets).long(),
      ).logits.numpy()
  finally:
    for hook in hooks:
      hook.remove()
  return logits, called


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
  """The largest difference, relative to the largest value."""
  assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
  return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def first_difference(
  config: T5Config, params: Any, batch: Batch, called: list
) -> str:
  """Says which module differs first, or that none does."""
  outputs = our_outputs(config, params, batch)
  pairs = module_pairs(config)
  counts = dict.fromkeys(pairs, 0)
  equal = 0
  for theirs, value in called:
    if theirs.endswith('embed_tokens'):
      theirs = 'shared'  # versions differ in what they call it
    if theirs not in pairs:
      continue
    own = outputs[pairs[theirs]][counts[theirs]]
    if 'relative_attention_bias' in theirs:
      value = value.transpose(2, 0, 1)  # [S, S, H] there
      if own.ndim == 2:  # an encoder's, of each distance
        place = np.arange(value.shape[1])
        own = own[:, place[None] - place[:, None] + len(place) - 1]
    found = difference(own, value)
    if not found < TOLERANCE:
      return (
        f'The first output that differs is that of {pairs[theirs]} ({theirs}'
        f' there), after {equal} equal ones: by {found:.2g} of its largest'
        ' value.'
      )
    counts[theirs] += 1
    equal += 1
  never = [name for name, count in counts.items() if not count]
  return f'All {equal} outputs are equal; not compared: {never}.'


@functools.cache
def _decode(network: LanguageModel) -> Any:
  return jax.jit(Loop(network).decode)


def greedy(
  network: LanguageModel,
  params: Any,
  inputs: np.ndarray,
  budget: int = BUDGET,
  **changes,
) -> list[list]:
  """Tokens of the plain loop, a list a row.

  Args:
    network: the model.
    params: its parameters.
    inputs: int32[B, E], a column of zeros where it has no encoder.
    budget: the most tokens a row.
    **changes: fields of the `Request`, such as `prompt` and `prompt_length`.
  """
  batch = len(inputs)
  request = Request(
    inputs=jnp.asarray(inputs),
    keys=jax.random.split(jax.random.key(0), batch),
    sampling=SamplingConfig(0.0).params(batch),
    min_length=jnp.zeros((batch,), jnp.int32),
    max_length=jnp.full((batch,), budget, jnp.int32),
    slots=budget,
    gamma=0,
    greedy=True,
    **{'stop_ids': jnp.full((4,), EOS, jnp.int32)} | changes,
  )
  done = jax.device_get(_decode(network)(PairParams(params, None), request))
  rows = zip(done.tokens, done.length, strict=True)
  return [row[:length].tolist() for row, length in rows]


def check_rows(rows: list[list]) -> None:
  """Raises AssertionError where equal rows would say little.

  Several must be long, and they must not be one token over and over.
  """
  assert sum(len(row) >= 20 for row in rows) >= 2, rows
  assert len({tuple(row) for row in rows}) > 2, rows
  assert len({token for row in rows for token in row}) > 5, rows


def generate(model: Any, inputs: np.ndarray, **options) -> Any:
  """What a T5's `generate` returns for inputs int32[B, E]."""
  import torch

  # Version 5.23 sizes the decoder's cache by the encoder's layers.
  kept = model.config.num_layers
  model.config.num_layers = model.config.num_decoder_layers
  try:
    tokens = torch.tensor(inputs).long()
    return model.generate(
      input_ids=tokens,
      attention_mask=(tokens != 0).long(),
      do_sample=False,
      **options,
    )
  finally:
    model.config.num_layers = kept


def their_greedy(model: Any, inputs: np.ndarray) -> list[list]:
  """Tokens of `generate`, without the start and what follows an end."""
  generated = generate(model, inputs, num_beams=1, max_new_tokens=BUDGET)
  rows = generated[:, 1:].tolist()
  return [row[: row.index(1) + 1] if 1 in row else row for row in rows]


def compare(model: Any, config: T5Config, params: Any) -> list[list]:
  """Teacher-forced logits to 1e-4 relative, greedy tokens equal.

  Returns:
    The tokens of each row.

  Raises:
    AssertionError: something differs; names the first module that does.
  """
  model = model.eval()
  batch = make_batch(config.vocab_size)
  expected, called = their_outputs(model, batch)
  logits = _logits(config)(params, batch.inputs, batch.targets)

  def where():
    return first_difference(config, params, batch, called)

  found = difference(np.asarray(logits), expected)
  assert found < TOLERANCE, f'Logits differ by {found:.2g}. {where()}'
  rows = greedy(T5(config), params, batch.inputs)
  others = their_greedy(model, batch.inputs)
  for i, (row, other) in enumerate(zip(rows, others, strict=True)):
    assert row == other, f'Row {i} is {row}, there {other}. {where()}'
  return rows


@functools.cache
def _logits(config: T5Config) -> Any:
  return jax.jit(T5(config).logits)
