"""A drafter without an encoder, which reads its target's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from small_vocabulary import network, weights
from specdec_jax.checkpoints.disk_arrays import fingerprint
from specdec_jax.decoding import speculative
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import example_keys, new_request
from specdec_jax.drafters.small_model import small_model
from specdec_jax.drafters.uniform import uniform
from specdec_jax.models.gpt import GPT, GPTConfig
from specdec_jax.models.model import Model
from specdec_jax.models.t5 import T5
from specdec_jax.probs import SamplingConfig
from specdec_jax.training.own_drafter import decoder_layers

TARGET = network(num_decoder_layers=2)
ALONE = T5(
  dataclasses.replace(TARGET.config, num_encoder_layers=0, num_decoder_layers=1)
)


@functools.cache
def target_params(seed=1):
  return weights(TARGET, seed)


def draft_params():
  return decoder_layers(target_params(), 1)


def request_of(gamma=3, rows=3, slots=12, **changes):
  rng = np.random.default_rng(0)
  inputs = rng.integers(3, 200, (rows, 7)).astype(np.int32)
  inputs[1, 4:] = 0
  return new_request(
    inputs,
    example_keys(0, np.arange(rows, dtype=np.uint32)),
    SamplingConfig(0.0),
    slots=slots,
    gamma=gamma,
    stop_ids=[1],
    **changes,
  )


def engine_of(tokenizer, draft, target=None):
  return specdec_jax.Engine(
    target or Model(TARGET, target_params()),
    draft,
    tokenizer=tokenizer,
    gamma=3,
    max_input_len=24,
    max_decode_len=20,
    batch_size=4,
  )


def products(start, params) -> int:
  return jax.jit(start).lower(params).as_text().count('stablehlo.dot_general')


def test_the_encoder_runs_once():
  """A drafter adds two products a layer; one with an encoder adds that too."""
  request = request_of()

  def of(draft):
    drafter = small_model(draft)
    params = PairParams(target_params(), weights(draft, 2))
    return products(
      lambda params: speculative.start(TARGET, drafter, params, request),
      params,
    )

  plain = products(
    lambda params: Loop(TARGET).start(params, request.replace(gamma=0)),
    PairParams(target_params(), None),
  )
  encoder = products(
    lambda params: TARGET.encode(params, request.inputs), target_params()
  )
  assert encoder > 0
  assert of(ALONE) == plain + 2
  assert of(network(num_decoder_layers=1)) == plain + encoder + 2


def test_needs_what_an_encoder_says():
  tokens = jnp.ones((1, 3), jnp.int32)
  params = draft_params()
  with pytest.raises(ValueError, match='has no encoder.*can only draft'):
    ALONE.prefill(params, tokens, 8)
  with pytest.raises(ValueError, match='has no encoder'):
    ALONE.encode(params, tokens)
  with pytest.raises(ValueError, match='width of 16, got 12'):
    ALONE.logits(params, tokens, tokens, encoded=jnp.ones((1, 3, 12)))
  with pytest.raises(ValueError, match='encoder_dim'):
    dataclasses.replace(TARGET.config, encoder_dim=8)


def test_another_target_is_refused(tokenizer):
  made = Model(
    ALONE,
    draft_params(),
    name='mine',
    made_for=fingerprint(target_params()),
  )
  engine_of(tokenizer, made)
  other = Model(TARGET, target_params(2), name='other')
  with pytest.raises(ValueError, match='target: .*was made for.*other.*distil'):
    engine_of(tokenizer, made, other)


def test_a_target_without_an_encoder_is_refused(tokenizer):
  gpt = GPT(
    GPTConfig(
      vocab_size=288,
      emb_dim=16,
      num_heads=2,
      num_layers=1,
      head_dim=8,
      mlp_dim=16,
    )
  )
  draft = Model(ALONE, draft_params())
  other = Model(gpt, weights(gpt, 0))
  with pytest.raises(ValueError, match='target: .*encoder'):
    engine_of(tokenizer, draft, other)
  own = uniform(288)._replace(reads_encoder=True)  # of somebody's own
  with pytest.raises(ValueError, match='target: .*encoder.*GPT'):
    engine_of(tokenizer, own, other)
  with pytest.raises(ValueError, match='target: .*encoder of its own'):
    engine_of(tokenizer, None, draft)
