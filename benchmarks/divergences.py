"""Compares what a drafter may minimise: divergences from its target.

  python benchmarks/divergences.py TEXTS.txt --folder outputs/divergences \
    --output benchmarks/results/divergences_demo.json

TEXTS are sentences, one a line. `specdec distil` makes a drafter of the demo's
target with each divergence in turn: from the same layer, on the same outputs of
the target, in the same order, for the same steps. Each then speculates on the
texts that were held out, which no drafter has seen. FILE is a record that
`scripts/update_readme.py` shows.
"""

import argparse
import pathlib
import shutil
from unittest import mock

import jax
import jax.numpy as jnp
from common import demo_pair, report

from specdec_jax import Engine, load
from specdec_jax.training import losses, own_drafter

SEEDS = range(3)  # of the samples
COLUMNS = ['the drafter minimises', 'tokens a call, T = 0', 'T = 1']


def _forward(draft, target):
  return jnp.sum(jnp.exp(target) * (target - draft), axis=-1)


def _total_variation(draft, target):
  return 1 - jnp.sum(jnp.exp(jnp.minimum(draft, target)), axis=-1)


def _reverse(draft, target):
  return _forward(target, draft)


def _surprise(draft, target):
  """Of an accepted proposal: the first LK loss of arXiv 2602.23881."""
  return -jax.nn.logsumexp(jnp.minimum(draft, target), axis=-1)


def _blend(draft, target):
  """The second one: forward where few are accepted, else total variation."""
  distance = _total_variation(draft, target)
  share = jnp.exp(-3 * jax.lax.stop_gradient(1 - distance))
  return share * _forward(draft, target) + (1 - share) * distance


def _jensen_shannon(draft, target):
  middle = jnp.logaddexp(draft, target) - jnp.log(2.0)
  return (_forward(middle, target) + _forward(middle, draft)) / 2


# Of log-probabilities of the drafter and of the target, [..., V]; with weights.
DIVERGENCES = {
  'forward + total variation': {_forward: 1, _total_variation: 1},
  'forward': {_forward: 1},
  'total variation': {_total_variation: 1},
  'reverse': {_reverse: 1},
  'Jensen-Shannon': {_jensen_shannon: 1},
  'forward + 3 x total variation': {_forward: 1, _total_variation: 3},
  'forward + reverse + total variation': {
    _forward: 1,
    _reverse: 1,
    _total_variation: 1,
  },
  'forward + reverse': {_forward: 1, _reverse: 1},
  '-log(acceptance)': {_surprise: 1},
  'forward and total variation by exp(-3 alpha)': {_blend: 1},
  'forward + reverse - log(acceptance)': {
    _forward: 1,
    _reverse: 1,
    _surprise: 1,
  },
}


def instead(weights):
  """A `losses.distillation` that minimises other divergences."""
  theirs = losses.distillation

  def distillation(draft_logits, target_logits):
    _, alpha = theirs(draft_logits, target_logits)
    draft, target = map(jax.nn.log_softmax, (draft_logits, target_logits))
    target = jax.lax.stop_gradient(target)
    return sum(x * of(draft, target) for of, x in weights.items()), alpha

  return distillation


def speculated(target, folder):
  """How many texts were held out, and tokens a call on them, by temperature."""
  texts = (folder / own_drafter.HELD_OUT).read_text('utf-8').splitlines()
  engine = Engine(target, load(str(folder)), batch_size=16, gamma=4)
  rates = []
  for temperature, seeds in ((0.0, (0,)), (1.0, SEEDS)):
    done = [
      one.stats
      for seed in seeds
      for one in engine.generate(texts, temperature=temperature, seed=seed)
    ]
    tokens = sum(stats.num_tokens for stats in done)
    calls = sum(stats.num_target_calls for stats in done)
    rates.append(f'{tokens / calls:.3f}')
  return len(texts), rates


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('texts')
  parser.add_argument('--folder', required=True)
  parser.add_argument('--steps', type=int, default=200)
  parser.add_argument('--output')
  flags = parser.parse_args()
  target, _ = demo_pair()
  rows, outputs = [], None
  for number, (name, weights) in enumerate(DIVERGENCES.items()):
    folder = pathlib.Path(flags.folder, str(number))
    theirs, outputs = outputs, folder / 'training' / 'outputs'
    if theirs and not outputs.exists():
      shutil.copytree(theirs, outputs)
    config = own_drafter.DistilConfig(
      target, flags.texts, str(folder), minutes=0.0, steps=flags.steps
    )
    with (
      mock.patch.object(losses, 'distillation', instead(weights)),
      mock.patch.multiple(
        own_drafter._Measured, time_calls=mock.DEFAULT, calibrated=mock.DEFAULT
      ),
    ):
      own_drafter.distil(config)
    count, rates = speculated(target, folder)
    rows.append([name, *rates])
    print(' | '.join(rows[-1]), flush=True)
    jax.clear_caches()  # the next one's loss is not this one's
  title = (
    f'Divergences, demo target, {flags.steps} steps, {count} held-out texts,'
    ' gamma 4'
  )
  report(title, COLUMNS, rows, flags.output)


if __name__ == '__main__':
  main()
