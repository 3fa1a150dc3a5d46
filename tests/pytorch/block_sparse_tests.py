"""triad_nsa.block_sparse_attention, select, indexed_attention and dense_attention_with_index on the CPU: values and gradients
against dense masks in f64, lists of every kind, and everything that PyTorch does with an operator."""
import unittest

import torch
from torch.utils.checkpoint import checkpoint

import dense_reference
import triad_nsa
from listed_problem import Listed, random_lists
from problem import error, worst

F64 = 1e-9
SHORT = [0, 3, 33, 70]
CASES = {
    "short lists and empty ones": dict(),
    "no empty list": dict(least=1),
    "all blocks": dict(n=9, least=9),
    "one block": dict(n=1),
    "one token": dict(T=1),
    "fewer tokens than a block": dict(T=5),
    "scale": dict(scale=0.5),
    "packed": dict(bounds=SHORT),
    "packed, a document each": dict(bounds=[0, 1, 2, 9, 17, 49, 50, 70], n=4),
    "packed, blocks of 5": dict(bounds=SHORT, block=5, n=4),
    "(128, 64)": dict(B=1, T=60, Hq=4, Hkv=1, dk=128, dv=64),
    **{f"G = {G}, blocks of {block}": dict(B=1, T=300, Hq=G, Hkv=1, block=block, n=3) for G in (1, 2, 4, 6, 8, 16) for block in (64, 128)},
}
# What an index of these cases lists: selected, init_blocks, local_blocks.
OPTIONS = dict(selected=4, init_blocks=1, local_blocks=2)
INDEX = {
    "defaults": dict(),
    "one local block": dict(selected=3, init_blocks=0, local_blocks=1),
    "all blocks": dict(selected=9),
    "packed": dict(bounds=SHORT),
    "packed, blocks of 5": dict(bounds=SHORT, block=5),
    "scale, narrow": dict(scale=0.7, di=2),
    "one token": dict(T=1),
    **{f"G = {G}, blocks of {block}": dict(B=1, T=300, Hq=G, Hkv=1, block=block, selected=2, init_blocks=0, local_blocks=1)
       for G in (1, 6, 16) for block in (64, 128)},
}


def split(case):
    """The case's problem, and its options of selection."""
    options = {**OPTIONS, **{name: value for name, value in case.items() if name in OPTIONS}}
    return Listed(**{name: value for name, value in case.items() if name not in OPTIONS}), options


class Attention(unittest.TestCase):
    def test_against_dense_masks(self):
        for name, case in CASES.items():
            with self.subTest(name):
                p = Listed(**case)
                (o, lse), (expected, expected_lse, _) = p.run(), p.reference()
                self.assertLessEqual(error(o, expected), F64)
                finite = expected_lse.isfinite()
                self.assertTrue(torch.equal(lse.isfinite(), finite))
                self.assertTrue((lse[~finite] == -torch.inf).all() and (o[~finite] == 0).all())
                if finite.any():
                    self.assertLessEqual((lse - expected_lse)[finite].abs().max().item(), F64)
                self.assertLessEqual(worst(p.gradients(o, lse), p.gradients(expected, expected_lse)), F64)

    def test_cases_have_empty_rows(self):
        self.assertTrue((Listed().lists < 0).all(-1).any() and (Listed(bounds=SHORT).lists < 0).all(-1).any())

    def test_only_one_output(self):
        p = Listed()
        expected, expected_lse, _ = p.reference()
        finite = expected_lse.isfinite()
        for mine, reference in ((p.run(return_lse=False).sin().sum(), expected.sin().sum()),
                                (p.run()[1][finite].sin().sum(), expected_lse[finite].sin().sum())):
            for x in p.branch()[:2]:
                self.assertLessEqual(error(*(torch.autograd.grad(y, x, retain_graph=True)[0] for y in (mine, reference))), F64)

    def test_gradcheck(self):
        for case in (dict(least=1), dict(least=1, bounds=[0, 3, 21])):
            p = Listed(B=1, T=20, Hq=2, Hkv=1, dk=4, dv=3, block=4, **case)
            self.assertTrue(torch.autograd.gradcheck(lambda *given: triad_nsa.block_sparse_attention(
                *given, p.lists, block=4, cu_seqlens=p.cu_seqlens, return_lse=True), p.branch()))

    def test_all_blocks_are_dense_attention(self):
        p = Listed(n=9, least=9)
        o, _, lse = triad_nsa.dense_attention_with_index(*p.leaves(), return_lse=True)
        mine, mine_lse = p.run()
        self.assertLessEqual(error(mine, o), F64)
        self.assertLessEqual(error(mine_lse, lse), F64)

    def test_a_block_after_the_token_adds_nothing(self):
        p = Listed(B=1, T=20, n=2)
        expected = p.run()[0]
        empty = (p.lists < 0).all(-1)
        self.assertTrue(empty[:, :16].any())
        p.lists[..., 0][empty] = 2  # the tokens from 16 on
        out = p.run(check=False)[0]
        self.assertTrue(torch.equal(out[:, :16], expected[:, :16]))

    def test_narrower_types(self):
        for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            for case in (dict(), dict(bounds=SHORT)):
                with self.subTest(f"{dtype} {case}"):
                    p = Listed(dtype=dtype, **case)
                    (o, lse), wide = p.run(), p.wide()
                    self.assertEqual((o.dtype, lse.dtype), (dtype, torch.float32))
                    expected, expected_lse, _ = wide.reference()
                    self.assertLessEqual(error(o, expected), most)
                    mine = p.gradients(o, lse)
                    self.assertTrue(all(x.dtype == dtype for x in mine))
                    self.assertLessEqual(worst(mine, wide.gradients(expected, expected_lse)), most)

    def test_nothing(self):
        for shape in (dict(T=0), dict(B=0)):
            p = Listed(**shape)
            self.assertEqual([x.shape for x in p.gradients(*p.run())], [x.shape for x in p.branch()])
            o, loss, _ = p.taught(**OPTIONS)
            self.assertEqual(loss.item(), 0)
            self.assertEqual([x.shape for x in torch.autograd.grad(o.sum() + loss, p.leaves())], [x.shape for x in p.leaves()])

    def test_same_bits_and_layouts(self):
        p = Listed(dtype=torch.float32, bounds=SHORT)
        first, second = p.run(), p.run()
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(first, second)))
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(p.gradients(*first), p.gradients(*second))))
        p = Listed()
        expected = p.run()[0]
        for axes in ((1, 2), (2, 3)):
            turned = [x.detach().transpose(*axes).contiguous().transpose(*axes) for x in (*p.branch(), p.lists)]
            self.assertFalse(turned[3].is_contiguous())
            self.assertTrue(torch.equal(triad_nsa.block_sparse_attention(*turned, block=8), expected))
        grad = torch.autograd.grad(expected.sum(), p.branch())  # its upstream gradient is one number, expanded
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(
            grad, torch.autograd.grad(p.run()[0], p.branch(), torch.ones_like(expected)))))

    def test_some_gradients(self):
        p = Listed()
        expected = p.gradients(*p.run())
        for i, leaf in enumerate(p.branch()):
            self.assertTrue(torch.equal(p.gradients(*p.run(), [leaf])[0], expected[i]))
        p.k = p.k.detach()
        self.assertTrue(torch.equal(p.gradients(*p.run(), [p.v])[0], expected[2]))


class Index(unittest.TestCase):
    def test_lists(self):
        for name, case in INDEX.items():
            with self.subTest(name):
                p, options = split(case)
                bounds = p.bounds or [0, p.q.size(1)]
                cut = (lambda x, a, b: x[None, a:b]) if p.bounds else (lambda x, a, b: x[:, a:b])  # noqa: E731
                expected = torch.cat([dense_reference.select_by_index(cut(p.iq, a, b), cut(p.ik, a, b), p.block, **options)
                                      for a, b in zip(bounds, bounds[1:])], 1)
                lists = triad_nsa.select(p.iq, p.ik, block=p.block, cu_seqlens=p.cu_seqlens, **options)
                self.assertEqual(lists.dtype, torch.int32)
                self.assertTrue(torch.equal(lists, expected[0] if p.bounds else expected))
                triad_nsa.check_lists(lists, p.block, p.cu_seqlens)

    def check(self, p, options):
        o, loss, lse = p.taught(**options)
        lists = None if p.lists is None else triad_nsa.select(p.iq, p.ik, block=p.block, cu_seqlens=p.cu_seqlens, **options)
        expected, expected_lse, expected_loss = p.reference(lists)
        self.assertEqual(loss.shape, ())
        self.assertLessEqual(error(o, expected), F64)
        self.assertLessEqual((lse - expected_lse).abs().max().item(), F64)
        self.assertLessEqual(abs(loss.item() - expected_loss.item()), F64)
        self.assertLessEqual(worst(p.gradients(o, lse, p.leaves(), loss), p.gradients(expected, expected_lse, p.leaves(), expected_loss)),
                             F64)
        # The loss gives q, k and v nothing, and o gives the index nothing.
        self.assertEqual(torch.autograd.grad(loss, p.branch(), allow_unused=True), (None,) * 3)
        self.assertEqual(torch.autograd.grad(o.sum(), p.leaves()[3:], allow_unused=True), (None,) * 2)

    def test_taught_against_dense_masks(self):
        for name, case in INDEX.items():
            with self.subTest(name):
                self.check(*split(case))

    def test_dense_against_dense_masks(self):
        for case in (dict(), dict(bounds=SHORT), dict(scale=0.7, di=6), dict(T=1), dict(B=1, Hq=16, Hkv=1)):
            with self.subTest(str(case)):
                self.check(Listed(dense=True, **case), {})

    def test_gradcheck(self):
        """Of the loss alone; the attention's is Attention.test_gradcheck. The index keeps its lists."""
        for dense in (False, True):
            p = Listed(B=1, T=14, Hq=2, Hkv=1, dk=4, dv=3, block=4, di=2, dense=dense)
            options = {} if dense else dict(selected=4)  # all blocks: no list depends on the index

            def loss(iq, ik):
                call = triad_nsa.dense_attention_with_index if dense else triad_nsa.indexed_attention
                return call(p.q, p.k, p.v, iq, ik, **({} if dense else {"block": 4}), **options)[1]

            self.assertTrue(torch.autograd.gradcheck(loss, (p.iq, p.ik)))

    def test_invariants(self):
        p = Listed(bounds=[0, 1, 2, 3])
        self.assertEqual(p.taught(**OPTIONS)[1].item(), 0)  # documents of one token
        p = Listed()
        o, loss, _ = p.taught(selected=9)
        dense, dense_loss, _ = triad_nsa.dense_attention_with_index(*p.leaves(), return_lse=True)
        self.assertLessEqual(error(o, dense), F64)
        self.assertLessEqual(abs(loss.item() - dense_loss.item()), F64)
        with torch.no_grad():
            quiet, quiet_loss, _ = p.taught(selected=9)
        self.assertTrue(torch.equal(quiet, o) and torch.equal(quiet_loss, loss))
        self.assertTrue(torch.equal(p.taught(selected=9)[0], triad_nsa.block_sparse_attention(
            *p.branch(), triad_nsa.select(p.iq, p.ik, block=8, selected=9), block=8)))

    def test_one_of_two(self):
        p = Listed()
        expected = torch.autograd.grad(p.taught(**OPTIONS)[1], [p.iq, p.ik])
        p.iq = p.iq.detach()
        self.assertTrue(torch.equal(torch.autograd.grad(p.taught(**OPTIONS)[1], [p.ik])[0], expected[1]))

    def test_narrower_types(self):
        for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            for dense in (False, True):
                p = Listed(dtype=dtype, dense=dense)
                o, loss, lse = p.taught(**({} if dense else {"selected": 9}))
                wide = p.wide()
                expected, expected_lse, expected_loss = wide.reference(None if dense else random_lists((2, 70), 2, 9, 8, least=9))
                self.assertEqual(loss.dtype, torch.float32)
                self.assertLessEqual(error(loss, expected_loss), most)
                mine = p.gradients(o, lse, p.leaves(), loss)
                self.assertTrue(all(x.dtype == dtype for x in mine))
                self.assertLessEqual(worst(mine[3:], wide.gradients(expected, expected_lse, wide.leaves(), expected_loss)[3:]), most)


class Inside(unittest.TestCase):
    """Inside other parts of PyTorch."""

    def test_opcheck(self):
        operators = torch.ops.triad_nsa
        for case in (dict(), dict(bounds=[0, 3, 21]), dict(dense=True, dtype=torch.float32)):
            p = Listed(B=1, T=21, **case)
            torch.library.opcheck(operators.select_by_index.default, (p.iq, p.ik, p.cu_seqlens, [8, 4, 1, 2]))
            lists = None if p.lists is None else operators.select_by_index(p.iq, p.ik, p.cu_seqlens, [8, 4, 1, 2])
            torch.library.opcheck(operators.block_sparse.default, (*p.branch(), lists, p.cu_seqlens, 8, 0.0))
            branch = [x.detach() for x in p.branch()]
            o, lse = operators.block_sparse(*branch, lists, p.cu_seqlens, 8, 0.0)
            for d_o, dlse, wanted in ((p.d_o, p.dlse, 7), (None, p.dlse, 1), (p.d_o, None, 6)):
                torch.library.opcheck(operators.block_sparse_backward.default,
                                      (d_o, dlse, *branch, lists, p.cu_seqlens, o, lse, 8, 0.0, wanted))
            taught = branch[0], branch[1], lse, lists
            torch.library.opcheck(operators.index_loss.default, (*taught, p.iq, p.ik, p.padding(), p.cu_seqlens, 8, 0.0, True))
            index = p.iq.detach(), p.ik.detach()
            torch.library.opcheck(operators.index_loss.default, (*taught, *index, None, p.cu_seqlens, 8, 0.0, False))
            loss, diq, dik = operators.index_loss(*taught, *index, None, p.cu_seqlens, 8, 0.0, True)
            torch.library.opcheck(operators.index_loss_backward.default, (loss, diq, dik, *index))

    def test_compile(self):
        def both(p):
            o, lse = p.run(check=False)
            out, loss, _ = p.taught(**OPTIONS)
            return o.sin() + out, lse.masked_fill(lse.isinf(), 0), loss * 2

        for dynamic in (False, True):
            for case in (dict(), dict(bounds=SHORT)):
                with self.subTest(f"{case}, dynamic {dynamic}"):
                    torch._dynamo.reset()
                    run = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=dynamic)
                    for T in (70, 75):
                        p = Listed(T=T, **case)
                        out, expected = run(p), both(p)
                        self.assertTrue(all(torch.equal(a, b) for a, b in zip(out, expected)))
                        for a, b in zip(*(torch.autograd.grad(sum(x.sum() for x in y), p.leaves()) for y in (out, expected))):
                            self.assertTrue(torch.equal(a, b))

    def test_export(self):
        class Layer(torch.nn.Module):
            def forward(self, q, k, v, iq, ik):
                lists = triad_nsa.select(iq, ik, block=8, **OPTIONS)
                return triad_nsa.block_sparse_attention(q, k, v, lists, block=8), \
                    triad_nsa.indexed_attention(q, k, v, iq, ik, block=8, **OPTIONS)[1]

        T = torch.export.Dim("T", min=16, max=4096)
        given, other = ([x.detach() for x in Listed(T=tokens).leaves()] for tokens in (70, 93))
        program = torch.export.export(Layer(), tuple(given), dynamic_shapes=({1: T},) * 5)
        for each in (given, other):
            self.assertTrue(all(torch.equal(a, b) for a, b in zip(program.module()(*each), Layer()(*each))))

    def test_checkpoint(self):
        p = Listed()

        def both(*leaves):
            o, loss = triad_nsa.indexed_attention(*leaves, block=8, **OPTIONS)
            return o.sin().sum() + loss

        expected = torch.autograd.grad(both(*p.leaves()), p.leaves())
        for reentrant in (False, True):
            leaves = [x.detach().requires_grad_() for x in p.leaves()]
            checkpoint(both, *leaves, use_reentrant=reentrant).backward()
            self.assertTrue(all(torch.equal(a.grad, b) for a, b in zip(leaves, expected)))

    def test_autocast(self):
        p = Listed(dtype=torch.float32)
        narrow = p.wide(torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            out, taught = p.run(), p.taught(**OPTIONS)
            lists = triad_nsa.select(p.iq, p.ik, block=8)
        self.assertEqual(out[0].dtype, torch.bfloat16)
        self.assertTrue(all(torch.equal(a, b) for a, b in zip((*out, *taught), (*narrow.run(), *narrow.taught(**OPTIONS)))))
        self.assertTrue(torch.equal(lists, triad_nsa.select(narrow.iq, narrow.ik, block=8)))
        self.assertEqual({x.dtype for x in p.gradients(taught[0], taught[2], p.leaves(), taught[1])}, {torch.float32})

    def test_fsdp(self):
        import tempfile

        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.project = torch.nn.Linear(24, 4 * 8 + 2 * (8 + 8) + (2 + 1) * 4)

            def forward(self, x):
                parts = self.project(x).split((32, 16, 16, 8, 4), -1)
                return triad_nsa.indexed_attention(*(y.unflatten(-1, (-1, w)) for y, w in zip(parts, (8, 8, 8, 4, 4))), block=8, **OPTIONS)

        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            try:
                torch.manual_seed(0)
                layer, x = Layer(), torch.randn(2, 70, 24)
                expected = layer(x)
                sharded = fully_shard(layer, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
                out = sharded(x)
                (out[0].sum() + out[1]).backward()
                self.assertTrue(all(torch.equal(a, b) for a, b in zip(out, expected)))
                self.assertTrue(all(p.grad is not None for p in sharded.parameters()))
            finally:
                dist.destroy_process_group()

    def test_operators_give_the_bits_of_the_calls_around_them(self):
        """And so does a tensor that functorch has left behind."""
        operators, left = torch.ops.triad_nsa, []
        for p in (Listed(), Listed(bounds=SHORT)):
            lists = operators.select_by_index(p.iq, p.ik, p.cu_seqlens, [8, 4, 1, 2])
            o, lse = operators.block_sparse(*p.branch(), lists, p.cu_seqlens, 8, 0.0)
            loss, _, _ = operators.index_loss(p.q, p.k, lse, lists, p.iq, p.ik, None, p.cu_seqlens, 8, 0.0, True)
            mine, mine_loss, mine_lse = p.taught(**OPTIONS)
            self.assertTrue(all(torch.equal(a, b) for a, b in ((o, mine), (lse, mine_lse), (loss, mine_loss))))
            for a, b in zip(p.gradients(o, lse, p.leaves(), loss), p.gradients(mine, mine_lse, p.leaves(), mine_loss)):
                self.assertTrue(torch.equal(a, b))
        p = Listed()
        torch.func.grad(lambda q: (left.append(q), q.sum())[1])(p.q.detach())
        with self.assertRaisesRegex(RuntimeError, "storage"):
            left[0].data_ptr()
        out = triad_nsa.block_sparse_attention(left[0], p.k, p.v, p.lists, block=8)
        self.assertTrue(torch.equal(out, p.run()[0]))
        self.assertTrue(torch.equal(*(torch.autograd.grad(y, p.v, p.d_o)[0] for y in (out, p.run()[0]))))

    def test_second_derivative(self):
        p = Listed()
        for output, leaf in ((p.run()[0], p.q), (p.taught(**OPTIONS)[1], p.iq)):
            gradient, = torch.autograd.grad(output.sum(), [leaf], create_graph=True)
            with self.assertRaisesRegex(NotImplementedError, "second derivatives"):
                gradient.sum().backward()


class Errors(unittest.TestCase):
    def test_lists(self):
        """The first wrong entry is named, of plain and of packed rows."""
        for bounds, at, entries, pattern in (
                (None, (1, 40, 1), [2, 1, -1], r"lists\[1, 40, 1, 1\] is 1, which is less than the entry before it; .* is 5"),
                (None, (0, 40, 0), [2, 2, -1], r"lists\[0, 40, 0, 1\] is 2, which stands twice"),
                (None, (0, 39, 0), [2, 5, -1], r"lists\[0, 39, 0, 1\] is 5, which is after the token's own block; .* is 4"),
                (None, (0, 40, 0), [-1, 5, -1], r"lists\[0, 40, 0, 1\] is 5, which follows a -1"),
                (None, (0, 40, 0), [0, 5, -2], r"lists\[0, 40, 0, 2\] is -2, which is no block"),
                (None, (0, 40, 0), [1000, -1, -1], r"lists\[0, 40, 0, 0\] is 1000, which is after"),
                (SHORT, (2, 1), [1, -1, -1], r"lists\[2, 1, 0\] is 1, which is after the token's own block; .* is 0"),
                (SHORT, (69, 0), [4, 5, -1], r"lists\[69, 0, 1\] is 5, which is after the token's own block; .* is 4")):
            with self.subTest(pattern):
                p = Listed(bounds=bounds)
                p.run()
                p.lists[at] = torch.tensor(entries, dtype=torch.int32)
                with self.assertRaisesRegex(ValueError, pattern):
                    p.run()
        with self.assertRaisesRegex(Exception, "check them outside"):
            torch.compile(Listed().run, fullgraph=True, backend="aot_eager")()

    def test_messages(self):
        p, packed = Listed(), Listed(bounds=SHORT)
        q, k, v, iq, ik, lists = *(x.detach() for x in p.leaves()), p.lists

        def refused(pattern, call, *arguments, **more):
            with self.assertRaisesRegex(ValueError, pattern):
                call(*arguments, **{"block": 8, **more})

        sparse, select, indexed = triad_nsa.block_sparse_attention, triad_nsa.select, triad_nsa.indexed_attention
        refused(r"lists is \[2, 69, 2, 3\]: \[2, 70, 2, 'any'\] is needed, as q is \[2, 70, 4, 8\]", sparse, q, k, v, lists[:, 1:])
        refused("lists is torch.int64: torch.int32 is needed", sparse, q, k, v, lists.long())
        refused("lists is on meta, and q is on cpu", sparse, q, k, v, torch.empty_like(lists, device="meta"))
        refused("k's heads has to divide", sparse, q[:, :, :3], k, v, lists)
        refused(r"v is \[2, 70, 1, 6\]", sparse, q, k, v[:, :, :1], lists)
        refused("k is torch.float32", sparse, q, k.float(), v, lists)
        refused("q is torch.float16", sparse, q.half(), k, v, lists)
        refused("without cu_seqlens", sparse, q[0], k[0], v[0], lists[0])
        refused("with cu_seqlens", sparse, q, k, v, lists, cu_seqlens=packed.cu_seqlens)
        refused("block is 0", sparse, q, k, v, lists, block=0)
        refused("lists of 0 entries", sparse, q, k, v, lists[..., :0])
        refused(r"cu_seqlens\[1\] is 33 and cu_seqlens\[2\] is 3", sparse, *packed.branch(), packed.lists,
                cu_seqlens=torch.tensor([0, 33, 3, 70], dtype=torch.int32))
        refused(r"ik is \[2, 70, 1, 3\]: \[2, 70, 1, 4\] is needed", select, iq, ik[..., :3])
        refused(r"ik is \[2, 70, 2, 4\]", select, iq, ik.expand(-1, -1, 2, -1))
        refused("its width has to be even", select, iq[..., :3], ik[..., :3])
        refused("selected is 2, init_blocks 1 and local_blocks 2", select, iq, ik, selected=2)
        refused(r"iq is \[2, 70, 1, 4\]: \[2, 70, 2, 'any'\] is needed", indexed, q, k, v, iq[:, :, :1], ik)
        refused("iq is torch.float32: torch.float64 is needed", indexed, q, k, v, iq.float(), ik.float())
        refused("[Ss]tride", sparse, q, k[:, :1].expand(-1, 70, -1, -1), v, lists)

    def test_version(self):
        self.assertRegex(triad_nsa.__version__, r"^\d+\.\d+\.\d+$")
        self.assertTrue(triad_nsa.build_info().startswith(triad_nsa.__version__ + ", "))
