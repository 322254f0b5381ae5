"""Translates a file of lines by two engines of Ray, each an actor of its own.

  pip install -e '.[ray]'
  python examples/ray_data.py [FILE OUTPUT_FOLDER]

Started again it goes on where it was stopped: Ray keeps which texts are done.
On a cluster (RAY_ADDRESS; `ray start`) all machines must see both paths.
"""

import json
import os
import pathlib
import sys

import gin
import ray.data
from ray.data.checkpoint import CheckpointConfig

import specdec_jax as sd

NUM_ENGINES = int(os.environ.get('NUM_ENGINES', 2))
file, out = sys.argv[1:] or ('demo/input.txt', 'outputs/ray')
out = pathlib.Path(out).resolve()
folder = pathlib.Path().resolve()  # has the demo pair


class Translate:
  """An engine, which lives as long as its actor."""

  def __init__(self):
    # With a pair of yours: sd.Engine(sd.load('MY_TARGET'), sd.load('MY_DRAFT'))
    os.chdir(folder)
    gin.parse_config_file('gin/models/demo_pair.gin')
    self.engine = gin.get_configurable(sd.Engine)(batch_size=16)

  def __call__(self, batch):
    done = self.engine.generate(batch['text'].tolist())
    return batch | {'translation': [one.text for one in done]}


ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
  'text', str(out / 'checkpoint'), delete_checkpoint_on_success=False
)
lines = pathlib.Path(file).read_text('utf-8').split('\n')
ray.data.read_text(
  os.path.abspath(file), override_num_blocks=1 + len(lines) // 256
).map_batches(
  Translate,
  batch_size=256,
  compute=ray.data.ActorPoolStrategy(size=NUM_ENGINES),
  num_cpus=0.5,  # reading needs some too; or num_gpus=1
).write_json(str(out / 'parts'))

# The parts come in any order; equal texts have equal (greedy) translations.
texts = {}
for part in (out / 'parts').glob('*.json'):
  records = map(json.loads, part.read_text('utf-8').splitlines())
  texts |= {record['text']: record['translation'] for record in records}
german = ''.join(f'{texts.get(line, "")}\n' for line in lines[:-1])
(out / 'german.txt').write_text(german, 'utf-8')
print(f'{len(texts)} texts, {len(lines) - 1} lines: {out / "german.txt"}')
