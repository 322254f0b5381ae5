"""A run over a mixture: each task its own files, the models loaded once."""

import io
import json
import pathlib

import pytest
import rich.console

from infer_task_test import LENGTHS, LINES, Making
from specdec_jax import infer
from specdec_jax.text import tasks


@pytest.fixture
def files(tmp_path):
  """Two files of examples, in place of the tasks of a mixture."""
  found = []
  for name, lines in (('one', LINES[:2]), ('two', LINES[2:])):
    path = tmp_path / f'{name}.tsv'
    path.write_text(''.join(f'{a}\t{b}\n' for a, b in lines))
    found.append(str(path))
  return found


def run(make, tokenizer, name, out, lengths=LENGTHS, drafter=None):
  config = infer.TaskConfig(
    make,
    tokenizer,
    name,
    str(out),
    drafter=drafter,
    task_feature_lengths=lengths,
    decoding='plain' if drafter is None else 'speculative',
    batch_size=2,
  )
  return infer.decode_task(
    config, console=rich.console.Console(file=io.StringIO())
  )


def predictions(folder: pathlib.Path, name: str) -> list[str]:
  text = (folder / f'{name}-predict.jsonl-00000-of-00001').read_text('utf-8')
  return [json.loads(line)['prediction'] for line in text.splitlines()]


def test_each_task_has_its_files(files, tokenizer, tmp_path, monkeypatch):
  make = Making(tokenizer)
  for path in files:
    run(make, tokenizer, path, tmp_path / 'alone')
  made = len(make.asked)
  monkeypatch.setattr(
    tasks, 'tasks_of', lambda name: files if name == 'both' else [name]
  )
  out = tmp_path / 'together'
  summary = run(make, tokenizer, 'both', out)
  assert len(make.asked) == made + 1  # the models were loaded once
  assert (summary['kind'], summary['mixture']) == ('mixture', 'both')
  assert [one['task'] for one in summary['tasks'].values()] == ['one', 'two']
  for name, lines in (('one', LINES[:2]), ('two', LINES[2:])):
    have = predictions(out, name)
    assert have == predictions(tmp_path / 'alone', name)
    assert len(have) == len(lines)
    assert (out / f'{name}-predict.jsonl-00000-of-00001.COMPLETED').exists()

  # Where the longest example decides, each task may need its own engine.
  run(make, tokenizer, 'both', tmp_path / 'longest', lengths=None)
  asked = [one['max_input_len'] for one in make.asked[made + 1 :]]
  assert len(set(asked)) == len(asked) == 2


def test_the_drafter_is_loaded_once(files, tokenizer, tmp_path, monkeypatch):
  make, loaded = Making(tokenizer), []

  def draft():
    loaded.append(1)
    return make._models[1]

  monkeypatch.setattr(
    tasks, 'tasks_of', lambda name: files if name == 'both' else [name]
  )
  run(make, tokenizer, 'both', tmp_path / 'out', drafter=draft)
  assert len(loaded) == len(make.asked) == 1
