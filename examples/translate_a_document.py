"""Translates a document: sentence by sentence, put back as it was.

A translation model reads sentences; of a longer text it loses some. So the text
is split, all sentences are decoded together, and lines and paragraphs stay.

  pip install -e '.[split]'
  python examples/translate_a_document.py
"""

import specdec_jax as sd

DOCUMENT = """\
The trip

We arrived in the city yesterday. The train was late, but we were not tired.
The hotel is near the river. The food is good, and the weather is beautiful.

Tomorrow we want to visit the museum. Where will you be next week?
Please write to me soon.
"""

# The shipped pair. With one of yours:
# engine = sd.Engine(sd.load('MY_TARGET'), sd.load('MY_DRAFT'))
engine = sd.Engine(sd.load('demo'), sd.load('demo-draft'))

[done] = engine.generate([DOCUMENT], split='sentences')
print(done.text, end='')
print(f'{done.stats.tokens_per_call:.2f} tokens a call of the large model')
