"""The demo pair beside transformers and CTranslate2, on the same weights.

  pip install '.[peers]'
  python benchmarks/peers.py --output-file benchmarks/results/peers_demo.json

Batch 1, float32, greedy, one process. Every system decodes all lines once,
untimed, and then in turn with the others. All read the same parameters, which
are exported once, and use the same tokenizer, whose time counts. "Same lines"
are those whose tokens are those of the plain loop here. The table goes to
stdout. Nothing else should be running. transformers has no assistant here: the
shipped drafter has a shortlist, which it does not know.
"""

import argparse
import functools
import importlib.metadata
import pathlib
import tempfile
import time

import ctranslate2
import torch
import transformers
from common import demo_pair
from ctranslate2.converters import TransformersConverter

from specdec_jax import Engine, files
from specdec_jax.checkpoints import huggingface
from specdec_jax.measure.calls import summarise
from specdec_jax.report import record
from specdec_jax.report.console import console
from specdec_jax.report.table import Column, Table
from specdec_jax.text.tasks import read_prompts

PLAIN = 'specdec_jax plain'
PACKAGES = ('transformers', 'torch', 'ctranslate2', 'sentencepiece')
# OpenMP's threads spin for up to 0.2 s after their work; the pause keeps that
# out of the next system's time.
PAUSE_SECONDS = 0.3


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


def ours(engine: Engine, speculative: bool):
  def generate(text):
    (done,) = engine.generate([text], speculative=speculative)
    return done.tokens

  return generate


def of_transformers(engine, folder, **options):
  """Greedy `generate` of transformers, with the options given."""
  target = transformers.T5ForConditionalGeneration.from_pretrained(
    folder, dtype=torch.float32
  ).eval()
  # Version 5.23 takes the size of the decoder's cache from the encoder's
  # layers, and fails if the decoder has more.
  target.config.num_layers = target.config.num_decoder_layers

  def generate(text):
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
    return tokens

  return generate


def of_ctranslate2(engine, folder, threads, compute_type):
  """CTranslate2's translator of a Hugging Face folder, converted by its own."""
  words = Vocabulary(engine.tokenizer)
  made = f'{folder}_{compute_type}'

  class Converter(TransformersConverter):
    def load_tokenizer(self, *_, **__):
      return words

  # It rescales the input of every output layer, for transformers 5 calls every
  # T5 tied: one positive factor, which changes no greedy token.
  Converter(str(folder)).convert(made)
  translator = ctranslate2.Translator(
    made, compute_type=compute_type, inter_threads=1, intra_threads=threads
  )

  def generate(text):
    (done,) = translator.translate_batch(
      [[words.pieces[token] for token in engine.codec.input_ids(text)]],
      beam_size=1,
      max_input_length=0,
      max_decoding_length=engine.config.max_decode_len,
      return_end_token=True,
    )
    tokens = [words.ids.get(piece, -1) for piece in done.hypotheses[0]]
    engine.tokenizer.decode([token for token in tokens if token >= 0])
    return tokens

  return generate


def decoders(engine: Engine, model, folder: pathlib.Path, threads: int):
  """Name of each system -> what decodes a text with it."""
  torch.set_num_threads(threads)
  transformers.utils.logging.set_verbosity_error()
  path = folder / 'target'
  huggingface.save_huggingface(path, model.network.config, model.params)
  torch_ = functools.partial(of_transformers, engine, path)
  translator = functools.partial(of_ctranslate2, engine, path, threads)
  return {
    PLAIN: ours(engine, False),
    'specdec_jax speculative': ours(engine, True),
    'transformers plain': torch_(),
    'transformers prompt lookup': torch_(prompt_lookup_num_tokens=3),
    'CTranslate2 float32': translator('float32'),
    'CTranslate2 int8': translator('int8_float32'),
  }


def measure(systems, texts, repeats: int):
  """Outputs of each system, and its seconds in each pass."""
  outputs = {
    name: [one(text) for text in texts] for name, one in systems.items()
  }
  seconds: dict[str, list[float]] = {name: [] for name in systems}
  for _ in range(repeats):
    for name, generate in systems.items():
      time.sleep(PAUSE_SECONDS)
      begin = time.perf_counter()
      for text in texts:
        generate(text)
      seconds[name].append(time.perf_counter() - begin)
  return outputs, seconds


def table(title: str, outputs, seconds) -> Table:
  """A row a system."""
  rows = []
  for name, found in outputs.items():
    count = sum(map(len, found))
    times = summarise([1e3 * each / count for each in seconds[name]])
    if name == PLAIN:
      plain = times['median']
    same = sum(a == b for a, b in zip(found, outputs[PLAIN], strict=True))
    ms = [times[key] for key in ('median', 'min', 'max')]
    rows.append([name, *ms, plain / ms[0], count, f'{same}/{len(found)}'])
  columns = ['system', *(Column(n, '.2f') for n in ('ms/token', 'min', 'max'))]
  columns += [Column(f'against {PLAIN}', '.2f'), Column('tokens', ',')]
  versions = [f'{name} {importlib.metadata.version(name)}' for name in PACKAGES]
  return Table(title, [*columns, 'same lines'], rows, [', '.join(versions)])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('file', nargs='?', default='demo/input.txt')
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--output-file')
  args = parser.parse_args()
  threads = record.describe()['cores']
  texts = read_prompts(args.file, lambda text: len(text.strip()))
  model, draft = demo_pair()
  engine = Engine(model, draft, max_decode_len=120, gamma=4)
  with tempfile.TemporaryDirectory() as folder:
    systems = decoders(engine, model, pathlib.Path(folder), threads)
    outputs, seconds = measure(systems, texts, args.repeats)
  shown = table(
    f'{args.file}, {len(texts)} lines, batch 1, float32, greedy, gamma 4,'
    f' {threads} threads, {args.repeats} passes in turn',
    outputs,
    seconds,
  )
  console().print(shown)
  if args.output_file:
    values = shown.to_json() | {'name': 'peers, demo pair'}
    files.write_json(args.output_file, record.new('table', values))


if __name__ == '__main__':
  main()
