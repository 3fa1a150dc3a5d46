"""The custom operators triad_nsa::forward and triad_nsa::backward: the library's calls on PyTorch's tensors.

torch.library registers them with fake tensors and a derivative, so torch.compile, export, autocast and checkpointing treat
them as PyTorch's own. A call allocates the outputs and the workspace, all from PyTorch's allocator, and queues work on
the current stream.

Shapes, strides and options of a call decide everything but addresses. They are the key of a plan, which holds the
library's structures filled in; a later call of the same key sets only their pointers.
"""
import ctypes
import threading
from ctypes import byref, c_size_t, c_void_p

import torch

from . import library

INPUTS = ("q", "k_cmp_raw", "k_sel", "k_win", "v_cmp_raw", "v_sel", "v_win", "gate", "k_cmp", "v_cmp")
FIELDS = (("q",), ("k", 0), ("k", 1), ("k", 2), ("v", 0), ("v", 1), ("v", 2), ("gate",), ("k_cmp",), ("v_cmp",))
GATE, K_CMP, V_CMP = 7, 8, 9
SOME_ADDRESS = 256  # of pointers in a query of the workspace, which count as given
KEPT_PLANS = 512


def accumulator(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def blocks_within(tokens, l, d):
    """The number of complete compressed blocks; tokens may be symbolic."""
    return torch.sym_max(0, (tokens - l) // d + 1)


class Sizes:
    """The sizes of a call, which may be symbolic. Packed tokens [N, H, D] are one row, B = 1."""

    def __init__(self, q, k, v, options):
        self.packed = q.dim() == 3
        self.B, self.T = (1, q.size(0)) if self.packed else (q.size(0), q.size(1))
        self.Hq, self.dk, self.Hkv, self.dv = q.size(-2), q.size(-1), k.size(-2), v.size(-1)
        self.l, self.d, self.block, self.selected = options[:4]
        self.Tc = blocks_within(self.T, self.l, self.d)

        self.lead = (self.T,) if self.packed else (self.B, self.T)
        self.out = (*self.lead, self.Hq, self.dv)
        self.lists = (*self.lead, self.Hkv, self.selected)

    def lse(self):
        """The elements of each branch in the operator's output `lse`."""
        return [self.B * self.T * self.Hq] * 3

    def values(self, learned):
        """The elements in the operator's output `values`: o of the three branches, then the averages k_cmp and v_cmp,
        which are absent if learned, because the caller gives them."""
        blocks = self.B * self.Tc * self.Hkv
        averages = [] if learned else [blocks * self.dk, blocks * self.dv]
        return [self.B * self.T * self.Hq * self.dv] * 3 + averages


def begins(counts, dtype):
    """Where tensors of so many elements begin in one buffer, at multiples of 16 bytes, and the buffer's elements."""
    unit, at, found = 16 // dtype.itemsize, 0, []
    for count in counts:
        found.append(at)
        at = at + (count + unit - 1) // unit * unit
    return found, at


def buffer(counts, found, size, dtype, device):
    """An uninitialized buffer, but for zeros between its tensors, so that equal calls give equal bits."""
    made = torch.empty(size, dtype=dtype, device=device)
    for count, begin, end in zip(counts, found, [*found[1:], size]):
        if begin + count < end:
            made[begin + count:end].zero_()
    return made


def first_given(a, b):
    return a if a is not None else b


# ---- checks, of real tensors and of fake ones ----


def _expect(condition, message):
    if not condition:
        raise ValueError(f"triad_nsa: {message()}")


def check_inputs(tensors, cu_seqlens, options):
    """Raises a ValueError that names the first argument that does not fit. tensors: in the order of INPUTS."""
    q = tensors[0]
    shape = lambda x: list(x.shape)  # noqa: E731
    _expect(q.dim() in (3, 4), lambda: f"q is {shape(q)}: [B, T, Hq, dk] is needed, or packed [N, Hq, dk] with cu_seqlens")
    _expect((cu_seqlens is not None) == (q.dim() == 3), lambda:
            f"q is {shape(q)} {'with' if cu_seqlens is not None else 'without'} cu_seqlens: packed tokens [N, Hq, dk] need "
            "cu_seqlens, and only they may have it")
    _expect(str(q.dtype)[6:] in library.DTYPES and q.is_floating_point(),
            lambda: f"q is {q.dtype}: bfloat16, float32 or (on the CPU) float64 is needed")
    for name, x in zip(("cu_seqlens", *INPUTS), (cu_seqlens, *tensors)):
        _expect(x is None or x.device == q.device, lambda: f"{name} is on {x.device}, and q is on {q.device}")
    k, v = first_given(tensors[1], tensors[2]), first_given(tensors[4], tensors[5])
    lead, Hq, Hkv = q.shape[:-2], q.size(-2), k.size(-2)
    _expect(k.dim() == q.dim() and Hkv > 0 and Hq % Hkv == 0, lambda:
            f"q is {shape(q)} and k is {shape(k)}: the number of k's heads has to divide that of q's")
    for i, name in enumerate(INPUTS[1:7], 1):
        x, width = tensors[i], q.size(-1) if i < 4 else v.size(-1)
        _expect(x is None or x.shape == (*lead, Hkv, width), lambda:
                f"{name} is {shape(x)}: {[*lead, Hkv, width]} is needed, as q is {shape(q)}")
        _expect(x is None or x.dtype == q.dtype, lambda: f"{name} is {x.dtype}, and q is {q.dtype}")
    gate, k_cmp, v_cmp = tensors[GATE:]
    _expect(gate is None or gate.shape in ((*lead, Hkv, 3), (*lead, Hq, 3)), lambda:
            f"gate is {shape(gate)}: {[*lead, Hkv, 3]} is needed, or {[*lead, Hq, 3]}: a factor for each of cmp, sel, win")
    _expect((k_cmp is None) == (v_cmp is None), lambda: "k_cmp and v_cmp are given both or not at all")
    for name, x, width in (("k_cmp", k_cmp, q.size(-1)), ("v_cmp", v_cmp, v.size(-1))):
        if x is None:
            continue
        _expect(x.dtype == q.dtype, lambda: f"{name} is {x.dtype}, and q is {q.dtype}")
        if cu_seqlens is None:
            needed = (q.size(0), blocks_within(q.size(1), options[0], options[1]), Hkv, width)
            _expect(x.shape == needed, lambda: f"{name} is {shape(x)}: {list(needed)} is needed, a row for each block")
        else:
            _expect(x.dim() == 3 and x.shape[1:] == (Hkv, width), lambda:
                    f"{name} is {shape(x)}: [blocks of all documents, {Hkv}, {width}] is needed")
    if cu_seqlens is not None:
        _expect(cu_seqlens.dim() == 1 and cu_seqlens.dtype == torch.int32 and cu_seqlens.size(0) > 1, lambda:
                f"cu_seqlens is {cu_seqlens.dtype} {shape(cu_seqlens)}: int32 [documents + 1] is needed")


# ---- the rows of k_cmp and v_cmp of packed documents ----


def block_rows(blocks, cu_seqlens, rows, l, d):
    """Callers have the blocks of all documents one after another; in the library, block c of the document that begins at
    token s is row s // d + c of `rows`. Returns for each of the caller's blocks its row, or `rows` if it is after the
    last block."""
    lengths = cu_seqlens.diff()
    counts = torch.where(lengths < l, 0, (lengths - l).div(d, rounding_mode="floor") + 1)
    ends = counts.cumsum(0)
    block = torch.arange(blocks, device=cu_seqlens.device)
    document = torch.searchsorted(ends, block, right=True)
    inside = document < ends.numel()
    document = document.clamp(max=ends.numel() - 1)
    row = cu_seqlens[document].div(d, rounding_mode="floor") + block - (ends - counts)[document]
    return torch.where(inside, row, rows)


def spread_blocks(x, row, rows):
    """x [blocks, H, D] -> [rows, H, D]; rows between documents are zeros."""
    out = x.new_zeros(rows + 1, *x.shape[1:])
    return out.index_copy_(0, row, x)[:rows]


def gather_blocks(x, row, rows):
    """The transpose of spread_blocks."""
    if rows == 0:
        return x.new_zeros(row.size(0), *x.shape[1:])
    return torch.where((row < rows)[:, None, None], x[row.clamp(max=rows - 1)], 0)


# ---- plans ----


def describe(target, x, rank):
    """Fills in the view of x but for its address. A packed tensor becomes a batch of one row."""
    target.dtype = library.DTYPES[str(x.dtype)[6:]]
    target.rank = rank
    size, stride = list(x.shape), list(x.stride())
    if len(size) == rank - 1:
        size.insert(0, 1)
        stride.insert(0, max(1, x.numel()))
    target.size[:rank], target.stride[:rank] = size, stride


def part(structure, field):
    for name in field:
        structure = structure[name] if isinstance(name, int) else getattr(structure, name)
    return structure


class Plan:
    """The library's structures for calls of one key. Each thread has its own, since a call sets their pointers."""

    def __init__(self, tensors, cu_seqlens, options, scale):
        """tensors: in the order of INPUTS, as the operator has them, with stride 1 on their last axes."""
        check_inputs(tensors, cu_seqlens, options)
        tensors, _ = library_blocks(tensors, cu_seqlens, options)
        q, learned = tensors[0], tensors[K_CMP] is not None
        self.device, self.dtype = q.device, q.dtype
        self.index = q.device.index if q.is_cuda else library.CPU
        self.context = library.context(self.index)
        self.sizes = Sizes(q, first_given(tensors[1], tensors[2]), first_given(tensors[4], tensors[5]), options)
        self.options = library.new(library.Options)
        for name, value in zip(("compress_length", "compress_stride", "block", "selected", "window", "init_blocks",
                                "local_blocks"), options):
            setattr(self.options, name, value)
        self.options.scale, self.options.flags = scale, library.UNCHECKED_POINTERS
        self.inputs, self.saved = library.new(library.Inputs), library.new(library.Saved)
        self.pointers = []
        for i, (x, field) in enumerate(zip(tensors, FIELDS)):
            if x is not None:
                describe(part(self.inputs, field), x, 4)
                self.pointers.append((i, library.pointer_in(self.inputs, (*field, "data"))))
        self.documents = None
        if cu_seqlens is not None:
            self.inputs.documents.count = cu_seqlens.numel() - 1
            self.documents = library.pointer_in(self.inputs, ("documents", "cu_seqlens"))
        acc, saved = accumulator(q.dtype), self.saved
        fields = (("o", 0), ("o", 1), ("o", 2), ("k_cmp",), ("v_cmp",))
        counts = self.sizes.values(learned)
        found, size = begins(counts, q.dtype)
        self.values = (counts, found, size, q.dtype, q.device)
        self.value_pointers = [(library.pointer_in(saved, field), at * q.dtype.itemsize) for field, at in zip(fields, found)]
        counts = self.sizes.lse()
        found, size = begins(counts, acc)
        self.lse = (counts, found, size, acc, q.device)
        self.lse_pointers = [(library.pointer_in(saved, ("lse", b)), at * acc.itemsize) for b, at in enumerate(found)]
        self.lists_pointer = library.pointer_in(self.saved, ("block_index",))
        self.out = library.Tensor()
        describe(self.out, torch.empty(self.sizes.out, dtype=q.dtype, device="meta"), 4)
        self.out_pointer = library.pointer_in(self.out, ("data",))
        self.workspace_bytes = c_size_t()
        self.references = tuple(ctypes.cast(byref(x), c_void_p) for x in
                                (self.options, self.inputs, self.out, self.saved, self.workspace_bytes))

    def set_inputs(self, tensors, cu_seqlens):
        for i, pointer in self.pointers:
            pointer.value = tensors[i].data_ptr()
        if cu_seqlens is not None:
            self.documents.value = cu_seqlens.data_ptr()

    def set_saved(self, values, lse, lists):
        """The addresses of the outputs' memory."""
        for pointer, begin in self.value_pointers:
            pointer.value = values + begin
        for pointer, begin in self.lse_pointers:
            pointer.value = lse + begin
        self.lists_pointer.value = lists

    def stream(self):
        if self.index == library.CPU:
            library.set_threads(torch.get_num_threads())
            return None
        return torch._C._cuda_getCurrentRawStream(self.index)


class ForwardPlan(Plan):
    def __init__(self, tensors, cu_seqlens, options, scale, keep):
        super().__init__(tensors, cu_seqlens, options, scale)
        self.keep = keep
        options, inputs, out, saved, size = self.references
        self.arguments = (options, inputs, out, saved if keep else None)
        self.size = size
        self.set_saved(SOME_ADDRESS, SOME_ADDRESS, SOME_ADDRESS)
        library.check(library.c.triad_nsa_forward(self.context, None, *self.arguments, None, size))
        self.needed = self.workspace_bytes.value

    def __call__(self, tensors, cu_seqlens):
        sizes, device = self.sizes, self.device
        out = torch.empty(sizes.out, dtype=self.dtype, device=device)
        if self.keep:
            values, lse = buffer(*self.values), buffer(*self.lse)
            lists = torch.empty(sizes.lists, dtype=torch.int32, device=device)
            self.set_saved(values.data_ptr(), lse.data_ptr(), lists.data_ptr())
        else:
            values, lse, lists = out.new_empty(0), out.new_empty(0), out.new_empty(0)
        workspace = torch.empty(self.needed, dtype=torch.uint8, device=self.device)
        self.set_inputs(tensors, cu_seqlens)
        self.out_pointer.value = out.data_ptr()
        self.workspace_bytes.value = self.needed
        library.check(library.c.triad_nsa_forward(self.context, self.stream(), *self.arguments, workspace.data_ptr(),
                                                  self.size))
        return out, values, lse, lists


class BackwardPlan(Plan):
    def __init__(self, tensors, cu_seqlens, options, scale, dout, wanted):
        super().__init__(tensors, cu_seqlens, options, scale)
        tensors, _ = library_blocks(tensors, cu_seqlens, options)
        self.gradients = library.new(library.Gradients)
        describe(self.out, dout, 4)  # the view of dout
        self.shapes, self.gradient_pointers = [], []
        for i, (x, field) in enumerate(zip(tensors, FIELDS)):
            if x is not None and wanted >> i & 1:
                empty = torch.empty(x.shape, dtype=x.dtype, device="meta")
                describe(part(self.gradients, field), empty, 4)
                self.shapes.append((x.shape, x.dtype))
                self.gradient_pointers.append(library.pointer_in(self.gradients, (*field, "data")))
        options, inputs, out, saved, size = self.references
        gradients = ctypes.cast(byref(self.gradients), c_void_p)
        self.arguments, self.size = (options, inputs, saved, out, gradients), size
        self.set_saved(SOME_ADDRESS, SOME_ADDRESS, SOME_ADDRESS)
        library.check(library.c.triad_nsa_backward(self.context, None, *self.arguments, None, size))
        self.needed = self.workspace_bytes.value

    def __call__(self, tensors, cu_seqlens, values, lse, lists, dout):
        gradients = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self.shapes]
        workspace = torch.empty(self.needed, dtype=torch.uint8, device=self.device)
        self.set_inputs(tensors, cu_seqlens)
        self.set_saved(values.data_ptr(), lse.data_ptr(), lists.data_ptr())
        self.out_pointer.value = dout.data_ptr()
        for pointer, x in zip(self.gradient_pointers, gradients):
            pointer.value = x.data_ptr()
        self.workspace_bytes.value = self.needed
        library.check(library.c.triad_nsa_backward(self.context, self.stream(), *self.arguments, workspace.data_ptr(),
                                                   self.size))
        return gradients


_plans = threading.local()


def plan_of(kind, tensors, cu_seqlens, options, scale, *more):
    """This thread's plan for calls of these shapes and strides. Arguments are checked when it is made."""
    plans = _plans.__dict__.setdefault("by_key", {})
    key = (kind, *[x if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors],
           cu_seqlens if cu_seqlens is None else (cu_seqlens.size(0), cu_seqlens.device), options, scale,
           *[x if isinstance(x, int) else (x.shape, x.stride(), x.dtype, x.device) for x in more])
    found = plans.get(key)
    if found is None:
        if len(plans) >= KEPT_PLANS:
            plans.clear()
        found = plans[key] = kind(tensors, cu_seqlens, options, scale, *more)
    return found


def rows(tensors):
    """The inputs with stride 1 on their last axes, which the library needs of all but the gate."""
    return [x if x is None or i == GATE or x.stride(-1) == 1 else x.contiguous() for i, x in enumerate(tensors)]


def compact(cu_seqlens):
    return cu_seqlens if cu_seqlens is None or cu_seqlens.stride(0) == 1 else cu_seqlens.contiguous()


def library_blocks(tensors, cu_seqlens, options):
    """Puts k_cmp and v_cmp of packed documents into the library's rows. Returns the rows, to turn gradients back."""
    if cu_seqlens is None or tensors[K_CMP] is None:
        return tensors, None
    count = blocks_within(tensors[0].size(0), options[0], options[1])
    row = block_rows(tensors[K_CMP].size(0), cu_seqlens, count, options[0], options[1])
    return [*tensors[:K_CMP], *(spread_blocks(x, row, count) for x in tensors[K_CMP:])], row


# ---- the operators ----

_TENSORS = ", ".join(f"Tensor{'' if name == 'q' else '?'} {name}" for name in INPUTS)
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
torch.library.define("triad_nsa::forward", f"({_TENSORS}, Tensor? cu_seqlens, int[] options, float scale, bool keep) -> "
                     "(Tensor out, Tensor values, Tensor lse, Tensor block_index)", tags=_TAGS)
torch.library.define("triad_nsa::backward", f"(Tensor dout, {_TENSORS}, Tensor? cu_seqlens, Tensor values, "
                     "Tensor lse, Tensor block_index, int[] options, float scale, int wanted) -> Tensor[]", tags=_TAGS)


@torch.library.impl("triad_nsa::forward", ("CPU", "CUDA"))
def _forward(*arguments):
    *tensors, cu_seqlens, options, scale, keep = arguments
    options, tensors, cu_seqlens = tuple(options), rows(tensors), compact(cu_seqlens)
    plan = plan_of(ForwardPlan, tensors, cu_seqlens, options, scale, int(keep))
    return plan(library_blocks(tensors, cu_seqlens, options)[0], cu_seqlens)


@torch.library.register_fake("triad_nsa::forward")
def _(*arguments):
    *tensors, cu_seqlens, options, scale, keep = arguments
    check_inputs(tensors, cu_seqlens, options)
    q = tensors[0]
    sizes = Sizes(q, first_given(tensors[1], tensors[2]), first_given(tensors[4], tensors[5]), options)
    out = q.new_empty(sizes.out)
    if not keep:
        return out, q.new_empty(0), q.new_empty(0), q.new_empty(0)
    acc = accumulator(q.dtype)
    return (out, q.new_empty(begins(sizes.values(tensors[K_CMP] is not None), q.dtype)[1]),
            q.new_empty(begins(sizes.lse(), acc)[1], dtype=acc), q.new_empty(sizes.lists, dtype=torch.int32))


@torch.library.impl("triad_nsa::backward", ("CPU", "CUDA"))
def _backward(*arguments):
    dout, *tensors, cu_seqlens, values, lse, lists, options, scale, wanted = arguments
    options, tensors, cu_seqlens = tuple(options), rows(tensors), compact(cu_seqlens)
    if dout.stride(-1) != 1 or 0 in dout.stride():  # the gradient of a sum is one number, expanded
        dout = dout.contiguous()
    plan = plan_of(BackwardPlan, tensors, cu_seqlens, options, scale, dout, wanted)
    tensors, row = library_blocks(tensors, cu_seqlens, options)
    gradients = plan(tensors, cu_seqlens, values, lse, lists, dout)
    if row is not None:
        count = tensors[K_CMP].size(0)
        learned = (wanted >> K_CMP & 1) + (wanted >> V_CMP & 1)
        for i in range(len(gradients) - learned, len(gradients)):
            gradients[i] = gather_blocks(gradients[i], row, count)
    return gradients


@torch.library.register_fake("triad_nsa::backward")
def _(*arguments):
    _, *tensors, _, _, _, _, _, _, wanted = arguments
    return [x.new_empty(x.shape) for i, x in enumerate(tensors) if x is not None and wanted >> i & 1]


def _setup_context(ctx, inputs, output):
    *tensors, cu_seqlens, options, scale, keep = inputs
    if not keep:
        raise RuntimeError("triad_nsa::forward was called with keep=False on tensors that require gradients")
    ctx.save_for_backward(*tensors, cu_seqlens, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.options, ctx.scale = options, scale


def _gradient(ctx, dout, *_):
    given = ctx.saved_tensors
    wanted = sum(1 << i for i, x in enumerate(given[:len(INPUTS)]) if x is not None and ctx.needs_input_grad[i])
    found = torch.ops.triad_nsa.backward(dout, *given, ctx.options, ctx.scale, wanted)
    found = iter(found)
    return (*[next(found) if wanted >> i & 1 else None for i in range(len(INPUTS))], None, None, None, None)


def _no_second_derivative(ctx, *gradients):
    raise NotImplementedError("triad_nsa: second derivatives are not implemented")


torch.library.register_autograd("triad_nsa::forward", _gradient, setup_context=_setup_context)
torch.library.register_autograd("triad_nsa::backward", _no_second_derivative, setup_context=lambda ctx, inputs, output: None)
