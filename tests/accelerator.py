"""A device that is not the CPU, where there is none: a tensor on "gpu" holds a CPU tensor, and like a GPU it refuses
to be mixed with tensors elsewhere. Values that are read back, for which a GPU would have to wait, are counted.

Importing this changes PyTorch for the whole process: `accelerator_cases.py` is run in one of its own.
"""

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend
from transformers import masking_utils


class Resident(torch.Tensor):
    """What lies on the device."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), **layout, device="gpu:0")

    def __init__(self, inner: torch.Tensor):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return run(operation, *args, **kwargs or {})

    def tolist(self):
        READ.append("tolist")
        return self.inner.tolist()


class Module(_DummyBackendModule):
    """`torch.gpu`."""

    def get_amp_supported_dtype(self):
        return [torch.float32, torch.bfloat16]


READ: list[str] = []  # operations that read values back
WIDENED: list[str] = []  # operations that make float64 of numbers of another type, which some devices lack
COPIES = {"aten::copy_", "aten::_copy_from", "aten::_to_copy"}


@torch.inference_mode(False)  # a tensor is made for each view, and then neither is of inference
def run(operation, *args, **kwargs):
    """`operation` on the tensors inside."""
    name, tensors = operation._schema.name, [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    residents = [x for x in tensors if isinstance(x, Resident)]
    elsewhere = [x for x in tensors if not isinstance(x, Resident) and x.dim()]
    if residents and elsewhere and name not in COPIES:
        raise RuntimeError(f"{name}: tensors on two devices, {[(x.device.type, tuple(x.shape)) for x in tensors]}")
    if name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"):
        READ.append(name)
    if name == "aten::_copy_from":
        inside(args[1]).copy_(inside(args[0]))
        return args[1]

    device = kwargs.get("device")
    out = operation(*tree_map(inside, args), **tree_map(inside, kwargs))
    if device is not None and not is_gpu(torch.device(device)):
        return out
    if any(x.dtype == torch.float64 for x in tree_leaves(out) if isinstance(x, torch.Tensor)):
        if not any(x.dtype == torch.float64 for x in tensors):
            WIDENED.append(name)
    given = {id(x.inner): x for x in residents}  # in place, or `out=`

    def outside(x):
        return x if not isinstance(x, torch.Tensor) else given[id(x)] if id(x) in given else Resident(x)

    return tree_map(outside, out)


def inside(x):
    """What the CPU has in place of a tensor or device."""
    return x.inner if isinstance(x, Resident) else torch.device("cpu") if is_gpu(x) else x


def is_gpu(x) -> bool:
    return isinstance(x, torch.device) and x.type == "gpu"


def moved(make):
    """A function that makes tensors, some of which PyTorch cannot make where there is only Python."""

    def made(*args, device=None, **kwargs):
        x = make(*args, **kwargs)
        return x if device is None else x.to(device)

    return made


def by_broadcasting(mask_function):
    """In place of `vmap`, which does not know such tensors."""

    def mask(b, h, q, k):
        return mask_function(b[:, None, None, None], h[:, None, None], q[:, None], k)

    return mask


_setup_privateuseone_for_python_backend("gpu", Module())
library = torch.library.Library("_", "IMPL")
library.fallback(run, "PrivateUse1")
torch.tensor, torch.arange = moved(torch.tensor), moved(torch.arange)
masking_utils._vmap_expansion_sdpa = by_broadcasting
