"""Three branches with given lists or a taught index, padding that teaches nothing, and decoding over lists, on the CPU."""
import unittest

import torch
from torch.utils.checkpoint import checkpoint

import dense_reference
import triad_nsa
from listed_problem import Listed, random_lists
from problem import SMALL, Problem, error, worst

F64 = 1e-9
SHORT = [0, 3, 33, 70]
OPTIONS = dict(selected=4, init_blocks=1, local_blocks=2)
CASES = {
    "apart": dict(),
    "shared, gate by head": dict(shared=True, gate="head"),
    "no gate": dict(gate=None),
    "learned": dict(learned=True),
    "packed": dict(bounds=SHORT),
    "packed, learned": dict(bounds=SHORT, learned=True),
    "packed, a document each": dict(bounds=[0, 1, 2, 9, 17, 49, 50, 70], shared=True),
    "scale": dict(scale=0.5),
    "one token": dict(T=1),
    "shorter than a block": dict(T=5),
}


def lists_of(p, n=3, **more):
    return random_lists(p.q.shape[:-2], p.k[-1].size(-2), n, 8, p.bounds, **more)


def index_of(p, di=6, seed=7):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(*p.q.shape[:-2], heads, di, generator=random).to(p.q.dtype).requires_grad_()
            for heads in (p.k[-1].size(-2), 1)]


class Branches(unittest.TestCase):
    """attention(lists=...)"""

    def test_against_dense_reference(self):
        for name, case in CASES.items():
            with self.subTest(name):
                p = Problem(**case)
                lists = lists_of(p)
                out, parts = p.run(lists=lists, return_parts=True)
                (expected, o, lse, _), gradients = p.reference(lists)
                self.assertLessEqual(error(out, expected), F64)
                self.assertLessEqual((parts.o[1] - o[1]).abs().max().item(), F64)
                finite = lse[1].isfinite()
                self.assertTrue(torch.equal(finite, parts.lse[1].isfinite()))
                self.assertTrue(torch.equal(parts.block_index, lists))
                mine = p.gradients(out)
                self.assertLessEqual(worst(mine, gradients), F64)
                direct = p.run(lists=lists)  # around the dispatcher
                self.assertTrue(torch.equal(direct, out))
                self.assertTrue(all(torch.equal(a, b) for a, b in zip(p.gradients(direct), mine)))
                with torch.no_grad():
                    self.assertTrue(torch.equal(p.run(lists=lists), out))
                turned = lists.transpose(-1, -2).contiguous().transpose(-1, -2)
                self.assertTrue(torch.equal(p.run(lists=turned), out))

    def test_lists_change_between_calls_of_one_shape(self):
        p, outputs = Problem(), []
        for seed in (1, 2):
            lists = lists_of(p, seed=seed)
            with torch.no_grad():
                quiet = p.run(lists=lists)
            outputs.append(p.run(lists=lists))
            self.assertTrue(torch.equal(quiet, outputs[-1]))
        self.assertFalse(torch.equal(*outputs))
        for out, seed in zip(outputs, (1, 2)):  # backward reads the lists of its own forward
            self.assertLessEqual(worst(p.gradients(out), p.reference(lists_of(p, seed=seed))[1]), F64)

    def test_selected_lists_give_the_bits_of_the_selection(self):
        for case in (dict(), dict(bounds=SHORT)):
            p = Problem(**case)
            out, parts = p.run(return_parts=True)
            given = p.run(lists=parts.block_index)
            self.assertTrue(torch.equal(given, out))
            self.assertTrue(all(torch.equal(a, b) for a, b in zip(p.gradients(given), p.gradients(out))))

    def test_gradcheck(self):
        for bounds in (None, [0, 3, 20]):
            p = Problem(B=1, T=20, Hq=2, Hkv=1, dk=4, dv=3, bounds=bounds, shared=True)
            lists = lists_of(p, n=2)
            self.assertTrue(torch.autograd.gradcheck(lambda q, k, v, gate: triad_nsa.attention(
                q, k, v, gate, cu_seqlens=p.cu_seqlens, lists=lists, **SMALL), p.leaves()))

    def test_opcheck_and_compile(self):
        for bounds in (None, [0, 3, 21]):
            p = Problem(B=1, T=21, bounds=bounds)
            lists, options = lists_of(p), [8, 4, 8, 3, 12, 0, 1, 0]
            torch.library.opcheck(torch.ops.triad_nsa.forward.default,
                                  (p.q, *p.k, *p.v, p.gate, None, None, lists, p.cu_seqlens, options, 0.0, True))
            torch._dynamo.reset()
            run = torch.compile(lambda lists: p.run(lists=lists).sin(), fullgraph=True, backend="aot_eager")
            out = run(lists)
            self.assertTrue(torch.equal(out, p.run(lists=lists).sin()))
            self.assertTrue(all(torch.equal(a, b) for a, b in zip(p.gradients(out), p.gradients(p.run(lists=lists).sin()))))

    def test_refused(self):
        p = Problem()
        for lists, pattern in ((lists_of(p)[:, 1:], r"lists is torch.int32 \[2, 69, 2, 3\]: int32 \[2, 70, 2, 3\] is needed"),
                               (lists_of(p).long(), "lists is torch.int64"),
                               (lists_of(p).to("meta"), "lists is on meta")):
            with self.assertRaisesRegex(ValueError, pattern):
                p.run(lists=lists)


class Index(unittest.TestCase):
    """attention_with_index"""

    def both(self, p, **more):
        iq, ik = index_of(p)
        k, v = (x[0] if len(x) == 1 else x for x in (p.k, p.v))
        options = {**p.options, "cu_seqlens": p.cu_seqlens, "k_cmp": p.k_cmp, "v_cmp": p.v_cmp, **more}
        out, loss = triad_nsa.attention_with_index(p.q, k, v, p.gate, iq, ik, **{**options, **OPTIONS})
        lists = triad_nsa.select(iq, ik, block=8, cu_seqlens=p.cu_seqlens, **OPTIONS)
        expected = p.run(dense_reference.attention, cu_seqlens=p.bounds, lists=lists)[0]
        k_sel, v_sel = (x[len(x) // 2] for x in (p.k, p.v))
        _, _, expected_loss = dense_reference.one_softmax(p.q, k_sel, v_sel, lists, 8, p.options.get("scale"), iq, ik, p.bounds)
        return (iq, ik), (out, loss), (expected, expected_loss)

    def test_against_dense_masks(self):
        for name, case in CASES.items():
            with self.subTest(name):
                p = Problem(**case)
                index, (out, loss), (expected, expected_loss) = self.both(p)
                self.assertLessEqual(error(out, expected), F64)
                self.assertLessEqual(abs(loss.item() - expected_loss.item()), F64)
                self.assertLessEqual(worst(p.gradients(out), p.gradients(expected)), F64)
                mine, theirs = (torch.autograd.grad(x, index, allow_unused=True, retain_graph=True) for x in (loss, expected_loss))
                self.assertLessEqual(max((a - b).abs().max().item() for a, b in zip(mine, theirs)), F64)
                # The loss gives the attention nothing, and the output gives the index nothing.
                leaves = p.leaves()
                self.assertEqual(torch.autograd.grad(loss, leaves, allow_unused=True), (None,) * len(leaves))

    def test_gradcheck(self):
        """Of the loss, and of the output with the index as it is. All blocks are listed, whatever the index is."""
        for bounds in (None, [0, 3, 14]):
            p = Problem(B=1, T=14, Hq=2, Hkv=1, dk=4, dv=3, bounds=bounds, shared=True)
            index, options = index_of(p, di=2), dict(cu_seqlens=p.cu_seqlens, compress=(4, 2), block=4, window=5, selected=4)
            self.assertTrue(torch.autograd.gradcheck(lambda iq, ik: triad_nsa.attention_with_index(
                p.q, p.k[0], p.v[0], p.gate, iq, ik, **options)[1], index))
            self.assertTrue(torch.autograd.gradcheck(lambda q, k, v, gate: triad_nsa.attention_with_index(
                q, k, v, gate, *index, **options)[0], p.leaves()))

    def test_checkpoint_and_export(self):
        p = Problem()

        def both(q, k, v, gate, iq, ik):
            return triad_nsa.attention_with_index(q, k, v, gate, iq, ik, **{**SMALL, **OPTIONS})

        given = [p.q, p.k[1], p.v[1], p.gate, *index_of(p)]
        expected = torch.autograd.grad(sum(x.sin().sum() for x in both(*given)), given)
        again = torch.autograd.grad(sum(x.sin().sum() for x in checkpoint(both, *given, use_reentrant=False)), given)
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(again, expected)))

        class Layer(torch.nn.Module):
            def forward(self, *given):
                return both(*given)

        T = torch.export.Dim("T", min=16, max=4096)
        given = [x.detach() for x in given]
        program = torch.export.export(Layer(), tuple(given), dynamic_shapes=(tuple({1: T} for _ in given),))
        for tokens in (70, 51):
            cut = [x[:, :tokens].contiguous() for x in given]
            self.assertTrue(all(torch.equal(a, b) for a, b in zip(program.module()(*cut), both(*cut))))

    def test_compile(self):
        p = Problem(bounds=SHORT)
        iq, ik = index_of(p)

        def both():
            return triad_nsa.attention_with_index(p.q, p.k, p.v, p.gate, iq, ik, cu_seqlens=p.cu_seqlens, **{**SMALL, **OPTIONS})

        expected, out = both(), torch.compile(both, fullgraph=True, backend="aot_eager")()
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(out, expected)))

    def test_autocast(self):
        p = Problem(dtype=torch.float32)
        iq, ik = index_of(p)
        with torch.autocast("cpu", torch.bfloat16):
            out, loss = triad_nsa.attention_with_index(p.q, p.k, p.v, p.gate, iq, ik, **{**SMALL, **OPTIONS})
        narrow, (niq, nik) = p.wide(torch.bfloat16), (x.detach().bfloat16() for x in (iq, ik))
        expected, expected_loss = triad_nsa.attention_with_index(narrow.q, narrow.k, narrow.v, p.gate, niq, nik, **{**SMALL, **OPTIONS})
        self.assertTrue(torch.equal(out, expected) and torch.equal(loss, expected_loss))


class Padding(unittest.TestCase):
    def test_the_loss_is_the_mean_over_the_tokens_that_count(self):
        for case in (dict(), dict(dense=True), dict(bounds=SHORT), dict(dtype=torch.float32)):
            with self.subTest(str(case)):
                p = Listed(**case)
                begins = p.padding()
                options = {} if p.lists is None else OPTIONS
                _, loss, _ = p.taught(padding_begin=begins, **options)
                # Alone, each row without its padding: the mean weighs rows by their tokens.
                parts, counts = [], []
                for b, n in enumerate(begins.tolist()):
                    one = p.wide(p.q.dtype)
                    cut = (lambda x: x[:n]) if p.bounds else (lambda x: x[b:b + 1, :n])  # noqa: E731
                    one.q, one.k, one.v, one.iq, one.ik = map(cut, p.leaves())
                    if p.bounds:
                        one.cu_seqlens = p.cu_seqlens.clamp(max=n)
                    parts.append(one.taught(**options)[1] * n)
                    counts.append(n)
                expected = sum(parts) / sum(counts)
                most = 1e-12 if p.q.dtype == torch.float64 else 1e-6
                self.assertLessEqual(abs(loss.item() - expected.item()), most)
                for a, b in zip(*(torch.autograd.grad(x, [p.iq, p.ik]) for x in (loss, expected))):
                    self.assertLessEqual((a - b).abs().max().item(), most)

    def test_all_is_padding_and_nothing_is(self):
        p = Listed()
        none, all_of_it = (torch.full((2,), n, dtype=torch.int32) for n in (0, 70))
        _, loss, _ = p.taught(padding_begin=none, **OPTIONS)
        self.assertEqual(loss.item(), 0)
        self.assertTrue(all((x == 0).all() for x in torch.autograd.grad(loss, [p.iq, p.ik])))
        self.assertLessEqual(abs(p.taught(padding_begin=all_of_it, **OPTIONS)[1].item() - p.taught(**OPTIONS)[1].item()), 1e-15)
        for begins, pattern in ((none[:1], r"padding_begin is \[1\]: \[2\] is needed"), (none.long(), "padding_begin is torch.int64")):
            with self.assertRaisesRegex(ValueError, pattern):
                p.taught(padding_begin=begins, **OPTIONS)

    def test_compile(self):
        p = Listed()
        run = torch.compile(lambda begins: p.taught(padding_begin=begins, **OPTIONS)[1] * 2, fullgraph=True, backend="aot_eager")
        for begins in (p.padding(), p.padding() - 9):
            loss, expected = run(begins), p.taught(padding_begin=begins, **OPTIONS)[1] * 2
            self.assertTrue(torch.equal(loss, expected))


class Decode(unittest.TestCase):
    """The newest token of sequences of several lengths, against the last rows of whole ones."""
    LENGTHS = torch.tensor([1, 7, 33, 64, 95])

    def caches(self, tensors, paged):
        """What no token has written is NaN."""
        unwritten = torch.arange(96)[None] >= self.LENGTHS[:, None]
        caches = [x.detach().masked_fill(unwritten[..., None, None], torch.nan) for x in tensors]
        if not paged:
            return caches, None
        order = torch.randperm(5 * 12)
        return [x.reshape(5 * 12, 8, *x.shape[2:])[order] for x in caches], order.argsort().view(5, 12).to(torch.int32)

    def newest(self, x):
        return x.detach()[torch.arange(5), self.LENGTHS - 1]

    def test_one_softmax(self):
        for case in (dict(), dict(Hq=6, Hkv=1, scale=0.3)):
            for paged in (False, True):
                with self.subTest(f"{case}, paged {paged}"):
                    p = Listed(B=5, T=96, **case)
                    lists = triad_nsa.select(p.iq, p.ik, block=8, **OPTIONS)
                    o = triad_nsa.block_sparse_attention(*p.branch(), lists, block=8, scale=p.scale)
                    (k, v, ik), table = self.caches((p.k, p.v, p.ik), paged)
                    where = dict(lengths=self.LENGTHS, block_table=table)
                    chosen = triad_nsa.decode_select(self.newest(p.iq), ik, block=8, **where, **OPTIONS)
                    self.assertEqual(chosen.dtype, torch.int32)
                    self.assertTrue(torch.equal(chosen, self.newest(lists)))
                    out = triad_nsa.decode_block_sparse(self.newest(p.q), k, v, chosen, block=8, scale=p.scale, **where)
                    self.assertLessEqual(error(out, self.newest(o)), 1e-12)
                    again = triad_nsa.decode_block_sparse(
                        self.newest(p.q)[:, None], k, v, triad_nsa.decode_select(self.newest(p.iq)[:, None], ik, block=8, **where, **OPTIONS),
                        block=8, scale=p.scale, **where)
                    self.assertTrue(torch.equal(again[:, 0], out))

    def test_short_lists_empty_ones_and_blocks_after_the_token(self):
        p = Listed(B=5, T=96, n=3)
        o, _ = p.run()
        (k, v), _ = self.caches((p.k, p.v), False)
        lists = self.newest(p.lists)
        lists[1] = -1
        out = triad_nsa.decode_block_sparse(self.newest(p.q), k, v, lists, lengths=self.LENGTHS, block=8)
        self.assertTrue((out[1] == 0).all())
        keep = torch.tensor([0, 2, 3, 4])
        self.assertLessEqual(error(out[keep], self.newest(o)[keep]), 1e-12)
        more = torch.cat([torch.full_like(lists[..., :1], 11), lists], -1)  # unordered; the last sequence alone has block 11
        out = triad_nsa.decode_block_sparse(self.newest(p.q), k, v, more, lengths=self.LENGTHS, block=8)
        self.assertLessEqual(error(out[:4][keep[:3]], self.newest(o)[keep[:3]]), 1e-12)

    def test_three_branches(self):
        for case in (dict(), dict(shared=True, gate=None), dict(learned=True)):
            for paged in (False, True):
                with self.subTest(f"{case}, paged {paged}"):
                    p = Problem(B=5, T=96, **case)
                    lists = lists_of(p)
                    (*kv,), table = self.caches((*p.k, *p.v), paged)
                    k, v = (x[0] if len(x) == 1 else x for x in (kv[:len(p.k)], kv[len(p.k):]))
                    out = triad_nsa.decode(self.newest(p.q), k, v, None if p.gate is None else self.newest(p.gate), lengths=self.LENGTHS,
                                           block_table=table, k_cmp=p.k_cmp, v_cmp=p.v_cmp, lists=self.newest(lists), **p.options)
                    self.assertLessEqual(error(out, self.newest(p.run(lists=lists))), 1e-12)

    def test_refused(self):
        p, n = Listed(B=5, T=96), self.LENGTHS
        q, iq = self.newest(p.q), self.newest(p.iq)
        for pattern, call in (
                (r"ik is \[5, 96, 1, 3\]: \[.., .., 1, 4\]", lambda: triad_nsa.decode_select(iq, p.ik[..., :3], lengths=n)),
                ("selected is 2", lambda: triad_nsa.decode_select(iq, p.ik, lengths=n, selected=2)),
                ("one new token per sequence", lambda: triad_nsa.decode_select(p.iq, p.ik, lengths=n)),
                (r"lists is \[5, 1, 3\]", lambda: triad_nsa.decode_block_sparse(q, p.k, p.v, p.lists[:, 0, :1], lengths=n)),
                (r"lengths is \[4\]", lambda: triad_nsa.decode_block_sparse(q, p.k, p.v, p.lists[:, 0], lengths=n[:4])),
                ("q has 3 heads and k has 2", lambda: triad_nsa.decode_block_sparse(q[:, :3], p.k, p.v, p.lists[:, 0], lengths=n))):
            with self.assertRaisesRegex(ValueError, pattern):
                call()
