"""The checked configuration of a run."""

import dataclasses

from experiments import (
  conversions,
  lengths,
  processes,
  recording,
  text_files,
)
from specjax import noise, requests
from specjax.mesh import (
  FULLY_SHARDED,
  TENSOR_PARALLEL,
  MeshShape,
  View,
  parse_mesh,
  refine,
)
from specjax.models.heads import files as head_files
from specjax.proposers.base import check_num_draft_tokens
from specjax.proposers.ngram import NGram
from specjax.sampling import SamplingOptions
from specjax.verify.widths import powers_of_two

DTYPES = ('float32', 'bfloat16')
HEADS = head_files.KINDS
PROPOSERS = ('none', 'draft', 'ngram', 'early_exit', *HEADS, 'tli', 'slem')
# Those that --draft is for.
DRAFTING = ('draft', 'tli', 'slem')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """One run, checked; a notebook may build it without flags.

  Attributes are the flags of the same names; `options`, `stop_ids` and
  `proposer` are already parsed.
  """

  target: str
  draft: str | None = None
  dtype: str = 'bfloat16'
  draft_dtype: str | None = None
  quantize: str = 'none'
  draft_quantize: str | None = None
  cache_dtype: str | None = None
  cache_dir: str | None = None
  mesh: str = 'data:1,model:1'
  draft_mesh: str | None = None
  fully_sharded: bool = False
  proposer: str = 'none'
  num_draft_tokens: int = 4
  stop_rule: str = 'fixed'
  verify: str = 'auto'
  exact: bool = True
  ngram_min: int = 1
  ngram_max: int = 3
  exit_layer: int | None = None
  head: str | None = None
  prompt: str | None = None
  prompt_file: str | None = None
  prompts_jsonl: str | None = None
  limit: int | None = None
  batch_size: int = 1
  chat: bool = False
  system: str | None = None
  max_new_tokens: int = 128
  max_length: int | None = None
  options: SamplingOptions = SamplingOptions()
  seed: int = 0
  stop: tuple[str, ...] = ()
  stop_ids: tuple[int, ...] = ()
  ignore_eos: bool = False
  logprobs: bool = False
  stream: bool = False
  trace: bool = False
  json_out: str | None = None
  record: str | None = None
  record_top: int = 256
  coordinator: str | None = None
  num_processes: int | None = None
  process_id: int | None = None

  def __post_init__(self):
    processes.check(self.coordinator, self.num_processes, self.process_id)
    if not self.target:
      raise ValueError('--target must name a model; --help says how.')
    if self.proposer in DRAFTING and not self.draft:
      raise ValueError(f'--proposer={self.proposer} needs --draft.')
    if self.proposer not in DRAFTING and self.draft:
      raise ValueError(
        f'--draft is not used with --proposer={self.proposer}; drop one.'
      )
    if self.draft_dtype and not self.draft:
      raise ValueError('--draft_dtype needs --draft.')
    if self.draft_quantize and not self.draft:
      raise ValueError('--draft_quantize needs --draft.')
    if self.draft_mesh and not self.draft:
      raise ValueError('--draft_mesh needs --draft.')
    self._check_meshes()
    check_num_draft_tokens(self.num_draft_tokens)
    lengths.check(
      self.stop_rule,
      self.proposer,
      needs_one_process=(self.num_processes or 1) > 1,
    )
    if self.proposer == 'ngram':
      self.make_ngram()
    if self.proposer == 'slem':
      self._check_slem()
    if self.proposer == 'early_exit' and self.exit_layer is None:
      raise ValueError('--proposer=early_exit needs --exit_layer.')
    if self.proposer != 'early_exit' and self.exit_layer is not None:
      raise ValueError(
        f'--exit_layer is not used with --proposer={self.proposer}; drop one.'
      )
    if self.proposer in HEADS and not self.head:
      raise ValueError(f'--proposer={self.proposer} needs --head.')
    if self.proposer not in HEADS and self.head is not None:
      raise ValueError(
        f'--head is not used with --proposer={self.proposer}; drop one.'
      )
    noise.check_seed(self.seed)
    if self.batch_size < 1:
      raise ValueError(f'batch_size must be >= 1, got {self.batch_size}.')
    requests.check_max_new_tokens(self.max_new_tokens)
    if '' in self.stop:
      raise ValueError("stop must not hold an empty text, got ''.")
    if self.max_length is not None and self.max_length < 1:
      raise ValueError(f'max_length must be >= 1, got {self.max_length}.')
    if self.stream and (self.trace or self.batch_size > 1):
      raise ValueError(
        '--stream needs --batch_size=1 and no --trace, got '
        f'--batch_size={self.batch_size}{" --trace" * self.trace}.'
      )
    if self.system is not None and not self.chat:
      raise ValueError('--system needs --chat.')
    if self.cache_dir is not None:
      conversions.check_cache_dir(self.cache_dir)
    if self.json_out is not None and self.is_first:
      text_files.check_writable(self.json_out)
    if self.record is not None:
      recording.check(
        self.record, self.record_top, self.proposer, self.num_processes
      )

  def _check_slem(self):
    if (self.num_processes or 1) > 1 or self.stop_rule != 'fixed':
      raise ValueError(
        '--proposer=slem drafts on the host: it needs --num_processes=1 and '
        '--stop_rule=fixed.'
      )
    if self.draft_mesh is not None:
      raise ValueError(
        '--draft_mesh is not used with --proposer=slem, whose draft has a '
        'device to itself; drop one.'
      )

  def _check_meshes(self):
    shapes = self.mesh_shapes()
    for shape in shapes:
      if self.batch_size % shape.data:
        raise ValueError(
          f'batch_size must be a multiple of {shape.data}, the size of the '
          f'data axis, got {self.batch_size}.'
        )
    if self.fully_sharded and all(shape.data == 1 for shape in shapes):
      raise ValueError(
        f'--fully_sharded needs a data axis of at least 2, got {shapes[0]}.'
      )

  def mesh_shapes(self) -> tuple[MeshShape, MeshShape]:
    """The meshes of target and draft."""
    shape = parse_mesh(self.mesh)
    if self.draft_mesh is None:
      return shape, shape
    return shape, parse_mesh(self.draft_mesh, '--draft_mesh')

  def views(self) -> tuple[View | None, View | None]:
    """This machine's devices as target and draft see them; None is one."""
    shapes = self.mesh_shapes()
    is_alone = not self.num_processes or self.num_processes == 1
    if is_alone and all(shape.num_devices == 1 for shape in shapes):
      return None, None
    rules = FULLY_SHARDED if self.fully_sharded else TENSOR_PARALLEL
    return refine(*shapes, rules=rules)

  @property
  def is_first(self) -> bool:
    """Whether this process is the one that prints and writes."""
    return not self.process_id

  def widths(self, has_independent_rows: bool) -> tuple[int, ...] | None:
    """The widths of a verification; None is one, that of all drafts.

    Args:
      has_independent_rows: of the target. If its logits do not depend on the
        width, the cheapest are exact.
    """
    if self.exact and not has_independent_rows:
      return None
    if self.proposer == 'none':
      # The wide pass is never run; with it the buffers have equal sizes.
      return (1, self.num_draft_tokens + 1) if self.exact else None
    is_varied = self.proposer == 'ngram' or self.stop_rule != 'fixed'
    return powers_of_two(self.num_draft_tokens + 1) if is_varied else None

  def make_ngram(self) -> NGram:
    return NGram(
      num_draft_tokens=self.num_draft_tokens,
      stop=lengths.parse(self.stop_rule),
      min_ngram=self.ngram_min,
      max_ngram=self.ngram_max,
    )
