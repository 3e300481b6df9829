"""GPU tests without a GPU: set LEONE_EMULATE=1 (and LEONE_EMULATE_ARCH=89 for an older card).

    LEONE_EMULATE=1 python -m pytest -m gpu tests/test_kernels.py -k rmsnorm

install() makes device.py find driver.py of this folder in place of cuda.bindings.driver.
"""
import hashlib
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType


def install():
    """To be called before `device` is imported."""
    sys.path.append(str(Path(__file__).resolve().parent))
    import driver
    package = ModuleType("cuda.bindings")
    package.driver = driver
    sys.modules["cuda.bindings"] = package
    import device
    device.CUBIN = stand_in_for_cubin(device.SOURCE)


def stand_in_for_cubin(source):
    """A file like kernels.cubin: in place of machine code it holds the path of kernels.cu."""
    content = os.fsencode(source)
    content += hashlib.sha256(Path(source).read_bytes()).hexdigest().encode()
    handle, name = tempfile.mkstemp(suffix=".cubin")
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    return Path(name)
