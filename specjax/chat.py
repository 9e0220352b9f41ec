"""Renders a conversation with a model's own chat template."""

import datetime
import json
from typing import Any, Mapping, Sequence


def _to_json(value: Any, indent: int | None = None, **settings: Any) -> str:
  # Not Jinja's own filter, which escapes for HTML.
  return json.dumps(value, ensure_ascii=False, indent=indent, **settings)


def _strftime_now(form: str) -> str:
  return datetime.datetime.now().strftime(form)


def _check_messages(messages: Sequence[Mapping[str, Any]]):
  if not messages:
    raise ValueError('messages must hold at least one message.')
  for i, message in enumerate(messages):
    for key in ('role', 'content'):
      if not isinstance(message.get(key), str):
        raise ValueError(
          f'message {i} must have a text {key!r}, got {message.get(key)!r}.'
        )


def _environment() -> Any:
  """Jinja as published templates expect it, in a sandbox."""
  import jinja2
  from jinja2 import sandbox

  class Environment(sandbox.ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str):
      # Refused at once: the default refuses only what is done with it.
      raise sandbox.SecurityError(
        f'access to {attribute!r} of {type(obj).__name__} is not allowed'
      )

  def raise_exception(message: str):
    raise jinja2.TemplateError(message)

  environment = Environment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=['jinja2.ext.loopcontrols'],
  )
  environment.filters['tojson'] = _to_json
  environment.globals['raise_exception'] = raise_exception
  environment.globals['strftime_now'] = _strftime_now
  return environment


def render_chat(
  template: str | None,
  messages: Sequence[Mapping[str, Any]],
  *,
  add_generation_prompt: bool = True,
  bos_token: str = '',
  eos_token: str = '',
) -> str:
  """The prompt text for a conversation.

  Templates come from downloaded files, so they run in Jinja's sandbox and
  cannot reach Python's internals or change what they are given. The text
  already holds the special tokens: encode it with `add_special=False`.

  Args:
    template: Jinja source, `Tokenizer.chat_template`.
    messages: each with 'role' and 'content', in order.
    add_generation_prompt: whether to end with the head of the answer.
    bos_token: how the template spells the beginning of a text.
    eos_token: and its end.

  Raises:
    ValueError: no template, a malformed message, or whatever the template
      itself refuses or fails with.

  >>> render_chat('{% for m in messages %}[{{ m.role }}] {{ m.content }}'
  ...             '{% endfor %}', [{'role': 'user', 'content': 'hi'}])
  '[user] hi'
  """
  if not template:
    raise ValueError('the model has no chat template.')
  _check_messages(messages)

  try:
    return (
      _environment()
      .from_string(template)
      .render(
        messages=[dict(message) for message in messages],
        add_generation_prompt=add_generation_prompt,
        bos_token=bos_token,
        eos_token=eos_token,
        tools=None,
        documents=None,
      )
    )
  except Exception as error:  # A template can fail in any way Python can.
    reason = ' '.join(str(error).split()).rstrip('.') or type(error).__name__
    raise ValueError(f'the chat template failed: {reason}.') from None
