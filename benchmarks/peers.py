"""The demo pair beside transformers and CTranslate2, on the same weights.

  pip install '.[peers]'
  python benchmarks/peers.py --output-file benchmarks/results/peers_demo_1.json
  python benchmarks/peers.py FILE --rows 32 --output-file ...

Greedy, one process; the first command decodes line by line, the second a file
in batches. Every system decodes all lines once, untimed, and then in turn with
the others. All read the same parameters, which are exported once, and use the
same tokenizer, whose time counts. "Same lines" are those whose tokens are those
of the plain loop here. The table goes to stdout. Nothing else should be
running. transformers is there for line by line alone, and without an assistant:
the shipped drafter has a shortlist, which it does not know.
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

from specdec_jax import Engine, files, load
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


def ours(engine: Engine, speculative: bool | None, rows: int):
  def generate(texts):
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

  def generate(texts):
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


def of_ctranslate2(engine, folder, rows, compute_type):
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

  def generate(texts):
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


def decoders(folder: pathlib.Path, rows: int):
  """Name of each system -> what decodes some texts with it."""
  torch.set_num_threads(record.describe()['cores'])
  transformers.utils.logging.set_verbosity_error()
  sizes = {'max_decode_len': 120, 'batch_size': rows}
  model, draft = demo_pair()
  engine = Engine(model, draft, **sizes)
  path = folder / 'target'
  huggingface.save_huggingface(path, model.network.config, model.params)
  systems = {
    PLAIN: ours(engine, False, rows),
    'specdec_jax speculative': ours(engine, True, rows),
    'specdec_jax by default': ours(engine, None, rows),
  }
  int8 = Engine(load('demo', dtype='int8'), load('demo-draft'), **sizes)
  systems['specdec_jax int8 plain'] = ours(int8, False, rows)
  systems['specdec_jax int8 speculative'] = ours(int8, True, rows)
  if rows == 1:
    torch_ = functools.partial(of_transformers, engine, path)
    systems['transformers plain'] = torch_()
    lookup = torch_(prompt_lookup_num_tokens=3)
    systems['transformers prompt lookup'] = lookup
  translator = functools.partial(of_ctranslate2, engine, path, rows)
  systems['CTranslate2 float32'] = translator('float32')
  systems['CTranslate2 int8'] = translator('int8_float32')
  return systems


def measure(systems, texts, rows: int, repeats: int):
  """Outputs of each system, and its seconds in each pass."""
  parts = [texts] if rows > 1 else [[text] for text in texts]

  def decode(generate):
    return [tokens for part in parts for tokens in generate(part)]

  outputs = {name: decode(generate) for name, generate in systems.items()}
  seconds: dict[str, list[float]] = {name: [] for name in systems}
  for _ in range(repeats):
    for name, generate in systems.items():
      time.sleep(PAUSE_SECONDS)
      begin = time.perf_counter()
      decode(generate)
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
  parser.add_argument('--rows', type=int, default=1)
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--output-file')
  args = parser.parse_args()
  texts = read_prompts(args.file, lambda text: len(text.strip()))
  with tempfile.TemporaryDirectory() as folder:
    systems = decoders(pathlib.Path(folder), args.rows)
    outputs, seconds = measure(systems, texts, args.rows, args.repeats)
  together = 'line by line' if args.rows == 1 else f'{args.rows} rows at once'
  shown = table(
    f'{args.file}, {len(texts)} lines, {together}, greedy, gamma 4,'
    f' {args.repeats} passes in turn',
    outputs,
    seconds,
  )
  console().print(shown)
  if args.output_file:
    values = shown.to_json() | {'name': 'peers, demo pair'}
    files.write_json(args.output_file, record.new('table', values))


if __name__ == '__main__':
  main()
