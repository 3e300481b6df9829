# Leone. `make` prints the targets. All that is fetched or built lies in this folder and is ignored
# by git: .venv/ (packages), models/ (the default model), kernels.cubin, dist/.
# Python work behind a target is in prepare.py.

# What a user may set: make generate PROMPT="..." N=64 MODEL=other.gguf PYTHON=python3.12
PYTHON ?= python3
PROMPT ?= The capital of France is
N ?= 64
MODEL ?=
ROWS ?= 1,8
DEFAULT_MODEL := models/SmolLM2-135M-Instruct.Q4_1.gguf

# `value` hands the text on as it was typed: make must not expand a $ inside a prompt or a path.
export LEONE_PROMPT := $(value PROMPT)
export LEONE_MODEL := $(or $(value MODEL),$(DEFAULT_MODEL))
unexport PROMPT MODEL
# A model that the user names is the user's own: only the default one is fetched.
FETCHED_MODEL := $(if $(value MODEL),,$(DEFAULT_MODEL))

VENV_PYTHON := .venv/bin/python
PACKAGES := .venv/requirements.txt
TEST_PACKAGES := .venv/tests-requirements.txt
PIP_INSTALL := $(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help generate venv model kernels-for-card test test-venv test-long test-gpu
.PHONY: test-emulated sanitize check bench dist clean

help:           ## print this list
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

# ---- Using it --------------------------------------------------------------------------------

generate: venv $(FETCHED_MODEL) kernels-for-card  ## answer PROMPT in N tokens, on the GPU if any
	@$(VENV_PYTHON) leone.py generate -m "$$LEONE_MODEL" --prompt="$$LEONE_PROMPT" -n "$(N)"

bench: venv $(FETCHED_MODEL) kernels-for-card  ## measure MODEL at ROWS sequences, into bench/
	@$(VENV_PYTHON) leone.py bench -m "$$LEONE_MODEL" --rows "$(ROWS)" --evidence bench

# ---- Setting up ------------------------------------------------------------------------------

venv: $(PACKAGES)  ## make .venv/ and install the packages of requirements.txt

.venv/bin/python:
	@command -v "$(PYTHON)" >/dev/null || { \
	    echo "$(PYTHON) is not there: install Python 3.11 or say make PYTHON=path" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$(PYTHON) is older than Python 3.11: say make PYTHON=path of a newer one" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) has no venv module (Debian: apt install python3-venv)" >&2; exit 1; }
	@"$(PYTHON)" -m venv --clear .venv || { rm -rf .venv; exit 1; }

# The copies inside .venv/ say what is installed: pip runs again only when a list changes.
$(PACKAGES): requirements.txt .venv/bin/python
	@echo "Installing packages into .venv/" >&2
	@$(PIP_INSTALL) -r requirements.txt
	@cp requirements.txt $@

test-venv: $(TEST_PACKAGES)

$(TEST_PACKAGES): tests/requirements.txt $(PACKAGES)
	@$(PIP_INSTALL) -r tests/requirements.txt
	@cp tests/requirements.txt $@

model: $(DEFAULT_MODEL)  ## fetch the default model (94 MB)

$(DEFAULT_MODEL): | $(PACKAGES)
	@$(VENV_PYTHON) prepare.py model $@

kernels.cubin: kernels.cu | $(PACKAGES)  ## build the GPU kernels for every supported card
	@$(VENV_PYTHON) prepare.py kernels

kernels-for-card: | $(PACKAGES)
	@$(VENV_PYTHON) prepare.py kernels --if-card

dist: kernels.cubin  ## pack dist/leone-VERSION.tar.gz, which runs without a compiler
	@$(VENV_PYTHON) prepare.py dist

clean:          ## remove what was built; .venv/ and models/ stay
	rm -rf kernels.cubin dist .pytest_cache __pycache__ tests/__pycache__

# ---- Checking it -----------------------------------------------------------------------------

test: test-venv model kernels-for-card  ## every test that this machine can run
	$(VENV_PYTHON) -m pytest -q -rs tests

test-long: test-venv model kernels-for-card  ## the same with the full counts of random cases
	LEONE_TEST_LONG=1 $(VENV_PYTHON) -m pytest -q -rs tests

test-gpu: test-venv model kernels.cubin  ## the tests that need a GPU; without one this fails
	LEONE_TEST_GPU=1 $(VENV_PYTHON) -m pytest -q -m gpu tests

test-emulated: test-venv  ## the same in an emulator on the CPU (g++, x86-64): half an hour or more
	LEONE_EMULATE=1 LEONE_TEST_GPU=1 $(VENV_PYTHON) -m pytest -q -m gpu tests

# One case of each kind: the tools slow a kernel down a hundredfold.
SANITIZED := small or linear_blocks and Q4_K or test_sample and 509 or rmsnorm and 100 or \
    linear_silu and (96 or 160) or copy_page or \
    test_attention and 96-1-3 or sigmoid_gate and 64-3-2 or rmsnorm_f32 and 64-64 or \
    scale_rows and 240 or (rope_latent or test_latent_attention) and 256-4 and not bits or \
    test_route and (deepseek3 or broken) or test_linear_experts and (96 or 160) or \
    test_linear_heads and 256 or test_combine and True-True or \
    (delta_conv or delta_rule or delta_norm or dropped_tokens and 2) and cuda

sanitize: test-venv kernels.cubin  ## kernel tests under compute-sanitizer: memory errors, races
	@for tool in memcheck racecheck; do \
	    PATH="$$PATH:$${CUDA_HOME:-/usr/local/cuda}/bin" LEONE_TEST_GPU=1 \
	    compute-sanitizer --tool $$tool --error-exitcode 1 \
	    $(VENV_PYTHON) -m pytest -q -m gpu tests/test_kernels*.py -k "$(SANITIZED)" || exit 1; \
	done

check: venv     ## lines of code against the budget, style, the README's file map
	@$(VENV_PYTHON) tests/check.py
