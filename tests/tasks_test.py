"""seqio tasks: a clear error without seqio, token pairs with it."""

import builtins
import importlib.util

import pytest

from specdec_jax import tasks, tokenizer

HAS_SEQIO = importlib.util.find_spec('seqio') is not None


def test_without_seqio_the_error_says_what_to_do(monkeypatch):
  original = builtins.__import__

  def refuse(name, *args, **kwargs):
    if name.split('.')[0] in ('seqio', 'tensorflow'):
      raise ImportError(name)
    return original(name, *args, **kwargs)

  monkeypatch.setattr(builtins, '__import__', refuse)
  for call in (
    lambda: tasks.splits('any'),
    lambda: tasks.token_lists('any', 'train'),
    lambda: tasks.register_tsv('any', {}, 'vocab.model'),
  ):
    with pytest.raises(ValueError, match=r"not installed: .*'\.\[tasks\]'"):
      call()


# TensorFlow and its companions warn about Python's own deprecations.
@pytest.mark.filterwarnings('ignore')
@pytest.mark.skipif(not HAS_SEQIO, reason='needs seqio, the extra [tasks]')
def test_a_task_gives_the_ids_of_its_file(tmp_path):
  lines = [('ein Haus', 'a house'), ('zwei Häuser', 'two houses')]
  sentences = [side for pair in lines for side in pair] * 20
  vocab = tmp_path / 'vocab.model'
  ours = tokenizer.train_tokenizer(sentences, vocab, 275)
  pairs = tmp_path / 'pairs.tsv'
  pairs.write_text(''.join(f'{s}\t{t}\n' for s, t in lines), 'utf-8')
  tasks.register_tsv('specdec_test', {'train': pairs}, vocab)
  assert tasks.splits('specdec_test') == ['train']
  sources, targets = tasks.token_lists('specdec_test', 'train')
  assert [x.tolist() for x in sources] == [ours.encode(s) for s, _ in lines]
  assert [x.tolist() for x in targets] == [ours.encode(t) for _, t in lines]
  with pytest.raises(ValueError, match="no seqio task 'specdec_tset'"):
    tasks.splits('specdec_tset')
  with pytest.raises(ValueError, match="no file 'nowhere.tsv'"):
    tasks.register_tsv('another', {'train': 'nowhere.tsv'}, vocab)
