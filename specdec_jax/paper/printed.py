"""The numbers of the tables of Leviathan et al. 2023, as printed there.

Source: "Fast Inference from Transformers via Speculative Decoding", ICML 2023,
arXiv:2211.17192. The file printed.json has the rows of the tables. Its numbers
are all the paper's; this project has neither computed nor measured them. As in
the paper, rates have two decimals, and factors one or two.

The task `ende` is WMT English to German, and `cnndm` is CNN/DM summarisation.
The models `t5_small`, `t5_base` and `t5_large` are T5 1.1, and so is the target
`t5_xxl`. Temperature 0 is argmax, temperature 1 is standard sampling.
"""

import json
import pathlib
from typing import NamedTuple


class Table2Row(NamedTuple):
  """A row of Tables 2 and 4: the speed-up of T5-XXL on one TPU v4, batch 1.

  `speedup` was measured; Table 4 repeats this number in its column EMP.
  `expected` is the column EXP of Table 4, the walltime factor of Theorem 3.8.
  `cost_ratio` was estimated from profiler traces.
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
# Table 1 compares arithmetic operations and speed with those of plain decoding,
# for c = c-hat = 0. Each row has alpha, gamma, the operations factor and the
# walltime factor.
TABLE1 = tuple(map(tuple, _ROWS['table1']))
TABLE2 = tuple(Table2Row(*row) for row in _ROWS['table2'])
# Table 3 has alpha on 10,000 tokens that the target generated. Each row has
# target, draft, temperature and alpha. The name of a T5-XXL ends with the task
# that it was fine-tuned for. LaMDA's outputs at temperature 1 were also
# filtered by top-40.
TABLE3 = tuple(map(tuple, _ROWS['table3']))
# Table 5 has alpha for several values of lenience, when sampling, for T5-XXL on
# English to German. Each row has draft, lenience and alpha.
TABLE5 = tuple(map(tuple, _ROWS['table5']))
