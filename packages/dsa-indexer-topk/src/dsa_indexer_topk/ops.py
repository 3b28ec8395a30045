"""The public function and its operator: argument checks, schema, fake, and which implementation runs."""

import torch
from hopper_kernels import dispatch
from torch import Tensor

from dsa_indexer_topk import arguments, launch, reference


def dsv41_index_topk(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    ks: Tensor,
    ke: Tensor,
    topk: int,
    candidates: Tensor | None,
    emit_candidates: bool,
    max_entries_per_doc: int,
    block_size: int,
    topk_blocks: int,
) -> tuple[Tensor, Tensor]:
    """The best entries of each query by the scores of DeepSeek-V4.1's Lightning Indexer, and the best blocks of them.

    q: (S_q, H, D) bf16, index queries; H is 16, 32 or 64, D 64 or 128.
    k: (S_k, D) bf16, index keys of all entries, shared by the heads. S_q and S_k may be 0.
    w: (S_q, H) bf16 or fp32, weights of the heads, of either sign.
    ks, ke: (S_q,) int32 or int64. Row t reads the entries ks[t] <= e < min(ke[t], S_k); ks[t] is the first entry of
        its document. Rows may come in any order, of any documents. A row with ke <= ks reads nothing; bounds outside of
        the keys, which no caller should give, let a row read nothing else.
    topk: picks of a row, 0 to `MAX_TOPK`.
    candidates: None, or (S_q, C) int32 or int64, any C: the blocks that a row may pick from. Block b of row t holds the
        entries ks[t] + b * block_size and on. A row names a block once; -1 anywhere, any number of times, is no block.
        A block without readable entries adds none.
    emit_candidates: whether to return blocks. They are ranked by all readable entries, whatever `candidates` says.
    max_entries_per_doc: at least ke - ks in every row; it may be larger, and exceed S_k.
    block_size: entries of a block: 1, 2, 4, 8 or 16.
    topk_blocks: blocks of a row that are returned, at least 0.
    All tensors on one device, with any strides. None is modified.

    Each row of q (a token's head) and of k is rounded to e4m3 with one power-of-two scale, 2^ceil(log2(max(amax, 1e-10)
    / 448)), the recipe `index_rows` of `hopper_kernels.fp8`. With q^, k^ the bytes and s_q, s_k the scales,
        score[t, e] = s_k[e] sum_h max(q^[t, h] . k^[e], 0) w[t, h] s_q[t, h]
    `reference.index_topk` is the exact definition.

    Returns
        picks   (S_q, topk) int64: the entries with the topk best scores, ascending, then -1 where there are fewer
        blocks  (S_q, topk_blocks) int32: the topk_blocks blocks with the best entries, ascending, then -1 where there
                are fewer. The block of a row's last entry comes before all others, and block 0 in a row without
                entries. (0, 0) without emit_candidates.
    Equal scores go to the smaller index, -0 being equal to 0. A score that is NaN makes its entry unreadable. NaN and
    Inf in q or w stay in their row, those in k in their entry.

    Results are new tensors and never require grad. Bitwise repeatable, so that a checkpoint recomputes the same picks;
    a row's results do not depend on the other rows. Autocast changes nothing. Nothing waits for the GPU.

    Raises TypeError or ValueError that names the argument before anything is launched, and
    `hopper_kernels.KernelUnavailable` on a CUDA device that is not SM90 or with a Triton or a PyTorch that the kernels
    cannot be built with. CPU tensors, and CUDA tensors inside `hopper_kernels.reference()`, get the definition. Rows
    with ke - ks above max_entries_per_doc are a ValueError on a CPU and an assertion of the device on a GPU, after
    which its CUDA context is unusable. So are rows that name a candidate block twice; the kernels notice one that would
    be picked from twice, and any other changes nothing.

    Source: the indexer of deepseek-ai/DeepSeek-V4.1-Flash, in the form and with the FP8 recipe of
    PrimeIntellect-ai/prime-rl, whose function has this name and these arguments. DeepSeek's own quantises to MXFP4, and
    multiplies the weights by a positive constant, which changes no pick.
    """
    operands = (q, k, w, ks, ke, topk, candidates, emit_candidates, max_entries_per_doc, block_size, topk_blocks)
    arguments.index_topk(*operands)
    return torch.ops.dsa_indexer_topk.dsv41_index_topk(*operands)


_library = torch.library.Library("dsa_indexer_topk", "DEF")
# SymInt: numbers that change from batch to batch must not be compiled in.
_library.define(
    "dsv41_index_topk(Tensor q, Tensor k, Tensor w, Tensor ks, Tensor ke, SymInt topk, Tensor? candidates,"
    " bool emit_candidates, SymInt max_entries_per_doc, int block_size, SymInt topk_blocks)"
    " -> (Tensor picks, Tensor candidate_blocks)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _index_topk(
    q, k, w, ks, ke, topk, candidates, emit_candidates, max_entries_per_doc, block_size, topk_blocks
) -> tuple[Tensor, Tensor]:
    operands = (q, k, w, ks, ke, topk, candidates, emit_candidates, max_entries_per_doc, block_size, topk_blocks)
    arguments.index_topk(*operands)
    kernel = dispatch.use_kernel("dsa_indexer_topk", q, "dsv41_index_topk")
    # Here and not in the public function: a compiled graph cannot look into a tensor, and must not leave this out.
    arguments.entries_per_doc(ks, ke, max_entries_per_doc)
    with torch.no_grad():  # below, autograd is not asked (see the fallthrough), so it would look into what runs here
        if kernel:
            return launch.index_topk(*operands)
        if candidates is not None:
            arguments.unique_candidates(candidates)
        return reference.index_topk(*operands)


for _key in ("CPU", "CUDA"):
    _library.impl("dsv41_index_topk", _index_topk, _key)

# No derivative: results are integers.
_library.impl("dsv41_index_topk", torch.library.fallthrough_kernel, "Autograd")


@torch.library.register_fake("dsa_indexer_topk::dsv41_index_topk", lib=_library)
def _(q, k, w, ks, ke, topk, candidates, emit_candidates, max_entries_per_doc, block_size, topk_blocks):
    arguments.index_topk(
        q, k, w, ks, ke, topk, candidates, emit_candidates, max_entries_per_doc, block_size, topk_blocks
    )
    blocks = (q.shape[0], topk_blocks) if emit_candidates else (0, 0)
    return q.new_empty((q.shape[0], topk), dtype=torch.int64), q.new_empty(blocks, dtype=torch.int32)
