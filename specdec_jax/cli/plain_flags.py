"""Flags for people who have no gin: each is another way to write a macro.

`specdec decode --gamma 7` is `specdec decode --gin.GAMMA=7`: there is one way
of configuration, and operative_config.gin shows it. Where no --gin_file is
given, a command takes a run file of its own.
"""

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from specdec_jax.checks.names import nearest

_NOTHING = ('None', 'False', '()', "''")
_TEXTS = ('decode', 'demo')
_ENGINE = ('decode', 'demo', 'calibrate')
_SERVER = ('serve', 'bench-serve')
_TRANSLATES = ('decode', 'score', 'calibrate', 'try', *_SERVER)
_PAIR = ('decode', 'score', 'calibrate', 'try', 'distil', *_SERVER)


@dataclasses.dataclass(frozen=True)
class Flag:
  """A flag, and the macro that it binds.

  Attributes:
    names: the first is shown first; the others are what else people try. A
      name without dashes is a place on the command line.
    macro: that it gives a value.
    help: what it is, on a line.
    commands: that have it.
    kind: str, int, float, bool (a switch), tuple (given again for each one),
      list (whole numbers with commas between them), or int | str (gamma).
    choices: the words that it may be; none is any.
    also: macro -> what it is then, where the run file has that macro and nobody
      says otherwise.
  """

  names: tuple[str, ...]
  macro: str
  help: str
  commands: tuple[str, ...]
  kind: Any = str
  choices: tuple[str, ...] = ()
  also: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def metavar(self) -> str:
    """What --help calls the value."""
    if self.choices:
      return '|'.join(self.choices)
    shown = {int: 'N', float: 'X', list: 'N,N', int | str: 'N|adaptive'}
    return shown.get(self.kind, 'TEXT')

  def value(self, name: str, text: str) -> Any:
    """The value that a text on the command line stands for.

    Raises:
      ValueError: it is none.
    """
    if self.choices and text not in self.choices:
      raise ValueError(
        f'{name} is {text!r}, expected one of {list(self.choices)}.'
        f'{nearest(text, self.choices, or_all=False)}'
      )
    kinds: dict[Any, tuple[Callable[[str], Any], str]] = {
      int: (int, 'a whole number'),
      float: (_finite, 'a finite number'),
      list: (_numbers, 'whole numbers with commas between them'),
      int | str: (_gamma, "a whole number, or 'adaptive'"),
    }
    if self.kind not in kinds:
      return text
    read, what = kinds[self.kind]
    try:
      return read(text)
    except ValueError as error:
      raise ValueError(f'{name} is {text!r}, expected {what}.') from error


def _finite(text: str) -> float:
  if not math.isfinite(value := float(text)):
    raise ValueError(f'{value} is no value of gin')
  return value


def _gamma(text: str) -> int | str:
  return text if text == 'adaptive' else int(text)


def _numbers(text: str) -> tuple[int, ...]:
  return tuple(int(part) for part in text.split(','))


FLAGS = (
  Flag(
    ('TARGET',),
    'CHECKPOINT_PATH',
    'the large model: a folder, a file or an id of the Hugging Face hub',
    ('try',),
  ),
  Flag(('DRAFT',), 'DRAFT_CHECKPOINT_PATH', 'the small model', ('try',)),
  Flag(
    ('FILE',),
    'INPUT_FILE',
    "text, a line for each input, plain or .gz; '-' is stdin; of a .tsv the"
    " first column, of a .jsonl 'inputs'. Outputs go to stdout then, the report"
    ' to stderr',
    _TEXTS,
    also={'STDOUT': 'outputs'},
  ),
  Flag(
    ('FILE',),
    'INPUT_FILE',
    'text, a prompt per line, as of `specdec decode`',
    ('calibrate',),
  ),
  Flag(
    ('FILE',),
    'INPUT_FILE',
    "inputs<TAB>targets on each line (.tsv), or .jsonl with 'inputs' and"
    " 'targets'",
    ('score', 'try'),
  ),
  Flag(
    ('--target', '--model', '--target-model'),
    'CHECKPOINT_PATH',
    'the model whose outputs are wanted: a folder, a file or an id of the'
    ' Hugging Face hub',
    ('decode', 'score', 'calibrate', 'convert', 'distil'),
  ),
  Flag(
    ('--texts', '--input', '--input-file'),
    'INPUT_FILE',
    'inputs as the target gets them, one a line, as of `specdec decode`',
    ('distil',),
  ),
  Flag(
    ('--draft', '--drafter', '--draft-model', '--assistant-model'),
    'DRAFT_CHECKPOINT_PATH',
    'the small model that proposes tokens',
    ('decode', 'calibrate'),
  ),
  Flag(
    ('--target', '--model', '--target-model'),
    'CHECKPOINT_PATH',
    'the model whose outputs are wanted, as of `specdec decode`; the shipped'
    ' pair if it is left out',
    _SERVER,
    # What the shipped pair needs, and others do not.
    also={
      'DRAFT_CHECKPOINT_PATH': None,
      'MODEL_NAME': None,
      'TARGET': None,
      'DRAFT': None,
      'VOCAB_PATH': None,
    },
  ),
  Flag(
    ('--draft', '--drafter', '--draft-model', '--assistant-model'),
    'DRAFT_CHECKPOINT_PATH',
    'the small model that proposes tokens',
    _SERVER,
    also={'DRAFT': None},
  ),
  Flag(
    ('--host',),
    'HOST',
    'the address to listen at; 0.0.0.0 is all of this machine',
    ('serve',),
  ),
  Flag(('--port',), 'PORT', 'its port', ('serve',), kind=int),
  Flag(
    ('--model-name', '--served-model-name'),
    'MODEL_NAME',
    'what requests call the model',
    _SERVER,
  ),
  Flag(
    ('--rows', '--max-num-seqs'),
    'ROWS',
    'outputs that are decoded together',
    _SERVER,
    kind=int,
  ),
  Flag(
    ('--replicas',),
    'REPLICAS',
    'servers behind one address, kept by Ray Serve; 0 is one without Ray',
    ('serve',),
    kind=int,
  ),
  Flag(
    ('--beams',),
    'BEAMS',
    'widths of the beam searches that are served',
    _SERVER,
    kind=list,
  ),
  Flag(
    ('--max-waiting',),
    'MAX_WAITING',
    'outputs that may wait; more are answered by 429',
    _SERVER,
    kind=int,
  ),
  Flag(
    ('--api-key-file',),
    'API_KEY_FILE',
    'a file with a key a line, one of which each request needs',
    ('serve',),
  ),
  Flag(
    ('--url',),
    'URL',
    'of a server that runs already, which is measured as it is',
    ('bench-serve',),
  ),
  Flag(
    ('--vocab', '--tokenizer', '--vocabulary'),
    'VOCAB_PATH',
    'a sentencepiece model, or a folder that holds a vocabulary; where it is'
    " left out, the target's own",
    _PAIR,
  ),
  Flag(
    ('--input', '--input-file'),
    'INPUT_FILE',
    'the same as FILE',
    _TEXTS,
    also={'STDOUT': 'outputs'},
  ),
  Flag(
    ('--input', '--input-file'),
    'INPUT_FILE',
    'the same as FILE',
    ('calibrate',),
  ),
  Flag(
    ('--output-dir', '--output'),
    'OUTPUT_DIR',
    'a folder for the results, which are kept there; a run that was killed goes'
    ' on in it',
    ('decode', 'demo', 'score', 'distil'),
  ),
  Flag(
    ('--output-dir', '--output'),
    'OUTPUT_DIR',
    'a new folder; for the format t5x a new file',
    ('convert',),
  ),
  Flag(
    ('--output-file', '--output'),
    'OUTPUT_FILE',
    'a file for what was measured; `specdec decode --calibration` takes it',
    ('calibrate',),
  ),
  Flag(
    ('--output-file', '--output'),
    'OUTPUT_FILE',
    'a file for the record of what was measured',
    ('try', 'bench-serve'),
  ),
  Flag(
    ('--mode',),
    'DECODING',
    'which loops decode; both are compared',
    _TEXTS,
    choices=('speculative', 'plain', 'both'),
  ),
  Flag(
    ('--gamma', '--num-speculative-tokens', '--num-assistant-tokens'),
    'GAMMA',
    "a number, or 'adaptive', for as long as it is sure enough (in the demo"
    ' what pays on its host, unless it is given): tokens that the drafter'
    ' proposes per round',
    ('decode', 'demo', 'try', *_SERVER),
    kind=int | str,
  ),
  Flag(
    ('--temperature',),
    'TEMPERATURE',
    '0 is greedy; above it outputs are sampled',
    _ENGINE,
    kind=float,
  ),
  Flag(
    ('--top-k',),
    'TOP_K',
    'samples come from the K most likely tokens; 0 is all',
    _TEXTS,
    kind=int,
  ),
  Flag(
    ('--top-p',),
    'TOP_P',
    'samples come from the most likely tokens that have this probability'
    ' together; 1 is all',
    _TEXTS,
    kind=float,
  ),
  Flag(
    ('--seed',),
    'SEED',
    'the seed of the samples',
    (*_TEXTS, 'score', 'try'),
    kind=int,
  ),
  Flag(
    ('--max-length', '--max-new-tokens', '--max-tokens', '--max-decode-len'),
    'MAX_DECODE_LEN',
    'tokens of an output at most',
    ('decode', 'calibrate', 'try', 'distil', *_SERVER),
    kind=int,
  ),
  Flag(
    ('--max-input-length', '--max-input-len'),
    'MAX_INPUT_LEN',
    'tokens of an input at most; a longer one is an error',
    ('decode', 'calibrate', 'try', *_SERVER),
    kind=int,
  ),
  Flag(
    ('--max-input-length', '--max-input-len'),
    'MAX_INPUT_LEN',
    'tokens of an input at most; longer ones are left out',
    ('distil',),
    kind=int,
  ),
  Flag(
    ('--minutes',),
    'MINUTES',
    'of all of it: a third at most to decode the texts, then to learn; the last'
    ' minutes, some at least, to compile and calibrate',
    ('distil',),
    kind=float,
  ),
  Flag(
    ('--num-layers',),
    'NUM_LAYERS',
    "layers of the target's decoder that become the drafter",
    ('distil',),
    kind=int,
  ),
  Flag(
    ('--batch-size',),
    'BATCH_SIZE',
    'inputs that are decoded together',
    (*_TEXTS, 'score'),
    kind=int,
  ),
  Flag(
    ('--batch-sizes',),
    'BATCHES',
    'numbers of inputs that are decoded together, a gamma for each',
    ('calibrate',),
    kind=list,
  ),
  Flag(
    ('--batching',),
    'BATCHING',
    "'continuous' gives the place of an input that is finished to the next one",
    (*_TEXTS, 'score'),
    choices=('fixed', 'continuous'),
  ),
  Flag(
    ('--num-samples', '--num-return-sequences', '--num-decodes'),
    'NUM_SAMPLES',
    'outputs for each input: samples, or the best beams',
    ('decode',),
    kind=int,
  ),
  Flag(
    ('--chat',),
    'CHAT',
    "each line is a user's message, put into the target's chat template",
    ('decode',),
    kind=bool,
  ),
  Flag(
    ('--adapter', '--lora', '--lora-path'),
    'ADAPTER',
    'a LoRA adapter of the large model, which is merged: a folder of PEFT',
    ('decode', 'score', 'calibrate', 'try', *_SERVER),
  ),
  Flag(
    ('--draft-adapter', '--draft-lora'),
    'DRAFT_ADAPTER',
    'likewise of the small model',
    ('decode', 'calibrate', 'try', *_SERVER),
  ),
  Flag(
    ('--draft-shortlist',),
    'DRAFT_SHORTLIST',
    'texts like the outputs: the small model proposes their tokens alone, which'
    ' is quicker where its vocabulary is large',
    ('decode', 'calibrate', 'try', *_SERVER),
  ),
  Flag(
    ('--source-lang', '--src-lang'),
    'SOURCE_LANG',
    'language of the texts, such as eng_Latn, of a model that translates'
    ' between many',
    _TRANSLATES,
  ),
  Flag(
    ('--target-lang', '--tgt-lang'),
    'TARGET_LANG',
    'language of the outputs, likewise',
    _TRANSLATES,
  ),
  Flag(
    ('--num-beams', '--beams', '--beam-size'),
    'NUM_BEAMS',
    'a beam search of this width, and its best output',
    _TEXTS,
    kind=int,
    also={'DECODER': 'beam'},
  ),
  Flag(
    ('--num-beams', '--beams', '--beam-size'),
    'NUM_BEAMS',
    'chooses gamma and --draft-beams for a beam search of this width as well',
    ('calibrate',),
    kind=int,
  ),
  Flag(
    ('--draft-beams',),
    'DRAFT_BEAMS',
    "the drafter's beams in a beam search; twice as many where it is left out",
    _TEXTS,
    kind=int,
  ),
  Flag(
    ('--alpha',),
    'ALPHA',
    "length penalty of a beam search, as T5X's brevity penalty",
    _TEXTS,
    kind=float,
  ),
  Flag(
    ('--length-penalty',),
    'LENGTH_PENALTY',
    'that of transformers instead, with its rules',
    ('decode',),
    kind=float,
  ),
  Flag(
    ('--calibration',),
    'CALIBRATION',
    'a file of `specdec calibrate`, which chooses gamma',
    (*_TEXTS, 'serve'),
  ),
  Flag(
    ('--fallback',),
    'DRAFTER_RESTS',
    'lets the drafter rest where a text shows that it is not worth its time',
    (*_TEXTS, 'serve'),
    kind=bool,
  ),
  Flag(
    ('--dtype',),
    'DTYPE',
    'of parameters and computation: float32, bfloat16, or kernels of int8 or'
    ' int4',
    (*_PAIR, 'convert'),
  ),
  Flag(
    ('--draft-dtype',),
    'DRAFT_DTYPE',
    "the drafter's own: of int8 it changes no output",
    ('decode', 'calibrate', 'try', *_SERVER),
  ),
  Flag(
    ('--prefix',),
    'PREFIX',
    "put before each input; 'translate English to German: ' for the sample",
    ('try',),
  ),
  Flag(
    ('--format',),
    'FORMAT',
    'what is written: orbax, safetensors (a Hugging Face folder) or t5x',
    ('convert',),
    choices=('orbax', 'safetensors', 't5x'),
  ),
  Flag(
    ('--stop', '--stop-string', '--stop-strings'),
    'STOP_STRINGS',
    'text that ends an output and is no part of it; may be given several times',
    ('decode',),
    kind=tuple,
  ),
  Flag(
    ('--overwrite',),
    'OVERWRITE',
    'replaces the results in the output folder',
    (*_TEXTS, 'score'),
    kind=bool,
  ),
)


def of(command: str) -> list[Flag]:
  """The flags of a command."""
  return [flag for flag in FLAGS if command in flag.commands]


def spelling(command: str, macro: str) -> str:
  """How a macro is written on the command line of a command."""
  for flag in of(command):
    if flag.macro == macro:
      return flag.names[0]
  return f'--gin.{macro}=...'


def dashed(arg: str, flags: Iterable[Flag]) -> str:
  """--max_length as --max-length, if that is one of the flags."""
  name, equals, value = arg.partition('=')
  new = name.replace('_', '-')
  known = any(new in flag.names for flag in flags)
  return f'{new}{equals}{value}' if known else arg


def places(flags: Iterable[Flag]) -> list[str]:
  """The names of what has no dashes."""
  return [f.names[0] for f in flags if not f.names[0].startswith('-')]


def defaults(text: str) -> dict[str, str]:
  """Macro -> its value in the text of a run file, where that is a literal."""
  found = re.findall(r'^([A-Z]\w*) = ([^%@\s].*?)(?: +#.*)?$', text, re.M)
  return {name: value for name, value in found if value not in _NOTHING}


def add(
  parser: argparse.ArgumentParser,
  flags: Sequence[Flag],
  known: Mapping[str, str],
) -> None:
  """Adds the flags to a parser; `bindings` reads what was given.

  Args:
    parser: to add to.
    flags: of one command.
    known: macro -> its value where the flag is not given, for --help.
  """
  inputs = parser.add_argument_group('inputs')
  group = parser.add_argument_group('flags without gin')
  for number, flag in enumerate(flags):
    if not flag.names[0].startswith('-'):
      # The name of a place is its `dest`.
      inputs.add_argument(flag.names[0], nargs='?', help=flag.help)
    elif flag.kind is bool:
      group.add_argument(
        *flag.names, dest=f'plain_{number}', action='store_true', help=flag.help
      )
    else:
      group.add_argument(
        *flag.names,
        dest=f'plain_{number}',
        action='append',
        metavar=flag.metavar,
        # Where a flag changes more than its macro, there is no default without.
        help=flag.help + _default(None if flag.also else known.get(flag.macro)),
      )


def _default(value: str | None) -> str:
  return '' if value is None else f' (default: {value})'.replace('%', '%%')


def also(
  args: argparse.Namespace, flags: Sequence[Flag]
) -> list[tuple[str, Any]]:
  """Macros and what they are where nobody says otherwise."""
  return [
    (macro, value)
    for number, flag in enumerate(flags)
    if _given(args, number, flag) is not None
    for macro, value in flag.also.items()
  ]


def _given(args: argparse.Namespace, number: int, flag: Flag) -> Any:
  """What was given: a text, several, or True; None or False is nothing."""
  return getattr(args, f'plain_{number}', getattr(args, flag.names[0], None))


def bindings(
  args: argparse.Namespace, flags: Sequence[Flag]
) -> Mapping[str, tuple[str, Any]]:
  """Macro -> how it was written and its value, of the flags that were given.

  Raises:
    ValueError: a value is wrong, or two flags say different things.
  """
  found: dict[str, tuple[str, Any]] = {}
  for number, flag in enumerate(flags):
    name = flag.names[0]
    given = _given(args, number, flag)
    if given is None or given is False:
      continue
    if isinstance(given, str):
      given = [given]
    value: Any = True
    if given is not True:
      values = [flag.value(name, text) for text in given]
      value = tuple(values) if flag.kind is tuple else values[-1]
    if flag.macro in found and found[flag.macro][1] != value:
      other, before = found[flag.macro]
      raise ValueError(
        f'{other} is {before!r} and {name} is {value!r}, which mean the same;'
        ' give one of them.'
      )
    found[flag.macro] = name, value
  return found
