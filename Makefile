PYTHON ?= python

sim:  # SEEDS=2000 FROM=0 JOBS=2 EVENTS=5000, or SEED=n to replay one seed exactly
	$(PYTHON) -m tests.sim $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),2000) --from $(or $(FROM),0)) \
		--jobs $(or $(JOBS),2) $(if $(EVENTS),--events $(EVENTS)) $(if $(TRACE),--trace)

.PHONY: sim
