"""Folders of Llama, Qwen and Gemma: what is read, what is refused."""

import dataclasses
import importlib.util
import json
import shutil
import warnings

import jax
import numpy as np
import pytest

import huggingface_memory_test
import specdec_jax
import tokenizer_bpe_test
from causal_lm_test import GEMMA2, GEMMA3, LLAMA, QWEN2, QWEN3, shapes
from specdec_jax import checkpoints
from specdec_jax.checkpoints import causal_config, causal_names, huggingface
from specdec_jax.checkpoints.convert import ConvertConfig, convert
from specdec_jax.models.causal_lm import CausalLM
from specdec_jax.models.rope import Rope
from specdec_jax.text.tokenizer_bpe import BpeTokenizer

pytestmark = [
  pytest.mark.skipif(
    importlib.util.find_spec('safetensors') is None,
    reason="needs safetensors: pip install 'specdec_jax[huggingface]'",
  ),
  pytest.mark.filterwarnings('ignore:.*arrays are for images'),
]
_SIZES = {
  'vocab_size': 60,
  'hidden_size': 24,
  'num_attention_heads': 6,
  'num_key_value_heads': 2,
  'num_hidden_layers': 3,
  'intermediate_size': 40,
  'head_dim': 10,
  'rms_norm_eps': 1e-5,
  'torch_dtype': 'float32',
  'eos_token_id': 1,
}
_LLAMA_3_1 = {
  'rope_type': 'llama3',
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 24,
}
_GEMMA = {'sliding_window': 9, 'query_pre_attn_scalar': 7}
# Name: config.json as the folders of the hub have it, and the configuration.
DESCRIBED = {
  'llama': (
    _SIZES
    | {
      'model_type': 'llama',
      'rope_theta': 5e5,
      'rope_scaling': _LLAMA_3_1,
      'mlp_bias': False,
      'pretraining_tp': 1,
    },
    LLAMA,
  ),
  'qwen2': (
    _SIZES
    | {
      'model_type': 'qwen2',
      'rope_theta': 1e6,
      'num_key_value_heads': 6,
      'use_sliding_window': False,
      'sliding_window': 4096,
      'max_window_layers': 28,
    },
    QWEN2,
  ),
  'qwen3': (
    _SIZES
    | {
      'model_type': 'qwen3',
      'rope_theta': 1e6,
      'rope_scaling': None,
      'tie_word_embeddings': True,
      'use_sliding_window': False,
    },
    QWEN3,
  ),
  'gemma2': (
    _SIZES
    | _GEMMA
    | {
      'model_type': 'gemma2',
      'hidden_act': 'gelu_pytorch_tanh',
      'attn_logit_softcapping': 5.0,
      'final_logit_softcapping': 3.0,
      'cache_implementation': 'hybrid',
      'sliding_window_size': 9,
    },
    GEMMA2,
  ),
  'gemma3_text': (
    _SIZES
    | _GEMMA
    | {
      'model_type': 'gemma3_text',
      'num_key_value_heads': 1,
      'num_hidden_layers': 4,
      'sliding_window_pattern': 3,
      'rope_scaling': {'factor': 8.0, 'rope_type': 'linear'},
    },
    GEMMA3,
  ),
}
DESCRIBED['gemma3'] = (
  {
    'model_type': 'gemma3',
    'text_config': DESCRIBED['gemma3_text'][0],
    'vision_config': {'model_type': 'siglip_vision_model'},
    'boi_token_index': 50,
    'mm_tokens_per_image': 4,
    'eos_token_id': [1, 6],
  },
  GEMMA3,
)


def no_change(arrays):
  del arrays


def write_folder(folder, kind, change=no_change, config=None, **described):
  """A folder as transformers writes it; returns its arrays."""
  from safetensors import numpy as safetensors_numpy

  said, own = DESCRIBED[kind]
  config = config or own
  rng = np.random.default_rng(0)
  prefix = 'language_model.model.' if kind == 'gemma3' else 'model.'
  arrays = {}
  for row in causal_names.table(config).values():
    name = row.name if row.name == 'lm_head.weight' else prefix + row.name
    values = rng.standard_normal(row.stored_shape).astype(np.float32)
    arrays[name] = values
  if kind == 'gemma3':
    arrays['vision_tower.vision_model.post_layernorm.bias'] = np.ones(3)
    arrays['multi_modal_projector.mm_input_projection_weight'] = np.ones(3)
  change(arrays)
  folder.mkdir(exist_ok=True)
  safetensors_numpy.save_file(arrays, folder / 'model.safetensors')
  (folder / 'config.json').write_text(json.dumps(said | described))
  return arrays


@pytest.mark.parametrize('kind', DESCRIBED)
def test_what_is_for_images_is_said(kind, tmp_path):
  write_folder(tmp_path, kind)
  with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter('always')
    specdec_jax.load(tmp_path)
  words = [str(one.message) for one in told]
  assert any('2 arrays are for images' in w for w in words) == (
    kind == 'gemma3'
  )


@pytest.mark.parametrize('kind', DESCRIBED)
def test_folder(kind, tmp_path):
  arrays = write_folder(tmp_path, kind)
  found, params = huggingface.load_huggingface(tmp_path)
  config = DESCRIBED[kind][1]
  assert found == config
  checkpoints.check_params(params, shapes(config))
  layer = params['decoder']['layers_1']
  prefix = 'language_model.model' if kind == 'gemma3' else 'model'
  theirs = f'{prefix}.layers.1'
  same = np.testing.assert_array_equal
  kernel = arrays[f'{theirs}.self_attn.k_proj.weight']
  same(layer['self_attention']['key']['kernel'], kernel.T)
  same(layer['mlp']['wi_1']['kernel'], arrays[f'{theirs}.mlp.up_proj.weight'].T)
  norms = {'pre_mlp': 'post_attention'}
  if config.post_norms:
    norms = {'pre_mlp': 'pre_feedforward', 'post_mlp': 'post_feedforward'}
    norms |= {'post_self_attention': 'post_attention'}
  for ours, name in norms.items():
    scale = layer[f'{ours}_layer_norm']['scale']
    same(scale, arrays[f'{theirs}.{name}_layernorm.weight'])
  loaded = specdec_jax.load(tmp_path)
  assert loaded.network == CausalLM(config)
  assert loaded.stop_ids == ((1, 6) if kind == 'gemma3' else (1,))
  same(loaded.params['decoder']['decoder_norm']['scale'],
       arrays[f'{prefix}.norm.weight'])  # fmt: skip


def test_another_network_is_refused(tmp_path):
  write_folder(tmp_path, 'qwen3')
  other = CausalLM(dataclasses.replace(QWEN3, num_heads=3, num_kv_heads=1))
  with pytest.raises(ValueError, match=r'\(num_attention_heads\) is 6, exp'):
    checkpoints.load(tmp_path, other)


def test_it_is_written_for_t5x_and_not_for_transformers(tmp_path):
  write_folder(tmp_path / 'a', 'gemma3_text')
  written = tmp_path / 'b.msgpack'
  given = {'checkpoint_path': str(tmp_path / 'a')}
  convert(ConvertConfig(**given, output=str(written), format='t5x'))
  want = checkpoints.load(tmp_path / 'a')
  have = checkpoints.load(written, CausalLM(GEMMA3))
  jax.tree.map(np.testing.assert_array_equal, have, want)
  with pytest.raises(ValueError, match='is not a T5; only a T5 is written'):
    convert(
      ConvertConfig(**given, output=str(tmp_path / 'c'), format='safetensors')
    )


def test_rope_as_transformers_5_writes_it(tmp_path):
  """`rope_parameters`, for all layers or for each kind."""
  write_folder(
    tmp_path / 'a',
    'llama',
    rope_scaling=None,
    rope_theta=None,
    rope_parameters=_LLAMA_3_1 | {'rope_theta': 5e5},
  )
  assert huggingface.load_huggingface(tmp_path / 'a')[0] == LLAMA
  kinds = ['sliding_attention'] * 2 + ['full_attention', 'sliding_attention']
  write_folder(
    tmp_path / 'b',
    'gemma3_text',
    rope_scaling=None,
    sliding_window_pattern=None,
    _sliding_window_pattern=6,
    layer_types=kinds,
    rope_parameters={
      'full_attention': {
        'rope_type': 'linear', 'factor': 8.0, 'rope_theta': 1e6
      },
      'sliding_attention': {'rope_type': 'default', 'rope_theta': 1e4},
    },
  )  # fmt: skip
  assert huggingface.load_huggingface(tmp_path / 'b')[0] == GEMMA3


def test_windows_of_qwen(tmp_path):
  windows = dict(layer_kinds=('global', 'local', 'local'), window=9)
  config = dataclasses.replace(QWEN2, **windows)
  write_folder(
    tmp_path,
    'qwen2',
    config=config,
    use_sliding_window=True,
    sliding_window=9,
    max_window_layers=1,
  )
  assert huggingface.load_huggingface(tmp_path)[0] == config


def drop(name):
  return lambda arrays: arrays.pop(name)


def add(name, *shape):
  return lambda arrays: arrays.update({name: np.ones(shape, np.float32)})


@pytest.mark.parametrize(
  ('kind', 'change', 'described', 'words'),
  [
    ('llama', drop('model.norm.weight'), {}, 'missing: norm.weight'),
    ('llama', drop('lm_head.weight'), {}, 'missing: lm_head.weight'),
    ('llama', add('model.extra', 2), {}, 'unknown: extra'),
    ('llama', add('norm.weight', 24), {}, 'norm.weight twice'),
    ('qwen3', add('lm_head.weight', 60, 24), {}, 'is not the embedding'),
    ('llama', no_change, {'num_attention_heads': 5}, 'multiple of num_kv'),
    ('llama', no_change, {'num_hidden_layers': None}, 'num_hidden_layers is N'),
    ('llama', no_change, {'attention_bias': True}, 'attention_bias is True'),
    ('llama', no_change, {'mlp_bias': True}, 'mlp_bias is True'),
    ('llama', no_change, {'hidden_act': 'gelu'}, "hidden_act is 'gelu'"),
    ('llama', no_change, {'rms_norm_eps': '1'}, 'norm_epsilon: .* finite num'),
    ('llama', no_change, {'logit_scale': 2.0}, 'logit_scale = 2.0: the net'),
    ('llama', no_change, {'final_logit_softcapping': 2.0}, 'does not know'),
    ('llama', no_change, {'rope_scaling': {'type': 'yarn'}}, "type is 'yarn'"),
    (
      'llama',
      no_change,
      {'rope_scaling': {'rope_type': 'linear'}},
      "type 'linear' lacks factor",
    ),
    (
      'llama',
      no_change,
      {'rope_scaling': _LLAMA_3_1 | {'partial_rotary_factor': 0.5}},
      "type 'llama3' has partial_rotary_factor",
    ),
    ('llama', no_change, {'rope_scaling': 8}, 'rope_scaling is 8, expected an'),
    ('llama', no_change, {'partial_rotary_factor': 0.5}, 'partial_rotary_fact'),
    ('llama', no_change, {'quantization_config': {}}, 'quantization_config = '),
    ('qwen3', no_change, {'layer_types': ['full_attention']}, 'expected 3 nam'),
    (
      'qwen3',
      no_change,
      {'layer_types': ['chunked_attention'] * 3},
      "layer_types is 'chunked_attention'",
    ),
    (
      'qwen3',
      no_change,
      {'layer_types': ['sliding_attention'] * 3, 'sliding_window': 9},
      'window: expected a whole number, got None',
    ),
    ('qwen2', no_change, {'max_window_layers': 'x'}, "layers is 'x'"),
    (
      'gemma3_text',
      no_change,
      {'use_bidirectional_attention': True},
      'use_bidirectional_attention is True',
    ),
    (
      'gemma3_text',
      no_change,
      {'attn_logit_softcapping': 50.0},
      'attn_logit_softcapping = 50.0',
    ),
    ('gemma3_text', no_change, {'sliding_window_pattern': 0}, 'pattern is 0'),
    (
      'gemma3_text',
      no_change,
      {'rope_parameters': {'rope_type': 'default'}},
      'expected an entry for each of full_attention',
    ),
    ('gemma2', no_change, {'sliding_window': None}, 'window_size is 9; the'),
    ('gemma2', no_change, {'sliding_window_size': 8}, 'window_size is 8; the'),
    ('gemma3', no_change, {'text_config': 1}, 'text_config is 1, expected an'),
    ('gemma3', no_change, {'adapter': 1}, 'adapter = 1: the network'),
  ],
)  # fmt: skip
def test_folders_that_are_none(kind, change, described, words, tmp_path):
  write_folder(tmp_path, kind, change, **described)
  with pytest.raises(ValueError, match=words):
    huggingface.load_huggingface(tmp_path)


def test_null_is_what_transformers_takes_it_for(tmp_path):
  """Off where it is a cap, the number of heads where it is that of keys."""
  config = dataclasses.replace(GEMMA2, score_softcap=0.0)
  write_folder(tmp_path, 'gemma2', attn_logit_softcapping=None)
  assert huggingface.load_huggingface(tmp_path)[0] == config
  said = {**DESCRIBED['llama'][0], 'num_key_value_heads': None}
  said.pop('head_dim')
  found = causal_config.read_config(said, 'config.json')
  assert (found.num_kv_heads, found.head_dim) == (6, 4)


@pytest.mark.slow
@huggingface_memory_test.linux
@pytest.mark.parametrize(
  ('how', 'dtype'),
  [('device', 'float16'), ('device', 'float32'), ('host', 'float32')],
)
def test_peak_of_host_memory(how, dtype, tmp_path):
  """No more than the model and twice its largest array."""
  sizes = {'vocab_size': 40000, 'hidden_size': 512, 'intermediate_size': 2048}
  sizes |= {'num_hidden_layers': 16, 'head_dim': 64}
  fields = {theirs: ours for ours, theirs in causal_config.FIELDS.items()}
  config = dataclasses.replace(
    QWEN3, **{fields[name]: value for name, value in sizes.items()}
  )
  arrays = write_folder(tmp_path, 'qwen3', config=config, **sizes)
  total = sum(array.nbytes for array in arrays.values())
  largest = max(array.nbytes for array in arrays.values())
  assert total > 300e6 and 3 * largest < total
  seen = huggingface_memory_test.measure(tmp_path, how, dtype)
  assert seen['loaded'] == total * np.dtype(dtype).itemsize // 4
  slack = huggingface_memory_test.SLACK
  assert seen['extra'] < 2 * largest + slack, seen


# As the folders of the hub have it.
QWEN3_0_6B = {
  'architectures': ['Qwen3ForCausalLM'],
  'attention_bias': False,
  'attention_dropout': 0.0,
  'bos_token_id': 151643,
  'eos_token_id': 151645,
  'head_dim': 128,
  'hidden_act': 'silu',
  'hidden_size': 1024,
  'initializer_range': 0.02,
  'intermediate_size': 3072,
  'max_position_embeddings': 40960,
  'max_window_layers': 28,
  'model_type': 'qwen3',
  'num_attention_heads': 16,
  'num_hidden_layers': 28,
  'num_key_value_heads': 8,
  'rms_norm_eps': 1e-06,
  'rope_scaling': None,
  'rope_theta': 1000000,
  'sliding_window': None,
  'tie_word_embeddings': True,
  'torch_dtype': 'bfloat16',
  'transformers_version': '4.51.0',
  'use_cache': True,
  'use_sliding_window': False,
  'vocab_size': 151936,
}


def test_a_published_configuration():
  found = causal_config.read_config(QWEN3_0_6B, 'config.json')
  assert found.rope == Rope(1e6) and found.logits_via_embedding
  assert found.window == 0 and found.layer_kinds == ('global',)
  leaves = jax.tree.leaves(jax.eval_shape(
    CausalLM(dataclasses.replace(found, num_layers=1)).init, jax.random.key(0)
  ))  # fmt: skip
  assert sum(leaf.size for leaf in leaves) == 155_582_464 + 15_730_944 + 1024


def vocabulary(folder, prefix=None, **settings):
  """A BPE vocabulary whose texts begin with a token, or do not."""
  import tokenizers

  one, _ = tokenizer_bpe_test.train(folder)
  made = tokenizers.Tokenizer.from_file(str(one / 'tokenizer.json'))
  made.add_special_tokens(['<bos>', '<turn>'])
  if prefix is not None:
    made.post_processor = tokenizers.processors.TemplateProcessing(
      single=f'{prefix} $A', special_tokens=[(prefix, made.token_to_id(prefix))]
    )
  made.save(str(one / 'tokenizer.json'))
  if settings:
    (one / 'tokenizer_config.json').write_text(json.dumps(settings))
  return one


@pytest.mark.skipif(
  importlib.util.find_spec('tokenizers') is None, reason='needs tokenizers'
)
class TestVocabularies:
  @pytest.mark.parametrize(
    ('prefix', 'settings', 'begins', 'ends'),
    [
      (None, {}, None, '<|endoftext|>'),
      ('<bos>', {'eos_token': '<turn>'}, '<bos>', '<turn>'),
      (None, {'eos_token': {'content': '<turn>'}}, None, '<turn>'),
      (None, {'add_bos_token': True, 'bos_token': '<bos>'}, '<bos>', None),
      ('<bos>', {'add_bos_token': False, 'bos_token': '<bos>'}, None, None),
    ],
  )
  def test_begins_and_ends(self, prefix, settings, begins, ends, tmp_path):
    tokenizer = BpeTokenizer(vocabulary(tmp_path, prefix, **settings))
    ids = tokenizer._processor.token_to_id
    assert tokenizer.bos_id == (begins and ids(begins))
    assert tokenizer.eos_id == ids(ends or '<|endoftext|>')
    # What is encoded has neither.
    assert tokenizer.bos_id not in tokenizer.encode('the <bos> red')
    assert tokenizer.vocab_size == 268

  def test_a_folder_with_its_vocabulary(self, tmp_path):
    files = vocabulary(tmp_path, '<bos>', eos_token='<turn>')
    folder = tmp_path / 'model'
    # One id less: the last special token is no text (Gemma's images).
    for size, ok in ((267, True), (266, False)):
      config = dataclasses.replace(LLAMA, vocab_size=size)
      write_folder(
        folder, 'llama', config=config, vocab_size=size, bos_token_id=7
      )
      shutil.copytree(files, folder, dirs_exist_ok=True)
      settings = json.dumps({'eos_token': '<|endoftext|>'})
      (folder / 'tokenizer_config.json').write_text(settings)
      if not ok:
        with pytest.raises(ValueError, match='vocabulary of 266'):
          specdec_jax.load(folder)
        return
      (folder / 'generation_config.json').write_text(
        json.dumps({'eos_token_id': [3, 5]})
      )
      model = specdec_jax.load(folder)
      assert model.bos_id == 266 and model.stop_ids == (3, 5)

  @pytest.mark.parametrize('begins', ['<bos>', None])
  def test_a_text_begins_as_the_vocabulary_says(self, begins, tmp_path):
    """Without a config.json, or with one that names another id."""
    files = vocabulary(tmp_path, begins)
    config = dataclasses.replace(LLAMA, vocab_size=268)
    path = tmp_path / 'model.msgpack'
    network = CausalLM(config)
    checkpoints.save_t5x(path, network.init(jax.random.key(0)), step=1)
    alone = tmp_path / 'alone'
    write_folder(alone, 'llama', config=config, vocab_size=268, bos_token_id=7)
    engines = [
      specdec_jax.Engine(specdec_jax.load(path, network, tokenizer=files)),
      specdec_jax.Engine(specdec_jax.load(path, network), tokenizer=files),
      specdec_jax.Engine(specdec_jax.load(alone, tokenizer=files)),
      specdec_jax.Engine(specdec_jax.load(alone), tokenizer=files),
    ]
    assert {engine.bos_id for engine in engines} == {begins and 266}
    engine = engines[0]
    assert engine.num_input_tokens('') == (begins is not None)
    if begins is None:  # an empty text stays empty, and compiles nothing
      (done,) = engine.generate([''], speculative=False)
      assert done.finish_reason == 'empty' and engine.num_programs == 0

  def test_settings_that_are_broken(self, tmp_path):
    folder = vocabulary(tmp_path, eos_token='<|endoftext|>')
    (folder / 'tokenizer_config.json').write_text('{')
    with pytest.raises(ValueError, match='tokenizer_config.json. cannot be'):
      BpeTokenizer(folder)
