"""triad_nsa.attention on the CPU: values, gradients, layouts, and everything that PyTorch does with an operator."""
import threading
import unittest

import torch
from torch.utils.checkpoint import checkpoint

import dense_reference
import triad_nsa
from problem import SMALL, Problem, error, worst

F64 = 1e-9
SHORT, LONG = [0, 3, 33, 70], [0, 781, 2048]
DEFAULTS = dict(compress=(32, 16), block=64, selected=16, window=512)
CASES = {
    "apart, gate by group": dict(),
    "apart, gate by head": dict(gate="head"),
    "shared, no gate": dict(shared=True, gate=None),
    "shared, gate by head": dict(shared=True, gate="head"),
    "learned": dict(learned=True),
    "learned, shared": dict(learned=True, shared=True),
    "packed": dict(bounds=SHORT),
    "packed, shared, gate by head": dict(bounds=SHORT, shared=True, gate="head"),
    "packed, learned": dict(bounds=SHORT, learned=True),
    "packed, a document each": dict(bounds=[0, 1, 2, 9, 17, 49, 50, 70], learned=True),
    "packed, long": dict(bounds=LONG, Hq=2, Hkv=1, dk=16, dv=16, **DEFAULTS),
    "shorter than a block": dict(T=5),
    "shorter than a block, learned": dict(T=5, learned=True),
    "packed, no document has a block": dict(bounds=[0, 5, 12], learned=True),
    "one token": dict(T=1),
    "no forced first block": dict(init_blocks=0, local_blocks=1),
    "stride equals length": dict(compress=(4, 4), selected=6, init_blocks=2, local_blocks=3, window=1),
    "scale": dict(scale=0.5),
    "(64, 64)": dict(T=150, Hq=6, Hkv=1, dk=64, dv=64),
    "(128, 128)": dict(B=1, T=100, Hq=4, Hkv=1, dk=128, dv=128),
    "(192, 128)": dict(B=1, T=100, Hq=4, Hkv=1, dk=192, dv=128),
    **{f"G = {G}": dict(B=1, T=60, Hq=2 * G, Hkv=2, gate="head") for G in (1, 2, 4, 6, 8, 16)},
}


class Values(unittest.TestCase):
    def test_against_dense_reference(self):
        for name, case in CASES.items():
            with self.subTest(name):
                p = Problem(**case)
                out, parts = p.run(return_parts=True)
                (expected, o, lse, lists), gradients = p.reference()
                self.assertLessEqual(error(out, expected), F64)
                for b in range(3):
                    self.assertLessEqual((parts.o[b] - o[b]).abs().max().item(), F64)
                    finite = lse[b].isfinite()
                    self.assertTrue(torch.equal(finite, parts.lse[b].isfinite()))
                    self.assertLessEqual((parts.lse[b] - lse[b])[finite].abs().max().item() if finite.any() else 0, F64)
                self.assertTrue(torch.equal(parts.block_index, lists.to(torch.int32)))
                self.assertLessEqual(worst(p.gradients(out), gradients), F64)

    def test_gradcheck(self):
        for case in (dict(), dict(shared=True, gate="head"), dict(learned=True, gate="head"),
                     dict(bounds=[0, 3, 21], learned=True), dict(bounds=[0, 3, 21], shared=True)):
            with self.subTest(str(case)):
                p = Problem(B=1, T=20, Hq=2, Hkv=1, dk=4, dv=3, **case, compress=(4, 2), block=4, selected=3, window=5)
                leaves = p.leaves()

                def call(*given):
                    at = iter(given)
                    replaced = [next(at) for _ in leaves]
                    other = object.__new__(Problem)
                    other.__dict__.update(p.__dict__)
                    new = dict(zip(map(id, leaves), replaced))
                    pick = lambda x: new.get(id(x), x)  # noqa: E731
                    other.q, other.gate, other.k_cmp, other.v_cmp = map(pick, (p.q, p.gate, p.k_cmp, p.v_cmp))
                    other.k, other.v = [pick(x) for x in p.k], [pick(x) for x in p.v]
                    return other.run()

                self.assertTrue(torch.autograd.gradcheck(call, leaves))

    def test_narrower_types(self):
        for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            for case in (dict(), dict(shared=True, gate="head"), dict(bounds=SHORT, learned=True)):
                with self.subTest(f"{dtype} {case}"):
                    p = Problem(dtype=dtype, **case)
                    out, parts = p.run(return_parts=True)
                    self.assertEqual(out.dtype, dtype)
                    (expected, *_), gradients = p.wide().reference(parts.block_index)
                    self.assertLessEqual(error(out, expected), most)
                    mine = p.gradients(out)
                    self.assertTrue(all(a.dtype == b.dtype for a, b in zip(mine, p.leaves())))
                    self.assertLessEqual(worst(mine, gradients), most)

    def test_wide_gate(self):
        p = Problem(dtype=torch.bfloat16)
        p.gate = p.gate.detach().float().requires_grad_()
        self.assertEqual(p.gradients(p.run())[-1].dtype, torch.float32)

    def test_nothing(self):
        for shape in (dict(T=0), dict(B=0)):
            p = Problem(**shape)
            self.assertEqual([x.shape for x in p.gradients(p.run())], [x.shape for x in p.leaves()])

    def test_same_bits(self):
        p = Problem(dtype=torch.float32, bounds=SHORT)
        first, second = (p.run() for _ in range(2))
        self.assertTrue(torch.equal(first, second))
        for a, b in zip(p.gradients(first), p.gradients(second)):
            self.assertTrue(torch.equal(a, b))

    def test_some_gradients(self):
        p = Problem(shared=True, gate="head")
        expected = p.gradients(p.run())
        for wanted in range(4):
            out = p.run()
            alone, = torch.autograd.grad(out, [p.leaves()[wanted]], p.dout)
            self.assertTrue(torch.equal(alone, expected[wanted]))
        p.k[0] = p.k[0].detach()
        p.gate = p.gate.detach()
        dq, dv = torch.autograd.grad(p.run(), [p.q, p.v[0]], p.dout)
        self.assertTrue(torch.equal(dq, expected[0]) and torch.equal(dv, expected[2]))
        with torch.no_grad():
            self.assertTrue(torch.equal(p.run(), out))
        with torch.inference_mode():
            for case in (dict(), dict(bounds=SHORT, learned=True)):
                p = Problem(**case)
                self.assertLessEqual(error(p.run(), p.run(dense_reference.attention, cu_seqlens=p.bounds)[0]), F64)
                self.assertTrue(torch.equal(p.run(return_parts=True)[0], p.run()))


class Layouts(unittest.TestCase):
    def check(self, q, k, v, gate, dout=None):
        leaves = [q, *k, *v, gate]
        out = triad_nsa.attention(q, k, v, gate, **SMALL)
        expected, *_ = dense_reference.attention(q, k, v, gate, **SMALL)
        self.assertLessEqual(error(out, expected), F64)
        dout = torch.randn_like(out) if dout is None else dout
        self.assertLessEqual(worst(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout)), F64)

    def test_heads_first(self):
        p = Problem()
        turned = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (p.q, *p.k, *p.v)]
        self.assertFalse(turned[0].is_contiguous())
        self.check(turned[0], turned[1:4], turned[4:], p.gate)

    def test_slices_of_one_product(self):
        rows = torch.randn(2, 70, 4 * 8 + 3 * 2 * (8 + 6), dtype=torch.float64, requires_grad=True)
        at, views = 0, []
        for heads, width in ((4, 8), *((2, 8),) * 3, *((2, 6),) * 3):
            views.append(rows[..., at:at + heads * width].unflatten(-1, (heads, width)))
            at += heads * width
        self.check(views[0], views[1:4], views[4:], Problem().gate)

    def test_last_axis_with_a_stride(self):
        p = Problem()
        turned = [x.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in (p.q, *p.k, *p.v)]
        self.check(turned[0], turned[1:4], turned[4:], p.gate)

    def test_expanded_gate_and_gradient(self):
        p = Problem()
        gate = torch.rand(1, 1, 1, 3, dtype=torch.float64).expand(2, 70, 2, 3).requires_grad_()
        self.check(p.q, p.k, p.v, gate, torch.ones((), dtype=torch.float64).expand(2, 70, 4, 6))
        self.check(p.q, p.k, p.v, torch.rand(3, 2, 70, 4, dtype=torch.float64).permute(1, 2, 3, 0).requires_grad_())

    def test_batch_of_one_and_a_bounds_slice(self):
        p = Problem(bounds=[0, 3, 33, 70])
        padded = torch.tensor([0, 9, 3, 9, 33, 9, 70, 9], dtype=torch.int32)[::2]
        self.assertTrue(torch.equal(p.run(cu_seqlens=padded), p.run()))
        repeated = torch.tensor([0, 3, 33, 70, 70, 70], dtype=torch.int32)
        self.assertTrue(torch.equal(p.run(cu_seqlens=repeated), p.run()))


class Inside(unittest.TestCase):
    """Inside other parts of PyTorch."""

    def test_opcheck(self):
        for case in (dict(), dict(shared=True, gate="head"), dict(bounds=[0, 3, 21], learned=True),
                     dict(Hq=1, Hkv=1, dv=3, dtype=torch.float32)):  # the last: gaps between saved tensors
            p = Problem(B=1, T=21, **case)
            k, v = (x if len(x) == 3 else [x[0], None, None] for x in (p.k, p.v))
            k, v = ([None, *x[1:]] if case.get("learned") else x for x in (k, v))
            options = [8, 4, 8, 4, 12, 1, 2, 0]
            torch.library.opcheck(torch.ops.triad_nsa.forward.default,
                                  (p.q, *k, *v, p.gate, p.k_cmp, p.v_cmp, None, p.cu_seqlens, options, 0.0, True))
            tensors = [x if x is None else x.detach() for x in (p.q, *k, *v, p.gate, p.k_cmp, p.v_cmp)]
            _, *kept = torch.ops.triad_nsa.forward(*tensors, None, p.cu_seqlens, options, 0.0, True)
            wanted = sum(1 << i for i, x in enumerate(tensors) if x is not None)
            torch.library.opcheck(torch.ops.triad_nsa.backward.default,
                                  (p.dout, *tensors, p.cu_seqlens, *kept, options, 0.0, wanted))

    def test_compile(self):
        for dynamic in (False, True):
            for case in (dict(), dict(shared=True, gate="head"), dict(bounds=SHORT, learned=True)):
                with self.subTest(f"{case}, dynamic {dynamic}"):
                    torch._dynamo.reset()
                    run = torch.compile(lambda p: p.run().sin(), fullgraph=True, backend="aot_eager", dynamic=dynamic)
                    for T in (70, 75):
                        p = Problem(T=T, **case)
                        out = run(p)
                        self.assertTrue(torch.equal(out, p.run().sin()))
                        for a, b in zip(p.gradients(out), p.gradients(p.run().sin())):
                            self.assertTrue(torch.equal(a, b))
        torch._dynamo.reset()
        p = Problem(bounds=SHORT)
        parts = torch.compile(lambda: p.run(return_parts=True)[1].block_index, fullgraph=True, backend="aot_eager")()
        self.assertTrue(torch.equal(parts, p.run(return_parts=True)[1].block_index))

    def test_checkpoint(self):
        p = Problem()
        for reentrant in (False, True):
            out = checkpoint(lambda q, *kv: triad_nsa.attention(q, kv[:3], kv[3:], p.gate, **SMALL), p.q, *p.k, *p.v,
                             use_reentrant=reentrant)
            for a, b in zip(torch.autograd.grad(out, [p.q], p.dout) if not reentrant else [self.backward(out, p)],
                            p.gradients(p.run())):
                self.assertTrue(torch.equal(a, b))

    @staticmethod
    def backward(out, p):
        out.backward(p.dout)
        return p.q.grad

    def test_autocast(self):
        p = Problem(dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            out = p.run()
            k, v = ([x.bfloat16() for x in each] for each in (p.k, p.v))
            self.assertEqual(out.dtype, torch.bfloat16)
        self.assertTrue(torch.equal(out, triad_nsa.attention(p.q.bfloat16(), k, v, p.gate, **SMALL)))
        self.assertEqual({x.dtype for x in p.gradients(out)}, {torch.float32})
        compiled = torch.compile(lambda: p.run(), fullgraph=True, backend="aot_eager")
        with torch.autocast("cpu", torch.bfloat16):
            self.assertTrue(torch.equal(compiled(), out))

    def test_export(self):
        class Layer(torch.nn.Module):
            def forward(self, q, k, v, gate):
                return triad_nsa.attention(q, k, v, gate, **SMALL)

        p, T = Problem(shared=True), torch.export.Dim("T", min=16, max=4096)
        given = tuple(x.detach() for x in (p.q, p.k[0], p.v[0], p.gate))
        program = torch.export.export(Layer(), given, dynamic_shapes=({1: T},) * 4)
        other = tuple(x.detach() for x in (lambda o: (o.q, o.k[0], o.v[0], o.gate))(Problem(shared=True, T=93)))
        for each in (given, other):
            self.assertTrue(torch.equal(program.module()(*each), Layer()(*each)))

    def test_export_packed(self):
        layer = triad_nsa.NSAAttention(24, 4, 2, 8, 6, **SMALL, phi="conv")
        x, bounds = torch.randn(70, 24), torch.tensor(SHORT, dtype=torch.int32)
        program = torch.export.export(layer, (x, bounds), dynamic_shapes={
            "x": {0: torch.export.Dim("N", min=16, max=4096)}, "cu_seqlens": None})
        for each in ((x, bounds), (torch.randn(90, 24), torch.tensor([0, 10, 80, 90], dtype=torch.int32))):
            self.assertTrue(torch.equal(program.module()(*each), layer(*each)))

    def test_tensors_that_functorch_left_behind(self):
        p, left = Problem(), []
        expected = p.run()
        torch.func.grad(lambda q: (left.append(q), q.sum())[1])(p.q.detach())
        with self.assertRaisesRegex(RuntimeError, "storage"):
            left[0].data_ptr()
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                out = triad_nsa.attention(left[0], p.k, p.v, p.gate, **SMALL)
            self.assertTrue(torch.equal(out, expected))
        with torch.enable_grad():
            out = triad_nsa.attention(left[0], p.k, p.v, p.gate, **SMALL)
        for a, b in zip(torch.autograd.grad(out, p.k, p.dout), torch.autograd.grad(expected, p.k, p.dout)):
            self.assertTrue(torch.equal(a, b))

    def test_threads(self):
        problems = [Problem(seed=i) for i in range(4)]
        expected = [p.gradients(p.run()) for p in problems]
        wrong = []

        def work(p, expected):
            for _ in range(5):
                if not all(torch.equal(a, b) for a, b in zip(p.gradients(p.run()), expected)):
                    wrong.append(p)

        threads = [threading.Thread(target=work, args=each) for each in zip(problems, expected)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        self.assertFalse(wrong)

    def test_memory_of_a_small_workspace(self):
        """The same bits whether the workspace has memory of its own or shares that of what backward needs."""
        from triad_nsa import plans

        before = plans.SMALL_SHARE
        self.addCleanup(setattr, plans, "SMALL_SHARE", before)
        for case in (dict(), dict(shared=True, gate="head"), dict(learned=True, bounds=SHORT)):
            results = []
            for share in (1 << 60, 0):  # never, always
                plans.SMALL_SHARE = share
                plans._plans.__dict__.clear()
                p = Problem(**case)
                out = p.run()
                plan = next(call.plan for call in plans._plans.by_key.values() if hasattr(call, "plan"))
                self.assertEqual(plan.workspace_at is None, share > 0)
                results.append((out, *p.gradients(out)))
            self.assertTrue(all(torch.equal(a, b) for a, b in zip(*results)))
        plans._plans.__dict__.clear()

    def test_second_derivative(self):
        p = Problem()
        dq, = torch.autograd.grad(p.run().sum(), [p.q], create_graph=True)
        with self.assertRaisesRegex(NotImplementedError, "second derivatives"):
            dq.sum().backward()


class Errors(unittest.TestCase):
    def refused(self, pattern, *arguments, kind=ValueError, **more):
        with self.assertRaisesRegex(kind, pattern):
            triad_nsa.attention(*arguments, **{**SMALL, **more})

    def test_messages(self):
        p, packed = Problem(), Problem(bounds=SHORT)
        q, k, v, gate = p.q.detach(), [x.detach() for x in p.k], [x.detach() for x in p.v], p.gate.detach()
        far = lambda x: torch.empty_like(x, device="meta")  # noqa: E731
        self.refused(r"k\[1\] is on meta, and q is on cpu", q, [k[0], far(k[1]), k[2]], v, gate)
        self.refused("gate is on meta, and q is on cpu", q, k, v, far(gate))
        self.refused("[Ss]tride", q, [k[0], k[1][:, :1].expand(-1, 70, -1, -1), k[2]], v, gate)
        self.refused("[Ss]tride", torch.as_strided(q, q.shape, (70 * 32, 16, 8, 1)), k, v, gate)
        self.refused(r"gate is \[2, 70, 2, 4\]: \[2, 70, 2, 3\] is needed, or \[2, 70, 4, 3\]", q, k, v, torch.rand(2, 70, 2, 4))
        self.refused(r"gate is \[2, 70, 3, 3\]", q, k, v, torch.rand(2, 70, 3, 3))
        self.refused(r"k is \[2, 69, 2, 8\]: \[2, 70, 2, 8\] is needed", q, k[0][:, 1:], v, gate)
        self.refused("k has 2 tensors", q, k[:2], v, gate)
        self.refused("k's heads has to divide", q[:, :, :3], k, v, gate)
        self.refused(r"v\[2\] is \[2, 69, 2, 6\]: \[2, 70, 2, 6\] is needed", q, k, [*v[:2], v[2][:, 1:]], gate)
        self.refused(r"k\[2\] is torch.float32, and q is torch.float64", q, [*k[:2], k[2].float()], v, gate)
        self.refused("q is torch.float16", q.half(), k, v, gate)
        self.refused("without cu_seqlens", q[0], k[0][0], v[0][0], gate[0])
        self.refused("with cu_seqlens", q, k, v, gate, cu_seqlens=packed.cu_seqlens)
        self.refused("both or not at all", q, k, v, gate, k_cmp=torch.rand(2, 16, 2, 8, dtype=torch.float64))
        self.refused(r"k_cmp is \[2, 15, 2, 8\]: \[2, 16, 2, 8\] is needed", q, k, v, gate,
                     k_cmp=torch.rand(2, 15, 2, 8, dtype=torch.float64), v_cmp=torch.rand(2, 16, 2, 6, dtype=torch.float64))
        self.refused("selected", q, k, v, gate, selected=2)
        self.refused("window", q, k, v, gate, window=0)
        self.refused(r"compress is \(8, 3\)", q, k, v, gate, compress=(8, 3))
        self.refused(r"compress is \(8, 0\)", q, k, v, gate, compress=(8, 0))

    def test_supports(self):
        x = torch.empty(1)
        self.assertTrue(triad_nsa.supports(x) and triad_nsa.supports(x.double()) and triad_nsa.supports(x.bfloat16()))
        self.assertFalse(triad_nsa.supports(x.half()) or triad_nsa.supports(x.to("meta")))

    def test_bounds(self):
        p = Problem(bounds=SHORT)
        for bounds, pattern in (([0, 33, 3, 70], r"cu_seqlens\[1\] is 33 and cu_seqlens\[2\] is 3"),
                                ([0, 33, 69], "cu_seqlens ends with 69: there are 70 tokens"),
                                ([0, 33, 71], "cu_seqlens ends with 71"), ([1, 33, 70], "begin with 0"),
                                ([0, 0, 70], r"cu_seqlens\[0\] is 0 and cu_seqlens\[1\] is 0")):
            with self.subTest(str(bounds)), self.assertRaisesRegex(ValueError, pattern):
                p.run(cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
        with self.assertRaisesRegex(ValueError, "int32"):
            p.run(cu_seqlens=torch.tensor(SHORT))
        p = Problem(bounds=SHORT, learned=True)
        p.k_cmp, p.v_cmp = p.k_cmp[1:], p.v_cmp[1:]
        with self.assertRaisesRegex(ValueError, "k_cmp has 13 rows: the documents have 14 compressed blocks"):
            p.run()

    def test_operator(self):
        """The same bounds through the operator itself, which the library checks."""
        p = Problem(bounds=SHORT)
        with self.assertRaisesRegex(ValueError, "33"):
            torch.ops.triad_nsa.forward(p.q.detach(), *p.k, *p.v, p.gate, None, None, None,
                                        torch.tensor([0, 33, 3, 70], dtype=torch.int32), [8, 4, 8, 4, 12, 1, 2, 0], 0.0, True)
