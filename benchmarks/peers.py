"""The demo pair beside transformers and CTranslate2, on the same weights.

  pip install '.[peers]'
  python benchmarks/peers.py FILE --output-file benchmarks/results/...
  python benchmarks/peers.py FILE --base --output-file benchmarks/results/...

Greedy, one process: lines one by one (the first 48), and the whole file in
batches of 8 and of 32. The second command has the layers of a T5 1.1 base with
random weights, and the demo's vocabulary; it says 32 tokens a line, and nothing
drafts for it. Every system decodes all lines once, untimed, and then in turn
with the others. All read the same parameters, which are exported once, and use
the same tokenizer, whose time counts. "Same lines" are those whose tokens are
those of the plain loop here. The table goes to stdout. Nothing else should be
running. transformers is there for the demo pair line by line alone, and without
an assistant: the shipped drafter has a shortlist, which it does not know.
"""

import argparse
import functools
import importlib.metadata
import operator
import pathlib
import tempfile
import time

import ctranslate2
import torch
import transformers
from common import demo_pair
from ctranslate2.converters import TransformersConverter

from specdec_jax import Engine, files, load
from specdec_jax.checkpoints import huggingface
from specdec_jax.measure.calls import random_params, summarise
from specdec_jax.models.model import Model
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.report import record
from specdec_jax.report.console import console
from specdec_jax.report.table import Table
from specdec_jax.text.tasks import read_prompts

PLAIN = 'specdec_jax plain'
PACKAGES = ('transformers', 'torch', 'ctranslate2', 'sentencepiece')
# OpenMP's threads spin for up to 0.2 s after their work; the pause keeps that
# out of the next system's time.
PAUSE_SECONDS = 0.3
ROWS = 1, 8, 32
_LINES = 48  # are decoded one by one
_ALONE = 'transformers'  # decodes nothing in batches here


class Vocabulary:
  """The part of a transformers tokenizer that CTranslate2's converter needs."""

  def __init__(self, tokenizer):
    self.pieces = [tokenizer.pieces[i] for i in range(tokenizer.vocab_size)]
    self.ids = {piece: i for i, piece in enumerate(self.pieces)}
    self.pad_token = self.pieces[tokenizer.pad_id]
    self.eos_token = self.pieces[tokenizer.eos_id]
    self.unk_token = self.pieces[tokenizer.unk_id]

  def get_vocab(self):
    return self.ids

  def convert_ids_to_tokens(self, token):
    return self.pieces[token]


def ours(engine: Engine, speculative: bool | None):
  def generate(texts, rows):
    options = {'batch_size': rows, 'speculative': speculative}
    return [done.tokens for done in engine.generate(texts, **options)]

  return generate


def of_transformers(engine, folder, **options):
  """Greedy `generate` of transformers, with the options given."""
  target = transformers.T5ForConditionalGeneration.from_pretrained(
    folder, dtype=torch.float32
  ).eval()
  # Version 5.23 takes the size of the decoder's cache from the encoder's
  # layers, and fails if the decoder has more.
  target.config.num_layers = target.config.num_decoder_layers

  def generate(texts, rows):
    (text,) = texts
    inputs = torch.tensor([engine.codec.input_ids(text)])
    sequence = target.generate(
      input_ids=inputs,
      attention_mask=torch.ones_like(inputs),
      do_sample=False,
      num_beams=1,
      max_new_tokens=engine.config.max_decode_len,
      **options,
    )
    tokens = sequence[0, 1:].tolist()  # without the start token
    engine.tokenizer.decode(tokens)
    return [tokens]

  return generate


def of_ctranslate2(engine, folder, compute_type):
  """CTranslate2's translator of a Hugging Face folder, converted by its own."""
  words = Vocabulary(engine.tokenizer)
  made = f'{folder}_{compute_type}'

  class Converter(TransformersConverter):
    def load_tokenizer(self, *_, **__):
      return words

  # It rescales the input of every output layer, for transformers 5 calls every
  # T5 tied: one positive factor, which changes no greedy token.
  Converter(str(folder)).convert(made)
  # A batch on each core is quicker than a batch on all of them, and so is one
  # line on one core alone.
  translator = ctranslate2.Translator(
    made,
    compute_type=compute_type,
    inter_threads=record.describe()['cores'],
    intra_threads=1,
  )

  def generate(texts, rows):
    ids = [engine.codec.input_ids(text) for text in texts]
    found = []
    for done in translator.translate_batch(
      [[words.pieces[token] for token in of_text] for of_text in ids],
      beam_size=1,
      max_batch_size=rows,
      max_input_length=0,
      max_decoding_length=engine.config.max_decode_len,
      return_end_token=True,
    ):
      tokens = [words.ids.get(piece, -1) for piece in done.hypotheses[0]]
      engine.tokenizer.decode([token for token in tokens if token >= 0])
      found.append(tokens)
    return found

  return generate


def base(dtype: str = 'float32') -> Model:
  """The layers of a T5 1.1 base, random, and the demo's vocabulary."""
  sizes = dict(emb_dim=768, num_heads=12, head_dim=64, mlp_dim=2048)
  layers = dict(num_encoder_layers=12, num_decoder_layers=12)
  network = T5(T5Config(vocab_size=8000, **sizes, **layers))
  params = random_params(network, 0, 'float32')
  return Model(network, params, dtype=dtype, tokenizer=load('demo').tokenizer)


def decoders(folder: pathlib.Path, is_base: bool):
  """Name of each system -> what decodes some texts, so many at once."""
  torch.set_num_threads(record.describe()['cores'])
  transformers.utils.logging.set_verbosity_error()
  sizes = {'max_decode_len': 32 if is_base else 120}
  model, draft = (base(), None) if is_base else demo_pair()
  engine = Engine(model, draft, **sizes)
  path = folder / 'target'
  huggingface.save_huggingface(path, model.network.config, model.params)
  small = base('int8') if is_base else load('demo', dtype='int8')
  int8 = Engine(small, draft, **sizes)
  systems = {PLAIN: ours(engine, False)}
  if draft:
    systems['specdec_jax speculative'] = ours(engine, True)
    systems['specdec_jax by default'] = ours(engine, None)
  systems['specdec_jax int8 plain'] = ours(int8, False)
  if draft:
    systems['specdec_jax int8 speculative'] = ours(int8, True)
  systems['CTranslate2 float32'] = of_ctranslate2(engine, path, 'float32')
  systems['CTranslate2 int8'] = of_ctranslate2(engine, path, 'int8_float32')
  if draft:
    torch_ = functools.partial(of_transformers, engine, path)
    systems[f'{_ALONE} plain'] = torch_()
    lookup = torch_(prompt_lookup_num_tokens=3)
    systems[f'{_ALONE} prompt lookup'] = lookup
  return systems


def measure(systems, texts, repeats: int):
  """Name and rows -> outputs, and milliseconds a token in each pass."""
  outputs, ms = {}, {}

  def decode(name, rows):
    some = texts if rows > 1 else texts[:_LINES]
    parts = [some] if rows > 1 else [[text] for text in some]
    return [out for part in parts for out in systems[name](part, rows)]

  runs = [(n, r) for r in ROWS for n in systems if r == 1 or _ALONE not in n]
  for number in range(repeats + 1):
    for run in runs:
      time.sleep(PAUSE_SECONDS)
      begin = time.perf_counter()
      outputs[run] = decode(*run)
      seconds = time.perf_counter() - begin
      if number:
        count = sum(map(len, outputs[run]))
        ms.setdefault(run, []).append(1e3 * seconds / count)
  return outputs, ms


def table(title: str, systems, outputs, ms) -> Table:
  """A row a system: milliseconds a token by rows, and lines as plainly."""

  def cell(run):
    if run not in ms:
      return None
    times = summarise(ms[run])
    return '{median:.2f} ({min:.2f} to {max:.2f})'.format_map(times)

  rows = []
  for name in systems:
    most = max(rows for other, rows in ms if other == name)
    both = outputs[name, most], outputs[PLAIN, most]
    same = f'{sum(map(operator.eq, *both))} of {len(both[0])}'
    rows.append([name, *(cell((name, number)) for number in ROWS), same])
  columns = ['ms a token (least to most)']
  columns += [f'{rows} row{"s" * (rows > 1)}' for rows in ROWS]
  versions = [f'{name} {importlib.metadata.version(name)}' for name in PACKAGES]
  return Table(title, [*columns, 'same lines'], rows, [', '.join(versions)])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('file')
  parser.add_argument('--base', action='store_true')
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--output-file')
  args = parser.parse_args()
  texts = read_prompts(args.file, lambda text: len(text.strip()))
  with tempfile.TemporaryDirectory() as folder:
    systems = decoders(pathlib.Path(folder), args.base)
    outputs, ms = measure(systems, texts, args.repeats)
  name = 'T5 1.1 base, random, 8,000 ids' if args.base else 'demo pair'
  shown = table(
    f'{name}: {min(len(texts), _LINES)} lines one by one, {len(texts)} in'
    f' batches, greedy{", gamma 4" * (not args.base)}, {args.repeats} passes in'
    ' turn',
    systems,
    outputs,
    ms,
  )
  console().print(shown)
  if args.output_file:
    values = shown.to_json() | {'name': f'peers, {name}'}
    files.write_json(args.output_file, record.new('table', values))


if __name__ == '__main__':
  main()
