"""How a test sees what is compiled."""

import contextlib
import threading

import jax.monitoring


@contextlib.contextmanager
def compiling_threads():
  """Gives a list with the thread of each compilation inside."""
  threads = []

  def listen(event, *_, **__):
    if event == '/jax/core/compile/backend_compile_duration':
      threads.append(threading.current_thread())

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield threads
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


@contextlib.contextmanager
def nothing_compiles():
  """Fails if anything is compiled inside."""
  with compiling_threads() as threads:
    yield
  assert not threads
