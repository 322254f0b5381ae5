"""The numbers of the tables of Leviathan et al. 2023, as printed there.

Source: "Fast Inference from Transformers via Speculative Decoding", ICML 2023,
arXiv:2211.17192. No number here is computed or was measured by this project.
As in the paper, rates have two decimals, and factors one or two.

Names of tasks and models: `ende` is WMT English to German, `cnndm` is CNN/DM
summarisation; `t5_small`, `t5_base` and `t5_large` are T5 1.1, as is the target
`t5_xxl`. Temperature 0 is argmax, temperature 1 is standard sampling.
"""

from typing import NamedTuple


class Table1Row(NamedTuple):
  """Table 1: arithmetic operations and speed vs the baseline, c = c-hat = 0.

  Attributes:
    acceptance_rate: alpha.
    gamma: proposals per step.
    operations_factor: OPERATIONS, in multiples of the baseline.
    walltime_factor: SPEED, in multiples of the baseline.
  """

  acceptance_rate: float
  gamma: int
  operations_factor: float
  walltime_factor: float


class Table2Row(NamedTuple):
  """Table 2: measured speed-up of T5-XXL, batch 1 on one TPU v4.

  Attributes:
    task: 'ende' or 'cnndm'.
    draft: M_q.
    temperature: 0 or 1.
    gamma: proposals per step.
    acceptance_rate: alpha.
    speedup: SPEED, against T5X's decoding.
  """

  task: str
  draft: str
  temperature: int
  gamma: int
  acceptance_rate: float
  speedup: float


class Table3Row(NamedTuple):
  """Table 3: alpha on 10,000 tokens that the target generated.

  Attributes:
    target: M_p; for T5-XXL with the task that it was fine-tuned for.
    draft: M_q.
    temperature: 0 or 1; LaMDA's outputs were filtered by top-40 as well.
    acceptance_rate: alpha.
  """

  target: str
  draft: str
  temperature: int
  acceptance_rate: float


class Table4Row(NamedTuple):
  """Table 4: Table 2 compared with what Theorem 3.8 expects.

  Attributes:
    task: 'ende' or 'cnndm'.
    draft: M_q.
    temperature: 0 or 1.
    gamma: proposals per step.
    acceptance_rate: alpha.
    cost_ratio: c, estimated from profiler traces.
    expected: EXP, the walltime factor of Theorem 3.8.
    empirical: EMP, measured; `speedup` of Table 2.
  """

  task: str
  draft: str
  temperature: int
  gamma: int
  acceptance_rate: float
  cost_ratio: float
  expected: float
  empirical: float


class Table5Row(NamedTuple):
  """Table 5: alpha by lenience, sampling, T5-XXL on English to German.

  Attributes:
    draft: M_q.
    lenience: l; 1 is no lenience.
    acceptance_rate: alpha.
  """

  draft: str
  lenience: float
  acceptance_rate: float


TABLE1 = (
  Table1Row(0.6, 2, 1.53, 1.96),
  Table1Row(0.7, 3, 1.58, 2.53),
  Table1Row(0.8, 2, 1.23, 2.44),
  Table1Row(0.8, 5, 1.63, 3.69),
  Table1Row(0.9, 2, 1.11, 2.71),
  Table1Row(0.9, 10, 1.60, 6.86),
)

TABLE2 = (
  Table2Row('ende', 't5_small', 0, 7, 0.75, 3.4),
  Table2Row('ende', 't5_base', 0, 7, 0.80, 2.8),
  Table2Row('ende', 't5_large', 0, 7, 0.82, 1.7),
  Table2Row('ende', 't5_small', 1, 7, 0.62, 2.6),
  Table2Row('ende', 't5_base', 1, 5, 0.68, 2.4),
  Table2Row('ende', 't5_large', 1, 3, 0.71, 1.4),
  Table2Row('cnndm', 't5_small', 0, 5, 0.65, 3.1),
  Table2Row('cnndm', 't5_base', 0, 5, 0.73, 3.0),
  Table2Row('cnndm', 't5_large', 0, 3, 0.74, 2.2),
  Table2Row('cnndm', 't5_small', 1, 5, 0.53, 2.3),
  Table2Row('cnndm', 't5_base', 1, 3, 0.55, 2.2),
  Table2Row('cnndm', 't5_large', 1, 3, 0.56, 1.7),
)

TABLE3 = (
  Table3Row('gpt_like_97m', 'unigram', 0, 0.03),
  Table3Row('gpt_like_97m', 'bigram', 0, 0.05),
  Table3Row('gpt_like_97m', 'gpt_like_6m', 0, 0.88),
  Table3Row('gpt_like_97m', 'unigram', 1, 0.03),
  Table3Row('gpt_like_97m', 'bigram', 1, 0.05),
  Table3Row('gpt_like_97m', 'gpt_like_6m', 1, 0.89),
  Table3Row('t5_xxl_ende', 'unigram', 0, 0.08),
  Table3Row('t5_xxl_ende', 'bigram', 0, 0.20),
  Table3Row('t5_xxl_ende', 't5_small', 0, 0.75),
  Table3Row('t5_xxl_ende', 't5_base', 0, 0.80),
  Table3Row('t5_xxl_ende', 't5_large', 0, 0.82),
  Table3Row('t5_xxl_ende', 'unigram', 1, 0.07),
  Table3Row('t5_xxl_ende', 'bigram', 1, 0.19),
  Table3Row('t5_xxl_ende', 't5_small', 1, 0.62),
  Table3Row('t5_xxl_ende', 't5_base', 1, 0.68),
  Table3Row('t5_xxl_ende', 't5_large', 1, 0.71),
  Table3Row('t5_xxl_cnndm', 'unigram', 0, 0.13),
  Table3Row('t5_xxl_cnndm', 'bigram', 0, 0.23),
  Table3Row('t5_xxl_cnndm', 't5_small', 0, 0.65),
  Table3Row('t5_xxl_cnndm', 't5_base', 0, 0.73),
  Table3Row('t5_xxl_cnndm', 't5_large', 0, 0.74),
  Table3Row('t5_xxl_cnndm', 'unigram', 1, 0.08),
  Table3Row('t5_xxl_cnndm', 'bigram', 1, 0.16),
  Table3Row('t5_xxl_cnndm', 't5_small', 1, 0.53),
  Table3Row('t5_xxl_cnndm', 't5_base', 1, 0.55),
  Table3Row('t5_xxl_cnndm', 't5_large', 1, 0.56),
  Table3Row('lamda_137b', 'lamda_100m', 0, 0.61),
  Table3Row('lamda_137b', 'lamda_2b', 0, 0.71),
  Table3Row('lamda_137b', 'lamda_8b', 0, 0.75),
  Table3Row('lamda_137b', 'lamda_100m', 1, 0.57),
  Table3Row('lamda_137b', 'lamda_2b', 1, 0.71),
  Table3Row('lamda_137b', 'lamda_8b', 1, 0.74),
)

TABLE4 = (
  Table4Row('ende', 't5_small', 0, 7, 0.75, 0.02, 3.2, 3.4),
  Table4Row('ende', 't5_base', 0, 7, 0.80, 0.04, 3.3, 2.8),
  Table4Row('ende', 't5_large', 0, 7, 0.82, 0.11, 2.5, 1.7),
  Table4Row('ende', 't5_small', 1, 7, 0.62, 0.02, 2.3, 2.6),
  Table4Row('ende', 't5_base', 1, 5, 0.68, 0.04, 2.4, 2.4),
  Table4Row('ende', 't5_large', 1, 3, 0.71, 0.11, 2.0, 1.4),
  Table4Row('cnndm', 't5_small', 0, 5, 0.65, 0.02, 2.4, 3.1),
  Table4Row('cnndm', 't5_base', 0, 5, 0.73, 0.04, 2.6, 3.0),
  Table4Row('cnndm', 't5_large', 0, 3, 0.74, 0.11, 2.0, 2.2),
  Table4Row('cnndm', 't5_small', 1, 5, 0.53, 0.02, 1.9, 2.3),
  Table4Row('cnndm', 't5_base', 1, 3, 0.55, 0.04, 1.8, 2.2),
  Table4Row('cnndm', 't5_large', 1, 3, 0.56, 0.11, 1.6, 1.7),
)

TABLE5 = (
  Table5Row('unigram', 1, 0.07),
  Table5Row('unigram', 0.5, 0.10),
  Table5Row('unigram', 0.3, 0.11),
  Table5Row('unigram', 0.1, 0.16),
  Table5Row('bigram', 1, 0.19),
  Table5Row('bigram', 0.5, 0.23),
  Table5Row('bigram', 0.3, 0.25),
  Table5Row('bigram', 0.1, 0.32),
  Table5Row('t5_small', 1, 0.62),
  Table5Row('t5_small', 0.5, 0.71),
  Table5Row('t5_small', 0.3, 0.76),
  Table5Row('t5_small', 0.1, 0.84),
  Table5Row('t5_base', 1, 0.68),
  Table5Row('t5_base', 0.5, 0.80),
  Table5Row('t5_base', 0.3, 0.83),
  Table5Row('t5_base', 0.1, 0.90),
)
