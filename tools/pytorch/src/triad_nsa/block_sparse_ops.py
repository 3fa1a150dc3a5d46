"""The operators behind block_sparse.py, their derivatives, and the calls of the library that they prepare.

Lists have the library's numbers of blocks here, which count in the row (kernels/library/triad_nsa.h). block_index None:
dense causal attention. As in ops.py, torch.library registers the operators with fake tensors and a derivative."""
import math
import operator
from ctypes import byref, c_double

import torch
from torch._functorch.utils import unwrap_dead_wrappers

from . import library
from .arguments import accumulator, expect
from .ops import PLAIN, watched
from .plans import Plan, Prepared, address, describe, plan_of

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_BRANCH = "Tensor q, Tensor k, Tensor v, Tensor? block_index, Tensor? cu_seqlens"
# options: block, selected, init_blocks, local_blocks.
torch.library.define("triad_nsa::select_by_index", "(Tensor iq, Tensor ik, Tensor? cu_seqlens, int[] options) -> Tensor",
                     tags=_TAGS)
torch.library.define("triad_nsa::block_sparse", f"({_BRANCH}, int block, float scale) -> (Tensor o, Tensor lse)", tags=_TAGS)
# wanted: a bit for each of dq, dk and dv.
torch.library.define("triad_nsa::block_sparse_backward", f"(Tensor? d_o, Tensor? dlse, {_BRANCH}, Tensor o, Tensor lse, "
                     "int block, float scale, int wanted) -> Tensor[]", tags=_TAGS)
# loss: the mean KL (iq and ik of its backward: that second derivatives are refused). diq, dik: its gradients, in the accumulator type; without elements unless `keep`.
torch.library.define("triad_nsa::index_loss", "(Tensor q, Tensor k, Tensor lse, Tensor? block_index, Tensor iq, Tensor ik, "
                     "Tensor? padding_begin, Tensor? cu_seqlens, int block, float scale, bool keep) -> (Tensor loss, Tensor diq, Tensor dik)", tags=_TAGS)
torch.library.define("triad_nsa::index_loss_backward", "(Tensor dloss, Tensor diq, Tensor dik, Tensor iq, Tensor ik) -> "
                     "(Tensor, Tensor)", tags=_TAGS)


# ---- checks of real tensors and of fake ones ----


def _check(names, tensors, shapes, dtypes, device):
    for name, x, shape, dtype in zip(names, tensors, shapes, dtypes):
        if x is None:
            continue
        expect(x.device == device, lambda: f"{name} is on {x.device}, and {names[0]} is on {device}")
        expect(x.dim() == len(shape) and all(n is None or n == m for n, m in zip(shape, x.shape)), lambda:
               f"{name} is {list(x.shape)}: {['any' if n is None else n for n in shape]} is needed, as {names[0]} is "
               f"{list(tensors[0].shape)}")
        expect(x.dtype == dtype, lambda: f"{name} is {x.dtype}: {dtype} is needed")


def _lead(name, x, cu_seqlens, axes):
    """The axes of the tokens: [B, T], or [N] of packed documents."""
    expect(x.dim() == (4 if cu_seqlens is None else 3), lambda:
           f"{name} is {list(x.shape)} {'without' if cu_seqlens is None else 'with'} cu_seqlens: [B, T, {axes}] is needed, or "
           f"packed [N, {axes}] with cu_seqlens")
    expect(x.dtype in (torch.bfloat16, torch.float32, torch.float64),
           lambda: f"{name} is {x.dtype}: bfloat16, float32 or (on the CPU) float64 is needed")
    if cu_seqlens is not None:
        _check((name, "cu_seqlens"), (x, cu_seqlens), (x.shape, (None,)), (x.dtype, torch.int32), x.device)
    return tuple(x.shape[:-2])


def _check_branch(q, k, v, block_index, cu_seqlens):
    lead = _lead("q", q, cu_seqlens, "Hq, dk")
    expect(k.dim() == q.dim() and k.size(-2) > 0 and q.size(-2) % k.size(-2) == 0, lambda:
           f"q is {list(q.shape)} and k is {list(k.shape)}: the number of k's heads has to divide that of q's")
    Hkv = k.size(-2)
    _check(("q", "k", "v", "lists"), (q, k, v, block_index),
           (q.shape, (*lead, Hkv, q.size(-1)), (*lead, Hkv, None), (*lead, Hkv, None)), (q.dtype,) * 3 + (torch.int32,), q.device)
    return lead


def _check_index(iq, ik, cu_seqlens):
    lead = _lead("iq", iq, cu_seqlens, "Hkv, di")
    _check(("iq", "ik"), (iq, ik), (iq.shape, (*lead, 1, iq.size(-1))), (iq.dtype,) * 2, iq.device)
    return lead


def check_taught(q, k, iq, ik, cu_seqlens):
    """Raises a ValueError unless the index fits the attention."""
    lead = _check_branch(q, k, k, None, cu_seqlens)
    _check_index(iq, ik, cu_seqlens)
    _check(("q", "iq"), (q, iq), (q.shape, (*lead, k.size(-2), None)), (q.dtype, q.dtype), q.device)


def _check_loss(q, k, lse, block_index, iq, ik, padding_begin, cu_seqlens):
    _check_branch(q, k, k, block_index, cu_seqlens)
    check_taught(q, k, iq, ik, cu_seqlens)
    rows = q.size(0) if cu_seqlens is None else 1
    _check(("q", "lse", "padding_begin"), (q, lse, padding_begin), (q.shape, q.shape[:-1], (rows,)),
           (q.dtype, accumulator(q.dtype), torch.int32), q.device)


# ---- calls of the library ----


class TensorPlan(Prepared):
    """A call of a function of the library whose arguments are tensors: `given`, then cu_seqlens if rows are packed; then
    results, which it makes. options: block, selected, init_blocks, local_blocks. Arguments are checked when it is made."""

    RANKS = (4, 4, 4, 4)  # of the inputs
    CONTIGUOUS = ()  # the inputs that have to be; of the others the last axis has to

    def __init__(self, given, absent, options, scale, more):
        *tensors, cu_seqlens = Plan.all_inputs(given, absent)
        self.check(*tensors, cu_seqlens)
        self.on(given[0].device)
        readable = [x is None or (x.is_contiguous() if i in self.CONTIGUOUS else x.dim() == 0 or x.stride(-1) == 1)
                    for i, x in enumerate((*tensors, cu_seqlens))]
        self.copied = [i for i, good in enumerate([good for good, missing in zip(readable, absent) if not missing]) if not good]
        given = self.readable(given)
        self.options, self.structures, self.results = library.new(library.Options), [], []
        library.c.triad_nsa_default_options(byref(self.options))
        self.options.compress_length = self.options.compress_stride = 1  # divides any block
        self.options.block, self.options.selected, self.options.init_blocks, self.options.local_blocks = options
        self.options.scale, self.options.flags = scale, library.UNCHECKED_POINTERS
        *tensors, cu_seqlens = Plan.all_inputs(given, absent)
        inputs, documents = [self.place(x, rank) for x, rank in zip(tensors, self.RANKS)], None
        if cu_seqlens is not None:
            self.documents = library.Documents(count=cu_seqlens.numel() - 1)
            self.pointers.append(library.pointer_in(self.documents, ("cu_seqlens",)))
            documents = address(self.documents)
        self.query(self.function_of(), address(self.options), documents, *self.arguments_of(tensors, inputs, more))

    def readable(self, given):
        return [x.contiguous() if i in self.copied else x for i, x in enumerate(given)] if self.copied else given

    def place(self, x, rank):
        """Describes an input; packed tokens are a batch of one row."""
        if x is None:
            return None
        self.structures.append(library.Tensor())
        describe(self.structures[-1], x, rank)
        self.pointers.append(library.pointer_in(self.structures[-1], ("data",)))
        return address(self.structures[-1])

    def result(self, shape, dtype, rank=4):
        self.structures.append(library.Tensor())
        describe(self.structures[-1], torch.empty(shape, dtype=dtype, device="meta"), rank)
        nothing = torch.empty(0, dtype=dtype, device=self.device)
        self.results.append((nothing, tuple(shape), library.pointer_in(self.structures[-1], ("data",))))
        return address(self.structures[-1])

    def run(self, given):
        """Returns the results."""
        given, made = self.readable(given), []
        for nothing, shape, pointer in self.results:
            made.append(nothing.new_empty(shape))
            pointer.value = made[-1].data_ptr()
        workspace = self.bytes.new_empty(self.needed)
        self.call(given, workspace.data_ptr())
        return made


class Select(TensorPlan):
    @staticmethod
    def check(*tensors):
        _check_index(*tensors)

    def function_of(self):
        return library.c.triad_nsa_select_by_index

    def arguments_of(self, tensors, inputs, selected):
        return *inputs, self.result((*tensors[0].shape[:-1], selected), torch.int32)


class Forward(TensorPlan):  # q, k, v, block_index
    CONTIGUOUS = (3,)

    @staticmethod
    def check(*tensors):
        _check_branch(*tensors)

    def function_of(self):
        return library.c.triad_nsa_block_sparse_forward

    def arguments_of(self, tensors, inputs, more):
        q, _, v, _ = tensors
        return *inputs, self.result((*q.shape[:-1], v.size(-1)), q.dtype), self.result(q.shape[:-1], accumulator(q.dtype), 3)


class Backward(TensorPlan):  # q, k, v, block_index, o, lse, d_o, dlse
    RANKS, CONTIGUOUS = (4, 4, 4, 4, 4, 3, 4, 3), (3, 4, 5, 6, 7)

    @staticmethod
    def check(q, k, v, block_index, o, lse, d_o, dlse, cu_seqlens):
        _check_branch(q, k, v, block_index, cu_seqlens)

    def function_of(self):
        return library.c.triad_nsa_block_sparse_backward

    def arguments_of(self, tensors, inputs, wanted):
        return *inputs, *(self.result(x.shape, x.dtype) if wanted >> i & 1 else None for i, x in enumerate(tensors[:3]))


class Loss(TensorPlan):  # q, k, lse, block_index, iq, ik, padding_begin
    RANKS, CONTIGUOUS = (4, 4, 3, 4, 4, 4, 1), (2, 3, 6)

    @staticmethod
    def check(*tensors):
        _check_loss(*tensors)

    def function_of(self):
        return library.c.triad_nsa_index_loss

    def arguments_of(self, tensors, inputs, keep):
        iq, ik, _ = tensors[4:]
        acc = accumulator(iq.dtype)
        return (*inputs, c_double(1 / max(1, math.prod(iq.shape[:-1]))), self.result((1,), torch.float64, 1),
                *(self.result(x.shape, acc) if keep else None for x in (iq, ik)))


def _call(kind, tensors, cu_seqlens, options, scale, more):
    given = [x for x in tensors if x is not None]
    if cu_seqlens is not None:
        given.append(cu_seqlens)
    absent = (*[x is None for x in tensors], cu_seqlens is None)
    return plan_of(kind, given, absent, options, scale, more).run(given)


_ANY = 1, 0, 1  # selected, init_blocks, local_blocks of calls that do not select


def _select(iq, ik, cu_seqlens, options):
    return _call(Select, (iq, ik), cu_seqlens, tuple(options), 0.0, options[1])[0]


@torch.library.register_fake("triad_nsa::select_by_index")
def _(iq, ik, cu_seqlens, options):
    lead = _check_index(iq, ik, cu_seqlens)
    return iq.new_empty((*lead, iq.size(-2), options[1]), dtype=torch.int32)


def _forward(q, k, v, block_index, cu_seqlens, block, scale):
    return tuple(_call(Forward, (q, k, v, block_index), cu_seqlens, (block, *_ANY), scale, None))


@torch.library.register_fake("triad_nsa::block_sparse")
def _(q, k, v, block_index, cu_seqlens, block, scale):
    _check_branch(q, k, v, block_index, cu_seqlens)
    return q.new_empty((*q.shape[:-1], v.size(-1))), q.new_empty(q.shape[:-1], dtype=accumulator(q.dtype))


def _backward(d_o, dlse, q, k, v, block_index, cu_seqlens, o, lse, block, scale, wanted):
    d_o = torch.zeros_like(o) if d_o is None else d_o
    return _call(Backward, (q, k, v, block_index, o, lse, d_o, dlse), cu_seqlens, (block, *_ANY), scale, wanted)


@torch.library.register_fake("triad_nsa::block_sparse_backward")
def _(d_o, dlse, q, k, v, block_index, cu_seqlens, o, lse, block, scale, wanted):
    return [x.new_empty(x.shape) for i, x in enumerate((q, k, v)) if wanted >> i & 1]


def _loss(q, k, lse, block_index, iq, ik, padding_begin, cu_seqlens, block, scale, keep):
    loss, *gradients = _call(Loss, (q, k, lse, block_index, iq, ik, padding_begin), cu_seqlens, (block, *_ANY), scale, keep)
    mean = (loss / max(1, math.prod(iq.shape[:-1]))).to(accumulator(q.dtype)).view(())
    if padding_begin is not None:  # the mean over the tokens that count, whose number is known to the device only
        tokens = math.prod(iq.shape[:-2])
        share = tokens / padding_begin.clamp(0, iq.size(-3)).sum().clamp(min=1).to(mean.dtype)
        mean, gradients = mean * share, [x * share for x in gradients if x is not None]
    return mean, *(gradients if keep else [mean.new_empty(0) for _ in range(2)])


@torch.library.register_fake("triad_nsa::index_loss")
def _(q, k, lse, block_index, iq, ik, padding_begin, cu_seqlens, block, scale, keep):
    _check_loss(q, k, lse, block_index, iq, ik, padding_begin, cu_seqlens)
    acc = accumulator(q.dtype)
    return q.new_empty((), dtype=acc), *(x.new_empty(x.shape if keep else (0,), dtype=acc) for x in (iq, ik))


def _loss_backward(dloss, diq, dik, iq, ik):
    return (diq * dloss).to(iq.dtype), (dik * dloss).to(ik.dtype)


@torch.library.register_fake("triad_nsa::index_loss_backward")
def _(dloss, diq, dik, iq, ik):
    return diq.new_empty(diq.shape, dtype=iq.dtype), dik.new_empty(dik.shape, dtype=ik.dtype)


# ---- derivatives ----


def _unseen(inputs):
    """Whether nothing has to see the operators: no tracing, mode or transform, and no tensor of another kind."""
    return not watched() and PLAIN.issuperset([type(x) for x in inputs if isinstance(x, torch.Tensor)])


def _below(op, device, inputs):
    """The operator below autograd; where nothing has to see it, around the dispatcher, which saves a third of a call's host time."""
    if _unseen(inputs):
        return device(*inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*inputs)


class _BlockSparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, block_index, cu_seqlens, block, scale):
        o, lse = _below(_block_sparse_op, _forward, (q, k, v, block_index, cu_seqlens, block, scale))
        ctx.save_for_backward(q, k, v, block_index, cu_seqlens, o, lse)
        ctx.set_materialize_grads(False)
        ctx.options = block, scale
        return o, lse

    @staticmethod
    def backward(ctx, d_o, dlse):
        if d_o is None and dlse is None:
            return (None,) * 7
        wanted = sum(1 << i for i in range(3) if ctx.needs_input_grad[i])
        inputs = d_o, dlse, *ctx.saved_tensors, *ctx.options, wanted
        around = not torch.is_grad_enabled() and _unseen(inputs)
        found = iter(_backward(*inputs) if around else _backward_op(*inputs))
        return *(next(found) if wanted >> i & 1 else None for i in range(3)), None, None, None, None


class _IndexLoss(torch.autograd.Function):
    """q, k and lse get no gradient."""

    @staticmethod
    def forward(ctx, *inputs):
        if not inputs[-1]:
            raise RuntimeError("triad_nsa::index_loss was called with keep=False on an index that requires gradients")
        loss, diq, dik = _below(_index_loss_op, _loss, inputs)
        ctx.save_for_backward(diq, dik, *inputs[4:6])
        ctx.mark_non_differentiable(diq, dik)
        ctx.set_materialize_grads(False)
        return loss, diq, dik

    @staticmethod
    def backward(ctx, dloss, *_):
        if dloss is None:
            return (None,) * 11
        diq, dik = _loss_backward_op(dloss, *ctx.saved_tensors)
        found = [x if need else None for x, need in zip((diq, dik), ctx.needs_input_grad[4:6])]
        return (None,) * 4 + tuple(found) + (None,) * 5


class _Once(torch.autograd.Function):
    """A backward operator."""

    @staticmethod
    def forward(ctx, op, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(op(*inputs))

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("triad_nsa: second derivatives are not implemented")


def _differentiated(inputs):
    return torch.is_grad_enabled() and any([isinstance(x, torch.Tensor) and x.requires_grad for x in inputs])


def _with_derivative(op, derivative, inputs_of=slice(None)):
    """The kernel of the dispatch key Autograd. inputs_of: the arguments that can have gradients."""

    def run(*inputs):
        if _differentiated(inputs[inputs_of]):
            return derivative(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    return run


def _callable(op, device, derivative, inputs_of):
    """The operator as a function, around the dispatcher where nothing has to see it."""

    def around(inputs):
        return derivative(*inputs) if _differentiated(inputs[inputs_of]) else device(*inputs)

    def run(*inputs):
        if not _unseen(inputs):
            return op(*inputs)
        try:
            return around(inputs)
        except RuntimeError:  # as in ops.py, functorch may have left a wrapper behind
            inside = unwrap_dead_wrappers(inputs)
            if all(map(operator.is_, inside, inputs)):
                raise
        return around(inside)

    return run


_operators = torch.ops.triad_nsa
_select_op, _block_sparse_op = _operators.select_by_index.default, _operators.block_sparse.default
_index_loss_op, _backward_op = _operators.index_loss.default, _operators.block_sparse_backward.default
_loss_backward_op = _operators.index_loss_backward.default
_KERNELS = (
    (_select_op, _select, None, slice(0)),
    (_block_sparse_op, _forward, _BlockSparse.apply, slice(3)),
    (_index_loss_op, _loss, _IndexLoss.apply, slice(4, 6)),
    (_backward_op, _backward, lambda *inputs: list(_Once.apply(_backward_op, *inputs)), slice(None)),
    (_loss_backward_op, _loss_backward, lambda *inputs: _Once.apply(_loss_backward_op, *inputs), slice(None)))
for _op, _device, _derivative, _inputs in _KERNELS:
    _name = _op.name().removesuffix(".default")
    torch.library.impl(_name, ("CPU", "CUDA"), _device)
    torch.library.impl(_name, "Autograd", _with_derivative(_op, _derivative, _inputs))
select_by_index, block_sparse, index_loss = (_callable(*kernel) for kernel in _KERNELS[:3])
