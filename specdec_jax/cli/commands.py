"""What can be run: a function a command, whose docstring is its `--help`.

`python scripts/NAME.py` is `run('NAME')`. Each command takes T5X's flags, see
`gin_flags`; the macros of a run are listed in the header of its gin file.
What a command needs is imported when it runs.
"""

from collections.abc import Sequence

from specdec_jax.cli import gin_checks, gin_flags


def accelerator() -> None:
  """Measures Table 2 in forced-acceptance mode on one GPU or TPU.

    python scripts/accelerator.py --gin_file=gin/runs/accelerator.gin \\
      --gin.OUTPUT_DIR=benchmarks/results/accelerator

  Leaves a record for each row in the records/ of OUTPUT_DIR and goes on where
  it was stopped. It needs only jax, flax, numpy and gin-config. `reproduce`
  with gin/runs/table2.gin and the same OUTPUT_DIR makes tables of them.
  """
  from specdec_jax.engine import compilation_cache
  from specdec_jax.paper import table2_suite

  compilation_cache.enable(None)
  table2_suite.run(gin_flags.build(table2_suite.SuiteConfig))


def benchmark() -> None:
  """Measures calls and loops of a pair of models on this machine.

    python scripts/benchmark.py --gin_file=gin/runs/benchmark_base.gin

  The table goes to stdout.
  """
  from specdec_jax.measure import benchmark, report

  report.show(gin_flags.build(benchmark.BenchmarkConfig))


def calibrate() -> None:
  """Measures what speculation is worth for a pair on this machine.

    python scripts/calibrate.py --gin_file=gin/runs/calibrate_demo.gin \\
      --gin.OUTPUT_FILE=calibration.json

  `decode` takes the file by --gin.CALIBRATION=calibration.json. The tables go
  to stdout.
  """
  from specdec_jax.measure import calibrate

  calibrate.calibrate(gin_flags.build(calibrate.CalibrateConfig))


def convert_checkpoint() -> None:
  """Writes a checkpoint of any kind anew: for Orbax, Hugging Face or T5X.

    python scripts/convert_checkpoint.py \\
      --gin_file=gin/runs/convert_checkpoint.gin \\
      --gin.CHECKPOINT_PATH=FOLDER --gin.OUTPUT=FOLDER --gin.FORMAT=safetensors

  A line about it goes to stdout.
  """
  from specdec_jax.checkpoints import convert

  print(convert.convert(gin_flags.build(convert.ConvertConfig)))


def decode() -> None:
  """Decodes text plainly and speculatively: lines, or a task as with T5X.

    python scripts/decode.py --gin_file=gin/runs/demo.gin

    python scripts/decode.py --gin_file=gin/models/demo/pair.gin \\
      --gin_file=gin/runs/infer.gin --gin.MIXTURE_OR_TASK_NAME=... ...

  A run file that configures `infer.TaskConfig` is over a task or a file of
  examples; others are over lines of text (`infer.DecodeConfig`), which both
  ways decode, and are compared. A run that was killed goes on when it is
  started again. The report goes to stdout.
  """
  from specdec_jax import infer

  beside = {'operative_config.gin': gin_flags.operative_config}
  if any(name.endswith('.TaskConfig') for name in gin_checks.configured()):
    infer.decode_task(gin_flags.build(infer.TaskConfig), beside)
  else:
    infer.decode(gin_flags.build(infer.DecodeConfig), beside)


def drafter_costs() -> None:
  """Measures what a draft costs, for every drafter beside one target.

    python scripts/drafter_costs.py --gin_file=gin/runs/drafter_costs.gin

  The table goes to stdout.
  """
  from specdec_jax.measure import drafter_costs

  drafter_costs.drafter_costs(gin_flags.build(drafter_costs.DrafterCostsConfig))


def evaluate() -> None:
  """Scores a pair on a test set: BLEU, and how often drafts are accepted.

    python scripts/evaluate.py --gin_file=gin/runs/eval.gin \\
      --gin.EVAL_FILE=FILE

  The report goes to stdout.
  """
  from specdec_jax.infer import quality

  quality.evaluate(
    gin_flags.build(quality.EvaluateConfig),
    beside={'operative_config.gin': gin_flags.operative_config},
  )


def fit_ngram() -> None:
  """Fits an n-gram table: a drafter without a network.

    python scripts/fit_ngram.py --gin_file=gin/runs/fit_ngram.gin \\
      --gin.TRAIN_FILES="['text.txt']" --gin.OUTPUT_FILE=bigram.npz

  What it holds goes to stdout.
  """
  from specdec_jax.measure import ngram

  ngram.fit_ngram(gin_flags.build(ngram.FitNgramConfig))


def measure_alpha() -> None:
  """Measures a pair's acceptance rate: Corollary 3.6 on the target's tokens.

    python scripts/measure_alpha.py --gin_file=gin/runs/alpha_demo.gin

  The table goes to stdout.
  """
  from specdec_jax.measure import alpha

  alpha.measure_alpha(gin_flags.build(alpha.MeasureAlphaConfig))


def peers() -> None:
  """Times this project beside transformers and CTranslate2 on equal weights.

    python scripts/peers.py --gin_file=gin/runs/peers_demo.gin

  Needs the extra: pip install -e '.[peers]'. The table goes to stdout.
  """
  from specdec_jax.measure import peers

  peers.compare(gin_flags.build(peers.PeersConfig))


def reproduce() -> None:
  """Writes tables and figures of the paper beside what is measured here.

    python scripts/reproduce.py --gin_file=gin/runs/table2.gin \\
      --gin.OUTPUT_DIR=outputs/table2

  The tables go to stdout.
  """
  from specdec_jax.paper import reproduce

  for path in reproduce.reproduce(gin_flags.build(reproduce.ReproduceConfig)):
    print(path)


def throughput() -> None:
  """Measures data-set decoding: full slots beside fixed batches; batch sizes.

    python scripts/throughput.py --gin_file=gin/runs/throughput_demo.gin \\
      --gin.OUTPUT_FILE=throughput.json --gin.PLOT_FILE=throughput.png

  The tables go to stdout.
  """
  from specdec_jax.measure import throughput, throughput_picture

  config = gin_flags.build(throughput.ThroughputConfig)
  record = throughput.measure_throughput(config)
  if config.plot_file:
    throughput_picture.plot_throughput(config.plot_file, record)


def tpu_check() -> None:
  """Compiles for TPU v4 without a TPU; counts memory, bytes and exchanges.

  Table 2 on one chip:

    python scripts/tpu_check.py --gin_file=gin/runs/tpu_check.gin \\
      --gin.OUTPUT_DIR=outputs/tpu_v4

  Models that are split over slices of 4 and 16 chips:

    python scripts/tpu_check.py --gin_file=gin/runs/tpu_slices.gin \\
      --gin.OUTPUT_DIR=outputs/tpu_v4_slices

  results.json and report.md go to the output folder.
  """
  import jax

  from specdec_jax.measure.compiled import tpu_check, tpu_slices
  from specdec_jax.paper import printed

  # With libtpu installed JAX would look for a TPU here, and wait for it.
  jax.config.update('jax_platforms', 'cpu')
  slices = f'{tpu_slices.__name__}.{tpu_slices.SlicesConfig.__name__}'
  if slices in gin_checks.configured():
    tpu_slices.check(gin_flags.build(tpu_slices.SlicesConfig))
  else:
    tpu_check.check(gin_flags.build(tpu_check.TpuCheckConfig), printed.TABLE2)


def train() -> None:
  """Trains a model, or distils a drafter from a target.

    python scripts/train.py --gin_file=gin/runs/train.gin \\
      --gin.MODEL_DIR=FOLDER --gin.TRAIN_FILE=FILE --gin.VOCAB_PATH=FILE

  The same command goes on where a killed run was. Progress goes to stderr.
  """
  from specdec_jax import training

  training.train(
    gin_flags.build(training.TrainRun),
    beside={'operative_config.gin': gin_flags.operative_config},
  )


_COMMANDS = (
  accelerator,
  benchmark,
  calibrate,
  convert_checkpoint,
  decode,
  drafter_costs,
  evaluate,
  fit_ngram,
  measure_alpha,
  peers,
  reproduce,
  throughput,
  tpu_check,
  train,
)
COMMANDS = {function.__name__: function for function in _COMMANDS}


def run(name: str, argv: Sequence[str] | None = None) -> int:
  """Runs the command `name` with `argv`, or the process's; the exit status."""
  return gin_flags.main(COMMANDS[name], argv)
