"""BLEU and ROUGE of predictions, computed by the packages that define them.

A metric takes targets and predictions and returns a dict of numbers, as seqio's
metric functions do. A target is a text, or several texts that are all correct.
sacrebleu and rouge_score come with the extra `[metrics]`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec_jax.checks.fields import package

Targets = Sequence[str | Sequence[str]]
Metric = Callable[[Targets, Sequence[str]], dict[str, Any]]

_ROUGE = ('rouge1', 'rouge2', 'rougeL', 'rougeLsum')


def bleu(
  targets: Targets, predictions: Sequence[str], tokenize: str = '13a'
) -> dict[str, Any]:
  """Computes corpus BLEU by sacrebleu, with its default settings.

  If no prediction has four words, the defaults would give BLEU 0: then the
  effective order is used, as the signature says (eff).

  Args:
    targets: one or more references for each prediction.
    predictions: texts.
    tokenize: sacrebleu's tokenization; its own default is '13a'.

  Returns:
    {'bleu': 0 to 100, 'bleu_signature': sacrebleu's signature}.

  Raises:
    ValueError: sacrebleu is not installed.
  """
  sacrebleu = package('BLEU', 'sacrebleu.metrics', 'metrics')
  references = _references(targets)
  # sacrebleu takes the n-th references of all predictions, None where a
  # prediction has fewer.
  streams = [
    [texts[i] if i < len(texts) else None for texts in references]
    for i in range(max(map(len, references)))
  ]
  for effective in (False, True):
    metric = sacrebleu.BLEU(tokenize=tokenize, effective_order=effective)
    score = metric.corpus_score(list(predictions), streams)
    if score.totals[-1]:
      break
  return {'bleu': score.score, 'bleu_signature': str(metric.get_signature())}


def rouge(targets: Targets, predictions: Sequence[str]) -> dict[str, float]:
  """Computes mean ROUGE F-measures by rouge_score, without stemming.

  T5's own metric is the median of resampled means: the same number except for
  the noise of resampling. As in T5, ` . ` ends a sentence for rougeLsum, like a
  line break. Of several targets the best one counts, for each measure.

  Args:
    targets: one or more references for each prediction.
    predictions: texts.

  Returns:
    {'rouge1', 'rouge2', 'rougeL', 'rougeLsum'}, each 0 to 100.

  Raises:
    ValueError: rouge_score is not installed.
  """
  scorer_module = package('ROUGE', 'rouge_score.rouge_scorer', 'metrics')
  scorer = scorer_module.RougeScorer(list(_ROUGE), use_stemmer=False)
  references = _references(targets)
  totals = dict.fromkeys(_ROUGE, 0.0)
  for texts, prediction in zip(references, predictions, strict=True):
    scores = scorer.score_multi([_lines(t) for t in texts], _lines(prediction))
    for name in _ROUGE:
      totals[name] += scores[name].fmeasure
  return {name: 100 * totals[name] / len(references) for name in _ROUGE}


def t5_bleu(targets: Targets, predictions: Sequence[str]) -> dict[str, Any]:
  """Computes `bleu` with international tokenization, as in the T5 paper."""
  return bleu(targets, predictions, tokenize='intl')


def first_bleu(targets: Targets, predictions: Sequence[str]) -> dict[str, Any]:
  """Computes `bleu` with the first reference of each prediction alone."""
  score = bleu([texts[:1] for texts in _references(targets)], predictions)
  return {f'first_{name}': value for name, value in score.items()}


# The metrics that a configuration can name.
_METRICS = bleu, first_bleu, t5_bleu, rouge
METRICS: Mapping[str, Metric] = {metric.__name__: metric for metric in _METRICS}


def _references(targets: Targets) -> list[list[str]]:
  return [[t] if isinstance(t, str) else list(t) for t in targets]


def _lines(text: str) -> str:
  return text.replace(' . ', ' .\n')
