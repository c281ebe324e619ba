# A real SGLang on a CPU, in an environment of its own. Its CPU kernels have no wheel: the tests bring what EAGLE-3 calls
# of them in plain PyTorch (tests/sglang_server/plugin). SGLANG_PIP_ARGS goes to pip where torch must come from an index
# of CPU builds (a CUDA torch works too, but is 3 GB more). Only tests use it, and they import a part of what lies there:
# Python compiles that when it is imported.
SGLANG_VERSION ?= 0.5.23
SGLANG_PIP_ARGS ?=
SGLANG_BIN := .venv-sglang/bin
.PHONY: sglang sglang-test sglang-clean

.venv-sglang/.ready: tests/sglang_requirements.txt
	@echo "setting up .venv-sglang with SGLang $(SGLANG_VERSION) for CPUs (once; some minutes, 3 GB)"
	@test -x $(SGLANG_BIN)/python || $(PYTHON) -m venv .venv-sglang
	@$(SGLANG_BIN)/python $(NEW_PIP)
	@$(SGLANG_BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(SGLANG_PIP_ARGS) "$$(grep '^torch==' $<)"
	@$(SGLANG_BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(SGLANG_PIP_ARGS) -r $<
	@$(SGLANG_BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps sglang==$(SGLANG_VERSION)
	@touch $@

sglang: .venv-sglang/.ready ## Make the environment of the real SGLang (CPU)

sglang-test: $(VENV)/.ready .venv-sglang/.ready ## Swap drafters on a real SGLang under load (ARGS="-k refused")
	@$(BIN)/python -m pytest tests/sglang_server $(ARGS)

sglang-clean: ## Remove the environment of the real SGLang
	rm -rf .venv-sglang
