"""Random inputs of attention, and the comparison with the dense reference."""
import torch

import dense_reference
import triad_nsa

SMALL = dict(compress=(8, 4), block=8, selected=4, window=12)
NAMES = ("q", "k", "v", "gate", "k_cmp", "v_cmp")


def count_blocks(bounds, l, d):
    return sum(max(0, (end - begin - l) // d + 1) for begin, end in zip(bounds, bounds[1:]))


class Problem:
    """Inputs of one call. `leaves` are those that need gradients, in the order of `arguments`."""

    def __init__(self, B=2, T=70, Hq=4, Hkv=2, dk=8, dv=6, *, bounds=None, shared=False, gate="group", learned=False,
                 dtype=torch.float64, device="cpu", seed=0, **options):
        random = torch.Generator().manual_seed(seed)
        lead = (B, T) if bounds is None else (bounds[-1],)

        def leaf(*shape, uniform=False):
            x = torch.rand(*shape, generator=random) if uniform else torch.randn(*shape, generator=random)
            return x.to(dtype).to(device).requires_grad_()

        self.options = {**SMALL, **options}
        l, d = self.options["compress"]
        count = 1 if shared else 3
        self.q = leaf(*lead, Hq, dk)
        self.k = [leaf(*lead, Hkv, dk) for _ in range(count)]
        self.v = [leaf(*lead, Hkv, dv) for _ in range(count)]
        self.gate = None if gate is None else leaf(*lead, Hkv if gate == "group" else Hq, 3, uniform=True)
        rows = (B, max(0, (T - l) // d + 1)) if bounds is None else (count_blocks(bounds, l, d),)
        self.k_cmp, self.v_cmp = (leaf(*rows, Hkv, dk), leaf(*rows, Hkv, dv)) if learned else (None, None)
        self.bounds = bounds
        self.cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=device)
        self.dout = torch.randn(*lead, Hq, dv, generator=random).to(dtype).to(device)

    def leaves(self):
        """Of learned compression k[0] and v[0] are not read unless they are shared."""
        read = slice(1, None) if self.k_cmp is not None and len(self.k) == 3 else slice(None)
        given = [self.q, *self.k[read], *self.v[read], self.gate, self.k_cmp, self.v_cmp]
        return [x for x in given if x is not None]

    def run(self, attention=None, cu_seqlens=None, **more):
        """The call; attention: triad_nsa's unless another is given."""
        attention = attention or triad_nsa.attention
        k, v = (x[0] if len(x) == 1 else x for x in (self.k, self.v))
        return attention(self.q, k, v, self.gate, cu_seqlens=self.cu_seqlens if cu_seqlens is None else cu_seqlens,
                         k_cmp=self.k_cmp, v_cmp=self.v_cmp, **self.options, **more)

    def gradients(self, out):
        return torch.autograd.grad(out, self.leaves(), self.dout.to(out.dtype))

    def wide(self, dtype=torch.float64):
        """The same problem with inputs in another dtype."""
        other = object.__new__(Problem)
        other.__dict__.update(self.__dict__)
        cast = lambda x: None if x is None else x.detach().to(dtype).requires_grad_()  # noqa: E731
        other.q, other.gate, other.k_cmp, other.v_cmp = map(cast, (self.q, self.gate, self.k_cmp, self.v_cmp))
        other.k, other.v = [cast(x) for x in self.k], [cast(x) for x in self.v]
        return other

    def reference(self, lists=None):
        """Returns the dense reference's (out, o, lse, lists) and its gradients."""
        result = self.run(dense_reference.attention, cu_seqlens=self.bounds, lists=lists)
        return result, self.gradients(result[0])


def error(a, b, least=1e-30):
    """The relative error of a, in the L2 norm."""
    a, b = a.detach().double(), b.detach().double()
    return ((a - b).norm() / b.norm().clamp(min=least)).item()


def worst(mine, reference):
    """The largest relative error of several gradients. One that is nearly zero counts relative to the others."""
    least = 1e-3 * max(b.detach().double().norm().item() for b in reference)
    return max(error(a, b, least) for a, b in zip(mine, reference, strict=True))
