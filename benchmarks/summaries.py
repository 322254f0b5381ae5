"""A BART that writes titles, and what speculation gains with a drafter of it.

  python3 -m venv .venv && .venv/bin/pip install -e '.[peers]'
  .venv/bin/python benchmarks/summaries.py PAIRS outputs/summaries

PAIRS has a JSON object a line with an abstract, 'source', and its title,
'target'; a name that ends in .gz is a compressed file. A small BART with random
weights learns for `--minutes` from all but the last fifty. `specdec distil`
makes a drafter of layers of its decoder. Then the held-out abstracts are
decoded one at a time, greedily and by a search with four beams, with the
settings of bart-large-cnn. What is in the folder is not made again.
"""

import argparse
import gzip
import json
import pathlib
import random
import subprocess
import sys
import time

import numpy as np
from common import alone, report

from specdec_jax import Engine, load, prompt_lookup
from specdec_jax.measure.calls import decode_in_turn
from specdec_jax.report.console import bar, console

SIZE, MOST_INPUT, MOST_OUTPUT, BATCH = 256, 128, 32, 32
HELD_OUT, REPEATS = 50, 3
# Settings of bart-large-cnn; only the lengths are smaller.
BEAMS = dict(num_beams=4, length_penalty=2.0, early_stopping=True, min_length=4)
RULES = dict(no_repeat_ngram_size=3, forced_bos_token_id=0)
SPECIAL = ['<s>', '<pad>', '</s>', '<unk>', '<mask>']


def pairs_of(path: pathlib.Path) -> list[tuple[str, str]]:
  """Returns abstracts and titles."""
  opened = gzip.open if path.suffix == '.gz' else open
  with opened(path, 'rt', encoding='utf-8') as lines:
    rows = [json.loads(line) for line in lines]
  return [(row['source'], row['target']) for row in rows]


def train(pairs: list, folder: pathlib.Path, minutes: float) -> None:
  """Writes a BART that learned from pairs, and its vocabulary."""
  import tokenizers
  import torch
  import transformers as hf

  torch.manual_seed(0)
  bytes_of = tokenizers.ByteLevelBPETokenizer()
  texts = [text for pair in pairs for text in pair]
  bytes_of.train_from_iterator(texts, 8000, special_tokens=SPECIAL)
  part = folder.with_suffix('.part')
  part.mkdir(parents=True, exist_ok=True)
  bytes_of.save_model(str(part))
  tokenizer = hf.BartTokenizer.from_pretrained(part)
  sizes = {f'{x}_ffn_dim': 4 * SIZE for x in ('encoder', 'decoder')}
  sizes |= {f'{x}_attention_heads': 4 for x in ('encoder', 'decoder')}
  config = hf.BartConfig(
    vocab_size=len(tokenizer),
    d_model=SIZE,
    encoder_layers=3,
    decoder_layers=6,
    max_position_embeddings=2 * MOST_INPUT,
    **sizes,
  )
  model = hf.BartForConditionalGeneration(config)
  optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
  begin, rng, losses, shown = time.monotonic(), random.Random(0), [], 0
  with bar(console(), 'Training', 100) as advance:
    while (done := (time.monotonic() - begin) / 60 / minutes) < 1:
      optimizer.param_groups[0]['lr'] = 1e-3 * min(50 * done, 1 - done)
      chosen = rng.sample(pairs, BATCH)
      options = dict(padding=True, truncation=True, return_tensors='pt')
      sources, titles = zip(*chosen, strict=True)
      batch = tokenizer(sources, max_length=MOST_INPUT, **options)
      labels = tokenizer(titles, max_length=MOST_OUTPUT, **options)
      labels = labels['input_ids'].masked_fill(
        labels['attention_mask'] == 0, -100
      )
      now = model(**batch, labels=labels).loss
      now.backward()
      torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
      optimizer.step()
      optimizer.zero_grad()
      losses.append(now.item())
      advance(int(100 * done) - shown)
      shown = int(100 * done)
  last = np.mean(losses[-100:])
  print(f'{len(losses)} steps of {BATCH} pairs, loss {last:.2f} at last')
  model.generation_config.update(max_length=MOST_OUTPUT, **RULES, **BEAMS)
  for content in (tokenizer, model):
    content.save_pretrained(part)
  part.rename(folder)


def measure(target, draft, texts: list[str]) -> list[list[str]]:
  """Times texts one at a time, each way in turn."""
  sizes = {'max_input_len': MOST_INPUT, 'max_decode_len': MOST_OUTPUT}
  engine, lookup = (
    Engine(target, drafter, **sizes) for drafter in (draft, prompt_lookup())
  )
  rows, parts = [], [[index] for index in range(len(texts))]
  for kind, options in ('greedy', {}), ('4 beams', BEAMS):
    ways = {'none': (engine, {'speculative': False})}
    for gamma in (1, 2, 4):
      ways[f'drafter, gamma {gamma}'] = engine, {'gamma': gamma}
    if kind == 'greedy':  # it knows one continuation, not all beams
      ways['prompt lookup'] = lookup, {}
    options = {'on_too_long': 'truncate', 'speculative': True} | options
    timed = decode_in_turn(ways, texts, parts, REPEATS, **options)
    plain = timed['none']
    for name, way in timed.items():
      both = zip(way.outputs, plain.outputs, strict=True)
      equal = sum(x[0][0].tokens == y[0][0].tokens for x, y in both)
      all_ms, plain_ms = (np.median(x.ms, axis=0).sum() for x in (way, plain))
      calls = sum(stats.num_target_calls for stats in way.stats)
      row = [kind, name, f'{equal} of {len(texts)}']
      row += [f'{way.tokens.sum() / calls:.2f}', f'{all_ms / len(texts):.1f}']
      rows.append([*row, f'{plain_ms / all_ms:.2f}'])
  return rows


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('pairs', type=pathlib.Path)
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('--minutes', type=float, default=12.0)
  flags = parser.parse_args()
  folder, pairs = flags.folder, pairs_of(flags.pairs)
  shown, held_out = pairs[:-HELD_OUT], pairs[-HELD_OUT:]
  bart, drafter = folder / 'bart', folder / 'drafter'
  if not bart.exists():
    alone('A BART learns titles', train, shown, bart, flags.minutes)
  inputs = folder / 'abstracts.txt'
  inputs.write_text('\n'.join(' '.join(text.split()) for text, _ in shown))
  command = [sys.executable, '-m', 'specdec_jax', 'distil', '--minutes', '10']
  command += ['--target', str(bart), '--texts', str(inputs)]
  command += ['--output-dir', str(drafter)]
  subprocess.run(command, check=True)
  models = load(str(bart)), load(str(drafter))
  rows = measure(*models, [text for text, _ in held_out])
  title = f'{HELD_OUT} abstracts, one at a time; a small BART that learned'
  title += f' titles for {flags.minutes:g} minutes'
  columns = ['decoding', 'drafts of', 'outputs as plain', 'tokens per call']
  columns += ['ms per text', 'speed-up']
  report(title, columns, rows, folder / 'summaries.json')


if __name__ == '__main__':
  main()
