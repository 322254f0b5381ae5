"""What a pair is worth: its acceptance rate and its calibration.

`MeasureAlphaConfig` and `measure_alpha` are scripts/measure_alpha.py;
`CalibrateConfig` and `calibrate` are scripts/calibrate.py.
"""

from specdec_jax.measure.alpha import MeasureAlphaConfig, measure_alpha
from specdec_jax.measure.calibrate import CalibrateConfig, calibrate

__all__ = [
  'CalibrateConfig',
  'MeasureAlphaConfig',
  'calibrate',
  'measure_alpha',
]
