"""Models of the Hugging Face hub: what is fetched, and what is said of it."""

import fnmatch
import shutil
import types

import pytest

import small_vocabulary
from load_pair_test import save_folder
from specdec_jax import notebook
from specdec_jax.checkpoints import huggingface
from specdec_jax.engine import loading

LENGTHS = {'max_input_len': 16, 'max_decode_len': 8}


@pytest.fixture
def model(tmp_path, tokenizer):
  """A folder as it lies on the hub, with another framework's weights."""
  folder = tmp_path / 'model'
  save_folder(folder, small_vocabulary.network(1), 0, tokenizer.path)
  (folder / 'pytorch_model.bin').write_bytes(b'large')
  return folder


@pytest.fixture
def revisions(model, tmp_path, monkeypatch):
  """Puts a hub with one model in place; returns the revisions asked for."""
  revisions = []

  def snapshot_download(hub_id, revision, allow_patterns):
    if hub_id != 'someone/tiny-t5':
      raise RuntimeError(f'404 \n for {hub_id}')
    revisions.append(revision)
    folder = tmp_path / f'cache{len(revisions)}'
    folder.mkdir()
    for path in model.iterdir():
      if any(fnmatch.fnmatch(path.name, p) for p in allow_patterns):
        shutil.copy(path, folder)
    return str(folder)

  hub = types.SimpleNamespace(snapshot_download=snapshot_download)
  monkeypatch.setattr(huggingface, 'package', lambda *_: hub)
  monkeypatch.chdir(tmp_path)
  return revisions


def test_a_model_of_the_hub(model, revisions):
  there = notebook.load('someone/tiny-t5', **LENGTHS)
  names = {path.name for path in (model.parent / 'cache1').iterdir()}
  assert {'config.json', 'model.safetensors', 'spiece.model'} <= names
  assert 'pytorch_model.bin' not in names
  here = notebook.load(model, **LENGTHS)
  assert there.fingerprints == here.fingerprints
  assert there.tokenizer.fingerprint == here.tokenizer.fingerprint
  huggingface.fetch('someone/tiny-t5@refs/pr/1')
  assert revisions == [None, 'refs/pr/1']


def test_paths_are_not_asked_of_the_hub(model, revisions, tmp_path):
  """Not those that are mistyped, nor one with a revision."""
  for path in (tmp_path, 'org/model@v2'):
    with pytest.raises(ValueError, match="revision: .*, got 'main'"):
      loading.load(path, revision='main')
  (tmp_path / 'hf').mkdir()
  for path in ('hf/modle', 'model.msgpack', '/a/b', './x/y', 'a/b/c@v1'):
    with pytest.raises(ValueError, match=f"{path}': No such file or folder."):
      loading.load(path)
  assert not revisions


def test_what_the_hub_does_not_have(model, revisions):
  words = r"'someone/other' could not be fetched .*RuntimeError: 404 for"
  with pytest.raises(ValueError, match=words):
    notebook.load('someone/other', **LENGTHS)
  (model / 'model.safetensors').unlink()
  with pytest.raises(ValueError, match="tiny-t5' .* no model.*@refs/pr"):
    huggingface.fetch('someone/tiny-t5')
