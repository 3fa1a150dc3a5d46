"""triad_nsa on a GPU: bf16 and f32 against the dense reference in f64, streams, CUDA graphs, compile, memory. Skipped without one.

bf16 is held to the error of a bf16 PyTorch implementation: at most twice the error that the dense reference itself has
when it runs in bf16 with the same selection lists."""
import unittest

import torch

import triad_nsa
from problem import SMALL, Problem, error, worst

DEFAULTS = dict(compress=(32, 16), block=64, selected=16, window=512)
LONG = [0, 781, 2048]
CASES = {
    "apart": dict(T=700, dk=64, dv=64, Hq=12, Hkv=2, **DEFAULTS),
    "shared, gate by head": dict(T=700, dk=64, dv=64, Hq=8, Hkv=2, shared=True, gate="head", **DEFAULTS),
    "no gate": dict(T=600, dk=128, dv=128, Hq=8, Hkv=2, gate=None, **DEFAULTS),
    "learned": dict(T=600, dk=64, dv=64, Hq=8, Hkv=2, learned=True, **DEFAULTS),
    "learned, shared": dict(T=600, dk=128, dv=128, Hq=8, Hkv=2, learned=True, shared=True, **DEFAULTS),
    "packed [0, 3, 33, 70]": dict(bounds=[0, 3, 33, 70], dk=64, dv=64),
    "packed [0, 781, 2048]": dict(bounds=LONG, dk=64, dv=64, Hq=4, Hkv=2, **DEFAULTS),
    "packed, learned, shared": dict(bounds=LONG, dk=128, dv=128, Hq=4, Hkv=1, learned=True, shared=True, gate="head", **DEFAULTS),
    "(64, 64)": dict(B=1, T=1500, dk=64, dv=64, Hq=16, Hkv=1, **DEFAULTS),
    "(128, 128)": dict(B=1, T=1500, dk=128, dv=128, Hq=16, Hkv=1, **DEFAULTS),
    "(192, 128)": dict(B=1, T=1000, dk=192, dv=128, Hq=8, Hkv=1, **DEFAULTS),
    "odd widths": dict(T=301, dk=40, dv=24, Hq=3, Hkv=1),
    "odd tokens": dict(B=3, T=333, dk=64, dv=64, Hq=3, Hkv=1, **DEFAULTS),
    "shorter than a block": dict(T=5, dk=64, dv=64, **DEFAULTS),
    **{f"G = {G}": dict(B=1, T=400, dk=64, dv=64, Hq=2 * G, Hkv=2, **DEFAULTS) for G in (1, 2, 4, 6, 8, 16)},
    **{f"G = {G}, gate by head": dict(B=1, T=400, dk=128, dv=128, Hq=G, Hkv=1, gate="head", **DEFAULTS) for G in (1, 6, 16)},
}


@unittest.skipUnless(torch.cuda.is_available(), "there is no GPU")
class Gpu(unittest.TestCase):
    def problem(self, dtype=torch.bfloat16, **case):
        return Problem(device="cuda", dtype=dtype, **case)

    def test_against_dense_reference(self):
        largest = {}
        for name, case in CASES.items():
            for dtype in (torch.bfloat16, torch.float32):
                with self.subTest(f"{name}, {dtype}"):
                    p = self.problem(dtype, **case)
                    out, parts = p.run(return_parts=True)
                    mine = p.gradients(out)
                    (expected, _, _, _), gradients = p.wide().reference(parts.block_index)
                    # The bf16 implementation: the reference with bf16 operands, and products and softmax in bf16.
                    (narrow, *_), narrow_gradients = p.reference(parts.block_index)
                    floor = 1e-4 if dtype == torch.bfloat16 else 1e-5
                    for what, a, b, c in [("out", out, expected, narrow)] + [
                            (f"gradient {i}", *each) for i, each in enumerate(zip(mine, gradients, narrow_gradients, strict=True))]:
                        least = 1e-3 * max(x.norm().item() for x in gradients) if what != "out" else 1e-30
                        ours, theirs = error(a, b, least), error(c, b, least)
                        largest[dtype] = max(largest.get(dtype, (0,)), (ours / max(theirs, floor), name, what, ours, theirs))
                        self.assertTrue(a.isfinite().all().item(), f"{what} is not finite")
                        self.assertLessEqual(ours, 2 * max(theirs, floor), f"{what}: PyTorch's own error is {theirs}")
        for dtype, (ratio, name, what, ours, theirs) in largest.items():
            print(f"{dtype}: at most {ratio:.2f} times PyTorch's error: {name}, {what}, {ours:.1e} and {theirs:.1e}", flush=True)

    def test_lists(self):
        """Selection lists against those of the reference in f64 on the same bf16 inputs: near ties may differ."""
        p = self.problem(B=1, T=2048, dk=128, dv=128, Hq=16, Hkv=2, learned=True, **{**DEFAULTS, "selected": 6})
        _, parts = p.run(return_parts=True)
        (_, _, _, lists), _ = p.wide().reference()
        same = (parts.block_index == lists).all(-1).float().mean().item()
        self.assertGreater(same, 0.999)

    def test_matches_cpu(self):
        for case in (dict(), dict(bounds=[0, 3, 33, 70], learned=True), dict(shared=True, gate="head")):
            there = Problem(dtype=torch.float32, **case)
            here = self.problem(torch.float32, **case)
            self.assertLessEqual(error(here.run().cpu(), there.run()), 1e-5)

    def test_same_bits(self):
        for case in (dict(B=1, T=3000, dk=64, dv=64, Hq=12, Hkv=2), dict(bounds=LONG, dk=128, dv=128, Hq=8, Hkv=1, shared=True)):
            p = self.problem(**{**case, **DEFAULTS})
            first, second = (p.run() for _ in range(2))
            self.assertTrue(torch.equal(first, second))
            for a, b in zip(p.gradients(first), p.gradients(second)):
                self.assertTrue(torch.equal(a, b))
            self.assertTrue(torch.equal(p.run(return_parts=True)[0], first))  # through the operator

    def test_layouts(self):
        p = self.problem(T=300, dk=64, dv=64, Hq=8, Hkv=2)
        expected = p.run()
        turned = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (p.q, *p.k, *p.v)]
        self.assertTrue(torch.equal(triad_nsa.attention(turned[0], turned[1:4], turned[4:], p.gate, **SMALL), expected))
        last = [x.detach().transpose(2, 3).contiguous().transpose(2, 3) for x in (p.q, *p.k, *p.v)]
        self.assertTrue(torch.equal(triad_nsa.attention(last[0], last[1:4], last[4:], p.gate, **SMALL), expected))
        odd = [torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x.detach()) for x in (p.q, *p.k, *p.v)]
        self.assertLessEqual(error(triad_nsa.attention(odd[0], odd[1:4], odd[4:], p.gate, **SMALL), expected), 1e-2)

    def test_streams(self):
        problems = [self.problem(seed=i, B=1, T=1024, dk=64, dv=64, Hq=12, Hkv=2, **DEFAULTS) for i in range(4)]
        expected = [p.gradients(p.run()) for p in problems]
        streams = [torch.cuda.Stream() for _ in problems]
        torch.cuda.synchronize()
        found = [[] for _ in problems]
        for _ in range(5):
            for p, stream, results in zip(problems, streams, found):
                with torch.cuda.stream(stream):
                    results.append(p.gradients(p.run()))
        torch.cuda.synchronize()
        for results, want in zip(found, expected):
            for got in results:
                self.assertTrue(all(torch.equal(a, b) for a, b in zip(got, want)))

    def test_cuda_graph(self):
        for case in (dict(B=1, T=1024, shared=True), dict(bounds=LONG, learned=True)):
            p = self.problem(dk=64, dv=64, Hq=12, Hkv=2, **case, **DEFAULTS)
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(2):
                    p.gradients(p.run())
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                out = p.run()
                gradients = p.gradients(out)
            other = self.problem(dk=64, dv=64, Hq=12, Hkv=2, seed=1, **case, **DEFAULTS)
            with torch.no_grad():
                for a, b in zip([*p.leaves(), p.dout], [*other.leaves(), other.dout]):
                    a.copy_(b)
                if p.cu_seqlens is not None and p.k_cmp is None:
                    p.cu_seqlens.copy_(torch.tensor([0, 900, 2048]))
            graph.replay()
            want = other.run()
            self.assertTrue(torch.equal(out, want))
            for a, b in zip(gradients, other.gradients(want)):
                self.assertTrue(torch.equal(a, b))

    def test_compile(self):
        """By inductor: a layer with its projections, and with CUDA graphs."""
        torch.manual_seed(0)
        layer = triad_nsa.NSAAttention(256, 8, 2, 64, **DEFAULTS, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(2, 700, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        expected = layer(x)
        want, = torch.autograd.grad(expected.float().square().sum(), [x])
        for mode in ("default", "reduce-overhead"):
            with self.subTest(mode):
                torch._dynamo.reset()
                compiled = torch.compile(layer, fullgraph=True, mode=mode)
                for _ in range(3):
                    out = compiled(x).clone()
                    got, = torch.autograd.grad(out.float().square().sum(), [x])
                self.assertLessEqual(error(out, expected), 2e-2)
                self.assertLessEqual(error(got, want), 4e-2)

    def test_autocast_and_checkpoint(self):
        from torch.utils.checkpoint import checkpoint

        layer = triad_nsa.NSAAttention(256, 8, 2, 64, **DEFAULTS, device="cuda")
        x = torch.randn(2, 300, 256, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            out, again = layer(x), checkpoint(layer, x, use_reentrant=False)
        self.assertTrue(torch.equal(out, again))
        first, second = (torch.autograd.grad(y.float().sum(), [x])[0] for y in (out, again))
        self.assertTrue(torch.equal(first, second))
        self.assertLessEqual(error(out, layer(x)), 3e-2)

    def test_refused(self):
        p = self.problem(dk=64, dv=64)
        with self.assertRaisesRegex(ValueError, r"k\[1\] is on cpu, and q is on cuda:0"):
            triad_nsa.attention(p.q, [p.k[0], p.k[1].cpu(), p.k[2]], p.v, p.gate, **SMALL)
        with self.assertRaisesRegex((ValueError, RuntimeError), "f64|float64"):
            triad_nsa.attention(p.q.double(), p.k[0].double(), p.v[0].double(), **SMALL)
        packed = self.problem(bounds=[0, 33, 70], dk=64, dv=64)
        with self.assertRaisesRegex(ValueError, r"cu_seqlens\[1\] is 71"):
            packed.run(cu_seqlens=torch.tensor([0, 71, 70], dtype=torch.int32, device="cuda"))

    def test_decode(self):
        p = self.problem(B=3, T=2000, dk=128, dv=128, Hq=8, Hkv=2, **DEFAULTS)
        k, v = ([x.detach() for x in each] for each in (p.k, p.v))
        lengths = torch.full((3,), 2000, device="cuda")
        expected = p.run()[:, -1]
        self.assertLessEqual(error(triad_nsa.decode(p.q[:, -1], k, v, p.gate[:, -1], lengths=lengths, **DEFAULTS), expected), 2e-2)

    def test_negative_gates(self):
        p = self.problem(B=1, T=300, dk=64, dv=64)
        p.gate = (p.gate.detach() - 0.5).requires_grad_()
        triad_nsa.set_signed_gates(True)
        try:
            out, parts = p.run(return_parts=True)
            mine = p.gradients(out)
        finally:
            triad_nsa.set_signed_gates(False)
        (expected, *_), gradients = p.wide().reference(parts.block_index)
        self.assertLessEqual(error(out, expected), 2e-2)
        self.assertLessEqual(worst(mine, gradients), 3e-2)
