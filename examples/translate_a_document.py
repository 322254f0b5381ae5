"""Translates a document: sentence by sentence, put back as it was.

A translation model reads sentences; of a longer text it loses some. So the text
is split, all sentences are decoded together, and lines and paragraphs stay.

  python examples/translate_a_document.py
"""

import gin

import specdec_jax as sd

DOCUMENT = """\
A day in town

We took the train early in the morning. It was cold, but the sun was shining.
The museum was still closed, so we drank a cup of coffee. My sister bought a
book.

In the evening it rained. We were tired, and nobody wanted to walk home.
"""

# The shipped pair. With one of yours:
# engine = sd.Engine(sd.load('MY_TARGET'), sd.load('MY_DRAFT'))
gin.parse_config_file('gin/models/demo_pair.gin')
engine = gin.get_configurable(sd.Engine)()

[done] = engine.generate([DOCUMENT], split='sentences')
print(done.text)
print(f'{done.stats.tokens_per_call:.2f} tokens a call of the large model')
