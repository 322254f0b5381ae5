"""What can be run: a function for each command, whose docstring is its --help.

`specdec NAME` runs those of `COMMANDS`; `python scripts/NAME.py` runs those of
`SCRIPTS`, by their old names. Each takes T5X's flags, see `gin_flags`, and some
take plain ones, see `plain_flags`; the macros of a run are listed in the header
of its gin file. What a command needs is imported when it runs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


def accelerator() -> None:
  """Measures Table 2 in forced-acceptance mode on one GPU or TPU.

    specdec measure --gin_file=gin/runs/accelerator.gin \\
      --gin.OUTPUT_DIR=benchmarks/results/accelerator

  Leaves a record for each row in the records/ of OUTPUT_DIR and goes on where
  it was stopped. It needs only jax, flax, numpy and gin-config. `reproduce`
  with gin/runs/table2.gin and the same OUTPUT_DIR makes tables of them.
  """
  from specdec_jax.engine import compilation_cache
  from specdec_jax.paper import table2_suite

  compilation_cache.enable(None)
  table2_suite.run(_build(table2_suite.SuiteConfig))


def benchmark() -> None:
  """Measures calls and loops of a pair of models on this machine.

    specdec measure --gin_file=gin/runs/benchmark_base.gin

  The table goes to stdout.
  """
  from specdec_jax.measure import benchmark, report

  report.show(_build(benchmark.BenchmarkConfig))


def calibrate() -> None:
  """Says whether speculation pays here for a pair, with which gamma.

    specdec calibrate --target google/flan-t5-xl --draft google/flan-t5-small \\
      prompts.txt --output-file calibration.json

    specdec calibrate --gin_file=gin/runs/calibrate_demo.gin

  FILE has prompts of your own, one per line. The verdict comes first, the
  tables that it rests on after it, all to stdout. `specdec decode` takes what
  was measured by --calibration calibration.json.
  """
  from specdec_jax.measure import calibrate

  calibrate.calibrate(_build(calibrate.CalibrateConfig))


def compile_check() -> None:
  """Compiles for a GPU or TPU without one; counts kernels and bytes.

  Table 2 on one H200:

    specdec compile-check --gin_file=gin/runs/compile_check.gin \\
      --gin.DEVICE="'h200'" --gin.OUTPUT_DIR=outputs/h200

  Models that are split over slices of 4 and 16 TPU chips:

    specdec compile-check --gin_file=gin/runs/tpu_slices.gin \\
      --gin.OUTPUT_DIR=outputs/tpu_v4_slices

  Beam search, plain and speculative, on one H200:

    specdec compile-check --gin_file=gin/runs/compile_check_beams.gin \\
      --gin.OUTPUT_DIR=outputs/h200_beams

  A call over a tree of proposals, there too:

    specdec compile-check --gin_file=gin/runs/compile_check_trees.gin \\
      --gin.OUTPUT_FILE=outputs/h200_trees.json

  results.json and report.md go to the output folder.
  """
  import jax

  from specdec_jax.measure.compiled import (
    beam_check,
    pair_check,
    tpu_check,
    tpu_slices,
    tree_check,
  )
  from specdec_jax.paper import printed

  # With a plug-in installed JAX would look for its device here, and wait.
  jax.config.update('jax_platforms', 'cpu')
  if _is_configured('.SlicesConfig'):
    tpu_slices.check(_build(tpu_slices.SlicesConfig))
    return
  if _is_configured('.BeamCheckConfig'):
    beam_check.check(_build(beam_check.BeamCheckConfig))
    return
  if _is_configured('.TreeCheckConfig'):
    tree_check.check(_build(tree_check.TreeCheckConfig))
    return
  old = _is_configured('.TpuCheckConfig')
  kind = tpu_check.TpuCheckConfig if old else pair_check.PairCheckConfig
  pair_check.check(_build(kind), printed.TABLE2)


def convert() -> None:
  """Writes a checkpoint anew: for Orbax, Hugging Face or T5X.

    specdec convert --target t5_1_1_small/checkpoint_1000000 \\
      --output-dir outputs/t5_1_1_small --format safetensors

    specdec convert --gin_file=gin/models/t5_1_1/small.gin \\
      --gin_file=gin/runs/convert_checkpoint.gin --target FOLDER \\
      --gin.TARGET=%T5_1_1_SMALL --output-dir FOLDER --format orbax

  A line about it goes to stdout.
  """
  from specdec_jax.checkpoints import convert

  print(convert.convert(_build(convert.ConvertConfig)))


def decode() -> None:
  """Decodes text speculatively, plainly, or both ways, compared.

    specdec decode --target google/flan-t5-xl --draft google/flan-t5-small \\
      input.txt > output.txt

    echo 'Good morning!' | specdec decode --gin_file=gin/runs/demo.gin -

  FILE has an input per line. Outputs go to stdout in the order of the inputs, a
  line for each, and the report to stderr; with --output-dir all of it is kept,
  and a run that was killed goes on when it is started again.

  A run file that configures `infer.TaskConfig` is over a task or a file of
  examples, as with T5X's infer.py; others are over lines of text
  (`infer.DecodeConfig`). Where FILE is not given the report goes to stdout.
  """
  from specdec_jax import infer

  if _is_configured('.TaskConfig'):
    infer.decode_task(_build(infer.TaskConfig), _beside())
  else:
    infer.decode(_build(infer.DecodeConfig), _beside())


def demo() -> None:
  """Translates English to German by the shipped pair, both ways.

    specdec demo

    echo 'Where can I buy a ticket?' | specdec demo -

  Without FILE it translates 48 sentences that are shipped. The report has some
  outputs, calls and time of plain and of speculative decoding, and whether all
  outputs agree. FILE has English sentences of yours, one per line; outputs then
  go to stdout, a line for each, and the report to stderr.
  """
  decode()


def distil() -> None:
  """Makes a drafter for a T5 of your own, from texts alone.

    specdec distil --target my_t5 --texts inputs.txt --output-dir my_drafter

    specdec distil --gin_file=gin/models/demo/target.gin \\
      --gin_file=gin/runs/own_drafter.gin --gin.TARGET=%DEMO_TARGET \\
      --target demo/target.msgpack --vocab demo/vocab.model \\
      --texts inputs.txt --output-dir my_drafter --minutes 10

  The target decodes the texts, one a line; a part of its decoder, which reads
  its encoder, learns what it said; and the pair is calibrated on texts that
  were held out. The same command goes on where one was stopped. What the
  drafter is worth goes to stdout, progress to stderr.
  """
  from specdec_jax import infer

  infer.distil(_build(infer.DistilConfig))


def drafter_costs() -> None:
  """Measures what a draft costs, for every drafter beside one target.

    specdec measure --gin_file=gin/runs/drafter_costs.gin

  The table goes to stdout.
  """
  from specdec_jax.measure import drafter_costs

  drafter_costs.drafter_costs(_build(drafter_costs.DrafterCostsConfig))


def evaluate() -> None:
  """Scores a pair on a test set: BLEU, and how often drafts are accepted.

    specdec measure --gin_file=gin/runs/eval.gin --gin.EVAL_FILE=FILE

  The report goes to stdout.
  """
  from specdec_jax.infer import quality

  quality.evaluate(_build(quality.EvaluateConfig), beside=_beside())


def fit_ngram() -> None:
  """Fits an n-gram table: a drafter without a network.

    specdec train --gin_file=gin/runs/fit_ngram.gin \\
      --gin.TRAIN_FILES="['text.txt']" --gin.OUTPUT_FILE=bigram.npz

  What it holds goes to stdout.
  """
  from specdec_jax.measure import ngram

  ngram.fit_ngram(_build(ngram.FitNgramConfig))


def gamma_curve() -> None:
  """Measures the speed-up at each gamma, beside what a calibration predicts.

    specdec measure --gin_file=gin/runs/gamma_demo.gin \\
      --gin.CALIBRATION=calibration.json --gin.PLOT_FILE=speed_up.png

  The table goes to stdout.
  """
  from specdec_jax.measure import gamma_curve

  gamma_curve.gamma_curve(_build(gamma_curve.GammaCurveConfig))


def compare_methods() -> None:
  """Measures ways to speculate beside each other.

    specdec measure --gin_file=gin/runs/methods.gin \\
      --gin.CHECKPOINT_PATH=target --gin.DRAFT_CHECKPOINT_PATH=draft \\
      --gin.INPUT_FILE=prompts.txt

  The table goes to stdout.
  """
  from specdec_jax.measure import methods

  methods.compare_methods(_build(methods.MethodsConfig))


def beam_grid() -> None:
  """Measures beam search, plain and speculative, over gamma and widths.

    specdec measure --gin_file=gin/runs/beams_demo.gin \\
      --gin.OUTPUT_FILE=beams.json

  The table goes to stdout.
  """
  from specdec_jax.measure import beam_grid

  beam_grid.beam_grid(_build(beam_grid.BeamGridConfig))


def predict_trees() -> None:
  """Tokens a call of trees: predicted from acceptance by rank, and measured.

    specdec measure --gin_file=gin/runs/trees_demo.gin

  The table goes to stdout.
  """
  from specdec_jax.measure import tree_prediction

  tree_prediction.predict_trees(_build(tree_prediction.TreePredictionConfig))


def measure() -> None:
  """Measures costs, acceptance, throughput or quality.

    specdec measure --gin_file=gin/runs/alpha_demo.gin

    specdec measure --gin_file=gin/runs/benchmark_base.gin

  Run files, in gin/runs/, and what each measures:

    alpha_demo       how often the target accepts the drafter's tokens
    benchmark_base   calls and both loops; also benchmark_demo
    gamma_demo       the speed-up at each gamma, beside the predicted one
    methods          ways to speculate: tokens a call, time, speed-up; also
                     methods_demo
    trees_demo       trees of proposals: tokens a call, predicted and real
    beams_demo       beam search, plain and with each gamma and draft width
    throughput_demo  a data set: continuous batching, batch sizes
    drafter_costs    what a draft costs, for each kind of drafter
    eval             BLEU and acceptance on a test set
    peers_demo       transformers and CTranslate2 on the same weights
    accelerator      all of Table 2 on one GPU or TPU

  Their headers say what they need and how long they take. Tables go to stdout.
  """
  _chosen(
    'measure',
    {
      '.SuiteConfig': accelerator,
      '.MeasureAlphaConfig': measure_alpha,
      '.BenchmarkConfig': benchmark,
      '.GammaCurveConfig': gamma_curve,
      '.MethodsConfig': compare_methods,
      '.TreePredictionConfig': predict_trees,
      '.BeamGridConfig': beam_grid,
      '.ThroughputConfig': throughput,
      '.DrafterCostsConfig': drafter_costs,
      '.EvaluateConfig': evaluate,
      '.PeersConfig': peers,
    },
  )


def measure_alpha() -> None:
  """Measures a pair's acceptance rate: Corollary 3.6 on the target's tokens.

    specdec measure --gin_file=gin/runs/alpha_demo.gin

  The table goes to stdout.
  """
  from specdec_jax.measure import alpha

  alpha.measure_alpha(_build(alpha.MeasureAlphaConfig))


def peers() -> None:
  """Times this project beside transformers and CTranslate2 on equal weights.

    specdec measure --gin_file=gin/runs/peers_demo.gin

  Needs the extra: pip install 'specdec_jax[peers]'. The table goes to stdout.
  """
  from specdec_jax.measure import peers

  peers.compare(_build(peers.PeersConfig))


def reproduce() -> None:
  """Writes the paper's tables beside what is measured here.

    specdec reproduce --gin_file=gin/runs/table1.gin \\
      --gin.OUTPUT_DIR=outputs/table1

    specdec reproduce --gin_file=gin/runs/trace_demo.gin \\
      --gin.OUTPUT_DIR=outputs/trace

  The tables go to stdout.
  """
  from specdec_jax.paper import reproduce

  for path in reproduce.reproduce(_build(reproduce.ReproduceConfig)):
    print(path)


def score() -> None:
  """Scores given outputs: the target's log-probability of each.

    specdec score --target google/flan-t5-xl pairs.tsv

    specdec score --gin_file=gin/models/demo/target.gin \\
      --gin_file=gin/runs/score.gin --gin.TARGET=%DEMO_TARGET \\
      --target demo/target.msgpack --vocab demo/vocab.model pairs.tsv

  FILE has an example per line. The scores, in nats, go to stdout in the same
  order, a line for each, and the report to stderr; with --output-dir all of it
  is kept, as T5X's infer.py does in the mode 'score'.
  """
  from specdec_jax import infer

  infer.decode_task(_build(infer.TaskConfig), _beside())


def serve() -> None:
  """Serves a pair by HTTP, as OpenAI's completions.

    specdec serve

    specdec serve --target google/flan-t5-xl --draft google/flan-t5-small

    specdec serve --replicas 2

  Without --target it serves the shipped pair, which translates English to
  German. It listens to this machine alone unless --host says otherwise; docs/
  serve.md describes the requests. The log goes to stderr, a JSON object a line.
  SIGTERM makes it finish what it has taken, and end.
  """
  from specdec_jax import serving
  from specdec_jax.cli import gin_flags

  remake = gin_flags.builder(serving.ServeConfig)
  serving.serve(_build(serving.ServeConfig), remake)


def bench_serve() -> None:
  """Measures a server: first token, between, throughput, goodput.

    specdec bench-serve

    specdec bench-serve --output-file serving.json \\
      --gin.CALIBRATION=calibration.json --gin.PLOT_FILE=serving.png

    specdec bench-serve --url http://127.0.0.1:8000

  It starts the server itself, in a process of its own for each way to decode,
  unless --url names one that runs; models and flags are those of `specdec
  serve`. Needs the extra: pip install 'specdec_jax[serve,load]'. The tables go
  to stdout.
  """
  import pathlib
  import sys
  import tempfile

  from specdec_jax.cli import gin_flags
  from specdec_jax.serving import bench, bench_report

  config = _build(bench.BenchServeConfig)
  with tempfile.TemporaryDirectory() as folder:
    same = pathlib.Path(folder, 'serve.gin')
    same.write_text(gin_flags.whole_config(), 'utf-8')
    command = [sys.executable, '-m', 'specdec_jax', 'serve']
    record = bench.bench_serve(config, [*command, f'--gin_file={same}'])
  if config.plot_file:
    bench_report.plot_serving(config.plot_file, record)


def throughput() -> None:
  """Measures data-set decoding: full slots beside fixed batches; batch sizes.

    specdec measure --gin_file=gin/runs/throughput_demo.gin \\
      --gin.OUTPUT_FILE=throughput.json --gin.PLOT_FILE=throughput.png

  The tables go to stdout.
  """
  from specdec_jax.measure import throughput, throughput_picture

  config = _build(throughput.ThroughputConfig)
  record = throughput.measure_throughput(config)
  if config.plot_file:
    throughput_picture.plot_throughput(config.plot_file, record)


def train() -> None:
  """Trains a model, distils a drafter, or fits an n-gram table.

    specdec train --gin_file=gin/runs/train.gin \\
      --gin.OUTPUT_DIR=FOLDER --gin.TRAIN_FILE=FILE --gin.VOCAB_PATH=FILE

    specdec train --gin_file=gin/runs/fit_ngram.gin \\
      --gin.TRAIN_FILES="['text.txt']" --gin.OUTPUT_FILE=bigram.npz

  The same command goes on where a killed run was. Progress goes to stderr.
  """
  _chosen('train', {'.TrainRun': _train, '.FitNgramConfig': fit_ngram})


def try_() -> None:
  """Fetches a pair, checks it, and decodes a sample both ways.

    specdec try google/flan-t5-xl google/flan-t5-small --output-file try.json

    specdec try outputs/my_target google/flan-t5-small mine.tsv --prefix ''

  A first look: is it quicker here, how much is accepted, do all outputs agree,
  and how good are they? FILE may have examples of your own.
  """
  from specdec_jax import infer

  infer.look(_build(infer.TryConfig))


def _train() -> None:
  from specdec_jax import training

  training.train(_build(training.TrainRun), beside=_beside())


def _build(cls: type) -> Any:
  from specdec_jax.cli import gin_flags

  return gin_flags.build(cls)


def _beside() -> dict[str, Callable[[], str]]:
  """What goes into an output folder beside the results."""
  from specdec_jax.cli import gin_flags

  return {'operative_config.gin': gin_flags.operative_config}


def _is_configured(ending: str) -> bool:
  from specdec_jax.cli import gin_checks

  return any(name.endswith(ending) for name in gin_checks.configured())


def _chosen(name: str, functions: dict[str, Callable[[], None]]) -> None:
  """Calls the function of the configuration that the run file has.

  Raises:
    ValueError: it has none of them, or is a run of another command.
  """
  others = {'.ReproduceConfig': 'reproduce', '.TaskConfig': 'decode'}
  others |= {'.DecodeConfig': 'decode', '.CalibrateConfig': 'calibrate'}
  for ending, other in others.items():
    if _is_configured(ending):
      raise ValueError(
        f'This run file is one of `specdec {other}`, not of `specdec {name}`.'
      )
  for ending, function in functions.items():
    if _is_configured(ending):
      return function()
  known = ', '.join(ending.removeprefix('.') for ending in functions)
  raise ValueError(
    f'The gin files configure none of {known}, of which `specdec {name}` needs'
    f' one. `specdec {name} --help` names run files that do.'
  )


@dataclasses.dataclass(frozen=True)
class Command:
  """A command of `specdec`.

  Attributes:
    function: does it, when gin's configuration is loaded.
    run_file: which it takes where no --gin_file is given; None requires one.
  """

  function: Callable[[], None]
  run_file: str | None = None

  @property
  def summary(self) -> str:
    """The first line of its help."""
    return str(self.function.__doc__).partition('\n')[0].rstrip('.')


# Name -> command, in the order of --help. `simulate` has flags of its own.
COMMANDS = {
  'demo': Command(demo, 'gin/runs/demo.gin'),
  'decode': Command(decode, 'gin/runs/decode.gin'),
  'try': Command(try_, 'gin/runs/try.gin'),
  'score': Command(score, 'gin/runs/score.gin'),
  'serve': Command(serve, 'gin/runs/serve.gin'),
  'bench-serve': Command(bench_serve, 'gin/runs/bench_serve_demo.gin'),
  'calibrate': Command(calibrate, 'gin/runs/calibrate.gin'),
  'measure': Command(measure),
  'train': Command(train),
  'distil': Command(distil, 'gin/runs/own_drafter.gin'),
  'convert': Command(convert, 'gin/runs/convert_checkpoint.gin'),
  'reproduce': Command(reproduce),
  'compile-check': Command(compile_check),
}
_SCRIPTS = (
  accelerator,
  benchmark,
  drafter_costs,
  evaluate,
  fit_ngram,
  measure_alpha,
  peers,
  throughput,
)
# Name of a script -> command; its run file is always given.
SCRIPTS = {
  **{function.__name__: Command(function) for function in _SCRIPTS},
  **{
    name: dataclasses.replace(COMMANDS[name], run_file=None)
    for name in ('calibrate', 'decode', 'reproduce', 'train')
  },
  'convert_checkpoint': Command(convert),
  'tpu_check': Command(compile_check),
}
# What somebody may type who knows the scripts -> the command.
SAID_OTHERWISE = {
  'accelerator': 'measure',
  'bench_serve': 'bench-serve',
  'benchmark': 'measure',
  'convert_checkpoint': 'convert',
  'distill': 'distil',
  'drafter_costs': 'measure',
  'evaluate': 'measure',
  'fit_ngram': 'train',
  'generate': 'decode',
  'infer': 'decode',
  'measure_alpha': 'measure',
  'peers': 'measure',
  'throughput': 'measure',
  'tpu_check': 'compile-check',
  'translate': 'decode',
}


def run(name: str, argv: Sequence[str] | None = None) -> int:
  """Runs the command of a script with `argv`, or the process's; the status."""
  from specdec_jax.cli import gin_flags

  said = SAID_OTHERWISE.get(name, name)
  plain = said if said in ('calibrate', 'convert', 'decode') else ''
  return gin_flags.main(SCRIPTS[name].function, argv, plain)
