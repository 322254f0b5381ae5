"""GPT-2 by scripts/decode.py's gin files: lines, and a file of examples."""

import importlib.util
import json

import gin
import pytest

from gpt_test import GPT2
from notebook_gpt_test import SIZE, gpt2_folder
from specdec_jax import infer
from specdec_jax.cli import gin_flags
from specdec_jax.models.gpt import GPT
from specdec_jax.text.tokenizer_bpe import BpeTokenizer
from tokenizer_bpe_test import train

pytestmark = [
  pytest.mark.skipif(
    any(
      importlib.util.find_spec(name) is None
      for name in ('tokenizers', 'safetensors')
    ),
    reason="needs both: pip install 'specdec_jax[huggingface,bpe]'",
  ),
]
SIZES = {
  name: SIZE if name == 'vocab_size' else getattr(GPT2, name)
  for name in ('vocab_size', 'emb_dim', 'num_heads', 'num_layers', 'head_dim')
  + ('mlp_dim', 'num_positions')
}


def load(files, **macros):
  """Loads gin files, whose published sizes become small ones."""
  flags = [f'--gin_file=gin/{name}.gin' for name in files]
  flags += [f'--gin.{name}={value}' for name, value in macros.items()]
  flags += [
    f'--gin.{scope}/gpt.GPTConfig.{name}={value}'
    for scope in ('gpt2_1558m', 'gpt2_124m')
    for name, value in SIZES.items()
  ]
  gin_flags.load(gin_flags.parse_flags(flags))


@pytest.fixture(scope='module')
def pair(folder):
  """Folders of a target and a drafter; the drafter's has no tokenizer.json."""
  one, two = train(folder)
  return gpt2_folder(folder / 'xl', one), gpt2_folder(folder / 's', two)


def test_lines_and_examples_are_decoded_alike(pair, tmp_path):
  lines = tmp_path / 'lines.txt'
  lines.write_text('the red dog\n\ndogs\n')
  eos = BpeTokenizer(pair[0]).eos_id
  load(
    ['runs/gpt2'],
    CHECKPOINT_PATH=pair[0],
    DRAFT_CHECKPOINT_PATH=pair[1],
    INPUT_FILE=lines,
    INFER_OUTPUT_DIR=tmp_path / 'lines',
    BATCH_SIZE=4,
    MAX_INPUT_LEN=16,
    MAX_DECODE_LEN=12,
    BOS_ID=eos,
  )
  infer.decode(gin_flags.build(infer.DecodeConfig))
  load(
    ['models/gpt2/1558m', 'models/gpt2/124m', 'runs/infer'],
    TARGET='%GPT2_1558M',
    DRAFT='%GPT2_124M',
    CHECKPOINT_PATH=pair[0],
    DRAFT_CHECKPOINT_PATH=pair[1],
    VOCAB_PATH=pair[0],
    BOS_ID=eos,
    MIXTURE_OR_TASK_NAME=lines,
    TASK_FEATURE_LENGTHS="{'inputs': 16, 'targets': 12}",
    INFER_OUTPUT_DIR=tmp_path / 'task',
    BATCH_SIZE=4,
  )
  infer.decode_task(gin_flags.build(infer.TaskConfig))
  found = [
    [json.loads(line) for line in path.read_text('utf-8').splitlines()]
    for path in (
      tmp_path / 'lines' / 'predictions.jsonl',
      tmp_path / 'task' / 'lines-predict.jsonl-00000-of-00001',
    )
  ]
  tokens = [[one['prediction_tokens'] for one in some] for some in found]
  assert tokens[0] == tokens[1]
  # An empty line is a text as well.
  assert len(tokens[0]) == 3 and all(tokens[0])
  assert [one['error'] for one in found[0]] == [None] * 3


def test_the_run_is_gpt2s(pair, tmp_path):
  flags = ['--gin_file=gin/runs/gpt2.gin', f'--gin.INPUT_FILE={tmp_path}']
  flags += [f'--gin.{s}_PATH={tmp_path / s}' for s in ('TARGET', 'DRAFT')]
  gin_flags.load(gin_flags.parse_flags(flags))
  for side, layers in (('target', 48), ('draft', 12)):
    bound = gin.get_bindings(f'{side}/engine.load')
    assert type(bound['network']) is GPT
    assert bound['network'].config.num_layers == layers
    assert bound['path'] == str(tmp_path / side.upper())
  bound = gin.get_bindings('engine.Engine', resolve_references=False)
  assert gin.query_parameter('BOS_ID/gin.macro.value') == 50256
  assert str(bound['bos_id']) == '%BOS_ID'
