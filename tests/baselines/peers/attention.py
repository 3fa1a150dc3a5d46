#!/usr/bin/env python3
"""Times attention by other programs on one GPU, forward and backward, at the shapes of kernels/README.md.

    tests/baselines/peers/attention.py [--shapes 1x65536x12x2x64,...] [--peers triad,cudnn,flash_nsa,...] [--page FILE]

A shape is BxTxHqxHkvxd: sequences, tokens, query heads, key heads, head width. Inputs are bf16 and normally distributed
("randn"). NSA has Triad's sizes: compression 32/16, 16 blocks of 64 (the first and the last two of them fixed), window
512; fla and flash_msa have their own, see README.md. Prints rows of rows.jsonl; what a peer lacks is named on stderr.
--page also writes them as a page of tables, a table for each shape.
"""
import argparse
import dataclasses
import gc
import importlib.metadata
import pathlib

import flash_attn_stand_in
from measure import Clock, Failures, Missing, Rows, add_options, need, need_torch

SHAPES = "8x2048x12x2x64,3x6000x12x2x64,1x65536x12x2x64,1x8192x64x4x128,1x65536x64x4x128"
# NSA's sizes: a compression block and its stride, a selection block, list entries (fixed ones: the first block, and the
# last blocks), the window.
BLOCK, STRIDE, SELECTED_BLOCK, ENTRIES, FIRST, LAST, WINDOW = 32, 16, 64, 16, 1, 2, 512
MSA_BLOCK, MSA_HEAD = 128, 128  # flash_msa has one block and one head width


@dataclasses.dataclass(frozen=True)
class Shape:
    sequences: int
    tokens: int
    heads: int
    groups: int
    width: int

    @classmethod
    def parse(cls, text):
        try:
            shape = cls(*map(int, text.split("x")))
        except (TypeError, ValueError):
            raise argparse.ArgumentTypeError(f"{text!r} is not a shape BxTxHqxHkvxd") from None
        if min(dataclasses.astuple(shape)) < 1 or shape.heads % shape.groups != 0:
            raise argparse.ArgumentTypeError(f"{text!r}: sizes begin at 1, and Hq is a multiple of Hkv")
        return shape

    def __str__(self):
        return "x".join(map(str, dataclasses.astuple(self)))


@dataclasses.dataclass
class Problem:
    """What a peer computes: `call` returns the outputs, from whose gradients those of `leaves` follow."""
    call: object
    leaves: list
    keeps_graph: bool = True  # backward can be repeated on one forward's graph


class Inputs:
    """Random q [B,T,Hq,d], k and v [B,T,Hkv,d], and the logits of NSA's gates [B,T,Hq,3]."""

    def __init__(self, torch, shape, device):
        self.torch, self.shape, self.device = torch, shape, device
        torch.manual_seed(0)
        self.q, self.gates = self.normal(shape.heads, shape.width), self.normal(shape.heads, 3)
        self.k, self.v = self.normal(shape.groups, shape.width), self.normal(shape.groups, shape.width)

    def normal(self, *row):
        return self.torch.randn(self.shape.sequences, self.shape.tokens, *row, device=self.device,
                                dtype=self.torch.bfloat16, requires_grad=True)

    def bounds(self, tokens):
        """The first token of each sequence in a tensor of all tokens, and their number."""
        return self.torch.arange(self.shape.sequences + 1, device="cuda", dtype=self.torch.int32) * tokens

    def all_tokens(self):
        return [tensor.flatten(0, 1) for tensor in (self.q, self.k, self.v, self.gates)]


def dense(backend):
    """Causal attention by PyTorch's scaled_dot_product_attention."""

    def problem(torch, inputs):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        kernel = getattr(SDPBackend, backend)
        q, k, v = inputs.q, inputs.k, inputs.v

        def call():
            with sdpa_kernel([kernel]):
                return torch.nn.functional.scaled_dot_product_attention(
                    q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True)
        return Problem(call, [q, k, v])
    return problem


def flash_nsa_core(torch, heads, groups, width):
    """The attention of flash_nsa as a module: core(q, k, v, gates, bounds)."""
    flash_attn_stand_in.install(torch)
    library = need("flash_nsa", "github.com/mdy666/Scalable-Flash-Native-Sparse-Attention, its folder on PYTHONPATH")
    sizes = library.NSAConfig(num_heads=heads, num_kv_heads=groups, head_dim=width, kernel_size=BLOCK, stride=STRIDE,
                              block_size=SELECTED_BLOCK, top_n=ENTRIES, num_init_blocks=FIRST, num_local_blocks=LAST,
                              window_size=WINDOW)
    return library.HFNSACore(sizes)


def flash_nsa(torch, inputs):
    shape = inputs.shape
    core = flash_nsa_core(torch, shape.heads, shape.groups, shape.width).to("cuda", torch.bfloat16)
    bounds = inputs.bounds(shape.tokens)
    return Problem(lambda: core(*inputs.all_tokens(), bounds), [inputs.q, inputs.k, inputs.v, inputs.gates])


def fsa(selects_by):
    """NSA as Flash-Sparse-Attention composes it. selects_by: the module and function of its selected branch."""

    def problem(torch, inputs):
        flash_attn_stand_in.install(torch)
        source = "github.com/Relaxed-System-Lab/Flash-Sparse-Attention, its folder on PYTHONPATH"
        compressed = need("nsa_ref.ops", source).compressed_attention
        selected = getattr(need(selects_by[0], source), selects_by[1])
        window = need("flash_attn", "pip install flash-attn").flash_attn_varlen_func
        shape = inputs.shape
        blocks = (shape.tokens - BLOCK) // STRIDE + 1
        bounds, block_bounds = inputs.bounds(shape.tokens), inputs.bounds(blocks)

        def means(x):  # [B,T,H,d]: of BLOCK tokens each, STRIDE apart
            return x.unfold(1, BLOCK, STRIDE).mean(-1).flatten(0, 1)

        def call():
            q, k, v, gates = inputs.all_tokens()
            out, lists = compressed(q, means(inputs.k), means(inputs.v), BLOCK, STRIDE, SELECTED_BLOCK, ENTRIES, bounds,
                                    block_bounds, shape.tokens, blocks, None, FIRST, LAST)
            branches = [out, selected(q, k, v, lists, SELECTED_BLOCK, bounds, None),
                        window(q, k, v, bounds, bounds, shape.tokens, shape.tokens, causal=True,
                               window_size=(WINDOW - 1, -1))]
            return sum(gate * branch for gate, branch in zip(gates.sigmoid().split(1, dim=-1), branches))
        return Problem(call, [inputs.q, inputs.k, inputs.v, inputs.gates])
    return problem


def fla(torch, inputs):
    """Without a window. Compression blocks do not overlap and are as long as selection blocks."""
    shape = inputs.shape
    if shape.heads % (16 * shape.groups) != 0:
        raise Missing(f"fla has groups of 16 heads and multiples of it; {shape} has {shape.heads // shape.groups}")
    flash_attn_stand_in.install(torch)
    attend = need("fla.ops.nsa.parallel", "pip install flash-linear-attention").parallel_nsa

    def call():
        gates = dict(zip(("g_cmp", "g_slc", "g_swa"), (g.contiguous() for g in inputs.gates.sigmoid().unbind(-1))))
        return attend(inputs.q, inputs.k, inputs.v, **gates, block_counts=ENTRIES, block_size=SELECTED_BLOCK,
                      window_size=0)
    return Problem(call, [inputs.q, inputs.k, inputs.v])


def flash_msa(torch, inputs):
    """MSA, which chooses blocks of 128 by an index of its own: the attention and the loss of the index."""
    shape = inputs.shape
    if shape.width != MSA_HEAD:
        raise Missing(f"flash_msa has heads of {MSA_HEAD}; {shape} has {shape.width}")
    attend = need("flash_msa", "pip install flash-msa (README.md has its other packages)").flash_msa_func

    def leaf(heads):
        return torch.randn(shape.sequences, heads, shape.tokens, shape.width, device="cuda", dtype=torch.bfloat16,
                           requires_grad=True)
    index_q, index_k, q, k, v = (leaf(heads) for heads in (shape.groups, 1, shape.heads, shape.groups, shape.groups))
    return Problem(lambda: attend(index_q, index_k, q, k, v, ENTRIES * MSA_BLOCK, shape.width ** -0.5),
                   [index_q, index_k, q, k, v], keeps_graph=False)


def triad_nsa():
    return need("triad_nsa", "pip install ./tools/pytorch")


def triad(torch, inputs):
    """NSA by Triad's package for PyTorch, with a gate for each group."""
    gates = inputs.normal(inputs.shape.groups, 3)
    attend = triad_nsa().attention
    return Problem(lambda: attend(inputs.q, inputs.k, inputs.v, gates.sigmoid()), [inputs.q, inputs.k, inputs.v, gates])


def triad_index(width):
    """One softmax over the blocks that an index of this width selects, with the loss of the index."""

    def problem(torch, inputs):
        index_q, index_k = inputs.normal(inputs.shape.groups, width), inputs.normal(1, width)
        attend = triad_nsa().indexed_attention
        return Problem(lambda: attend(inputs.q, inputs.k, inputs.v, index_q, index_k, block=MSA_BLOCK, selected=ENTRIES,
                                      init_blocks=0, local_blocks=1),
                       [inputs.q, inputs.k, inputs.v, index_q, index_k])
    return problem


def random_lists(torch, inputs, block):
    """Each token's own block and random blocks before it, ascending, -1 after the last: [B,T,Hkv,ENTRIES]."""
    shape, device = inputs.shape, inputs.device
    own = torch.arange(shape.tokens, device=device) // block
    blocks = int(own[-1]) + 1
    lists = torch.full((shape.sequences, shape.tokens, shape.groups, ENTRIES), -1, dtype=torch.int32, device=device)
    for tokens in torch.arange(shape.tokens, device=device).split(4096):
        rank = torch.rand(shape.sequences, len(tokens), shape.groups, blocks, device=device)
        number, last = torch.arange(blocks, device=device), own[tokens][:, None, None]
        rank = rank.masked_fill(number > last, -1).masked_fill(number == last, 2)
        best = rank.topk(min(ENTRIES, blocks), dim=-1)
        chosen = best.indices.masked_fill(best.values < 0, blocks).sort(dim=-1).values
        lists[:, tokens, :, :chosen.shape[-1]] = chosen.masked_fill(chosen == blocks, -1).int()
    return lists


def triad_lists(block):
    """One softmax over the blocks of lists that come from elsewhere."""

    def problem(torch, inputs):
        lists = random_lists(torch, inputs, block)
        attend = triad_nsa().block_sparse_attention
        return Problem(lambda: attend(inputs.q, inputs.k, inputs.v, lists, block=block), [inputs.q, inputs.k, inputs.v])
    return problem


@dataclasses.dataclass(frozen=True)
class Peer:
    program: str  # as in rows.jsonl
    op: str
    problem: object
    package: str = ""  # whose version a row has


PEERS = {
    "triad": Peer("Triad", "NSA", triad, "triad-nsa"),
    "triad_index_64": Peer("Triad", "one softmax, index of 64", triad_index(64), "triad-nsa"),
    "triad_index_128": Peer("Triad", "one softmax, index of 128", triad_index(128), "triad-nsa"),
    "triad_lists_64": Peer("Triad", "given lists, blocks of 64", triad_lists(64), "triad-nsa"),
    "triad_lists_128": Peer("Triad", "given lists, blocks of 128", triad_lists(128), "triad-nsa"),
    "cudnn": Peer("cuDNN", "dense", dense("CUDNN_ATTENTION")),
    "flash": Peer("FlashAttention-2", "dense", dense("FLASH_ATTENTION")),
    "flash_nsa": Peer("flash_nsa", "attention", flash_nsa, "flash-nsa"),
    "fsa": Peer("FSA", "attention", fsa(("fsa.ops", "FSA_topk_sparse_attention")), "fsa"),
    "nsa_ref": Peer("nsa_ref", "attention", fsa(("nsa_ref.ops", "topk_sparse_attention")), "fsa"),
    "fla": Peer("fla", "attention without window", fla, "flash-linear-attention"),
    "flash_msa": Peer("flash_msa", "MSA", flash_msa, "flash-msa"),
}


def version(peer, rows):
    if not peer.package:
        return f"{peer.program} by {rows.torch}"
    try:
        return f"{peer.package} {importlib.metadata.version(peer.package)} with {rows.torch}"
    except importlib.metadata.PackageNotFoundError:
        return f"{peer.package} (a checkout) with {rows.torch}"


def measure(torch, clock, rows, peer, shape):
    gc.collect()
    torch.cuda.empty_cache()
    problem = peer.problem(torch, Inputs(torch, shape, "cuda" if clock.is_cuda else "cpu"))

    def forward():
        outputs = problem.call()
        return outputs if isinstance(outputs, (tuple, list)) else (outputs,)

    def backward(outputs, keeps_graph):
        torch.autograd.grad(outputs, problem.leaves, grads, retain_graph=keeps_graph)
    outputs = forward()
    grads = [torch.randn_like(outputs[0]), *map(torch.ones_like, outputs[1:])]  # after the output only losses
    backward(outputs, keeps_graph=False)
    del outputs
    peak = {}
    if clock.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        backward(forward(), keeps_graph=False)
        torch.cuda.synchronize()
        peak = {"peak_gb": round((torch.cuda.max_memory_allocated() - before) / 1e9, 3)}
    forward_ms = clock.median_ms(forward)
    if problem.keeps_graph:
        outputs = forward()
        backward_ms = clock.median_ms(lambda: backward(outputs, keeps_graph=True))
    else:
        backward_ms = clock.median_ms(lambda: backward(forward(), keeps_graph=False)) - forward_ms
    said, case = version(peer, rows), f"{shape} randn"
    rows.add(peer.program, peer.op, case, "forward", {"ms": round(forward_ms, 4)}, version=said)
    rows.add(peer.program, peer.op, case, "backward", {"ms": round(backward_ms, 4), **peak}, version=said)


def page(rows):
    """The measurements as Markdown: for each shape a table of programs."""
    first = rows.kept[0]
    lines = ["# Attention by shape: Triad and other programs", "",
             f"{first['gpu']}, {first['date']}, commit {first['commit']}, bf16, random inputs; medians in ms, with what "
             "a call needs beyond its inputs.", "", "```sh", rows.command, "```"]
    for case in dict.fromkeys(row["case"] for row in rows.kept):
        lines += ["", f"## {case.removesuffix(' randn')}", "", "| program | attention | forward | backward | both | GB |",
                  "| --- | --- | --- | --- | --- | --- |"]
        of_case = [row for row in rows.kept if row["case"] == case]
        for forward, backward in zip(of_case[::2], of_case[1::2]):
            lines.append(f"| {forward['source'].split(' with ')[0].split('; ')[0]} | {forward['op']} | {forward['ms']:.3g} "
                         f"| {backward['ms']:.3g} | {forward['ms'] + backward['ms']:.3g} | {backward.get('peak_gb', '')} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, type=lambda text: [Shape.parse(s) for s in text.split(",")],
                        help=f"shapes BxTxHqxHkvxd ({SHAPES})")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"some of {', '.join(PEERS)} (all)")
    parser.add_argument("--page", type=pathlib.Path, help="also write the measurements as Markdown to this file")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"],
                        help="cpu: to try the script; only Triad's functions and dense attention run there (cuda)")
    add_options(parser, seconds=0.2)
    args = parser.parse_args()
    peers = args.peers.split(",")
    unknown = [name for name in peers if name not in PEERS]
    if unknown:
        parser.error(f"--peers: {unknown[0]!r} is none of {', '.join(PEERS)}")
    if args.dry_run:
        for shape in args.shapes:
            for name in peers:
                print(f"{PEERS[name].program}, {PEERS[name].op}, {shape} randn: forward, backward")
        return
    torch = need_torch(args.device)
    clock, rows, failures = Clock(torch, args.device, args.seconds), Rows(torch, args.device), Failures()
    for shape in args.shapes:
        for name in peers:
            try:
                measure(torch, clock, rows, PEERS[name], shape)
            except Exception as error:  # whatever a peer throws: the others are still measured
                failures.add(f"{name}, {shape}", error)
    if args.page and rows.kept:
        args.page.write_text(page(rows))
    failures.leave()


if __name__ == "__main__":
    main()
