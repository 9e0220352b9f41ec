"""The kernels against their twins, and what becomes of them without a kernel.

Skipped loudly where the kernels were not built, but for the last class.
"""

import ctypes
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax.kernels import products

ROOT = pathlib.Path(__file__).resolve().parents[2]
DTYPES = (('int8', 'int8'), ('bfloat16', 'bfloat16'))

# Inputs and channels: multiples of nothing, of every block, one of each, and
# more than one piece of inputs and one task of channels.
NUM_ROWS = (*range(1, 18), 128)
SIZES = ((1, 1), (15, 3), (16, 32), (37, 70), (2051, 67), (1024, 600))


def product_of(dtype: str):
  return getattr(products, f'{dtype}_product')


def random_matrix(seed: int, shape: tuple[int, int], dtype: str) -> jax.Array:
  rng = np.random.default_rng(seed)
  if dtype == 'int8':
    return jnp.asarray(rng.integers(-128, 128, shape), jnp.int8)
  return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)


def compiled(dtype: str, x_MI, weight_OI) -> np.ndarray:
  return np.asarray(jax.jit(product_of(dtype))(x_MI, weight_OI))


class AnyProcessorTest(parameterized.TestCase):
  """With the code for the processor at hand, which may have AVX-512."""

  most_code = 2

  def setUp(self):
    super().setUp()
    if not products.is_available():
      self.skipTest('THE KERNELS WERE NOT BUILT')
    library = ctypes.CDLL(str(products._LIBRARY))
    library.specjax_set_most_code(self.most_code)
    self.addCleanup(library.specjax_set_most_code, 2)

  @parameterized.product(size=SIZES, dtype=('int8', 'bfloat16'))
  def test_equals_its_twin(self, size, dtype):
    i, o = size
    weight_OI = random_matrix(0, (o, i), dtype)
    for m in NUM_ROWS if size == (37, 70) else (1, 5, 6, 16):
      x_MI = random_matrix(m, (m, i), dtype)
      y_MO = compiled(dtype, x_MI, weight_OI)
      if dtype == 'int8':
        exact_MO = (
          np.asarray(x_MI, np.int32) @ np.asarray(weight_OI, np.int32).T
        )
        np.testing.assert_array_equal(y_MO, exact_MO)
      else:
        x, weight = np.asarray(x_MI, float), np.asarray(weight_OI, float)
        error_MO = np.abs(y_MO - x @ weight.T)
        # A float32 rounding for every product and sum would be i * 2**-24.
        bound_MO = np.abs(x) @ np.abs(weight).T * (i + 8) * 2**-24
        self.assertTrue((error_MO <= bound_MO).all())

  @parameterized.product(size=SIZES, dtype=('int8', 'bfloat16'))
  def test_a_row_has_the_same_bits_in_any_company(self, size, dtype):
    i, o = size
    weight_OI = random_matrix(0, (o, i), dtype)
    x_MI = random_matrix(1, (23, i), dtype)
    alone_MO = np.concatenate(
      [compiled(dtype, x_MI[m : m + 1], weight_OI) for m in range(23)]
    )
    for m in (2, 3, 4, 5, 6, 7, 13, 23):
      y_MO = compiled(dtype, x_MI[:m], weight_OI)
      np.testing.assert_array_equal(y_MO, alone_MO[:m])

  @parameterized.named_parameters(*DTYPES)
  def test_sums_are_the_same_every_time(self, dtype):
    # Large enough for all threads, whoever comes first.
    weight_OI = random_matrix(0, (999, 1500), dtype)
    x_MI = random_matrix(1, (5, 1500), dtype)
    y_MO = compiled(dtype, x_MI, weight_OI)
    for _ in range(50):
      np.testing.assert_array_equal(compiled(dtype, x_MI, weight_OI), y_MO)

  def test_int8_bounds(self):
    ones_MI = jnp.ones((3, 4099), jnp.int8)
    y_MO = compiled('int8', ones_MI * -128, ones_MI * -128)
    np.testing.assert_array_equal(y_MO, np.full((3, 3), 4099 * 2**14))

  def test_int8_sums_wrap_as_those_of_xla(self):
    x_MI = jnp.full((1, 2**17 + 5), -128, jnp.int8)
    y_MO = compiled('int8', x_MI, x_MI)
    exact = (2**17 + 5) * 2**14
    self.assertEqual(int(y_MO[0, 0]), exact - 2**32)
    twin_MO = jax.jit(products.pure_int8_product)(x_MI, x_MI)
    np.testing.assert_array_equal(y_MO, twin_MO)

  @parameterized.named_parameters(*DTYPES)
  def test_no_inputs(self, dtype):
    y_MO = compiled(dtype, jnp.zeros((2, 0), dtype), jnp.zeros((3, 0), dtype))
    np.testing.assert_array_equal(y_MO, np.zeros((2, 3)))

  @parameterized.parameters(jnp.nan, jnp.inf, -jnp.inf)
  def test_what_is_not_finite_stays_in_its_row_and_channel(self, value):
    x_MI = random_matrix(0, (7, 45), 'bfloat16')
    weight_OI = random_matrix(1, (37, 45), 'bfloat16')
    y_MO = compiled('bfloat16', x_MI, weight_OI)
    y2_MO = compiled('bfloat16', x_MI.at[2, 44].set(value), weight_OI)
    self.assertFalse(np.isfinite(y2_MO[2]).any())
    np.testing.assert_array_equal(
      np.delete(y2_MO, 2, axis=0), np.delete(y_MO, 2, axis=0)
    )
    y3_MO = compiled('bfloat16', x_MI, weight_OI.at[5, 0].set(value))
    self.assertFalse(np.isfinite(y3_MO[:, 5]).any())
    np.testing.assert_array_equal(
      np.delete(y3_MO, 5, axis=1), np.delete(y_MO, 5, axis=1)
    )

  def test_tiny_numbers_count_as_zero_on_every_thread(self):
    tiny_OI = jnp.full((3000, 64), 2.0**-130, jnp.bfloat16)
    x_MI = jnp.full((1, 64), 2.0**100, jnp.bfloat16)
    y_MO = compiled('bfloat16', x_MI, tiny_OI)
    self.assertLen(np.unique(y_MO), 1)


class Avx2Test(AnyProcessorTest):
  most_code = 1


class PlainTest(AnyProcessorTest):
  most_code = 0


class KernelTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    if not products.is_available():
      self.skipTest('THE KERNELS WERE NOT BUILT')

  @parameterized.named_parameters(*DTYPES)
  def test_inside_a_loop(self, dtype):
    weight_OI = random_matrix(0, (40, 40), dtype)
    x_MI = random_matrix(1, (3, 40), dtype)
    product = product_of(dtype)

    def step(_, x_MI):
      return (product(x_MI, weight_OI) // 64).astype(dtype)

    @jax.jit
    def run(x_MI, num_steps):
      return jax.lax.fori_loop(0, num_steps, step, x_MI)

    expected_MI = x_MI
    for _ in range(4):
      expected_MI = jax.jit(step)(0, expected_MI)
    np.testing.assert_array_equal(run(x_MI, 4), expected_MI)

  @parameterized.named_parameters(*DTYPES)
  def test_vmap(self, dtype):
    weight_OI = random_matrix(0, (40, 33), dtype)
    x_BMI = random_matrix(1, (15, 33), dtype).reshape(5, 3, 33)
    y_BMO = jax.vmap(product_of(dtype), in_axes=(0, None))(x_BMI, weight_OI)
    for b in range(5):
      expected_MO = compiled(dtype, x_BMI[b], weight_OI)
      np.testing.assert_array_equal(y_BMO[b], expected_MO)

  def test_gradients_are_those_of_the_twin(self):
    weight_OI = random_matrix(0, (6, 20), 'bfloat16')
    x_MI = random_matrix(1, (3, 20), 'bfloat16')

    def gradient(product):
      loss = lambda x_MI, weight_OI: jnp.sum(product(x_MI, weight_OI) ** 2)
      return jax.grad(loss, argnums=(0, 1))(x_MI, weight_OI)

    got = gradient(products.bfloat16_product)
    expected = gradient(products.pure_bfloat16_product)
    for g, e in zip(got, expected, strict=True):
      np.testing.assert_allclose(
        g.astype(jnp.float32), e.astype(jnp.float32), rtol=2**-7, atol=1e-2
      )

  @parameterized.product(dtype=('int8', 'bfloat16'), platform=('cpu', 'tpu'))
  def test_other_devices_never_see_it(self, dtype, platform):
    x_MI = jnp.zeros((2, 32), dtype)
    lowered = (
      jax.jit(product_of(dtype))
      .trace(x_MI, x_MI)
      .lower(lowering_platforms=(platform,))
    )
    self.assertEqual('specjax_' in lowered.as_text(), platform == 'cpu')


class WithoutKernelTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    products.is_available.cache_clear()
    self.addCleanup(products.is_available.cache_clear)

  def check_twins(self):
    for dtype in ('int8', 'bfloat16'):
      x_MI = random_matrix(0, (2, 20), dtype)
      weight_OI = random_matrix(1, (5, 20), dtype)
      text = jax.jit(product_of(dtype)).lower(x_MI, weight_OI).as_text()
      self.assertNotIn('specjax_', text)
      twin = getattr(products, f'pure_{dtype}_product')
      np.testing.assert_array_equal(
        compiled(dtype, x_MI, weight_OI), jax.jit(twin)(x_MI, weight_OI)
      )

  def test_turned_off(self):
    with mock.patch.dict(os.environ, {products.SWITCH: '0'}):
      with self.assertNoLogs('absl'):
        self.assertFalse(products.is_available())
      self.check_twins()

  def test_a_switch_of_another_value(self):
    with mock.patch.dict(os.environ, {products.SWITCH: 'no'}):
      with self.assertRaisesRegex(
        ValueError, "SPECJAX_KERNELS must be 0 or 1, got 'no'."
      ):
        products.is_available()

  def test_not_built(self):
    missing = pathlib.Path('/nowhere/_products.so')
    with mock.patch.object(products, '_LIBRARY', missing):
      with self.assertLogs('absl') as logs:
        self.assertFalse(products.is_available())
        self.check_twins()
    self.assertLen(logs.output, 1)
    self.assertIn('/nowhere/_products.so is not there', logs.output[0])

  def test_not_a_library(self):
    path = pathlib.Path(__file__)
    with mock.patch.object(products, '_LIBRARY', path):
      with self.assertLogs('absl'):
        self.assertFalse(products.is_available())

  def test_built_for_another_jaxlib(self):
    if not products._LIBRARY.exists():
      self.skipTest('THE KERNELS WERE NOT BUILT')
    with mock.patch('importlib.metadata.version', return_value='0.0.1'):
      with self.assertLogs('absl') as logs:
        self.assertFalse(products.is_available())
    self.assertIn('found 0.0.1; install specjax again', logs.output[0])

  @parameterized.parameters(
    (
      (2, 3),
      (4, 5),
      'int8',
      r'weight_OI must have shape \(O, 3\), got \(4, 5\)',
    ),
    ((3,), (4, 3), 'int8', r'x_MI must have shape \(M, I\), got \(3,\)'),
    ((2, 3), (4, 3), 'float32', 'x_MI must be int8, got float32'),
  )
  def test_what_does_not_fit(self, x_shape, weight_shape, dtype, message):
    with self.assertRaisesRegex(ValueError, message):
      products.int8_product(
        jnp.zeros(x_shape, dtype), jnp.zeros(weight_shape, dtype)
      )


class BuildTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('no_compiler', {'PATH': ''}),
    ('a_broken_compiler', {'CC': 'false', 'CXX': 'false'}),
  )
  def test_an_install_does_not_fail(self, environment):
    if importlib.util.find_spec('setuptools') is None:
      self.skipTest('setuptools is not installed')
    with tempfile.TemporaryDirectory() as folder:
      places = (f'--build-lib={folder}', f'--build-temp={folder}')
      done = subprocess.run(
        [sys.executable, 'setup.py', '-q', 'build_ext', *places],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
      )
      self.assertEqual(done.returncode, 0, done.stderr)
      self.assertEmpty(list(pathlib.Path(folder).rglob('*.so')))


if __name__ == '__main__':
  absltest.main()
