"""Accelerators by name: what their makers say they can do."""

import dataclasses
import math
import re


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """One chip; peaks are dense, without structured sparsity.

  Attributes:
    name: as in a topology.
    hbm_bytes: memory that a program may use.
    hbm_bandwidth: bytes per second.
    bfloat16_flops: per second.
    int8_ops: per second.
    num_axes: sizes in the shape of a topology: TPUs are wired as a grid.
  """

  name: str
  hbm_bytes: int
  hbm_bandwidth: float
  bfloat16_flops: float
  int8_ops: float
  num_axes: int = 1


# TPUs: bandwidth and peaks from the "System architecture" tables under
# https://cloud.google.com/tpu/docs/ (pages v5e, v5p and v6e). The memory of
# the pages is 16, 95 and 32 GB; what stands here is what the compiler of
# libtpu 0.0.42 says is available, when it refuses a program that is too large.
# The page of v5p states no int8 peak; https://cloud.google.com/blog/products/
# ai-machine-learning/introducing-cloud-tpu-v5p-and-ai-hypercomputer has it.
# The page of v4 (docs/v4) gives one peak, "275 teraflops (bf16 or int8)".
# NVIDIA, SXM forms: the data sheets at https://www.nvidia.com/en-us/
# data-center/ (a100, h100, h200; l4 is a card), halved where they count
# sparsity.
# RTX 4090: NVIDIA Ada GPU Architecture, version 2.1, table 2, with FP32 sums.
CHIPS = {
  chip.name: chip
  for chip in (
    Chip(
      name='v5e',
      hbm_bytes=int(15.75 * 2**30),
      hbm_bandwidth=819e9,
      bfloat16_flops=197e12,
      int8_ops=393e12,
      num_axes=2,
    ),
    Chip(
      name='v5p',
      hbm_bytes=int(95.74 * 2**30),
      hbm_bandwidth=2765e9,
      bfloat16_flops=459e12,
      int8_ops=918e12,
      num_axes=3,
    ),
    Chip(
      name='v6e',
      hbm_bytes=int(31.25 * 2**30),
      hbm_bandwidth=1640e9,
      bfloat16_flops=918e12,
      int8_ops=1836e12,
      num_axes=2,
    ),
    Chip(
      name='a100',
      hbm_bytes=80 * 10**9,
      hbm_bandwidth=2039e9,
      bfloat16_flops=312e12,
      int8_ops=624e12,
    ),
    Chip(
      name='h100',
      hbm_bytes=80 * 10**9,
      hbm_bandwidth=3350e9,
      bfloat16_flops=989.5e12,
      int8_ops=1979e12,
    ),
    Chip(
      name='h200',
      hbm_bytes=141 * 10**9,
      hbm_bandwidth=4800e9,
      bfloat16_flops=989.5e12,
      int8_ops=1979e12,
    ),
    Chip(
      name='v4',
      hbm_bytes=32 * 2**30,
      hbm_bandwidth=1200e9,
      bfloat16_flops=275e12,
      int8_ops=275e12,
      num_axes=3,
    ),
    Chip(
      name='l4',
      hbm_bytes=24 * 10**9,
      hbm_bandwidth=300e9,
      bfloat16_flops=121e12,
      int8_ops=242.5e12,
    ),
    Chip(
      name='rtx4090',
      hbm_bytes=24 * 10**9,
      hbm_bandwidth=1008e9,
      bfloat16_flops=165.2e12,
      int8_ops=660.6e12,
    ),
  )
}

CPU = 'cpu'
MAX_DEVICES = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
  """Chips that are wired together.

  Attributes:
    name: as it was asked for.
    chip: None for fake CPU devices, about which nothing is claimed.
    num_devices: how many.
  """

  name: str
  chip: Chip | None
  num_devices: int

  @property
  def is_tpu(self) -> bool:
    return self.chip is not None and self.chip.num_axes > 1


def parse_topology(text: str) -> Topology:
  """A topology from 'v5e:8x8', 'v5p:4x4x4', 'h100:8' or 'cpu:8'.

  Raises:
    ValueError: the chip is unknown, or the shape is not one of its kind.

  >>> parse_topology('v5e:8x8').num_devices
  64
  """
  found = re.fullmatch(r'([a-z]\w*):([1-9]\d{0,3}(?:x[1-9]\d{0,3})*)', text)
  name = found and found[1]
  if name != CPU and name not in CHIPS:
    raise ValueError(
      '--topology must be a chip and a shape, as in v5e:8x8, with a chip of '
      f'{", ".join((*CHIPS, CPU))}, got {text!r}.'
    )
  sizes = [int(size) for size in found[2].split('x')]
  chip = CHIPS.get(name)
  num_axes = 1 if chip is None else chip.num_axes
  if len(sizes) != num_axes:
    example = '8' if num_axes == 1 else 'x'.join('2' * num_axes)
    raise ValueError(
      f'--topology of {name} must have {num_axes} sizes, as in '
      f'{name}:{example}, got {text!r}.'
    )
  num_devices = math.prod(sizes)
  if num_devices > MAX_DEVICES:
    raise ValueError(
      f'--topology must have at most {MAX_DEVICES} devices, got '
      f'{num_devices} in {text!r}.'
    )
  return Topology(name=text, chip=chip, num_devices=num_devices)
