"""The numbers of the tables of Leviathan et al. 2023, as printed there.

Source: "Fast Inference from Transformers via Speculative Decoding", ICML 2023,
arXiv:2211.17192. This project has neither computed nor measured any number of
printed.json, which has the rows. As in the paper, rates have two decimals, and
factors one or two.

Names of tasks and models: `ende` is WMT English to German, `cnndm` is CNN/DM
summarisation; `t5_small`, `t5_base` and `t5_large` are T5 1.1, as is the target
`t5_xxl`. Temperature 0 is argmax, temperature 1 is standard sampling.
"""

import json
import pathlib
from typing import NamedTuple


class Table2Row(NamedTuple):
  """Tables 2 and 4: the speed-up of T5-XXL, batch 1 on one TPU v4.

  `speedup` was measured; Table 4 repeats it as EMP. `expected` is that table's
  EXP, the walltime factor of Theorem 3.8, and `cost_ratio` was estimated from
  profiler traces.
  """

  task: str
  draft: str
  temperature: int
  gamma: int
  acceptance_rate: float
  cost_ratio: float
  expected: float
  speedup: float


_ROWS = json.loads(
  pathlib.Path(__file__).with_name('printed.json').read_text('utf-8')
)
# Table 1, arithmetic operations and speed vs the baseline, c = c-hat = 0:
# (alpha, gamma, operations factor, walltime factor).
TABLE1 = tuple(map(tuple, _ROWS['table1']))
TABLE2 = tuple(Table2Row(*row) for row in _ROWS['table2'])
# Table 3, alpha on 10,000 tokens that the target generated: (target, draft,
# temperature, alpha). T5-XXL has the task that it was fine-tuned for in its
# name. LaMDA's outputs at temperature 1 were filtered by top-40 as well.
TABLE3 = tuple(map(tuple, _ROWS['table3']))
# Table 5, alpha by lenience, sampling, T5-XXL on English to German: (draft,
# lenience, alpha).
TABLE5 = tuple(map(tuple, _ROWS['table5']))
