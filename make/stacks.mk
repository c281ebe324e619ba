# RL stacks with their real packages, on a CPU, each pinned and in an environment of its own. Not part of `make test`.
# STACKS_PIP_ARGS goes to pip where torch must come from an index of CPU builds (a CUDA torch works too, but is 3 GB more).
VERL_VENV ?= .venv-verl
OPENRLHF_VENV ?= .venv-openrlhf
MEGATRON_VENV ?= .venv-megatron
RAY_VENV ?= .venv-ray
STACKS_PIP_ARGS ?=
.PHONY: stacks stacks-clean

$(VERL_VENV)/.ready: tests/stacks/verl_requirements.txt pyproject.toml
	@echo "setting up $(VERL_VENV) with verl (once; some minutes, 2 GB)"
	@test -x $(VERL_VENV)/bin/python || $(PYTHON) -m venv $(VERL_VENV)
	@$(VERL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(STACKS_PIP_ARGS) \
	  "$$(grep '^torch==' tests/stacks/verl_requirements.txt)" setuptools
	@$(VERL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(STACKS_PIP_ARGS) \
	  -r tests/stacks/verl_requirements.txt
	@$(VERL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(OPENRLHF_VENV)/.ready: tests/stacks/openrlhf_requirements.txt
	@echo "setting up $(OPENRLHF_VENV) with OpenRLHF and DeepSpeed (once; some minutes, 2 GB)"
	@test -x $(OPENRLHF_VENV)/bin/python || $(PYTHON) -m venv $(OPENRLHF_VENV)
	@$(OPENRLHF_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(STACKS_PIP_ARGS) \
	  "$$(grep '^torch==' $<)"
	@$(OPENRLHF_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(STACKS_PIP_ARGS) -r $<
	@DS_BUILD_OPS=0 $(OPENRLHF_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --no-build-isolation deepspeed==0.19.6 openrlhf==0.11.2
	@touch $@

$(MEGATRON_VENV)/.ready: tests/stacks/megatron_requirements.txt
	@echo "setting up $(MEGATRON_VENV) with Megatron-Core (once; a minute or two, 1 GB)"
	@test -x $(MEGATRON_VENV)/bin/python || $(PYTHON) -m venv $(MEGATRON_VENV)
	@$(MEGATRON_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(STACKS_PIP_ARGS) \
	  "$$(grep '^torch==' $<)"
	@$(MEGATRON_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(STACKS_PIP_ARGS) -r $<
	@touch $@

$(RAY_VENV)/.ready: pyproject.toml constraints.txt
	@echo "setting up $(RAY_VENV) with Ray and the service (once; a minute or two, 1 GB)"
	@test -x $(RAY_VENV)/bin/python || $(PYTHON) -m venv $(RAY_VENV)
	@$(RAY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(STACKS_PIP_ARGS) -c constraints.txt torch
	@$(RAY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(STACKS_PIP_ARGS) -c constraints.txt \
	  -e . pytest ray==2.60.0
	@touch $@

stacks: $(VENV)/.ready $(VERL_VENV)/.ready $(OPENRLHF_VENV)/.ready $(MEGATRON_VENV)/.ready $(RAY_VENV)/.ready ## The hook in real RL stacks on a CPU (verl, OpenRLHF, Megatron-Core), the service on Ray
	@timeout 1500 $(BIN)/python -m pytest tests/stacks $(ARGS)

stacks-clean: ## Remove the environments of the RL stacks
	rm -rf $(VERL_VENV) $(OPENRLHF_VENV) $(MEGATRON_VENV) $(RAY_VENV)
