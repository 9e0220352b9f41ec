"""What the laws of every model leave open: captures, scales, refusals."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax.models import attention, base
from tests.models import tiny

TOKENS_BT = np.arange(12, dtype=np.int32).reshape(2, 6)


@functools.partial(jax.jit, static_argnames=('model', 'capture'))
def step(model, params, tokens_BT, cache, capture=(), **kwargs):
  return model.apply(params, tokens_BT, cache, capture=capture, **kwargs)


def apply(model, params, tokens_BT=TOKENS_BT, **kwargs):
  cache = model.init_cache(2, 8, 0)
  return step(model, params, jnp.asarray(tokens_BT), cache, **kwargs)


class TransformerTest(parameterized.TestCase):
  @parameterized.parameters('llama', 'gemma3')
  def test_capture(self, name):
    model = tiny.model(name)
    params = tiny.params_of(model)
    d, last = model.embed_dim, model.num_layers
    hidden, _ = apply(model, params, capture=(last, 0, 1))
    features_BTE = np.asarray(hidden.features_BTE)
    self.assertEqual(features_BTE.shape, (2, 6, 3 * d))
    np.testing.assert_array_equal(features_BTE[..., :d], hidden.last_BTD)
    scale = model.embed_scale or 1.0
    np.testing.assert_array_equal(
      features_BTE[..., d : 2 * d], params['embed'][TOKENS_BT] * scale
    )
    # The stream after block 1 is the last of a model with that block alone.
    first = dataclasses.replace(
      model, windows=model.windows[:1], ropes=model.ropes[:1]
    )
    first_params = {**params, 'layers': params['layers'][:1]}
    want, _ = apply(first, first_params)
    np.testing.assert_allclose(
      features_BTE[..., 2 * d :], want.last_BTD, atol=1e-5
    )
    self.assertIsNone(apply(model, params)[0].features_BTE)

  def test_unembed_is_head_of_final_norm(self):
    model = tiny.model('llama', vocab_size=37)
    params = tiny.params_of(model)
    shape = (2, 3, model.embed_dim)
    last_BTD = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    normed_BTD = np.asarray(model.final_norm(params, last_BTD))
    mean_square = np.mean(np.square(last_BTD), axis=-1, keepdims=True)
    np.testing.assert_allclose(
      normed_BTD,
      last_BTD / np.sqrt(mean_square + 1e-5) * np.asarray(params['final_norm']),
      rtol=1e-5,
    )
    np.testing.assert_allclose(
      model.unembed(params, last_BTD),
      (normed_BTD @ np.asarray(params['head']).T)[:, :, :37],
      atol=1e-5,
    )

  def test_softcap(self):
    plain = tiny.model('llama')
    capped = dataclasses.replace(plain, logit_softcap=0.5)
    params = tiny.params_of(plain)
    np.testing.assert_allclose(
      tiny.logits_of(capped, params),
      0.5 * np.tanh(tiny.logits_of(plain, params) / 0.5),
      atol=1e-6,
    )

  def test_embedding_scale_is_rounded_to_the_dtype(self):
    # The square root of 24 is not a bfloat16.
    model = dataclasses.replace(
      tiny.model('gemma3', 'bfloat16'), embed_scale=24**0.5
    )
    params = tiny.params_of(model)
    hidden, _ = apply(model, params, capture=(0,))
    want = params['embed'][TOKENS_BT] * jnp.bfloat16(24**0.5)
    np.testing.assert_array_equal(hidden.features_BTE, want)

  @parameterized.parameters(*tiny.CONFIGS)
  def test_slots_beyond_the_length_hold_anything_finite(self, name):
    model = tiny.model(name)
    params = tiny.params_of(model)
    _, cache = apply(model, params, num_tokens_B=jnp.array([3, 1]))
    slot = jnp.arange(8)[None, None, :, None]
    beyond = slot >= cache.length_B[:, None, None, None]
    poison = lambda tree: jax.tree.map(
      lambda x: jnp.where(beyond, jnp.asarray(1e30, x.dtype), x), tree
    )
    poisoned = cache.replace(k=poison(cache.k), v=poison(cache.v))
    # The same six columns again: what does not fit is dropped.
    count_B = jnp.array([3, 4])
    tokens_BT = jnp.asarray(TOKENS_BT)
    want, _ = step(model, params, tokens_BT, cache, num_tokens_B=count_B)
    got, _ = step(model, params, tokens_BT, poisoned, num_tokens_B=count_B)
    for b, count in enumerate(count_B):
      np.testing.assert_array_equal(
        got.last_BTD[b, :count], want.last_BTD[b, :count]
      )

  @parameterized.parameters('llama', 'gemma3')
  def test_bfloat16_is_near_float32(self, name):
    narrow, wide = tiny.model(name, 'bfloat16'), tiny.model(name)
    params = tiny.params_of(narrow)
    self.assertEqual(params['final_norm'].dtype, jnp.float32)
    want = tiny.logits_of(
      wide, jax.tree.map(lambda x: x.astype(jnp.float32), params)
    )
    got = tiny.logits_of(narrow, params)
    self.assertLess(np.max(np.abs(got - want)), 0.05 * np.max(np.abs(want)))

  def test_the_cache_has_the_dtype_asked_for(self):
    model = tiny.model('llama', 'bfloat16')
    for asked, got in (
      (None, jnp.float32),  # On a CPU.
      ('bfloat16', jnp.bfloat16),
      ('int8', jnp.int8),
    ):
      cache = dataclasses.replace(model, cache_dtype=asked).init_cache(1, 2, 0)
      self.assertEqual(jax.tree.leaves(cache.k[0])[0].dtype, got)
    with self.assertRaisesRegex(ValueError, "cache_dtype must .*, got 'int4'"):
      dataclasses.replace(model, cache_dtype='int4')

  def test_a_buffer_of_many_blocks(self):
    # Its windows are far shorter than the text.
    model = tiny.model('gemma3')
    model = dataclasses.replace(model, context_length=2048)
    params = tiny.params_of(model)
    tokens_BT = np.random.default_rng(0).integers(0, 32, (2, 560))
    num_B = jnp.array([560, 300], jnp.int32)
    logits = {}
    for num_slots in (560, 1000):
      cache = base.prefill(
        model,
        params,
        model.init_cache(2, num_slots, 0),
        jnp.asarray(tokens_BT, jnp.int32),
        num_B - 1,
        chunk=100,
      )
      last_B1 = tokens_BT[jnp.arange(2), num_B - 1][:, None]
      hidden, _ = step(model, params, jnp.asarray(last_B1), cache)
      logits[num_slots] = model.unembed(params, hidden.last_BTD)
    np.testing.assert_allclose(logits[560], logits[1000], atol=1e-5)
    # The same text in one pass, all slots at once.
    placed = functools.partial(attention.attend, by_block=False)
    with mock.patch.object(attention, 'attend', lambda *a, **_: placed(*a)):
      hidden, _ = model.apply(
        params, jnp.asarray(tokens_BT, jnp.int32), model.init_cache(2, 560, 0)
      )
    last_B1D = hidden.last_BTD[jnp.arange(2), num_B - 1][:, None]
    want = model.unembed(params, last_B1D)
    np.testing.assert_allclose(logits[560], want, atol=1e-4)

  def test_padded_rows_matter_to_nothing(self):
    model = tiny.model('llama_tied_biased', vocab_size=37)
    params = tiny.params_of(model)
    poisoned = {**params, 'embed': params['embed'].at[37:].set(1e9)}
    np.testing.assert_array_equal(
      tiny.logits_of(model, params), tiny.logits_of(model, poisoned)
    )

  @parameterized.named_parameters(
    ('rows', {}, TOKENS_BT[:1], r'tokens_BT must have shape \(2, T\)'),
    (
      'counts',
      {'num_tokens_B': jnp.zeros(3, jnp.int32)},
      TOKENS_BT,
      r'num_tokens_B must have shape \(2\)',
    ),
    (
      'positions',
      {'positions_BT': jnp.zeros((2, 5), jnp.int32)},
      TOKENS_BT,
      r'positions_BT must have shape \(2, 6\)',
    ),
    (
      'mask',
      {'mask_BTT': jnp.zeros((2, 6, 8), bool)},
      TOKENS_BT,
      r'mask_BTT must have shape \(2, 6, 6\)',
    ),
    ('capture', {'capture': (3,)}, TOKENS_BT, 'layers 0..2, got 3'),
    ('negative', {'capture': (-1,)}, TOKENS_BT, 'layers 0..2, got -1'),
  )
  def test_refuses(self, kwargs, tokens_BT, message):
    model = tiny.model('llama')
    params = tiny.params_of(model)
    with self.assertRaisesRegex(ValueError, message):
      apply(model, params, tokens_BT, **kwargs)

  @parameterized.parameters(
    ({'windows': (None,)}, 'one entry per layer, got 1 and 2'),
    ({'windows': (0, None)}, 'window must be > 0 or None, got 0'),
    ({'activation': 'tanh'}, "silu, gelu_pytorch_tanh, got 'tanh'"),
    ({'ffn_dim': 0}, 'ffn_dim must be > 0, got 0'),
  )
  def test_refuses_settings(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(tiny.model('llama'), **changes)


if __name__ == '__main__':
  absltest.main()
