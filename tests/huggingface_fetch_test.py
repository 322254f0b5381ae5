"""From a hub id to a folder, by a stand-in for the package huggingface_hub."""

import fnmatch
import sys
import types

import pytest

from specdec_jax.checkpoints import huggingface_fetch


class Hub(types.ModuleType):
  """Stands in for huggingface_hub: answers, or raises what it is told to."""

  def __init__(self, folder):
    super().__init__('huggingface_hub')
    self.folder = folder
    self.fail = None
    self.asked = []
    self.errors = types.ModuleType('huggingface_hub.errors')
    missing = type('RepositoryNotFoundError', (OSError,), {})
    self.errors.RepositoryNotFoundError = missing
    self.errors.GatedRepoError = type('GatedRepoError', (missing,), {})
    self.errors.RevisionNotFoundError = type('RevisionNotFound', (OSError,), {})
    self.errors.HFValidationError = type('HFValidation', (ValueError,), {})

  def snapshot_download(self, repo_id, *, revision=None, allow_patterns=None):
    self.asked.append((repo_id, revision, allow_patterns))
    if self.fail is not None:
      raise self.fail
    return str(self.folder)


@pytest.fixture
def hub(tmp_path, monkeypatch):
  hub = Hub(tmp_path)
  monkeypatch.setitem(sys.modules, 'huggingface_hub', hub)
  monkeypatch.setitem(sys.modules, 'huggingface_hub.errors', hub.errors)
  return hub


@pytest.mark.parametrize(
  'name', ['model.safetensors', 'model.safetensors.index.json']
)
def test_the_folder_is_returned(hub, tmp_path, name):
  (tmp_path / name).write_bytes(b'')
  assert huggingface_fetch.fetch('a/b', 'main') == tmp_path
  ((hub_id, revision, patterns),) = hub.asked
  assert (hub_id, revision) == ('a/b', 'main')

  def wanted(file_name):
    return any(fnmatch.fnmatch(file_name, pattern) for pattern in patterns)

  for file_name in (
    'config.json',
    'generation_config.json',
    'model.safetensors',
    'model-00001-of-00002.safetensors',
    'model.safetensors.index.json',
    'spiece.model',
    'tokenizer.json',
    'tokenizer_config.json',
    'vocab.json',
    'merges.txt',
  ):
    assert wanted(file_name), file_name
  for file_name in (
    'pytorch_model.bin',
    'tf_model.h5',
    'flax_model.msgpack',
    'pytorch_model.bin.index.json',
    'onnx/model.onnx',
    'README.md',
  ):
    assert not wanted(file_name), file_name


def test_errors_say_what_to_do(hub):
  errors = hub.errors
  cases = [
    (errors.GatedRepoError(), r"gives 'a/b' at 'v1' only .*`hf auth login`"),
    (errors.RepositoryNotFoundError(), r"no public model 'a/b' at 'v1'"),
    (errors.RevisionNotFoundError(), r"'a/b' of the hub has no revision 'v1'"),
    (errors.HFValidationError('slashes'), r"'a/b' is not an id .*\(slashes\)"),
    (ConnectionError('no route'), r'cannot be reached \(Conn.*: no route\)'),
    (RuntimeError('proxy'), r'cannot be reached \(RuntimeError: proxy\)'),
  ]
  for error, words in cases:
    hub.fail = error
    with pytest.raises(ValueError, match=words):
      huggingface_fetch.fetch('a/b', 'v1')


def test_a_model_without_safetensors(hub, tmp_path):
  (tmp_path / 'config.json').write_text('{}')
  with pytest.raises(
    ValueError, match=r"The model 'a/b' .* has no model\.safe"
  ):
    huggingface_fetch.fetch('a/b')


def test_the_package_is_missing(monkeypatch):
  monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
  with pytest.raises(ValueError, match='pip install huggingface_hub. Or give'):
    huggingface_fetch.fetch('a/b')
