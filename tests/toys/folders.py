"""Small Hugging Face folders of all families, as transformers writes them."""

import dataclasses
import functools
import json
import pathlib
import shutil

import flax.serialization
import jax
import numpy as np

import small_vocabulary
import toy_families
from specdec_jax.checkpoints import config_json, families, huggingface
from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.models.t5 import T5Config

# H * D is not M, and neither H nor the layers of the stacks are equal.
_T5 = dict(vocab_size=61, emb_dim=20, num_heads=3, head_dim=4, mlp_dim=28)
T5 = T5Config(**_T5, num_encoder_layers=1, num_decoder_layers=2)
T5_10 = dataclasses.replace(
  T5, num_heads=7, mlp_activations=('relu',), logits_via_embedding=True
)
UMT5 = dataclasses.replace(T5, bias_per_layer=True)
GPT2 = dataclasses.replace(toy_families.GPT2, dropout_rate=0.1)
NLLB, BART, MBART, PEGASUS, MARIAN = (
  dataclasses.replace(config, head_dim=8)
  for config in toy_families.BARTS.values()
)
LLAMA, QWEN2, QWEN3, GEMMA2, GEMMA3 = toy_families.DECODERS.values()
T5GEMMA, T5GEMMA2 = toy_families.ONE, toy_families.TWO

# config.json as the folders of the hub have it, and the configuration.
_CONFIGS = json.loads(
  pathlib.Path(__file__).with_name('configs.json').read_text()
)
FOLDERS = {
  name: (_CONFIGS[name], config)
  for name, config in {
    't5': T5, 't5 1.0': T5_10, 'mt5': T5, 'umt5': UMT5, 'gpt2': GPT2,
    'm2m_100': NLLB, 'bart': BART, 'plbart': BART, 'mbart': MBART,
    'pegasus': PEGASUS, 'marian': MARIAN, 'llama': LLAMA, 'qwen2': QWEN2,
    'qwen3': QWEN3, 'gemma2': GEMMA2, 'gemma3_text': GEMMA3, 'gemma3': GEMMA3,
    't5gemma': T5GEMMA, 't5gemma2': T5GEMMA2,
  }.items()
}  # fmt: skip
LLAMA_3_1 = _CONFIGS['llama']['rope_scaling']
# What stands before all names in a file, the output layer's excepted.
PREFIXES = {
  **{x: 'model.' for x, (_, y) in FOLDERS.items() if type(y) is not T5Config},
  'gpt2': 'transformer.',
  'gemma3': 'language_model.model.',
}
# Arrays that only images go through.
IMAGES = {
  'gemma3': (
    'vision_tower.vision_model.post_layernorm.bias',
    'multi_modal_projector.mm_input_projection_weight',
  ),
  't5gemma2': (
    'model.encoder.vision_tower.post_layernorm.bias',
    'model.encoder.multi_modal_projector.mm_soft_emb_norm.weight',
  ),
}


def arrays_of(name, config=None, dtype=np.float32):
  """The arrays of a file, by the names that they have there."""
  rng = np.random.default_rng(0)
  arrays = {}
  described, own = FOLDERS[name]
  family = families.FAMILIES[described['model_type']]
  for row in families.table(family, config or own).values():
    has_none = row.name.startswith(('lm_head', 'final_logits'))
    prefix = '' if has_none else PREFIXES.get(name, '')
    values = rng.standard_normal(row.stored_shape).astype(dtype)
    arrays[prefix + row.name] = values
  return arrays | {name: np.ones(3) for name in IMAGES.get(name, ())}


def write_folder(folder, name, change=None, config=None, **described):
  """A folder as transformers writes it; returns its arrays.

  Args:
    folder: made if needed.
    name: of `FOLDERS`.
    change: changes the arrays, a dict by name.
    config: another configuration of the family.
    **described: fields of config.json that are other ones.
  """
  arrays = arrays_of(name, config)
  if change is not None:
    change(arrays)
  write_arrays(folder, arrays, FOLDERS[name][0] | described)
  return arrays


def read(folder, dtype=None, sharding=None):
  """The configuration and the parameters of a folder."""
  opened = open_checkpoint(folder, dtype=dtype)
  return opened.facts.config, opened.read(dtype, sharding)


def special_ids(folder):
  return open_checkpoint(folder).facts.ids


def write_arrays(folder, arrays, described):
  from safetensors import numpy as safetensors_numpy

  folder.mkdir(exist_ok=True)
  arrays = {name: np.ascontiguousarray(a) for name, a in arrays.items()}
  path = folder / 'model.safetensors'
  safetensors_numpy.save_file(arrays, path, metadata={'format': 'pt'})
  (folder / 'config.json').write_text(json.dumps(described))


def write_vocabulary(folder, prefix=None, **settings):
  """A BPE vocabulary whose texts begin with a token, or do not."""
  import tokenizers

  place, _ = small_vocabulary.byte_level(folder)
  made = tokenizers.Tokenizer.from_file(str(place / 'tokenizer.json'))
  made.add_special_tokens(['<bos>', '<turn>'])
  if prefix is not None:
    made.post_processor = tokenizers.processors.TemplateProcessing(
      single=f'{prefix} $A', special_tokens=[(prefix, made.token_to_id(prefix))]
    )
  made.save(str(place / 'tokenizer.json'))
  if settings:
    (place / 'tokenizer_config.json').write_text(json.dumps(settings))
  return place


ARRAY = 'decoder/layers_0/mlp/wo/kernel'


def write_stored(folder, params, **change):
  """What T5X writes: one array in a folder of TensorStore's, others inside.

  Args:
    folder: made if needed.
    params: the parameters.
    **change: entries of the array's specification.
  """
  import tensorstore as ts

  *rest, last = ARRAY.split('/')
  tree = jax.tree.map(lambda leaf: leaf, params)
  inner = functools.reduce(dict.get, rest, tree)
  array = inner[last]
  kvstore = {'driver': 'file', 'path': f'{folder}/array/'}
  metadata = {'shape': list(array.shape), 'chunks': [5, 3]}
  metadata['compressor'] = {'id': 'gzip', 'level': 1}
  spec = {'driver': 'zarr', 'kvstore': kvstore, 'dtype': str(array.dtype)}
  full = {**spec, 'metadata': metadata}
  shutil.rmtree(folder / 'array', ignore_errors=True)
  ts.open(full, create=True).result().write(array).result()
  inner[last] = {
    'driver': 'zarr',
    'kvstore': {'driver': 'file', 'path': 'array'},
    'metadata': {'shape': list(array.shape)},
    **change,
  }
  whole = {'version': 3, 'optimizer': {'target': tree}}
  packed = flax.serialization.msgpack_serialize(whole)
  (folder / 'checkpoint').write_bytes(packed)


# What stands where another kind of value belongs.
WRONG = (None, -1, float('nan'), 'x', [1], {})
LANGUAGES = ('deu_Latn', 'eng_Latn', 'zho_Hans')


def write_nllb(folder, languages=LANGUAGES):
  """The files of a folder of NLLB-200, of few words: 0 <s>, 1 <pad>, 2 </s>."""
  import tokenizers

  made = small_vocabulary.trained_bpe(
    tokenizers.pre_tokenizers.Metaspace(),
    small_vocabulary.sentences(),
    ['<s>', '<pad>', '</s>', '<unk>'],
    size=80,
    unk_token='<unk>',
  )
  made.decoder = tokenizers.decoders.Metaspace()
  made.add_special_tokens([*languages, '<mask>'])
  ends = [(name, made.token_to_id(name)) for name in (languages[0], '</s>')]
  made.post_processor = tokenizers.processors.TemplateProcessing(
    f'{languages[0]} $A </s>', special_tokens=ends
  )
  folder.mkdir(exist_ok=True)
  made.save(str(folder / 'tokenizer.json'))
  said = {'eos_token': '</s>', 'bos_token': '<s>', 'pad_token': '<pad>'}
  (folder / 'tokenizer_config.json').write_text(json.dumps(said))
  return folder


def save_folder(folder, network, seed, vocabulary=None, ids=config_json.T5_IDS):
  """A Hugging Face folder, with its vocabulary as its authors leave it."""
  params = small_vocabulary.weights(network, seed)
  huggingface.save_huggingface(folder, network.config, params, ids=ids)
  if vocabulary is not None:
    shutil.copy(vocabulary, folder / 'spiece.model')
  return str(folder)
