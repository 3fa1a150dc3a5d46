"""Calls of the library on PyTorch's tensors.

Shapes, strides and options of a call decide everything but addresses. They are the key of a plan, which holds the
library's structures filled in; a later call of the same key sets only their pointers, so that it takes little host time.
"""
import ctypes
import operator
import threading
from ctypes import byref, c_size_t, c_void_p

import torch

from . import library
from .arguments import FIELDS, GATE, K_CMP, Sizes, accumulator, blocks_within, check_inputs

ALIGNMENT = 16  # bytes, of what forward leaves for backward
SOME_ADDRESS = 4096  # of pointers in a query of the workspace, which count as given
KEPT_PLANS = 512
SMALL_SHARE = 32  # a workspace this many times smaller than what backward needs shares its memory


def begins(counts, dtype):
    """Where tensors of so many elements begin in one buffer, and the buffer's elements. All may be symbolic."""
    unit, at, found = ALIGNMENT // dtype.itemsize, 0, []
    for count in counts:
        found.append(at)
        at = at + (count + unit - 1) // unit * unit
    return found, at


class Buffer:
    """Memory for several tensors of one type, one after another."""

    def __init__(self, counts, dtype, device):
        self.dtype, self.device = dtype, device
        self.begins, self.size = begins(counts, dtype)
        self.bytes = self.size * dtype.itemsize
        ends = [*self.begins[1:], self.size]
        self.gaps = [(at + n, end) for at, n, end in zip(self.begins, counts, ends) if at + n < end]

    def empty(self):
        """The memory, uninitialized but for zeros between the tensors, so that equal calls give equal bits."""
        made = torch.empty(self.size, dtype=self.dtype, device=self.device)
        for begin, end in self.gaps:
            made[begin:end].zero_()
        return made

    def pointers(self, structure, fields):
        """The pointers of these fields, with the bytes at which their tensors begin."""
        return [(library.pointer_in(structure, field), at * self.dtype.itemsize) for field, at in zip(fields, self.begins)]


# ---- k_cmp and v_cmp of packed documents ----


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


def part(structure, field):
    for name in field:
        structure = structure[name] if isinstance(name, int) else getattr(structure, name)
    return structure


def describe(target, x, rank=4):
    """Fills in the view of x but for its address. A packed tensor becomes a batch of one row."""
    size, stride = list(x.shape), list(x.stride())
    if len(size) == rank - 1:
        size, stride = [1, *size], [max(1, x.numel()), *stride]
    target.dtype, target.rank = library.DTYPES[str(x.dtype)[6:]], rank
    target.size[:rank], target.stride[:rank] = size, stride


_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # None: PyTorch without CUDA


def address(structure):
    return ctypes.cast(byref(structure), c_void_p)


class Prepared:
    """A call of the library that is prepared for one key: .device, .index, .context and the pointers of its inputs, in the
    order in which they are given. Each thread has its own, since a call sets its pointers."""

    def on(self, device):
        self.device, self.index = device, device.index if device.type == "cuda" else library.CPU
        self.context, self.workspace_bytes, self.pointers = library.context(self.index), c_size_t(), []

    def query(self, function, *arguments):
        """The library checks the arguments and sets the size of the workspace."""
        self.function, self.stream, self.workspace = function, c_void_p(), c_void_p()
        self.arguments = self.context, self.stream, *arguments, self.workspace, address(self.workspace_bytes)
        library.check(function(*self.arguments))
        self.needed = self.workspace_bytes.value
        # A tensor without memory: its new_empty() takes less host time than torch.empty().
        self.bytes = torch.empty(0, dtype=torch.uint8, device=self.device)

    def call(self, given, workspace):
        """Calls the library, with memory for the workspace at this address."""
        for pointer, x in zip(self.pointers, given):
            pointer.value = x.data_ptr()
        self.workspace.value = workspace
        if self.index >= 0:
            self.stream.value = _current_stream(self.index)
        else:
            library.set_threads(torch.get_num_threads())
        status = self.function(*self.arguments)
        if status:
            library.check(status)


class Plan(Prepared):
    """The library's structures for calls of attention.

    `given` are the inputs that are present, in the order of INPUTS; then the lists, if the caller gives them, and cu_seqlens if
    rows are packed."""

    def __init__(self, given, absent, options, scale):
        *tensors, lists, cu_seqlens = self.all_inputs(given, absent)
        check_inputs(tensors, lists, cu_seqlens, options)
        self.absent = absent
        # What the library cannot read as it is: strides on the last axis, and learned blocks of packed documents.
        self.copied = [i for i, x in enumerate(tensors) if x is not None and i != GATE and x.stride(-1) != 1]
        self.spread = cu_seqlens is not None and tensors[K_CMP] is not None
        self.strided_bounds = cu_seqlens is not None and cu_seqlens.stride(0) != 1
        self.as_they_are = not (self.copied or self.spread or self.strided_bounds)
        q = tensors[0]
        self.on(q.device)
        self.dtype = q.dtype
        self.sizes = sizes = Sizes(tensors, options)
        self.compress = options[:2]
        given, _ = self.readable(given)
        *tensors, lists, cu_seqlens = self.all_inputs(given, absent)
        self.read = tensors

        self.options = library.new(library.Options)
        names = ("compress_length", "compress_stride", "block", "selected", "window", "init_blocks", "local_blocks")
        for name, value in zip(names, options):
            setattr(self.options, name, value)
        self.options.scale = scale
        self.options.flags = library.UNCHECKED_POINTERS | (library.SIGNED_GATES if options[len(names)] else 0)
        self.options.flags |= 0 if lists is None else library.GIVEN_LISTS

        self.inputs, self.saved, self.out = library.new(library.Inputs), library.new(library.Saved), library.Tensor()
        for x, field in zip(tensors, FIELDS):
            if x is not None:
                describe(part(self.inputs, field), x)
                self.pointers.append(library.pointer_in(self.inputs, (*field, "data")))
        self.lists_pointer = library.pointer_in(self.saved, ("block_index",))
        self.lists_at = None if lists is None else len(self.pointers)
        if lists is not None:
            self.pointers.append(self.pointer_of_given_lists())
        if cu_seqlens is not None:
            self.inputs.documents.count = cu_seqlens.numel() - 1
            self.pointers.append(library.pointer_in(self.inputs, ("documents", "cu_seqlens")))
        self.values = Buffer(sizes.values, q.dtype, q.device)
        self.value_pointers = self.values.pointers(self.saved, [("o", 0), ("o", 1), ("o", 2), ("k_cmp",), ("v_cmp",)])
        self.lse = Buffer(sizes.lse, accumulator(q.dtype), q.device)
        self.lse_pointers = self.lse.pointers(self.saved, [("lse", b) for b in range(3)])
        self.out_pointer = library.pointer_in(self.out, ("data",))
        self.saved_at = None
        self.set_saved((SOME_ADDRESS,) * 3)

    @staticmethod
    def all_inputs(given, absent):
        """The tensors in the order of INPUTS, lists and cu_seqlens, with None for absent ones."""
        given = iter(given)
        return [None if missing else next(given) for missing in absent]

    def pointer_of_given_lists(self):
        """The pointer to set to the caller's lists: none that the library reads, where forward's copy of them is read."""
        return ctypes.c_void_p()

    def readable(self, given):
        """The inputs as the library can read them, and the rows of learned blocks, to turn their gradients back."""
        if self.as_they_are:
            return given, None
        (*tensors, lists, cu_seqlens), row = self.all_inputs(given, self.absent), None
        for i in self.copied:
            tensors[i] = tensors[i].contiguous()
        if self.strided_bounds:
            cu_seqlens = cu_seqlens.contiguous()
        if self.spread:
            row = block_rows(tensors[K_CMP].size(0), cu_seqlens, self.sizes.Tc, *self.compress)
            tensors[K_CMP:] = [spread_blocks(x, row, self.sizes.Tc) for x in tensors[K_CMP:]]
        return [x for x in (*tensors, lists, cu_seqlens) if x is not None], row

    def set_saved(self, addresses):
        """The addresses of what forward leaves for backward: values, lse, lists."""
        if addresses == self.saved_at:
            return
        values, lse, lists = self.saved_at = addresses
        for pointer, begin in self.value_pointers:
            pointer.value = values + begin
        for pointer, begin in self.lse_pointers:
            pointer.value = lse + begin
        self.lists_pointer.value = lists


class ForwardPlan(Plan):
    def __init__(self, given, absent, options, scale, keep):
        self.keep = keep
        super().__init__(given, absent, options, scale)
        describe(self.out, torch.empty(self.sizes.out, dtype=self.dtype, device="meta"))
        self.nothing = torch.empty(0, dtype=self.dtype, device=self.device)
        self.query(library.c.triad_nsa_forward, address(self.options), address(self.inputs), address(self.out),
                   address(self.saved if keep else self.lists_alone) if keep or self.lists_at is not None else None)
        del self.read  # the structures have its shapes; a plan keeps no memory
        # One buffer for all that backward needs, where nobody looks at its parts.
        aligned = lambda n: -(-n // ALIGNMENT) * ALIGNMENT  # noqa: E731
        lse_at = aligned(self.values.bytes)
        lists_at = aligned(lse_at + self.lse.bytes)
        end = aligned(lists_at + 4 * self.sizes.count_lists())
        self.parts_at = lse_at, lists_at
        # A small workspace is at the end of this buffer, which saves an allocation.
        self.workspace_at = end if self.needed * SMALL_SHARE <= end else None
        self.kept_bytes = end + self.needed if self.workspace_at is not None else end

    def pointer_of_given_lists(self):
        if self.keep:  # what backward needs holds a copy
            return super().pointer_of_given_lists()
        self.lists_alone = library.new(library.Saved)
        pointer = library.pointer_in(self.lists_alone, ("block_index",))
        pointer.value = SOME_ADDRESS
        return pointer

    def copy_lists(self, given, kept):
        """Into the memory at the end of which they are, for forward and backward to read."""
        if self.lists_at is not None:
            kept.copy_(given[self.lists_at])

    def run(self, given, addresses):
        """Returns the output. addresses: of the memory for what backward needs, with given lists in it; None: backward will not
        be called."""
        given, _ = self.readable(given)
        out = self.nothing.new_empty(*self.sizes.out)  # numbers take less time to convert than a tuple
        workspace = self.bytes.new_empty(self.needed)
        if addresses is not None:
            self.set_saved(addresses)
        self.out_pointer.value = out.data_ptr()
        self.call(given, workspace.data_ptr())
        return out

    def in_one_buffer(self, given):
        """Returns the output and one uint8 tensor of all that backward needs."""
        kept = self.bytes.new_empty(self.kept_bytes)
        if self.lists_at is not None:
            self.copy_lists(given, self.parts(kept)[2])
        if self.workspace_at is None:
            return self.run(given, self.addresses(kept)), kept
        if not self.as_they_are:
            given, _ = self.readable(given)
        out, base = self.nothing.new_empty(*self.sizes.out), kept.data_ptr()
        self.set_saved(self.addresses(kept))
        self.out_pointer.value = out.data_ptr()
        self.call(given, base + self.workspace_at)
        return out, kept

    def addresses(self, kept):
        base, (lse_at, lists_at) = kept.data_ptr(), self.parts_at
        return base, base + lse_at, base + lists_at

    def parts(self, kept):
        """Views of in_one_buffer's buffer: values, lse and lists."""
        (lse_at, lists_at), lists_bytes = self.parts_at, 4 * self.sizes.count_lists()
        return (kept[:self.values.bytes].view(self.dtype), kept[lse_at:lse_at + self.lse.bytes].view(self.lse.dtype),
                kept[lists_at:lists_at + lists_bytes].view(torch.int32).view(self.sizes.lists))

    def in_parts(self, given):
        """Returns the output, values, lse and lists, every byte of which is written."""
        values, lse = self.values.empty(), self.lse.empty()
        lists = torch.empty(self.sizes.lists, dtype=torch.int32, device=self.device)
        self.copy_lists(given, lists)
        out = self.run(given, (values.data_ptr(), lse.data_ptr(), lists.data_ptr()))
        return out, values, lse, lists


class BackwardPlan(Plan):
    """wanted: a bit for each of the inputs whose gradient is computed, in the order of INPUTS. The upstream gradient
    follows the inputs in `given`."""

    def __init__(self, given, absent, options, scale, wanted):
        *given, dout = given
        super().__init__(given, absent, options, scale)
        self.copied_dout = dout.stride(-1) != 1 or 0 in dout.stride()  # the gradient of a sum is one number, expanded
        describe(self.out, dout.contiguous() if self.copied_dout else dout)
        self.gradients = library.new(library.Gradients)
        self.gradient_shapes, self.gradient_pointers, self.learned = [], [], 0
        for i, (x, field) in enumerate(zip(self.read, FIELDS)):
            if x is not None and wanted >> i & 1:
                describe(part(self.gradients, field), torch.empty(x.shape, dtype=x.dtype, device="meta"))
                self.gradient_shapes.append((torch.empty(0, dtype=x.dtype, device=self.device), x.shape))
                self.gradient_pointers.append(library.pointer_in(self.gradients, (*field, "data")))
                self.learned += i >= K_CMP
        self.query(library.c.triad_nsa_backward, address(self.options), address(self.inputs), address(self.saved),
                   address(self.out), address(self.gradients))
        del self.read

    def run(self, given, addresses, dout):
        """Returns the wanted gradients."""
        given, row = self.readable(given)
        dout = dout.contiguous() if self.copied_dout else dout
        gradients = [nothing.new_empty(*shape) for nothing, shape in self.gradient_shapes]
        workspace = self.bytes.new_empty(self.needed)
        self.set_saved(addresses)
        self.out_pointer.value = dout.data_ptr()
        for pointer, x in zip(self.gradient_pointers, gradients):
            pointer.value = x.data_ptr()
        self.call(given, workspace.data_ptr())
        if row is not None:
            for i in range(len(gradients) - self.learned, len(gradients)):
                gradients[i] = gather_blocks(gradients[i], row, self.sizes.Tc)
        return gradients


_plans = threading.local()  # by_key: a thread's plans; last: of each kind the last key and its plan
_facts = operator.attrgetter("shape", "dtype", "device")
_strides = torch.Tensor.stride
_NONES = (None,) * len(FIELDS)


def absences(tensors, lists, cu_seqlens):
    """Which inputs are None, in the order of INPUTS, then lists and cu_seqlens."""
    return (*map(operator.is_, tensors, _NONES), lists is None, cu_seqlens is None)


def plan_of(kind, given, absent, options, scale, more):
    """This thread's plan for calls of these shapes, strides and dtypes; the arguments are checked when it is made. more:
    keep of forward, wanted of backward. kind: a function of all further arguments, which makes the plan."""
    key = (absent, options, scale, more, *map(_facts, given), *map(_strides, given))
    try:
        last, plan = _plans.last[kind]
        if last == key:  # takes less time than the key's hash
            return plan
    except (AttributeError, KeyError):
        pass
    plans = _plans.__dict__.setdefault("by_key", {})
    plan = plans.get((kind, key))
    if plan is None:
        plan = kind(given, absent, options, scale, more)
        if len(plans) >= KEPT_PLANS:
            plans.clear()
        plans[kind, key] = plan
    _plans.__dict__.setdefault("last", {})[kind] = key, plan
    return plan
