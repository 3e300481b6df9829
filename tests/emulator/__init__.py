"""GPU tests without a GPU: set LEONE_EMULATE=1 (and LEONE_EMULATE_ARCH=89 for an older card).

    LEONE_EMULATE=1 python -m pytest -m gpu tests/test_kernels.py -k rmsnorm

install() makes device.py find driver.py of this folder in place of cuda.bindings.driver.
"""
import hashlib
import os
import sys
from types import ModuleType

from . import build, driver


def install():
    """To be called before `device` is imported."""
    package = ModuleType("cuda.bindings")
    package.driver = driver
    sys.modules["cuda.bindings"] = package
    import device
    device.CUBIN = stand_in_for_cubin(device.SOURCE)


def stand_in_for_cubin(source):
    """A file like kernels.cubin: in place of machine code it holds the path of kernels.cu."""
    name = os.fsencode(source)
    path = build.folder() / f"{hashlib.sha256(name).hexdigest()[:20]}.cubin"
    path.write_bytes(name + hashlib.sha256(source.read_bytes()).hexdigest().encode())
    return path
