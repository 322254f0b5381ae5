"""LoRA adapters that are merged when a model is loaded."""

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from causal_folder_test import DESCRIBED
from causal_lm_test import LLAMA
from m2m100_test import SMALL as NLLB
from small_vocabulary import network as t5_of
from specdec_jax.checkpoints import (
  causal_names,
  gpt2_names,
  huggingface,
  huggingface_names,
  lora,
  m2m100_names,
)
from specdec_jax.cli import main
from specdec_jax.models.gpt import GPTConfig

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('safetensors') is None,
  reason="needs safetensors: pip install 'specdec_jax[huggingface]'",
)
T5 = t5_of(2).config
GPT2 = GPTConfig(
  vocab_size=60, emb_dim=24, num_heads=3, num_layers=2, head_dim=8, mlp_dim=40
)
NLLB = dataclasses.replace(NLLB, head_dim=8)
# Family: where its arrays are, what is before their names in a file, its
# config.json, and modules that adapters are for, as PEFT calls them.
FAMILIES = {
  't5': (
    huggingface_names.table(T5),
    '',
    huggingface_names.describe(T5),
    [
      'encoder.block.0.layer.0.SelfAttention.q',
      'decoder.block.1.layer.1.EncDecAttention.v',
      'decoder.block.0.layer.2.DenseReluDense.wo',
    ],
  ),
  'llama': (
    causal_names.table(LLAMA),
    'model.',
    DESCRIBED['llama'][0],
    ['model.layers.0.self_attn.q_proj', 'model.layers.2.mlp.down_proj'],
  ),
  'gpt2': (
    gpt2_names.table(GPT2),
    '',  # adapters have the prefix all the same
    {theirs: getattr(GPT2, ours) for ours, theirs in gpt2_names.FIELDS.items()}
    | {'model_type': 'gpt2', 'n_inner': 40},
    [
      'transformer.h.0.attn.c_attn',
      'transformer.h.1.attn.c_proj',  # square
      'transformer.h.1.mlp.c_proj',
    ],
  ),
  'nllb': (
    m2m100_names.table(NLLB),
    '',
    {
      theirs: getattr(NLLB, ours)
      for ours, theirs in m2m100_names.FIELDS.items()
    }
    | {'model_type': 'm2m_100', 'decoder_start_token_id': 2},
    [
      'model.encoder.layers.0.self_attn.q_proj',
      'model.decoder.layers.1.encoder_attn.out_proj',
      'model.decoder.layers.0.fc1',
    ],
  ),
}
RANK, ALPHA = 3, 7


def write(folder, arrays, described):
  from safetensors.numpy import save_file

  folder.mkdir(exist_ok=True)
  save_file(arrays, folder / 'model.safetensors')
  (folder / 'config.json').write_text(json.dumps(described))


def base_of(family, dtype=np.float32):
  """The arrays of a file, by the names that they have there."""
  table, prefix, _, _ = FAMILIES[family]
  rng = np.random.default_rng(0)
  return {
    prefix * (row.name != 'lm_head.weight') + row.name: rng.standard_normal(
      row.stored_shape
    ).astype(dtype)
    for row in table.values()
  }


def kernel_name(family, module):
  """What a module's kernel is called in the file of `base_of`."""
  return f'{module.removeprefix("transformer.")}.weight'


def adapter_of(family, base):
  """Module -> A [r, in] and B [out, r]."""
  rng = np.random.default_rng(1)
  found = {}
  for module in FAMILIES[family][3]:
    shape = base[kernel_name(family, module)].shape
    if family == 'gpt2':
      shape = shape[::-1]
    found[module] = (
      rng.standard_normal((RANK, shape[1])).astype(np.float32),
      rng.standard_normal((shape[0], RANK)).astype(np.float32),
    )
  return found


SAID = {
  'peft_type': 'LORA',
  'r': RANK,
  'lora_alpha': ALPHA,
  'bias': 'none',
  'fan_in_fan_out': False,
  'init_lora_weights': True,
  'modules_to_save': None,
  'target_modules': ['q'],
  'use_dora': False,
  'some_new_field': [],  # asks for nothing
}


def write_adapter(folder, adapter, said=SAID, **more):
  from safetensors.numpy import save_file

  folder.mkdir(exist_ok=True)
  arrays = dict(more)
  for module, (down, up) in adapter.items():
    arrays[f'base_model.model.{module}.lora_A.weight'] = down
    arrays[f'base_model.model.{module}.lora_B.weight'] = up
  save_file(arrays, folder / 'adapter_model.safetensors')
  (folder / 'adapter_config.json').write_text(json.dumps(said))
  return folder


def merged(family, base, adapter, scale_of):
  """The arrays of a file after merging, number by number."""
  found = dict(base)
  for module, (down, up) in adapter.items():
    name = kernel_name(family, module)
    kernel = base[name].astype(np.float64)
    for out, into in np.ndindex(len(up), down.shape[1]):
      change = sum(up[out, i] * down[i, into] for i in range(RANK))
      place = (into, out) if family == 'gpt2' else (out, into)
      kernel[place] += scale_of(module) * change
    found[name] = kernel.astype(base[name].dtype)
  return found


def loaded(folder, adapter=None):
  return specdec_jax.load(folder, adapter=adapter).params


def check_same(have, want, rtol=1e-5):
  for one, other in zip(
    jax.tree.leaves(have), jax.tree.leaves(want), strict=True
  ):
    assert one.dtype == other.dtype
    one, other = (np.asarray(x, np.float32) for x in (one, other))
    np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol)


@pytest.mark.parametrize('family', FAMILIES)
def test_an_adapter_is_merged(family, tmp_path):
  base = base_of(family)
  described = FAMILIES[family][2]
  write(tmp_path / 'base', base, described)
  adapter = adapter_of(family, base)
  place = write_adapter(tmp_path / 'adapter', adapter)
  want = merged(family, base, adapter, lambda module: ALPHA / RANK)
  write(tmp_path / 'merged', want, described)
  have = loaded(tmp_path / 'base', place)
  check_same(have, loaded(tmp_path / 'merged'))
  # Negative control: it is not what it was.
  with pytest.raises(AssertionError):
    check_same(have, loaded(tmp_path / 'base'))


def test_scales_of_other_kinds(tmp_path):
  base, described = base_of('t5'), FAMILIES['t5'][2]
  write(tmp_path / 'base', base, described)
  adapter = adapter_of('t5', base)
  said = SAID | {
    'use_rslora': True,
    'alpha_pattern': {'EncDecAttention.v': 2, 'wo': 5.0},
    'rank_pattern': {'wo': RANK},
  }
  place = write_adapter(tmp_path / 'adapter', adapter, said)
  alphas = dict(zip(adapter, (ALPHA, 2, 5), strict=True))
  want = merged('t5', base, adapter, lambda name: alphas[name] / RANK**0.5)
  write(tmp_path / 'merged', want, described)
  check_same(loaded(tmp_path / 'base', place), loaded(tmp_path / 'merged'))


def test_kernels_keep_their_dtype(tmp_path):
  base, described = base_of('llama', jnp.bfloat16), FAMILIES['llama'][2]
  write(tmp_path / 'base', base, described)
  adapter = adapter_of('llama', base)
  place = write_adapter(tmp_path / 'adapter', adapter)
  want = merged('llama', base, adapter, lambda module: ALPHA / RANK)
  write(tmp_path / 'merged', want, described)
  have = loaded(tmp_path / 'base', place)
  check_same(have, loaded(tmp_path / 'merged'), rtol=2**-7)


def _other(module='encoder.block.0.layer.0.SelfAttention.q', down=16, up=16):
  return {module: (np.ones((RANK, down)), np.ones((up, RANK)))}


@pytest.mark.parametrize(
  ('said', 'adapter', 'message'),
  [
    ({'peft_type': 'IA3'}, {}, 'peft_type is .IA3.'),
    ({'use_dora': True}, {}, 'use_dora = True'),
    ({'bias': 'all'}, {}, "bias = 'all'"),
    ({'modules_to_save': ['lm_head']}, {}, r"modules_to_save = \['lm_head'\]"),
    ({'init_lora_weights': 'pissa'}, {}, "init_lora_weights = 'pissa'"),
    ({'layer_replication': [[0, 2]]}, {}, 'layer_replication'),
    ({'lora_alpha': None}, {}, 'lora_alpha is None, expected a number'),
    ({'lora_alpha': float('nan')}, {}, 'lora_alpha is nan, expected a number'),
    ({'alpha_pattern': {'q': 'x'}}, {}, "q is 'x', expected a number"),
    ({'alpha_pattern': ['q']}, {}, r"alpha_pattern is \['q'\], expected an"),
    ({'alpha_pattern': {'(': 3}}, {}, r"'\(', which is no regular expression"),
    ({'r': 0}, {}, 'r is 0, expected a rank'),
    ({'r': '3'}, {}, "r is '3', expected a rank"),
    ({'r': RANK + 1}, _other(), r'A \[3, 16\], but .* says r = 4'),
    ({'use_rslora': 'no'}, {}, "use_rslora is 'no', expected true or false"),
    ({}, _other('model.layers.0.q_proj'), 'has no array model.layers.0.q_proj'),
    # The end of the name alone would be right.
    ({}, _other('vision.encoder.block.0.layer.0.SelfAttention.q'), 'no array'),
    ({}, _other(down=17), r'A \[3, 17\] and B \[16, 3\], which do not fit'),
    ({}, {}, 'is empty'),
  ],
  ids=str,
)
def test_adapters_that_are_refused(said, adapter, message, tmp_path):
  write(tmp_path / 'base', base_of('t5'), FAMILIES['t5'][2])
  place = write_adapter(tmp_path / 'adapter', adapter, SAID | said)
  with pytest.raises(ValueError, match=message):
    specdec_jax.load(tmp_path / 'base', adapter=place)


@pytest.mark.parametrize(
  ('name', 'shape', 'message'),
  [
    ('q.lora_magnitude_vector', (4,), 'q.lora_magnitude_vector'),
    ('shared.lora_embedding_A', (3, 9), 'neither the A nor the B'),
    ('q.lora_B.bias', (4,), 'q.lora_B.bias'),
    ('q.lora_A.weight', (3, 16), 'q has only lora_A'),
  ],
)
def test_arrays_that_are_refused(name, shape, message, tmp_path):
  base = base_of('t5')
  write(tmp_path / 'base', base, FAMILIES['t5'][2])
  array = {f'base_model.model.{name}': np.zeros(shape, np.float32)}
  adapter = adapter_of('t5', base)
  place = write_adapter(tmp_path / 'adapter', adapter, **array)
  with pytest.raises(ValueError, match=message):
    specdec_jax.load(tmp_path / 'base', adapter=place)


def test_numbers_that_are_not_finite(tmp_path):
  base = base_of('t5')
  write(tmp_path / 'base', base, FAMILIES['t5'][2])
  adapter = adapter_of('t5', base)
  module = 'decoder.block.0.layer.2.DenseReluDense.wo'
  adapter[module][0][1, 2] = np.nan
  place = write_adapter(tmp_path / 'adapter', adapter)
  with pytest.raises(ValueError, match=r'DenseReluDense.wo.* not finite'):
    loaded(tmp_path / 'base', place)


def test_a_rank_of_nothing_is_refused(tmp_path):
  write(tmp_path / 'base', base_of('t5'), FAMILIES['t5'][2])
  module = 'encoder.block.0.layer.0.SelfAttention.q'
  empty = {module: (np.ones((0, 16)), np.ones((16, 0)))}
  place = write_adapter(tmp_path / 'adapter', empty)
  with pytest.raises(ValueError, match='have not one rank'):
    loaded(tmp_path / 'base', place)


def test_an_adapter_of_a_module_that_files_leave_out():
  """T5Gemma 2's encoder for texts, beside that for images."""
  stored = {'encoder.layers.0.mlp.up_proj.weight': 0}
  names = ('model.encoder.text_model.layers.0', 'model.encoder.layers.0')
  for name in names:
    found = lora._name_of(f'{name}.mlp.up_proj', stored)
    assert found == 'encoder.layers.0.mlp.up_proj.weight'
  # Control: of another encoder.
  assert lora._name_of('model.encoder.vision.layers.0.mlp.up_proj', stored) is (
    None
  )


def test_what_is_no_adapter_or_no_folder(tmp_path, capsys):
  write(tmp_path / 'base', base_of('t5'), FAMILIES['t5'][2])
  with pytest.raises(ValueError, match='is no adapter'):
    specdec_jax.load(tmp_path / 'base', adapter=tmp_path)
  with pytest.raises(ValueError, match='is no Hugging Face folder'):
    specdec_jax.load('demo/target.msgpack', network=t5_of(1), adapter=tmp_path)
  flags = ['decode', '--target', str(tmp_path / 'base'), '--mode', 'plain']
  assert main.main([*flags, '--adapter', str(tmp_path), 'demo/input.txt'])
  assert 'is no adapter' in capsys.readouterr().err


@pytest.mark.skipif(
  importlib.util.find_spec('peft') is None, reason='needs the package peft'
)
@pytest.mark.parametrize('rslora', [False, True])
@pytest.mark.parametrize('family', ['T5', 'Llama', 'GPT2', 'M2M100'])
@pytest.mark.filterwarnings('ignore')
def test_what_peft_merges(family, rslora, tmp_path):
  """PEFT's own `merge_and_unload`, saved and loaded."""
  import peft
  import torch
  import transformers

  settings, modules, network = {
    'T5': (
      dict(vocab_size=60, d_model=16, d_kv=8, d_ff=20, num_layers=2,
           num_heads=2),
      ['q', 'wo'],
      'T5ForConditionalGeneration',
    ),
    'Llama': (
      dict(vocab_size=60, hidden_size=24, intermediate_size=44,
           num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2),
      ['q_proj', 'v_proj', 'down_proj'],
      'LlamaForCausalLM',
    ),
    'GPT2': (
      dict(vocab_size=60, n_embd=24, n_layer=2, n_head=3, n_positions=32),
      ['c_attn', 'c_proj'],
      'GPT2LMHeadModel',
    ),
    'M2M100': (
      dict(vocab_size=60, d_model=24, encoder_layers=2, decoder_layers=2,
           encoder_attention_heads=4, decoder_attention_heads=4,
           encoder_ffn_dim=44, decoder_ffn_dim=44),
      ['q_proj', 'out_proj', 'fc1'],
      'M2M100ForConditionalGeneration',
    ),
  }[family]  # fmt: skip
  torch.manual_seed(0)
  described = getattr(transformers, f'{family}Config')(**settings)
  model = getattr(transformers, network)(described)
  model.save_pretrained(tmp_path / 'base')
  config = peft.LoraConfig(
    r=RANK,
    lora_alpha=ALPHA,
    target_modules=modules,
    use_rslora=rslora,
    init_lora_weights=False,  # B is not 0
  )
  adapted = peft.get_peft_model(model, config)
  adapted.save_pretrained(tmp_path / 'adapter')
  adapted.merge_and_unload().save_pretrained(tmp_path / 'merged')
  have = loaded(tmp_path / 'base', tmp_path / 'adapter')
  check_same(have, loaded(tmp_path / 'merged'))
  before = huggingface.load_huggingface(tmp_path / 'base')[1]
  with pytest.raises(AssertionError):
    check_same(have, before)
