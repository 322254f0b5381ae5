"""All measurements: calls, loops, acceptance, calibration, memory, programs."""
