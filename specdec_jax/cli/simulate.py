"""Shows what becomes of one proposal: the exact law, and a check of it.

  specdec simulate --target=0.5,0.3,0.2 --draft=0.2,0.3,0.5

The exit status is 1 where the check fails, 2 for bad input.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec_jax.checks.names import nearest

if TYPE_CHECKING:
  from specdec_jax.paper import simulation

_FLAGS = ('--target', '--draft', '--num_samples', '--lenience', '--seed')


def main(argv: Sequence[str]) -> int:
  """Runs the experiment that the command line describes; the exit status."""
  try:
    config = parse(argv)
    from specdec_jax.paper import simulation

    record = simulation.simulate(config)
  except ValueError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  return 0 if record['agrees'] else 1


def parse(argv: Sequence[str]) -> 'simulation.SimulateConfig':
  """Reads the command line.

  Raises:
    ValueError: an unknown or missing flag, or a value that is none.
  """
  parser = argparse.ArgumentParser(
    prog='specdec simulate',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
    exit_on_error=False,
  )
  parser.add_argument(
    '--target',
    type=_numbers,
    metavar='A,B,...',
    help="the target's probabilities",
  )
  parser.add_argument(
    '--draft',
    type=_numbers,
    metavar='A,B,...',
    help="the drafter's, over the same tokens",
  )
  parser.add_argument(
    '--num_samples',
    '--num-samples',
    type=int,
    metavar='N',
    help='proposals of the check, a million by default',
  )
  parser.add_argument(
    '--lenience',
    type=float,
    metavar='L',
    help='in (0, 1]; below 1 more is accepted, and it is lossy',
  )
  parser.add_argument('--seed', type=int, metavar='N', help='of the check')
  try:
    args, unknown = parser.parse_known_args(argv)
  except argparse.ArgumentError as error:
    raise ValueError(str(error)) from error
  if unknown:
    name = unknown[0].split('=')[0]
    raise ValueError(f'Unknown argument {name!r}.{nearest(name, _FLAGS)}')
  given = {name: v for name, v in vars(args).items() if v is not None}
  for name in ('target', 'draft'):
    if name not in given:
      raise ValueError(
        f'--{name} is missing; expected probabilities, as --{name}=0.5,0.3,0.2'
      )
  from specdec_jax.paper import simulation

  return simulation.SimulateConfig(**given)


def _numbers(text: str) -> tuple[float, ...]:
  try:
    return tuple(float(part) for part in text.split(','))
  except ValueError as error:
    raise argparse.ArgumentTypeError(
      f'expected probabilities with commas between them, got {text!r}'
    ) from error
