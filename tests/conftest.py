"""What all tests share: the flat modules on the path, and the marker of tests that need a GPU."""
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if os.environ.get("LEONE_EMULATE"):
    import emulator
    emulator.install()


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs an NVIDIA card and a current kernels.cubin")


def no_gpu():
    """Why GPU tests cannot run here, in one line, or None."""
    import device
    card = device.probe()
    if isinstance(card, str):
        return f"no GPU: {card}"
    state = device.cubin_state()
    return None if state == "ok" else state


def pytest_collection_modifyitems(items):
    """Skip GPU tests where there is no GPU; with LEONE_TEST_GPU set (`make test-gpu`) stop."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    reason = no_gpu() if gpu_items else None
    if reason is None:
        return
    if os.environ.get("LEONE_TEST_GPU"):
        pytest.exit(f"LEONE_TEST_GPU is set, but {reason}", returncode=1)
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason=reason))
