# What the project does, in one word each. Rust is all that must be there: the rest is
# installed by apt, and said beforehand.
.PHONY: demo test test-long bench fuzz sanitizers guest-kernel programs

# A real VM on screen, with Ebb and without.
demo: programs
	cargo xtask assets 6.1-cloud
	cargo xtask demo

# Every test there is; the long form also fuzzes, a minute for each target.
test:
	scripts/test

test-long: test fuzz

# Every benchmark: tables on screen, JSON in target/bench.
bench: programs
	cargo xtask assets 6.1-cloud
	cargo xtask bench

# A minute for each fuzz target.
fuzz:
	scripts/fuzz 60

# The guest's C under the address, undefined behaviour and thread sanitizers.
sanitizers:
	$(MAKE) --no-print-directory -C guest/llfree check \
		OUT="$(abspath $(or $(CARGO_TARGET_DIR),target))/guest-llfree"

# Linux with LLFree in the buddy allocator's place, for guests; minutes the first time.
guest-kernel:
	scripts/setup kernel
	cargo xtask guest-kernel

programs:
	scripts/setup
	cargo build --release -p ebb -p ebbd
