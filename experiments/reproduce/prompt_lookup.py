"""Reproduces prompt lookup (2023) by task, as in Spec-Bench, arXiv:2401.07851.

Claim:    text that repeats its prompt is drafted well by looking it up there:
          summaries most, then chat, then translation.
Notation: tokens a step is their mean accepted tokens (MAT).
Command:  python experiments/reproduce/prompt_lookup.py
Runtime:  5 minutes on 2 CPU cores; --quick: 10 seconds.
Expected: summarisation > chat > translation; with Vicuna 7B on an RTX 3090 a
          speed of 2.46, 1.64 and 1.15 times plain decoding, and 1.73 tokens a
          step over all of its six tasks.
Got:      SmolLM2 135M: tokens a step, summarization, chat, translation: 1.954
          1.315 1.796; Qwen 1.5B: tokens a step, summarization, chat,
          translation: 2.891 1.2 1.056; 1 of 1 hold; 1 shown, not asserted;
          2026-11-30, CPU.
Differs:  Qwen2.5-Coder-Instruct 1.5B and SmolLM2-Instruct 135M, int8, chat
          template, K = 8, suffixes of 1 to 3 tokens, temperature 0, 64 tokens
          of the first turn of 8 prompts per task (texts to be summarised of up
          to 2000 characters); tokens a step and no speed. The claim is not
          asserted of SmolLM2, which quotes what it should translate.
"""

import sys
from typing import Any

import numpy as np

from experiments import script
from experiments.reproduce import definitions, measured, record

TASKS = ('summarization', 'chat', 'translation')
K, BATCH, NUM_PROMPTS, NUM_TOKENS = 8, 8, 8, 64
_SMALL = 'SmolLM2 135M'


def measure(place: measured.Place) -> list[dict[str, Any]]:
  """A row per target and task."""
  targets = {'demo': {'target': 'demo:target'}}
  if not place.is_quick:
    targets = {
      name: {'target': place.model(file), 'quantize': 'int8', 'chat': True}
      for name, file in (
        (_SMALL, measured.SMOLLM2),
        ('Qwen 1.5B', measured.QWEN),
      )
    }
  prompts = [
    row for task in TASKS for row in measured.rows(place, task, NUM_PROMPTS)
  ]
  found = []
  for name, settings in targets.items():
    trace = measured.run(
      prompts,
      **settings,
      proposer='ngram',
      num_draft_tokens=K,
      batch_size=BATCH,
      max_new_tokens=24 if place.is_quick else NUM_TOKENS,
      exact=False,
    ).trace
    task_R = np.arange(trace.num_requests) // NUM_PROMPTS
    for i, task in enumerate(TASKS):
      own = definitions.measure(trace.select(task_R == i))
      found.append({'target': name, 'task': task, 'K': K, **own})
  return found


def findings(
  rows: list[dict[str, Any]], is_quick: bool
) -> list[record.Finding]:
  """The order of the tasks, for every target."""
  found = []
  for name in dict.fromkeys(row['target'] for row in rows):
    taus = [row['tokens_per_step'][0] for row in rows if row['target'] == name]
    claim = f'{name}: tokens a step, {", ".join(TASKS)}'
    if is_quick:
      # The demo prompts are the same for each task.
      holds = max(taus) == min(taus) >= 1
      found.append(record.true(claim, 'equal', taus, holds))
    elif name == _SMALL:
      note = 'it cannot translate: it quotes the prompt, as a lookup drafts'
      found.append(record.shown(claim, 'falling', taus, note, is_headline=True))
    else:
      found.append(
        record.true(
          claim, 'falling', taus, taus[0] > taus[1] > taus[2], is_headline=True
        )
      )
  return found


def main(values) -> int:
  place = measured.place_of(values)

  def reproduce(quick: bool) -> record.Measured:
    rows = measure(place)
    return record.Measured(findings=findings(rows, quick), rows=rows)

  return record.run('prompt_lookup', reproduce, values)


if __name__ == '__main__':
  sys.exit(script.run_main(main, measured.FLAG_GROUPS))
