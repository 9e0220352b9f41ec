"""What heads are taught: the laws they draft with, at every depth."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax.models import fused
from specjax.models.heads import base, build
from specjax.training import heads as training
from specjax.training import losses
from specjax.training.step import AdamW, Trainer
from tests.models import tiny
from tests.models.heads import tiny_heads

V, B, T = 16, 2, 6


@functools.cache
def made(kind: str, **settings):
  """A trainable head, its parameters and what is frozen."""
  target = tiny_heads.target_of(vocab_size=V)
  head = tiny_heads.head_of(kind, target)
  trained, frozen = training.split(tiny_heads.params_of(head))
  frozen = {'target': tiny.params_of(target), **frozen}
  return training.trainable_head(head), trained, frozen


def batch_of(seed: int = 0, mask=None):
  rng = np.random.default_rng(seed)
  tokens_BT = rng.integers(0, V, (B, T)).astype(np.int32)
  mask_BT = np.ones((B, T), bool) if mask is None else mask
  return {'tokens_BT': jnp.asarray(tokens_BT), 'mask_BT': jnp.asarray(mask_BT)}


@functools.partial(jax.jit, static_argnums=0)
def loss_of(objective, params, frozen, batch, key):
  return objective.loss(params, frozen, batch, key)


@functools.partial(jax.jit, static_argnums=(0, 1))
def drafted(head, depth, both, tokens_BT):
  """Logits behind every beginning of a text, as drafting makes them.

  Entry by entry, one beginning at a time: [t][s] for t + s + 2 < T.
  """
  t_max = tokens_BT.shape[1] - 2
  target = head.target
  hidden, _ = target.apply(
    both['target'],
    tokens_BT,
    target.init_cache(B, T, 0),
    capture=head.target_features,
  )
  true_BTD = head.fuse(both, hidden.features_BTE)
  found = []
  for t in range(t_max):
    cache = head.block.init_cache(B, T, 0)
    out_BTD, cache = head.apply(
      both, true_BTD[:, : t + 1], tokens_BT[:, 1 : t + 2], cache
    )
    line, feature_B1D = [], out_BTD[:, -1:]
    for s in range(min(depth, t_max - t)):
      if s:
        token_B1 = tokens_BT[:, t + s + 1 : t + s + 2]
        feature_B1D, cache = head.apply(both, feature_B1D, token_B1, cache)
      line.append((head.unembed(both, feature_B1D)[:, 0], feature_B1D[:, 0]))
    found.append(line)
  laws_BTV = target.unembed(both['target'], hidden.last_BTD)
  return found, laws_BTV, true_BTD


@functools.partial(jax.jit, static_argnums=0)
def log_laws(target, params, tokens_BT):
  hidden, _ = target.apply(params, tokens_BT, target.init_cache(B, T, 0))
  return jax.nn.log_softmax(target.unembed(params, hidden.last_BTD))


class FeatureLossTest(parameterized.TestCase):
  @parameterized.parameters('mtp', 'mtp_reduced', 'eagle3_reduced')
  def test_every_depth_is_taught_the_law_it_drafts_with(self, kind):
    head, trained, frozen = made(kind)
    mask_BT = np.random.default_rng(3).random((B, T)) < 0.7
    batch = batch_of(mask=mask_BT)
    tokens_BT = batch['tokens_BT']
    depth = 3
    objective = training.FeatureLoss(
      head=head, depth=depth, divergence=None, feature_weight=0.5, decay=0.7
    )
    total, figures = loss_of(
      objective, trained, frozen, batch, jax.random.key(0)
    )
    both = training.join(trained, frozen)
    found, laws_BTV, true_BTD = drafted(head, depth, both, tokens_BT)
    ids = np.asarray(frozen.get('ids', np.arange(V)))
    wanted_total = 0.0
    for s in range(depth):
      tokens, overlaps, features = [], [], []
      for t in range(T - 2 - s):
        q_BR, feature_BD = found[t][s]
        q_BV = np.full((B, V), -np.inf)
        q_BV[:, ids] = np.asarray(jax.nn.log_softmax(q_BR))
        p_BV = np.asarray(jax.nn.softmax(laws_BTV[:, t + s + 1]))
        gap = np.abs(np.asarray(feature_BD - true_BTD[:, t + s + 1]))
        for b in range(B):
          if mask_BT[b, t + s + 2]:
            token = int(tokens_BT[b, t + s + 2])
            tokens.append(-q_BV[b, token])
            overlaps.append(np.minimum(p_BV[b], np.exp(q_BV[b])).sum())
            features.append(
              np.where(gap[b] < 1, gap[b] ** 2 / 2, gap[b] - 0.5).mean()
            )
      tokens = [x for x in tokens if np.isfinite(x)]
      np.testing.assert_allclose(
        [figures[f'{n}_{s}'] for n in ('loss', 'overlap', 'features')],
        [np.mean(tokens), np.mean(overlaps), np.mean(features)],
        rtol=2e-4,
      )
      wanted_total += 0.7**s * (np.mean(tokens) + 0.5 * np.mean(features))
    np.testing.assert_allclose(total, wanted_total, rtol=2e-4)

  def test_a_reduced_vocabulary_is_taught_where_the_target_s_best_is_in_it(
    self,
  ):
    head, trained, frozen = made('eagle3_reduced')
    objective = training.FeatureLoss(head=head)
    batch = batch_of()
    _, figures = loss_of(objective, trained, frozen, batch, jax.random.key(0))
    both = training.join(trained, frozen)
    found, laws_BTV, _ = drafted(head, 1, both, batch['tokens_BT'])
    ids, wanted = np.asarray(frozen['ids']), []
    kl = jax.jit(functools.partial(losses.divergence, 'forward_kl'))
    for t in range(T - 2):
      p_BV = laws_BTV[:, t + 1]
      kl_B = kl(p_BV[:, ids], found[t][0][0])
      is_in_B = np.isin(np.argmax(p_BV, axis=-1), ids)
      wanted += [float(kl_B[b]) for b in range(B) if is_in_B[b]]
    self.assertBetween(len(wanted), 1, B * (T - 2) - 1)
    np.testing.assert_allclose(figures['loss_0'], np.mean(wanted), rtol=1e-4)

  @parameterized.parameters('mtp', 'eagle3_reduced')
  def test_a_reader_is_the_target_in_another_form(self, kind):
    head, trained, frozen = made(kind)
    plain = tiny_heads.target_of(vocab_size=V)
    reader, reader_params = fused.fuse(
      plain, jax.tree.map(jnp.copy, tiny.params_of(plain))
    )
    objective = training.objective_of('eagle3', head, depth=2)
    key = jax.random.key(0)
    value, figures = loss_of(objective, trained, frozen, batch_of(), key)
    objective = dataclasses.replace(objective, reader=reader)
    # What it says is what is learnt: the target's own law is not asked for.
    frozen = {**frozen, 'reader': reader_params}
    grads = jax.jit(jax.grad(objective.loss, has_aux=True))
    self.assertNotEqual(
      float(optax.tree.norm(grads(trained, frozen, batch_of(), key)[0])), 0
    )
    got, got_figures = loss_of(objective, trained, frozen, batch_of(), key)
    np.testing.assert_allclose(got, value, rtol=1e-4)
    np.testing.assert_allclose(
      got_figures['overlap_1'], figures['overlap_1'], rtol=1e-4
    )
    frozen['reader'] = jax.tree.map(jnp.zeros_like, reader_params)
    other, _ = loss_of(objective, trained, frozen, batch_of(), key)
    self.assertGreater(abs(float(other - value)), 0.01)

  def test_noise_moves_the_features(self):
    head, trained, frozen = made('eagle')
    noisy = training.objective_of('eagle', head)
    self.assertEqual(
      (noisy.noise, noisy.token_weight, noisy.feature_weight), (0.1, 0.1, 1.0)
    )
    quiet = training.objective_of('eagle', head, noise=0.0)
    found = {
      (name, seed): float(
        loss_of(objective, trained, frozen, batch_of(), jax.random.key(seed))[0]
      )
      for name, objective in (('noisy', noisy), ('quiet', quiet))
      for seed in (0, 1)
    }
    self.assertEqual(found['quiet', 0], found['quiet', 1])
    self.assertNotEqual(found['noisy', 0], found['noisy', 1])
    self.assertLess(abs(found['noisy', 0] / found['quiet', 0] - 1), 0.2)

  @parameterized.parameters(
    ({'depth': 0}, 'depth must be >= 1, got 0'),
    ({'noise': -0.1}, 'noise must be >= 0, got -0.1'),
    ({'decay': 0.0}, 'decay must be above 0 and at most 1, got 0.0'),
    ({'divergence': 'l2'}, "one of forward_kl, .* got 'l2'"),
  )
  def test_settings(self, settings, message):
    with self.assertRaisesRegex(ValueError, message):
      training.FeatureLoss(head=made('mtp')[0], **settings)

  def test_rows_are_long_enough(self):
    head, trained, frozen = made('mtp')
    objective = training.FeatureLoss(head=head, depth=T)
    message = f'at least {T + 2} tokens for a depth of {T}, got {T}'
    with self.assertRaisesRegex(ValueError, message):
      jax.eval_shape(
        objective.loss, trained, frozen, batch_of(), jax.random.key(0)
      )


class MedusaLossTest(parameterized.TestCase):
  def test_new_heads_say_what_the_target_says(self):
    """Head i takes the target's law for x(t+1) for that of x(t+2+i)."""
    target = tiny_heads.target_of(vocab_size=V)
    target_params = tiny.params_of(target)
    heads = build.build(
      'medusa', target, num_heads=2, num_layers=2, own_heads=True
    )
    heads = training.trainable_head(heads)
    params = heads.begin(heads.init(jax.random.key(0)), target_params)
    objective = training.objective_of('medusa', heads)
    batch = batch_of()
    total, figures = loss_of(
      objective, params, {'target': target_params}, batch, jax.random.key(0)
    )
    tokens_BT = batch['tokens_BT']
    log_p_BTV = log_laws(target, target_params, tokens_BT)
    wanted = []
    for i in range(2):
      token_BT = tokens_BT[:, i + 2 :]
      log_p = log_p_BTV[:, : token_BT.shape[1]]
      picked = jnp.take_along_axis(log_p, token_BT[..., None], axis=-1)
      wanted.append(-float(picked.mean()))
    np.testing.assert_allclose(
      [figures['loss_0'], figures['loss_1']], wanted, rtol=1e-4
    )
    np.testing.assert_allclose(
      total, 0.8 * wanted[0] + 0.64 * wanted[1], rtol=1e-4
    )

  def test_rows_are_long_enough(self):
    heads, trained, frozen = made('medusa')
    batch = jax.tree.map(lambda x: x[:, :4], batch_of())
    with self.assertRaisesRegex(ValueError, 'at least 5 tokens for 3 heads'):
      jax.eval_shape(
        training.MedusaLoss(heads=heads).loss,
        trained,
        frozen,
        batch,
        jax.random.key(0),
      )


class TrainingTest(parameterized.TestCase):
  @parameterized.parameters(
    ('medusa', {}),
    ('eagle3_reduced', {'depth': 2}),
  )
  def test_the_loss_falls_and_the_target_stays(self, kind, settings):
    head, trained, frozen = made(kind)
    recipe = kind.removesuffix('_reduced')
    objective = training.objective_of(recipe, head, **settings)
    adamw = AdamW(learning_rate=0.02, num_steps=40)
    trainer = Trainer(objective=objective, adamw=adamw, seed=0)
    state = trainer.init(trained)
    seen = []
    for _ in range(20):
      state, metrics = trainer.step(state, frozen, batch_of())
      seen.append(float(metrics['loss']))
    self.assertLess(seen[-1], 0.75 * seen[0])
    moved = jax.tree.map(
      lambda x, y: bool(jnp.any(x != y)), state.params, trained
    )
    self.assertTrue(all(jax.tree.leaves(moved)), moved)
    # Nothing of the target's would move, were it trained.
    grad = jax.jit(
      jax.grad(
        lambda target: objective.loss(
          trained, {**frozen, 'target': target}, batch_of(), jax.random.key(0)
        )[0]
      )
    )(frozen['target'])
    self.assertEqual(
      max(float(jnp.abs(x).max()) for x in jax.tree.leaves(grad)), 0
    )


class BuildTest(parameterized.TestCase):
  def test_heads_have_the_measure_of_the_target(self):
    target = dataclasses.replace(
      tiny.model('qwen3'), dtype='bfloat16', is_fused=True
    )
    for kind in build.KINDS:
      settings = {'num_heads': 2} if kind == 'medusa' else {}
      head = build.build(kind, target, 'bfloat16', **settings)
      self.assertEqual(head.feature_dim, target.embed_dim)
      self.assertEqual(head.vocab_size, target.vocab_size)
      leaves = jax.tree.leaves(head.init(jax.random.key(0)))
      self.assertContainsSubset({'bfloat16'}, {x.dtype.name for x in leaves})

  def test_eagle3_begins_with_rows_of_the_target_s_output_head(self):
    target = tiny_heads.target_of('gemma3', V)
    params = tiny.params_of(target)
    head = build.build('eagle3', target, num_ids=3)
    ids = build.most_frequent(np.arange(V) % 7, 3)
    own = {**head.init(jax.random.key(0)), 'ids': jnp.asarray(ids)}
    own = head.begin(own, params)
    self.assertEqual(ids.tolist(), [5, 6, 13])
    np.testing.assert_array_equal(own['head'], params['embed'][ids])
    np.testing.assert_array_equal(
      base.output_head(target, params), params['embed'][:V]
    )

  @parameterized.parameters('llama', 'qwen3')
  def test_eagle3_begins_as_the_target_s_last_layer(self, family):
    target = tiny.model(family)
    params = tiny.params_of(target)
    head = build.build('eagle3', target)
    own = head.begin(head.init(jax.random.key(0)), params)
    both = {'target': params, 'proposer': own}
    rng = np.random.default_rng(0)
    num = len(head.target_features)
    features_BTE = jnp.asarray(
      rng.normal(size=(B, T, num * target.embed_dim)), jnp.float32
    )
    tokens_BT = jnp.asarray(rng.integers(0, V, (B, T)))
    stream_BTD = features_BTE[:, :, -target.embed_dim :]
    np.testing.assert_allclose(
      head.fuse(both, features_BTE), stream_BTD, atol=1e-5
    )
    got_BTD, _ = head.apply(
      both, stream_BTD, tokens_BT, head.block.init_cache(B, T, 0)
    )
    # What the layer of a head has no room for is left out.
    last = {k: params['layers'][-1][k] for k in own['layers'][0]}
    layer = build.block_of(target, target.dtype)
    wanted_BTD, _ = layer.run_layers(
      {'layers': (last,)}, stream_BTD, layer.init_cache(B, T, 0)
    )
    np.testing.assert_allclose(got_BTD, wanted_BTD, atol=1e-4)

  def test_a_fused_target_gives_no_layer(self):
    target = tiny.model('llama')
    fused_target, fused_params = fused.fuse(
      target, jax.tree.map(jnp.copy, tiny.params_of(target))
    )
    head = build.build('eagle3', fused_target)
    own = head.init(jax.random.key(0))
    begun = head.begin(own, fused_params)
    jax.tree.map(np.testing.assert_array_equal, begun['layers'], own['layers'])

  def test_what_is_unknown(self):
    target = tiny.model('llama')
    with self.assertRaisesRegex(ValueError, "one of medusa, .* got 'hydra'"):
      build.build('hydra', target)
    with self.assertRaisesRegex(ValueError, 'num_ids must be in 1..40'):
      build.build('eagle3', target, num_ids=41)


if __name__ == '__main__':
  absltest.main()
