"""Two forms of one target beside each other: of floats, and of eight bits."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.engine import scoring
from specdec_jax.engine.completion import Completion
from specdec_jax.engine.engine import Engine


def check(engine: Engine, other: Engine) -> None:
  """Raises ValueError if the targets have different vocabularies."""
  if engine.tokenizer.fingerprint != other.tokenizer.fingerprint:
    raise ValueError(
      'The target that is compared has the vocabulary'
      f' {other.tokenizer.path!r}, and the one that is evaluated'
      f' {engine.tokenizer.path!r}: expected one model in two forms.'
    )


def compare(
  engines: tuple[Engine, Engine],
  grouped: Mapping[str, Sequence[str]],
  greedy: tuple[Sequence[Completion], Sequence[Completion]],
  batch_size: int,
) -> dict[str, Any]:
  """Compares greedy outputs, and what is predicted of the references.

  Args:
    engines: the engine that is evaluated, and the other; of one tokenizer.
    grouped: source -> its references.
    greedy: the greedy outputs of each, in the order of the sources.
    batch_size: references that are read together.

  Returns:
    'sources' that both decoded and how many outputs are 'equal', token for
    token. Over the 'tokens' of their references, ends included: 'perplexity' of
    the first and 'other_perplexity'; the absolute difference of a token's
    log-probability in nats, 'mean_difference' and 'largest_difference'; and the
    root mean square of the logits' difference over that of the other's logits,
    'logits_error'.
  """
  both = [
    (source, first, second)
    for source, first, second in zip(grouped, *greedy, strict=True)
    if not first.error and not second.error
  ]
  found = _read(
    engines,
    [(source, text) for source, *_ in both for text in grouped[source]],
    batch_size,
  )
  totals = {
    name: np.concatenate([[], *(one[name] for one in found)])
    for name in ('log_probs', 'other_log_probs', 'logits', 'errors')
  }
  # `scoring.compare` has the other one first: errors are over its logits.
  scores, others = totals['other_log_probs'], totals['log_probs']
  differences = np.abs(scores - others)
  return {
    'sources': len(both),
    'equal': sum(one.tokens == two.tokens for _, one, two in both),
    'tokens': len(scores),
    'perplexity': math.exp(-scores.mean()),
    'other_perplexity': math.exp(-others.mean()),
    'mean_difference': float(differences.mean()),
    'largest_difference': float(differences.max()),
    'logits_error': math.sqrt(totals['errors'].sum() / totals['logits'].sum()),
  }


def _read(
  engines: tuple[Engine, Engine],
  pairs: Sequence[tuple[str, str]],
  batch_size: int,
) -> list[dict[str, np.ndarray]]:
  """`scoring.compare` of all pairs, those of similar length together."""
  ours, other = engines
  end = ours.stop_ids[0]
  examples = sorted(
    (
      (ours.input_ids(source), [*ours.tokenizer.encode(target), end])
      for source, target in pairs
    ),
    key=lambda pair: (len(pair[1]), len(pair[0])),
  )
  found = []
  for at in range(0, len(examples), batch_size):
    inputs, targets = zip(*examples[at : at + batch_size], strict=True)
    found += scoring.compare(
      (other.target, ours.target),
      (other.params.target, ours.params.target),
      inputs,
      targets,
      ours.languages().before_output(()),
    )
  return found


def cells(found: Mapping[str, Any]) -> list[str]:
  """Of what `rows` has: equal outputs, both perplexities, error of logits."""
  return [
    f'{found["equal"]:,} of {found["sources"]:,}',
    f'{found["perplexity"]:.3f} ({found["other_perplexity"]:.3f})',
    f'{found["logits_error"]:.4f}',
  ]


def rows(found: Mapping[str, Any]) -> list[list[str | None]]:
  """Rows of a table of what `compare` returned, with the other's 'bleu'."""
  return [
    [
      "greedy outputs equal to the other target's",
      f'{found["equal"]:,} of {found["sources"]:,}',
    ],
    [
      'BLEU of the other target, all references',
      f'{found["bleu"]["score"]:.1f}',
    ],
    ['tokens of references', f'{found["tokens"]:,}'],
    ['their perplexity', f'{found["perplexity"]:.3f}'],
    [
      'their perplexity by the other target',
      f'{found["other_perplexity"]:.3f}',
    ],
    [
      "difference of a token's log-probability, mean",
      f'{found["mean_difference"]:.4f}',
    ],
    [
      "difference of a token's log-probability, largest",
      f'{found["largest_difference"]:.2f}',
    ],
    [
      "error of logits over the other target's logits (root mean squares)",
      f'{found["logits_error"]:.4f}',
    ],
  ]
