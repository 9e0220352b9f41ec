"""The first of the largest."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import ranking


class RankingTest(parameterized.TestCase):
  @parameterized.parameters('float32', 'bfloat16', 'int32')
  def test_is_that_of_numpy(self, dtype):
    rng = np.random.default_rng(0)
    # Few values, so that most of them are there more than once.
    x = rng.integers(-3, 4, (5, 7, 40))
    found = jax.jit(ranking.best)(jnp.asarray(x, dtype))
    self.assertEqual(found.dtype, jnp.int32)
    np.testing.assert_array_equal(found, np.argmax(x, axis=-1))

  def test_infinities(self):
    x = np.full((4, 6), -np.inf, np.float32)
    x[1, 3] = x[1, 5] = 0
    x[2, 5] = np.inf
    x[3, 4] = -1e38
    np.testing.assert_array_equal(ranking.best(jnp.asarray(x)), [0, 3, 5, 4])

  def test_nan_names_an_index_that_is_there(self):
    x = jnp.array([[1.0, jnp.nan, 3.0]])
    self.assertIn(int(ranking.best(x)[0]), range(3))


if __name__ == '__main__':
  absltest.main()
