"""The operators triad_nsa::forward and triad_nsa::backward, and the way around them.

torch.library registers them with fake tensors and a derivative, so torch.compile, export, CUDA graphs, autocast and
checkpointing treat them as PyTorch's own. PyTorch spends as much host time on dispatching an operator with so many
arguments as the call itself needs; therefore forward() calls the library directly for plain tensors outside of any
tracing or dispatch mode.
"""
import operator

import torch
from torch._functorch.utils import unwrap_dead_wrappers

from .arguments import INPUTS, Sizes, accumulator, check_inputs
from .plans import BackwardPlan, ForwardPlan, absences, begins, plan_of

COUNT = len(INPUTS)
_TENSORS = ", ".join(f"Tensor{'' if name == 'q' else '?'} {name}" for name in INPUTS)
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
# options: compress length and stride, block, selected, window, init_blocks, local_blocks, 1 if gates can be negative.
# values: o of the three branches, then the averages k_cmp and v_cmp unless the caller gives them (arguments.Sizes).
# lists: what the selected branch attends to, with the library's numbers; None: it selects. block_index: a copy then.
torch.library.define("triad_nsa::forward", f"({_TENSORS}, Tensor? lists, Tensor? cu_seqlens, int[] options, float scale, "
                     "bool keep) -> (Tensor out, Tensor values, Tensor lse, Tensor block_index)", tags=_TAGS)
torch.library.define("triad_nsa::backward", f"(Tensor dout, {_TENSORS}, Tensor? cu_seqlens, Tensor values, Tensor lse, "
                     "Tensor block_index, int[] options, float scale, int wanted) -> Tensor[]", tags=_TAGS)


def _forward(*arguments):
    *tensors, lists, cu_seqlens, options, scale, keep = arguments
    lists = None if lists is None else lists.contiguous()
    given = [x for x in (*tensors, lists, cu_seqlens) if x is not None]
    plan = plan_of(ForwardPlan, given, absences(tensors, lists, cu_seqlens), tuple(options), scale, keep)
    if keep:
        return plan.in_parts(given)
    out = plan.run(given, None)
    return out, out.new_empty(0), out.new_empty(0), out.new_empty(0)


@torch.library.register_fake("triad_nsa::forward")
def _(*arguments):
    *tensors, lists, cu_seqlens, options, _, keep = arguments
    check_inputs(tensors, lists, cu_seqlens, options)
    q, sizes = tensors[0], Sizes(tensors, options)
    out, acc = q.new_empty(sizes.out), accumulator(q.dtype)
    if not keep:
        return out, q.new_empty(0), q.new_empty(0), q.new_empty(0)
    return (out, q.new_empty(begins(sizes.values, q.dtype)[1]), q.new_empty(begins(sizes.lse, acc)[1], dtype=acc),
            q.new_empty(sizes.lists, dtype=torch.int32))


def _backward(*arguments):
    dout, *tensors, cu_seqlens, values, lse, lists, options, scale, wanted = arguments
    given = [x for x in (*tensors, cu_seqlens) if x is not None]
    plan = plan_of(BackwardPlan, (*given, dout), absences(tensors, None, cu_seqlens), tuple(options), scale, wanted)
    return plan.run(given, (values.data_ptr(), lse.data_ptr(), lists.data_ptr()), dout)


@torch.library.register_fake("triad_nsa::backward")
def _(*arguments):
    _, *tensors, _, _, _, _, _, _, wanted = arguments
    return [x.new_empty(x.shape) for i, x in enumerate(tensors) if x is not None and wanted >> i & 1]


# ---- derivatives ----


def _wanted(ctx, tensors):
    return sum(1 << i for i, x in enumerate(tensors) if x is not None and ctx.needs_input_grad[i])


def _all_gradients(found, wanted):
    """One for each argument of forward."""
    found = iter(found)
    return (*[next(found) if wanted >> i & 1 else None for i in range(COUNT)], None, None, None, None, None)


class _Forward(torch.autograd.Function):
    """Of the operator. (torch.library.register_autograd would do the same, in more host time.)"""

    @staticmethod
    def forward(ctx, *inputs):
        *tensors, _, cu_seqlens, options, scale, keep = inputs
        if not keep:
            raise RuntimeError("triad_nsa::forward was called with keep=False on tensors that require gradients")
        with torch._C._AutoDispatchBelowAutograd():
            out, *kept = _forward_op(*inputs)
        ctx.save_for_backward(*tensors, cu_seqlens, *kept)
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.scale = options, scale
        return out, *kept

    @staticmethod
    def backward(ctx, dout, *_):
        if dout is None:
            return (None,) * (COUNT + 5)
        given = ctx.saved_tensors
        wanted = _wanted(ctx, given[:COUNT])
        return _all_gradients(_backward_op(dout, *given, ctx.options, ctx.scale, wanted), wanted)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(_backward_op(*inputs))

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("triad_nsa: second derivatives are not implemented")


def _forward_autograd(*inputs):
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs[:COUNT]):
        return _Forward.apply(*inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return _forward_op(*inputs)


def _backward_autograd(*inputs):
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
        return list(_Backward.apply(*inputs))
    with torch._C._AutoDispatchBelowAutograd():
        return _backward_op(*inputs)


for _name, _device, _autograd in (("triad_nsa::forward", _forward, _forward_autograd),
                                  ("triad_nsa::backward", _backward, _backward_autograd)):
    torch.library.impl(_name, ("CPU", "CUDA"), _device)
    torch.library.impl(_name, "Autograd", _autograd)
_forward_op, _backward_op = torch.ops.triad_nsa.forward.default, torch.ops.triad_nsa.backward.default


# ---- around the dispatcher ----

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_transforms = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: 1)


def watched():
    """Whether tracing, a dispatch mode or a transform has to see the operators."""
    return torch.compiler.is_compiling() or _modes() != 0 or _transforms() is not None


class _DirectCall:
    """A call around the dispatcher: the plan, and what only the call's derivative needs."""

    def __init__(self, given, absent, options, scale, differentiable):
        self.absent, self.options, self.scale = absent, options, scale
        self.present = [i for i, missing in enumerate(absent) if not missing]
        self.plan = ForwardPlan(given, absent, options, scale, differentiable)

    def gradients(self, given, kept, dout, needed):
        """The gradients of `given`, where needed; None for the others."""
        wanted = sum([1 << i for i, need in zip(self.present, needed) if need])
        if torch.is_grad_enabled() or watched() or not PLAIN.issuperset(map(type, (*given, kept, dout))):
            *tensors, _, cu_seqlens = self.plan.all_inputs(given, self.absent)
            found = _backward_op(dout, *tensors, cu_seqlens, *self.plan.parts(kept), self.options, self.scale, wanted)
        else:
            plan = plan_of(BackwardPlan, (*given, dout), self.absent, self.options, self.scale, wanted)
            found = plan.run(given, self.plan.addresses(kept), dout)
        found = iter(found)
        return [next(found) if need else None for need in needed]


class _Direct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *given):
        out, kept = call.plan.in_one_buffer(given)
        ctx.save_for_backward(*given, kept)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx, dout):
        *given, kept = ctx.saved_tensors
        return None, *ctx.call.gradients(given, kept, dout, ctx.needs_input_grad[1:])


# Function.apply without its search for wrappers that functorch has left behind, which takes a fifth of the host time of a
# call. Such a tensor has no data_ptr(), so that forward() notices.
_apply_direct = super(torch.autograd.Function, _Direct).apply
_requires_grad = operator.attrgetter("requires_grad")


def _forward_direct(given, absent, options, scale):
    if torch.is_grad_enabled() and True in map(_requires_grad, given):
        return _apply_direct(plan_of(_DirectCall, given, absent, options, scale, True), *given)
    return plan_of(_DirectCall, given, absent, options, scale, False).plan.run(given, None)


def forward(tensors, lists, cu_seqlens, options, scale, parts):
    """tensors: in the order of INPUTS; lists: contiguous. Returns the output, and if parts, also values, lse and lists."""
    if not parts and not watched():
        given = [x for x in tensors if x is not None]
        if lists is not None:
            given.append(lists)
        if cu_seqlens is not None:
            given.append(cu_seqlens)
        if PLAIN.issuperset(map(type, given)):
            absent = absences(tensors, lists, cu_seqlens)
            try:
                return _forward_direct(given, absent, options, scale)
            except RuntimeError:
                inside = unwrap_dead_wrappers(tuple(given))
                if all(map(operator.is_, inside, given)):
                    raise
            return _forward_direct(inside, absent, options, scale)
    keep = parts or torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in tensors])
    out, *kept = _forward_op(*tensors, lists, cu_seqlens, options, scale, keep)
    return (out, *kept) if parts else out
