"""Noise is a function of seed, position or step, and purpose; of no more."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import noise
from specjax.verify import chain


def bits(key) -> tuple[int, ...]:
  return tuple(np.ravel(jax.random.key_data(key)).tolist())


class NoiseTest(parameterized.TestCase):
  @parameterized.parameters(0, 1, 2**31, 2**32 - 1, 7.0, np.uint32(8))
  def test_seeds(self, seed):
    found = noise.check_seed(seed)
    self.assertEqual(found, seed)
    self.assertIsInstance(found, int)

  @parameterized.parameters(
    -1, 2**32, 0.5, True, '3', None, float('nan'), float('inf')
  )
  def test_bad_seeds(self, seed):
    message = f'^seed must be a whole number in 0..4294967295, got {seed!r}.$'
    with self.assertRaisesRegex(ValueError, message):
      noise.check_seed(seed)

  def test_keys_differ_by_seed_purpose_length_and_offset(self):
    keys = {}
    seeds = (0, 1, 2**32 - 1)
    purposes = (noise.DRAFT, noise.ACCEPT, noise.RESIDUAL)
    for seed, purpose, length, offset in itertools.product(
      seeds, purposes, (1, 2, 5), (0, 1, 2)
    ):
      key = noise.step_key(
        jnp.uint32(seed), purpose, jnp.int32(length), jnp.int32(offset)
      )
      keys[seed, purpose, length, offset] = bits(key)
    for seed, position in itertools.product(seeds, range(6)):
      key = noise.token_key(jnp.uint32(seed), jnp.int32(position))
      keys[seed, position] = bits(key)
    self.assertLen(set(keys.values()), len(keys))

  def test_token_noise_is_keyed_by_absolute_position(self):
    seed = jnp.uint32(9)
    early = noise.draw_keys(seed, noise.TOKEN, jnp.int32(4), 5)
    late = noise.draw_keys(seed, noise.TOKEN, jnp.int32(6), 2)
    self.assertEqual(bits(early[2:4]), bits(late))
    # The rest is keyed by the step, so that a second try is fresh.
    early = noise.draw_keys(seed, noise.DRAFT, jnp.int32(4), 5)
    late = noise.draw_keys(seed, noise.DRAFT, jnp.int32(6), 5)
    self.assertTrue(set(map(bits, early)).isdisjoint(set(map(bits, late))))

  def test_a_row_draws_the_same_in_any_batch(self):
    seed_B = jnp.asarray([5, 1, 9, 1], jnp.uint32)
    length_B = jnp.asarray([3, 8, 2, 3], jnp.int32)
    make = lambda s, n: jax.tree.map(
      lambda x: (
        jax.random.key_data(x)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        else x
      ),
      chain.make_noise(s, n, 3),
    )
    batch = jax.vmap(make)(seed_B, length_B)
    for i in range(4):
      alone = make(seed_B[i], length_B[i])
      row = jax.tree.map(lambda x, i=i: x[i], batch)
      jax.tree.map(np.testing.assert_array_equal, row, alone)

  def test_more_drafts_leave_the_noise_of_the_first_as_it_is(self):
    few = chain.make_noise(jnp.uint32(3), jnp.int32(7), 2)
    many = chain.make_noise(jnp.uint32(3), jnp.int32(7), 6)
    np.testing.assert_array_equal(few.accept_K, many.accept_K[:2])
    self.assertEqual(bits(few.token_N), bits(many.token_N[:3]))
    self.assertEqual(bits(few.residual_N), bits(many.residual_N[:3]))

  def test_uniforms_and_gumbels_have_their_laws(self):
    draw = jax.vmap(lambda s: chain.make_noise(s, jnp.int32(1), 1))
    found = draw(jnp.arange(1 << 14, dtype=jnp.uint32))
    uniform = np.asarray(found.accept_K)[:, 0]
    self.assertTrue(np.all((uniform >= 0) & (uniform < 1)))
    self.assertAlmostEqual(float(uniform.mean()), 0.5, delta=0.01)
    gumbel = jax.vmap(lambda key: noise.gumbel(key, 2))(found.token_N[:, 0])
    self.assertTrue(np.all(np.isfinite(gumbel)))
    # Euler's constant and pi^2 / 6; five standard errors.
    self.assertAlmostEqual(float(gumbel.mean()), 0.5772, delta=0.036)
    self.assertAlmostEqual(float(gumbel.var()), 1.6449, delta=0.1)
    correlation = np.corrcoef(np.asarray(gumbel[:, 0]), uniform)[0, 1]
    self.assertLess(abs(correlation), 0.04)


if __name__ == '__main__':
  absltest.main()
