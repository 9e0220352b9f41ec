"""Hiddens that are read once say what those of every step would."""

from unittest import mock

import jax
import numpy as np
from absl.testing import absltest

import tests.setup_jax  # noqa: F401
from specjax.training import data, remembered
from specjax.training import heads as training
from tests.models import tiny
from tests.models.heads import tiny_heads

V = 16


def packed(**settings):
  rng = np.random.default_rng(0)
  return data.Packed(
    tokens_n=rng.integers(0, V, 50).astype(np.int32),
    mask_n=np.ones(50, bool),
    batch_size=2,
    length=7,
    seed=3,
    **settings,
  )


class RememberedTest(absltest.TestCase):
  def test_the_loss_is_that_of_reading_and_a_window_is_read_once(self):
    target = tiny_heads.target_of(vocab_size=V)
    head = tiny_heads.head_of('eagle3_reduced', target)
    trained, frozen = training.split(tiny_heads.params_of(head))
    frozen = {'target': tiny.params_of(target), **frozen}
    head = training.trainable_head(head)
    objective = training.objective_of('eagle3', head, depth=2)
    reader, reader_params = objective.reading(frozen)
    source = packed(recuts=False)
    kept = remembered.Remembered(
      source=source,
      reader=reader,
      reader_params=reader_params,
      capture=head.target_features,
    )
    loss = jax.jit(objective.loss)
    key = jax.random.key(0)
    num_steps = 2 * source.num_rows // source.batch_size
    with mock.patch.object(
      remembered, '_read', side_effect=remembered._read
    ) as read:
      for i in range(num_steps):
        batch = kept.batch(i, None)
        np.testing.assert_array_equal(
          batch['tokens_BT'], source.batch(i)['tokens_BT']
        )
        np.testing.assert_allclose(
          loss(trained, frozen, batch, key)[0],
          loss(trained, frozen, source.batch(i), key)[0],
          rtol=1e-5,
        )
    self.assertLen(kept.kept, source.num_rows)
    self.assertLess(read.call_count, num_steps)

  def test_the_windows_stay_and_their_order_does_not(self):
    source = packed(recuts=False)
    num = source.num_rows // source.batch_size
    epochs = [
      [source.windows(i) for i in range(e * num, (e + 1) * num)]
      for e in range(2)
    ]
    self.assertNotEqual(*epochs)
    rows = {}
    for i in range(2 * num):
      tokens_BT = source.batch(i)['tokens_BT']
      for window, tokens_T in zip(source.windows(i), tokens_BT):
        np.testing.assert_array_equal(
          tokens_T, rows.setdefault(window, tokens_T)
        )
    self.assertLen(rows, source.num_rows)

  def test_windows_that_move(self):
    with self.assertRaisesRegex(ValueError, 'must stay, recuts is True'):
      remembered.Remembered(
        source=packed(), reader=None, reader_params=None, capture=()
      )


if __name__ == '__main__':
  absltest.main()
