"""Translates a file of lines by two engines of Ray, each an actor of its own.

  pip install -e '.[ray]'
  python examples/ray_data.py [FILE OUTPUT_FOLDER]

Started again it goes on where it was stopped: Ray keeps which texts are done.
On a cluster (RAY_ADDRESS; `ray start`) all machines must see both paths.
"""

import json
import pathlib
import sys

import ray.data.checkpoint

import specdec_jax as sd
from specdec_jax.serving.run import check_cluster

NUM_ENGINES = 2
EACH = {'num_cpus': 0}  # on a cluster what each needs: {'num_gpus': 1}
file, out = sys.argv[1:] or ('demo/input.txt', 'outputs/ray')
file, out = pathlib.Path(file).resolve(), pathlib.Path(out).resolve()


class Translate:  # an engine, which lives as long as its actor
  def __init__(self):
    # With a pair of yours: sd.Engine(sd.load('MY_TARGET'), sd.load('MY_DRAFT'))
    pair = sd.load('demo'), sd.load('demo-draft')
    self.engine = sd.Engine(*pair, batch_size=16)

  def __call__(self, batch):
    done = self.engine.generate(batch['text'].tolist())
    return batch | {'translation': [one.text for one in done]}


try:
  check_cluster()
  ray.init()
  lines = file.read_bytes().decode().removesuffix('\n').split('\n')
except (OSError, ValueError) as error:
  sys.exit(f'error: {error}')
checkpoints = ray.data.checkpoint.CheckpointConfig(
  'text', str(out / 'checkpoint'), delete_checkpoint_on_success=False
)
ray.data.DataContext.get_current().checkpoint_config = checkpoints
blocks = max(2 * NUM_ENGINES, len(lines) // 256)
actors = ray.data.ActorPoolStrategy(size=NUM_ENGINES)
texts = ray.data.read_text(str(file), override_num_blocks=blocks)
made = texts.map_batches(Translate, batch_size=None, compute=actors, **EACH)
made.write_json(str(out / 'parts'))

# The parts come in any order; equal texts have equal (greedy) translations.
german = {}
for part in (out / 'parts').glob('*.json'):
  records = map(json.loads, part.read_text('utf-8').splitlines())
  german |= {record['text']: record['translation'] for record in records}
text = ''.join(f'{german.get(line, "")}\n' for line in lines)
(out / 'german.txt').write_text(text, 'utf-8')
print(f'{len(german)} texts of {len(lines)} lines are in {out / "german.txt"}')
