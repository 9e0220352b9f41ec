"""Heads against NumPy that reads the written files by their published names."""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax.models.heads import files
from tests.models import tiny
from tests.models.heads import numpy_reader, tiny_heads

T = 7
TARGET = tiny_heads.target_of()


def reference(kind, tensors, config, embed, last, features, head):
  """Logits by the names in the files; of Medusa, of the second head."""
  if kind == 'medusa':
    return numpy_reader.medusa(tensors, config, last, head)[1]
  feature = last
  if kind == 'eagle3':
    feature = numpy_reader.eagle3_feature(tensors, features)
  make = getattr(numpy_reader, kind)
  logits = make(tensors, config, embed, feature, head)[1]
  return logits[:, : TARGET.vocab_size]


class ReferenceTest(parameterized.TestCase):
  @parameterized.parameters(
    'eagle', 'eagle3_reduced', 'mtp', 'mtp_reduced', 'medusa_own'
  )
  def test_logits(self, name):
    head = tiny_heads.head_of(name, TARGET)
    params = tiny_heads.params_of(head)
    if 'fc_bias' in params:
      self.assertGreater(float(jnp.abs(params['fc_bias']).min()), 0)
    target = tiny.params_of(TARGET)
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder, 'head')
      files.save_head(path, head, params)
      tensors, config = numpy_reader.read(path)
    kind = name.split('_')[0]
    got, last, features, tokens = apply(
      head, {'target': target, 'proposer': params}, kind
    )
    next_tokens = tokens[1:]
    want = reference(
      kind,
      tensors,
      config,
      np.asarray(target['embed'])[next_tokens],
      last[:-1],
      features[:-1],
      np.asarray(target['head'])[: TARGET.vocab_size],
    )
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def apply(head, params, kind):
  """Logits of our own, and what goes in: of tokens 0..T-1."""
  tokens_1T = jnp.asarray([[3, 1, 4, 1, 5, 9, 2]], jnp.int32)

  @jax.jit
  def run(params):
    hidden, _ = TARGET.apply(
      params['target'],
      tokens_1T,
      TARGET.init_cache(1, T, 0),
      capture=head.target_features,
    )
    normed_1TD = TARGET.final_norm(params['target'], hidden.last_BTD)
    features_1TE = hidden.features_BTE
    if kind == 'medusa':
      logits_1TV = head.logits(params, features_1TE[:, :-1], 2)[1]
    else:
      feature_1TD, _ = head.apply(
        params,
        head.fuse(params, features_1TE[:, :-1]),
        tokens_1T[:, 1:],
        head.block.init_cache(1, T, 0),
      )
      logits_1TV = head.unembed(params, feature_1TD)
      if head.num_ids is not None:
        wide_1TV = jnp.full((1, T - 1, TARGET.vocab_size), -jnp.inf)
        ids = params['proposer']['ids']
        logits_1TV = wide_1TV.at[:, :, ids].set(logits_1TV)
    return logits_1TV[0], normed_1TD[0], features_1TE[0]

  return *map(np.asarray, run(params)), np.asarray(tokens_1T[0])


if __name__ == '__main__':
  absltest.main()
