"""The training loop: batches in, checkpoints out, resumable at any step."""

from collections.abc import Callable

import jax

from specjax.shapes import Params
from specjax.sharding import Placement, put
from specjax.training.checkpoints import Checkpoints
from specjax.training.data import Source
from specjax.training.objective import Metrics
from specjax.training.step import Trainer, TrainState

# Called after a step with its number, the state and the step's figures. The
# state is donated to the next step: it may be read, not kept.
OnStep = Callable[[int, TrainState, Metrics], None]


def train(
  trainer: Trainer,
  source: Source,
  frozen_params: Params = None,
  *,
  init_params: Params | None = None,
  placement: Placement | None = None,
  checkpoints: Checkpoints | None = None,
  save_every: int = 0,
  stop_at: int | None = None,
  on_start: Callable[[int, TrainState], None] | None = None,
  on_step: OnStep | None = None,
) -> TrainState:
  """Runs the schedule, on from the newest checkpoint if there is one.

  What comes out is a function of the arguments alone: stopped at any step, by
  whatever means, and started again, a run ends with the same bits.

  Args:
    trainer: objective and optimizer.
    source: of batches; step i takes batch i.
    frozen_params: what the objective does not train.
    init_params: to start from; None: the objective's own.
    placement: whose data axis the rows are split over.
    checkpoints: where to; None keeps none.
    save_every: steps between two checkpoints; 0: none but the last.
    stop_at: the step to end at before the schedule does; None: its end.
    on_start: called once with the steps already taken and the state.
    on_step: called after every step.

  Returns:
    The last state.

  Raises:
    ValueError: the newest checkpoint is damaged or of another run.
  """
  state = trainer.init(init_params)
  if checkpoints is not None:
    state = checkpoints.restore(state) or state
  start = int(state.step)
  if on_start is not None:
    on_start(start, state)
  num_steps = trainer.adamw.num_steps
  if stop_at is not None:
    num_steps = min(num_steps, stop_at)
  for step in range(start, num_steps):
    batch = source.batch(step, state.params)
    batch = jax.tree.map(lambda x: put(x, placement, 'batch'), batch)
    state, figures = trainer.step(state, frozen_params, batch)
    is_last = step + 1 == num_steps
    is_due = is_last or (save_every > 0 and (step + 1) % save_every == 0)
    if checkpoints is not None and is_due:
      checkpoints.save(state)
    if on_step is not None:
      on_step(step + 1, state, figures)
  return state
