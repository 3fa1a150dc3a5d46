"""The arguments of a call: their order, their sizes, and checks of real tensors and of fake ones."""
import torch

INPUTS = ("q", "k_cmp_raw", "k_sel", "k_win", "v_cmp_raw", "v_sel", "v_win", "gate", "k_cmp", "v_cmp")
FIELDS = (("q",), ("k", 0), ("k", 1), ("k", 2), ("v", 0), ("v", 1), ("v", 2), ("gate",), ("k_cmp",), ("v_cmp",))
GATE, K_CMP, V_CMP = 7, 8, 9


def three_tensors(name, given):
    """One tensor for all branches, or three in the order cmp, sel, win: returns three."""
    if isinstance(given, torch.Tensor):
        return given, given, given
    if len(given) != 3:
        raise ValueError(f"{name} has {len(given)} tensors: one is needed, or three in the order cmp, sel, win")
    return tuple(given)


def needed_tensors(name, given, learned):
    """As three_tensors, but None for what the library does not need: the last two if all are one tensor, otherwise the first
    one if there are `learned` blocks."""
    if isinstance(given, torch.Tensor):
        return given, None, None
    first, second, third = three_tensors(name, given)
    if first is second is third:
        return first, None, None
    return first if learned is None else None, second, third


def accumulator(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def blocks_within(tokens, l, d):
    """The number of complete compressed blocks; tokens may be symbolic."""
    return torch.sym_max(0, (tokens - l) // d + 1)


def first_given(a, b):
    return a if a is not None else b


class Sizes:
    """The sizes of a call, which may be symbolic. Packed tokens [N, H, D] are one row, B = 1."""

    def __init__(self, tensors, options):
        q, k, v = tensors[0], first_given(*tensors[1:3]), first_given(*tensors[4:6])
        lead, Hkv, dv = q.shape[:-2], k.size(-2), v.size(-1)
        self.B, self.T = (1, *lead) if len(lead) == 1 else lead
        self.Hq = q.size(-2)
        self.Tc = blocks_within(self.T, options[0], options[1])
        self.out, self.lists = (*lead, self.Hq, dv), (*lead, Hkv, options[3])
        # The elements of what forward leaves for backward: lse of the branches, and the values, which are o of the
        # branches and the averages k_cmp and v_cmp, absent if the caller gives these.
        rows = self.B * self.T
        self.lse = [rows * self.Hq] * 3
        averages = [self.B * self.Tc * Hkv * width for width in (q.size(-1), dv)] if tensors[K_CMP] is None else []
        self.values = [rows * self.Hq * dv] * 3 + averages

    def count_lists(self):
        return self.B * self.T * self.lists[-2] * self.lists[-1]


def expect(condition, message):
    if not condition:
        raise ValueError(f"triad_nsa: {message()}")


def names_of(name, tensors):
    """How messages call the tensors of k or v: as the caller gave them."""
    return [name] * 3 if tensors[1] is None else [f"{name}[{b}]" for b in range(3)]


def check_inputs(tensors, lists, cu_seqlens, options):
    """Raises a ValueError that names the first argument that does not fit. tensors: in the order of INPUTS."""
    q = tensors[0]
    shape = lambda x: list(x.shape)  # noqa: E731
    expect(q.dim() in (3, 4), lambda: f"q is {shape(q)}: [B, T, Hq, dk] is needed, or packed [N, Hq, dk] with cu_seqlens")
    expect((cu_seqlens is not None) == (q.dim() == 3), lambda:
            f"q is {shape(q)} {'with' if cu_seqlens is not None else 'without'} cu_seqlens: packed tokens [N, Hq, dk] need "
            "cu_seqlens, and only they may have it")
    expect(q.dtype in (torch.bfloat16, torch.float32, torch.float64),
            lambda: f"q is {q.dtype}: bfloat16, float32 or (on the CPU) float64 is needed")
    l, d = options[:2]
    expect(d > 0 and l > 0 and l % d == 0, lambda: f"compress is ({l}, {d}): a length and a stride that divides it are needed")
    names = ["q", *names_of("k", tensors[1:4]), *names_of("v", tensors[4:7]), "gate", "k_cmp", "v_cmp"]
    for name, x in zip(("cu_seqlens", "lists", *names), (cu_seqlens, lists, *tensors)):
        expect(x is None or x.device == q.device, lambda: f"{name} is on {x.device}, and q is on {q.device}")
    k, v = first_given(tensors[1], tensors[2]), first_given(tensors[4], tensors[5])
    lead, Hq, Hkv = q.shape[:-2], q.size(-2), k.size(-2)
    expect(k.dim() == q.dim() and Hkv > 0 and Hq % Hkv == 0, lambda:
            f"q is {shape(q)} and k is {shape(k)}: the number of k's heads has to divide that of q's")
    for i, name in enumerate(names[1:7], 1):
        x, width = tensors[i], q.size(-1) if i < 4 else v.size(-1)
        expect(x is None or x.shape == (*lead, Hkv, width), lambda:
                f"{name} is {shape(x)}: {[*lead, Hkv, width]} is needed, as q is {shape(q)}")
        expect(x is None or x.dtype == q.dtype, lambda: f"{name} is {x.dtype}, and q is {q.dtype}")
    expect(lists is None or lists.dtype == torch.int32 and lists.shape == (*lead, Hkv, options[3]), lambda:
           f"lists is {lists.dtype} {shape(lists)}: int32 {[*lead, Hkv, options[3]]} is needed, as k is {shape(k)}")
    gate, k_cmp, v_cmp = tensors[GATE:]
    expect(gate is None or gate.shape in ((*lead, Hkv, 3), (*lead, Hq, 3)), lambda:
            f"gate is {shape(gate)}: {[*lead, Hkv, 3]} is needed, or {[*lead, Hq, 3]}: a factor for each of cmp, sel, win")
    expect((k_cmp is None) == (v_cmp is None), lambda: "k_cmp and v_cmp are given both or not at all")
    for name, x, width in (("k_cmp", k_cmp, q.size(-1)), ("v_cmp", v_cmp, v.size(-1))):
        if x is None:
            continue
        expect(x.dtype == q.dtype, lambda: f"{name} is {x.dtype}, and q is {q.dtype}")
        if cu_seqlens is None:
            needed = (q.size(0), blocks_within(q.size(1), l, d), Hkv, width)
            expect(x.shape == needed, lambda: f"{name} is {shape(x)}: {list(needed)} is needed, a row for each block")
        else:
            expect(x.dim() == 3 and x.shape[1:] == (Hkv, width), lambda:
                    f"{name} is {shape(x)}: [blocks of all documents, {Hkv}, {width}] is needed")
    if cu_seqlens is not None:
        expect(cu_seqlens.dim() == 1 and cu_seqlens.dtype == torch.int32 and cu_seqlens.size(0) > 1, lambda:
                f"cu_seqlens is {cu_seqlens.dtype} {shape(cu_seqlens)}: int32 [documents + 1] is needed")
