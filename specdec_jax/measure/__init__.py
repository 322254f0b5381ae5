"""All measuring: calls and loops, acceptance, calibration, memory, programs."""
