"""Small task files that two suites share, and what examples should be."""

import os
import pathlib

import numpy as np

from specdec_jax.text import metrics
from specdec_jax.text.local_tasks import LocalTask
from specdec_jax.text.tokenizer import EOS_ID

DATA = pathlib.Path(__file__).resolve().parents[2] / 'shared' / 'data'
T5_VOCAB = DATA / 'vocab' / 't5.spiece.model'
ENDE = 'translate English to German: '
PAIRS = [
  ('the old house', 'das alte Haus'),
  ('a red tree sleeps here', 'ein roter Baum schläft hier'),
  ('a dog', ''),
]


def pairs_task(folder, tokenizer):
  """A task over a TSV file of `PAIRS`, written to `folder`."""
  path = folder / 'pairs.tsv'
  path.write_text(''.join(f'{s}\t{t}\n' for s, t in PAIRS), 'utf-8')
  return LocalTask('pairs', {'test': path}, tokenizer.path, prefix=ENDE)


def to_seqio(task):
  """The seqio task with the examples of a local one."""
  import seqio
  import tensorflow as tf

  signature = dict.fromkeys(('inputs', 'targets'), tf.TensorSpec((), tf.string))

  def read(split, shuffle_files, seed=None):
    del shuffle_files, seed  # seqio shuffles examples itself

    def generate():
      for example in task.texts(split):
        yield {feature: example[feature] for feature in signature}

    return tf.data.Dataset.from_generator(generate, output_signature=signature)

  vocabulary = seqio.SentencePieceVocabulary(os.fspath(task.vocab_path))
  return seqio.Task(
    task.name,
    source=seqio.FunctionDataSource(read, splits=tuple(task.files)),
    preprocessors=[
      seqio.preprocessors.tokenize,
      seqio.preprocessors.append_eos_after_trim,
    ],
    output_features={
      feature: seqio.Feature(vocabulary, add_eos=True) for feature in signature
    },
    metric_fns=[metrics.METRICS[name] for name in task.metrics],
  )


def with_end(tokenizer, text):
  """Ids of a side."""
  return [*tokenizer.encode(text), EOS_ID]


def same(first, second):
  """Whether two examples have equal features."""
  return first.keys() == second.keys() and all(
    np.array_equal(first[key], second[key]) for key in first
  )
