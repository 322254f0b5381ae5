"""Tiny models of transformers beside ours, for suites that have torch."""

import contextlib
import functools
import importlib.util
import pathlib
import tempfile
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import folders
from specdec_jax import partitioning
from specdec_jax.checkpoints import families
from specdec_jax.decoding.loop import Loop
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.engine.padding import padded
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.families import network_of
from specdec_jax.probs import SamplingConfig
from toy_beams import near, program
from toy_requests import request_of

_PACKAGES = 'transformers', 'torch', 'safetensors'
MARKS = [
  pytest.mark.skipif(
    None in map(importlib.util.find_spec, _PACKAGES),
    reason="needs transformers and torch: pip install 'specdec_jax[parity]'",
  ),
  pytest.mark.filterwarnings('ignore'),  # those of torch and transformers
]
TOLERANCE = 1e-4  # of the largest value of an output
BUDGET = 40  # tokens a row; more than windows
LENGTHS = (7, 2, 30, 3, 12)  # of the rows, their ends included
LANGUAGE = 90  # what outputs of M2M-100 begin with

_BARTS = ('Bart', 'MBart', 'PLBart', 'Pegasus', 'Marian', 'M2M100')
MODELS = families.read_tables(
  pathlib.Path(__file__).with_name('parity_models.toml')
)
IMAGES = MODELS['T5Gemma 2']['config']['encoder']['vision_config']
# TOML has no null.
MODELS['T5Gemma, untied']['config']['decoder']['final_logit_softcapping'] = None


def their_model(name: str) -> Any:
  """A randomly initialised model of transformers; nothing in it is 0 or 1."""
  import torch
  import transformers

  family, settings = MODELS[name]['family'], MODELS[name]['config']
  text = 'Text' if family == 'Gemma3' else ''
  described = getattr(transformers, f'{family}{text}Config')(**settings)
  kinds = {'GPT2': 'LMHeadModel', 'T': 'ForConditionalGeneration'}
  kind = kinds.get(family, 'ForCausalLM')
  is_bart = family in _BARTS
  if 'T5' in family or is_bart:
    kind = 'MTModel' if family == 'Marian' else kinds['T']
  torch.manual_seed(0)
  # Others than the eager attention leave out what they do not have.
  model = getattr(transformers, family + kind)._from_config(
    described, attn_implementation='eager'
  )
  is_t5 = 'T5' in family and 'Gemma' not in family
  if is_t5 and not described.tie_word_embeddings:
    # Version 5 ties every new T5; published ones of 1.1 are not tied.
    shape = model.shared.weight.shape
    model.lm_head.weight = torch.nn.Parameter(torch.randn(shape))
  # Or each token's own embedding, which is the head, would choose it again.
  small = {'T5Gemma': 0.3, 'T5Gemma2': 0.8}.get(family, 0.2)
  if is_bart:  # norms that follow residuals leave little of them
    small = 0.1 if family in ('Bart', 'PLBart', 'Marian') else 0.8
  with torch.no_grad():
    for part, parameter in model.named_parameters():
      if not parameter.requires_grad:  # sinusoids
        continue
      is_table = any(word in part for word in ('norm', 'embed', 'shared'))
      scale = 0.1 if is_t5 else 0.2 if is_table else small
      if family == 'T5Gemma2' and 'embed' in part:
        scale = 0.05
      elif is_bart and 'embed_positions' in part:
        scale = 1.0
      elif family in ('PLBart', 'Marian') and 'layer' not in part:
        scale = 0.05  # they are multiplied by sqrt(M)
      parameter += scale * torch.randn(parameter.shape)
    if name == 'T5 1.0':
      model.shared.weight *= 0.1
    if is_bart:
      # Padding is never the likeliest: transformers would mask it as an output.
      model.lm_head.weight[described.pad_token_id] = 0
      model.generation_config.forced_eos_token_id = None
    if hasattr(model, 'final_logits_bias'):
      bias = model.final_logits_bias
      bias += 0.1 * torch.randn(bias.shape)
      bias[:, described.pad_token_id] = -9
  return model.eval()


@functools.cache
def folder_of(name: str) -> tuple[Any, str]:
  """A model and a folder in which it lies."""
  folder = tempfile.mkdtemp()
  model = their_model(name)
  model.save_pretrained(folder, max_shard_size='40KB')
  return model, folder


def loaded(name: str) -> tuple[Any, Any, Any]:
  """A model, and the configuration and parameters read from its folder."""
  model, folder = folder_of(name)
  return model, *folders.read(folder)


def rows_of(network: Any, seed: int = 1) -> list[np.ndarray]:
  """Ragged inputs, or prompts; 0 in them is a token unless it is padding."""
  rng = np.random.default_rng(seed)
  ids = np.arange(3, min(network.vocab_size, 90))
  ids = ids[ids != network.pad_id]
  rows = [rng.choice(ids, length) for length in LENGTHS]
  if network.has_encoder:
    for row in rows:
      row[-1] = 2 if hasattr(network.config, 'pad_id') else 1
  return rows


def check_logits(
  model: Any, config: Any, params: Any, most: int = 90, pad_id: Any = None
) -> None:
  """Teacher-forced logits of ragged rows to 1e-4 of the largest.

  Args:
    model: transformers'.
    config: ours.
    params: ours.
    most: ids that are read are below this.
    pad_id: what inputs of ours are padded with; None: as is right.

  Raises:
    AssertionError: they differ.
  """
  import torch

  network = network_of(config)
  right = network.pad_id
  ids = np.arange(0 if right else 1, most)
  ids = ids[ids != right]
  fed = np.random.default_rng(2).choice(ids, (len(LENGTHS), 50))
  inputs = None
  given = {'input_ids': torch.tensor(fed)}
  if network.has_encoder:
    rows = rows_of(network)
    inputs, _ = padded(rows, len(rows), max(LENGTHS), right)
    given = dict(
      input_ids=torch.tensor(inputs).long(),
      attention_mask=torch.tensor(inputs != right).long(),
      decoder_input_ids=torch.tensor(fed),
    )
    if pad_id is not None:
      inputs = np.where(inputs == right, pad_id, inputs)
  with torch.no_grad():
    want = model(**given).logits.numpy()
  have = jax.jit(network.logits)(params, inputs, jnp.asarray(fed, jnp.int32))
  assert have.shape == want.shape
  found = float(np.abs(have - want).max() / np.abs(want).max())
  assert found < TOLERANCE, f'Logits differ by {found:.2g}.'


@functools.cache
def _decode(network: LanguageModel) -> Any:
  return jax.jit(Loop(network).decode)


def greedy(network: Any, params: Any, rows: list[np.ndarray]) -> list[list]:
  """Tokens of the plain loop over a ragged batch, a list a row."""
  batch = len(rows)
  tokens, length = padded(rows, batch, max(map(len, rows)), network.pad_id)
  nothing, ones = np.zeros((batch, 1), np.int32), np.ones(batch, np.int32)
  eos, given = 1, (tokens, nothing + getattr(network, 'start_id', 0), ones)
  if hasattr(network.config, 'pad_id'):
    prompt = np.array([[network.start_id, LANGUAGE]] * batch, np.int32)
    eos, given = 2, (tokens, prompt, ones + 1)
  elif not network.has_encoder:
    given = (nothing, tokens, length)
  names = ('inputs', 'prompt', 'prompt_length')
  changes: Any = dict(zip(names, map(jnp.asarray, given), strict=True))
  request = request_of(
    batch, 0, SamplingConfig(0.0), BUDGET, inputs=(0,), seed=0, stop_ids=(eos,)
  ).replace(**changes)
  done = jax.device_get(_decode(network)(PairParams(params, None), request))
  outputs = zip(done.tokens, done.length, strict=True)
  return [row[:length].tolist() for row, length in outputs]


def generate(model: Any, inputs: Any, **options: Any) -> Any:
  """What `generate` of transformers returns for inputs int[B, E], greedy."""
  import torch

  # Version 5.23 sizes the cache of a T5's decoder by the encoder's layers.
  patched: Any = contextlib.nullcontext()
  if layers := getattr(model.config, 'num_decoder_layers', None):
    patched = mock.patch.object(model.config, 'num_layers', layers)
  tokens = torch.tensor(inputs).long()
  pad = model.config.pad_token_id if model.config.is_encoder_decoder else -1
  mask = (tokens != pad).long()
  with patched:
    return model.generate(
      input_ids=tokens, attention_mask=mask, do_sample=False, **options
    )


def their_outputs(
  model: Any, rows: list, ends: Any, width: int = 1, **options: Any
) -> list[list[tuple[list[int], float]]]:
  """Of each row all (tokens, score) of `generate`, from the worst to the best.

  The tokens have neither what the decoder was given nor what follows an end.
  """
  outputs = []
  for row in rows:
    made = generate(
      model,
      row[None],
      num_beams=width,
      num_return_sequences=width,
      return_dict_in_generate=True,
      output_scores=True,
      **options,
    )
    begin = 1 if model.config.is_encoder_decoder else len(row)
    some = []
    for tokens in made.sequences[:, begin:].tolist():
      at = [i for i, token in enumerate(tokens) if token in ends]
      some.append(tokens[: at[0] + 1] if at else tokens)
    scores = made.sequences_scores.tolist() if width > 1 else [0.0]
    outputs.append([*zip(some, scores, strict=True)][::-1])
  return outputs


def their_greedy(model: Any, rows: list, network: Any) -> list[list]:
  """Tokens of `generate`, without what it is given and what follows an end."""
  has_language = hasattr(network.config, 'pad_id')
  options: dict[str, Any] = {'max_new_tokens': BUDGET + has_language}
  if has_language:
    options['forced_bos_token_id'] = LANGUAGE
  elif not network.has_encoder:
    options['pad_token_id'] = 0
  found = their_outputs(model, rows, (2 if has_language else 1,), **options)
  return [tokens[has_language:] for ((tokens, _),) in found]


def check_rows(rows: list[list]) -> None:
  """Raises AssertionError where equal rows would say little.

  Several must be long, and they must not be one token over and over.
  """
  assert sum(len(row) >= 20 for row in rows) >= 2, rows
  assert len({tuple(row) for row in rows}) > 2, rows
  assert len({token for row in rows for token in row}) > 5, rows


class Pair(NamedTuple):
  """A model of transformers, ours, and what both read."""

  theirs: Any
  network: Any
  params: PairParams
  rows: list[np.ndarray]

  def outputs(self, request, gamma, width):
    """Of each row all (tokens, score), the best last, and what was accepted."""
    run = program(self.network, self.network if gamma else None)
    params = self.params if gamma else self.params._replace(draft=None)
    done = jax.device_get(run(params, request))
    scores = done.scores if width > 1 else np.zeros(len(done.tokens))
    beams = [
      (tokens[:n].tolist(), float(score))
      for tokens, n, score in zip(done.tokens, done.length, scores, strict=True)
    ]
    rows = [beams[i : i + width] for i in range(0, len(beams), width)]
    return rows, done.stats.num_accepted


@functools.cache
def pair_of(name):
  model, config, params = loaded(name)
  network = network_of(config)
  both = params, near(jax.device_get(params), 0.05)
  placed = PairParams(*map(partitioning.place, both))
  return Pair(model, network, placed, rows_of(network))
