"""Runs generate.py in processes that share a mesh; reads what they wrote."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / 'experiments' / 'generate.py'

PROMPTS = (
  'def fibonacci(n):\n',
  'The capital of France is Paris. The capital of Italy is',
  'Once upon a time',
  '1, 2, 3, 4, 5, 6, 7, 8,',
  'class Stack:\n  def push(self, item):\n',
  'Dear Sir or Madam,',
  'A B C A B C A B C A',
  'import os\nimport sys\n\ndef main():\n',
)


def free_port() -> int:
  with socket.create_server(('127.0.0.1', 0)) as server:
    return server.getsockname()[1]


def start(
  argv: list[str],
  num_processes: int,
  num_devices: int,
  own: Sequence[list[str]] | None = None,
) -> list[subprocess.Popen]:
  """The processes, each with so many CPU devices; one runs alone.

  `own` has flags that each process has for itself.
  """
  environment = {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'JAX_NUM_CPU_DEVICES': str(num_devices),
    'PYTHONPATH': str(ROOT),
  }
  port = free_port()
  joining = [
    f'--coordinator=127.0.0.1:{port}',
    f'--num_processes={num_processes}',
  ]
  return [
    subprocess.Popen(
      [
        sys.executable,
        str(PROGRAM),
        *argv,
        *(own[i] if own else ()),
        *([*joining, f'--process_id={i}'] if num_processes > 1 else []),
      ],
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(num_processes)
  ]


def write_prompts(path: str, num_rounds: int = 1, max_new_tokens: int = 16):
  """Ragged rows: greedy and sampled side by side, coupled is exact for both."""
  with open(path, 'w', encoding='utf-8') as file:
    for i in range(num_rounds * len(PROMPTS)):
      row = i % len(PROMPTS)
      request = {
        'prompt': PROMPTS[row],
        'temperature': 0.8 * (row % 2),
        'max_new_tokens': max_new_tokens - row,
      }
      file.write(json.dumps(request) + '\n')


def flags(prompts: str) -> list[str]:
  return [
    f'--prompts_jsonl={prompts}',
    f'--batch_size={len(PROMPTS)}',
    '--verify=coupled',
    '--num_draft_tokens=3',
    '--dtype=float32',
  ]


def tokens(
  argv: list[str], num_processes: int, num_devices: int
) -> list[list[int]]:
  """The rows' tokens; checks that process 0 alone has written."""
  with tempfile.TemporaryDirectory() as folder:
    write_prompts(f'{folder}/prompts.jsonl')
    argv = [*flags(f'{folder}/prompts.jsonl'), *argv]
    argv.append(f'--json_out={folder}/out.json')
    running = start(argv, num_processes, num_devices)
    ended = [process.communicate(timeout=600) for process in running]
    for process, (_, err) in zip(running, ended):
      assert process.returncode == 0, err
    assert ended[0][0], 'process 0 prints'
    assert all(out == '' for out, _ in ended[1:]), ended
    with open(f'{folder}/out.json', encoding='utf-8') as file:
      return [request['tokens'] for request in json.load(file)['requests']]
