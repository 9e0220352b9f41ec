"""Counts what JAX traces and compiles, as JAX itself reports it."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

_TRACE = '/jax/core/compile/jaxpr_trace_duration'
_COMPILE = '/jax/core/compile/backend_compile_duration'


@dataclasses.dataclass
class Traces:
  """What happened since the context was entered.

  Attributes:
    num_traces: functions traced, those inside others included.
    num_compilations: programs compiled, one-operation programs included.
  """

  num_traces: int = 0
  num_compilations: int = 0


@contextlib.contextmanager
def count_traces() -> Iterator[Traces]:
  """Counts traces and compilations of the whole process.

  >>> double = jax.jit(lambda x: 2 * x)
  >>> with count_traces() as first:
  ...   _ = double(1.5)
  >>> with count_traces() as second:
  ...   _ = double(2.5)
  >>> first.num_compilations > 0, second.num_compilations
  (True, 0)
  """
  traces = Traces()

  def listen(event: str, seconds: float, **details):
    del seconds, details
    traces.num_traces += event == _TRACE
    traces.num_compilations += event == _COMPILE

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield traces
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
