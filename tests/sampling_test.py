"""The transform against a reference that sorts; settings; the draw."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import sampling, testing
from specjax.sampling import SamplingOptions, stack_options

V = 12
TRANSFORM = jax.jit(sampling.transform)
OFF = SamplingOptions()

OPTIONS = (
  dict(),
  dict(temperature=1.0),
  dict(temperature=0.5),
  dict(temperature=1.7),
  dict(temperature=1.0, top_k=1),
  dict(temperature=1.0, top_k=5),
  dict(temperature=1.0, top_k=V),
  dict(temperature=1.0, top_k=1000),
  dict(temperature=1.0, top_p=0.1),
  dict(temperature=1.3, top_p=0.73),
  dict(temperature=1.0, top_p=0.999),
  dict(temperature=1.0, min_p=0.3),
  dict(temperature=1.0, min_p=1.0),
  dict(temperature=1.7, top_k=6, top_p=0.81, min_p=0.07),
  dict(temperature=1.0, repetition_penalty=1.8),
  dict(temperature=1.0, repetition_penalty=0.7, top_k=4),
  dict(temperature=0.9, presence_penalty=0.8, frequency_penalty=0.3),
  dict(temperature=1.0, frequency_penalty=-0.5, top_p=0.9),
  dict(temperature=1.0, logit_bias=((3, 2.0), (5, -1.5), (3, 0.5))),
  dict(temperature=1.0, banned_ids=(0, 7), top_k=3),
  dict(temperature=1.0, allowed_ids=(2, 3, 11), top_p=0.8),
  dict(temperature=0.0, allowed_ids=(4, 6), banned_ids=(4,)),
  dict(
    temperature=0.6,
    top_k=7,
    top_p=0.95,
    min_p=0.02,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.1,
    logit_bias=((1, 1.0),),
    banned_ids=(9,),
  ),
  dict(temperature=0.0, repetition_penalty=3.0, frequency_penalty=1.0),
)


def probs(log_weights):
  return np.asarray(jax.nn.softmax(log_weights, axis=-1))


def law_of(logits, **options) -> np.ndarray:
  """The law of one row of logits."""
  logits = jnp.asarray(logits, jnp.float32)
  settings = stack_options([SamplingOptions(**options)], logits.shape[-1])
  return probs(TRANSFORM(settings, logits[None, None]))[0, 0]


class TransformTest(parameterized.TestCase):
  def test_equals_the_sorting_reference(self):
    """Every setting on random logits, rounded so that ties abound."""
    rng = np.random.default_rng(0)
    options = [SamplingOptions(**o) for o in OPTIONS]
    b, t, length, prompt_length = len(options), 6, 9, 4
    tokens_BL = rng.integers(0, V, (b, length + 3)).astype(np.int32)
    counts = sampling.count_committed(
      jnp.asarray(tokens_BL),
      jnp.full(b, length, jnp.int32),
      jnp.full(b, prompt_length, jnp.int32),
      V,
    )
    settings = stack_options(options, V)
    for grain in (None, 0.5, 2.0):
      logits_BTV = rng.normal(size=(b, t, V)) * 2
      if grain is not None:
        logits_BTV = np.round(logits_BTV / grain) * grain
      logits_BTV = logits_BTV.astype(np.float32)
      found = probs(TRANSFORM(settings, jnp.asarray(logits_BTV), counts))
      for row, option in enumerate(options):
        wanted = testing.reference_law(
          logits_BTV[row],
          option,
          tokens_BL[row, :prompt_length],
          np.tile(tokens_BL[row, prompt_length:length], (t, 1)),
        )
        with self.subTest(f'{OPTIONS[row]}', grain=grain):
          np.testing.assert_array_equal(found[row] > 0, wanted > 0)
          np.testing.assert_allclose(found[row], wanted, atol=2e-6)

  @parameterized.parameters(
    # By hand: what survives.
    (dict(top_k=2), [0.4, 0.35, 0.15, 0.1], [0.5333333, 0.4666667, 0, 0]),
    (dict(top_k=2), [0.3, 0.2, 0.3, 0.2], [0.5, 0, 0.5, 0]),
    (dict(top_k=3), [0.3, 0.2, 0.3, 0.2], [0.375, 0.25, 0.375, 0]),
    (dict(top_p=0.7), [0.4, 0.35, 0.15, 0.1], [0.5333333, 0.4666667, 0, 0]),
    (
      dict(top_p=0.76),
      [0.4, 0.35, 0.15, 0.1],
      [0.4444444, 0.3888889, 1 / 6, 0],
    ),
    (dict(top_p=0.4), [0.25] * 4, [0.5, 0.5, 0, 0]),  # Ties by id.
    (dict(top_p=1e-6), [0.2, 0.3, 0.3, 0.2], [0, 1, 0, 0]),
    # 0 and subnormal in float32: never a law without any id.
    (dict(top_p=1e-40), [0.2, 0.3, 0.3, 0.2], [0, 1, 0, 0]),
    (dict(top_p=1e-300), [0.2, 0.3, 0.3, 0.2], [0, 1, 0, 0]),
    (dict(min_p=0.7), [0.5, 0.3, 0.2], [1, 0, 0]),
    (dict(min_p=0.5), [0.5, 0.3, 0.2], [0.625, 0.375, 0]),
    (
      dict(temperature=0.5),
      [0.4, 0.35, 0.15, 0.1],
      [0.5079365, 0.3888889, 0.0714286, 0.0317460],
    ),
    (dict(temperature=0.0), [0.3, 0.5, 0.2], [0, 1, 0]),
    (dict(temperature=0.0), [0.4, 0.4, 0.2], [1, 0, 0]),
    (dict(banned_ids=(0,)), [0.5, 0.3, 0.2], [0, 0.6, 0.4]),
    (dict(allowed_ids=(2,)), [0.5, 0.3, 0.2], [0, 0, 1]),
  )
  def test_by_hand(self, options, p_V, expected):
    options = {'temperature': 1.0, **options}
    np.testing.assert_allclose(
      law_of(np.log(p_V), **options), expected, atol=1e-6
    )

  def test_top_k_1_is_greedy(self):
    rng = np.random.default_rng(1)
    logits = rng.integers(0, 4, (50, V)).astype(np.float32)
    for row in logits:
      warm = law_of(row, temperature=1.0, top_k=1)
      np.testing.assert_array_equal(warm, law_of(row, temperature=0.0))

  def test_a_bias_can_change_the_argmax(self):
    law = law_of([1.0, 2.0, 0.0], temperature=0.0, logit_bias=((2, 2.5),))
    np.testing.assert_array_equal(law, [0, 0, 1])

  def test_one_predicate_for_greedy(self):
    """Tiny temperatures are finite everywhere, and agree on the arg-max."""
    temperatures = (0.0, 1e-39, 1e-38, 2e-38, 1e-12, 1e-6, 1e-5, 2e-5)
    logits_V = jnp.float32([49.0, 50.0, 49.99, -7.0])
    settings = stack_options(
      [SamplingOptions(temperature=t) for t in temperatures]
      + [SamplingOptions(temperature=1.0)],
      4,
    )
    b = len(temperatures) + 1
    log_weights = TRANSFORM(settings, jnp.tile(logits_V, (b, 1, 1)))
    self.assertFalse(np.any(np.isnan(log_weights)))
    law = probs(log_weights)[:, 0]
    np.testing.assert_array_equal(law[:-1], [[0, 1, 0, 0]] * (b - 1))
    self.assertGreater(law[-1, 0], 0.1)
    is_greedy = sampling.is_greedy(settings.temperature_B)
    self.assertEqual(is_greedy.tolist(), [True] * 3 + [False] * (b - 3))

  def test_greedy_row_is_the_same_beside_a_sampled_row(self):
    logits_V = jnp.float32([-8, -3, -2, -1, 0, 9, 1, 2])
    for others in ([], [SamplingOptions(temperature=0.7, top_k=3)]):
      settings = stack_options([OFF, *others], 8)
      rows = jnp.tile(logits_V, (1 + len(others), 1, 1))
      np.testing.assert_array_equal(
        TRANSFORM(settings, rows)[0, 0],
        np.where(np.arange(8) == 5, 0, -np.inf),
      )

  def test_equal_logits_at_zero_never_depend_on_the_key(self):
    settings = stack_options([OFF, SamplingOptions(temperature=1.0)], 3)
    rows = jnp.float32([[[1, 1, 0]], [[1, 1, 0]]])
    log_weights_BV = TRANSFORM(settings, rows)[:, 0]

    @jax.jit
    def draw(key):
      return sampling.draw(log_weights_BV, jax.random.split(key, 2), settings)

    drawn = np.stack([draw(jax.random.key(i)) for i in range(100)])
    np.testing.assert_array_equal(drawn[:, 0], 0)
    self.assertEqual(set(drawn[:, 1].tolist()), {0, 1, 2})

  def test_infinite_logits(self):
    law = law_of([-np.inf, 0.0, 0.0], temperature=1.0, top_k=2)
    np.testing.assert_allclose(law, [0, 0.5, 0.5])
    law = law_of([-np.inf, 0.0, 1.0], temperature=0.7, top_p=0.99)
    self.assertEqual(law[0], 0)

  def test_large_vocabulary_keeps_exactly_k(self):
    rng = np.random.default_rng(2)
    logits = np.round(rng.normal(size=5000), 1)  # Dozens of ties at the edge.
    for k in (1, 17, 300, 4999):
      law = law_of(logits, temperature=1.0, top_k=k)
      self.assertEqual(np.sum(law > 0), k)
      kept = np.argsort(-logits, kind='stable')[:k]
      self.assertEqual(set(np.nonzero(law)[0]), set(kept))


class PenaltyTest(parameterized.TestCase):
  def test_counts(self):
    counts = sampling.count_committed(
      jnp.asarray([[0, 1, 1, 2, 9, -5, 1 << 30]]),
      jnp.asarray([4]),
      jnp.asarray([2]),
      4,
    )
    np.testing.assert_array_equal(counts.seen_BTV, [[[1, 2, 1, 0]]])
    np.testing.assert_array_equal(counts.generated_BTV, [[[0, 1, 1, 0]]])
    rows = sampling.count_drafts(counts, jnp.asarray([[3, 1]]))
    np.testing.assert_array_equal(
      rows.generated_BTV[0], [[0, 1, 1, 0], [0, 1, 1, 1], [0, 2, 1, 1]]
    )
    np.testing.assert_array_equal(
      rows.seen_BTV[0], [[1, 2, 1, 0], [1, 2, 1, 1], [1, 3, 1, 1]]
    )

  def test_a_row_sees_the_drafts_before_it_alone(self):
    """Drafts [a, a]: row 1 sees a penalised, row 0 does not."""
    settings = stack_options(
      [SamplingOptions(repetition_penalty=1e4)], vocab_size=6
    )
    counts = sampling.count_committed(
      jnp.zeros((1, 5), jnp.int32), jnp.asarray([0]), jnp.asarray([0]), 6
    )
    counts = sampling.count_drafts(counts, jnp.asarray([[2, 2]]))
    logits = jnp.tile(-jnp.float32([5, 3, 1, 2, 4, 6]), (1, 3, 1))
    log_weights = TRANSFORM(settings, logits, counts)
    np.testing.assert_array_equal(jnp.argmax(log_weights[0], -1), [2, 3, 3])

  def test_penalties_by_hand(self):
    settings = stack_options(
      [
        SamplingOptions(
          temperature=1.0,
          repetition_penalty=2.0,
          presence_penalty=0.5,
          frequency_penalty=0.25,
        )
      ],
      4,
    )
    # Prompt [0], output [1, 1, 2]: 0 is in the prompt alone.
    counts = sampling.count_committed(
      jnp.asarray([[0, 1, 1, 2]]), jnp.asarray([4]), jnp.asarray([1]), 4
    )
    logits = jnp.float32([[[2.0, 4.0, -1.0, 1.0]]])
    found = TRANSFORM(settings, logits, counts)[0, 0]
    wanted = np.float32([1.0, 2 - 0.5 - 0.5, -2 - 0.5 - 0.25, 1.0])
    np.testing.assert_allclose(found, wanted - wanted.max(), atol=1e-6)


class DrawTest(parameterized.TestCase):
  def test_law(self):
    p_V = np.asarray([0.45, 0.3, 0.2, 0.05, 0])
    b = 1 << 15
    one = stack_options([SamplingOptions(temperature=1.0)], 5)
    settings = jax.tree.map(lambda x: jnp.repeat(x, b, axis=0), one)
    with np.errstate(divide='ignore'):
      log_weights = jnp.tile(jnp.log(jnp.float32(p_V)) + 3, (b, 1))
    keys = jax.random.split(jax.random.key(0), b)
    drawn = sampling.draw(log_weights, keys, settings)
    self.assertEqual(drawn.dtype, jnp.int32)
    result = testing.chi_square(np.bincount(drawn, minlength=5), p_V)
    self.assertEqual(result.dof, 3)
    self.assertGreater(result.p_value, 1e-4)

  def test_ids_outside_are_never_drawn(self):
    b = 100_000
    logits = jnp.asarray(np.random.default_rng(3).normal(size=V), jnp.float32)
    for options in (dict(top_k=3), dict(top_p=0.6), dict(min_p=0.4)):
      one = stack_options([SamplingOptions(temperature=1.0, **options)], V)
      log_weights = TRANSFORM(one, logits[None, None])[:, 0]
      settings = jax.tree.map(lambda x: jnp.repeat(x, b, axis=0), one)
      drawn = sampling.draw(
        jnp.repeat(log_weights, b, axis=0),
        jax.random.split(jax.random.key(1), b),
        settings,
      )
      kept = np.nonzero(probs(log_weights)[0])[0]
      self.assertLess(len(kept), V)
      self.assertEqual(set(np.unique(drawn)), set(kept))


class OptionsTest(parameterized.TestCase):
  @parameterized.parameters(
    ('temperature', -0.5, r'in \[0, 1e6\], got -0.5'),
    ('temperature', float('nan'), r'in \[0, 1e6\], got nan'),
    ('temperature', float('inf'), r'in \[0, 1e6\], got inf'),
    ('temperature', '1', r"in \[0, 1e6\], got '1'"),
    ('temperature', True, r'in \[0, 1e6\], got True'),
    ('top_k', -1, 'a whole number in 0..2147483647, got -1'),
    ('top_k', 2.5, 'a whole number in 0..2147483647, got 2.5'),
    ('top_k', 2**31, 'a whole number in 0..2147483647, got 2147483648'),
    ('top_p', 0.0, r'in \(0, 1\], got 0.0'),
    ('top_p', 1.1, r'in \(0, 1\], got 1.1'),
    ('min_p', -0.1, r'in \[0, 1\], got -0.1'),
    ('min_p', 2, r'in \[0, 1\], got 2'),
    ('repetition_penalty', 0.0, r'in \[1e-6, 1e6\], got 0.0'),
    ('repetition_penalty', 1e-39, r'in \[1e-6, 1e6\], got 1e-39'),
    ('repetition_penalty', float('inf'), r'in \[1e-6, 1e6\], got inf'),
    ('presence_penalty', float('nan'), r'in \[-1e6, 1e6\], got nan'),
    ('frequency_penalty', float('inf'), r'in \[-1e6, 1e6\], got inf'),
  )
  def test_value_out_of_range(self, name, value, message):
    with self.assertRaisesRegex(ValueError, f'^{name} must be {message}.$'):
      SamplingOptions(**{name: value})

  @parameterized.parameters(
    (dict(logit_bias=((3, float('inf')),)), 'logit_bias of id 3 must be'),
    (dict(allowed_ids=()), r'allowed_ids must leave .* got \[\]'),
    (dict(allowed_ids=(1,), banned_ids=(1,)), r'allowed_ids .* got \[1\]'),
  )
  def test_bad_sets(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      SamplingOptions(**options)

  @parameterized.parameters(
    (dict(logit_bias=((4, 1.0),)), 'logit_bias must name ids in 0..3, got 4'),
    (dict(banned_ids=(-1,)), 'banned_ids must name ids in 0..3, got -1'),
    (dict(allowed_ids=(9, 1)), 'allowed_ids must name ids in 0..3, got 9'),
    (dict(banned_ids=(0, 1, 2, 3)), 'banned_ids must leave at least one'),
  )
  def test_ids_outside_the_vocabulary(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      stack_options([SamplingOptions(**options)], 4)

  def test_numbers_of_numpy(self):
    found = SamplingOptions(
      temperature=np.float32(0.5), top_k=np.int64(3), top_p=np.float64(0.5)
    )
    self.assertEqual(
      found, SamplingOptions(temperature=0.5, top_k=3, top_p=0.5)
    )

  def test_stack(self):
    rows = [
      SamplingOptions(temperature=0.5, top_k=3),
      SamplingOptions(top_p=0.5, min_p=0.25),
    ]
    found = stack_options(rows, 4)
    np.testing.assert_array_equal(found.temperature_B, np.float32([0.5, 0]))
    np.testing.assert_array_equal(found.top_k_B, [3, 0])
    np.testing.assert_array_equal(found.top_p_B, [1, 0.5])
    np.testing.assert_array_equal(found.min_p_B, [0, 0.25])
    self.assertFalse(found.has_penalties)
    self.assertIsNone(found.logit_bias_BV)

  def test_optional_parts_appear_when_any_row_needs_them(self):
    names = ('repetition_penalty', 'presence_penalty', 'frequency_penalty')
    for name in names:
      found = stack_options([OFF, SamplingOptions(**{name: 0.5})], 4)
      self.assertTrue(found.has_penalties)
      np.testing.assert_array_equal(
        getattr(found, f'{name}_B'), [getattr(OFF, name), 0.5]
      )
    found = stack_options([SamplingOptions(banned_ids=(2,)), OFF], 4)
    np.testing.assert_array_equal(
      found.logit_bias_BV, [[0, 0, -np.inf, 0], [0, 0, 0, 0]]
    )

  def test_absent_parts_equal_neutral_ones(self):
    logits = jnp.asarray(
      np.random.default_rng(4).normal(size=(1, 2, V)), jnp.float32
    )
    counts = sampling.count_committed(
      jnp.zeros((1, 3), jnp.int32), jnp.asarray([3]), jnp.asarray([1]), V
    )
    for temperature, top_k in itertools.product((0.0, 0.7), (0, 2)):
      row = SamplingOptions(temperature=temperature, top_k=top_k)
      plain = stack_options([row], V)
      other = dataclasses.replace(
        row, repetition_penalty=2.0, logit_bias=((0, 1.0),)
      )
      full = stack_options([row, other], V)
      full = jax.tree.map(lambda x: x[:1], full)
      np.testing.assert_array_equal(
        TRANSFORM(plain, logits), TRANSFORM(full, logits, counts)
      )


if __name__ == '__main__':
  absltest.main()
