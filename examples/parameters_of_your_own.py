"""Parameters of your own become a checkpoint: those of annalog (MIT).

A stranger's model of molecules: a BART without norms of its embeddings.
It needs `pip install torch` and `pip install --no-deps annalog==1.0.6`.
"""

import importlib.util
import pathlib
import pickle
import re
import tempfile

import torch
from flax.traverse_util import unflatten_dict

import specdec_jax as sd
from specdec_jax.text.tokenizer import Vocabulary

PACKAGE = pathlib.Path(importlib.util.find_spec('annalog').origin).parent
VOCAB, STATE = map(next, map(PACKAGE.glob, ('*/*_ttf.pkl', '*/*.pt')))
WORDS = pickle.loads(VOCAB.read_bytes())['itos']
NAMES = """layers.=layers_ weight=kernel fc_q=query fc_k=key fc_v=value fc_1=wi
fc_2=wo fc_out=logits_dense fc_o=out positionwise_feedforward=mlp tok_=token_
pos_=position_ embedding.kernel=embedder.embedding ff_layer=post_mlp_layer
layer_norm.kernel=layer_norm.scale enc_attn=post_cross_attention
encoder_attention=encoder_decoder_attention decoder.token=token
decoder.logits_dense.bias=logits_bias""".split()


def renamed(name, array):
  for theirs, ours in (pair.split('=') for pair in NAMES):
    name = name.replace(theirs, ours)
  own = 'attention' if name.startswith('encoder') else 'self_attention'
  name = name.replace('self_attention', own).replace('self_attn', f'post_{own}')
  # Scores here are not divided by sqrt(D); BART's first position is row 2.
  array = array / 32**0.5 if 'query' in name else array
  array = torch.cat([array[:2], array]) if 'position' in name else array
  array = array[None] if name == 'logits_bias' else array
  return name, (array.T if name.endswith('kernel') else array).numpy()


class Molecules(Vocabulary):
  fingerprint, vocab_size, before, eos_id = 'SMILES', len(WORDS), [2], 3

  def encode(self, text):
    return [*map(WORDS.index, re.findall(r'\[[^]]*]|%\d\d|Br|Cl|.', text))]

  def decode(self, ids):
    return ''.join(WORDS[i] for i in ids if i > 3)


state = torch.load(STATE, map_location='cpu').items()
params = unflatten_dict(dict(renamed(*pair) for pair in state), sep='.')
sd.save_orbax(folder := tempfile.mkdtemp() + '/annalog', params)
sizes = (59, 256, 8, 3, 3, 32, 512, ('relu',), True, False, 102, False, True)
network = sd.Bart(sd.BartConfig(*sizes, False, encoder_vocab_size=59))
target = sd.load(folder, network, tokenizer=Molecules())
most = dict(max_input_len=102, max_decode_len=56)
engine = sd.Engine(target, sd.prompt_lookup(), **most)
print(engine.generate(['CC(=O)Oc1ccccc1C(=O)O'])[0].text)
