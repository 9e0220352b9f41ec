"""A fused model is the model: the same logits from the same parameters."""

import jax
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import sharding
from specjax.models import fused, quantize
from tests.models import tiny


class FusedTest(parameterized.TestCase):
  @parameterized.product(
    name=('qwen2', 'gemma3', 'llama_tied_biased'), scheme=quantize.SCHEMES
  )
  def test_the_logits_are_the_same(self, name, scheme):
    model = tiny.model(name)
    params = tiny.params_of(model)
    if scheme == 'int8':
      params = quantize.quantize_params(params)
      model = tiny.model(name, quantize='int8')
    want = tiny.logits_of(model, params)
    got_model, got_params = fused.fuse(model, params)
    self.assertTrue(jax.tree.leaves(params['layers'][0]['q'])[0].is_deleted())
    for layer in got_params['layers']:
      self.assertContainsSubset({'qkv', 'gate_up'}, layer)
      self.assertNoCommonElements({'q', 'k', 'v', 'gate', 'up'}, layer)
    declared = jax.tree.map(
      lambda spec: spec.shape, got_model.param_specs(), is_leaf=sharding.is_spec
    )
    shapes = jax.tree.map(lambda x: x.shape, got_params)
    self.assertEqual(shapes, declared)
    np.testing.assert_allclose(
      tiny.logits_of(got_model, got_params), want, atol=1e-5
    )

  def test_fusing_twice_is_refused(self):
    model = tiny.model('llama', is_fused=True)
    with self.assertRaisesRegex(ValueError, 'not fused'):
      fused.fuse(model, tiny.params_of(model))


if __name__ == '__main__':
  absltest.main()
