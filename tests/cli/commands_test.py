"""`specdec decode`, `score` and `try` on Hugging Face folders, without gin."""

import io
import pathlib
import sys

import gin
import pytest

import small_vocabulary
import update_readme
from folders import save_folder
from specdec_jax.checkpoints import huggingface
from specdec_jax.cli import main
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.loading import load
from specdec_jax.report import record

LINES = ['the red dog runs', '', 'a cat sleeps', 'the old house sings here']
LENGTHS = ['--max-decode-len', '12', '--max-input-length', '32', '--gamma', '3']


@pytest.fixture(scope='module')
def pair(folder, tokenizer):
  """Flags of two folders that describe themselves, random weights in them."""
  network = small_vocabulary.network(1)
  (folder / 'in.txt').write_text('\n'.join(LINES) + '\n')
  return [
    save_folder(folder / name, network, seed, tokenizer.path)
    for seed, name in enumerate(('large', 'small'))
  ]


@pytest.fixture
def run(capsys, pair, tmp_path, monkeypatch):
  """Runs a command line, checks its status; lines of stdout, and stderr."""
  monkeypatch.chdir(tmp_path)

  def run(*argv, status=0):
    found = main.main([*argv, '--gin.DTYPE=float32'])
    shown = capsys.readouterr()
    assert found == status, shown.err
    return shown.out.splitlines(), shown.err

  yield run
  gin.clear_config()


@pytest.fixture(scope='module')
def expected(pair):
  """Greedy outputs of the engine itself."""
  engine = Engine(load(pair[0]), max_input_len=32, max_decode_len=12)
  found = engine.generate(LINES, speculative=False)
  return [' '.join(done.text.splitlines()) for done in found]


def test_outputs_are_lines_of_stdout(run, pair, folder, expected, monkeypatch):
  flags = ['--target', pair[0], '--draft', pair[1], *LENGTHS]
  out, err = run('decode', *flags, str(folder / 'in.txt'))
  assert out == expected and out[1] == ''
  stdin = io.TextIOWrapper(io.BytesIO('\n'.join(LINES).encode()))
  monkeypatch.setattr(sys, 'stdin', stdin)
  out, err = run('decode', *flags, '-', '--mode=both')
  assert out == expected
  assert 'speed-up' in err and '3 of 3' in err
  assert not list(pathlib.Path().iterdir())  # nothing is kept


def test_a_folder_is_kept(run, pair, folder, tmp_path):
  flags = ['--target', pair[0], '--draft', pair[1], *LENGTHS]
  flags += ['--num-samples', '3', '--temperature', '1', '--seed', '4']
  flags += [str(folder / 'in.txt'), '--output-dir', 'out', '--batch-size', '2']
  out, err = run('decode', *flags)
  assert len(out) == 3 * len(LINES) and out[3:6] == [''] * 3
  assert len(set(out[:3])) == 3
  assert (tmp_path / 'out' / 'predictions.jsonl').exists()
  config = (tmp_path / 'out' / 'operative_config.gin').read_text()
  assert 'Options.num_samples = 3' in config


def test_a_stop_string_and_what_needs_no_drafter(run, pair, folder, expected):
  stop = expected[0][1:3]
  flags = ['--target', pair[0], '--mode', 'plain', str(folder / 'in.txt')]
  out, err = run('decode', *flags, *LENGTHS, '--stop', stop)
  assert out == [line.partition(stop)[0] for line in expected]
  alone = 'decode', '--target', pair[0], str(folder / 'in.txt')
  _, err = run(*alone, status=2)
  assert '--draft' in err and '--mode plain' in err


def test_scores_are_lines_of_stdout(run, pair, tmp_path):
  (tmp_path / 'pairs.tsv').write_text('a dog\tthe cat\nno target\na\tb\n')
  out, err = run('score', '--target', pair[0], 'pairs.tsv')
  assert out[1] == '' and float(out[0]) < 0 and float(out[2]) < 0
  assert 'Mean log-probability' in err and 'has no tokens' in err
  flags = ['--output-dir=out', 'pairs.tsv']
  assert run('score', '--target', pair[0], *flags)[0] == out
  assert (tmp_path / 'out/pairs-score.jsonl-00000-of-00001').exists()


def test_a_first_look(run, pair, tmp_path, monkeypatch):
  """At models of the hub, which are fetched first."""
  (tmp_path / 'mine.tsv').write_text('the dog\ta b\na cat\tc d\n')
  ids = {'someone/large@refs/pr/1': pair[0], 'someone/small': pair[1]}
  monkeypatch.setattr(huggingface, 'fetch', ids.__getitem__)
  flags = ['mine.tsv', '--prefix', '', *LENGTHS, '--output-dir', 'out']
  flags += ['--revision', 'refs/pr/1']
  out, err = run('try', 'someone/large', 'someone/small', *flags)
  assert 'agree token for token: 2 of 2' in '\n'.join(out)
  summary = 'out/mine-predict.jsonl-00000-of-00001.summary.json'
  found = record.load(summary, 'decode')
  assert found['models']['target'] == 'someone/large@refs/pr/1'
  assert found['agreement']['compared'] == 2 and found['gamma'] == 3
  block = f'<!-- results: {summary} | x -->\n<!-- /results -->\n'
  shown = update_readme.fill(block, tmp_path)
  assert 'acceptance rate' in shown and '2 of 2' in shown
