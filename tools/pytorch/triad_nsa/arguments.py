"""Checks of arguments that attention and decode share."""
import torch


def three_tensors(name, given):
    """One tensor for all branches, or three in the order cmp, sel, win: returns three."""
    if isinstance(given, torch.Tensor):
        return given, given, given
    if len(given) != 3:
        raise ValueError(f"{name} has {len(given)} tensors: one is needed, or three in the order cmp, sel, win")
    return tuple(given)
