"""Starts processes that share a program, and reads what became of them."""

import json
import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / 'tests' / 'experiments' / 'mesh_program.py'


def free_port() -> int:
  with socket.create_server(('127.0.0.1', 0)) as server:
    return server.getsockname()[1]


def start(
  argv: list[str], num_processes: int, num_devices: int
) -> list[subprocess.Popen]:
  """The processes, each with so many CPU devices; one runs alone."""
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
        *([*joining, f'--process_id={i}'] if num_processes > 1 else []),
      ],
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(num_processes)
  ]


def tokens(
  argv: list[str], num_processes: int, num_devices: int
) -> list[list[int]]:
  """The rows' tokens; checks that process 0 alone has written."""
  running = start(argv, num_processes, num_devices)
  ended = [process.communicate(timeout=600) for process in running]
  for process, (_, err) in zip(running, ended):
    assert process.returncode == 0, err
  assert all(out == '' for out, _ in ended[1:]), ended
  return json.loads(ended[0][0])
