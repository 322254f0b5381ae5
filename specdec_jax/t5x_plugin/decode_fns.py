"""T5X's decode functions, with speculative decoding.

They have T5X's names and arguments. T5X gives a decode function
`tokens_to_logits`, which reads one token per call.
`t5x_plugin.EncoderDecoderModel` gives it a `Pair` instead: both models, their
parameters and the inputs, which is all that a whole loop needs. gin's bindings
and `decoder_params` reach these functions as they reach T5X's.

`DECODE_FNS`, at the end, must list each decode function of this module.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.checks.fields import unexpected
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.engine.options import Options
from specdec_jax.probs import SamplingConfig, SamplingParams
from specdec_jax.request import Drafting, Request
from specdec_jax.types import Generation

MIN_TEMPERATURE = 1e-4  # T5X takes the argmax up to this temperature


class Pair(NamedTuple):
  """Both models and their inputs.

  Attributes:
    loop: the target and its drafter.
    params: the parameters of both.
    inputs: int32[B, E], the encoder's inputs, 0 past each row's end.
    gamma: proposals per round.
    has_prompt: whether outputs begin with the argument `inputs` of the decode
      function; otherwise only the shape of this argument is used.
  """

  loop: Loop
  params: PairParams
  inputs: jax.Array
  gamma: int
  has_prompt: bool


def temperature_sample(
  inputs: jax.Array,
  cache: Any,
  tokens_to_logits: Pair,
  eos_id: int,
  decode_rng: jax.Array | None = None,
  num_decodes: int = 1,
  temperature: float | jax.Array = 1.0,
  topk: int = 1,
  topp: float = 0.0,
  cache_offset: int = 0,
  max_decode_steps: int | jax.Array | None = None,
  max_decode_steps_hard_limit: int | None = None,
  rescale_log_probs: bool = True,
) -> tuple[jax.Array, jax.Array]:
  """Samples as T5X's `decoding.temperature_sample`, by speculative decoding.

  At temperature 0 the tokens are T5X's. Above it they have T5X's distribution,
  but are other samples: each decode of each example has its own key. T5X's
  arguments for callbacks in each step do not exist, since a step here is a
  round of several tokens.

  Args:
    inputs: int32[B, L], 0 first, then each row's prompt (see
      `Pair.has_prompt`), then 0.
    cache: not used; the loop makes its own.
    tokens_to_logits: a `Pair`.
    eos_id: id that ends an output.
    decode_rng: a PRNG key; None is the key of seed 0.
    num_decodes: samples of each example.
    temperature: a number or float[B]; up to 1e-4 it takes the argmax.
    topk: 0 is off.
    topp: 0.0 is off.
    cache_offset: not used.
    max_decode_steps: the most tokens after the prompt; None is L.
    max_decode_steps_hard_limit: bounds `max_decode_steps`, if that is given.
    rescale_log_probs: whether scores use the distribution after temperature,
      top-k and top-p, so that they are 0.0 at temperature 0; otherwise they use
      the model's own.

  Returns:
    Tokens int32[B, num_decodes, L], each row its prompt and its output, then 0;
    and their scores float32[B, num_decodes], the sum of the log-probabilities
    of the output. The best score is the last.

  Raises:
    ValueError: `topk` and `topp` are both given, or `max_decode_steps` is more
      than L.
  """
  del cache, cache_offset  # arguments that T5X gives to any decode function
  pair = tokens_to_logits
  sampling, greedy = _sampling(inputs.shape[0], temperature, topk, topp)
  has_scores = not (greedy and rescale_log_probs)
  steps = _steps(inputs.shape[1], max_decode_steps, max_decode_steps_hard_limit)

  def each(rows):
    return jnp.repeat(rows, num_decodes, axis=0)

  tokens, done = _decode(
    pair._replace(inputs=each(pair.inputs)),
    each(inputs),
    eos_id,
    steps,
    keys=_keys(decode_rng, inputs.shape[0] * num_decodes),
    sampling=jax.tree.map(each, sampling),
    greedy=greedy,
    with_log_probs=has_scores,
    log_probs_as_drawn=rescale_log_probs,
  )
  shape = (inputs.shape[0], num_decodes)
  scores = jnp.zeros(shape)
  if has_scores:
    scores = jnp.sum(done.log_probs, axis=1).reshape(shape)
  order = jnp.argsort(scores, axis=1)
  return (
    jnp.take_along_axis(tokens.reshape(*shape, -1), order[..., None], axis=1),
    jnp.take_along_axis(scores, order, axis=1),
  )


def beam_search(
  inputs: jax.Array,
  cache: Any,
  tokens_to_logits: Pair,
  eos_id: int,
  num_decodes: int = 4,
  alpha: float = 0.6,
  max_decode_len: int | None = None,
  decode_rng: jax.Array | None = None,
  cache_offset: int = 0,
  draft_beams: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Finds the beams of T5X's `decoding.beam_search`, by speculative decoding.

  They differ only after a prompt of L - 1 tokens: T5X repeats the last of them,
  and this function searches the one token that is left.

  Args:
    inputs: int32[B, L], as for `temperature_sample`.
    cache: not used; the search makes its own.
    tokens_to_logits: a `Pair`.
    eos_id: id that ends a beam.
    num_decodes: K, the width of the search.
    alpha: exponent of the brevity penalty, >= 0.
    max_decode_len: length of the outputs, prompt included; None is L.
    decode_rng: not used; a search draws nothing.
    cache_offset: not used.
    draft_beams: beams of the drafter; None is 2 K.

  Returns:
    Tokens int32[B, K, L], each row its prompt and its output, then 0; and their
    scores float32[B, K], the best one last. If a search finishes fewer than K
    beams, the first ones are 0 and their scores -1e7, as in T5X.

  Raises:
    ValueError: a number is too small or too large.
  """
  del cache, decode_rng, cache_offset
  pair = tokens_to_logits
  options = Options(num_beams=num_decodes, alpha=alpha, draft_beams=draft_beams)
  length = inputs.shape[1] if max_decode_len is None else max_decode_len
  padding = max(0, length - inputs.shape[1])
  prompt = jnp.pad(inputs, ((0, 0), (0, padding)))[:, :length]
  batch = prompt.shape[0]
  tokens, done = _decode(
    pair,
    prompt,
    eos_id,
    length,
    keys=_keys(None, batch),
    sampling=SamplingConfig(0.0).params(batch),
    greedy=True,
    with_log_probs=False,
    beams=options.beam_settings(num_ends=1),
  )
  if pair.has_prompt:  # beams that do not exist have no prompt
    tokens = jnp.where(done.length[:, None] > 0, tokens, 0)
  scores = jnp.asarray(done.scores).reshape(batch, num_decodes)
  return tokens.reshape(batch, num_decodes, length), scores


def _decode(
  pair: Pair, prompt: jax.Array, eos_id: int, steps: Any, **settings: Any
) -> tuple[jax.Array, Generation]:
  """Decodes with a pair of models.

  Args:
    pair: both models and their inputs.
    prompt: int32[B, L], 0 first, see `Pair.has_prompt`.
    eos_id: id that ends an output.
    steps: the most tokens after a prompt.
    **settings: further fields of the `Request`.

  Returns:
    int32[N B, L], each row's prompt and output; and the generation of N rows
    for each row.
  """
  length = prompt.shape[1]
  # The number of tokens of each prompt.
  produced = jnp.zeros(prompt.shape[:1], jnp.int32)
  if pair.has_prompt:
    produced = jnp.sum(prompt[:, 1:] != 0, axis=1, dtype=jnp.int32)
  request = Request(
    inputs=pair.inputs,
    stop_ids=jnp.array([eos_id], jnp.int32),
    min_length=jnp.zeros_like(produced),
    max_length=jnp.minimum(steps, length - produced),
    slots=length,
    drafting=Drafting(pair.gamma),
    prompt=prompt if pair.has_prompt else jnp.zeros_like(prompt[:, :1]),
    prompt_length=produced + 1,
    **settings,
  )
  done = pair.loop.decode(pair.params, request)
  tokens = done.tokens
  if pair.has_prompt:
    num_outputs = tokens.shape[0] // prompt.shape[0]
    before = jnp.pad(prompt[:, 1:], ((0, 0), (0, 1)))
    before, produced = (
      jnp.repeat(rows, num_outputs, axis=0) for rows in (before, produced)
    )
    place = jnp.arange(length) - produced[:, None]
    moved = jnp.take_along_axis(tokens, jnp.maximum(place, 0), axis=1)
    tokens = jnp.where(place < 0, before, moved)
  return tokens, done


def _sampling(batch: int, temperature, topk, topp):
  """Returns T5X's arguments as `SamplingParams`, and whether all are greedy.

  Arguments may be traced; these count as sampled.
  """
  if _are_concrete(topk, topp) and topk and topp:
    expected = f'0 beside topp = {topp} (it is 1 by default)'
    raise unexpected('topk', expected, topk)
  greedy = _are_concrete(temperature)
  greedy = greedy and bool(np.all(np.asarray(temperature) <= MIN_TEMPERATURE))
  temperature = jnp.asarray(temperature, jnp.float32)
  temperature = jnp.where(temperature > MIN_TEMPERATURE, temperature, 0.0)
  top_p = jnp.asarray(topp, jnp.float32)
  params = SamplingParams(
    temperature=jnp.broadcast_to(temperature, (batch,)),
    top_k=jnp.full((batch,), topk, jnp.int32),
    top_p=jnp.broadcast_to(jnp.where(top_p > 0, top_p, 1.0), (batch,)),
  )
  return params, greedy


def _are_concrete(*values: Any) -> bool:
  """Returns whether none of the arguments is traced."""
  return not any(isinstance(value, jax.core.Tracer) for value in values)


def _steps(length: int, steps, hard_limit):
  """Returns the most tokens after a prompt, int32[] or int32[B]."""
  if steps is None:
    return length
  if hard_limit:
    steps = jnp.minimum(steps, hard_limit)
  if _are_concrete(steps) and np.any(steps > length):
    expected = f'{length} at most, the tokens of the targets'
    raise unexpected('max_decode_steps', expected, steps)
  return steps


def _keys(rng: jax.Array | None, rows: int) -> jax.Array:
  """Derives a key for each row from T5X's key of the batch."""
  if rng is None:
    rng = jax.random.key(0)
  elif not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
    rng = jax.random.wrap_key_data(rng)
  return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng, jnp.arange(rows))


DECODE_FNS = (temperature_sample, beam_search)
