"""Hugging Face folders and adapters: what is read, refused, written."""

import contextlib
import dataclasses
import itertools
import json
import sys
import warnings

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import folders
import small_vocabulary
import specdec_jax
from folders import FOLDERS, LLAMA_3_1, WRONG, write_folder
from specdec_jax import checkpoints
from specdec_jax.checkpoints import config_json, families, huggingface
from specdec_jax.models.base import param_shapes
from specdec_jax.models.families import network_of
from toy_families import SUPPORT, assert_same, make

pytestmark = pytest.mark.filterwarnings('ignore:.*arrays are for images')
all_folders = pytest.mark.parametrize('name', FOLDERS)
read = folders.read


# What is read.

_CROSS = 'decoder.block.0.layer.1.EncDecAttention'
# Family, our array, the one in the file, and what is done to that.
# M is 24 and D is 8 in the GPT-2 and the NLLB. tests/parity has all arrays.
PINS = """
t5 decoder/layers_1/encoder_decoder_attention/value/kernel \
  decoder.block.1.layer.1.EncDecAttention.v x.T
gpt2 decoder/layers_1/self_attention/query/kernel \
  h.1.attn.c_attn x[:,:M]/D**.5
gpt2 decoder/layers_1/self_attention/value/kernel h.1.attn.c_attn x[:,2*M:]
gpt2 decoder/layers_0/mlp/wo/kernel h.0.mlp.c_proj x
gpt2 decoder/decoder_norm/scale ln_f x*M**.5
m2m_100 encoder/layers_1/attention/query/kernel \
  encoder.layers.1.self_attn.q_proj x.T/D**.5
m2m_100 decoder/layers_0/mlp/wi/kernel decoder.layers.0.fc1 x.T
bart token_embedder/embedding decoder.embed_tokens x
bart encoder/position_embedder/embedding encoder.embed_positions x
bart decoder/layers_1/post_mlp_layer_norm/scale \
  decoder.layers.1.final_layer_norm x
marian token_embedder/embedding decoder.embed_tokens x
marian encoder/token_embedder/embedding encoder.embed_tokens x
qwen3 decoder/layers_2/pre_mlp_layer_norm/scale \
  layers.2.post_attention_layernorm x
qwen3 decoder/layers_0/self_attention/query_norm/scale \
  layers.0.self_attn.q_norm x
gemma3 decoder/layers_2/pre_mlp_layer_norm/scale \
  layers.2.pre_feedforward_layernorm x
t5gemma decoder/layers_0/encoder_decoder_attention/key/kernel \
  decoder.layers.0.cross_attn.k_proj x.T
"""


def pins_of(name):
  """Our array, the name in the file, and the function between both."""
  prefix = folders.PREFIXES.get(name, '')
  for line in PINS.strip().splitlines():
    family, ours, theirs, text = line.split()
    if family == name:
      function = eval(f'lambda x, M=24, D=8: {text}')
      yield ours, f'{prefix}{theirs}.weight', function


@all_folders
def test_a_folder(name, tmp_path):
  arrays = write_folder(tmp_path, name)
  described, config = FOLDERS[name]
  with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter('always')
    found, params = read(tmp_path)
  assert found == config
  messages = ' '.join(str(warning.message) for warning in told)
  assert ('2 arrays are for images' in messages) == (name in folders.IMAGES)
  network = network_of(config)
  checkpoints.check_params(params, param_shapes(network))
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  for ours, theirs, change in pins_of(name):
    want = change(arrays[theirs])
    np.testing.assert_allclose(flat[ours], want, rtol=1e-6, err_msg=ours)
  loaded = specdec_jax.load(tmp_path)
  assert loaded.network == network
  ends = (described.get('decoder', {}) | described).get('eos_token_id', [])
  assert [*loaded.stop_ids] == (ends if isinstance(ends, list) else [ends])
  placed = read(tmp_path, jnp.bfloat16, jax.devices()[0])[1]
  assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(placed))
  assert_same(placed, params, jnp.bfloat16)


def rename(old, new):
  def change(arrays):
    for name in list(arrays):
      arrays[name.replace(old, new, 1)] = arrays.pop(name)

  return change


def copy(old, *new):
  def change(arrays):
    for name in new:
      arrays[name] = arrays[old].copy()

  return change


def add(name, *shape):
  return lambda arrays: arrays.update({name: np.ones(shape, np.float32)})


def newer_names(arrays):
  """transformers 5 says `text_model`, and a file may have both tables."""
  for name in ('layers', 'norm', 'embed_tokens.w'):
    rename(f'encoder.{name}', f'encoder.text_model.{name}')(arrays)
  table = 'model.encoder.text_model.embed_tokens.weight'
  names = 'model.decoder.embed_tokens.weight', 'lm_head.out_proj.weight'
  copy(table, *names)(arrays)


@pytest.mark.parametrize(
  ('name', 'change'),
  [
    ('t5', rename('shared.weight', 'decoder.embed_tokens.weight')),
    ('t5', add(f'{_CROSS}.relative_attention_bias.weight', 32, 3)),
    ('t5 1.0', copy('shared.weight', 'lm_head.weight')),
    ('gpt2', rename('transformer.', '')),
    ('gpt2', add('transformer.h.1.attn.bias', 1, 1, 160, 160)),
    ('m2m_100', add('model.encoder.embed_positions.weights', 9, 24)),
    ('llama', add('model.layers.0.self_attn.rotary_emb.inv_freq', 5)),
    ('t5gemma2', newer_names),
  ],
)
def test_other_names_of_files_are_known(name, change, tmp_path):
  write_folder(tmp_path / 'a', name)
  want = read(tmp_path / 'a')
  write_folder(tmp_path / 'b', name, change)
  have = read(tmp_path / 'b')
  assert have[0] == want[0]
  assert_same(have[1], want[1])


def test_a_head_of_its_own_beside_a_tied_config(tmp_path):
  """It is the head, as in transformers; T5's rescales what it reads."""
  cases = ('qwen3', (60, 24), 1.0), ('t5 1.0', (61, 20), 20**-0.5)
  for name, shape, value in cases:
    write_folder(tmp_path, name, add('lm_head.weight', *shape))
    config, params = read(tmp_path)
    assert not config.logits_via_embedding
    kernel = params['decoder']['logits_dense']['kernel']
    np.testing.assert_allclose(kernel, value, rtol=1e-6)


# What config.json says.

_LOCAL, _FULL = 'sliding_attention', 'full_attention'
_ROPES = {
  _FULL: {'rope_type': 'linear', 'factor': 8.0, 'rope_theta': 1e6},
  _LOCAL: {'rope_type': 'default', 'rope_theta': 1e4},
}
# As transformers 5 writes RoPE, for all layers or for each kind.
_FOR_ALL = {'rope_scaling': None, 'rope_theta': None}
_FOR_ALL |= {'rope_parameters': LLAMA_3_1 | {'rope_theta': 5e5}}
_FOR_EACH = {'rope_scaling': None, 'rope_parameters': _ROPES}
_FOR_EACH |= {'layer_types': [_LOCAL, _LOCAL, _FULL, _LOCAL]}
_FOR_EACH |= {'sliding_window_pattern': None}


@pytest.mark.parametrize(
  ('name', 'described', 'changes'),
  [
    ('t5', {'num_decoder_layers': None}, {'num_decoder_layers': 1}),
    ('t5', {'is_gated_act': False}, {'mlp_activations': ('gelu',)}),
    ('t5', {'dense_act_fn': 'swish'}, {'mlp_activations': ('silu', 'linear')}),
    ('gpt2', {'n_inner': None}, {'mlp_dim': 96}),
    ('m2m_100', {'decoder_start_token_id': [5]}, {'start_id': 5}),
    ('llama', _FOR_ALL, {}),
    ('gemma3_text', _FOR_EACH, {}),
    ('llama', {'num_key_value_heads': None}, {'num_kv_heads': 6}),
    # Null is "off" where it is a cap.
    ('gemma2', {'attn_logit_softcapping': None}, {'score_softcap': 0.0}),
  ],
)
def test_fields_that_decide(name, described, changes):
  said, config = FOLDERS[name]
  tied = getattr(config, 'logits_via_embedding', True)
  found = config_json.read_config(said | described, 'config.json', tied)
  assert found == dataclasses.replace(config, **changes)


def test_sizes_that_transformers_leaves_out():
  """T5Gemma 2B-2B has its defaults, which some versions do not write."""
  stack = {'model_type': 't5_gemma_module'}
  described = {'model_type': 't5gemma', 'encoder': stack, 'decoder': stack}
  found = config_json.read_config(described, 'config.json')
  wanted = dict(vocab_size=256_000, emb_dim=2304, num_layers=26, num_heads=8)
  wanted |= dict(num_kv_heads=4, window=4096, layer_kinds=('local', 'global'))
  for stack in (found.encoder, found.decoder):
    assert dataclasses.replace(stack, **wanted) == stack


# What others write into a folder, and no model reads.
FOREIGN = {
  'auto_map': {'AutoModel': 'modeling.Model'},
  'bad_words_ids': [[3]],
  'forced_bos_token_id': 3,
  'pruned_heads': {},
  'quantization_config': None,
  'transformers.js_config': {'dtype': 'q4'},
  'unk_token_id': 0,
}
# What changes the mathematics, or may.
DECIDES = {
  'add_cross_attention': True,
  'pruned_heads': {'0': [1]},
  'quantization_config': {'load_in_8bit': True},
  'tie_word_embeddings': 'no',
}


@all_folders
def test_fields_of_all_families(name):
  described = FOLDERS[name][0]
  want = config_json.read_config(described, 'config.json')
  assert config_json.read_config(FOREIGN | described, 'config.json') == want
  for field, value in DECIDES.items():
    with pytest.raises(ValueError, match=f'config.json: {field}'):
      config_json.read_config(described | {field: value}, 'config.json')


def inside(name, part, **fields):
  """config.json's entries with fields of a part changed."""
  return {part: FOLDERS[name][0][part] | fields}


UNKNOWN = 'led bigbird_pegasus prophetnet fsmt blenderbot'.split()
_CROSSED = inside('t5gemma', 'decoder', cross_attention_hidden_size=24)
_SCALED = {'rope_scaling': LLAMA_3_1 | {'partial_rotary_factor': 0.5}}
# Folder, what is changed in config.json, and what the message names if it is
# not that field.
CONFIGS_REFUSED = [
  *(('t5', {'model_type': name}) for name in UNKNOWN),
  ('t5', {'layer_norm_epsilon': 1e-5}),
  ('t5', {'feed_forward_proj': 'gated-gleu'}, 'gleu.* known: gated-gelu'),
  ('gpt2', {'n_embd': 25}, 'n_embd: .* n_head = 3, got 25'),
  ('gpt2', {'activation_function': 'gelu_fast'}),
  ('m2m_100', {'decoder_ffn_dim': 7}, 'decoder_ffn_dim: expected 40.* got 7'),
  ('m2m_100', {'tie_word_embeddings': False}),
  ('bart', {'decoder_attention_heads': 4}, 'heads: expected 3.* got 4'),
  ('bart', {'max_position_embeddings': None}, 'max_position_embeddings'),
  ('marian', {'decoder_vocab_size': 0}, 'decoder_vocab_size'),
  ('llama', {'num_attention_heads': 5}, 'num_heads'),
  ('llama', {'rope_scaling': {'type': 'yarn'}}, 'rope_type'),
  ('llama', {'rope_scaling': {'type': 'linear'}}, "'linear'.* factor"),
  ('llama', _SCALED, 'llama3.*partial_rotary_factor'),
  ('qwen3', {'layer_types': [_FULL]}),
  ('qwen3', {'layer_types': [_LOCAL] * 3, 'sliding_window': 9}, 'window'),
  ('gemma3_text', {'use_bidirectional_attention': True}),
  ('gemma3_text', {'sliding_window_pattern': 0}),
  ('gemma3_text', {'rope_parameters': {'factor': 2}}),
  ('gemma2', {'sliding_window_size': 8}),
  ('t5gemma', {'decoder': None}),
  ('t5gemma', inside('t5gemma', 'decoder', bits=2), 'json: decoder: bits'),
  ('t5gemma', _CROSSED, 'decoder.cross_attention_hidden_size: .* 20, got 24'),
  ('t5gemma', inside('t5gemma', 'decoder', vocab_size=61), 'vocab_size'),
  ('t5gemma2', {'tie_word_embeddings': False}),
]


@pytest.mark.parametrize('case', CONFIGS_REFUSED, ids=str)
def test_configurations_that_are_refused(case):
  name, described, *words = case
  words = words or [f'config.json: {next(iter(described))}']
  with pytest.raises(ValueError, match=words[0]):
    config_json.read_config(FOLDERS[name][0] | described, 'config.json')


@all_folders
def test_values_of_another_kind(name):
  """A field is refused in a sentence, or does not matter."""
  described = FOLDERS[name][0]
  inner = {n: x for n, x in described.items() if isinstance(x, dict)}
  for part, fields in ({'': described} | inner).items():
    for field, value in itertools.product(fields, WRONG):
      changed = fields | {field: value}
      with contextlib.suppress(ValueError):
        whole = described | {part: changed} if part else changed
        config_json.read_config(whole, 'config.json')
  with pytest.raises(ValueError, match='config.json: model_type'):
    config_json.read_config(described | {'model_type': None}, 'config.json')


def drop(name):
  return lambda arrays: arrays.pop(name)


def spoil(arrays):
  add('encoder.block.9.extra.weight', 3)(arrays)
  drop('decoder.final_layer_norm.weight')(arrays)
  add('decoder.block.1.layer.1.EncDecAttention.k.weight', 20, 12)(arrays)


def quantise(arrays):
  arrays['shared.weight'] = arrays['shared.weight'].astype(np.int8)


SPOILT = (
  'missing: decoder.final_layer_norm.weight',
  'unknown: encoder.block.9.extra.weight',
  'EncDecAttention.k.weight is [20, 12], expected [12, 20]',
)
TABLE = 'model.decoder.embed_tokens.weight'


@pytest.mark.parametrize(
  ('name', 'change', 'words'),
  [
    ('t5', spoil, SPOILT),
    ('t5', quantise, ['shared.weight', 'I8']),
    ('t5', add('encoder.embed_tokens.weight', 61, 20), ['[61, 20] and shared']),
    ('gpt2', drop('transformer.wte.weight'), ['missing: wte.weight']),
    ('gpt2', add('wte.weight', 2), ['wte.weight in', 'twice']),
    ('t5gemma2', add(TABLE, 60, 24), ['encoder.embed_tokens.weight [60, 24]']),
  ],
)
def test_arrays_that_are_refused(name, change, words, tmp_path):
  write_folder(tmp_path, name, change)
  with pytest.raises(ValueError) as caught:
    read(tmp_path)
  for word in (str(tmp_path), *words):
    assert word in str(caught.value)


def test_broken_folders(tmp_path):
  with pytest.raises(ValueError, match='config.json'):
    read(tmp_path)
  write_folder(tmp_path, 't5')
  path = tmp_path / huggingface.WEIGHTS
  whole = path.read_bytes()
  for size in (0, 5, len(whole) // 2, len(whole) - 1):
    path.write_bytes(whole[:size])
    with pytest.raises(ValueError, match='model.safetensors.* cut short'):
      read(tmp_path)
  path.rename(tmp_path / 'pytorch_model.bin')
  with pytest.raises(ValueError, match=r'pytorch_model\.bin'):
    read(tmp_path)


def test_a_package_is_missing(tmp_path, monkeypatch):
  write_folder(tmp_path, 't5')
  for name in ('safetensors', 'huggingface_hub'):
    monkeypatch.setitem(sys.modules, name, None)
  for path, extra in ((tmp_path, 'huggingface'), ('a/b', 'hub')):
    with pytest.raises(ValueError, match=rf'specdec_jax\[{extra}\]'):
      checkpoints.load(path)


# Ids.


def test_special_ids(tmp_path):
  """Those of generation_config.json go before config.json's."""
  described = {'eos_token_id': 1, 'pad_token_id': 0}

  def special_ids():
    return config_json.read_facts(tmp_path, described, folders.UMT5).ids

  assert special_ids() == (0, (1,), 0)
  said = {'decoder_start_token_id': [0], 'eos_token_id': [1, 7]}
  file = tmp_path / 'generation_config.json'
  file.write_text(json.dumps(said | {'pad_token_id': None}))
  assert special_ids() == (0, (1, 7), 0)
  file.write_text(json.dumps({'decoder_start_token_id': 2}))
  with pytest.raises(ValueError, match='decoder_start_token_id: .* 0.* got 2'):
    special_ids()


# What is written.


def test_several_files(tmp_path):
  """As transformers writes large models; a save then replaces them."""
  from safetensors import numpy as safetensors_numpy

  arrays = write_folder(tmp_path, 't5')
  want = read(tmp_path)[1]
  (tmp_path / huggingface.WEIGHTS).unlink()
  names = [f'model-0000{i}-of-00002.safetensors' for i in (1, 2)]
  stored_in = {name: names[i % 2] for i, name in enumerate(arrays)}
  for file_name in names:
    part = {n: arrays[n] for n in arrays if stored_in[n] == file_name}
    safetensors_numpy.save_file(part, tmp_path / file_name)
  index = json.dumps({'weight_map': stored_in})
  (tmp_path / huggingface.INDEX).write_text(index)
  assert_same(read(tmp_path)[1], want)
  # The same array in both of them.
  second = tmp_path / names[1]
  doubled = safetensors_numpy.load_file(second)
  name = next(iter(arrays))
  safetensors_numpy.save_file(doubled | {name: np.ones(2)}, second)
  with pytest.raises(ValueError, match=f'{name} in .* and as {name} in'):
    read(tmp_path)
  second.unlink()
  with pytest.raises(ValueError, match=f'{second.name}.* is missing'):
    read(tmp_path)
  changed = make(folders.T5)[1]
  huggingface.save_huggingface(tmp_path, folders.T5, changed)
  assert not list(tmp_path.glob('model-*')) + list(tmp_path.glob('*.index*'))
  assert_same(read(tmp_path)[1], changed)


def test_the_configuration_is_written_last(tmp_path, monkeypatch):
  write_folder(tmp_path, 't5')

  def full_disk(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr('specdec_jax.files.os.fsync', full_disk)
  with pytest.raises(OSError, match='No space left'):
    huggingface.save_huggingface(tmp_path, folders.T5, make(folders.T5)[1])
  with pytest.raises(ValueError, match='config.json'):
    read(tmp_path)


@pytest.mark.parametrize('layers', [0, 3])
@pytest.mark.parametrize(
  'name', ['umt5', 'm2m_100', 'bart', 'mbart', 'pegasus', 'marian']
)
def test_what_is_written_is_read(name, layers, tmp_path):
  """Also a decoder alone, which reads its target's encoder."""
  config = dataclasses.replace(FOLDERS[name][1], num_encoder_layers=layers)
  params, dtype = make(config)[1], 'float32'
  ids = config_json.SpecialIds(0, (2, 5), 1)
  if name == 'umt5':
    dtype = 'bfloat16'
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
  else:
    ids = config_json.SpecialIds(config.start_id, (2,), config.pad_id)
  folder, about = tmp_path / 'new' / 'folder', {'target': 'x'}
  huggingface.save_huggingface(folder, config, params, ids, about)
  have, loaded = read(folder)
  assert have == config and folders.special_ids(folder) == ids
  described = json.loads((folder / 'config.json').read_text())
  assert (described['model_type'], described['torch_dtype']) == (name, dtype)
  if name == 'umt5':  # every bit; a BART's queries are scaled
    assert_same(loaded, params)
    return
  pairs = zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True)
  for ours, theirs in pairs:
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


# Adapters that are merged when a model is loaded.

RANK, ALPHA = 3, 7
MERGED = {
  name
  for row in SUPPORT.values()
  for name in row['model_type']
  if 'lora' in row['features']
}


def write(folder, family, arrays):
  folders.write_arrays(folder, arrays, FOLDERS[family][0])


def adapter_of(family, base):
  """Module, as PEFT calls it -> A [r, in] and B [out, r]; some of each kind."""
  described, config = FOLDERS[family]
  rows = families.table(families.FAMILIES[described['model_type']], config)
  prefix, rng = folders.PREFIXES.get(family, ''), np.random.default_rng(1)
  kernels = [
    prefix + row.name.removesuffix('.weight')
    for name, row in rows.items()
    if name.endswith('/kernel') and 'logits' not in name
  ]
  found = {}
  for module in [*dict.fromkeys(kernels)][::2]:
    out, into = base[f'{module}.weight'].shape[:: -1 if family == 'gpt2' else 1]
    halves = rng.standard_normal((RANK, into)), rng.standard_normal((out, RANK))
    found[module] = tuple(half.astype(np.float32) for half in halves)
  return found


SAID = {'peft_type': 'LORA', 'r': RANK, 'lora_alpha': ALPHA, 'bias': 'none'}
SAID |= {'fan_in_fan_out': False, 'init_lora_weights': True, 'use_dora': False}
SAID |= {'modules_to_save': None, 'target_modules': ['q'], 'some_new_field': []}


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


def merged(family, base, adapter, scale):
  """The arrays of a file after merging, in float64."""
  found = dict(base)
  for module, (down, up) in adapter.items():
    name = f'{module}.weight'
    change = scale * np.einsum('or,ri->oi', up, down, dtype=float)
    kernel = base[name] + (change.T if family == 'gpt2' else change)
    found[name] = kernel.astype(base[name].dtype)
  return found


def loaded(folder, adapter=None):
  return specdec_jax.load(folder, adapter=adapter).params


def check_same(have, want, rtol):
  def compare(leaf, other):
    assert leaf.dtype == other.dtype
    leaf, other = (np.asarray(x, np.float32) for x in (leaf, other))
    np.testing.assert_allclose(leaf, other, rtol=rtol, atol=rtol)

  jax.tree.map(compare, have, want)


RS = {'use_rslora': True, 'rank_pattern': {'wo': RANK}}


@pytest.mark.parametrize(
  ('family', 'dtype', 'said', 'divided'),
  [
    ('t5', np.float32, RS, RANK**0.5),
    ('llama', jnp.bfloat16, {}, RANK),
    *((name, np.float32, {}, RANK) for name in sorted(MERGED)),
  ],
)
def test_an_adapter_is_merged(family, dtype, said, divided, tmp_path):
  base = folders.arrays_of(family, dtype=dtype)
  write(tmp_path / 'base', family, base)
  adapter = adapter_of(family, base)
  place = write_adapter(tmp_path / 'adapter', adapter, SAID | said)
  want = merged(family, base, adapter, ALPHA / divided)
  write(tmp_path / 'merged', family, want)
  have = loaded(tmp_path / 'base', place)
  rtol = 1e-5 if dtype == np.float32 else 2**-7
  check_same(have, loaded(tmp_path / 'merged'), rtol)
  # Negative control: it is not what it was.
  with pytest.raises(AssertionError):
    check_same(have, loaded(tmp_path / 'base'), rtol)


QUERY = 'encoder.block.0.layer.0.SelfAttention.q'


def _other(module=QUERY, down=20, up=12, rank=RANK, value=1.0):
  return {module: (np.full((rank, down), value), np.ones((up, rank)))}


@pytest.mark.parametrize(
  ('said', 'adapter', 'words'),
  [
    ({'peft_type': 'IA3'}, {}, 'peft_type'),
    ({'bias': 'all'}, {}, 'bias'),
    ({'init_lora_weights': 'pissa'}, {}, 'init_lora_weights'),
    ({'alpha_pattern': {'q': 3}}, {}, 'alpha_pattern'),
    ({'r': 0}, {}, 'r: .* 0'),
    ({'r': RANK + 1}, _other(), r'A \[4, .*\[3, 20\]'),
    # The end of the name alone would be right.
    ({}, _other(f'vision.{QUERY}'), 'vision'),
    ({}, _other(down=17), r'kernel \[12, 20\], got \[\[3, 17\], \[12, 3\]\]'),
    ({}, _other(rank=0), r'kernel \[12, 20\], got \[\[0, 20\], \[12, 0\]\]'),
    ({}, _other(value=np.nan), 'SelfAttention.q.* not finite'),
    ({}, {}, 'nothing'),
    ({}, {'base_model.model.q.lora_magnitude_vector': np.zeros(4)}, 'q.lora_m'),
    ({}, {'base_model.model.q.lora_A.weight': np.ones((3, 4))}, 'q: .*lora_A'),
  ],
  ids=str,
)
def test_adapters_that_are_refused(said, adapter, words, tmp_path):
  write(tmp_path / 'base', 't5', folders.arrays_of('t5'))
  arrays = {n: a for n, a in adapter.items() if n.startswith('base_model')}
  adapter = {n: a for n, a in adapter.items() if n not in arrays}
  place = write_adapter(tmp_path / 'adapter', adapter, SAID | said, **arrays)
  with pytest.raises(ValueError, match=words):
    loaded(tmp_path / 'base', place)


def test_what_is_no_adapter_or_no_folder(tmp_path):
  write(tmp_path / 'base', 't5', folders.arrays_of('t5'))
  with pytest.raises(ValueError, match=f'adapter {tmp_path}'):
    specdec_jax.load(tmp_path / 'base', adapter=tmp_path)
  demo, network = 'demo/target.msgpack', small_vocabulary.network(1)
  with pytest.raises(ValueError, match=demo):
    specdec_jax.load(demo, network=network, adapter=tmp_path)
