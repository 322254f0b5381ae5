"""Makes a drafter for a T5 from texts alone, and decodes with it.

The T5 decodes the texts; one layer of its decoder learns to say the same. Here
48 texts and some steps are enough to see it work; thousands of texts and an
hour make a drafter that is worth its time. A command for any T5:

  specdec distil --target MY_T5 --texts inputs.txt --output-dir my_drafter

This file does the same in Python (`pip install -e '.[huggingface]'`):

  python examples/train_a_drafter.py
"""

import specdec_jax as sd
from specdec_jax import training

target = sd.load('demo')  # of yours: sd.load('MY_T5')
training.distil(
  training.DistilConfig(
    target=target,
    texts='demo/input.txt',
    output_dir='outputs/my_drafter',
    max_input_len=32,
    max_decode_len=32,
    steps=10,
    max_gamma=1,
    num_tokens=100,
    repeats=2,
  )
)

draft = sd.load('outputs/my_drafter')
engine = sd.Engine(target, draft, gamma=1)
[done] = engine.generate(['Where is the station?'])
print(done.text)
print(f'{done.stats.num_accepted} of {done.stats.num_drafted} proposals kept')
