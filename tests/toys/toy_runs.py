"""Runs over lines and files, with an engine of plain Python."""

import dataclasses
import gzip
import io
import json
import types

import numpy as np
import pytest
import rich.console

from specdec_jax import infer
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.engine.completion import Completion, CompletionStats
from specdec_jax.engine.options import EngineConfig
from specdec_jax.infer.data import PREDICTIONS
from specdec_jax.request import Drafting
from specdec_jax.text.tokenizer import Vocabulary

MAX_INPUT_LEN = 9


class WordTokenizer(Vocabulary):
  """One token a word."""

  fingerprint = 'words'

  def __init__(self):
    self.ids: dict[str, int] = {}

  def encode(self, text):
    return [self.ids.setdefault(word, len(self.ids)) for word in text.split()]


class ReversingEngine:
  """Reverses each text; a word is a token, a plain call makes one of them.

  Speculatively, each call makes two. `differ` names texts whose speculative
  output is wrong, `fail` texts that give an error.
  """

  config = EngineConfig(gamma=1, max_input_len=MAX_INPUT_LEN, max_decode_len=32)
  codec = types.SimpleNamespace(bos_id=None, source_lang=None, target_lang=None)
  drafting, drafter = Drafting(1), None
  has_drafter = fallback = across_hosts = False
  kernel_layout, gamma = 'in_out', 1
  fingerprints = types.MappingProxyType({'target': 'reversal'})
  models = types.MappingProxyType({})
  params = PairParams({'w': np.zeros(1, np.float32)}, None)

  def __init__(self, differ=(), fail=(), tokenizer=None):
    self.tokenizer = tokenizer or WordTokenizer()
    self.differ, self.fail = differ, fail
    self.calls: list[tuple[bool, list[str], list[int]]] = []
    self.warm: list[tuple[bool, int]] = []

  def num_input_tokens(self, text):
    words = len(self.tokenizer.encode(text))
    return words and words + 1  # its end

  def text_request(self, texts, speculative, options):
    request = texts, speculative, options
    return types.SimpleNamespace(
      terms=request, passed_over={}, rows=[], widen=lambda least: None
    )

  def scheduler(self, size):
    self.size = size
    return self

  def warmup(self, request):
    texts, speculative, _ = request.terms
    if (speculative, len(texts)) in self.warm:
      return 0.0
    self.warm.append((speculative, len(texts)))
    return 0.5

  def run(self, request):
    outputs = enumerate(self.generate(*request.terms))
    return [(index, [output]) for index, output in outputs]

  def generate(self, texts, speculative, options):
    assert self.size == len(texts)
    lossless = options.lenience == 1 or not speculative
    self.calls.append((speculative, list(texts), list(options.example_ids)))
    return [self.complete(text, speculative, lossless) for text in texts]

  def complete(self, text, speculative, lossless):
    if text in self.fail:
      return Completion('', [], [], 'error', error='NaN')
    ids = self.tokenizer.encode(text) if isinstance(text, str) else text
    tokens = ids[: MAX_INPUT_LEN - 1][::-1]
    if speculative and text in self.differ:
      tokens[-1] += 1000
    count = len(tokens)
    calls = (count + 1) // 2 if speculative else count
    accepted = count - calls
    tested = calls if speculative else 0
    histogram = (calls - accepted, accepted)
    stats = CompletionStats(count, calls, tested, accepted, histogram, accepted)
    log_probs, text = [-0.5] * count, str(text)[::-1]
    return Completion(text, tokens, log_probs, 'stop', stats, lossless=lossless)


OPTIONS = {field.name for field in dataclasses.fields(infer.Options)}


def decoded(out, make, **options):
  """Decodes into a folder; returns (summary, records, printed text).

  The records of a mixture are in files of their own.
  """
  printed = io.StringIO()
  console = rich.console.Console(file=printed, width=100)
  config = infer.DecodeConfig(make, output_dir=str(out), **options)
  beside = {'operative_config.gin': lambda: 'A = 1\n'}
  summary = infer.decode(config, beside, console)
  name = PREDICTIONS
  shard = f'-{config.shard_id:05}-of-{config.num_shards:05}'
  if task := summary.get('task'):
    name = f'{task}-{config.task_mode}.jsonl{shard}'
  elif config.num_shards > 1:
    name += shard
  records = records_of(out / name) if (out / name).exists() else []
  return summary, records, printed.getvalue()


def records_of(path):
  """Those of a file: strict JSON."""
  return [
    json.loads(line, parse_constant=pytest.fail)
    for line in path.read_text('utf-8').split('\n')[:-1]
  ]


def run(tmp_path, data: bytes, engine=None, **options):
  """`decoded` of the lines of `data`."""
  tmp_path.mkdir(exist_ok=True)
  (tmp_path / 'input.txt').write_bytes(data)
  engine = engine or ReversingEngine()
  options = {'input_file': str(tmp_path / 'input.txt')} | options
  decoding = {name: options.pop(name) for name in OPTIONS & options.keys()}
  options['options'] = infer.Options(**decoding)
  return decoded(tmp_path / 'out', lambda: engine, **options)


def write(path, content):
  if path.name.endswith('.gz'):
    content = gzip.compress(content, mtime=0)
  path.write_bytes(content)
  return str(path)
