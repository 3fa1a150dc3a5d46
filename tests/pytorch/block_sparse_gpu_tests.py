"""Block-sparse attention and its index on a GPU: bf16 and f32 against dense masks in f64, CUDA graphs, compile. Skipped
without one. As in gpu_tests.py, bf16 is held to twice the error of the dense masks themselves in bf16."""
import unittest

import torch

import dense_reference
import triad_nsa
from listed_problem import Listed
from problem import Problem, error

LONG = [0, 781, 2048]
CASES = {
    **{f"G = {G}, blocks of {block}, heads of {width}": dict(B=1, T=700, dk=width, dv=width, Hq=2 * G, Hkv=2, n=4, block=block, di=64)
       for G in (1, 2, 4, 6, 8, 16) for block in (64, 128) for width in (64, 128)},
    "dense, heads of 64": dict(T=700, dk=64, dv=64, Hq=12, Hkv=2, di=64, dense=True),
    "dense, packed": dict(bounds=LONG, dk=128, dv=128, Hq=4, Hkv=1, di=64, dense=True),
    "packed": dict(bounds=LONG, dk=64, dv=64, Hq=8, Hkv=2, n=5, block=64, di=64),
    "packed, blocks of 128": dict(bounds=LONG, dk=128, dv=128, Hq=16, Hkv=1, n=5, block=128, di=128),
    "small blocks, odd widths": dict(T=301, dk=40, dv=24, Hq=3, Hkv=1, n=5, block=16, di=6),
    "fewer tokens than a block": dict(T=5, dk=64, dv=64, block=64),
    "scale": dict(T=300, dk=64, dv=64, Hq=8, Hkv=2, block=64, scale=0.1, di=32),
}
OPTIONS = dict(selected=4, init_blocks=1, local_blocks=1)


@unittest.skipUnless(torch.cuda.is_available(), "there is no GPU")
class BlockSparseGpu(unittest.TestCase):
    def problem(self, dtype=torch.bfloat16, **case):
        return Listed(device="cuda", dtype=dtype, **case)

    def compare(self, dtype, mine, wide, narrow):
        floor = 1e-4 if dtype == torch.bfloat16 else 1e-5
        least = 1e-3 * max(x.double().norm().item() for x in wide)
        for i, (a, b, c) in enumerate(zip(mine, wide, narrow, strict=True)):
            self.assertTrue(a.isfinite().all().item(), f"{i} is not finite")
            self.assertLessEqual(error(a, b, least), 2 * max(error(c, b, least), floor), f"{i}: PyTorch's error is {error(c, b, least)}")

    def test_against_dense_masks(self):
        for name, case in CASES.items():
            for dtype in (torch.bfloat16, torch.float32):
                with self.subTest(f"{name}, {dtype}"):
                    p = self.problem(dtype, **case)
                    if p.lists is None:
                        o, _, lse = p.taught()
                    else:
                        o, lse = p.run()
                    wide = p.wide()
                    (expected, expected_lse, _), (narrow, narrow_lse, _) = wide.reference(), p.reference()
                    finite = expected_lse.isfinite()
                    self.assertTrue(torch.equal(lse.isfinite(), finite) and (o[~finite] == 0).all().item())
                    rows = lambda x: x.masked_fill(~finite, 0)  # noqa: E731
                    self.compare(dtype, (o,), (expected,), (narrow,))
                    self.compare(dtype, (rows(lse),), (rows(expected_lse),), (rows(narrow_lse),))
                    self.compare(dtype, p.gradients(o, lse), wide.gradients(expected, expected_lse), p.gradients(narrow, narrow_lse))

    def test_index_loss(self):
        for name, case in CASES.items():
            for dtype in (torch.bfloat16, torch.float32):
                with self.subTest(f"{name}, {dtype}"):
                    p = self.problem(dtype, **case)
                    lists = None if p.lists is None else triad_nsa.select(p.iq, p.ik, block=p.block, cu_seqlens=p.cu_seqlens, **OPTIONS)
                    if lists is not None:
                        triad_nsa.check_lists(lists, p.block, p.cu_seqlens)
                    _, loss, _ = p.taught(**({} if lists is None else OPTIONS))
                    wide = p.wide()
                    (_, _, expected), (_, _, narrow) = wide.reference(lists), p.reference(lists)
                    self.compare(dtype, (loss,), (expected,), (narrow,))
                    if expected.item() == 0:
                        continue
                    self.compare(dtype, *(torch.autograd.grad(x, y) for x, y in (
                        (loss, [p.iq, p.ik]), (expected, [wide.iq, wide.ik]), (narrow, [p.iq, p.ik]))))

    def test_three_branches_with_an_index(self):
        """Lists, output and loss against the dense masks in f64 with the same lists."""
        for bounds in (None, LONG):
            p = Problem(B=1, T=1000, Hq=8, Hkv=2, dk=64, dv=64, dtype=torch.bfloat16, device="cuda", bounds=bounds, compress=(32, 16),
                        block=64, selected=4, window=128)
            iq, ik = (torch.randn(*p.q.shape[:-2], heads, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (2, 1))
            options = {**p.options, **OPTIONS}
            out, loss = triad_nsa.attention_with_index(p.q, p.k, p.v, p.gate, iq, ik, cu_seqlens=p.cu_seqlens, **options)
            lists = triad_nsa.select(iq, ik, block=64, cu_seqlens=p.cu_seqlens, **OPTIONS)
            self.assertTrue(torch.equal(out, p.run(lists=lists)))
            wide = p.wide()
            (expected, *_), gradients = wide.reference(lists)
            (narrow, *_), narrow_gradients = p.reference(lists)
            self.compare(torch.bfloat16, (out,), (expected,), (narrow,))
            self.compare(torch.bfloat16, p.gradients(out), gradients, narrow_gradients)
            begins = torch.tensor([900], dtype=torch.int32, device="cuda")
            _, shorter = triad_nsa.attention_with_index(p.q, p.k, p.v, p.gate, iq, ik, cu_seqlens=p.cu_seqlens, padding_begin=begins, **options)
            _, _, of_all = dense_reference.one_softmax(wide.q, wide.k[1], wide.v[1], lists, 64, None, iq.double(), ik.double(), bounds)
            self.assertLessEqual(abs(loss.item() - of_all.item()), 1e-2 * of_all.item())
            self.assertTrue(0 < shorter.item() and shorter.item() != loss.item())
            diq, = torch.autograd.grad(shorter, iq)
            self.assertTrue((diq.flatten(0, -3)[900:] == 0).all().item() and (diq.flatten(0, -3)[:900] != 0).any().item())

    def test_same_bits(self):
        for case in (dict(B=1, T=3000, dk=128, dv=128, Hq=16, Hkv=1, block=128, di=64), dict(bounds=LONG, dk=64, dv=64, block=64)):
            p = self.problem(**case)
            results = []
            for _ in range(2):
                (o, lse), (taught, loss, _) = p.run(), p.taught(**OPTIONS)
                results.append((o, lse, taught, loss, *p.gradients(o, lse), *torch.autograd.grad(loss, [p.iq, p.ik])))
            self.assertTrue(all(torch.equal(a, b) for a, b in zip(*results)))

    def test_matches_cpu(self):
        for case in (dict(), dict(bounds=[0, 3, 33, 70]), dict(dense=True)):
            here, there = self.problem(torch.float32, **case), Listed(dtype=torch.float32, **case)
            options = {} if here.lists is None else dict(selected=9)
            for a, b in zip(here.taught(**options), there.taught(**options)):
                self.assertLessEqual(error(a.cpu(), b), 1e-5)

    def test_cuda_graph(self):
        case = dict(B=1, T=1024, dk=64, dv=64, Hq=12, Hkv=2, block=64, di=64)

        def step(p):
            (o, lse), (_, loss, _) = p.run(check=False), p.taught(**OPTIONS)
            return (o, loss, *torch.autograd.grad((o * p.d_o).sum() + (lse * p.dlse).sum() + loss, p.leaves()))

        p, other, stream = self.problem(least=1, **case), self.problem(least=1, seed=1, **case), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                step(p)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = step(p)
        with torch.no_grad():
            for a, b in zip([*p.leaves(), p.lists, p.d_o, p.dlse], [*other.leaves(), other.lists, other.d_o, other.dlse]):
                a.copy_(b)
        graph.replay()
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(found, step(other))))

    def test_compile(self):
        p = self.problem(T=700, dk=64, dv=64, Hq=8, Hkv=2, block=64, di=64)

        def both(*leaves):
            o, loss = triad_nsa.indexed_attention(*leaves, block=64, **OPTIONS)
            return o.float().square().mean() + loss

        expected = torch.autograd.grad(both(*p.leaves()), p.leaves())
        for mode in ("default", "reduce-overhead"):
            torch._dynamo.reset()
            compiled = torch.compile(both, fullgraph=True, mode=mode)
            for _ in range(3):
                found = [x.clone() for x in torch.autograd.grad(compiled(*p.leaves()), p.leaves())]
            for a, b in zip(found, expected):
                self.assertLessEqual(error(a, b), 2e-2)

    def test_refused(self):
        p = self.problem(dk=64, dv=64)
        p.lists[0, 40, 0] = torch.tensor([2, 2, -1], dtype=torch.int32)
        with self.assertRaisesRegex(ValueError, r"lists\[0, 40, 0, 1\] is 2, which stands twice"):
            p.run()
        with self.assertRaisesRegex((ValueError, RuntimeError), "f64|float64"):
            triad_nsa.dense_attention_with_index(*(x.double() for x in p.leaves()))
