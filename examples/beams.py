"""Beam search: the four best outputs of a sentence, with their scores.

The rule is T5X's; `length_penalty` in place of `alpha` gives transformers'.

  python examples/beams.py
"""

import specdec_jax as sd

engine = sd.Engine(sd.load('demo'), sd.load('demo-draft'))
texts = ['I forgot my umbrella at the office, so I got wet on the way home.']

[greedy] = engine.generate(texts)
print(f'greedy: {greedy.text}')
for beam in engine.generate(texts, num_beams=4, num_samples=4, alpha=0.6):
  print(f'{beam.score:7.3f}  {beam.text}')  # the best one is the last
