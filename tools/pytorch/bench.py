#!/usr/bin/env python3
"""Times triad_nsa.attention on a GPU next to the peers that are installed, and to `triad bench attention` in the same run.

  bench.py [--triad PROGRAM] [--shapes BxTxHqxHkvxd,...] [--peers NAME,...] [--json FILE] [--readme] [--host]

A time is the median of CUDA events around 15 to 31 calls that are queued without waiting, each after a write that evicts the
L2 cache, as in `triad bench`. Inputs are bf16 slices of one projection's rows, as a model makes them, with keys and values
for each branch; forward keeps what backward needs. peak: extra memory of both passes. `indexed` is indexed_attention with 16
blocks of 128 tokens, next to `triad bench attention --branches sel`, whose backward computes what ours computes of the index's
loss in forward: compare the sums. `block_sparse` has the same lists, given. Peers: SDPA (dense attention) by cuDNN and by
FlashAttention; flash_nsa; fla (its own NSA: no window, compressed blocks that do not overlap).

--readme writes the table of times into README.md. Host time: of one forward call while the GPU is idle, next to a trivial
operator of torch.library.custom_op, at the first of --shapes and at a short one. --host times nothing else."""
import argparse
import functools
import gc
import json
import pathlib
import statistics
import subprocess
import time

import torch

import triad_nsa

ONE_SOFTMAX = dict(block=128, selected=16, init_blocks=0, local_blocks=1)
OURS = ("triad_nsa", "indexed", "block_sparse")
PEERS = (*OURS, "sdpa_cudnn", "sdpa_flash", "flash_nsa", "fla")


def inputs(B, T, Hq, Hkv, d):
    """q, three k, three v as slices of rows, a gate of factors, and dout."""
    torch.manual_seed(0)
    widths = [Hq * d] + 6 * [Hkv * d]
    rows = torch.randn(B, T, sum(widths), device="cuda", dtype=torch.bfloat16)
    views = [x.unflatten(-1, (-1, d)).detach().requires_grad_() for x in rows.split(widths, -1)]
    gate = torch.randn(B, T, Hkv, 3, device="cuda").softmax(-1).requires_grad_()
    return views[0], views[1:4], views[4:], gate


def call_of(peer, B, T, Hq, Hkv, d):
    """Returns the call and the tensors whose gradients backward computes."""
    q, k, v, gate = inputs(B, T, Hq, Hkv, d)
    if peer == "triad_nsa":
        return (lambda: triad_nsa.attention(q, k, v, gate)), [q, *k, *v, gate]
    if peer in OURS:
        q, k, v = q, k[1], v[1]
        iq, ik = (torch.randn(B, T, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (Hkv, 1))
        if peer == "indexed":
            return (lambda: triad_nsa.indexed_attention(q, k, v, iq, ik, **ONE_SOFTMAX)), [q, k, v, iq, ik]
        lists = triad_nsa.select(iq, ik, **ONE_SOFTMAX)
        return (lambda: triad_nsa.block_sparse_attention(q, k, v, lists, block=ONE_SOFTMAX["block"])), [q, k, v]
    q, k, v = (x.detach().contiguous().requires_grad_() for x in (q, k[1], v[1]))  # as the peers have one k and one v
    if peer.startswith("sdpa"):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = {"sdpa_cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa_flash": SDPBackend.FLASH_ATTENTION}[peer]
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]

        def dense():
            with sdpa_kernel([backend]):
                return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)

        return dense, [q, k, v]
    gates = torch.randn(B, T, Hq, 3, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    if peer == "flash_nsa":
        from flash_nsa import HFNSACore, NSAConfig

        core = HFNSACore(NSAConfig(num_heads=Hq, num_kv_heads=Hkv, head_dim=d)).to(q)
        flat = [x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v, gates)]
        bounds = (torch.arange(B + 1, device="cuda") * T).int()
        return (lambda: core(*flat, bounds)), flat
    from fla.ops.nsa.parallel import parallel_nsa

    factors = [gates[..., b].sigmoid().detach().contiguous().requires_grad_() for b in range(3)]
    return (lambda: parallel_nsa(q, k, v, *factors, block_counts=16, block_size=64, window_size=0)), [q, k, v, *factors]


class Clock:
    """Medians of CUDA events with a cold L2 cache."""

    def __init__(self):
        size = torch.cuda.get_device_properties(0).L2_cache_size
        self.other = torch.empty(2 * max(size, 1 << 20), dtype=torch.uint8, device="cuda")

    def __call__(self, work):
        for _ in range(3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
        torch.cuda.synchronize()
        runs = int(min(31, max(15, 1000 / begin.elapsed_time(end))))
        events = []
        for i in range(runs):
            self.other.fill_(i)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in events)


def measure(peer, shape, clock):
    gc.collect()
    torch.cuda.empty_cache()
    call, leaves = call_of(peer, *shape)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call()
    dout = [torch.randn_like(x) for x in out] if isinstance(out, tuple) else torch.randn_like(out)
    torch.autograd.grad(out, leaves, dout, retain_graph=True)
    peak = torch.cuda.max_memory_allocated() - before
    forward = clock(call)
    backward = clock(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))
    return {"forward_ms": forward, "backward_ms": backward, "peak_mib": peak / 2**20}


SHORT = "1x2048x12x2x64"  # a shape at which the host's time matters


def host_us(work, before, count=500):
    """The host's time of work() after before() has run and the GPU has finished: the longer the host has waited, the slower its first calls."""
    times = []
    for _ in range(count):
        before()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


@functools.cache
def trivial_operator():
    @torch.library.custom_op("triad_nsa_bench::trivial", mutates_args=())
    def trivial(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    trivial.register_fake(torch.empty_like)
    trivial.register_autograd(lambda ctx, g: g, setup_context=lambda ctx, inputs, output: None)
    return trivial


def host_times(shape, what):
    trivial = trivial_operator()
    call, leaves = call_of(what, *shape)
    result = {}
    for name, mode in (("training", torch.enable_grad), ("inference", torch.no_grad)):
        with mode():
            ours, theirs = host_us(call, before=call), host_us(lambda: trivial(leaves[0]), before=call)
        result[name] = {"forward_us": ours, "trivial_us": theirs, "beyond_us": ours - theirs}
    return result


def engine(program, shape, what):
    """The rows of `triad bench attention` of this shape, in ms; for `indexed` with one softmax."""
    more = [f"--{key}={value}" for key, value in zip(("l-sel", "n-sel", "init-blocks", "local-blocks"), ONE_SOFTMAX.values())]
    more = ["--branches=sel", *more] if what == "indexed" else []
    done = subprocess.run([program, "bench", "attention", "--shapes", "x".join(map(str, shape)), *more, "--json"], capture_output=True,
                          text=True)
    if done.returncode:
        return {"skipped": done.stderr.strip()[-200:]}
    found = {}
    for row in json.loads(done.stdout)["results"]:
        if row["op"] == "attention" and "skipped" in row:
            return {"skipped": row["skipped"]}
        if row["op"] == "attention":
            found[f"{row['pass']}_ms"] = row["us"] / 1e3
            found["peak_mib"] = row.get("peak_bytes", 0) / 2**20
    return found


def write_readme(rows):
    """The table of times between the marks of README.md."""
    path = pathlib.Path(__file__).parent / "README.md"
    before, rest = path.read_text().split("<!-- times", 1)
    after = rest.split("<!-- end -->", 1)[1]
    lines = [f"<!-- times: written by bench.py --readme; medians, {torch.cuda.get_device_name()}, torch {torch.__version__} -->",
             "| shape | what | forward, ms | backward, ms | extra memory, MiB |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {r['shape']} | {r['what']} | {r['forward_ms']:.3f} | {r['backward_ms']:.3f} | {r['peak_mib']:.0f} |"
              for r in rows if "forward_ms" in r]
    lines.append("")
    lines += [f"{r['what'].capitalize()}, {r['shape']}: a forward takes {r['forward_us']:.0f} microseconds, a trivial operator {r['trivial_us']:.0f}."
              for r in rows if "forward_us" in r]
    path.write_text(before + "\n".join(lines) + "\n<!-- end -->" + after)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triad", type=pathlib.Path)
    parser.add_argument("--shapes", default="1x8192x64x4x128,1x65536x64x4x128")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--readme", action="store_true")
    parser.add_argument("--host", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.py needs a GPU")
    unknown = set(options.peers.split(",")) - set(PEERS)
    if unknown:
        raise SystemExit(f"--peers: {', '.join(sorted(unknown))}: known are {', '.join(PEERS)}")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triad_nsa {triad_nsa.build_info()}")
    print(f"{'shape':>22} {'what':12} {'forward ms':>11} {'backward ms':>12} {'peak MiB':>9}", flush=True)
    clock, rows, shapes, peers = Clock(), [], options.shapes.split(","), options.peers.split(",")
    sizes = {text: tuple(map(int, text.split("x"))) for text in shapes}

    def add(text, what, timed):
        rows.append({"shape": text, "what": what, **timed})
        numbers = "skipped: " + timed["skipped"] if "skipped" in timed else \
            f"{timed['forward_ms']:11.3f} {timed['backward_ms']:12.3f} {timed['peak_mib']:9.0f}"
        print(f"{text:>22} {what:12} {numbers}", flush=True)
        return timed

    def try_to_measure(text, peer):
        try:
            return measure(peer, sizes[text], clock)
        except Exception as error:  # a peer that is missing, or that cannot take the shape
            return {"skipped": f"{type(error).__name__}: {error}".splitlines()[0][:100]}

    mine = [peer for peer in OURS if peer in peers]
    for text, what in [(text, what) for text in shapes for what in mine if not options.host]:
        ours = add(text, what, try_to_measure(text, what))
        if options.triad and what != "block_sparse":
            gc.collect()
            torch.cuda.empty_cache()
            theirs = add(text, "triad bench" + (", sel" if what == "indexed" else ""), engine(options.triad, sizes[text], what))
            if "forward_ms" in ours and "forward_ms" in theirs:
                both = [sum(times[f"{each}_ms"] for each in ("forward", "backward")) for times in (ours, theirs)]
                print(f"{'':>22} ratio        {ours['forward_ms'] / theirs['forward_ms']:11.3f} "
                      f"{ours['backward_ms'] / theirs['backward_ms']:12.3f}, of the sums {both[0] / both[1]:.3f}", flush=True)
    for text, what in [(text, what) for text in dict.fromkeys((shapes[0], SHORT)) for what in ("triad_nsa", "block_sparse")]:
        for name, row in host_times(tuple(map(int, text.split("x"))), what).items():
            rows.append({"shape": text, "what": f"host, {what}, {name}", **row})
            print(f"host time of a forward, {what}, {text}, {name}: {row['forward_us']:.1f} us, a trivial operator "
                  f"{row['trivial_us']:.1f} us, beyond it {row['beyond_us']:.1f} us", flush=True)
    if options.host:
        peers = []
    # Peers are last: an illegal access of one of them would end the others' measurements, too.
    for text in shapes:
        for peer in peers:
            if peer not in OURS:
                add(text, peer, try_to_measure(text, peer))
    rows.sort(key=lambda row: (*shapes, SHORT).index(row["shape"]))
    if options.readme:
        write_readme(rows)
    if options.json:
        options.json.write_text("".join(json.dumps({"gpu": torch.cuda.get_device_name(), **row}) + "\n" for row in rows))


if __name__ == "__main__":
    main()
