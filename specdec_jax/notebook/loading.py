"""Loads a target and its drafter from paths, for a notebook."""

from specdec_jax.checks.memory import device_bytes
from specdec_jax.engine.loading import Path
from specdec_jax.engine.loading import load as load_model
from specdec_jax.engine.options import as_gamma
from specdec_jax.engine.padding import SMALLEST_PROMPT
from specdec_jax.engine.pair import own_vocabulary
from specdec_jax.measure import memory
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.families import Network
from specdec_jax.models.gpt import GPT
from specdec_jax.models.model import Model
from specdec_jax.notebook.model import Interactive
from specdec_jax.partitioning import Placement
from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.types import LengthRule


def load(
  target: Path,
  draft: Path | None = None,
  *,
  network: LanguageModel | None = None,
  draft_network: LanguageModel | None = None,
  tokenizer: Tokenizer | Path | None = None,
  dtype: str | None = None,
  placement: Placement | None = None,
  gamma: int | str | LengthRule = 4,
  max_input_len: int = 128,
  max_decode_len: int = 128,
) -> Interactive:
  """Loads a target, and a drafter for it, as an object that can be asked.

  A Hugging Face folder, or its id on the hub, says which sizes its model has
  and holds its vocabulary; other checkpoints need both as arguments:

    load('t5x/checkpoint_1000000', network=T5(T5Config(...)),
         tokenizer='vocab.model')

  All errors except those in the arrays themselves are found before arrays are
  read.

  Args:
    target: a checkpoint of any kind that `checkpoints.load` knows.
    draft: checkpoint of a small model which proposes; None for plain decoding.
    network: the target's network; needed unless its folder describes itself,
      and compared with the checkpoint.
    draft_network: the same for the drafter.
    tokenizer: the tokenizer of both, or a path for
      `vocabulary.open_vocabulary`; None is the one in the target's folder.
    dtype: dtype of parameters and computation, 'float32' or 'bfloat16'. None is
      that of `placement`, or else of `network`, and float32 without them.
    placement: how the target is split over several devices, such as
      `Placement(model=0)` for all devices. The drafter is whole on each device.
      None is one device; then its memory is compared with what is needed.
    gamma: as of `Engine`: proposals per round, or 'adaptive'.
    max_input_len: tokens of the longest input, its end included.
    max_decode_len: tokens of the longest output, its end included.

  Raises:
    ValueError: a checkpoint, its sizes or its vocabulary is missing or does
      not fit; the two have different vocabularies; or the device's memory is
      too small (`checks.memory.DoesNotFitError`).
  """
  if draft is None and draft_network is not None:
    raise ValueError('draft_network was given without draft, its checkpoint.')
  if dtype is None and placement is not None:
    dtype = placement.dtype
  if dtype is None:
    dtype = getattr(getattr(network, 'config', None), 'dtype', 'float32')
  # The drafter first: it is fetched quickly from the hub, so errors show early.
  small = None
  if draft is not None:
    small = load_model(draft, draft_network, dtype=dtype)
  large = load_model(target, network, tokenizer=tokenizer, dtype=dtype)
  own_vocabulary(large)  # before its memory is counted
  if placement is None or placement.on_one_device:
    most, _ = as_gamma(gamma)
    _check_memory(large, small, dtype, most, max_input_len, max_decode_len)
  return Interactive(
    large,
    small,
    gamma=gamma,
    max_input_len=max_input_len,
    max_decode_len=max_decode_len,
    placement=placement,
  )


def _check_memory(
  target: Model,
  draft: Model | None,
  dtype: str,
  gamma: int,
  input_len: int,
  decode_len: int,
) -> None:
  """Raises DoesNotFitError if not even one text fits into memory.

  Raises ValueError if a model has too few positions for the shortest text.
  """
  large, small = target.network, None if draft is None else draft.network
  if not isinstance(large, Network) or not isinstance(small, Network | None):
    return  # a network of the caller's own
  if not large.has_encoder:
    longest = input_len - 1  # after the first token
    for network in (large, small):
      # With few positions, the longest text that they leave room for.
      if isinstance(network, GPT) and network.config.num_positions:
        room = network.config.num_positions // 64 * 64 - 1 - decode_len
        longest = min(longest, room - (gamma if small else 0))
    input_len = max(1, longest, min(SMALLEST_PROMPT, input_len - 1))
  plan = memory.Plan(
    large,
    small,
    input_len=input_len,
    decode_len=decode_len,
    gamma=gamma,
    param_dtype=dtype,
  )
  memory.check_fits(plan, device_bytes())
