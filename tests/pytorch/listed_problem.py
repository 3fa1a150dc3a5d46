"""Random inputs of block-sparse attention and of its index, and the dense reference's results for them."""
import torch

import dense_reference
import triad_nsa


def random_lists(lead, Hkv, n, block, bounds=None, seed=0, least=0):
    """Lists of random blocks up to each token's own, of `least` (if there are as many) to n blocks."""
    random = torch.Generator().manual_seed(seed)
    B, T = lead if len(lead) == 2 else (1, *lead)
    lists = torch.full((B, T, Hkv, n), -1, dtype=torch.int32)
    bounds = bounds or [0, T]
    for a, b in zip(bounds, bounds[1:]):
        for t in range(a, b):
            own = (t - a) // block
            for row in (lists[b, t, g] for b in range(B) for g in range(Hkv)):
                count = int(torch.randint(min(least, own + 1), min(n, own + 1) + 1, (), generator=random))
                row[:count] = torch.randperm(own + 1, generator=random)[:count].sort().values
    return lists.reshape(*lead, Hkv, n)


class Listed:
    """lists: given, or random ones of at most n blocks; index: whether an index of width di is taught. dense: no lists."""

    def __init__(self, B=2, T=70, Hq=4, Hkv=2, dk=8, dv=6, *, n=3, block=8, bounds=None, di=4, scale=None, dense=False, least=0,
                 dtype=torch.float64, device="cpu", seed=0):
        random = torch.Generator().manual_seed(seed)
        lead = (B, T) if bounds is None else (bounds[-1],)

        def leaf(*shape):
            return torch.randn(*shape, generator=random).to(dtype).to(device).requires_grad_()

        self.q, self.k, self.v = leaf(*lead, Hq, dk), leaf(*lead, Hkv, dk), leaf(*lead, Hkv, dv)
        self.iq, self.ik = leaf(*lead, Hkv, di), leaf(*lead, 1, di)
        self.lists = None if dense else random_lists(lead, Hkv, n, block, bounds, seed, least).to(device)
        self.block, self.scale, self.bounds = block, scale, bounds
        self.cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=device)
        self.d_o = torch.randn(*lead, Hq, dv, generator=random).to(dtype).to(device)
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        self.dlse = torch.randn(*lead, Hq, generator=random).to(acc).to(device)

    def branch(self):
        return [self.q, self.k, self.v]

    def leaves(self):
        return [*self.branch(), self.iq, self.ik]

    def run(self, **more):
        """Returns o and lse."""
        return triad_nsa.block_sparse_attention(*self.branch(), self.lists, block=self.block, cu_seqlens=self.cu_seqlens,
                                                scale=self.scale, **{"return_lse": True, "check": True, **more})

    def taught(self, **options):
        """Returns o, the index's loss and lse."""
        options = dict(cu_seqlens=self.cu_seqlens, scale=self.scale, return_lse=True, **options)
        if self.lists is None:
            return triad_nsa.dense_attention_with_index(*self.leaves(), **options)
        return triad_nsa.indexed_attention(*self.leaves(), block=self.block, **options)

    def padding(self):
        """padding_begin: of a few tokens at the end of each row."""
        rows, tokens = self.q.shape[:2] if self.bounds is None else (1, self.q.size(0))
        return torch.tensor([max(0, tokens - 3 - 2 * b) for b in range(rows)], dtype=torch.int32, device=self.q.device)

    def reference(self, lists=None):
        """Returns o, lse and the index's loss."""
        lists = self.lists if lists is None else lists
        return dense_reference.one_softmax(*self.branch(), lists, self.block, self.scale, self.iq, self.ik, self.bounds)

    def gradients(self, o, lse, leaves=None, loss=None):
        """Those of the outputs' random upstream gradients; rows without keys have none for lse."""
        finite = lse.isfinite()
        total = (o * self.d_o.to(o.dtype)).sum() + (lse[finite] * self.dlse.to(lse.dtype)[finite]).sum()
        return torch.autograd.grad(total if loss is None else total + 3 * loss, leaves or self.branch())

    def wide(self, dtype=torch.float64):
        """The same problem with inputs in another dtype."""
        other = object.__new__(Listed)
        other.__dict__.update(self.__dict__)
        other.q, other.k, other.v, other.iq, other.ik = (x.detach().to(dtype).requires_grad_() for x in self.leaves())
        return other
