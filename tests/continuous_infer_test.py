"""A data set by continuous batching: bad lines, a full disk, going on."""

import errno
import io
import json
import os

import numpy as np
import pytest
import rich.console

from continuous_test import POISON, engine_of, make_t5, make_texts
from specdec_jax import files, infer
from specdec_jax.engine.continuous import Continuous
from specdec_jax.infer import batches, results, resume
from specdec_jax.probs import SamplingConfig

LINES = [text for text in make_texts(16, 2) if len(text) < 60]
TOO_LONG, EMPTY, INVALID = 3, 5, 7


@pytest.fixture(scope='module')
def engine(tokenizer):
  """One word of its target is NaN."""
  target = make_t5(0)
  table = np.array(target.params['token_embedder']['embedding'])
  table[tokenizer.encode(POISON)[-1]] = np.nan
  target.params['token_embedder'] = {'embedding': table}
  return engine_of(target, make_t5(0), tokenizer, max_input_len=32)


def run(engine, folder, **changes):
  """The summary, the records and what was printed."""
  lines = list(LINES)
  lines[TOO_LONG], lines[INVALID] = 'the dog ' * 40, f'a {POISON}'
  lines[EMPTY] = ''
  folder.mkdir(exist_ok=True)
  (folder / 'lines.txt').write_text('\n'.join(lines))
  settings = {
    'input_file': str(folder / 'lines.txt'),
    'output_dir': str(folder / 'out'),
    'mode': 'speculative',
    'sampling': SamplingConfig(temperature=1.0),
    'batch_size': 2,
    'checkpoint_period': 2,
    'batching': 'continuous',
  }
  config = infer.DecodeConfig(lambda: engine, **(settings | changes))
  console = rich.console.Console(file=io.StringIO(), width=100)
  summary = infer.decode(config, console=console)
  text = (folder / 'out' / results.PREDICTIONS).read_text('utf-8')
  records = [json.loads(line) for line in text.splitlines()]
  for record in records:
    for stats in record['stats'].values():
      del stats['batch_ms_per_token']
  return summary, records, console.file.getvalue()


def test_bad_lines_a_full_disk_and_going_on(engine, tmp_path, monkeypatch):
  """One compiled engine for all of it, so one test."""
  summary, records, printed = run(engine, tmp_path / 'whole')
  assert len(records) == len(LINES)
  errors = {i: one['error'] for i, one in enumerate(records) if one['error']}
  assert set(errors) == {TOO_LONG, INVALID}
  assert errors[TOO_LONG].startswith(f'line {TOO_LONG + 1}: ')
  assert errors[INVALID].startswith(f'line {INVALID + 1}: ')
  assert 'NaN' in errors[INVALID]
  assert records[EMPTY]['finish_reason'] == 'empty'
  good = set(range(len(LINES))) - {TOO_LONG, INVALID, EMPTY}
  assert all(records[i]['prediction_tokens'] for i in good)
  assert 0 < summary['speculative']['occupancy'] <= 1
  assert 'running rows / slots' in printed

  # The disk is full at the second chunk; what is finished stays.
  write = files.write_atomically

  def no_space(path, data):
    if os.fspath(path).endswith('00001.json'):
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write(path, data)

  with monkeypatch.context() as patch:
    patch.setattr(files, 'write_atomically', no_space)
    patch.setattr(files.writing, 'write_atomically', no_space)
    with pytest.raises(OSError, match='00001.json could not be written.*again'):
      run(engine, tmp_path / 'full')
  out = tmp_path / 'full' / 'out'
  assert not (out / f'{results.PREDICTIONS}.COMPLETED').exists()
  done = list(out.rglob('0*.json'))
  assert [path.name for path in done] == ['00000.json']
  kept = []
  monkeypatch.setattr(
    files.writing,
    'write_atomically',
    lambda path, data: (kept.append(os.fspath(path)), write(path, data)),
  )
  _, again, _ = run(engine, tmp_path / 'full')
  assert not [path for path in kept if path.endswith('00000.json')]
  assert [path for path in kept if path.endswith('00001.json')]
  assert again == records

  # Another way of batching is another configuration, with the same samples.
  with pytest.raises(ValueError, match='finished results'):
    run(engine, tmp_path / 'full', batching='fixed')
  _, fixed, printed = run(engine, tmp_path / 'fixed', batching='fixed')
  for one, other in zip(records, fixed, strict=True):
    np.testing.assert_allclose(
      one.pop('log_prob') or 0, other.pop('log_prob') or 0, atol=1e-4
    )
    assert one == other
  assert 'running rows / slots' not in printed


def test_a_pool_keeps_what_is_finished_while_it_runs(
  engine, tmp_path, monkeypatch
):
  """By the clock; only the rest is decoded when it is started again."""
  _, want, _ = run(engine, tmp_path / 'whole')
  monkeypatch.setattr(batches, '_KEEP_SECONDS', 0.0)
  keep, kept = resume.Folder.keep, []

  def dies(folder, number, chunk):
    if number == 3:
      raise KeyboardInterrupt
    keep(folder, number, chunk)
    kept.extend(chunk['speculative']['completions'])

  with monkeypatch.context() as patch:
    patch.setattr(resume.Folder, 'keep', dies)
    with pytest.raises(KeyboardInterrupt):
      run(engine, tmp_path / 'killed', checkpoint_period=100)
  assert len(kept) == 3
  given = []
  real = Continuous.run
  monkeypatch.setattr(
    Continuous,
    'run',
    lambda pool, texts, **asked: (
      given.extend(texts) or real(pool, texts, **asked)
    ),
  )
  summary, have, _ = run(engine, tmp_path / 'killed')
  assert have == want and len(given) == len(LINES) - 2 - len(kept)
  assert 0 < summary['speculative']['occupancy'] <= 1


def test_unknown_batching(engine, tmp_path):
  with pytest.raises(ValueError, match="batching: .*'fixed', 'continuous'"):
    run(engine, tmp_path, batching='dynamic')
