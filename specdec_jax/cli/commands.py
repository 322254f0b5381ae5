"""The commands: a function for each, whose docstring is its --help.

`specdec NAME` runs a command of `COMMANDS`, `python scripts/NAME.py` one of
`SCRIPTS`. Each takes T5X's flags, and the flags that `gin_flags` makes of the
fields of the classes that its run file configures. A command imports its
modules when it runs.
"""

import os
import shlex
from collections.abc import Callable
from typing import Any

from specdec_jax.cli import Command, resumable


def calibrate() -> None:
  """Measures whether a drafter saves time, and chooses gamma.

    specdec calibrate --target google/flan-t5-xl --draft google/flan-t5-small \\
      prompts.txt --output-file calibration.json

    specdec calibrate --gin_file=gin/runs/calibrate_demo.gin

  FILE has prompts of your own, one per line. The verdict for this machine goes
  to stdout, followed by tables of the measured costs. With `--calibration
  calibration.json` other commands use what was measured.
  """
  from specdec_jax.measure import calibrate

  calibrate.calibrate(_build(calibrate.CalibrateConfig))


def compile_check() -> None:
  """Compiles Table 2's pairs for a GPU or TPU that is not present.

  Table 2 is in the paper. For one H200, and for one chip of a TPU v4:

    specdec compile-check --gin_file=gin/runs/compile_check.gin
    specdec compile-check --gin_file=gin/runs/compile_check.gin \\
      --device=tpu_v4 --output-file=tpu_v4.json

  A table says whether each pair fits into memory, how many bytes are read per
  token, and the speed-up that follows from these bytes.
  """
  import jax

  from specdec_jax.measure import pair_check

  # Otherwise JAX would wait for the device of an installed plug-in.
  jax.config.update('jax_platforms', 'cpu')
  pair_check.check(_build(pair_check.PairCheckConfig))


def convert() -> None:
  """Converts a checkpoint for Orbax, Hugging Face or T5X.

    specdec convert --target t5_1_1_small/checkpoint_1000000 \\
      --output-dir outputs/t5_1_1_small --format safetensors

    specdec convert --gin_file=gin/models/t5_1_1.gin \\
      --gin_file=gin/runs/convert_checkpoint.gin --target FOLDER \\
      --gin.TARGET=%T5_1_1_SMALL --output-dir FOLDER --format orbax

  A line about the new checkpoint goes to stdout.
  """
  from specdec_jax.checkpoints import convert

  print(convert.convert(_build(convert.ConvertConfig)))


def decode() -> None:
  """Decodes text speculatively or plainly, or compares the two.

    specdec decode --target google/flan-t5-xl --draft google/flan-t5-small \\
      input.txt > output.txt

    echo 'Good morning!' | specdec decode --gin_file=gin/runs/demo.gin -

  FILE has an input per line. Outputs go to stdout in the order of the inputs, a
  line for each, and the report to stderr. --output-dir names a folder that
  keeps both; with it, the same command continues a run that was killed.

  A run file that binds `mixture_or_task_name` decodes a task or a file of
  examples, as T5X's infer.py does; other run files decode lines of text. If
  FILE is not given, the report goes to stdout.
  """
  from specdec_jax import infer

  config = _build(infer.DecodeConfig)
  with resumable(config.output_dir):
    infer.decode(config, _beside())


def demo() -> None:
  """Translates English to German, with drafts and without.

    specdec demo

    echo 'Where can I buy a ticket?' | specdec demo -

  Without FILE the shipped pair translates 48 shipped sentences. The report has
  some outputs, the calls and the time of plain and of speculative decoding,
  and says whether all outputs agree. FILE has English sentences of yours, one
  per line; outputs then go to stdout, a line for each, and the report to
  stderr.
  """
  decode()


def distil() -> None:
  """Makes a drafter for a model of your own, from texts alone.

    specdec distil --target my_t5 --texts inputs.txt --output-dir my_drafter

    specdec distil --target demo --texts inputs.txt --output-dir my_drafter \\
      --minutes 10

  The target decodes the texts, one a line. Some layers of its decoder, which
  read the target's encoder, are trained on these outputs. Then the pair is
  calibrated on held-out texts. The same command continues a stopped run. The
  speed-up goes to stdout, progress to stderr; the last line is a command that
  decodes with the drafter.
  """
  from specdec_jax import training
  from specdec_jax.cli import gin_flags
  from specdec_jax.training.own_drafter import CALIBRATION, HELD_OUT

  config = _build(training.DistilConfig)
  folder = config.output_dir
  with resumable(folder):
    calibrated = training.distil(config)
  argv = ['decode', *gin_flags.of_models, '--draft', folder]
  for name, language in config.languages.items():
    argv += [f'--{name.replace("_", "-")}', language] if language else []
  if calibrated is not None:
    argv += ['--calibration', os.path.join(folder, CALIBRATION)]
  argv.append(os.path.join(folder, HELD_OUT))
  print(f'specdec {shlex.join(argv)}')


def measure() -> None:
  """Measures costs, acceptance or throughput.

    specdec measure --gin_file=gin/runs/alpha_demo.gin

    specdec measure --gin_file=gin/runs/benchmark_base.gin

  Run files, in gin/runs/, and what each measures:

    alpha_demo       how often the target accepts the drafter's tokens
    benchmark_base   the time of model calls, of plain and of speculative
                     decoding; also benchmark_demo
    gamma_demo       the speed-up at each gamma, beside the predicted one
    methods          methods of speculation: tokens per call, time, speed-up;
                     also methods_demo
    throughput_demo  the speed-up by the number of rows decoded together

  The headers of these files say what a run needs and how long it takes. Tables
  go to stdout.
  """
  from specdec_jax.measure import acceptance, calls, compare

  functions: dict[type, Callable[[Any], object]] = {
    acceptance.MeasureAlphaConfig: acceptance.measure_alpha,
    calls.BenchmarkConfig: calls.benchmark,
    compare.CompareConfig: compare.compare,
  }
  _chosen('measure', functions)


def reproduce() -> None:
  """Measures the paper's tables anew, beside the paper's numbers.

    specdec reproduce --gin_file=gin/runs/table1.gin \\
      --output-dir=outputs/table1

    specdec reproduce --gin_file=gin/runs/table2.gin \\
      --output-dir=outputs/table2

    specdec reproduce --gin_file=gin/runs/trace_demo.gin \\
      --output-dir=outputs/trace

  The tables go to stdout.
  """
  from specdec_jax.paper import reproduce

  for path in reproduce.reproduce(_build(reproduce.ReproduceConfig)):
    print(path)


def score() -> None:
  """Scores given outputs by the target's log-probability of each.

    specdec score --target google/flan-t5-xl pairs.tsv

    specdec score --target demo pairs.tsv

  FILE has an input and an output per line. The scores, in nats, go to stdout in
  the same order, a line for each, and the report to stderr. --output-dir names
  a folder that keeps both, in the form of T5X's infer.py in its mode 'score'.
  """
  decode()


def serve() -> None:
  """Serves a pair over HTTP, by OpenAI's API for completions.

    specdec serve

    specdec serve --target google/flan-t5-xl --draft google/flan-t5-small

    specdec serve --replicas 2

  Without --target the shipped pair is served, which translates English to
  German. Only this machine can reach the server unless --host says otherwise;
  docs/serve.md describes the requests. The log goes to stderr, a JSON object
  per line. SIGTERM makes the server finish the requests that it has, and end.
  """
  from specdec_jax import serving
  from specdec_jax.cli import gin_flags

  remake = gin_flags.builder(serving.ServeConfig)
  serving.serve(_build(serving.ServeConfig), remake)


def train() -> None:
  """Trains a model, distils a drafter, or fits an n-gram table.

    specdec train --gin_file=gin/runs/train.gin \\
      --model-dir=FOLDER --train-file=FILE --gin.VOCAB_PATH=FILE

    specdec train --gin_file=gin/runs/fit_ngram.gin \\
      --train-files text.txt --output-file=bigram.npz

  The same command continues a run that was killed. Progress goes to stderr.
  """
  from specdec_jax import training
  from specdec_jax.training import ngram

  def train(run: training.TrainRun) -> None:
    with resumable(run.model_dir):
      training.train(run, beside=_beside())

  _chosen(
    'train', {training.TrainRun: train, ngram.FitNgramConfig: ngram.fit_ngram}
  )


def try_() -> None:
  """Fetches a pair, checks it, and decodes with drafts and without.

    specdec try google/flan-t5-xl google/flan-t5-small

    specdec try outputs/my_target google/flan-t5-small mine.tsv --prefix ''

  The report answers the first questions about a pair: is it quicker than the
  target alone on this machine, how many drafted tokens are accepted, do all
  outputs agree, and how good are they? FILE may have examples of your own.
  """
  decode()


def _build(cls: type) -> Any:
  from specdec_jax.cli import gin_flags

  return gin_flags.build(cls)


def _beside() -> dict[str, Callable[[], str]]:
  """Returns further files of a run: name -> function that makes the text."""
  import gin

  return {'operative_config.gin': gin.operative_config_str}


def _chosen(name: str, functions: dict[type, Callable[[Any], object]]) -> None:
  """Calls the function for the class that the run file configures.

  Raises:
    ValueError: the run file configures another class.
  """
  from specdec_jax.cli import gin_flags

  roots = {root.rpartition('.')[2] for root in gin_flags.roots()}
  for config, function in functions.items():
    if config.__name__ in roots:
      function(_build(config))
      return
  names = ', '.join(config.__name__ for config in functions)
  raise ValueError(
    f'The gin files configure {", ".join(sorted(roots))}; `specdec {name}`'
    f' needs one of {names}. `specdec {name} --help` names run files of these.'
  )


_FILE = ('input',)
_OF_TEXTS = {'--input': {'STDOUT': 'outputs'}}
# The shipped drafter, and the name of the shipped pair, fit no other target.
_OTHER_PAIR = {'--target': {'DRAFT_CHECKPOINT_PATH': None, 'MODEL_NAME': None}}

# Name -> command, in the order of --help.
COMMANDS = {
  'demo': Command(demo, 'gin/runs/demo.gin', _FILE, _OF_TEXTS),
  'decode': Command(decode, 'gin/runs/decode.gin', _FILE, _OF_TEXTS),
  'try': Command(try_, 'gin/runs/try.gin', ('target', 'draft', 'input')),
  'score': Command(score, 'gin/runs/score.gin', _FILE),
  'serve': Command(serve, 'gin/runs/serve.gin', implied=_OTHER_PAIR),
  'calibrate': Command(calibrate, 'gin/runs/calibrate.gin', _FILE),
  'measure': Command(measure),
  'train': Command(train),
  'distil': Command(distil, 'gin/runs/own_drafter.gin'),
  'convert': Command(convert, 'gin/runs/convert_checkpoint.gin'),
  'reproduce': Command(reproduce),
  'compile-check': Command(compile_check, 'gin/runs/compile_check.gin'),
}
# T5X users start these with a --gin_file.
SCRIPTS = {x: COMMANDS[x]._replace(run_file=None) for x in ('decode', 'train')}
