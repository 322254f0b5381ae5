"""The comparison with peers: its harness, and the peers where installed."""

import dataclasses
import importlib.util
import io
import json
import pathlib
import subprocess
import sys

import gin
import jax
import numpy as np
import pytest
import rich.console

import small_vocabulary
from specdec_jax.checkpoints import huggingface_names
from specdec_jax.cli import gin_flags
from specdec_jax.measure import peer_systems, peers
from specdec_jax.measure.peer_systems import PLAIN, Output, System
from specdec_jax.models.model import Model
from specdec_jax.models.t5 import T5, T5Config

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEERS = ('transformers', 'torch', 'safetensors', 'ctranslate2')
LINES = ['the red dog runs', '', 'a cat sleeps here', 'the old house']

# More layers in the decoder than in the encoder, and H * D is not M.
TARGET = T5Config(
  vocab_size=small_vocabulary.VOCAB_SIZE + 8,
  emb_dim=20,
  num_heads=3,
  num_encoder_layers=1,
  num_decoder_layers=2,
  head_dim=8,
  mlp_dim=28,
)


def make_model(config, seed):
  rng = np.random.default_rng(seed)

  def draw(leaf):
    noise = rng.standard_normal(leaf.shape).astype(np.float32)
    return 1 + noise / 10 if len(leaf.shape) == 1 else noise / 3

  return Model(
    T5(config), jax.tree.map(draw, huggingface_names.shapes(T5(config)))
  )


@pytest.fixture(scope='module')
def config(folder, tokenizer):
  (folder / 'input.txt').write_text('\n'.join(LINES))
  return peers.PeersConfig(
    target=make_model(TARGET, 0),
    draft=make_model(dataclasses.replace(TARGET, num_decoder_layers=1), 1),
    tokenizer=tokenizer,
    input_file=str(folder / 'input.txt'),
    gamma=2,
    max_decode_len=12,
    repeats=2,
  )


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
  monkeypatch.setattr(peers, '_PAUSE_SECONDS', 0.0)


def system(log, name, cost=1.0, wrong=(), fails_at=None):
  """A system that takes `cost` seconds a text and says its characters."""
  calls = [0]

  def generate(text):
    calls[0] += 1
    if calls[0] == fails_at:
      raise RuntimeError('no more\nmemory')
    log.append((name, text))
    log.clock[0] += cost
    tokens = [*map(ord, text), 1]
    return Output(tokens[:-2] if text in wrong else tokens, len(text))

  return System((), lambda pair: generate)


class Log(list):
  """What was called, and a clock that only the systems move."""

  def __init__(self):
    super().__init__()
    self.clock = [0.0]


def run(config, monkeypatch, systems, log, **options):
  monkeypatch.setattr(peers, 'SYSTEMS', systems)
  monkeypatch.setattr(peers.time, 'perf_counter', lambda: log.clock[0])
  printed = io.StringIO()
  console = rich.console.Console(file=printed, width=120)
  options |= {'systems': tuple(systems)[1:]}  # plain is always there
  record = peers.compare(dataclasses.replace(config, **options), console)
  return record, printed.getvalue()


def test_systems_take_turns_and_are_compared_with_plain(config, monkeypatch):
  log = Log()
  systems = {
    PLAIN: system(log, PLAIN),
    'half': system(log, 'half', cost=0.5, wrong=[LINES[2]]),
  }
  record, printed = run(config, monkeypatch, systems, log)
  texts = [line for line in LINES if line]
  one_pass = [(name, text) for name in systems for text in texts]
  assert log == one_pass * 3  # one of them untimed
  plain, half = record['results'][PLAIN], record['results']['half']
  count = sum(len(text) + 1 for text in texts)
  assert plain['tokens'] == count and half['tokens'] == count - 2
  assert plain['seconds'] == [3.0, 3.0] and half['seconds'] == [1.5, 1.5]
  assert plain['ms_per_token']['median'] == pytest.approx(3e3 / count)
  assert half['against_plain'] == pytest.approx(2 * (count - 2) / count)
  assert (plain['equal_lines'], half['equal_lines']) == (3, 2)
  assert plain['target_calls'] == count - 3
  assert record['rows'][1][-1] == '2/3' and '2/3' in printed
  assert record['machine']['jax'] == jax.__version__
  assert record['versions']['sentencepiece']


def never_loads(pair):
  raise ImportError(f'not for {pair.threads} threads')


def test_what_fails_is_reported_and_stops_nothing(
  config, monkeypatch, tmp_path
):
  log = Log()
  systems = {
    PLAIN: system(log, PLAIN),
    'never loads': System((), never_loads),
    'fails later': system(log, 'fails later', fails_at=5),
    'fine': system(log, 'fine'),
  }
  path = tmp_path / 'out' / 'peers.json'
  record, printed = run(
    config, monkeypatch, systems, log, output_file=str(path)
  )
  assert json.loads(path.read_text()) == record
  results = record['results']
  assert results['never loads']['failure'].startswith('ImportError: not for')
  assert results['fails later'] == {'failure': 'RuntimeError: no more\nmemory'}
  assert results['fine']['failure'] is None
  assert record['rows'][2][:2] == ['fails later', 'failed']
  assert {len(row) for row in record['rows']} == {len(record['columns'])}
  assert 'fails later failed: RuntimeError: no more\nmemory' in printed


def test_without_plain_nothing_is_compared(config, monkeypatch):
  log = Log()
  systems = {PLAIN: system(log, PLAIN, fails_at=1), 'x': system(log, 'x')}
  with pytest.raises(ValueError, match='plain failed: RuntimeError: no more'):
    run(config, monkeypatch, systems, log)


def test_outputs_that_change_are_counted(config, monkeypatch):
  log = Log()

  def unsteady(text):
    log.clock[0] += 1
    return Output([len(text), int(log.clock[0])], None)

  systems = {
    PLAIN: system(log, PLAIN),
    'unsteady': System((), lambda pair: unsteady),
  }
  record, printed = run(config, monkeypatch, systems, log)
  assert record['results']['unsteady']['lines_that_changed'] == 3
  assert record['results']['unsteady']['target_calls'] is None
  assert 'unsteady: 3 lines changed' in printed


def test_missing_package_is_named_with_its_command(config, monkeypatch):
  log = Log()
  systems = {
    PLAIN: system(log, PLAIN),
    'x': System(('json', 'no_such_package'), never_loads),
  }
  message = (
    r"not installed: no_such_package\..*pip install 'specdec_jax\[peers\]'"
  )
  with pytest.raises(ValueError, match=message):
    run(config, monkeypatch, systems, log)
  assert not log


@pytest.mark.parametrize(
  ('options', 'words'),
  [
    ({'repeats': 0}, 'repeats must be at least 1, got 0'),
    ({'threads': 0}, 'threads must be'),
    ({'num_lines': 1.5}, 'num_lines must be a whole number, got 1.5'),
    ({'systems': ('vLLM',)}, r"systems must be names .*got \('vLLM',\)"),
    ({'systems': PLAIN}, 'systems must be names'),
  ],
)
def test_config_says_what_is_wrong(config, options, words):
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(config, **options)


def test_input_without_text(config, tmp_path):
  (tmp_path / 'empty.txt').write_text('\n\n')
  empty = dataclasses.replace(
    config, input_file=str(tmp_path / 'empty.txt'), systems=()
  )
  with pytest.raises(ValueError, match='empty.txt.* has no line that can be'):
    peers.compare(empty)


@pytest.mark.skipif(
  not (ROOT / 'demo/target.msgpack').exists(),
  reason='demo/target.msgpack, the demo pair, is not there',
)
def test_gin_file_of_the_demo(monkeypatch):
  monkeypatch.chdir(ROOT)
  flags = ['--gin_file=gin/runs/peers_demo.gin', '--gin.NUM_LINES=2']
  try:
    gin_flags.load(gin_flags.parse_flags(flags))
    config = gin_flags.build(peers.PeersConfig)
  finally:
    gin.clear_config()
  assert config.num_lines == 2 and config.input_file == 'demo/input.txt'
  assert set(config.systems) == set(peer_systems.SYSTEMS)
  pair = config.target, config.draft
  assert len({model.network.vocab_size for model in pair}) == 1


def test_runs_as_a_file(tmp_path):
  """Where neither the repository nor scripts/ is on Python's path."""
  script = str(ROOT / 'scripts' / 'peers.py')
  command = [sys.executable, script, '--gin_file=x']
  done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
  assert done.returncode == 2
  assert "The gin file 'x' was not found" in done.stderr


@pytest.mark.skipif(
  any(importlib.util.find_spec(name) is None for name in PEERS),
  reason="needs the peers: pip install 'specdec_jax[peers]'",
)
@pytest.mark.filterwarnings('ignore')  # those of torch and transformers
def test_every_peer_says_the_same_tokens(config):
  record = peers.compare(config, rich.console.Console(file=io.StringIO()))
  results = record['results']
  assert set(results) == set(peer_systems.SYSTEMS)
  assert results[PLAIN]['tokens'] > 2 * results[PLAIN]['lines']
  assert not [r['failure'] for r in results.values() if r['failure']]
  for name, result in results.items():
    if 'int8' not in name:
      assert result['equal_lines'] == 3, name
      assert result['tokens'] == results[PLAIN]['tokens']
    assert result['lines_that_changed'] == 0
    assert (result['target_calls'] is None) == name.startswith('CTranslate2')
  assert (
    results['transformers plain']['target_calls'] == results[PLAIN]['tokens']
  )
  assert record['versions']['torch']


@pytest.mark.skipif(
  any(importlib.util.find_spec(name) is None for name in PEERS),
  reason="needs the peers: pip install 'specdec_jax[peers]'",
)
@pytest.mark.filterwarnings('ignore')
def test_an_assistant_without_an_encoder_reads_the_targets(config):
  """The target's own decoder as drafter: each of its proposals is right."""
  decoder = {k: v for k, v in config.target.params.items() if k != 'encoder'}
  alone = T5(dataclasses.replace(TARGET, num_encoder_layers=0))
  names = ('transformers assistant + mask', 'specdec_jax speculative')
  draft = Model(alone, decoder)
  shared = dataclasses.replace(config, draft=draft, systems=names)
  record = peers.compare(shared, rich.console.Console(file=io.StringIO()))
  results = record['results']
  assert not [r['failure'] for r in results.values() if r['failure']]
  for name in names:
    calls, tokens = (results[name][k] for k in ('target_calls', 'tokens'))
    assert calls <= tokens / 3 + 2 * results[name]['lines'], name
