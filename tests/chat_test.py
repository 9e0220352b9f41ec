"""Chat templates: what published ones need, and what none may do."""

import importlib.util
import unittest

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import chat

_MESSAGES = [
  {'role': 'user', 'content': 'Hi "you"'},
  {'role': 'assistant', 'content': 'Hä?'},
]


def setUpModule():
  if importlib.util.find_spec('jinja2') is None:
    raise unittest.SkipTest('the jinja2 package is not installed')


class RenderTest(parameterized.TestCase):
  def test_turns_and_generation_prompt(self):
    template = (
      '{{ bos_token }}{% for m in messages %}\n'
      '    {% if loop.index > 5 %}{% break %}{% endif %}\n'
      "{{ '<' + m['role'] + '>' + m.content + eos_token }}\n"
      '{% endfor %}\n'
      '{% if add_generation_prompt and not tools %}<assistant>{% endif %}'
    )
    for add, expected in (
      (True, '^<user>Hi "you"$\n<assistant>Hä?$\n<assistant>'),
      (False, '^<user>Hi "you"$\n<assistant>Hä?$\n'),
    ):
      text = chat.render_chat(
        template,
        _MESSAGES,
        add_generation_prompt=add,
        bos_token='^',
        eos_token='$',
      )
      self.assertEqual(text, expected)

  def test_tojson_does_not_escape(self):
    self.assertEqual(
      chat.render_chat('{{ messages[1].content | tojson }}<>', _MESSAGES),
      '"Hä?"<>',
    )

  def test_date(self):
    text = chat.render_chat("{{ strftime_now('%Y') }}", _MESSAGES)
    self.assertRegex(text, r'^20\d\d$')

  @parameterized.parameters(
    ("{{ ''.__class__ }}", "access to '__class__' of str is not allowed"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", 'is not allowed'),
    ("{{ cycler.__init__.__globals__.os.system('true') }}", 'is not allowed'),
    ("{{ '{0.__class__}'.format(messages) }}", 'is not allowed'),
    ("{{ messages[0]['__class__'].x }}", 'failed'),
    ('{{ messages.append(1) }}', "access to 'append' of list"),
    ("{{ messages[0].update({'role': 'system'}) }}", "access to 'update'"),
    ("{% include '/etc/passwd' %}", 'failed'),
    ("{{ raise_exception('roles must alternate') }}", 'roles must alternate'),
    ('{% for %}', 'failed'),
    ('{{ messages[0].content + 1 }}', 'failed'),
    ('{{ 1 / 0 }}', 'division by zero'),
  )
  def test_one_sentence_for_what_is_refused(self, template, message):
    with self.assertRaisesRegex(ValueError, message) as caught:
      chat.render_chat(template, _MESSAGES)
    self.assertTrue(str(caught.exception).endswith('.'))
    self.assertNotIn('\n', str(caught.exception))

  def test_messages_are_checked_and_left_alone(self):
    for messages, reason in (
      ([], 'at least one message'),
      ([{'role': 'user'}], "message 0 must have a text 'content', got None"),
      ([_MESSAGES[0], {'content': 'x'}], "message 1 must have a text 'role'"),
    ):
      with self.assertRaisesRegex(ValueError, reason):
        chat.render_chat('x', messages)

  def test_no_template(self):
    with self.assertRaisesRegex(ValueError, 'has no chat template'):
      chat.render_chat(None, _MESSAGES)


if __name__ == '__main__':
  absltest.main()
