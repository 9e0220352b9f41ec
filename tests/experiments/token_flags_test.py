"""Flags that name token ids."""

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import token_flags


class ParseTest(parameterized.TestCase):
  @parameterized.parameters(
    ('', ()), ('7', (7,)), ('1, 2,3', (1, 2, 3)), ('2147483647', (2**31 - 1,))
  )
  def test_ids(self, text, expected):
    self.assertEqual(token_flags.parse_ids(text, '--stop_ids'), expected)

  @parameterized.parameters('-1', '1,,2', '1.5', 'a', '2147483648', '٣', '1,')
  def test_bad_ids(self, text):
    with self.assertRaisesRegex(
      ValueError, '^--stop_ids must be token ids joined by commas'
    ):
      token_flags.parse_ids(text, '--stop_ids')

  def test_logit_bias(self):
    self.assertEqual(token_flags.parse_logit_bias(''), ())
    self.assertEqual(
      token_flags.parse_logit_bias('5:-1.5, 7:2e1'), ((5, -1.5), (7, 20.0))
    )

  @parameterized.parameters(
    '5', '5:', ':1', '5:nan', '5:inf', '-5:1', '5:1,5:2'
  )
  def test_bad_logit_bias(self, text):
    with self.assertRaisesRegex(ValueError, '^--logit_bias must be ID:X,ID:X'):
      token_flags.parse_logit_bias(text)


if __name__ == '__main__':
  absltest.main()
