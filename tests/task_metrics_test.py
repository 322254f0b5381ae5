"""Which metrics a run over a task has, by an engine of plain Python."""

import io
import sys

import pytest
import rich.console

from hostile_lines_test import LENGTHS, Reversing
from specdec_jax import infer
from specdec_jax.text import metrics
from specdec_jax.text.local_tasks import LocalTask

needs_bleu = pytest.mark.usefixtures('sacrebleu')


@pytest.fixture
def sacrebleu():
  pytest.importorskip('sacrebleu', reason='it is in the extra [metrics]')


class Knowing(Reversing):
  """Answers with what the targets of the files below are."""

  def generate(self, sources, **options):
    found = super().generate(sources, **options)
    text = 'the cat sat on the mat'
    return [type(one)(text, [3], [-0.5], 'stop') for one in found]


@pytest.fixture
def run(tokenizer, tmp_path):
  def run(task, **options):
    config = infer.TaskConfig(
      lambda **options: Knowing(tokenizer),
      tokenizer,
      task,
      str(tmp_path / 'out'),
      task_feature_lengths=LENGTHS,
      decoding='plain',
      overwrite=True,
      **options,
    )
    console = rich.console.Console(file=io.StringIO(), width=100)
    summary = infer.decode_task(config, console=console)
    return summary, console.file.getvalue()

  return run


@pytest.fixture
def pairs(tmp_path):
  path = tmp_path / 'pairs.tsv'
  path.write_text('a\tthe cat sat on the mat\nb\nc\tthe cat sat on the mat\n')
  return str(path)


@needs_bleu
def test_a_file_with_targets_has_bleu(run, pairs):
  """Of the examples that have a target."""
  summary, printed = run(pairs)
  (found,) = summary['metrics'].values()
  assert found['bleu'] == pytest.approx(100) and summary['unmeasured'] is None
  assert 'bleu' in printed
  for names in ((), None):
    summary, printed = run(pairs, metrics=names)
    assert summary['metrics'] == {'plain': {}} and 'bleu' not in printed


def test_without_targets_there_is_nothing_to_measure(run, tmp_path):
  (tmp_path / 'a.txt').write_text('a\nb\n')
  summary, _ = run(str(tmp_path / 'a.txt'))
  assert summary['metrics'] == {} and summary['unmeasured'] is None


def test_a_task_names_its_own(run, pairs, tokenizer):
  pytest.importorskip('rouge_score')
  own = LocalTask('own', {'test': pairs}, tokenizer.path, metrics=('rouge',))
  summary, _ = run(own)
  (found,) = summary['metrics'].values()
  assert found['rouge1'] == pytest.approx(100) and 'bleu' not in found


def test_the_summary_says_what_to_install(run, pairs, tokenizer, monkeypatch):
  monkeypatch.setitem(sys.modules, 'sacrebleu.metrics', None)
  summary, printed = run(pairs)
  assert summary['metrics'] == {'plain': {}}
  for said in (summary['unmeasured'], printed):
    assert 'sacrebleu, which is not installed' in said
    assert "pip install 'specdec_jax[metrics]'" in said
  # Who names it cannot do without; that is said before anything is loaded.
  own = LocalTask('own', {'test': pairs}, tokenizer.path, metrics=('bleu',))
  for task, options in ((pairs, {'metrics': ('bleu',)}), (own, {})):
    with pytest.raises(ValueError, match='sacrebleu, which is not installed'):
      run(task, **options)


@pytest.mark.parametrize('found', [ZeroDivisionError('no'), 5, {'x': {1j}}])
def test_a_metric_that_fails_loses_no_result(run, pairs, tmp_path, found):
  """Nor does a number that JSON does not have."""

  def own(targets, predictions):
    if len(targets) > 1 and isinstance(found, Exception):
      raise found
    return found

  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(metrics.METRICS, 'own', own)
    if isinstance(found, dict):
      summary, _ = run(pairs, metrics=('own',))
      assert summary['metrics'] == {'plain': found}
    else:
      with pytest.raises(ValueError, match='metric of the task failed'):
        run(pairs, metrics=('own',))
  assert list((tmp_path / 'out').glob('*.COMPLETED'))
  (kept,) = (tmp_path / 'out').glob('*.jsonl-*-of-00001')
  assert len(kept.read_text().splitlines()) == 3
