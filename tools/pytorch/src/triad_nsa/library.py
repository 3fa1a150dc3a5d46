"""libtriad_nsa.so through ctypes: the structures and functions of triad_nsa.h (kernels/library) that the package calls."""
import ctypes
import os
import pathlib
import threading
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p

OK, ARGUMENT, STRIDE, BOUNDS, DEVICE = range(5)
CPU = -1  # the device of a context
LISTS = 10
DTYPES = {"float64": 0, "float32": 1, "bfloat16": 2, "int32": 3}
UNCHECKED_POINTERS, SIGNED_GATES, GIVEN_LISTS = 1, 2, 4
MAX_RANK = 5


class Tensor(Structure):
    _fields_ = [("data", c_void_p), ("dtype", c_int32), ("rank", c_int32), ("size", c_int64 * MAX_RANK),
                ("stride", c_int64 * MAX_RANK)]


class Options(Structure):
    _fields_ = [("struct_size", c_size_t), ("compress_length", c_int64), ("compress_stride", c_int64), ("block", c_int64),
                ("selected", c_int64), ("window", c_int64), ("init_blocks", c_int64), ("local_blocks", c_int64),
                ("scale", c_double), ("kernels", c_int32), ("flags", c_uint32)]


class Documents(Structure):
    _fields_ = [("cu_seqlens", c_void_p), ("count", c_int64), ("max_per_row", c_int64)]


class Inputs(Structure):
    _fields_ = [("struct_size", c_size_t), ("q", Tensor), ("k", Tensor * 3), ("v", Tensor * 3), ("k_cmp", Tensor),
                ("v_cmp", Tensor), ("gate", Tensor), ("documents", Documents)]


class Saved(Structure):
    _fields_ = [("struct_size", c_size_t), ("o", c_void_p * 3), ("lse", c_void_p * 3), ("block_index", c_void_p),
                ("k_cmp", c_void_p), ("v_cmp", c_void_p)]


class Gradients(Structure):
    _fields_ = [("struct_size", c_size_t), ("q", Tensor), ("k", Tensor * 3), ("v", Tensor * 3), ("k_cmp", Tensor),
                ("v_cmp", Tensor), ("gate", Tensor)]


def new(kind):
    """A structure of zeros that knows its size."""
    return kind(struct_size=ctypes.sizeof(kind))


def pointer_in(structure, field):
    """The pointer at `field`, such as ("k", 1, "data"), as an object whose .value can be set quickly."""
    address = ctypes.addressof(structure)
    at = structure
    for name in field[:-1]:
        at = at[name] if isinstance(name, int) else getattr(at, name)
    last = field[-1]
    offset = ctypes.addressof(at) - address
    offset += last * ctypes.sizeof(c_void_p) if isinstance(last, int) else getattr(type(at), last).offset
    return c_void_p.from_buffer(structure, offset)


def _load():
    chosen = os.environ.get("TRIAD_NSA_LIBRARY")
    path = pathlib.Path(chosen) if chosen else pathlib.Path(__file__).parent / "libtriad_nsa.so"
    if not path.is_file():
        hint = "TRIAD_NSA_LIBRARY names no file" if chosen else "install the wheel, or set TRIAD_NSA_LIBRARY to the library"
        raise ImportError(f"triad_nsa: {path} is missing: {hint}")
    try:
        c = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"triad_nsa: {path} does not load: {error}") from error
    c.triad_nsa_last_error.restype = c.triad_nsa_build_info.restype = c.triad_nsa_status_name.restype = c_char_p
    c.triad_nsa_context_create.argtypes = [POINTER(c_void_p), c_int]
    c.triad_nsa_context_set_threads.argtypes = [c_void_p, c_int]
    return c


c = _load()


def check(status):
    """Raises the library's message unless status is OK."""
    if status != OK:
        kind = ValueError if status in (ARGUMENT, STRIDE, BOUNDS, DEVICE, LISTS) else RuntimeError
        name = c.triad_nsa_status_name(status).decode()
        raise kind(f"triad_nsa: {c.triad_nsa_last_error().decode()} ({name})")


def build_info():
    """What the library was built for, for instance "0.1.0, CUDA 13.0, sm_90a and compute_80"."""
    return c.triad_nsa_build_info().decode()


_contexts, _lock, _threads = {}, threading.Lock(), {}


def context(device):
    """The context of a CUDA ordinal, or of CPU. It lives as long as the process."""
    found = _contexts.get(device)
    if found is None:
        with _lock:
            found = _contexts.get(device)
            if found is None:
                made = c_void_p()
                check(c.triad_nsa_context_create(byref(made), device))
                found = _contexts[device] = made
    return found


def set_threads(count):
    """The number of threads of later calls on the CPU."""
    if _threads.get(CPU) != count:
        check(c.triad_nsa_context_set_threads(context(CPU), count))
        _threads[CPU] = count
