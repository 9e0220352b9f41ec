"""int8: rounded as declared, summed exactly, and no row sees another."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import sharding
from specjax.models import config as model_config
from specjax.models import layers, presets, quantize
from tests.models import tiny

# Parts of a second each with eager operations; the models run jitted.
dense = jax.jit(layers.dense, static_argnames='dtype')


def normal(seed, *shape):
  rng = np.random.default_rng(seed)
  # Rows and channels of different sizes, so that a wrong scale shows.
  sizes = np.exp(rng.normal(size=(*shape[:-1], 1)))
  return (sizes * rng.normal(size=shape)).astype(np.float32)


def num_bytes(model) -> int:
  specs = jax.tree.leaves(model.param_specs(), is_leaf=sharding.is_spec)
  return sum(spec.num_bytes for spec in specs)


class QuantizeTest(parameterized.TestCase):
  def test_by_hand(self):
    int8, scale = quantize.quantize(
      jnp.array([[127.0, -0.4, 0.6, 1.5], [0.5, -0.25, 0.0, 0.0]])
    )
    np.testing.assert_array_equal(int8, [[127, 0, 1, 2], [127, -64, 0, 0]])
    np.testing.assert_allclose(scale, [1.0, 0.5 / 127], rtol=1e-6)
    self.assertEqual((int8.dtype, scale.dtype), (jnp.int8, jnp.float32))

  @parameterized.parameters('float32', 'bfloat16')
  def test_error_is_half_a_scale_at_most(self, dtype):
    x = jnp.asarray(normal(0, 3, 5, 64), dtype)
    int8, scale = map(np.asarray, quantize.quantize(x))
    error = np.abs(np.asarray(x, np.float32) - int8 * scale[..., None])
    self.assertTrue(np.all(error <= 0.50001 * scale[..., None]))
    # The largest entry takes the whole range, and -128 is never used.
    np.testing.assert_array_equal(np.max(np.abs(int8), axis=-1), 127)
    self.assertEqual(np.min(int8), -127)

  @parameterized.parameters(0.0, 1e-45, 1e-38, 1e-35, 3e38)
  def test_zero_and_extreme_rows_stay_finite(self, value):
    x = jnp.full((1, 1, 4), value, jnp.float32)
    int8, scale = jax.jit(quantize.quantize)(x)
    self.assertGreater(float(scale[0, 0]), 0)
    np.testing.assert_allclose(
      int8 * scale[..., None], np.asarray(x), rtol=1e-2, atol=1e-38
    )
    weight = quantize.quantize_weight(jnp.zeros((2, 4)).at[0].set(0.125))
    y = np.asarray(dense(x, weight))[0, 0]
    np.testing.assert_allclose(y, [value / 2, 0], rtol=1e-2, atol=1e-38)


class ProductTest(parameterized.TestCase):
  @parameterized.product(dtype=('float32', 'bfloat16'), t=(1, 3), b=(1, 2))
  def test_dense_is_the_exact_sum_times_both_scales(self, dtype, t, b):
    x = jnp.asarray(normal(0, b, t, 300), dtype)
    weight = quantize.quantize_weight(normal(1, 7, 300))
    got = dense(x, weight, dtype=jnp.float32)
    int8, scale = map(np.asarray, quantize.quantize(x))
    sums = np.einsum(
      'bti,oi->bto', int8.astype(np.int32), np.asarray(weight.int8_OI, np.int32)
    )
    want = sums.astype(np.float32) * np.asarray(weight.scale_O)
    want = want * scale[..., None]
    np.testing.assert_array_equal(got, want)
    self.assertEqual(dense(x, weight).dtype, jnp.dtype(dtype))

  def test_the_sum_has_room(self):
    # The widest input of the published shapes: all products are 127 * 127.
    x, weight = jnp.ones((1, 2, 53248)), jnp.ones((2, 53248))
    y = dense(x, quantize.quantize_weight(weight))
    np.testing.assert_allclose(y, 53248, rtol=1e-5)

  def test_error_against_float(self):
    x, weight, bias = normal(0, 2, 3, 256), normal(1, 20, 256), normal(2, 20)
    quantized = quantize.quantize_weight(weight)
    got = np.asarray(dense(x, quantized, bias), np.float64)
    want = np.float64(x) @ np.float64(weight).T + bias
    # Each factor is off by half of its scale at most.
    step_x = np.asarray(quantize.quantize(x)[1], np.float64)[..., None] / 2
    step_w = np.asarray(quantized.scale_O, np.float64) / 2
    bound = np.abs(x).sum(-1, keepdims=True) * step_w
    bound = bound + step_x * np.abs(weight).sum(-1) + 256 * step_x * step_w
    error = np.abs(got - want)
    self.assertTrue(np.all(error <= 1.001 * bound + 1e-4))
    # And they are independent, so that the sum is far below the bound.
    size = np.linalg.norm(x, axis=-1)[..., None] * np.linalg.norm(
      weight, axis=1
    )
    self.assertLess(np.max(error / size), 0.01)

  @parameterized.parameters('float32', 'bfloat16')
  def test_one_row_becomes_two(self, dtype):
    x = jnp.ones((1, 1, 4), dtype)
    weight = quantize.quantize_weight(jnp.ones((3, 4)))
    program = str(jax.make_jaxpr(layers.dense)(x, weight))
    self.assertIn('i8[1,2,4]', program)
    self.assertEqual(layers.dense(x, weight).shape, (1, 1, 3))

  @parameterized.parameters((1, 1), (1, 4), (3, 2))
  def test_no_row_sees_another(self, b, t):
    x = normal(0, b, t, 64)
    weight = quantize.quantize_weight(normal(1, 9, 64))
    want = np.asarray(dense(x, weight))
    for b_kept, t_kept in np.ndindex(b, t):
      for other in (0.0, 1e30, np.inf, np.nan):
        changed = np.full_like(x, other)
        changed[b_kept, t_kept] = x[b_kept, t_kept]
        got = np.asarray(dense(changed, weight))[b_kept, t_kept]
        np.testing.assert_array_equal(got, want[b_kept, t_kept])
        # Alone, in another shape, it is the same too: the sums are exact.
        alone = dense(x[b_kept, t_kept][None, None], weight)[0, 0]
        np.testing.assert_array_equal(alone, got)

  @parameterized.parameters(np.nan, np.inf, -np.inf)
  def test_what_is_not_finite_stays_so(self, value):
    x = normal(0, 1, 3, 16)
    x[0, 1, 5] = value
    weight = normal(1, 6, 16)
    weight[2] = 0
    y = np.asarray(dense(x, quantize.quantize_weight(weight)))
    np.testing.assert_array_equal(np.isfinite(y).all(-1), [[True, False, True]])
    self.assertFalse(np.isfinite(y[0, 1]).any())

  @parameterized.parameters('float32', 'bfloat16')
  def test_lookup(self, dtype):
    table = normal(0, 5, 8)
    tokens_BT = jnp.array([[3, 0], [9, -7]])
    got = layers.lookup(quantize.quantize_weight(table), tokens_BT, dtype)
    self.assertEqual(got.dtype, jnp.dtype(dtype))
    want = table[[[3, 0], [4, 0]]]
    scale = np.abs(want).max(-1, keepdims=True) / 127
    error = np.abs(np.asarray(got, np.float32) - want)
    self.assertTrue(
      np.all(error <= (0.51 if dtype == 'float32' else 1) * scale)
    )


class ModelTest(parameterized.TestCase):
  @parameterized.parameters(*presets.PRESETS)
  def test_half_of_bfloat16(self, name):
    plain = model_config.config_from_hf(presets.PRESETS[name])
    model = dataclasses.replace(plain, quantize='int8')
    self.assertBetween(num_bytes(model) / num_bytes(plain), 0.5, 0.505)

  def test_specs(self):
    plain = tiny.model('llama_tied_biased', 'bfloat16')
    model = dataclasses.replace(plain, quantize='int8')
    specs, plain_specs = model.param_specs(), plain.param_specs()
    self.assertNotIn('head', specs)
    embed = specs['embed']
    self.assertEqual(embed.int8_OI.logical_axes, ('vocab', 'embed'))
    self.assertEqual(embed.int8_OI.dtype, 'int8')
    self.assertEqual(embed.scale_O.logical_axes, ('vocab',))
    self.assertEqual(embed.scale_O.shape, (40,))
    self.assertEqual(embed.scale_O.dtype, 'float32')
    down = specs['layers'][1]['down']
    self.assertEqual(down.int8_OI.logical_axes, ('embed', 'ffn'))
    self.assertEqual(down.scale_O.logical_axes, ('embed',))
    for name, spec in specs['layers'][0].items():
      plain_spec = plain_specs['layers'][0][name]
      is_weight = isinstance(spec, quantize.Int8Weight)
      self.assertEqual(is_weight, not name.endswith(('_bias', '_norm')), name)
      self.assertEqual(
        spec.int8_OI.shape if is_weight else spec,
        plain_spec.shape if is_weight else plain_spec,
      )

  @parameterized.product(
    name=('llama', 'llama_tied_biased', 'gemma3'),
    dtype=('float32', 'bfloat16'),
  )
  def test_logits_are_near_those_of_float32(self, name, dtype):
    params = tiny.params_of(tiny.model(name))
    want = tiny.logits_of(tiny.model(name), params)
    got = tiny.logits_of(
      tiny.model(name, dtype, quantize='int8'), quantize.quantize_params(params)
    )
    self.assertLess(np.max(np.abs(got - want)), 0.08 * np.max(np.abs(want)))

  def test_a_token_without_a_finite_embedding_spoils_its_row_alone(self):
    model = tiny.model('llama', quantize='int8')
    params = quantize.quantize_params(tiny.params_of(tiny.model('llama')))
    want = tiny.logits_of(model, params)
    embed = params['embed']
    for value in (np.nan, np.inf):
      broken = embed._replace(scale_O=embed.scale_O.at[8].set(value))
      got = tiny.logits_of(
        model, {**params, 'embed': broken}
      )  # Row 1 is 6..11.
      np.testing.assert_array_equal(got[0], want[0])
      self.assertFalse(np.isfinite(got[1, 2:]).any())

  def test_random_parameters_are_the_float_ones_rounded(self):
    model = tiny.model('gemma3', quantize='int8')
    got = model.init(jax.random.key(3))
    want = quantize.quantize_params(
      tiny.model('gemma3').init(jax.random.key(3))
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)
    largest = functools.partial(np.max, axis=-1)
    np.testing.assert_array_equal(largest(np.abs(got['embed'].int8_OI)), 127)

  def test_refuses(self):
    with self.assertRaisesRegex(ValueError, "none, int8, got 'int4'"):
      dataclasses.replace(tiny.model('llama'), quantize='int4')


if __name__ == '__main__':
  absltest.main()
