"""Where the repository is, and the data beside it, which a clone lacks."""

import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / 'shared'
T5X_FIXTURES = SHARED / 'fixtures/t5x'
TEST_SPLIT = SHARED / 'data/ende/tatoeba.test.tsv.gz'
needs_fixtures = pytest.mark.skipif(
  not T5X_FIXTURES.exists(), reason='needs the checkpoints in ../shared'
)
