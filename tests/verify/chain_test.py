"""The rules by hand and by enumeration; nothing here is sampled twice."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import noise as noise_lib
from specjax import testing
from specjax.testing import certificate, mutants, rules
from specjax.verify import chain

# A new rule joins by one line: the rule, and whether it may sample.
RULES_UNDER_TEST = (
  ('greedy', chain.Greedy(), False),
  ('rejection', chain.Rejection(), True),
  ('coupled', chain.Coupled(), True),
  ('block', chain.Block(), True),
)

V3 = np.float32([0.6, 0.3, 0.1]), np.float32([0.2, 0.3, 0.5])
V4B = np.float32([0.4, 0.35, 0.15, 0.1]), np.float32([0.1, 0.2, 0.3, 0.4])
JUST_BELOW_1 = np.float32(1 - 2**-24)


def log(probs):
  with np.errstate(divide='ignore'):
    return jnp.log(jnp.asarray(probs, jnp.float32))


call = jax.jit(lambda rule, *args: rule(*args), static_argnums=0)


def judge(rule, draft, q, p, accept=None, gumbel=None, num_draft=None):
  """Runs a rule on injected noise; returns num_accepted and next_token."""
  k, v = len(draft), len(p[0])
  accept = np.full(k, 0.5) if accept is None else accept
  gumbel = np.zeros((k + 1, v)) if gumbel is None else gumbel
  noise = chain.Noise(
    jnp.asarray(accept, jnp.float32).reshape(k),
    jnp.asarray(gumbel, jnp.float32),
    jnp.asarray(gumbel, jnp.float32),
  )
  verdict = call(
    rule,
    noise,
    jnp.asarray(draft, jnp.int32).reshape(k),
    None if q is None else log(q).reshape(k, v),
    jnp.int32(k if num_draft is None else num_draft),
    log(p),
  )
  return int(verdict.num_accepted), int(verdict.next_token)


def toward(token, v=3, k=1):
  """Gumbel noise that draws `token` wherever it has any mass."""
  return np.where(np.arange(v) == token, 50.0, 0.0) * np.ones((k + 1, 1))


def emitted_law(p_V, q_V):
  """sum_d q(d) (a(d) 1_d + (1 - a(d)) residual), float64 [V]."""
  a_V = np.asarray(chain.accept_prob(jnp.asarray(p_V), jnp.asarray(q_V)))
  residual_V = np.asarray(chain.residual(jnp.asarray(p_V), jnp.asarray(q_V)))
  return q_V * a_V + np.sum(q_V * (1 - a_V)) * residual_V


class PiecesTest(parameterized.TestCase):
  @parameterized.parameters(
    (0.3, 0.6, 0.5),
    (0.0, 1.0, 0.0),
    (0.0, 0.0, 0.0),
    (0.5, 0.5, 1.0),
    (0.9, 0.1, 1.0),
    (0.2, 0.0, 1.0),
    (1e-9, 1e-8, 0.1),  # In half precision this would be 0 / 0.
    (1e-37, 1e-36, 0.1),
  )
  def test_accept_prob(self, p, q, expected):
    found = chain.accept_prob(jnp.float32(p), jnp.float32(q))
    self.assertEqual(found.dtype, jnp.float32)
    self.assertAlmostEqual(float(found), expected, places=6)

  @parameterized.parameters(
    (*V3, [1, 0, 0]),
    (*V4B, [2 / 3, 1 / 3, 0, 0]),
    ([0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [2 / 3, 1 / 3, 0]),
    ([0.5, 0.3, 0.2], [1, 0, 0], [0, 0.6, 0.4]),  # A certain draft.
    ([0.5, 0.5, 0], [0, 0, 1], [0.5, 0.5, 0]),  # Nothing in common.
    ([0, 0.5, 0.5], [0, 0.5, 0.5], [0, 0.5, 0.5]),  # Equal: p, not token 0.
    ([0.5, 0.3, 0.2], [0, 0, 0], [0.5, 0.3, 0.2]),
  )
  def test_residual(self, p_V, q_V, expected):
    found = chain.residual(
      jnp.asarray(p_V, jnp.float32), jnp.asarray(q_V, jnp.float32)
    )
    np.testing.assert_allclose(found, expected, atol=1e-6)

  @parameterized.parameters(
    ([0.6, 0.3, 0.1], [0.2, 0.3, 0.5]),
    ([0.3, 0.5, 0.2], [1, 0, 0]),
    ([0.5, 0.3, 0.2], [1, 0, 0]),
    ([0.533, 0.467, 0, 0], [0.5, 0, 0.5, 0]),  # Both filtered by top-2.
    ([0.508, 0.389, 0.071, 0.032], [0.346, 0.154, 0.346, 0.154]),
    ([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]),
  )
  def test_emitted_law_is_the_target(self, p_V, q_V):
    p_V, q_V = np.float32(p_V), np.float32(q_V)
    np.testing.assert_allclose(emitted_law(p_V, q_V), p_V, atol=1e-6)
    # The identity of the acceptance rate.
    a_V = chain.accept_prob(jnp.asarray(p_V), jnp.asarray(q_V))
    rate = float(jnp.sum(q_V * a_V))
    self.assertAlmostEqual(rate, float(np.minimum(p_V, q_V).sum()), places=6)

  def test_draft_probs(self):
    draft_K = jnp.asarray([2, 0])
    one_hot = chain.draft_probs(draft_K, None, 3)
    np.testing.assert_array_equal(one_hot, [[0, 0, 1], [1, 0, 0]])
    q_KV = chain.draft_probs(draft_K, log([[0.2, 0.8, 0], [1, 0, 0]]) + 7, 3)
    np.testing.assert_allclose(q_KV, [[0.2, 0.8, 0], [1, 0, 0]], atol=1e-6)


class ByHandTest(parameterized.TestCase):
  @parameterized.parameters(chain.Rejection(), chain.Block())
  def test_uniform_of_zero_never_accepts_the_impossible(self, rule):
    p, q = [[0, 1], [0.5, 0.5]], [[1, 0]]
    self.assertEqual(judge(rule, [0], q, p, accept=[0.0]), (0, 1))

  @parameterized.parameters(chain.Rejection(), chain.Block())
  def test_largest_uniform_accepts_an_equal_draft(self, rule):
    p = [[0.5, 0.25, 0.25]] * 2
    for token in range(3):
      num_accepted, _ = judge(rule, [token], p[:1], p, accept=[JUST_BELOW_1])
      self.assertEqual(num_accepted, 1)

  @parameterized.product(
    rule=(chain.Rejection(), chain.Block()), token=(0, 1, 2)
  )
  def test_forced_rejection_of_an_equal_draft_draws_from_p(self, rule, token):
    p = [[0, 0.5, 0.5]] * 2
    found = judge(rule, [1], p[:1], p, accept=[1.5], gumbel=toward(token))
    self.assertEqual(found, (0, token or 1))

  @parameterized.parameters(chain.Rejection(), chain.Block())
  def test_ratio_below_half_precision(self, rule):
    p, q = [[1e-9, 1 - 1e-9]] * 2, [[1e-8, 1 - 1e-8]]
    self.assertEqual(judge(rule, [0], q, p, accept=[0.05])[0], 1)
    self.assertEqual(judge(rule, [0], q, p, accept=[0.2])[0], 0)

  @parameterized.parameters(chain.Rejection(), chain.Block())
  def test_both_tokens_of_the_residual_appear(self, rule):
    p, q = [[0.5, 0.3, 0.2]] * 2, [[0.1, 0.1, 0.8]]
    for token, expected in ((0, 0), (1, 1), (2, 0)):
      found = judge(rule, [2], q, p, accept=[0.9], gumbel=toward(token))
      self.assertEqual(found, (0, expected))

  @parameterized.parameters(chain.Rejection(), chain.Block())
  def test_certain_draft(self, rule):
    # Accepted with p(x); the correction is never x, and p is not touched.
    p = np.float32([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
    kept = p.copy()
    self.assertEqual(judge(rule, [0], None, p, accept=[0.49])[0], 1)
    self.assertEqual(
      judge(rule, [0], None, p, accept=[0.51], gumbel=toward(0)), (0, 1)
    )
    np.testing.assert_array_equal(p, kept)

  @parameterized.named_parameters(*RULES_UNDER_TEST)
  def test_each_draft_is_judged_by_the_row_before_it(self, rule, _):
    one_hot = lambda token: np.eye(8)[token]
    p = [one_hot(7), one_hot(7)]
    self.assertEqual(judge(rule, [3], [one_hot(3)], p), (0, 7))
    p = [one_hot(1), one_hot(2), one_hot(3)]
    q = [one_hot(1), one_hot(2)]
    self.assertEqual(judge(rule, [1, 2], q, p), (2, 3))
    # A rejected draft hides the right one behind it.
    self.assertEqual(judge(rule, [5, 2], [one_hot(5), q[1]], p), (0, 1))
    self.assertEqual(judge(rule, [1, 5], [q[0], one_hot(5)], p), (1, 2))

  @parameterized.named_parameters(*RULES_UNDER_TEST)
  def test_no_drafts(self, rule, _):
    p = [[0.1, 0.7, 0.2]]
    self.assertEqual(judge(rule, [], None, p), (0, 1))
    q = np.zeros((0, 3))
    self.assertEqual(judge(rule, [], q, p), (0, 1))

  @parameterized.named_parameters(*RULES_UNDER_TEST)
  def test_drafts_beyond_num_draft_are_not_there(self, rule, _):
    p = [[0, 1, 0], [0, 0, 1], [1, 0, 0], [1, 0, 0]]
    q = [[0, 1, 0], [np.nan] * 3, [np.nan] * 3]
    found = judge(rule, [1, 2, 0], q, p, num_draft=1)
    self.assertEqual(found, (1, 2))
    self.assertEqual(judge(rule, [1, 2, 0], q, p, num_draft=0), (0, 1))

  def test_greedy_ties_go_to_the_lowest_id(self):
    p = [[0.4, 0.4, 0.2], [0.2, 0.4, 0.4]]
    self.assertEqual(judge(chain.Greedy(), [0], None, p), (1, 1))
    self.assertEqual(judge(chain.Greedy(), [1], None, p), (0, 0))

  def test_greedy_ignores_how_likely_the_draft_found_its_token(self):
    p, q = [[0, 1, 0]] * 2, [[0.2, 0.7, 0.1]]
    self.assertEqual(judge(chain.Greedy(), [0], q, p), (0, 1))

  def test_coupled_accepts_the_targets_own_draw_and_nothing_else(self):
    p = [[0.5, 0.3, 0.2]] * 2
    for own in range(3):
      for draft in range(3):
        found = judge(chain.Coupled(), [draft], None, p, gumbel=toward(own))
        self.assertEqual(found, (int(own == draft), own))

  def test_block_may_keep_more_than_its_first_failure(self):
    # BV: draft 0 then 1. w = 1/2, 1; h_2 = 1, so two are kept whatever u_1.
    p, q = [[1 / 3, 2 / 3]] * 3, [[2 / 3, 1 / 3]] * 2
    accept = [JUST_BELOW_1, 0.99]
    self.assertEqual(judge(chain.Block(), [0, 1], q, p, accept=accept)[0], 2)
    self.assertEqual(
      judge(chain.Rejection(), [0, 1], q, p, accept=accept)[0], 0
    )

  @parameterized.named_parameters(*RULES_UNDER_TEST)
  def test_one_hot_rows_use_no_randomness(self, rule, _):
    rng = np.random.default_rng(0)
    p = np.eye(4)[[2, 0, 3]]
    for draft in itertools.product(range(4), repeat=2):
      q = np.eye(4)[list(draft)]
      results = {
        judge(
          rule,
          draft,
          q,
          p,
          accept=rng.random(2),
          gumbel=rng.gumbel(size=(3, 4)),
        )
        for _ in range(3)
      }
      wanted = 0 if draft[0] != 2 else 1 if draft[1] != 0 else 2
      self.assertEqual(results, {(wanted, (2, 0, 3)[wanted])})


class EnumerationTest(parameterized.TestCase):
  """Joint laws without a sampling error, and the papers' numbers."""

  @parameterized.product(
    rule=('rejection', 'block'), k=(0, 1, 2, 3), is_drawn=(True, False)
  )
  def test_joint_law_is_the_targets(self, rule, k, is_drawn):
    p = certificate.random_path_law(1, 3)
    q = certificate.random_path_law(2, 3)
    found = testing.enumerate_rule(rule, p, q, 3, k, is_drawn=is_drawn)
    np.testing.assert_allclose(
      found.law, testing.path_law(p, 3, k + 1), atol=1e-6
    )

  @parameterized.parameters(
    # Pair, K, token-wise, block, no rule can do better.
    ('BV', 1, 2 / 3, 2 / 3, 2 / 3),
    ('BV', 2, 10 / 9, 11 / 9, 12 / 9),
    ('BV', 3, 38 / 27, 5 / 3, 50 / 27),
    ('BV', 4, 130 / 81, 166 / 81, 64 / 27),
    ('BV', 5, 422 / 243, 64 / 27, 226 / 81),
    ('V3', 1, 0.6, 0.6, 0.6),
    ('V3', 2, 0.96, 1.00, 1.04),
    ('V3', 3, 1.176, 1.284, 1.388),
    ('V4b', 1, 0.55, 0.55, 0.55),
    ('V4b', 2, 0.8525, 0.935, 1.0175),
    ('V4b', 3, 1.018875, 1.211625, 1.3785),
  )
  def test_expected_accepted(self, pair, k, token_wise, block, ideal):
    p_V, q_V = {
      'BV': ([1 / 3, 2 / 3], [2 / 3, 1 / 3]),
      'V3': V3,
      'V4b': V4B,
    }[pair]
    p, q = lambda path: p_V, lambda path: q_V
    for rule, expected in (('rejection', token_wise), ('block', block)):
      found = testing.enumerate_rule(rule, p, q, len(p_V), k)
      self.assertAlmostEqual(found.expected_accepted, expected, places=6)
      np.testing.assert_allclose(
        found.law, testing.path_law(p, len(p_V), k + 1), atol=1e-6
      )
    self.assertAlmostEqual(
      testing.ideal_accepted(p, q, len(p_V), k), ideal, places=6
    )

  @parameterized.parameters('rejection', 'block')
  def test_rule_follows_its_probabilities(self, name):
    """The wrapper equals its helpers: uniforms, index, row and noise."""
    k, v = 3, 4
    rng = np.random.default_rng(5)
    p_NV, q_KV = rng.dirichlet(np.ones(v), k + 1), rng.dirichlet(np.ones(v), k)
    cases = 4000
    draft_MK = rng.integers(0, v, (cases, k)).astype(np.int32)
    num_draft_M = rng.integers(0, k + 1, cases).astype(np.int32)
    accept_MK = rng.random((cases, k)).astype(np.float32)
    gumbel_MNV = rng.gumbel(size=(2, cases, k + 1, v)).astype(np.float32)
    p_NV, q_KV = jnp.float32(p_NV), jnp.float32(q_KV)

    @jax.jit
    @jax.vmap
    def both(draft_K, num_draft, accept_K, token_NV, residual_NV):
      noise = chain.Noise(accept_K, token_NV, residual_NV)
      verdict = chain.RULES[name](
        noise, draft_K, jnp.log(q_KV), num_draft, jnp.log(p_NV)
      )

      _, next_NV = rules.RULE_PROBS[name](p_NV, q_KV, draft_K, num_draft)
      h_N, w_N = chain.block_accept_prob(p_NV, q_KV, draft_K, num_draft)
      return verdict.num_accepted, verdict.next_token, next_NV, h_N, w_N

    found = jax.tree.map(
      np.asarray,
      both(draft_MK, num_draft_M, accept_MK, gumbel_MNV[0], gumbel_MNV[1]),
    )
    seen = set()
    for m in range(cases):
      num_accepted, next_token, next_NV, h_N = (x[m] for x in found[:4])
      draft_K, num_draft = draft_MK[m], num_draft_M[m]
      expected = 0
      for i in range(num_draft):
        if name == 'block':
          if accept_MK[m, i] < h_N[i + 1]:
            expected = i + 1
        else:
          ratio = p_NV[i, draft_K[i]] / q_KV[i, draft_K[i]]
          if accept_MK[m, i] >= ratio:
            break
          expected = i + 1
      self.assertEqual(num_accepted, expected)
      # The bonus uses the target's own noise, a correction the residual's.
      gumbel_V = gumbel_MNV[int(expected < num_draft), m, expected]
      with np.errstate(divide='ignore'):
        log_weights_V = np.log(next_NV[expected])
      self.assertEqual(next_token, np.argmax(log_weights_V + gumbel_V))
      seen.add((int(num_draft), int(expected)))
    self.assertLen(seen, 10)  # Every (num_draft, num_accepted).


class ConformanceTest(parameterized.TestCase):
  @parameterized.named_parameters(*RULES_UNDER_TEST)
  def test_rule(self, rule, is_sampled):
    testing.check_rule(rule, jax.random.key(3), is_sampled=is_sampled)

  @parameterized.named_parameters(*RULES_UNDER_TEST)
  def test_rebuilt_rules_are_equal(self, rule, _):
    self.assertEqual(type(rule)(), rule)
    self.assertEqual(hash(type(rule)()), hash(rule))
    self.assertIs(chain.RULES[rule.name], chain.RULES[type(rule)().name])

  def test_draft_purposes(self):
    purposes = {name: rule.draft_purpose for name, rule in chain.RULES.items()}
    self.assertEqual(
      purposes,
      {
        'greedy': noise_lib.TOKEN,
        'rejection': noise_lib.DRAFT,
        'coupled': noise_lib.TOKEN,
        'block': noise_lib.DRAFT,
      },
    )

  def test_broken_rules_do_not_conform(self):

    with self.assertRaisesRegex(AssertionError, 'must emit the law'):
      testing.check_rule(
        mutants.BrokenRejection(mistake='residual_from_p'), jax.random.key(3)
      )


if __name__ == '__main__':
  absltest.main()
