"""Times transformers: plain, assisted generation, prompt lookup.

A program for `peers.py`, which has the protocol; it needs torch, transformers
and accelerate, and nothing of specjax. Greedy, one prompt at a time, stop ids
ignored. Seconds are those of decoding: what n tokens take, less what one takes;
with an assistant, less what one token takes the assistant, which reads the
prompt as well.
"""

import copy
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

_TUNED_ON = 2  # Prompts.


def say(text: str):
  print(f'transformers: {text}', file=sys.stderr, flush=True)


class Timer:
  """The models and their modes."""

  def __init__(self, job: dict[str, Any]):
    import torch
    import transformers

    torch.set_num_threads(job['num_threads'])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    self._torch = torch
    self._dtype = getattr(torch, job['dtype'])
    self._target = self._load(job['target'])
    self._draft = job['draft'] and self._load(job['draft'])
    self._prompts = [
      torch.tensor([ids], device=self._target.device) for ids in job['prompts']
    ]
    self._num_tokens = job['num_tokens']
    self._plain = copy.deepcopy(self._target.generation_config)
    self._own = self._draft and copy.deepcopy(self._draft.generation_config)
    say('warming up')
    self._seconds(self._prompts[0], 4, {})
    self.about = {
      'versions': {
        'transformers': transformers.__version__,
        'torch': torch.__version__,
      },
      'dtype': job['dtype'],
      'num_threads': torch.get_num_threads(),
      'device': str(self._target.device),
    }
    self._modes, self.about['tuning'] = self._tune(job['draft_lengths'])
    self.about['note'] = (
      f'{job["dtype"]}, one prompt at a time, greedy, decoding alone; its '
      'repeats alternate with ours. Draft lengths of the constant schedule and '
      f'of prompt lookup: the fastest on the first {_TUNED_ON} prompts.'
    )

  def _load(self, name: str):
    import transformers

    say(f'loading {name}')
    where: dict[str, Any] = {'dtype': self._dtype}
    if name.endswith('.gguf'):
      name, where['gguf_file'] = os.path.split(os.path.abspath(name))
    model = transformers.AutoModelForCausalLM.from_pretrained(
      name.removeprefix('hf:'), **where
    )
    if self._torch.cuda.is_available():
      model = model.to('cuda')
    # A fresh config: what the authors recommend for sampling is not for here.
    given = model.generation_config
    model.generation_config = transformers.GenerationConfig(
      bos_token_id=given.bos_token_id, pad_token_id=0
    )
    return model.eval()

  def _set(self, mode: str, num_draft_tokens: int) -> dict[str, Any]:
    """Makes ready for a mode; what `generate` is called with."""
    if mode.startswith('assisted'):
      config = self._draft.generation_config = copy.deepcopy(self._own)
      if mode == 'assisted, constant':
        config.num_assistant_tokens = num_draft_tokens
        config.num_assistant_tokens_schedule = 'constant'
        config.assistant_confidence_threshold = 0.0
      return {'assistant_model': self._draft}
    if mode == 'prompt lookup':
      return {'prompt_lookup_num_tokens': num_draft_tokens}
    return {}

  def _seconds(self, ids, num_tokens: int, how: dict, model=None) -> float:
    model = self._target if model is None else model
    with self._torch.inference_mode():
      clock = time.perf_counter()
      out = model.generate(
        ids,
        attention_mask=self._torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        **how,
      )
      if ids.is_cuda:
        self._torch.cuda.synchronize()
      seconds = time.perf_counter() - clock
    if out.shape[1] - ids.shape[1] != num_tokens:
      raise ValueError(
        f'{num_tokens} tokens were asked for, {out.shape[1] - ids.shape[1]} '
        'came.'
      )
    return seconds

  def _decode_seconds(self, mode: str, k: int, index: int) -> float:
    ids, n = self._prompts[index], self._num_tokens[index]
    seconds = self._seconds(ids, n, self._set(mode, k))
    seconds -= self._seconds(ids, 1, self._set(mode, k))
    if mode.startswith('assisted'):
      self._set(mode, k)
      seconds -= self._seconds(ids, 1, {}, self._draft)
    return seconds

  def _tune(self, draft_lengths: list[int]):
    """The modes, each at its fastest draft length, and how that was found."""
    modes, found = [('plain', None)], []
    tuned = ['prompt lookup']
    if self._draft:
      modes.append(('assisted, default', None))
      tuned.insert(0, 'assisted, constant')
    for mode in tuned:
      seconds = {}
      for k in draft_lengths:
        say(f'trying {mode}, {k} drafts')
        tried = range(min(_TUNED_ON, len(self._prompts)))
        seconds[k] = sum(self._decode_seconds(mode, k, i) for i in tried)
        found.append(
          {'mode': mode, 'num_draft_tokens': k, 'seconds': seconds[k]}
        )
      modes.append((mode, min(seconds, key=seconds.get)))
    return modes, found

  def round(self, number: int) -> dict[str, Any]:
    answers = []
    for mode, k in self._modes:
      say(f'round {number}, {mode}' + (f', {k} drafts' if k else ''))
      seconds = [
        self._decode_seconds(mode, k, i) for i in range(len(self._prompts))
      ]
      answers.append({'mode': mode, 'num_draft_tokens': k, 'seconds': seconds})
    return {'about': self.about, 'modes': answers}


def serve(read: Callable[[], str], answer: Callable[[dict], None]):
  """Answers a job, then round after round, until the input ends."""
  try:
    timer = Timer(json.loads(read()))
    answer({'ready': timer.about})
    while line := read():
      answer(timer.round(json.loads(line)['round']))
  except (ValueError, OSError, ImportError) as error:
    answer({'error': ' '.join(str(error).split())})


def main():
  # Libraries print what they like; the answers have a way of their own.
  out = os.fdopen(os.dup(sys.stdout.fileno()), 'w', encoding='utf-8')
  os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

  def answer(message: dict[str, Any]):
    out.write(json.dumps(message) + '\n')
    out.flush()

  serve(sys.stdin.readline, answer)


if __name__ == '__main__':
  main()
