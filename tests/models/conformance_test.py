"""The laws of `LanguageModel`, over every model that implements it.

What must be equal at one shape is compared bit for bit; only where the shape
of a pass differs is there a tolerance, for the other order of summation.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from tests.models import tiny

# Name, how to make the model, largest difference between two widths of a pass
# (relative to the largest logit). A new model joins by one line.
MODELS_UNDER_TEST = (
  ('padded_vocab', lambda: tiny.model('llama', vocab_size=37), 1e-5),
  ('window', lambda: tiny.model('mistral'), 1e-5),
  ('window_on_some_layers', lambda: tiny.model('qwen2'), 1e-5),
  ('qk_norm', lambda: tiny.model('qwen3'), 1e-5),
  ('post_norms', lambda: tiny.model('gemma3'), 1e-5),
  # Two roundings to eight bits that fall differently, a few times over.
  ('bfloat16', lambda: tiny.model('gemma3', 'bfloat16'), 5e-2),
  ('int8', lambda: tiny.model('gemma3', quantize='int8'), 5e-2),
  ('fused', lambda: tiny.model('qwen2', is_fused=True), 1e-5),
  ('int8_cache', lambda: tiny.model('gemma3', cache_dtype='int8'), 1e-4),
)

B, T, S = 3, 7, 16
# Ids that name no token: padding may hold anything an int32 can.
POISON = np.array([-(2**31), 2**31 - 1, -1, 10**6], np.int32)


@functools.cache
def params_of(model):
  return model.init(jax.random.key(0))


@functools.partial(jax.jit, static_argnames='model')
def apply(model, params, tokens_BT, cache, num_tokens_B, **kwargs):
  hidden, cache = model.apply(
    params, tokens_BT, cache, num_tokens_B=num_tokens_B, **kwargs
  )
  return model.unembed(params, hidden.last_BTD), cache


@functools.partial(jax.jit, static_argnames='model')
def keep(model, cache, start_B, path_BM, num_B):
  return model.keep(cache, start_B, path_BM, num_B)


def run(model, tokens_BT, cache=None, *, num_B=None, width=T, **kwargs):
  """Logits of the tokens given, and the cache after them.

  Tokens are padded to one width, so that each model compiles few shapes and
  results are comparable bit for bit.
  """
  tokens_BT = np.asarray(tokens_BT, np.int32)
  num_new = tokens_BT.shape[1]
  if num_B is None:
    num_B = [num_new] * B
  if cache is None:
    cache = model.init_cache(B, S, T)
  padded_BT = np.pad(tokens_BT, ((0, 0), (0, width - num_new)))
  logits_BTV, cache = apply(
    model,
    params_of(model),
    jnp.asarray(padded_BT),
    cache,
    jnp.asarray(num_B, jnp.int32),
    **kwargs,
  )
  return np.asarray(logits_BTV)[:, :num_new], cache


def random_tokens(model, seed=0, num_tokens=T):
  rng = np.random.default_rng(seed)
  return rng.integers(0, model.vocab_size, (B, num_tokens), np.int32)


def int_B(*values):
  return jnp.asarray(values, jnp.int32)


class ConformanceTest(parameterized.TestCase):
  def assert_close(self, got, want, tolerance):
    scale = np.max(np.abs(want))
    self.assertLess(np.max(np.abs(got - want)), tolerance * scale)

  @parameterized.named_parameters(*MODELS_UNDER_TEST)
  def test_is_static_and_declares_its_parameters(self, make, _):
    model = make()
    self.assertEqual(model, make())
    self.assertEqual(hash(model), hash(make()))
    declared = jax.tree.map(
      lambda spec: (spec.shape, str(jnp.dtype(spec.dtype))),
      model.param_specs(),
    )
    made = jax.tree.map(lambda x: (x.shape, str(x.dtype)), params_of(model))
    self.assertEqual(declared, made)

  @parameterized.named_parameters(*MODELS_UNDER_TEST)
  def test_logits_and_cache_keep_their_types(self, make, _):
    model = make()
    logits_BTV, cache = run(model, random_tokens(model))
    self.assertEqual(logits_BTV.shape, (B, T, model.vocab_size))
    self.assertEqual(logits_BTV.dtype, np.float32)
    self.assertTrue(np.all(np.isfinite(logits_BTV)))
    np.testing.assert_array_equal(cache.length_B, [T] * B)
    fresh = model.init_cache(B, S, T)
    for leaf in jax.tree.leaves(fresh):
      np.testing.assert_array_equal(leaf, np.zeros_like(leaf))
    describe = lambda tree: jax.tree.map(
      lambda x: (x.shape, x.dtype, x.weak_type), tree
    )
    self.assertEqual(describe(cache), describe(fresh))
    kept = keep(model, cache, int_B(0, 0, 0), None, int_B(1, 2, 3))
    self.assertEqual(describe(kept), describe(fresh))

  @parameterized.named_parameters(*MODELS_UNDER_TEST)
  def test_in_chunks_equals_at_once(self, make, tolerance):
    model = make()
    tokens_BT = random_tokens(model)
    want, _ = run(model, tokens_BT)
    cache, parts = None, []
    for start, stop in ((0, 1), (1, 2), (2, T)):
      part, cache = run(
        model, tokens_BT[:, start:stop], cache, width=stop - start
      )
      parts.append(part)
    self.assert_close(np.concatenate(parts, axis=1), want, tolerance)

  @parameterized.named_parameters(*MODELS_UNDER_TEST)
  def test_ragged_rows_equal_rows_alone(self, make, tolerance):
    model = make()
    tokens_BT = random_tokens(model)
    num_B = (1, 4, 5)
    _, cache = run(model, tokens_BT, num_B=num_B)
    np.testing.assert_array_equal(cache.length_B, num_B)
    next_BT = random_tokens(model, seed=1, num_tokens=2)
    got, _ = run(model, next_BT, cache)
    for b in range(B):
      # The row in a batch of its own likes, its text in one piece.
      text_T = np.concatenate([tokens_BT[b, : num_B[b]], next_BT[b]])
      want, _ = run(model, np.tile(text_T, (B, 1)))
      self.assert_close(got[b], want[b, -2:], tolerance)

  @parameterized.named_parameters(*MODELS_UNDER_TEST)
  def test_junk_and_keep_equal_never_written(self, make, _):
    model = make()
    prompt_BT = random_tokens(model)
    next_BT = random_tokens(model, seed=1, num_tokens=4)
    _, clean = run(model, prompt_BT)
    want, _ = run(model, next_BT, clean)
    # Rejected at every index of the junk, from one pass and from several.
    for num_kept in range(4):
      junk_BT = random_tokens(model, seed=2, num_tokens=4)
      junk_BT[:, :num_kept] = next_BT[:, :num_kept]
      _, dirty = run(model, junk_BT, clean)
      _, dirty = run(model, junk_BT, dirty)
      kept = int_B(0, num_kept, 0)
      dirty = keep(model, dirty, int_B(T, T, T), None, kept)
      np.testing.assert_array_equal(dirty.length_B, T + kept)
      tail_BT = next_BT.copy()
      tail_BT[1] = np.roll(next_BT[1], -num_kept)
      got, _ = run(model, tail_BT, dirty, num_B=4 - kept)
      np.testing.assert_array_equal(got[0], want[0])
      np.testing.assert_array_equal(got[2], want[2])
      if num_kept == 0:
        np.testing.assert_array_equal(got[1], want[1])

  @parameterized.named_parameters(*MODELS_UNDER_TEST)
  def test_no_row_sees_another(self, make, _):
    model = make()
    tokens_BT = random_tokens(model)
    want, clean = run(model, tokens_BT, num_B=(T, 3, 5))
    others_BT = random_tokens(model, seed=3)
    others_BT[0] = tokens_BT[0]
    got, cache = run(model, others_BT, num_B=(T, 6, 0))
    np.testing.assert_array_equal(got[0], want[0])
    want, _ = run(model, tokens_BT, clean)
    got, _ = run(model, others_BT, cache)
    np.testing.assert_array_equal(got[0], want[0])

  @parameterized.named_parameters(*MODELS_UNDER_TEST)
  def test_padding_may_hold_anything(self, make, _):
    model = make()
    num_B = (2, 5, 0)
    tokens_BT = random_tokens(model)
    poisoned_BT = tokens_BT.copy()
    for b in range(B):
      poisoned_BT[b, num_B[b] :] = np.resize(POISON, T - num_B[b])
    want, clean = run(model, tokens_BT, num_B=num_B)
    got, cache = run(model, poisoned_BT, num_B=num_B)
    for b in range(B):
      np.testing.assert_array_equal(got[b, : num_B[b]], want[b, : num_B[b]])
    jax.tree.map(np.testing.assert_array_equal, cache, clean)
    self.assertTrue(np.all(np.isfinite(got)))

  @parameterized.named_parameters(*MODELS_UNDER_TEST)
  def test_finished_row_is_frozen(self, make, _):
    model = make()
    _, before = run(model, random_tokens(model))
    _, after = run(
      model,
      random_tokens(model, seed=1),
      before,
      num_B=(T, 0, 2),
    )
    jax.tree.map(
      lambda x, y: np.testing.assert_array_equal(x[1], y[1]), before, after
    )

  @parameterized.named_parameters(*MODELS_UNDER_TEST)
  def test_later_tokens_change_nothing_before_them(self, make, _):
    model = make()
    tokens_BT = random_tokens(model)
    want, _ = run(model, tokens_BT)
    for t in range(1, T):
      other_BT = random_tokens(model, seed=4)
      other_BT[:, :t] = tokens_BT[:, :t]
      got, _ = run(model, other_BT)
      np.testing.assert_array_equal(got[:, :t], want[:, :t])

  @parameterized.named_parameters(*MODELS_UNDER_TEST)
  def test_every_earlier_token_is_seen(self, make, _):
    # Not within a window's reach: there the last token would not see it.
    model = make()
    tokens_BT = random_tokens(model, num_tokens=3)
    want, _ = run(model, tokens_BT)
    for t in range(3):
      other_BT = tokens_BT.copy()
      other_BT[:, t] = (other_BT[:, t] + 1) % model.vocab_size
      got, _ = run(model, other_BT)
      changed_B = np.any(got[:, -1] != want[:, -1], axis=-1)
      np.testing.assert_array_equal(changed_B, [True] * B)

  @parameterized.named_parameters(*MODELS_UNDER_TEST)
  def test_writes_past_the_end_are_dropped(self, make, _):
    model = make()
    _, full = run(model, random_tokens(model))
    _, full = run(model, random_tokens(model, seed=1), full)
    more_BT = random_tokens(model, seed=2)
    _, over = run(model, more_BT, full)
    np.testing.assert_array_equal(over.length_B, [S] * B)
    # What did fit is there, and nothing else has changed.
    _, fit = run(model, more_BT, full, num_B=(S - 2 * T,) * B)
    jax.tree.map(np.testing.assert_array_equal, over, fit)
    length_B = int_B(2 * T, 2 * T, 2 * T)
    back = keep(model, over, length_B, None, int_B(0, 0, 0))
    next_BT = random_tokens(model, seed=3, num_tokens=2)
    want, _ = run(model, next_BT, full)
    got, _ = run(model, next_BT, back)
    np.testing.assert_array_equal(got, want)

  @parameterized.named_parameters(*MODELS_UNDER_TEST)
  def test_tree_branches_equal_chains(self, make, tolerance):
    model = make()
    prompt_BT = random_tokens(model)
    _, prompt = run(model, prompt_BT)
    #   a - b - c       tokens a b c d e, depths 0 1 2 1 2, then padding
    #     \ d - e
    tree_BT = random_tokens(model, seed=5, num_tokens=5)
    depth_T = np.array([0, 1, 2, 1, 2, 0, 0], np.int32)
    branches = ([0, 1, 2], [0, 3, 4])
    mask_TT = np.zeros((T, T), bool)
    for branch in branches:
      for i, t in enumerate(branch):
        mask_TT[t, branch[: i + 1]] = True
    got, cache = run(
      model,
      tree_BT,
      prompt,
      positions_BT=jnp.asarray(T + np.tile(depth_T, (B, 1))),
      mask_BTT=jnp.asarray(np.tile(mask_TT, (B, 1, 1))),
    )
    for branch in branches:
      want, _ = run(model, tree_BT[:, branch], prompt)
      self.assert_close(got[:, branch], want, tolerance)
      # Keeping the branch leaves what its chain would have left; row 1 keeps
      # one token less and row 2, which is finished, none.
      num_B = int_B(3, 2, 0)
      path_BM = jnp.asarray(np.tile(branch, (B, 1)), jnp.int32)
      kept = keep(model, cache, int_B(T, T, T), path_BM, num_B)
      np.testing.assert_array_equal(kept.length_B, T + num_B)
      _, chain = run(model, tree_BT[:, branch], prompt, num_B=num_B)
      next_BT = random_tokens(model, seed=6, num_tokens=3)
      want, _ = run(model, next_BT, chain)
      got_next, _ = run(model, next_BT, kept)
      self.assert_close(got_next, want, tolerance)

  @parameterized.named_parameters(*MODELS_UNDER_TEST)
  def test_causal_mask_given_equals_none(self, make, _):
    model = make()
    _, prompt = run(model, random_tokens(model))
    tokens_BT = random_tokens(model, seed=1)
    want, _ = run(model, tokens_BT, prompt)
    got, _ = run(
      model,
      tokens_BT,
      prompt,
      positions_BT=jnp.asarray(np.tile(T + np.arange(T), (B, 1)), jnp.int32),
      mask_BTT=jnp.asarray(np.tile(np.tri(T, dtype=bool), (B, 1, 1))),
    )
    np.testing.assert_array_equal(got, want)

  @parameterized.named_parameters(*MODELS_UNDER_TEST)
  def test_one_trace_for_all_values(self, make, _):
    model = make()
    _, cache = run(model, random_tokens(model))
    num_traces = apply._cache_size()
    for num_new in (1, 2, 4):
      tokens_BT = random_tokens(model, num_new, num_new)
      _, cache = run(make(), tokens_BT, cache, num_B=(num_new, 0, 1))
    self.assertEqual(apply._cache_size(), num_traces)


if __name__ == '__main__':
  absltest.main()
