"""The command `specdec`, also `python -m specdec_jax`.

Nothing that takes long to import is imported before it is known that a command
runs: --help and mistyped names answer at once.
"""

import sys
from collections.abc import Sequence

import specdec_jax
from specdec_jax.checks.fields import nearest
from specdec_jax.cli import commands

_HEAD = """\
usage: specdec COMMAND ...

Speculative decoding of T5-style and decoder-only models in JAX: a small model
drafts, a large one checks several tokens in one call, and the output is exactly
the large one's.

commands:
"""
_TAIL = """
`specdec COMMAND --help` describes its flags and shows examples, such as

  specdec demo
  specdec decode --target google/flan-t5-xl --draft google/flan-t5-small in.txt

Run files of gin, in gin/runs/, are found from any folder:

  specdec measure --gin_file=gin/runs/alpha_demo.gin
"""


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line `argv`, or the process's; returns the exit status."""
  return commands.guarded(
    lambda: _main(sys.argv[1:] if argv is None else list(argv))
  )


def _main(argv: list[str]) -> int:
  name = argv[0] if argv else ''
  if name in ('-h', '--help', 'help'):
    print(_help(), end='')
    return 0
  if name == '--version':
    print(f'specdec_jax {specdec_jax.__version__}')
    return 0
  if name in commands.COMMANDS:
    from specdec_jax.cli import gin_flags

    return gin_flags.main(commands.COMMANDS[name], argv[1:], name)
  print(_unknown(name) if name else _help(), file=sys.stderr)
  return 2


def _help() -> str:
  summaries = {name: one.summary for name, one in commands.COMMANDS.items()}
  width = max(map(len, summaries))
  lines = [f'  {name:{width}}  {text}' for name, text in summaries.items()]
  return _HEAD + '\n'.join(lines) + '\n' + _TAIL


def _unknown(name: str) -> str:
  if name.startswith('-'):
    hint = ' A command comes first, its flags after it; see `specdec --help`.'
  else:
    hint = nearest(name, commands.COMMANDS)
  return f'error: there is no command {name!r}.{hint}'


if __name__ == '__main__':
  sys.exit(main())
