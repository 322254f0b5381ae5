"""How a test sees that nothing is compiled."""

import contextlib

import jax.monitoring


@contextlib.contextmanager
def nothing_compiles():
  """Fails if anything is compiled inside."""
  compiled = []

  def listen(event, duration, **_):
    del duration
    if event == '/jax/core/compile/backend_compile_duration':
      compiled.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert not compiled
