"""Table 1 of the paper, printed beside the closed forms that it comes from.

The speed-up that follows from an acceptance rate, and how much more arithmetic
it takes (Theorems 3.8 and 3.11). The last line is the gamma of another pair.

  python examples/table_1.py

With pictures: specdec reproduce --gin_file=gin/runs/table1.gin --output-dir=DIR
"""

import rich

from specdec_jax import analysis
from specdec_jax.paper import tables

for comparison in tables.table1():
  rich.print(comparison.table())

alpha, cost_ratio = 0.8, 0.05
gamma = int(analysis.optimal_gamma(alpha, cost_ratio, max_gamma=16))
factor = float(analysis.walltime_factor(alpha, gamma, cost_ratio))
print(
  f'alpha {alpha}, c {cost_ratio}: gamma {gamma}, {factor:.2f} times faster'
)
