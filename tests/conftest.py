"""Fixtures that several suites of text share."""

import pytest

import small_vocabulary


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A folder of the module's own."""
  return tmp_path_factory.mktemp('module')


@pytest.fixture(scope='module')
def own_cache(folder):
  """JAX's compilation cache, apart from the user's; by `usefixtures`."""
  with small_vocabulary.own_compilation_cache(folder):
    yield


@pytest.fixture(scope='module')
def tokenizer(folder):
  """A small one, its file in `folder`."""
  return small_vocabulary.train(folder)
