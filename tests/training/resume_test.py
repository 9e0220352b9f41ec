"""Stopped anywhere and started again, a run ends with the same bits."""

import dataclasses
import json
import pathlib
import shutil
import tempfile

import jax
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax.training import loop, written
from specjax.training.checkpoints import Checkpoints
from specjax.training.imitate import Distill, NextToken
from specjax.training.objective import trainable
from specjax.training.step import AdamW, Trainer
from tests.training import tiny

NUM_STEPS = 12


class Killed(Exception):
  pass


def trainer(seed: int = 0) -> Trainer:
  return Trainer(
    objective=NextToken(model=trainable(tiny.model())),
    adamw=AdamW(learning_rate=1e-2, num_steps=NUM_STEPS, num_warmup_steps=3),
    seed=seed,
  )


class ResumeTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name) / 'run'

  def checkpoints(self, **settings) -> Checkpoints:
    return Checkpoints(**{'directory': self.folder, 'run': 'a', **settings})

  def train(self, stop_after=None, **settings):
    def on_step(step, state, figures):
      del state, figures
      if step == stop_after:
        raise Killed

    given = {
      'trainer': trainer(),
      'source': tiny.packed(),
      'checkpoints': self.checkpoints(),
      'save_every': 1,
      'on_step': on_step,
    }
    return loop.train(**{**given, **settings})

  @parameterized.parameters(
    *np.random.default_rng(20).integers(1, 11, 3).tolist()
  )
  def test_killed_at_any_step(self, step):
    expected = self.train(checkpoints=None)
    for save_every in (1, 4):
      shutil.rmtree(self.folder, ignore_errors=True)
      with self.assertRaises(Killed):
        self.train(step, save_every=save_every)
      first = self.checkpoints().steps()
      self.assertEqual(max(first, default=0), step - step % save_every)
      got = self.train(save_every=save_every)
      self.assertTrue(tiny.same(got, expected))

  def test_killed_while_it_saves(self):
    expected = self.train(checkpoints=None)
    with self.assertRaises(Killed):
      self.train(5)
    # What a killed process leaves of the checkpoint it was writing.
    half = self.folder / '.step-00000006.1.unfinished'
    shutil.copytree(self.folder / 'step-00000005', half)
    self.assertTrue(tiny.same(self.train(), expected))
    self.assertFalse(half.exists())

  @parameterized.parameters(*written.WRITERS)
  def test_text_written_on_the_way(self, writer):
    objective = Distill(
      draft=trainable(tiny.model()),
      target=trainable(tiny.model(1, 24)),
      divergence='forward_kl',
    )
    frozen = objective.target.init(jax.random.key(5))
    source = written.Written(
      source=tiny.packed(),
      writer=writer,
      target=objective.target,
      draft=objective.draft,
      target_params=frozen,
      share=0.5,
      after=5,
      seed=3,
    )
    own = Trainer(
      objective=objective, adamw=AdamW(learning_rate=1e-2, num_steps=4), seed=0
    )
    run = {'trainer': own, 'source': source, 'frozen_params': frozen}
    expected = self.train(checkpoints=None, **run)
    with self.assertRaises(Killed):
      self.train(2, **run)
    self.assertTrue(tiny.same(self.train(**run), expected))
    with self.assertRaisesRegex(ValueError, 'after must be >= 1, got 0'):
      dataclasses.replace(source, after=0)
    plain = source.source.batch(1)
    batch = source.batch(1, expected.params)
    self.assertEqual(batch['tokens_BT'].shape, plain['tokens_BT'].shape)
    is_old = np.arange(17) < 5
    for name in plain:
      np.testing.assert_array_equal(batch[name][2:], plain[name][2:])
    np.testing.assert_array_equal(
      batch['tokens_BT'][:, is_old], plain['tokens_BT'][:, is_old]
    )
    self.assertFalse(batch['mask_BT'][:2, is_old].any())
    if writer == 'pair':
      # A draft is rejected now and then, and not always.
      self.assertTrue(batch['mask_BT'][:2].any())
      self.assertFalse(batch['mask_BT'][:2, 5:].all())
    else:
      self.assertTrue(batch['mask_BT'][:2, 5:].all())
    new = batch['tokens_BT'][:2, 5:]
    self.assertNotEqual(new.tolist(), plain['tokens_BT'][:2, 5:].tolist())
    again = source.batch(1, expected.params)['tokens_BT']
    np.testing.assert_array_equal(again, batch['tokens_BT'])

  def test_only_the_newest_are_kept(self):
    self.train(save_every=2, checkpoints=self.checkpoints(num_kept=3))
    self.assertEqual(self.checkpoints().steps(), [8, 10, 12])


class DamageTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.checkpoints = Checkpoints(directory=pathlib.Path(folder.name), run='a')
    self.trainer = trainer()
    loop.train(
      self.trainer,
      tiny.packed(),
      checkpoints=self.checkpoints,
      save_every=NUM_STEPS // 2,
    )
    self.newest = pathlib.Path(folder.name) / f'step-{NUM_STEPS:08d}'

  def files(self):
    """The newest checkpoint's files, the largest first."""
    files = [p for p in self.newest.rglob('*') if p.is_file()]
    return sorted(files, key=lambda p: -p.stat().st_size)

  def refused(self, message: str):
    like = self.trainer.init()
    with self.assertRaisesRegex(ValueError, message) as caught:
      self.checkpoints.restore(like)
    sentence = str(caught.exception)
    self.assertNotIn('\n', sentence)
    self.assertIn(
      f'remove {self.newest} to go on from step {NUM_STEPS // 2}.', sentence
    )
    # The one before it still loads.
    shutil.rmtree(self.newest)
    self.assertEqual(int(self.checkpoints.restore(like).step), NUM_STEPS // 2)

  def test_cut_short(self):
    file = self.files()[0]
    file.write_bytes(file.read_bytes()[:-10])
    self.refused(f'damaged, not as it was written: .*{file.name}')

  def test_one_byte_changed(self):
    file = self.files()[0]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    self.refused(f'damaged, not as it was written: .*{file.name}')

  def test_a_file_missing(self):
    file = self.files()[0]
    file.unlink()
    self.refused(f'damaged, not as it was written: .*{file.name}')

  def test_no_description(self):
    (self.newest / 'checkpoint.json').unlink()
    self.refused('damaged: it lacks checkpoint.json')

  @parameterized.parameters(
    ('{', 'must be JSON'),
    ('[]', 'must hold a JSON object'),
    ('{"format": "x"}', 'of version 1, it is not'),
  )
  def test_a_broken_description(self, text, message):
    (self.newest / 'checkpoint.json').write_text(text)
    self.refused(message)

  def test_an_edited_step(self):
    file = self.newest / 'checkpoint.json'
    about = json.loads(file.read_text())
    file.write_text(json.dumps({**about, 'step': 3}))
    self.refused('damaged, not as it was written: checkpoint.json')

  def test_a_renamed_folder(self):
    file = self.newest / 'checkpoint.json'
    about = json.loads(file.read_text())
    file.write_text(json.dumps({**about, 'step': NUM_STEPS + 1}))
    folder = self.newest.with_name(f'step-{NUM_STEPS + 1:08d}')
    self.newest = self.newest.rename(folder)
    self.refused(f'is damaged: it has step {NUM_STEPS}')

  def test_another_run(self):
    other = Checkpoints(directory=self.checkpoints.directory, run='b')
    with self.assertRaisesRegex(ValueError, 'of a run with other settings'):
      other.restore(self.trainer.init())


if __name__ == '__main__':
  absltest.main()
