import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax.mesh import MeshShape, refine
from specjax.sharding import put
from specjax.testing import count_traces
from specjax.training.imitate import Distill, NextToken
from specjax.training.objective import trainable
from specjax.training.step import AdamW, Trainer
from tests.training import tiny


def next_token(dtype='float32', view=None, **adamw) -> Trainer:
  settings = AdamW(**{'learning_rate': 1e-2, 'num_steps': 20, **adamw})
  objective = NextToken(model=trainable(tiny.model(dtype=dtype), view))
  return Trainer(objective=objective, adamw=settings, seed=0)


def take(
  trainer: Trainer, num_steps: int, source=None, frozen=None, placed=None
):
  source = source or tiny.packed()
  state, rows = trainer.init(), []
  for i in range(num_steps):
    batch = jax.tree.map(lambda x: put(x, placed, 'batch'), source.batch(i))
    state, figures = trainer.step(state, frozen, batch)
    rows.append(jax.device_get(figures))
  return state, rows


class StepTest(parameterized.TestCase):
  @parameterized.parameters('float32', 'bfloat16')
  def test_the_loss_falls_and_masters_are_float32(self, dtype):
    trainer = next_token(dtype)
    state, rows = take(trainer, 20)
    self.assertAlmostEqual(rows[0]['loss'], np.log(257), delta=1.5)
    self.assertLess(rows[-1]['loss'], rows[0]['loss'] - 1.5)
    for leaf in jax.tree.leaves(state.params):
      self.assertEqual(leaf.dtype, jnp.float32)
    rounded = trainer.rounded(state.params)
    self.assertEqual(rounded['layers'][0]['q'].dtype, jnp.dtype(dtype))
    self.assertEqual(rounded['final_norm'].dtype, jnp.float32)

  def test_parts_of_a_batch_have_the_gradient_of_the_whole(self):
    states = [take(next_token(num_accumulated=n), 1)[0] for n in (1, 2, 4)]
    for other in states[1:]:
      jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5),
        states[0].params,
        other.params,
      )
    with self.assertRaisesRegex(ValueError, 'divide the 4 rows.* got 3'):
      take(next_token(num_accumulated=3), 1)

  def test_devices_share_the_rows(self):
    view, _ = refine(MeshShape(data=4))
    trainer = next_token(view=view)
    placement = trainer.objective.model.placement
    sharded, rows = take(trainer, 3, placed=placement)
    alone, expected = take(next_token(), 3)
    self.assertAlmostEqual(rows[2]['loss'], expected[2]['loss'], delta=1e-4)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3),
      jax.device_get(sharded.params),
      jax.device_get(alone.params),
    )
    self.assertLen(sharded.params['embed'].sharding.device_set, 4)

  @parameterized.parameters(1, 4)
  def test_the_first_step_compiles_for_all(self, num_devices):
    view, _ = refine(MeshShape(data=num_devices))
    trainer = next_token(view=view)
    placed = trainer.objective.model.placement
    source, state = tiny.packed(), trainer.init()
    batches = [
      jax.tree.map(lambda x: put(x, placed, 'batch'), source.batch(i))
      for i in range(3)
    ]
    state, _ = trainer.step(state, None, batches[0])
    with count_traces() as traces:
      for batch in batches[1:]:
        state, _ = trainer.step(state, None, batch)
    self.assertEqual(traces.num_compilations, 0)

  def test_masked_tokens_do_not_count(self):
    batch = tiny.packed().batch(0)
    trainer = next_token()
    objective, params = trainer.objective, trainer.objective.init(trainer.key())
    batch['mask_BT'][:, 9:] = False
    value, _ = objective.loss(params, None, batch, trainer.key())
    changed = {**batch, 'tokens_BT': batch['tokens_BT'].copy()}
    changed['tokens_BT'][:, 9:] = 7
    again, _ = objective.loss(params, None, changed, trainer.key())
    self.assertAlmostEqual(float(value), float(again), places=5)

  @parameterized.parameters(
    ({'learning_rate': 0.0}, 'learning_rate must be > 0, got 0.0'),
    ({'num_steps': 0}, 'num_steps must be >= 1, got 0'),
    ({'num_warmup_steps': 20}, r'in 0\.\.19, got 20'),
    ({'weight_decay': 2.0}, r'weight_decay must be in 0\.\.1, got 2.0'),
  )
  def test_settings_are_checked(self, settings, message):
    with self.assertRaisesRegex(ValueError, message):
      next_token(**settings)

  def test_the_schedule(self):
    settings = AdamW(learning_rate=1.0, num_steps=20, num_warmup_steps=4)
    rate = settings.schedule()
    got = [float(rate(i)) for i in (0, 2, 4, 12, 20)]
    np.testing.assert_allclose(got, [0.25, 0.625, 1.0, 0.55, 0.1], atol=1e-6)

  def test_only_float_models_are_trained(self):
    int8 = dataclasses.replace(tiny.model(), quantize='int8')
    with self.assertRaisesRegex(ValueError, 'quantize int8'):
      trainable(int8)


class DistillTest(parameterized.TestCase):
  @parameterized.parameters('forward_kl', 'reverse_kl', 'js', 'tv')
  def test_the_draft_comes_closer(self, name):
    target = trainable(tiny.model(2, 24))
    taught = Trainer(
      objective=NextToken(model=target),
      adamw=AdamW(learning_rate=1e-2, num_steps=30),
      seed=1,
    )
    frozen = take(taught, 30)[0].params
    objective = Distill(
      draft=trainable(tiny.model()), target=target, divergence=name
    )
    trainer = Trainer(
      objective=objective,
      adamw=AdamW(learning_rate=1e-2, num_steps=40),
      seed=2,
    )
    before = jax.device_get(frozen)
    _, rows = take(trainer, 40, frozen=frozen)
    self.assertLess(rows[-1][name], 0.8 * rows[0][name])
    self.assertGreater(rows[-1]['overlap'], rows[0]['overlap'])
    if name == 'tv':
      self.assertAlmostEqual(rows[5]['tv'], 1 - rows[5]['overlap'], places=5)
    self.assertTrue(tiny.same(before, jax.device_get(frozen)))

  def test_a_copy_of_the_target_has_nothing_to_learn(self):
    target = trainable(tiny.model())
    objective = Distill(draft=target, target=target, divergence='forward_kl')
    params = target.init(jax.random.key(0))
    batch = tiny.packed().batch(0)
    value, figures = objective.loss(params, params, batch, jax.random.key(0))
    self.assertAlmostEqual(float(value), 0, places=6)
    self.assertAlmostEqual(float(figures['overlap']), 1, places=5)

  def test_vocabularies_must_agree(self):
    other = dataclasses.replace(tiny.model(), vocab_size=200)
    with self.assertRaisesRegex(ValueError, 'got 200 and 257'):
      Distill(
        draft=trainable(other),
        target=trainable(tiny.model()),
        divergence='tv',
      )


if __name__ == '__main__':
  absltest.main()
