"""Outputs of a form: one of some labels, a regular expression, JSON.

The output has the model's distribution under the rule, whatever the drafter
proposes. The demo pair only translates: it keeps to the forms, and fills them
as a translator would.

  python examples/constrain_an_output.py
"""

import json

import specdec_jax as sd

engine = sd.Engine(sd.load('demo'), sd.load('demo-draft'))

LABELS = ['gut', 'schlecht']
[label] = engine.generate(['I like it very much.'], choices=LABELS)
[probs] = engine.classify(['I like it very much.'], LABELS)
print(label.text, dict(zip(LABELS, probs.round(3).tolist(), strict=True)))

[time] = engine.generate(
  ['The train leaves at ten.'], regex=r'Um (1?[0-9]|2[0-3]):[0-5][0-9] Uhr'
)
print(time.text)

PERSON = {
  'type': 'object',
  'properties': {
    'who': {'enum': ['Bruder', 'Schwester']},
    'where': {'enum': ['Berlin', 'Hamburg', 'Wien']},
  },
  'required': ['who', 'where'],
  'additionalProperties': False,  # no other keys
}
[person] = engine.generate(['My sister lives in Berlin.'], json_schema=PERSON)
print(json.loads(person.text))
print(f'{person.stats.tokens_per_call:.2f} tokens a call of the large model')
