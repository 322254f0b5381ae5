"""The tasks of T5 that need none of its code: names, data and prefixes.

Names, prefixes and metrics are those of T5's own task definitions (Raffel et
al. 2020, appendix D); the data are TensorFlow Datasets'.
"""

from typing import NamedTuple

VOCAB = 'gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model'
EXTRA_IDS = 100  # sentinels that T5's vocabulary has after its pieces


class T5Task(NamedTuple):
  """A task of T5 over TensorFlow Datasets (TFDS).

  Attributes:
    tfds: dataset, its configuration and version.
    inputs: TFDS's feature that is the input; None is an empty input.
    targets: TFDS's feature that is the target.
    prefix: put before each input.
    metrics: names of `metrics.METRICS`.
  """

  tfds: str
  inputs: str | None
  targets: str
  prefix: str = ''
  metrics: tuple[str, ...] = ()


TASKS = {
  'wmt_t2t_ende_v003': T5Task(
    'wmt_t2t_translate/de-en:1.0.0',
    'en',
    'de',
    'translate English to German: ',
    ('t5_bleu',),
  ),
  # T5 used 3.1.0, which TFDS no longer makes. 3.4.0 differs: no space before
  # the full stops of the targets (ROUGE ignores it), and two more features.
  'cnn_dailymail_v002': T5Task(
    'cnn_dailymail:3.4.0', 'article', 'highlights', 'summarize: ', ('rouge',)
  ),
  'lm1b_v110': T5Task('lm1b:1.1.0', None, 'text'),
}
