"""Topologies by name, and numbers of the right size behind them."""

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import chips


class ChipsTest(parameterized.TestCase):
  @parameterized.parameters(
    ('v5e:2x4', 'v5e', 8, True),
    ('v5e:8x8', 'v5e', 64, True),
    ('v5p:4x4x4', 'v5p', 64, True),
    ('v6e:8x8', 'v6e', 64, True),
    ('h100:8', 'h100', 8, False),
  )
  def test_topologies(self, text, name, num_devices, is_tpu):
    topology = chips.parse_topology(text)
    self.assertEqual(topology.chip, chips.CHIPS[name])
    self.assertEqual(topology.num_devices, num_devices)
    self.assertEqual(topology.is_tpu, is_tpu)

  def test_fake_devices_claim_nothing(self):
    topology = chips.parse_topology('cpu:8')
    self.assertIsNone(topology.chip)
    self.assertEqual(topology.num_devices, 8)
    self.assertFalse(topology.is_tpu)

  @parameterized.parameters(
    ('v7:2x2', 'with a chip of v5e, .* cpu, got'),
    ('v5e', "as in v5e:8x8, .* got 'v5e'"),
    ('v5e:0x8', 'must be a chip and a shape'),
    ('v5e:8', 'v5e must have 2 sizes, as in v5e:2x2'),
    ('v5p:4x4', 'v5p must have 3 sizes, as in v5p:2x2x2'),
    ('cpu:2x4', 'cpu must have 1 sizes, as in cpu:8'),
    ('cpu:9999', 'at most 4096 devices, got 9999'),
  )
  def test_what_is_no_topology(self, text, message):
    with self.assertRaisesRegex(ValueError, message):
      chips.parse_topology(text)

  def test_units(self):
    for chip in chips.CHIPS.values():
      with self.subTest(chip.name):
        self.assertBetween(chip.hbm_bytes, 15 * 2**30, 200 * 2**30)
        self.assertBetween(chip.hbm_bandwidth, 2e11, 1e13)
        self.assertBetween(chip.bfloat16_flops, 5e13, 3e15)
        # Twice bfloat16, but for rounding in the sources; a v4 has one rate,
        # and the 4090 halves that of bfloat16 where sums are float32.
        ratio = {'v4': 1, 'rtx4090': 4}.get(chip.name, 2)
        self.assertAlmostEqual(
          chip.int8_ops / chip.bfloat16_flops, ratio, delta=0.02
        )


if __name__ == '__main__':
  absltest.main()
