"""The Pallas product, interpreted, against the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax.kernels import pallas, products


class PallasTest(parameterized.TestCase):
  @parameterized.parameters(
    (1, 1, 1), (1, 128, 128), (6, 200, 130), (33, 384, 256), (128, 77, 301)
  )
  def test_equals_its_twin(self, m, i, o):
    rng = np.random.default_rng(0)
    x_MI = jnp.asarray(rng.integers(-128, 128, (m, i)), jnp.int8)
    weight_OI = jnp.asarray(rng.integers(-128, 128, (o, i)), jnp.int8)
    y_MO = pallas.int8_product(x_MI, weight_OI, interpret=True)
    self.assertEqual(y_MO.dtype, jnp.int32)
    expected_MO = jax.jit(products.pure_int8_product)(x_MI, weight_OI)
    np.testing.assert_array_equal(y_MO, expected_MO)

  def test_what_does_not_match(self):
    with self.assertRaisesRegex(ValueError, r'weight_OI must have shape'):
      pallas.int8_product(
        jnp.zeros((2, 3), jnp.int8), jnp.zeros((4, 5), jnp.int8)
      )


if __name__ == '__main__':
  absltest.main()
