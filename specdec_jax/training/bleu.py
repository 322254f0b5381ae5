"""BLEU of a model's greedy outputs during its training."""

import itertools

import numpy as np

from specdec_jax import partitioning
from specdec_jax.models.base import LanguageModel, Params
from specdec_jax.text import metrics
from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.training.outputs import PLACEMENT, Decoder, OutputsConfig
from specdec_jax.training.pairs import TokenPairs

# Outputs that repeat themselves are kept, and count as they are.
_WHOLE_OUTPUTS = OutputsConfig(max_ratio=2.0, max_extra=16, max_unfinished=0.0)


class Bleu:
  """Corpus BLEU of a model over the first pairs of a held-out set."""

  def __init__(
    self,
    model: LanguageModel,
    tokenizer: Tokenizer,
    pairs: TokenPairs,
    number: int,
  ):
    """
    Args:
      model: a `LanguageModel`.
      tokenizer: the tokenizer of the pairs.
      pairs: sources and references; pairs that are too long are left out.
      number: how many pairs are used.
    """
    self._tokenizer = tokenizer
    self._decoder = Decoder(model, _WHOLE_OUTPUTS)
    lengths = np.diff(pairs.inputs_offsets)
    usable = (lengths > 0) & (lengths < _WHOLE_OUTPUTS.widths[-1])
    chosen = np.flatnonzero(usable)[:number]
    self._pairs = [pairs[i] for i in chosen[np.argsort(lengths[chosen])]]

  def __call__(self, params: Params) -> dict[str, float]:
    """Returns {'bleu': 0 to 100} for these parameters."""
    placed = partitioning.place(params, PLACEMENT)
    found = []
    for at in range(0, len(self._pairs), _WHOLE_OUTPUTS.batch_size):
      batch = self._pairs[at : at + _WHOLE_OUTPUTS.batch_size]
      sources = [source for source, _ in batch]
      found.append(self._decoder(placed, sources, range(len(batch))))
    texts = [
      self._tokenizer.decode(output.tokens)
      for output in itertools.chain.from_iterable(found)
    ]
    references = [self._tokenizer.decode(target) for _, target in self._pairs]
    return {'bleu': metrics.bleu(references, texts)['bleu']}
