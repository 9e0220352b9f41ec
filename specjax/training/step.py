"""One training step: gradients of an objective, and AdamW.

Parameters are kept in float32 and rounded for every step to the dtypes in which
the objective computes. Nothing is drawn from a generator that moves on: the key
of a step follows from the seed and the step's number, so that a run that was
stopped goes on as if it had not been.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from specjax.shapes import Array, Key, Params
from specjax.training.objective import Batch, Metrics, Objective


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
  """The optimizer's settings.

  Attributes:
    learning_rate: at its peak.
    num_steps: of the whole schedule: linear warm-up, then a cosine.
    num_warmup_steps: of them.
    final_share: of the peak, at the last step.
    weight_decay: of matrices; vectors are not decayed.
    b1, b2: decay of the moments.
    max_grad_norm: longer gradients are shortened to it.
    num_accumulated: a step's batch goes through in so many parts, whose
      gradients are averaged; it must divide the rows.

  Raises:
    ValueError: naming the setting, the rule and the value.

  Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization,
    arXiv:1711.05101, algorithm 2.
  """

  learning_rate: float
  num_steps: int
  num_warmup_steps: int = 0
  final_share: float = 0.1
  weight_decay: float = 0.1
  b1: float = 0.9
  b2: float = 0.95
  max_grad_norm: float = 1.0
  num_accumulated: int = 1

  def __post_init__(self):
    for name in ('learning_rate', 'max_grad_norm'):
      if not getattr(self, name) > 0:
        raise ValueError(f'{name} must be > 0, got {getattr(self, name)}.')
    for name in ('num_steps', 'num_accumulated'):
      if not getattr(self, name) >= 1:
        raise ValueError(f'{name} must be >= 1, got {getattr(self, name)}.')
    if not 0 <= self.num_warmup_steps < self.num_steps:
      raise ValueError(
        f'num_warmup_steps must be in 0..{self.num_steps - 1}, got '
        f'{self.num_warmup_steps}.'
      )
    for name in ('final_share', 'weight_decay'):
      if not 0 <= getattr(self, name) <= 1:
        raise ValueError(f'{name} must be in 0..1, got {getattr(self, name)}.')

  def schedule(self) -> optax.Schedule:
    """From a step, 0 the first, to its learning rate."""
    return optax.warmup_cosine_decay_schedule(
      init_value=self.learning_rate / max(self.num_warmup_steps, 1),
      peak_value=self.learning_rate,
      warmup_steps=self.num_warmup_steps,
      decay_steps=self.num_steps,
      end_value=self.learning_rate * self.final_share,
    )

  def transformation(self) -> optax.GradientTransformation:
    """Clipping by the norm of all gradients, then AdamW on the schedule."""
    return optax.chain(
      optax.clip_by_global_norm(self.max_grad_norm),
      optax.adamw(
        self.schedule(),
        b1=self.b1,
        b2=self.b2,
        weight_decay=self.weight_decay,
        mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
      ),
    )


@flax.struct.dataclass
class TrainState:
  """What a run carries from step to step.

  Attributes:
    step: int32 [], steps taken; the data's position follows from it.
    params: float32.
    optimizer: optax's state.
  """

  step: Array
  params: Params
  optimizer: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
  """An objective and its optimizer; static.

  Attributes:
    objective: what is trained.
    adamw: the optimizer's settings.
    seed: of the first parameters and of every step's key.

  Raises:
    ValueError: the seed is out of range.
  """

  objective: Objective
  adamw: AdamW
  seed: int

  def __post_init__(self):
    if not 0 <= self.seed < 2**32:
      raise ValueError(f'seed must be in 0..{2**32 - 1}, got {self.seed}.')

  def key(self) -> Key:
    """Of the first parameters, and the root of every step's."""
    return jax.random.key(self.seed)

  def dtypes(self) -> Params:
    """The dtypes in which the objective computes, in the parameters' tree."""
    shapes = jax.eval_shape(self.objective.init, self.key())
    return jax.tree.map(lambda x: x.dtype, shapes)

  def init(self, params: Params | None = None) -> TrainState:
    """The state before the first step.

    Args:
      params: to start from, floats of any dtype; None: the objective's own.
    """
    if params is None:
      params = self.objective.init(self.key())
    state = _init(self, params)
    # Scalars lie where the parameters do: what goes into a step is laid out as
    # what comes out of it, and is compiled for once.
    lies = jax.tree.leaves(params)[0].sharding
    if not isinstance(lies, NamedSharding):
      return state
    everywhere = NamedSharding(lies.mesh, PartitionSpec())
    return jax.tree.map(
      lambda x: jax.device_put(x, everywhere) if x.ndim == 0 else x, state
    )

  def rounded(self, params: Params) -> Params:
    """The parameters as the objective computes with them."""
    return jax.tree.map(lambda x, d: x.astype(d), params, self.dtypes())

  def step(
    self, state: TrainState, frozen_params: Params, batch: Batch
  ) -> tuple[TrainState, Metrics]:
    """One step, compiled; the state is donated.

    Returns:
      The next state, and the objective's figures with 'loss', 'grad_norm' (as
      it was before it was shortened) and 'learning_rate'.
    """
    return _step(self, state, frozen_params, batch)


@functools.partial(jax.jit, static_argnames='trainer')
def _init(trainer: Trainer, params: Params) -> TrainState:
  params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
  optimizer = trainer.adamw.transformation().init(params)
  return TrainState(jnp.int32(0), params, optimizer)


@functools.partial(jax.jit, static_argnames='trainer', donate_argnames='state')
def _step(
  trainer: Trainer, state: TrainState, frozen_params: Params, batch: Batch
) -> tuple[TrainState, Metrics]:
  key = jax.random.fold_in(trainer.key(), state.step)
  dtypes = trainer.dtypes()

  def loss(params, batch, key):
    params = jax.tree.map(lambda x, d: x.astype(d), params, dtypes)
    return trainer.objective.loss(params, frozen_params, batch, key)

  def gradients(batch, key):
    (value, figures), grads = jax.value_and_grad(loss, has_aux=True)(
      state.params, batch, key
    )
    return {'loss': value, **figures}, grads

  figures, grads = _accumulate(
    gradients, batch, key, trainer.adamw.num_accumulated
  )
  updates, optimizer = trainer.adamw.transformation().update(
    grads, state.optimizer, state.params
  )
  figures |= {
    'grad_norm': optax.tree.norm(grads),
    'learning_rate': trainer.adamw.schedule()(state.step),
  }
  params = optax.apply_updates(state.params, updates)
  return TrainState(state.step + 1, params, optimizer), figures


def _accumulate(gradients, batch: Batch, key: Key, num_parts: int):
  """Means of figures and gradients over parts of the batch."""
  if num_parts == 1:
    return gradients(batch, key)
  rows = jax.tree.leaves(batch)[0].shape[0]
  if rows % num_parts:
    raise ValueError(
      f'num_accumulated must divide the {rows} rows of a batch, got '
      f'{num_parts}.'
    )

  # Every part takes rows of every device: none has to move.
  def part(i: Array) -> Batch:
    return jax.tree.map(
      lambda x: x.reshape(-1, num_parts, *x.shape[1:])[:, i], batch
    )

  def add(total, i):
    new = gradients(part(i), jax.random.fold_in(key, i))
    return jax.tree.map(jnp.add, total, new), None

  shapes = jax.eval_shape(gradients, part(jnp.int32(0)), key)
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
  total, _ = jax.lax.scan(add, zeros, jnp.arange(num_parts))
  return jax.tree.map(lambda x: x / num_parts, total)
