"""The small pair that is compiled for devices that are not there."""

import dataclasses

from specdec_jax.models import t5

CONFIG = t5.T5Config(
  vocab_size=512,
  emb_dim=256,
  num_heads=2,
  head_dim=64,
  num_encoder_layers=1,
  num_decoder_layers=2,
  mlp_dim=512,
  dtype='bfloat16',
)
TARGET = t5.T5(CONFIG)
DRAFT = t5.T5(dataclasses.replace(CONFIG, num_decoder_layers=1))
