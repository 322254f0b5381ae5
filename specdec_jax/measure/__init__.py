"""What a pair is worth: its acceptance rate and its calibration.

`MeasureAlphaConfig` and `measure_alpha` are scripts/measure_alpha.py;
`CalibrateConfig` and `calibrate` are scripts/calibrate.py; `ThroughputConfig`
and `measure_throughput` are scripts/throughput.py.
"""

from specdec_jax.measure.alpha import MeasureAlphaConfig, measure_alpha
from specdec_jax.measure.calibrate import CalibrateConfig, calibrate
from specdec_jax.measure.throughput import (
  ThroughputConfig,
  measure_throughput,
)

__all__ = [
  'CalibrateConfig',
  'MeasureAlphaConfig',
  'ThroughputConfig',
  'calibrate',
  'measure_alpha',
  'measure_throughput',
]
