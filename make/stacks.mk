# RL stacks with their real packages, on a CPU, each pinned and in an environment of its own. Not part of `make test`.
# STACKS_PIP_ARGS goes to pip where torch must come from an index of CPU builds (a CUDA torch works too, but is 3 GB more).
STACKS := verl openrlhf areal skyrl megatron ray
# prime-rl is in no package index: name a checkout of it, PRIME_RL_SOURCE=/src/prime-rl (v0.8.1.dev67), to have it checked.
STACKS += $(if $(PRIME_RL_SOURCE),prime_rl)
STACKS_PIP_ARGS ?=
.PHONY: stacks stacks-clean

# What is installed without its own requirements, after what the stack's file pins: their metadata asks for CUDA.
EXTRA_verl := --no-build-isolation -e .
EXTRA_openrlhf := --no-build-isolation deepspeed==0.19.6 openrlhf==0.11.2
EXTRA_areal := areal==1.0.4
EXTRA_skyrl := skyrl==0.3.0 skyrl-gym==0.4.0

# torch goes first, so that a build of DeepSpeed finds it.
.venv-%/.ready: tests/stacks/%_requirements.txt pyproject.toml
	@echo "setting up .venv-$* (once; some minutes, 1 to 2 GB)"
	@test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check $(STACKS_PIP_ARGS) \
	  "$$(grep '^torch==' $<)" setuptools
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check $(STACKS_PIP_ARGS) -r $<
	@test -z "$(EXTRA_$*)" || DS_BUILD_OPS=0 .venv-$*/bin/python -m pip install --quiet --disable-pip-version-check \
	  --no-deps $(EXTRA_$*)
	@touch $@

.venv-ray/.ready: pyproject.toml constraints.txt
	@echo "setting up .venv-ray with Ray and the service (once; a minute or two, 1 GB)"
	@test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	@.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check $(STACKS_PIP_ARGS) -c constraints.txt torch
	@.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check $(STACKS_PIP_ARGS) -c constraints.txt \
	  -e . pytest ray==2.60.0
	@touch $@

stacks: $(VENV)/.ready $(STACKS:%=.venv-%/.ready) ## The hook in real RL stacks on a CPU (verl, OpenRLHF, AReaL, SkyRL, Megatron-Core, prime-rl), the service on Ray
	@timeout 1500 $(BIN)/python -m pytest tests/stacks $(ARGS)

stacks-clean: ## Remove the environments of the RL stacks
	rm -rf $(STACKS:%=.venv-%) .venv-prime_rl
