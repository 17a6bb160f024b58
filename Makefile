# What the project does, in one word each. Rust is all that must be there: the rest is
# installed by apt, and said beforehand.
.PHONY: demo check test test-long bench fuzz sanitizers guest-kernel programs deb release book

# A real VM on screen, with Ebb and without, and three under the pilot. On a terminal these stay up,
# with a dashboard, until Enter is pressed.
demo: programs
	cargo xtask assets 6.1-cloud
	cargo xtask demo

# Format, lint, the tests inside of src, docs: no root, no VM, two minutes once it is built.
# The tests that have the host swap take minutes: `make test` runs them.
check:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo test --workspace --exclude vmtest --exclude kvmtest --lib --bins -- \
		--skip each_way_can_be_set_up_and_leaves_nothing \
		--skip memory_and_pool_share_one_limit \
		--skip what_a_killed_benchmark_left_is_swept
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

# All tests; it names those that it skips, as those that only `cargo xtask soak` has the time for.
# The long form also fuzzes, a minute for each target.
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

# Debian's package of Ebb, with systemd's unit (docs/install.md).
deb: programs
	scripts/deb

# A release in dist, from what is committed, signed with the key in EBB_RELEASE_KEY (docs/release.md).
release:
	scripts/release $(VERSION)

# The pages in docs as a book for browsers, in target/book; it fails if a link leads nowhere.
book:
	scripts/book

programs:
	scripts/setup
	cargo build --release -p ebb -p ebbd -p xtask
